"""The syncer as a process: sockets around the state machine. One thread; it never waits for a single learner."""

import json
import selectors
import socket
import sys
from collections import Counter, deque

from recipes.diloco.keep import Keeper, now
from recipes.diloco.messages import Describe, Description, Expel, Hello, Message, Move, Reader, write
from recipes.diloco.run import Run
from recipes.diloco.syncer import Out, Syncer
from recipes.diloco.tape import TapeWriter
from zephon.errors import RestoreError

_READ = 1 << 20


class Connection:
    """One socket, and what is still to be sent on it."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self.reader, self.learner = link, Reader(), -1
        self._out: deque[memoryview] = deque()

    def send(self, raw: bytes) -> None:
        self._out.append(memoryview(raw))

    def flush(self) -> bool:
        """Send what the socket takes; returns whether all is sent."""
        while self._out:
            try:
                sent = self.link.send(self._out[0])
            except BlockingIOError:
                return False
            rest = self._out[0][sent:]
            if rest:
                self._out[0] = rest
            else:
                self._out.popleft()
        return True


class Server:
    """Runs the syncer of a run until it is done.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.syncer: Syncer | None = None
        self._keeper = Keeper(run, TapeWriter(run.folder / "tape.jsonl"))
        self._bytes: Counter[tuple[int, str, str]] = Counter()
        self._learners: dict[int, Connection] = {}
        self._early: list[tuple[Connection, Hello]] = []
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        port = run.folder / "port.new"
        port.write_text(str(self._listener.getsockname()[1]))
        port.replace(run.folder / "port")

    def serve(self) -> None:
        """Serve until the run is done."""
        while self.syncer is None or not self.syncer.done:
            due = self.syncer.deadline if self.syncer else None
            wait = None if due is None else max(0.0, (due - now()) / 1e6)
            for key, events in self._selector.select(wait):
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                if events & selectors.EVENT_READ:
                    self._read(key.data)
                if events & selectors.EVENT_WRITE and not self._try_flush(key.data):
                    self._drop(key.data)
            if self.syncer:
                if (due := self.syncer.deadline) is not None and due <= now():
                    self._tell(self.syncer.tick(now()))
                self._tell(self._keeper.snapshot(self.syncer))
        self._finish(self.syncer)

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(link, selectors.EVENT_READ, Connection(link))

    def _read(self, connection: Connection) -> None:
        try:
            raw = connection.link.recv(_READ)
            messages = connection.reader.feed(raw) if raw else None
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            _say(f"connection of learner {connection.learner}: {error}")
            messages = None
        if messages is None:
            self._drop(connection)
            return
        for message, size in messages:
            try:
                self._take(connection, message, size)
            except RestoreError:  # nothing that another learner says could mend that
                raise
            except ValueError as error:  # it broke the protocol
                _say(f"learner {connection.learner}: {error}")
                self._drop(connection)
                return

    def _take(self, connection: Connection, message: Message, size: int) -> None:
        if isinstance(message, Move | Expel):
            if self.syncer and isinstance(message, Move):
                self._tell(self.syncer.move(dict(message.homes), now()))
            elif self.syncer and isinstance(message, Expel):
                self._tell(self.syncer.expel(message.learner, now()))
            return
        if isinstance(message, Description):
            self._begin(message)
            return
        if isinstance(message, Hello):
            self._greet(connection, message)
        self._bytes[connection.learner, "up", type(message).__name__] += size
        if self.syncer and self._learners.get(connection.learner) is connection:
            self._tell(self.syncer.receive(connection.learner, message, now()))

    def _greet(self, connection: Connection, hello: Hello) -> None:
        """A new connection of a learner takes the place of its old one."""
        if old := self._learners.get(hello.learner):
            self._drop(old)
        connection.learner = hello.learner
        self._learners[hello.learner] = connection
        if self.syncer is None:
            self._early.append((connection, hello))
            if len(self._early) == 1:
                connection.send(write(Describe()))
                self._try_flush(connection)

    def _begin(self, said: Description) -> None:
        """Make the syncer, now that the first learner has said what it trains."""
        if self.syncer:
            return
        self.syncer = self._keeper.begin(said)
        early, self._early = self._early, []
        for connection, hello in early:
            self._tell(self.syncer.receive(connection.learner, hello, now()))

    def _tell(self, out: Out) -> None:
        encoded: dict[int, bytes] = {}
        touched: dict[int, Connection] = {}
        for learner, message in out:
            if connection := self._learners.get(learner):
                raw = encoded.setdefault(id(message), write(message))
                self._bytes[learner, "down", type(message).__name__] += len(raw)
                connection.send(raw)
                touched[learner] = connection
        for connection in touched.values():
            if not self._try_flush(connection):
                self._drop(connection)

    def _try_flush(self, connection: Connection) -> bool:
        """Send what goes; watch the socket for the rest. False where the connection is broken."""
        try:
            rest = selectors.EVENT_READ if connection.flush() else selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(connection.link, rest, connection)
        except (OSError, KeyError, ValueError):  # broken, or dropped already
            return False
        return True

    def _drop(self, connection: Connection) -> None:
        try:
            self._selector.unregister(connection.link)
        except (KeyError, ValueError):
            return  # dropped already
        connection.link.close()
        self._early = [one for one in self._early if one[0] is not connection]
        if self._learners.get(connection.learner) is connection:
            del self._learners[connection.learner]
            if self.syncer:
                self._tell(self.syncer.gone(connection.learner, now()))
            elif self._early:
                self._early[0][0].send(write(Describe()))
                self._try_flush(self._early[0][0])

    def _finish(self, syncer: Syncer) -> None:
        self._keeper.finish(syncer)
        traffic = [[*key, count] for key, count in sorted(self._bytes.items())]
        (self.run.folder / "traffic.json").write_text(json.dumps(traffic) + "\n")
        for connection in list(self._learners.values()):
            connection.link.close()
        self._listener.close()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
