"""Reading rows of JSONL files by number: one seek and one read for rows that lie together.

A row ends at LF; a CR before it, a byte-order mark at byte 0 and blank lines are harmless. A row is one JSON object. It
means what Python's `json` says (duplicate keys: the last; NaN and Infinity allowed); orjson, twice as fast, reads what
it can and agrees where it does. Bytes that are not UTF-8 are an error, never replaced.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import orjson
from numpy.typing import NDArray

from zephon.errors import DataError
from zephon.index import BLANK, LineIndex
from zephon.types import Row

_NEAR = 16 * 1024
"""Rows closer than this are read in one go: a second call costs what reading 16 KiB from the page cache costs."""

_OPEN_FILES = 64


class JsonlReader:
    """Rows of the shards of one source, by their number in the source.

    Args:
        indexes: one index a shard, in catalogue order.
    """

    def __init__(self, indexes: Sequence[LineIndex]) -> None:
        self._indexes = list(indexes)
        rows = np.asarray([index.shard.rows for index in indexes], dtype=np.int64)
        self._first = np.cumsum(rows) - rows
        self._files: OrderedDict[int, int] = OrderedDict()

    def read(self, rows: NDArray[np.int64]) -> list[Row]:
        """The parsed rows, in the order asked for.

        Raises:
            DataError: a row is no JSON object; names file, line and byte.
        """
        return [self._parse(raw, number) for raw, number in zip(self._raw(rows), rows.tolist(), strict=True)]

    def place(self, row: int) -> str:
        """Where a row is: file, line and byte. Counts lines, so only for messages."""
        shard, start, _ = self._span(row)
        path = self._indexes[shard].shard.path
        line, left = 1, start
        with Path(path).open("rb") as file:
            while left > 0 and (block := file.read(min(left, 1 << 20))):
                line += block.count(b"\n")
                left -= len(block)
        return f"{path}, line {line}, byte {start}"

    def _span(self, row: int) -> tuple[int, int, int]:
        shard = int(np.searchsorted(self._first, row, side="right")) - 1
        starts, local = self._indexes[shard].starts, row - int(self._first[shard])
        return shard, int(starts[local]), int(starts[local + 1])

    def _raw(self, rows: NDArray[np.int64]) -> list[bytes]:
        """Bytes of each row, read in few calls: rows are visited by place and joined while the gaps are small."""
        shards = np.searchsorted(self._first, rows, side="right") - 1
        out: list[bytes] = [b""] * len(rows)
        for shard in map(int, np.unique(shards)):
            where = np.flatnonzero(shards == shard)
            local = rows[where] - self._first[shard]
            order = np.argsort(local, kind="stable")
            where, local = where[order], local[order]
            lo, hi = self._indexes[shard].spans(local)
            breaks = np.flatnonzero(lo[1:] - hi[:-1] > _NEAR) + 1
            file = self._file(shard)
            for a, b in zip([0, *breaks.tolist()], [*breaks.tolist(), len(lo)], strict=True):
                base = int(lo[a])
                data = self._pread(file, int(hi[b - 1]) - base, base, shard)
                for w, x, y in zip(
                    where[a:b].tolist(), (lo[a:b] - base).tolist(), (hi[a:b] - base).tolist(), strict=True
                ):
                    out[w] = data[x:y]
        return out

    def _file(self, shard: int) -> int:
        """A file descriptor of a shard; the least recently used ones are closed."""
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        if len(self._files) >= _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        self._files[shard] = os.open(self._indexes[shard].shard.path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[shard]

    def _pread(self, file: int, size: int, at: int, shard: int) -> bytes:
        data = os.pread(file, size, at)
        while len(data) < size:
            more = os.pread(file, size - len(data), at + len(data))
            if not more:
                path = self._indexes[shard].shard.path
                raise DataError(
                    f"{path}: the file ends at byte {at + len(data)}, before the rows that its index promises. "
                    "It was cut while the run read it. Put the old file back, or start a new run on the new one."
                )
            data += more
        return data

    def _parse(self, raw: bytes, number: int) -> Row:
        try:
            row = orjson.loads(raw)
        except orjson.JSONDecodeError:
            row = self._parse_slowly(raw, number)
        if not isinstance(row, dict):
            raise DataError(f"{self.place(number)}: a row must be a JSON object, this one is {_kind(row)}.")
        return cast(Row, row)

    def _parse_slowly(self, raw: bytes, number: int) -> object:
        """Parse what orjson refuses (lone surrogates, NaN, huge integers), or say exactly what is wrong and where."""
        _, start, _ = self._span(number)
        try:
            text = raw.rstrip(BLANK).decode("utf-8")
        except UnicodeDecodeError as error:
            what, byte = f"byte 0x{raw[error.start]:02x} is not valid UTF-8", start + error.start
        else:
            try:
                return json.loads(text)
            except json.JSONDecodeError as error:
                what, byte = f"{error.msg}", start + len(text[: error.pos].encode())
            except RecursionError:
                what, byte = "the JSON is nested too deeply", start
        place = self.place(number).rsplit(", byte", 1)[0]
        raise DataError(f"{place}, byte {byte}: the row is not valid JSON: {what}. Mend or remove the line.")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a truth value"
    kinds = {list: "an array", str: "a string", int: "a number", float: "a number"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "null")
