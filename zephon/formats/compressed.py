"""Compressed files: streamed member by member, and the decompressed copies of those that cannot be read in place.

gzip, zstd, bzip2 and xz files are rows of members (gzip's word; frames, streams) that decompress alone. Where all are
small (bgzip, pbzip2, parts joined with cat) rows are read in place; it costs the members they lie in. Within a larger
member a row costs all that comes before it, so such a file gets a decompressed copy in the cache folder.

A stream holds no more than one block, whatever the file claims to hold, and copies are bounded in bytes. There is no
limit to the ratio: text of few distinct rows rightly shrinks a thousandfold.
"""

import bz2
import contextlib
import errno
import fcntl
import functools
import importlib
import logging
import lzma
import os
import shlex
import shutil
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from zephon.errors import DataError, RecipeError, UsageError
from zephon.formats.shared import private_name

logger = logging.getLogger(__name__)

MEMBER_BYTES = 8 * 1024 * 1024
"""A file with a larger member, decompressed, is not read in place: every row of it would cost tens of milliseconds."""

COPIES_BYTES, COPIES_SHARE = 64 * 1024**3, 0.8
"""What all copies of a cache folder may take: bytes, and the share of what the disk has free without them."""

_IN, _OUT = 64 * 1024, 1024 * 1024  # compressed bytes given to a decoder, and most that it gives back, at once
_MEMORY = 128 * 1024 * 1024  # what a decoder may need: xz -9 takes 65 MiB, zstd without --long 8 MiB, --ultra 128 MiB


class Decoder(Protocol):
    """Decompresses one member: what bz2, lzma and zstd of the standard library look like."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Up to `max_length` bytes; what more `data` holds comes with the next call."""
        ...


class _Gzip:
    """zlib, which has other names for the same things."""

    def __init__(self) -> None:
        self._zlib, self.needs_input = zlib.decompressobj(zlib.MAX_WBITS | 16), True

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out = self._zlib.decompress(data or self._zlib.unconsumed_tail, max_length)
        self.needs_input = len(out) < max_length and not self._zlib.unconsumed_tail
        return out


@functools.cache
def _zstd() -> Any:
    """The zstd module: of the standard library, or the same for Python before 3.14."""
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError as error:
        raise RecipeError(
            "A source has .zst files, which this Python cannot decompress by itself. Install the extra: "
            "pip install -e '.[zstd]' in a checkout."
        ) from error


def _zstd_decoder() -> Decoder:
    zstd = _zstd()
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MEMORY.bit_length() - 1})


@dataclass(frozen=True)
class Codec:
    """One way to compress. `tool` does it on the command line; `magics` are how a member may begin."""

    name: str
    suffix: str
    tool: str
    magics: tuple[bytes, ...]
    decoder: Callable[[], Decoder]


CODECS = (
    Codec("gzip", ".gz", "gzip", (b"\x1f\x8b",), _Gzip),
    Codec(
        "zstd",
        ".zst",
        "zstd",
        (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + i, 0x2A, 0x4D, 0x18]) for i in range(16))),  # a frame, or one to skip
        _zstd_decoder,
    ),
    Codec("bzip2", ".bz2", "bzip2", (b"BZh",), bz2.BZ2Decompressor),
    Codec("xz", ".xz", "xz", (b"\xfd7zXZ\0",), functools.partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, _MEMORY)),
)


def codec_of(path: str | Path) -> Codec | None:
    """How a file is compressed, which its suffix says; None where it is plain."""
    return next((codec for codec in CODECS if str(path).endswith(codec.suffix)), None)


class Piece(NamedTuple):
    """Some decompressed bytes, the compressed byte at which their member begins, and the one reached so far."""

    start: int
    data: bytes
    at: int


def decompress(read: Callable[[int], bytes | None], codec: Codec, path: str, at: int = 0) -> Iterator[Piece]:
    """Decompress members until `read` gives no more; `at` is where it begins. Empty members give an empty piece.

    Raises:
        DataError: the file is cut, damaged or something else; names the compressed byte.
    """
    view = b""
    while view or (view := read(_IN) or b""):
        while len(view) < 8 and (more := read(_IN)):
            view += more
        _check_head(view, codec, path, at)
        start, decoder, data = at, codec.decoder(), b""
        while not decoder.eof:
            if decoder.needs_input:
                data, view = view or read(_IN) or b"", b""
                if not data:
                    raise DataError(_cut(path, codec, at, start))
                at += len(data)
            try:
                out = decoder.decompress(data, _OUT)
            except MemoryError:
                raise
            except Exception as error:  # each library has its own, and nothing else happens in there
                raise DataError(
                    f"{path}: the {codec.name} member that starts at compressed byte {start} cannot be read; the fault "
                    f"shows in the {_IN >> 10} KiB before byte {at} ({error}; a decoder may use {_MEMORY >> 20} MiB). "
                    "The rows from there on would be lost. Get the file again, or write it again."
                ) from error
            yield Piece(start, out, at)
            data = b""
        view = decoder.unused_data
        at -= len(view)


def _check_head(head: bytes, codec: Codec, path: str, at: int) -> None:
    """Refuse what cannot be the beginning of a member."""
    if head.startswith(codec.magics):
        return
    if any(magic.startswith(head) for magic in codec.magics):
        raise DataError(_cut(path, codec, at + len(head), at))
    if at == 0:
        raise DataError(
            f"{path} is no {codec.name} file, as its suffix says: it starts with {head[:8]!r}. Name it as what it is."
        )
    raise DataError(
        f"{path}: behind the {codec.name} data, which ends at compressed byte {at}, comes something else: "
        f"{head[:8]!r}. It may be damage, or text appended to a compressed file; rows in it would be lost. "
        "Cut it off if it is of no use (truncate -s), or write the file again."
    )


def _cut(path: str, codec: Codec, at: int, start: int) -> str:
    return (
        f"{path} ends at compressed byte {at}, in the middle of the {codec.name} member that starts at byte {start}: "
        "it was cut. The rest of its rows would be lost. Get the file again, or write it again."
    )


class CompressedFile:
    """A compressed file, streamed.

    Attributes:
        bytes: compressed size.
        at: compressed byte that has been reached.
    """

    def __init__(self, path: Path, codec: Codec) -> None:
        self.path, self.codec, self.bytes, self.at = path, codec, path.stat().st_size, 0

    def blocks(self, size: int, note: Callable[[Piece], bool] | None = None) -> Iterator[bytes]:
        """The text in blocks of `size` bytes; ends early where `note`, told of every piece, returns False.

        Raises:
            DataError: the file is cut, damaged or something else; names the compressed byte.
        """
        held, waiting, member, given = list[bytes](), 0, -1, 0
        with self.path.open("rb", buffering=0) as file:
            bgzf = self.codec.name == "gzip" and (file.read(16) or b"")[12:] == b"BC\x02\0"
            file.seek(0)
            for piece in decompress(file.read, self.codec, str(self.path)):
                self.at, data = piece.at, piece.data
                given, member = len(data) + (given if piece.start == member else 0), piece.start
                if note and not note(piece):
                    return
                while len(data) >= size - waiting:
                    cut = size - waiting
                    yield b"".join([*held, data[:cut]])
                    held, waiting, data = [], 0, data[cut:]
                held.append(data)
                waiting += len(data)
        if bgzf and given:  # bgzip ends a file with an empty member, so that a cut between members shows
            raise DataError(_cut(str(self.path), self.codec, self.at, self.at))
        if waiting:
            yield b"".join(held)

    def recompress(self) -> str:
        """A command that writes the file in parts that can be read in place."""
        old, tool = shlex.quote(str(self.path)), self.codec.tool
        new = shlex.quote(str(self.path.with_name(f"parts-{self.path.name}")))
        also = f" (bgzip does it as well: {tool} -dc {old} | bgzip > {new})" if tool == "gzip" else ""
        return f"`{tool} -dc {old} | split --line-bytes=256K --filter='{tool} -c' - > {new}`{also}"


class Descriptor:
    """An open file; closed when the last that holds it lets go, so that no thread reads from a number that is gone."""

    def __init__(self, path: str | Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class Copies:
    """Decompressed copies in a cache folder, together bounded in bytes.

    Whoever uses a copy holds a shared lock on it, which vanishes with its process. Who needs room removes only what he
    can lock for himself, least recently used first, and holds the lock of the cache besides.

    Args:
        folder: where copies lie; made when the first is written.
        locked: whether the lock of the cache is held. Without it nothing is removed: nobody knows who reads.
    """

    def __init__(self, folder: Path, locked: bool) -> None:
        self.folder, self._locked = folder, locked
        self._lock, self._used, self._limit = threading.Lock(), -1, 0

    @staticmethod
    def find(at: Path, size: int) -> Descriptor | None:
        """The copy at `at`, locked against removal, or None where there is none of that size."""
        try:
            copy = Descriptor(at)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise UsageError(
                f"Every decompressed copy needs an open file, and this process may have no more ({at}). Raise the "
                "limit (ulimit -n), or write the files in parts of at most 8 MiB (bgzip), which need no copy."
            ) from error
        try:
            fcntl.flock(copy.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return None  # just being removed
        except OSError:
            pass  # a file system without locks: then nobody removes either
        stat = os.fstat(copy.fd)
        if stat.st_size != size or stat.st_nlink == 0:
            return None
        with contextlib.suppress(OSError):
            os.utime(at)
        return copy

    def write(self, at: Path, source: CompressedFile, blocks: Iterable[bytes]) -> Descriptor:
        """Keep `blocks`, the text of `source`, at `at`: whole or not at all.

        Raises:
            UsageError: there is no room, or the folder cannot be written.
        """
        logger.warning(
            "%s (%.1f MB) has a %s member of more than %d MiB, so its rows cannot be read in place: decompressing it "
            "into %s. To do without the copy: %s",
            *(source.path, source.bytes / 1e6, source.codec.name, MEMBER_BYTES >> 20, self.folder, source.recompress()),
        )
        private, size = private_name(at), 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with private.open("wb", buffering=0) as file:
                for block in blocks:
                    if not self._take(len(block)):
                        raise UsageError(self._full(source, size, len(block)))
                    size += len(block)
                    rest = memoryview(block)
                    while rest:
                        rest = rest[file.write(rest) :]
                os.fsync(file.fileno())  # or a crash of the machine leaves a copy of the right size, but of zeros
            with self._lock:
                self._used -= _size(at)
            private.replace(at)
        except BaseException as error:
            with contextlib.suppress(OSError):
                private.unlink()
            with self._lock:
                self._used -= size
            if isinstance(error, OSError):
                raise UsageError(
                    f"Cannot decompress {source.path} into {self.folder} ({error}), and its rows cannot be read in "
                    f"place. {self._ways_out(source)}"
                ) from error
            raise
        logger.info("The decompressed copy of %s is %s, %.1f MB.", source.path, at, size / 1e6)
        return self.find(at, size) or Descriptor(at)

    def _take(self, size: int) -> bool:
        """Count `size` more bytes, if there is room or room can be made."""
        with self._lock:
            if self._used < 0:
                self._used = sum(map(_size, self.folder.iterdir()))
                free = shutil.disk_usage(self.folder).free + self._used
                self._limit = min(COPIES_BYTES, int(COPIES_SHARE * free))
            while self._used + size > self._limit:
                if not (self._locked and self._evict()):
                    return False
            self._used += size
            return True

    def _evict(self) -> bool:
        """Remove the copy that was used longest ago and that no process has open; False where there is none."""
        for at in sorted(self.folder.glob("*.jsonl"), key=lambda one: one.stat().st_mtime_ns):
            with contextlib.suppress(OSError), at.open("rb+") as file:  # locks may need the right to write
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                size = _size(at)
                at.unlink()
                self._used -= size
                logger.info("Removed the decompressed copy %s, used longest ago, to make room.", at)
                return True
        return False

    def _full(self, source: CompressedFile, size: int, more: int) -> str:
        whole = (size + more) * source.bytes // max(1, source.at)
        return (
            f"{source.path}: its rows cannot be read in place, and a decompressed copy, about {whole / 1e6:,.1f} MB, "
            f"would exceed what copies in {self.folder} may take: {self._limit / 1e6:,.1f} MB in all (at most "
            f"{COPIES_BYTES >> 30} GiB, and {COPIES_SHARE:.0%} of the free disk). Others, which are in use, take "
            f"{(self._used - size) / 1e6:,.1f} MB. Nothing of it was kept. {self._ways_out(source)}"
        )

    def _ways_out(self, source: CompressedFile) -> str:
        return (
            f"Either write the file in parts, which needs no copy: {source.recompress()}; or keep it plain; or name a "
            "folder with more room as cache in [run] of the recipe."
        )


def _size(at: Path) -> int:
    try:
        return at.stat().st_size
    except FileNotFoundError:
        return 0
