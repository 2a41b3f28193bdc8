"""Where does the time of one rank go? A flame graph, and the same as a table (`make bench` installs py-spy).

    python -m benchmarks.flame RECIPE [--seconds 20] [--name text]

Samples the loader's process 200 times a second with py-spy, native frames included, from the fourth second on. The
graph is `results/flame_NAME.svg`; the table sums what lies below each of our stages.
"""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, write
from zephon import Recipe, Stream

STAGES = {
    "decode a JPEG": "decode_jpeg", "resize": "interpolate (torch", "patchify": "patchify (", "read bytes": "_raw (",
    "read an image": "FileBlob", "parse, or address members": "read (zephon/formats",
    "tokenise": "encode (modalities/encoder", "measure, the rest": "measure (modalities",
    "build, the rest": "materialise (modalities", "source order": "group (zephon/order",
    "hand out measured samples": "_collect (zephon/feed", "pack": "offer (zephon/pack", "state": "mark (zephon/lane",
    "mix": "next_plan (zephon/lane", "loader, the rest": "__next__ (zephon/loader",
}  # fmt: skip
"""Stages by a part of a frame's name, the innermost first."""


@dataclass
class Args:
    recipe: Annotated[Path, tyro.conf.Positional]
    seconds: int = 20
    name: str = "text"
    one: bool = False
    """Internal: iterate until killed."""


def main() -> None:
    args = tyro.cli(Args)
    if args.one:
        recipe = Recipe.load(args.recipe)  # without the watchdog, whose sleep py-spy takes for work
        with Stream(replace(recipe, run=replace(recipe.run, timeout=0))) as stream:
            loader = stream.loader(local_batch_size=8 if stream.batch.global_batch_size % 8 == 0 else 1)
            next(loader)
            print("started", flush=True)
            while True:
                next(loader)
    RESULTS.mkdir(exist_ok=True)
    spy_path = Path(sys.executable).with_name("py-spy")
    if not spy_path.exists():
        raise SystemExit(f"{spy_path} is missing. Install the extra: pip install -e '.[bench]' (`make bench` does).")
    graph, raw = RESULTS / f"flame_{args.name}.svg", RESULTS / f"flame_{args.name}.raw"
    command = [sys.executable, "-m", "benchmarks.flame", str(args.recipe), "--one"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"OMP_NUM_THREADS": "1", **os.environ}) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(4.0)  # queues fill, caches warm
            for kind, out in (("flamegraph", graph), ("raw", raw)):
                spy = [spy_path, "record", "--native", "--rate", "200", "--format", kind]
                subprocess.run([*spy, "-d", str(args.seconds // 2), "-o", out, "-p", str(child.pid)], check=True)
        finally:
            child.kill()
    plain = re.sub(r"(?<=[ (])/[^ ()<]*/(?=[^/ ()<]+[:<])", "", graph.read_text())  # names of files, not of folders
    for folder in (RESULTS, Path(sys.executable).parent):
        plain = plain.replace(f"{folder}/", "")
    graph.write_text(plain)
    shares = summary(raw.read_text())
    raw.unlink()
    table = Table("stage", "share")
    for stage, share in shares.items():
        table.add_row(stage, f"{share:.1%}")
    Console().print(table)
    write(f"flame_{args.name}", {"shares": shares})


def summary(raw: str) -> dict[str, float]:
    """The share of samples in each stage, most first."""
    found = Counter[str]()
    for line in raw.splitlines():
        frames, count = line.rsplit(" ", 1)
        found[next((stage for stage, part in STAGES.items() if part in frames), "elsewhere")] += int(count)
    total = max(1, found.total())
    return {stage: count / total for stage, count in found.most_common()}


if __name__ == "__main__":
    main()
