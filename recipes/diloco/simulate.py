"""The whole system in one process on a virtual clock: real messages, real merging, islands that are real or toys.

Everything happens in the order of (time, kind, number), so a run depends on its arguments alone. Times are
microseconds.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from recipes.diloco.faults import Fault
from recipes.diloco.lanes import Lanes, divide
from recipes.diloco.learner import Island, Learner, plan_of
from recipes.diloco.messages import Hello, LaneAt, Message, Welcome, write
from recipes.diloco.outer import GlobalModel
from recipes.diloco.settings import Settings
from recipes.diloco.syncer import Event, Out, Syncer

SLOW = 3
"""How much longer steps take during a "slow" fault."""

_MESSAGE, _WORK = 0, 1  # at one time, messages come before work


@dataclass(frozen=True, slots=True)
class Network:
    """Every link between a learner and the syncer, both ways alike.

    Attributes:
        latency: microseconds.
        rate: bytes a second; 0 for a link without limit.
    """

    latency: int = 0
    rate: int = 0


@dataclass
class _Node:
    """A learner's machine."""

    life: int = 0
    alive: bool = False
    learner: Learner | None = None
    island: Island | None = None
    busy: bool = False
    frozen: int = 0
    slow: int = 0
    parted: int = 0
    free: list[int] = field(default_factory=lambda: [0, 0])  # when its up-link and its down-link are free again
    taken: dict[int, int] = field(default_factory=dict[int, int])


class Simulation:
    """A run on a virtual clock.

    Args:
        settings: of the run.
        make_island: the island of a learner, fresh; the first one's parameters are the run's.
        step_time: how long a learner's step takes, given its number and how many it has made.
        network: all links.
        faults: what goes wrong, and when.
    """

    def __init__(
        self,
        settings: Settings,
        make_island: Callable[[int], Island],
        step_time: Callable[[int, int], int] = lambda learner, count: 1_000_000,
        network: Network | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        first = make_island(0)
        self.plan = plan_of(first, settings)
        lanes = [LaneAt(lane, 0, state) for lane, state in sorted(first.first_lanes().items())]
        book = Lanes(lanes, divide([one.lane for one in lanes], range(settings.learners)))
        self.tape: list[Event] = []
        model = GlobalModel(settings, self.plan, first.read(self.plan))
        self._begin(settings, Syncer(settings, model, book, self.tape.append), make_island, step_time, network)
        for fault in faults:
            self.at(fault.at, partial(self._fault, fault))

    @classmethod
    def of(cls, syncer: Syncer, tape: list[Event], make_island: Callable[[int], Island]) -> "Simulation":
        """A simulation that goes on with a syncer that was made elsewhere, say from a snapshot."""
        made = cls.__new__(cls)
        made.plan, made.tape = syncer.plan, tape
        made._begin(syncer.settings, syncer, make_island, lambda learner, count: 1_000_000, None)
        return made

    def _begin(
        self,
        settings: Settings,
        syncer: Syncer,
        make_island: Callable[[int], Island],
        step_time: Callable[[int, int], int],
        network: Network | None,
    ) -> None:
        self.settings, self.syncer, self.now = settings, syncer, 0
        self.bytes: Counter[tuple[int, str, str]] = Counter()
        """Bytes on the wire by learner, direction ("up", "down") and kind of message."""
        self.takes: list[tuple[int, int, int]] = []
        """Learner, lane and step of every lane step that was begun."""
        self._make, self._time, self._network = make_island, step_time, network
        self._nodes = {learner: _Node() for learner in range(settings.learners)}
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._count = itertools.count()
        for learner in self._nodes:
            self.at(0, partial(self.start, learner))

    def at(self, time: int, what: Callable[[], None], kind: int = _MESSAGE) -> None:
        """Have something done at a time."""
        heapq.heappush(self._heap, (time, kind, next(self._count), what))

    def tell(self, out: Out) -> None:
        """Send what the syncer says."""
        for learner, message in out:
            self._send(learner, message, 1)

    def run(self, until: int = 1 << 60) -> "Simulation":
        """Run to the end, or to a time.

        Raises:
            RuntimeError: nothing is left to happen, and the run has not ended.
        """
        while not (self.syncer.done and not any(node.busy for node in self._nodes.values())):
            due = self.syncer.deadline
            if due is not None and (not self._heap or due < self._heap[0][0]):
                self.now = max(self.now, due)
                self.tell(self.syncer.tick(self.now))
                continue
            if not self._heap:
                raise RuntimeError(f"The run hangs at {self.now} us, after {self.syncer.round} rounds.")
            if self._heap[0][0] > until:
                break
            self.now, _, _, what = heapq.heappop(self._heap)
            what()
        return self

    def start(self, learner: int) -> None:
        """A learner comes up, for the first time or again; one that has been told to stop stays down."""
        node = self._nodes.setdefault(learner, _Node())
        if self.syncer.done:
            return
        node.life, node.alive, node.learner, node.busy = node.life + 1, True, None, False
        node.frozen, node.slow, node.free = 0, 0, [0, 0]
        self._send(learner, Hello(learner, self.plan.digest, tuple(sorted(node.taken.items()))), 0)

    def kill(self, learner: int, lost: bool = True) -> None:
        """SIGKILL."""
        node = self._nodes[learner]
        if not node.alive:
            return
        node.life, node.alive, node.busy = node.life + lost, False, False
        life = node.life
        self.at(max(self.now, node.free[0]), lambda: self._hear_of_death(learner, life))

    def _hear_of_death(self, learner: int, life: int) -> None:
        node = self._nodes[learner]
        if node.life == life:
            node.life += 1
            self.tell(self.syncer.gone(learner, self.now))

    def _fault(self, fault: Fault) -> None:
        node, until = self._nodes[fault.learner], self.now + fault.lasting
        if not node.alive:
            return
        if fault.kind == "kill":
            self.kill(fault.learner, fault.lost)
            self.at(until, partial(self.start, fault.learner))
        elif fault.kind == "stop":
            node.frozen = until
        elif fault.kind == "slow":
            node.slow = until
        else:
            node.parted = until

    def _send(self, learner: int, message: Message, way: int) -> None:
        """Put a message on a link, which keeps the order; what is on its way when a learner dies may be lost."""
        node, network = self._nodes[learner], self._network
        took = 0
        if network:
            size = len(write(message))
            self.bytes[learner, ("up", "down")[way], type(message).__name__] += size
            took = network.latency + (size * 1_000_000 // network.rate if network.rate else 0)
        node.free[way] = max(self.now, node.free[way], node.parted) + took
        life = node.life
        deliver = self._hear if way == 0 else self._tell
        self.at(node.free[way], lambda: deliver(learner, life, message))

    def _hear(self, learner: int, life: int, message: Message) -> None:
        if self._nodes[learner].life == life:
            self.tell(self.syncer.receive(learner, message, self.now))

    def _tell(self, learner: int, life: int, message: Message) -> None:
        node = self._nodes[learner]
        if node.life != life or not node.alive:
            return
        if self.now < node.frozen:
            self.at(node.frozen, lambda: self._tell(learner, life, message))
        elif isinstance(message, Welcome):
            node.island = self._make(learner)
            node.learner = Learner(learner, self.settings, self.plan, message, node.island)
            self._work(learner)
        elif node.learner:
            for said in node.learner.receive(message):
                self._send(learner, said, 0)
            if not node.busy:
                self._work(learner)

    def _work(self, learner: int) -> None:
        node = self._nodes[learner]
        node.busy = True
        self.at(self.now, partial(self._start_step, learner, node.life), _WORK)

    def _start_step(self, learner: int, life: int) -> None:
        node = self._nodes[learner]
        if node.life != life or not node.alive or node.learner is None or node.island is None:
            return
        for said in node.learner.at_boundary(node.island):
            self._send(learner, said, 0)
        node.busy = bool(node.learner.lanes) and not node.learner.stopped
        if node.learner.stopped:
            node.alive = False
            if node.learner.expelled:
                self.start(learner)
        if not node.busy or node.learner is None:
            return
        for lane, at in node.learner.lanes.items():
            node.taken[lane] = max(at.steps + 1, node.taken.get(lane, 0))
            self.takes.append((learner, lane, at.steps + 1))
        took = self._time(learner, node.learner.clock) * (SLOW if self.now < node.slow else 1)
        self.at(self.now + took, partial(self._end_step, learner, life), _WORK)

    def _end_step(self, learner: int, life: int) -> None:
        node = self._nodes[learner]
        if node.life != life or not node.alive or node.learner is None or node.island is None:
            return
        if self.now < node.frozen:
            self.at(node.frozen, partial(self._end_step, learner, life), _WORK)
            return
        tokens = node.island.step(node.learner.clock)
        self._send(learner, node.learner.stepped(node.island.read(self.plan), tokens, node.island.lanes()), 0)
        self._work(learner)
