"""Reading rows of Parquet files by number.

A row costs the decoding of its whole row group, so decoded groups are kept, up to so many bytes, and the order of a
source visits the rows of a group near each other (`zephon/order.py`). Footers are read once, when a source is opened.

A row is a dict of what pyarrow makes of its columns: strings, numbers, `Decimal`, `datetime`, lists, dicts for structs,
lists of pairs for maps. Nanoseconds are cut to microseconds, which is what Python's times have. Binary cells at the
top, in structs and in lists become a `CellBlob`; in maps they are bytes.
"""

import functools
import hashlib
import importlib
import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon.catalogue import Shard
from zephon.errors import DataError, RecipeError
from zephon.formats.blobs import OPEN, File
from zephon.formats.cache import ByteCache
from zephon.formats.index import Progress
from zephon.formats.parts import by_part, part_of
from zephon.run.budget import MEMORY, Budget
from zephon.types import Bad, Row

LARGE_BYTES, REFUSED_BYTES = 256 * 1024 * 1024, 4 * 1024**3
"""Row groups that are warned of, and that are refused: a damaged or hostile footer, or more than ranks can hold."""

KEPT_BYTES = 64 * 1024 * 1024
"""Decoded row groups that a process keeps at first (one if that is larger). Two sources of text in groups of 7.6 MiB
need 64 to 69 MiB with one lane on the rank, 99 with 8 of 64, 445 with 64 (777 after 240 Mtoken)."""

GROUPS = ByteCache(KEPT_BYTES, 0)
"""Of this process, footers too, as group -1; every open source lends it what it may hold."""

_TAIL, _THREADS = 64 * 1024, 16  # bytes of a file that are read first, and footers that are read at once
_BROKEN = "The file is damaged or was not written to its end. Put a whole one in its place, or remove it."
_Path = tuple[str | int, ...]  # column, then names of struct fields and numbers of list items


@functools.cache
def _arrow() -> Any:
    try:
        return [importlib.import_module(name) for name in ("pyarrow.compute", "pyarrow.parquet", "pyarrow")][-1]
    except ImportError as error:
        raise RecipeError(
            "A source has .parquet files, which are read with pyarrow. Install the extra: "
            "pip install -e '.[parquet]' in a checkout."
        ) from error


class _Footer(NamedTuple):
    """What is kept of a footer: nothing of each column chunk, of which a source may have millions."""

    shard: Shard
    file: File
    columns: dict[str, str]


def open_parquet(
    files: dict[str, Path], progress: Progress | None = None, most: int = Budget.of(MEMORY).groups
) -> "tuple[list[Shard], ParquetReader]":
    """Read the footers of a source's files, many at once. There is no index in the cache: footers are one.

    A shard's `sha256` is of its footer and its size, not of its pages: that would read the whole source before the
    first batch. A footer holds sizes, places and, with most writers, statistics of every column of every row group, so
    other rows under the same name are noticed. Pages changed in place are noticed when read, if they have checksums.

    Raises:
        RecipeError: pyarrow is not installed.
        DataError: a file is damaged, encrypted or absurd, or has other columns than the first.
    """
    _arrow()  # says now what must be installed
    total, done, footers = sum(path.stat().st_size for path in files.values()), 0, list[_Footer]()
    with ThreadPoolExecutor(max(1, min(_THREADS, len(files)))) as pool:
        for footer in pool.map(_footer, files, files.values()):
            footers.append(footer)
            done += footer.file.size
            if progress:
                progress(done, total)
    _compare(footers)
    large = [(size, one.file.path) for one in footers for size in one.shard.group_bytes if size > LARGE_BYTES]
    if large:
        logging.getLogger(__name__).warning(
            "%d row group(s) hold more than %d MiB; the largest %d MiB, in %s. A rank decodes a whole group for some "
            "of its rows, and keeps one or two for a lane: that costs seconds and gigabytes. Write the files again "
            "with smaller groups: pyarrow.parquet.write_table(table, path, row_group_size=1000).",
            len(large), LARGE_BYTES >> 20, max(large)[0] >> 20, max(large)[1],
        )  # fmt: skip
    return [footer.shard for footer in footers], ParquetReader(footers, most)


def _footer(name: str, path: Path) -> _Footer:
    file = File.at(path)
    meta = _metadata(file, raw := _tail(file))
    groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
    rows, sizes = tuple(int(g.num_rows) for g in groups), tuple(int(g.total_byte_size) for g in groups)
    if min((*rows, *sizes), default=0) < 0 or sum(rows) != meta.num_rows:
        raise DataError(f"{path}: the footer contradicts itself about the number of rows. {_BROKEN}")
    for number, (count, size) in enumerate(zip(rows, sizes, strict=True)):
        if max(size, 4 * count * meta.num_columns) > REFUSED_BYTES:
            raise DataError(
                f"{path}: row group {number} is said to hold {count} rows, {size} bytes. More than {REFUSED_BYTES} are "
                "not read: every rank would have to hold them. Write the file again with smaller groups "
                "(row_group_size=1000), or remove it if it is damaged."
            )
    leaves = map(meta.schema.column, range(meta.num_columns))
    columns = {leaf.path: f"{leaf.physical_type} {leaf.logical_type}".split(", is_from")[0] for leaf in leaves}
    digest = hashlib.sha256(raw + struct.pack("<q", file.size)).hexdigest()
    return _Footer(Shard(name, str(path), sum(rows), sum(sizes), digest, rows, sizes), file, columns)


def _tail(file: File) -> bytes:
    """The footer, its length and the magic bytes at the end of a file."""
    raw = file.read(max(0, file.size - _TAIL), min(file.size, _TAIL))
    length, magic = struct.unpack("<I4s", raw[-8:]) if len(raw) >= 8 else (0, b"")
    if magic == b"PARE":
        raise DataError(f"{file.path} is encrypted. Encrypted files are not read; write it again without.")
    if magic != b"PAR1" or length + 12 > file.size:
        raise DataError(f"{file.path} does not end as a Parquet file does. {_BROKEN}")
    return raw[-8 - length :] if length + 8 <= len(raw) else file.read(file.size - 8 - length, length + 8)


def _metadata(file: File, raw: bytes) -> Any:
    pa = _arrow()
    try:
        return pa.parquet.read_metadata(pa.BufferReader(raw))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())
        raise DataError(f"{file.path}: the footer cannot be read ({what}). {_BROKEN}") from error


def _footer_of(file: File) -> tuple[Any, int]:
    return _metadata(file, raw := _tail(file)), 8 * len(raw)  # it is several times as large in memory


def _compare(footers: Sequence[_Footer]) -> None:
    """Refuse columns that differ between files; files without rows, and columns of nulls alone, fit any."""
    full = [footer for footer in footers if footer.shard.rows]
    for other in full:
        for column in (*full[0].columns, *other.columns) if other.columns != full[0].columns else ():
            here, there = (one.columns.get(column, "missing") for one in (full[0], other))
            if here != there and not here.endswith(" Null") and not there.endswith(" Null"):
                raise DataError(
                    f"Column {column!r} differs between files of one source: {here} in {full[0].file.path}, {there} in "
                    f"{other.file.path}. Rows would change their meaning from file to file. Write the files with one "
                    "schema, or make them two sources."
                )


class DamagedGroupError(DataError):
    """A row group whose bytes are not what was written: its rows are lost, those of others are not."""


class ParquetReader:
    """Rows of the files of one source, by their number in the source. Several threads may read.

    Args:
        footers: of the files.
        most: bytes that the decoded row groups of a process may take more, as long as this is open.
    """

    def __init__(self, footers: Sequence[_Footer], most: int) -> None:
        self._lent = most
        GROUPS.lend(most)
        self._files = [footer.file for footer in footers]
        rows = np.asarray([n for footer in footers for n in footer.shard.groups], np.int64)
        self._first = np.cumsum(rows) - rows
        self.row_bytes = max(1, sum(footer.shard.bytes for footer in footers) // max(1, int(rows.sum())))
        self._first_group = np.asarray([0, *accumulate(len(footer.shard.groups) for footer in footers)], np.int64)

    def read(self, rows: NDArray[np.int64]) -> list[Row | Bad]:
        """The rows, in the order asked for; `Bad` in place of one with a cell without value, or of a damaged group."""
        out: list[Row | Bad] = [{}] * len(rows)
        for group, where, inside in by_part(self._first, rows):
            local: list[int] = inside.tolist()
            file, number = self._where(group)
            try:
                table = _decoded(file, number)
            except DamagedGroupError as error:
                for i in where.tolist():
                    out[i] = Bad(str(error))
                continue
            try:
                found = _rows(table, local, file, number)
            except (ValueError, OverflowError):
                found = [_fault(table, i) or _rows(table, [i], file, number)[0] for i in local]
            for i, row in zip(where.tolist(), found, strict=True):
                out[i] = row
        return out

    def place(self, row: int, offset: int = 0) -> str:
        """Where a row is: file, row of the file and row group, counted from 0."""
        group, _ = part_of(self._first, row)
        file, number = self._where(group)
        return f"{file.path}, row {row - int(self._first[group - number])} (row group {number})"

    address = place

    def close(self) -> None:
        """Let go of files and of what was decoded; blobs that are read later open them again."""
        GROUPS.forget(set(self._files))
        GROUPS.lend(-self._lent)
        self._lent = 0
        OPEN.forget(self._files)

    def _where(self, group: int) -> tuple[File, int]:
        """The file of a row group, and its number there."""
        shard, number = part_of(self._first_group, group)
        return self._files[shard], number


@dataclass(frozen=True, slots=True)
class CellBlob:
    """A binary cell: a `zephon.types.Blob`, named by file, row group, row of that group, and path in the row.

    It is taken from its decoded row group, which is kept for a while. `head` as well: it takes 13 us right after the
    rows were read, against 2 ms to decode a column of 32 images again (4 MB).
    """

    file: File
    group: int
    row: int
    path: _Path
    size: int

    @property
    def place(self) -> str:
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)
        return f"{self.file.path}, row group {self.group}, row {self.row} of it, {steps[1:]}"

    def head(self, size: int) -> bytes:
        return self._cell()[: max(0, size)].to_pybytes()

    def read(self) -> bytes:
        return self._cell().to_pybytes()

    def _cell(self) -> Any:
        cell = _decoded(self.file, self.group, str(self.path[0])).column(self.path[0])[self.row]
        for step in self.path[1:]:
            cell = cell[step]
        return cell.as_buffer()


def _fault(table: Any, i: int) -> Bad | None:
    """What is wrong where a cell of row `i` of a table has no value."""
    for name in table.column_names:
        try:
            table.column(name)[i].as_py()
        except (ValueError, OverflowError) as error:
            utf8 = isinstance(error, UnicodeDecodeError)
            what = f"not valid UTF-8 at byte {error.start}" if utf8 else f"no value of Python's ({error})"
            return Bad(f"column {name!r} is {what}. Mend or remove the row.")
    return None


def _rows(table: Any, local: list[int], file: File, group: int) -> list[Row]:
    """Rows of a decoded group."""
    names, blob = table.column_names, functools.partial(CellBlob, file, group)
    taken, columns = table.take(_arrow().array(local, "int64")), list[list[Any]]()
    for name, column in zip(names, taken.columns, strict=True):
        at = [(row, (name,)) for row in local] if _holds_binary(column.type) else []
        columns.append(_values(column.combine_chunks(), at, blob) if at else column.to_pylist())
    return [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]


def _values(array: Any, at: Sequence[tuple[int, _Path]], blob: Callable[..., CellBlob]) -> list[Any]:
    """Python's values of an array whose items are in rows and paths `at`; binary ones become blobs."""
    pa, kind = _arrow(), array.type
    if not _holds_binary(kind):
        return array.to_pylist()
    if pa.types.is_struct(kind):
        names, valid = [field.name for field in kind], array.is_valid().to_pylist()
        pairs = zip(array.flatten(), names, strict=True)
        parts = [_values(part, [(row, (*path, name)) for row, path in at], blob) for part, name in pairs]
        return [dict(zip(names, cells, strict=True)) if ok else None for ok, *cells in zip(valid, *parts, strict=True)]
    if not hasattr(kind, "value_type"):  # no list
        sizes = pa.compute.binary_length(array).to_pylist()
        return [None if size is None else blob(*where, size) for where, size in zip(at, sizes, strict=True)]
    sizes = pa.compute.list_value_length(array).to_pylist()
    inner = [(row, (*path, i)) for (row, path), size in zip(at, sizes, strict=True) for i in range(size or 0)]
    items, ends = _values(array.flatten(), inner, blob), accumulate((size or 0 for size in sizes), initial=0)
    return [None if size is None else items[a:b] for size, (a, b) in zip(sizes, pairwise(ends), strict=True)]


@functools.lru_cache(1024)
def _holds_binary(kind: Any) -> bool:
    """Whether binary cells lie in values of this kind, where blobs can name them."""
    is_ = _arrow().types
    if is_.is_struct(kind):
        return any(_holds_binary(field.type) for field in kind)
    if is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind):
        return _holds_binary(kind.value_type)
    return is_.is_binary(kind) or is_.is_large_binary(kind) or is_.is_fixed_size_binary(kind)


class _Bytes:
    """A file as pyarrow reads one; every read checks that it is still the same file."""

    closed = False

    def __init__(self, file: File) -> None:
        self._file, self._at = file, 0

    def read(self, size: int) -> bytes:
        start, self._at = self._at, min(self._at + size, self._file.size)
        return self._file.read(start, self._at - start)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def _decoded(file: File, group: int, column: str | None = None) -> Any:
    """A decoded row group, or one column of it where the group is not kept."""
    if column is not None and (whole := GROUPS.find((file, group, None))) is not None:
        return whole
    return GROUPS.get((file, group, column), lambda: _decode(file, group, column))


def _decode(file: File, group: int, column: str | None) -> tuple[Any, int]:
    pa = _arrow()
    try:
        reader = pa.parquet.ParquetFile(
            pa.PythonFile(_Bytes(file), mode="r"),
            metadata=GROUPS.get((file, -1, None), lambda: _footer_of(file)),
            pre_buffer=False,
            page_checksum_verification=True,
            coerce_int96_timestamp_unit="us",
        )
        parts = list(_parts(reader, file, group, column)) or [reader.schema_arrow.empty_table()]
        table = pa.concat_tables(parts).combine_chunks()
    except (MemoryError, pa.ArrowMemoryError) as error:
        raise DataError(f"{file.path}: row group {group} needs more memory than there is ({error}).") from error
    except (pa.ArrowException, OSError, ValueError) as error:  # ours are DataErrors: these are about what was read
        what = " ".join(str(error).split())
        raise DamagedGroupError(f"{file.path}: row group {group} cannot be read ({what}). {_BROKEN}") from error
    if table.num_rows != (promised := reader.metadata.row_group(group).num_rows):
        raise DamagedGroupError(
            f"{file.path}: row group {group} holds {table.num_rows} rows, not {promised}. {_BROKEN}"
        )
    if len(set(table.column_names)) < table.num_columns:
        raise DataError(f"{file.path} has several columns of one name, of which a row can hold only one. Rename them.")
    return table, table.get_total_buffer_size()


def _parts(reader: Any, file: File, group: int, column: str | None) -> Iterator[Any]:
    """A row group in tables, none above `REFUSED_BYTES` though all its rows repeat the longest string of the group.

    A dictionary makes gigabytes out of a page of kilobytes, and the footer does not tell.
    """
    meta, total, columns = reader.metadata.row_group(group), 0, None if column is None else [column]
    if (step := max(1, REFUSED_BYTES // max(1, meta.total_byte_size))) >= meta.num_rows:
        yield _plain(reader.read_row_group(group, columns, use_threads=False))  # 34 us for 200 rows, 77 as a batch
        return
    for batch in reader.iter_batches(step, [group], columns, use_threads=False):
        yield (table := _plain(_arrow().Table.from_batches([batch])))
        if (total := total + table.nbytes) > REFUSED_BYTES:
            raise DataError(
                f"{file.path}: row group {group} holds more than {REFUSED_BYTES} bytes when it is decoded; its footer "
                "says less. Write the file again with smaller groups (row_group_size=1000), or remove it."
            )


def _plain(table: Any) -> Any:
    """The table with kinds that rows are made of: no dictionaries of binary cells, no views, no nanoseconds."""
    schema = _arrow().schema(list(_plain_kind(_arrow().struct(list(table.schema)))))
    return table if schema == table.schema else table.cast(schema, safe=False)


@functools.lru_cache(1024)
def _plain_kind(kind: Any) -> Any:
    pa, is_ = _arrow(), _arrow().types
    inner: Callable[[Any], Any] = lambda field: field.with_type(_plain_kind(field.type))  # noqa: E731
    if is_.is_struct(kind):
        return pa.struct(map(inner, kind))
    if is_.is_map(kind):
        return pa.map_(inner(kind.key_field), inner(kind.item_field))
    if is_.is_large_list(kind):
        return pa.large_list(inner(kind.value_field))
    if is_.is_list(kind) or is_.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_field), kind.list_size if is_.is_fixed_size_list(kind) else -1)
    if is_.is_dictionary(kind) and _holds_binary(kind.value_type):
        return kind.value_type
    if is_.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return {**views, pa.duration("ns"): pa.duration("us")}.get(kind, kind)
