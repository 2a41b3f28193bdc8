"""Draws what the newest results say: peers, lanes, first batch, state and resume.

python -m benchmarks.figures
"""

import json
import re
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.report import RESULTS

OURS, LIMIT, THEIRS = "#1b7837", "#666666", "#b35806"


def main() -> None:
    for name, data, draw in (
        ("peers", newest_peers(), peers), ("lanes", newest("lanes"), lanes), ("state", newest("state"), state),
    ):  # fmt: skip
        if data:
            figure = draw(data)
            figure.text(0.99, 0.01, f"{data['command']}   {data['when'][:10]}", ha="right", fontsize=7, color="#888888")
            figure.savefig(RESULTS / f"{name}.png", dpi=110)
            plt.close(figure)
            print(f"wrote {RESULTS / f'{name}.png'}")


def newest(theme: str) -> dict[str, Any] | None:
    """The latest results of a theme."""
    files = sorted(path for path in RESULTS.glob(f"{theme}_*.json") if re.fullmatch(rf"{theme}_[\d-]+", path.stem))
    return json.loads(files[-1].read_text()) if files else None


def newest_peers() -> dict[str, Any] | None:
    """The latest session of each work in which all sides ran, on a machine that nothing else kept busy."""
    paths = [path for path in RESULTS.glob("peers_*.json") if not re.search("some|slower", path.stem)]
    found = [json.loads(path.read_text()) for path in paths]
    data: dict[str, Any] = {}
    for session in sorted(found, key=lambda one: one["when"]):
        data |= {"command": "make bench-peers", "when": session["when"]}
        data |= {letter: {**session[letter], "when": session["when"]} for letter in "TSV" if letter in session}
    return data or None


def peers(data: dict[str, Any]) -> Any:
    """CPU of every loader on every work, cheapest first; a logarithmic axis, as they are up to 60 times apart."""
    works = {"T": "long documents", "S": "short documents", "V": "captioned images"}
    works = {letter: f"{title}, {data[letter]['when'][:10]}" for letter, title in works.items() if letter in data}
    sizes = [len(data[letter]["medians"]) for letter in works]
    figure, axes = plt.subplots(len(works), 1, figsize=(10, 1.5 + 0.2 * sum(sizes)), height_ratios=sizes, squeeze=False)
    for (letter, title), axis in zip(works.items(), axes[:, 0], strict=True):
        unit, factor = ("CPU ms an image", 1e3) if letter == "V" else ("CPU s per million tokens", 1e6)
        rows = sorted(data[letter]["medians"].items(), key=lambda item: -item[1]["cpu_s_per_unit"])
        values = [row["cpu_s_per_unit"] * factor for _, row in rows]
        axis.barh([name for name, _ in rows], values, color=[colour(name) for name, _ in rows])
        for place, value in enumerate(values):
            axis.text(value * 1.04, place, f"{value:.3g}", va="center", fontsize=7)
        axis.set_xscale("log")
        axis.set_xlim(min(values) * 0.7, max(values) * 1.6)
        axis.tick_params(axis="y", labelsize=6.5)
        axis.set_title(f"{title}: {unit}", fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.01)
    figure.subplots_adjust(left=0.27, right=0.97, top=0.98, bottom=0.03, hspace=0.12)
    return figure


def colour(name: str) -> str:
    return OURS if name.startswith("ours") else LIMIT if name == "prototype" else THEIRS


def lanes(data: dict[str, Any]) -> Any:
    """What lanes cost on one rank, for text and, where there are results, for images."""
    found = {"text": data} | ({"images": more} if (more := newest("lanes_images")) else {})
    sets = {f"{name}, {one['when'][:10]}": one["rows"] for name, one in found.items()}
    figure, axes = plt.subplots(2, 2, figsize=(9, 6))
    panels = (
        ("throughput_of_first", "throughput, of that with the fewest lanes", 1.0),
        ("first_s", "seconds to the first batch; of a resume: filled", 1.0),
        ("state_dict_ms", "state_dict(), ms", 1.0),
        ("peak_mib", "memory, MiB", 1.0),
    )
    for (key, title, factor), axis in zip(panels, axes.flat, strict=True):
        for (name, rows), tone in zip(sets.items(), (OURS, THEIRS), strict=False):
            places = [row["lanes"] for row in rows]
            hollow = {"mfc": "white"} if key == "first_s" else {}
            axis.plot(places, [row[key] * factor for row in rows], "o-", color=tone, label=name, **hollow)
            if key == "first_s":
                axis.plot(places, [row["resume_s"] for row in rows], "o--", color=tone)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_xlabel("lanes on one rank", fontsize=8)
        axis.set_ylim(0, axis.get_ylim()[1] * 1.1)
        axis.set_title(title, fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    return figure


def state(data: dict[str, Any]) -> Any:
    """Neither state nor resume grows with the steps of a run."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
    steps = [row["step"] for row in data["rows"]]
    left.plot(steps, [row["lane_bytes_max"] for row in data["rows"]], "o-", color=OURS, label="largest")
    left.plot(steps, [row["lane_bytes_median"] for row in data["rows"]], "o--", color=OURS, label="median")
    left.set_title("bytes of state a lane", fontsize=9, loc="left")
    for world, style in zip(data["fresh_first_batch_s"], ("o-", "o--"), strict=False):
        values = [row[f"resume_to_first_batch_s_of_{world}"]["wall"] for row in data["rows"]]
        right.plot(steps, values, style, color=OURS, label=f"{world} rank(s)")
    right.set_title("seconds from a state to the first batch", fontsize=9, loc="left")
    for axis in (left, right):
        axis.set_xlabel("step", fontsize=8)
        axis.set_xscale("log")
        axis.set_ylim(0, axis.get_ylim()[1] * 1.1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


if __name__ == "__main__":
    main()
