"""Images: sizes and pixels beside TorchTitan, transformers and Pillow; odd and broken files; what may not matter.

Tolerances, fixed before anything was measured: grids equal; pixels of an image within 2 of 255 on average.
"""

import hashlib
import io
import math
import os
import random
import struct
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps
from torchtitan.hf_datasets.multimodal.utils import image as titan
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from modalities.geometry import Geometry, ImageError, expand, patchify
from modalities.headers import MAX_SOURCE_PIXELS, read_header
from modalities.images import _DECODERS, codec_versions, load
from modalities.presets import PRESETS
from zephon.errors import UsageError

MEAN = 2.0  # levels of 255
HALF = (0.5, 0.5, 0.5)
QWEN3, QWEN2 = PRESETS["qwen3_5"].geometry, PRESETS["qwen2_vl"].geometry


@dataclass
class File:
    """A blob that remembers how much of it was read."""

    data: bytes
    seen: int = 0

    def __post_init__(self) -> None:
        self.size, self.place = len(self.data), "a test"

    def head(self, size: int) -> bytes:
        self.seen = max(self.seen, min(size, self.size))
        return self.data[:size]

    def read(self) -> bytes:
        return self.head(self.size)


# --- pictures ---


def scene(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Waves, a hard edge and some noise: smooth, sharp and busy parts."""
    rng, (y, x) = np.random.default_rng(seed), np.mgrid[0:height, 0:width]
    waves = [127 + 110 * np.sin(x / (7 + 5 * c) + seed) * np.cos(y / (9 + 3 * c)) for c in range(channels)]
    pixels = np.stack(waves, axis=-1) + rng.normal(0, 6, (height, width, channels))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = 230 - 40 * np.arange(channels)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def picture(height: int, width: int, channels: int = 3, seed: int = 0) -> Image.Image:
    return Image.fromarray(scene(height, width, channels, seed))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def exif(turn: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = turn
    return tags.tobytes()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc32(kind + content))


def ordinary() -> Iterator[tuple[str, bytes]]:
    sizes = [(64, 64), (97, 131), (480, 640), (333, 777), (1024, 768), (28, 300), (900, 60), (511, 513)]
    for seed, (height, width) in enumerate(sizes):
        image = picture(height, width, seed=seed)
        yield f"{height}x{width} JPEG", saved(image, "JPEG", quality=(60, 75, 90, 95)[seed % 4], subsampling=seed % 3)
        yield f"{height}x{width} progressive", saved(image, "JPEG", progressive=True, optimize=True)
        if seed < 4:
            yield f"{height}x{width} PNG", saved(image, "PNG")
            yield f"{height}x{width} WebP", saved(image, "WEBP", quality=70)
    yield "gray JPEG", saved(picture(200, 310).convert("L"), "JPEG")


def real(most: int = 200) -> Iterator[tuple[str, bytes]]:
    """Pictures of the tar files that the environment names, if it does."""
    for path in filter(None, os.environ.get("ZEPHON_IMAGES", "").split(os.pathsep)):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith((".jpg", ".png", ".webp")) and most > 0:
                    most -= 1
                    file = tar.extractfile(member)
                    assert file
                    yield member.name, file.read()


PICTURES = dict(ordinary())


def ours(data: bytes, geometry: Geometry) -> tuple[torch.Tensor, list[int]]:
    size = geometry.target(*read_header(File(data)).shown())
    found = torch.from_numpy(patchify(load(data, size), geometry))
    return expand(found, geometry, HALF, HALF), list(geometry.grid(*size))


def by_titan(data: bytes, geometry: Geometry) -> tuple[torch.Tensor, list[int]] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision.io is deprecated; as an error it would be caught in there
        image = titan.process_image(
            data,
            patch_size=geometry.patch_size,
            merge_size=geometry.merge_size,
            min_pixels=geometry.min_pixels,
            max_pixels=geometry.max_pixels,
        )
    if image is None:
        return None
    patches, grid = titan.vision_to_patches(
        image, geometry.patch_size, geometry.temporal, geometry.merge_size, geometry.order
    )
    return patches, grid.tolist()


def by_transformers(data: bytes, geometry: Geometry) -> tuple[torch.Tensor, list[int]]:
    processor = Qwen2VLImageProcessor(
        patch_size=geometry.patch_size,
        merge_size=geometry.merge_size,
        temporal_patch_size=geometry.temporal,
        size={"shortest_edge": geometry.min_pixels, "longest_edge": geometry.max_pixels},
        image_mean=list(HALF),
        image_std=list(HALF),
    )
    found = processor(images=[Image.open(io.BytesIO(data))], return_tensors="pt")
    return found["pixel_values"], found["image_grid_thw"][0].tolist()


def gap(left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Mean and largest difference in levels of 255."""
    levels = (left - right).abs() * 127.5
    return levels.mean().item(), levels.max().item()


# --- sizes ---


GEOMETRIES = st.builds(
    lambda patch, merge, least, factor: Geometry(patch, merge, 2, "block", least, least * factor),
    st.sampled_from([8, 14, 16]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([784, 3136, 65_536]),
    st.sampled_from([4, 16, 256, 5000]),
) | st.sampled_from([replace(one.geometry, max_patches=None, max_patches_per_side=None) for one in PRESETS.values()])
SIDES = st.integers(1, 65_535) | st.integers(1, 300)


@settings(max_examples=1500)
@given(height=SIDES, width=SIDES, geometry=GEOMETRIES)
def test_targets_are_torchtitans(height: int, width: int, geometry: Geometry) -> None:
    def theirs() -> tuple[int, ...]:
        return titan.resize_to_pixel_budget(
            height,
            width,
            patch_size=geometry.patch_size,
            merge_size=geometry.merge_size,
            min_pixels=geometry.min_pixels,
            max_pixels=geometry.max_pixels,
        )

    try:
        found = geometry.target(height, width)
    except ImageError:
        with pytest.raises(ValueError, match="aspect ratio"):
            theirs()
        return
    assert theirs() == (*found, 0, 0)
    assert geometry.patches(*found) == math.prod(geometry.grid(*found))
    assert geometry.tokens(*found) * geometry.merge_size**2 == geometry.patches(*found)


@settings(max_examples=1500)
@given(
    height=st.integers(50, 20_000), width=st.integers(50, 20_000), geometry=GEOMETRIES,
    cap=st.integers(1, 5000), side=st.integers(4, 600), tighter=st.none() | st.integers(16, 5000),
)  # fmt: skip
def test_caps_hold_and_shrink_by_the_rule(
    height: int, width: int, geometry: Geometry, cap: int, side: int, tighter: int | None
) -> None:
    unit, merge = geometry.unit, geometry.merge_size
    capped = replace(geometry, max_patches=cap + merge**2, max_patches_per_side=side)
    try:
        free = geometry.target(height, width)
    except ImageError:
        return
    found = capped.target(height, width, tighter)
    most = min(cap + merge**2, tighter or cap + merge**2)
    assert found[0] % unit == found[1] % unit == 0 < min(found)
    assert capped.patches(*found) <= most
    assert max(capped.grid(*found)) <= side
    assert found[0] <= free[0]
    assert found[1] <= free[1]
    if geometry.patches(*free) <= most and max(geometry.grid(*free)) <= side:
        assert found == free
    elif min(found) > unit and max(free) <= side // merge * unit:  # one scale for both sides, rounded down
        scale = math.sqrt(most // merge**2 * unit**2 / (height * width))
        for got, full, before in zip(found, (height, width), free, strict=True):
            assert got == before or abs(got - math.floor(full * scale / unit + 1e-9) * unit) == 0


def test_a_tighter_cap_never_makes_an_image_larger() -> None:
    for height, width in ((300, 4000), (97, 131), (3000, 2000), (60, 9000)):
        sizes = [QWEN2.target(height, width, cap) for cap in range(4, 1500)]
        counts = [QWEN2.patches(*size) for size in sizes]
        assert counts == sorted(counts)


def test_impossible_sizes_and_geometries_are_refused() -> None:
    for height, width in ((0, 5), (5, 0), (10_000, 8), (1, 201), (60, 12_001)):
        with pytest.raises(ImageError):
            QWEN2.target(height, width)
    with pytest.raises(ImageError, match="room for 3"):
        QWEN2.target(100, 100, 3)
    for change in (
        {"order": "spiral"}, {"patch_size": 0}, {"max_pixels": 1}, {"max_patches": 3}, {"max_patches_per_side": 1},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            replace(QWEN2, **change)


# --- patches ---


@pytest.mark.parametrize("order", ["block", "raster"])
@pytest.mark.parametrize(("side", "merge"), [(16, 2), (14, 2), (8, 1), (7, 3)])
def test_patches_are_torchtitans(order: str, side: int, merge: int) -> None:
    geometry = Geometry(side, merge, 2, cast(Any, order), 1, 10**6)
    pixels = np.random.default_rng(0).integers(0, 256, (3 * geometry.unit, 5 * geometry.unit, 3), dtype=np.uint8)
    found = patchify(pixels, geometry)
    assert (found.dtype, found.shape) == (np.uint8, (15 * merge**2, 3 * side**2))
    mean, std = (0.48, 0.45, 0.4), (0.26, 0.261, 0.27)
    image = titan.TVF.normalize(torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, list(mean), list(std))
    theirs, grid = titan.vision_to_patches(image.permute(1, 2, 0)[None], side, 2, merge, order)
    assert tuple(grid.tolist()) == geometry.grid(*pixels.shape[:2])
    torch.testing.assert_close(expand(torch.from_numpy(found), geometry, mean, std), theirs, rtol=0, atol=1e-6)


def test_patches_of_any_layout_go_where_they_are_wanted() -> None:
    geometry, pixels = QWEN3, scene(64, 96)
    plain = patchify(pixels, geometry)
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1)).transpose(1, 2, 0)
    batch = np.zeros((60, 768), np.uint8)
    for layout in (planes, np.asfortranarray(pixels), pixels[::-1, ::-1].copy()[::-1, ::-1]):
        assert np.array_equal(patchify(layout, geometry), plain)
    assert patchify(planes, geometry, batch[30:54]).base is batch
    assert np.array_equal(batch[30:54], plain)
    assert not batch[:30].any()
    assert not batch[54:].any()
    for wrong in (np.zeros((25, 768), np.uint8), np.zeros((24, 1536), np.uint8)[:, ::2]):
        with pytest.raises(ValueError, match="contiguous"):
            patchify(pixels, geometry, wrong)
    with pytest.raises(ValueError, match="whole units"):
        patchify(pixels[:63], geometry)


@pytest.mark.gpu
def test_a_device_expands_as_the_processor_does() -> None:
    found = torch.from_numpy(patchify(scene(64, 96), QWEN3))
    there = expand(found.cuda(), QWEN3, HALF, HALF)
    torch.testing.assert_close(there.cpu(), expand(found, QWEN3, HALF, HALF), rtol=0, atol=1e-6)


# --- parity ---


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_pixels_are_torchtitans(preset: str) -> None:
    geometry = PRESETS[preset].geometry
    for name, data in (*PICTURES.items(), *real()):
        found, theirs = ours(data, geometry), by_titan(data, geometry)
        assert theirs, name
        assert found[1] == theirs[1], name
        assert gap(found[0], theirs[0])[0] <= MEAN, name
        assert gap(found[0], theirs[0])[1] < 1e-3, name  # stricter than promised: the same operators and versions


def test_pixels_are_those_of_transformers() -> None:
    for name, data in (*PICTURES.items(), *real()):
        found, theirs = ours(data, QWEN2), by_transformers(data, QWEN2)
        assert found[1] == theirs[1], name
        mean, most = gap(found[0], theirs[0])
        assert mean <= MEAN, name
        assert most < 1e-2, name  # stricter than promised: they resize with torch as well


def test_pixels_are_those_of_pillow() -> None:
    for name, data in (*PICTURES.items(), *real()):
        size = QWEN2.target(*read_header(File(data)).shown())
        with Image.open(io.BytesIO(data)) as image:
            theirs = np.asarray(image.convert("RGB").resize(size[::-1], Image.Resampling.BICUBIC)).astype(int)
        assert np.abs(load(data, size) - theirs).mean() <= MEAN, name


# --- odd files ---


class Odd:
    """A row of the table.

    Args:
        data: the file.
        expected: height and width that it has, or what an error says.
        there: what TorchTitan makes of it: "same"; "other" pixels or another grid; "none": it is left out; "crash".
        why: where it is not the same.
    """

    def __init__(self, data: bytes, expected: tuple[int, int] | str, there: str = "same", why: str = "") -> None:
        assert why or there == "same" or isinstance(expected, str)
        self.data, self.expected, self.there, self.why = data, expected, there, why


def early(data: bytes) -> bytes:
    """A JPEG whose scan stops in the middle, with the marker of an end."""
    return data[: len(data) // 2] + b"\xff\xd9"


def odd() -> dict[str, Odd]:
    wide, alpha = picture(90, 130), picture(90, 130, 4)
    size, turned = (90, 130), (130, 90)
    jpeg, png, webp = saved(wide, "JPEG"), saved(wide, "PNG"), saved(wide, "WEBP")
    frames = [wide.rotate(180)]
    ignored = "TorchTitan does not read orientation"
    dropped = "TorchTitan drops alpha: what lies under it becomes visible"
    rows = {
        f"{kind} turned {turn}": Odd(
            saved(wide, kind, exif=exif(turn)), turned if turn > 4 else size, "same" if turn == 1 else "other",
            "" if turn == 1 else ignored,
        )
        for kind in ("JPEG", "PNG", "WEBP")
        for turn in range(1, 9)
    }  # fmt: skip
    flat = wide.quantize(8).convert("RGB")
    deep = Image.fromarray(scene(90, 130, 1)[..., 0].astype(np.uint16) * 257 + 3)
    return rows | {
        "CMYK": Odd(saved(wide.convert("CMYK"), "JPEG"), size),
        "progressive": Odd(saved(wide, "JPEG", progressive=True), size),
        "restart markers": Odd(saved(wide, "JPEG", restart_marker_blocks=3), size),
        "garbage behind a JPEG": Odd(jpeg + b"\xff\xd8garbage\0" * 99, size),
        "garbage within a JPEG": Odd(jpeg[:20] + b"\0\1\2" + jpeg[20:], size),
        "fill bytes": Odd(jpeg[:2] + b"\xff" * 9 + jpeg[2:], size),
        "MPO": Odd(saved(wide, "MPO", save_all=True, append_images=frames), size),
        "palette": Odd(saved(wide.quantize(64), "PNG"), size),
        "palette, transparent": Odd(
            saved(wide.quantize(64), "PNG", transparency=bytes(range(0, 256, 4))), size, "other", dropped
        ),
        "RGBA": Odd(saved(alpha, "PNG"), size, "other", dropped),
        "gray and alpha": Odd(saved(alpha.convert("LA"), "PNG"), size, "other", dropped),
        "a transparent colour": Odd(
            saved(flat, "PNG", transparency=flat.getpixel((0, 0))), size, "other", dropped,
        ),
        "16 bits": Odd(saved(deep, "PNG"), size),  # TorchTitan divides, we cut: less than one level
        "one bit": Odd(saved(wide.convert("1"), "PNG"), size),
        "APNG": Odd(saved(wide, "PNG", save_all=True, append_images=frames), size),
        "a comment of 300 kB": Odd(png[:33] + chunk(b"tEXt", b"Comment\0" + b"x" * 300_000) + png[33:], size),
        "EXIF of 60 kB": Odd(saved(wide, "JPEG", exif=exif(1) + b"x" * 60_000), size),
        "broken EXIF": Odd(saved(wide, "JPEG", exif=exif(6)[:18]), size),
        "WebP with alpha": Odd(saved(alpha, "WEBP"), size, "other", dropped),
        "lossless WebP": Odd(saved(wide, "WEBP", lossless=True), size),
        "animated WebP": Odd(
            saved(wide, "WEBP", save_all=True, append_images=frames), size, "none", "TorchTitan decodes no animation"
        ),
        "GIF": Odd(saved(wide, "GIF"), size),
        "animated GIF": Odd(
            saved(wide, "GIF", save_all=True, append_images=frames), size, "none", "TorchTitan gets all frames"
        ),
        "BMP": Odd(saved(wide, "BMP"), size, "none", "torchvision has no BMP"),
        "1 by 1": Odd(saved(wide.resize((1, 1)), "PNG"), (1, 1)),
        "3 by 200": Odd(saved(wide.resize((200, 3)), "JPEG"), (3, 200)),
        "10,000 by 8": Odd(saved(wide.resize((8, 10_000)), "JPEG"), "too narrow", "none"),
        "JPEG without its last byte": Odd(jpeg[:-1], "truncated", "none"),
        "half a JPEG": Odd(jpeg[: len(jpeg) // 2], "truncated", "none"),
        "the header of a JPEG": Odd(jpeg[:150], "ends within its header", "none"),
        "half a JPEG that claims to end": Odd(early(jpeg), "ends early", "other"),  # half grey, in silence
        "half a PNG": Odd(png[: len(png) // 2], "cut off", "none"),
        "a PNG with a flipped bit": Odd(png[:9000] + bytes([png[9000] ^ 1]) + png[9001:], "checksum", "crash"),
        "a PNG that was broken before its checksum": Odd(
            png[:33] + chunk(b"IDAT", b"\0" + png[42:9000]) + chunk(b"IEND", b""), "cannot be decoded", "crash"
        ),
        "half a WebP": Odd(webp[: len(webp) // 2], "cannot be decoded", "none"),
        "TIFF": Odd(saved(wide, "TIFF"), "a TIFF; images are JPEG", "none"),
        "AVIF": Odd(saved(wide, "AVIF"), "an AVIF; images", "none"),
        "a page": Odd(b"\n<!DOCTYPE html><html>not found</html>", "page of HTML", "none"),
        "nothing": Odd(b"", "an empty file", "none"),
        "text": Odd(b"hello, world; this is no picture", "begins with b'hello, world'", "none"),
    }  # fmt: skip


ODD = odd()


@pytest.mark.parametrize("name", sorted(ODD))
def test_odd_files(name: str) -> None:
    case = ODD[name]
    theirs = by_titan(case.data, QWEN2) if case.data and case.there != "crash" else None  # torchvision 0.29.1: SIGSEGV
    if isinstance(case.expected, str):
        with pytest.raises(ImageError, match=case.expected):
            ours(case.data, QWEN2)
        assert (theirs is None) == (case.there in ("none", "crash"))
        return
    assert read_header(File(case.data)).shown() == case.expected
    found, grid = ours(case.data, QWEN2)
    if theirs is None:
        assert case.there == "none"
        return
    same = grid == theirs[1] and gap(found, theirs[0])[0] <= (MEAN if case.there == "same" else 0.01)
    assert same == (case.there == "same"), case.why


def upright(data: bytes, background: tuple[int, int, int] = (255, 255, 255)) -> np.ndarray:
    """What a file shows, by Pillow's own means, of its own size."""
    with Image.open(io.BytesIO(data)) as image:
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        shown = ImageOps.exif_transpose(image).convert("RGBA")
        canvas = Image.new("RGBA", shown.size, (*background, 255))
        return np.asarray(Image.alpha_composite(canvas, shown).convert("RGB")).astype(int)


@pytest.mark.parametrize("name", sorted(name for name, case in ODD.items() if not isinstance(case.expected, str)))
@pytest.mark.parametrize("background", [(255, 255, 255), (0, 90, 200)])
def test_odd_files_show_what_pillow_shows(name: str, background: tuple[int, int, int]) -> None:
    case = ODD[name]
    assert not isinstance(case.expected, str)
    if name in ("broken EXIF", "EXIF of 60 kB", "garbage within a JPEG", "fill bytes"):
        case = Odd(ODD["JPEG turned 1"].data, case.expected)  # Pillow warns of these, or does not open them
        assert np.array_equal(load(ODD[name].data, (90, 130)), load(case.data, (90, 130)))
    shown = load(case.data, case.expected, background)
    assert np.abs(shown - upright(case.data, background)).max() <= 1


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_turned_picture_is_the_upright_one(turn: int) -> None:
    """Resized before it is turned, which is quick, and differs little where rows have become columns."""
    data = saved(picture(300, 410), "PNG", exif=exif(turn))
    plain = saved(Image.fromarray(upright(data).astype(np.uint8)), "PNG")
    size = QWEN2.target(*read_header(File(plain)).shown())
    assert size == QWEN2.target(*read_header(File(data)).shown())
    size = (size[0] // 2, size[1] // 2)
    difference = np.abs(load(data, size).astype(int) - load(plain, size))
    assert difference.max() <= (4 if turn > 4 else 0)
    assert difference.mean() <= 0.5


def test_gray_of_few_bits_and_transparent_colours() -> None:
    """Pillow does not write these, so libpng's own words: a PNG by hand."""
    import zlib

    def made(depth: int, color: int, rows: bytes, key: bytes) -> bytes:
        head = struct.pack(">IIBBBBB", 2, 1, depth, color, 0, 0, 0)
        parts = (chunk(b"IHDR", head), chunk(b"tRNS", key), chunk(b"IDAT", zlib.compress(b"\0" + rows)))
        return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")

    red = (250, 10, 20)
    for data, pixels in (
        (made(2, 0, b"\x60", b"\0\1"), [red, (170, 170, 170)]),  # 1 of 3 is clear
        (made(8, 0, b"\x11\x22", b"\0\x11"), [red, (34, 34, 34)]),
        (made(16, 0, b"\x12\x34\x12\x35", b"\x12\x34"), [red, (18, 18, 18)]),  # one of 65,536
        (made(8, 2, b"\1\2\3\1\2\4", b"\0\1\0\2\0\4"), [(1, 2, 3), red]),
        (made(16, 2, b"\1\0\2\0\3\7\1\0\2\0\4\0", b"\1\0\2\0\3\0"), [red, (1, 2, 4)]),  # by the upper 8 bits
    ):
        assert load(data, (1, 2), red).tolist() == [[list(one) for one in pixels]]


def test_a_gif_whose_first_frame_is_larger_than_its_screen() -> None:
    data = bytearray(saved(picture(90, 130), "GIF"))
    data[6:10] = struct.pack("<HH", 20, 0)
    assert read_header(File(bytes(data))).shown() == (90, 130)
    assert np.array_equal(load(bytes(data), (90, 130)), load(saved(picture(90, 130), "GIF"), (90, 130)))


# --- broken files ---


def outcome(data: bytes) -> str | bytes:
    try:
        return load(data, read_header(File(data)).shown()).tobytes()
    except ImageError as error:
        return str(error)


KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_off_is_never_a_picture(kind: str) -> None:
    """But where only what follows the last pixel is missing: the end mark of a GIF, the padding of a BMP."""
    data = saved(picture(61, 83), kind)
    whole = outcome(data)
    assert isinstance(whole, bytes)
    for cut in (*range(0, len(data) - 40, max(1, len(data) // 150)), *range(len(data) - 40, len(data))):
        found = outcome(data[:cut])
        assert isinstance(found, str) or (kind in ("GIF", "BMP") and cut >= len(data) - 3 and found == whole), cut


@pytest.mark.parametrize("kind", KINDS)
def test_broken_bytes_are_an_error_or_pixels_and_nothing_else(kind: str) -> None:
    """A PNG has checksums: any change of what decides pixels is found. The others have none."""
    data, chance = saved(picture(61, 83), kind), random.Random(kind)
    whole = outcome(data)
    for _ in range(150):
        broken = bytearray(data)
        for _ in range(chance.choice((1, 2, 30))):
            broken[chance.randrange(len(data))] = chance.randrange(256)
        found = outcome(bytes(broken))
        assert isinstance(found, str) or kind != "PNG" or found == whole


def test_a_jpeg_that_ends_in_gray_is_no_broken_one() -> None:
    for mode, color in (("RGB", (128, 128, 128)), ("L", 128)):
        for options in ({}, {"progressive": True}, {"restart_marker_blocks": 2}, {"quality": 5}, {"subsampling": 0}):
            data = saved(Image.new(mode, (83, 61), color), "JPEG", **options)
            assert (load(data, (61, 83)) == 128).all()


def test_early_ends_are_found_wherever_they_are() -> None:
    for options in ({}, {"restart_marker_blocks": 4}, {"quality": 95, "subsampling": 0}):
        data = saved(picture(200, 300), "JPEG", **options)
        begin = data.index(b"\xff\xda") + 20
        for cut in range(begin, len(data) - 200, len(data) // 23):
            assert str(outcome(data[:cut] + b"\xff\xd9" + b"\0" * 50)).startswith("a JPEG"), cut


def frame(process: int = 0xC0, depth: int = 8, height: int = 9, width: int = 9, channels: int = 3) -> bytes:
    return b"\xff\xd8\xff" + bytes([process]) + struct.pack(">HBHHB", 17, depth, height, width, channels) + bytes(9)


SMALL = saved(picture(9, 9), "PNG")
HEADERS: dict[str, tuple[bytes, str]] = {
    "no rows": (frame(height=0), "0 by 9"),
    "65,535 squared": (frame(height=65_535, width=65_535), f"at most {MAX_SOURCE_PIXELS:,}"),
    "a wide PNG": (SMALL[:16] + struct.pack(">II", 70_000, 5) + SMALL[24:], "5 by 70,000 pixels"),
    "a bomb": (SMALL[:16] + b"\xff" * 8 + SMALL[24:], "4,294,967,295"),
    "12 bits": (frame(depth=12), "12 bits"),
    "arithmetic coding": (frame(0xC9), "process 9"),
    "lossless": (frame(0xC3), "process 3"),
    "two channels": (frame(channels=2), "2 channels"),
    "no frame": (b"\xff\xd8\xff\xda\0\2", "without a frame"),
    "an end at once": (b"\xff\xd8\xff\xd9", "ends before"),
    "noise behind the mark": (b"\xff\xd8\xff" + b"\1\0" * 9000, "without a marker|ends within"),
    "zeros": (b"\xff\xd8\xff\0" + bytes(90_000), "without a marker"),
    "an endless GIF": (b"GIF89a" + bytes(90_000), "without a picture"),
    "an empty GIF": (b"GIF89a" + bytes(7) + b";" + bytes(9), "without a picture"),
    "an unknown WebP": (b"RIFF\0\0\0\0WEBPJUNK" + bytes(99), "first chunk"),
    "a BMP that is too wide": (b"BM" + bytes(12) + struct.pack("<Iii", 40, 70_000, -3), "3 by 70,000"),
}


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_what_a_header_tells_is_refused_without_decoding(name: str) -> None:
    data, says = HEADERS[name]
    with pytest.raises(ImageError, match=says):
        read_header(File(data)).shown()


def test_headers_are_read_in_small_parts() -> None:
    image = picture(600, 800)
    plain, long = saved(image, "JPEG", quality=98), saved(image, "JPEG", quality=98, exif=exif(6) + b"x" * 50_000)
    assert len(plain) > 200_000
    for data, most, size in (
        (plain, 4096, (600, 800)),
        (long, 65_536, (800, 600)),
        (saved(image, "PNG"), 4096, (600, 800)),
        (saved(image, "WEBP", lossless=True), 4096, (600, 800)),
        (saved(image, "GIF"), 4096, (600, 800)),
        (saved(image, "BMP"), 4096, (600, 800)),
    ):
        file = File(data)
        assert read_header(file).shown() == size
        assert file.seen <= most


# --- what may not matter ---


def digest() -> str:
    sha = hashlib.sha256()
    for name in ("333x777 JPEG", "1024x768 progressive", "97x131 PNG", "64x64 WebP"):
        for size in ((56, 84), (700, 420), (1, 3)):
            sha.update(load(PICTURES[name], size).tobytes())
    for name in ("RGBA", "JPEG turned 6", "animated GIF", "16 bits", "CMYK"):
        sha.update(load(ODD[name].data, (64, 96)).tobytes())
    return sha.hexdigest()


def test_pixels_do_not_depend_on_threads() -> None:
    before, expected = torch.get_num_threads(), digest()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            assert digest() == expected
    finally:
        torch.set_num_threads(before)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: digest(), range(16))) == {expected}


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["ATEN_CPU_CAPABILITY=default", "ATEN_CPU_CAPABILITY=avx2", "JSIMD_FORCENONE=1"])
def test_pixels_do_not_depend_on_vector_units(variable: str) -> None:
    code = "import test_images; print(test_images.digest())"
    setting = dict([variable.split("=")])
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env={**os.environ, **setting},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == digest()


def test_options_of_pillow_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digest()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert digest() == expected
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(UsageError, match="LOAD_TRUNCATED_IMAGES"):
        digest()


def test_versions_are_named() -> None:
    versions = codec_versions()
    assert {"torch", "torchvision", "pillow"} <= versions.keys()
    assert all(versions.values())


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate")])
def test_want_of_memory_is_no_fault_of_a_picture(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It became a black one, so that data depended on the machine."""

    def decode(*_: object) -> None:
        raise error

    monkeypatch.setitem(_DECODERS, "JPEG", decode)
    picture = io.BytesIO()
    Image.new("RGB", (32, 32)).save(picture, "JPEG")
    with pytest.raises(type(error)) as found:
        load(picture.getvalue(), (32, 32))
    assert found.value is error
