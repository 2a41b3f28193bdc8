"""Your own worker: a modality, the stateless work on samples. Installed packages name theirs under an entry point.

python examples/own_modality.py
"""

from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
from _data import sample_recipe

import zephon.modality
from zephon.types import Batch, Measured, Plan, Record, Row


class Bytes:
    """Bytes instead of tokens: a byte's value is its id, 256 ends a text."""

    family, builds, costs, filler = "bytes", (), (), None  # alone in its sequences, no budgets, nothing to fill with
    cheap_materialise = True  # cheaper to build here than to send away
    on_error = "raise"  # a bad row stops the run, where a recipe does not say otherwise
    counters = ("empty",)

    def __init__(self, options: dict[str, Any], context: zephon.modality.Context) -> None:
        self._seq_len, self._field = context.seq_len, options.get("text", "text")

    def fingerprint(self) -> dict[str, Any]:
        return {"text": self._field}  # what a checkpoint must agree on

    def probe(self, rows: list[Row]) -> None:
        """Look at the first rows; nothing to settle here."""

    def measure(self, rows: list[Row]) -> Measured:
        """Rows to sized samples: what a sample costs, and what is needed to build it."""
        ids = [np.frombuffer(str(row[self._field]).encode() + b"\0", np.uint8).astype(np.int32) for row in rows]
        for one in ids:
            one[-1] = 256
        sizes = [len(one) - 1 for one in ids]
        return Measured(range(len(rows)), sizes, ids, {i: ("empty",) for i, size in enumerate(sizes) if not size})

    def materialise(self, plans: list[Plan]) -> Batch:
        """Plans to arrays: a segment is positions [start, end) of a sample."""
        shape = (len(plans), self._seq_len)
        batch = {"input": np.full(shape, 256, np.int32), "labels": np.full(shape, -100, np.int32)}
        for i, plan in enumerate(plans):
            at = 0
            for sample, start, end in plan:
                batch["input"][i, at : at + end - start] = sample.payload[start:end]
                batch["labels"][i, at : at + end - start] = sample.payload[start + 1 : end + 1]
                at += end - start
        return dict(batch)

    def records(self, batch: Batch) -> list[Record]:
        return [{name: array[i] for name, array in batch.items()} for i in range(len(batch["input"]))]


# In a package: [project.entry-points."zephon.modalities"] bytes = "my_package:Bytes". Here, for one process:
point = EntryPoint("bytes", f"{__name__}:Bytes", zephon.modality.GROUP)
zephon.modality.entry_points = lambda group: [point]
recipe = sample_recipe()
recipe.write_text(recipe.read_text().replace('name = "prose"', 'name = "prose"\nmodality = "bytes"'))
recipe.write_text(recipe.read_text().replace('name = "code"', 'name = "code"\nmodality = "bytes"'))
with zephon.Stream.open(recipe) as stream:
    batch = next(stream.loader())
    print({name: array.shape for name, array in batch.items()})
    print("".join(chr(byte) if byte < 128 else "·" for byte in batch["input"][0, :120].tolist()))
