"""Filters and maps: the user's own stateless functions on rows, named in a recipe as `module:function`.

`filter` says whether a row stays; `map` gives a row in its place, None to drop it, or a list of rows. Both run in
workers. A function may take a second argument, a `Draw`: randomness keyed by the row, the same in every run.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from zephon.errors import RecipeError
from zephon.keyed import Draw
from zephon.plugin import find_named
from zephon.types import Atom, Bad, Measured, Row

FILTERED = "filtered"
"""Counter of the rows that a filter or a map dropped."""

_LATER = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction

BAD_ROW = "bad row"
"""Counter of the rows that could not be used."""


class Transform:
    """One user function.

    Args:
        kind: `filter` or `map`.
        name: `module:function`; the module lies beside the recipe, or is looked for on the path.
        folder: the recipe's folder.

    Raises:
        RecipeError: there is no such function.
    """

    def __init__(self, kind: str, name: str, folder: Path) -> None:
        self.kind, self.name = kind, name
        wanted = "a function {0}(row) or {0}(row, draw)"
        found = find_named(kind, name, folder, wanted)
        self._function: Callable[..., Any] = found.value
        self._sha256 = found.sha256
        try:
            self._draws = len(inspect.signature(self._function).parameters) > 1
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{kind} = {name!r} is no function that can be called: {error}.") from error
        if any(one(self._function) for one in _LATER):  # what it answers is true, and no row
            raise RecipeError(
                f"{kind} = {name!r} is a generator or a coroutine: calling it runs nothing. Let it be a plain function "
                "that returns its answer; a map may return a list of rows."
            )

    def fingerprint(self) -> dict[str, Any]:
        """The name, and a hash of the file that holds the function."""
        return {"name": self.name, "sha256": self._sha256}

    def __call__(self, row: Row, draw: Draw) -> list[Row]:
        """The rows that take the place of `row`.

        Raises:
            TypeError: a map gave something else.
        """
        answer = self._function(row, draw) if self._draws else self._function(row)
        if self.kind == "filter":
            return [row] if answer else []
        if answer is None:
            return []
        rows = cast(list[Any], answer if isinstance(answer, list) else [answer])
        for row in rows:
            if not isinstance(row, dict) or not all(isinstance(key, str) for key in cast(dict[Any, Any], row)):
                raise TypeError(f"a map gives a dict with names as keys, a list of such, or None; not {row!r:.200}")
        return rows


def transform(
    transforms: Sequence[Transform], rows: Mapping[int, Row], draws: Callable[[int, str], Draw], bad: dict[int, Bad]
) -> tuple[list[Row], list[int]]:
    """Apply functions to rows, by their numbers, one after the other.

    A row for which a function raises goes to `bad`.

    Returns:
        The rows that are left, and for each the number of the row that it came from.
    """
    out: list[Row] = []
    origin: list[int] = []
    for i, row in rows.items():
        current = [row]
        for one in transforms:
            try:
                current = [new for old in current for new in one(old, draws(i, one.name))]
            except MemoryError:  # the machine's, not the row's
                raise
            except (Exception, SystemExit) as error:  # sys.exit() in a worker would end a run as if it were done
                told = "".join(traceback.format_exception(error))
                bad[i] = Bad(f"{one.kind} {one.name!r} raised an error. Mend it, or have it drop such rows.\n{told}")
                current = []
                break
        out += current
        origin += [i] * len(current)
    return out, origin


def spread(measured: Measured, origin: Sequence[int], rows: int, bad: Mapping[int, Bad]) -> Measured:
    """What was measured on rows that are left, in terms of all; a bad or a dropped row gives one empty sample."""
    of_row, positions, payloads = list[int](), list[int](), list[Any]()
    counts, atoms = dict[int, tuple[str, ...]](), dict[int, tuple[Atom, ...]]()
    sample = 0
    for row in range(rows):
        before = sample
        while sample < len(measured.rows) and origin[measured.rows[sample]] == row:
            fault = sample in measured.faults
            if noted := measured.counts.get(sample, ()) + ((BAD_ROW,) if fault else ()):
                counts[len(of_row)] = noted
            if sample in measured.atoms:
                atoms[len(of_row)] = measured.atoms[sample]
            of_row.append(row)
            positions.append(0 if fault else measured.positions[sample])
            payloads.append(bad[row]._replace(reason=measured.faults[sample]) if fault else measured.payloads[sample])
            sample += 1
        if sample == before:
            counts[len(of_row)] = (BAD_ROW,) if row in bad else (FILTERED,)
            of_row.append(row)
            positions.append(0)
            payloads.append(bad.get(row))
    return Measured(of_row, positions, payloads, counts, atoms)
