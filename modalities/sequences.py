"""Packed sequences of tokens, as every modality of plain text builds them: input, labels, positions.

A sample of `m` tokens has `m - 1` positions: the input is the tokens without the last, the labels are the tokens
without the first. So no label crosses a sample, and a cut inside one keeps its true next token.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from zephon.types import Batch, Plan, Record

IGNORED = -100
"""The label of a position that is not trained, as PyTorch's cross entropy has it."""

Ids: TypeAlias = NDArray[np.int32]
Payload: TypeAlias = Ids | tuple[Ids, NDArray[np.bool_]]
"""Token ids of one sample, and which of them are trained (where that is not all): arrays of `m`, ready to be sent. A
modality that needs more may put it behind these two."""


def build(plans: Sequence[Plan], seq_len: int, extras: Sequence[str] = (), free: int = 0) -> Batch:
    """Build `input`, `labels` and `positions`, each int32 [len(plans), seq_len], and what `extras` names.

    Positions count from 0 at each sample and again at each sequence start. What a plan leaves free is input `free` and
    label -100. A label is -100 as well where its token is not trained.

    `document_ids`, int32 [len(plans), seq_len]: number of the segment in its sequence, -1 where it is free.
    `cu_seqlens`, int32 [len(plans), seq_len + 1]: where segments begin, then `seq_len` to the end, so that the shape
    never changes; attention over variable lengths takes the repeats for segments of length 0.
    """
    shape = (len(plans), seq_len)
    inputs, labels = np.full(shape, free, np.int32), np.full(shape, IGNORED, np.int32)
    positions = np.zeros(shape, np.int32)
    count = np.arange(seq_len, dtype=np.int32)
    more = {name: _EXTRAS[name](plans, seq_len) for name in extras}
    for i, plan in enumerate(plans):
        if not plan:
            continue
        tokens = [sample.payload for sample, _, _ in plan]
        masked = [k for k, one in enumerate(tokens) if isinstance(one, tuple)]
        for k in masked:
            tokens[k] = tokens[k][0]
        # Joined in one call each: short documents are many.
        spans = [(ids, start, end) for ids, (_, start, end) in zip(tokens, plan, strict=True)]
        following = [ids[start + 1 : end + 1] for ids, start, end in spans]
        for k in masked:
            trained = plan[k].sample.payload[1][plan[k].start + 1 : plan[k].end + 1]
            following[k] = np.where(trained, following[k], IGNORED)
        here, at = [ids[start:end] for ids, start, end in spans], sum([end - start for _, start, end in spans])
        np.concatenate(here, out=inputs[i, :at])
        np.concatenate(following, out=labels[i, :at])
        np.concatenate([count[: end - start] for _, start, end in spans], out=positions[i, :at])
    return {"input": inputs, "labels": labels, "positions": positions, **more}


def _document_ids(plans: Sequence[Plan], seq_len: int) -> Ids:
    out = np.full((len(plans), seq_len), -1, np.int32)
    for row, plan in zip(out, plans, strict=True):
        lengths = [end - start for _, start, end in plan]
        row[: sum(lengths)] = np.repeat(np.arange(len(plan), dtype=np.int32), lengths)
    return out


def _cu_seqlens(plans: Sequence[Plan], seq_len: int) -> Ids:
    out = np.full((len(plans), seq_len + 1), seq_len, np.int32)
    for row, plan in zip(out, plans, strict=True):
        row[0] = 0
        row[1 : len(plan) + 1] = np.cumsum([end - start for _, start, end in plan])
    return out


_EXTRAS: dict[str, Callable[[Sequence[Plan], int], Ids]] = {"document_ids": _document_ids, "cu_seqlens": _cu_seqlens}


def split(batch: Batch) -> list[Record]:
    """The records of a micro-batch, int32 again where a trainer widened them."""
    narrow = {name: np.ascontiguousarray(array, dtype="<i4") for name, array in batch.items()}
    return [{name: array[i] for name, array in narrow.items()} for i in range(len(narrow["input"]))]
