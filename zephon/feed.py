"""Reading ahead: measured samples for the lanes of one rank.

Rows are measured shortly before they are needed, for the lanes of a source that will run dry first, in one task for
many lanes: the first batch does not wait for whole windows, and 64 lanes cost one native call, not 64. How far it reads
ahead changes time and memory, never what a lane sees.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from zephon.order import Group, SourceOrder
from zephon.state import Position
from zephon.types import Measured, Ref, Sample, maker
from zephon.worker import Handle, Runner, Source, Worker

TASK_BYTES = 1024 * 1024
"""Raw bytes one task measures; the last lane that joins may bring more. A batch of 64 documents costs 0.014 CPU s per
Mtoken to tokenise, of 1000 0.012."""

AHEAD_BYTES = 32 * 1024 * 1024
"""Raw bytes that the loaders of a stream measure ahead in all, shared by their lanes and sources. CPU s per Mtoken of
two sources with 2, 4, 8, 16, 32 MiB: at 64 lanes 0.066, 0.049, 0.046, 0.043, 0.042 (at 1 lane 0.039); at 256 lanes
0.064 with 16 MiB and 0.045 with 32."""

FEED_BYTES = 16 * 1024
"""Raw bytes of one source that a lane holds, if memory allows, so that many lanes of short rows still read in runs.
Also what it holds first: with every turn half as much again, until it is its share, so that the first batch comes
early. With twice as much, 8 lanes of images measured 3,064 rows before a first batch of 1,712; now 2,573."""


class Feed:
    """Measured samples of one source for one lane, in order.

    Args:
        source: number of the source.
        lane: number of the lane.
        order: order of the source.
        position: the first sample to deliver.
    """

    def __init__(self, source: int, lane: int, order: SourceOrder, position: Position) -> None:
        self.source = source
        self.ready = 0
        """Measured samples that have not been taken whole. Who has taken all of one counts it down: so it says where
        the feed stands."""
        self.pending = 0
        """Rows that have been asked for and not come back."""
        self.next_bytes = FEED_BYTES
        """Raw bytes to hold after the next turn, up to a task's; the share of the feed may be less."""
        self.ended = False
        """Whether a finite source was found to have no more rows to ask for."""
        self._lane, self._order = lane, order
        self._group, self._index = position.group, position.place
        self._had = position.sample
        self._rows: Group | None = None
        self.stand(position)
        self._waiting: deque[Iterator[Sample]] = deque()
        self.pop: Callable[[], Sample] = chain.from_iterable(iter(self._waiting.popleft, None)).__next__
        """Gives the next sample, where one is ready, without running Python."""

    def mark(self) -> tuple["_Block", int]:
        """Behind the sample that was taken last, for `position_of`: two references, while a position is an object."""
        blocks = self._blocks
        while (passed := self._kept - self.ready) > len(blocks[0].places):
            self._kept -= len(blocks.popleft().places)
        return blocks[0], passed

    def position(self) -> Position:
        """Behind the sample that was taken last."""
        return position_of(*self.mark())

    def stand(self, position: Position) -> None:
        """Stand before the sample at a position: the first, or the end of a finite source."""
        self._blocks, self._kept = deque([_Block(position.group, (position.place,), (position.sample,))]), 1

    @property
    def ahead(self) -> int:
        """Rows measured or asked for."""
        return self.ready + self.pending

    def take(self, count: int) -> tuple[Group, int, int] | None:
        """The next rows to measure, at most `count` and at least one: rows, and the group and index of the first.

        None when a finite source has no more.
        """
        while self._rows is None or self._index >= len(self._rows.row):
            if self._rows is not None:
                self._group, self._index = self._group + 1, 0
            if self._order.groups is not None and self._group >= self._order.groups:
                self.ended, self._rows = True, None
                return None
            self._rows = self._order.group(self._lane, self._group)
        first, end = self._index, min(self._index + count, len(self._rows.row))
        self._index = end
        self.pending += end - first
        self.next_bytes = min(self.next_bytes * 3 // 2, TASK_BYTES)
        rows = self._rows
        return Group(rows.epoch[first:end], rows.chunk[first:end], rows.row[first:end]), self._group, first

    def put(
        self, rows: Sequence[list[int]], group: int, index: int, measured: Measured, first_row: int, first: int
    ) -> int:
        """Take in the measured samples of rows that `take` gave; returns the number of the sample behind them.

        Args:
            rows: the columns of a `Group`.
            group: its number.
            index: index of the first in its group.
            measured: the result of the task that held them.
            first_row: number of the first row in the task.
            first: number of its first sample.
        """
        epochs, chunks, inside = rows
        end_row = first_row + len(inside)
        end = bisect_left(measured.rows, end_row, first)
        self.pending -= end_row - first_row
        numbers: Iterable[int] = repeat(0)
        block = _Block(group, range(index + 1, index + 1 + end - first))
        if end - first != end_row - first_row:  # a row gave several samples
            local = [row - first_row for row in measured.rows[first:end]]
            numbers = [i - bisect_left(local, row) for i, row in enumerate(local)]
            block = _Block(group, [index + row for row in (*local[1:], len(inside))], [*numbers[1:], 0])
            epochs, chunks, inside = ([column[row] for row in local] for column in rows)
        refs = zip(repeat(self.source), epochs, chunks, inside, numbers, strict=False)
        samples = zip(
            map(_REF, refs),
            measured.positions[first:end],
            measured.payloads[first:end],
            _some(measured.counts, first, end),
            _some(measured.atoms, first, end),
            strict=False,  # those that repeat have no end
        )
        self._blocks.append(block)
        self._kept += end - first
        # Made when they are taken: 100,000 tuples that wait made each full collection of garbage slow, and short
        # documents cost a fifth more.
        self._waiting.append(map(_SAMPLE, samples))
        self.ready += end - first
        while self._had and self.ready:  # a restored lane has had the first samples of its first row
            self.pop()
            self.ready -= 1
            self._had -= 1
        return end


class _Block(NamedTuple):
    """Samples that came together: their group, and for each the place and the number of the sample behind it."""

    group: int
    places: Sequence[int]
    numbers: Sequence[int] = ()


def position_of(block: _Block, passed: int) -> Position:
    """The position that a mark stands for."""
    return Position(block.group, block.places[passed - 1], block.numbers[passed - 1] if block.numbers else 0)


_REF, _SAMPLE, _AHEAD = maker(Ref), maker(Sample), attrgetter("ahead")


def _some(found: Mapping[int, tuple[Any, ...]], first: int, end: int) -> Iterable[tuple[Any, ...]]:
    """What some of the samples have, most none."""
    return [found.get(i, ()) for i in range(first, end)] if found else repeat(())


_Part = tuple[Feed, int, int, int]
"""A feed, how many of a task's rows are its, and group and index of the first of them."""


class Feeder:
    """Keeps the feeds of one rank filled.

    Args:
        sources: the open sources.
        worker: does the measuring.
        runner: has it done.
        ahead_bytes: raw bytes that so many feeds may have measured ahead just now.
    """

    def __init__(
        self, sources: Sequence[Source], worker: Worker, runner: Runner, ahead_bytes: Callable[[int], int]
    ) -> None:
        self._sources, self._worker, self._runner, self._ahead_bytes = sources, worker, runner, ahead_bytes
        self.feeds: list[list[Feed]] = [[] for _ in sources]
        """Those that are served, by source."""
        self._tasks: deque[tuple[Handle[Measured], Group, list[_Part]]] = deque()
        self._row_bytes = [source.reader.row_bytes for source in sources]

    def fill(self, feed: Feed) -> None:
        """Return when `feed` has at least one sample, or has none any more."""
        while not feed.ready:
            if not feed.pending:
                self._request(feed)
                if feed.ended and not feed.pending:
                    return
            self._collect()

    def top_up(self) -> None:
        """Where work is done ahead: ask for rows of the feeds that hold less than half of what they should."""
        while len(self._tasks) < self._runner.tasks:
            emptiest = [min(feeds, key=_AHEAD) for feeds in self.feeds]
            fills = [(feed.ahead / self._wanted(feed), feed.source) for feed in emptiest if not feed.ended]
            fill, source = min(fills, default=(1.0, 0))
            if 2 * fill >= 1 or not self._request(emptiest[source]):
                return

    def fetch(self, refs: Sequence[Ref]) -> dict[Ref, Sample]:
        """Measure the samples of rows, as a restore needs them; without those that there are not any more."""
        out: dict[Ref, Sample] = {}
        for number, source in enumerate(self._sources):
            mine = sorted({(ref.epoch, ref.chunk, ref.row) for ref in refs if ref.source == number})
            if not mine:
                continue
            places = np.asarray(mine, dtype=np.int64)
            rows = source.catalogue.chunks.rows(places[:, 1], places[:, 2])
            measured = self._runner.submit(self._worker.measure, number, rows, places[:, 0]).result()
            for i, row in enumerate(measured.rows):
                ref = Ref(number, *mine[row], i - bisect_left(measured.rows, row))
                out[ref] = Sample(ref, measured.positions[i], measured.payloads[i], atoms=measured.atoms.get(i, ()))
        return out

    def _share(self, source: int) -> int:
        """Raw bytes that a feed of a source is to hold in the end."""
        feeds = len(self.feeds[source]) * len(self.feeds)
        return min(self._ahead_bytes(feeds) // feeds, TASK_BYTES)

    def _wanted(self, feed: Feed) -> int:
        """Rows that a feed should hold: few at first, those of its share in the end."""
        return max(1, min(self._share(feed.source), feed.next_bytes) // self._row_bytes[feed.source])

    def _request(self, first: Feed) -> bool:
        """Have rows measured for `first`, and in the same task for the feeds of its source that run dry next.

        Returns whether there were any.
        """
        share, row_bytes = self._share(first.source), self._row_bytes[first.source]
        # Lanes that have not come to their share do not join: the first batch, of a few lanes, would wait for all.
        hungry = [
            feed
            for feed in self.feeds[first.source]
            if feed.next_bytes >= share and 4 * feed.ahead * row_bytes < 3 * share and not feed.ended
            and feed is not first
        ]  # fmt: skip
        hungry.sort(key=_AHEAD)
        room = max(1, TASK_BYTES // row_bytes)
        parts, groups = list[_Part](), list[Group]()
        for feed in (first, *hungry):
            if room <= 0:
                break
            if taken := feed.take(max(1, self._wanted(feed) - feed.ahead)):
                rows, group, index = taken
                groups.append(rows)
                parts.append((feed, len(rows.row), group, index))
                room -= len(rows.row)
        if not parts:
            return False
        rows = Group(*map(np.concatenate, zip(*groups, strict=True)))
        numbers = self._sources[first.source].catalogue.chunks.rows(rows.chunk, rows.row)
        handle = self._runner.submit(self._worker.measure, first.source, numbers, rows.epoch)
        self._tasks.append((handle, rows, parts))
        return True

    def _collect(self) -> None:
        """Hand the samples of the oldest task to its feeds."""
        handle, rows, parts = self._tasks.popleft()
        measured = handle.result()
        epochs, chunks, inside = (column.tolist() for column in rows)
        at = sample = 0
        for feed, count, group, index in parts:
            mine = slice(at, at + count)
            sample = feed.put((epochs[mine], chunks[mine], inside[mine]), group, index, measured, at, sample)
            at += count
