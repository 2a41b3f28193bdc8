"""Which code a recipe runs. All of it is named: modalities of installed packages, functions, and a packer."""

from importlib.metadata import entry_points

from zephon.modality import GROUP
from zephon.pack import ALGORITHMS
from zephon.plugin import locate
from zephon.recipe import Recipe


def named_code(recipe: Recipe) -> list[dict[str, str]]:
    """What for, `module:name`, and from which file, of all code that a recipe names; imports none of it."""
    folder = recipe.path.parent
    installed = {point.name: point.value for point in entry_points(group=GROUP)}
    found: list[dict[str, str]] = []

    def add(what: str, code: str) -> None:
        found.append({"for": what, "code": code, "from": locate(code, folder)})

    for source in recipe.sources:
        add(f"modality {source.modality!r} of {source.name!r}", installed.get(source.modality, "not installed"))
        for kind, name in (("filter", source.filter), ("map", source.map)):
            if name:
                add(f"{kind} of {source.name!r}", name)
    if recipe.packing.algorithm not in ALGORITHMS:
        add("packing", recipe.packing.algorithm)
    return found
