"""Who does the work, in which process and in which portions, never changes data: laws 1, 2, 3 and 7 at once.

The other law tests vary one thing of inline streams, or run one fixed world with a few runners. Here every runner, with
1 to 4 workers, isolated or not, meets worlds, ranks, micro-batches and resumes that nobody chose. One inline run on one
rank says what is right: digests, where a finite stream ends, and the bytes of every state, so that any run can go on
from any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from worlds import (
    Fleet,
    World,
    best_fit_worlds,
    divisors,
    finite_worlds,
    opened,
    record_lists,
    worlds,
)

import zephon
from zephon.run.runners import InlineRunner
from zephon.types import Ref, Sample, Segment
from zephon.worker import Runner

T = TypeVar("T")

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
STEPS = 8
"""Steps of a stream that repeats. A finite one is followed to its end."""

KINDS = [(algorithm, on_end) for algorithm in ("concat", "best_fit") for on_end in ("repeat", "stop", "renormalise")]


def law(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=QUIET)


def small_worlds(algorithm: str, on_end: str) -> st.SearchStrategy[World]:
    if on_end != "repeat":
        kind = {"algorithm": algorithm, "on_end": on_end}
        return finite_worlds(max_sources=3, max_batch=6).map(lambda world: replace(world, **kind))
    return worlds(max_sources=3, max_lanes=6) if algorithm == "concat" else best_fit_worlds(3, 6)


def drawn(strategy: st.SearchStrategy[T], number: int) -> T:
    """One value that `number` alone decides, for tests that cannot afford many; the first is always the plainest."""
    found: list[T] = []

    @seed(number)
    @settings(max_examples=2, database=None, phases=[Phase.generate], suppress_health_check=QUIET)
    @given(strategy)
    def take(value: T) -> None:
        found.append(value)

    take()
    return found[-1]


class CutFleet(Fleet):
    """All ranks of a run, each with micro-batches of a size of its own."""

    def __init__(self, stream: zephon.Stream, local: Sequence[int], pad_last: bool) -> None:
        self.loaders = [stream.loader(rank, len(local), size, pad_last=pad_last) for rank, size in enumerate(local)]


class Reference:
    """What an inline run on one rank gives: the digest of every step, and the state before it and after the last."""

    def __init__(self, world: World, pad_last: bool) -> None:
        self.pad_last = pad_last
        self.digests: list[str] = []
        with opened(world) as stream:
            fleet = Fleet(stream, 1, pad_last=pad_last)
            self.states: list[Mapping[str, bytes]] = [fleet.state()]
            while world.finite or len(self.digests) < STEPS:
                try:
                    self.digests.append(fleet.step())
                except StopIteration:
                    break
                self.states.append(fleet.state())


@dataclass(frozen=True)
class Course:
    """How a run is made: ranks with their micro-batches, where it begins, where it breaks off, and where it goes on."""

    local: tuple[int, ...]
    begin: int
    stop: int
    back: int


@st.composite
def courses(draw: st.DrawFn, world: World, steps: int) -> Course:
    degree = draw(st.sampled_from(world.degrees), label="ranks")
    sizes = st.sampled_from(divisors(world.batch // degree)[::-1])
    begin = draw(st.integers(0, steps), label="begin")
    return Course(
        local=tuple(draw(sizes, label=f"micro-batch of rank {rank}") for rank in range(degree)),
        begin=begin,
        stop=draw(st.integers(begin, steps), label="stop"),
        back=draw(st.integers(0, steps), label="back"),
    )


def follow(stream: zephon.Stream, reference: Reference, course: Course) -> None:
    """Go on from a state of the reference; then send the same loaders elsewhere, amid their work and from the end."""
    fleet = CutFleet(stream, course.local, reference.pad_last)
    if course.begin:
        load(fleet, reference.states[course.begin])
    assert fleet.state() == reference.states[course.begin]
    for step in range(course.begin, course.stop):
        assert fleet.step() == reference.digests[step]
        assert fleet.state() == reference.states[step + 1]
    for step in (course.back, course.stop):
        load(fleet, reference.states[step])
        finish(stream, fleet, reference, step)


def load(fleet: Fleet, state: Mapping[str, bytes]) -> None:
    for loader in fleet.loaders:
        loader.load_state_dict(state)


def finish(stream: zephon.Stream, fleet: Fleet, reference: Reference, done: int) -> None:
    left = reference.digests[done:]
    assert fleet.steps(len(left)) == left
    if stream.recipe.finite:
        assert fleet.to_end() == []
    assert fleet.state() == reference.states[-1]
    assert {loader.step for loader in fleet.loaders} == {len(reference.digests)}


# --- 1, 2, 3: threads, many worlds ---------------------------------------------------------------------------------


@law(20)
@given(st.sampled_from(KINDS), st.booleans(), st.data())
def test_execution_threads_give_what_one_inline_rank_gives(
    kind: tuple[str, str], pad_last: bool, data: st.DataObject
) -> None:
    world = data.draw(small_worlds(*kind), label="world")
    reference = Reference(world, pad_last)
    workers = data.draw(st.integers(1, 4), label="workers")
    with opened(replace(world, runner="threads", workers=workers)) as stream:
        for _ in range(2):
            follow(stream, reference, data.draw(courses(world, len(reference.digests)), label="course"))


# --- 1, 2, 3: processes, one drawn world each ----------------------------------------------------------------------

CHILDREN = [
    *(("process", workers, False) for workers in (1, 2, 3, 4)),
    ("inline", 1, True),
    *(("threads", workers, True) for workers in (1, 2, 3, 4)),
    *(("process", workers, True) for workers in (1, 2, 3, 4)),
]
CASES = [(*kind, *child) for kind, child in zip(cycle(KINDS), CHILDREN, strict=False)]


def lively(kind: tuple[str, str], number: int) -> tuple[World, Reference]:
    """A world of its own for each number, of a few steps at least."""
    for attempt in count():
        world = drawn(small_worlds(*kind), 100 * number + attempt)
        reference = Reference(world, pad_last=bool(number % 2))
        if 4 <= len(reference.digests) <= 40 and len(world.degrees) > 1:
            return world, reference
    raise AssertionError


@pytest.mark.parametrize(("algorithm", "on_end", "runner", "workers", "isolate"), CASES)
def test_execution_processes_give_what_one_inline_rank_gives(
    algorithm: str, on_end: str, runner: str, workers: int, isolate: bool
) -> None:
    number = CASES.index((algorithm, on_end, runner, workers, isolate))
    world, reference = lively((algorithm, on_end), number)
    every = courses(world, len(reference.digests))
    with opened(replace(world, runner=runner, workers=workers, isolate=isolate)) as stream:

        @law(8)
        @given(every)
        def agrees(course: Course) -> None:
            follow(stream, reference, course)

        if isolate:  # every rank has processes of its own: one course, of few ranks, that goes somewhere
            ranks = 1 if runner == "process" and workers > 2 else 2
            cheap = every.filter(lambda one: len(one.local) <= ranks and max(one.begin, one.back) < one.stop)
            follow(stream, reference, drawn(cheap, number))
        else:
            agrees()


# --- 7. pure -------------------------------------------------------------------------------------------------------


def made(stream: zephon.Stream, runner: Runner, source: int, groups: Sequence[Sequence[int]]) -> list[tuple[Any, ...]]:
    """What a runner makes of rows of a source, given in groups: row, size, counters and the built record of each."""
    worker = stream.worker
    arrays = [np.array(group, dtype=np.int64) for group in groups]
    tasks = [runner.submit(worker.measure, source, rows, rows * 0) for rows in arrays]
    found: list[tuple[Any, ...]] = []
    building = []
    for rows, task in zip(arrays, tasks, strict=True):
        measured = task.result()
        plans = []
        for index, (row, size) in enumerate(zip(measured.rows, measured.positions, strict=True)):
            sample = Sample(Ref(source, 0, 0, int(rows[row]), 0), size, measured.payloads[index])
            plans.append([Segment(sample, 0, min(size, stream.batch.seq_len))] if size else [])
            found.append((int(rows[row]), int(size), tuple(measured.counts.get(index, ()))))
        building.append(runner.submit(worker.materialise, plans))
    records = [record_lists(record) for task in building for record in worker.records(task.result())]
    return list(zip(found, records, strict=True))


@st.composite
def groupings(draw: st.DrawFn, rows: int) -> list[list[int]]:
    """Rows in any order, some twice, in groups of any size."""
    row = st.integers(0, rows - 1)
    return draw(st.lists(st.lists(row, min_size=1, max_size=12), min_size=1, max_size=10))


@pytest.mark.parametrize(
    ("runner", "workers"), [("inline", 1), *(("threads", n) for n in (1, 2, 3, 4)), ("process", 1), ("process", 3)]
)
def test_pure_the_same_rows_give_the_same_samples_whoever_measures_them_in_any_grouping(
    runner: str, workers: int
) -> None:
    world = drawn(worlds(max_sources=3, max_lanes=2), 50 + workers)
    with opened(replace(world, runner=runner, workers=workers)) as stream:

        @law(12)
        @given(st.data())
        def agrees(data: st.DataObject) -> None:
            source = data.draw(st.integers(0, len(world.sources) - 1), label="source")
            groups = data.draw(groupings(world.sources[source].rows), label="groups")
            alone = [[row] for group in groups for row in group]
            inline = InlineRunner(stream.watch)
            assert made(stream, stream.runner, source, groups) == made(stream, inline, source, alone)

        agrees()
