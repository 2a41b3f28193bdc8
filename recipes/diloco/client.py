"""A learner's training loop, and its connection to the syncer."""

import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from recipes.diloco.fragments import Plan
from recipes.diloco.learner import Island, Learner, pack, plan_of
from recipes.diloco.messages import Describe, Description, Hello, LaneAt, Message, Reader, Welcome, write
from recipes.diloco.run import BookWriter, Run, read_book

CONNECT = 60.0
"""Seconds in which the syncer must come up."""

_FLUSH = 10.0  # seconds that last words may take
_SLICE = 0.01


class SyncerGoneError(RuntimeError):
    """The syncer closed the connection before the run was over."""


class NotWelcomeError(SyncerGoneError):
    """The connection was closed before the syncer had answered: it may be starting, or not be reached yet."""


class RunOverError(RuntimeError):
    """The run had ended before this learner came."""


class Client(ABC):
    """One learner's side of a run: joins, trains, and passes on what is said; how it travels is a subclass's affair.

    Args:
        run: the run.
        number: which learner.
    """

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self.learner: Learner | None = None
        self._lock, self._news = threading.Lock(), threading.Condition()
        self._came: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # until there is a learner
        self._closed = False

    @abstractmethod
    def send(self, message: Message) -> None:
        """Have a message sent; returns at once."""

    def join(self, island: Island) -> Learner:
        """Say hello, and start from what the syncer says.

        Raises:
            NotWelcomeError: it closed the connection instead; another try may work.
            RunOverError: the run ended before.
        """
        settings = self.run.settings
        plan = plan_of(island, settings)
        book = self.run.book(self.number)
        taken: dict[int, int] = {}
        for one in read_book(book, self.number):
            taken[one.lane] = max(one.step, taken.get(one.lane, 0))
        self.send(Hello(self.number, plan.digest, tuple(sorted(taken.items()))))
        while True:
            message = self._came.get()
            if message is None:
                if self.run.over():
                    raise RunOverError("The run ended before this learner was welcomed.")
                raise NotWelcomeError("The syncer closed the connection before it welcomed this learner; see its log.")
            if isinstance(message, Describe):
                self.send(describe(plan, island))
            elif isinstance(message, Welcome):
                break
        with self._lock:
            learner = self.learner = Learner(self.number, settings, plan, message, island)
            while not self._came.empty():
                self._receive(self._came.get())
        begun = BookWriter(book)
        island.book = lambda digests: begun.write(
            (lane, learner.lanes[lane].steps + 1, digest) for lane, digest in sorted(digests.items())
        )
        return learner

    def train(self, learner: Learner, island: Island) -> None:
        """Step until the syncer says stop.

        Raises:
            SyncerGoneError: it closed the connection instead.
        """
        while self.boundary(learner, island):
            began = time.monotonic()
            tokens = island.step(learner.clock)
            idle(began + self.run.pace - time.monotonic())
            self.stepped(learner, island, tokens)

    def boundary(self, learner: Learner, island: Island) -> bool:
        """Do what has come; waits only where there is no lane to train on. False when it is time to stop."""
        while True:
            with self._lock:
                for said in learner.at_boundary(island):
                    self.send(said)
            if learner.stopped:
                return False
            if self._closed:
                raise SyncerGoneError("The syncer is gone; this learner's last steps may not count. See its log.")
            if learner.lanes:
                return True
            with self._news:
                self._news.wait(1.0)

    def stepped(self, learner: Learner, island: Island, tokens: int) -> None:
        """Hold and report what a step gave."""
        values, lanes = island.read(learner.plan), island.lanes()
        with self._lock:
            self.send(learner.stepped(values, tokens, lanes))

    def _receive(self, message: Message | None) -> None:
        if self.learner is None:
            self._came.put(message)
        elif message is not None:
            for said in self.learner.receive(message):
                self.send(said)


class SocketClient(Client):
    """A client on a socket, with two threads that talk, so that training never waits for the network.

    Args:
        run: the run.
        number: which learner.
        port: where the syncer listens; read from the run's folder where left out.
    """

    def __init__(self, run: Run, number: int, port: int | None = None) -> None:
        super().__init__(run, number)
        self._link = _connect(lambda: port or int((run.folder / "port").read_text()), run.over)
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Message) -> None:
        self._out.put(write(message))

    def close(self) -> None:
        """Send what is left, then hang up."""
        self._out.put(None)
        self._writer.join(_FLUSH)
        self._link.close()

    def _write(self) -> None:
        while (raw := self._out.get()) is not None:
            try:
                self._link.sendall(raw)
            except OSError:
                return

    def _read(self) -> None:
        reader = Reader()
        try:
            while raw := self._link.recv(1 << 20):
                for message, _ in reader.feed(raw):
                    with self._lock:
                        self._receive(message)
                with self._news:
                    self._news.notify_all()
        except (OSError, ValueError):
            pass
        self._closed = True
        self._came.put(None)
        with self._news:
            self._news.notify_all()


def idle(seconds: float) -> None:
    """Stand for an accelerator that is at work: in slices, so that a process which is stopped half of the time takes
    twice as long."""
    for _ in range(round(seconds / _SLICE)):
        time.sleep(_SLICE)


def describe(plan: Plan, island: Island) -> Description:
    """What an island trains, for a syncer that does not know it yet."""
    lanes = tuple(LaneAt(lane, 0, state) for lane, state in sorted(island.first_lanes().items()))
    tensors = tuple((one.name, one.shape) for one in island.tensors)
    return Description(island.header, tensors, lanes, pack(island.read(plan)))


def _connect(port: Callable[[], int], over: Callable[[], bool]) -> socket.socket:
    """Connect once the syncer is up.

    Raises:
        SyncerGoneError: it does not come up.
        RunOverError: the run has ended.
    """
    give_up = time.monotonic() + CONNECT
    while True:
        try:
            link = socket.create_connection(("127.0.0.1", port()), timeout=CONNECT)
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return link
        except (OSError, ValueError) as error:
            if over():
                raise RunOverError("The run has ended; there is nothing left to do.") from None
            if time.monotonic() > give_up:
                raise SyncerGoneError(f"No syncer answers after {CONNECT:.0f} s: {error}. Start it first.") from error
            time.sleep(0.02)
