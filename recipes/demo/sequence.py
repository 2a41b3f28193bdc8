"""Packed sequences as a picture: whose positions are whose, what is trained, and the images as the model gets them."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch
from numpy.typing import NDArray

from modalities.geometry import Geometry
from modalities.image_text import ImageText
from modalities.sequences import IGNORED
from zephon import Stream
from zephon.types import Record

_ROWS, _STEPS = 3, 12
_KINDS = {"text": "#4c78a8", "image": "#f58518", "null image": "#bab0ac", "padding": "#ffffff"}


def draw(stream: Stream, file: Path) -> None:
    """Sequences of a stream's first steps, one strip each, images below: those with most images, and one without."""
    builder = stream.worker.builder
    assert isinstance(builder, ImageText)
    loader = stream.loader()
    seen = [record for _ in range(_STEPS) for mine in loader.step_records().values() for record in mine]
    records = sorted(seen, key=lambda one: -len(one["grid_thw"]))[:_ROWS]
    records += [record for record in seen if not record["pixel_values"].any()][:1]
    figure = plt.figure(figsize=(13, 2.3 * len(records) + 0.5), layout="constrained")
    rows: Any = figure.subfigures(len(records), 1, squeeze=False)[:, 0]
    for row, record in zip(rows, records, strict=True):
        _draw_record(row, record, builder)
    handles = [Patch(facecolor=colour, edgecolor="gray", label=kind) for kind, colour in _KINDS.items()]
    handles.append(Patch(facecolor="black", label="below the strip: trained"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _draw_record(row: Any, record: Record, builder: ImageText) -> None:
    images = unpatched(record, builder.geometry)
    axes = row.subplots(2, max(1, len(images)), height_ratios=(1, 3), squeeze=False)
    grid = axes[0, 0].get_gridspec()
    for axis in axes[0]:
        axis.remove()
    strip = row.add_subplot(grid[0, :])
    kinds = _kinds(record, builder)
    for kind, colour in _KINDS.items():
        strip.bar(np.flatnonzero(kinds == kind), 1.0, 1.0, color=colour, align="edge")
    strip.bar(np.flatnonzero(record["labels"] != IGNORED), -0.25, 1.0, color="black", align="edge")
    for start in np.flatnonzero(record["positions"] == 0):
        if kinds[start] != "padding":
            strip.axvline(start, color="black", linewidth=1.2)
    strip.set(xlim=(0, len(kinds)), ylim=(-0.3, 1.0), yticks=[])
    strip.tick_params(labelsize=7)
    for axis in axes[1]:
        axis.set_axis_off()
    for axis, image, (_, height, width) in zip(axes[1], images, record["grid_thw"], strict=False):
        axis.imshow(image)
        axis.set_title(f"{height}×{width} patches", fontsize=7)


def _kinds(record: Record, builder: ImageText) -> NDArray[np.str_]:
    """What each position holds."""
    ids, labels = record["input"], record["labels"]
    marks = (builder.marks.start, builder.marks.pad, builder.marks.end)
    kinds = np.where(np.isin(ids, marks), "image", "text").astype("<U12")
    last = int(np.flatnonzero((ids != 0) | (labels != IGNORED))[-1]) + 1
    kinds[last:] = "padding"
    if not record["pixel_values"].any():
        kinds[last - 3 : last] = "null image"
    return kinds


def unpatched(record: Record, geometry: Geometry) -> list[NDArray[np.generic]]:
    """The images of a record, uint8 [height, width, 3] each, put together again from their patches."""
    side, merge, images, at = geometry.patch_size, geometry.merge_size, list[NDArray[np.generic]](), 0
    for _, rows, columns in record["grid_thw"].tolist():
        patches = record["pixel_values"][at : at + rows * columns]
        at += rows * columns
        if geometry.order == "block":
            shape = (rows // merge, columns // merge, merge, merge, 3, side, side)
            pixels = patches.reshape(shape).transpose(0, 2, 5, 1, 3, 6, 4)
        else:
            pixels = patches.reshape(rows, columns, 3, side, side).transpose(0, 3, 1, 4, 2)
        images.append(pixels.reshape(rows * side, columns * side, 3))
    return images
