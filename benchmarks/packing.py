"""How full does best-fit make sequences of real documents, and what does that cost?

    python -m benchmarks.packing RECIPE [--seq-lens 2048 8192] [--bins 32 8 128] [--million-tokens 20]

Fill is positions delivered over positions of sequences. Beside `concat` (cuts texts, pads nothing): first-fit
with as many open bins over the same pieces, and as the ideal best-fit-decreasing over all delivered pieces at once.
"""

import functools
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.report import about, write
from zephon import Recipe, Stream
from zephon.pack import ALGORITHMS, MAX_OPEN_SEGMENTS
from zephon.recipe import PackingSpec

WATCHED: list["WatchedPacker"] = []  # remember what they were offered and what they gave, as lengths


@dataclass
class Args:
    recipe: Annotated[Path, tyro.conf.Positional]
    seq_lens: tuple[int, ...] = (2048, 8192)
    bins: tuple[int, ...] = (32, 8, 128)
    million_tokens: float = 20.0


class WatchedPacker:
    def __init__(self, kind: Any, *args: Any) -> None:
        self._packer, self.pieces, self.sequences = kind(*args), list[int](), list[list[int]]()
        WATCHED.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packer, name)

    def offer(self, sample: Any, start: int, end: int) -> Any:
        taken, plan = self._packer.offer(sample, start, end)
        self.pieces.append(taken - start)
        self.sequences += [[one.end - one.start for one in plan]] if plan else []
        return taken, plan


def main() -> None:
    args, rows, facts = tyro.cli(Args), [], {}
    for name, kind in dict(ALGORITHMS).items():
        ALGORITHMS[name] = functools.partial(WatchedPacker, kind)
    recipe = Recipe.load(args.recipe)
    for seq_len in args.seq_lens:
        for packing in (PackingSpec(), *(PackingSpec("best_fit", bins) for bins in args.bins)):
            with Stream(replace(recipe, packing=packing, batch=replace(recipe.batch, seq_len=seq_len))) as stream:
                rows, facts = [*rows, follow(stream, args.million_tokens * 1e6)], about(stream)
            print(rows[-1])
    write("packing", {**facts, "seq_len": list(args.seq_lens), "rows": rows})


def follow(stream: Stream, tokens: float) -> dict[str, Any]:
    WATCHED.clear()
    loader, seq_len, packing, largest = stream.loader(), stream.batch.seq_len, stream.recipe.packing, 0
    while (stats := loader.stats()).positions < tokens:
        loader.step_records()
        largest = max(largest, *(len(raw) for key, raw in loader.state_dict().items() if key != "header"))
    given = [piece for packer in WATCHED for plan in packer.sequences for piece in plan]
    fill, segments = stats.positions / (stats.records * seq_len), len(given) / stats.records
    row = {"seq_len": seq_len, "algorithm": packing.algorithm, "fill": fill, "padding": stats.padding}
    row |= {"sequences": stats.records, "segments_per_sequence": segments, "lane_bytes_max": largest}
    if packing.algorithm == "best_fit":
        left = [bin for packer in WATCHED for bin in first_fit(packer.pieces, seq_len, packing.bins)]
        row |= {"bins": packing.bins, "first_fit_fill": sum(left) / len(left) / seq_len}
        row["ideal_fill"] = sum(given) / decreasing(given, seq_len) / seq_len
    return row


def first_fit(pieces: list[int], seq_len: int, most: int) -> Iterator[int]:
    """Positions of each sequence that leaves `most` open bins where a piece goes to the oldest that holds it."""
    bins: list[tuple[int, int]] = []  # room, segments
    for size in pieces:
        at = next((i for i, (room, _) in enumerate(bins) if room >= size), len(bins))
        room, held = bins.pop(at) if at < len(bins) else (seq_len, 0)
        bins.insert(at, (room - size, held + 1))
        if room == size:
            yield seq_len - bins.pop(at)[0]
        elif len(bins) > most or sum(held for _, held in bins) >= MAX_OPEN_SEGMENTS:
            yield seq_len - bins.pop(min(range(len(bins)), key=lambda i: bins[i][0]))[0]


def decreasing(pieces: list[int], seq_len: int) -> int:
    """Sequences that best-fit needs when it may begin with the largest pieces."""
    rooms: list[int] = []
    for size in sorted(pieces, reverse=True):
        at = bisect_left(rooms, size)
        insort(rooms, (rooms.pop(at) if at < len(rooms) else seq_len) - size)
    return len(rooms)


if __name__ == "__main__":
    main()
