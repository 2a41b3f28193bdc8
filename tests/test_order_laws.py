"""Keyed permutations and the order of a source: pure functions, checked against the words of the design."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections import Counter
from itertools import chain, pairwise, permutations
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon.catalogue import Catalogue, ChunkTable, Shard
from zephon.keyed import make_key, permute
from zephon.order import SourceOrder


def law(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


def permuted(n: int, purpose: str = "test", seed: int = 0, *parts: str | int) -> list[int]:
    return permute(n, make_key(purpose, seed, *parts), np.arange(n, dtype=np.int64)).tolist()


# --- keyed permutations --------------------------------------------------------------------------------------------


@law(150)
@given(st.integers(1, 70) | st.integers(1, 4000), st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_permutation_is_a_bijection(n: int, seed: int, part: int) -> None:
    found = permute(n, make_key("rows", seed, "name", part), np.arange(n, dtype=np.int64))
    assert found.dtype == np.int64
    assert sorted(found.tolist()) == list(range(n))


def test_permutation_is_a_bijection_for_every_small_size() -> None:
    for n in range(1, 300):
        assert sorted(permuted(n, "small", n)) == list(range(n))


@law(60)
@given(st.integers(1, 10**15), st.integers(0, 99), st.data())
def test_permutation_is_pointwise_so_any_part_of_it_can_be_asked_for(n: int, seed: int, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    key = make_key("far", seed)
    together = permute(n, key, np.array(index, dtype=np.int64)).tolist()
    assert together == [permute(n, key, np.array([i], dtype=np.int64)).tolist()[0] for i in index]
    assert all(0 <= value < n for value in together)
    assert len(set(together)) == len(set(index))


def test_permutation_all_orders_of_three_and_four_items_appear_about_equally_often() -> None:
    for n, tries in ((3, 1200), (4, 2400)):
        seen = Counter(tuple(permuted(n, "orders", seed)) for seed in range(tries))
        assert set(seen) == set(permutations(range(n)))
        expected = tries / len(seen)
        # chi-square: 23 degrees of freedom at most; 60 is far beyond what an even generator gives
        assert sum((count - expected) ** 2 / expected for count in seen.values()) < 60


def test_permutation_moves_things_far_and_evenly() -> None:
    n = 1000
    for seed in range(5):
        found = permuted(n, "far", seed)
        assert sum(a == b for a, b in enumerate(found)) < 12  # one fixed point is expected
        assert sum(abs(b - a) == 1 for a, b in pairwise(found)) < 15  # two are expected
        assert abs(np.corrcoef(np.arange(n), found)[0, 1]) < 0.15


def test_keys_differ_by_purpose_seed_and_each_part() -> None:
    seeds = [0, 1, 2, 255, 256, 2**32, 2**63 - 1]
    parts: list[tuple[str | int, ...]] = [
        (), ("",), ("a",), ("ab",), ("a", "b"), ("b", "a"), ("", "ab"), (0,), (1,), (256,), (2**40,), ("1",), ("0",),
        (0, 0), (1, 2), (12,), ("a", 1), ("a1",), (1, "a"), ("é",), ("e",), ("a\0",), ("a\0b",),
    ]  # fmt: skip
    keys = {
        make_key(purpose, seed, *rest).tobytes()
        for purpose in ("chunks", "rows", "chunksa", "")
        for seed in seeds
        for rest in parts
    }
    assert len(keys) == 4 * len(seeds) * len(parts)


def test_keys_are_the_same_every_time() -> None:
    assert make_key("rows", 3, "name", 4).tobytes() == make_key("rows", 3, "name", 4).tobytes()
    assert permuted(500, "rows", 3, "name", 4) == permuted(500, "rows", 3, "name", 4)


# --- the order of a source -----------------------------------------------------------------------------------------

Draw = tuple[int, int]  # epoch, chunk


def groups(order: SourceOrder, lane: int, count: int) -> list[list[tuple[int, int, int]]]:
    """The first groups of a lane, as (epoch, chunk, row)."""
    found = []
    for number in range(count):
        group = order.group(lane, number)
        assert {group.epoch.dtype, group.chunk.dtype, group.row.dtype} == {np.dtype(np.int64)}
        found.append(list(zip(group.epoch.tolist(), group.chunk.tolist(), group.row.tolist(), strict=True)))
    return found


def draws(group: list[tuple[int, int, int]]) -> list[Draw]:
    """The draws of a group, in order of their first row."""
    return list(dict.fromkeys((epoch, chunk) for epoch, chunk, _ in group))


@st.composite
def tables(draw: st.DrawFn, max_shards: int = 4, max_rows: int = 60) -> tuple[list[int], int]:
    shards = draw(st.lists(st.integers(0, max_rows), min_size=1, max_size=max_shards).filter(any))
    return shards, draw(st.integers(1, 12))


def naive_chunks(shards: list[int], rows: int) -> list[int]:
    """The sizes of all chunks; a chunk lies in one shard."""
    return [min(rows, total - start) for total in shards for start in range(0, total, rows)]


WINDOWS = st.sampled_from([0, 1, 3, 8, 30, 256])
LANES = st.sampled_from([1, 2, 3, 4, 7, 16])
SEEDS = st.integers(0, 2**40)


@law(60)
@given(tables())
def test_chunks_are_consecutive_rows_of_one_shard(table: tuple[list[int], int]) -> None:
    shards, rows = table
    chunks = ChunkTable(shards, rows)
    sizes = naive_chunks(shards, rows)
    assert chunks.count == len(sizes)
    index = np.arange(len(sizes), dtype=np.int64)
    assert chunks.sizes(index).tolist() == sizes
    # 'rows' gives the row in the source: each chunk goes on where the one before it ended
    chunk = np.repeat(index, sizes)
    row = np.concatenate([np.arange(size, dtype=np.int64) for size in sizes])
    assert chunks.rows(chunk, row).tolist() == list(range(sum(shards)))


@law(120)
@given(tables(), LANES, WINDOWS, SEEDS)
def test_group_is_k_whole_draws_and_its_rows_a_permutation_of_their_rows(
    table: tuple[list[int], int], lanes: int, window: int, seed: int
) -> None:
    shards, rows = table
    sizes = naive_chunks(shards, rows)
    n = len(sizes)
    order = SourceOrder("name", ChunkTable(shards, rows), seed=seed, lanes=lanes, window=window)
    k = max(1, min(window // rows, n // lanes if n >= lanes else n))
    assert order.draws_per_group == k
    for lane in {0, lanes - 1, lanes // 2}:
        for group in groups(order, lane, 4):
            drawn = draws(group)
            assert len(drawn) == k  # none twice, although a group may reach over an epoch's end
            assert sorted(group) == sorted((e, c, row) for e, c in drawn for row in range(sizes[c]))


@law(120)
@given(tables(), LANES, WINDOWS, SEEDS)
def test_epoch_all_lanes_together_draw_every_chunk_exactly_once(
    table: tuple[list[int], int], lanes: int, window: int, seed: int
) -> None:
    shards, rows = table
    n = len(naive_chunks(shards, rows))
    if n < lanes:
        lanes = n
    order = SourceOrder("name", ChunkTable(shards, rows), seed=seed, lanes=lanes, window=window)
    k = order.draws_per_group
    epochs = 3
    whole: list[list[Draw]] = [[] for _ in range(epochs)]
    for lane in range(lanes):
        mine: list[Draw] = []
        owed = len(range(lane, epochs * n, lanes))  # draws p = lane, lane + L, ... below 3 n
        for group in groups(order, lane, -(-owed // k)):
            mine += sorted(draws(group))  # the row order hides the order of draws inside a group, not their epochs
        assert [epoch for epoch, _ in mine[:owed]] == [p // n for p in range(lane, epochs * n, lanes)]
        for epoch, chunk in mine:
            if epoch < epochs:
                whole[epoch].append((epoch, chunk))
    for epoch in range(epochs):
        # n need not be a multiple of L: lanes take n // L draws of this epoch or one more
        assert sorted(whole[epoch]) == [(epoch, chunk) for chunk in range(n)]


@law(80)
@given(tables(max_shards=2, max_rows=12), st.sampled_from([3, 5, 8, 16]), WINDOWS, SEEDS)
def test_epoch_with_fewer_chunks_than_lanes_each_lane_walks_all_of_them_in_each_epoch_of_its_own(
    table: tuple[list[int], int], lanes: int, window: int, seed: int
) -> None:
    shards, rows = table
    n = len(naive_chunks(shards, rows))
    if n >= lanes:
        lanes = n + 1
    order = SourceOrder("name", ChunkTable(shards, rows), seed=seed, lanes=lanes, window=window)
    for lane in range(lanes):
        mine = [draw for group in groups(order, lane, 3 * n) for draw in sorted(draws(group))]
        for epoch in range(3):
            assert sorted(mine[epoch * n : (epoch + 1) * n]) == [(epoch, chunk) for chunk in range(n)]


@law(80)
@given(tables(), LANES, SEEDS)
def test_window_0_is_the_stored_order(table: tuple[list[int], int], lanes: int, seed: int) -> None:
    shards, rows = table
    sizes = naive_chunks(shards, rows)
    n = len(sizes)
    order = SourceOrder("name", ChunkTable(shards, rows), seed=seed, lanes=lanes, window=0)
    for lane in range(lanes):
        for number, group in enumerate(groups(order, lane, 2 * n + 1 if n < lanes else 6)):
            p = lane + number * lanes if n >= lanes else number
            chunk = p % n if n >= lanes else (lane + number) % n
            assert group == [(p // n, chunk, row) for row in range(sizes[chunk])]


@law(60)
@given(tables(), LANES, WINDOWS, SEEDS)
def test_order_is_a_pure_function(table: tuple[list[int], int], lanes: int, window: int, seed: int) -> None:
    shards, rows = table

    def fresh() -> SourceOrder:
        return SourceOrder("name", ChunkTable(list(shards), rows), seed=seed, lanes=lanes, window=window)

    used = fresh()
    forward = {(lane, number): groups(used, lane, 5)[number] for lane in range(lanes) for number in range(5)}
    backward = fresh()
    for lane in reversed(range(lanes)):
        for number in reversed(range(5)):
            group = backward.group(lane, number)
            assert (
                list(zip(group.epoch.tolist(), group.chunk.tolist(), group.row.tolist(), strict=True))
                == (forward[lane, number])
            )


def first_draws(name: str, seed: int, lanes: int, n: int = 64, count: int = 16) -> list[list[tuple[int, int, int]]]:
    order = SourceOrder(name, ChunkTable([n], 1), seed=seed, lanes=lanes, window=1)
    return [list(chain.from_iterable(groups(order, lane, count))) for lane in range(lanes)]


def test_order_is_keyed_by_seed_name_epoch_and_lane() -> None:
    base = first_draws("name", 1, 2)
    assert base == first_draws("name", 1, 2)
    assert base != first_draws("name", 2, 2)
    assert base != first_draws("eman", 1, 2)
    order = SourceOrder("name", ChunkTable([40], 1), seed=1, lanes=1, window=1)
    walk = [group[0] for group in groups(order, 0, 80)]
    assert [c for _, c, _ in walk[:40]] != [c for _, c, _ in walk[40:]], "each epoch has its own permutation"
    few = SourceOrder("name", ChunkTable([12], 1), seed=1, lanes=16, window=1)
    walks = {tuple(group[0][1] for group in groups(few, lane, 12)) for lane in range(16)}
    assert len(walks) == 16, "with fewer chunks than lanes each lane has its own permutation"


def test_lanes_that_are_epochs_apart_share_one_permutation_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def noted(n: int, key: Any, index: Any) -> Any:
        made.append(n)
        return permute(n, key, index)

    monkeypatch.setattr("zephon.order.permute", noted)
    order = SourceOrder("name", ChunkTable([4096], 4), seed=3, lanes=256, window=16)
    for turn in range(6):
        for lane in (0, 100, 255):
            order.group(lane, turn % 3 * 4)  # 4 chunks of a lane are an epoch
    assert made.count(1024) == 3


def test_rows_of_a_group_are_mixed_across_its_chunks() -> None:
    order = SourceOrder("name", ChunkTable([4096], 16), seed=3, lanes=2, window=128)
    assert order.draws_per_group == 8
    seen = set()
    for number, group in enumerate(groups(order, 0, 4)):
        assert len(group) == 128
        assert [c for _, c, _ in group] != sorted(c for _, c, _ in group)
        changes = sum(a[1] != b[1] for a, b in pairwise(group))
        assert changes > 80, f"group {number} visits chunk after chunk"  # about 111 when visited at random
        seen.add(tuple(row for _, _, row in group))
    assert len(seen) == 4, "each group has its own row order"


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_late_epoch_is_as_cheap_as_the_first(lanes: int) -> None:
    order = SourceOrder("name", ChunkTable([1000], 10), seed=3, lanes=lanes, window=40)
    far = 10**12
    group = order.group(lanes - 1, far)
    k, n = order.draws_per_group, 100
    expected = sorted((lanes - 1 + lanes * (far * k + i)) // n for i in range(k))
    drawn = sorted(set(zip(group.epoch.tolist(), group.chunk.tolist(), strict=True)))
    assert [epoch for epoch, _ in drawn] == expected


# --- row groups ----------------------------------------------------------------------------------------------------

MIB = 1024 * 1024


@st.composite
def grouped(draw: st.DrawFn) -> ChunkTable:
    """Row groups of few rows and of up to 200 MiB, so that lanes share them or have several of their own."""
    rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    steps = draw(st.lists(st.integers(1, 12), min_size=len(rows), max_size=len(rows)))
    size = draw(st.sampled_from([1, 64 * 1024, 3 * MIB, 40 * MIB, 200 * MIB]))
    sizes = draw(st.lists(st.integers(1, size), min_size=len(rows), max_size=len(rows)))
    return ChunkTable(rows, steps, sizes)


def rows_of(table: ChunkTable, group: list[tuple[int, int, int]]) -> list[int]:
    _, chunk, row = np.array(group, dtype=np.int64).T
    return table.rows(chunk, row).tolist()


@law(60)
@given(grouped())
def test_chunks_lie_in_one_row_group_and_cover_all_rows(table: ChunkTable) -> None:
    index = np.arange(table.count)
    sizes = table.sizes(index)
    rows = table.rows(np.repeat(index, sizes), np.concatenate([np.arange(size) for size in sizes.tolist()]))
    assert rows.tolist() == list(range(rows.size))
    part = table.part_of(index)
    assert Counter(part.tolist()) == Counter(dict(enumerate(table.parts.tolist())))
    assert (sizes <= table.steps[part]).all()


@law(60)
@given(grouped(), LANES, WINDOWS, SEEDS)
def test_row_groups_every_epoch_visits_every_row_exactly_once_over_all_lanes(
    table: ChunkTable, lanes: int, window: int, seed: int
) -> None:
    n, lanes = table.count, min(lanes, table.count)
    order = SourceOrder("name", table, seed=seed, lanes=lanes, window=window)
    assert not order.walks_all
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for lane in range(lanes):
        mine: list[Draw] = []
        for group in groups(order, lane, -(-len(range(lane, 3 * n, lanes)) // order.draws_per_group)):
            mine += sorted(draws(group))
            for place, row in zip(group, rows_of(table, group), strict=True):
                seen.setdefault(place[0], []).append(row)
        # as without row groups: lane l takes draws l, l + L, ... of an endless row of epochs
        assert [epoch for epoch, _ in mine][: 3 * n // lanes] == [p // n for p in range(lane, 3 * n, lanes)][
            : 3 * n // lanes
        ]
    total = int(table.sizes(np.arange(n)).sum())
    for epoch in range(3):
        assert sorted(seen[epoch]) == list(range(total))


@law(40)
@given(grouped(), st.sampled_from([3, 8, 64]), st.sampled_from([1, 8, 256]), SEEDS)
def test_row_groups_with_fewer_chunks_than_lanes_each_lane_walks_all_of_them(
    table: ChunkTable, lanes: int, window: int, seed: int
) -> None:
    n = table.count
    lanes = max(lanes, n + 1)
    order = SourceOrder("name", table, seed=seed, lanes=lanes, window=window)
    for lane in (0, lanes - 1):
        count = -(-3 * n // order.draws_per_group)
        mine = [draw for group in groups(order, lane, count) for draw in sorted(draws(group))]
        for epoch in range(3):
            assert sorted(mine[epoch * n : (epoch + 1) * n]) == [(epoch, chunk) for chunk in range(n)]


@law(40)
@given(grouped(), LANES, st.sampled_from([1, 8, 256]), SEEDS, st.randoms(use_true_random=False))
def test_row_groups_the_order_is_a_pure_function_of_lane_and_group(
    table: ChunkTable, lanes: int, window: int, seed: int, random: Random
) -> None:
    forward = SourceOrder("name", table, seed=seed, lanes=lanes, window=window)
    known = {(lane, number): group for lane in range(lanes) for number, group in enumerate(groups(forward, lane, 6))}
    again = SourceOrder("name", table, seed=seed, lanes=lanes, window=window)
    other = SourceOrder("other", ChunkTable([9] * 5, [2] * 5, [MIB] * 5), seed=seed, lanes=lanes, window=window)
    places = list(known)
    random.shuffle(places)
    for lane, number in places:  # asked in any order, with other sources beside it
        other.group(lane, number)
        found = again.group(lane, number)
        assert (
            list(zip(found.epoch.tolist(), found.chunk.tolist(), found.row.tolist(), strict=True))
            == (known[lane, number])
        )


@law(60)
@given(grouped(), LANES, SEEDS)
def test_row_groups_window_0_is_the_stored_order(table: ChunkTable, lanes: int, seed: int) -> None:
    order = SourceOrder("name", table, seed=seed, lanes=min(lanes, table.count), window=0)
    for lane in range(min(lanes, table.count)):
        for number, group in enumerate(groups(order, lane, 5)):
            p = lane + number * min(lanes, table.count)
            assert draws(group) == [(p // table.count, p % table.count)]


def even(count: int, chunks: int, size: int) -> ChunkTable:
    """`count` row groups of `chunks` chunks of 32 rows, `size` bytes each."""
    return ChunkTable([32 * chunks] * count, [32] * count, [size] * count)


def walks(table: ChunkTable, lanes: int, window: int = 256) -> list[list[int]]:
    """The row groups that each lane draws from in the first epoch, chunk by chunk, in order of its groups of draws."""
    order = SourceOrder("name", table, seed=5, lanes=lanes, window=window)
    count = table.count // lanes // order.draws_per_group
    part = table.part_of(np.arange(table.count)).tolist()
    return [[part[c] for g in groups(order, lane, count) for _, c in sorted(draws(g))] for lane in range(lanes)]


def test_lanes_with_room_for_a_row_group_walk_their_own() -> None:
    table = even(400, 16, 4 * MIB)
    found = walks(table, 64)  # 4 MiB for each of 64 lanes
    pairs = sum(len(set(walk)) for walk in found)
    assert pairs <= 400 + 63  # a group is decoded once, but for one at each border of two lanes
    for walk in found:  # in groups of 8 draws
        for group in set(walk):
            first, last = walk.index(group) // 8, (len(walk) - 1 - walk[::-1].index(group)) // 8
            assert last - first <= 2, "a lane comes back to a group"


def test_lanes_share_row_groups_that_are_larger() -> None:
    table = even(100, 256, 64 * MIB)  # 4 MiB of each are a lane's: 16 lanes walk a group side by side
    order = SourceOrder("name", table, seed=5, lanes=64, window=256)
    part = table.part_of(np.arange(table.count))
    for turn in range(10):  # of two groups of 8 draws
        drawn = [
            set(part[order.group(lane, number).chunk].tolist())
            for lane in range(64)
            for number in (2 * turn, 2 * turn + 1)
        ]
        assert len(set().union(*drawn)) <= 5  # 256 MiB, and one for the border
        assert sum(map(len, drawn)) <= 128 + 5


def test_a_single_lane_mixes_several_row_groups() -> None:
    (walk,) = walks(even(64, 32, 8 * MIB), 1)
    for start in range(0, len(walk), 4 * 32):
        assert len(set(walk[start : start + 4 * 32])) == 4  # 32 MiB are permuted together
    mixed = [len(set(walk[start : start + 8])) for start in range(0, len(walk), 8)]
    assert sum(mixed) / len(mixed) > 3  # 3.6 at random


def test_row_groups_that_are_one_chunk_are_permuted_like_chunks() -> None:
    found = walks(even(1000, 1, MIB), 5)
    assert sorted(group for walk in found for group in walk) == list(range(1000))
    for walk in found:
        assert abs(np.corrcoef(np.arange(len(walk)), walk)[0, 1]) < 0.3
        assert sum(abs(a - b) == 1 for a, b in pairwise(walk)) < 5


def test_a_lane_mixes_no_more_rows_than_it_has_room_for() -> None:
    assert (
        SourceOrder("x", even(900, 16, 4 * MIB), seed=1, lanes=64, window=10_000).draws_per_group == 16
    )  # n // L = 225
    assert SourceOrder("x", even(900, 16, 4 * MIB), seed=1, lanes=64, window=256).draws_per_group == 8
    assert SourceOrder("x", ChunkTable([14400], 32), seed=1, lanes=1, window=10_000).draws_per_group == 312


def test_order_memory_is_that_of_the_row_groups() -> None:
    """10**15 rows in 50 groups: nothing may be as long as the chunks are many, in any epoch."""
    table = ChunkTable([2 * 10**13] * 50, [1000] * 50, [2**50] * 50)
    order = SourceOrder("name", table, seed=1, lanes=64, window=4000)
    tracemalloc.start()
    for number in (0, 1, 10**6, 10**9, 10**12):
        for lane in (0, 63):
            assert len(order.group(lane, number).row) == 4000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * MIB
    held = sum(array.size for tables in (order._groups._tables.values() if order._groups else ()) for array in tables)
    assert held <= 2 * (3 * 50 + 1)


GOLDEN = {
    "own": [[13, 25], [6, 14], [5, 16], [15, 17], [1, 32], [29, 0]],
    "shared": [[11, 1], [15, 0], [44, 41], [10, 5], [2, 6], [45, 36]],
    "fewer chunks than lanes": [[3, 2], [0, 1], [4, 5], [2, 3], [5, 4], [0, 1]],
    "uneven": [[10, 0, 9], [4, 1, 8], [7, 2, 1], [5, 4, 8], [10, 0, 9], [9, 4, 3]],
}


def test_golden_order_of_row_groups() -> None:
    """The same on every machine and in every version; a change needs a new ORDER_VERSION."""
    found = {}
    for name, table, lanes in [
        ("own", even(9, 4, 3 * MIB), 2),
        ("shared", even(3, 16, 300 * MIB), 4),
        ("fewer chunks than lanes", even(3, 2, 3 * MIB), 8),
        ("uneven", ChunkTable([5, 70, 1, 33], [5, 9, 1, 33], [100, 4 * MIB, 7, MIB]), 3),
    ]:
        order = SourceOrder("name", table, seed=7, lanes=lanes, window=64)
        both = [*groups(order, 0, 3), *groups(order, lanes - 1, 3)]
        found[name] = [list(dict.fromkeys(chunk for _, chunk, _ in group)) for group in both]
    assert found == GOLDEN


# --- the catalogue -------------------------------------------------------------------------------------------------


def shard(name: str, rows: tuple[int, ...], sizes: tuple[int, ...]) -> Shard:
    return Shard(name, f"/x/{name}", sum(rows), sum(sizes), "0" * 64, rows, sizes)


def cut(shards: list[Shard], lanes: int, chunk_rows: int | None = None) -> list[int]:
    table = Catalogue.of(shards, lanes=lanes, chunk_rows=chunk_rows).chunks
    return table.sizes(np.arange(table.count)).tolist()


def test_a_small_row_group_is_a_chunk_and_a_large_one_is_cut() -> None:
    shards = [shard("a", (1000, 0, 500), (MIB, 0, MIB + 1)), shard("b", (600,), (10 * MIB,))]
    # 2,100 rows of 12 MiB: 43 rows are 256 KiB
    assert cut(shards, 1) == [*[43] * 23, 11, *[43] * 11, 27, *[43] * 13, 41]  # a quarter of 2,100 is less than 1,000
    more = [*shards, shard("c", (2500,), (25 * MIB,))]
    assert cut(more, 1)[0] == 1000
    assert cut(more, 1)[1:3] == [31, 31]
    assert cut(more, 64)[0] == 4600 // 256
    assert cut(more, 1, chunk_rows=700)[:3] == [700, 300, 500]


def test_fingerprint_holds_the_row_groups() -> None:
    def digest(*shards: Shard, lanes: int = 1, chunk_rows: int | None = None) -> Any:
        return Catalogue.of(list(shards), lanes=lanes, chunk_rows=chunk_rows).fingerprint["sha256"]

    base = digest(shard("a", (10, 10), (50, 50)))
    others = [
        digest(shard("a", (11, 9), (50, 50))),
        digest(shard("a", (10, 10), (49, 51))),
        digest(shard("a", (10, 10), (50, 50)), chunk_rows=7),
        digest(Shard("a", "/x/a", 20, 100, "0" * 64)),
    ]
    assert len({base, *others}) == 5
    assert base == digest(Shard("a", "/elsewhere/a", 20, 100, "0" * 64, (10, 10), (50, 50)))


def test_fingerprint_of_a_source_without_row_groups_is_as_it_always_was() -> None:
    shards = [Shard("a.jsonl", "/x/a.jsonl", 20, 100, "0" * 64), Shard("b.jsonl", "/x/b.jsonl", 5, 30, "1" * 64)]
    line = "".join(f"{s.name}\0{s.rows}\0{s.bytes}\0{s.sha256}\n" for s in shards)
    assert Catalogue.of(shards, lanes=2, chunk_rows=None).fingerprint == {
        "shards": 2,
        "rows": 25,
        "bytes": 130,
        "chunk_rows": 3,
        "sha256": hashlib.sha256(line.encode()).hexdigest(),
    }
