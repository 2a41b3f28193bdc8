"""How long does a training loop that holds the interpreter wait for data, with and without `[run] isolate`?

    python -m benchmarks.isolation RECIPE [--rounds 3] [--steps 24]

Loader and trainer have a core each. The trainer computes 100 ms in one call that never releases the interpreter, then
takes as many micro-batches as are 80 % of what an isolated loader with the same runner gives in that time when it is
drained as fast as possible. Data wait is the time in `next`, so it holds the cost of the hand-over too; `slowdown` is
the computation, in wall and in CPU time, against a loop without a loader just before and after (medians of steps).
"""

import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.report import about, write
from zephon import Loader, Recipe, Stream

CORES = sorted(os.sched_getaffinity(0))
TRAINER, LOADER = CORES[0], CORES[len(CORES) // 2]  # neighbours may be two threads of one core
COMPUTE_S, SHARE = 0.1, 0.8
VARIANTS = [(runner, isolate) for runner in ("inline", "threads") for isolate in (False, True)]


@dataclass
class Args:
    recipe: Annotated[Path, tyro.conf.Positional]
    rounds: int = 3
    steps: int = 24
    peak_s: float = 2.0


def main() -> None:
    args, rounds, medians = tyro.cli(Args), list[dict[str, Any]](), list[dict[str, Any]]()
    recipe = Recipe.load(args.recipe)
    os.sched_setaffinity(0, {TRAINER})
    size = calibrate()
    for number in range(args.rounds):
        peaks = {runner: peak(variant(recipe, runner, True), args.peak_s) for runner in ("inline", "threads")}
        for runner, isolate in VARIANTS if number % 2 == 0 else VARIANTS[::-1]:
            row: dict[str, Any] = {"runner": runner, "isolate": isolate, "peak_batches_per_s": peaks[runner]}
            batches = round(SHARE * COMPUTE_S * peaks[runner])
            alone = [compute(size) for _ in range(args.steps // 2)]
            row |= train(variant(recipe, runner, isolate), size, batches, args.steps)
            wall, cpu = zip(*alone, *(compute(size) for _ in range(args.steps // 2)), strict=True)
            row["slowdown_wall"] = row["compute_ms"] / statistics.median(wall) / 1e3
            row["slowdown_cpu"] = row["compute_cpu_ms"] / statistics.median(cpu) / 1e3
            rounds.append(row)
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    for runner, isolate in VARIANTS:
        mine = [row for row in rounds if (row["runner"], row["isolate"]) == (runner, isolate)]
        medians.append({key: statistics.median(row[key] for row in mine) for key in mine[0] if key != "runner"})
        medians[-1] |= {"runner": runner, "isolate": isolate}
    print("medians", medians)
    with Stream(recipe) as stream:
        write("isolation", {**about(stream), "cores": [TRAINER, LOADER], "medians": medians, "rounds": rounds})


def variant(recipe: Recipe, runner: str, isolate: bool) -> Stream:
    return Stream(replace(recipe, run=replace(recipe.run, runner=runner, workers=1, isolate=isolate)))


def compute(size: int) -> tuple[float, float]:
    """Seconds, wall and CPU, of one call that holds the interpreter from beginning to end."""
    wall, cpu = time.perf_counter(), time.thread_time()
    sum(range(size))
    return time.perf_counter() - wall, time.thread_time() - cpu


def calibrate() -> int:
    """The size that takes `COMPUTE_S` of CPU time on this machine."""
    return round(1_000_000 * COMPUTE_S / statistics.median(compute(1_000_000)[1] for _ in range(20)))


def pin(loader: Loader) -> None:
    """Put all work but this thread's on the loader's core."""
    next(loader)  # until the first batch is there, not all threads are
    child = getattr(loader, "_child", None)
    for process in [os.getpid(), *([child.process.pid] if child else [])]:
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {TRAINER if thread.name == str(os.getpid()) else LOADER})


def peak(stream: Stream, seconds: float) -> float:
    """Micro-batches a second of an isolated loader that is drained as fast as possible."""
    with stream:
        loader, count = stream.loader(), 0
        pin(loader)
        until = time.perf_counter() + 2  # by then what was made before we came is gone
        while time.perf_counter() < until:
            next(loader)
        started = time.perf_counter()
        while (passed := time.perf_counter() - started) < seconds:
            next(loader)
            count += 1
        return count / passed


def train(stream: Stream, size: int, batches: int, steps: int) -> dict[str, float]:
    """A training loop; its first steps are left out, as queues fill."""
    with stream:
        loader, rows = stream.loader(), list[tuple[float, float, float]]()
        pin(loader)
        for _ in range(steps + 5):
            computed = compute(size)
            started = time.perf_counter()
            for _ in range(batches):
                next(loader)
            rows.append((time.perf_counter() - started, *computed))
    waits, walls, cpus = ([1e3 * one for one in column] for column in zip(*rows[5:], strict=True))
    row = {"batches_per_step": batches, "wait_ms_mean": statistics.mean(waits), "wait_ms_max": max(waits)}
    row |= {"wait_ms_median": statistics.median(waits), "wait_share": sum(waits) / (sum(waits) + sum(walls))}
    return row | {"compute_ms": statistics.median(walls), "compute_cpu_ms": statistics.median(cpus)}


if __name__ == "__main__":
    main()
