"""Are positions in = positions out + open tail, to the position, with saves and resizes on the way?

    python -m benchmarks.conserve RECIPE [--million-tokens 50]

Counts twice, independently: positions delivered, from the labels of every batch; positions drawn, by asking the
tokenizer for the length of every row of every group that the order says was visited.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from benchmarks.report import about, write
from zephon import Stream
from zephon.recipe import divisors
from zephon.state import HEADER, LaneState


@dataclass
class Args:
    recipe: Annotated[Path, tyro.conf.Positional]
    million_tokens: float = 50
    steps_between_saves: int = 40


def main() -> None:
    args = tyro.cli(Args)
    chosen = random.Random(1)  # which resizes to try; decides no data
    with Stream.open(args.recipe) as stream:
        worlds = divisors(stream.recipe.lanes)
        state: dict[str, bytes] = {}
        delivered = padding = 0
        resizes: list[int] = []
        while delivered < args.million_tokens * 1e6:
            resizes.append(chosen.choice(worlds))
            loaders = [stream.loader(rank, resizes[-1]) for rank in range(resizes[-1])]
            for loader in loaders:
                if state:
                    loader.load_state_dict(state)
                for _ in range(args.steps_between_saves):
                    for records in loader.step_records().values():
                        for record in records:
                            valid = int((record["labels"] >= 0).sum())
                            delivered += valid
                            padding += record["labels"].size - valid
            state = {key: raw for loader in loaders for key, raw in loader.state_dict().items()}
        lanes = {key: LaneState.decode(key, raw, state[HEADER]) for key, raw in state.items() if key != HEADER}
        drawn = sum(drawn_positions(stream, int(key[-5:]), lane) for key, lane in lanes.items())
        tail = sum(one.end - one.start for lane in lanes.values() for one in lane.waiting)
        result: dict[str, Any] = {
            "positions_drawn": drawn, "positions_delivered": delivered, "open_tail": tail,
            "difference": drawn - delivered - tail, "padding": padding, "resizes": resizes,
        }  # fmt: skip
        print(result)
        write("conserve", {**about(stream), **result})
        assert result["difference"] == 0
        assert padding == 0


def drawn_positions(stream: Stream, lane: int, state: LaneState) -> int:
    """Positions of everything that a lane has drawn, from the order and the data alone."""
    total = 0
    for number, (source, known) in enumerate(zip(stream.sources, stream.lane_sources, strict=True)):
        at = state.sources[number].position
        for group in range(at.group + 1):
            rows = known.order.group(lane, group)
            count = len(rows.row) if group < at.group else at.place
            if count:
                numbers = source.catalogue.chunks.rows(rows.chunk[:count], rows.row[:count])
                total += int(np.sum(stream.worker.measure(number, numbers, numbers * 0).positions))
        total += state.sources[number].offset
    return total


if __name__ == "__main__":
    main()
