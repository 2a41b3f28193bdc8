"""Child processes: workers that measure and build, and loaders that run apart from the trainer.

A child is started fresh (never forked), talks over one Unix socket, and ends when the other side closes it or dies: it
needs no clean-up by anybody, whoever is killed.
"""

import contextlib
import errno
import gc
import logging
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zephon.errors import DataError, ZephonError
from zephon.restore import differences
from zephon.run.wire import ALIVE, hang_up, receive, send, show_life, wait

if TYPE_CHECKING:
    from zephon.recipe import Recipe
    from zephon.stream import Stream

QUEUE_GROUPS = 64
"""Messages that wait at most: each holds a file descriptor in flight, and the kernel allows about 1,000."""

GROUP_BATCHES, GROUP_BYTES = 16, 4 * 1024 * 1024
"""Micro-batches that go in one message at most; the trainer holds all of them as long as it holds one."""

HUNG = -1
"""Number of the answer that says that the task which is being done hangs."""

_START = 60.0  # seconds until the first sign of life: Python starts in 0.2, from a cold network disk in 20

PATIENCE = 3.0
"""Seconds that an idle child, or a thread that works, gets to end by itself: one that hangs leaves nothing either."""

_PROGRAM = (
    "import sys; from importlib.util import module_from_spec, spec_from_file_location as at; sys.path[:] = {path!r}; "
    "spec = at('zephon', {file!r}); package = sys.modules['zephon'] = module_from_spec(spec); "
    "spec.loader.exec_module(package); from zephon.run.child import main; main()"
)  # the files of this Zephon, wherever the parent has found it: another one might decide the order, in silence


class Child:
    """A child process and our end of its socket.

    Args:
        role: `worker` or `loader`.
        task: what it gets first, by pickle.
        timeout: seconds without a sign of life after which it is held to hang; 0 never.

    Raises:
        DataError: no process can be started.
    """

    def __init__(self, role: str, task: Any, timeout: float) -> None:
        self._silence, self._timeout = timeout and max(timeout, _START), timeout
        program = _PROGRAM.format(path=[*map(str, sys.path)], file=str(Path(__file__).parents[1] / "__init__.py"))
        try:
            self.link, theirs = socket.socketpair()
            if timeout:  # whoever sends may hold what the thread needs that would find out that it hangs
                self.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(self._silence), 0))
            with theirs:
                command = [sys.executable, "-c", program, str(theirs.fileno())]
                self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        except OSError as error:
            raise _lack(f"A {role} process cannot be started", error) from error
        self.send((logging.getLogger().level, role, task))

    def send(self, message: Any) -> bool:
        """Send it a message; False where it has gone, or takes nothing and was ended: who receives from it learns that.

        Raises:
            DataError: this process lacks what that takes.
        """
        try:
            send(self.link, message)
        except BlockingIOError:
            self.process.kill()
            return False
        except OSError as error:
            if isinstance(error, ConnectionError) or error.errno == errno.EBADF:  # EBADF: we have hung up meanwhile
                return False
            raise _lack("Work cannot be sent to another process", error) from error
        return True

    def receive(self) -> Any:
        """Its next message.

        Raises:
            EOFError, ConnectionError: it has gone.
            TimeoutError: it hangs.
            DataError: this process cannot take the message.
            Exception: why it cannot go on, as it said itself.
        """
        while True:
            try:
                wait(self.link, self._silence)
                message, self._silence = receive(self.link), self._timeout
            except (EOFError, ConnectionError, TimeoutError):
                raise
            except Exception as error:
                raise _lack("What another process has sent cannot be received", error) from error
            if isinstance(message, Exception):
                raise message
            if message != ALIVE:
                return message

    def close(self, patience: float = PATIENCE) -> int:
        """Hang up and wait for the exit code; a child that does not end in so many seconds is killed."""
        hang_up(self.link)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(patience)
        return self.kill()

    def kill(self) -> int:
        """End it at once."""
        hang_up(self.link)
        self.process.kill()
        return self.process.wait()


def _lack(what: str, error: Exception) -> DataError:
    return DataError(
        f"{what}: {error!r}. Most often the limit of open files (ulimit -n) or of processes (ulimit -u, a container's "
        "pids limit) is reached, or memory is: raise it, or use fewer [run] workers, then go on from the last state."
    )


class _Line:
    """The child's end of a link, on which several of its threads send."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self._lock = link, threading.Lock()

    def send(self, message: Any) -> None:
        with self._lock:
            send(self.link, message)


def failure(error: BaseException) -> Exception:
    """An error as it can be sent: ours as they are, others with their traceback as text."""
    if isinstance(error, ZephonError):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))


def check_same(header: Mapping[str, Any], stream: "Stream") -> None:
    """Refuse a stream that is not the parent's, which deals rows by number, with a `DataError`."""
    if found := differences(header, stream.header(0)):
        table = "\n".join(f"  {key}: {before} -> {now}" for key, (before, now) in found.items())
        raise DataError(
            f"A process of this run that opens the stream now finds another one (this run -> now):\n{table}\nFiles, or "
            "code that the recipe names, have changed since the run began: it would silently get other data. "
            "Put them back as they were, then go on from the last state."
        )


def serve_worker(line: _Line, recipe: "Recipe") -> None:
    """Do what is asked, one task after the other."""
    from zephon.stream import Stream

    run, half = recipe.run, recipe.run.timeout / 2  # half: a hung task is done again before the timeout
    show_life(line.send, half)
    own = replace(run, runner="inline", workers=1, isolate=False, memory=run.memory // run.workers, timeout=half)
    with Stream(replace(recipe, run=own)) as stream:
        stream.watch.told = lambda error: line.send((HUNG, False, error))
        check_same(receive(line.link), stream)
        while True:
            number, name, args = receive(line.link)
            try:
                work = getattr(stream.worker, name)
                answer = (number, True, stream.watch.do(work, args))
            except Exception as error:
                answer = (number, False, failure(error))
            line.send(answer)


def serve_loader(line: _Line, task: tuple["Recipe", dict[str, Any], Mapping[str, Any]]) -> None:
    """Produce micro-batches as long as few enough wait; `("load", turn, state)` starts again from a state.

    Sends `(turn, items)`, items being `(batch, state, (stats, rows ahead, skipped))`, the last two None but with the
    last micro-batch of a step; `(None, error, skipped)` at the end of the stream or when something failed. Small
    micro-batches go together while the trainer has others to take: one by one, a hand-over cost it 0.09 ms, whatever
    the size. `("taken", turn)` says that it has come to the end of the oldest items.
    """
    from zephon.stream import Stream

    recipe, options, header = task
    show_life(line.send, recipe.run.timeout)
    asked: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
    threading.Thread(target=_listen, args=(line.link, asked), daemon=True).start()
    with Stream(replace(recipe, run=replace(recipe.run, isolate=False))) as stream:
        stream.watch.told = line.send
        check_same(header, stream)
        loader, most = stream.loader(**options), stream.budget.waiting
        gc.freeze()  # what is there now stays: full collections need not look at it again
        turn, live = 0, True
        sent, group, size = list[int](), list[Any](), 0
        while True:
            full = sum(sent) + size >= most or len(sent) >= QUEUE_GROUPS
            if group and (full or not sent or not live or len(group) >= GROUP_BATCHES or size >= GROUP_BYTES):
                line.send((turn, group))
                sent.append(size)
                group, size = [], 0
            while not live or sum(sent) >= most or len(sent) >= QUEUE_GROUPS or not asked.empty():
                message = asked.get()
                if message is None:
                    return
                if message[0] == "load":
                    _, turn, state = message
                    sent, group, size, live = [], [], 0, True
                    loader.load_state_dict(state)
                elif message[1] == turn:
                    sent.pop(0)
            try:
                batch = next(loader)
            except Exception as error:
                ended = isinstance(error, StopIteration)
                group.append((None, None if ended else failure(error), loader.take_skipped()))
                live = False
                continue
            ends = loader.between_steps
            state = loader.state_dict() if ends else None
            about = (loader.stats(), loader.rows_ahead, loader.take_skipped()) if ends else None
            group.append((batch, state, about))
            size += sum(array.nbytes for array in batch.values())


def _listen(link: socket.socket, asked: "queue.Queue[tuple[Any, ...] | None]") -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked.put(receive(link))
    asked.put(None)


def main() -> None:
    """Entry point of a child."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # sent to whole jobs; ours to end is the parent's link
        signal.signal(one, signal.SIG_IGN)
    line = _Line(socket.socket(fileno=int(sys.argv[1])))
    try:
        level, role, task = receive(line.link)
        logging.basicConfig(level=level)
        {"worker": serve_worker, "loader": serve_loader}[role](line, task)
    except Exception as error:  # the parent's to say, once; most often it is that the parent has gone
        with contextlib.suppress(OSError):
            line.send(failure(error))
