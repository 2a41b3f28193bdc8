"""Where rows start in text: lines that are not blank. A line ends at LF; a byte-order mark counts at byte 0 only."""

import hashlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.uint64]

BLANK = b" \t\r\n\x0b\x0c"
"""ASCII white space: a line of nothing else is no row."""

ROW_BYTES = 64 * 1024 * 1024
"""A longer row, or text of a sample, is a bad one and is not read: parsed, JSON takes up to 25 times its size."""

_BOM = b"\xef\xbb\xbf"


class Rows:
    """Finds rows in text that comes block after block, each of which but the last is of the full size."""

    def __init__(self) -> None:
        self._at, self._fresh = 0, True
        self._open: Offsets | None = None  # start of a line that is blank so far and goes on

    def of(self, block: bytes) -> tuple[Offsets, bytes, int]:
        """What `scan_block` finds in a block; a line that is blank up to the end of its block comes with the next."""
        starts, is_open = _row_starts(block, self._at, self._fresh)
        if self._open is not None:
            stop = block.find(b"\n")
            if block[: stop if stop >= 0 else None].strip(BLANK):
                starts, self._open = np.concatenate([self._open, starts]), None
            elif stop >= 0:
                self._open = None
        if is_open:
            starts, self._open = starts[:-1], starts[-1:]
        self._at, self._fresh = self._at + len(block), block.endswith(b"\n")
        return starts, hashlib.sha256(block).digest(), len(block)


def scan_block(path: Path, start: int, size: int) -> tuple[Offsets, bytes, int]:
    """Offsets of the non-blank lines that start in one block of a plain file, the block's hash and its size."""
    with path.open("rb") as file:
        file.seek(max(0, start - 1))
        fresh = start == 0 or file.read(1) == b"\n"
        block = file.read(size)
        starts, is_open = _row_starts(block, start, fresh)
        if is_open and _is_blank_from_here(file):
            starts = starts[:-1]
    return starts, hashlib.sha256(block).digest(), len(block)


def _row_starts(block: bytes, start: int, fresh: bool) -> tuple[Offsets, bool]:
    """Where non-blank lines start in a block, and whether the last is blank up to the block's end.

    Args:
        block: text from byte `start` on.
        start: its place in the whole text.
        fresh: whether a line begins with it.
    """
    letters, mark = np.frombuffer(block, np.uint8), len(_BOM) if start == 0 and block.startswith(_BOM) else 0
    ends = letters == ord("\n")
    starts = np.flatnonzero(ends[:-1] & ~ends[1:]) + 1  # not those of empty lines, of which there may be millions
    if fresh and not ends[mark : mark + 1].all():
        starts = np.concatenate([np.array([mark]), starts])
    first = letters[starts]
    blank, is_open = list[int](), False
    for i in np.flatnonzero(np.isin(first, np.frombuffer(BLANK, np.uint8))).tolist():
        line = int(starts[i])
        stop = block.find(b"\n", line)
        if stop < 0:
            is_open = not block[line:].strip(BLANK)
        elif not block[line:stop].strip(BLANK):
            blank.append(i)
    return np.delete(starts, blank).astype(np.uint64) + np.uint64(start), is_open


def _is_blank_from_here(file: BinaryIO) -> bool:
    """Whether the rest of a line holds ASCII white space only."""
    while more := file.readline(1 << 16):
        if more.strip(BLANK):
            return False
        if more.endswith(b"\n"):
            break
    return True
