"""xz, block by block: where blocks begin in a stream, and a stream read from one of them on.

A stream is a header, blocks, their index and a footer (xz file format 1.1.0). `xz -T` and `xz --block-size` write many
blocks into one stream, and any of them decompresses alone. liblzma decodes and compares everything; here is only
followed where a block ends, from LZMA2 chunk to chunk, which begin with their sizes. So nothing is decoded for it, and
nothing believed, least of all an index: what is wrong there, liblzma refuses. It takes at most 2% of the first pass, 7%
where blocks are as small as 4 KiB.
"""

import lzma
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass

MAGIC, HEADER_BYTES = b"\xfd7zXZ\0", 12
_SEEN = 4096  # bytes of an index that are stepped over at once: two at once, 100,000 records took 0.18 s
_ON = bytes(range(128, 256))  # bytes of a number, but for its last; each has seven bits, the lowest first
_CHECK_BYTES = (0, 4, 8, 16, 32, 64)  # behind a block, for kind 0, kinds 1 to 3, 4 to 6 and so on

_Steps = Generator[int, bytes, None]
"""Yields how many bytes come next, 0 where a stream ends, and is sent the last of them."""


def padding(read: Callable[[int], bytes | None], view: bytes, whole: bool) -> tuple[int, bytes]:
    """How many zeros come between two streams, and what follows.

    The format allows them in fours, and at the end of a `whole` file. There they count as something else: a crash and
    an unfinished download leave zeros in the place of rows.
    """
    zeros, rest = 0, b""
    while not rest and (view := view or read(1 << 16) or b""):
        rest = view.lstrip(b"\0")
        zeros, view = zeros + len(view) - len(rest), b""
    return (0, bytes(8)) if zeros % 4 or (zeros and whole and not rest) else (zeros, rest)


@dataclass
class Place:
    """How far a stream has been followed, counted from the first byte given."""

    passed: int = 0
    block: int = 0  # where the block that is read begins; 0 for the first of a stream
    between: bool = False  # whole blocks have been given and nothing else: a part of a file may end here
    behind: bool = False  # the index is being stepped over


class XzDecoder:
    """Decompresses one xz stream, or what is left of one from a block on: liblzma is then told `header` first.

    The index of a stream that was entered later cannot be compared with the blocks before, so it is stepped over. The
    first pass over a file compares it.

    Args:
        memory: what liblzma may need.
        header: of the file's first stream. Streams of another kind are not divided into blocks.
    """

    def __init__(self, memory: int, header: bytes = b"") -> None:
        self._lzma, self._header = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=memory), header
        self.place, self._steps = Place(), None  # apart, since a cycle would keep the 65 MiB of xz -9 for a while
        self._left, self._seen, self._held = 1, b"", b""  # of the present step; its last bytes; from the next block on

    @property
    def eof(self) -> bool:
        return not self._left or self._lzma.eof

    @property
    def needs_input(self) -> bool:
        return self._lzma.needs_input and not self._held

    @property
    def unused_data(self) -> bytes:
        return self._lzma.unused_data + self._held

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if not self._steps:
            if entered := not data.startswith(MAGIC):
                self._lzma.decompress(self._header)
            self._steps = _follow(self.place, self._header, entered)
            self._left = next(self._steps)
        self._held += data
        part = self._next(self._steps) if self._lzma.needs_input else b""
        return b"" if self.place.behind else self._lzma.decompress(part, max_length)

    def _next(self, steps: _Steps) -> bytes:
        """What is there of the block that goes on or begins: of one block only, so that output belongs to it."""
        end, place = 0, self.place
        while end < len(self._held) and self._left and not (place.between and end):
            part = self._held[end : end + self._left]
            end, place.passed, self._left = end + len(part), place.passed + len(part), self._left - len(part)
            self._seen = (self._seen + part)[-_SEEN:]
            if not self._left:
                self._left = steps.send(self._seen)
        part, self._held = self._held[:end], self._held[end:]
        return part


def _follow(place: Place, known: bytes, entered: bool) -> _Steps:
    header = known if entered else (yield HEADER_BYTES)[-HEADER_BYTES:]
    check, blocks = _CHECK_BYTES[(header[7] % 16 + 2) // 3] if len(header) == HEADER_BYTES else 0, 0
    while True:
        place.between = True
        words = (yield 1)[-1]
        place.between = False
        if not words:  # a block's head is longer: this is the index
            break
        if blocks and header == known:
            place.block = place.passed - 1
        blocks += 1
        yield 4 * words + 3
        start = place.passed
        while control := (yield 1)[-1]:
            if 3 <= control < 0x80:
                yield sys.maxsize  # there is no such chunk, as liblzma will say
            size = int.from_bytes((yield 2 if control < 3 else 4)[-2:], "big") + 1
            yield size + (control >= 0xC0)  # then a byte of properties comes first
        if tail := (start - place.passed) % 4 + check:
            yield tail
    if not entered:
        yield sys.maxsize  # liblzma compares the index with the blocks, and finds the end
    place.behind, start, count, shift = True, place.passed - 1, 0, 1  # of numbers: two a record
    while (byte := (yield 1)[-1]) in _ON and shift < 63:
        count, shift = count + ((byte - 128) << shift), shift + 7
    count += byte << shift
    while size := min(count, _SEEN):
        count -= len((yield size)[-size:].translate(None, _ON))
    yield (start - place.passed) % 4 + 4 + HEADER_BYTES  # the footer is as long as the header
    yield 0
