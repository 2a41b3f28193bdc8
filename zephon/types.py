"""The words that all parts share: rows, refs, samples, segments, plans, batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, object]
"""One parsed row of a source."""

Batch = dict[str, NDArray[np.generic]]
"""A micro-batch: named arrays whose first axis is the sequence, for arrays that have one entry a sequence."""

Record = dict[str, NDArray[np.generic]]
"""One packed sequence, built: named arrays."""


class Ref(NamedTuple):
    """Names one sample for ever.

    Attributes:
        source: number of the source in the recipe.
        epoch: how often the source had been drawn completely before.
        chunk: number of the chunk in the source.
        row: number of the row in the chunk.
        sample: number of the sample in the row.
    """

    source: int
    epoch: int
    chunk: int
    row: int
    sample: int


class Sample(NamedTuple):
    """A sized sample. Accumulators look at `ref` and `positions` only; the payload rides along.

    Attributes:
        ref: its name.
        positions: how many positions of a sequence it fills; 0 means that there is nothing to deliver.
        payload: what the modality needs to build it; opaque here.
        counts: counters of its source that it raises when it is passed.
    """

    ref: Ref
    positions: int
    payload: Any
    counts: tuple[str, ...] = ()


class Segment(NamedTuple):
    """A run of one sample's positions, `[start, end)`."""

    sample: Sample
    start: int
    end: int


Plan = list[Segment]
"""One packed sequence, decided but not built."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What measuring a micro-batch of rows gives; the lists have one entry a sample, in row order.

    Attributes:
        rows: which row of the micro-batch each sample came from; ascending.
        positions: positions that each sample fills.
        payloads: what the modality needs to build each sample.
        counts: counters that a sample raises, by number of the sample; most samples have none.
    """

    rows: Sequence[int]
    positions: Sequence[int]
    payloads: Sequence[Any]
    counts: Mapping[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
