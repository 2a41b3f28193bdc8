"""An island of one process: any torch module, AdamW, and its own lanes of a Zephon stream."""

import io
from collections.abc import Callable, Sequence

import torch

from recipes.diloco.feed import Fed, Feed
from recipes.diloco.fragments import Plan, Tensor, Vector
from zephon import Stream

Schedule = Callable[[int], float]
"""Learning rate of a step, by the learner's clock."""


class TorchIsland(Fed):
    """A model on one device.

    Args:
        model: takes `input` int64 `[batch, seq_len]` and gives logits `[batch, seq_len, vocabulary]`.
        stream: the run's data.
        lr: learning rate by the learner's clock.
        watch: told the loss of every step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        stream: Stream,
        lr: Schedule = lambda clock: 1e-3,
        watch: Callable[[int, float], None] = lambda clock, loss: None,
    ) -> None:
        self.model, self.feed, self._lr, self._watch = model, Feed(stream), lr, watch
        self.book: Callable[[dict[int, str]], None] = lambda digests: None
        """Told the lanes of every step that is begun, with the SHA-256 of their records."""
        self.inner = torch.optim.AdamW(model.parameters(), lr=lr(0), betas=(0.9, 0.95), weight_decay=0.1)
        self.parameters = dict(model.named_parameters())
        self.tensors: Sequence[Tensor] = [Tensor(name, tuple(one.shape)) for name, one in self.parameters.items()]

    def read(self, plan: Plan) -> list[Vector]:
        return plan.gather({name: one.detach().numpy() for name, one in self.parameters.items()})

    @torch.no_grad()
    def write(self, plan: Plan, fragment: int, value: Vector) -> None:
        for name, tensor in plan.scatter(fragment, value).items():
            self.parameters[name].copy_(torch.from_numpy(tensor.copy()))  # pyright: ignore[reportUnknownMemberType]

    def step(self, clock: int) -> int:
        assert self.feed.loader is not None, "a learner without lanes does not step"
        batch = next(self.feed.loader)
        self.book(self.feed.digests([batch]))
        loss = self.loss(batch["input"], batch["labels"])
        self.inner.zero_grad()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.inner.param_groups:
            group["lr"] = self._lr(clock)
        self.inner.step()
        self._watch(clock, float(loss.detach()))
        return batch["input"].size

    def loss(self, inputs: object, labels: object) -> torch.Tensor:
        """Mean cross-entropy of a batch of int64 arrays `[batch, seq_len]`; labels of -100 do not count."""
        logits: torch.Tensor = self.model(torch.from_numpy(inputs))  # pyright: ignore
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten())  # pyright: ignore

    def optimizer(self) -> bytes:
        return pack_state(self.inner.state_dict())

    def load_optimizer(self, state: bytes) -> None:
        self.inner.state.clear()
        if state:
            self.inner.load_state_dict(unpack_state(state))


def pack_state(state: object) -> bytes:
    """A nested state of tensors and numbers as bytes."""
    file = io.BytesIO()
    torch.save(state, file)  # pyright: ignore[reportUnknownMemberType]
    return file.getvalue()


def unpack_state(raw: bytes) -> dict[str, object]:
    """The inverse of `pack_state`; bytes that hold anything but tensors and plain containers are refused by torch."""
    return torch.load(io.BytesIO(raw), weights_only=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
