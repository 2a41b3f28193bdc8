"""JSONL, plain and compressed: the rows that Python's own libraries read, line by line."""

import bz2
import gzip
import importlib
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz.feed import Feed
from benchmarks.fuzz.law import LossError, equal, refused
from zephon.errors import ZephonError
from zephon.formats import compressed as members
from zephon.formats import index
from zephon.formats.index import index_files
from zephon.formats.jsonl import JsonlReader
from zephon.formats.lines import BLANK
from zephon.types import Bad
from zephon.worker import RowReader

zstd: Any = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

PIECES = (
    b'{"text": "a"}', b"\n", b"\n", b"\r\n", b"\r", b" ", b"\t", b"\x0b", b"\x0c", b"\0", b"\xff", b"\xef\xbb\xbf",
    b"{}",
    b'{"a": 1, "a": 2}', b"[]", b"null", b"{", b"}", b'"', b",", b'{"n": 1e999}', b'{"n": NaN, "m": -Infinity}',
    b'{"n": 18446744073709551616}', b'{"n": -9223372036854775809, "z": -0, "f": 1.0}', b'{"s": "\\ud800"}',
    b'{"s": "caf\xc3\xa9 \xe2\x80\xa8 \xc2\x85"}', b'{"d": ' + b"[" * 1500 + b"]" * 1500 + b"}", b"[" * 2500,
    b'{"n": ' + b"9" * 5000 + b"}", b'{"n": 0.1e-7, "k": {"\\u0000": [true, null, {"x": []}]}}',
    b"{'a': 1}", b'{"a": 1,}',
    b'{"n": 1.7976931348623157e308, "t": 4.9e-324, "u": 123456789.123456789e-20}',
    b"\xed\xa0\x80", b'{"\xed\xa0\x80": 1}',
)  # fmt: skip
"""Of a file of lines: right ones, wrong ones, and what separates them."""


def text(feed: Feed, most: int = 40) -> bytes:
    """A file of lines."""
    parts = [feed.pick(PIECES) if not feed.chance(8) else feed.take(feed.number(20)) for _ in range(feed.number(most))]
    if feed.chance(2):  # mostly right rows, one a line
        parts = [b'{"text": "%d"}\n' % i + part for i, part in enumerate(parts)]
    return feed.edit(b"".join(parts), 2)


def rows_of(raw: bytes) -> list[str | None]:
    """What Python makes of every line that is not blank: a row as `repr` has it, or None for what is no JSON object."""
    lines = [line for line in raw.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip(BLANK)]
    out = list[str | None]()
    for line in lines:
        try:
            value = json.loads(line.rstrip(BLANK).decode())
        except (ValueError, RecursionError):
            value = None
        out.append(shown(value) if isinstance(value, dict) else None)
    return out


def shown(row: Any) -> str:
    """A row as a string that tells 1 from 1.0 and True; whole numbers beyond 64 bits are told as floats."""
    try:
        return repr(_narrow(row))
    except RecursionError:
        return "deep"


def _narrow(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value) if abs(value) < 10**308 else "huge"
    if isinstance(value, dict):
        return {key: _narrow(one) for key, one in value.items()}
    return [_narrow(one) for one in value] if isinstance(value, list) else value


def check_rows(reader: RowReader, wanted: Sequence[str | None], path: Path, feed: Feed) -> str:
    """Rows in three groupings are those of the oracle; bad ones are named by file.

    Raises:
        LossError: they are not.
    """
    count = len(wanted)
    found = reader.read(np.arange(count))
    equal("rows", [None if isinstance(row, Bad) else shown(row) for row in found], list(wanted))
    order = np.array([feed.number(count - 1) for _ in range(5)] if count else [], np.int64)
    for rows in (np.arange(count)[::-1], order, order[:1]):
        again = [shown(row) for row in reader.read(rows)]
        equal(f"rows {rows.tolist()}, read together", again, [shown(found[i]) for i in rows.tolist()])
    for i, row in enumerate(found):
        for told in (reader.address(i), reader.place(i, row.offset)) if isinstance(row, Bad) else ():
            if str(path) not in told:
                raise LossError(f"row {i} is bad, and its place is {told!r}")
    return f"{count} rows, {sum(isinstance(row, Bad) for row in found)} bad"


def clear(folder: Path) -> None:
    """Remove what an index cache holds."""
    for kind in ("index", "decompressed"):
        for left in (folder / "cache" / kind).glob("*"):
            left.unlink()


def read_lines(path: Path, wanted: Sequence[str | None], folder: Path, feed: Feed) -> str:
    """Index and read a file of lines as a stream does."""
    one = index_files({path.name: path}, folder / "cache")[0]
    equal("rows by the index", one.shard.rows, len(wanted))
    reader = JsonlReader([one])
    try:
        return check_rows(reader, wanted, path, feed)
    finally:
        reader.close()


def jsonl(data: bytes, folder: Path) -> str:
    """A plain file; blocks of the index are small at times, so that rows cross them."""
    feed, path = Feed(data), folder / "file.jsonl"
    clear(folder)
    index._BLOCK = feed.pick((1 << 25, 64, 7, 5))  # pyright: ignore[reportPrivateUsage]
    raw = feed.rest() if feed.chance(3) else text(feed)
    raw = raw[: 64 * index._BLOCK]  # pyright: ignore[reportPrivateUsage]
    path.write_bytes(raw)
    try:
        return read_lines(path, rows_of(raw), folder, feed)
    except ZephonError as error:
        raise LossError(f"a plain file of lines was refused: {error}") from error
    finally:
        index._BLOCK = 1 << 25  # pyright: ignore[reportPrivateUsage]


def _unxz(raw: bytes) -> bytes:
    """All streams; zeros in fours may come between them, which `lzma.decompress` takes for the end."""
    out, rest = list[bytes](), raw
    while rest:
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        out.append(decoder.decompress(rest))
        if not decoder.eof:
            raise EOFError
        rest = decoder.unused_data
        zeros = len(rest) - len(rest.lstrip(b"\0"))
        rest = rest[zeros - zeros % 4 :]
    return b"".join(out)


_CODECS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    ".gz": (lambda raw: gzip.compress(raw, 1, mtime=0), gzip.decompress),
    ".zst": (lambda raw: zstd.compress(raw, options={zstd.CompressionParameter.checksum_flag: 1}), zstd.decompress),
    ".bz2": (lambda raw: bz2.compress(raw, 1), bz2.decompress),
    ".xz": (lambda raw: lzma.compress(raw, check=lzma.CHECK_CRC32, preset=0), _unxz),
}
_PADS = (b"\0\0\0\0", b"\0", b"\x5a\x2a\x4d\x18\x05\0\0\0hello", b"x", b"\x1f\x8b")


def compressed(data: bytes, folder: Path) -> str:
    """Members of any number, damaged at times; read in place or from a copy."""
    feed = Feed(data)
    clear(folder)
    suffix = feed.pick(list(_CODECS))
    pack, unpack = _CODECS[suffix]
    path = folder / f"file.jsonl{suffix}"
    index.MEMBER_BYTES, index.JOINED_BYTES = feed.pick((8 << 20, 40, 3)), feed.pick((32 << 10, 10, 1))
    members._OUT, members._IN = feed.pick((1 << 20, 13, 1)), feed.pick((64 << 10, 29, 8))  # pyright: ignore[reportPrivateUsage]
    if feed.chance(6):
        raw = feed.rest()
    else:
        plain, parts = text(feed, 12), list[bytes]()
        for _ in range(feed.number(4)):
            size = feed.number(len(plain))
            parts.append(pack(plain[:size]) + (feed.pick(_PADS) if feed.chance(6) else b""))
            plain = plain[size:]
        raw = feed.edit(b"".join([*parts, pack(plain)]), 2 if feed.chance(2) else 0)
    path.write_bytes(raw)
    try:
        found = unpack(raw) if raw else b""
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zstd.ZstdError):
        found = None
    try:
        return read_lines(path, ["the oracle fails"] if found is None else rows_of(found), folder, feed)
    except ZephonError as error:
        return refused(error, path)
    finally:
        index.MEMBER_BYTES, index.JOINED_BYTES = 8 << 20, 32 << 10
        members._OUT, members._IN = 1 << 20, 64 << 10  # pyright: ignore[reportPrivateUsage]
