"""Decoupled DiLoCo in real processes: SIGKILL, SIGSTOP, a launcher that dies, bytes counted, TorchTitan learners."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from small import write_recipe
from worlds import tokenizer_folder

from recipes import titan_text
from recipes.diloco.chaos import leftovers
from recipes.diloco.judge import judge
from recipes.diloco.learner import plan_of
from recipes.diloco.messages import Expel, LaneAt, Message, Move, write
from recipes.diloco.processes import Processes, whole
from recipes.diloco.run import BookWriter, Run, read_book
from recipes.diloco.settings import Settings
from recipes.diloco.snapshot import Cut
from recipes.diloco.tape import Event, TapeWriter, account, read_tape, replay
from recipes.diloco.titan_island import IslandTrainer, TitanIsland
from recipes.diloco.traffic import INT4, Format, decoupled, ring
from zephon.errors import UsageError

USUAL = Settings(learners=3, rounds=60, every=6, fragments=4)
LANES = 6


def make_run(folder: Path, changed: Settings = USUAL, lanes: int = LANES, **more: Any) -> Run:
    recipe = write_recipe(folder / "data", lanes=lanes, size=2 * lanes)
    options = {"recipe": str(recipe), "vocabulary": 260, **more.pop("options", {})}
    return Run(folder / "run", changed, "recipes.diloco.bigram:make", options, pace=0.05, **more)


def tape_of(run: Run) -> list[Event]:
    file = run.folder / "tape.jsonl"
    return read_tape(file) if file.exists() else []


def nothing_left(run: Run, seconds: float = 30) -> None:
    """Ranks of a learner that was killed die with it, but not in the same instant."""
    until = time.monotonic() + seconds
    while list(leftovers(run.folder)):
        assert time.monotonic() < until, list(leftovers(run.folder))
        time.sleep(0.02)


@pytest.mark.parametrize("left", ["tape.jsonl", "books", "snapshot.cut", "final.cut"])
def test_a_folder_that_a_run_has_used_is_refused(tmp_path: Path, left: str) -> None:
    run = make_run(tmp_path)
    run.save()
    run.save()  # nothing has run yet
    (run.folder / left).mkdir()
    with pytest.raises(UsageError, match=f"holds {left} of a run: .*Nothing was started. Name a new folder"):
        Processes(run)
    with pytest.raises(UsageError, match="two runs would lie there as one"):
        TapeWriter(run.folder / "tape.jsonl")
    assert sorted(path.name for path in run.folder.iterdir()) == sorted([left, "run.json"])


def test_a_torn_line_costs_that_line_alone(tmp_path: Path) -> None:
    """A learner that was killed amid a line starts again, and goes on in the same book."""
    file = tmp_path / "books" / "learner_000.jsonl"
    for step in (1, 2, 3):
        book = BookWriter(file)
        book.write([(4, step, "aa"), (5, step, "bb")])
        if step == 2:
            file.write_bytes(file.read_bytes()[:-5])
    assert [(one.lane, one.step) for one in read_book(file, 0)] == [(4, 1), (5, 1), (4, 3), (5, 3)]
    file.write_bytes(file.read_bytes().replace(b"[5, 1,", b'["x", 1,'))
    with pytest.raises(UsageError, match=r"learner_000\.jsonl, line 1 is no line of a learner's book"):
        list(read_book(file, 0))
    tape = TapeWriter(tmp_path / "run" / "tape.jsonl")
    tape({"event": "stop", "round": 1})
    tape.close()
    file = tmp_path / "run" / "tape.jsonl"
    file.write_bytes(file.read_bytes() + b'{"event": "st')
    assert read_tape(file) == [{"event": "stop", "round": 1}]
    file.write_bytes(b"[1]\n")
    with pytest.raises(UsageError, match=r"tape\.jsonl, line 1 is no event of a tape"):
        read_tape(file)


def start_in_vain(run: Run) -> str:
    run.save()
    command = [sys.executable, "-m", "recipes.diloco.processes", str(run.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    nothing_left(run)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_run_that_cannot_begin_ends_with_what_its_learner_says(tmp_path: Path) -> None:
    run = make_run(tmp_path, options={"recipe": str(tmp_path / "none.toml")})
    assert "error: Cannot read the recipe" in start_in_vain(run)


def test_a_run_whose_snapshot_is_of_another_stream_ends_with_what_its_syncer_says(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    island = run.make_island(0)
    plan = plan_of(island, run.settings)
    lanes = {lane: LaneAt(lane, 0, state) for lane, state in island.first_lanes().items()}
    values = island.read(plan)
    cut = Cut(3, plan, values, [0 * one for one in values], [0] * len(values), lanes)
    cut.save(tmp_path / "cut", island.header.replace('"seed":7', '"seed":8'))
    assert "order.seed: 8 -> 7" in start_in_vain(replace(run, restore=str(tmp_path / "cut")))


def test_pipeline_stages_are_refused() -> None:
    base = titan_text.micro()
    config = IslandTrainer.Config(**{one.name: getattr(base, one.name) for one in fields(base)})
    config.parallelism = replace(base.parallelism, pipeline_parallel_degree=2)
    with pytest.raises(UsageError, match="pipeline_parallel_degree is 2, but an island merges .* a whole model"):
        TitanIsland(config)


def wait_for(processes: Processes, what: Callable[[list[Event]], bool], seconds: float = 120) -> None:
    """Look at the tape until it says something."""
    until = time.monotonic() + seconds
    while not what(tape_of(processes.run)):
        assert processes.syncer.poll() is None, processes.log("syncer")
        assert time.monotonic() < until, tape_of(processes.run)[-3:]
        time.sleep(0.02)


def reached(round: int) -> Callable[[list[Event]], bool]:
    return lambda tape: any(one.get("round", 0) >= round for one in tape if one["event"] == "close")


def start_all(processes: Processes) -> None:
    for learner in range(processes.run.settings.learners):
        processes.start(learner)


def tell(run: Run, message: Message) -> None:
    """What an operator says."""
    with socket.create_connection(("127.0.0.1", int((run.folder / "port").read_text()))) as link:
        link.sendall(write(message))


def test_a_learner_is_killed_and_comes_back(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with Processes(run) as processes:
        start_all(processes)
        wait_for(processes, reached(10))
        processes.kill(1)
        processes.start(1)
        processes.wait(120)
        assert [processes.learners[one].returncode for one in range(3)] == [0, 0, 0], processes.log("learner_1")
    added = judge(run)
    tape = tape_of(run)
    back = [one for one in tape if one["event"] == "join"][3:]
    assert [(one["learner"], one["copy"]) for one in back] == [(1, 0)]
    assert added.dead == added.named <= 2  # of its two lanes at most the step in hand
    assert [one["round"] for one in tape if one["event"] == "stop"] == [60]
    nothing_left(run)


@pytest.mark.slow
def test_lanes_move_and_a_learner_is_given_up_while_the_run_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, replace(USUAL, rounds=80))
    with Processes(run) as processes:
        start_all(processes)
        wait_for(processes, reached(10))
        tell(run, Move(((0, 2),)))
        wait_for(
            processes,
            lambda tape: any(one["event"] == "step" and 0 in one["lanes"] and one["learner"] == 2 for one in tape),
        )
        tell(run, Expel(1))
        wait_for(processes, lambda tape: sum(one["event"] == "join" for one in tape) == 4)
        processes.wait(120)
    judge(run)
    assert [one["learner"] for one in tape_of(run) if one["event"] == "expelled"] == [1]


@pytest.mark.slow
def test_a_stopped_learner_holds_up_nobody(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with Processes(run) as processes:
        start_all(processes)
        wait_for(processes, reached(5))
        processes.learners[2].send_signal(signal.SIGSTOP)
        wait_for(processes, reached(60))
        processes.learners[2].send_signal(signal.SIGCONT)
        processes.wait(120)
    judge(run)


@pytest.mark.slow
def test_a_run_goes_on_from_a_snapshot_on_disk_with_more_learners(tmp_path: Path) -> None:
    first = make_run(tmp_path, replace(USUAL, rounds=200), snapshot_every=10)
    with Processes(first) as processes:
        start_all(processes)
        wait_for(processes, lambda tape: (first.folder / "snapshot.cut").exists() and reached(15)(tape))
        processes.syncer.kill()
        for learner in processes.learners.values():
            assert learner.wait(60) == 1  # it says that the syncer is gone
        assert "The syncer is gone" in processes.log("learner_0")
    island = first.make_island(0)
    cut = Cut.load(first.folder / "snapshot.cut", plan_of(island, first.settings), island.header)
    changed = replace(USUAL, learners=5, rounds=20)
    second = replace(first, folder=tmp_path / "again", settings=changed, restore=str(first.folder / "snapshot.cut"))
    with Processes(second) as processes:
        start_all(processes)
        processes.wait(120)
    added = judge(second)
    assert all(steps > cut.lanes[lane].steps > 0 for lane, steps in added.ends.items())


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path, replace(USUAL, rounds=100_000))
    run.save()
    launcher = subprocess.Popen([sys.executable, "-m", "recipes.diloco.processes", str(run.folder)])
    until = time.monotonic() + 60
    while not reached(5)(tape_of(run)) and time.monotonic() < until:
        time.sleep(0.05)
    mine = [pid for pid in leftovers(run.folder) if pid != launcher.pid]
    assert len(mine) == 4
    os.kill(next(pid for pid in mine if "learner" in Path(f"/proc/{pid}/cmdline").read_text()), signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    nothing_left(run)


@pytest.mark.slow
@pytest.mark.parametrize(("up", "form"), [("bf16", Format(16)), ("int4", INT4)])
def test_bytes_on_the_wire_are_those_of_the_formula(tmp_path: Path, up: str, form: Format) -> None:
    """8 learners, H = 24, 264 k parameters: fragments, reports and all heads within 5 % of the formula."""
    changed = Settings(learners=8, rounds=48, every=24, fragments=4, up=up, quorum=8)  # nobody misses a merge
    run = make_run(tmp_path, changed, lanes=8, options={"width": 500})
    with Processes(run) as processes:
        start_all(processes)
        processes.wait(300)
    counted: dict[str, dict[int, int]] = {"up": defaultdict(int), "down": defaultdict(int)}
    for learner, way, kind, size in json.loads((run.folder / "traffic.json").read_text()):
        if kind not in ("Hello", "Welcome"):  # what a learner begins with
            counted[way][learner] += size
    plan = plan_of(run.make_island(0), run.settings)
    formula = decoupled(list(map(plan.size, range(4))), every=24, steps=48, up=form)
    reference = ring(plan.total, learners=8, steps=48)
    for learner in range(8):
        assert counted["up"][learner] == pytest.approx(formula.up, rel=0.05)
        assert counted["down"][learner] == pytest.approx(formula.down, rel=0.05)
    less = reference.up / (sum(counted["up"].values()) / 8)
    assert less == pytest.approx(42 if up == "bf16" else 42 * 16 / 4.0625, rel=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DTensor random operators")  # of the replay in this process, on a CPU
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_learner_is_a_torchtitan_job(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # as a trainer of this process leaves it: learners must not take it for theirs
    recipe = write_recipe(tmp_path / "data", lanes=8, size=16)
    training = {"seq_len": 32, "global_batch_size": 16, "local_batch_size": 2, "steps": 40}
    options = {
        "recipe": str(recipe), "folder": str(tmp_path / "out"), "assets": str(tokenizer_folder("both")),
        "training": training,
    }  # fmt: skip
    changed = Settings(learners=2, rounds=10_000, every=6, fragments=6)
    run = Run(tmp_path / "run", changed, "recipes.diloco.titan_island:make", options, ranks=ranks, snapshot_every=0)
    with Processes(run) as processes:
        start_all(processes)
        wait_for(processes, reached(8), 180)
        processes.kill(1)
        processes.start(1)
        wait_for(processes, lambda tape: sum(one["event"] == "join" for one in tape) == 3, 180)
        back = next(i for i, one in enumerate(tape_of(run)) if one["event"] == "join" and i > 3)
        wait_for(processes, lambda tape: sum(one["event"] == "step" and one["learner"] == 1 for one in tape[back:]) > 6)
        processes.syncer.kill()
    nothing_left(run)
    tape = tape_of(run)
    assert [one["copy"] for one in tape if one["event"] == "join"] == [None, None, 0]
    added = account(tape, run.takes())
    assert added.named <= added.dead
    if ranks == 1:
        monkeypatch.delenv("RANK")
        replay(tape, changed, run.make_island)


def test_a_learner_that_always_fails_stops_the_run_with_its_log(tmp_path: Path) -> None:
    """Started again for ever, it would hide a wrong name among the options."""
    run = make_run(tmp_path, options={"width_": 8})
    with pytest.raises(RuntimeError, match=r"Learner \d failed 3 times(?s:.*)unexpected keyword argument 'width_'"):
        whole(run)
    nothing_left(run)
