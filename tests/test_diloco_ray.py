"""Runs on a local Ray cluster: learners and shards that are killed, snapshots, shards beside one whole model."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import ray
from diloco_toys import TENSORS, Toy
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster
from ray.exceptions import RayTaskError
from small import write_recipe

from recipes.diloco.chaos import judge
from recipes.diloco.fragments import make_plan
from recipes.diloco.messages import Bye, LaneAt, Merged, Message, Own, Part, Stop, Welcome
from recipes.diloco.outer import GlobalModel
from recipes.diloco.ray_actors import ShardedModel, Talk, join, split, start_shards
from recipes.diloco.ray_driver import Driver
from recipes.diloco.run import Run
from recipes.diloco.settings import Settings
from recipes.diloco.tape import read_tape
from recipes.diloco.wire import encode

SETTINGS = Settings(learners=4, rounds=200, every=8, fragments=4)


@pytest.mark.parametrize(
    "message",
    [
        Merged(3, 1, b"abc"),
        Welcome(1, (0, 1), (LaneAt(2, 5, b"state"),), 2, b"xy"),
        Part(0, 1, 2, 0, 0, 0, b""),
        Bye(),
        Stop(),
    ],
)
def test_a_message_and_its_body_come_together_again(message: Message) -> None:
    head, body = split(message)
    assert join(head, body) == message
    assert not getattr(head, "body", b"")


@given(st.permutations(range(6)))
def test_messages_that_overtook_one_another_are_heard_in_order(order: list[int]) -> None:
    """A learner that follows lanes says so in the order of what it was told."""
    talk = Talk(Run(Path("nowhere"), SETTINGS), 0)
    heard: list[Message] = []
    talk.learner = cast(Any, type("Ear", (), {"receive": lambda self, message: heard.append(message) or [message]})())
    told = [Own(number, ()) for number in range(6)]
    for number in order:
        talk.hear(number, told[number])
    assert heard == told
    assert [talk.said.get_nowait() for _ in told] == told


@pytest.fixture(scope="module", autouse=True)
def calm() -> Iterator[None]:
    """Ray kills actors when the machine's memory runs short, whoever takes it: not the deaths that are tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        yield


@pytest.fixture(scope="module")
def cluster(calm: None) -> Iterator[None]:
    """A cluster on this machine."""
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("ray"), lanes=8, size=8)


def make_run(folder: Path, recipe: Path, **changes: Any) -> Run:
    run = Run(folder, SETTINGS, "recipes.diloco.bigram:make", {"recipe": str(recipe)}, snapshot_every=20, pace=0.1)
    run = replace(run, **changes)
    run.save()
    return run


def kill(actor: Any) -> None:
    os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)


def watch(run: Run, merges: dict[int, Callable[[], None]]) -> threading.Thread:
    """Do something when a run has merged so often."""

    def look() -> None:
        for count, act in sorted(merges.items()):
            while (run.folder / "tape.jsonl").read_bytes().count(b'"merge"') < count:
                time.sleep(0.01)
            act()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_run_outlives_a_node_with_its_learners_and_shards(tmp_path: Path, recipe: Path) -> None:
    """Fragments of 1 MB, so that they lie in the nodes' stores; comes first, since it has a cluster of its own."""
    wide = {"recipe": str(recipe), "vocabulary": 16_384, "width": 16}
    run = make_run(tmp_path / "run", recipe, settings=replace(SETTINGS, rounds=80), options=wide, pace=0.25)
    store: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    # Ray notices a node that is gone after 15 s and more; learners would have made all their steps by then.
    notice = {"health_check_period_ms": 300, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}
    head = {**store, "include_dashboard": False, "_system_config": notice}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    other = nodes.add_node(**store)
    try:
        ray.init(address=nodes.address, log_to_driver=False)
        driver, lost = Driver(run), list[int]()

        def lose() -> None:
            asked = [
                one.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
                for one in driver.learners.values()
            ]
            lost.extend(learner for learner, one in enumerate(ray.get(asked)) if one == other.node_id)
            nodes.remove_node(other, allow_graceful=False)

        watch(run, {10: lose})
        driver.serve()
    finally:
        ray.shutdown()
        nodes.shutdown()
    assert len(lost) == 2
    judge(run)
    tape = read_tape(run.folder / "tape.jsonl")
    assert {event["learner"] for event in tape if event["event"] == "gone"} == set(lost)
    after = tape[max(at for at, event in enumerate(tape) if event["event"] == "gone") :]
    merged = {event["fragment"] for event in after if event["event"] == "merge"}
    assert merged == {0, 1, 2, 3}, "no fragment went with the node"


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_run_outlives_a_learner_and_shards_and_trains_again_to_the_same_bits(tmp_path: Path, recipe: Path) -> None:
    run = make_run(tmp_path / "run", recipe)
    driver = Driver(run)
    acts = {
        6: lambda: kill(driver.learners[1]),
        12: lambda: kill(driver.shards[2]),
        18: lambda: kill(driver.shards[0]),
    }
    killer = watch(run, acts)
    driver.serve()
    killer.join(5)
    assert not killer.is_alive(), "the run ended before all were killed"
    added = judge(run)  # every bit, every lane step
    assert added.dead == added.named, "what died was told of"
    tape = read_tape(run.folder / "tape.jsonl")
    gone = [event["learner"] for event in tape if event["event"] == "gone"]
    assert gone == [1]
    back = max(at for at, event in enumerate(tape) if event["event"] == "join")
    assert tape[back]["learner"] == 1
    assert tape[back]["copy"] is not None, "it starts with the optimizer state of a peer"
    assert any(event["event"] == "step" and event["learner"] == 1 for event in tape[back:])
    counted = [event for event in tape if event["event"] == "merge"]
    after = [event["fragment"] for event in counted[18:]]
    assert {0, 2} <= set(after), "the fragments of the killed shards are merged again"
    steps = {
        learner: sum(event["event"] == "step" and event["learner"] == learner for event in tape) for learner in range(4)
    }
    assert min(steps[learner] for learner in (0, 2, 3)) > 0.9 * SETTINGS.rounds, "nobody waited for the dead"


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_learner_that_cannot_be_told_something_starts_afresh(tmp_path: Path, recipe: Path) -> None:
    """An object that is lost on its way to a learner would leave it deaf: it waits for that message for ever."""
    run = make_run(tmp_path / "run", recipe)
    lost = ray.remote(lambda: 1 / 0).remote()
    ray.wait([lost])  # before the run: to start a worker takes seconds
    driver = Driver(run)

    def lose() -> None:
        driver._calls[driver.learners[2].hear.remote(1, 10**6, Bye(), lost)] = (2, 1)

    watch(run, {6: lose})
    driver.serve()
    judge(run)
    tape = [(event["event"], event.get("learner")) for event in read_tape(run.folder / "tape.jsonl")]
    assert tape.count(("gone", 2)) == 1
    assert tape.count(("join", 2)) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_mistake_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(RayTaskError, match=r"Cannot read the recipe nowhere\.toml"):
        Driver(make_run(tmp_path / "run", Path("nowhere.toml"))).serve()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_run_goes_on_from_a_snapshot_with_other_learners(tmp_path: Path, recipe: Path) -> None:
    first = make_run(tmp_path / "first", recipe, settings=replace(SETTINGS, rounds=40))
    Driver(first).serve()
    more = replace(SETTINGS, rounds=24, learners=2)
    second = make_run(tmp_path / "second", recipe, settings=more, restore=str(first.folder / "snapshot.cut"))
    Driver(second).serve()
    start, *tape = read_tape(second.folder / "tape.jsonl")
    ends = {one["lane"]: one["steps"] for one in start["lanes"]}
    assert start["round"] >= 20
    assert min(ends.values()) > 0
    assert {event["learner"] for event in tape if event["event"] == "step"} == {0, 1}


@pytest.mark.slow
def test_the_command_starts_a_cluster_of_its_own_and_leaves_nothing(tmp_path: Path, recipe: Path) -> None:
    run = make_run(tmp_path / "run", recipe, settings=replace(SETTINGS, rounds=24, learners=2))
    command = [sys.executable, "-m", "recipes.diloco.ray_driver", str(run.folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    judge(run)
    assert read_tape(run.folder / "tape.jsonl")[-1]["event"] == "stopped"


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_shards_merge_as_one_model_does(tmp_path: Path) -> None:
    settings, toy = replace(SETTINGS, up="int4"), Toy()
    plan = make_plan(TENSORS, settings.fragments, settings.every)
    assert plan.averaged, "one fragment is averaged, the others are merged by direction"
    whole = GlobalModel(settings, plan, toy.read(plan))
    sharded = ShardedModel(GlobalModel(settings, plan, toy.read(plan)), start_shards(3))
    noise = np.random.default_rng(0)
    for round, fragment in ((round, round % 4) for round in range(1, 17)):
        base = whole.values[fragment]
        bodies = [
            encode("int4", base + noise.normal(size=base.size).astype(np.float32), base) if learner else b""
            for learner in range(3)
        ]
        parts = [
            Part(learner, round, fragment, whole.clocks[fragment], learner, 10 * learner, body)
            for learner, body in enumerate(bodies)
        ]
        parts = parts[: round % 5]  # at times nobody
        ours = sharded.merge(round, fragment, [replace(one, body=cast(Any, ray.put(one.body))) for one in parts])
        theirs = whole.merge(round, fragment, parts)
        assert (ours is None) == (theirs is None)
        if ours and theirs:
            assert replace(ours, body=ray.get(cast(Any, ours.body))) == theirs
            assert sharded.digest(fragment) == whole.digest(fragment)
        for model in (whole, sharded):
            model.forget(fragment, whole.clocks[fragment])
    assert sharded.clocks == whole.clocks
    for name in ("values", "momentum"):
        assert all(map(np.array_equal, getattr(sharded, name), getattr(whole, name)))
