"""The laws of best_fit: every piece once and whole, nothing lost, little open; alone, and in whole streams."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import (
    Fleet,
    LaneOracle,
    SourceSpec,
    World,
    best_fit_worlds,
    check_resumes,
    livable,
    make_texts,
    opened,
    plain_world,
    record_lists,
)

import zephon
from zephon.pack import MAX_OPEN_SEGMENTS, BestFit, Concat, Room
from zephon.types import Ref, Sample, Segment

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
Run = tuple[int, int, int]  # number of the sample, start, end
Bins = list[list[Run]]


def law(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=QUIET)


# --- the packer alone ----------------------------------------------------------------------------------------------


def sample(number: int, positions: int) -> Sample:
    return Sample(Ref(0, 0, 0, number, 0), positions, None)


def runs(segments: list[Segment]) -> list[Run]:
    return [(segment.sample.ref.row, segment.start, segment.end) for segment in segments]


def open_runs(packer: BestFit | Concat) -> Bins:
    return [runs(one) for one in packer.open]


def size(one: list[Run]) -> int:
    return sum(end - start for _, start, end in one)


def naive(seq_len: int, limit: int, bins: Bins, piece: Run) -> tuple[list[list[Run]], Bins]:
    """The rule, read slowly: what leaves as `piece` comes to `bins` (oldest first), and the bins after it."""
    number, start, end = piece
    gone = []
    while end - start >= seq_len:
        gone.append([(number, start, start + seq_len)])
        start += seq_len
    if start == end:
        return gone, bins
    room = [seq_len - size(one) for one in bins]
    least = min((left for left in room if left >= end - start), default=None)
    if least is None:
        bins = [*bins, [(number, start, end)]]
    else:
        at = room.index(least)
        bins = [*bins[:at], [*bins[at], (number, start, end)], *bins[at + 1 :]]
    room = [seq_len - size(one) for one in bins]
    if 0 in room or len(bins) > limit or sum(len(one) for one in bins) >= MAX_OPEN_SEGMENTS:
        at = room.index(min(room))
        return [*gone, bins[at]], [*bins[:at], *bins[at + 1 :]]
    return gone, bins


def offer(packer: BestFit | Concat, piece: Run, positions: int | None = None) -> list[list[Run]]:
    """Offers all of a piece; the plans that leave."""
    number, start, end = piece
    one = sample(number, positions or end)
    plans = []
    while start < end:
        taken, plan = packer.offer(one, start, end)
        assert start < taken <= end
        assert plan is not None or taken == end, "a piece is only left over when a sequence leaves"
        start = taken
        if plan is not None:
            plans.append(runs(plan))
    return plans


def flushed(packer: BestFit | Concat) -> list[list[Run]]:
    plans = []
    while (plan := packer.flush()) is not None:
        plans.append(runs(plan))
        assert len(plans) < 2000
    return plans


@st.composite
def pieces(draw: st.DrawFn, seq_len: int) -> list[Run]:
    """Pieces as a mixer hands them over: whole documents, and parts of documents that others may part."""
    shape = draw(st.sampled_from(["any", "any", "tiny", "one", "same", "longer", "full"]))
    sizes = {
        "any": st.integers(1, 3) | st.integers(1, 3 * seq_len),
        "tiny": st.integers(1, min(3, seq_len)),
        "one": st.just(1),
        "same": st.just(draw(st.integers(1, seq_len))),
        "longer": st.integers(seq_len + 1, 4 * seq_len),
        "full": st.sampled_from([seq_len, 2 * seq_len]),
    }[shape]
    found: list[Run] = []
    waiting: list[Run] = []
    for number, count in enumerate(draw(st.lists(sizes, min_size=1, max_size=60))):
        if draw(st.integers(0, 3)):
            found.append((number, 0, count))
            continue
        parts = [(number, start, min(start + seq_len, count)) for start in range(0, count, seq_len)]
        found += [parts[0], *waiting]
        waiting = parts[1:]
    return found + waiting


SEQ_LENS = st.sampled_from([1, 2, 5, 8, 16, 64])
LIMITS = st.sampled_from([1, 2, 3, 8, 32])


@law(200)
@given(st.data(), SEQ_LENS, LIMITS)
def test_packer_follows_the_rule_step_by_step(data: st.DataObject, seq_len: int, limit: int) -> None:
    packer, bins = BestFit(Room(seq_len), limit), []
    assert list(packer.open) == []
    for piece in data.draw(pieces(seq_len)):
        expected, bins = naive(seq_len, limit, bins, piece)
        assert offer(packer, piece) == expected
        assert open_runs(packer) == bins
    order = sorted(bins, key=lambda one: -size(one))  # stable: the fullest first, the oldest of equals
    assert flushed(packer) == order
    assert list(packer.open) == []
    assert packer.flush() is None


@law(150)
@given(st.data(), SEQ_LENS, LIMITS)
def test_packer_delivers_every_piece_once_and_whole(data: st.DataObject, seq_len: int, limit: int) -> None:
    """Told without the rule: whatever it does, it must not lose, cut, repeat, overfill or hoard."""
    offered = data.draw(pieces(seq_len))
    packer = BestFit(Room(seq_len), limit)
    plans: list[list[Run]] = []
    for piece in offered:
        plans += offer(packer, piece)
        opened_now = open_runs(packer)
        assert len(opened_now) <= limit
        assert sum(map(len, opened_now)) < MAX_OPEN_SEGMENTS
        assert all(0 < size(one) < seq_len for one in opened_now), "a full sequence leaves at once"
    plans += flushed(packer)
    assert all(0 < size(plan) <= seq_len for plan in plans)
    expected: list[Run] = []  # a piece longer than a sequence is full sequences and a remainder
    for number, start, end in offered:
        expected += [(number, at, min(at + seq_len, end)) for at in range(start, end, seq_len)]
    assert Counter(run for plan in plans for run in plan) == Counter(expected)


@pytest.mark.parametrize(("seq_len", "limit"), [(8192, 32), (8192, 1024), (512, 1024), (300, 1024), (2, 1024)])
@pytest.mark.parametrize("longest", [1, 3])
def test_packer_never_holds_more_than_its_bounds_of_tiny_documents(seq_len: int, limit: int, longest: int) -> None:
    rng = np.random.default_rng(seq_len + longest)
    packer, bins, plans = BestFit(Room(seq_len), limit), [], 0
    for number, count in enumerate(rng.integers(1, longest + 1, 1500).tolist()):
        expected, bins = naive(seq_len, limit, bins, (number, 0, count))
        assert offer(packer, (number, 0, count)) == expected
        plans += len(expected)
        if number % 50 == 0 or number > 1400:
            assert open_runs(packer) == bins
            assert len(bins) <= limit
            assert sum(map(len, bins)) < MAX_OPEN_SEGMENTS
    assert plans > 2


def test_packer_holds_up_to_its_limit_of_bins_that_hold_one_piece_each() -> None:
    packer = BestFit(Room(9), 1024)
    left = [offer(packer, (number, 0, 5)) for number in range(1000)]
    assert left[: MAX_OPEN_SEGMENTS - 1] == [[]] * (MAX_OPEN_SEGMENTS - 1)
    assert left[MAX_OPEN_SEGMENTS - 1 :] == [[[(number, 0, 5)]] for number in range(1001 - MAX_OPEN_SEGMENTS)], (
        "from the limit of segments on the oldest of equals"
    )
    assert len(packer.open) == MAX_OPEN_SEGMENTS - 1


def test_packer_worked_out_by_hand() -> None:
    packer = BestFit(Room(10), 3)
    steps: list[tuple[int, list[list[Run]], Bins]] = [
        (3, [], [[(0, 0, 3)]]),
        (8, [], [[(0, 0, 3)], [(1, 0, 8)]]),
        (4, [], [[(0, 0, 3), (2, 0, 4)], [(1, 0, 8)]]),
        (9, [], [[(0, 0, 3), (2, 0, 4)], [(1, 0, 8)], [(3, 0, 9)]]),
        (5, [[(3, 0, 9)]], [[(0, 0, 3), (2, 0, 4)], [(1, 0, 8)], [(4, 0, 5)]]),  # a fourth bin: the fullest leaves
        (2, [[(1, 0, 8), (5, 0, 2)]], [[(0, 0, 3), (2, 0, 4)], [(4, 0, 5)]]),  # least room; full
        (10, [[(6, 0, 10)]], [[(0, 0, 3), (2, 0, 4)], [(4, 0, 5)]]),
        (24, [[(7, 0, 10)], [(7, 10, 20)]], [[(0, 0, 3), (2, 0, 4)], [(4, 0, 5), (7, 20, 24)]]),
        (1, [[(4, 0, 5), (7, 20, 24), (8, 0, 1)]], [[(0, 0, 3), (2, 0, 4)]]),
        (7, [], [[(0, 0, 3), (2, 0, 4)], [(9, 0, 7)]]),
        (3, [[(0, 0, 3), (2, 0, 4), (10, 0, 3)]], [[(9, 0, 7)]]),  # two have the same room: the oldest
    ]
    for number, (count, plans, bins) in enumerate(steps):
        assert offer(packer, (number, 0, count)) == plans
        assert open_runs(packer) == bins
    assert flushed(packer) == [[(9, 0, 7)]]


def test_packer_the_fullest_that_leaves_may_be_the_newest() -> None:
    packer = BestFit(Room(10), 1)
    assert offer(packer, (0, 0, 6)) == []
    assert offer(packer, (1, 0, 9)) == [[(1, 0, 9)]]
    assert offer(packer, (2, 0, 6)) == [[(0, 0, 6)]]
    assert open_runs(packer) == [[(2, 0, 6)]]


@pytest.mark.parametrize("kind", ["best_fit", "concat"])
@law(80)
@given(st.data(), st.sampled_from([2, 5, 16]), LIMITS)
def test_packer_goes_on_from_its_open_bins(kind: str, data: st.DataObject, seq_len: int, limit: int) -> None:
    def new() -> BestFit | Concat:
        return BestFit(Room(seq_len), limit) if kind == "best_fit" else Concat(Room(seq_len), 1)

    offered = data.draw(pieces(seq_len))
    stop = data.draw(st.integers(0, len(offered)))
    first = new()
    for piece in offered[:stop]:
        offer(first, piece)
    saved = first.open
    kept = [tuple(one) for one in saved]
    rest = [offer(first, piece) for piece in offered[stop:]]
    assert saved == kept, "what was saved is not the packer's own"
    open_at_end, end = open_runs(first), flushed(first)
    assert saved == kept
    for _ in range(2):  # twice from the same lists: nothing is shared with a packer that goes on
        second = new()
        second.restore(saved)
        assert second.open == kept
        assert [offer(second, piece) for piece in offered[stop:]] == rest
        assert open_runs(second) == open_at_end
        assert flushed(second) == end
        assert saved == kept


@law(60)
@given(st.data(), st.sampled_from([5, 16]), LIMITS)
def test_packer_goes_on_in_the_middle_of_a_flush(data: st.DataObject, seq_len: int, limit: int) -> None:
    first = BestFit(Room(seq_len), limit)
    for piece in data.draw(pieces(seq_len)):
        offer(first, piece)
    for _ in range(data.draw(st.integers(0, len(first.open)))):
        first.flush()
    second = BestFit(Room(seq_len), limit)
    second.restore(first.open)
    assert flushed(second) == flushed(first)


# --- whole streams -------------------------------------------------------------------------------------------------


@law(40)
@given(best_fit_worlds(), st.integers(1, 5))
def test_conservation_every_record_is_what_a_naive_reading_of_the_design_says(world: World, count: int) -> None:
    oracles = [LaneOracle(world, lane) for lane in range(world.lanes)]
    padded = 0
    with opened(world) as stream:
        fleet = Fleet(stream, world.degrees[-1])
        for _ in range(count):
            records = fleet.records()
            assert records is not None
            for lane, mine in records.items():
                for record in mine:
                    assert {array.dtype for array in record.values()} == {np.dtype(np.int32)}
                    assert {array.shape for array in record.values()} == {(world.seq_len,)}
                    found = record_lists(record)
                    assert found == oracles[lane].record()
                    padded += found["labels"].count(-100)
        stats = fleet.stats()
    # drawn = delivered + open; delivered + padding = all there is in the records
    assert stats["records"] == count * world.batch
    assert stats["padding"] == padded
    assert stats["positions"] + padded == count * world.batch * world.seq_len
    for source in world.sources:
        assert stats["mixed"][source.name] == sum(oracle.mixed[source.name] for oracle in oracles)
    open_positions = sum(oracle.open_positions() for oracle in oracles)
    assert sum(stats["mixed"].values()) == stats["positions"] + open_positions


def whole_pieces(record: dict[str, list[int]]) -> list[list[int]]:
    """The runs of a record, each with its next token; the padding must be at the end and empty."""
    labels = record["labels"]
    used = labels.index(-100) if -100 in labels else len(labels)
    assert labels[used:] == [-100] * (len(labels) - used)
    assert not any(record["input"][used:])
    assert not any(record["positions"][used:])
    starts = [at for at in range(used) if record["positions"][at] == 0]
    assert used == 0 or starts[0] == 0
    return [[*record["input"][a:b], labels[b - 1]] for a, b in pairwise([*starts, used])]


@law(25)
@given(best_fit_worlds(), st.integers(1, 4))
def test_conservation_a_stream_delivers_documents_whole(world: World, count: int) -> None:
    """Told from the data alone: every run that is delivered is a whole document, or a full sequence or the rest of one
    that is longer than a sequence."""
    pieces: set[tuple[int, ...]] = set()
    for source in world.sources:
        for text in (text for shard in source.shards for text in shard if world.accepts(text)):
            tokens = world.tokens(text)
            for start in range(0, len(tokens) - 1, world.seq_len):
                pieces.add(tuple(tokens[start : start + world.seq_len + 1]))
    with opened(world) as stream:
        fleet = Fleet(stream, 1)
        for _ in range(count):
            for records in (fleet.records() or {}).values():
                for record in records:
                    for piece in whole_pieces(record_lists(record)):
                        assert tuple(piece) in pieces


@law(25)
@given(best_fit_worlds(), st.integers(1, 5))
def test_elastic_every_degree_that_divides_the_lanes_gives_the_same_digests(world: World, count: int) -> None:
    with opened(world) as stream:
        found = {degree: Fleet(stream, degree).steps(count) for degree in world.degrees}
    assert len({tuple(steps) for steps in found.values()}) == 1, found


@law(25)
@given(best_fit_worlds(), st.data())
def test_resumable_three_times_each_at_another_degree(world: World, data: st.DataObject) -> None:
    check_resumes(opened, world, data)


@law(12)
@given(best_fit_worlds(max_sources=2, max_lanes=4), st.data())
def test_resumable_after_every_step(world: World, data: st.DataObject) -> None:
    with opened(world) as stream:
        fleet, expected, states = Fleet(stream, 1), [], []
        for _ in range(8):
            states.append(fleet.state())
            expected.append(fleet.step())
        for stop, state in enumerate(states):
            degree = data.draw(st.sampled_from(world.degrees), label="degree")
            assert Fleet(stream, degree, state).steps(len(expected) - stop) == expected[stop:]


@law(20)
@given(best_fit_worlds(), st.integers(1, 6))
def test_bounded_a_lane_never_needs_more_than_4_kib(world: World, count: int) -> None:
    with opened(world) as stream:
        fleet = Fleet(stream, 1)
        for _ in range(count):
            fleet.step()
            assert max(len(value) for key, value in fleet.state().items() if key != "header") <= 4096


def lane_sizes(world: World, steps: int) -> int:
    """The largest state of a lane after any of `steps` steps; resumed in the middle, which must not matter."""
    largest = 0
    with opened(world) as stream:
        fleet = Fleet(stream, 1)
        state = fleet.state()
        for number in range(steps):
            if number == steps // 2:
                fleet = Fleet(stream, 1, state)
            fleet.step()
            state = fleet.state()
            largest = max(largest, *(len(value) for key, value in state.items() if key != "header"))
    return largest


@pytest.mark.parametrize("bins", [1, 32, 1024])
@pytest.mark.parametrize("chunk_rows", [1, 500])
def test_bounded_the_state_of_many_documents_of_one_to_three_tokens(bins: int, chunk_rows: int) -> None:
    sources = tuple(SourceSpec(f"s{i}", "1", (tuple(make_texts(i, 3000, 2, 0.1)),), chunk_rows) for i in range(6))
    world = World(sources=sources, lanes=1, seq_len=8192, window=256, tokenizer="eos", algorithm="best_fit", bins=bins)
    assert lane_sizes(world, 12) <= 4096


def test_bounded_the_state_of_tiny_documents_between_long_ones() -> None:
    sources = (
        SourceSpec("tiny", "1", (tuple(make_texts(1, 3000, 2, 0.1)),), 1),
        SourceSpec("half", "15", (("h" * 33,) * 3000,), 1),  # two do not fit in a sequence of 64
    )
    world = World(sources=sources, lanes=1, per_lane=8, seq_len=64, window=256, tokenizer="eos")
    assert 1000 < lane_sizes(replace(world, algorithm="best_fit", bins=1024), 60) <= 4096


STATES: dict[str, tuple[int, int, int, int | None, int]] = {
    # seq_len, bins, positions of every document, chunk_rows, rows
    "two bins of five": (9, 1024, 5, 1, 3000),
    "twelve in each of 32 bins": (135, 32, 11, 1, 3000),
    "many epochs": (135, 32, 11, 1, 5),
    "one in each of 399 bins": (256, 1024, 200, 1, 3000),
    "the same of a larger source": (256, 1024, 200, 1, 20000),
    "ends of long documents, all defaults": (4096, 32, 5 * 4096 + 330, None, 450),
    "ends of long documents": (4096, 32, 5 * 4096 + 330, 1, 450),
    "ends of long documents in 399 bins": (256, 1024, 65 * 256 + 129, 1, 450),
}


@pytest.mark.parametrize("name", STATES)
def test_bounded_the_state_of_hundreds_of_open_pieces(name: str) -> None:
    seq_len, bins, positions, chunk_rows, rows = STATES[name]
    sources = (SourceSpec("only", "1", (("a" * positions,) * rows,), chunk_rows),)
    per_lane = max(8, 8 * positions // seq_len)
    world = World(sources=sources, lanes=1, per_lane=per_lane, seq_len=seq_len, window=256, tokenizer="eos")
    assert 1000 < lane_sizes(replace(world, algorithm="best_fit", bins=bins), 60) <= 4096


# --- documents of one shape ----------------------------------------------------------------------------------------


def one_length(positions: list[int], **changes: Any) -> World:
    """Two sources of documents of the given positions, in stored order."""
    texts = tuple("abcdefghijklmnopqrstuvwxyz"[: count + 1] for count in positions)
    sources = tuple(SourceSpec(name, "1", (texts,), 1) for name in ("one", "two"))
    world = World(sources=sources, lanes=1, per_lane=2, seq_len=6, tokenizer="none", algorithm="best_fit")
    return livable(replace(world, **changes))


@pytest.mark.parametrize(
    ("positions", "padded"),
    [
        ([1], 0),
        ([2], 0),
        ([3], 0),
        ([4], 2),  # one a sequence
        ([5], 1),
        ([6], 0),
        ([12], 0),
        ([18, 24], 0),
        ([9], 0),  # a full sequence, and halves
        ([4, 2], 0),
        ([5, 1], 0),
    ],
)
def test_shape_how_much_is_padded(positions: list[int], padded: int) -> None:
    world = one_length(positions)
    with opened(world) as stream:
        fleet = Fleet(stream, 1)
        fleet.steps(60)
        stats = fleet.stats()
    assert stats["padding"] == padded * stats["records"]


def test_shape_best_fit_pads_little_on_real_lengths() -> None:
    with opened(plain_world(algorithm="best_fit")) as stream:
        fleet = Fleet(stream, 1)
        fleet.steps(60)
        stats = fleet.stats()
    assert 0 <= stats["padding"] < 0.02 * (stats["padding"] + stats["positions"])


# --- too long ------------------------------------------------------------------------------------------------------

LONG = World(
    sources=(
        SourceSpec("short", "1", (("abc", "defg", "hi"),), 1),
        SourceSpec("mixed", "1", (("abcdefg", "A" * 8, "B" * 9, "C" * 40), ("xy",)), 1),
    ),
    lanes=1,
    seq_len=7,
    tokenizer="none",
    algorithm="best_fit",
)


def test_too_long_drop_leaves_out_whole_documents_before_the_mix_and_counts_them() -> None:
    world = replace(LONG, too_long="drop")
    assert [world.accepts("x" * letters) for letters in (1, 2, 8, 9)] == [False, True, True, False]
    with opened(world) as stream:
        fleet = Fleet(stream, 1)
        seen: Counter[int] = Counter()
        for _ in range(60):
            for records in (fleet.records() or {}).values():
                seen.update(token for record in records for token in record["input"].tolist())
        stats = fleet.stats()
    assert seen[ord("A")]
    assert not seen[ord("B")]
    assert not seen[ord("C")]
    dropped = stats["dropped"]["mixed"]
    turns = stats["mixed"]["mixed"] / (6 + 7 + 1)
    assert abs(dropped["too long"] - 2 * turns) <= 2
    assert stats["dropped"]["short"].get("too long", 0) == 0
    total = sum(stats["mixed"].values())
    assert abs(stats["mixed"]["short"] - total / 2) <= 7, "they cost nothing in the mix"


def test_too_long_split_drops_nothing() -> None:
    with opened(LONG) as stream:
        fleet = Fleet(stream, 1)
        found = [token for _ in range(60) for token in (fleet.records() or {})[0][0]["input"].tolist()]
        assert fleet.stats()["dropped"]["mixed"].get("too long", 0) == 0
    assert found.count(ord("C")) % 39 in range(39)
    assert found.count(ord("C")) > 39


@pytest.mark.parametrize("algorithm", ["concat", "best_fit"])
@pytest.mark.parametrize("piece", ["document", "sequence"])
def test_too_long_error_names_the_place_of_the_row(algorithm: str, piece: str) -> None:
    world = replace(LONG, too_long="error", algorithm=algorithm, piece=piece)
    with opened(world) as stream, pytest.raises(zephon.DataError, match=r"(?s)mixed.*part 10\.jsonl.*line 3") as error:
        Fleet(stream, 1).steps(60)
    assert "too_long" in str(error.value)


def test_too_long_error_is_none_where_all_documents_fit() -> None:
    world = one_length([1, 4, 6], too_long="error")
    with opened(world) as stream:
        expected = Fleet(stream, 1).steps(30)
    with opened(replace(world, too_long="split")) as stream:
        assert Fleet(stream, 1).steps(30) == expected


@law(15)
@given(best_fit_worlds(max_sources=3, max_lanes=4), st.integers(1, 4))
def test_too_long_documents_are_counted_and_named(world: World, count: int) -> None:
    world = livable(replace(world, too_long="drop"))
    oracles = [LaneOracle(world, lane) for lane in range(world.lanes)]
    for oracle in oracles:
        for _ in range(count * world.per_lane):
            oracle.record()
    with opened(world) as stream:
        fleet = Fleet(stream, world.degrees[-1])
        fleet.steps(count)
        dropped = fleet.stats()["dropped"]
    for index, source in enumerate(world.sources):
        least: Counter[str] = sum((oracle.finished[source.name] for oracle in oracles), start=Counter())
        most = least.copy()
        for oracle in oracles:  # up to the next document that is accepted, which may or may not be looked at already
            before = oracle.finished[source.name].copy()
            next(oracle.pieces[index])
            most.update(oracle.drawn[source.name])
            most.subtract(before)
        for counter in ("empty", "too long"):
            assert least[counter] <= dropped[source.name].get(counter, 0) <= most[counter], (source.name, counter)


def test_too_long_a_source_of_nothing_else_is_an_error_that_names_it() -> None:
    sources = (SourceSpec("short", "1", (("abc",),), 1), SourceSpec("epics", "1", (("a" * 9, "b" * 20),), 1))
    with (
        pytest.raises(zephon.DataError, match="epics"),
        opened(replace(LONG, sources=sources, too_long="drop")) as stream,
    ):
        Fleet(stream, 1).steps(20)


def test_too_long_a_source_of_nothing_else_is_an_error_however_its_chunks_are_dealt() -> None:
    """Where a permutation says which lane gets which chunk, a lane that has seen many tells nothing of the others."""
    sources = (SourceSpec("short", "1", (("abc",) * 9,), 1), SourceSpec("epics", "1", (("a" * 9, "b" * 20) * 4,), 1))
    world = replace(LONG, sources=sources, too_long="drop", lanes=2, window=2)
    with pytest.raises(zephon.DataError, match="epics"), opened(world) as stream:
        Fleet(stream, 1).steps(20)


# --- execution and refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("runner", "isolate"), [("threads", False), ("process", False), ("inline", True)])
def test_execution_every_runner_gives_the_same_digests(runner: str, isolate: bool) -> None:
    world = plain_world(algorithm="best_fit", bins=4)
    with opened(world) as stream:
        fleet = Fleet(stream, 1)
        expected = fleet.steps(4)
        state = fleet.state()
        expected += fleet.steps(4)
    with opened(replace(world, runner=runner, workers=2 if runner == "threads" else 1, isolate=isolate)) as stream:
        fleet = Fleet(stream, 2)
        assert fleet.steps(4) == expected[:4]
        assert fleet.state() == state
        assert fleet.steps(4) == expected[4:]
        assert Fleet(stream, 1, state).steps(4) == expected[4:]


@pytest.mark.parametrize("bins", [0, -1, 1025])
def test_refusal_bins_out_of_range(bins: int) -> None:
    with pytest.raises(zephon.RecipeError, match="bins"), opened(plain_world(algorithm="best_fit", bins=bins)):
        pass


def test_refusal_an_unknown_word_for_too_long() -> None:
    with pytest.raises(zephon.RecipeError, match="too_long"), opened(replace(LONG, too_long="cut")):
        pass


@pytest.mark.parametrize(
    ("changes", "names"),
    [({"bins": 5}, "bins"), ({"too_long": "drop"}, "too_long"), ({"algorithm": "concat"}, "algorithm|packing")],
)
def test_refusal_a_state_of_another_packing_is_refused_by_field(changes: dict[str, Any], names: str) -> None:
    with opened(LONG) as stream:
        fleet = Fleet(stream, 1)
        fleet.steps(2)
        state = fleet.state()
    with opened(replace(LONG, **changes)) as stream, pytest.raises(zephon.RestoreError, match=f"(?s){names}"):
        stream.loader().load_state_dict(state)
