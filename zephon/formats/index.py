"""The row index of line-delimited files: where every row starts, found once and kept in a cache.

An index is one file: a line of JSON (padded to 64 bytes), then `rows + 1` little-endian uint64 offsets, the last of
which is the size of the text; for a compressed file that is read in place, `members + 1` offsets of its members in the
file, and as many in the text. All places of rows are bytes of the text, decompressed. It is mapped, not read, so that
ranks of a node share its pages. It is valid for one path, size, modification time and hash of head and tail, and, where
the file needs a decompressed copy, as long as that is there; anything else is indexed again.

Many ranks may start at once. Each index is written under a private name and renamed into place, which is atomic on
local disks and on NFS, so a reader never sees half of one. A lock on the cache folder only spares the others the work:
it vanishes with its process, and where the file system has none (NFS) every rank simply indexes for itself.
"""

import contextlib
import copy
import hashlib
import json
import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zephon.catalogue import Shard
from zephon.errors import DataError
from zephon.formats.blobs import File
from zephon.formats.compressed import MEMBER_BYTES, CompressedFile, Copies, Descriptor, Piece, codec_of
from zephon.formats.lines import Offsets, Rows, scan_block
from zephon.formats.shared import alone, private_name, sweep

logger = logging.getLogger(__name__)

T = TypeVar("T")

Stamp = dict[str, int | str]
"""What tells one state of a file from another."""

Progress = Callable[[int, int], None]
"""Called with bytes of the files done and in all; from any thread, but never twice at once."""

JOINED_BYTES = 32 * 1024
"""Smaller neighbours count as one member, so that a table of members never outgrows the one of rows."""

_FORMAT = 4
_BLOCK = 32 * 1024 * 1024  # bytes one thread takes at a time: 8 blocks in flight stay under 1 GiB with their masks
_THREADS = 8
_MAPPED_BYTES = 256 * 1024  # indexes up to this are read; 1,000 shards of one row need not keep 1,000 files open
_EDGE = 4096  # bytes of head and tail that tell a changed file of the same size and time


class LineIndex:
    """Row offsets of one file.

    Attributes:
        shard: name, path, rows, bytes and content hash of the text; those of a compressed file are of the plain one.
        starts: uint64 [rows + 1]; row `i` lies in bytes `[starts[i], starts[i + 1])`, trailing blanks included.
        codec: how the file is compressed, or None.
        file: the state of the file that was indexed.
        members: uint64 [2, members + 1] where it is read in place: first byte of each in the file and in the text.
        copy: the text, decompressed, where it is not; locked against removal while anybody holds it.
    """

    def __init__(
        self, shard: Shard, starts: Offsets, members: Offsets | None = None, copy: Descriptor | None = None
    ) -> None:
        self.shard, self.starts, self.members, self.copy = shard, starts, members, copy
        self.codec, self.file = codec_of(shard.path), File.at(Path(shard.path))

    def named(self, name: str) -> "LineIndex":
        """The same file under another shard name; in the state that was indexed, whatever lies there by now."""
        other = copy.copy(self)
        other.shard = replace(self.shard, name=name)
        return other

    def spans(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First byte of each row, and the byte behind its last, trailing blanks included.

        Raises:
            DataError: the index is damaged.
        """
        lo, hi = np.asarray(self.starts[rows], np.int64), np.asarray(self.starts[rows + 1], np.int64)
        if (lo < 0).any() or (hi < lo).any() or (hi > self.shard.bytes).any():
            raise DataError(
                f"The cached index of {self.shard.path} is damaged. Remove the cache folder and start again."
            )
        return lo, hi

    def check(self, fd: int) -> None:
        """Refuse a file that is no longer what was indexed.

        Raises:
            DataError: size or modification time differ.
        """
        if not self.file.is_state(os.fstat(fd)):
            raise DataError(
                f"{self.shard.path} was changed while the run reads it: the rows that it would give now are not those "
                "that the run's order was made for. Put the old file back, or start a new run on the new one."
            )


def index_files(files: dict[str, Path], cache: Path, progress: Progress | None = None) -> list[LineIndex]:
    """Index `files` (shard name to path), from `cache` where it still holds, in parallel where it does not.

    Raises:
        DataError: a compressed file is cut or damaged; names the compressed byte.
        UsageError: there is no room for a decompressed copy.
    """
    return from_cache(
        files,
        cache,
        lambda name, path: _load(name, path, cache),
        lambda missing, locked: _build_all(missing, cache, locked, progress),
    )


def from_cache(
    files: dict[str, Path],
    cache: Path,
    load: Callable[[str, Path], T | None],
    build: Callable[[dict[str, Path], bool], dict[str, T]],
) -> list[T]:
    """The index of every file: what `load` finds, and what `build` makes where that is None.

    Builders take turns where the file system has locks; `build` is told whether it holds one, and stores what it makes.
    """
    found = {name: load(name, path) for name, path in files.items()}
    if any(index is None for index in found.values()):
        with alone(cache / "index") as locked:
            if locked:
                sweep(cache / "index")
                sweep(cache / "decompressed")
            found = {name: load(name, files[name]) if index is None else index for name, index in found.items()}
            found.update(build({name: files[name] for name, index in found.items() if index is None}, locked))
    return [index for index in found.values() if index is not None]


def _cache_file(path: Path, cache: Path) -> Path:
    return cache / "index" / (hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32] + ".idx")


def _copy_file(path: Path, stamp: Stamp, cache: Path) -> Path:
    """Where the decompressed copy of one state of a file lies."""
    state = hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:16]
    return cache / "decompressed" / f"{_cache_file(path, cache).stem}-{state}.jsonl"


def stamp_of(path: Path, layout: int | str) -> Stamp:
    """What must be unchanged for an index to hold; `layout` is the kind of index, and its version."""
    stat = path.stat()
    with path.open("rb") as file:
        head = file.read(_EDGE)
        file.seek(max(0, stat.st_size - _EDGE))
        edges = hashlib.sha256(head + file.read(_EDGE)).hexdigest()[:32]
    return {"format": layout, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "edges": edges}


def _load(name: str, path: Path, cache: Path) -> LineIndex | None:
    """The cached index of `path`, or None where there is none that still holds."""

    def use(stamp: Stamp, meta: dict[str, Any], offsets: Offsets) -> LineIndex | None:
        rows, members, size = int(meta["rows"]), int(meta["members"]), int(meta["size"])
        if len(offsets) != rows + 1 + (2 * (members + 1) if members else 0):
            return None
        copy = None
        if codec_of(path) and not members and not (copy := Copies.find(_copy_file(path, stamp, cache), size)):
            return None
        table = offsets[rows + 1 :].reshape(2, members + 1) if members else None
        return LineIndex(Shard(name, str(path), rows, size, meta["sha256"]), offsets[: rows + 1], table, copy)

    return load_kept(path, cache, _FORMAT, use)


def load_kept(
    path: Path, cache: Path, layout: int | str, use: Callable[[Stamp, dict[str, Any], Offsets], T | None]
) -> T | None:
    """What `use` makes of the stamp, the first line and the numbers of a cached index; None where none holds.

    A KeyError, TypeError or ValueError of `use` means that the index is damaged.
    """
    at = _cache_file(path, cache)
    try:
        with at.open("rb") as file:
            head = file.readline()
        meta = json.loads(head)
        stamp = stamp_of(path, layout)
        if {key: meta.get(key) for key in stamp} != stamp:
            return None
        numbers = _offsets(at, len(head))
        if meta.pop("check") != _check(meta, [numbers]):
            raise ValueError("its checksum does not fit")
        return use(stamp, meta, numbers)
    except OSError:
        path.stat()  # the data file itself must be there; for an index any reason is good enough
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        logger.warning("The index %s is damaged; indexing %s again.", at, path)
        return None


def _check(about: dict[str, Any], numbers: list[Offsets]) -> int:
    """A checksum over a whole index: rows at damaged offsets could be halves of two."""
    check = 0
    for array in numbers:
        check = zlib.crc32(array.data, check)
    return zlib.crc32(json.dumps(about).encode(), check)


def _offsets(at: Path, start: int) -> Offsets:
    """Offsets from an index file: mapped, or read where they are few, since every mapping holds an open file."""
    count, odd = divmod(at.stat().st_size - start, 8)
    if odd:
        raise ValueError(f"{odd} bytes too many")
    if 8 * count > _MAPPED_BYTES:
        with contextlib.suppress(OSError):  # too many open files
            return np.memmap(at, dtype="<u8", mode="r", offset=start, shape=(count,))
    return np.fromfile(at, dtype="<u8", count=count, offset=start)


class Meter:
    """Sums up what several threads have done, and stops them when the result is no longer wanted."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._lock, self._done, self.stopped = threading.Lock(), 0, False

    def add(self, size: int) -> None:
        """Count `size` more bytes."""
        with self._lock:
            if self.stopped:
                raise CancelledError
            self._done += size
            if self._progress:
                self._progress(self._done, self._total)


@dataclass
class _Scan:
    """What the pass over one file finds."""

    starts: list[Offsets] = field(default_factory=list[Offsets])
    hashes: list[bytes] = field(default_factory=list[bytes])  # of each block
    size: int = 0
    members: Offsets | None = None
    copy: Descriptor | None = None

    def add(self, starts: Offsets, block_hash: bytes, size: int) -> None:
        """Take in one more block."""
        self.starts.append(starts)
        self.hashes.append(block_hash)
        self.size += size


def _build_all(files: dict[str, Path], cache: Path, locked: bool, progress: Progress | None) -> dict[str, LineIndex]:
    """Index all of `files` over a pool of threads (reading, decompressing, comparing and hashing release the GIL).

    Plain files go block by block, compressed ones as a whole: their members are only found one after the other.
    """
    stamps = {name: stamp_of(path, _FORMAT) for name, path in files.items()}
    total = sum(int(stamp["bytes"]) for stamp in stamps.values())
    if total > _BLOCK:
        logger.info("Indexing %d files, %.1f MB, once; the index is kept in %s.", len(files), total / 1e6, cache)
    built, meter, copies = dict[str, LineIndex](), Meter(total, progress), Copies(cache / "decompressed", locked)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        try:
            blocks = {name: _submit(pool, path, stamps[name], copies, meter) for name, path in files.items()}
            for name, path in files.items():
                scan = blocks.pop(name)()
                stamp = stamps[name]
                starts = np.concatenate([*scan.starts, np.array([scan.size], np.uint64)])
                digest = hashlib.sha256(b"".join(scan.hashes)).hexdigest()
                shard = Shard(name, str(path), len(starts) - 1, scan.size, digest)
                built[name] = LineIndex(shard, starts, scan.members, scan.copy)
                if stamp_of(path, _FORMAT) != stamp:
                    raise DataError(f"{path} was changed while it was indexed. Start again when it is complete.")
                _store(stamp, built[name], cache)
        except BaseException:
            meter.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return built


def _submit(pool: ThreadPoolExecutor, path: Path, stamp: Stamp, copies: Copies, meter: Meter) -> Callable[[], _Scan]:
    """Have a file scanned; returns what waits for the result."""
    if codec := codec_of(path):
        at = _copy_file(path, stamp, copies.folder.parent)
        return pool.submit(_scan_compressed, CompressedFile(path, codec), at, copies, meter).result
    size = int(stamp["bytes"])
    blocks = [pool.submit(scan_block, path, start, min(_BLOCK, size - start)) for start in range(0, size or 1, _BLOCK)]

    def join() -> _Scan:
        scan = _Scan()
        for block in blocks:
            scan.add(*block.result())
            meter.add(block.result()[2])
        return scan

    return join


def _scan_compressed(file: CompressedFile, at: Path, copies: Copies, meter: Meter) -> _Scan:
    """One pass over a compressed file; a second one, into a copy at `at`, where it cannot be read in place."""
    told = 0

    def scanned(scan: _Scan, blocks: Iterable[bytes]) -> Iterator[bytes]:
        nonlocal told
        rows = Rows()
        for block in blocks:
            yield block
            scan.add(*rows.of(block))
            meter.add(max(0, file.at - told))
            told = max(told, file.at)

    scan, layout = _Scan(), _Layout()
    deque(scanned(scan, file.blocks(_BLOCK, layout.add)), maxlen=0)
    if not scan.starts and layout.seekable:
        scan.add(*Rows().of(b""))  # as of an empty plain file
    if layout.seekable:
        scan.members = layout.table(file.bytes)
    else:
        scan = _Scan()
        scan.copy = copies.write(at, file, scanned(scan, file.blocks(_BLOCK)))
    meter.add(file.bytes - told)
    return scan


class _Layout:
    """Where the members of a file begin, noted while it is streamed."""

    def __init__(self) -> None:
        self._starts, self._size = list[tuple[int, int]](), 0
        self._member, self._begin = -1, 0
        self.seekable = True

    def add(self, piece: Piece) -> bool:
        """Note one more piece; False where its member is too large to be read in place."""
        if piece.start != self._member:
            self._member, self._begin = piece.start, self._size
            if not self._starts or self._size - self._starts[-1][1] >= JOINED_BYTES:
                self._starts.append((piece.start, self._size))
        self._size += len(piece.data)
        self.seekable = self._size - self._begin <= MEMBER_BYTES
        return self.seekable

    def table(self, size: int) -> Offsets:
        """What `LineIndex.members` holds, for a file of `size` bytes."""
        return np.array([*(self._starts or [(0, 0)]), (size, self._size)], np.uint64).T.copy()


def _store(stamp: Stamp, index: LineIndex, cache: Path) -> None:
    shard, count = index.shard, 0 if index.members is None else index.members.shape[1] - 1
    about = {"rows": shard.rows, "members": count, "size": shard.bytes, "sha256": shard.sha256}
    numbers = [index.starts] if index.members is None else [index.starts, index.members]
    keep(Path(shard.path), cache, {**stamp, **about}, numbers)


def keep(path: Path, cache: Path, about: dict[str, Any], numbers: list[Offsets]) -> None:
    """Keep an index of `path`: what `load_kept` gives back. Where that cannot be written the run goes on without."""
    numbers = [np.ascontiguousarray(array, "<u8") for array in numbers]
    meta = json.dumps({**about, "check": _check(about, numbers)}).encode()
    meta += b" " * (-(len(meta) + 1) % 64) + b"\n"
    at = _cache_file(path, cache)
    private = private_name(at)
    try:
        at.parent.mkdir(parents=True, exist_ok=True)
        with private.open("wb") as file:
            file.write(meta)
            for array in numbers:
                file.write(array.data)
        private.replace(at)
    except OSError as error:
        logger.warning("Cannot keep the index of %s in %s (%s); it will be made again next time.", path, at, error)
        with contextlib.suppress(OSError):
            private.unlink()
