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


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a source.

    Attributes:
        name: path below the source's common folder, with forward slashes; decides the order of shards.
        path: where it lies on this machine; never part of a fingerprint.
        rows: number of rows.
        bytes: size in bytes.
        sha256: hex digest of the content.
    """

    name: str
    path: str
    rows: int
    bytes: int
    sha256: str


class ChunkTable:
    """How the rows of a source are cut into chunks of consecutive rows; a chunk never crosses a shard.

    Args:
        shard_rows: rows of each shard, in shard order.
        rows_per_chunk: rows of every chunk but the last of a shard.
    """

    def __init__(self, shard_rows: list[int], rows_per_chunk: int) -> None:
        self.rows_per_chunk = rows_per_chunk
        rows = np.asarray(shard_rows, dtype=np.int64)
        per_shard = -(-rows // rows_per_chunk)
        self._first_chunk = np.cumsum(per_shard) - per_shard
        self._first_row = np.cumsum(rows) - rows
        self._rows = rows
        self.count = int(per_shard.sum())

    def shard_of(self, chunk: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of the shard that holds each chunk."""
        return np.searchsorted(self._first_chunk, chunk, side="right") - 1

    def sizes(self, chunk: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of rows of each chunk."""
        shard = self.shard_of(chunk)
        first = (chunk - self._first_chunk[shard]) * self.rows_per_chunk
        return np.minimum(self.rows_per_chunk, self._rows[shard] - first)

    def rows(self, chunk: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number in the whole source of each row of each chunk."""
        shard = self.shard_of(chunk)
        return self._first_row[shard] + (chunk - self._first_chunk[shard]) * self.rows_per_chunk + row


@dataclass(frozen=True)
class Catalogue:
    """Shards of one source, sorted by name, and its chunk table."""

    source: str
    shards: tuple[Shard, ...]
    chunks: ChunkTable

    @staticmethod
    def of(source: str, shards: list[Shard], *, lanes: int, chunk_rows: int | None) -> "Catalogue":
        """Cut `shards` into chunks; `chunk_rows` overrides the rule, which depends on rows, bytes and lanes alone."""
        rows, size = sum(s.rows for s in shards), sum(s.bytes for s in shards)
        by_bytes = min(max(CHUNK_BYTES * rows // max(1, size), 1), MAX_CHUNK_ROWS)
        per_chunk = chunk_rows or min(by_bytes, max(1, rows // (4 * lanes)))
        return Catalogue(source, tuple(shards), ChunkTable([s.rows for s in shards], per_chunk))

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
        return {
            "shards": len(self.shards),
            "rows": self.rows,
            "bytes": self.bytes,
            "chunk_rows": self.chunks.rows_per_chunk,
            "sha256": digest.hexdigest(),
        }
