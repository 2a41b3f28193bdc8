"""Runners: who does the work of a stream. Which one, and how many workers, changes time and memory, never data.

`inline` works in the calling thread when a result is asked for. `threads` works ahead in threads: right where most of
the work releases the interpreter (images: two threads give 1.7 times as many; text with the fast tokenizer: 0.93).
`process` works ahead in processes: right where it does not (maps written in Python).
"""

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from zephon.errors import DataError, UsageError
from zephon.recipe import Recipe
from zephon.run.child import HUNG, PATIENCE, Child
from zephon.run.watch import CLOSED, Watch
from zephon.run.wire import hang_up
from zephon.worker import Handle, Runner

T = TypeVar("T")

logger = logging.getLogger(__name__)

DEATHS = 3
"""Times that workers may die over the same task before the run stops."""

HANGS = 1
"""Times that workers may hang over the same task before the run stops."""


class _Lazy(Handle[T]):
    def __init__(self, watch: Watch, work: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._watch, self._work, self._args = watch, work, args

    def result(self) -> T:
        return self._watch.do(self._work, self._args)


class InlineRunner(Runner):
    """Does the work in the calling thread, when its result is asked for."""

    tasks = 0

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def submit(self, work: Callable[..., T], *args: Any) -> Handle[T]:
        return _Lazy(self._watch, work, args)

    def close(self) -> None:
        pass


_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class ThreadRunner(Runner):
    """Does the work in threads. One that hangs is replaced and left behind, and nobody waits for it."""

    def __init__(self, workers: int, watch: Watch) -> None:
        self.tasks = workers + 1
        self._watch = watch
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._crew = set[threading.Thread]()
        for _ in range(workers):
            _hire(self._tasks, watch, self._crew)
        self._end = weakref.finalize(self, _send_home, self._tasks, self._crew, watch)

    def submit(self, work: Callable[..., T], *args: Any) -> Handle[T]:
        future: Future[T] = Future()
        self._tasks.put((future, work, args))
        if self._watch.closed:  # maybe after the threads have gone
            _fail(future, UsageError(CLOSED))
        return future

    def close(self) -> None:
        self._end()


def _fail(future: Future[Any], error: BaseException) -> None:
    """Tell those who wait for a task, unless they have been told."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def _hire(tasks: "queue.SimpleQueue[_Task | None]", watch: Watch, crew: set[threading.Thread]) -> None:
    thread = threading.Thread(target=_work, args=(tasks, watch, crew), name="zephon-worker", daemon=True)
    crew.add(thread)
    thread.start()


def _work(tasks: "queue.SimpleQueue[_Task | None]", watch: Watch, crew: set[threading.Thread]) -> None:
    """What a worker thread does until it is sent home, or left behind."""
    me = threading.current_thread()
    while me in crew and (task := tasks.get()) is not None:
        future, work, args = task

        def give_up(error: Exception, future: Future[Any] = future) -> None:
            """Fail it, and what waits behind it: that may be what somebody waits for, and would hang in its turn."""
            _fail(future, error)
            if me in crew:  # else all have been sent home
                crew.discard(me)
                _drop(tasks, error)
                _hire(tasks, watch, crew)

        try:
            result = watch.do(work, args, give_up)
            with contextlib.suppress(InvalidStateError):  # it was given up
                future.set_result(result)
            del result
        except BaseException as error:
            _fail(future, error)
        del task, future, args, give_up  # what a thread has done must not stay while it waits


def _drop(tasks: "queue.SimpleQueue[_Task | None]", error: Exception) -> None:
    """Fail the tasks that no thread has taken."""
    with contextlib.suppress(queue.Empty):
        while task := tasks.get_nowait():
            _fail(task[0], error)


def _send_home(tasks: "queue.SimpleQueue[_Task | None]", crew: set[threading.Thread], watch: Watch) -> None:
    """Drop what waits and let the threads end; those that do not are left behind. Files close with their readers."""
    _drop(tasks, UsageError(CLOSED))
    for _ in crew:
        tasks.put(None)
    ends = time.monotonic() + PATIENCE
    while (left := [one for one in tuple(crew) if one.is_alive()]) and time.monotonic() < ends:
        left[0].join(PATIENCE / 20)
    crew.clear()
    if left:
        what = "; ".join(watch.leave(thread.ident or 0) for thread in left)
        logger.warning("Closing waits no longer than %g s, and leaves behind, with its thread: %s.", PATIENCE, what)


class ProcessRunner(Runner):
    """Does the work in processes of its own; one that dies is replaced and its work done again."""

    def __init__(self, recipe: Recipe, watch: Watch) -> None:
        self._crew: list[_Hand] = []
        self._end = weakref.finalize(self, _dismiss, self._crew)  # a stream that is dropped leaves no process
        self.tasks = 2 * recipe.run.workers
        try:
            for number in range(recipe.run.workers):
                self._crew.append(_Hand(recipe, number, watch))
        except BaseException:
            self.close()
            raise

    def expect(self, header: Mapping[str, Any]) -> None:
        for hand in self._crew:
            hand.expect(header)

    def submit(self, work: Callable[..., T], *args: Any) -> Handle[T]:
        hand = min(self._crew, key=lambda one: len(one.tasks))
        return hand.submit(work.__name__, args)

    def close(self) -> None:
        self._end()


def _dismiss(crew: "list[_Hand]") -> None:
    ends = time.monotonic() + PATIENCE
    for hand in crew:
        hand.hang_up()  # all of them first: they end side by side
    for hand in crew:
        hand.close(max(0.0, ends - time.monotonic()))


class _Hand:
    """One worker process, its open tasks in the order given, and the thread that reads its answers."""

    def __init__(self, recipe: Recipe, number: int, watch: Watch) -> None:
        self._recipe, self._number, self._watch = recipe, number, watch
        self._lock = threading.RLock()  # the search for garbage may close a dropped runner in any of these places
        self.tasks: dict[int, tuple[str, tuple[Any, ...], Future[Any]]] = {}
        self._next = 0
        self._header: Mapping[str, Any] | None = None  # what its process must find when it opens the stream
        self._lost: Exception | None = None  # why nothing is done here any more
        self._child = Child("worker", recipe, recipe.run.timeout / 2)
        self._reader = threading.Thread(target=self._read, name=f"zephon-reader-{number}", daemon=True)
        self._reader.start()

    def expect(self, header: Mapping[str, Any]) -> None:
        with self._lock:
            self._header = header
            self._child.send(header)

    def submit(self, name: str, args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._lost:
                future.set_exception(self._lost)
                return future
            number, self._next = self._next, self._next + 1
            self.tasks[number] = name, args, future
            try:
                self._child.send((number, name, args))  # where it has died the reader notices, and sends it again
            except DataError as error:
                self._give_up(error)
        return future

    def hang_up(self) -> None:
        with self._lock:
            self._give_up(UsageError(CLOSED))
        hang_up(self._child.link)

    def close(self, patience: float) -> None:
        self._child.close(patience)
        if self._reader is not threading.current_thread():
            self._reader.join()

    def _read(self) -> None:
        """Hand out answers; whatever ends that, nobody waits for ever."""
        try:
            self._hand_out()
        except Exception as error:
            self._child.kill()
            with self._lock:
                self._give_up(error)

    def _hand_out(self) -> None:
        """Hand out answers; replace the process when it dies, or hangs."""
        deaths = hangs = 0
        while not self._lost:
            try:
                number, good, value = self._child.receive()
            except TimeoutError:
                number, good, value = HUNG, False, None
            except (EOFError, ConnectionError):
                deaths += 1
                code = self._child.close()
                self._replace(f"died (exit code {code})", self._died(code) if deaths > DEATHS else None)
                continue
            if number == HUNG:
                hangs += 1
                self._child.kill()  # without the lock: who sends to it may wait, holding that, for it to read
                # One that does not even say what it hangs over does so over the oldest open task.
                error = value or self._watch.error(f"{self._oldest()}, in a process that gives no sign of life")
                self._replace(f"hangs ({error})", error if hangs > HANGS else None)
                continue
            with self._lock:
                if self._lost:
                    return
                future = self.tasks.pop(number)[2]
            deaths = hangs = 0
            if good:
                future.set_result(value)
            else:
                future.set_exception(value)

    def _died(self, code: int) -> Exception:
        return DataError(
            f"{self._oldest()}: worker processes died {DEATHS + 1} times over the same work, last with exit code "
            f"{code} (-9 is SIGKILL, often for want of memory). Give the machine more memory, use fewer [run] "
            "workers, or look at those rows."
        )

    def _oldest(self) -> str:
        """What it works on: the oldest open task."""
        with self._lock:
            name, args, _ = next(iter(self.tasks.values()), ("nothing", (), None))
        return self._watch.describe(name, args)

    def _replace(self, what: str, error: Exception | None) -> None:
        """Have the open tasks done again by a new process, or give them up with an error."""
        with self._lock:
            if self._lost:
                return
            logger.warning("Worker process %d %s; replacing it.", self._number, what)
            if error:
                raise error
            self._child = Child("worker", self._recipe, self._recipe.run.timeout / 2)
            if self._header:
                self._child.send(self._header)
            for again, (name, args, _) in self.tasks.items():
                self._child.send((again, name, args))

    def _give_up(self, error: Exception) -> None:
        """Do nothing more: the open tasks fail, and all to come."""
        self._lost = self._lost or error
        for _, _, future in self.tasks.values():
            future.set_exception(self._lost)
        self.tasks.clear()


def make_runner(recipe: Recipe, watch: Watch) -> Runner:
    """The runner that a recipe asks for."""
    if recipe.run.runner == "threads":
        return ThreadRunner(recipe.run.workers, watch)
    if recipe.run.runner == "process":
        return ProcessRunner(recipe, watch)
    return InlineRunner(watch)
