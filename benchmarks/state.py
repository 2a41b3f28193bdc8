"""How large is the state, and how long does a resume take, as steps go by?

python -m benchmarks.state RECIPE [--at 10 100 1000]
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.report import about, write
from zephon import Stream


@dataclass
class Args:
    recipe: Annotated[Path, tyro.conf.Positional]
    at: tuple[int, ...] = (10, 100, 1000)
    repeats: int = 7
    worlds: tuple[int, ...] = (1, 16)


def main() -> None:
    args = tyro.cli(Args)
    rows: list[dict[str, Any]] = []
    with Stream.open(args.recipe) as stream:
        loader = stream.loader()
        fresh = {world: first_batch(stream, None, world, args.repeats) for world in args.worlds}
        for step in args.at:
            while loader.step < step:
                next(loader)
            started = time.perf_counter()
            state = loader.state_dict()
            took = time.perf_counter() - started
            sizes = sorted(len(raw) for key, raw in state.items() if key != "header")
            row: dict[str, Any] = {
                "step": step,
                "lane_bytes_median": statistics.median(sizes),
                "lane_bytes_max": sizes[-1],
            }
            row |= {"header_bytes": len(state["header"]), "state_dict_ms": took * 1e3}
            for world in args.worlds:
                row[f"resume_to_first_batch_s_of_{world}"] = first_batch(stream, state, world, args.repeats)
            rows.append(row)
            print(row)
        print("fresh first batch", fresh)
        write("state", {**about(stream), "fresh_first_batch_s": fresh, "rows": rows})


def first_batch(stream: Stream, state: dict[str, bytes] | None, world: int, repeats: int) -> dict[str, float]:
    """Seconds from nothing to the first batch of rank 0, wall and CPU: median of several."""
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        loader = stream.loader(0, world)
        if state:
            loader.load_state_dict(state)
        next(loader)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {"wall": round(statistics.median(walls), 4), "cpu": round(statistics.median(cpus), 4)}


if __name__ == "__main__":
    main()
