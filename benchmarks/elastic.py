"""Loader processes saved at a step and resumed as other numbers: is every batch the same?

    python -m benchmarks.elastic RECIPE [--steps 200] [--save-at 150] [--ranks 16] [--to 8 32 64]

Every rank is a real `zephon run` process of its own, started in waves of at most `--wave`.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.report import about, write
from zephon import Stream
from zephon.digest import lane_digest, step_digest
from zephon.ledger import compare_ledgers, read_ledger


@dataclass
class Args:
    recipe: Annotated[Path, tyro.conf.Positional]
    steps: int = 200
    save_at: int = 150
    ranks: int = 16
    to: tuple[int, ...] = (8, 32, 64)
    in_process: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Numbers of ranks for which `zephon digest` runs too, over the first `digest_steps` steps."""
    digest_steps: int = 50
    wave: int = 8


def run_ranks(args: Args, world: int, steps: int, ledger: Path, *extra: str) -> float:
    """Run all ranks as processes; returns seconds."""
    started = time.perf_counter()
    for first in range(0, world, args.wave):
        ranks = range(first, min(first + args.wave, world))
        processes = [
            subprocess.Popen(command(args, world, rank, steps, ledger, *extra), stdout=subprocess.DEVNULL)
            for rank in ranks
        ]
        assert not any(process.wait() for process in processes)
    return time.perf_counter() - started


def command(args: Args, world: int, rank: int, steps: int, ledger: Path, *extra: str) -> list[str]:
    options = {"--dp": world, "--rank": rank, "--steps": steps, "--ledger": ledger / f"rank_{rank:05d}.jsonl"}
    flags = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", "zephon", "run", str(args.recipe), *flags, "--json", *extra]


def digest(recipe: Path, world: int, steps: int) -> list[str]:
    call = [sys.executable, "-m", "zephon", "digest", str(recipe), "--dp", str(world), "--steps", str(steps)]
    out = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    return [json.loads(line)["sha256"] for line in out.splitlines()]


def main() -> None:
    args = tyro.cli(Args)
    work = Path(tempfile.mkdtemp(prefix="zephon-elastic-"))
    with Stream.open(args.recipe) as stream:
        loader, whole, digests = stream.loader(), {}, []
        for step in range(1, args.steps + 1):
            lanes = {lane: lane_digest(records) for lane, records in loader.step_records().items()}
            whole[step] = {f"{lane:05d}": one.hex() for lane, one in lanes.items()}
            digests.append(step_digest(lanes))
        facts = about(stream)
    rows: list[dict[str, Any]] = []

    def note(run: str, compared: int, differs: int | None, seconds: float | None = None) -> None:
        rows.append({"run": run, "compared": compared, "first difference": differs, "s": seconds})

    seconds = run_ranks(args, args.ranks, args.save_at, work / "first", "--save", str(work / "state"))
    result = compare_ledgers(whole, read_ledger(work / "first"))
    note(f"{args.ranks} processes to step {args.save_at}", result.compared, result.step, seconds)
    for world in args.to:
        seconds = run_ranks(args, world, args.steps, work / str(world), "--resume", str(work / "state"))
        result = compare_ledgers(whole, read_ledger(work / str(world)))
        note(f"resumed as {world} processes", result.compared, result.step, seconds)
    for world in args.in_process:
        found = digest(args.recipe, world, args.digest_steps)
        differing = [step for step, (a, b) in enumerate(zip(found, digests, strict=False), 1) if a != b]
        note(f"zephon digest --dp {world}", len(found), min(differing, default=None))
    for row in rows:
        print(row)
    shutil.rmtree(work)
    write("elastic", {**facts, "rows": rows})
    assert all(row["first difference"] is None and row["compared"] for row in rows)


if __name__ == "__main__":
    main()
