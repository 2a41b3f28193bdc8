"""Mixing (an accumulator): which source gives the next sample of a lane.

Every source has a deficit: how far it is behind its share, in positions times 2**32. The source with the largest
deficit gives the next piece. All integers, so that a share is exact for ever: in a lane a source is never more than one
largest sample over its target, and never more than `S - 1` under it with `S` sources.
"""

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

_ONE = 1 << 32
_NEVER = -(1 << 200)  # below every deficit that can come up


def integer_weights(weights: Sequence[Decimal]) -> list[int]:
    """Weights as integers near `2**32` in all, by exact rational arithmetic.

    Args:
        weights: each above 0, in any unit; only their ratios count.
    """
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    return [max(1, round(_ONE * weight / total)) for weight in exact]


class Mixer:
    """Deficit scheduling over the sources of one lane.

    Args:
        weights: from `integer_weights`, one a source.
        deficits: where to go on; starts even when left out.
    """

    def __init__(self, weights: Sequence[int], deficits: Sequence[int] | None = None) -> None:
        self._weights = list(weights)
        self._total = sum(weights)
        self._deficits = list(deficits) if deficits is not None else [0] * len(self._weights)

    @property
    def deficits(self) -> list[int]:
        """How far sources are behind, in positions or samples times the sum of weights; 0 for one that has ended."""
        return [deficit if deficit != _NEVER else 0 for deficit in self._deficits]

    def pick(self) -> int:
        """The source that is furthest behind; the first in the recipe among equals."""
        return self._deficits.index(max(self._deficits))

    def charge(self, source: int, cost: int) -> int:
        """Account for a piece of `cost` (positions, or 1 where samples are mixed) taken from `source`; then `pick`."""
        deficits = self._deficits
        for i, weight in enumerate(self._weights):
            deficits[i] += weight * cost
        deficits[source] -= self._total * cost
        return deficits.index(max(deficits))

    def retire(self, source: int) -> bool:
        """A source has ended: the others share what it would have got. Returns whether any is left."""
        self._total -= self._weights[source]
        self._weights[source] = 0
        self._deficits[source] = _NEVER
        return self._total > 0
