"""Child processes: workers that measure and build, and loaders that run apart from the trainer.

A child is started fresh (never forked), talks over one Unix socket, and ends when the other side closes it or dies: it
needs no clean-up by anybody, whoever is killed.
"""

import contextlib
import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zephon.errors import ZephonError
from zephon.run.wire import hang_up, receive, send

if TYPE_CHECKING:
    from zephon.recipe import Recipe

QUEUE_BYTES = 64 * 1024 * 1024
"""Bytes of batches that wait for the trainer: 100 ms of a trainer that takes 20 Mtoken/s are 24 MB."""

QUEUE_BATCHES = 256
"""Batches that wait at most: each holds a file descriptor in flight, and the kernel allows about 1,000."""

_PATIENCE = 10.0  # seconds that an idle child gets to end by itself


class Child:
    """A child process and our end of its socket.

    Args:
        role: `worker` or `loader`.
        task: what it gets first, by pickle.
    """

    def __init__(self, role: str, task: Any) -> None:
        self.link, theirs = socket.socketpair()
        command = [sys.executable, "-c", "from zephon.run.child import main; main()", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        with contextlib.suppress(OSError):  # it died at once: whoever waits for its first answer will say so
            send(self.link, (sys.path, logging.getLogger().level, role, task))

    def close(self) -> None:
        """Hang up and wait; a child that does not end is killed."""
        hang_up(self.link)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_PATIENCE)
            return
        self.process.kill()
        self.process.wait()


def failure(error: BaseException) -> Exception:
    """An error as it can be sent: ours as they are, others with their traceback as text."""
    if isinstance(error, ZephonError):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))


def serve_worker(link: socket.socket, recipe: "Recipe") -> None:
    """Do what is asked, one task after the other."""
    from zephon.stream import Stream

    with Stream(replace(recipe, run=replace(recipe.run, runner="inline", workers=1, isolate=False))) as stream:
        while True:
            number, name, args = receive(link)
            try:
                answer = (number, True, getattr(stream.worker, name)(*args))
            except Exception as error:
                answer = (number, False, failure(error))
            send(link, answer)


def serve_loader(link: socket.socket, task: tuple["Recipe", dict[str, Any]]) -> None:
    """Produce micro-batches as long as few enough wait; `("load", turn, state)` starts again from a state.

    Sends `(turn, batch, state, stats)`: state and stats after the last micro-batch of a step, else None; `(turn, None,
    error, None)` at the end of the stream or when something failed.
    """
    from zephon.stream import Stream

    recipe, options = task
    asked: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
    threading.Thread(target=_listen, args=(link, asked), daemon=True).start()
    with Stream(replace(recipe, run=replace(recipe.run, isolate=False))) as stream:
        loader = stream.loader(**options)
        turn, live, waiting = 0, True, list[int]()
        while True:
            idle = not live or sum(waiting) >= QUEUE_BYTES or len(waiting) >= QUEUE_BATCHES
            while idle or not asked.empty():
                message = asked.get()
                if message is None:
                    return
                if message[0] == "load":
                    _, turn, state = message
                    waiting, live = [], True
                    loader.load_state_dict(state)
                elif message[1] == turn:
                    waiting.pop(0)
                idle = not live or sum(waiting) >= QUEUE_BYTES or len(waiting) >= QUEUE_BATCHES
            try:
                batch = next(loader)
            except Exception as error:
                send(link, (turn, None, None if isinstance(error, StopIteration) else failure(error), None))
                live = False
                continue
            ends = loader.between_steps
            send(
                link,
                (
                    turn,
                    batch,
                    loader.state_dict() if ends else None,
                    (loader.stats(), loader.rows_ahead) if ends else None,
                ),
            )
            waiting.append(sum(array.nbytes for array in batch.values()))


def _listen(link: socket.socket, asked: "queue.Queue[tuple[Any, ...] | None]") -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked.put(receive(link))
    asked.put(None)


def main() -> None:
    """Entry point of a child."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # sent to whole jobs; ours to end is the parent's link
        signal.signal(one, signal.SIG_IGN)
    link = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        sys.path[:], level, role, task = receive(link)
        logging.basicConfig(level=level)
        {"worker": serve_worker, "loader": serve_loader}[role](link, task)
