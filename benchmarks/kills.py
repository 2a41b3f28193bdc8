"""Kill one process of a run with SIGKILL at a chosen moment; go on elsewhere: every batch the same, nothing left?

    python -m benchmarks.kills [--runs 100] [--trainers 20] [--seed 1]

A run is `zephon digest`, of texts or of texts and images, or TorchTitan's trainer under torchrun on 2 ranks. The kind
of victim is drawn first, then a way to run that has one. The moment follows from what the run has done (its indexes,
lines of its ledger, the folder of its state), so no run can end before it. A worker that dies is replaced and its run
goes on; any other death must end the run with an error that names it. Then another run goes on with another runner and
number of ranks. Left is what outlives a run: processes, found by a mark in their environment, and the nameless memory
files that they hold; names in shared memory that nobody holds; temporary files; and, at last, what in the cache or
beside a state an undisturbed run does not leave.
"""

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.leftovers import ended, files_below, shared_memory, what_is_left
from benchmarks.report import write
from benchmarks.victims import (
    AFTER,
    APART,
    BEFORE,
    BOUND,
    DURING,
    INDEXING,
    INLINE,
    LOADERS,
    LONG,
    PHASES,
    SINGLE,
    STARTING,
    TRAINERS,
    WAYS,
    Job,
    Stage,
    Victim,
    Way,
    stage,
    started,
)  # fmt: skip
from recipes.demo.corpus import build
from recipes.demo.pictures import MARKS, build_pairs
from zephon import UsageError
from zephon.command.saved import read_state
from zephon.ledger import Steps, read_ledger

FAULTS = ("not hit", "hang", "unclear end", "differs", "left")  # how the text of a fault begins


@dataclass
class Args:
    runs: int = 100
    trainers: int = 20  # runs of TorchTitan's trainer among them; each takes some 30 s on two cores
    seed: int = 1


def main() -> None:
    args, console, rows = tyro.cli(Args), Console(width=max(120, Console().width)), list[dict[str, Any]]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, which jobs in the background ignore
    work, chance = Path(tempfile.mkdtemp(prefix="zephon-kills-")), random.Random(args.seed)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    try:
        with console.status("building a corpus, and what its streams give undisturbed"):
            build(work / "corpus", marks=MARKS)
            build_pairs(work / "corpus" / "pairs")
            stages = {name: stage(work, name, chance) for name in ("text", "mixed", *["trainer"] * (args.trainers > 0))}
        with Progress(*columns, console=console) as bars:
            task = bars.add_task("", total=args.runs)
            with contextlib.suppress(KeyboardInterrupt):  # what has been seen so far counts
                for number, (victim, target) in enumerate(plan(args, chance)):
                    bars.update(task, description=f"{victim.name}, {target}")
                    name = "trainer" if victim in TRAINERS else ("text", "mixed")[number % 2]
                    rows.append(one_run(stages[name], work / f"run-{number:04d}", victim, target))
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
    facts = {name: one.facts for name, one in stages.items()}
    write("kills_by_phase", {"stages": facts, "table": lines, "rows": rows})
    if bad := sum(bool(row["faults"]) for row in rows):
        sys.exit(f"{bad} of {len(rows)} runs are not as they should be; what they wrote is kept in {work}.")
    shutil.rmtree(work)


def plan(args: Args, chance: random.Random) -> list[tuple[Victim, str]]:
    """Victim and phase of every run, in random order; each kind of victim goes through the phases evenly."""
    kinds = cycle(LOADERS), cycle((*TRAINERS, TRAINERS[0]))  # ranks twice as often as what they start
    victims = [*islice(kinds[0], args.runs - args.trainers), *islice(kinds[1], args.trainers)]
    phases = {victim: cycle(chance.sample(PHASES, len(PHASES))) for victim in (*LOADERS, *TRAINERS)}
    return chance.sample([(victim, next(phases[victim])) for victim in victims], len(victims))


def one_run(at: Stage, folder: Path, victim: Victim, target: str) -> dict[str, Any]:
    """Start, kill, look, go on elsewhere, look again."""
    shared = shared_memory()
    way, ranks = at.chance.choice(victim.ways), 2 if at.trainer else at.chance.choice((1, 2, 4))
    row: dict[str, Any] = {
        "stream": at.name,
        "victim": victim.name,
        "target": target,
        "phase": None,
        "first": [*way, ranks],
    }
    job = started(at, folder, "first", way, ranks, at.steps if victim.code == 0 else 100_000)
    come = moment(at, job, victim, target)
    faults = strike(at, job, victim, row) if come else ["not hit: the moment never came"]
    left = what_is_left(folder, shared)
    if not faults:
        reached = at.steps if victim.code == 0 else job.lines() - 2 * at.trainer  # a rank may lack its last two lines
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


def moment(at: Stage, job: Job, victim: Victim, target: str) -> bool:
    """Wait until the victim is there and the run in the phase that was drawn, then for a random point of that phase."""
    if not job.wait(lambda: job.found(victim.place)):
        return False
    if target == INDEXING:
        come = job.wait(lambda: job.indexing() or job.lines())
        time.sleep(at.chance.uniform(0, 0.02))  # the indexes of these files are made in 20 to 60 ms
        return come
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


def files_left(at: Stage, folder: Path) -> list[str]:
    """Files of the cache and of states that an undisturbed run does not leave, or leaves with other bytes."""
    cache, state = files_below(folder / "cache"), files_below(folder / f"state/step-{at.save_at}")
    pairs = ("cache", cache, at.cache), ("state", state, {} if at.trainer else at.state)
    left = [f"{what}/{one}" for what, mine, known in pairs for one in mine if mine[one] != known.get(one)]
    return left + [one.name for one in (folder / "run").rglob("*.tmp*")]


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
