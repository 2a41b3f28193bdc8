"""The published goodput table as a picture: ours as lines, the published cells as marks; and the uptime.

The closed form is left out: it lies on the lines (0.4 points at most)."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from recipes.diloco.goodput import short

TONES = ("#8c510a", "#d8862b", "#8cc084", "#4f9f57", "#1b7837", "#00441b")
"""One a row of the table: data-parallel in browns, decoupled in greens, darker with more learners."""


def draw(found: dict[str, Any], file: Path) -> None:
    """Goodput left, uptime right, over the number of chips.

    Args:
        found: from `goodput.compute`.
        file: PNG or SVG.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.8), width_ratios=(1.6, 1), layout="constrained")
    chips = found["chips"]
    for row, tone, ours, up in zip(found["rows"], TONES, found["simulated"], found["uptime_simulated"], strict=True):
        left.plot(chips, ours, color=tone, linewidth=1.8)
        left.plot(chips, row["cells"], "o", color=tone, markersize=6, markeredgecolor="white", markeredgewidth=0.8)
        end = {"xy": (chips[-1], ours[-1]), "xytext": (9, 0), "textcoords": "offset points", "va": "center"}
        left.annotate(row["name"], color=tone, fontsize=8.5, **end)
        right.plot(chips, up, "o-", color=tone, linewidth=1.8, markersize=4)
    left.set_title("Goodput: chip-time that trains, %", loc="left", fontsize=10)
    right.set_title("Uptime: at least one learner runs, %", loc="left", fontsize=10)
    lines = Line2D([], [], color="#555555", linewidth=1.8)
    marks = Line2D([], [], color="#555555", linewidth=0, marker="o", markersize=6)
    left.legend([lines, marks], ["ours, simulated", "published"], loc="lower left", fontsize=8.5, frameon=False)
    right.text(chips[2], 102.5, "M = 4, 8, 16: above 99", ha="center", fontsize=8.5, color=TONES[-1])
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xticks(chips, [short(one) for one in chips])
        axis.minorticks_off()
        axis.set_ylim(0, 108)
        axis.set_xlabel("chips of the fleet")
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    left.set_xlim(right=chips[-1] * 2.6)
    figure.savefig(file, dpi=110)
    plt.close(figure)
