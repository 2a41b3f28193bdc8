"""Faults on seeded schedules: every run ends, its tape replays bit for bit, every lane step counts once or is dead."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import write_recipe

from recipes.diloco.bigram import make
from recipes.diloco.chaos import Options, one_run
from recipes.diloco.faults import KINDS, schedule
from recipes.diloco.settings import Settings
from recipes.diloco.simulate import Network, Simulation
from recipes.diloco.tape import Take, account, replay


@given(
    seed=st.integers(0, 10**9), learners=st.integers(1, 9), length=st.integers(1000, 10**9), count=st.integers(0, 20)
)
def test_schedules_are_seeded_sorted_and_never_hurt_whom_they_hurt_already(
    seed: int, learners: int, length: int, count: int
) -> None:
    faults = schedule(seed, learners, length, count)
    assert faults == schedule(seed, learners, length, count) == sorted(faults)
    assert len(faults) <= count
    free = dict.fromkeys(range(learners), 0)
    for fault in faults:
        assert fault.kind in KINDS
        assert free[fault.learner] <= fault.at < length
        free[fault.learner] = fault.at + fault.lasting


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("chaos"), lanes=8, size=8)


@pytest.mark.parametrize("seed", range(10))
def test_chaos_on_a_virtual_clock(recipe: Path, seed: int) -> None:
    """A real stream, a real model, real messages; only time is virtual."""
    changed = Settings(learners=4, rounds=30, every=8, fragments=4)

    def island(learner: int) -> object:
        return make(learner, str(recipe), vocabulary=260)

    sim = Simulation(
        changed, island,  # type: ignore[arg-type]
        step_time=lambda learner, count: 900_000 + 60_000 * learner,
        network=Network(10_000, 1_000_000),
        faults=schedule(seed, 4, 30_000_000, 8),
    ).run()  # fmt: skip
    model = replay(sim.tape, changed, island)  # type: ignore[arg-type]
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(model.values, sim.syncer.model.values, strict=True))
    added = account(sim.tape, [Take(*one) for one in sim.takes])
    assert added.ends == {lane: one.steps for lane, one in sim.syncer.lanes.at.items()}
    assert added.steps >= 150


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 50))])
def test_chaos_in_real_processes(recipe: Path, tmp_path: Path, seed: int) -> None:
    """SIGKILL, SIGSTOP, slow learners, networks that carry nothing; `one_run` raises where anything is wrong."""
    said = one_run(Options(recipe=recipe, folder=tmp_path, seconds=4.0, vocabulary=260), seed)
    assert "replay equal" in said
