"""WebDataset tar files: which members make which sample, found from headers alone; samples by number.

Names are split and grouped by the rules of the `webdataset` package: consecutive members of one key are a sample. Where
it skips in silence what may be damage (a bad header ends a file, a link holds nothing), here that is an error. So only
headers are left to Python's `tarfile`, which ends at a bad one without a word; the walk over them is written here.

Members that hold text are decoded when their row is read, all others are addresses (`blobs.py`). An index is kept in
the cache like that of a JSONL file: the numbers of `TarIndex`, one after the other.

The content hash of a shard is that of its headers and its size: names, sizes and times of all members. To hash what
they hold, every byte would have to be read before a run starts.
"""

import hashlib
import importlib
import json
import logging
import os
import re
import tarfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from zephon.catalogue import Shard
from zephon.errors import DataError, RecipeError
from zephon.formats.blobs import OPEN, File, FileBlob
from zephon.formats.index import Meter, Progress, Stamp, from_cache, keep, load_kept, stamp_of
from zephon.formats.lines import ROW_BYTES, Offsets
from zephon.formats.parts import by_part, part_of, read_near
from zephon.types import Bad, Row

logger = logging.getLogger(__name__)

_LAYOUT = "tar 1"  # a change of what an index holds or of what makes a sample is another layout
_BLOCK, _HEAD_BYTES = 512, 4096  # the latter of an image measuring reads; a text it reads whole
_THREADS = 8  # headers lie far apart: where the file system is remote, waiting takes the time
_TOLD = 8 * 1024 * 1024  # bytes between two calls of progress
_EXTENDED_BYTES, _NAME_CHARS = 1024 * 1024, 4096  # webdataset's pattern takes the square of a name's length: 0.1 s here
_META = re.compile(r"__[^/]*__($|/)")  # as webdataset.tariterators.tar_file_iterator has it, but only as a default
_TAKEN = ("__key__", "__url__", "__local_path__", "__bad__")  # what webdataset itself puts into samples

_LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_LINKS = (tarfile.LNKTYPE, tarfile.SYMTYPE)
_EMPTY = (tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
_LABELS = (b"D", b"V")  # GNU: what a folder held when it was saved, and the label of a volume


class _Member(NamedTuple):
    """A file in a tar: its name, where its header begins, and the bytes that it holds."""

    name: str
    header: int
    at: int
    size: int


@dataclass(frozen=True)
class TarIndex:
    """The samples of one tar file.

    Attributes:
        shard: name, path, rows, bytes, and hash of the headers.
        file: the state of the file that was indexed.
        suffixes: all suffixes of its members.
        starts: uint64 [rows + 1], the first member of each sample.
        keys: uint64 [rows + 1], where each key starts in `names`.
        members: uint64 [3, members]: first byte, size, number of the suffix.
        names: uint8, all keys in UTF-8.
    """

    shard: Shard
    file: File
    suffixes: tuple[str, ...]
    starts: Offsets
    keys: Offsets
    members: Offsets
    names: NDArray[np.uint8]

    @staticmethod
    def of(name: str, path: Path, about: dict[str, Any], numbers: Offsets) -> "TarIndex":
        """The index that a first line and numbers describe."""
        rows, members, size = about["rows"], about["members"], about["bytes"]
        starts, keys, table, names = np.split(numbers, np.cumsum([rows + 1, rows + 1, 3 * members]))
        shard, file = Shard(name, str(path), rows, size, about["sha256"]), File(str(path), size, about["mtime_ns"])
        suffixes = tuple(about["suffixes"])
        return TarIndex(shard, file, suffixes, starts, keys, table.reshape(3, members), names.view(np.uint8))

    def named(self, name: str) -> "TarIndex":
        """The same file under another shard name."""
        return replace(self, shard=replace(self.shard, name=name))

    def key(self, row: int) -> str:
        """The key of a sample."""
        return self.names[int(self.keys[row]) : int(self.keys[row + 1])].tobytes().decode("utf-8", "surrogateescape")

    @cached_property
    def decoders(self) -> list[tuple[str, Callable[[bytes], object]] | None]:
        """How members of each suffix are decoded; None for those that are not."""
        return [_DECODERS.get(suffix.rpartition(".")[2]) for suffix in self.suffixes]

    def read_bytes(self) -> int:
        """Bytes that measuring all samples reads."""
        members = np.asarray(self.members, np.int64)
        is_text, sizes = self._texts(members)
        return int(np.where(is_text, sizes, np.minimum(members[1], _HEAD_BYTES)).sum())

    def _texts(self, members: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Of these members, which are texts, and bytes to read: none of what is too long."""
        is_text = np.array([one is not None for one in self.decoders], bool)[members[2]]
        return is_text, np.where(members[1] > ROW_BYTES, 0, members[1])

    def rows(self, rows: NDArray[np.int64]) -> list[Row | Bad]:
        """The samples with these numbers: texts decoded, addresses of everything else.

        Raises:
            DataError: the file is no longer what was indexed.
        """
        lo = np.asarray(self.starts[rows], np.int64)
        count = np.asarray(self.starts[rows + 1], np.int64) - lo
        picked = np.arange(int(count.sum())) + (lo - np.cumsum(count) + count).repeat(count)
        table = np.asarray(self.members[:, picked], np.int64)
        is_text, sizes = self._texts(table)
        text_at = table[0, is_text]
        texts = iter(read_near(text_at, text_at + sizes[is_text], self.file.read))
        at, size, kind = cast(list[list[int]], table.tolist())
        members = zip(at, size, kind, strict=True)
        out: list[Row | Bad] = []
        for row, own in zip(rows.tolist(), count.tolist(), strict=True):
            key = self.key(row)
            sample: dict[str, object] = {"__key__": key}
            for _ in range(own):
                first, length, number = next(members)
                blob = FileBlob(self.file, first, length, f"{key}.{self.suffixes[number]}")
                decoder = self.decoders[number]
                sample[self.suffixes[number]] = _decoded(blob, *decoder, next(texts)) if decoder else blob
            out.append(next((one for one in sample.values() if isinstance(one, Bad)), sample))
        return out


class TarReader:
    """Samples of the shards of one source, by their number in the source. Several threads may read.

    Args:
        indexes: one index a shard, in catalogue order.
    """

    def __init__(self, indexes: Sequence[TarIndex]) -> None:
        self._indexes = list(indexes)
        rows = np.asarray([index.shard.rows for index in indexes], np.int64)
        self._first = np.cumsum(rows) - rows
        self.row_bytes = max(1, sum(index.read_bytes() for index in indexes) // max(1, int(rows.sum())))

    def read(self, rows: NDArray[np.int64]) -> list[Row | Bad]:
        out: list[Row | Bad] = [{}] * len(rows)
        for shard, where, local in by_part(self._first, rows):
            for i, row in zip(where.tolist(), self._indexes[shard].rows(local), strict=True):
                out[i] = row
        return out

    def place(self, row: int, offset: int = 0) -> str:
        shard, local = part_of(self._first, row)
        index = self._indexes[shard]
        return f"{index.file.path}, sample {index.key(local)}, byte {index.members[0, int(index.starts[local])]}"

    address = place

    def close(self) -> None:
        OPEN.forget(index.file for index in self._indexes)


def _json(raw: bytes) -> object:
    """As a row of JSONL: what Python's `json` says, by orjson where that can."""
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return json.loads(raw.decode("utf-8"))


_DECODERS: dict[str, tuple[str, Callable[[bytes], object]]] = {
    **dict.fromkeys(("txt", "text", "transcript", "caption"), ("UTF-8 text", bytes.decode)),
    **dict.fromkeys(("json", "jsn"), ("JSON", _json)),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), ("a whole number", int)),
}
"""What a member is by the last part of its suffix, and how it is decoded: like webdataset's basic handlers."""


def _decoded(blob: FileBlob, what: str, decode: Callable[[bytes], object], raw: bytes) -> object:
    if blob.size > ROW_BYTES:
        told = f"member {blob.name}, byte {blob.offset}, holds {blob.size:,} bytes"
        return Bad(f"{told}; of a text {ROW_BYTES:,} are read at most. Divide it, or remove its sample.")
    try:
        return decode(raw)
    except (ValueError, RecursionError) as error:
        told = f"member {blob.name}, byte {blob.offset}: a member with this suffix is {what}, which this one is not"
        return Bad(f"{told} ({error}). Mend it, give it another suffix, or remove its sample.")


def index_tars(files: dict[str, Path], cache: Path, progress: Progress | None = None) -> list[TarIndex]:
    """Index `files` (shard name to path), from `cache` where it still holds; only headers are read.

    Raises:
        DataError: a file is cut, damaged, or holds what would be lost; names the byte.
        RecipeError: the package `webdataset` is needed and missing.
    """

    def load(name: str, path: Path) -> TarIndex | None:
        return load_kept(path, cache, _LAYOUT, lambda _, about, numbers: TarIndex.of(name, path, about, numbers))

    return from_cache(files, cache, load, lambda missing, _: _build_all(missing, cache, progress))


def _build_all(files: dict[str, Path], cache: Path, progress: Progress | None) -> dict[str, TarIndex]:
    stamps = {name: stamp_of(path, _LAYOUT) for name, path in files.items()}
    meter = Meter(sum(int(stamp["bytes"]) for stamp in stamps.values()), progress)
    built, split = dict[str, TarIndex](), _splitter() if files else None
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            scans = {name: pool.submit(_scan, path, stamps[name], split, meter) for name, path in files.items()}
            for name, path in files.items():
                about, numbers = scans.pop(name).result()
                if stamp_of(path, _LAYOUT) != stamps[name]:
                    raise DataError(f"{path} was changed while it was indexed. Start again when it is complete.")
                built[name] = TarIndex.of(name, path, about, numbers)
                keep(path, cache, about, [numbers])
        except BaseException:
            meter.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return built


def _splitter() -> Any:
    """How webdataset splits a name into key and suffix. It imports torch, seconds that a known file need not cost."""
    try:
        return importlib.import_module("webdataset.tariterators").base_plus_ext
    except ImportError as error:
        raise RecipeError(
            "A source has .tar files, whose samples are found by the rules of the package webdataset, and that cannot "
            f"be imported ({error}). Install the extra: pip install -e '.[image]' in a checkout."
        ) from error


def _scan(path: Path, stamp: Stamp, split: Any, meter: Meter) -> tuple[dict[str, Any], Offsets]:
    """One pass over the headers of a file: what `TarIndex.of` takes."""
    digest, size, current = hashlib.sha256(), int(stamp["bytes"]), None
    suffixes, starts, keys, table, names = dict[str, int](), array("Q"), array("Q"), array("Q"), bytearray()
    seen, ignored = set[str](), list[str]()
    for one in _members(path, size, digest.update, meter):
        key, suffix = (None, "") if _META.match(one.name) else split(one.name)
        if key is None:
            ignored += [] if _META.match(one.name) else [one.name]
            continue
        if key != current:
            current, seen = key, set[str](_TAKEN)
            starts.append(len(table) // 3)
            keys.append(len(names))
            names += key.encode("utf-8", "surrogateescape")
        if (suffix := suffix.lower()) in seen:
            what = "has a suffix of webdataset's own" if suffix in _TAKEN else f"is the second {suffix!r} of its sample"
            raise _refusal(path, one.header, one.name, what)
        seen.add(suffix)
        table.extend((one.at, one.size, suffixes.setdefault(suffix, len(suffixes))))
    if ignored:
        logger.warning(
            "%s: %d files without a suffix, such as %r, belong to no sample.", path, len(ignored), ignored[0]
        )
    about = {"rows": len(starts), "members": len(table) // 3, "suffixes": list(suffixes)}
    starts.append(len(table) // 3)
    keys.append(len(names))
    digest.update(str(size).encode())
    columns, padded = np.array(table, np.uint64).reshape(-1, 3).T.ravel(), bytes(names) + bytes(-len(names) % 8)
    numbers = [np.array(starts, np.uint64), np.array(keys, np.uint64), columns, np.frombuffer(padded, np.uint64)]
    return {**stamp, **about, "sha256": digest.hexdigest()}, np.concatenate(numbers)


def _members(path: Path, size: int, note: Callable[[bytes], None], meter: Meter) -> Iterator[_Member]:
    """The files in a tar; `note` is told what all headers hold.

    Raises:
        DataError: the tar is cut or damaged, or has members that a sample cannot have.
    """
    at, told, waits = 0, 0, -1
    shared, own = dict[str, str](), dict[str, str]()  # of extended headers: for all members, and for the next
    with path.open("rb", buffering=0) as file:
        while at < size and (block := os.pread(file.fileno(), _BLOCK, at)).strip(b"\0"):
            note(block)
            try:
                info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.HeaderError as error:
                raise _damage(path, at, f"no header, but {block[:8]!r} ({error})") from error
            is_extended, more = info.type in (*_LONG, *_PAX), {**shared, **own}
            name, held = more.get("path") or info.name, info.size if is_extended else int(more.get("size") or info.size)
            if info.type in _EMPTY or info.type in _LINKS:
                held = 0
            end = at + _BLOCK + held + -held % _BLOCK
            if held < 0 or end > size or (is_extended and held > _EXTENDED_BYTES):
                raise _damage(path, at, f"{name!r} holds {held} bytes by its header, and the file {size} in all")
            if is_extended:
                data = os.pread(file.fileno(), held, at + _BLOCK)
                note(data)
                if info.type == tarfile.XGLTYPE:
                    shared |= _extended(info.type, data, path, at)
                else:  # of several, the first counts
                    own, waits = _extended(info.type, data, path, at) | own, at
            else:
                own, waits = {}, -1
                if info.type not in _EMPTY and info.type not in _LABELS:
                    _check_member(path, at, name, info.type, more)
                    yield _Member(name, at, at + _BLOCK, held)
            at = end
            if at - told >= _TOLD:
                meter.add(at - told)
                told = at
            if meter.stopped:
                raise CancelledError
        _check_end(file.fileno(), path, at, size)
    if waits >= 0:
        raise _damage(path, waits, "an extended header, and the archive ends before its member")
    meter.add(size - told)


def _extended(kind: bytes, data: bytes, path: Path, header: int) -> dict[str, str]:
    """What an extended header says: GNU's one long name, or PAX records, `LENGTH KEY=VALUE` and a line feed."""
    at, found = 0, dict[str, str]()
    if kind in _LONG:
        name = data.rstrip(b"\0")
        if name and name != data and b"\0" not in name:
            return {"path" if kind == tarfile.GNUTYPE_LONGNAME else "linkpath": name.decode("utf-8", "surrogateescape")}
        raise _damage(path, header, f"a long name should follow, not {data[:32]!r}")
    while at < len(data):
        digits = data[at : at + 20].partition(b" ")[0]
        record = data[at : at + int(digits)] if digits.isdigit() else b""
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        is_size = (value.isdigit() and len(value) < 20) or key != b"size"
        if not (equals and is_size and record.endswith(b"\n") and len(record) == int(digits)):
            raise _damage(path, header, f"an extended header should hold a record, not {data[at : at + 32]!r}")
        text = value.decode("utf-8", "surrogateescape")
        found[key.decode("utf-8", "replace")] = text.rstrip("/") if key == b"path" else text
        at += len(record)
    return found


def _check_member(path: Path, at: int, name: str, kind: bytes, extended: dict[str, str]) -> None:
    """Refuse what does not hold its own bytes, in one piece, or has a name that leads elsewhere."""
    if name.startswith("/") or ".." in name.split("/"):
        raise _refusal(path, at, name, "has a path that leads out of the archive")
    if len(name) > _NAME_CHARS:
        raise _refusal(path, at, name[:64], f"(and so on) has a name of {len(name)} characters, {_NAME_CHARS} may be")
    if kind == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse.") for key in extended):
        raise _refusal(path, at, name, "is stored with holes (tar --sparse), so that its bytes do not lie together")
    if kind not in _PLAIN:
        what = "a link (tar --dereference --hard-dereference stores files)" if kind in _LINKS else f"of kind {kind!r}"
        raise _refusal(path, at, name, f"is {what}, no file that holds its bytes")


def _check_end(fd: int, path: Path, at: int, size: int) -> None:
    """Refuse an archive that goes on behind its end; one without an end may be cut between two members."""
    if at >= size:
        logger.warning(
            "%s ends at byte %d without two blocks of zeros: if it was cut just there, samples are missing.", path, at
        )
    while at < size and (block := os.pread(fd, 1 << 20, at)):
        if rest := block.lstrip(b"\0"):
            raise _damage(path, at + len(block) - len(rest), f"behind the end of the archive comes {rest[:8]!r}")
        at += len(block)


def _refusal(path: Path, at: int, name: str, what: str) -> DataError:
    return DataError(
        f"{path}, byte {at}: the member {name!r} {what}. A sample would be incomplete, or not the one that is meant. "
        "Write the archive again without such members."
    )


def _damage(path: Path, at: int, what: str) -> DataError:
    return DataError(
        f"{path}, byte {at}: {what}. The file is cut, damaged, no tar archive, or several (tar -A joins them); the "
        "samples from there on would be lost. Get it again, or write it again."
    )
