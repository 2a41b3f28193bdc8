"""The keys of a source that belong to its modality, read strictly."""

from collections.abc import Mapping, Sequence
from typing import Any

from zephon.errors import RecipeError, nearest

_EVERY = ("name", "paths", "weight", "modality", "chunk_rows", "filter", "map", "epochs")
"""Keys that every source takes, for messages."""


class Options:
    """The options of a modality; an unknown one is refused at once.

    Args:
        modality: its name.
        given: what the recipe says.
        known: the keys it takes.

    Raises:
        RecipeError: an unknown key.
    """

    def __init__(self, modality: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
        self._given = given
        for key in given:
            if key not in known:
                raise RecipeError(
                    f"{key} is not a known key of a source of modality {modality!r}; it takes {', '.join(known)}, and "
                    f"every source takes {', '.join(_EVERY)}.{nearest(key, (*known, *_EVERY))}"
                )

    def field(self, key: str, default: str) -> str:
        """The name of a field of a row."""
        value = self._given.get(key, default)
        if not isinstance(value, str):
            raise RecipeError(f"{key} must be the name of a field, it is {value!r}.")
        return value

    def choice(self, key: str, allowed: Sequence[str]) -> str:
        """One of a few words; the first is the default."""
        value = self._given.get(key, allowed[0])
        if value not in allowed:
            hint = nearest(value, allowed) if isinstance(value, str) else ""
            known = ", ".join(repr(one) for one in allowed)
            raise RecipeError(f"{key} must be one of {known}; it is {value!r}.{hint}")
        return value
