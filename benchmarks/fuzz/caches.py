"""The cache of indexes: what was damaged there is made again or refused, never believed."""

import importlib
import io
import tarfile
from pathlib import Path

import numpy as np

from benchmarks.fuzz.feed import Feed
from benchmarks.fuzz.law import equal, refused
from benchmarks.fuzz.rows import _CODECS, clear, rows_of, shown  # pyright: ignore[reportPrivateUsage]
from zephon.errors import ZephonError
from zephon.formats import index as keeping
from zephon.formats.index import index_files
from zephon.formats.jsonl import JsonlReader
from zephon.formats.tar import TarReader, index_tars
from zephon.types import Bad

importlib.import_module("webdataset.tariterators")  # and with it torch: memory that no input is to blame for

TEXT = b"".join(b'{"n": %d, "text": "%s"}\n%s' % (i, b"x" * (i * 7 % 40), b"\n" * (i % 3 == 0)) for i in range(30))


def _archive() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for i in range(8):
            for suffix, held in (("txt", b"text %d" % i), ("jpg", bytes([i] * 40))):
                member = tarfile.TarInfo(f"{i}.{suffix}")
                member.size = len(held)
                archive.addfile(member, io.BytesIO(held))
    return file.getvalue()


def index_cache(data: bytes, folder: Path) -> str:
    """An index is made, damaged, and used again."""
    feed = Feed(data)
    kind = feed.pick((".jsonl", ".jsonl.gz", ".jsonl.bz2", ".tar"))
    keeping.JOINED_BYTES = 64
    path, cache = folder / f"file{kind}", folder / "cache"
    clear(folder)
    raw = _archive() if kind == ".tar" else TEXT
    if kind in (".jsonl.gz", ".jsonl.bz2"):
        pack = _CODECS[path.suffix][0]
        raw = b"".join(pack(raw[at : at + 200]) for at in range(0, len(raw), 200))
    path.write_bytes(raw)
    first = _rows(path, cache)
    if kind != ".tar":
        equal("rows", first, rows_of(TEXT))
    (at,) = (cache / "index").glob("*.idx")
    at.write_bytes(feed.edit(at.read_bytes()))
    try:
        equal("rows by a damaged index", _rows(path, cache), first)
    except ZephonError as error:
        return refused(error, path)
    finally:
        keeping.JOINED_BYTES = 32 << 10
    return "the same rows"


def _rows(path: Path, cache: Path) -> list[str | None]:
    if path.suffix == ".tar":
        index = index_tars({path.name: path}, cache)[0]
        reader, count = TarReader([index]), index.shard.rows
    else:
        index = index_files({path.name: path}, cache)[0]
        reader, count = JsonlReader([index]), index.shard.rows
    try:
        return [None if isinstance(row, Bad) else shown(row) for row in reader.read(np.arange(count))]
    finally:
        reader.close()
