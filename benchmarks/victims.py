"""Runs that can be killed (`zephon digest`, or TorchTitan's trainer under torchrun), as they are seen from outside.

Phases follow from what a run has done: lines of its ledger, the folder of its state.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.corpus import IMAGES, TEXT
from benchmarks.leftovers import MARK, children, files_below
from benchmarks.report import about
from zephon import Stream
from zephon.digest import lane_digest
from zephon.ledger import Steps, ledger_line

BOUND, LONG = 60.0, 300.0  # seconds for a killed run to end (torchrun gives other ranks 30), and for one that goes on
PHASES = ("starting", "indexing", "before the save", "during the save", "after the save")
STARTING, INDEXING, BEFORE, DURING, AFTER = PHASES

Way = tuple[str, int, bool]  # runner, workers and isolate of [run]
INLINE, THREADS, PROCESS = ("inline", 1, False), ("threads", 2, False), ("process", 2, False)
SINGLE, APART, BOTH = ("process", 1, False), ("inline", 1, True), ("process", 1, True)
WAYS = (INLINE, THREADS, PROCESS, APART, BOTH)


class Victim(NamedTuple):
    """A kind of process to kill: its place in the family, and which exit code and words its death must bring about."""

    name: str
    place: str
    ways: tuple[Way, ...]
    code: int
    told: str


REPLACED, DIED = "died (exit code -9); replacing it", "The process of the isolated loader died (exit code -9"
LOADERS = (
    Victim("loader", "top", WAYS, -signal.SIGKILL, ""),
    Victim("worker", "worker", (PROCESS,), 0, REPLACED),
    Victim("isolated loader", "apart", (APART, BOTH), 1, DIED),
    Victim("isolated loader's worker", "below", (BOTH,), 0, REPLACED),
)
TRAINERS = (
    Victim("rank", "top", (APART, SINGLE), 1, "Signal 9 (SIGKILL) received by PID"),
    Victim("rank's isolated loader", "apart", (APART,), 1, DIED),
    Victim("rank's worker", "worker", (SINGLE,), 0, REPLACED),
)


@dataclass(frozen=True)
class Stage:
    """What a stream gives where nobody kills anything, and how its runs go."""

    name: str
    recipe: str
    trainer: bool
    save_at: int
    steps: int  # where a run ends that survives; any other is given no end that it could come to
    saving: float  # seconds that a save takes, about
    whole: Steps
    state: dict[str, bytes]
    cache: dict[str, bytes]
    facts: dict[str, Any]
    chance: random.Random  # decides kills, never data
    typical: dict[str, float] = field(default_factory=dict[str, float])  # seconds that victims lived to the first line


@dataclass
class Job:
    """A run that was started, and what can be seen of it from outside."""

    at: Stage
    folder: Path
    name: str
    way: Way
    ranks: int
    process: subprocess.Popen[bytes]

    def ledgers(self) -> list[Path]:
        ranks = (self.folder / "run" / "ledger").glob(f"*_of_{self.ranks:05d}.jsonl")
        return list(ranks) if self.at.trainer else [self.folder / f"{self.name}.out"]

    def lines(self) -> int:
        """Lines of the ledger that has most."""
        return max((file.read_bytes().count(b"\n") for file in self.ledgers()), default=0)

    def phase(self) -> str:
        """How far it has come, by what of the state is written first and last."""
        path = "run/checkpoint/step-{}/.metadata" if self.at.trainer else f"state/step-{{}}/{max(self.at.state)}"
        last = self.folder / path.format(self.at.save_at)
        if last.exists():
            return AFTER
        if last.parent.exists():
            return DURING
        return BEFORE if self.lines() else INDEXING if self.indexing() else STARTING

    def indexing(self) -> bool:
        """Whether some, but not all of the indexes are there."""
        cache = self.folder / "cache"
        return cache.exists() and not self.at.cache.keys() <= files_below(cache).keys()

    def found(self, place: str) -> list[int]:
        """The living processes at a place of the family. An isolated loader has the workers, in place of its parent."""
        tops = children(self.process.pid, "-u -m torchtitan.train") if self.at.trainer else [self.process.pid]
        if place == "top":
            return tops
        workers = self.way[1] if self.way[0] == "process" and not self.way[2] else 0
        helpers = [children(top, "zephon.run.child") for top in tops]
        if place == "worker":
            return [pid for mine in helpers for pid in mine[:workers]]
        apart = [pid for mine in helpers for pid in mine[workers:]]
        return apart if place == "apart" else [pid for one in apart for pid in children(one, "zephon.run.child")]

    def wait(self, until: Callable[[], object], seconds: float = LONG) -> bool:
        """Wait for something to be seen; False where the run ends, or time runs out, before."""
        deadline = time.monotonic() + seconds
        while not until():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.01 if self.at.trainer else 0.001)
        return True

    def end(self, seconds: float) -> int | None:
        """Exit code, or None where it hangs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)


SHAPES = {"text": (2048, 16, 20, 160, 0.04), "mixed": (256, 16, 20, 160, 0.04), "trainer": (64, 8, 3, 8, 0.1)}
"""Of each stage: seq_len, global batch, step of the save, last step, seconds that a save takes."""


def stage(work: Path, name: str, chance: random.Random) -> Stage:
    """Take a stream further than any run that is killed comes, undisturbed and in this process."""
    seq_len, size, save_at, steps, saving = SHAPES[name]
    recipe, cache, whole, state = work / f"{name}.toml", work / f"cache-{name}", Steps(), dict[str, bytes]()
    text = (IMAGES if name == "mixed" else TEXT).format(lanes=8, seq_len=seq_len, size=size)
    text = text.replace('path = "', f'path = "{work}/corpus/').replace('["', f'["{work}/corpus/')
    recipe.write_text(f'{text}[run]\ncache = "{cache}"\n')
    with Stream.open(recipe) as stream:
        loader = stream.loader()
        for step in range(1, 4 * steps + 1):
            lanes = {lane: lane_digest(mine) for lane, mine in loader.step_records().items()}
            whole[step] = ledger_line(step, lanes, whole=True)["lanes"]
            state = loader.state_dict() if step == save_at else state
        facts = {**about(stream), "save_at": save_at, "steps": steps}
    trainer = name == "trainer"
    return Stage(name, text, trainer, save_at, steps, saving, whole, state, files_below(cache), facts, chance)


def started(at: Stage, folder: Path, name: str, way: Way, ranks: int, steps: int, resume: bool = False) -> Job:
    """Start a run, with the mark by which its processes are found and a folder of its own for temporary files."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    run = f'[run]\ncache = "cache"\nrunner = "{way[0]}"\nworkers = {way[1]}\nisolate = {str(way[2]).lower()}\n'
    (folder / f"{name}.toml").write_text(at.recipe + run)
    full = [sys.executable, "-m", *command(at, folder, str(folder / f"{name}.toml"), ranks, resume)]
    full += ["--training.steps" if at.trainer else "--steps", str(steps)]
    ours = {MARK: str(folder), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        process = subprocess.Popen(full, stdout=out, stderr=err, env={**os.environ, **ours})
    return Job(at, folder, name, way, ranks, process)


def command(at: Stage, folder: Path, recipe: str, ranks: int, resume: bool) -> list[str]:
    """What to run. TorchTitan's trainer resumes by itself; a digest that resumes saves at its end."""
    save = str(folder / "state")
    if not at.trainer:
        digest = ["zephon", "digest", recipe, "--dp", str(ranks), "--lanes", "--save", save]
        return [*digest, *(("--resume", save) if resume else ("--save-at", str(at.save_at)))]
    torchrun = ["torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
    torchrun += ["--rdzv-endpoint=localhost:0", "--log-dir", str(folder / "torchrun"), "-m", "torchtitan.train"]
    torchrun += ["--module", "recipes.titan_text", "--config", "micro", "--dataloader.recipe", recipe]
    torchrun += ["--dump_folder", str(folder / "run"), "--hf_assets_path", str(folder.parent / "corpus" / "tokenizer")]
    torchrun += ["--training.global_batch_size", str(at.facts["global_batch_size"])]
    return [*torchrun, "--training.seq_len", str(at.facts["seq_len"]), "--checkpoint.interval", str(at.save_at)]
