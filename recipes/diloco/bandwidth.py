"""How fast a link must be, for data-parallel and for decoupled learners: formulas, and a simulation of the link.

    python -m recipes.diloco.bandwidth [--picture FILE] [--json FILE]

A step computes for T seconds: forward T/3, backward 2T/3. Compute utilisation is the share of the time that computes,
T over T and the wait for the link.

*Data-parallel*: gradients of N parameters in bf16 are all-reduced every step. On a ring each of D sites sends
`2(1 - 1/D)` times its 16·N bits. They leave in equal buckets during the backward pass, first come first served, and the
next step waits for the last.

*Decoupled*: every H steps a learner sends each of P fragments and gets it back merged: N/P parameters every H/P steps,
however many learners there are. A fragment has `overlap + 1` steps to arrive before it is waited for. These are a
learner's bits; a site that also holds its 1/M of the syncer sends and gets as many again for the others.

Source: "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv 2604.21428, whose bandwidths are simulated; the
model of the link follows the simulator that its first author has published. Not all inputs of the published numbers
are known: what is printed says under which assumption each is met. Fragments count as equal here: an embedding that is
larger needs more while it moves, or its slack. `traffic` predicts the bytes of a real run.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from recipes.diloco.traffic import BARE_INT4, BF16, INT4, Format, Traffic, decoupled, ring

UTILISATIONS = (0.5, 0.75, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class DataParallel:
    """An all-reduce of all gradients between sites in every step.

    Args:
        params: parameters of the model, N.
        sites: that take part in the ring, D.
        step: seconds that a step computes, T.
        buckets: equal parts in which the gradients leave; 128 in the author's later simulator, 16 in the earlier.
        latency: seconds that every bucket adds; 0 in the later, 0.002 in the earlier.
    """

    params: float
    sites: int
    step: float = 1.0
    buckets: int = 128
    latency: float = 0.0

    @property
    def bits(self) -> float:
        """Bits that a site sends in a step."""
        return BF16.bits * self.params * 2 * (1 - 1 / self.sites)

    def needs(self, utilisation: float) -> float:
        """Bits a second for this utilisation, in closed form.

        The last bucket is through when the link has sent all since the first was released, or this one since it was
        released itself, whichever is later: buckets are equal and evenly spaced. `inf` where latency alone is longer.
        """
        end, last = self.step / utilisation, self.bits / self.buckets
        since_first = end - self.step / 3 - 2 * self.step / (3 * self.buckets) - self.buckets * self.latency
        since_last = end - self.step - self.latency
        if min(since_first, since_last) <= 0:
            return math.inf
        return max(self.bits / since_first, last / since_last)

    def utilisation(self, bandwidth: float) -> float:
        """Utilisation on a link of so many bits a second, bucket after bucket."""
        done, took = 0.0, self.bits / self.buckets / bandwidth + self.latency
        for bucket in range(1, self.buckets + 1):
            released = self.step / 3 + 2 * self.step / 3 * bucket / self.buckets
            done = max(done, released) + took
        return self.step / max(self.step, done)


@dataclass(frozen=True)
class Decoupled:
    """A fragment up and a fragment down every few steps; the two directions are links of their own.

    Args:
        params: parameters of the model, N.
        kind: format of the values on the wire.
        step: seconds that a step computes, T.
        every: steps between two merges of one fragment, H.
        fragments: P, at most H and a divisor of it.
        overlap: steps from the point at which a fragment is due to its use, τ.
    """

    params: float
    kind: Format = BF16
    step: float = 1.0
    every: int = 24
    fragments: int = 24
    overlap: int = 2

    def __post_init__(self) -> None:
        if self.fragments < 1 or self.every % self.fragments:
            raise ValueError(
                f"{self.fragments} fragments every {self.every} steps: the steps must be a multiple of the fragments, "
                "or their traffic is not even and the formula does not hold."
            )

    def needs(self, utilisation: float) -> float:
        """Bits a second, each way, in closed form.

        A fragment leaves every `gap = H/P` steps and may take as long without a wait, or `overlap + 1` steps if that is
        less. With one fragment a step this is `bits·N·CU / (H·T)`: what a learner makes must pass.
        """
        gap = self.every // self.fragments
        idle = gap - min(gap, self.overlap + 1)  # steps in which the link has nothing to send
        return self.kind.bits_a_value * self.params / self.fragments / (self.step * (gap / utilisation - idle))

    def utilisation(self, bandwidth: float, steps: int = 2_000) -> float:
        """Utilisation on a link of so many bits a second, fragment after fragment; the first half is not counted."""
        gap = self.every // self.fragments
        took = self.kind.bits_a_value * self.params / self.fragments / bandwidth
        now, free, half = 0.0, 0.0, 0.0  # free: when the link has sent all that it was given
        arrived: dict[int, float] = {}
        for step in range(1, steps + 1):
            now += self.step
            if step % gap == 0:
                free = arrived[step] = max(free, now) + took
            now = max(now, arrived.pop(step - self.overlap - 1, 0.0))
            half = now if step == steps // 2 else half
        return (steps - steps // 2) * self.step / (now - half)


def narrowest(utilisation: Callable[[float], float], target: float, precision: float = 1e-4) -> float:
    """The slowest link, in bits a second, that reaches the target: bisection of a simulation, which is monotone.

    Raises:
        ValueError: no link up to 1e18 bits a second reaches it.
    """
    low, high = 1.0, 1e18
    if utilisation(high) < target:
        raise ValueError(f"a utilisation of {target} is out of reach on any link: latency alone costs more.")
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if utilisation(middle) >= target else (middle, high)
    return high


@dataclass(frozen=True)
class Claim:
    """A published number beside ours."""

    what: str
    published: float
    ours: float
    formula: str
    inputs: str
    assumed: str
    """What of the inputs is our reading, because the sources do not say it."""

    @property
    def off(self) -> float:
        """Deviation of ours, as a share of the published number."""
        return self.ours / self.published - 1


EARLY = {"buckets": 16, "latency": 0.002}
MODEL = 5e9  # parameters of the published simulation


def claims() -> list[Claim]:
    """Every published number that we know, with what it takes to meet it. Bandwidths in Gbit/s."""
    ring_formula, late, each = "16·N·2(1 - 1/D) / (T/CU - T/3 - 2T/3B - B·l)", "128 buckets", "bits·N·CU / (H·T)"
    early = DataParallel(MODEL, 8, **EARLY).needs(0.9) / 1e9
    two, eight = (DataParallel(MODEL, sites).needs(0.9) / 1e9 for sites in (2, 8))
    bare, scaled = (Decoupled(MODEL, kind).needs(1) / 1e9 for kind in (BARE_INT4, INT4))
    half = Decoupled(MODEL).needs(0.5) / 1e9
    ratios = [eight * 1e9 / Decoupled(MODEL, kind).needs(0.9) for kind in (BF16, BARE_INT4)]
    return [
        Claim("data-parallel, 8 sites", 198, early, ring_formula, "D = 8, CU 90 %, 16 buckets of 2 ms",
              f"CU, and the earlier version of the link: the later gives {eight:.0f}"),
        Claim("decoupled, 8 sites", 0.84, bare, each, "int4, H = 24, CU 100 %", "no scales; CU"),
        Claim("the same, scales counted", 0.84, scaled, each, "4.0625 bits, H = 24, CU 100 %", "a scale for 256; CU"),
        Claim("their ratio", 236, early / bare, "", "the first two lines", "both CU: they are not the same"),
        Claim("data-parallel, 1 s", 104, two, ring_formula, f"D = 2, CU 90 %, {late}", "D, CU, version"),
        Claim("decoupled, 1 s", 1.7, half, each, "bf16, H = 24, CU 50 %", "bf16; CU, not that of its partner"),
        Claim("least reduction", 60, ratios[0], "", f"D = 8, CU 90 %, {late}; bf16", "D, CU, version"),
        Claim("largest reduction", 242, ratios[1], "", f"D = 8, CU 90 %, {late}; int4", "D, CU, version, no scales"),
    ]  # fmt: skip


def four_regions(link: float, kind: Format = BF16) -> dict[str, float]:
    """The 12 B run over four regions, on a link of so many bits a second.

    Published: links of 2 to 5 Gbit/s, over 20 times faster than synchronous training; not the time of a step. Hence the
    step times at which both hold: from `shortest`, where the fragments just pass, to `longest`, where data-parallel is
    20 times slower. Seconds, and how much faster decoupled is with the shortest step.
    """
    shortest = Decoupled(12e9, kind).needs(1) / link
    reduce = DataParallel(12e9, 4).bits / link
    slower = shortest / DataParallel(12e9, 4, shortest).utilisation(link)
    longest = reduce / (20 - 1 / 3 - 2 / (3 * 128))  # T/3 + 2T/(3·128) + reduce = 20·T
    return {"all_reduce": reduce, "shortest": shortest, "faster": slower / shortest, "longest": longest}


def on_the_wire(values: int = int(MODEL), learners: int = 8, every: int = 24) -> dict[str, tuple[Traffic, Traffic]]:
    """Bytes of a learner in H steps: for each format ours, and the ring all-reduce over as many learners."""
    reference = ring(values, learners=learners, steps=every)
    ways = {"bf16 both ways": (BF16, BF16), "int4 up, bf16 down": (INT4, BF16), "int4 both ways": (INT4, INT4)}
    return {
        name: (decoupled([values], every=every, steps=every, up=up, down=down), reference)
        for name, (up, down) in ways.items()
    }


SETTINGS: dict[str, DataParallel | Decoupled] = {
    "data-parallel, D = 8, 16 buckets of 2 ms": DataParallel(MODEL, 8, **EARLY),
    "data-parallel, D = 8, 128 buckets": DataParallel(MODEL, 8),
    "data-parallel, D = 2, 128 buckets": DataParallel(MODEL, 2),
    "decoupled, bf16": Decoupled(MODEL),
    "decoupled, int4 with scales": Decoupled(MODEL, INT4),
}


@dataclass(frozen=True)
class Args:
    """Bandwidth of data-parallel and decoupled training, beside the published numbers."""

    json: Path | None = None
    """Also write everything that is printed to this file."""
    picture: Path | None = None
    """Also draw the bandwidths (PNG or SVG). Needs matplotlib: pip install -e '.[demo]'."""


def main() -> None:
    """Print the tables; write the files that were asked for."""
    args, out = tyro.cli(Args, description=__doc__), Console(width=118, highlight=False)
    for title, table in (
        ("Published numbers, N = 5e9, T = 1 s. Gbit/s or ratios.", _claims()),
        (
            "12 B over four regions. Published: 2 to 5 Gbit/s, over 20 times faster; the time of a step is not.",
            _regions(),
        ),
        ("What a link must do, Gbit/s, for a compute utilisation of", _needed()),
        ("Bytes a parameter, of a learner in a step: 8 learners, H = 24; beside a bf16 ring all-reduce of 8.", _wire()),
    ):
        out.print(f"\n{title}", table, sep="\n")
    if args.json:
        regions = {f"{link:g}": four_regions(link) for link in (2e9, 5e9)}
        found = {"claims": [{**asdict(claim), "off": claim.off} for claim in claims()], "four_regions": regions}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.picture:
        from recipes.diloco.bandwidth_picture import draw

        draw(args.picture)


def _claims() -> Table:
    table = Table("what", "published", "ours", "off", "inputs", "met only if", "formula")
    for one in claims():
        ours = (f"{one.published:.3g}", f"{one.ours:.3g}", f"{one.off:+.1%}")
        table.add_row(one.what, *ours, one.inputs, one.assumed, one.formula)
    return table


def _regions() -> Table:
    table = Table(
        "link", "all-reduce of a step", "fragments pass from T =", "then faster by", "over 20 times up to T ="
    )
    for link in (2e9, 5e9):
        one = four_regions(link)
        times = (
            f"{one['all_reduce']:.1f} s",
            f"{one['shortest']:.1f} s",
            f"{one['faster']:.0f}",
            f"{one['longest']:.1f} s",
        )
        table.add_row(f"{link / 1e9:g} Gbit/s", *times)
    return table


def _needed() -> Table:
    table = Table("", *(f"{target:.0%}" for target in UTILISATIONS), "simulated: differs by at most")
    for name, setting in SETTINGS.items():
        closed = [setting.needs(target) for target in UTILISATIONS]
        played = [narrowest(setting.utilisation, target) for target in UTILISATIONS]
        off = max(abs(one / other - 1) for one, other in zip(played, closed, strict=True))
        table.add_row(name, *(f"{bits / 1e9:.3f}"[:5].rstrip(".") for bits in closed), f"{off:.2%}")
    return table


def _wire() -> Table:
    table, values = Table("", "up", "times less", "total", "times less"), MODEL * 24
    for name, (ours, reference) in on_the_wire().items():
        up, total = reference.up / ours.up, reference.total / ours.total
        table.add_row(name, f"{ours.up / values:.4f}", f"{up:.1f}", f"{ours.total / values:.4f}", f"{total:.1f}")
    reference = on_the_wire()["bf16 both ways"][1]
    table.add_row("ring all-reduce", f"{reference.up / values:.4f}", "", f"{reference.total / values:.4f}", "")
    return table


if __name__ == "__main__":
    main()
