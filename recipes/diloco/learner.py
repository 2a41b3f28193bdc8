"""A learner as a state machine: messages in, messages out. It never waits, and it has no clock but its own steps.

Whoever drives it calls `receive` for every message, in order; `at_boundary` between two steps; `stepped` after one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from recipes.diloco.fragments import Plan, Tensor, Vector, make_plan
from recipes.diloco.messages import (
    Bye,
    Copy,
    CopyFor,
    Expelled,
    Followed,
    LaneAt,
    Marker,
    Merged,
    Message,
    Own,
    Part,
    Pull,
    Recorded,
    Report,
    Stop,
    Welcome,
)
from recipes.diloco.settings import Settings
from recipes.diloco.wire import decode, encode


class Island(Protocol):
    """What trains: a model, its optimizer, and the lanes that feed it. All calls come between two steps."""

    tensors: Sequence[Tensor]
    """The model's parameters."""

    book: Callable[[dict[int, str]], None]
    """To be told, before it trains on them, the lanes of every step with the SHA-256 of what they gave."""

    @property
    def header(self) -> str:
        """What its stream says of itself, as in a checkpoint (JSON); empty where lanes are of no stream."""
        ...

    def first_lanes(self) -> dict[int, bytes]:
        """The state of every lane of the run before its first step."""
        ...

    def read(self, plan: Plan) -> list[Vector]:
        """A copy of all fragments."""
        ...

    def write(self, plan: Plan, fragment: int, value: Vector) -> None:
        """Replace a fragment; inner-optimizer state and learning rate stay as they are."""
        ...

    def own(self, lanes: dict[int, bytes]) -> None:
        """Own exactly these lanes from the next step on, each from its state."""
        ...

    def lanes(self) -> dict[int, bytes]:
        """The state of every lane that it owns, after the last step."""
        ...

    def step(self, clock: int) -> int:
        """Make an inner step on one step of every lane; returns its tokens. `clock` sets the learning rate."""
        ...

    def optimizer(self) -> bytes:
        """The state of the inner optimizer."""
        ...

    def load_optimizer(self, state: bytes) -> None:
        """Take over the state of another island's inner optimizer; begin afresh where `state` is empty."""
        ...


class Learner:
    """One learner, from its welcome on.

    Args:
        number: which learner.
        settings: of the run.
        plan: the fragments.
        welcome: what it starts from.
        island: what trains, which may have trained before; it is set to the welcome's fragments, lanes and optimizer
            state, of which there may be none.
    """

    def __init__(self, number: int, settings: Settings, plan: Plan, welcome: Welcome, island: Island) -> None:
        self.number, self.settings, self.plan = number, settings, plan
        self.clock, self.stopped, self.expelled = welcome.round, False, False
        self.steps, self.tokens = [0] * len(plan.fragments), [0] * len(plan.fragments)
        self._bases, self._clocks = welcome_values(plan, welcome), list(welcome.clocks)
        self._held = list(self._bases)
        self._lanes = {one.lane: one for one in welcome.lanes}
        self._adopted: list[tuple[int, int]] = []
        self._queue: deque[Message] = deque()
        for fragment, value in enumerate(self._bases):
            island.write(plan, fragment, value)
        island.own({one.lane: one.state for one in welcome.lanes})
        island.load_optimizer(welcome.body[len(welcome.body) - welcome.optimizer :])

    @property
    def lanes(self) -> dict[int, LaneAt]:
        """The lanes that it owns, after its last step; without any it cannot step, and waits for an `Own`."""
        return self._lanes

    def receive(self, message: Message) -> list[Message]:
        """Take a message; a pull is answered at once, from what was held after the last step, the rest waits."""
        if isinstance(message, Pull):
            return [self._part(message)]
        self._queue.append(message)
        return []

    def at_boundary(self, island: Island) -> list[Message]:
        """Between two steps: do what has come since, in the order in which it came."""
        said: list[Message] = []
        while self._queue:
            message = self._queue.popleft()
            if isinstance(message, Merged):
                self._adopt(message, island)
            elif isinstance(message, Own):
                said.append(self._follow(message, island))
            elif isinstance(message, CopyFor):
                said.append(Copy(message.learner, island.optimizer()))
            elif isinstance(message, Marker):
                said.append(self._recorded(message.snapshot, island.optimizer()))
            elif isinstance(message, Stop):
                self.stopped = True
                said.append(Bye())
            elif isinstance(message, Expelled):
                self.stopped = self.expelled = True
        return said

    def stepped(self, values: list[Vector], tokens: int, states: dict[int, bytes]) -> Report:
        """After a step: hold its fragments for pulls, count, and report.

        Args:
            values: all fragments, which must not change any more.
            tokens: that the step has trained on.
            states: of every lane that it owns.
        """
        self.clock += 1
        self._held = values
        self.steps = [one + 1 for one in self.steps]
        self.tokens = [one + tokens for one in self.tokens]
        self._lanes = {lane: LaneAt(lane, self._lanes[lane].steps + 1, states[lane]) for lane in sorted(self._lanes)}
        adopted, self._adopted = tuple(self._adopted), []
        return Report(self.clock, tokens, adopted, tuple(self._lanes.values()))

    def _adopt(self, message: Merged, island: Island) -> None:
        p = message.fragment
        base = decode(self.settings.down, message.body, self._bases[p])
        value = base
        if self.settings.alpha:
            keep = np.float32(self.settings.alpha)
            value = (keep * self._held[p] + (np.float32(1) - keep) * base).astype(np.float32)
        island.write(self.plan, p, value)
        self._bases[p], self._held[p], self._clocks[p] = base, value, message.round
        self.steps[p] = self.tokens[p] = 0
        self.clock = max(self.clock, message.round)
        self._adopted.append((message.round, p))

    def _follow(self, order: Own, island: Island) -> Followed:
        """Lanes that stay go on from where they are, which may be further than the syncer has heard."""
        self._lanes = {one.lane: self._lanes.get(one.lane, one) for one in order.lanes}
        island.own({lane: one.state for lane, one in self._lanes.items()})
        return Followed(order.order)

    def _part(self, pull: Pull) -> Part:
        p = pull.fragment
        body = encode(self.settings.up, self._held[p], self._bases[p]) if self.steps[p] else b""
        return Part(self.number, pull.round, p, self._clocks[p], self.steps[p], self.tokens[p], body)

    def _recorded(self, snapshot: int, optimizer: bytes) -> Recorded:
        body = pack(self._held) + optimizer
        lanes = tuple(self._lanes.values())
        return Recorded(snapshot, self.number, tuple(self.steps), tuple(self.tokens), lanes, body)


def plan_of(island: Island, settings: Settings) -> Plan:
    """The fragments of an island's model."""
    return make_plan(island.tensors, settings.fragments, settings.every)


def welcome_values(plan: Plan, welcome: Welcome) -> list[Vector]:
    """The fragments of a welcome."""
    return unpack(plan, welcome.body)


def pack(values: Iterable[Vector]) -> bytes:
    """All fragments as little-endian float32, one after the other."""
    return b"".join(one.astype("<f4").tobytes() for one in values)


def unpack(plan: Plan, raw: bytes) -> list[Vector]:
    """The inverse of `pack`; what follows the fragments in `raw` is left alone."""
    flat = np.frombuffer(raw[: 4 * plan.total], "<f4").astype(np.float32)
    ends = np.cumsum([plan.size(p) for p in range(len(plan.fragments))])[:-1]
    return [part.copy() for part in np.split(flat, ends)]
