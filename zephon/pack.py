"""Packing (an accumulator): which segments share a sequence.

A packer sees refs, lengths and costs only. `offer` takes as much of a piece as it wants, says how far it came, and
hands out a plan when a sequence is complete. What it still holds open is a list of bins, each a list of segments: all
its state.

A sequence has room for `seq_len` positions and for so much of every budget (patches and images, say). An atom is never
cut. Where every record must hold media, a bin without any keeps room for a filler, which it gets when it leaves.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, gt, itemgetter, sub
from typing import Protocol

from zephon.errors import DataError
from zephon.types import Atom, Plan, Sample, Segment, segment

MAX_OPEN_SEGMENTS = 300
"""Segments that may wait in a packer, so that the state of a lane of 20 sources stays under 4 KiB: a segment takes up
to 12 bytes; 400 came to 4.7 KiB where most were ends of long documents."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a sequence holds.

    Attributes:
        seq_len: positions.
        budgets: most of each cost, in the order of an atom's costs; empty in streams of text.
        filler: the sample that ends a sequence without any atom; None where such sequences may be.
    """

    seq_len: int
    budgets: tuple[int, ...] = ()
    filler: Sample | None = None

    def empty(self) -> Plan:
        """A sequence that holds nothing, as a validation pads its last step with."""
        return Bin(self).leave()

    def plan(self, segments: Sequence[Segment], reserved: int) -> Plan:
        """A finished sequence of these, with a filler where positions are `reserved` for it."""
        filler = self.filler
        return [*segments, Segment(filler, 0, filler.positions)] if reserved and filler else list(segments)

    @property
    def plain(self) -> int:
        """Positions of a sequence without atoms."""
        return self.seq_len - (self.filler.positions if self.filler else 0)


class Bin:
    """One sequence in the making.

    Attributes:
        segments: what it holds.
        room: positions that are left, those kept for a filler included.
        left: what is left of every budget.
        reserved: positions kept for a filler; none once the bin holds an atom.
    """

    def __init__(self, room: Room, segments: Sequence[Segment] = ()) -> None:
        self._of = room
        self.segments: Plan = []
        self.room, self.left = room.seq_len, room.budgets
        self.reserved = room.seq_len - room.plain
        for one in segments:
            self.add(*one)

    @property
    def full(self) -> bool:
        """Whether not one more position of text fits."""
        return self.room <= self.reserved

    def reach(self, sample: Sample, start: int, end: int) -> int:
        """How far positions `[start, end)` of a sample fit; `start` where not even the first does."""
        limit = start + self.room - self.reserved
        if not sample.atoms:
            return end if end < limit else limit
        left = self.left
        for atom in _atoms(sample, start, end):
            if atom.end - start > self.room or any(cost > most for cost, most in zip(atom.costs, left, strict=True)):
                return max(start, min(atom.start, limit))
            left = _without(left, atom)
            limit = start + self.room  # an atom within: no filler
        return min(end, limit)

    def add(self, sample: Sample, start: int, end: int) -> None:
        """Take in positions that fit; touching runs of one sample are one segment."""
        first = self.segments.pop().start if start and _touch(self.segments, sample, start) else start
        self.segments.append(segment((sample, first, end)))
        self.room -= end - start
        if sample.atoms:
            for atom in _atoms(sample, start, end):
                self.left, self.reserved = _without(self.left, atom), 0

    def leave(self) -> Plan:
        """The finished plan."""
        return self._of.plan(self.segments, self.reserved)


_START, _ROOM_AND_AGE = attrgetter("start"), itemgetter(0, 2)


def _touch(segments: Sequence[Segment], sample: Sample, start: int) -> bool:
    """Whether a sample goes on, from `start` > 0, where the last of the segments ends."""
    return bool(segments) and segments[-1].end == start and segments[-1].sample.ref == sample.ref


def _atoms(sample: Sample, start: int, end: int) -> list[Atom]:
    """The atoms of a sample that begin in `[start, end)`."""
    first, last = (bisect_left(sample.atoms, at, key=_START) for at in (start, end))
    return list(sample.atoms[first:last])


def _without(left: tuple[int, ...], atom: Atom) -> tuple[int, ...]:
    return tuple(most - cost for most, cost in zip(left, atom.costs, strict=True))


def uncut(sample: Sample, start: int, end: int) -> int:
    """The last place up to `end` where positions from `start` on may be cut; the end of an atom that begins there."""
    inside = [atom for atom in _atoms(sample, start, end) if atom.end > end]
    if not inside:
        return end
    return inside[0].start if inside[0].start > start else inside[0].end


class Packer(Protocol):
    """What every packing algorithm offers.

    Args:
        room: what a sequence holds.
        bins: sequences that may be open at once.
    """

    def __init__(self, room: Room, bins: int) -> None: ...

    @property
    def open(self) -> Sequence[Sequence[Segment]]:
        """Bins not yet delivered, oldest first, as `restore` wants them; asked for after every step of a lane."""
        ...

    def offer(self, sample: Sample, start: int, end: int) -> tuple[int, Plan | None]:
        """Place positions `[start, end)` of a sample, or the first part of them.

        Returns:
            Where the part that was taken ends, and a completed plan if there is one. One of the two must move: a packer
            that takes nothing and completes nothing would be asked for ever.
        """
        ...

    def flush(self) -> Plan | None:
        """At the end of a finite stream: the next bin, though it is not full; None when nothing is open."""
        ...

    def restore(self, bins: Sequence[Sequence[Segment]]) -> None:
        """Take up the open bins of a checkpoint."""
        ...


class Concat:
    """Concatenate, then split: every position is delivered, in order; a sequence ends early only before an atom.

    After a plan leaves, nothing is open: the rest of the piece has not been taken yet.
    """

    def __init__(self, room: Room, bins: int) -> None:
        self._room, self._bin = room, Bin(room)

    @property
    def open(self) -> list[tuple[Segment, ...]]:
        return [tuple(self._bin.segments)] if self._bin.segments else []

    def offer(self, sample: Sample, start: int, end: int) -> tuple[int, Plan | None]:
        one, size = self._bin, end - start
        if not start and not sample.atoms and size < one.room - one.reserved:  # nearly all, where documents are short
            one.segments.append(segment((sample, 0, end)))
            one.room -= size
            return end, None
        taken = one.reach(sample, start, end)
        if taken > start:
            one.add(sample, start, taken)
        elif not one.segments:
            raise _too_large(sample, start)
        return taken, self.flush() if taken < end or one.room <= one.reserved else None

    def flush(self) -> Plan | None:
        done, self._bin = self._bin, Bin(self._room)
        return done.leave() if done.segments else None

    def restore(self, bins: Sequence[Sequence[Segment]]) -> None:
        self._bin = Bin(self._room, list(chain.from_iterable(bins)))


_Fit = tuple[int, tuple[int, ...], int, int]
"""Of an open bin: the room that is left, of it and of each budget; its age, a number that grows; what is reserved."""


class BestFit:
    """Pieces stay whole: each goes into the bin that it fills best, of at most `bins` open ones.

    What is longer than a sequence is first cut into full sequences and a remainder. A piece goes to the bin with the
    least room that holds it, then with the least of each budget, the oldest among equals; where none does, it opens
    one. When there are too many bins or segments, the fullest bin leaves, the oldest among equals. On real text 32 bins
    fill 99.3 % at 2,048 positions and 99.8 % at 8,192 (`benchmarks.packing`).

    A lane comes back to its bins when their memory is cold, and says what is open after every step: so bins are found
    by bisection, and what they hold are tuples that a mark may keep. With an object a bin, looked at one by one, 64
    lanes took 0.050 CPU s per Mtoken, now 0.041; of short documents one lane took 0.159, now 0.139.
    """

    def __init__(self, room: Room, bins: int) -> None:
        self._room, self._most, self._empty = room, bins, Bin(room)
        self._fits: list[_Fit] = []  # sorted, which is the order in which bins are chosen
        self._open: dict[int, tuple[Segment, ...]] = {}  # by age, oldest first
        self._next_age = self._segments = 0

    @property
    def open(self) -> list[tuple[Segment, ...]]:
        return list(self._open.values())

    def offer(self, sample: Sample, start: int, end: int) -> tuple[int, Plan | None]:
        end = self._empty.reach(sample, start, end)
        if end == start:
            raise _too_large(sample, start)
        size, atoms = end - start, _atoms(sample, start, end) if sample.atoms else ()
        costs = tuple(map(sum, zip(*(atom.costs for atom in atoms), strict=True))) if atoms else ()
        fits, at = self._fits, bisect_left(self._fits, (size, (), -1, 0))
        while at < len(fits):
            room, left, age, reserved = fits[at]
            if (atoms or room - reserved >= size) and not any(map(gt, costs, left)):
                del fits[at]
                break
            at += 1
        else:
            (room, left, age, reserved), self._next_age = self._fit((), self._next_age), self._next_age + 1
        held = self._open.get(age, ())
        if start and _touch(held, sample, start):
            held, start = held[:-1], held[-1].start
        else:
            self._segments += 1
        self._open[age] = (*held, segment((sample, start, end)))
        if atoms:
            left, reserved = tuple(map(sub, left, costs)), 0
        fit = (room - size, left, age, reserved)
        insort(fits, fit)
        if room - size <= reserved:
            return end, self._leave(fit)
        crowded = len(fits) > self._most or self._segments >= MAX_OPEN_SEGMENTS
        return end, self.flush() if crowded else None

    def flush(self) -> Plan | None:
        return self._leave(min(self._fits, key=_ROOM_AND_AGE)) if self._fits else None

    def restore(self, bins: Sequence[Sequence[Segment]]) -> None:
        self._open = dict(enumerate(map(tuple, bins)))
        self._fits = sorted(map(self._fit, self._open.values(), self._open))
        self._next_age, self._segments = len(bins), sum(map(len, bins))

    def _fit(self, segments: Sequence[Segment], age: int) -> _Fit:
        one = Bin(self._room, segments)
        return one.room, one.left, age, one.reserved

    def _leave(self, fit: _Fit) -> Plan:
        self._fits.remove(fit)
        segments = self._open.pop(fit[2])
        self._segments -= len(segments)
        return self._room.plan(segments, fit[3])


def _too_large(sample: Sample, start: int) -> DataError:
    """A modality gave an atom that no sequence holds; it must shrink or drop such samples when it measures."""
    return DataError(
        f"Sample {tuple(sample.ref)} holds, from position {start} on, what must not be cut and fits no sequence: its "
        "modality should have shrunk or dropped it. Raise seq_len or the [packing] budgets."
    )


ALGORITHMS: dict[str, type[Packer]] = {"concat": Concat, "best_fit": BestFit}
"""Packers by the name that a recipe gives."""
