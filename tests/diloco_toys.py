"""Islands for tests: numpy only, quick, and sensitive to every lane step that they are given."""

import functools
from collections.abc import Callable

import numpy as np

from recipes.diloco.fragments import Plan, Tensor, Vector
from zephon.keyed import make_key, permute

TENSORS = (
    Tensor("embed.weight", (7, 3)),
    Tensor("layers.0.w", (4, 4)),
    Tensor("layers.1.w", (4, 4)),
    Tensor("layers.0.norm", (3,)),
    Tensor("head.weight", (7, 3)),
)
TOKENS = 16


@functools.cache
def target(lane: int, step: int, size: int) -> Vector:
    """Where a step of a lane pulls the model to."""
    numbers = permute(1 << 16, make_key("toy", 1, lane, step), np.arange(size))
    return ((numbers - (1 << 15)) / (1 << 15)).astype(np.float32)


class Toy:
    """Momentum SGD towards the targets of its lanes' steps; a lane's state is how many steps it has given."""

    def __init__(self, lanes: int = 8, seed: int = 0, lr: float = 0.1) -> None:
        self.header, self.tensors, self._lr, self._all = "", TENSORS, np.float32(lr), lanes
        self.values = {one.name: target(-1 - seed, i, one.size).reshape(one.shape) for i, one in enumerate(TENSORS)}
        self.velocity = {name: np.zeros_like(value) for name, value in self.values.items()}
        self._lanes: dict[int, int] = {}
        self.book: Callable[[dict[int, str]], None] = lambda digests: None

    def first_lanes(self) -> dict[int, bytes]:
        return {lane: (0).to_bytes(8, "little") for lane in range(self._all)}

    def read(self, plan: Plan) -> list[Vector]:
        return plan.gather(self.values)

    def write(self, plan: Plan, fragment: int, value: Vector) -> None:
        self.values |= {name: one.copy() for name, one in plan.scatter(fragment, value).items()}

    def own(self, lanes: dict[int, bytes]) -> None:
        self._lanes = {lane: int.from_bytes(state, "little") for lane, state in lanes.items()}

    def lanes(self) -> dict[int, bytes]:
        return {lane: steps.to_bytes(8, "little") for lane, steps in self._lanes.items()}

    def step(self, clock: int) -> int:
        assert self._lanes
        self.book(dict.fromkeys(self._lanes, ""))
        self._lanes = {lane: steps + 1 for lane, steps in self._lanes.items()}
        for i, one in enumerate(TENSORS):
            pulls = [
                target(lane, steps, one.size + i)[i:].reshape(one.shape) for lane, steps in sorted(self._lanes.items())
            ]
            gradient = self.values[one.name] - sum(pulls) / np.float32(len(pulls))
            self.velocity[one.name] = np.float32(0.5) * self.velocity[one.name] + gradient
            self.values[one.name] = self.values[one.name] - self._lr * self.velocity[one.name]
        return TOKENS * len(self._lanes)

    def optimizer(self) -> bytes:
        return b"".join(self.velocity[one.name].tobytes() for one in TENSORS)

    def load_optimizer(self, state: bytes) -> None:
        flat, at = np.frombuffer(state or bytes(4 * sum(one.size for one in TENSORS)), np.float32), 0
        for one in TENSORS:
            self.velocity[one.name] = flat[at : at + one.size].reshape(one.shape).copy()
            at += one.size


def toys(lanes: int = 8) -> Callable[[int], Toy]:
    """Islands that all start alike."""
    return lambda learner: Toy(lanes)
