"""The keys of a source that belong to its modality, read strictly."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from zephon.errors import RecipeError, nearest
from zephon.recipe import SourceSpec

_EVERY = tuple(one.name for one in fields(SourceSpec) if one.name != "options")
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

    def fields(self, key: str, default: Sequence[str]) -> tuple[str, ...]:
        """The names of fields of which a row has one; a single name may stand for a list of one."""
        value = self._given.get(key, list(default))
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(isinstance(one, str) and one for one in names):
            raise RecipeError(f"{key} must be the name of a field or a list of names, it is {value!r}.")
        return tuple(names)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._given.get(key, default)
        if not isinstance(value, bool):
            raise RecipeError(f"{key} must be true or false, it is {value!r}.")
        return value

    def number(self, key: str) -> int | None:
        """A whole number above 0; None where it is left out."""
        value = self._given.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise RecipeError(f"{key} must be a whole number from 1 to {2**31 - 1}, it is {value!r}.")
        return value

    def colour(self, key: str, default: tuple[int, int, int]) -> tuple[int, int, int]:
        """Red, green and blue, from 0 to 255 each."""
        value = self._given.get(key, list(default))
        right = isinstance(value, list) and len(value) == 3
        if not right or not all(
            isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= 255 for one in value
        ):
            raise RecipeError(
                f"{key} must be red, green and blue from 0 to 255, as in [255, 255, 255]; it is {value!r}."
            )
        return (value[0], value[1], value[2])
