"""The laws of the whole loader, on random worlds: any degree, any stop, any way of running, the same global batches."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
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
    built,
    check_resumes,
    cut_in_shards,
    digests,
    divisors,
    livable,
    make_texts,
    opened,
    plain_world,
    record_lists,
    shard_bytes,
    worlds,
)

import zephon

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def law(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=QUIET)


# --- 1. elastic ----------------------------------------------------------------------------------------------------


@law(30)
@given(worlds(), st.integers(1, 5))
def test_elastic_every_degree_that_divides_the_lanes_gives_the_same_digests(world: World, count: int) -> None:
    with opened(world) as stream:
        found = {degree: Fleet(stream, degree).steps(count) for degree in world.degrees}
    assert len({tuple(steps) for steps in found.values()}) == 1, found


@law(15)
@given(worlds(max_sources=2))
def test_elastic_rank_r_owns_the_lanes_that_the_design_gives_it(world: World) -> None:
    with opened(world) as stream:
        for degree in world.degrees:
            for rank in range(degree):
                owned = [lane for lane in range(world.lanes) if lane * degree // world.lanes == rank]
                loader = stream.loader(rank, degree)
                assert list(loader.lanes) == owned
                records = loader.step_records()
                assert list(records) == owned
                assert {len(lane) for lane in records.values()} == {world.per_lane}


# --- 2. resumable --------------------------------------------------------------------------------------------------


@law(30)
@given(worlds(), st.data())
def test_resumable_three_times_each_at_another_degree(world: World, data: st.DataObject) -> None:
    check_resumes(opened, world, data)


@law(20)
@given(worlds(max_sources=3), st.integers(0, 4), st.integers(0, 4), st.data())
def test_resumable_in_place_a_used_loader_goes_back_or_forward(
    world: World, target: int, used: int, data: st.DataObject
) -> None:
    before, after = (data.draw(st.sampled_from(world.degrees)) for _ in range(2))
    with opened(world) as stream:
        fleet = Fleet(stream, before)
        fleet.steps(target)
        state = fleet.state()
        kept = dict(state)
        expected = fleet.steps(3)
        other = Fleet(stream, after)
        other.steps(used)
        for loader in other.loaders:
            loader.load_state_dict(state)
        assert other.steps(3) == expected
        for loader in other.loaders:  # the same state again: nothing of it was consumed or changed
            loader.load_state_dict(state)
        assert other.steps(3) == expected
        assert state == kept


def test_resumable_state_is_bytes_keyed_by_lane_under_one_header() -> None:
    world = plain_world()
    with opened(world) as stream:
        fleet = Fleet(stream, 2)
        for step in range(3):
            parts = [loader.state_dict() for loader in fleet.loaders]
            assert [sorted(part) for part in parts] == [
                ["header", "lane_00000", "lane_00001"],
                ["header", "lane_00002", "lane_00003"],
            ]
            assert parts[0]["header"] == parts[1]["header"]
            assert {type(value) for part in parts for value in part.values()} == {bytes}
            lanes = [value for part in parts for key, value in part.items() if key != "header"]
            assert len({value[:16] for value in lanes}) == 1, "every lane begins with the hash of the one header"
            assert [loader.step for loader in fleet.loaders] == [step, step]
            fleet.step()


def test_resumable_in_the_middle_of_a_step_a_loader_can_be_sent_back() -> None:
    with opened(plain_world()) as stream:
        loader = stream.loader(0, 1, 1)
        state = loader.state_dict()
        first = [next(loader)["input"].tolist() for _ in range(5)]
        loader.load_state_dict(state)
        assert loader.step == 0
        assert [next(loader)["input"].tolist() for _ in range(5)] == first


# --- 3. execution never changes data -------------------------------------------------------------------------------


def global_batches(world: World, degree: int, count: int) -> list[list[list[dict[str, list[int]]]]]:
    """For each rank, for each step, its records, lane-major."""
    with opened(world) as stream:
        found = []
        for rank in range(degree):
            loader = stream.loader(rank, degree)
            steps = [loader.step_records() for _ in range(count)]
            found.append([[record_lists(r) for lane in sorted(step) for r in step[lane]] for step in steps])
    return found


@law(20)
@given(worlds(max_sources=3), st.data())
def test_execution_local_batch_cuts_the_same_records_into_consecutive_micro_batches(
    world: World, data: st.DataObject
) -> None:
    degree = data.draw(st.sampled_from(world.degrees), label="degree")
    share, count = world.batch // degree, 3
    expected = global_batches(world, degree, count)
    states: dict[int, dict[str, bytes]] = {}
    with opened(world) as stream:
        for local in [None, *divisors(share)]:
            for rank in range(degree):
                loader = stream.loader(rank, degree, local)
                rows: list[dict[str, list[int]]] = []
                for number in range(1, count * share // (local or share) + 1):
                    batch = next(loader)
                    assert set(batch) == {"input", "labels", "positions"}
                    for array in batch.values():
                        assert array.dtype == np.int32
                        assert array.shape == (local or share, world.seq_len)
                    rows += [{name: array[i].tolist() for name, array in batch.items()} for i in range(local or share)]
                    assert loader.step == number * (local or share) // share
                assert rows == [record for step in expected[rank] for record in step]
                assert states.setdefault(rank, loader.state_dict()) == loader.state_dict()


@law(20)
@given(worlds(max_sources=3), st.data())
def test_execution_saves_sharing_and_pace_do_not_matter(world: World, data: st.DataObject) -> None:
    degree = data.draw(st.sampled_from(world.degrees), label="degree")
    rng = random.Random(data.draw(st.integers(0, 2**16), label="pace"))
    count = 4
    expected = global_batches(world, degree, count)
    with built(world) as recipe:
        shared = zephon.Stream.open(recipe)
        own = [zephon.Stream.open(recipe) for _ in range(2)]
        streams = [shared if rng.random() < 0.5 else rng.choice(own) for _ in range(degree)]
        loaders = [stream.loader(rank, degree) for rank, stream in enumerate(streams)]
        turns = [rank for rank in range(degree) for _ in range(count)]
        rng.shuffle(turns)  # ranks run ahead of each other
        found: list[list[Any]] = [[] for _ in range(degree)]
        states: list[dict[int, dict[str, bytes]]] = [{} for _ in range(degree)]
        for rank in turns:
            for _ in range(rng.choice([0, 0, 1, 3])):
                states[rank][loaders[rank].step] = loaders[rank].state_dict()
                loaders[rank].stats()
            records = loaders[rank].step_records()
            found[rank].append([record_lists(r) for lane in sorted(records) for r in records[lane]])
        for stream in {shared, *own}:
            stream.close()
    assert found == expected
    with opened(world) as stream:  # what was saved along the way is what a run that saves at every step saves
        calm = [stream.loader(rank, degree) for rank in range(degree)]
        for step in range(count):
            for rank, loader in enumerate(calm):
                state = loader.state_dict()
                assert states[rank].get(step, state) == state
                loader.step_records()


@law(15)
@given(worlds(max_sources=3))
def test_execution_warm_or_cold_cache_and_other_folder(world: World) -> None:
    with built(world) as recipe:
        with zephon.Stream.open(recipe) as cold:
            first = Fleet(cold, 1)
            expected = first.steps(3)
            state = first.state()
        with zephon.Stream.open(recipe) as warm:
            second = Fleet(warm, 1)
            assert second.steps(3) == expected
            assert second.state() == state
    assert digests(world, 1, 3) == expected


@pytest.mark.parametrize("same_size", [False, True])
def test_execution_a_warm_cache_never_serves_an_old_file(same_size: bool) -> None:
    old, new = ["first", "second", "third!"], ["FIRST", "SECOND", "THIRD!"] if same_size else ["x", "yy", "zzz", "u"]
    world = World(sources=(SourceSpec("only", "1", (tuple(old),), 1),), lanes=1, seq_len=8, window=4)
    with built(world) as recipe:
        with zephon.Stream.open(recipe) as stream:
            Fleet(stream, 1).steps(2)
        (shard,) = (recipe.parent / "data 0").glob("*.jsonl")
        shard.write_bytes(shard_bytes(new, 0))
        os.utime(shard, ns=(10**18, 10**18))
        with zephon.Stream.open(recipe) as stream:
            found = Fleet(stream, 1).steps(4)
    assert found == digests(world.with_source(0, shards=(tuple(new),)), 1, 4)


def test_execution_what_was_handed_over_is_the_trainers_to_write_on() -> None:
    world = plain_world()
    expected = global_batches(world, 1, 4)[0]
    with opened(world) as stream:
        loader = stream.loader()
        for step in range(4):
            loader.state_dict().clear()
            if step % 2:
                batch = next(loader)
                found = [{name: array[i].tolist() for name, array in batch.items()} for i in range(world.batch)]
                arrays = list(batch.values())
            else:
                records = [record for lane in loader.step_records().values() for record in lane]
                found = [record_lists(record) for record in records]
                arrays = [array for record in records for array in record.values()]
            assert found == expected[step]
            for array in arrays:
                array[...] = -1


def test_execution_step_records_in_the_middle_of_a_step_never_misnames_a_lane() -> None:
    """A whole global step cannot be handed over when part of it is gone: refuse, or hand over the next whole one."""
    with opened(plain_world()) as stream:
        whole = stream.loader()
        steps = [
            {lane: [record_lists(r) for r in records] for lane, records in whole.step_records().items()}
            for _ in range(2)
        ]
        loader = stream.loader(0, 1, 2)
        next(loader)
        try:
            found = loader.step_records()
        except zephon.ZephonError:
            return
        assert {lane: [record_lists(r) for r in records] for lane, records in found.items()} in steps


# --- 4. conservation -----------------------------------------------------------------------------------------------


@law(45)
@given(worlds(), st.integers(1, 5))
def test_conservation_every_record_is_what_a_naive_reading_of_the_design_says(world: World, count: int) -> None:
    oracles = [LaneOracle(world, lane) for lane in range(world.lanes)]
    with opened(world) as stream:
        fleet = Fleet(stream, 1)
        (loader,) = fleet.loaders
        for _ in range(count):
            for lane, records in loader.step_records().items():
                for record in records:
                    assert {array.dtype for array in record.values()} == {np.dtype(np.int32)}
                    assert {array.shape for array in record.values()} == {(world.seq_len,)}
                    assert record_lists(record) == oracles[lane].record()
        stats = fleet.stats()
    delivered = count * world.batch * world.seq_len
    assert stats["records"] == count * world.batch
    assert stats["positions"] == delivered
    assert stats["padding"] == 0
    for source in world.sources:
        assert stats["mixed"][source.name] == sum(oracle.mixed[source.name] for oracle in oracles)
    assert sum(stats["mixed"].values()) == delivered + sum(oracle.open_positions() for oracle in oracles)


@law(30)
@given(worlds(max_sources=3), st.integers(1, 5))
def test_conservation_what_is_dropped_or_mended_is_counted_and_named(world: World, count: int) -> None:
    oracles = [LaneOracle(world, lane) for lane in range(world.lanes)]
    for oracle in oracles:
        for _ in range(count * world.per_lane):
            oracle.record()
    with opened(world) as stream:
        fleet = Fleet(stream, world.degrees[-1])
        fleet.steps(count)
        dropped = fleet.stats()["dropped"]
    for source in world.sources:
        least = sum((oracle.finished[source.name] for oracle in oracles), start=Counter())
        most = least.copy()
        for oracle in oracles:  # up to the next document with a position, which may or may not be looked at already
            before = oracle.finished[source.name].copy()
            next(oracle.pieces[world.sources.index(source)])
            most.update(oracle.drawn[source.name])
            most.subtract(before)
        for counter in ("empty", "surrogates", "special tokens in text"):
            assert least[counter] <= dropped[source.name].get(counter, 0) <= most[counter], (source.name, counter)


def test_conservation_empty_documents_are_counted_exactly() -> None:
    texts = ["one", "", "", "two", "x", "three"]  # without BOS and EOS, "x" is one token and has no position
    world = World(sources=(SourceSpec("only", "1", (tuple(texts),), 6),), lanes=1, seq_len=4, tokenizer="none")
    with opened(world) as stream:
        loader = stream.loader()
        records = [record_lists(loader.step_records()[0][0]) for _ in range(2)]
        assert loader.stats().dropped["only"]["empty"] in (3, 6)  # 3 a turn; 7 of 8 positions of a turn are delivered
    assert bytes(records[0]["input"]) == b"ontw"
    assert bytes(records[1]["input"]) == b"thre"


# --- 5. bounded ----------------------------------------------------------------------------------------------------


@law(25)
@given(worlds(), st.integers(1, 6))
def test_bounded_a_lane_never_needs_more_than_4_kib(world: World, count: int) -> None:
    with opened(world) as stream:
        fleet = Fleet(stream, 1)
        for _ in range(count):
            fleet.step()
            assert max(len(value) for key, value in fleet.state().items() if key != "header") <= 4096


def test_bounded_a_lane_needs_at_most_4_kib_even_when_a_long_sequence_is_filled_with_tiny_documents() -> None:
    texts = make_texts(3, 2000, 1, 0.0)
    sources = tuple(SourceSpec(f"s{i}", "1", (tuple(texts),), 50) for i in range(2))
    world = World(sources=sources, lanes=1, seq_len=8192, window=256, tokenizer="eos")
    with opened(world) as stream:
        fleet = Fleet(stream, 1)
        for _ in range(6):
            fleet.step()
            assert len(fleet.state()["lane_00000"]) <= 4096


def test_bounded_state_and_memory_do_not_grow_with_steps() -> None:
    world = plain_world(lanes=2, per_lane=1)
    with opened(world) as stream:
        fleet = Fleet(stream, 1)
        sizes: list[int] = []

        def run(steps: int) -> int:
            for _ in range(steps):
                fleet.step()
                sizes.append(max(len(value) for key, value in fleet.state().items() if key != "header"))
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            early, late = run(200), run(1500)
        finally:
            tracemalloc.stop()
    # eight times the steps: an epoch, a group index or a counter may need one byte more in a varint, nothing else grows
    assert max(sizes[200:]) <= max(sizes[:200]) + 16
    assert late - early < 1500 * 64
    assert max(sizes) < 300


# --- 6. independence -----------------------------------------------------------------------------------------------


def marked(name: str, rows: int, weight: str, chunk_rows: int | None, longest: int = 6) -> SourceSpec:
    """A source whose documents carry its name and their number, and hold no special token."""
    rng = random.Random(f"{name} {rows} {longest}")
    texts = [f"{name}{row}" + "." * rng.randint(0, longest) for row in range(rows)]
    return SourceSpec(name, weight, cut_in_shards(texts, 2, rows), chunk_rows)


def delivered_documents(world: World, count: int) -> dict[str, list[list[str]]]:
    """The documents of each source in order of delivery, lane by lane, read from the tokens alone."""
    found: dict[str, list[list[str]]] = {source.name: [[] for _ in range(world.lanes)] for source in world.sources}
    with opened(world) as stream:
        loader = stream.loader()
        tokens: list[list[int]] = [[] for _ in range(world.lanes)]
        for _ in range(count):
            for lane, records in loader.step_records().items():
                for record in records:
                    tokens[lane] += record["input"].tolist()
    for lane, stream_tokens in enumerate(tokens):
        documents = bytes(0 if token == 256 else token for token in stream_tokens).split(b"\0")
        for document in documents[1:-1]:  # the last may be cut; before the first BOS there is nothing
            found[chr(document[0])][lane].append(document.decode())
    return found


@law(18)
@given(st.data())
def test_independence_the_order_inside_a_source_does_not_depend_on_the_others(data: st.DataObject) -> None:
    chunk_rows = data.draw(st.none() | st.integers(1, 5), label="chunk_rows")
    kept = marked("A", data.draw(st.integers(1, 60), label="rows"), "0.5", chunk_rows)
    world = World(
        sources=(kept, marked("B", data.draw(st.integers(1, 40)), "0.5", None)),
        seed=data.draw(st.integers(0, 99)),
        lanes=data.draw(st.sampled_from([1, 2, 4, 6])),
        per_lane=2,
        seq_len=data.draw(st.sampled_from([16, 31, 64])),
        window=data.draw(st.sampled_from([0, 2, 16, 64])),
        unit=data.draw(st.sampled_from(["tokens", "samples"])),
    )
    other = marked("B", data.draw(st.integers(1, 40)), data.draw(st.sampled_from(["0.01", "0.5", "3"])), 2, 30)
    third = marked("C", data.draw(st.integers(1, 40)), "0.7", None)
    weighed = replace(kept, weight=data.draw(st.sampled_from(["0.1", "0.5", "4"]), label="own weight"))
    expected = delivered_documents(world, 8)["A"]
    for sources in [(kept,), (kept, other), (other, kept), (third, weighed, other), (weighed, world.sources[1], third)]:
        found = delivered_documents(replace(world, sources=sources), 8)["A"]
        for lane in range(world.lanes):
            both = min(len(expected[lane]), len(found[lane]))
            assert found[lane][:both] == expected[lane][:both]


def test_independence_a_world_delivers_enough_to_compare() -> None:
    world = World(sources=(marked("A", 20, "1", 2), marked("B", 20, "1", 2)), lanes=2, per_lane=2, window=4)
    assert all(len(lane) > 10 for lane in delivered_documents(world, 8)["A"])


# --- 7. pure -------------------------------------------------------------------------------------------------------

CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from worlds import digests, plain_world
json.dump(digests(plain_world(), int(sys.argv[2]), 5), sys.stdout)
"""


def test_pure_another_process_with_another_hash_seed_gives_the_same_digests() -> None:
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), "2"]
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(run.stdout) == digests(plain_world(), 1, 5)


# --- the mixer's promise, in every lane ----------------------------------------------------------------------------


@law(25)
@given(worlds(), st.integers(1, 6))
def test_shares_in_a_lane_no_source_strays_beyond_its_bound(world: World, count: int) -> None:
    world = replace(world, unit="tokens")
    largest = world.largest_sample()
    with opened(world) as stream:
        loaders = [stream.loader(lane, world.lanes) for lane in range(world.lanes)]
        for loader in loaders:
            weights = LaneOracle(world, 0).weights
            for _ in range(count):
                loader.step_records()
                mixed = [loader.stats().mixed[source.name] for source in world.sources]
                for have, weight in zip(mixed, weights, strict=True):
                    over = have * sum(weights) - weight * sum(mixed)
                    assert over <= largest * sum(weights)
                    assert -over <= (len(weights) - 1) * largest * sum(weights)


# --- refusals ------------------------------------------------------------------------------------------------------


def test_refusal_a_save_in_the_middle_of_a_global_step() -> None:
    with opened(plain_world()) as stream:
        loader = stream.loader(1, 2, 2)
        loader.state_dict()
        next(loader)
        with pytest.raises(zephon.ZephonError, match="step"):
            loader.state_dict()
        next(loader)
        assert loader.step == 1
        loader.state_dict()


@pytest.mark.parametrize(("rank", "degree"), [(0, 3), (0, 8), (0, 0), (2, 2), (-1, 2)])
def test_refusal_ranks_that_do_not_fit_the_lanes(rank: int, degree: int) -> None:
    with opened(plain_world()) as stream, pytest.raises(zephon.TopologyError):
        stream.loader(rank, degree)


@pytest.mark.parametrize("local", [3, 8, 0, -1])
def test_refusal_a_local_batch_that_does_not_divide_the_share(local: int) -> None:
    with opened(plain_world()) as stream, pytest.raises(zephon.TopologyError):
        stream.loader(0, 2, local)


def edited(world: World, index: int) -> World:
    """One letter of one document is another; rows and bytes stay."""
    shards = [list(texts) for texts in world.sources[index].shards]
    shards[0][1] = ("Q" if shards[0][1][:1] != "Q" else "R") + shards[0][1][1:]
    return world.with_source(index, shards=tuple(map(tuple, shards)))


SMALL = World(
    sources=(
        SourceSpec("web", "0.7", (("alpha", "beta", "gamma delta"), ("epsilon",)), 1),
        SourceSpec("books", "0.3", (("zeta eta theta", "iota kappa", "lambda"),), 1),
    ),
    lanes=2,
    per_lane=2,
    window=2,
)

CHANGES: dict[str, tuple[World, str]] = {
    "seed": (replace(SMALL, seed=1), "seed"),
    "weight": (SMALL.with_source(1, weight="0.4"), "weight.*books|books.*weight"),
    "data": (edited(SMALL, 1), "books"),
    "row added": (SMALL.with_source(1, shards=(("zeta eta theta", "iota kappa", "lambda", "mu"),)), "books"),
    "shards cut elsewhere": (SMALL.with_source(0, shards=(("alpha", "beta"), ("gamma delta", "epsilon"))), "web"),
    "chunk rows": (SMALL.with_source(0, chunk_rows=2), "chunk_rows|chunk rows"),
    "window": (replace(SMALL, window=3), "window"),
    "piece": (replace(SMALL, piece="sequence"), "piece"),
    "unit": (replace(SMALL, unit="samples"), "unit"),
    "more lanes": (replace(SMALL, lanes=4, per_lane=1), "lanes"),
    "fewer lanes": (replace(SMALL, lanes=1, per_lane=4), "lanes"),
    "global batch": (replace(SMALL, per_lane=1), "global_batch_size|global batch"),
    "seq_len": (replace(SMALL, seq_len=17), "seq_len"),
    "eos": (replace(SMALL, eos=False), "eos"),
    "bos": (replace(SMALL, bos=False), "bos"),
    "name": (SMALL.with_source(0, name="net"), "net|web"),
    "source added": (
        replace(SMALL, sources=(*SMALL.sources, SourceSpec("code", "1", (("nu xi",),), 1))),
        "code|sources",
    ),
    "source taken away": (replace(SMALL, sources=SMALL.sources[:1]), "books|sources"),
    "sources in another order": (replace(SMALL, sources=SMALL.sources[::-1]), "web|books|sources"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_refusal_a_state_of_another_recipe_is_refused_by_field(change: str) -> None:
    other, names = CHANGES[change]
    with opened(SMALL) as stream:
        fleet = Fleet(stream, 1)
        fleet.steps(2)
        state = fleet.state()
    with opened(other) as stream:
        loader = stream.loader()
        with pytest.raises(zephon.RestoreError, match=f"(?s){names}"):
            loader.load_state_dict(state)


def test_refusal_both_values_of_the_field_are_shown() -> None:
    with opened(replace(SMALL, seed=12345)) as stream:
        state = Fleet(stream, 1).state()
    with opened(replace(SMALL, seed=67890)) as stream, pytest.raises(zephon.RestoreError) as refusal:
        stream.loader().load_state_dict(state)
    assert "12345" in str(refusal.value)
    assert "67890" in str(refusal.value)


def damaged() -> dict[str, Any]:
    def without(key: str) -> Any:
        return lambda old, new: {k: v for k, v in old.items() if k != key}

    return {
        "no header": without("header"),
        "a lane is missing": without("lane_00001"),
        "a lane of another step": lambda old, new: {**old, "lane_00001": new["lane_00001"]},
        "the header of another step": lambda old, new: {**old, "header": new["header"]},
        "a lane is cut short": lambda old, new: {**old, "lane_00000": old["lane_00000"][:-3]},
        "a lane is longer": lambda old, new: {**old, "lane_00000": old["lane_00000"] + b"\0"},
        "a lane is empty": lambda old, new: {**old, "lane_00000": b""},
        "the header is cut short": lambda old, new: {**old, "header": old["header"][:-3]},
        "the header is noise": lambda old, new: {**old, "header": b"\xff" * 40},
        "nothing": lambda old, new: {},
    }


@pytest.mark.parametrize("damage", damaged())
def test_refusal_a_damaged_state(damage: str) -> None:
    with opened(SMALL) as stream:
        fleet = Fleet(stream, 2)
        fleet.steps(1)
        old = fleet.state()
        fleet.steps(1)
        broken = damaged()[damage](old, fleet.state())
        with pytest.raises(zephon.RestoreError):
            stream.loader().load_state_dict(broken)


def test_refusal_a_rank_reads_its_own_lanes_only() -> None:
    with opened(SMALL) as stream:
        fleet = Fleet(stream, 2)
        fleet.steps(2)
        own = fleet.loaders[1].state_dict()
        expected = fleet.loaders[1].step_records()
        loader = stream.loader(1, 2)
        loader.load_state_dict(own)
        assert [record_lists(r) for r in loader.step_records()[1]] == [record_lists(r) for r in expected[1]]


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("window", [0, 16])
def test_refusal_a_source_without_any_position_is_an_error_that_names_it(lanes: int, window: int) -> None:
    sources = (SourceSpec("full", "1", (("abc",) * 5,), 1), SourceSpec("hollow", "0.1", (("", "", "x", ""),), 1))
    world = World(sources=sources, lanes=lanes, window=window, tokenizer="none")
    with pytest.raises(zephon.DataError, match="hollow"), opened(world) as stream:
        Fleet(stream, 1).steps(40)


@pytest.mark.parametrize(
    ("texts", "window"),
    [
        *((texts, 0) for texts in [("abc", ""), ("", "abc"), ("", "", "abc"), ("abc", "", "", "", "")]),
        *((texts, 4) for texts in [("abc", ""), ("", "abc"), ("", "", "abc")]),
        (("abc", "", "", "", ""), 4),
    ],
)
def test_a_thin_source_with_fewer_chunks_than_lanes_is_no_error(texts: tuple[str, ...], window: int) -> None:
    """Each lane walks all chunks in each epoch of its own, so the one usable document always comes round."""
    world = World(sources=(SourceSpec("thin", "1", (texts,), 1),), lanes=6, seq_len=8, window=window, tokenizer="none")
    with opened(world) as stream:
        fleet = Fleet(stream, 3)
        for _ in range(12):
            for loader in fleet.loaders:
                for records in loader.step_records().values():
                    assert bytes(records[0]["input"].tolist()) == b"abababab"


@pytest.mark.parametrize(
    ("texts", "lanes"),
    [
        (("abcd", "", "efgh", ""), 1),
        (("abcd", "", "efgh", ""), 2),
        (("abcd", "", "efgh", "ijkl"), 4),
    ],
)
def test_a_source_with_a_few_empty_documents_is_no_error_however_long_it_runs(
    texts: tuple[str, ...], lanes: int
) -> None:
    """Half or a quarter of 4 rows are empty. A lane may draw only those for a while: chance, not a dead source."""
    world = World(sources=(SourceSpec("half", "1", (texts,), 1),), lanes=lanes, seq_len=16, window=1, tokenizer="none")
    with opened(world) as stream:
        Fleet(stream, 1).steps(400)


def test_refusal_a_source_without_rows() -> None:
    sources = (SourceSpec("full", "1", (("abc",),), 1), SourceSpec("hollow", "1", ((), ()), 1))
    with pytest.raises(zephon.ZephonError, match="hollow"), opened(World(sources=sources)) as stream:
        Fleet(stream, 1).steps(1)


@pytest.mark.parametrize("weight", ["0", "-1", "0.0"])
def test_refusal_a_weight_that_is_not_above_zero(weight: str) -> None:
    with pytest.raises(zephon.RecipeError, match="weight"), opened(SMALL.with_source(0, weight=weight)):
        pass


def test_refusal_nothing_of_run_and_folders_is_compared() -> None:
    with opened(SMALL) as stream:
        state = Fleet(stream, 1).state()
        expected = Fleet(stream, 1).steps(2)
    with opened(replace(SMALL, cache="another cache")) as stream:
        assert Fleet(stream, 2, state).steps(2) == expected


def test_livable_leaves_a_world_that_needs_nothing_as_it_is() -> None:
    assert livable(SMALL) == SMALL
