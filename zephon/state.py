"""The state of a stream: a header that all ranks share, and a few bytes a lane.

A lane's bytes are the first 16 bytes of the header's SHA-256, then integers as LEB128 varints (signed ones zigzag) in a
fixed order that `LaneState.encode` shows, then 4 bytes of a SHA-256 over the lane's key and all before. No pickle, no
text, nothing that depends on time or machine: ranks that hold the same lane write the same bytes.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from zephon.errors import RestoreError
from zephon.types import Ref, Sample, Segment, maker

FORMAT_VERSION = 3
"""Raised whenever the bytes below change their meaning."""

HEADER = "header"
_TAG, _SUM = 16, 4
_NUMBER_BITS = 126  # most of a varint; deficits, the largest numbers, stay near 50


class Position(NamedTuple):
    """How far a lane has come in one source: the next sample to be mixed.

    Attributes:
        group: number of the group.
        place: place of the row in its group.
        sample: number of the sample in the row.
    """

    group: int = 0
    place: int = 0
    sample: int = 0


class Range(NamedTuple):
    """Positions `[start, end)` of a sample, without its payload."""

    ref: Ref
    start: int
    end: int


Open = Range | Segment
"""What waits in a lane: the segments of a running lane as they are, ranges where a state was read."""


class SourceState(NamedTuple):
    """What a lane remembers of one source.

    Attributes:
        position: the next sample.
        offset: positions of it that have been taken.
        deficit: from the mixer.
        mixed: positions that were handed to the packer so far.
        counters: what the modality counts, in its order.
    """

    position: Position
    offset: int
    deficit: int
    mixed: int
    counters: tuple[int, ...]


class LaneState(NamedTuple):
    """All that a lane must remember after a record.

    Attributes:
        sources: one entry a source, in recipe order.
        rest: what the packer has not taken yet of the current piece.
        open: bins of segments that wait in the packer.
    """

    sources: tuple[SourceState, ...]
    rest: Open | None = None
    open: tuple[tuple[Open, ...], ...] = ()

    @property
    def waiting(self) -> list[Open]:
        """Everything that has been mixed and not delivered."""
        return [*([self.rest] if self.rest else []), *itertools.chain.from_iterable(self.open)]

    def with_late(self, late: Mapping[tuple[int, int], int]) -> "LaneState":
        """This state with what was counted when its records were built, after the lane had decided them."""
        if not late:
            return self
        sources = [
            one._replace(counters=tuple(number + late.get((i, k), 0) for k, number in enumerate(one.counters)))
            for i, one in enumerate(self.sources)
        ]
        return self._replace(sources=tuple(sources))

    def without_deficits(self) -> "LaneState":
        """This state as if all sources had had their share so far."""
        return self._replace(sources=tuple(one._replace(deficit=0) for one in self.sources))

    def encode(self, key: str, tag: bytes) -> bytes:
        """Bytes of this state for the lane `key`, under the header that `tag` names."""
        sources, numbers = len(self.sources), [len(self.sources)]
        for position, offset, deficit, mixed, counters in self.sources:
            zigzag = deficit * 2 if deficit >= 0 else -deficit * 2 - 1
            numbers += (*position, offset, zigzag, mixed, len(counters), *counters)
        numbers += (bool(self.rest), len(self.open), *map(len, self.open))
        for what, start, end in self.waiting:  # up to 20,000 in 64 lanes
            source, epoch, chunk, row, sample = what.ref if isinstance(what, Sample) else what
            numbers += (sample * sources + source, epoch, chunk, row, start, end - start)
        body = tag + b"".join(map(_WORDS.__getitem__, numbers))
        return body + _checksum(key, body)

    @staticmethod
    def decode(key: str, raw: bytes, header: bytes) -> "LaneState":
        """The inverse of `encode`.

        Raises:
            RestoreError: the bytes are damaged, another lane's, belong to another header, or are none that `encode`
                writes.
        """
        body = raw[:-_SUM]
        if len(raw) <= _TAG + _SUM or raw[-_SUM:] != _checksum(key, body):
            raise RestoreError(f"State {key!r} is cut, damaged, or another lane's. Resume from another checkpoint.")
        if body[:_TAG] != tag_of(header):
            raise RestoreError(
                f"State {key!r} was not written together with the header beside it: the checkpoint mixes two saves. "
                "Resume from a checkpoint that one save wrote."
            )
        try:
            state = LaneState._decode(_take(body[_TAG:]))
            exact = state.encode(key, body[:_TAG]) == raw
        except (StopIteration, RuntimeError, TypeError, ValueError, ZeroDivisionError):  # numbers are missing or absurd
            exact, state = False, None
        if state is None or not exact:
            raise RestoreError(
                f"State {key!r} has a right checksum, but its numbers are not those of a lane: another program wrote "
                "it. Resume from another checkpoint."
            )
        return state

    @staticmethod
    def _decode(numbers: Iterator[int]) -> "LaneState":
        sources: list[SourceState] = []
        for _ in range(next(numbers)):
            group, place, sample, offset, deficit = itertools.islice(numbers, 5)
            deficit = -(deficit + 1) // 2 if deficit % 2 else deficit // 2
            mixed = next(numbers)
            counters = tuple(next(numbers) for _ in range(next(numbers)))
            sources.append(SourceState(Position(group, place, sample), offset, deficit, mixed, counters))
        has_rest = next(numbers)
        sizes = [next(numbers) for _ in range(next(numbers))]
        count = has_rest + sum(sizes)
        ranges = iter([_range(len(sources), *itertools.islice(numbers, 6)) for _ in range(count)])
        rest = next(ranges) if has_rest else None
        return LaneState(tuple(sources), rest, tuple(tuple(itertools.islice(ranges, size)) for size in sizes))


def _range(sources: int, both: int, epoch: int, chunk: int, row: int, start: int, length: int) -> Range:
    sample, source = divmod(both, sources)
    return _RANGE((_REF((source, epoch, chunk, row, sample)), start, start + length))


_REF, _RANGE = maker(Ref), maker(Range)


def _checksum(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + body).digest()[:_SUM]


class _Words(dict[int, bytes]):
    """Numbers as varints; small ones are kept, which makes a state of many open segments twice as fast to write."""

    def __missing__(self, number: int) -> bytes:
        out, rest = bytearray(), number
        while rest > 127:
            out.append(rest & 127 | 128)
            rest >>= 7
        out.append(rest)
        if number < 1 << 12:
            self[number] = bytes(out)
        return bytes(out)


_WORDS = _Words()


def _take(raw: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in raw:
        number |= (byte & 127) << shift
        shift += 7
        if shift > _NUMBER_BITS:  # or a megabyte of 0xff is one number, which takes minutes
            raise ValueError("a number that is too large")
        if byte < 128:
            yield number
            number = shift = 0


def lane_key(lane: int) -> str:
    """The key of a lane in a `state_dict`."""
    return f"lane_{lane:05d}"


def encode_header(values: Mapping[str, Any]) -> bytes:
    """Canonical JSON, the same bytes on every rank."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def tag_of(header: bytes) -> bytes:
    """What ties a lane's bytes to a header."""
    return hashlib.sha256(header).digest()[:_TAG]
