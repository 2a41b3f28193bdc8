"""A lane: one of the fixed logical streams that a run is cut into.

A lane depends on the recipe, the data and its own number: never on the rank that hosts it, nor on other lanes. It mixes
and packs, one record after the other, in one thread; what is costly has been done before (measuring) or comes after
(materialising).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zephon.errors import DataError
from zephon.feed import Feed
from zephon.mix import Mixer
from zephon.order import SourceOrder
from zephon.pack import Packer
from zephon.state import LaneState, Position, Range, SourceState
from zephon.types import Plan, Ref, Sample, Segment


@dataclass(frozen=True, slots=True)
class LaneSource:
    """What a lane knows of a source.

    Attributes:
        name: for messages.
        order: its order.
        counters: what its modality counts.
        has_usable_row: whether any row of the whole source gives a position; slow.
    """

    name: str
    order: SourceOrder
    counters: tuple[str, ...]
    has_usable_row: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Mix:
    """How a lane mixes.

    Attributes:
        weights: integer weights, one a source.
        by_samples: charge 1 a sample instead of its positions.
        piece: longest piece that enters the mix at once, in positions; None for whole documents.
    """

    weights: Sequence[int]
    by_samples: bool
    piece: int | None


class Lane:
    """One lane, from a state on.

    Args:
        number: its number, 0 to L - 1.
        sources: the sources, in recipe order.
        mix: how to mix them.
        packer: a fresh packer.
        state: where to go on.
        samples: the samples that `state` names as open, measured.
        fill: blocks until a feed has a sample.
    """

    def __init__(
        self,
        number: int,
        sources: Sequence[LaneSource],
        mix: Mix,
        packer: Packer,
        state: LaneState,
        samples: dict[Ref, Sample],
        fill: Callable[[Feed], None],
    ) -> None:
        self.number, self._sources, self._mix, self._packer, self._fill = number, sources, mix, packer, fill
        self._mixer = Mixer(mix.weights, [source.deficit for source in state.sources])
        self._positions = [source.position for source in state.sources]
        self._mixed = [source.mixed for source in state.sources]
        self._counts = [list(source.counters) for source in state.sources]
        self._fresh = [position.group for position in self._positions]
        self.feeds = [Feed(i, number, source.order, self._positions[i]) for i, source in enumerate(sources)]
        self._rest: Segment | None = None
        if state.rest:
            self._rest = Segment(samples[state.rest.ref], state.rest.start, state.rest.end)
        packer.restore([Segment(samples[one.ref], one.start, one.end) for one in state.open])

    @staticmethod
    def start(sources: Sequence[LaneSource]) -> LaneState:
        """The state before the first record."""
        return LaneState(tuple(SourceState(Position(), 0, 0, (0,) * len(source.counters)) for source in sources))

    def next_plan(self) -> Plan:
        """Decide the next record."""
        while True:
            sample, start, end = self._rest or self._next_piece()
            taken, plan = self._packer.offer(sample, start, end)
            self._rest = Segment(sample, taken, end) if taken < end else None
            if plan is not None:
                return plan

    def state(self) -> LaneState:
        """The state after the record that `next_plan` returned last; shares nothing with this lane."""
        zipped = zip(self._positions, self._mixer.deficits, self._mixed, self._counts, strict=True)
        sources = tuple(SourceState(at, deficit, mixed, tuple(counts)) for at, deficit, mixed, counts in zipped)
        rest = _range(self._rest) if self._rest else None
        return LaneState(sources, rest, tuple(_range(segment) for segment in self._packer.open))

    def _next_piece(self) -> Segment:
        """Take the next piece from the source that is furthest behind its share."""
        source = self._mixer.pick()
        sample, after = self._next_sample(source)
        start, end = self._positions[source].offset, sample.positions
        piece = self._mix.piece
        if piece is not None and end - start > piece:
            end = start + piece
            self._positions[source] = self._positions[source]._replace(offset=end)
        else:
            self.feeds[source].ready.popleft()
            self._pass(source, sample, after)
        self._mixer.charge(source, 1 if self._mix.by_samples else end - start)
        self._mixed[source] += end - start
        return Segment(sample, start, end)

    def _next_sample(self, source: int) -> tuple[Sample, Position]:
        """The next sample of a source that has positions; the empty ones before it are passed and counted."""
        feed, known = self.feeds[source], self._sources[source]
        while True:
            if not feed.ready:
                self._fill(feed)
            sample, after = feed.ready[0]
            if sample.positions:
                self._fresh[source] = after.group
                return sample, after
            feed.ready.popleft()
            self._pass(source, sample, after)
            draws = (
                after.group - self._fresh[source] - 1
            ) * known.order.draws_per_group  # at least so many, whole groups
            if draws > known.order.patience:
                if not (known.order.by_chance and known.has_usable_row()):
                    raise DataError(
                        f"Source {known.name!r} gave lane {self.number} no usable sample in {draws} draws: "
                        f"{self._reasons(source)}. The mix would wait for it for ever. Mend its data or its filter, or "
                        "remove it from the recipe."
                    )
                self._fresh[source] = after.group

    def _pass(self, source: int, sample: Sample, after: Position) -> None:
        self._positions[source] = after
        for name in sample.counts:
            self._counts[source][self._sources[source].counters.index(name)] += 1

    def _reasons(self, source: int) -> str:
        counted = zip(self._sources[source].counters, self._counts[source], strict=True)
        return ", ".join(f"{number} {name}" for name, number in counted if number) or "all its rows gave nothing"


def _range(segment: Segment) -> Range:
    return Range(segment.sample.ref, segment.start, segment.end)
