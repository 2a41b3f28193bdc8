"""How much memory do queues and caches take, beside what `[run] memory` allows?

    python -m benchmarks.memory RECIPE [--memory 128 512 2048] [--ways inline threads] [--steps 20]

Each way to run is a process of its own, whose memory (without libraries) is read after every micro-batch. `base` is
what it has when the stream is open, before the first row ahead; `grown` is its peak above that, one micro-batch that
the trainer holds left out.
"""

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.report import about, write
from zephon import Recipe, Stream
from zephon.command.rehearse import process_tree
from zephon.recipe import RunSpec

WAYS = {"inline": RunSpec(), "threads": RunSpec("threads", 2)}
"""In one process: what the start of another takes cannot be told from its queues."""


@dataclass
class Args:
    recipe: Annotated[Path, tyro.conf.Positional]
    memory: tuple[int, ...] = (128, 512, 2048)
    """Values of `[run] memory`, in MiB."""
    ways: tuple[str, ...] = tuple(WAYS)
    steps: int = 20
    local: int = 8
    name: str = "memory"
    """Of the file of results."""
    one: tuple[str, int] | None = None
    """Internal: run one way with so much memory, and print its figures."""


def main() -> None:
    args = tyro.cli(Args)
    if args.one:
        print(json.dumps(measure(args, *args.one)))
        return
    rows: list[dict[str, Any]] = []
    for way in args.ways:
        for memory in args.memory:
            command = [sys.executable, "-m", "benchmarks.memory", str(args.recipe), "--one", way, str(memory)]
            command += ["--steps", str(args.steps), "--local", str(args.local)]
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            rows.append(json.loads(out.splitlines()[-1]))
            print(rows[-1])
    with Stream.open(args.recipe) as stream:
        write(args.name, {**about(stream), "local_batch_size": args.local, "rows": rows})


def measure(args: Args, way: str, memory: int) -> dict[str, Any]:
    recipe = Recipe.load(args.recipe)
    run = replace(WAYS[way], memory=memory << 20, cache=recipe.run.cache)
    with Stream(replace(recipe, run=run)) as stream:
        loader = stream.loader(local_batch_size=args.local)
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what loading a tokenizer has left free would hide growth
        base = used()
        batch, peak = next(loader), 0
        held = sum(array.nbytes for array in batch.values())
        while loader.step < args.steps:
            batch = next(loader)
            peak = max(peak, used())
        mib = 1 << 20
        return {
            "way": way, "allowed_mib": memory, "base_mib": round(base / mib), "batch_mib": round(held / mib, 1),
            "grown_mib": round((peak - base - held) / mib, 1), "share": round((peak - base - held) / mib / memory, 3),
        }  # fmt: skip


def used() -> int:
    """Bytes of this process and its children, without libraries."""
    total = 0
    for pid in process_tree(os.getpid()):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total * 1024


if __name__ == "__main__":
    main()
