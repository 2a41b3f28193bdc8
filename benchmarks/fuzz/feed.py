"""Bytes read as decisions, so that whatever bytes an engine makes are a valid input of a target."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

WORDS = (
    b"\0", b"\xff", b"\x80", b"\x7f", b"\n", b'"', b"{", b"[", b" ", b"\0\0\0\0", b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\x7f", b"\x80\0\0\0", b"\xff" * 8, b"\x01\0\0\0", b"\0\0\0\x01", b"7777777", b"999999999999",
)  # fmt: skip
"""What formats are known to stumble over."""


class Feed:
    """Decisions, one after the other; when the bytes are used up every number is 0.

    Args:
        data: any bytes.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def more(self) -> bool:
        """Whether bytes are left."""
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        """The next `size` bytes, or fewer."""
        self._at += size
        return self._data[self._at - size : self._at]

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(max(0, len(self._data) - self._at))

    def number(self, most: int) -> int:
        """A whole number in `[0, most]`."""
        return int.from_bytes(self.take((most.bit_length() + 7) // 8), "little") % (most + 1)

    def pick(self, options: Sequence[T]) -> T:
        """One of the options; the first when the bytes are used up."""
        return options[self.number(len(options) - 1)]

    def chance(self, one_in: int) -> bool:
        """True once in so many times, never when the bytes are used up."""
        return self.number(one_in - 1) == one_in - 1

    def edit(self, raw: bytes, most: int = 6) -> bytes:
        """`raw` with up to `most` edits: bytes set, flipped, put in, taken out, repeated, or the end cut off."""
        for _ in range(self.number(most)):
            at = self.number(len(raw)) if not self.chance(3) else max(0, len(raw) - self.number(64))
            kind, size = self.number(5), 1 + self.number(15)
            if kind == 0:
                raw = raw[:at] + self.take(size) + raw[at + size :]
            elif kind == 1 and at < len(raw):
                raw = raw[:at] + bytes([raw[at] ^ 1 << self.number(7)]) + raw[at + 1 :]
            elif kind == 2:
                raw = raw[:at] + (word := self.pick(WORDS)) + raw[at + (len(word) if self.chance(2) else 0) :]
            elif kind == 3:
                raw = raw[:at] + raw[at + size * (1 + self.number(63)) :]
            elif kind == 4:
                raw = raw[: at + size] + raw[at : at + size] * (1 + self.number(3)) + raw[at + size :]
            else:
                raw = raw[:at]
        return raw
