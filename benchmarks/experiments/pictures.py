"""The results as pictures."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, STOCK, OTHERS = "#1b7837", "#b35806", "#7a7a7a"
COMMAND = "python -m benchmarks.experiments --only"


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write `experiments_NAME.png` for every experiment of `results` that has a picture."""
    makes: dict[str, Callable[[dict[str, Any]], Any]] = {"order": order, "throughput": throughput, "saves": saves}
    for name in results.keys() & makes.keys():
        figure = makes[name](results[name])
        figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))
        figure.text(0.995, 0.005, f"{COMMAND} {name}", ha="right", va="bottom", fontsize=6, color="#888888")
        figure.savefig(folder / f"experiments_{name}.png", dpi=110)
        plt.close(figure)


def order(found: dict[str, Any]) -> Any:
    """Loss curves of one seed above, their differences from the run on one rank below; spreads on the right."""
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.4), layout="constrained", width_ratios=[1, 1, 0.8])
    losses = {name: {int(step): loss for step, loss in one.items()} for name, one in found["losses"].items()}
    seed = min(name.split("-")[2] for name in losses)
    for column, (loader, tone) in enumerate((("ours", OURS), ("stock", STOCK))):
        chosen = {name: one for name, one in losses.items() if name.startswith(f"{loader}-") and name.endswith(seed)}
        base = chosen[f"{loader}-1-{seed}"]
        for place, (name, curve) in enumerate(chosen.items()):
            ranks = name.split("-")[1].replace("to", " → ")
            style: dict[str, Any] = {"color": tone, "alpha": 1 - 0.16 * place, "linewidth": 3.4 - 0.7 * place}
            steps = sorted(curve)
            axes[0, column].plot(steps, [curve[step] for step in steps], label=f"{ranks} rank(s)", **style)
            gaps = [max(abs(curve[step] - base[step]), 1e-8) for step in steps]
            if name != f"{loader}-1-{seed}":
                axes[1, column].plot(steps, gaps, label=f"{ranks} rank(s)", **(style | {"linewidth": 1.0}))
        axes[0, column].set_title("Zephon" if loader == "ours" else "TorchTitan's own loader", fontsize=10)
        axes[1, column].set_yscale("log")
        axes[1, column].set_ylim(5e-9, 3)
        axes[1, column].set_xlabel("step", fontsize=8)
        axes[0, column].legend(fontsize=7, frameon=False)
    axes[0, 0].sharey(axes[0, 1])
    axes[0, 0].set_ylabel("training loss", fontsize=8)
    axes[1, 0].set_ylabel("|loss − loss on 1 rank|", fontsize=8)
    bars(axes[0, 2], found["spreads"], ("docs", "code"), "largest difference between numbers of ranks,\nnats a token")
    bars(axes[1, 2], found["spreads"], ("cloze",), "the same, points of cloze accuracy")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
    return figure


def bars(axis: Any, spreads: dict[str, Any], metrics: tuple[str, ...], title: str) -> None:
    """Spreads with their intervals, on a logarithmic axis."""
    least = 1e-8 if "docs" in metrics else 1e-3
    kinds = {"ours": OURS, "floor": OTHERS, "stock": STOCK}
    labels: list[str] = []
    for metric in metrics:
        for kind, tone in kinds.items():
            middle, low, high = (max(value, least) for value in spreads[metric][kind])
            axis.plot([low, high], [len(labels)] * 2, color=tone, linewidth=2)
            axis.plot([middle], [len(labels)], "o", color=tone)
            labels.append(f"{metric}: {'stock loader' if kind == 'stock' else kind}")
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_title(title, fontsize=8, loc="left")
    axis.margins(y=0.2)


def throughput(found: dict[str, Any]) -> Any:
    """What a step of training is spent on, and what the loaders cost alone."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
    names = {"text": "text, ours", "stock": "text, stock", "images": "images, ours", "stock_images": "images, stock"}
    for place, (name, one) in enumerate(found["trained"].items()):
        tone = STOCK if "stock" in name else OURS
        left.barh(place, 1e3 * one["data_s"], color=tone)
        left.text(
            1e3 * one["data_s"],
            place,
            f"  {1e3 * one['data_s']:.2g} of {1e3 * one['step_s']:.0f} ms",
            va="center",
            fontsize=7,
        )
    left.set_yticks(range(len(names)), list(names.values()))
    left.set_title("ms of a training step that wait for data", fontsize=9, loc="left")
    left.margins(x=0.35)
    alone = found["alone"]
    for place, (name, one) in enumerate(alone.items()):
        value = one["cpu_s_per_unit"] * (1e3 if name.startswith("images") else 1e6)
        right.barh(place, value, color=OURS if "ours" in name else STOCK)
        right.text(value, place, f" {value:.3g}", va="center", fontsize=7)
    right.set_yticks(range(len(alone)), list(alone))
    right.set_xscale("log")
    right.margins(x=0.2)
    right.set_title("alone: CPU s a million tokens, or ms an image", fontsize=9, loc="left")
    for axis in (left, right):
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
    return figure


def saves(found: dict[str, Any]) -> Any:
    """Bytes, time to save and time to restore, by steps."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    curves: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        curves.setdefault((row["loader"], row["kind"], row["lanes"]), []).append(row)
    panels = (("state_bytes", "bytes of state"), ("save_ms", "ms to save"), ("restore_s", "s to restore"))
    markers = iter("sD^vP*Xhp<>" * 2)
    for (loader, kind, lanes), rows in curves.items():
        mine = loader == "ours"
        tone = OURS if mine else STOCK if loader.startswith("stock") else OTHERS
        label = f"ours, {kind}, {lanes} lane{'s' * (lanes > 1)}" if mine else loader
        marker = "o" if mine else next(markers)
        for axis, (name, title) in zip(axes, panels, strict=True):
            line = "-" if kind == "text" else "--"
            steps = [row["step"] for row in rows]
            share = math.log2(lanes) / 8 if mine else 0.4  # the more lanes, the stronger
            looks = {
                "color": tone,
                "alpha": 0.4 + 0.6 * share,
                "linewidth": 0.8 + 2 * share,
                "markersize": 3 + 4 * share,
            }
            axis.plot(steps, [row[name] for row in rows], line, marker=marker, label=label, **looks)
            axis.set_title(title, fontsize=9, loc="left")
    steps = sorted({row["step"] for row in found["rows"]})
    for axis in axes:
        axis.set_xscale("log")
        axis.set_xticks(steps, [f"{step:,}" for step in steps], minor=False)
        axis.set_xticks([], minor=True)
        axis.set_yscale("log")
        axis.set_xlabel("step", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
    axes[2].legend(fontsize=6, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
