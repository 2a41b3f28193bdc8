"""The loss curves of the demonstration as a picture."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Curve = tuple[str, dict[int, float]]

_STYLES = (("-", 4.0, 0.35), ("-", 1.2, 1.0), ("--", 1.6, 1.0), (":", 2.2, 1.0))


def draw(ours: list[Curve], stock: list[Curve], saved: int, file: Path) -> None:
    """Two panels with one scale, Zephon left, TorchTitan's own loader right; the first curve is uninterrupted."""
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.6), sharey=True, layout="constrained")
    for panel, title, curves in zip(panels, ("Zephon", "TorchTitan's own loader"), (ours, stock), strict=True):
        for (name, losses), (line, width, alpha) in zip(curves, _STYLES, strict=False):
            steps = sorted(losses)
            panel.plot(steps, [losses[step] for step in steps], line, linewidth=width, alpha=alpha, label=name)
        panel.axvline(saved, color="gray", linewidth=0.8)
        panel.annotate(
            "checkpoint", (saved, panel.get_ylim()[1]), fontsize=8, color="gray", ha="right", va="top", rotation=90
        )
        panel.set_title(title)
        panel.set_xlabel("step")
        panel.legend(fontsize=8)
    panels[0].set_ylabel("training loss")
    note = "resumed on other ranks: refused.\nData state left out: starts again\nwith documents it has seen."
    panels[1].text(0.03, 0.04, note, transform=panels[1].transAxes, fontsize=8, va="bottom")
    figure.savefig(file, dpi=110)
    plt.close(figure)
