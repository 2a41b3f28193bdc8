"""Train, kill, resume on other numbers of ranks, and compare what `train_step` received.

    python -m recipes.demo

Everything lands in `demo/`: corpus, tokenizer, checkpoints, ledgers, logs, and `loss.png`. The exit code is 1 if any
digest of Zephon's differs.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recipes.demo.corpus import build
from recipes.demo.picture import draw
from zephon.command.rehearse import process_tree
from zephon.ledger import compare_ledgers, read_ledger

ROOT = Path("demo")
STEPS, SAVE = 40, 20
OURS, STOCK = ("recipes.titan_text", "micro"), ("recipes.demo.stock", "stock")

console = Console()
Losses = dict[int, float]


@dataclass
class Row:
    """One line of the final table."""

    name: str
    ranks: str
    equal: str
    differs: str
    losses: Losses = field(default_factory=dict[int, float])
    against: Losses = field(default_factory=dict[int, float])

    @property
    def loss_gap(self) -> str:
        both = self.losses.keys() & self.against.keys()
        return f"{max(abs(self.losses[step] - self.against[step]) for step in both):.0e}" if both else ""


def main() -> None:
    """Run the whole demonstration."""
    if ROOT.exists():
        shutil.rmtree(ROOT)
    ROOT.mkdir()
    with console.status("building a corpus and a tokenizer from this machine's Python"):
        counts = build(ROOT)
        shutil.copy(Path(__file__).parent / "recipe.toml", ROOT / "recipe.toml")
    console.print(
        f"Corpus: {counts['docs']} documents of prose, {counts['code']} of code, two sources mixed 0.7 / 0.3."
    )
    train(
        "seed", 1, OURS, "--checkpoint.create_seed_checkpoint", say="one seed checkpoint, so that all runs start alike"
    )
    ours = _zephon()
    stock = _stock()
    _report(ours, stock)
    if any(row.differs not in ("", "none") for row in ours):
        console.print("[red]A digest differs: the promise is broken.[/]")
        sys.exit(1)


def _zephon() -> list[Row]:
    """(a) an uninterrupted run; (b) the same, killed after its save; resumed on 1 and on 4 ranks."""
    train("a", 2, OURS, seed=True, say=f"(a) 2 ranks, {STEPS} steps")
    reached = kill_after_save("b")
    whole = read_ledger(ROOT / "a" / "ledger")
    rows = [Row("(a) uninterrupted", "2", "", "", losses("a"))]
    before = read_ledger(ROOT / "b" / "ledger")
    result = compare_ledgers(whole, before)
    rows.append(Row(f"(b) killed in step {reached + 1}", "2", *verdict(result.compared, result.step)))
    rows[-1].losses, rows[-1].against = losses("b"), losses("a")
    for ranks in (1, 4):
        name = f"b-on-{ranks}"
        _copy_checkpoint("b", name)
        train(name, ranks, OURS, say=f"(b) resumed at step {SAVE} on {count(ranks)}")
        result = compare_ledgers(whole, read_ledger(ROOT / name / "ledger"))
        row = Row("(b) resumed", f"2 → {ranks}", *verdict(result.compared, result.step, STEPS - SAVE))
        row.losses, row.against = losses(name), losses("a")
        rows.append(row)
    return rows


def _stock() -> list[Row]:
    """(c) TorchTitan's own loader: refused after a change of ranks, or silently started again."""
    train("stock", 2, STOCK, seed=True, say="(c) TorchTitan's own loader, 2 ranks")
    whole = rows_of("stock")
    rows = [Row("(c) uninterrupted", "2", "", "", losses("stock"))]
    for ranks in (1, 4):
        name = f"stock-on-{ranks}"
        _copy_checkpoint("stock", name)
        log = train(name, ranks, STOCK, must_work=False, say=f"(c) stock loader resumed on {count(ranks)}")
        rows.append(Row("(c) resumed", f"2 → {ranks}", "refused", refusal(log)))
        shutil.rmtree(ROOT / name)
        _copy_checkpoint("stock", name)
        train(
            name,
            ranks,
            STOCK,
            "--checkpoint.exclude_from_loading",
            "dataloader",
            say="(c) the same, its data state left out",
        )
        resumed = rows_of(name)
        differing = [step for step in sorted(resumed) if resumed[step] != whole.get(step)]
        row = Row("(c) data state left out", f"2 → {ranks}", *verdict(len(resumed), min(differing, default=None)))
        row.losses, row.against = losses(name), losses("stock")
        rows.append(row)
    return rows


def train(
    name: str, ranks: int, module: tuple[str, str], *extra: str, seed: bool = False, must_work: bool = True, say: str
) -> str:
    """Run one training job to its end; returns its log."""
    if seed:
        _copy_checkpoint("seed", name)
    with console.status(say):
        started = time.perf_counter()
        process = _launch(name, ranks, module, *extra)
        code = process.wait()
    log = (ROOT / name / "log.txt").read_text()
    if code and must_work:
        console.print(log[-4000:], markup=False)
        raise SystemExit(f"The run {name!r} failed with exit code {code}; its log is {ROOT / name / 'log.txt'}.")
    console.print(f"{say}: exit {code}, {time.perf_counter() - started:.0f} s")
    return log


def kill_after_save(name: str) -> int:
    """Train until the checkpoint of step `SAVE` is complete, then SIGKILL every process; gives the last whole step."""
    _copy_checkpoint("seed", name)
    say = f"(b) 2 ranks, killed with SIGKILL after the save at step {SAVE}"
    with console.status(say):
        process = _launch(name, 2, OURS)
        while not (ROOT / name / "checkpoint" / f"step-{SAVE}" / ".metadata").exists():
            if process.poll() is not None:
                raise SystemExit(f"The run {name!r} ended before its save; its log is {ROOT / name / 'log.txt'}.")
            time.sleep(0.01)
        for pid in reversed(process_tree(process.pid)):  # ranks first: torchrun would report a rank that dies before it
            _kill(pid)
        process.wait()
    reached = max(read_ledger(ROOT / name / "ledger"))
    console.print(f"{say}: killed while training step {reached + 1}")
    return reached


def _launch(name: str, ranks: int, module: tuple[str, str], *extra: str) -> subprocess.Popen[bytes]:
    folder = ROOT / name
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "-m", "torchtitan.train", "--module", module[0], "--config", module[1]]
    command += ["--dump_folder", str(folder), *extra]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _copy_checkpoint(source: str, target: str) -> None:
    """Start `target` from the checkpoint of `source`: the seed, or the one of step `SAVE`."""
    step = f"step-{0 if source == 'seed' else SAVE}"
    shutil.copytree(ROOT / source / "checkpoint" / step, ROOT / target / "checkpoint" / step)


def losses(name: str) -> Losses:
    """Unrounded loss of every step that a run logged."""
    lines = (ROOT / name / "loss.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def rows_of(name: str) -> dict[int, str]:
    """For the stock loader, one digest a step over its rows in any order: a mere change of places does not count."""
    rows: dict[int, list[str]] = {}
    for file in (ROOT / name / "rows").glob("*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            rows.setdefault(line["step"], []).extend(line["rows"])
    return {step: hashlib.sha256("".join(sorted(mine)).encode()).hexdigest() for step, mine in rows.items()}


def count(ranks: int) -> str:
    """A number of ranks in words."""
    return f"{ranks} rank" + "s" * (ranks > 1)


def verdict(compared: int, differs: int | None, expected: int | None = None) -> tuple[str, str]:
    """How many steps were equal, and the first that was not."""
    if expected is not None and compared != expected:
        return f"only {compared} of {expected} steps there", "missing steps"
    return (f"{compared} of {compared} steps", "none") if differs is None else ("", f"step {differs}")


def refusal(log: str) -> str:
    """What TorchTitan says when it refuses to go on."""
    for known in ("dataloader resharding is not supported yet", "Missing key in checkpoint state_dict: dataloader"):
        if known in log:
            return known
    return "for another reason; see its log"


def _report(ours: list[Row], stock: list[Row]) -> None:
    columns = ("run", "ranks", "digests equal", "first that differs", "loss gap")
    table = Table(*columns, title="Are the batches those of the uninterrupted run?")
    for title, rows in (("Zephon", ours), ("TorchTitan's own loader", stock)):
        table.add_section()
        table.add_row(f"[bold]{title}[/]")
        for row in rows:
            table.add_row(row.name, row.ranks, row.equal, row.differs, row.loss_gap)
    console.print(table)
    file = ROOT / "loss.png"
    draw(_curves(ours), _curves(stock), SAVE, file)
    console.print(f"Loss curves: {file}. On the CPU attention is a dense mask, the rest is TorchTitan's own trainer.")


def _curves(rows: list[Row]) -> list[tuple[str, Losses]]:
    return [(f"{row.name}, {row.ranks} ranks", row.losses) for row in rows if row.losses]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped by Ctrl-C")
