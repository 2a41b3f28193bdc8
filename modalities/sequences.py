"""Packed sequences of tokens, as every modality of plain text builds them: input, labels, positions.

A sample of `m` tokens has `m - 1` positions: the input is the tokens without the last, the labels are the tokens
without the first. So no label crosses a sample, and a cut inside one keeps its true next token.
"""

from collections.abc import Sequence
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from zephon.types import Batch, Plan, Record

IGNORED = -100
"""The label of a position that is not trained, as PyTorch's cross entropy has it."""

Ids: TypeAlias = NDArray[np.int32]
Payload: TypeAlias = Ids | tuple[Ids, NDArray[np.bool_]]
"""Token ids of one sample, and which of them are trained (where that is not all): arrays of `m`, ready to be sent."""


def build(plans: Sequence[Plan], seq_len: int) -> Batch:
    """Build `input`, `labels` and `positions`, each int32 [len(plans), seq_len].

    Positions count from 0 at each sample and again at each sequence start. What a plan leaves free is input 0, label
    -100. A label is -100 as well where its token is not trained.
    """
    shape = (len(plans), seq_len)
    inputs, labels = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
    positions = np.zeros(shape, np.int32)
    count = np.arange(seq_len, dtype=np.int32)
    for i, plan in enumerate(plans):
        at = 0
        for sample, start, end in plan:
            payload = cast(Payload, sample.payload)
            ids, trained = payload if isinstance(payload, tuple) else (payload, None)
            size = end - start
            inputs[i, at : at + size] = ids[start:end]
            following = ids[start + 1 : end + 1]
            if trained is not None:
                following = np.where(trained[start + 1 : end + 1], following, IGNORED)
            labels[i, at : at + size] = following
            positions[i, at : at + size] = count[:size]
            at += size
    return {"input": inputs, "labels": labels, "positions": positions}


def split(batch: Batch) -> list[Record]:
    """The records of a micro-batch, int32 again where a trainer widened them."""
    narrow = {name: np.ascontiguousarray(batch[name], dtype="<i4") for name in ("input", "labels", "positions")}
    return [{name: array[i] for name, array in narrow.items()} for i in range(len(narrow["input"]))]
