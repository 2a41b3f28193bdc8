"""Packed sequences of tokens, as every modality of plain text builds them: input, labels, positions.

A sample of `m` tokens has `m - 1` positions: the input is the tokens without the last, the labels are the tokens
without the first. So no label crosses a sample, and a cut inside one keeps its true next token.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from zephon.types import Batch, Plan, Record, Ref, Sample, Segment

IGNORED = -100
"""The label of a position that is not trained, as PyTorch's cross entropy has it."""

Ids: TypeAlias = NDArray[np.int32]
Payload: TypeAlias = Ids | tuple[Ids, NDArray[np.bool_]]
"""Token ids of one sample, and which of them are trained (where that is not all): arrays of `m`, ready to be sent. A
modality that needs more may put it behind these two."""

_LONG = 250
"""Mean positions of a segment above which two slices of each cost less than two masks over all tokens. CPU s per Mtoken
of 8 sequences of 2,048: documents of 60 tokens 0.011 by masks and 0.015 by slices, of 600 tokens 0.0036 and 0.0030."""


def build(plans: Sequence[Plan], seq_len: int, extras: Sequence[str] = (), free: int = 0) -> Batch:
    """Build `input`, `labels` and `positions`, each int32 [len(plans), seq_len], and what `extras` names.

    Positions count from 0 at each sample and again at each sequence start. What a plan leaves free is input `free` and
    label -100. A label is -100 as well where its token is not trained.

    `document_ids`, int32 [len(plans), seq_len]: number of the segment in its sequence, -1 where it is free.
    `cu_seqlens`, int32 [len(plans), seq_len + 1]: where segments begin, then `seq_len` to the end, so that the shape
    never changes; attention over variable lengths takes the repeats for segments of length 0.
    """
    rest = _rest(seq_len, free)
    segments, lengths, used = [Segment(rest, 0, 0)], [0], list[int]()  # one at least, though there may be no plans
    for plan in plans:
        sizes = [end - start for _, start, end in plan]
        used.append(sum(sizes))
        segments += plan
        lengths += sizes
        if used[-1] < seq_len:
            segments.append(Segment(rest, 0, seq_len - used[-1]))
            lengths.append(seq_len - used[-1])
    shape = (len(plans), seq_len)
    inputs, labels, positions = (array.reshape(shape) for array in _join(segments, lengths))
    for i, size in enumerate(used):
        if size < seq_len:
            labels[i, size:], positions[i, size:] = IGNORED, 0
    more = {name: _EXTRAS[name](plans, seq_len) for name in extras}
    return {"input": inputs, "labels": labels, "positions": positions, **more}


@functools.lru_cache(16)
def _rest(seq_len: int, free: int) -> Sample:
    """What a sequence ends with: all of it, so that the sequences of a batch lie end to end."""
    return Sample(Ref(-1, 0, 0, 0, 0), seq_len, np.full(seq_len + 1, free, np.int32))


def _join(segments: Sequence[Segment], lengths: Sequence[int]) -> tuple[Ids, Ids, Ids]:
    """Input, labels and positions of all segments, one after the other: those of a whole batch in a few calls."""
    payloads: list[Payload] = [sample.payload for sample, _, _ in segments]
    masked = any(issubclass(kind, tuple) for kind in set(map(type, payloads)))
    tokens = [one[0] if isinstance(one, tuple) else one for one in payloads] if masked else cast(list[Ids], payloads)
    sizes = np.array(lengths)
    ends = np.cumsum(sizes)
    if ends[-1] > _LONG * len(segments):
        spans = [(ids, start, end) for ids, (_, start, end) in zip(tokens, segments, strict=True)]
        inputs = np.concatenate([ids[start:end] for ids, start, end in spans])
        labels = np.concatenate([ids[start + 1 : end + 1] for ids, start, end in spans])
    else:
        cut = [
            ids[start : end + 1] if start or end + 1 < len(ids) else ids
            for ids, (_, start, end) in zip(tokens, segments, strict=True)
        ]
        joined, last = np.concatenate(cut), ends + np.arange(len(cut))
        is_input, is_label = np.ones((2, len(joined)), bool)
        is_input[last] = is_label[last - sizes] = False
        inputs, labels = joined[is_input], joined[is_label]
    if masked:
        trained = [
            one[1][start + 1 : end + 1] if isinstance(one, tuple) else np.ones(end - start, bool)
            for one, (_, start, end) in zip(payloads, segments, strict=True)
        ]
        labels[~np.concatenate(trained)] = IGNORED
    positions = np.arange(len(inputs), dtype=np.int32) - np.repeat((ends - sizes).astype(np.int32), sizes)
    return inputs, labels, positions


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
