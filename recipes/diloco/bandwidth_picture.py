"""The bandwidth that training asks of a link, as a picture: over the utilisation, and over the time of a step."""

from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from recipes.diloco.bandwidth import EARLY, MODEL, DataParallel, Decoupled
from recipes.diloco.traffic import BARE_INT4

LINES = (
    ("data-parallel, 8 sites, 16 buckets of 2 ms", DataParallel(MODEL, 8, **EARLY), "#8c510a", "-"),
    ("data-parallel, 8 sites", DataParallel(MODEL, 8), "#8c510a", "--"),
    ("data-parallel, 2 sites", DataParallel(MODEL, 2), "#d8862b", "-"),
    ("decoupled, bf16", Decoupled(MODEL), "#1b7837", "-"),
    ("decoupled, int4", Decoupled(MODEL, BARE_INT4), "#1b7837", "--"),
)
PUBLISHED = ((90, 198), (90, 104), (50, 1.7), (100, 0.84))
"""Compute utilisation at which we meet a published number, and the number."""


def draw(file: Path) -> None:
    """Both panels, Gbit/s on one logarithmic scale.

    Args:
        file: PNG or SVG.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.6), sharey=True, layout="constrained")
    shares, steps = np.linspace(0.4, 0.99, 60), np.geomspace(0.25, 16, 40)
    for name, link, tone, dashes in LINES:
        left.plot(100 * shares, [link.needs(one) / 1e9 for one in shares], color=tone, linestyle=dashes, linewidth=1.8)
        needs = [replace(link, step=one).needs(0.9) / 1e9 for one in steps]
        if name != LINES[0][0]:  # its latency is of a step of 1 s
            right.plot(steps, needs, color=tone, linestyle=dashes, linewidth=1.8)
        left.plot([], [], color=tone, linestyle=dashes, linewidth=1.8, label=name)
    for share, number in PUBLISHED:
        left.plot(share, number, "o", color="#222222", markersize=5, zorder=3, clip_on=False)
        below = -13 if number == 104 else 6  # clear of the line above it
        left.annotate(f"{number:g}", (share, number), (-6, below), textcoords="offset points", fontsize=9, ha="right")
    left.plot([], [], "o", color="#222222", markersize=5, label="published (at which %: our reading)")
    left.set_title("5 B parameters, steps of 1 s: Gbit/s each way, of a site or learner", loc="left", fontsize=10)
    left.set_xlabel("compute utilisation, %")
    left.set_xlim(40, 100)
    right.set_title("The same at a utilisation of 90 %", loc="left", fontsize=10)
    right.set_xlabel("seconds that a step computes")
    right.set_xscale("log")
    right.set_xticks([0.25, 0.5, 1, 2, 4, 8, 16], ["0.25", "0.5", "1", "2", "4", "8", "16"])
    right.minorticks_off()
    for axis in (left, right):
        axis.set_yscale("log")
        axis.set_yticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)
