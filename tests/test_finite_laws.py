"""The laws of finite streams: validation sets, and training that stops. Any degree, any stop, the same end."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import (
    BOS,
    Fleet,
    LaneOracle,
    Record,
    SourceSpec,
    World,
    built,
    cut_in_shards,
    divisors,
    finite_worlds,
    global_steps,
    make_texts,
    masked,
    opened,
    plain_finite,
    record_lists,
)

import zephon

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
PADS = pytest.mark.parametrize("pad_last", [False, True])


def law(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=QUIET)


def steps_of(fleet: Fleet, limit: int = 5000) -> list[list[Record]]:
    """All steps that are left; each is its records, record j at place j."""
    found = []
    while (step := fleet.records()) is not None:
        assert sorted(step) == list(range(len(step)))
        assert {len(records) for records in step.values()} == {1}
        found.append([record_lists(step[lane][0]) for lane in sorted(step)])
        assert len(found) < limit
    return found


def run(world: World, degree: int = 1, pad_last: bool = False) -> list[list[Record]]:
    with opened(world) as stream:
        return steps_of(Fleet(stream, degree, pad_last=pad_last))


def pairs(records: list[Record]) -> Counter[tuple[int, int]]:
    """How often each pair of a token and its next token is delivered, padding left out."""
    return Counter(
        (token, label)
        for record in records
        for token, label in zip(record["input"], record["labels"], strict=True)
        if label != -100
    )


# --- the decision stream -------------------------------------------------------------------------------------------


@law(120)
@given(finite_worlds(), st.booleans(), st.data())
def test_conservation_the_stream_is_what_a_naive_reading_of_the_design_says(
    world: World, pad_last: bool, data: st.DataObject
) -> None:
    degree = data.draw(st.sampled_from(world.degrees), label="degree")
    oracle = LaneOracle(world)
    expected = global_steps(world, pad_last)
    with opened(world) as stream:
        fleet = Fleet(stream, degree, pad_last=pad_last)
        found = steps_of(fleet)
        stats = fleet.common_stats()
    assert found == expected
    delivered = [record for step in found for record in step]
    padded = sum(label == -100 for record in delivered for label in record["labels"])
    assert stats.records == len(delivered)
    assert stats.padding == padded
    assert stats.positions == len(delivered) * world.seq_len - padded
    whole = oracle.all_records()
    if len(delivered) >= len(whole):
        assert stats.mixed == oracle.mixed
        assert stats.positions == sum(oracle.mixed.values())
    else:
        oracle = LaneOracle(world)
        for _ in delivered:
            oracle.record()
        if delivered:
            assert stats.mixed == oracle.mixed
        assert sum(oracle.mixed.values()) == stats.positions + oracle.open_positions()


@law(40)
@given(finite_worlds(), st.data())
def test_conservation_a_validation_delivers_every_position_exactly_epochs_times(
    world: World, data: st.DataObject
) -> None:
    """Told from the data alone: no order, mix or packing is computed."""
    world = replace(world, on_end="renormalise")
    degree = data.draw(st.sampled_from(world.degrees), label="degree")
    expected: Counter[tuple[int, int]] = Counter()
    for source in world.sources:
        for text in (text for shard in source.shards for text in shard if world.accepts(text)):
            tokens = world.tokens(text)
            for _ in range(source.epochs or 1):
                expected.update(pairwise(tokens))
    delivered = [record for step in run(world, degree, pad_last=True) for record in step]
    assert pairs(delivered) == expected


def numbered(name: str, rows: int, epochs: int | None, weight: str = "1", chunk_rows: int | None = None) -> SourceSpec:
    """A source whose documents carry its name and their number."""
    texts = [f"{name}{row}" + "." * (row * 7 % 11) for row in range(rows)]
    return SourceSpec(name, weight, cut_in_shards(texts, 2, rows), chunk_rows, epochs=epochs)


def documents(records: list[Record]) -> list[str]:
    """The documents of `records` in order, from documents that begin with BOS; concat only."""
    tokens = [
        token
        for record in records
        for token, label in zip(record["input"], record["labels"], strict=True)
        if label != -100
    ]
    data = bytes(0 if token == BOS else token for token in tokens)
    return [document.decode() for document in data.split(b"\0")[1:]]


@law(35)
@given(st.data())
def test_conservation_every_row_comes_once_in_each_epoch_and_epoch_after_epoch(data: st.DataObject) -> None:
    window = data.draw(st.sampled_from([0, 3, 16]), label="window")
    sources = tuple(
        numbered(
            name,
            data.draw(st.integers(1, 30), label="rows"),
            data.draw(st.integers(1, 4), label="epochs"),
            data.draw(st.sampled_from(["1", "0.2", "7"])),
            data.draw(st.none() | st.integers(1, 5), label="chunk_rows"),
        )
        for name in data.draw(st.sampled_from(["A", "AB", "ABC"]), label="names")
    )
    world = World(sources=sources, lanes=4, seq_len=16, window=window, on_end="renormalise")
    records = [record for step in run(world, 2, pad_last=True) for record in step]
    found = documents(records)
    for source in sources:
        texts = sorted(text for shard in source.shards for text in shard)
        mine = [document for document in found if document[0] == source.name]
        assert sorted(mine) == sorted(texts * (source.epochs or 1))
        if window == 0:  # a window may hold the end of one epoch and the beginning of the next; chunks alone do not
            turns = [mine[start : start + len(texts)] for start in range(0, len(mine), len(texts))]
            assert all(sorted(turn) == texts for turn in turns)


@law(12)
@given(st.data())
def test_independence_the_order_inside_a_source_does_not_depend_on_the_others(data: st.DataObject) -> None:
    kept = numbered("A", data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3)), chunk_rows=2)
    shared: dict[str, Any] = {
        "lanes": data.draw(st.sampled_from([1, 3, 4])),
        "seq_len": data.draw(st.sampled_from([8, 31])),
        "window": data.draw(st.sampled_from([0, 2, 16])),
        "on_end": "renormalise",
    }
    other = numbered("B", data.draw(st.integers(1, 40)), 2, data.draw(st.sampled_from(["0.01", "3"])), 3)
    third = numbered("C", data.draw(st.integers(1, 9)), None)
    found = []
    for sources in [(kept,), (kept, other), (other, replace(kept, weight="4"), third)]:
        records = [record for step in run(World(sources=sources, **shared), pad_last=True) for record in step]
        found.append([document for document in documents(records) if document[0] == "A"])
    assert found[0] == found[1] == found[2]


# --- 1. elastic ----------------------------------------------------------------------------------------------------


@law(35)
@given(finite_worlds(), st.booleans())
def test_elastic_every_degree_that_divides_the_batch_gives_the_same_digests_and_the_same_end(
    world: World, pad_last: bool
) -> None:
    found = {}
    with opened(world) as stream:
        for degree in world.degrees:
            fleet = Fleet(stream, degree, pad_last=pad_last)
            found[degree] = (fleet.to_end(), fleet.state(), fleet.common_stats())
            assert {loader.step for loader in fleet.loaders} == {len(found[degree][0])}
    assert all(one == found[1] for one in found.values())


@law(10)
@given(finite_worlds(max_sources=2))
def test_elastic_record_j_goes_to_the_rank_that_the_design_says(world: World) -> None:
    expected = global_steps(world, pad_last=True)
    with opened(world) as stream:
        for degree in world.degrees:
            for rank in range(degree):
                owned = [j for j in range(world.batch) if j * degree // world.batch == rank]
                loader = stream.loader(rank, degree, pad_last=True)
                assert list(loader.lanes) == owned
                for step in expected:
                    records = loader.step_records()
                    assert list(records) == owned
                    assert [record_lists(records[j][0]) for j in owned] == [step[j] for j in owned]
                    assert {array.dtype for j in owned for array in records[j][0].values()} == {np.dtype(np.int32)}
                with pytest.raises(StopIteration):
                    loader.step_records()


# --- 2. resumable --------------------------------------------------------------------------------------------------


@law(35)
@given(finite_worlds(max_sources=3, max_batch=6), st.booleans(), st.data())
def test_resumable_after_every_step_and_after_the_end(world: World, pad_last: bool, data: st.DataObject) -> None:
    with opened(world) as stream:
        fleet = Fleet(stream, data.draw(st.sampled_from(world.degrees), label="degree"), pad_last=pad_last)
        expected, states, stats = [], [fleet.state()], [fleet.common_stats()]
        while (step := steps_to(fleet, 1)) and len(expected) < 2000:
            expected += step
            states.append(fleet.state())
            stats.append(fleet.common_stats())
        assert fleet.state() == states[-1], "the end is not a step"
        assert fleet.common_stats() == stats[-1]
        last = len(expected)
        stops = range(last + 1) if last <= 8 else sorted({0, last - 2, last - 1, last, *every(last, 6)})
        for stop in stops:
            degree = data.draw(st.sampled_from(world.degrees), label=f"degree at {stop}")
            again = Fleet(stream, degree, states[stop], pad_last=pad_last)
            assert {loader.step for loader in again.loaders} == {stop}
            assert again.state() == states[stop]
            assert again.common_stats() == stats[stop]
            assert again.to_end() == expected[stop:]
            assert again.state() == states[-1]
            assert again.common_stats() == stats[-1]


def every(count: int, parts: int) -> list[int]:
    return [count * part // parts for part in range(parts)]


def steps_to(fleet: Fleet, count: int) -> list[str]:
    """The digests of at most `count` steps."""
    found = []
    while len(found) < count:
        try:
            found.append(fleet.step())
        except StopIteration:
            break
    return found


@law(35)
@given(finite_worlds(), st.booleans(), st.data())
def test_resumable_three_times_each_at_another_degree(world: World, pad_last: bool, data: st.DataObject) -> None:
    degrees = [data.draw(st.sampled_from(world.degrees), label="degree") for _ in range(5)]
    with opened(world) as stream:
        expected = Fleet(stream, degrees[0], pad_last=pad_last).to_end()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(expected)), min_size=3, max_size=3), label="stops"))
    state, done = None, 0
    for degree, stop in zip(degrees[1:], [*cuts, len(expected)], strict=True):
        with opened(world) as stream:  # a new folder and an empty cache each time
            fleet = Fleet(stream, degree, state, pad_last=pad_last)
            assert steps_to(fleet, stop - done) == expected[done:stop]
            state, done = fleet.state(), stop
            if stop == len(expected):
                assert fleet.to_end() == []


@law(15)
@given(finite_worlds(max_sources=2, max_batch=4), st.booleans(), st.data())
def test_resumable_in_place_a_loader_that_has_ended_goes_back(
    world: World, pad_last: bool, data: st.DataObject
) -> None:
    with opened(world) as stream:
        fleet = Fleet(stream, data.draw(st.sampled_from(world.degrees)), pad_last=pad_last)
        start = fleet.state()
        expected = fleet.to_end()
        target = data.draw(st.integers(0, len(expected)), label="target")
        for _ in range(2):
            for loader in fleet.loaders:
                loader.load_state_dict(start)
            assert steps_to(fleet, target) == expected[:target]
            middle = fleet.state()
            assert fleet.to_end() == expected[target:]
            for loader in fleet.loaders:
                loader.load_state_dict(middle)
            assert fleet.to_end() == expected[target:]
            assert fleet.to_end() == []


@PADS
def test_resumable_every_rank_writes_the_same_bytes(pad_last: bool) -> None:
    with opened(plain_finite()) as stream:
        for degree in (1, 2, 4):
            fleet = Fleet(stream, degree, pad_last=pad_last)
            while True:
                first, *others = [loader.state_dict() for loader in fleet.loaders]
                assert sorted(first) == ["header", "lane_00000"]
                assert all(other == first for other in others)
                if not steps_to(fleet, 1):
                    break


def test_resumable_a_rank_needs_the_state_of_any_one_rank() -> None:
    with opened(plain_finite()) as stream:
        fleet = Fleet(stream, 4)
        steps_to(fleet, 3)
        own = fleet.loaders[3].state_dict()
        expected = fleet.to_end()
        assert Fleet(stream, 2, own).to_end() == expected
        assert len(expected) > 3


# --- the end -------------------------------------------------------------------------------------------------------


@law(40)
@given(finite_worlds(max_sources=3), st.data())
def test_end_training_drops_the_last_incomplete_batch_and_validation_shows_it(
    world: World, data: st.DataObject
) -> None:
    degree = data.draw(st.sampled_from(world.degrees), label="degree")
    short, long = run(world, degree), run(world, degree, pad_last=True)
    assert long[: len(short)] == short
    assert len(long) - len(short) in (0, 1)
    for step in short:
        assert masked(world) not in step
    for step in long[len(short) :]:
        count = step.index(masked(world))
        assert count > 0, "a step of nothing but padding"
        assert step[count:] == [masked(world)] * (world.batch - count)
        assert masked(world) not in step[:count]


@PADS
@law(20)
@given(finite_worlds(max_sources=2), st.data())
def test_end_micro_batches_end_together_on_every_rank(pad_last: bool, world: World, data: st.DataObject) -> None:
    degree = data.draw(st.sampled_from(world.degrees), label="degree")
    share = world.batch // degree
    local = data.draw(st.sampled_from(divisors(share)), label="local batch")
    expected = global_steps(world, pad_last)
    with opened(world) as stream:
        for rank in range(degree):
            loader = stream.loader(rank, degree, local, pad_last=pad_last)
            rows = []
            for number in range(1, len(expected) * share // local + 1):
                batch = next(loader)
                assert {array.shape for array in batch.values()} == {(local, world.seq_len)}
                assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
                rows += [{name: array[i].tolist() for name, array in batch.items()} for i in range(local)]
                assert loader.step == number * local // share
            assert rows == [record for step in expected for record in step[rank * share : (rank + 1) * share]]
            for _ in range(3):
                with pytest.raises(StopIteration):
                    next(loader)
            with pytest.raises(StopIteration):
                loader.step_records()
            assert loader.step == len(expected)
            assert sorted(loader.state_dict()) == ["header", "lane_00000"]


@PADS
def test_end_a_loader_is_an_iterator(pad_last: bool) -> None:
    world = plain_finite(lanes=6)
    expected = global_steps(world, pad_last)
    with opened(world) as stream:
        loader = stream.loader(1, 2, 3, pad_last=pad_last)
        found = [batch["input"].tolist() for batch in loader]
        assert list(loader) == []
    assert found == [[record["input"] for record in step[3:]] for step in expected]


def texts_world(*sources: tuple[str, ...], weights: tuple[str, ...] = (), **changes: Any) -> World:
    """Sources 'a', 'b', … of one shard in stored order; a document of n letters has n - 1 positions."""
    specs = tuple(
        SourceSpec(name, weight, (texts,), 1)
        for name, weight, texts in zip("abcd", weights or ("1",) * len(sources), sources, strict=False)
    )
    return replace(World(sources=specs, lanes=1, seq_len=4, tokenizer="none", on_end="renormalise"), **changes)


def letters(steps: list[list[Record]]) -> list[str]:
    """What each record holds; padding is '_'."""
    return [
        "".join(
            chr(token) if label != -100 else "_" for token, label in zip(record["input"], record["labels"], strict=True)
        )
        for step in steps
        for record in step
    ]


ONE = ("abcde", "fghij", "klmno")  # three documents of a full sequence each
TWO = ("ABCDE",)


@pytest.mark.parametrize(
    ("on_end", "sources", "weights", "expected"),
    [
        # a, then b (largest deficit), then a (tie), then b, which is exhausted
        ("stop", (ONE, TWO), ("1", "1"), ["abcd", "ABCD", "fghi"]),
        ("renormalise", (ONE, TWO), ("1", "1"), ["abcd", "ABCD", "fghi", "klmn"]),
        # three quarters are due to a: a b a a, and then a again, which is exhausted
        ("stop", (ONE, ("ABCDE", "FGHIJ")), ("3", "1"), ["abcd", "ABCD", "fghi", "klmn"]),
        ("renormalise", (ONE, ("ABCDE", "FGHIJ")), ("3", "1"), ["abcd", "ABCD", "fghi", "klmn", "FGHI"]),
        # a source is only exhausted once the mix picks it: b has its last row out long before
        ("stop", (("abcde",), ("ABCDE", "FGHIJ", "KLMNO")), ("1", "1000"), ["abcd", "ABCD", "FGHI", "KLMN"]),
        ("stop", (("abcde",),), (), ["abcd"]),
        ("stop", (("ab", "cd", "ef"),), (), ["ace_"]),
        # rows without a position: the source ends as soon as it is asked
        ("renormalise", (("", "x"), TWO), (), ["ABCD"]),
        ("renormalise", (TWO, ("", "x")), (), ["ABCD"]),
        ("renormalise", (("", ""), ("x",)), (), []),
        ("stop", (("", "x"), TWO), (), []),
        ("stop", (TWO, ("", "x")), (), ["ABCD"]),
        ("renormalise", (("abcde", "", "x"), ("", "ABCDE")), (), ["abcd", "ABCD"]),
    ],
)
@pytest.mark.parametrize("algorithm", ["concat", "best_fit"])
def test_end_where_a_stream_stops_worked_out_by_hand(
    algorithm: str, on_end: str, sources: tuple[tuple[str, ...], ...], weights: tuple[str, ...], expected: list[str]
) -> None:
    world = texts_world(*sources, weights=weights, on_end=on_end, algorithm=algorithm)
    if len(expected) and world.batch == 1:
        assert letters(global_steps(world, pad_last=False)) == expected, "the oracle"
    for pad_last in (False, True):
        assert letters(run(world, pad_last=pad_last)) == expected


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (("2", "1", "1"), "aBCBCBCBCBC"),  # a is asked, and found empty, after C: 0 -4 -4, then B and C take turns
        (("6", "1", "1"), "aBCCCCBCBBB"),  # after B: 0 -24 8; C catches up 32, which is 4 sequences at a sum of 2
    ],
)
def test_end_renormalise_keeps_the_deficits_of_what_is_left(weights: tuple[str, ...], expected: str) -> None:
    world = texts_world(("abcde",), ("Bbcde",) * 5, ("Cbcde",) * 5, weights=weights)
    assert letters(global_steps(world, pad_last=False)) == [f"{letter}bcd" for letter in expected], "the oracle"
    assert letters(run(world)) == [f"{letter}bcd" for letter in expected]


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8])
@PADS
def test_end_sources_of_one_row(batch: int, pad_last: bool) -> None:
    world = texts_world(("abcdefg",), ("ABC",), ("xyz",), lanes=batch)
    expected = global_steps(world, pad_last)
    assert letters(expected)[:3] == ["abcd", "efAB", "xy__"][: len(letters(expected))]
    with opened(world) as stream:
        for degree in world.degrees:
            assert steps_of(Fleet(stream, degree, pad_last=pad_last)) == expected
    assert len(expected) == (-(-3 // batch) if pad_last else 3 // batch)


@PADS
def test_end_epochs_of_one_row(pad_last: bool) -> None:
    world = texts_world(("abc",)).with_source(0, epochs=7)
    assert letters(run(world, pad_last=pad_last)) == ["abab", "abab", "abab", "ab__"]


@pytest.mark.parametrize("algorithm", ["concat", "best_fit"])
def test_end_a_stream_of_nothing_but_empty_documents_has_no_step(algorithm: str) -> None:
    world = texts_world(("", "x"), ("",), lanes=4, algorithm=algorithm)
    with opened(world) as stream:
        for pad_last in (False, True):
            fleet = Fleet(stream, 2, pad_last=pad_last)
            state = fleet.state()
            assert fleet.to_end() == []
            assert fleet.state() == state
            assert Fleet(stream, 4, state, pad_last=pad_last).to_end() == []


def test_end_a_validation_may_follow_a_training_state_and_the_other_way_round() -> None:
    """`pad_last` says what the loader does at the end; the decisions and the state are the same."""
    world = plain_finite(lanes=6)
    with opened(world) as stream:
        short, long = Fleet(stream, 2), Fleet(stream, 3, pad_last=True)
        for _ in range(5):
            assert short.step() == long.step()
            assert short.state() == long.state()
        state = short.state()
        rest = short.to_end()
        padded = long.to_end()
        assert len(rest) + 1 == len(padded)
        assert Fleet(stream, 1, state, pad_last=True).to_end() == padded
        assert Fleet(stream, 1, state).to_end() == rest
        assert Fleet(stream, 6, short.state(), pad_last=True).to_end() == padded[-1:]


# --- what is dropped -----------------------------------------------------------------------------------------------


@law(35)
@given(finite_worlds(max_sources=3))
def test_dropped_documents_are_counted_and_named(world: World) -> None:
    oracle = LaneOracle(world)
    records = oracle.all_records()
    with opened(world) as stream:
        fleet = Fleet(stream, world.degrees[-1], pad_last=True)
        fleet.to_end()
        found = fleet.common_stats().dropped
    padded = bool(records) and -100 in records[-1]["labels"]  # else the last record may have left before the last rows
    least = {name: counts.copy() for name, counts in oracle.finished.items()}
    for pieces in oracle.pieces:  # "stop" may have looked as far as the next document with a position
        next(pieces, None)
    for source in world.sources:
        for counter in ("empty", "too long", "surrogates", "special tokens in text"):
            counted = found[source.name].get(counter, 0)
            assert counted <= oracle.drawn[source.name][counter], (source.name, counter)
            assert not padded or least[source.name][counter] <= counted, (source.name, counter)


def dropped_places(caplog: pytest.LogCaptureFixture) -> set[tuple[str, int]]:
    """The rows that the log names: folder of the source, line."""
    return {(name, int(line)) for name, line in re.findall(r"(data \d+)/part \d+\.jsonl, line (\d+)", caplog.text)}


@pytest.mark.parametrize("algorithm", ["concat", "best_fit"])
@pytest.mark.parametrize("degree", [1, 2])
def test_dropped_batch_its_rows_are_named(algorithm: str, degree: int, caplog: pytest.LogCaptureFixture) -> None:
    world = texts_world(("abcde", "fghij", "klmno", "pq"), ("ABCDE",), lanes=4, algorithm=algorithm)
    with caplog.at_level("INFO"), opened(world) as stream:
        fleet = Fleet(stream, degree)
        assert len(fleet.to_end()) == 1  # abcd ABCD fghi klmn | p___
    assert dropped_places(caplog) == {("data 0", 4)}


def test_dropped_batch_nothing_is_said_when_nothing_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), opened(texts_world(ONE, TWO, lanes=4)) as stream:
        assert len(Fleet(stream, 1).to_end()) == 1
        Fleet(stream, 1, pad_last=True).to_end()
    with caplog.at_level("INFO"), opened(texts_world(ONE, TWO, lanes=3)) as stream:
        Fleet(stream, 1, pad_last=True).to_end()
    assert dropped_places(caplog) == set()


def test_dropped_batch_a_row_in_many_sequences_is_one_sample_in_the_message(caplog: pytest.LogCaptureFixture) -> None:
    world = texts_world(("a" * 13,), lanes=4)  # one document, three sequences of a batch of four
    with caplog.at_level("INFO"), opened(world) as stream:
        assert Fleet(stream, 1).to_end() == []
    assert "3 of 4 sequences" in caplog.text
    assert "1 sample" in caplog.text, caplog.text
    assert caplog.text.count("line 1") == 1, caplog.text


# --- 3. execution --------------------------------------------------------------------------------------------------

RUNS = [("threads", 2, False), ("process", 1, False), ("inline", 1, True)]


@pytest.mark.parametrize(("runner", "workers", "isolate"), RUNS)
@pytest.mark.parametrize("algorithm", ["concat", "best_fit"])
def test_execution_every_runner_gives_the_same_digests_and_the_same_end(
    algorithm: str, runner: str, workers: int, isolate: bool
) -> None:
    world = plain_finite(algorithm=algorithm, bins=4, lanes={"concat": 6, "best_fit": 4}[algorithm])
    with opened(world) as stream:
        fleet = Fleet(stream, 2)
        state = fleet.state()
        expected = fleet.to_end()
        end = fleet.state()
        padded = Fleet(stream, 1, pad_last=True).to_end()
    assert len(padded) == len(expected) + 1
    with opened(replace(world, runner=runner, workers=workers, isolate=isolate)) as stream:
        fleet = Fleet(stream, 2)
        assert fleet.state() == state
        assert steps_to(fleet, 3) == expected[:3]
        middle = fleet.state()
        assert fleet.to_end() == expected[3:]
        assert fleet.to_end() == []
        assert fleet.state() == end
        assert {loader.step for loader in fleet.loaders} == {len(expected)}
        again = Fleet(stream, 1, middle, pad_last=True)
        assert again.to_end() == padded[3:]
        assert Fleet(stream, 1, end, pad_last=True).to_end() == padded[-1:]


@pytest.mark.parametrize("runner", ["inline", "threads"])
@pytest.mark.parametrize(
    ("texts", "expected"), [(("abcdefghi",), ["abcd", "efgh"]), (("abcd", "efghi"), ["abce", "fgh_"])]
)
def test_execution_the_last_document_of_a_source_comes_once(
    texts: tuple[str, ...], expected: list[str], runner: str
) -> None:
    assert letters(run(texts_world(texts, runner=runner))) == expected


@law(10)
@given(finite_worlds(max_sources=3, max_batch=4), st.booleans())
def test_execution_threads_on_random_worlds(world: World, pad_last: bool) -> None:
    with opened(world) as stream:
        expected = Fleet(stream, 1, pad_last=pad_last).to_end()
    with opened(replace(world, runner="threads", workers=2)) as stream:
        fleet = Fleet(stream, world.degrees[-1], pad_last=pad_last)
        assert fleet.to_end() == expected
        assert fleet.to_end() == []


@law(12)
@given(finite_worlds(max_sources=2, max_batch=4), st.data())
def test_execution_how_often_states_are_taken_does_not_matter(world: World, data: st.DataObject) -> None:
    degree = data.draw(st.sampled_from(world.degrees), label="degree")
    with opened(world) as stream:
        expected = Fleet(stream, degree, pad_last=True).to_end()
        fleet = Fleet(stream, degree, pad_last=True)
        found: list[str] = []
        for _ in range(len(expected)):
            fleet.state()
            fleet.common_stats()
            found += steps_to(fleet, 1)
            fleet.loaders[-1].state_dict()
        assert found == expected


# --- 5. bounded ----------------------------------------------------------------------------------------------------


@law(20)
@given(finite_worlds())
def test_bounded_the_state_needs_at_most_4_kib_at_every_step(world: World) -> None:
    with opened(world) as stream:
        fleet = Fleet(stream, 1, pad_last=True)
        while steps_to(fleet, 1):
            assert len(fleet.state()["lane_00000"]) <= 4096


@pytest.mark.parametrize("algorithm", ["concat", "best_fit"])
def test_bounded_the_state_of_many_tiny_documents(algorithm: str) -> None:
    sources = tuple(SourceSpec(f"s{i}", "1", (tuple(make_texts(i, 1500, 1, 0.2)),), 1, epochs=2) for i in range(4))
    world = World(sources=sources, lanes=2, seq_len=2048, window=256, tokenizer="eos", on_end="renormalise")
    with opened(replace(world, algorithm=algorithm)) as stream:
        fleet = Fleet(stream, 1, pad_last=True)
        while steps_to(fleet, 1):
            assert len(fleet.state()["lane_00000"]) <= 4096
        assert fleet.common_stats().positions > 5000


# --- refusals ------------------------------------------------------------------------------------------------------


def test_refusal_lanes_of_a_finite_stream() -> None:
    with built(plain_finite()) as recipe:
        recipe.write_text("lanes = 4\n" + recipe.read_text())
        with pytest.raises(zephon.RecipeError, match="lanes"):
            zephon.Stream.open(recipe)


def test_refusal_epochs_of_a_stream_that_repeats() -> None:
    world = World(sources=(SourceSpec("only", "1", (("abc",),), 1, epochs=2),))
    with pytest.raises(zephon.RecipeError, match="epochs"), opened(world):
        pass


@pytest.mark.parametrize("epochs", [0, -1])
def test_refusal_epochs_below_one(epochs: int) -> None:
    with pytest.raises(zephon.RecipeError, match="epochs"), opened(plain_finite().with_source(0, epochs=epochs)):
        pass


@pytest.mark.parametrize(("rank", "degree"), [(0, 3), (0, 8), (0, 0), (4, 4), (-1, 2)])
def test_refusal_ranks_that_do_not_divide_the_batch(rank: int, degree: int) -> None:
    with opened(plain_finite()) as stream, pytest.raises(zephon.TopologyError):
        stream.loader(rank, degree)


def test_refusal_a_save_in_the_middle_of_a_global_step() -> None:
    with opened(plain_finite()) as stream:
        loader = stream.loader(0, 2, 1)
        next(loader)
        with pytest.raises(zephon.ZephonError, match="step"):
            loader.state_dict()


CHANGES: dict[str, tuple[World, str]] = {
    "on_end": (plain_finite(on_end="stop"), "on_end"),
    "epochs": (plain_finite().with_source(1, epochs=3), "epochs"),
    "global batch": (plain_finite(lanes=8), "global_batch_size|global batch"),
    "algorithm": (plain_finite(algorithm="best_fit"), "algorithm|packing"),
    "too_long": (plain_finite(too_long="drop"), "too_long"),
    "window": (plain_finite(window=9), "window"),
    "weight": (plain_finite().with_source(0, weight="0.6"), "weight"),
    "repeats": (
        World(
            sources=tuple(replace(source, epochs=None) for source in plain_finite().sources),
            seed=7, lanes=1, per_lane=4, seq_len=24, window=8,
        ),
        "on_end",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_refusal_a_state_of_another_recipe_is_refused_by_field(change: str) -> None:
    other, names = CHANGES[change]
    with opened(plain_finite()) as stream:
        fleet = Fleet(stream, 2)
        steps_to(fleet, 2)
        state = fleet.state()
    with opened(other) as stream, pytest.raises(zephon.RestoreError, match=f"(?s){names}"):
        stream.loader().load_state_dict(state)


def test_refusal_epochs_left_out_are_one() -> None:
    with opened(plain_finite().with_source(1, epochs=None)) as stream:
        state = Fleet(stream, 1).state()
    with opened(plain_finite().with_source(1, epochs=1)) as stream:
        Fleet(stream, 1, state)
