"""Training jobs of the demonstrations: run to the end, killed after a save, resumed elsewhere, and compared."""

import contextlib
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

from zephon.command.rehearse import process_tree
from zephon.ledger import compare_ledgers, read_ledger

console = Console()
Losses = dict[int, float]
Module = tuple[str, str]
"""A module with TorchTitan configurations, and the name of one."""


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


@dataclass(frozen=True)
class Jobs:
    """Jobs below one folder.

    Attributes:
        root: the folder, a path below the working directory.
        steps: steps of a whole run.
        save: the step after which runs save.
    """

    root: Path
    steps: int
    save: int

    def fresh(self) -> Path:
        """The folder, empty."""
        if self.root.exists():
            shutil.rmtree(self.root)
        self.root.mkdir()
        return self.root

    def elastic(self, module: Module) -> list[Row]:
        """(a) an uninterrupted run; (b) the same, killed after its save; resumed on 1 and on 4 ranks."""
        say = "one seed checkpoint, so that all runs start alike"
        self.train("seed", 1, module, "--checkpoint.create_seed_checkpoint", say=say)
        self.train("a", 2, module, seed=True, say=f"(a) 2 ranks, {self.steps} steps")
        reached = self.kill_after_save("b", module)
        whole = read_ledger(self.root / "a" / "ledger")
        rows = [Row("(a) uninterrupted", "2", "", "", self.losses("a"))]
        result = compare_ledgers(whole, read_ledger(self.root / "b" / "ledger"))
        rows.append(Row(f"(b) killed in step {reached + 1}", "2", *verdict(result.compared, result.step)))
        rows[-1].losses, rows[-1].against = self.losses("b"), self.losses("a")
        for ranks in (1, 4):
            name = f"b-on-{ranks}"
            self.copy_checkpoint("b", name)
            self.train(name, ranks, module, say=f"(b) resumed at step {self.save} on {count(ranks)}")
            result = compare_ledgers(whole, read_ledger(self.root / name / "ledger"))
            row = Row("(b) resumed", f"2 → {ranks}", *verdict(result.compared, result.step, self.steps - self.save))
            row.losses, row.against = self.losses(name), self.losses("a")
            rows.append(row)
        return rows

    def train(
        self, name: str, ranks: int, module: Module, *extra: str, seed: bool = False, must_work: bool = True, say: str
    ) -> str:
        """Run one training job to its end; returns its log."""
        if seed:
            self.copy_checkpoint("seed", name)
        with console.status(say):
            started = time.perf_counter()
            code = self._launch(name, ranks, module, *extra).wait()
        log = (self.root / name / "log.txt").read_text()
        if code and must_work:
            console.print(log[-4000:], markup=False)
            raise SystemExit(f"The run {name!r} failed with exit code {code}; its log is {self.root / name}/log.txt.")
        console.print(f"{say}: exit {code}, {time.perf_counter() - started:.0f} s")
        return log

    def kill_after_save(self, name: str, module: Module) -> int:
        """Train until the save is complete, then SIGKILL every process; gives the last whole step."""
        self.copy_checkpoint("seed", name)
        say = f"(b) 2 ranks, killed with SIGKILL after the save at step {self.save}"
        with console.status(say):
            process = self._launch(name, 2, module)
            while not (self.root / name / "checkpoint" / f"step-{self.save}" / ".metadata").exists():
                if process.poll() is not None:
                    raise SystemExit(f"The run {name!r} ended before its save; its log is {self.root / name}/log.txt.")
                time.sleep(0.01)
            for pid in reversed(process_tree(process.pid)):  # ranks first: torchrun would report one that dies first
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        reached = max(read_ledger(self.root / name / "ledger"))
        console.print(f"{say}: killed while training step {reached + 1}")
        return reached

    def copy_checkpoint(self, source: str, target: str) -> None:
        """Start `target` from the checkpoint of `source`: the seed, or the one of the save."""
        step = f"step-{0 if source == 'seed' else self.save}"
        shutil.copytree(self.root / source / "checkpoint" / step, self.root / target / "checkpoint" / step)

    def losses(self, name: str) -> Losses:
        """Unrounded loss of every step that a run logged."""
        lines = (self.root / name / "loss.jsonl").read_text().splitlines()
        return {line["step"]: line["loss"] for line in map(json.loads, lines)}

    def _launch(self, name: str, ranks: int, module: Module, *extra: str) -> subprocess.Popen[bytes]:
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=localhost:0", "-m", "torchtitan.train", "--module", module[0]]
        command += ["--config", module[1], "--dump_folder", str(folder), *extra]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (folder / "log.txt").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def count(ranks: int) -> str:
    """A number of ranks in words."""
    return f"{ranks} rank" + "s" * (ranks > 1)


def verdict(compared: int, differs: int | None, expected: int | None = None) -> tuple[str, str]:
    """How many steps were equal, and the first that was not."""
    if expected is not None and compared != expected:
        return f"only {compared} of {expected} steps there", "missing steps"
    return (f"{compared} of {compared} steps", "none") if differs is None else ("", f"step {differs}")


def show(sections: dict[str, list[Row]]) -> None:
    """Print the table."""
    columns = ("run", "ranks", "digests equal", "first that differs", "loss gap")
    table = Table(*columns, title="Are the batches those of the uninterrupted run?")
    for title, rows in sections.items():
        table.add_section()
        table.add_row(f"[bold]{title}[/]")
        for row in rows:
            table.add_row(row.name, row.ranks, row.equal, row.differs, row.loss_gap)
    console.print(table)


def check(rows: list[Row]) -> None:
    """End with exit code 1 where a digest differs."""
    if any(row.differs not in ("", "none") for row in rows):
        console.print("[red]A digest differs: the promise is broken.[/]")
        sys.exit(1)
