"""Runners: who does the work of a stream. Which one, and how many workers, changes time and memory, never data.

`inline` works in the calling thread when a result is asked for. `threads` works ahead in threads: right where the work
releases the interpreter (tokenising, decoding). `process` works ahead in processes: right where it does not (JSON,
maps written in Python).
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from zephon.recipe import Recipe
from zephon.run.child import Child
from zephon.run.wire import hang_up, receive, send
from zephon.worker import Handle, Runner

T = TypeVar("T")

logger = logging.getLogger(__name__)

DEATHS = 3
"""Times that workers may die over the same task before the run stops."""


class _Lazy(Handle[T]):
    def __init__(self, work: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._work, self._args = work, args

    def result(self) -> T:
        return self._work(*self._args)


class InlineRunner(Runner):
    """Does the work in the calling thread, when its result is asked for."""

    tasks = 0

    def submit(self, work: Callable[..., T], *args: Any) -> Handle[T]:
        return _Lazy(work, args)

    def close(self) -> None:
        pass


class ThreadRunner(Runner):
    """Does the work in a pool of threads."""

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="zephon")
        self.tasks = workers + 1

    def submit(self, work: Callable[..., T], *args: Any) -> Handle[T]:
        return self._pool.submit(work, *args)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class ProcessRunner(Runner):
    """Does the work in processes of its own; one that dies is replaced and its work done again."""

    def __init__(self, recipe: Recipe) -> None:
        self._crew = [_Hand(recipe, number) for number in range(recipe.run.workers)]
        self.tasks = 2 * recipe.run.workers

    def submit(self, work: Callable[..., T], *args: Any) -> Handle[T]:
        hand = min(self._crew, key=lambda one: one.load)
        return hand.submit(work.__name__, args)

    def close(self) -> None:
        for hand in self._crew:
            hand.close()


class _Hand:
    """One worker process, its open tasks in the order given, and the thread that reads its answers."""

    def __init__(self, recipe: Recipe, number: int) -> None:
        self._recipe, self._number = recipe, number
        self._lock = threading.Lock()
        self._tasks: dict[int, tuple[str, tuple[Any, ...], Future[Any]]] = {}
        self._next = 0
        self._closing = False
        self._child = Child("worker", recipe)
        self._reader = threading.Thread(target=self._read, name=f"zephon-reader-{number}", daemon=True)
        self._reader.start()

    @property
    def load(self) -> int:
        """Number of open tasks."""
        return len(self._tasks)

    def submit(self, name: str, args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._tasks[number] = name, args, future
            self._send(number, name, args)
        return future

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._child.close()
        self._reader.join()
        for _, _, future in self._tasks.values():
            future.cancel()

    def _send(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # it has died: the reader notices, and sends the task again
            send(self._child.link, (number, name, args))

    def _read(self) -> None:
        """Hand out answers; replace the process when it dies."""
        deaths = 0
        while True:
            link: socket.socket = self._child.link
            try:
                number, good, value = receive(link)
            except (EOFError, OSError):
                with self._lock:
                    if self._closing:
                        return
                    deaths += 1
                    code = self._child.process.wait()
                    logger.warning("Worker process %d died (exit code %d); replacing it.", self._number, code)
                    if deaths > DEATHS:
                        self._give_up(code)
                        return
                    hang_up(link)
                    self._child = Child("worker", self._recipe)
                    for again, (name, args, _) in self._tasks.items():
                        self._send(again, name, args)
                continue
            deaths = 0
            with self._lock:
                future = self._tasks.pop(number)[2]
            if good:
                future.set_result(value)
            else:
                future.set_exception(value)

    def _give_up(self, code: int) -> None:
        for _, _, future in self._tasks.values():
            future.set_exception(
                RuntimeError(
                    f"Worker processes died {DEATHS + 1} times over the same work, last with exit code {code} (-9 is "
                    "SIGKILL, often for want of memory). Give the machine more memory, or use fewer [run] workers."
                )
            )
        self._tasks.clear()


def make_runner(recipe: Recipe) -> Runner:
    """The runner that a recipe asks for."""
    if recipe.run.runner == "threads":
        return ThreadRunner(recipe.run.workers)
    if recipe.run.runner == "process":
        return ProcessRunner(recipe)
    return InlineRunner()
