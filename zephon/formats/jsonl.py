"""Reading rows of JSONL files by number: one seek and one read for rows that lie together.

A row ends at LF; a CR before it, a byte-order mark at byte 0 and blank lines are harmless. A row is one JSON object. It
means what Python's `json` says (duplicate keys: the last; NaN and Infinity allowed); orjson, twice as fast, reads what
it can and agrees where it does, but for whole numbers beyond 64 bits, which it may make floats. Bytes that are not
UTF-8 are an error, never replaced.

Rows of compressed files are read from the members they lie in, of which the last used are kept, or from the file's
decompressed copy. Several threads may read at once: a file is closed when the last of them lets go of it.
"""

import functools
import json
from collections.abc import Sequence
from typing import cast

import numpy as np
import orjson
from numpy.typing import NDArray

from zephon.errors import DataError
from zephon.formats.blobs import OpenFiles, open_files
from zephon.formats.cache import ByteCache
from zephon.formats.compressed import Codec, Descriptor, decompress
from zephon.formats.index import LineIndex
from zephon.formats.lines import BLANK, ROW_BYTES, Offsets
from zephon.formats.parts import by_part, part_of, read_near
from zephon.formats.steady import pread
from zephon.types import Bad, Row

OPEN_FILES = open_files(512, 3)
"""Files that the readers of a stream keep open, together: two streams, as of training and validation, find room."""

KEPT_BYTES = 32 * 1024 * 1024
"""Decompressed members that a reader keeps."""


class JsonlReader:
    """Rows of the shards of one source, by their number in the source. Several threads may read.

    Args:
        indexes: one index a shard, in catalogue order.
        kept: keeps members of compressed shards; readers may share one.
        open_files: files that it keeps open.
    """

    def __init__(
        self, indexes: Sequence[LineIndex], kept: ByteCache | None = None, open_files: int = OPEN_FILES
    ) -> None:
        self._indexes = list(indexes)
        rows = np.asarray([index.shard.rows for index in indexes], dtype=np.int64)
        self._first = np.cumsum(rows) - rows
        self.row_bytes = max(1, sum(index.shard.bytes for index in indexes) // max(1, int(rows.sum())))
        kept = kept or ByteCache(KEPT_BYTES, KEPT_BYTES)
        self._members = [
            Members(index.shard.path, index.codec, index.members, kept)
            if index.codec and index.members is not None
            else None
            for index in indexes
        ]
        self._files = OpenFiles(open_files)

    def read(self, rows: NDArray[np.int64]) -> list[Row | Bad]:
        """The parsed rows, in the order asked for; `Bad` in place of one that is no JSON object."""
        raws = self._raw(rows)
        try:
            found = list(map(orjson.loads, raws))
        except orjson.JSONDecodeError:
            found = []
        if len(found) == len(raws) and set(map(type, found)) == {dict}:
            return found
        return [_parse(raw) for raw in raws]

    def address(self, row: int, offset: int = 0) -> str:
        """File, row (from 0; blank lines have no number) and byte; of the text, where the file is compressed."""
        shard, start, _ = self._span(row)
        return f"{self._indexes[shard].shard.path}, row {row - int(self._first[shard])}, byte {start + offset}"

    def place(self, row: int, offset: int = 0) -> str:
        """File, line and byte; of the decompressed text, where the file is compressed. Counts lines."""
        shard, start, _ = self._span(row)
        index, line, at = self._indexes[shard], 1, 0
        while at < start:
            block = self._pread(self._file(shard), shard, at, min(start - at, 1 << 20))
            line, at = line + block.count(b"\n"), at + len(block)
        return f"{index.shard.path}, line {line}, {'decompressed byte' if index.codec else 'byte'} {start + offset}"

    def _span(self, row: int) -> tuple[int, int, int]:
        shard, local = part_of(self._first, row)
        starts = self._indexes[shard].starts
        return shard, int(starts[local]), int(starts[local + 1])

    def _raw(self, rows: NDArray[np.int64]) -> list[bytes]:
        """Bytes of each row, read in few calls."""
        out: list[bytes] = [b""] * len(rows)
        for shard, where, local in by_part(self._first, rows):
            lo, hi = self._indexes[shard].spans(local)
            hi = np.where(hi - lo > ROW_BYTES, lo, hi)  # nothing is read of what is too long
            file = self._file(shard)
            if not self._indexes[shard].copy:
                self._indexes[shard].check(file.fd)
            found = read_near(lo, hi, functools.partial(self._pread, file, shard))
            for i, raw in zip(where.tolist(), found, strict=True):
                out[i] = raw
        return out

    def _file(self, shard: int) -> Descriptor:
        """A shard that is open."""
        index = self._indexes[shard]
        if copy := index.copy:
            return copy
        assert not index.codec or self._members[shard], "the reader is closed"
        return self._files.get(index.file)

    def _pread(self, file: Descriptor, shard: int, at: int, size: int) -> bytes:
        """`size` bytes of a shard's text from byte `at` on."""
        if members := self._members[shard]:
            return members.read(file.fd, size, at)
        path = self._indexes[shard].shard.path
        data = pread(file.fd, size, at, path)
        while len(data) < size:
            more = pread(file.fd, size - len(data), at + len(data), path)
            if not more:
                raise DataError(
                    f"{path}: the file ends at byte {at + len(data)}, before the rows that its index promises. "
                    "It was cut while the run read it. Put the old file back, or start a new run on the new one."
                )
            data += more
        return data

    def close(self) -> None:
        """Close the files, and let go of copies."""
        self._files.forget(index.file for index in self._indexes)
        for index in self._indexes:
            index.copy = None


class Members:
    """The text of a compressed file whose members are small. Several threads may read.

    Args:
        path: the file, for messages.
        codec: how it is compressed.
        members: where members begin, as in `LineIndex`.
        kept: keeps them.
    """

    def __init__(self, path: str, codec: Codec, members: Offsets, kept: ByteCache) -> None:
        self._path, self._codec, self._kept = path, codec, kept
        self._compressed, self._plain = map(np.asarray, members)

    def read(self, fd: int, size: int, at: int) -> bytes:
        """`size` bytes from byte `at` of the text on; `fd` is the compressed file."""
        member, end = int(np.searchsorted(self._plain, np.uint64(at), side="right")) - 1, at + size
        parts: list[bytes] = []
        while at < end:
            base, stop = int(self._plain[member]), int(self._plain[member + 1])
            whole: bytes = self._kept.get(
                (self, member, None), functools.partial(self._decompress, fd, member, stop - base)
            )
            parts.append(whole[at - base : end - base])
            at, member = stop, member + 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _decompress(self, fd: int, member: int, size: int) -> tuple[bytes, int]:
        """One member and its size, read to its end: only there its checksum is compared."""
        at = first = int(self._compressed[member])
        end = int(self._compressed[member + 1])

        def read(most: int) -> bytes:
            nonlocal at
            data = pread(fd, min(most, end - at), at, self._path)
            at += len(data)
            return data

        pieces, got = list[bytes](), 0
        for piece in decompress(read, self._codec, self._path, first):
            pieces.append(piece.data)
            got += len(piece.data)
            if got > size:
                break
        if got != size:
            raise DataError(
                f"{self._path}: the {self._codec.name} data in compressed bytes {first} to {end} is not the {size} "
                "bytes of text that the index promises: the file was changed while the run read it. Put the old file "
                "back, or start a new run on the new one."
            )
        return b"".join(pieces), size


def _parse(raw: bytes) -> Row | Bad:
    if not raw:
        return Bad(f"the row is longer than {ROW_BYTES:,} bytes, which are the most that is read. Divide or remove it.")
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError:
        row = _parse_slowly(raw)
    if isinstance(row, dict | Bad):
        return cast(Row | Bad, row)
    return Bad(f"a row must be a JSON object, this one is {_kind(row)}.")


def _parse_slowly(raw: bytes) -> object:
    """Parse what orjson refuses (lone surrogates, NaN, huge integers), or say exactly what is wrong and where."""
    try:
        text = raw.rstrip(BLANK).decode("utf-8")
    except UnicodeDecodeError as error:
        what, byte = f"byte 0x{raw[error.start]:02x} is not valid UTF-8", error.start
    else:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            what, byte = f"{error.msg}", len(text[: error.pos].encode())
        except RecursionError:
            what, byte = "the JSON is nested too deeply", 0
        except ValueError as error:  # a number of thousands of digits
            what, byte = str(error), 0
    return Bad(f"the row is not valid JSON: {what}. Mend or remove the line.", byte)


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a truth value"
    kinds = {list: "an array", str: "a string", int: "a number", float: "a number"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "null")
