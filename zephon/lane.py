"""A lane: one of the fixed logical streams that a run is cut into.

A lane depends on the recipe, the data and its own number: never on the rank that hosts it, nor on other lanes. It mixes
and packs, one record after the other, in one thread; what is costly has been done before (measuring) or comes after
(materialising).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

from zephon.errors import DataError, RestoreError
from zephon.feed import Feed, position_of
from zephon.mix import Mixer
from zephon.order import SourceOrder
from zephon.pack import Packer, uncut
from zephon.state import LaneState, Open, Position, SourceState
from zephon.transform import BAD_ROW
from zephon.types import Bad, Plan, Ref, Sample, Segment

FEW_ROWS = 1000
"""A share of bad rows is of at least so many: the first row of a run may be bad."""

TOO_LONG = "too long"
"""Counter of the samples that [packing] too_long = "drop" leaves out."""

Mark = tuple[Any, ...]
"""What a lane needs to tell its state later. Marks are taken after every step and few are asked for, so they are one
flat tuple. States took 14 % of all CPU at 256 lanes of one record a step, half of it the search for garbage."""


@dataclass(frozen=True, slots=True)
class LaneSource:
    """What a lane knows of a source.

    Attributes:
        name: for messages.
        order: its order.
        counters: what its modality counts.
        has_usable_row: whether any row of the whole source gives a position; slow.
        place: where a sample lies, or a byte of its row, for messages; slow.
        max_bad: bad rows that a lane may skip: a number, or a share of the rows that it has come to; None where the
            first that it comes to stops the run.
    """

    name: str
    order: SourceOrder
    counters: tuple[str, ...]
    has_usable_row: Callable[[], bool]
    place: Callable[[Ref, int], str]
    max_bad: Fraction | int | None = 0


@dataclass(frozen=True, slots=True)
class Mix:
    """How a lane mixes.

    Attributes:
        weights: integer weights, one a source.
        by_samples: charge 1 a sample instead of its positions.
        piece: longest piece that enters the mix at once, in positions; None for whole documents.
        longest: longest sample that is delivered, in positions: one without atoms, and one with; None for any.
        drop_longer: drop and count samples that are longer, instead of stopping the run.
        stop: a finite stream ends with its first source, instead of with its last.
    """

    weights: Sequence[int]
    by_samples: bool = False
    piece: int | None = None
    longest: tuple[int, int] | None = None
    drop_longer: bool = True
    stop: bool = False


class Lane:
    """One lane, from a state on.

    Args:
        number: its number, 0 to L - 1.
        sources: the sources, in recipe order.
        mix: how to mix them.
        packer: a fresh packer.
        state: where to go on.
        samples: measures what `state` names as open; called when the next record is to be decided, not before.
        fill: blocks until a feed has a sample.
    """

    def __init__(
        self,
        number: int,
        sources: Sequence[LaneSource],
        mix: Mix,
        packer: Packer,
        state: LaneState,
        samples: Callable[[], Mapping[Ref, Sample]],
        fill: Callable[[Feed], None],
    ) -> None:
        self.number, self._sources, self._mix, self._packer, self._fill = number, sources, mix, packer, fill
        self._mixer = Mixer(mix.weights, [source.deficit for source in state.sources])
        positions = [source.position for source in state.sources]
        self._offsets = [source.offset for source in state.sources]
        self._held: list[Sample | None] = [None] * len(sources)  # of which something is left
        self._mixed = [source.mixed for source in state.sources]
        self._counts = [source.counters for source in state.sources]
        self.feeds = [
            Feed(i, number, source.order, position)
            for i, (source, position) in enumerate(zip(sources, positions, strict=True))
        ]
        self.skipped: list[tuple[int, Bad]] = []
        """Source and fault of the bad rows that were passed; who reads it empties it."""
        self._rest: Segment | None = None
        self._restored: tuple[LaneState, Callable[[], Mapping[Ref, Sample]]] | None = state, samples
        self._amid = {
            i: one.position.sample for i, one in enumerate(state.sources) if one.position.sample or one.offset
        }
        self._ended = False
        for i, position in enumerate(positions):
            if position == _end(sources[i].order):
                self._ended = not self._mixer.retire(i)

    def next_plan(self) -> Plan | None:
        """Decide the next record; None when a finite stream has no more."""
        if self._restored:
            self._take_up(*self._restored)
        feeds, held, offsets, mixed = self.feeds, self._held, self._offsets, self._mixed
        by_samples, most = self._mix.by_samples, self._mix.piece or sys.maxsize
        checked = bool(self._amid or self._mix.longest)
        # What happens once a piece is in one loop: calls took a quarter of the time to decide short documents.
        offer, charge, source = self._packer.offer, self._mixer.charge, self._mixer.pick()
        while self._rest or not self._ended:
            if self._rest:
                sample, start, end = self._rest
            else:
                sample = held[source]
                if sample is None:
                    feed = feeds[source]
                    sample = feed.pop() if feed.ready else None
                    if checked or sample is None or not sample.positions:
                        sample = self._next_sample(source, sample)
                        if sample is None:
                            source = self._end_source(source)
                            continue
                start, end = offsets[source], sample.positions
                if end - start > most:
                    end = uncut(sample, start, start + most)
                if end < sample.positions:
                    held[source], offsets[source] = sample, end
                elif start or sample.counts:
                    self._pass(source, sample)
                else:
                    feeds[source].ready -= 1
                mixed[source] += end - start
                source = charge(source, 1 if by_samples else end - start)
            taken, plan = offer(sample, start, end)
            self._rest = Segment(sample, taken, end) if taken < end else None
            if plan is not None:
                return plan
        return self._packer.flush()

    def mark(self) -> Mark:
        """What `state` needs to tell the state after the record that `next_plan` returned last, even much later."""
        waiting = self._restored[0][1:] if self._restored else (self._rest, tuple(map(tuple, self._packer.open)))
        places = [part for feed in self.feeds for part in feed.mark()]
        return (*waiting, *places, *self._offsets, *self._mixer.deficits, *self._mixed, *self._counts)

    def state(self, mark: Mark) -> LaneState:
        """The state that a mark of this lane stands for; shares nothing with the lane."""
        rest, waiting, *marks = mark
        n = len(self.feeds)
        positions = [position_of(*marks[i : i + 2]) for i in range(0, 2 * n, 2)]
        columns = (marks[i : i + n] for i in range(2 * n, 6 * n, n))
        sources = [SourceState(*parts) for parts in zip(positions, *columns, strict=True)]
        return LaneState(tuple(sources), rest, waiting)

    def _take_up(self, state: LaneState, samples: Callable[[], Mapping[Ref, Sample]]) -> None:
        """Put what a state names as open back to where it waited."""
        found = samples()

        def whole(one: Open) -> Segment:
            return Segment(self._same(one.ref, one.end, found.get(one.ref)), one.start, one.end)

        self._rest = whole(state.rest) if state.rest else None
        self._packer.restore([list(map(whole, bin)) for bin in state.open])
        self._restored = None

    def _same(self, ref: Ref, end: int, sample: Sample | None) -> Sample:
        """The sample that a state names, of which it has had, or waits for, positions up to `end`."""
        if sample is not None and sample.ref == ref and sample.positions >= end:
            return sample
        source, has = self._sources[ref.source], sample.positions if sample and sample.ref == ref else "none"
        raise RestoreError(
            f"Source {source.name!r}: {source.place(ref, 0)}: the state names positions up to {end} of sample "
            f"{ref.sample} of this row, which has {has}. What was allowed to differ (code, codecs) does not do the "
            "same; go on with what wrote the state."
        )

    def _end_source(self, source: int) -> int:
        """A source has no more samples: the stream ends, or goes on with the one that is returned."""
        if self._mix.stop:
            self._ended = True
        elif (end := _end(self._sources[source].order)) is not None:
            self._ended = not self._mixer.retire(source)
            self.feeds[source].stand(end)
        return self._mixer.pick()

    def _next_sample(self, source: int, sample: Sample | None) -> Sample | None:
        """The next sample that is to be delivered, `sample` perhaps; those before it are passed and counted."""
        feed, known, longest = self.feeds[source], self._sources[source], self._mix.longest
        fresh: int | None = None
        while True:
            if sample is None:
                self._fill(feed)
                if not feed.ready:
                    return None
                sample = feed.pop()
            if self._amid and (number := self._amid.pop(source, None)) is not None:
                offset = self._offsets[source]
                self._same(sample.ref._replace(sample=number), offset + 1 if offset else 0, sample)
            if longest and sample.positions > longest[bool(sample.atoms)]:
                sample = self._too_long(source, sample)
            if sample.positions:
                return sample
            fresh = feed.position().group if fresh is None else fresh
            self._pass(source, sample)
            # At least so many draws: whole groups only. A finite source ends by itself.
            draws = (feed.position().group - fresh - 1) * known.order.draws_per_group
            if draws > known.order.patience and known.order.groups is None:
                if not (known.order.by_chance and known.has_usable_row()):
                    counted = zip(known.counters, self._counts[source], strict=True)
                    noted = ", ".join(f"{number} {name}" for name, number in counted if number)
                    raise DataError(
                        f"Source {known.name!r} gave lane {self.number} no usable sample in {draws} draws: "
                        f"{noted or 'all its rows gave nothing'}. The mix would wait for it for ever. Mend its data or "
                        "its filter, or remove it from the recipe."
                    )
                fresh = feed.position().group
            sample = None

    def _too_long(self, source: int, sample: Sample) -> Sample:
        """A sample without positions in the place of one that is longer than the recipe allows."""
        if not self._mix.drop_longer:
            known, most = self._sources[source], self._mix.longest or (0, 0)
            raise DataError(
                f"Source {known.name!r}: {known.place(sample.ref, 0)}: the sample has {sample.positions} positions, "
                f"more than the {most[bool(sample.atoms)]} that a sequence holds, and [packing] too_long = 'error'. "
                "Use 'split' or 'drop', or a longer seq_len."
            )
        return sample._replace(positions=0, counts=(*sample.counts, TOO_LONG))

    def _pass(self, source: int, sample: Sample) -> None:
        self.feeds[source].ready -= 1
        self._held[source], self._offsets[source] = None, 0
        if sample.counts:
            counts, names = list(self._counts[source]), self._sources[source].counters
            for name in sample.counts:
                counts[names.index(name)] += 1
            self._counts[source] = tuple(counts)
            if BAD_ROW in sample.counts:
                self._skip(source, sample)

    def _skip(self, source: int, sample: Sample) -> None:
        """Note a bad row; stop where there are too many, or may be none."""
        known, why = self._sources[source], cast(Bad, sample.payload)
        if known.max_bad is None:
            raise DataError(f"Source {known.name!r}: {known.place(sample.ref, why.offset)}: {why.reason}")
        self.skipped.append((source, why))
        count, at = self._counts[source][known.counters.index(BAD_ROW)], self.feeds[source].position()
        come = max(known.order.rows_before(at.group) + at.place, FEW_ROWS)
        if count > (known.max_bad if isinstance(known.max_bad, int) else known.max_bad * come):
            raise DataError(
                f"Source {known.name!r}: lane {self.number} has come to {count} bad rows, more than max_bad = "
                f"{float(known.max_bad):g} allows; the last is {why.place}: {why.reason} The skip list names the "
                "others. Mend the data, or raise max_bad, which changes no order: the run goes on from its last state."
            )


def _end(order: SourceOrder) -> Position | None:
    """Where a source stands that the mix has found at its end; one that merely has no rows left stands before it."""
    return None if order.groups is None else Position(order.groups)
