"""What costs much to make again, kept for as long as there is room: row groups, members of compressed files."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Set
from typing import Any

_Key = tuple[Hashable, int, str | None]
"""File, number of the part, and its column where it is not all of them."""


class ByteCache:
    """What was decoded last, up to so many bytes or else one that is larger; threads and files share it.

    It keeps `kept` at first, and grows up to `most` where it must: what is decoded again although it was dropped lately
    makes room for itself. So a rank that hosts few lanes, which are amid few row groups, stays small.
    """

    def __init__(self, kept: int, most: int) -> None:
        self._start, self._limit, self._most, self._lock = kept, kept, most, threading.Lock()
        self._kept, self._dropped = OrderedDict[_Key, tuple[Any, int]](), OrderedDict[_Key, int]()
        self._making: dict[_Key, threading.Lock] = {}
        self.bytes, self.made, self._dropped_bytes = 0, 0, 0

    def find(self, key: _Key) -> Any:
        """What is kept under a key, or None."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key, (None, 0))[0]

    def get(self, key: _Key, make: Callable[[], tuple[Any, int]]) -> Any:
        """What is kept under a key, made where it is not; threads that want the same wait for one to make it."""
        if (found := self.find(key)) is None:
            with self._lock:
                turn = self._making.setdefault(key, threading.Lock())
            try:
                with turn:
                    if (found := self.find(key)) is None:
                        found, size = make()
                        with self._lock:
                            self._keep(key, found, size)
            finally:
                with self._lock:
                    self._making.pop(key, None)
        return found

    def lend(self, size: int) -> None:
        """Let it grow by so many bytes more, or less."""
        with self._lock:
            self._most += size

    def forget(self, files: Set[Hashable]) -> None:
        """Drop all of some files."""
        with self._lock:
            self._limit = self._start
            for key in [key for key in self._kept if key[0] in files]:
                self.bytes -= self._kept.pop(key)[1]

    def _keep(self, key: _Key, made: Any, size: int) -> None:
        self.made += 1
        if key in self._dropped:
            self._dropped_bytes -= self._dropped.pop(key)
            self._limit = min(self._limit + size, self._most)
        self.bytes += size - self._kept.pop(key, (None, 0))[1]
        self._kept[key] = made, size
        while self.bytes > min(self._limit, self._most) and len(self._kept) > 1:
            old, (_, size) = self._kept.popitem(last=False)
            self._dropped[old] = size
            self.bytes, self._dropped_bytes = self.bytes - size, self._dropped_bytes + size
        while self._dropped_bytes > self._most:
            self._dropped_bytes -= self._dropped.popitem(last=False)[1]
