"""The picture of the demonstration: loss over time, and tokens over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

_LOOKS = {
    "undisturbed": ("4 learners, undisturbed", "tab:gray", "-"),
    "decoupled": ("4 learners, decoupled", "tab:blue", "-"),
    "elastic": ("data-parallel, elastic", "tab:orange", "-"),
    "restarted": ("data-parallel, waits for the machine", "tab:red", "--"),
}

_STOP = 6.0  # seconds without a step after which the line of losses breaks off


def draw(results: Sequence[Any], faults: Sequence[tuple[float, float, str]], file: Path) -> None:
    """Two panels; faults are shaded: when, how long, what."""
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for at, lasting, kind in faults:
        for panel in panels:
            panel.axvspan(at, at + lasting, color="black", alpha=0.07, linewidth=0)
            panel.text(
                at + lasting / 2, 0.98, "killed" if kind == "kill" else "slowed", fontsize=8, ha="center", va="top",
                transform=panel.get_xaxis_transform(),
            )  # fmt: skip
    for one in results:
        label, colour, line = _LOOKS[one.name]
        times, tokens, losses = (np.array(column, dtype=float) for column in zip(*one.losses, strict=True))
        edges = np.arange(0, times[-1] + 2, 2.0)  # a mean over two seconds: several learners log
        place = np.digitize(times, edges)
        middle = np.array([(times[place == i].mean(), losses[place == i].mean()) for i in np.unique(place)])
        stops = np.flatnonzero(np.diff(middle[:, 0]) > _STOP) + 1
        panels[0].plot(*np.insert(middle, stops, np.nan, axis=0).T, line, color=colour, linewidth=1.4, label=label)
        times, tokens = np.append(times, one.seconds), np.append(tokens, tokens[-1])
        panels[1].plot(times, tokens / 1e3, line, color=colour, linewidth=1.6, label=f"{label}: {one.goodput:.0%}")
    panels[0].set(xlabel="seconds", ylabel="training loss", title="Loss")
    panels[1].set(xlabel="seconds", ylabel="thousand tokens that count", title="Tokens, and goodput")
    panels[0].legend(fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.94))
    panels[1].legend(fontsize=8, loc="lower right")
    figure.savefig(file, dpi=110)
    plt.close(figure)
