"""A loader in a process of its own: a training loop that holds the interpreter does not starve it, nor it the loop.

`IsolatedLoader` looks like a `Loader`. Batches come through shared memory without a copy; the state after a step rides
along with its last micro-batch, so that it belongs to what the trainer has received.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from zephon.errors import DataError
from zephon.loader import Loader, Stats
from zephon.run.child import Child
from zephon.types import Batch

if TYPE_CHECKING:
    from zephon.stream import Stream


_Item = tuple[Batch | None, Any, Any]
"""Micro-batch; with the last one of a step its state, and stats, rows ahead and bad rows."""


class IsolatedLoader(Loader):
    """A `Loader` whose work is done in a child process. Same arguments, same batches, same state."""

    def __init__(self, stream: "Stream", **options: Any) -> None:
        super().__init__(stream, **options)
        self._stats, self._rows_ahead = super().stats(), 0
        self._saved = super().state_dict()
        self._turn, self._came = 0, False
        self._taken: deque[_Item] = deque()
        self._ended = False
        # At once: it starts while a checkpoint loads.
        self._child = Child("loader", (stream.recipe, options, stream.header(0)), stream.recipe.run.timeout)
        self._end = weakref.finalize(self, self._child.close)  # a loader that is dropped leaves no process

    def __next__(self) -> Batch:
        self._stream.watch.check_open()
        if self._failed:
            raise self._unusable() from self._failed
        if self._ended:
            raise StopIteration
        batch, state, about = self._taken.popleft() if self._taken else self._receive()
        if batch is None:
            self._ended, self._failed = True, state
            self._skipped += about or []  # what it passed after the last step handed over
            raise state or StopIteration
        self._handed += 1
        if state is not None:
            self._handed, self._step, self._saved = 0, self._step + 1, state
            self._stats, self._rows_ahead, skipped = about
            self._note(skipped)
        return batch

    def _receive(self) -> _Item:
        """The next item of this turn; those from before the last restore are passed over."""
        try:
            if self._came:
                self._came = False
                self._child.send(("taken", self._turn))
            while True:
                turn, items = self._child.receive()
                if turn == self._turn:
                    self._came = True
                    self._taken.extend(items)
                    return self._taken.popleft()
        except TimeoutError:
            self._child.kill()
            self._failed = self._stream.watch.error("The process of the isolated loader: no sign of life")
            raise self._failed from None
        except (EOFError, ConnectionError) as error:
            self._stream.watch.check_open()  # another thread may have closed it meanwhile
            self._failed = self._died()
            raise self._failed from error
        except BaseException as error:  # it says why it cannot go on; or cannot be heard; or Ctrl-C cut a message
            self._child.kill()
            self._failed = error
            raise

    def _died(self) -> DataError:
        code = self._child.close()
        return DataError(
            f"The process of the isolated loader died (exit code {code}; -9 is SIGKILL, often for want of memory). "
            "What it had not handed over is not lost: resume from the last checkpoint."
        )

    def state_dict(self) -> dict[str, bytes]:
        self._check_between_steps()
        return dict(self._saved)

    def load_state_dict(self, state: Mapping[str, bytes], allow: Iterable[str] = ()) -> None:
        super().load_state_dict(state, allow)  # refuses what does not belong here, in this process
        mine = super().state_dict()
        self._taken.clear()
        self._came = False
        self._saved, self._stats, self._turn, self._ended = mine, super().stats(), self._turn + 1, False
        if not self._child.send(("load", self._turn, mine)):
            raise self._died()

    def stats(self) -> Stats:
        return self._stats

    @property
    def rows_ahead(self) -> int:
        return self._rows_ahead

    def close(self) -> None:
        super().close()
        self._end()
