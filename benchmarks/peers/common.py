"""What every side of the comparison runs in: the work, the clock, the measured loop. Imports nothing of any loader.

A side is a file that is run as `python SIDE.py JSON`: it makes its loader from the `Work` in the JSON and hands its
batches to `main`, which prints MEASURED when the figures are taken and then the figures as one line of JSON.
"""

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MEASURED = "measured"
MIN_PIXELS, MAX_PIXELS = 256**2, 512**2
MARKS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>", "pad_token": "<|endoftext|>",
}  # fmt: skip


@dataclass
class Work:
    """What a side has to do: read `data`, until `warm` and then `amount` tokens or images have come."""

    data: dict[str, str]
    """Folders of the same documents by format: jsonl, parquet, mds, litdata; of the images: tar, parquet."""
    tokenizer: str
    eos: int
    folder: str
    """For files that live as long as the comparison."""
    amount: int
    warm: int
    unit: str = "tokens"
    seq_len: int = 2048
    batch: int = 8
    options: dict[str, Any] = field(default_factory=dict)
    """Of this side."""

    def files(self, kind: str) -> list[str]:
        """The files of one format, in order."""
        return sorted(str(path) for path in Path(self.data[kind]).iterdir() if path.suffix in (f".{kind}", ".tar"))


class Run(NamedTuple):
    """A loader at work: its batches, what one of them holds, and what to find out when the figures are taken."""

    batches: Iterator[Any]
    look: Callable[[Any], dict[str, int]]
    finish: Callable[[], dict[str, Any]] = dict
    whole: bool = False
    """One pass over the data is the figure, the first batch included: for a loader that gives nothing before."""


class Clock:
    """Seconds of wall clock and of CPU, of this process and its children, from lap to lap, and first from its start."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}
        born = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        self._wall, self._cpu = time.perf_counter() - time.clock_gettime(time.CLOCK_BOOTTIME) + born, 0.0

    def lap(self, name: str) -> None:
        """What came since the last lap."""
        wall, cpu = time.perf_counter(), cpu_seconds(os.getpid())
        self.row |= {f"{name}_s": round(wall - self._wall, 4), f"{name}_cpu_s": round(cpu - self._cpu, 3)}
        self._wall, self._cpu = wall, cpu


def process_tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """Of a process and its descendants, those that have ended included."""
    ticks = 0
    for one in process_tree(pid):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """Of a process and its descendants, what they share counted once; without libraries and other mapped files."""
    kilobytes = 0
    for one in process_tree(pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return kilobytes / 1e3


def shared_files(pid: int) -> set[Path]:
    """Files of shared memory that a process and its descendants have mapped."""
    found = set[Path]()
    for one in process_tree(pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{one}/maps").read_text().splitlines()
            found |= {
                Path(line.split()[5]) for line in lines if " /dev/shm/" in line and not line.endswith("(deleted)")
            }
    return found


def look_text(batch: Any) -> dict[str, int]:
    """At the arrays of one batch of text."""
    return {"tokens": batch["input"].shape[0] * batch["input"].shape[1]}


def look_images(batch: Any) -> dict[str, int]:
    """At a batch of TorchTitan's collator; every sample has one image, and its positions count from 0."""
    pixels, counts = batch[0]["pixel_values"], batch[0]["grid_thw"].prod(dim=1)
    images, slots = len(counts), pixels.shape[0] * pixels.shape[1]
    positions = int(batch[0]["positions"].count_nonzero()) + images
    return {
        "images": images, "patches": int(counts.sum()), "pixel_bytes": pixels.nbytes, "slots": slots,
        "positions": positions, "sequences": len(batch[0]["positions"]),
    }  # fmt: skip


def main(make: Callable[[Work, Clock], Run]) -> None:
    """Run one side: `make` laps the clock for its imports and its tokenizer, then returns the loader."""
    work, clock, seen = Work(**json.loads(sys.argv[1])), Clock(), Counter[str]()
    run = make(work, clock)
    clock.row["base_mb"] = round(memory_mb(os.getpid()), 1)
    seen.update(check(work, run.look(next(run.batches))))
    clock.lap("first_batch")
    if not run.whole:
        while seen[work.unit] < work.warm:
            seen.update(run.look(next(run.batches)))
        clock.lap("warm")
        seen.clear()
    for batch in run.batches:
        seen.update(batches=1, **run.look(batch))
        if seen[work.unit] >= work.amount and not run.whole:
            break
    clock.lap("steady")
    print(MEASURED, flush=True)
    wall, cpu = (clock.row[f"steady{kind}"] + run.whole * clock.row[f"first_batch{kind}"] for kind in ("_s", "_cpu_s"))
    row = {**clock.row, **seen, "per_s": seen[work.unit] / wall, "cpu_s_per_unit": cpu / seen[work.unit]}
    if work.unit == "images":
        row["token_fill"] = round(seen["positions"] / (seen["sequences"] * work.seq_len), 4)
        row["patch_fill"] = round(seen["patches"] / seen["slots"], 4)
    print(json.dumps(row | run.finish()), flush=True)


def check(work: Work, held: dict[str, int]) -> dict[str, int]:
    """What the first batch holds, if it is as large as all others' are."""
    if work.unit == "tokens" and held["tokens"] != work.batch * work.seq_len:
        raise ValueError(f"a batch holds {held['tokens']} tokens, not {work.batch} sequences of {work.seq_len}")
    return held
