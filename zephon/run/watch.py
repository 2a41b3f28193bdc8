"""The watchdog: work that does not end is named, with its source and file, and stops the run instead of hanging it.

Every task of a stream (measure some rows, build a micro-batch) is noted while it is worked on, and one thread of the
process looks at the notes. After a third of `[run] timeout` it warns, after all of it the task is given up:

- in the main thread by a signal, which ends every wait that a signal can end;
- in a worker thread by failing the task: whoever waits for it goes on, and the thread is left behind;
- in a process of ours by telling the parent, which kills it, and has a worker's task done once more.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import WeakSet

from zephon.errors import DataError, UsageError

T = TypeVar("T")

logger = logging.getLogger(__name__)

TIMEOUT = 90
"""Seconds that a task may take where a recipe does not say. TorchTitan's process groups give up after 100 s, with a
message that names no data. Tasks take some 10 ms, and 21 s more where reads that fail are tried again."""

LOOKS = 20
"""How often the watchdog looks during a timeout."""

CLOSED = "The stream is closed; open it again and load the last state."

SIGNAL = signal.SIGURG
"""Interrupts a task of the main thread. Ignored by default, so it hurts nobody where it comes late; Go's runtime does
the same. SIGINT would not do: a shell has jobs in the background ignore it, and libraries take it over."""


class _GivenUpError(BaseException):
    """Raised inside a task that was given up; no `Exception`, or the task might take it for a failure of its own."""


class Watch:
    """The watchdog of one stream.

    Args:
        timeout: seconds that a task may take; 0 watches nothing.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.name_task: Callable[[str, tuple[Any, ...]], str] = lambda name, _: name
        """Says what a task is, by the name of its work and its arguments."""
        self.told: Callable[[DataError], None] | None = None
        """In a process that another one watches: is told what has to be given up."""
        self.closed = False  # set where the stream is closed: nobody does its work any more
        self._notes: dict[int, _Note] = {}
        self._lock = threading.Lock()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(SIGNAL) is signal.SIG_DFL:
            signal.signal(SIGNAL, _interrupt)

    def check_open(self) -> None:
        """Raise a `UsageError` where the stream has been closed."""
        if self.closed:
            raise UsageError(CLOSED)

    def do(self, work: Callable[..., T], args: tuple[Any, ...], fail: Callable[[Exception], None] | None = None) -> T:
        """Do a task in this thread, watched; `fail` tells those who wait for it elsewhere.

        Raises:
            DataError: it took too long; raised at once where the thread can be interrupted.
        """
        note, me = _Note(work.__name__, args, fail), threading.get_ident()
        self._notes[me] = note
        _READS.pop(me, None)  # of an earlier task, or a thread that has ended: numbers come again
        if self.timeout:
            _look_after(self)
        result: T | None = None
        try:
            try:
                result = work(*args)
            finally:
                note.working = False
        except _GivenUpError:
            pass
        finally:
            with self._lock:
                del self._notes[me]
        if note.error:
            raise note.error
        return cast(T, result)

    def interrupt(self, thread: int) -> None:
        """Called by a signal in the thread whose task was given up: end it, unless it has ended meanwhile."""
        note = self._notes.get(thread)
        if note and note.error and note.working:
            note.working = False
            raise _GivenUpError

    def look(self, now: float) -> None:
        """Warn of tasks that take long, and give up those that take too long."""
        with self._lock:
            for thread, note in list(self._notes.items()):
                age = now - note.since
                if age >= self.timeout and not note.told:
                    note.told = True
                    self._give_up(thread, note)
                elif age >= self.timeout / 3 and not note.warned:
                    note.warned = True
                    logger.warning("%s: %.0f s so far, of %g.", self._what(thread, note), age, self.timeout)

    def leave(self, thread: int) -> str:
        """Leave the task of a thread behind, since the stream is closed: who waits for it is told. Says what it is."""
        with self._lock:
            note = self._notes.get(thread)
            if note and note.fail:
                note.fail(UsageError(CLOSED))
            return self._what(thread, note) if note else "nothing"

    def forgive(self, seconds: float) -> None:
        """Seconds that do not count for the tasks of now."""
        with self._lock:
            for note in self._notes.values():
                note.since += seconds

    def describe(self, work: str, args: tuple[Any, ...]) -> str:
        """What a task is; never an error, which would end the thread that asks."""
        try:
            return self.name_task(work, args)
        except Exception as error:
            return f"{work} ({error!r} when asked of what)"

    def error(self, what: str) -> DataError:
        """What is raised about a task that was given up."""
        return DataError(
            f"{what}: no end in {self.timeout:g} s ([run] timeout). Storage hangs, or code that the recipe names; so "
            "would the run. Nothing is lost: go on from the last state once it answers, or with a larger timeout."
        )

    def _give_up(self, thread: int, note: "_Note") -> None:
        error = self.error(self._what(thread, note))
        if fail := note.fail or self.told:
            fail(error)
        elif thread == threading.main_thread().ident and signal.getsignal(SIGNAL) is _interrupt:
            note.error = error
            signal.pthread_kill(thread, SIGNAL)
        else:
            logger.error("%s This thread cannot be interrupted.", error)

    def _what(self, thread: int, note: "_Note") -> str:
        what = self.describe(note.work, note.args)
        return f"{what} (last read: {_READS[thread]})" if thread in _READS else what


class _Note:
    """A task that is being worked on."""

    def __init__(self, work: str, args: tuple[Any, ...], fail: Callable[[Exception], None] | None) -> None:
        self.work, self.args, self.fail = work, args, fail
        self.since = time.monotonic()
        self.working, self.warned, self.told = True, False, False
        self.error: DataError | None = None


_READS: dict[int, str] = {}
_WATCHES: "WeakSet[Watch]" = WeakSet()
_THREAD: list[threading.Thread] = []
_GUARD = threading.Lock()


def reading(path: str) -> None:
    """Note which file this thread is about to read."""
    _READS[threading.get_ident()] = path


def _interrupt(*_: object) -> None:
    """What `SIGNAL` does, in the main thread."""
    for watch in list(_WATCHES):
        watch.interrupt(threading.get_ident())


def _look_after(watch: Watch) -> None:
    """Have a watch looked at from now on."""
    if watch in _WATCHES:
        return
    with _GUARD:
        _WATCHES.add(watch)
        if not _THREAD or not _THREAD[0].is_alive():  # a fork leaves it behind
            _THREAD[:] = [
                threading.Thread(target=_patrol, args=(time.monotonic(),), name="zephon-watchdog", daemon=True)
            ]
            _THREAD[0].start()


def _patrol(last: float) -> None:
    """Look at all tasks for ever; `last` is when the thread was started."""
    pause = 0.1
    while True:
        with _GUARD:
            watches = list(_WATCHES)
        now = time.monotonic()
        stood, last = now - last - 2 * pause, now
        for watch in watches:
            if stood > 0:  # the whole job was stopped, or the machine asleep, and nothing could get on
                watch.forgive(stood)
            watch.look(now)
        pause = min([1.0, *(watch.timeout / LOOKS for watch in watches)])
        del watches
        time.sleep(pause)
