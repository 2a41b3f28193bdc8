"""From the bytes of a picture to pixels: its size from the header alone, then RGB of exactly the size that is wanted.

Stateless, and safe in any number of threads. A picture is decided by its own bytes and nothing else: no option of
Pillow or torch changes what comes out, and none is changed. What is read: JPEG (MPO's first picture with it), PNG,
WebP, GIF and BMP, of an animation the first frame.

JPEG and plain WebP go through torchvision's operators, as in TorchTitan, all else through Pillow. All are resized by
torch's integer kernel, whose pixels do not depend on threads or vector units (compared: default, AVX2 and AVX-512; 1, 2
and 4 threads), nor do those of libjpeg-turbo. Pixels of RGB files are TorchTitan's, bit by bit.

CPU time of a JPEG of 0.87 Mpixel that becomes 0.24 (`benchmarks/image_parity.py`): 3.2 ms, of which decoding takes 1.9,
resizing 0.9, patches 0.27, the header 0.015. The two operators alone take 2.7 there, TorchTitan's `process_image` 4.7.

| what | rule |
|---|---|
| orientation | EXIF's (JPEG: before the frame header; PNG: before the pixels; WebP: anywhere), never XMP's |
| turned pictures | resized, then turned: a quarter turn differs by at most 3 of 255 from the other order |
| transparency | laid over a background, before resizing |
| CMYK | as Adobe writes it (inverted), turned to RGB without a profile, as in Pillow |
| 16 bits a channel | the upper 8 |
| ICC profiles, gamma | ignored, as in TorchTitan and transformers |
"""

import re
from collections.abc import Callable
from io import BytesIO
from zlib import crc32

import numpy as np
import PIL
import torch
import torchvision.io  # registers the operators that decode
from numpy.typing import NDArray
from PIL import BmpImagePlugin, GifImagePlugin, Image, ImageFile, WebPImagePlugin, features

from modalities.geometry import ImageError, Size
from modalities.headers import Header, Prefix, read_header, segments
from modalities.media import Bytes
from zephon.errors import UsageError

Pixels = NDArray[np.uint8]
Color = tuple[int, int, int]

MAX_SCANS = 100
"""Of a JPEG; a progressive one has about 10. Each is a pass over all pixels (0.7 ns each) for as little as 33 bytes."""

_RGB = 3  # torchvision's ImageReadMode


def load(data: bytes, size: Size, background: Color = (255, 255, 255), header: Header | None = None) -> Pixels:
    """Decode a picture, turn it upright, make it RGB and resize it (bicubic, antialiased).

    Args:
        data: the file.
        size: (height, width) to resize to, of the picture as it is shown.
        background: RGB that transparent parts are laid over.
        header: of the file, where it has been read before.

    Returns:
        uint8 [height, width, 3], of any strides.

    Raises:
        ImageError: as of `read_header`; or the file is broken, cut off, or of another size than its header says. JPEG
            has no checksum: there, data that ends early is found where the right edge would be gray (not in later
            scans of a progressive one), flipped bits are not.
        UsageError: `PIL.ImageFile.LOAD_TRUNCATED_IMAGES` is set, and this is a GIF, a BMP, or a WebP with alpha or
            animation.
    """
    header = header or read_header(Bytes(data))
    try:
        pixels = _DECODERS[header.kind](data, header, background)
    except (ImageError, UsageError, MemoryError):
        raise
    except Exception as error:  # whatever a decoder makes of broken bytes
        if "DefaultCPUAllocator" in str(error):  # torch has no memory: no fault of the picture
            raise
        raise ImageError(f"a {header.kind} that cannot be decoded: {_reason(error)}") from error
    if pixels.shape[:2] != (header.height, header.width):
        raise ImageError(
            f"a {header.kind} of {pixels.shape[0]:,} by {pixels.shape[1]:,} pixels whose header says "
            f"{header.height:,} by {header.width:,}"
        )
    height, width = size
    return _turned(_resized(pixels, (width, height) if header.turn > 4 else size), header.turn)


def codec_versions() -> dict[str, str]:
    """Versions of what decides pixels.

    The wheels of torchvision bring their own libjpeg-turbo, libpng and libwebp. The processor is not among them: torch
    resizes to the same pixels with ATEN_CPU_CAPABILITY default, AVX2 and AVX-512.
    """
    return {
        "torch": str(torch.__version__),
        "torchvision": torchvision.__version__,
        "pillow": PIL.__version__,
        "pillow's libwebp": str(features.version("webp")),
    }


def _reason(error: Exception) -> str:
    """The first line of a message, without the place in torchvision's source that it begins with."""
    return re.sub(r"^.*\.cpp:\d+, ", "", (str(error) or type(error).__name__).splitlines()[0])


def _decode_jpeg(data: bytes, header: Header, background: Color) -> Pixels:
    """Decoded, and looked at: libjpeg fills what is missing with gray, and warns where no program can see it."""
    markers = list(segments(Prefix(Bytes(data))))
    one_scan = data[markers[-1][1]] >= header.channels and all(marker != 0xC2 for marker, _, _ in markers)
    if not one_scan and (scans := data.count(b"\xff\xda")) > MAX_SCANS:  # counting takes up to 2 ns a byte
        raise ImageError(f"a JPEG of {scans:,} scans; at most {MAX_SCANS} are decoded")
    pixels = _pixels(torch.ops.image.decode_jpeg(_tensor(data), _RGB, False))
    gray = 64 if header.channels == 4 else 128  # RGB of what has no coefficients
    if (pixels[::-8, -1] == gray).all(axis=1).any() and pixels.shape[:2] == (header.height, header.width):
        _refuse_early_end(data, header)
    return pixels


def _refuse_early_end(data: bytes, header: Header) -> None:
    """Raise where data of a JPEG ends before its last row, or before the last column of restart intervals.

    What follows data that is whole does not change pixels; where it was cut off, it is read as part of it. So the
    picture is decoded with other bytes behind all data of its first scan: thrice, by Pillow, which writes no warnings,
    and only where the right edge has a spot of that gray.
    """
    *_, (_, scan, _) = segments(Prefix(Bytes(data)))
    end = re.compile(rb"\xff[^\0\xff\xd0-\xd7]").search(data, scan)
    cut = end.start() if end else len(data)
    intervals, mode = re.split(rb"(?=\xff[\xd0-\xd7])", data[scan:cut]), "CMYK" if header.channels == 4 else "RGB"
    found = set[bytes]()
    for more in (b"", bytes(range(0x35, 0xF5)), bytes(range(0xF5, 0x35, -3))):
        padded = data[:scan] + b"".join(part + more for part in intervals) + data[cut:]
        found.add(Image.frombytes(mode, (header.width, header.height), padded, "jpeg", mode, "").tobytes())
    if len(found) > 1:
        raise ImageError("a JPEG whose data ends early: a part of it would be gray")


def _decode_png(data: bytes, header: Header, background: Color) -> Pixels:
    """Checksums here, pixels by Pillow's inflating decoder: torchvision 0.29's crashes the process on broken data."""
    parts = _png_parts(data)
    depth, color, interlaced, key = data[24], data[25], data[28], parts.get("tRNS", b"")
    if (depth, color) not in _PNG_MODES or interlaced > 1:
        raise ImageError(f"a PNG of colour type {color} with {depth} bits, interlaced by method {interlaced}")
    mode, raw = _PNG_MODES[depth, color]
    image = Image.frombytes(mode, (header.width, header.height), parts["IDAT"], "zip", raw, interlaced)
    if color == 3:
        if "PLTE" not in parts:
            raise ImageError("a PNG without its palette")
        return _flattened(_palette(parts["PLTE"], key)[np.asarray(image)], background)
    if color in (4, 6):
        return _flattened(np.asarray(image.convert("RGBA")), background)
    pixels = np.array(image.convert("L") if mode == "1" else image)
    if not color:
        pixels = np.repeat(pixels[:, :, np.newaxis], 3, axis=2)
    levels = pixels if pixels.dtype == np.uint8 else (pixels >> 8).astype(np.uint8)
    if key:  # one colour is transparent; of 16 bits of RGB, the upper 8 are compared
        scale = 255 // (2**depth - 1) if depth < 8 else 1
        clear = np.frombuffer(key, ">u2") * scale >> (8 if raw == "RGB;16B" else 0)
        levels[(pixels == clear).all(axis=2)] = background
    return levels


_PNG_MODES = {
    (1, 0): ("1", "1"), (2, 0): ("L", "L;2"), (4, 0): ("L", "L;4"), (8, 0): ("L", "L"), (16, 0): ("I;16", "I;16B"),
    (8, 2): ("RGB", "RGB"), (16, 2): ("RGB", "RGB;16B"),
    (1, 3): ("P", "P;1"), (2, 3): ("P", "P;2"), (4, 3): ("P", "P;4"), (8, 3): ("P", "P"),
    (8, 4): ("LA", "LA"), (16, 4): ("RGBA", "LA;16B"), (8, 6): ("RGBA", "RGBA"), (16, 6): ("RGBA", "RGBA;16B"),
}  # fmt: skip
"""Bits and colour type of a PNG: Pillow's mode, and its name for the bytes."""


def _png_parts(data: bytes) -> dict[str, bytes]:
    """What the chunks of a PNG hold that decide pixels, those of one kind joined; compares their checksums."""
    at, kind, parts = 8, b"", dict[str, list[bytes]]()
    while kind != b"IEND":
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 12 + size
        if end > len(data):
            raise ImageError(f"a PNG that is cut off: {len(data):,} bytes, and no end")
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            if crc32(data[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
                raise ImageError(f"a PNG whose chunk {kind.decode()} at byte {at:,} has a wrong checksum")
            parts.setdefault(kind.decode(), []).append(data[at + 8 : end - 4])
        at = end
    return {name: b"".join(contents) for name, contents in parts.items()}


def _palette(colors: bytes, alpha: bytes) -> Pixels:
    """uint8 [256, 4]; RGB alone, [256, 3], where everything is opaque."""
    table = np.zeros((256, 4), np.uint8)
    table[: len(colors) // 3, :3] = np.frombuffer(colors, np.uint8).reshape(-1, 3)
    table[:, 3] = np.frombuffer(alpha.ljust(256, b"\xff"), np.uint8)
    return table if alpha else table[:, :3]


def _decode_webp(data: bytes, header: Header, background: Color) -> Pixels:
    if header.plain:
        return _pixels(torch.ops.image.decode_webp(_tensor(data), _RGB))
    return _decode_by_pillow(data, header, background)


def _decode_by_pillow(data: bytes, header: Header, background: Color) -> Pixels:
    """The plugin is called itself: `Image.open` would apply the process's own limit, of which warnings come."""
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise UsageError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set in this process: images that are cut off would be filled with "
            "grey and trained on. Unset it."
        )
    plugins = {"GIF": GifImagePlugin.GifImageFile, "BMP": BmpImagePlugin.BmpImageFile}
    with plugins.get(header.kind, WebPImagePlugin.WebPImageFile)(BytesIO(data)) as image:
        if image.size != (header.width, header.height):
            return np.empty((image.height, image.width, 0), np.uint8)  # refused by who called, before it is decoded
        return _flattened(np.array(image.convert("RGBA")), background)


_DECODERS: dict[str, Callable[[bytes, Header, Color], Pixels]] = {
    "JPEG": _decode_jpeg,
    "PNG": _decode_png,
    "WebP": _decode_webp,
    "GIF": _decode_by_pillow,
    "BMP": _decode_by_pillow,
}


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)  # a copy: torch warns of memory that is read-only


def _pixels(image: torch.Tensor) -> Pixels:
    """uint8 [3, height, width] to a view [height, width, 3]."""
    return image.permute(1, 2, 0).numpy()


def _flattened(pixels: Pixels, background: Color) -> Pixels:
    """RGBA over a background, rounded to nearest."""
    if pixels.shape[2] == 3:
        return pixels
    canvas, image = Image.new("RGB", pixels.shape[1::-1], background), Image.fromarray(np.ascontiguousarray(pixels))
    canvas.paste(image, mask=image.getchannel("A"))
    return np.array(canvas)


def _resized(pixels: Pixels, size: Size) -> Pixels:
    """In memory by pixels, the layout for which torch has its fastest kernel; the layout does not change values."""
    if pixels.shape[:2] == size:
        return pixels
    batch = torch.from_numpy(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    scaled = torch.nn.functional.interpolate(batch, size=size, mode="bicubic", align_corners=False, antialias=True)
    return _pixels(scaled[0])


def _turned(pixels: Pixels, turn: int) -> Pixels:
    """A view of the pixels as EXIF orientation `turn` says."""
    if turn > 4:
        pixels = pixels.transpose(1, 0, 2)
    return pixels[:: -1 if turn in (3, 4, 7, 8) else 1, :: -1 if turn in (2, 3, 6, 7) else 1]
