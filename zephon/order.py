"""Source order: which row of a source a lane visits when. A pure function; no state, no I/O.

A source of `n` chunks is drawn for ever: draw `p` is chunk `perm(p mod n)` of epoch `p // n`, and lane `l` of `L` takes
draws `l, l + L, l + 2L, ...`. Draws are taken in groups of `K`; the rows of a group are visited in one permuted order.
A place in a lane's source is therefore `(group, index)`. The order inside a source depends on its own catalogue, the
seed, the number of lanes and the shuffle window: never on another source, nor on any weight.

Where a file has row groups a row costs its whole group, so their chunks are permuted in two levels (`_Groups`).
"""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon.catalogue import ChunkTable
from zephon.keyed import make_key, permute

ORDER_VERSION = 2
"""Raised whenever the same recipe and data would give another order. Stored in every checkpoint."""

_TABLE_CHUNKS = 65536
"""Chunks up to which a permutation is kept as a table (512 KiB): 30 numbers cost 200 us to permute, 5 us to look up."""

LANES_BYTES = 256 * 1024 * 1024
"""Bytes of row groups that all lanes of a source are amid, while they keep in step (`_Groups` has the figures)."""

MIXED_BYTES = 32 * 1024 * 1024
"""Bytes of row groups whose chunks are permuted together, in all lanes. Many lanes mix groups by being many: with 8
lanes of 4 groups each of 7.6 MiB the first 30 Mtoken cost 0.099 CPU s each (127 groups decoded), of one 0.071 (51)."""


class Group(NamedTuple):
    """The rows of one group in the order in which they are visited; three arrays of one length.

    Attributes:
        epoch: int64 [rows], how often the source had been drawn completely before.
        chunk: int64 [rows], number of the chunk in the source.
        row: int64 [rows], number of the row in its chunk.
    """

    epoch: NDArray[np.int64]
    chunk: NDArray[np.int64]
    row: NDArray[np.int64]


class SourceOrder:
    """The order of one source for all lanes.

    Args:
        name: name of the source; with the seed it keys every permutation.
        chunks: the source's chunk table.
        seed: the recipe's seed.
        lanes: number of lanes of the stream, L.
        window: rows permuted together in a lane (`shuffle.window`); 0 keeps the stored order.
        epochs: how often the source is drawn; None for ever. Finite streams have one lane.
    """

    def __init__(
        self, name: str, chunks: ChunkTable, *, seed: int, lanes: int, window: int, epochs: int | None = None
    ) -> None:
        self._draws_in_all = None if epochs is None else epochs * chunks.count
        self._name, self._chunks, self._seed, self._lanes = name, chunks, seed, lanes
        self._shuffled = window > 0
        self.walks_all = chunks.count < lanes
        """True when there are fewer chunks than lanes, so that every lane walks all of them by itself."""
        most = chunks.count if self.walks_all else chunks.count // lanes
        self._groups = _Groups(chunks, lanes) if self._shuffled and chunks.group_bytes else None
        if self._groups:
            most = min(most, self._groups.share)
        self.draws_per_group = max(1, min(window // chunks.rows_per_chunk, most))
        if self._groups:
            self._groups.align(self.draws_per_group)
        self.groups = None if self._draws_in_all is None else -(-self._draws_in_all // self.draws_per_group)
        """Number of groups of a lane; None for ever."""
        self.patience = 2 * chunks.count if self._shuffled else chunks.count
        """Draws after which a lane has seen every chunk that it ever sees, unless `by_chance`."""
        self.by_chance = self._shuffled and not self.walks_all and lanes > 1
        """True when the permutation of an epoch decides which chunks a lane sees: each comes, but who knows when."""
        self._tables: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def rows_before(self, group: int) -> int:
        """Rows of a lane before a group, as if all chunks were of one size."""
        return group * self.draws_per_group * self._chunks.rows_per_chunk

    def group(self, lane: int, group: int) -> Group:
        """The rows that `lane` visits in its group number `group`, in order."""
        first, end = group * self.draws_per_group, (group + 1) * self.draws_per_group
        k = np.arange(first, end if self._draws_in_all is None else min(end, self._draws_in_all))
        epoch, chunk = self._draws(lane, k)
        sizes = self._chunks.sizes(chunk)
        starts = np.cumsum(sizes) - sizes
        total = int(sizes.sum())
        visit = np.arange(total)
        if self._shuffled:
            visit = permute(total, make_key("rows", self._seed, self._name, lane, group), visit)
        draw = np.searchsorted(starts, visit, side="right") - 1
        return Group(epoch[draw], chunk[draw], visit - starts[draw])

    def _draws(self, lane: int, k: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Epoch and chunk of draws number `k` of `lane`."""
        n = self._chunks.count
        place = k if self.walks_all else lane + k * self._lanes
        epoch, within = place // n, place % n
        if not self._shuffled:
            return epoch, (lane + within) % n if self.walks_all else within
        chunk = np.empty_like(within)
        for one in range(int(epoch[0]), int(epoch[-1]) + 1):
            mine = epoch == one
            if self._groups:
                who = ("lane", lane) if self.walks_all else ()
                place = within[mine] if self.walks_all else self._groups.dealt(within[mine])
                chunk[mine] = self._groups.chunks(place, self._seed, self._name, *who, one)
            elif self.walks_all:
                chunk[mine] = permute(n, make_key("lane chunks", self._seed, self._name, lane, one), within[mine])
            else:
                chunk[mine] = self._permuted(one, within[mine])
        return epoch, chunk

    def _permuted(self, epoch: int, within: NDArray[np.int64]) -> NDArray[np.int64]:
        """Chunks at places of an epoch that all lanes share; small permutations are kept whole, for all lanes."""
        n, tables = self._chunks.count, self._tables
        if n > _TABLE_CHUNKS:
            return permute(n, make_key("chunks", self._seed, self._name, epoch), within)
        if epoch not in tables:
            tables[epoch] = permute(n, make_key("chunks", self._seed, self._name, epoch), np.arange(n))
            if len(tables) > max(2, _TABLE_CHUNKS // n):
                tables.popitem(last=False)
        return tables[epoch][within]


class _Groups:
    """The order of the chunks of a source with row groups, where a row costs the decoding of its group.

    The row groups of an epoch are put in a permuted row and cut into windows of a few; the chunks of a window are
    permuted together. In that row of chunks those of a group lie near each other. It is dealt to lanes in runs, not one
    by one, so that consecutive draws of a lane come from one window. What `LANES_BYTES` leaves a lane is

    - at least a row group: then a lane has one run an epoch, and walks groups of its own. Each is decoded once, but
      those at the ends of runs;
    - less: then as many lanes as needed walk a group side by side, each in a run of its share, and every rank that
      hosts one of them decodes it.

    Measured with text in row groups of 7.6 MiB, 1,000 rows; two sources, a window of 256 rows, the first 12 to 60
    Mtoken, CPU s per Mtoken on a busy machine, with `LANES_BYTES` of 128, 256 and 512 MiB, beside JSONL: 64 lanes on 1
    rank 0.082, 0.096, 0.128 (0.066), on 8 ranks 0.063, 0.063, 0.069 (0.064), on 64 ranks 0.104, 0.070, 0.081 (0.062);
    one lane of one 0.067 (0.057). Simulated over 6,000 rows a lane of 1,500 such groups: a rank with 64 lanes decodes
    1.1, 1.2, 1.4 times what it visits, one with 8 lanes 1.5, 1.4, 1.3 times, one with one lane 5.3, 4.2, 1.2 times.
    Drawn as from JSONL, the 7 chunks of a lane's group of draws would lie in 7 row groups, each decoded by 32 ranks.

    Args:
        chunks: the source's chunk table.
        lanes: number of lanes of the stream.

    Attributes:
        share: chunks that a lane may be amid.
    """

    def __init__(self, chunks: ChunkTable, lanes: int) -> None:
        self._chunks, self._lanes = chunks, lanes
        per_lane = LANES_BYTES // lanes
        self.share = max(1, per_lane * chunks.count // chunks.bytes)
        self._run = self.share if per_lane < chunks.group_bytes else chunks.count
        self._width = max(1, MIXED_BYTES // (lanes * chunks.group_bytes))
        self._tables: OrderedDict[tuple[str | int, ...], list[NDArray[np.int64]]] = OrderedDict()

    def align(self, draws: int) -> None:
        """Let a run hold whole groups of `draws`, so that the rows of one are of one run in the first epoch."""
        self._run = max(draws, self._run - self._run % draws)

    def dealt(self, within: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the row of chunks of draws number `within` of an epoch: turn after turn, a run for each lane."""
        per_turn = self._run * self._lanes
        start, lane = within // per_turn * per_turn, within % self._lanes
        size = np.minimum(per_turn, self._chunks.count - start)  # the last turn is shorter
        before = lane * (size // self._lanes) + np.minimum(lane, size % self._lanes)
        return start + before + (within - start) // self._lanes

    def chunks(self, place: NDArray[np.int64], *who: str | int) -> NDArray[np.int64]:
        """The chunks at places of the row of `who`: seed, source, perhaps lane, epoch."""
        order, ends, windows = self._table(*who)
        window = np.searchsorted(windows, place, side="right") - 1
        at = np.empty_like(place)
        for one in np.unique(window).tolist():
            mine, start, size = window == one, windows[one], int(windows[one + 1] - windows[one])
            key = make_key("group chunks", int(who[0]), *who[1:], one)
            at[mine] = start + permute(size, key, place[mine] - start)
        group = np.searchsorted(ends, at, side="right")
        part = order[group]
        return self._chunks.first[part] + at - (ends[group] - self._chunks.parts[part])

    def _table(self, *who: str | int) -> list[NDArray[np.int64]]:
        """The permuted row of groups, where each ends in the row of chunks, and where each window starts and the last
        ends: O(row groups), the last two of which are kept."""
        if who not in self._tables:
            count = len(self._chunks.parts)
            order = permute(count, make_key("groups", int(who[0]), *who[1:]), np.arange(count))
            ends = np.cumsum(self._chunks.parts[order])
            starts = ends - self._chunks.parts[order]
            self._tables[who] = [order, ends, np.append(starts[:: self._width], self._chunks.count)]
            if len(self._tables) > 2:
                self._tables.popitem(last=False)
        return self._tables[who]
