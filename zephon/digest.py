"""Digests: proof that two runs saw the same batches.

A record is hashed array by array in sorted order of names, each with its name, dtype and shape; a lane's digest covers
its records of one step, and the digest of a step covers its lanes in order. Every rank hashes only what it owns.
"""

import functools
import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zephon.types import Record


def lane_digest(records: Sequence[Record]) -> bytes:
    """SHA-256 over a lane's records of one step, one after the other; 32 bytes.

    For each array: byte length (little-endian int64) and bytes of its name, the same for NumPy's `dtype.str`, `ndim`,
    the shape (int64 each), then its C-order little-endian bytes.

    Raises:
        TypeError: an array of Python objects has no bytes to hash.
    """
    digest = hashlib.sha256()
    for record in records:
        for name in sorted(record):
            array = record[name]
            head, little = _head(name, array.dtype, array.shape)
            digest.update(head)
            digest.update(np.ascontiguousarray(array, little))  # pyright: ignore[reportArgumentType]
    return digest.digest()


@functools.lru_cache(1024)
def _head(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, np.dtype[Any]]:
    """What is hashed before an array's bytes, and the type of those; kept, as making it took a third of the time."""
    if dtype.hasobject:
        raise TypeError(f"Array {name!r} holds Python objects and cannot be hashed.")
    little, shape = dtype.newbyteorder("<"), shape or (1,)  # a number counts as an array of one
    words = (name.encode(), little.str.encode())
    sized = b"".join(struct.pack("<q", len(word)) + word for word in words)
    return sized + struct.pack(f"<q{len(shape)}q", len(shape), *shape), little


def step_digest(lanes: Mapping[int, bytes]) -> str:
    """SHA-256 over all lane digests in lane order, as hex."""
    return hashlib.sha256(b"".join(lanes[lane] for lane in sorted(lanes))).hexdigest()
