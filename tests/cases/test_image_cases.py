"""Pictures as they come: turned, in every colour layout, transparent, broken, gigantic, and of the oddest shapes."""

import re
import struct
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_worlds import PAD
from PIL import Image

from cases.makers import (
    BLUE,
    GREEN,
    RED,
    UNIT,
    WHITE,
    Delivered,
    Seen,
    colour,
    corners,
    encoded,
    images,
    law,
    near,
    quadrants,
    ranks,
    recipe,
    records,
    seen,
    source,
    tar,
    tile,
    trace,
)
from modalities.headers import read_header
from modalities.images import load
from modalities.media import Bytes
from zephon import DataError, Stream

WHOLE = '[packing]\nalgorithm = "best_fit"\n'
COLOURS = [RED, GREEN, BLUE, WHITE]


def decoded(data: bytes, background: tuple[int, int, int] = (255, 255, 255)) -> np.ndarray:
    """A picture at its own size, upright."""
    return load(data, read_header(Bytes(data)).shown(), background)


def read(folder: Path, files: dict[str, bytes], **keys: Any) -> tuple[dict[str, Seen], Delivered]:
    """A tar of these files with their names as captions, read as a user would; samples by caption."""
    members = [
        one
        for name, data in files.items()
        for one in ((name, data), (f"{name.split('.')[0]}.txt", name.split(".")[0].encode()))
    ]
    tar(folder / "shard.tar", members)
    found, about = seen(recipe(folder, images("shard.tar", **keys), more=WHOLE, seq_len=keys.pop("seq_len", 1024)))
    return {one.text: one for one in found}, about


# --- IMG-1 ---------------------------------------------------------------------------------------------------------

UNTURNED = {
    1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}  # fmt: skip


def exif(value: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = value
    return tags.tobytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("turn", UNTURNED)
def test_pictures_are_turned_as_their_tag_says(tmp_path: Path, kind: str, turn: int) -> None:
    """Photographs of phones are turned by a tag; it was ignored, and sizes did not fit.

    https://github.com/huggingface/datasets/issues/6252
    """
    stored = quadrants() if UNTURNED[turn] is None else quadrants().transpose(UNTURNED[turn])  # type: ignore[arg-type]
    data = encoded(stored, kind, exif=exif(turn), **({"lossless": True} if kind == "WEBP" else {}))
    assert read_header(Bytes(data)).shown() == (4 * UNIT, 2 * UNIT)
    found, about = read(tmp_path, {"a." + kind.lower(): data})
    (picture,) = found["a"].pictures
    assert picture.shape == (4 * UNIT, 2 * UNIT, 3)  # 4 by 2 tokens: counted from the turned size
    assert near(corners(picture), COLOURS, 14)
    assert not any(about.counts["s"].values())


def with_segment(body: bytes) -> bytes:
    data = encoded(quadrants())
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + data[2:]


@law(60)
@given(st.sampled_from([b"", b"MM\0*\0\0\0\x08\0\x01", b"II*\0\x08\0\0\0\x09\0"]), st.binary(max_size=40))
def test_a_damaged_tag_means_no_turn(head: bytes, raw: bytes) -> None:
    """After orientation was applied, files with a damaged tag crashed the program.

    https://github.com/huggingface/datasets/pull/6739
    """
    data = with_segment(b"Exif\0\0" + raw)
    if read_header(Bytes(data)).shown() == (4 * UNIT, 2 * UNIT):  # chance may write a whole tag
        assert near(corners(decoded(data)), COLOURS, 14)
    else:
        assert b"\x01\x12\x00\x03" in data[:80]


@pytest.mark.parametrize("data", [encoded(quadrants(), exif=exif(0)), encoded(quadrants(), exif=exif(9)),
                                  with_segment(b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12"),
                                  with_segment(b"Exif\0\0" + bytes(range(200)))])  # fmt: skip
def test_impossible_turns_mean_none(tmp_path: Path, data: bytes) -> None:
    """Values 0 and 9, a cut block, garbage: the picture as it is stored.

    https://github.com/huggingface/datasets/pull/6739
    """
    found, about = read(tmp_path, {"a.jpg": data})
    assert near(corners(found["a"].pictures[0]), COLOURS, 14)
    assert not any(about.counts["s"].values())


# --- IMG-2 ---------------------------------------------------------------------------------------------------------

COLOURED = {
    "rgb": encoded(quadrants()),
    "cmyk": encoded(quadrants().convert("CMYK")),
    "4:2:0": encoded(quadrants(), subsampling=2),
    "4:2:2": encoded(quadrants(), subsampling=1),
    "progressive": encoded(quadrants(), progressive=True),
    "progressive cmyk": encoded(quadrants().convert("CMYK"), progressive=True),
    "palette": encoded(quadrants().convert("P", palette=Image.Palette.ADAPTIVE, colors=16), "PNG"),
    "opaque": encoded(quadrants().convert("RGBA"), "PNG"),
    "gif": encoded(quadrants().convert("P", palette=Image.Palette.ADAPTIVE, colors=16), "GIF"),
    "bmp": encoded(quadrants(), "BMP"),
    "webp": encoded(quadrants(), "WEBP", quality=95),
}
GRAY = {
    "jpeg": encoded(quadrants().convert("L")),
    "png": encoded(quadrants().convert("L"), "PNG"),
    "with alpha": encoded(quadrants().convert("LA"), "PNG"),
    "one bit": encoded(quadrants().convert("1"), "PNG"),
    "16 bits": encoded(Image.fromarray(np.asarray(quadrants().convert("L"), np.uint16) * 257), "PNG"),
}


@pytest.mark.parametrize("layout", COLOURED)
def test_every_colour_layout_becomes_rgb(tmp_path: Path, layout: str) -> None:
    """CMYK was refused by one decoder and came out inverted from another.

    https://github.com/pytorch/vision/issues/6538, https://github.com/pytorch/vision/issues/3012
    """
    found, _ = read(tmp_path, {"a.png": COLOURED[layout]})  # the name decides nothing
    picture = found["a"].pictures[0]
    assert (picture.dtype, picture.shape) == (np.uint8, (4 * UNIT, 2 * UNIT, 3))
    assert near(corners(picture), COLOURS, 40)


@pytest.mark.parametrize("layout", GRAY)
def test_gray_becomes_three_equal_channels(tmp_path: Path, layout: str) -> None:
    """One channel, with or without alpha, is RGB as well, and of the right brightness.

    https://github.com/pytorch/vision/issues/3012
    """
    found, _ = read(tmp_path, {"a.png": GRAY[layout]})
    picture = found["a"].pictures[0]
    assert (picture == picture[:, :, :1]).all()
    if layout != "one bit":
        levels = [round(0.299 * r + 0.587 * g + 0.114 * b) for r, g, b in COLOURS]
        assert near([one[0] for one in corners(picture)], levels, 14)


# --- IMG-3 ---------------------------------------------------------------------------------------------------------


def ink() -> Image.Image:
    """A black stroke on clear ground, below which the colour is black as well."""
    image = Image.new("RGBA", (2 * UNIT, 2 * UNIT), (0, 0, 0, 0))
    image.paste((10, 10, 10, 255), (8, 24, 48, 32))
    return image


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "palette"])
@pytest.mark.parametrize("ground", [(255, 255, 255), (0, 128, 255)])
def test_transparent_parts_show_the_background(tmp_path: Path, kind: str, ground: tuple[int, int, int]) -> None:
    """Dropping the alpha channel shows what hides below it: black drawings became black all over.

    https://github.com/NVIDIA/DIGITS/issues/85, https://github.com/layumi/University1652-Baseline/issues/17
    """
    image = ink()
    if kind == "palette":
        image = image.convert("P")
        image.info["transparency"] = image.getpixel((0, 0))
    data = encoded(image, "WEBP" if kind == "WEBP" else "PNG", **({"lossless": True} if kind == "WEBP" else {}))
    found, _ = read(tmp_path, {"a.png": data}, background=list(ground))
    picture = found["a"].pictures[0]
    assert near(picture[1, 1], ground, 2)
    assert near(picture[28, 28], (10, 10, 10), 12)


def test_half_transparent_pixels_are_mixed(tmp_path: Path) -> None:
    """Alpha 128 is half of the background; a background changes nothing else.

    https://github.com/layumi/University1652-Baseline/issues/17
    """
    half = encoded(Image.new("RGBA", (UNIT, UNIT), (200, 0, 0, 128)), "PNG")
    for ground, mixed in (((255, 255, 255), (228, 128, 128)), ((0, 0, 0), (100, 0, 0))):
        found, _ = read(tmp_path, {"a.png": half, "b.png": tile(3, "PNG")}, background=list(ground))
        assert near(found["a"].pictures[0], mixed, 4)
        assert near(found["b"].pictures[0], colour(3), 1)


# --- IMG-4 ---------------------------------------------------------------------------------------------------------

JPEG, PNG = encoded(quadrants(200, 160)), encoded(quadrants(200, 160), "PNG")
UNREADABLE = {"empty": b"", "html": b"<html>403</html>", "noise": bytes(range(255, 100, -1)) * 5, "header": JPEG[:20]}
UNDECODABLE = {"cutjpg": JPEG[: len(JPEG) * 6 // 10], "cutpng": PNG[: len(PNG) // 2], "noend": JPEG[:-2]}


def test_a_broken_picture_costs_its_sample_alone(tmp_path: Path) -> None:
    """One image cut in transfer ended a long run with "image file is truncated" and no name.

    What the header shows is a bad row, with its key. What only decoding shows is black, of its sample no label is
    trained, and it is counted: sizes, and so the order of everything else, do not depend on decoding.

    https://github.com/modelscope/ms-swift/issues/3275, https://github.com/webdataset/webdataset/issues/206
    """
    files = {f"g{i}.jpg": tile(i) for i in range(4)}
    files |= {f"{name}.jpg": data for name, data in (UNREADABLE | UNDECODABLE).items()}
    files |= {f"h{i}.jpg": tile(i) for i in range(4)}
    found, about = read(tmp_path, files)
    for i in range(4):
        for name in (f"g{i}", f"h{i}"):
            assert near(found[name].pictures[0], colour(i), 6)
            assert found[name].trained
    assert found.keys() == {f"{letter}{i}" for letter in "gh" for i in range(4)} | UNDECODABLE.keys()
    for name in UNDECODABLE:
        assert not found[name].pictures[0].any()
        assert not found[name].trained
    assert about.counts["s"]["broken image"] == len(UNDECODABLE)
    assert [skip.place.split("sample ")[1].split(",")[0] for skip in about.skipped] == list(UNREADABLE)


@pytest.mark.parametrize("name", [*UNREADABLE, *UNDECODABLE])
def test_with_raise_a_broken_picture_stops_every_rank_by_name(tmp_path: Path, name: str) -> None:
    """The error names the member and the archive, whoever comes to it.

    https://github.com/webdataset/webdataset/issues/206
    """
    bad = (UNREADABLE | UNDECODABLE)[name]
    tar(tmp_path / "shard.tar", [("g.jpg", tile(1)), ("g.txt", b"g"), (f"{name}.jpg", bad), (f"{name}.txt", b"x")])
    path = recipe(tmp_path, images("shard.tar", on_error="raise"), lanes=2, size=2, more=WHOLE, seq_len=128)
    with pytest.raises(DataError, match=rf"shard\.tar, member {name}\.jpg"), Stream.open(path) as stream:
        for loader in ranks(stream, 2):
            trace([loader], 4)


# --- IMG-5 ---------------------------------------------------------------------------------------------------------


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def claims(width: int, height: int, depth: int = 8, colours: int = 2, data: bytes = b"\0" * 10) -> bytes:
    """A PNG whose header says so much over so little."""
    head = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def test_gigantic_pictures_are_bad_rows_by_their_header(tmp_path: Path) -> None:
    """One picture above the decoder's limit failed the run; without a limit, a tiny file could eat all memory.

    Our limit is fixed: 89 Mpixel, Pillow's default, looked at before anything is decoded.

    https://github.com/huggingface/dataset-viewer/issues/1192, https://github.com/open-edge-platform/geti_v2/issues/1486
    """
    large = {"big.png": claims(20_000, 20_000, 1, 0, bytes(2501) * 20), "liar.png": claims(60_000, 60_000)}
    large["tall.png"] = claims(1, 70_000)
    files = {"g0.png": tile(0, "PNG"), **large, "g1.png": tile(1, "PNG")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracemalloc.start()
        found, about = read(tmp_path, files)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert found.keys() == {"g0", "g1"}
    assert peak < 50e6
    sizes = [re.findall(r"of ([\d,]+) by ([\d,]+) pixels", skip.reason)[0] for skip in about.skipped]
    assert sizes == [("20,000", "20,000"), ("60,000", "60,000"), ("70,000", "1")]


def test_a_picture_that_lies_within_the_limit_is_found_when_it_is_decoded(tmp_path: Path) -> None:
    """Ten bytes that claim 9,000 by 9,000 pixels: black and counted, like any picture that breaks.

    https://github.com/huggingface/dataset-viewer/issues/1192
    """
    found, about = read(tmp_path, {"g0.png": tile(0, "PNG"), "liar.png": claims(9_000, 9_000)}, max_pixels=UNIT**2)
    assert about.counts["s"]["broken image"] == 1
    assert near(found["g0"].pictures[0], colour(0), 1)
    assert not found["liar"].trained


# --- IMG-6 ---------------------------------------------------------------------------------------------------------

SHAPES = [(1, 1), (1, 300), (300, 1), (3, 100), (100, 3), (2, 2), (27, 257), (3012, 5), (228, 1), (10000, 40), (1, 3)]


@pytest.mark.parametrize("preset", ["qwen2_vl", "qwen3_5", "glimmer"])
def test_any_shape_is_delivered_or_counted_with_its_size(tmp_path: Path, preset: str) -> None:
    """Sides of 1 or 3 were taken for the channels, a side was rounded to 0, an aspect check stopped the training.

    https://github.com/huggingface/transformers/issues/21638, https://github.com/huggingface/transformers/pull/31364,
    https://github.com/2U1/Qwen-VL-Series-Finetune/issues/133
    """
    files = {f"n{i}.png": tile(i, "PNG", width, height) for i, (width, height) in enumerate(SHAPES)}
    members = [one for name, data in files.items() for one in ((name, data), (f"{name[:-4]}.txt", name[:-4].encode()))]
    tar(tmp_path / "shard.tar", members)
    keys = {"modality": "image_text", "preset": preset, "max_bad": 1000}
    path = recipe(tmp_path, source("shard.tar", **keys), more=WHOLE, seq_len=4096)
    found, loader = records(path)
    names = list[str]()
    for record in found:
        pads, grids, at = int((record["input"] == PAD).sum()), record["grid_thw"], 0
        assert grids.min() >= 1
        assert pads == int(grids.prod(axis=1).sum()) // 4  # a token for four patches
        mine = re.findall(r"n\d+", "".join(chr(one) for one in record["input"].tolist() if one < 256))
        for name, grid in zip(mine, grids.prod(axis=1).tolist(), strict=True):
            patches = record["pixel_values"][at : at + grid].reshape(grid, 3, -1)
            assert near(patches.mean((0, 2)), colour(int(name[1:])), 14)
            at += grid
        names += mine
    narrow = [i for i, sides in enumerate(SHAPES) if max(sides) > 200 * min(sides)]
    reasons = {int(skip.place.split("sample n")[1].split(",")[0]): skip.reason for skip in loader.take_skipped()}
    assert sorted(int(name[1:]) for name in names) == [i for i in range(len(SHAPES)) if i not in reasons]
    assert sorted(reasons) == narrow
    for i, reason in reasons.items():
        assert f"{SHAPES[i][1]:,} by {SHAPES[i][0]:,} pixels" in reason


@law(40)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(0, 200))
def test_colours_survive_any_size(width: int, height: int, number: int) -> None:
    """Channels are known by construction, never guessed from a shape.

    https://github.com/huggingface/transformers/issues/21638
    """
    for kind in ("PNG", "JPEG", "BMP"):
        picture = load(tile(number, kind, width, height), (UNIT, 2 * UNIT))
        assert picture.shape == (UNIT, 2 * UNIT, 3)
        assert near(picture, colour(number), 14)
