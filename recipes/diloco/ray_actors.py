"""The actors of a run on a Ray cluster, and the global model whose fragments they merge; see `ray_driver`."""

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from recipes.diloco.client import Client
from recipes.diloco.fragments import Plan, Tensor, Vector
from recipes.diloco.learner import Island
from recipes.diloco.messages import Message
from recipes.diloco.outer import GlobalModel, Merge
from recipes.diloco.run import Run
from recipes.diloco.settings import Settings

Ref = Any
"""A reference to an object in Ray's store."""


def split(message: Message) -> tuple[Message, bytes]:
    """A message without its body, and the body; empty for messages that have none."""
    body = getattr(message, "body", b"")
    return (replace(message, body=b""), body) if body else (message, b"")  # pyright: ignore[reportCallIssue]


def join(head: Message, body: Any) -> Message:
    """The inverse; the body may be a reference."""
    return replace(head, body=body) if hasattr(head, "body") else head  # pyright: ignore[reportCallIssue]


class Talk(Client):
    """A client whose words go to a queue, and whose news come from calls.

    Args:
        run: the run.
        number: which learner.
    """

    def __init__(self, run: Run, number: int) -> None:
        super().__init__(run, number)
        self.said: queue.SimpleQueue[Message | Exception | None] = queue.SimpleQueue()
        self._early: dict[int, Message] = {}
        self._next = 0

    def send(self, message: Message) -> None:
        self.said.put(message)

    def hear(self, number: int, message: Message) -> None:
        """Take message `number` of this life; calls of Ray may overtake one another, messages must not."""
        with self._lock:
            self._early[number] = message
            while (ready := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._receive(ready)
        with self._news:
            self._news.notify_all()


class LearnerActor:
    """One learner.

    Args:
        run: the run.
        number: which learner.
    """

    def __init__(self, run: Run, number: int) -> None:
        self._run, self._number = run, number
        self._island: Island | None = None
        self._life, self._talk = -1, None
        self._trains: threading.Thread | None = None

    def speak(self, life: int) -> Iterator[bytes | Message]:
        """Live once: what this life says, each message as two objects, its body and the rest, until it is over."""
        if self._trains and self._trains.is_alive():
            os._exit(1)  # an earlier life that was lost on the way: two must not train one island; Ray starts it again
        talk = Talk(self._run, self._number)
        self._life, self._talk = life, talk
        self._trains = threading.Thread(target=self._train, args=(talk,), daemon=True)
        self._trains.start()
        while (message := talk.said.get()) is not None:
            if isinstance(message, Exception):
                raise message
            head, body = split(message)
            yield body
            yield head

    def hear(self, life: int, number: int, head: Message, body: bytes) -> None:
        """Be told something; what was meant for an earlier life is left."""
        if self._talk and life == self._life:
            self._talk.hear(number, join(head, body))

    _talk: Talk | None

    def _train(self, talk: Talk) -> None:
        try:
            island = self._island = self._island or self._run.make_island(self._number)
            talk.train(talk.join(island), island)
        except Exception as error:
            talk.said.put(error)
        talk.said.put(None)


class ShardActor:
    """Merges fragments. It has no state."""

    def hold(self, body: bytes) -> tuple[None, bytes]:
        """A copy on the shard's own node: the learner's node may go."""
        return None, body

    def merge(
        self, model: GlobalModel, round: int, oldest: int, parts: Sequence[Any]
    ) -> tuple[Any, bytes, GlobalModel]:
        """Merge the one fragment of a model.

        Args:
            model: of one fragment, as the last merge left it.
            round: of the merge.
            oldest: versions from before this round are dropped.
            parts: of learners; their bodies are references.

        Returns:
            The merge without its body and the SHA-256 of the new version (None, and of the old one, where nobody gave
            anything); the body; the new model.
        """
        bodies = ray.get([one.body for one in parts])
        model.forget(0, oldest)
        merge = model.merge(round, 0, [replace(one, body=body) for one, body in zip(parts, bodies, strict=True)])
        head = (replace(merge, body=b"") if merge else None, model.digest(0))
        return head, merge.body if merge else b"", model


def start_shards(count: int) -> list[Any]:
    """Actors of `ShardActor`, spread over the nodes; what a shard was asked when it died, Ray asks it again."""
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": "SPREAD"}
    return [ray.remote(ShardActor).options(**options).remote() for _ in range(count)]


class ShardedModel:
    """A `GlobalModel` whose fragments are objects in the store, merged by shards: fragment `p` by shard `p mod shards`.

    Args:
        model: what it starts from.
        shards: actors.
    """

    def __init__(self, model: GlobalModel, shards: Sequence[Any]) -> None:
        self.settings, self.plan, self.clocks = model.settings, model.plan, model.clocks
        parts = zip(model.plan.fragments, model.values, model.momentum, model.clocks, strict=True)
        self._fragments: list[Ref] = [
            ray.put(_one(model.settings, tensors, model.plan, p, values, momentum, clock))
            for p, (tensors, values, momentum, clock) in enumerate(parts)
        ]
        self._oldest, self._digests = list(self.clocks), [""] * len(self.clocks)
        self._shards = shards

    @property
    def values(self) -> list[Vector]:
        return [one.values[0] for one in ray.get(self._fragments)]

    @property
    def momentum(self) -> list[Vector]:
        return [one.momentum[0] for one in ray.get(self._fragments)]

    def merge(self, round: int, fragment: int, parts: Sequence[Any]) -> Merge | None:
        """As `GlobalModel.merge`, but bodies are references, those of `parts` and that of the result.

        None too where a node took with it what learners gave: their work counts at the next merge of the fragment.

        Raises:
            RayError: the fragment itself is lost.
        """
        merge = self._shards[fragment % len(self._shards)].merge.options(num_returns=3)
        said, body, model = merge.remote(self._fragments[fragment], round, self._oldest[fragment], list(parts))
        try:
            head, self._digests[fragment] = ray.get(said)
        except RayError:
            ray.get(self._fragments[fragment])
            return None
        if head is None:
            return None
        ray.wait([model], timeout=0, fetch_local=True)  # a second copy on this node: the shard's may go
        self._fragments[fragment], self.clocks[fragment] = model, round
        return replace(head, body=body)

    def forget(self, fragment: int, oldest: int) -> None:
        """Takes effect with the next merge."""
        self._oldest[fragment] = oldest

    def digest(self, fragment: int) -> str:
        return self._digests[fragment]


def _one(
    settings: Settings, tensors: tuple[Tensor, ...], plan: Plan, p: int, values: Vector, momentum: Vector, clock: int
) -> GlobalModel:
    """The global model of one fragment."""
    alone = Plan((tensors,), plan.every, plan.averaged and p == 0)
    return GlobalModel(settings, alone, [values], [momentum], [clock])
