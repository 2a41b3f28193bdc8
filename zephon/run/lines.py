"""Files of one JSON object a line to which runs append, each rank to its own: ledgers and skip lists."""

import contextlib
import json
import mmap
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from zephon.errors import UsageError

T = TypeVar("T")
_LINE = 1 << 26  # bytes of a first line that are looked at: a corpus may be one line


class LineWriter:
    """Appends to one file, with which the next run goes on, wherever this one is killed.

    Args:
        path: the file; it and its folders are made. A line that was left half written is cut off.
        what: what such a file is called.
        start: how every line begins.
        check: raises a ValueError for a line that is none of such a file.

    Raises:
        UsageError: the path is a folder, or a file that is something else, which is left as it is; or has no folder.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, what: str, start: bytes, check: Callable[[bytes], Any]) -> None:
        self._path = path
        if path.is_dir():
            raise UsageError(f"{path} is a folder, which cannot be a {what}. Name a file, for example in it.")
        if not path.exists():
            make_folder(path.parent)
        if path.is_file():  # pipes and devices are written to as they are
            with path.open("r+b") as file:
                first = file.readline(_LINE)
                if not _begins(first, start, check):
                    raise UsageError(f"{path} is there and is no {what}; it is left as it is. Choose another file.")
                if first:
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
                        whole = raw.rfind(b"\n") + 1
                    file.truncate(whole)
        self._file = path.open("ab")
        weakref.finalize(self, _let_go, self._file)

    def write(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Add lines; on disk, as far as this process goes, on return."""
        with naming(self._path):
            self._file.writelines((json.dumps(one) + "\n").encode() for one in values)
            self._file.flush()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()


def _let_go(file: IO[bytes]) -> None:
    """Close the file of a writer that was dropped; nothing is lost: a write was flushed, or failed and said so."""
    with contextlib.suppress(OSError):
        file.close()


def read_lines(path: Path, parse: Callable[[bytes], T]) -> Iterator[T]:
    """The lines of a file; one that a killed run left half written is passed over.

    Raises:
        UsageError: `parse` raised a ValueError, which follows file and line.
    """
    raw = path.read_bytes()
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), 1):
        try:
            yield parse(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number} {error}") from error


def make_folder(path: Path) -> None:
    """Make a folder, and see that files can be made in it.

    Raises:
        UsageError: they cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(
            f"{path} is no folder that can be written to ({error.strerror}): what the run gives would be lost. Nothing "
            "was run; name another folder."
        ) from error


@contextlib.contextmanager
def naming(path: Path | str) -> Generator[None]:
    """Errors of the operating system name the file, as those of opening do and those of writing do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _begins(line: bytes, start: bytes, check: Callable[[bytes], Any]) -> bool:
    """Whether a first line, which may be torn, is one of ours: not merely another's with the same first key."""
    for parse in (check, json.loads):
        with contextlib.suppress(ValueError, RecursionError):
            parse(line)
            return parse is check
    return not line.endswith(b"\n") and start.startswith(line[: len(start)])
