"""The global model: fragments, outer momentum, and the versions of fragments that learners still build on."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from recipes.diloco.fragments import Plan, Vector
from recipes.diloco.merge import Wide, average, nesterov, radial_directional, weight
from recipes.diloco.messages import Part
from recipes.diloco.settings import Settings
from recipes.diloco.wire import decode, encode


@dataclass(frozen=True, slots=True)
class Merge:
    """What a merge gave.

    Attributes:
        body: the new version, encoded for learners.
        used: learners whose outer gradients went into it.
        refused: learners whose fragments held NaN or infinity: their weight is 0.
    """

    body: bytes
    used: tuple[int, ...]
    refused: tuple[int, ...]


class GlobalModel:
    """Parameters and outer-optimizer state, fragment by fragment. No clock, no I/O.

    Args:
        settings: how to merge and how to write.
        plan: the fragments.
        values: float32 `[plan.size(p)]` for each fragment `p`.
        momentum: the same; zeros where left out.
        clocks: the round that each fragment was last merged in; 0 where left out.
    """

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        values: Sequence[Vector],
        momentum: Sequence[Vector] | None = None,
        clocks: Sequence[int] | None = None,
    ) -> None:
        self.settings, self.plan = settings, plan
        self.clocks = list(clocks or [0] * len(plan.fragments))
        self.momentum = list(momentum or [np.zeros(one.size, np.float32) for one in values])
        self._versions = [{clock: value} for clock, value in zip(self.clocks, values, strict=True)]

    @property
    def values(self) -> list[Vector]:
        """The newest version of every fragment; never changed in place."""
        return [versions[clock] for versions, clock in zip(self._versions, self.clocks, strict=True)]

    def merge(self, round: int, fragment: int, parts: Collection[Part]) -> Merge | None:
        """Merge what learners hold of a fragment into its next version; None where nobody has anything to give.

        A part is measured against the newest version, whichever version its learner built on (paper, appendix D.2): a
        learner that has missed a version gives an old outer gradient, never a wrong one.
        """
        settings, newest = self.settings, self._versions[fragment][self.clocks[fragment]]
        held = newest.astype(np.float64)
        given: dict[int, Wide] = {}
        known = {one.learner: one for one in sorted(parts, key=lambda one: one.learner) if one.steps}
        for learner, one in known.items():
            value = decode(settings.up, one.body, self._versions[fragment][one.base])
            if np.isfinite(value).all():
                given[learner] = held - value
        refused = tuple(known.keys() - given.keys())
        if not given:
            return None
        weights = [weight(known[learner].tokens, known[learner].steps) for learner in given]
        delta = self._average(fragment, list(given.values()), weights)
        wide, momentum = nesterov(
            held, self.momentum[fragment].astype(np.float64), delta, settings.outer_lr, settings.outer_momentum
        )
        body = encode(settings.down, wide.astype(np.float32), newest)
        self.momentum[fragment] = momentum.astype(np.float32)
        self._versions[fragment][round] = decode(settings.down, body, newest)
        self.clocks[fragment] = round
        return Merge(body, tuple(given), tuple(sorted(refused)))

    def forget(self, fragment: int, oldest: int) -> None:
        """Drop versions of a fragment from before round `oldest`: nobody builds on them any more."""
        newest, kept = self.clocks[fragment], self._versions[fragment]
        self._versions[fragment] = {clock: one for clock, one in kept.items() if clock >= oldest or clock == newest}

    def digest(self, fragment: int) -> str:
        """SHA-256 of a fragment's newest version."""
        return digest(self.values[fragment])

    def _average(self, fragment: int, deltas: list[Wide], weights: list[float]) -> Wide:
        """Averaged where the fragment holds embeddings, whose outer gradients are far from orthogonal; else as set."""
        if self.settings.merge == "average" or (self.plan.averaged and fragment == 0):
            return average(deltas, weights)
        tensors = self.plan.slices(fragment)
        return np.concatenate([radial_directional([one[where] for one in deltas], weights) for where in tensors])


def digest(value: Vector) -> str:
    """SHA-256 of a vector's bytes (little-endian float32)."""
    return hashlib.sha256(value.astype("<f4").tobytes()).hexdigest()
