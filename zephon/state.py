"""The state of a stream: a header that all ranks share, and a few bytes a lane.

A lane's bytes are the first 16 bytes of the header's SHA-256, then integers as LEB128 varints (signed ones zigzag) in a
fixed order that `LaneState.encode` shows. No pickle, no text, nothing that depends on time or machine: ranks that hold
the same lane write the same bytes.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from zephon.errors import RestoreError
from zephon.types import Ref

FORMAT_VERSION = 1
"""Raised whenever the bytes below change their meaning."""

HEADER = "header"
_TAG = 16


class Position(NamedTuple):
    """How far a lane has come in one source: the next sample to be mixed, and how much of it has been taken.

    Attributes:
        group: number of the group.
        place: place of the row in its group.
        sample: number of the sample in the row.
        offset: positions of it that have been taken.
    """

    group: int = 0
    place: int = 0
    sample: int = 0
    offset: int = 0


class Range(NamedTuple):
    """Positions `[start, end)` of a sample, without its payload."""

    ref: Ref
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SourceState:
    """What a lane remembers of one source.

    Attributes:
        position: the next sample.
        deficit: from the mixer.
        mixed: positions that were handed to the packer so far.
        counters: what the modality counts, in its order.
    """

    position: Position
    deficit: int
    mixed: int
    counters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LaneState:
    """All that a lane must remember after a record.

    Attributes:
        sources: one entry a source, in recipe order.
        rest: what the packer has not taken yet of the current piece.
        open: segments that wait in the packer.
    """

    sources: tuple[SourceState, ...]
    rest: Range | None = None
    open: tuple[Range, ...] = field(default=())

    def encode(self, tag: bytes) -> bytes:
        """Bytes of this state under the header that `tag` names."""
        out = bytearray(tag)
        _put(out, len(self.sources))
        for source in self.sources:
            for number in source.position:
                _put(out, number)
            _put(out, source.deficit * 2 if source.deficit >= 0 else -source.deficit * 2 - 1)
            _put(out, source.mixed)
            _put(out, len(source.counters))
            for number in source.counters:
                _put(out, number)
        ranges = (self.rest, *self.open) if self.rest else self.open
        _put(out, bool(self.rest))
        _put(out, len(self.open))
        for one in ranges:
            for number in (*one.ref, one.start, one.end):
                _put(out, number)
        return bytes(out)

    @staticmethod
    def decode(raw: bytes) -> "LaneState":
        """The inverse of `encode`.

        Raises:
            RestoreError: the bytes are cut or damaged.
        """
        numbers = _take(raw[_TAG:])
        try:
            sources: list[SourceState] = []
            for _ in range(next(numbers)):
                position = Position(*(next(numbers) for _ in range(4)))
                deficit = next(numbers)
                deficit = -(deficit + 1) // 2 if deficit % 2 else deficit // 2
                mixed = next(numbers)
                sources.append(
                    SourceState(position, deficit, mixed, tuple(next(numbers) for _ in range(next(numbers))))
                )
            has_rest, waiting = next(numbers), next(numbers)
            ranges = [
                Range(Ref(*(next(numbers) for _ in range(5))), next(numbers), next(numbers))
                for _ in range(has_rest + waiting)
            ]
        except (StopIteration, RuntimeError) as error:
            raise RestoreError("The state of a lane is cut or damaged. Resume from another checkpoint.") from error
        if next(numbers, None) is not None:
            raise RestoreError(
                "The state of a lane has bytes left over: it is damaged. Resume from another checkpoint."
            )
        return LaneState(tuple(sources), ranges[0] if has_rest else None, tuple(ranges[has_rest:]))


def _put(out: bytearray, number: int) -> None:
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)


def _take(raw: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in raw:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield number
            number = shift = 0
    if shift:
        raise RuntimeError("cut inside a number")


def lane_key(lane: int) -> str:
    """The key of a lane in a `state_dict`, a ledger or an export."""
    return f"lane_{lane:05d}"


def encode_header(values: Mapping[str, Any]) -> bytes:
    """Canonical JSON, the same bytes on every rank."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def tag_of(header: bytes) -> bytes:
    """What ties a lane's bytes to a header."""
    return hashlib.sha256(header).digest()[:_TAG]


def check_tag(key: str, raw: bytes, header: bytes) -> None:
    """Refuse a lane whose bytes were not written with `header`.

    Raises:
        RestoreError: they belong to another save.
    """
    if raw[:_TAG] != tag_of(header):
        raise RestoreError(
            f"State {key!r} was not written together with the header beside it: the checkpoint mixes two saves. "
            "Resume from a checkpoint that one save wrote."
        )


def compare_headers(saved: bytes, running: Mapping[str, Any]) -> int:
    """Check that a checkpoint belongs to this stream, and read its step.

    Args:
        saved: the header of the checkpoint.
        running: the header of the stream that wants to go on; its step does not matter.

    Returns:
        The step after which the checkpoint was taken.

    Raises:
        RestoreError: lists every field that differs, both values side by side.
    """
    try:
        old = json.loads(saved)
        step = int(old["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise RestoreError(
            "The loader's header in this checkpoint cannot be read; it is damaged or foreign."
        ) from error
    before, now = _flatten({**old, "step": 0}), _flatten({**running, "step": 0})
    differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if differing:
        absent = "(absent)"
        table = "\n".join(f"  {key}: {before.get(key, absent)} -> {now.get(key, absent)}" for key in differing)
        raise RestoreError(
            f"The checkpoint at step {step} was written by another stream (checkpoint -> this run):\n{table}\n"
            "Going on would silently change the data. Put the old values back, or start a new run."
        )
    return step


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Dotted names of all leaves; list entries are numbered, or named where they have a name."""
    if isinstance(value, Mapping):
        mapping = cast(Mapping[str, Any], value)
        items = [(f"{prefix}.{key}" if prefix else key, item) for key, item in mapping.items()]
    elif isinstance(value, list):
        entries = cast(list[Any], value)
        names = [
            cast(Any, one["name"] if isinstance(one, dict) and "name" in one else i) for i, one in enumerate(entries)
        ]
        items = [(f"{prefix}[{name}]", one) for name, one in zip(names, entries, strict=True)]
    else:
        return {prefix: json.dumps(value)}
    return {name: leaf for key, item in items for name, leaf in _flatten(item, key).items()}
