"""The user's own code, named in a recipe as `module:name`."""

import hashlib
import importlib
import sys
from pathlib import Path
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
    """Import what `key = "module:name"` names; the module is looked for on the path, then beside the recipe.

    Args:
        key: the recipe's key, for messages.
        name: `module:name`.
        folder: the recipe's folder.
        wanted: what is to be there, for messages.

    Raises:
        RecipeError: there is no such thing.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise RecipeError(f"{key} must be 'module:name', it is {name!r}.")
    beside = str(folder.resolve())
    if beside not in sys.path:
        sys.path.append(beside)
    try:
        module = importlib.import_module(module_name)
        value = getattr(module, attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise RecipeError(
            f"{key} = {name!r} cannot be used: {error}. The module must be importable, or lie beside the recipe as "
            f"{module_name}.py, and hold {wanted.format(attribute)}."
        ) from error
    file = getattr(module, "__file__", None)
    return Named(value, hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None)
