"""Source order: which row of a source a lane visits when. A pure function; no state, no I/O.

A source of `n` chunks is drawn for ever: draw `p` is chunk `perm(p mod n)` of epoch `p // n`, and lane `l` of `L` takes
draws `l, l + L, l + 2L, ...`. Draws are taken in groups of `K`; the rows of a group are visited in one permuted order.
A place in a lane's source is therefore `(group, index)`. The order inside a source depends on its own catalogue, the
seed, the number of lanes and the shuffle window: never on another source, nor on any weight.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zephon.catalogue import ChunkTable
from zephon.keyed import make_key, permute

ORDER_VERSION = 1
"""Raised whenever the same recipe and data would give another order. Stored in every checkpoint."""

_TABLE_CHUNKS = 65536
"""Chunks up to which a permutation is kept as a table (512 KiB): 30 numbers cost 200 us to permute, 5 us to look up."""


@dataclass(frozen=True, slots=True)
class Group:
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
        self.shared = chunks.count < lanes
        """True when there are fewer chunks than lanes, so that every lane walks all of them by itself."""
        most = chunks.count if self.shared else chunks.count // lanes
        self.draws_per_group = max(1, min(window // chunks.rows_per_chunk, most))
        self.groups = None if self._draws_in_all is None else -(-self._draws_in_all // self.draws_per_group)
        """Number of groups of a lane; None for ever."""
        self.patience = 2 * chunks.count if self._shuffled else chunks.count
        """Draws after which a lane has seen every chunk that it ever sees, unless `by_chance`."""
        self.by_chance = self._shuffled and not self.shared and lanes > 1
        """True when the permutation of an epoch decides which chunks a lane sees: each comes, but who knows when."""
        self._tables: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

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
        place = k if self.shared else lane + k * self._lanes
        epoch, within = place // n, place % n
        if not self._shuffled:
            return epoch, (lane + within) % n if self.shared else within
        chunk = np.empty_like(within)
        for one in np.unique(epoch).tolist():
            mine = epoch == one
            if self.shared:
                chunk[mine] = permute(n, make_key("lane chunks", self._seed, self._name, lane, one), within[mine])
            else:
                chunk[mine] = self._permuted(one, within[mine])
        return epoch, chunk

    def _permuted(self, epoch: int, within: NDArray[np.int64]) -> NDArray[np.int64]:
        """Chunks at places of an epoch that all lanes share; small permutations are kept whole, for all lanes."""
        n, key = self._chunks.count, make_key("chunks", self._seed, self._name, epoch)
        if n > _TABLE_CHUNKS:
            return permute(n, key, within)
        if epoch not in self._tables:
            self._tables[epoch] = permute(n, key, np.arange(n))
            if len(self._tables) > 2:  # lanes are at most two epochs apart nearly always
                self._tables.popitem(last=False)
        return self._tables[epoch][within]
