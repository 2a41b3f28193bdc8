"""How much of a large fleet's time goes to training, with one learner and with many: ours beside the published table.

    python -m recipes.diloco.goodput [--picture FILE] [--json FILE]

Every cell is computed twice, by simulating each failure and return (`failures.simulate`) and in closed form
(`failures.steady_goodput`), and printed with its distance from the table of "Decoupled DiLoCo for Resilient Distributed
Pre-training", arXiv 2604.21428. The paper's stops and return times are not known to us: two numbers are fitted to the
table, and the first lines that are printed say which.

Slow and scavenged hardware (tables 4 and 5 of the paper) come after it, from `uneven`.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from recipes.diloco.failures import Fleet, Outcome, simulate, steady_goodput, steady_uptime, weibull_mean
from recipes.diloco.uneven import RESHARD, pace, scavenged_decoupled, scavenged_elastic

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)


@dataclass(frozen=True)
class Row:
    """One row of the published table: goodput in percent for each of `CHIPS`."""

    name: str
    learners: int
    elastic: bool
    cells: tuple[int, ...]


PUBLISHED = (
    Row("data-parallel, waits", 1, False, (72, 57, 38, 27, 18)),
    Row("data-parallel, elastic", 1, True, (88, 80, 69, 58, 40)),
    Row("decoupled, M = 2", 2, True, (94, 88, 80, 70, 54)),
    Row("decoupled, M = 4", 4, True, (96, 93, 89, 82, 73)),
    Row("decoupled, M = 8", 8, True, (98, 96, 94, 88, 80)),
    Row("decoupled, M = 16", 16, True, (99, 98, 96, 93, 86)),
)

SLOW = {"waits for all, K = 8": (8, 84), "decoupled, K = 1": (1, 100)}
"""Quorum and published goodput (table 5): 8 learners, half of them on a slower generation of chips."""

SLOW_STEPS = (1.0,) * 4 + (1.18,) * 4
"""Step times: published are "the slowest 18 % slower" and a variance of 10 %, which we read as 1.18 steps' time for
that half and a deviation of 10 % of every step."""

SCAVENGED = {0.0: (1.00, 1.00), 0.25: (1.07, 0.90), 0.5: (1.09, 0.83), 1.0: (1.02, 0.75), 3.0: (0.80, 0.62)}
"""Extra chips: published time of data-parallel and of decoupled learners (table 4)."""


@dataclass(frozen=True)
class Args:
    """Goodput of training on failing hardware, beside the published table."""

    fleet: Annotated[Fleet, tyro.conf.arg(name="")] = field(default_factory=Fleet)
    quorum: int = 1
    """Learners that must run for the system to count as up."""
    failures: int = 50_000
    """Failures to simulate in each cell; four times as many halve the noise (0.1 points)."""
    seed: int = 0
    """Names the random draws."""
    json: Path | None = None
    """Also write everything that is printed to this file."""
    picture: Path | None = None
    """Also draw the table (PNG or SVG). Needs matplotlib: pip install -e '.[demo]'."""


def main() -> None:
    """Print the tables; write the files that were asked for."""
    args = tyro.cli(Args, description=__doc__)
    out, found = Console(width=118, highlight=False), compute(args)
    for title, table in (
        ("What goes in.", inputs(args.fleet)),
        ("Goodput in %, simulated; in brackets published, then the difference where it is over 2 points.",
         beside(found["simulated"])),
        ("The same in closed form.", beside(found["closed"])),
        ("Distance from the published cells, in points.", errors(found)),
        (f"Uptime in %: at least {args.quorum} running; simulated, closed form. Published in words: about 100 for M "
         "= 4, not to be told from 100 for 8 and 16.", uptimes(found)),
        ("Half of 8 learners 18 % slower, steps vary by 10 %: pace in % of the fastest learner's. Nothing fitted; how "
         "the 18 and 10 % are meant is our reading.", slow(found["slow"])),
        (f"Extra chips for half of the work: time of the run. Decoupled: nothing fitted. Data-parallel: loses "
         f"{RESHARD} times the share of its state that moves (fitted).", scavenged(found["scavenged"])),
    ):  # fmt: skip
        out.print(f"\n{title}", table, sep="\n")
    if args.json:
        args.json.write_text(json.dumps({"fleet": asdict(args.fleet), **found}, indent=1) + "\n")
    if args.picture:
        from recipes.diloco.goodput_picture import draw

        draw(found, args.picture)


def compute(args: Args) -> dict[str, Any]:
    """Everything that is shown: shares in percent, a list a row, in the order of `PUBLISHED` and `CHIPS`."""
    fleet, found = args.fleet, dict[str, Any](chips=CHIPS, rows=[asdict(row) for row in PUBLISHED])

    def played(chips: int, row: Row) -> Outcome:
        quorum = min(args.quorum, row.learners)
        return simulate(
            chips, row.learners, fleet, elastic=row.elastic, quorum=quorum, failures=args.failures, seed=args.seed
        )

    outcomes = [[played(chips, row) for chips in CHIPS] for row in PUBLISHED]
    found["simulated"] = [[100 * one.goodput for one in row] for row in outcomes]
    found["closed"] = _each(lambda chips, row: steady_goodput(chips, row.learners, fleet, elastic=row.elastic))
    found["uptime_simulated"] = [[100 * one.uptime for one in row] for row in outcomes]
    found["uptime_closed"] = _each(
        lambda chips, row: steady_uptime(
            chips, row.learners, fleet, quorum=min(args.quorum, row.learners), elastic=row.elastic
        )
    )
    found["errors"] = {kind: distances(found[kind]) for kind in ("simulated", "closed")}
    found["slow"] = {
        name: 100 * pace(np.array(SLOW_STEPS), quorum, seed=args.seed) for name, (quorum, _) in SLOW.items()
    }
    found["scavenged"] = {extra: (scavenged_elastic(extra), scavenged_decoupled(extra)) for extra in SCAVENGED}
    return found


def _each(value: Callable[[int, Row], float]) -> list[list[float]]:
    return [[100 * value(chips, row) for chips in CHIPS] for row in PUBLISHED]


def distances(cells: list[list[float]]) -> dict[str, tuple[float, float]]:
    """Root mean square and largest distance from the published cells, in points, for the groups of rows."""
    off = np.array(cells) - np.array([row.cells for row in PUBLISHED])
    elastic = np.array([row.elastic for row in PUBLISHED])
    groups = {
        "all 30 cells": off,
        "the 25 of elastic and decoupled rows": off[elastic],
        "the 5 that wait for hardware": off[~elastic],
    }
    return {name: (float(np.sqrt((part**2).mean())), float(np.abs(part).max())) for name, part in groups.items()}


def inputs(fleet: Fleet) -> Table:
    """Every number that goes in, and where it comes from."""
    mean = weibull_mean()
    rows = (
        ("time between interruptions of a chip", f"{fleet.mtbi / 86400:.2f} days", "published: 1 year, constant rate"),
        ("time until hardware returns", "exponentiated Weibull", "published; its values are not known"),
        ("stop to shrink, stop to grow", f"{fleet.downscale:g} s, {fleet.upscale:g} s",
         "fitted, as one number: 12.4 to 13.2 s meet every bound; 13.7 has the least error but gives 55 for 58"),
        ("return, where the learner waits", f"mean {fleet.replace_scale * mean:.0f} s",
         "fitted, to the first row alone: a spare that stands ready"),
        ("return, where the learner goes on", f"mean {fleet.return_scale * mean:.0f} s",
         "assumed: 71 to 1,400 s change no cell by 1 point"),
        ("chips of a slice", f"{fleet.slice_chips}", "assumed: 64 to 1,024 change no cell by 1 point"),
        ("shapes of the Weibull", "1.5 and 1.2", "assumed; only the mean matters"),
        ("speeds of chips", "equal", "assumed"),
        ("failures during a stop", "none; returns join the stop", "assumed"),
    )  # fmt: skip
    table = Table("input", "value", "source")
    for row in rows:
        table.add_row(*row)
    return table


def beside(cells: list[list[float]]) -> Table:
    """Ours, the published cell in brackets, and the difference where it is more than 2 points."""
    table = _grid()
    for row, ours in zip(PUBLISHED, cells, strict=True):
        table.add_row(row.name, *(_cell(one, published) for one, published in zip(ours, row.cells, strict=True)))
    return table


def _cell(ours: float, published: int) -> str:
    off = ours - published
    return f"{ours:.1f} ({published})" + (f" [bold]{off:+.1f}[/]" if abs(off) > 2 else "")


def errors(found: dict[str, Any]) -> Table:
    """How far ours are from the published cells."""
    table = Table("cells", "simulated: RMS", "worst", "closed form: RMS", "worst")
    for group, simulated in found["errors"]["simulated"].items():
        table.add_row(group, *(f"{value:.2f}" for value in (*simulated, *found["errors"]["closed"][group])))
    for name, learners, published in (("58: one elastic learner", 1, 58), ("88: M = 8", 8, 88)):
        at = next(i for i, row in enumerate(PUBLISHED) if row.elastic and row.learners == learners)
        off = [found[kind][at][CHIPS.index(1_200_000)] - published for kind in ("simulated", "closed")]
        table.add_row(f"{name}, 1.2M chips", f"{off[0]:+.2f}", "", f"{off[1]:+.2f}", "")
    return table


def uptimes(found: dict[str, Any]) -> Table:
    """Share of the time in which enough learners run."""
    table = _grid()
    for row, played, steady in zip(PUBLISHED, found["uptime_simulated"], found["uptime_closed"], strict=True):
        table.add_row(row.name, *(f"{one:.2f} / {other:.2f}" for one, other in zip(played, steady, strict=True)))
    return table


def slow(ours: dict[str, float]) -> Table:
    """Learners of two speeds."""
    table = Table("merges", "ours", "published")
    for name, (_, published) in SLOW.items():
        table.add_row(name, f"{ours[name]:.1f}", f"{published}")
    return table


def scavenged(ours: dict[float, tuple[float, float]]) -> Table:
    """Extra chips for half of the work, beside the least time there can be."""
    table = Table("extra", "0.5 + 0.5 / (1 + extra)", "decoupled", "published", "data-parallel", "published")
    for extra, (elastic, decoupled) in ours.items():
        theirs = SCAVENGED[extra]
        values = (0.5 + 0.5 / (1 + extra), decoupled, theirs[1], elastic, theirs[0])
        table.add_row(f"+{extra:.0%}", f"{values[0]:.3f}", *(f"{value:.2f}" for value in values[1:]))
    return table


def _grid() -> Table:
    table = Table("chips")
    for chips in CHIPS:
        table.add_column(short(chips), justify="right")
    return table


def short(chips: int) -> str:
    """How a number of chips is written: 150k, 1.2M."""
    return f"{chips / 1e6:g}M" if chips >= 1_000_000 else f"{chips // 1000}k"


if __name__ == "__main__":
    main()
