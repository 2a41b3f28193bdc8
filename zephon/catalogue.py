"""The catalogue: what is known of a source without reading its rows.

Shards sorted by name, how many rows and bytes each holds, and how they are cut into chunks. All order is computed from
this; none of it depends on where the files lie or on who reads them.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 256 * 1024
"""Aim for chunks of this size: long enough for one read to pay, short enough that 64 lanes hold few bytes each."""

MAX_CHUNK_ROWS = 1024

GROUP_CHUNK_BYTES = 1024 * 1024
"""A row group up to this size, decoded, is one chunk: cutting it would only have it decoded for less."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a source.

    Attributes:
        name: path below the source's common folder, with forward slashes; decides the order of shards.
        path: where it lies on this machine; never part of a fingerprint.
        rows: number of rows.
        bytes: size in bytes.
        sha256: hex digest of the content.
        groups: rows of each row group; empty for formats that have none.
        group_bytes: bytes of each row group, all columns, not compressed.
    """

    name: str
    path: str
    rows: int
    bytes: int
    sha256: str
    groups: tuple[int, ...] = ()
    group_bytes: tuple[int, ...] = ()


class ChunkTable:
    """How the rows of a source are cut into chunks of consecutive rows; a chunk never crosses a shard or a row group.

    Args:
        part_rows: rows of each shard, or of each row group where the format has them; in shard order.
        rows_per_chunk: rows of every chunk but the last of a part: one number, or one a part.
        part_bytes: bytes of each row group, decoded; None where parts are shards.

    Attributes:
        count: number of chunks.
        steps: int64, rows of the chunks of each part.
        parts: int64, chunks of each part.
        first: int64, number of the first chunk of each part.
        rows_per_chunk: what was given, or the mean.
        bytes: of all row groups; 0 where parts are shards.
        group_bytes: of the row group that a byte lies in, on average.
    """

    def __init__(
        self, part_rows: list[int], rows_per_chunk: int | list[int], part_bytes: list[int] | None = None
    ) -> None:
        sizes = part_bytes or []
        self.bytes = sum(sizes)
        self.group_bytes = sum(size * size for size in sizes) // max(1, self.bytes)
        rows = np.asarray(part_rows, dtype=np.int64)
        self.steps = np.broadcast_to(np.asarray(rows_per_chunk, np.int64), rows.shape)
        self.parts = -(-rows // self.steps)
        self.first = np.cumsum(self.parts) - self.parts
        self._first_row = np.cumsum(rows) - rows
        self._rows = rows
        self.count = int(self.parts.sum())
        mean = -(-int(rows.sum()) // max(1, self.count))
        self.rows_per_chunk = rows_per_chunk if isinstance(rows_per_chunk, int) else max(1, mean)

    def part_of(self, chunk: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of the part that holds each chunk."""
        return np.searchsorted(self.first, chunk, side="right") - 1

    def sizes(self, chunk: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of rows of each chunk."""
        part = self.part_of(chunk)
        step = self.steps[part]
        return np.minimum(step, self._rows[part] - (chunk - self.first[part]) * step)

    def rows(self, chunk: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number in the whole source of each row of each chunk."""
        part = self.part_of(chunk)
        return self._first_row[part] + (chunk - self.first[part]) * self.steps[part] + row


@dataclass(frozen=True)
class Catalogue:
    """Shards of one source, sorted by name, and its chunk table."""

    shards: tuple[Shard, ...]
    chunks: ChunkTable

    @staticmethod
    def of(shards: list[Shard], *, lanes: int, chunk_rows: int | None) -> "Catalogue":
        """Cut `shards` into chunks; `chunk_rows` overrides the rule, which depends on rows, bytes and lanes alone.

        A small row group is one chunk, unless lanes would then have too few.
        """
        rows, size = sum(s.rows for s in shards), sum(s.bytes for s in shards)
        by_bytes = min(max(CHUNK_BYTES * rows // max(1, size), 1), MAX_CHUNK_ROWS)
        most = max(1, rows // (4 * lanes))
        per_chunk = chunk_rows or min(by_bytes, most)
        if not any(s.groups for s in shards):
            return Catalogue(tuple(shards), ChunkTable([s.rows for s in shards], per_chunk))
        groups = [(n, max(1, b)) for s in shards for n, b in zip(s.groups, s.group_bytes, strict=True) if n]
        whole = 0 if chunk_rows else most
        steps = [n if n <= whole and b <= GROUP_CHUNK_BYTES else per_chunk for n, b in groups]
        return Catalogue(tuple(shards), ChunkTable([n for n, _ in groups], steps, [b for _, b in groups]))

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @cached_property
    def fingerprint(self) -> dict[str, int | str]:
        """What a checkpoint remembers: totals to read, and one digest over every shard and the chunk size."""
        digest = hashlib.sha256()
        for shard in self.shards:
            line = f"{shard.name}\0{shard.rows}\0{shard.bytes}\0{shard.sha256}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))  # file names need not be UTF-8
            if shard.groups:
                digest.update(f"groups\0{shard.groups}\0{shard.group_bytes}\n".encode())
        if self.chunks.group_bytes:
            digest.update(self.chunks.steps.astype("<i8").tobytes())
        return {
            "shards": len(self.shards),
            "rows": self.rows,
            "bytes": self.bytes,
            "chunk_rows": self.chunks.rows_per_chunk,
            "sha256": digest.hexdigest(),
        }
