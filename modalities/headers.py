"""What the header of a picture says, read from as few bytes as it takes, without decoding anything.

Written here and not left to Pillow: its plugins read a WebP whole, and warn of broken EXIF as they open a file. JPEG,
PNG, WebP, GIF and BMP are read; of an animation the first frame. What is refused here is found when rows are measured,
what only decoding tells when a sequence is built.
"""

import re
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from modalities.geometry import ImageError, Size
from zephon.types import Blob

MAX_SOURCE_PIXELS = 89_478_485
"""A larger picture is refused: a quarter of a GiB as RGB, Pillow's default."""

MAX_SOURCE_SIDE = 65_535

MAX_SOURCE_BYTES = 1024**3
"""A larger file is refused: as many pixels of 64 bits, not compressed, take less."""

_FIRST, _GROWTH = 4096, 16


class Header(NamedTuple):
    """What a header says. Sides are those of the stored pixels, before they are turned."""

    kind: str
    height: int
    width: int
    turn: int = 1  # EXIF orientation
    plain: bool = True  # of WebP: no alpha, no animation
    channels: int = 3  # of JPEG

    def shown(self) -> Size:
        """(height, width) of the picture as it is shown, turned as EXIF says."""
        return (self.width, self.height) if self.turn > 4 else (self.height, self.width)


class Prefix:
    """The first bytes of a blob, read in growing steps."""

    def __init__(self, blob: Blob) -> None:
        self._blob, self._data, self.size = blob, blob.head(_FIRST), blob.size

    def take(self, start: int, size: int) -> bytes:
        if start + size > len(self._data) < self.size:
            self._data = self._blob.head(max(start + size, _GROWTH * len(self._data)))
        part = self._data[start : start + size]
        if len(part) < size:
            raise ImageError(f"a file that ends within its header, after {len(self._data):,} bytes")
        return part

    def start(self) -> bytes:
        return self._data[:32]


def read_header(blob: Blob) -> Header:
    """What the header of a picture says.

    Reads 4 KiB, then 64 KiB and so on where a header is longer; a WebP whose flags promise EXIF is read up to it. Takes
    15 µs of CPU for a JPEG in a tar file in the page cache.

    Args:
        blob: the file.

    Raises:
        ImageError: it is empty or of another format, its header is broken, or it is too large.
    """
    if not blob.size:
        raise ImageError("an empty file")
    if blob.size > MAX_SOURCE_BYTES:
        raise ImageError(f"a file of {blob.size:,} bytes; at most {MAX_SOURCE_BYTES:,} are read")
    prefix = Prefix(blob)
    start = prefix.start()
    read = next((read for magic, read in _READERS if magic.match(start)), None)
    if read is None:
        found = next((name for magic, name in _OTHERS if magic.match(start)), f"a file that begins with {start[:12]!r}")
        raise ImageError(f"{found}; images are JPEG, PNG, WebP, GIF or BMP")
    header = read(prefix)
    height, width = header.shown()
    if min(height, width) < 1 or max(height, width) > MAX_SOURCE_SIDE or height * width > MAX_SOURCE_PIXELS:
        raise ImageError(
            f"a {header.kind} of {height:,} by {width:,} pixels (height by width); read are 1 to {MAX_SOURCE_SIDE:,} a "
            f"side and at most {MAX_SOURCE_PIXELS:,} in all"
        )
    return header


def segments(prefix: Prefix) -> Iterator[tuple[int, int, int]]:
    """The segments of a JPEG from the first to a start of scan: marker, where its content begins, bytes of that."""
    at = 2
    while True:
        for _ in range(_FIRST):  # libjpeg passes what is between segments
            fill, marker = prefix.take(at, 2)
            if fill == 0xFF and marker not in (0, 0xFF):
                break
            at += 1
        else:
            raise ImageError(f"a JPEG without a marker before byte {at:,}")
        at += 2
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # these stand alone
            continue
        if marker == 0xD9:
            raise ImageError("a JPEG that ends before its first scan")
        (size,) = struct.unpack(">H", prefix.take(at, 2))
        yield marker, at + 2, size - 2
        if marker == 0xDA:
            return
        at += max(size, 2)


def _jpeg_header(prefix: Prefix) -> Header:
    turn = 0
    for marker, at, size in segments(prefix):
        if marker == 0xE1 and not turn and prefix.take(at, min(size, 6)) == b"Exif\0\0":
            turn = _orientation(prefix.take(at, size))
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            depth, height, width, channels = struct.unpack(">BHHB", prefix.take(at, 6))
            if marker > 0xC2 or depth != 8 or channels not in (1, 3, 4):
                raise ImageError(
                    f"a JPEG of coding process {marker - 0xC0} with {channels} channels of {depth} bits; read are "
                    f"baseline, extended and progressive (0, 1, 2) with 1, 3 or 4 channels of 8 bits"
                )
            return Header("JPEG", height, width, turn or 1, channels=channels)
    raise ImageError("a JPEG without a frame header before its first scan")


def _png_header(prefix: Prefix) -> Header:
    width, height = struct.unpack(">II", prefix.take(16, 8))
    at = 8
    while (kind := prefix.take(at + 4, 4)) not in (b"IDAT", b"IEND"):
        (size,) = struct.unpack(">I", prefix.take(at, 4))
        if kind == b"eXIf":
            return Header("PNG", height, width, _orientation(prefix.take(at + 8, size)))
        at += size + 12
    return Header("PNG", height, width)


def _webp_header(prefix: Prefix) -> Header:
    kind = prefix.take(12, 4)
    if kind == b"VP8 " and prefix.take(23, 3) == b"\x9d\x01\x2a":
        width, height = (side & 0x3FFF for side in struct.unpack("<HH", prefix.take(26, 4)))
        return Header("WebP", height, width)
    if kind == b"VP8L" and prefix.take(20, 1) == b"\x2f":
        (bits,) = struct.unpack("<I", prefix.take(21, 4))
        return Header("WebP", (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1, plain=not bits >> 28 & 1)
    if kind != b"VP8X":
        raise ImageError(f"a WebP whose first chunk is {kind!r}")
    flags, width, height = (int.from_bytes(prefix.take(at, n), "little") for at, n in ((20, 1), (24, 3), (27, 3)))
    at, turn, end = 30, 1, min(8 + int.from_bytes(prefix.take(4, 4), "little"), prefix.size)
    while flags & 0x08 and at + 8 <= end:
        name, size = struct.unpack("<4sI", prefix.take(at, 8))
        if name == b"EXIF":
            turn = _orientation(prefix.take(at + 8, size))
            break
        at += 8 + size + size % 2
    return Header("WebP", height + 1, width + 1, turn, plain=not flags & 0x12)


def _gif_header(prefix: Prefix) -> Header:
    """As in Pillow, the screen grows where the first frame is larger."""
    width, height, flags = struct.unpack("<HHB", prefix.take(6, 5))
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    block = b""
    for _ in range(_FIRST):
        block, at = prefix.take(at, 1), at + 1
        if block in b",;":
            break
        if block == b"!":
            at += 1
            while size := prefix.take(at, 1)[0]:
                at += size + 1
            at += 1
    if block != b",":
        raise ImageError("a GIF without a picture")
    left, top, wide, tall = struct.unpack("<HHHH", prefix.take(at, 8))
    return Header("GIF", max(height, top + tall), max(width, left + wide))


def _bmp_header(prefix: Prefix) -> Header:
    (size,) = struct.unpack("<I", prefix.take(14, 4))
    width, height = struct.unpack("<HH", prefix.take(18, 4)) if size == 12 else struct.unpack("<ii", prefix.take(18, 8))
    return Header("BMP", abs(height), width)


def _orientation(exif: bytes) -> int:
    """The orientation that EXIF says, 1 to 8; 1 where it says none that can be read."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    try:
        (at,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, entry)
            if tag == 0x0112:
                return value if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:  # no TIFF header, or an offset outside
        pass
    return 1


_READERS: tuple[tuple[re.Pattern[bytes], Callable[[Prefix], Header]], ...] = (
    (re.compile(rb"\xff\xd8\xff"), _jpeg_header),
    (re.compile(re.escape(b"\x89PNG\r\n\x1a\n") + rb"\0\0\0\rIHDR"), _png_header),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), _webp_header),
    (re.compile(rb"GIF8[79]a"), _gif_header),
    (re.compile(rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0", re.DOTALL), _bmp_header),
)

_OTHERS = (
    (re.compile(rb"II\*\0|MM\0\*"), "a TIFF"),
    (re.compile(rb"....ftypavi[fs]", re.DOTALL), "an AVIF"),
    (re.compile(rb"....ftyp", re.DOTALL), "a HEIC, MP4 or another file of that family"),
    (re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "), "a JPEG XL"),
    (re.compile(rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  "), "a JPEG 2000"),
    (re.compile(rb"\s*(\xef\xbb\xbf)?\s*<(\?xml|svg|!doctype|html)", re.IGNORECASE), "a page of HTML, or an SVG"),
    (re.compile(rb"%PDF"), "a PDF"),
    (re.compile(rb"\0\0[\1\2]\0"), "an icon"),
)
"""For messages only."""
