"""Keyed permutations and the order of a source: pure functions, checked against the words of the design."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon.catalogue import ChunkTable
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
