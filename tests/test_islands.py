"""Islands: loaders that own some of the lanes. Whoever owns a lane, and whenever it moves, its records are the same."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import write_recipe

from zephon import Loader, Stream, TopologyError
from zephon.digest import lane_digest
from zephon.errors import RestoreError

LANES, STEPS = 6, 5
Digests = dict[tuple[int, int], bytes]
"""By lane and the lane's own step."""


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stream]:
    with Stream.open(write_recipe(tmp_path_factory.mktemp("islands"), lanes=LANES, size=2 * LANES)) as opened:
        yield opened


@pytest.fixture(scope="module")
def whole(stream: Stream) -> Digests:
    """Every lane of one loader that has them all."""
    loader = stream.loader()
    return {
        key: one for step in range(4 * STEPS) for key, one in take(loader, dict.fromkeys(range(LANES), step)).items()
    }


def take(loader: Loader, at: dict[int, int]) -> Digests:
    """One step; `at` says how many steps of each lane came before."""
    return {(lane, at[lane]): lane_digest(records) for lane, records in loader.step_records().items()}


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """For each era, the owner of every lane and the steps that each of three islands makes."""
    owners = st.lists(st.integers(0, 2), min_size=LANES, max_size=LANES)
    paces = st.lists(st.integers(0, STEPS), min_size=3, max_size=3)
    return draw(st.lists(st.tuples(owners, paces), min_size=1, max_size=4))


@settings(max_examples=30)
@given(history=histories())
def test_lanes_give_the_same_records_whoever_owns_them(
    stream: Stream, whole: Digests, history: list[tuple[list[int], list[int]]]
) -> None:
    at, state = dict.fromkeys(range(LANES), 0), stream.loader(lanes=range(LANES)).state_dict()
    for owners, paces in history:
        moved = dict(state)
        for island, steps in enumerate(paces):
            lanes = [lane for lane in range(LANES) if owners[lane] == island]
            if not lanes:
                continue
            loader = stream.loader(lanes=lanes)
            loader.load_state_dict(state)  # of all lanes, each where its last owner left it
            for _ in range(steps):
                for key, digest in take(loader, at).items():
                    assert whole[key] == digest, key
                    at[key[0]] += 1
            moved |= loader.state_dict()
            assert loader.stats()[:3] == (records := 2 * len(lanes) * steps, records * 32, 0)
        state = moved
    assert sum(at.values()) == sum(paces[owner] for owners, paces in history for owner in owners)


@settings(max_examples=20)
@given(lanes=st.sets(st.integers(0, LANES - 1), min_size=2).filter(lambda lanes: len(lanes) % 2 == 0))
def test_the_ranks_of_an_island_share_its_lanes(stream: Stream, whole: Digests, lanes: set[int]) -> None:
    found: Digests = {}
    for rank in range(2):
        loader = stream.loader(rank, 2, lanes=sorted(lanes))
        found |= take(loader, dict.fromkeys(range(LANES), 0))
    assert found == {(lane, 0): whole[lane, 0] for lane in lanes}


def test_an_island_in_a_process_of_its_own(tmp_path: Path, whole: Digests) -> None:
    recipe = write_recipe(tmp_path, lanes=LANES, size=2 * LANES)
    recipe.write_text(recipe.read_text() + "isolate = true\n")
    with Stream.open(recipe) as stream:
        loader = stream.loader(lanes=[1, 4])
        for step in range(3):
            assert take(loader, {1: step, 4: step}) == {(lane, step): whole[lane, step] for lane in (1, 4)}


@pytest.mark.parametrize("lanes", [[], [LANES], [-1, 2]])
def test_lanes_that_no_island_can_have(stream: Stream, lanes: Sequence[int]) -> None:
    with pytest.raises(TopologyError, match=r"needs at least one of 0 to 5"):
        stream.loader(lanes=lanes)


def test_finite_streams_have_no_islands(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, extra='[mix]\non_end = "renormalise"')
    recipe.write_text(recipe.read_text().replace("lanes = 4\n", ""))
    with Stream.open(recipe) as stream, pytest.raises(TopologyError, match="a stream that repeats"):
        stream.loader(lanes=[0])


def test_ranks_must_divide_the_lanes_of_their_island(stream: Stream) -> None:
    with pytest.raises(TopologyError, match="2 data-parallel ranks cannot share 3 lanes"):
        stream.loader(0, 2, lanes=[0, 1, 5])


def test_a_lane_that_the_state_lacks(stream: Stream) -> None:
    state = stream.loader(lanes=[0, 1]).state_dict()
    with pytest.raises(RestoreError, match="lacks \\['lane_00002'\\]"):
        stream.loader(lanes=[1, 2]).load_state_dict(state)


def test_an_island_goes_on_from_a_run_that_was_allowed_something(tmp_path: Path) -> None:
    """Its own states say step 0, and were refused as damaged, since the history named a later one."""
    path = write_recipe(tmp_path, lanes=LANES, size=2 * LANES)
    with Stream.open(path) as stream:
        loader = stream.loader()
        for _ in range(3):
            loader.step_records()
        state = loader.state_dict()
    path.write_text(path.read_text().replace("weight = 0.3", "weight = 0.4"))
    with Stream.open(path) as stream:
        loader = stream.loader()
        loader.load_state_dict(state, ["weights"])
        loader.step_records()
        state = loader.state_dict()
        expected = [loader.step_records() for _ in range(2)]
        islands = [stream.loader(lanes=[1, 4]) for _ in range(2)]
        for step, island in enumerate(islands):
            island.load_state_dict(state)
            assert (island.step, island.stats()[:3]) == (0, (0, 0, 0))
            found = island.step_records()
            assert {lane: lane_digest(found[lane]) for lane in found} == {
                lane: lane_digest(expected[step][lane]) for lane in (1, 4)
            }
            assert (island.step, island.stats().records) == (1, 4)
            state = island.state_dict()
