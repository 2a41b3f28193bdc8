"""Reading ahead: measured samples for the lanes of one rank.

Rows are measured shortly before they are needed, for the lanes of a source that will run dry first, in one task for
many lanes: the first batch does not wait for whole windows, and 64 lanes cost one native call, not 64. How far it reads
ahead changes time and memory, never what a lane sees.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon.order import Group, SourceOrder
from zephon.state import Position
from zephon.types import Measured, Ref, Sample
from zephon.worker import Handle, Runner, Source, Worker

TASK_BYTES = 1024 * 1024
"""Raw bytes one task measures. A batch of 64 documents costs 0.014 CPU s per Mtoken to tokenise, of 1000 0.012."""

AHEAD_BYTES = 8 * 1024 * 1024
"""Raw bytes that the loaders of a stream measure ahead in all, shared by their lanes and sources. At 64 lanes of two
sources, 2 MiB made tasks of 12 documents and cost 0.13 CPU s per Mtoken; 8 MiB make tasks of 100 and cost 0.06."""

FEED_BYTES = 16 * 1024
"""Raw bytes of one source that a lane takes at least, so that many lanes of short rows still read in runs. Also what
it takes first: it takes twice as much at every turn until it has its share, so that the first batch comes early."""


class Entry(NamedTuple):
    """A measured sample of a lane, and the position behind it."""

    sample: Sample
    after: Position


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
        self.ready: deque[Entry] = deque()
        self.pending = 0
        """Rows that have been asked for and not come back."""
        self.turns = 0
        """How often rows have been asked for."""
        self.ended = False
        """Whether all rows of a finite source have been asked for."""
        self._lane, self._order = lane, order
        self._group, self._index = position.group, position.place
        self._skip = position.sample
        self._rows: Group | None = None

    @property
    def ahead(self) -> int:
        """Rows measured or asked for."""
        return len(self.ready) + self.pending

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
        self.turns += 1
        rows = self._rows
        return Group(rows.epoch[first:end], rows.chunk[first:end], rows.row[first:end]), self._group, first

    def put(self, rows: Group, group: int, index: int, measured: Measured, span: tuple[int, int, int, int]) -> None:
        """Take in the measured samples of rows that `take` gave.

        Args:
            rows: the rows.
            group: their group.
            index: index of the first in its group.
            measured: the result of the task that held them.
            span: first and last-but-one row of ours in the task, first and last-but-one sample.
        """
        first_row, end_row, first, end = span
        self.pending -= end_row - first_row
        epoch, chunk, row = rows.epoch.tolist(), rows.chunk.tolist(), rows.row.tolist()
        of_row, positions, payloads = measured.rows, measured.positions, measured.payloads
        counts, atoms = measured.counts, measured.atoms
        number, last = 0, -1
        for i in range(first, end):
            local = of_row[i] - first_row
            number = number + 1 if local == last else 0
            last = local
            more = i + 1 < end and of_row[i + 1] - first_row == local
            after = Position(group, index + local, number + 1) if more else Position(group, index + local + 1)
            ref = Ref(self.source, epoch[local], chunk[local], row[local], number)
            sample = Sample(ref, positions[i], payloads[i], counts.get(i, ()), atoms.get(i, ()))
            self.ready.append(Entry(sample, after))
        while self._skip and self.ready:  # a restored lane has had the first samples of its first row
            self.ready.popleft()
            self._skip -= 1


_Part = tuple[Feed, Group, int, int]


class Feeder:
    """Keeps the feeds of one rank filled.

    Args:
        sources: the open sources.
        worker: does the measuring.
        runner: has it done.
        ahead_bytes: raw bytes that this rank may have measured ahead just now.
    """

    def __init__(
        self, sources: Sequence[Source], worker: Worker, runner: Runner, ahead_bytes: Callable[[], int]
    ) -> None:
        self._sources, self._worker, self._runner, self._ahead_bytes = sources, worker, runner, ahead_bytes
        self._feeds: list[list[Feed]] = [[] for _ in sources]
        self._tasks: deque[tuple[Handle[Measured], list[_Part]]] = deque()
        self._row_bytes = [source.reader.row_bytes for source in sources]

    def add(self, feed: Feed) -> None:
        """Serve one more feed."""
        self._feeds[feed.source].append(feed)

    @property
    def rows_ahead(self) -> int:
        """Rows measured or asked for, in all feeds."""
        return sum(feed.ahead for feeds in self._feeds for feed in feeds)

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
            feeds = [min(feeds, key=_ahead) for feeds in self._feeds]
            thin = [feed for feed in feeds if not feed.ended and 2 * feed.ahead < self._full(feed)]
            if not thin:
                return
            asked = len(self._tasks)
            self._request(min(thin, key=lambda feed: feed.ahead / self._full(feed)))
            if len(self._tasks) == asked:
                return

    def fetch(self, refs: Sequence[Ref]) -> dict[Ref, Sample]:
        """Measure samples by name, as a restore needs them."""
        out: dict[Ref, Sample] = {}
        for number, source in enumerate(self._sources):
            mine = sorted({(ref.epoch, ref.chunk, ref.row) for ref in refs if ref.source == number})
            if not mine:
                continue
            places = np.asarray(mine, dtype=np.int64)
            rows = source.catalogue.chunks.rows(places[:, 1], places[:, 2])
            measured = self._runner.submit(self._worker.measure, number, rows, places[:, 0]).result()
            found: dict[tuple[int, int, int], list[int]] = {place: [] for place in mine}
            for i, row in enumerate(measured.rows):
                found[mine[row]].append(i)
            for ref in refs:
                if ref.source == number:
                    i = found[ref.epoch, ref.chunk, ref.row][ref.sample]
                    out[ref] = Sample(ref, measured.positions[i], measured.payloads[i], atoms=measured.atoms.get(i, ()))
        return out

    def _full(self, feed: Feed) -> int:
        """Rows that a feed should hold by now."""
        feeds = len(self._feeds[feed.source]) * len(self._feeds)
        share = min(max(self._ahead_bytes() // feeds, FEED_BYTES), TASK_BYTES)
        return max(1, min(share, FEED_BYTES << min(feed.turns, 16)) // self._row_bytes[feed.source])

    def _request(self, first: Feed) -> None:
        """Have rows measured for `first`, and in the same task for the feeds of its source that run dry next."""
        feeds = self._feeds[first.source]
        room = max(1, TASK_BYTES // self._row_bytes[first.source])
        hungry = [feed for feed in feeds if feed.ahead < self._full(feed) and feed is not first and not feed.ended]
        hungry.sort(key=_ahead)
        parts: list[_Part] = []
        for feed in (first, *hungry):
            if room <= 0:
                break
            if taken := feed.take(max(1, self._full(feed) - feed.ahead)):
                parts.append((feed, *taken))
                room -= len(taken[0].row)
        if not parts:
            return
        chunks = self._sources[first.source].catalogue.chunks
        rows = chunks.rows(_join(parts, _chunk), _join(parts, _row))
        self._tasks.append((self._runner.submit(self._worker.measure, first.source, rows, _join(parts, _epoch)), parts))

    def _collect(self) -> None:
        """Hand the samples of the oldest task to its feeds."""
        handle, parts = self._tasks.popleft()
        measured = handle.result()
        first_row = first = 0
        for feed, rows, group, index in parts:
            end_row, end = first_row + len(rows.row), first
            while end < len(measured.rows) and measured.rows[end] < end_row:
                end += 1
            feed.put(rows, group, index, measured, (first_row, end_row, first, end))
            first_row, first = end_row, end


def _ahead(feed: Feed) -> int:
    return feed.ahead


def _chunk(rows: Group) -> NDArray[np.int64]:
    return rows.chunk


def _epoch(rows: Group) -> NDArray[np.int64]:
    return rows.epoch


def _row(rows: Group) -> NDArray[np.int64]:
    return rows.row


def _join(parts: list[_Part], column: Callable[[Group], NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([column(rows) for _, rows, _, _ in parts])
