"""Rows of a source by the part that holds them: a shard, or a row group."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def by_part(first: Ints, rows: Ints) -> Iterator[tuple[int, Ints, Ints]]:
    """For each part that holds some of `rows`: its number, which of them it holds, and their numbers in it.

    Args:
        first: number in the source of the first row of each part, ascending.
        rows: numbers of rows in the source, in any order.
    """
    parts = np.searchsorted(first, rows, side="right") - 1
    for part in np.unique(parts).tolist():
        where = np.flatnonzero(parts == part)
        yield part, where, rows[where] - first[part]


def part_of(first: Ints, row: int) -> tuple[int, int]:
    """The part that holds a row, and the number of the row in it."""
    part = int(np.searchsorted(first, row, side="right")) - 1
    return part, row - int(first[part])
