"""Bytes of files that are read when they are needed: an address that any process of the machine can follow.

A row with an image holds where the image lies, so that rows are measured by headers of images, and only what is built
is read whole. An address knows the state of its file: bytes of another state are refused, never given.
"""

import errno
import functools
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from zephon.errors import DataError
from zephon.formats.compressed import Descriptor
from zephon.formats.steady import pread, steadily, unreadable


def open_files(most: int, part: int) -> int:
    """How many files may stay open: `most`, or one in `part` of those that the process may open (`ulimit -n`)."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if allowed == resource.RLIM_INFINITY else max(2, min(most, allowed // part))


OPEN_BLOB_FILES = open_files(256, 8)
"""Files that a process keeps open for what is read late; opening one costs more than reading an image's header."""


class File(NamedTuple):
    """One state of a file; all addresses in a file share it."""

    path: str
    size: int
    mtime_ns: int

    @staticmethod
    def at(path: Path) -> "File":
        """The state that a file is in now; OSError where there is none."""
        stat = path.stat()
        return File(str(path), stat.st_size, stat.st_mtime_ns)

    def is_state(self, stat: os.stat_result) -> bool:
        """Whether this is still the state of the file, by size and modification time."""
        return (stat.st_size, stat.st_mtime_ns) == (self.size, self.mtime_ns)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from byte `offset` on. Several threads may read.

        Raises:
            DataError: the file is gone, was cut, or is in another state.
        """
        if not size:
            return b""
        file, data = OPEN.get(self), b""
        stat = os.fstat(file.fd)
        if self.is_state(stat):
            while len(data) < size and (more := pread(file.fd, size - len(data), offset + len(data), self.path)):
                data = data + more if data else more
        if len(data) < size:
            raise DataError(
                f"{self.path} was changed or cut while the run reads it ({stat.st_size} bytes now, {self.size} when it "
                "was indexed): what it would give now is not what the run's order was made for. Put the old file back, "
                "or start a new run on the new one."
            )
        return data


@dataclass(frozen=True, slots=True)
class FileBlob:
    """A run of bytes in a file: a `zephon.types.Blob`. `name` says what lies there, for messages."""

    file: File
    offset: int
    size: int
    name: str

    @property
    def place(self) -> str:
        return f"{self.file.path}, member {self.name}, byte {self.offset}"

    def head(self, size: int) -> bytes:
        return self.file.read(self.offset, max(0, min(size, self.size)))

    def read(self) -> bytes:
        return self.file.read(self.offset, self.size)


def path_blob(path: Path) -> FileBlob:
    """A whole file, in the state it is in now.

    Raises:
        OSError: there is no such file, or it is a folder or a pipe.
    """
    stat = path.stat()
    if not S_ISREG(stat.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return FileBlob(File(str(path), stat.st_size, stat.st_mtime_ns), 0, stat.st_size, path.name)


class OpenFiles:
    """Files that stay open, up to `limit`; threads share them. Each is closed when its last user lets go."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock, self._files = limit, threading.Lock(), OrderedDict[File, Descriptor]()

    def get(self, file: File) -> Descriptor:
        """The file, open.

        Raises:
            DataError: it cannot be opened.
        """
        with self._lock:
            if file in self._files:
                self._files.move_to_end(file)
                return self._files[file]
        try:  # without the lock: nobody waits for a slow file system who reads elsewhere
            opened = steadily(file.path, 0, functools.partial(Descriptor, file.path))
        except OSError as error:
            raise unreadable(file.path, error) from error
        with self._lock:
            self._files[file] = opened
            while len(self._files) > self._limit:
                self._files.popitem(last=False)
        return opened

    def forget(self, files: Iterable[File]) -> None:
        """Close files, as soon as nobody reads them."""
        with self._lock:
            for file in files:
                self._files.pop(file, None)


OPEN = OpenFiles(OPEN_BLOB_FILES)
