"""What does a batch cost on its way from the loader's shared memory to the device, pinned in one way or another?

    python -m benchmarks.pinned [--rounds 30]

A batch of an isolated loader lies in a memory file that the trainer maps; TorchTitan 0.3.0 copies it with
`tensor.to(device)`, in the order of the stream. `plain` does just that; `pin_memory` copies it into pinned memory
first; `register` pins the mapping where it is, and unpins it after; `ring` copies it into a buffer that stays pinned.
Milliseconds of the calling thread until the batch is on the device, median of the rounds, fresh memory each time.
"""

import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro

from benchmarks.report import write

SIZES = [1 << 16, 1 << 20, 1 << 23, 1 << 26]


@dataclass
class Args:
    rounds: int = 30


def main() -> None:
    args = tyro.cli(Args)
    if not torch.cuda.is_available():
        sys.exit("There is no GPU here; pinned memory is a matter of GPUs.")
    torch.zeros(1, device="cuda")
    ring = torch.empty(max(SIZES), dtype=torch.uint8).pin_memory()
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "plain": lambda batch: batch.to("cuda"),
        "pin_memory": lambda batch: batch.pin_memory().to("cuda"),
        "register": register,
        "ring": lambda batch: ring[: batch.numel()].copy_(batch).to("cuda"),
    }
    rows = []
    for size in SIZES:
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                batch = mapped(size)
                torch.cuda.synchronize()
                started = time.perf_counter()
                way(batch)
                torch.cuda.synchronize()
                times[name].append(1e3 * (time.perf_counter() - started))
        rows.append({"bytes": size, **{name: round(statistics.median(one), 4) for name, one in times.items()}})
        print(rows[-1], flush=True)
    write("pinned", {"rounds": args.rounds, "median_ms": rows})


def mapped(size: int) -> torch.Tensor:
    """A batch as it comes from an isolated loader: a new mapping of a memory file that another has filled."""
    file = os.memfd_create("batch")
    try:
        os.ftruncate(file, size)
        os.pwrite(file, b"x" * size, 0)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)


def register(batch: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()
    runtime.cudaHostRegister(batch.data_ptr(), batch.numel(), 0)
    batch.to("cuda")
    runtime.cudaHostUnregister(batch.data_ptr())


if __name__ == "__main__":
    main()
