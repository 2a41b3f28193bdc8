"""Four learners on the CPU, two killed and one slowed on the way, beside synchronous training under the same faults.

    python -m recipes.diloco.demo        (make demo-diloco)

Everything lands in `demo-diloco/`: corpus, runs, tapes, books, logs, `result.json` and `loss.png`. Every learner is a
TorchTitan job. A step takes at least `--pace` seconds, in which a process idles: it stands for an accelerator, since
four learners share a few cores here, and would otherwise get faster when one of them dies.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from recipes.demo.corpus import build
from recipes.diloco.baseline import DataParallel
from recipes.diloco.chaos import hurt
from recipes.diloco.demo_picture import draw
from recipes.diloco.faults import Fault
from recipes.diloco.processes import Processes
from recipes.diloco.run import Run
from recipes.diloco.settings import Settings
from recipes.diloco.snapshot import elements
from recipes.diloco.tape import account, read_tape
from recipes.diloco.traffic import ring

LEARNERS, SEQ_LEN, SEQUENCES = 4, 128, 24
console = Console()


@dataclass
class Options:
    """How long, and where."""

    folder: Path = Path("demo-diloco")
    """Emptied first."""

    seconds: float = 100.0
    """Of training, in each of the four runs."""

    pace: float = 1.0
    """Least seconds of a step."""

    save: int = 10
    """Steps between checkpoints of synchronous training; often, so that it loses little."""


@dataclass
class Outcome:
    """What a run did.

    Attributes:
        name: which run.
        seconds: from the first step to the last.
        tokens: trained on in steps that count.
        rate: tokens a second before the first fault.
        stops: how often all of it stood still.
        losses: seconds since the first step, tokens so far, loss; one a step of the run or of any learner.
    """

    name: str
    seconds: float
    tokens: int
    rate: float
    stops: int
    losses: list[tuple[float, int, float]]

    @property
    def goodput(self) -> float:
        """Share of what it would have trained on at the rate that it had before the first fault."""
        return self.tokens / (self.rate * self.seconds)

    def last_loss(self, tokens: int) -> float:
        """Mean loss over the last tenth before so many tokens."""
        near = [loss for _, at, loss in self.losses if 0.9 * tokens <= at <= tokens]
        return sum(near) / max(1, len(near))


def faults(seconds: float) -> list[Fault]:
    """Learner 1 and later learner 2 are killed, learner 3 is slowed between them."""
    shares = ((0.2, 1, "kill", 0.12), (0.4, 3, "slow", 0.25), (0.7, 2, "kill", 0.12))
    return [
        Fault(int(at * seconds * 1e6), who, kind, int(lasting * seconds * 1e6)) for at, who, kind, lasting in shares
    ]


def decoupled(options: Options, name: str, wanted: list[Fault]) -> tuple[Outcome, dict[str, Any]]:
    """A run of ours; also its account and its bytes on the wire."""
    root = options.folder.resolve()
    training = {"seq_len": SEQ_LEN, "global_batch_size": SEQUENCES, "local_batch_size": 2, "steps": steps(options)}
    kwargs = {
        "recipe": str(root / "recipe.toml"), "folder": str(root / name / "titan"), "assets": str(root / "tokenizer"),
        "training": training,
    }  # fmt: skip
    settings = Settings(learners=LEARNERS, rounds=steps(options), every=24, fragments=16)
    run = Run(root / name, settings, "recipes.diloco.titan_island:make", kwargs, pace=options.pace)
    with Processes(run) as processes:
        hurt(processes, wanted, seconds=10 * options.seconds)
    lines = [
        (line["time"], line["loss"])
        for file in (run.folder / "titan").glob("learner_*/loss.jsonl")
        for line in map(json.loads, file.read_text().splitlines())
    ]
    tape = read_tape(run.folder / "tape.jsonl")
    known = account(tape, run.takes())
    traffic = json.loads((run.folder / "traffic.json").read_text())
    up = sum(size for _, way, kind, size in traffic if way == "up" and kind in ("Part", "Report"))
    reference = ring(elements(run.folder / "final.cut"), learners=LEARNERS, steps=1).up
    made = sum(event["event"] == "step" for event in tape)
    about = {"account": known._asdict(), "up_bytes_a_step": up / made, "ring_bytes_a_step": reference}
    tokens = SEQUENCES * SEQ_LEN // LEARNERS
    return outcome(name, lines, tokens, known.tokens, 0, options), about


def synchronous(options: Options, name: str, wanted: list[Fault], elastic: bool) -> Outcome:
    """Synchronous training; a step that was trained on again counts once."""
    root = options.folder.resolve()
    training = {"seq_len": SEQ_LEN, "global_batch_size": SEQUENCES, "local_batch_size": 2, "steps": 10 * steps(options)}
    job = DataParallel(
        root / name, root / "recipe.toml", root / "tokenizer", LEARNERS, training, options.pace, options.save, elastic
    )
    stops = job.run(wanted, options.seconds)
    lines = [json.loads(line) for line in (root / name / "loss.jsonl").read_text().splitlines()]
    kept = {line["step"]: (line["time"], line["loss"]) for line in lines}  # the last time that a step was made
    tokens = SEQUENCES * SEQ_LEN
    made = outcome(name, list(kept.values()), tokens, len(kept) * tokens, stops, options)
    made.seconds = max(made.seconds, options.seconds)
    return made


def outcome(
    name: str, lines: list[tuple[float, float]], each: int, tokens: int, stops: int, options: Options
) -> Outcome:
    """Put the steps of a run in order of time."""
    lines = sorted(lines)
    first = lines[0][0]
    losses = [(at - first, (i + 1) * each, loss) for i, (at, loss) in enumerate(lines)]
    healthy = [at for at, _, _ in losses if at <= 0.2 * options.seconds]
    if len(healthy) < 2 * LEARNERS:
        raise SystemExit(f"{name}: only {len(healthy)} steps before the first fault; use a longer --seconds.")
    rate = each * (len(healthy) - LEARNERS) / (healthy[-1] - healthy[LEARNERS - 1])
    return Outcome(name, losses[-1][0], tokens, rate, stops, losses)


def steps(options: Options) -> int:
    """Steps that a run without faults makes."""
    return round(options.seconds / options.pace)


def main(options: Options) -> None:
    """Run all four, say and draw what came out."""
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    with console.status("building a corpus and a tokenizer from this machine's Python"):
        build(options.folder)
        shutil.copy(Path(__file__).parent / "recipe.toml", options.folder / "recipe.toml")
    wanted = faults(options.seconds)
    results: list[Outcome] = []
    about: dict[str, Any] = {}
    for name, given in (("undisturbed", []), ("decoupled", wanted)):
        with console.status(f"{name}: 4 learners, {options.seconds:.0f} s"):
            made, about[name] = decoupled(options, name, given)
        results.append(made)
    for name, elastic in (("elastic", True), ("restarted", False)):
        with console.status(f"synchronous data-parallel, {name}: {options.seconds:.0f} s"):
            results.append(synchronous(options, name, wanted, elastic))
    show(results, about)
    said = {"options": asdict(options) | {"folder": ""}, "about": about, "runs": [asdict(one) for one in results]}
    (options.folder / "result.json").write_text(json.dumps(said) + "\n")
    draw(results, [(one.at / 1e6, one.lasting / 1e6, one.kind) for one in wanted], options.folder / "loss.png")
    console.print(f"Picture: {options.folder}/loss.png")
    for name in about:
        judge(options.folder / name)


def judge(folder: Path) -> None:
    """Train again from a run's tape; ends with exit code 1 where a bit differs."""
    with console.status(f"{folder}: training again from the tape"):
        command = [sys.executable, "-m", "recipes.diloco.judge", str(folder)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder} does not train again to the same bits: {done.stderr[-2000:]}")
    console.print(f"{folder}: trained again from its tape, every bit equal.")


def show(results: list[Outcome], about: dict[str, Any]) -> None:
    """Print the table."""
    table = Table("run", "global stops", "goodput", "tokens", "loss at the same tokens", title="The same faults")
    least = min(one.tokens for one in results)
    for one in results:
        table.add_row(one.name, str(one.stops), f"{one.goodput:.0%}", f"{one.tokens:,}", f"{one.last_loss(least):.3f}")
    console.print(table)
    account, ours, ring = (about["decoupled"][name] for name in ("account", "up_bytes_a_step", "ring_bytes_a_step"))
    console.print(
        f"Lane steps that count: {account['steps']:,}, each once; {account['dead']} died with a learner, to be given "
        f"again. Sent per learner and step: {ours / 1e3:.0f} kB; a ring all-reduce in bf16 sends {ring / 1e3:.0f} kB."
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except KeyboardInterrupt:
        sys.exit("stopped by Ctrl-C")
