"""The fragment plan: which tensors are merged together, and when. A pure function of names and shapes.

Balanced tensor fragmentation: whole tensors, largest first, each into the fragment that is emptiest (LPT scheduling:
the largest fragment is at most 4/3 of the best possible). Embeddings have fragment 0 to themselves, since they are
averaged, not merged by direction.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon.errors import UsageError

Vector = NDArray[np.float32]
"""A fragment: its tensors in plan order, flattened, one after the other."""


class Tensor(NamedTuple):
    """Name and shape of a parameter."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def is_embedding(name: str) -> bool:
    """Whether a parameter is a token embedding, going by its name."""
    return "embed" in name


@dataclass(frozen=True, slots=True)
class Plan:
    """Fragments of a model and their rounds.

    Attributes:
        fragments: tensors of each; the embeddings, where there are any, are fragment 0.
        every: rounds between two merges of a fragment (H).
        averaged: whether fragment 0 holds embeddings.
    """

    fragments: tuple[tuple[Tensor, ...], ...]
    every: int
    averaged: bool

    def due(self, round: int) -> tuple[int, ...]:
        """The fragments that round 1, 2, ... merges: fragment `p` where `round mod H == p * H // P`."""
        count = len(self.fragments)
        return tuple(p for p in range(count) if round % self.every == p * self.every // count)

    def size(self, fragment: int) -> int:
        """Elements of a fragment."""
        return sum(one.size for one in self.fragments[fragment])

    @property
    def total(self) -> int:
        """Elements of the model."""
        return sum(map(self.size, range(len(self.fragments))))

    def slices(self, fragment: int) -> list[slice]:
        """Where each tensor of a fragment lies in its vector."""
        ends = itertools.accumulate((one.size for one in self.fragments[fragment]), initial=0)
        return [slice(start, end) for start, end in itertools.pairwise(ends)]

    @property
    def digest(self) -> str:
        """SHA-256 of the plan: two ends that disagree must not exchange fragments."""
        said = json.dumps([self.every, self.averaged, self.fragments], separators=(",", ":"))
        return hashlib.sha256(said.encode()).hexdigest()

    def gather(self, tensors: dict[str, NDArray[np.float32]]) -> list[Vector]:
        """Copy named tensors, of the plan's shapes, into one new vector a fragment."""
        return [np.concatenate([tensors[one.name].reshape(-1) for one in part]) for part in self.fragments]

    def scatter(self, fragment: int, value: Vector) -> dict[str, Vector]:
        """The tensors of a fragment by name: views of `value`, in their shapes."""
        parts = zip(self.fragments[fragment], self.slices(fragment), strict=True)
        return {one.name: value[where].reshape(one.shape) for one, where in parts}


def make_plan(
    tensors: Iterable[Tensor], fragments: int, every: int, embedding: Callable[[str], bool] = is_embedding
) -> Plan:
    """The plan for a model; the order of `tensors` does not matter.

    Args:
        tensors: all parameters.
        fragments: how many to make, the embeddings' included.
        every: rounds between two merges of a fragment.
        embedding: which names are embeddings.

    Raises:
        UsageError: fewer tensors than fragments, or a name twice.
    """
    ranked = sorted(tensors, key=lambda one: (-one.size, one.name))
    apart = tuple(one for one in ranked if embedding(one.name))
    rest: Sequence[Tensor] = [one for one in ranked if not embedding(one.name)]
    bins = fragments - bool(apart)
    if len({one.name for one in ranked}) < len(ranked):
        raise UsageError("Two parameters have one name: a plan could not tell them apart. Name them differently.")
    if not 1 <= bins <= len(rest):
        most = len(rest) + bool(apart)
        raise UsageError(
            f"{fragments} fragments, but this model has {len(rest)} tensors beside {len(apart)} embeddings, and "
            f"tensors are not cut: some fragments would be empty. Use {1 + bool(apart)} to {most} fragments."
        )
    filled: list[list[Tensor]] = [[] for _ in range(bins)]
    for one in rest:
        min(filled, key=lambda held: sum(other.size for other in held)).append(one)
    return Plan((*([apart] if apart else []), *map(tuple, filled)), every, bool(apart))
