"""The row index of line-delimited files: where every row starts, found once and kept in a cache.

An index is one file: a line of JSON (padded to 64 bytes), then `rows + 1` little-endian uint64 offsets, the last of
which is the size of the data file. It is mapped, not read, so that ranks of a node share its pages. It is valid for one
path, size, modification time and hash of head and tail; anything else is indexed again.

Many ranks may start at once. Each index is written under a private name and renamed into place, which is atomic on
local disks and on NFS, so a reader never sees half of one. A lock on the cache folder only spares the others the work:
it vanishes with its process, and where the file system has none (NFS) every rank simply indexes for itself.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from zephon.catalogue import Shard

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_FORMAT = 1
_BLOCK = 32 * 1024 * 1024  # bytes one thread takes at a time: 8 blocks in flight stay under 1 GiB with their masks
_EDGE = 4096  # bytes of head and tail that tell a changed file of the same size and time
BLANK = b" \t\r\n\x0b\x0c"
"""ASCII white space: a line of nothing else is no row."""

_BOM = b"\xef\xbb\xbf"

Offsets = NDArray[np.uint64]


class LineIndex:
    """Row offsets of one file.

    Attributes:
        shard: name, path, rows, bytes and content hash of the file.
        starts: uint64 [rows + 1]; row `i` lies in bytes `[starts[i], starts[i + 1])`, trailing blanks included.
    """

    def __init__(self, shard: Shard, starts: Offsets) -> None:
        self.shard, self.starts = shard, starts

    def spans(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First byte of each row, and the byte behind its last, trailing blanks included."""
        return np.asarray(self.starts[rows], np.int64), np.asarray(self.starts[rows + 1], np.int64)


def index_files(files: dict[str, Path], cache: Path, progress: Progress | None = None) -> list[LineIndex]:
    """Index `files` (shard name to path), from `cache` where it still holds, in parallel where it does not."""
    cache = cache / "index"
    found = {name: _load(name, path, cache) for name, path in files.items()}
    if all(found.values()):
        return [index for index in found.values() if index]
    with _lock(cache) as locked:
        if locked:
            _sweep(cache)
        missing: dict[str, Path] = {}
        for name, path in files.items():
            found[name] = found[name] or _load(name, path, cache)
            if found[name] is None:
                missing[name] = path
        found.update(_build_all(missing, cache, progress))
    return [index for index in found.values() if index]


def _cache_file(path: Path, cache: Path) -> Path:
    return cache / (hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32] + ".idx")


def _stamp(path: Path) -> dict[str, int | str]:
    """What must be unchanged for an index to hold."""
    stat = path.stat()
    with path.open("rb") as file:
        head = file.read(_EDGE)
        file.seek(max(0, stat.st_size - _EDGE))
        edges = hashlib.sha256(head + file.read(_EDGE)).hexdigest()[:32]
    return {"format": _FORMAT, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "edges": edges}


def _load(name: str, path: Path, cache: Path) -> LineIndex | None:
    """The cached index of `path`, or None where there is none that still holds."""
    at = _cache_file(path, cache)
    try:
        with at.open("rb") as file:
            head = file.readline()
        meta = json.loads(head)
        stamp = _stamp(path)
        rows, size = int(meta["rows"]), at.stat().st_size
        if {key: meta.get(key) for key in stamp} != stamp or size != len(head) + 8 * (rows + 1):
            return None
        starts = np.memmap(at, dtype="<u8", mode="r", offset=len(head), shape=(rows + 1,))
        return LineIndex(Shard(name, str(path), rows, int(meta["bytes"]), meta["sha256"]), starts)
    except OSError:
        path.stat()  # the data file itself must be there; for an index any reason is good enough
        return None
    except (ValueError, KeyError, TypeError):
        logger.warning("The index %s is damaged; indexing %s again.", at, path)
        return None


def _build_all(files: dict[str, Path], cache: Path, progress: Progress | None) -> dict[str, LineIndex]:
    """Index all of `files`, block by block over a pool of threads (reading, comparing and hashing release the GIL)."""
    stamps = {name: _stamp(path) for name, path in files.items()}
    total = sum(int(stamp["bytes"]) for stamp in stamps.values())
    if total > _BLOCK:
        logger.info("Indexing %d files, %.1f MB, once; the index is kept in %s.", len(files), total / 1e6, cache)
    done, built = 0, dict[str, LineIndex]()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        blocks = {
            name: [pool.submit(_scan, path, start) for start in range(0, int(stamps[name]["bytes"]) or 1, _BLOCK)]
            for name, path in files.items()
        }
        for name, path in files.items():
            starts, digest = [np.empty(0, np.uint64)], hashlib.sha256()
            for part in blocks.pop(name):
                some, block_hash, size = part.result()
                starts.append(some)
                digest.update(block_hash)
                done += size
                if progress:
                    progress(done, total)
            stamp = stamps[name]
            offsets = np.append(np.concatenate(starts), np.uint64(stamp["bytes"]))
            shard = Shard(name, str(path), len(offsets) - 1, int(stamp["bytes"]), digest.hexdigest())
            if _stamp(path) == stamp:  # a file that changes underneath is not worth keeping
                _store(stamp, shard, offsets, cache)
            built[name] = LineIndex(shard, offsets)
    return built


def _scan(path: Path, start: int) -> tuple[Offsets, bytes, int]:
    """Offsets of the non-blank lines that start in one block, the block's hash and its size."""
    with path.open("rb") as file:
        file.seek(start)
        block = file.read(_BLOCK)
        starts = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")).astype(np.uint64) + np.uint64(start + 1)
        if start == 0:
            starts = np.concatenate([np.array([len(_BOM) if block.startswith(_BOM) else 0], np.uint64), starts])
        else:
            file.seek(start - 1)
            if file.read(1) == b"\n":  # this block begins with a line
                starts = np.concatenate([np.array([start], np.uint64), starts])
        end = start + len(block)
        starts = starts[starts < end]  # a line that starts at the next block belongs to it
        first = np.frombuffer(block, np.uint8)[(starts - np.uint64(start)).astype(np.int64)]
        doubtful = np.flatnonzero(np.isin(first, np.frombuffer(BLANK, np.uint8)))
        blank = [i for i in doubtful.tolist() if _is_blank(file, block, start, int(starts[i]))]
    return np.delete(starts, blank), hashlib.sha256(block).digest(), len(block)


def _is_blank(file: BinaryIO, block: bytes, start: int, line: int) -> bool:
    """Whether the line at `line` holds ASCII white space only."""
    stop = block.find(b"\n", line - start)
    if stop >= 0:
        return not block[line - start : stop].strip(BLANK)
    if block[line - start :].strip(BLANK):
        return False
    file.seek(start + len(block))
    while more := file.readline(1 << 16):
        if more.strip(BLANK):
            return False
        if more.endswith(b"\n"):
            break
    return True


def _store(stamp: dict[str, int | str], shard: Shard, starts: Offsets, cache: Path) -> None:
    """Keep an index; where the cache cannot be written the run goes on without."""
    meta = json.dumps({**stamp, "rows": shard.rows, "sha256": shard.sha256}).encode()
    meta += b" " * (-(len(meta) + 1) % 64) + b"\n"
    at = _cache_file(Path(shard.path), cache)
    private = at.with_name(f"{at.name}.tmp-{socket.gethostname()}-{os.getpid()}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with private.open("wb") as file:
            file.write(meta)
            file.write(starts.astype("<u8").tobytes())
        private.replace(at)
    except OSError as error:
        logger.warning(
            "Cannot keep the index of %s in %s (%s); it will be made again next time.", shard.path, at, error
        )
        with contextlib.suppress(OSError):
            private.unlink()


@contextlib.contextmanager
def _lock(cache: Path) -> Generator[bool]:
    """Hold the cache folder while indexing; yields whether the file system could lock it."""
    fd, locked = -1, False
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fd = os.open(cache, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
        locked = True
    except OSError as error:
        logger.info("No lock on %s (%s); every process indexes for itself.", cache, error)
    try:
        yield locked
    finally:
        if fd >= 0:
            os.close(fd)


def _sweep(cache: Path) -> None:
    """Remove what indexers of this machine left when they were killed; nobody else writes while we hold the lock."""
    for left in cache.glob(f"*.tmp-{socket.gethostname()}-*"):
        with contextlib.suppress(OSError):
            left.unlink()
