"""Kill a loader, a worker or an isolated loader at random moments; go on elsewhere: is every batch the same?

    python -m benchmarks.kills RECIPE [--runs 100] [--steps 24] [--save-at 8]

Each run starts `zephon digest --lanes` with a random runner and number of ranks, kills one random process of it with
SIGKILL after a random time, and looks at what is left: processes, shared memory, private files. Then another `zephon
digest`, with another runner and number of ranks, goes on from the last complete state, or from the start. The report
says for every run which process was killed and in which phase.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.report import about, write
from zephon import Stream
from zephon.command.rehearse import process_tree
from zephon.digest import lane_digest
from zephon.ledger import compare_ledgers, ledger_line, read_ledger
from zephon.loader import admissible_worlds

VARIANTS = [
    ("inline", 1, False),
    ("threads", 2, False),
    ("process", 2, False),
    ("inline", 1, True),
    ("process", 1, True),
]


@dataclass
class Args:
    recipe: Annotated[Path, tyro.conf.Positional]
    runs: int = 100
    steps: int = 24
    save_at: int = 8
    seed: int = 1
    longest: float = 9.0
    """Seconds after the start up to which a kill may come."""


def main() -> None:
    args = tyro.cli(Args)
    chance = random.Random(args.seed)  # decides kills, never data
    work = Path(tempfile.mkdtemp(prefix="zephon-kills-"))
    with Stream.open(args.recipe) as stream:
        loader, facts, worlds = stream.loader(), about(stream), admissible_worlds(stream.recipe.lanes)
        whole: dict[int, dict[str, str]] = {}
        for step in range(1, args.steps + 1):
            lanes = {lane: lane_digest(mine) for lane, mine in loader.step_records().items()}
            whole[step] = ledger_line(step, lanes, whole=True)["lanes"]
    for number, (runner, workers, isolate) in enumerate(VARIANTS):
        run = f'\n[run]\nrunner = "{runner}"\nworkers = {workers}\nisolate = {str(isolate).lower()}\n'
        recipe_of(args, number).write_text(args.recipe.read_text() + run)
    try:
        rows = [one_run(args, number, chance, worlds, work, whole) for number in range(args.runs)]
    finally:
        for number in range(len(VARIANTS)):
            recipe_of(args, number).unlink()
        shutil.rmtree(work)
    phases = Counter(f"{row['killed']}, {row['phase']}" for row in rows)
    bad = [row for row in rows if row["differs"] is not None or row["left"]]
    print(json.dumps(phases, indent=1), "runs with a difference or something left:", bad)
    write("kills", {**facts, "phases": phases, "bad": bad, "rows": rows})
    assert not bad


def one_run(
    args: Args, number: int, chance: random.Random, worlds: list[int], work: Path, whole: Any
) -> dict[str, Any]:
    folder = work / f"run-{number}"
    folder.mkdir()
    shared = {path.name for path in Path("/dev/shm").iterdir()}
    variant, world = chance.randrange(len(VARIANTS)), chance.choice(worlds[:4])
    ledger, killed = folder / "first.jsonl", "nothing: it had ended"
    with ledger.open("wb") as out:
        process = start(args, variant, world, out, "--save", str(folder / "state"), "--save-at", str(args.save_at))
        moment = time.monotonic() + chance.uniform(0.3, args.longest)
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(0.005)
        family = process_tree(process.pid) if process.poll() is None else []
        if family:
            victim = chance.choice(family)
            killed = "loader" if victim == process.pid else kind_of(victim, process.pid, VARIANTS[variant][2])
            os.kill(victim, signal.SIGKILL)
        process.wait(timeout=120)
    seen = read_ledger(ledger) if ledger.stat().st_size and b"\n" in ledger.read_bytes() else {}
    left = what_is_left(family, shared)
    again, other = chance.randrange(len(VARIANTS)), chance.choice(worlds[:4])
    saved = folder / "state" / f"step-{args.save_at}"
    resume = ["--resume", str(folder / "state")] if (saved / "header").exists() and complete(saved, worlds[-1]) else []
    second = folder / "second.jsonl"
    with second.open("wb") as out:
        code = start(args, again, other, out, *resume).wait(timeout=300)
    result, before = compare_ledgers(whole, read_ledger(second)), compare_ledgers(whole, seen)
    expected = args.steps - (args.save_at if resume else 0)
    whole_run = code == 0 and result.compared == expected
    phase = "starting" if not seen else "before the save" if not resume else "after the save"
    return {
        "killed": killed, "phase": phase, "steps_before": len(seen),
        "first": [*VARIANTS[variant], world], "second": [*VARIANTS[again], other],
        "differs": result.step or before.step or (None if whole_run else "incomplete"), "left": left,
    }  # fmt: skip


def start(args: Args, variant: int, world: int, out: Any, *extra: str) -> subprocess.Popen[bytes]:
    """Start `zephon digest` with a way to run."""
    command = [sys.executable, "-m", "zephon", "digest", str(recipe_of(args, variant)), "--dp", str(world)]
    command += ["--steps", str(args.steps), "--lanes", *extra]
    return subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)


def recipe_of(args: Args, variant: int) -> Path:
    """The recipe with a way to run; it lies beside the recipe, since its paths start there."""
    return args.recipe.with_name(f"{args.recipe.stem}-kills-{variant}.toml")


def kind_of(pid: int, root: int, isolated: bool) -> str:
    """What a child is: the worker of a loader, the isolated loader, or a worker of that."""
    if not isolated:
        return "worker"
    parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return "isolated loader" if parent == root else "worker of an isolated loader"


def complete(saved: Path, lanes: int) -> bool:
    return all((saved / f"lane_{lane:05d}").exists() for lane in range(lanes))


def what_is_left(family: list[int], shared: set[str]) -> list[str]:
    """Processes of the killed run that live on, and names in shared memory."""
    deadline = time.monotonic() + 15
    while any(map(alive, family)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [f"process {pid}" for pid in family if alive(pid)]
    left += [f"/dev/shm/{name}" for name in {path.name for path in Path("/dev/shm").iterdir()} - shared]
    return left


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main()
