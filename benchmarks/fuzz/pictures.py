"""Pictures: headers beside Pillow's, decoding that gives pixels or an error, and paths that stay in their folder."""

import functools
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from PIL import Image

from benchmarks.fuzz.feed import Feed
from benchmarks.fuzz.law import LossError, equal, refused
from modalities import headers
from modalities.geometry import ImageError
from modalities.headers import read_header
from modalities.images import load
from modalities.media import Bytes, MediaError, media
from zephon.errors import ZephonError


@contextmanager
def _limits() -> Iterator[None]:
    """Few pixels, so that memory is that of small pictures; and no limit of the oracle's own."""
    before = headers.MAX_SOURCE_PIXELS, Image.MAX_IMAGE_PIXELS
    headers.MAX_SOURCE_PIXELS, Image.MAX_IMAGE_PIXELS = 1 << 20, None
    try:
        yield
    finally:
        headers.MAX_SOURCE_PIXELS, Image.MAX_IMAGE_PIXELS = before


@functools.cache
def _seeds() -> list[bytes]:
    """Small pictures of every kind."""
    y, x = np.mgrid[:17, :24]
    rgb = np.stack([x * 10, y * 15, (x * y) % 256], axis=2).astype(np.uint8)
    alpha = np.dstack([rgb, x * 10]).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    ways: list[tuple[Any, str, dict[str, Any]]] = [
        (rgb, "JPEG", {}), (rgb, "JPEG", {"progressive": True, "exif": exif}),
        (rgb[:, :, 0], "JPEG", {"restart_marker_rows": 1}),
        (rgb, "PNG", {"exif": exif}), (alpha, "PNG", {}), (rgb[:, :, 0], "PNG", {}), (rgb, "WEBP", {}),
        (alpha, "WEBP", {"lossless": True, "exif": exif}),
        (rgb, "GIF", {}), (rgb, "BMP", {}), (rgb[:, :, 0], "BMP", {}),
    ]  # fmt: skip
    out = list[bytes]()
    for pixels, kind, options in ways:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, kind, **options)
        out.append(file.getvalue())
    file = io.BytesIO()
    Image.fromarray(rgb).quantize(16).save(file, "PNG", transparency=3)
    cmyk = io.BytesIO()
    Image.fromarray(rgb).convert("CMYK").save(cmyk, "JPEG")
    frames = io.BytesIO()
    Image.fromarray(rgb).save(frames, "WEBP", save_all=True, append_images=[Image.fromarray(255 - rgb)])
    return [*out, file.getvalue(), cmyk.getvalue(), frames.getvalue()]


def _mended(raw: bytes) -> bytes:
    """A PNG whose chunks have right checksums, so that damage gets further."""
    at, out = 8, bytearray(raw[:8])
    while at + 12 <= len(raw):
        size = min(int.from_bytes(raw[at : at + 4], "big"), len(raw) - at - 12)
        body = raw[at + 4 : at + 8 + size]
        out += raw[at : at + 4] + body + crc32(body).to_bytes(4, "big")
        at += 12 + size
    return bytes(out)


def _picture(feed: Feed) -> bytes:
    raw = feed.rest() if feed.chance(16) else feed.edit(feed.pick(_seeds()))
    return _mended(raw) if raw.startswith(b"\x89PNG") and not feed.chance(4) else raw


@_limits()
def image_header(data: bytes, folder: Path) -> str:
    """The size that a header says is the one that Pillow finds, where both find one."""
    raw = _picture(Feed(data))
    try:
        header = read_header(Bytes(raw))
    except ImageError:
        return "refused"
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(raw)) as image:
            equal(f"(kind, width, height) of a {header.kind}", (header.width, header.height), image.size)
    except LossError:
        raise
    except Exception:  # Pillow has many, and decoding will tell
        return f"{header.kind}, not Pillow's"
    return header.kind


@_limits()
def image_pixels(data: bytes, folder: Path) -> str:
    """Decoding gives the same pixels twice, or an `ImageError`."""
    feed = Feed(data)
    size = (1 + feed.number(40), 1 + feed.number(40))
    raw = _picture(feed)
    try:
        pixels = load(raw, size)
    except ImageError:
        return "refused"
    equal("shape and kind", (pixels.shape, pixels.dtype), ((*size, 3), np.dtype(np.uint8)))
    equal("pixels of a second time", load(raw, size).tobytes(), pixels.tobytes())
    return read_header(Bytes(raw)).kind


_STEPS = (
    "a.jpg",
    "sub",
    "..",
    ".",
    "",
    "out",
    "loop",
    "dangling",
    "up.jpg",
    "pipe",
    "~",
    "a.jpg\0",
    "\ud800",
    "n" * 300,
    "http:",
)


def media_path(data: bytes, folder: Path) -> str:
    """Whatever a row says, what is read lies in the source's folder."""
    feed, root, outside = Feed(data), folder / "images", folder / "secret"
    if not root.exists():
        (root / "sub").mkdir(parents=True)
        outside.mkdir()
        for file in (root / "a.jpg", root / "sub" / "a.jpg", outside / "a.jpg"):
            file.write_bytes(b"secret" if file.parent == outside else b"picture")
        for name, to in (("out", outside), ("loop", "loop"), ("dangling", "nothing"), ("up.jpg", outside / "a.jpg")):
            (root / name).symlink_to(to)
    steps = [feed.pick(_STEPS) if not feed.chance(6) else feed.take(4).decode("latin-1") for _ in range(feed.number(5))]
    path: Any = "/".join(steps)
    if feed.chance(4):
        path = feed.pick(
            [str(outside / "a.jpg"), str(root / "a.jpg"), {"path": path}, {"bytes": None, "path": path}, {}, 7, None]
        )
    try:
        blob = media(path, root)
        held = (blob.read(), blob.head(3))
    except MediaError:
        return "refused"
    except ZephonError as error:
        raise LossError(f"one row's path stops the run: {refused(error, root)}: {error}") from error
    equal("what is read", held, (b"picture", b"pic"))
    return "read"
