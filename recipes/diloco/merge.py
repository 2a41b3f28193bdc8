"""Merging outer gradients: token weights, radial-directional averaging, the outer step. Pure functions, in float64.

Learners are always added up in the order of their numbers, so that the order in which they came does not change a bit.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Wide = NDArray[np.float64]


def weight(tokens: int, steps: int) -> float:
    """What a learner's outer gradient counts: `tokens**2 / steps`.

    Once for the tokens behind it, once for tokens a step, which stand for the quality of its gradients.

    Args:
        tokens: that its fragment has been trained on since it was last merged.
        steps: inner steps in that time, at least 1.
    """
    return tokens * tokens / steps


def average(deltas: Sequence[Wide], weights: Sequence[float]) -> Wide:
    """The weighted mean of vectors `[n]`; weights need not add up to 1."""
    if len(deltas) == 1:
        return deltas[0]
    return _sum(deltas, weights) / math.fsum(weights)


def radial_directional(deltas: Sequence[Wide], weights: Sequence[float]) -> Wide:
    """The mean length in the mean direction (RDA) of vectors `[n]`.

    Outer gradients of `M` learners are nearly orthogonal, so that their mean is shorter by about `sqrt(M)` and the best
    outer learning rate would depend on `M`; this keeps the length. Vectors that cancel out exactly give zeros.
    """
    if len(deltas) == 1:
        return deltas[0]
    lengths = [_length(one) for one in deltas]
    radius = math.fsum(map(float.__mul__, lengths, map(float, weights))) / math.fsum(weights)
    units = [one / length if length else one for one, length in zip(deltas, lengths, strict=True)]
    direction = _sum(units, weights)
    length = _length(direction)
    return direction * (radius / length) if length else direction


def nesterov(value: Wide, momentum: Wide, delta: Wide, lr: float, decay: float) -> tuple[Wide, Wide]:
    """One step of SGD with Nesterov momentum along the outer gradient `delta`; returns parameters and momentum."""
    momentum = decay * momentum + delta
    return value - lr * (delta + decay * momentum), momentum


def _sum(vectors: Sequence[Wide], weights: Sequence[float]) -> Wide:
    total = vectors[0] * weights[0]
    for one, by in zip(vectors[1:], weights[1:], strict=True):
        total += one * by
    return total


def _length(vector: Wide) -> float:
    """Without BLAS, whose threads may add in another order. Scaled, so that squares neither vanish nor overflow."""
    most = float(np.max(np.abs(vector), initial=0.0))
    return most * math.sqrt(float(np.sum(np.square(vector / most)))) if most else 0.0
