"""Rehearsal: iterate a loader as a trainer would, and measure what it costs."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from zephon.command.options import between_steps, err
from zephon.loader import Loader
from zephon.stream import Stream
from zephon.types import Record

_SAMPLE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Report:
    """What a rehearsal found. Times in seconds, CPU over all processes; `shares` of the positions that were mixed.

    `tokens` and `padding` are this rank's. The ranks of a finite stream decide it whole, and `Stats` has the figures of
    all: of those a rank has the part that it has of every batch. `dropped` is what all of them came to.
    `cpu_s_per_mtoken` and `first_batch_s` are None where no step was taken.
    """

    steps: int
    tokens: int
    tokens_per_s: float
    cpu_s_per_mtoken: float | None
    peak_pss_mb: float
    startup_s: float
    first_batch_s: float | None
    shares: dict[str, float]
    targets: dict[str, float]
    padding: int
    dropped: dict[str, dict[str, int]]


def rehearse(
    stream: Stream, loader: Loader, steps: int | None, after: Callable[[dict[int, list[Record]]], None]
) -> Report:
    """Take global steps until step `steps`, or until Ctrl-C; call `after` with the records of each."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    before, taken, first = loader.stats(), loader.step, 0.0
    part, whole = (len(loader.lanes), stream.parts) if stream.recipe.finite else (1, 1)
    bars = Progress(*columns, console=err, disable=not err.is_terminal)
    with _PeakPss() as memory, bars, between_steps() as stopped:
        task = bars.add_task("run", total=steps, completed=loader.step, rate="")
        started, cpu = time.perf_counter(), cpu_seconds()
        while not stopped and (steps is None or loader.step < steps):
            try:
                records = loader.step_records()
            except StopIteration:
                break
            first = first or time.perf_counter() - started
            after(records)
            if err.is_terminal:
                rate = (loader.stats().positions - before.positions) / whole * part / (time.perf_counter() - started)
                bars.update(task, completed=loader.step, rate=f"{rate / 1e6:.1f} Mtok/s")
        wall, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    now = loader.stats()
    tokens = (now.positions - before.positions) * part // whole
    mixed = {name: number - before.mixed[name] for name, number in now.mixed.items()}
    total = max(1, sum(mixed.values()))
    weights = {spec.name: spec.weight for spec in stream.recipe.sources}
    return Report(
        steps=loader.step - taken,
        tokens=tokens,
        tokens_per_s=tokens / wall,
        cpu_s_per_mtoken=cpu / tokens * 1e6 if tokens else None,
        peak_pss_mb=memory.peak / 1e6,
        startup_s=stream.startup_s,
        first_batch_s=first or None,
        shares={name: number / total for name, number in mixed.items()},
        targets={name: float(weight / sum(weights.values())) for name, weight in weights.items()},
        padding=(now.padding - before.padding) * part // whole,
        dropped={
            name: {what: number - before.dropped[name][what] for what, number in counts.items()}
            for name, counts in now.dropped.items()
        },
    )


def show_report(report: Report) -> None:
    """Print a report as a table."""
    table = Table(show_header=False, title=f"{report.steps} steps, {report.tokens:,} tokens")
    table.add_row("tokens/s", f"{report.tokens_per_s:,.0f}")
    if report.cpu_s_per_mtoken is not None:
        table.add_row("CPU s per Mtoken", f"{report.cpu_s_per_mtoken:.4f}")
    table.add_row("peak PSS, MB", f"{report.peak_pss_mb:,.0f}")
    table.add_row("start-up, s", f"{report.startup_s:.2f}")
    if report.first_batch_s is not None:
        table.add_row("first batch, s", f"{report.first_batch_s:.3f}")
    for name, share in report.shares.items():
        table.add_row(f"share of {escape(name)}", f"{share:.3%} (target {report.targets[name]:.3%})")
    table.add_row("padding", f"{report.padding:,} positions")
    for name, counts in report.dropped.items():
        noted = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
        table.add_row(f"noted in {escape(name)}", noted or "nothing")
    Console().print(table)


def cpu_seconds() -> float:
    """CPU time of this process and all its descendants, those that have ended included (Linux)."""
    ticks = 0
    for pid in process_tree(os.getpid()):
        try:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15]))
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


class _PeakPss:
    """Largest proportional set size of this process and its children, sampled by a thread (Linux)."""

    def __init__(self) -> None:
        self.peak = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "_PeakPss":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        last = False
        while not last:
            last = self._stop.wait(_SAMPLE_SECONDS)
            self.peak = max(self.peak, sum(map(_pss, process_tree(os.getpid()))))


def process_tree(pid: int) -> list[int]:
    """A process and all its descendants, parents first (Linux)."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *(one for child in children for one in process_tree(int(child)))]


def _pss(pid: int) -> float:
    """Bytes; 0 for a process that has gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return 0.0
