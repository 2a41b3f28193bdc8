"""Skip lists: which bad rows a run has left out, one JSON object a line.

A line is `{"source": ..., "place": ..., "reason": ..., "step": ..., "lane": ...}`. Every rank writes a file of its own,
empty where no row was bad. A row may stand there twice, because sources repeat, or because a run was killed after a
step that it had not saved and took again: `read_skips` counts it once.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from zephon.errors import UsageError
from zephon.run.lines import LineWriter, read_lines
from zephon.types import Skip

logger = logging.getLogger(__name__)

TOLD = 10
"""Bad rows of a source that are logged one by one; then every tenfold number of them."""

_KINDS = [str, str, str, int, int]  # of the values of a line


class SkipWriter:
    """Appends to one skip list, and logs some.

    Args:
        path: the file, or None to log alone; folders are made. A line that a killed run left half written is cut off.

    Raises:
        UsageError: the file is there and is no skip list; it is left as it is.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._lines = path, LineWriter(path, "skip list", b'{"source": ', _parse) if path else None
        self._counts = Counter[str]()

    def write(self, skips: Iterable[Skip]) -> None:
        """Add lines; on disk, as far as this process goes, on return."""
        skips = list(skips)
        for one in skips:
            self._counts[one.source] += 1
            count = self._counts[one.source]
            if count <= TOLD or str(count).strip("0") == "1":
                where = f" (all are in {self._path})" if self._path else ""
                logger.warning(
                    "Source %r: skipped %s: %s [%d so far%s]", one.source, one.place, one.reason, count, where
                )
        if self._lines and skips:
            self._lines.write(one._asdict() for one in skips)

    def close(self) -> None:
        """Close the file."""
        if self._lines:
            self._lines.close()


def read_skips(path: Path) -> list[Skip]:
    """The bad rows of a skip list, or of all lists in a folder, each once, by source and place.

    Raises:
        UsageError: nothing there, or a line is damaged.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not all(file.is_file() for file in files) or not path.exists():
        raise UsageError(f"{path} is neither a skip list nor a folder with *.jsonl skip lists.")
    found: dict[tuple[str, str], Skip] = {}
    for file in files:
        for one in read_lines(file, _parse):
            first = found.get((one.source, one.place))
            if first is None or one.step < first.step:
                found[one.source, one.place] = one
    return [found[key] for key in sorted(found)]


def _parse(line: bytes) -> Skip:
    try:
        one = Skip(**json.loads(line))
        if [type(value) for value in one] != _KINDS:
            raise TypeError("a value of another kind")
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError("is no line of a skip list.") from error
    return one
