"""Rows of a source by the part that holds them, a shard or a row group; bytes that lie near each other in one read."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NEAR_BYTES = 16 * 1024
"""What lies closer than this is read in one go: a second call costs what reading 16 KiB from the page cache costs."""


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


def read_near(start: Ints, end: Ints, read: Callable[[int, int], bytes]) -> list[bytes]:
    """Bytes `[start, end)` of a file for each pair, in the order asked for, in few calls of `read(at, size)`."""
    order = np.argsort(start, kind="stable")
    lo, hi = start[order], end[order]
    breaks = np.flatnonzero(lo[1:] - hi[:-1] > NEAR_BYTES) + 1
    out, places, starts, ends = [b""] * len(order), order.tolist(), lo.tolist(), hi.tolist()
    for a, b in pairwise([0, *breaks.tolist(), len(order)]) if places else ():
        base = starts[a]
        data = read(base, ends[b - 1] - base)
        for i in range(a, b):
            out[places[i]] = data[starts[i] - base : ends[i] - base]
    return out
