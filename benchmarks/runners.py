"""Which runner is fastest, and what does it cost: inline, threads or processes, 1 to N workers, isolated or not?

    python -m benchmarks.runners RECIPE [--workers 1 2] [--rounds 3] [--seconds 10]

Every run is a process of its own, in turns. It takes micro-batches as fast as they come: those of the first half fill
queues and caches, those of the second are counted. CPU is of the process and all its children.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.lanes import amount_of
from benchmarks.report import about, write
from zephon import Recipe, Stream
from zephon.command.rehearse import cpu_seconds


@dataclass
class Args:
    recipe: Annotated[Path, tyro.conf.Positional]
    workers: tuple[int, ...] = (1, 2)
    rounds: int = 3
    seconds: float = 10.0
    local: int = 8
    """Sequences of a micro-batch."""
    name: str = "runners"
    """Of the file of results."""
    one: str = ""
    """Internal: run this way and print the figures."""


def main() -> None:
    args = tyro.cli(Args)
    if args.one:
        print(json.dumps(measure(args)))
        return
    ways = ["inline", "inline isolated"]
    ways += [f"{runner} {count}" for runner in ("threads", "process") for count in args.workers]
    rounds = list[dict[str, dict[str, float]]]()
    for _ in range(args.rounds):
        rounds.append({way: run(args, way) for way in ways})
    rows = dict[str, dict[str, float]]()
    for way in ways:
        ratios = [(one[way], one[ways[0]]) for one in rounds]
        rows[way] = {key: statistics.median(one[way][key] for one in rounds) for key in rounds[0][way]}
        rows[way] |= {f"{key}_of_inline": statistics.median(a[key] / b[key] for a, b in ratios) for key in ratios[0][0]}
        print(f"{way:16}", {key: round(value, 4) for key, value in rows[way].items()})
    with Stream.open(args.recipe) as stream:
        write(args.name, {**about(stream), "rows": rows, "rounds": rounds})


def run(args: Args, way: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.runners", str(args.recipe), "--one", way]
    command += ["--seconds", str(args.seconds), "--local", str(args.local)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(way, out.splitlines()[-1], flush=True)
    return json.loads(out.splitlines()[-1])


def measure(args: Args) -> dict[str, Any]:
    """Tokens, or images, a second, and their CPU time: seconds per million tokens, or milliseconds an image."""
    runner, *more = args.one.split()
    recipe = Recipe.load(args.recipe)
    isolate = more == ["isolated"]
    how = replace(recipe.run, runner=runner, workers=1 if isolate or not more else int(more[0]), isolate=isolate)
    gc.disable()  # as TorchTitan's trainer does
    with Stream(replace(recipe, run=how)) as stream:
        loader = stream.loader(local_batch_size=args.local)
        end = time.perf_counter() + args.seconds / 2
        while time.perf_counter() < end:
            next(loader)
        started, cpu, done = time.perf_counter(), cpu_seconds(), 0
        while (now := time.perf_counter()) < started + args.seconds / 2:
            batch = next(loader)
            done += amount_of(batch)
        return {
            "rate": done / (now - started),
            "cpu": (cpu_seconds() - cpu) / done * (1e3 if "grid_thw" in batch else 1e6),
        }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
