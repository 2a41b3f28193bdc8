"""One table of a recipe, read strictly: wrong types, impossible values and unknown keys are named."""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, TypeVar, cast

from zephon.errors import RecipeError, nearest

T = TypeVar("T", int, str, bool)


class Section:
    """The keys of one table, taken one by one; `done` refuses what is left."""

    def __init__(self, values: object, name: str) -> None:
        if not isinstance(values, dict):
            raise RecipeError(f"{name} must be a table, it is {show(values)}.")
        self._values: dict[str, Any] = dict(values)  # pyright: ignore[reportUnknownArgumentType]
        self._name = name
        self._known: list[str] = []

    def take(self, key: str, kind: type[T], default: Any = ...) -> T:
        """The value of `key`, which must be of type `kind`; required unless there is a default."""
        value = self.raw(key, default)
        if value is default and default is not ...:
            return value
        if isinstance(value, str) and "\0" in value:
            raise RecipeError(f"{self.label(key)} holds a NUL character, which no name or path can.")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            names = {int: "a whole number", str: "a string", bool: "true or false"}
            raise RecipeError(f"{self.label(key)} must be {names[kind]}, it is {show(value)}.")
        if value == "":
            raise RecipeError(
                f"{self.label(key)} is empty. Give it a value{', or leave it out' * (default is not ...)}."
            )
        return value

    def number(self, key: str, least: int, default: Any = ..., most: int = 2**31 - 1) -> int:
        """A whole number in `[least, most]`."""
        value = self.take(key, int, default)
        if value is not default and not least <= value <= most:
            raise RecipeError(f"{self.label(key)} must be from {least} to {most}, it is {value}.")
        return value

    def size(self, key: str, least: int, default: int) -> int:
        """Bytes, as "512MiB" or "2GiB"."""
        value = self.take(key, str, f"{default >> 20}MiB")
        found = re.fullmatch(r"(\d{1,6}) ?(MiB|GiB)", value)
        number = int(found[1]) * 1024 ** (2 if found[2] == "MiB" else 3) if found else 0
        if number < least:
            raise RecipeError(
                f"{self.label(key)} must be a size from {least >> 20}MiB on, as '512MiB' or '2GiB'; it is {value!r}."
            )
        return number

    def words(self, key: str, what: str, default: Any = ...) -> tuple[str, ...]:
        """A list of words, `what` says of what; a single one may stand for a list of one."""
        value = self.raw(key, default)
        words = cast(list[Any], [value] if isinstance(value, str) else value if isinstance(value, list) else [])
        if not words or not all(isinstance(one, str) and one.strip("\0") for one in words):
            raise RecipeError(f"{self.label(key)} must be {what}, it is {show(value)}.")
        return tuple(words)

    @property
    def names(self) -> list[str]:
        """The keys that nobody has taken yet."""
        return list(self._values)

    def choice(self, key: str, allowed: Sequence[str], default: Any, or_named: bool = False) -> Any:
        """One of a few words, or `module:Class` where the user may bring a class."""
        value = self.take(key, str, default)
        if value is not default and value not in allowed and not (or_named and ":" in value):
            known = ", ".join([*map(repr, allowed), *(["'module:Class'"] if or_named else [])])
            raise RecipeError(f"{self.label(key)} must be one of {known}; it is {value!r}.{nearest(value, allowed)}")
        return value

    def raw(self, key: str, default: Any = ...) -> Any:
        """The value of `key` as TOML gave it."""
        self._known.append(key)
        if key not in self._values and default is ...:
            meant = [other for other in self._values if nearest(other, [key])]
            raise RecipeError(f"{self.label(key)} is missing.{f' Is {meant[0]!r} meant?' if meant else ''}")
        return self._values.pop(key, default)

    def rest(self) -> dict[str, Any]:
        """All keys that nobody took."""
        rest, self._values = self._values, {}
        return rest

    def done(self, elsewhere: Sequence[str] = ()) -> None:
        """Refuse unknown keys; `elsewhere` are those of every source, which somebody else took."""
        every = f", and every source takes {', '.join(elsewhere)}" if elsewhere else ""
        for key in self._values:
            raise RecipeError(
                f"{self.label(key)} is not a known key; {self._name.rstrip(':')} takes {', '.join(self._known)}{every}."
                f"{nearest(key, [*self._known, *elsewhere])}"
            )

    def label(self, key: str) -> str:
        return key if self._name == "the recipe" else f"{self._name} {key}"


def show(value: Any) -> str:
    """A value as a message has it."""
    if isinstance(value, dict):
        return "a table"
    return str(value) if isinstance(value, Decimal) else repr(value)
