"""How fragments and messages become bytes. No pickle: what arrives can only be data.

A codec writes a fragment given a version of it that both ends hold: `float32` writes the values themselves, `bf16` and
`int4` write the difference, which is small where the parameters are not: rounded to bfloat16 themselves, parameters
would lose 2**-9 of their size a merge. Both ends then hold exactly what `decode` gives, bit for bit.
"""

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.diloco.fragments import Vector

BLOCK = 256
"""Values that share a scale in `int4`: 4 + 16 / 256 bits a value."""

_HEAD = struct.Struct("<IQ")


def encode(codec: str, value: Vector, base: Vector) -> bytes:
    """Bytes of a fragment `[n]`, both float32: 4 n for "float32", 2 n for "bf16", n / 2 and 2 a block for "int4"."""
    return _WRITERS[codec](value, base)


def decode(codec: str, raw: bytes, base: Vector) -> Vector:
    """The inverse of `encode`, up to what the codec rounds; a new float32 `[n]`.

    Raises:
        ValueError: `raw` has not the length that `base` asks for.
    """
    if len(raw) != encoded_bytes(codec, base.size):
        raise ValueError(
            f"{len(raw)} bytes of {codec} for {base.size} values; {encoded_bytes(codec, base.size)} expected."
        )
    return _READERS[codec](raw, base)


def encoded_bytes(codec: str, size: int) -> int:
    """Bytes that `encode` makes of `size` values."""
    blocks = -(-size // BLOCK)
    return {"float32": 4 * size, "bf16": 2 * size, "int4": -(-size // 2) + 2 * blocks}[codec]


def to_bf16(value: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(value).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(
        np.uint16
    )
    return np.where(np.isnan(value), np.uint16(0x7FC0), rounded)


def from_bf16(raw: NDArray[np.uint16]) -> Vector:
    """The float32 that a bfloat16 stands for."""
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _write_float32(value: Vector, base: Vector) -> bytes:
    return value.astype("<f4").tobytes()


def _read_float32(raw: bytes, base: Vector) -> Vector:
    return np.frombuffer(raw, "<f4").astype(np.float32)


def _write_bf16(value: Vector, base: Vector) -> bytes:
    return to_bf16(value - base).astype("<u2").tobytes()


def _read_bf16(raw: bytes, base: Vector) -> Vector:
    return base + from_bf16(np.frombuffer(raw, "<u2").astype(np.uint16))


def _write_int4(value: Vector, base: Vector) -> bytes:
    """Scales (bfloat16: outer gradients of 1e-6 would fall among float16's subnormals), then two values a byte."""
    blocks = _in_blocks(value - base)
    scales = to_bf16(np.max(np.abs(blocks), axis=1) / np.float32(7))
    steps = from_bf16(scales)[:, None]
    known = np.where(steps > 0, steps, np.float32(1))
    numbers = np.clip(np.rint(blocks / known), -7, 7)
    whole = np.where(np.isnan(numbers), np.float32(0), numbers).astype(np.int8).reshape(-1)[: value.size]
    nibbles = np.zeros(2 * -(-value.size // 2), np.uint8)
    nibbles[: value.size] = (whole + np.int8(8)).view(np.uint8)
    return scales.astype("<u2").tobytes() + (nibbles[::2] | (nibbles[1::2] << np.uint8(4))).tobytes()


def _read_int4(raw: bytes, base: Vector) -> Vector:
    blocks = -(-base.size // BLOCK)
    scales = from_bf16(np.frombuffer(raw[: 2 * blocks], "<u2").astype(np.uint16))
    packed = np.frombuffer(raw[2 * blocks :], np.uint8)
    nibbles = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=1).reshape(-1)[: base.size]
    numbers = _in_blocks(nibbles.astype(np.float32) - np.float32(8))
    return (base + (numbers * scales[:, None]).reshape(-1)[: base.size]).astype(np.float32)


def _in_blocks(value: Vector) -> NDArray[np.float32]:
    blocks = np.zeros((-(-value.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: value.size] = value
    return blocks


_WRITERS: dict[str, Callable[[Vector, Vector], bytes]] = {
    "float32": _write_float32,
    "bf16": _write_bf16,
    "int4": _write_int4,
}
_READERS: dict[str, Callable[[bytes, Vector], Vector]] = {
    "float32": _read_float32,
    "bf16": _read_bf16,
    "int4": _read_int4,
}


def frame(head: dict[str, Any], body: bytes) -> bytes:
    """A message on a byte stream: two lengths (little-endian uint32, uint64), the head as JSON, the body as it is."""
    said = json.dumps(head, separators=(",", ":")).encode()
    return _HEAD.pack(len(said), len(body)) + said + body


class Frames:
    """Cuts a byte stream into the frames that it holds."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, raw: bytes) -> list[tuple[dict[str, Any], bytes, int]]:
        """Take more bytes; give head, body and size in bytes of the frames that are whole now."""
        self._held += raw
        found: list[tuple[dict[str, Any], bytes, int]] = []
        at = 0
        while len(self._held) - at >= _HEAD.size:
            head, body = _HEAD.unpack_from(self._held, at)
            end = at + _HEAD.size + head + body
            if len(self._held) < end:
                break
            split = at + _HEAD.size + head
            found.append((json.loads(self._held[at + _HEAD.size : split]), bytes(self._held[split:end]), end - at))
            at = end
        del self._held[:at]
        return found
