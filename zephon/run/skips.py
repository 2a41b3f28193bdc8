"""Skip lists: which bad rows a run has left out, one JSON object a line.

A line is `{"source": ..., "place": ..., "reason": ..., "step": ..., "lane": ...}`. Every rank writes a file of its own.
A row may stand there twice, because sources repeat, or because a run was killed after a step that it had not saved and
took again: `read_skips` counts it once.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from zephon.errors import UsageError
from zephon.types import Skip

logger = logging.getLogger(__name__)

TOLD = 10
"""Bad rows of a source that are logged one by one; then every tenfold number of them."""


_KINDS = [str, str, str, int, int]  # of the values of a line


class SkipWriter:
    """Appends to one skip list, which is made with its first line, and logs some.

    Args:
        path: the file, or None to log alone; folders are made.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._file = path, None
        self._counts = Counter[str]()

    def write(self, skips: Iterable[Skip]) -> None:
        """Add lines; on disk, as far as this process goes, on return."""
        for one in skips:
            self._counts[one.source] += 1
            count = self._counts[one.source]
            if count <= TOLD or str(count).strip("0") == "1":
                where = f" (all are in {self._path})" if self._path else ""
                logger.warning(
                    "Source %r: skipped %s: %s [%d so far%s]", one.source, one.place, one.reason, count, where
                )
            if self._path:
                self._open(self._path).write((json.dumps(one._asdict()) + "\n").encode())
        if self._file:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()

    def _open(self, path: Path) -> IO[bytes]:
        if self._file is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        return self._file


def read_skips(path: Path) -> list[Skip]:
    """The bad rows of a skip list, or of all lists in a folder, each once, by source and place.

    Raises:
        UsageError: nothing there, or a line is damaged; one that a killed run left half written is passed over.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not all(file.is_file() for file in files) or not path.exists():
        raise UsageError(f"{path} is neither a skip list nor a folder with *.jsonl skip lists.")
    found: dict[tuple[str, str], Skip] = {}
    for file in files:
        raw = file.read_bytes()
        for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), 1):
            try:
                one = Skip(**json.loads(line))
                if [type(value) for value in one] != _KINDS:
                    raise TypeError("a value of another kind")
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(f"{file}, line {number} is no line of a skip list.") from error
            first = found.get((one.source, one.place))
            if first is None or one.step < first.step:
                found[one.source, one.place] = one
    return [found[key] for key in sorted(found)]
