"""The user's own code, named in a recipe as `module:name`."""

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from zephon.errors import RecipeError


class Named(NamedTuple):
    """What a recipe names.

    Attributes:
        value: the function or class.
        sha256: of the file that holds it, None for what no file holds; part of every checkpoint.
    """

    value: Any
    sha256: str | None


def find_named(key: str, name: str, folder: Path, wanted: str) -> Named:
    """Import what `key = "module:name"` names; the module lies beside the recipe, or is looked for on the path.

    Args:
        key: the recipe's key, for messages.
        name: `module:name`.
        folder: the recipe's folder.
        wanted: what is to be there, for messages.

    Raises:
        RecipeError: there is no such thing.
    """
    module_name, _, attribute = name.partition(":")
    if not all(one.isidentifier() for one in (*module_name.split("."), attribute)):
        raise RecipeError(f"{key} must be 'module:name', it is {name!r}.")
    own = beside(module_name, folder)
    try:
        module = _load(own) if own.is_file() else importlib.import_module(module_name)
        value = getattr(module, attribute)
    except (Exception, SystemExit) as error:  # the module may raise anything
        raise RecipeError(
            f"{key} = {name!r} cannot be used: {error!r}. The module must lie beside the recipe as "
            f"{own.name}, or be importable, and hold {wanted.format(attribute)}."
        ) from error
    file = getattr(module, "__file__", None)
    return Named(value, hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None)


def beside(module_name: str, folder: Path) -> Path:
    """Where a module would lie that is the recipe's own."""
    return folder.resolve() / f"{module_name}.py"


def _load(file: Path) -> ModuleType:
    """Load a module that lies beside the recipe, under a name that no module of another recipe, or of an older version
    of this file, can have."""
    folder = str(file.parent)
    if folder not in sys.path:  # for what it imports itself
        sys.path.append(folder)
    unique = f"{file.stem}_{hashlib.sha256(folder.encode() + file.read_bytes()).hexdigest()[:16]}"
    if unique not in sys.modules:
        spec = importlib.util.spec_from_file_location(unique, file)
        assert spec
        assert spec.loader
        sys.modules[unique] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[unique])
        except BaseException:
            del sys.modules[unique]
            raise
    return sys.modules[unique]
