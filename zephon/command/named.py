"""Which code a recipe runs. All of it is named: modalities of installed packages, functions, and a packer."""

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from zephon.modality import GROUP
from zephon.pack import ALGORITHMS
from zephon.plugin import beside
from zephon.recipe import Recipe


def named_code(recipe: Recipe) -> list[dict[str, str]]:
    """What for, `module:name`, and from which file, of all code that a recipe names; imports none of it."""
    folder = recipe.path.parent
    installed = {point.name: point.value for point in entry_points(group=GROUP)}
    found: list[dict[str, str]] = []

    def add(what: str, code: str) -> None:
        found.append({"for": what, "code": code, "from": _locate(code, folder)})

    for source in recipe.sources:
        add(f"modality {source.modality!r} of {source.name!r}", installed.get(source.modality, "not installed"))
        for kind, name in (("filter", source.filter), ("map", source.map)):
            if name:
                add(f"{kind} of {source.name!r}", name)
    if recipe.packing.algorithm not in ALGORITHMS:
        add("packing", recipe.packing.algorithm)
    return found


def _locate(name: str, folder: Path) -> str:
    """The file that `find_named` would take `module:name` from; imports nothing. What it cannot tell, it says."""
    module_name = name.partition(":")[0]
    if not all(one.isidentifier() for one in module_name.split(".")):
        return "no name of a module"
    own = beside(module_name, folder)
    if own.is_file():
        return str(own)
    package, *inner = module_name.split(".")
    spec = find_spec(package)
    if spec is None:
        return f"not found ({package} is neither beside the recipe nor installed)"
    for folder in map(Path, spec.submodule_search_locations or ()):
        if inner and (file := folder.joinpath(*inner).with_suffix(".py")).is_file():
            return str(file)
    return spec.origin or package
