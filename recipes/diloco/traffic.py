"""Bytes that a run puts on the wire: predicted from its shapes, and beside the bytes that a real run has counted.

    python -m recipes.diloco.traffic RUN      # a run of `processes` that has ended

`decoupled` is a learner that sends every fragment once in H steps and gets it back merged, whatever the number of
learners. `ring` is the reference: a synchronous all-reduce of bf16 gradients in every step, over as many learners.
Messages' heads, and the report of a learner at every step, are not in it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recipes.diloco.learner import plan_of
from recipes.diloco.run import Run


@dataclass(frozen=True)
class Format:
    """How values look on the wire.

    Args:
        bits: of a value.
        block: values that share a scale; 0 for none. The last block of a fragment may be shorter.
        scale_bits: of a scale.
    """

    bits: int
    block: int = 0
    scale_bits: int = 0

    @property
    def bits_a_value(self) -> float:
        """Scales included, where blocks are full."""
        return self.bits + (self.scale_bits / self.block if self.block else 0)

    def bytes(self, values: int) -> int:
        """Of one fragment of so many values; values are packed, a scale takes whole bytes."""
        scales = -(-values // self.block) * self.scale_bits // 8 if self.block else 0
        return -(-values * self.bits // 8) + scales


BF16, BARE_INT4, INT4 = Format(16), Format(4), Format(4, 256, 16)
"""bf16; int4 without scales, as simulations count it; int4 with a scale of 16 bits for 256 values, as it is sent."""

FORMATS = {"float32": Format(32), "bf16": BF16, "int4": INT4}
"""By the names that `Settings.up` and `Settings.down` have for them."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one learner: what it sends and what it gets."""

    up: float
    down: float

    @property
    def total(self) -> float:
        """Both directions."""
        return self.up + self.down


def decoupled(fragments: Sequence[int], *, every: int, steps: int, up: Format = BF16, down: Format = BF16) -> Traffic:
    """What a decoupled learner sends and gets in a run in which it misses no merge, without the model it begins with.

    Args:
        fragments: values of each of the P fragments. Number p is due after the steps t with `t mod H == p * H // P`.
        every: steps between two merges of one fragment, H.
        steps: of the run, counted from 1.
        up: format of the way to the syncer.
        down: format of the way back.
    """
    offsets = [part * every // len(fragments) for part in range(len(fragments))]
    merges = [(steps - offset) // every - -offset // every for offset in offsets]
    each = zip(fragments, merges, strict=True)
    sent = [(times * up.bytes(values), times * down.bytes(values)) for values, times in each]
    return Traffic(sum(one for one, _ in sent), sum(one for _, one in sent))


def ring(values: int, *, learners: int, steps: int) -> Traffic:
    """What a learner of a synchronous ring all-reduce sends and gets: `2(1 - 1/M)` times all gradients each way.

    Reduce-scatter and all-gather each pass on `M - 1` of M parts (Patarasuk and Yuan, 2009).

    Args:
        values: gradients of the model, in bf16.
        learners: M, of the ring.
        steps: of the run.
    """
    each = steps * BF16.bytes(values) * 2 * (learners - 1) / learners
    return Traffic(each, each)


def counted(run: Run) -> dict[int, Traffic]:
    """Bytes that a run has counted, by learner: everything but the models that learners began with.

    Raises:
        FileNotFoundError: the run has not ended.
    """
    found: dict[int, list[int]] = {}
    for learner, way, kind, size in json.loads((run.folder / "traffic.json").read_text()):
        if kind not in ("Welcome", "Describe", "Description"):
            found.setdefault(learner, [0, 0])[way == "down"] += size
    return {learner: Traffic(up, down) for learner, (up, down) in sorted(found.items())}


def beside(run: Run) -> tuple[Traffic, Traffic]:
    """What is predicted for a learner of a run, and what a ring all-reduce over as many learners would send."""
    settings = run.settings
    plan = plan_of(run.make_island(0), settings)
    sizes = [plan.size(part) for part in range(len(plan.fragments))]
    up, down = FORMATS[settings.up], FORMATS[settings.down]
    ours = decoupled(sizes, every=settings.every, steps=settings.rounds, up=up, down=down)
    return ours, ring(plan.total, learners=settings.learners, steps=settings.rounds)


def main(folder: Path) -> None:
    """Print counted beside predicted bytes, for every learner of a run."""
    run = Run.load(folder)
    if not (folder / "traffic.json").exists():
        raise SystemExit(
            f"{folder} has no traffic.json: its run has not ended, or another driver ran it, which counts none."
        )
    predicted, reference = beside(run)
    table = Table("learner", "up: counted", "of predicted", "ring over it", "both ways", "of predicted", "ring over it")
    for learner, one in counted(run).items():
        cells = [
            (f"{got:,.0f}", f"{got / told:.3f}", f"{other / got:.1f}")
            for got, told, other in (
                (one.up, predicted.up, reference.up),
                (one.total, predicted.total, reference.total),
            )
        ]
        table.add_row(f"{learner}", *cells[0], *cells[1])
    settings = run.settings
    told = f"{settings.rounds} rounds, H = {settings.every}, {settings.up} up, {settings.down} down"
    Console(width=118).print(f"{told}; ring: bf16, {settings.learners} learners, as many steps.", table, sep="\n")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
