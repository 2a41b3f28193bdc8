"""Parquet: the rows that pyarrow reads from memory, or a refusal."""

import functools
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.fuzz.feed import Feed
from benchmarks.fuzz.law import equal, refused
from zephon.errors import ZephonError
from zephon.formats.parquet import open_parquet
from zephon.types import Bad

TEXTS = [None if i % 7 == 3 else f"text {i % 5} caf\u00e9 " + "x" * (i % 11) for i in range(24)]
COLUMNS: dict[str, Any] = {
    "text": pa.array(TEXTS),
    "number": pa.array(range(24), pa.int32()),
    "blob": pa.array([bytes([i] * i) for i in range(24)]),
    "list": pa.array([None if i % 5 == 0 else list(range(i % 4)) for i in range(24)]),
    "deep": pa.array([{"image": {"bytes": b"x" * i, "path": str(i)}} for i in range(24)]),
}


@functools.cache
def _seeds() -> list[bytes]:
    """Small files, each written another way."""
    ways: list[tuple[list[str], dict[str, Any]]] = [
        (["text", "number"], {"compression": "none", "use_dictionary": False}),
        (["text", "blob"], {"compression": "snappy"}),
        (["text", "list"], {"compression": "zstd", "data_page_version": "2.0"}),
        (["deep"], {"compression": "gzip", "write_page_checksum": True}),
        (["number"], {"use_dictionary": False, "column_encoding": {"number": "DELTA_BINARY_PACKED"}}),
        (["text"], {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}),
    ]
    out = list[bytes]()
    for names, options in ways:
        file = io.BytesIO()
        pq.write_table(
            pa.table({name: COLUMNS[name] for name in names}), file, row_group_size=10, store_schema=False, **options
        )  # pyright: ignore[reportUnknownMemberType]
        out.append(file.getvalue())
    return out


def _bytes(value: Any) -> Any:
    """A value with blobs read."""
    if isinstance(value, Mapping):
        return {key: _bytes(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_bytes(one) for one in value]
    return value.read() if hasattr(value, "read") else value


def parquet(data: bytes, folder: Path) -> str:
    """A small file of six kinds, damaged."""
    feed, path = Feed(data), folder / "file.parquet"
    raw = feed.edit(feed.pick(_seeds())) if not feed.chance(10) else b"PAR1" + feed.rest() + b"PAR1"
    return read(raw, path)


def read(raw: bytes, path: Path) -> str:
    """Read a file with these bytes, and compare with pyarrow, group by group."""
    path.write_bytes(raw)
    reader = None
    try:
        shards, reader = open_parquet({path.name: path})
        count = shards[0].rows
        if count > 10_000:
            reader.read(np.arange(count - 10, count))
            return "a footer that lies, and was believed so far"
        found = reader.read(np.arange(count))
        for i in (0, count - 1) if count else ():
            equal("a place", str(path) in reader.place(i), True)
            equal("a row alone", repr(reader.read(np.array([i]))[0]), repr(found[i]))
        ours = [None if isinstance(row, Bad) else _bytes(row) for row in found]
    except ZephonError as error:
        return refused(error, path)
    finally:
        if reader:
            reader.close()
    at = 0
    for group, size in enumerate(shards[0].groups):
        wanted = _group(raw, group, size)
        for row in range(size):
            if ours[at + row] is not None:
                equal(
                    f"row {row} of group {group}",
                    repr(ours[at + row]),
                    wanted if isinstance(wanted, str) else wanted[row],
                )
        at += size
    equal("rows of all groups", count, at)
    return f"{count} rows, {ours.count(None)} bad"


def _group(raw: bytes, group: int, size: int) -> list[str] | str:
    """The rows of a row group by pyarrow, a row that it has no value of left blank; or why it cannot be read."""
    try:
        file = pq.ParquetFile(pa.BufferReader(raw), page_checksum_verification=True)
        table = file.read_row_group(group, use_threads=False)  # pyright: ignore[reportUnknownMemberType]
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if len(table) != size:
        return f"{len(table)} rows, {size} are promised"
    out = list[str]()
    for row in range(size):
        try:
            out.append(repr(table.slice(row, 1).to_pylist()[0]))
        except (ValueError, OverflowError):
            out.append("")
    return out
