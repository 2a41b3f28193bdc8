"""What do many lanes on one rank cost: time, first batch, memory, state, ledger and resume?

    python -m benchmarks.lanes RECIPE [--lanes 1 8 64 256] [--rounds 3] [--million 60] [--images 400]

Every run is a process of its own, in turns; the page cache and the row index are warm. `first_s` is from an open
tokenizer and done imports to the first micro-batch (index, first rows, order and all), `resume_s` the same from a
state; both for micro-batches of `local` sequences. CPU is of all threads, per million tokens, or per image where the
recipe has images. The search for garbage is off, as TorchTitan's trainer has it. Memory is what the process has at its
end above what it has with the stream open. `ledger_of_cpu` is the CPU time of hashing every batch, beside all else of
the same steps.
"""

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import tyro

from benchmarks.memory import used
from benchmarks.report import about, write
from zephon import Recipe, Stream
from zephon.loader import Loader
from zephon.modality import find_modality
from zephon.run.hashing import Ledger
from zephon.types import Batch


@dataclass
class Args:
    recipe: Annotated[Path, tyro.conf.Positional]
    lanes: tuple[int, ...] = (1, 8, 64, 256)
    rounds: int = 3
    million: float = 60.0
    """Million tokens a run, where there are no images; as many before, half of them for images, are not counted."""
    images: int = 400
    """Images a run, where there are."""
    local: int = 8
    share: int = 1
    """Sequences that each of many lanes gives a step; fewer lanes than `local` share `local` times as many."""
    name: str = "lanes"
    """Of the file of results."""
    one: int = 0
    """Internal: run with so many lanes and print the figures."""


def main() -> None:
    args = tyro.cli(Args)
    if args.one:
        print(json.dumps(measure(args, args.one)))
        return
    rounds: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        for lanes in args.lanes:
            command = [sys.executable, "-m", "benchmarks.lanes", str(args.recipe), "--one", str(lanes)]
            command += ["--million", str(args.million), "--images", str(args.images), "--local", str(args.local)]
            command += ["--share", str(args.share)]
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            rounds.append(json.loads(out.splitlines()[-1]))
            print(rounds[-1])
    rows: list[dict[str, Any]] = []
    for place in range(len(args.lanes)):
        mine, first = rounds[place :: len(args.lanes)], rounds[:: len(args.lanes)]
        row = median(mine)
        for key, name in (("rate", "throughput"), ("cpu", "cpu"), ("peak_mib", "peak")):  # round by round: speed drifts
            ratios = [one[key] / other[key] for one, other in zip(mine, first, strict=True)]
            row[f"{name}_of_first"] = statistics.median(ratios)
        rows.append(row)
        print({key: round(value, 3) for key, value in row.items()})
    with Stream.open(args.recipe) as stream:
        write(args.name, {**about(stream), "rows": rows, "rounds": rounds})


def median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def measure(args: Args, lanes: int) -> dict[str, Any]:
    recipe = Recipe.load(args.recipe)
    assert recipe.batch is not None
    size = max(lanes, args.local) * args.share
    recipe = replace(recipe, lanes=lanes, batch=replace(recipe.batch, global_batch_size=size))
    share_tokenizer(recipe)
    gc.disable()
    started = time.perf_counter()
    with Stream(recipe) as stream:
        loader = stream.loader(local_batch_size=args.local)
        batch = next(loader)
        first = time.perf_counter() - started
        while not loader.between_steps:
            next(loader)
        has_images = "grid_thw" in batch
        deliver(loader, args.images / 2 if has_images else args.million * 1e6)  # queues and caches fill
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        cpu, wall = time.process_time(), time.perf_counter()
        done = deliver(loader, args.images if has_images else args.million * 1e6)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        unit, scale = ("image", 1e3) if has_images else ("token", 1e6)
        while not loader.between_steps:
            next(loader)
        ledger = ledger_of_cpu(stream, loader, args.images / 2 if has_images else args.million * 1e6 / 4)
        took = [clock(loader.state_dict) for _ in range(9)]
        state, peak = loader.state_dict(), used()
        resume = clock(lambda: resumed(stream, state, args.local))
    return {
        "lanes": lanes, "cpu": cpu / done * scale, "rate": done / wall / (1 if has_images else 1e6), "first_s": first,
        "resume_s": resume, "state_dict_ms": 1e3 * statistics.median(took), "peak_mib": peak / 2**20,
        "ledger_of_cpu": ledger, "state_bytes_a_lane": sum(map(len, state.values())) / lanes, f"{unit}s": done,
    }  # fmt: skip


def share_tokenizer(recipe: Recipe) -> None:
    """Load the tokenizer, and what images need, before the clock starts."""
    from modalities.tokenizer import TextTokenizer

    assert recipe.tokenizer is not None
    tokenizer = TextTokenizer(recipe.tokenizer)
    TextTokenizer.of = staticmethod(lambda *_: tokenizer)
    for spec in recipe.sources:
        find_modality(spec.modality)


def deliver(loader: Loader, amount: float) -> int:
    """Take micro-batches until so many tokens, or images, have come; returns how many did."""
    done = 0
    while done < amount:
        done += amount_of(next(loader))
    return done


def amount_of(batch: Batch) -> int:
    """Its images, where it may have some, or else its tokens."""
    return int((batch["grid_thw"].prod(axis=1) > 4).sum()) if "grid_thw" in batch else batch["input"].size


def ledger_of_cpu(stream: Stream, loader: Loader, amount: float) -> float:
    """CPU time of the ledger that a trainer's rank writes, as a part of what the same steps cost without it."""
    done, loading, hashing = 0, 0.0, 0.0
    with TemporaryDirectory() as folder:
        ledger = Ledger(stream.worker, loader.lanes, Path(folder, "ledger.jsonl"))
        while done < amount or not loader.between_steps:
            started = time.process_time()
            batch = next(loader)
            loaded = time.process_time()
            ledger.add(batch)
            if loader.between_steps:
                ledger.write(loader.step)
                ledger.flush()
            loading, hashing = loading + loaded - started, hashing + time.process_time() - loaded
            done += amount_of(batch)
        ledger.close()
    return hashing / loading


def resumed(stream: Stream, state: dict[str, bytes], local: int) -> None:
    loader = stream.loader(local_batch_size=local)
    loader.load_state_dict(state)
    next(loader)


def clock(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
