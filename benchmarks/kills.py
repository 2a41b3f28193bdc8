"""Kill one process of a run with SIGKILL at a chosen moment; go on elsewhere: every batch the same, nothing left?

    python -m benchmarks.kills [--runs 100] [--trainers 20] [--seed 1]

A run is `zephon digest`, or TorchTitan's trainer under torchrun on 2 ranks. The kind of victim is drawn first, then a
way to run that has one. The moment follows from what the run has done (lines of its ledger, the folder of its state),
so no run can end before it. A worker that dies is replaced and its run goes on; any other death must end the run with
an error that names it. Then another run goes on with another runner and number of ranks. Left is what outlives a run:
processes, found by a mark in their environment, and the nameless memory files that they hold; names in shared memory
that nobody holds; temporary files; and, at last, what in the cache or beside a state an undisturbed run does not leave.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.corpus import RECIPE
from benchmarks.report import about, write
from recipes.demo.corpus import build
from zephon import Stream, UsageError
from zephon.command.saved import read_state
from zephon.digest import lane_digest
from zephon.ledger import Steps, ledger_line, read_ledger

PHASES = STARTING, BEFORE, DURING, AFTER = ("starting", "before the save", "during the save", "after the save")
FAULTS = ("not hit", "hang", "unclear end", "differs", "left")  # how the text of a fault begins
BOUND, LONG = 60.0, 300.0  # seconds for a killed run to end (torchrun gives other ranks 30), and for one that goes on

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


@dataclass
class Args:
    runs: int = 100
    trainers: int = 20  # runs of TorchTitan's trainer among them; each takes some 30 s on two cores
    seed: int = 1


@dataclass(frozen=True)
class Stage:
    """What a stream gives where nobody kills anything, and how its runs go."""

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
        return DURING if last.parent.exists() else BEFORE if self.lines() else STARTING

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


def main() -> None:
    args, console, rows = tyro.cli(Args), Console(width=max(120, Console().width)), list[dict[str, Any]]()
    work, chance = Path(tempfile.mkdtemp(prefix="zephon-kills-")), random.Random(args.seed)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    try:
        with console.status("building a corpus, and what its streams give undisturbed"):
            build(work / "corpus")
            stages = tuple(stage(work, trainer, chance) for trainer in (False, True))
        with Progress(*columns, console=console) as bars:
            task = bars.add_task("", total=args.runs)
            for number, (victim, target) in enumerate(plan(args, chance)):
                bars.update(task, description=f"{victim.name}, {target}")
                rows.append(one_run(stages[victim in TRAINERS], work / f"run-{number:04d}", victim, target))
                if rows[-1]["faults"]:
                    bars.console.print(f"run {number}: {rows[-1]}", markup=False)
                bars.advance(task)
    finally:
        ended(work)
    lines = summary(rows)
    table = Table(*lines[0], title="Runs by victim and phase, runs by fault, longest time from a kill to the end")
    for line in lines:
        table.add_row(*map(str, line.values()))
    console.print(table)
    write("kills_by_phase", {"loaders": stages[0].facts, "trainers": stages[1].facts, "table": lines, "rows": rows})
    if bad := sum(bool(row["faults"]) for row in rows):
        sys.exit(f"{bad} of {len(rows)} runs are not as they should be; what they wrote is kept in {work}.")
    shutil.rmtree(work)


def plan(args: Args, chance: random.Random) -> list[tuple[Victim, str]]:
    """Victim and phase of every run, in random order; each kind of victim goes through the phases evenly."""
    kinds = cycle(LOADERS), cycle((*TRAINERS, TRAINERS[0]))  # ranks twice as often as what they start
    victims = [*islice(kinds[0], args.runs - args.trainers), *islice(kinds[1], args.trainers)]
    phases = {victim: cycle(chance.sample(PHASES, len(PHASES))) for victim in (*LOADERS, *TRAINERS)}
    return chance.sample([(victim, next(phases[victim])) for victim in victims], len(victims))


def stage(work: Path, trainer: bool, chance: random.Random) -> Stage:
    """Take a stream further than any run that is killed comes, undisturbed and in this process."""
    seq_len, size, save_at, steps, saving = (64, 8, 3, 8, 0.1) if trainer else (2048, 16, 20, 160, 0.04)
    recipe, cache, whole, state = work / f"{seq_len}.toml", work / f"cache-{seq_len}", Steps(), dict[str, bytes]()
    text = RECIPE.format(lanes=8, size=size).replace("seq_len = 2048", f"seq_len = {seq_len}")
    text = text.replace('path = "', f'path = "{work}/corpus/').replace('["', f'["{work}/corpus/')
    recipe.write_text(f'{text}[run]\ncache = "{cache}"\n')
    with Stream.open(recipe) as stream:
        loader = stream.loader()
        for step in range(1, 4 * steps + 1):
            lanes = {lane: lane_digest(mine) for lane, mine in loader.step_records().items()}
            whole[step] = ledger_line(step, lanes, whole=True)["lanes"]
            state = loader.state_dict() if step == save_at else state
        facts = {**about(stream), "save_at": save_at, "steps": steps}
    return Stage(text, trainer, save_at, steps, saving, whole, state, files_below(cache), facts, chance)


def one_run(at: Stage, folder: Path, victim: Victim, target: str) -> dict[str, Any]:
    """Start, kill, look, go on elsewhere, look again."""
    shared = shared_memory()
    way, ranks = at.chance.choice(victim.ways), 2 if at.trainer else at.chance.choice((1, 2, 4))
    row: dict[str, Any] = {"victim": victim.name, "target": target, "phase": None, "first": [*way, ranks]}
    job = started(at, folder, "first", way, ranks, at.steps if victim.code == 0 else 100_000)
    come = moment(at, job, victim, target)
    faults = strike(at, job, victim, row) if come else ["not hit: the moment never came"]
    left = what_is_left(folder, shared)
    if not faults:
        reached = at.steps if victim.code == 0 else job.lines() - at.trainer  # one rank may lack its last line
        faults = differences(at, job, 0, reached)
        others = [one for one in ((INLINE, SINGLE, APART) if at.trainer else WAYS) if one != way]
        ranks = at.chance.choice([one for one in (1, 1, 1, 2, 4) if one != ranks])  # four trainers are dear
        faults += go_on(at, folder, at.chance.choice(others), ranks, max(reached, at.save_at), row)
        left += what_is_left(folder, shared) + files_left(at, folder)
    runs = any(one.startswith(("not hit", "hang")) for one in faults)  # then nothing has been left yet
    row["faults"] = [*faults, *(f"left: {one}" for one in left if not runs)]
    if not row["faults"]:
        shutil.rmtree(folder)
    return row


def started(at: Stage, folder: Path, name: str, way: Way, ranks: int, steps: int, resume: bool = False) -> Job:
    """Start a run, with the mark by which its processes are found and a folder of its own for temporary files."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    run = f'[run]\ncache = "cache"\nrunner = "{way[0]}"\nworkers = {way[1]}\nisolate = {str(way[2]).lower()}\n'
    (folder / f"{name}.toml").write_text(at.recipe + run)
    full = [sys.executable, "-m", *command(at, folder, str(folder / f"{name}.toml"), ranks, resume)]
    full += ["--training.steps" if at.trainer else "--steps", str(steps)]
    ours = {"ZEPHON_KILLS": str(folder), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
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


def moment(at: Stage, job: Job, victim: Victim, target: str) -> bool:
    """Wait until the victim is there and the run in the phase that was drawn, then for a random point of that phase."""
    if not job.wait(lambda: job.found(victim.place)):
        return False
    seen = time.monotonic()
    if target == STARTING:
        until = seen + at.chance.uniform(0, at.typical.get(victim.name, 4.0 if at.trainer else 0.4))
        return job.wait(lambda: job.lines() or time.monotonic() > until)
    if not job.wait(job.lines):
        return False
    at.typical[victim.name] = time.monotonic() - seen
    first, last = {BEFORE: (1, at.save_at - 1), DURING: (1, 1), AFTER: (at.save_at + 1, 2 * at.save_at)}[target]
    line, phases = at.chance.randint(first, last), PHASES[PHASES.index(target) :]
    come = job.wait(lambda: job.lines() >= line and job.phase() in phases)
    time.sleep(at.chance.uniform(0, at.saving if target == DURING else at.saving / 10))
    return come and job.process.poll() is None


def strike(at: Stage, job: Job, victim: Victim, row: dict[str, Any]) -> list[str]:
    """Kill one process of the kind and wait for the end; says how that is not the end which it must come to."""
    found = job.found(victim.place)
    row["phase"], row["lines"] = job.phase(), job.lines()
    try:
        os.kill(at.chance.choice(found), signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return ["not hit: the victim had ended"]
    struck = time.monotonic()
    row["code"] = code = job.end(LONG if victim.code == 0 else BOUND)
    row["end_s"] = round(time.monotonic() - struck, 2)
    if code is None:
        return [f"hang: has not ended {row['end_s']:.0f} s after the kill"]
    said = "".join((job.folder / f"first.{one}").read_text(errors="replace") for one in ("out", "err"))
    if code != victim.code or victim.told not in " ".join(said.split()):
        return [f"unclear end: exit code {code}, expected {victim.code} and a log that says {victim.told!r}"]
    return []


def go_on(at: Stage, folder: Path, way: Way, ranks: int, reached: int, row: dict[str, Any]) -> list[str]:
    """Start another run on what the killed one has left; says what is not as in an undisturbed one."""
    start, faults = 0, list[str]()
    if at.trainer:
        complete = (folder / "run" / "checkpoint").glob("step-*/.metadata")  # TorchTitan takes the last of them
        start = max((int(one.parent.name[5:]) for one in complete), default=0)
    else:
        with contextlib.suppress(UsageError):
            if read_state(folder / "state") != at.state:
                faults.append("left: a state counts as complete and is not that of an undisturbed run")
            start = at.save_at
    steps = reached + (2 if at.trainer else 5)
    job = started(at, folder, "second", way, ranks, steps, resume=start > 0)
    row["second"], row["from"] = [*way, ranks], start
    if (code := job.end(LONG)) != 0:
        return [*faults, "hang: the run that goes on" if code is None else f"unclear end: going on ended with {code}"]
    return faults + differences(at, job, start, steps)


def differences(at: Stage, job: Job, start: int, end: int) -> list[str]:
    """Lanes of a run's ledger that are not those of the undisturbed stream, and steps up to `end` that it lacks."""
    seen, faults = Steps(), list[str]()
    for file in job.ledgers():
        try:
            for step, lanes in read_ledger(file).items():
                seen[step] = {**seen.get(step, {}), **lanes}
                wrong = lanes.items() - at.whole.get(step, {}).items()
                faults += [f"differs: step {step}, lane {lane}" for lane, _ in sorted(wrong)]
        except UsageError as error:
            faults.append(f"differs: {str(error).replace(str(file), file.name)}")
    short = [step for step in range(start + 1, end + 1) if seen.get(step, {}).keys() != at.whole[step].keys()]
    return faults + [f"differs: step {step} is not there whole" for step in short]


def what_is_left(folder: Path, shared: dict[str, int]) -> list[str]:
    """What outlives a run, by name; processes get 15 s to end, and are killed when they have been noted."""
    deadline = time.monotonic() + 15
    while marked(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [*ended(folder), *(f"temporary file {one}" for one in files_below(folder / "tmp"))]
    new = shared_memory().items() - shared.items()
    maps = b"\n".join(proc(one.name, "maps") for one in Path("/proc").glob("[0-9]*")).splitlines()
    held = {int(line.split()[4]) for line in maps if b"/dev/shm/" in line}  # by others, who are none of ours
    return left + [f"shared memory {name}" for name, file in new & shared_memory().items() if file not in held]


def files_left(at: Stage, folder: Path) -> list[str]:
    """Files of the cache and of states that an undisturbed run does not leave, or leaves with other bytes."""
    cache, state = files_below(folder / "cache"), files_below(folder / f"state/step-{at.save_at}")
    pairs = ("cache", cache, at.cache), ("state", state, {} if at.trainer else at.state)
    left = [f"{what}/{one}" for what, mine, known in pairs for one in mine if mine[one] != known.get(one)]
    return left + [one.name for one in (folder / "run").rglob("*.tmp*")]


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}


def shared_memory() -> dict[str, int]:
    """Names and the files behind them, by which mappings are told: a semaphore is mapped before it has its name."""
    return {one.name: one.inode() for one in os.scandir("/dev/shm")}


def marked(folder: Path) -> list[int]:
    """The living processes of all runs in or below a folder."""
    mark = f"ZEPHON_KILLS={folder}".encode()
    return [int(one.name) for one in Path("/proc").glob("[0-9]*") if mark in proc(one.name, "environ")]


def ended(folder: Path) -> list[str]:
    """Kill what still runs in or below a folder, and name it."""
    names = list[str]()
    for pid in marked(folder):
        words = " ".join(proc(pid, "cmdline").decode(errors="replace").split("\0")[1:4])
        names.append(f"process {words}, which holds {proc(pid, 'maps').count(b'memfd:zephon')} memory files")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return names


def children(pid: int, word: str) -> list[int]:
    """The children that the first thread of a process has started, oldest first, whose commands have a word in them."""
    every = map(int, proc(pid, f"task/{pid}/children").split())
    return [one for one in every if word.encode() in proc(one, "cmdline").replace(b"\0", b" ")]


def proc(pid: int | str, name: str) -> bytes:
    """What the kernel says of a process; nothing of one that has gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line a kind of victim, and one for all: runs by phase and by fault, the longest time from a kill to an end."""
    out: list[dict[str, Any]] = []
    for name in (*(one.name for one in (*LOADERS, *TRAINERS)), "all"):
        mine = [row for row in rows if name in (row["victim"], "all")]
        line = {"victim": name, **{phase: sum(row["phase"] == phase for row in mine) for phase in PHASES}}
        line |= {what: sum(any(one.startswith(what) for one in row["faults"]) for row in mine) for what in FAULTS}
        out.append({**line, "end, s": max((row["end_s"] for row in mine if row.get("code")), default=0.0)})
    return out


if __name__ == "__main__":
    main()
