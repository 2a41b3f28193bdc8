"""How far is a lane from its shares at worst, and how close are realised shares of the whole?

    python -m benchmarks.shares RECIPE RECIPE... [--at 10 50]

For each recipe, with whole documents and with pieces of a sequence: realised shares after so many million tokens, and
the largest deviation of any source in any lane after any sample, in largest samples that the lane has seen (the bound
is 1 over its share, S - 1 under it).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

import zephon.lane
from benchmarks.report import about, write
from zephon import Recipe, Stream
from zephon.mix import Mixer


@dataclass
class Args:
    recipes: Annotated[tuple[Path, ...], tyro.conf.Positional]
    at: tuple[int, ...] = (10, 50)


class WatchedMixer(Mixer):
    """A mixer that remembers how far it ever was from its shares."""

    worst = (0.0, 0.0)

    def charge(self, source: int, cost: int) -> int:
        chosen = super().charge(source, cost)
        self.largest = max(getattr(self, "largest", 1), cost)
        unit = self._total * self.largest
        over, under = WatchedMixer.worst
        WatchedMixer.worst = max(over, -min(self.deficits) / unit), max(under, max(self.deficits) / unit)
        return chosen


def main() -> None:
    args = tyro.cli(Args)
    rows: list[dict[str, Any]] = []
    facts: list[dict[str, Any]] = []
    zephon.lane.Mixer = WatchedMixer
    for path in args.recipes:
        for piece in ("document", "sequence"):
            recipe = Recipe.load(path)
            with Stream(replace(recipe, mix=replace(recipe.mix, piece=piece))) as stream:
                rows += follow(stream, piece, args.at)
                facts.append(about(stream))
    write("shares", {"recipes": facts, "rows": rows})


def follow(stream: Stream, piece: str, at: tuple[int, ...]) -> list[dict[str, Any]]:
    loader, rows = stream.loader(), []
    WatchedMixer.worst = (0.0, 0.0)
    weights = {spec.name: spec.weight for spec in stream.recipe.sources}
    for million in at:
        while loader.stats().positions < million * 1e6:
            next(loader)
        mixed = loader.stats().mixed
        shares = {name: count / sum(mixed.values()) for name, count in mixed.items()}
        errors = {
            name: round(100 * (shares[name] - float(weights[name] / sum(weights.values()))), 4) for name in shares
        }
        row = {"lanes": stream.recipe.lanes, "piece": piece, "million_tokens": million, "error_points": errors}
        row |= {"worst_over": round(WatchedMixer.worst[0], 3), "worst_under": round(WatchedMixer.worst[1], 3)}
        rows.append(row)
        print(row)
    return rows


if __name__ == "__main__":
    main()
