"""The smallest island that learns from real data: a low-rank bigram model in numpy, with momentum SGD.

It starts in half a second, where torch takes four, so that runs of many processes that are killed and started again fit
into tests.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from recipes.diloco.feed import Fed, Feed, open_stream
from recipes.diloco.fragments import Plan, Tensor, Vector
from zephon.keyed import make_key, permute

_DECAY = np.float32(0.9)


class Bigram(Fed):
    """Predicts the next token from the last: `softmax((embed[x] + shift) @ head + bias)`.

    Args:
        feed: its data.
        vocabulary: token ids.
        width: of the embedding.
        lr: learning rate.
    """

    def __init__(self, feed: Feed, vocabulary: int, width: int, lr: float) -> None:
        self.feed, self._lr, self.losses = feed, np.float32(lr), list[float]()
        shapes = {"embed": (vocabulary, width), "head": (width, vocabulary), "bias": (vocabulary,), "shift": (width,)}
        self.tensors: Sequence[Tensor] = [Tensor(name, shape) for name, shape in shapes.items()]
        self.values = {one.name: _noise(one.name, one.size).reshape(one.shape) for one in self.tensors}
        self._velocity = {name: np.zeros_like(value) for name, value in self.values.items()}
        self.book: Callable[[dict[int, str]], None] = lambda digests: None

    def read(self, plan: Plan) -> list[Vector]:
        return plan.gather(self.values)

    def write(self, plan: Plan, fragment: int, value: Vector) -> None:
        self.values |= {name: one.copy() for name, one in plan.scatter(fragment, value).items()}

    def step(self, clock: int) -> int:
        assert self.feed.loader is not None, "a learner without lanes does not step"
        batch = next(self.feed.loader)
        self.book(self.feed.digests([batch]))
        inputs, labels = (batch[name].astype(np.int64).reshape(-1) for name in ("input", "labels"))
        inputs, labels = inputs[labels >= 0], labels[labels >= 0]
        values = self.values
        hidden = values["embed"][inputs] + values["shift"]
        logits = hidden @ values["head"] + values["bias"]
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        self.losses.append(float(-np.log(chances[rows, labels] + np.float32(1e-9)).mean()))
        chances[rows, labels] -= 1
        slope = chances / np.float32(len(labels))
        back = slope @ values["head"].T
        embed = np.zeros_like(values["embed"])
        np.add.at(embed, inputs, back)
        slopes = {"embed": embed, "head": hidden.T @ slope, "bias": slope.sum(axis=0), "shift": back.sum(axis=0)}
        for name, one in slopes.items():
            self._velocity[name] = (_DECAY * self._velocity[name] + one).astype(np.float32)
            values[name] = (values[name] - self._lr * self._velocity[name]).astype(np.float32)
        return batch["input"].size

    def optimizer(self) -> bytes:
        return b"".join(self._velocity[one.name].astype("<f4").tobytes() for one in self.tensors)

    def load_optimizer(self, state: bytes) -> None:
        flat, at = np.frombuffer(state or bytes(4 * sum(one.size for one in self.tensors)), "<f4"), 0
        for one in self.tensors:
            self._velocity[one.name] = flat[at : at + one.size].reshape(one.shape).copy()
            at += one.size


def make(learner: int, recipe: str, vocabulary: int = 512, width: int = 8, lr: float = 0.5) -> Bigram:
    """An island; all start alike."""
    return Bigram(Feed(open_stream(recipe)), vocabulary, width, lr)


def _noise(name: str, size: int) -> NDArray[np.float32]:
    places = permute(1 << 20, make_key("bigram", 0, name), np.arange(size))
    return ((places - (1 << 19)) / (1 << 19) * 0.1).astype(np.float32)
