"""Random worlds of images and text, and a plain-Python oracle that says what the contract makes of them.

As in `worlds.py`, chunks, token ids, the mixer's rule, packing and records are written out again, slowly, from the
design. Taken from the product are the visible order, the sizes that images are resized to (`Geometry.target`) and
their pixels (`load`, `patchify`), which have tests of their own; M-RoPE is TorchTitan's.
"""

from __future__ import annotations

import atexit
import functools
import io
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torchtitan.hf_datasets.multimodal.mm_collator import MultiModalCollator
from worlds import BOS, EOS, LaneOracle, SourceSpec, World, byte_letters, clean, cut_in_shards, make_text, shard_bytes

import zephon
from modalities.geometry import Geometry, ImageError, patchify
from modalities.images import load
from modalities.presets import PRESETS, Preset
from zephon.catalogue import ChunkTable
from zephon.order import SourceOrder
from zephon.pack import MAX_OPEN_SEGMENTS

START, PAD, END, VIDEO = 258, 259, 260, 261
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
SPELLED = ("<bos>", "<eos>", *MARKS)
FILLER = 3
"""Positions of the null image: its three tokens."""

Arrays = dict[str, np.ndarray]


@functools.cache
def vision_tokenizer(kind: str) -> Path:
    """One token per UTF-8 byte, BOS and EOS as `kind` says ("both", "eos", "none"), and the marks of images.

    Its post-processor adds BOS and EOS twice, which the loader must not use; "titan", for TorchTitan, has none.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"zephon-vision-{kind}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in byte_letters().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPELLED])
    if kind != "titan":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> <bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"both": ("bos", "eos"), "eos": ("eos",), "titan": ("eos",), "none": ()}[kind]
    (folder / "tokenizer_config.json").write_text(json.dumps({f"{name}_token": f"<{name}>" for name in names}))
    return folder


# --- pictures ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Img:
    """A picture, as it is shown. `damage`: "data" where its header is whole and the rest is not, "header", "empty"."""

    kind: str
    height: int
    width: int
    seed: int = 0
    damage: str = ""

    @property
    def suffix(self) -> str:
        return {"JPEG": "jpg"}.get(self.kind, self.kind.lower())

    def __repr__(self) -> str:
        return f"<{self.kind} {self.height}x{self.width} {self.seed} {self.damage}>"


@functools.lru_cache(4096)
def file_bytes(img: Img) -> bytes:
    if img.damage == "empty":
        return b""
    if img.damage == "header":
        return b"\x89PNG\r\n" + bytes(img.seed % 7)
    whole = _whole(img)
    return _damaged(img, whole) if img.damage else whole


def _whole(img: Img) -> bytes:
    """Blocks of colour and noise; gray, transparent, turned and palette ones among them."""
    mode = {"JPEG": ("RGB", "L", "turned"), "PNG": ("RGB", "RGBA", "L"), "WEBP": ("RGB", "RGBA", "lossless")}
    how = mode.get(img.kind, ("P",) * 3)[img.seed % 3]
    rng = np.random.default_rng(img.seed)
    coarse = rng.integers(0, 256, (5, 4, 4 if how == "RGBA" else 3), np.uint8)
    image = Image.fromarray(coarse).resize((img.width, img.height), Image.Resampling.NEAREST)
    pixels = np.asarray(image).astype(int) + rng.integers(-9, 10, (img.height, img.width, 1))
    image, more = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)), dict[str, Any]()
    if how == "L":
        image = image.convert("L")
    if how == "P":
        image = image.quantize(32)
    if how == "lossless":
        more["lossless"] = True
    if how == "turned":  # 6: what is stored is to be turned clockwise
        image, exif = image.transpose(Image.Transpose.ROTATE_90), Image.Exif()
        exif[0x0112] = 6
        more["exif"] = exif.tobytes()
    out = io.BytesIO()
    image.save(out, img.kind, **more)
    return out.getvalue()


def _damaged(img: Img, whole: bytes) -> bytes:
    """Cut, or with a wrong checksum (PNG); the first cut from the end on that no decoder takes."""
    if img.kind == "PNG":
        at = whole.index(b"IDAT") + 8
        return whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
    head = whole.rindex(b"\xff\xda") + 14 if img.kind == "JPEG" else min(900, len(whole) // 2)
    for part in range(1, 8):
        cut = whole[: len(whole) - (len(whole) - head) * part // 8]
        try:
            load(cut, (img.height, img.width))
        except ImageError:
            return cut
    raise AssertionError(img)


@functools.lru_cache(8192)
def patches_of(img: Img, size: tuple[int, int], background: tuple[int, int, int], geometry: Geometry) -> Any:
    """The patches of a picture at its target size; None where it cannot be decoded."""
    try:
        return patchify(load(file_bytes(img), size, background), geometry)
    except ImageError:
        assert img.damage == "data"
        return None


# --- rows and sources ----------------------------------------------------------------------------------------------

Part = str | Img


class Row(NamedTuple):
    """Parts in order. `fault`: "no image", "no text", "unusable row" or "lost": how the row is written wrongly."""

    parts: tuple[Part, ...]
    fault: str = ""


@dataclass(frozen=True, repr=False)
class ImageSource(SourceSpec):
    """A source of modality image_text: `shards` hold `Row`s."""

    format: str = "jsonl"
    shape: str = "image_first"
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_patches: int | None = None
    over: str = "split"
    whole: bool = True
    background: tuple[int, int, int] | None = None
    strict: bool = False

    def __repr__(self) -> str:
        return (
            f"{SourceSpec.__repr__(self)[:-1]}{self.format} {self.shape} {self.over} whole={self.whole} "
            f"pixels={self.min_pixels}..{self.max_pixels}>"
        )


class Doc:
    """A sample, laid out: `m` ids, which are trained, its pictures, and what must not be cut."""

    def __init__(self, ids: list[int], trained: list[bool], pictures: list[Picture], whole: bool) -> None:
        self.ids, self.trained, self.pictures = ids, trained, pictures
        self.positions = len(ids) - 1
        self.atoms = [(one.start, min(one.end, self.positions), one.costs) for one in pictures]
        if whole and pictures:
            self.atoms = [(0, self.positions, _sum([one.costs for one in pictures]))]


class Picture(NamedTuple):
    """A picture of a sample: its tokens, marks included, are `[start, end)`; its pixels once resized."""

    img: Img | None
    start: int
    end: int
    size: tuple[int, int]
    geometry: Geometry
    background: tuple[int, int, int]

    @property
    def costs(self) -> tuple[int, int]:
        return self.geometry.patches(*self.size), 1

    @property
    def grid(self) -> tuple[int, int, int]:
        return 1, self.size[0] // self.geometry.patch_size, self.size[1] // self.geometry.patch_size

    @property
    def patches(self) -> np.ndarray | None:
        if self.img is None:
            return np.zeros((self.costs[0], 3 * self.geometry.patch_size**2), np.uint8)
        return patches_of(self.img, self.size, self.background, self.geometry)

    @property
    def broken(self) -> bool:
        return self.patches is None


def _sum(costs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*costs, strict=True)))


Piece = tuple[Any, int, int]  # a Doc, or whatever has `atoms`, and the positions of it that are meant


# --- worlds --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageWorld(World):
    """A world with at least one source of images, `ImageSource`; budgets of patches and images, None for none."""

    preset: str = "qwen3_5"
    patches: int | None = None
    images: int | None = None
    floats: bool = False
    ids: bool = True
    ends: bool = False

    @property
    def kind(self) -> Preset:
        return PRESETS[self.preset]

    @property
    def unit_patches(self) -> int:
        return self.kind.geometry.merge_size**2

    @property
    def budgets(self) -> tuple[int, int]:
        return self.patches or 2**40, self.images or 2**40

    @property
    def damaged(self) -> bool:
        """Whether an image is broken behind its header."""
        rows = (row for source in self.sources for shard in source.shards for row in shard)
        parts = (part for row in rows if not isinstance(row, str) for part in row.parts)
        return any(isinstance(part, Img) and part.damage == "data" for part in parts)

    def geometry(self, source: ImageSource) -> Geometry:
        given = {name: getattr(source, name) for name in ("min_pixels", "max_pixels", "max_patches")}
        return replace(self.kind.geometry, **{key: value for key, value in given.items() if value})

    def order(self, source: SourceSpec) -> SourceOrder:
        size = self._chunk_rows(source)
        if isinstance(source, ImageSource) and source.format == "parquet":
            groups = [pq.ParquetFile(io.BytesIO(raw)).metadata for raw in parquet_shards(source)]
            parts = [meta.row_group(i) for meta in groups for i in range(meta.num_row_groups)]
            rows = [(one.num_rows, one.total_byte_size) for one in parts if one.num_rows]
            table = ChunkTable([n for n, _ in rows], [size] * len(rows), [b for _, b in rows])
        else:
            table = ChunkTable([len(rows) for rows in source.shards], size)
        epochs = source.epochs or 1 if self.finite else None
        lanes = self.order_lanes
        return SourceOrder(source.name, table, seed=self.seed, lanes=lanes, window=self.window, epochs=epochs)

    def edges(self) -> tuple[list[int], list[int]]:
        has_bos = self.tokenizer == "both" and self.bos is not False
        has_eos = self.tokenizer != "none" and self.eos is not False
        return [BOS] * has_bos, [EOS] * has_eos

    def laid(self, source: SourceSpec, row: Any) -> tuple[Doc | None, list[str]]:
        """What a row becomes, and what is counted of it: the counters of the modality, or "too long"."""
        doc, counts = self._text(row) if isinstance(row, str) else self._mixed(cast(ImageSource, source), row)
        if doc is not None and doc.positions < 1:
            return None, [*counts, "empty"]
        longest = self.seq_len - (0 if doc and doc.atoms else FILLER)
        if doc is not None and self.too_long == "drop" and doc.positions > longest:
            return None, [*counts, "too long"]
        return doc, counts

    def _text(self, text: str) -> tuple[Doc, list[str]]:
        bos, eos = self.edges()
        ids = [*bos, *clean(text).encode(), *eos] if text else []
        return Doc(ids, [True] * len(ids), [], whole=False), []

    def _mixed(self, source: ImageSource, row: Row) -> tuple[Doc | None, list[str]]:
        parts = [part for part in row.parts if part != ""]
        if row.fault:
            return None, ["bad row"]
        if all(isinstance(part, Img) or part.isspace() for part in parts):
            return None, ["bad row"]
        images = [part for part in parts if isinstance(part, Img)]
        if any(img.damage in ("header", "empty") for img in images):
            return None, ["bad row"]
        bos, eos = self.edges()
        letters = sum(len(clean(part).encode()) for part in parts if isinstance(part, str))
        sizes = self.fitted(source, images, len(bos) + len(eos) + letters)
        if sizes is None:
            return None, ["over budget"]
        geometry = self.geometry(source)
        shrunk = sizes != [geometry.target(img.height, img.width) for img in images]
        ids, trained, pictures = [*bos], [True] * len(bos), list[Picture]()
        ahead = iter(sizes)
        for part in parts:
            if isinstance(part, str):
                ids += clean(part).encode()
            else:
                size = next(ahead)
                end = len(ids) + geometry.tokens(*size) + 2
                pictures.append(Picture(part, len(ids), end, size, geometry, source.background or (255, 255, 255)))
                ids += [START, *[PAD] * geometry.tokens(*size), END]
            trained += [isinstance(part, str)] * (len(ids) - len(trained))
        ids, trained = [*ids, *eos], [*trained, *[True] * len(eos)]
        positions, costs = len(ids) - 1, _sum([(0, 0), *(one.costs for one in pictures)])
        return Doc(ids, trained, pictures, source.whole and self.fits(positions, costs)), ["shrunk to fit"] * shrunk

    def fits(self, positions: int, costs: Sequence[int]) -> bool:
        return positions <= self.seq_len and all(cost <= most for cost, most in zip(costs, self.budgets, strict=True))

    def fitted(self, source: ImageSource, images: list[Img], others: int) -> list[tuple[int, int]] | None:
        """Sizes of a sample's images; `others` counts its tokens that do not belong to images."""
        geometry = self.geometry(source)
        most = min(self.budgets[0], (self.seq_len - 2) * self.unit_patches)
        most -= most % self.unit_patches

        def at(cap: int | None) -> list[tuple[int, int]]:
            return [geometry.target(img.height, img.width, cap) for img in images]

        def good(sizes: list[tuple[int, int]]) -> bool:
            costs = _sum([(0, 0), *((geometry.patches(*size), 1) for size in sizes)])
            tokens = others + sum(geometry.tokens(*size) + 2 for size in sizes)
            return self.fits(tokens - 1, costs)

        if source.over == "split" or good(at(None)):
            return at(most)
        if source.over == "drop":
            return None
        return next((at(cap) for cap in range(most, 0, -self.unit_patches) if good(at(cap))), at(most))

    def accepts(self, text: str) -> bool:
        return self.laid(self.sources[0], text)[0] is not None

    def with_source(self, index: int, **changes: Any) -> ImageWorld:
        return cast(ImageWorld, super().with_source(index, **changes))


# --- writing -------------------------------------------------------------------------------------------------------


def stored(row: Row, shape: str, cell: Any) -> dict[str, Any]:
    """A row as it is written; `cell(number, img)` is what stands for an image."""
    images = [cell(i, part) for i, part in enumerate(row.parts) if isinstance(part, Img)]
    if row.fault == "lost" and images:
        images[0] = cell(99, None)
    ahead = iter(images)
    cells = [part if isinstance(part, str) else next(ahead) for part in row.parts]
    texts = [part if isinstance(part, str) else None for part in row.parts]
    wrong = row.fault == "unusable row"
    if shape == "interleaved":
        pictures = [None if isinstance(part, str) else one for part, one in zip(row.parts, cells, strict=True)]
        return {"images": pictures, "texts": [*texts, "one too many"] if wrong else texts}
    if shape == "parts":
        table = [
            {"type": "text", "text": part, "image": None}
            if isinstance(part, str)
            else {"type": "image", "text": None, "image": one}
            for part, one in zip(row.parts, cells, strict=True)
        ]
        return {"parts": [*table, {"type": "sound", "text": "x", "image": None}] if wrong else table}
    text = "".join(part if isinstance(part, str) else "<image>" * (shape == "marker") for part in row.parts)
    found = {"images": images, "text": text + "<image>" * wrong}
    if row.fault in ("no image", "no text"):
        del found["images" if row.fault == "no image" else "text"]
    return found


def write_source(folder: Path, source: ImageSource) -> None:
    """Shards out of order, named so that only sorting restores it."""
    folder.mkdir()
    (folder / "pictures").mkdir()
    names = sorted(f"part {10 - number}" for number in range(len(source.shards)))
    for number, name in reversed(list(enumerate(names))):
        if source.format == "parquet":
            (folder / f"{name}.parquet").write_bytes(parquet_shards(source)[number])
        elif source.format == "tar":
            write_tar(folder / f"{name}.tar", source.shards[number], source.shape)
        else:
            rows = [stored(row, source.shape, functools.partial(_path, number, i))
                    for i, row in enumerate(source.shards[number])]  # fmt: skip
            if source.layout % 2:  # one image need not be a list
                for row in rows:
                    if len(row.get("images", ())) == 1 and source.shape in ("image_first", "image_last", "marker"):
                        row["image"] = row.pop("images")[0]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for i, row in enumerate(source.shards[number]):
            for at, img in enumerate(row.parts):
                if isinstance(img, Img) and (source.format == "jsonl" or _by_path(img)):
                    (folder / "pictures" / _path(number, i, at, img)).write_bytes(file_bytes(img))


def _path(shard: int, row: int, at: int, img: Img | None) -> str:
    return f"{shard}-{row}-{at}.{img.suffix if img else 'png'}"


def _by_path(img: Img) -> bool:
    """Whether a cell of a Parquet file holds a path below `folder` in place of bytes."""
    return img.seed % 4 == 0


def write_tar(path: Path, rows: Sequence[Any], shape: str) -> None:
    from webdataset import TarWriter

    with TarWriter(str(path), mtime=0) as out:
        for number, row in enumerate(rows):
            sample: dict[str, Any] = {"__key__": f"{number:05d}"}
            written = stored(row, shape, lambda _, img: img)
            for img in written.get("images", ()):
                sample[img.suffix] = file_bytes(img)
            if "text" in written:
                sample["txt"] = written["text"]
            out.write(sample)


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
COLUMNS = {
    "images": pa.list_(IMAGE),
    "text": pa.string(),
    "texts": pa.list_(pa.string()),
    "parts": pa.list_(pa.struct([("type", pa.string()), ("text", pa.string()), ("image", IMAGE)])),
    "image": IMAGE,
}


@functools.lru_cache(512)
def _parquet(rows: tuple[Row, ...], shape: str, shard: int) -> bytes:
    def cell(row: int, at: int, img: Img | None) -> dict[str, Any]:
        path = _path(shard, row, at, img)
        return {"bytes": None if img is None or _by_path(img) else file_bytes(img), "path": path}

    table = [stored(one, shape, functools.partial(cell, i)) for i, one in enumerate(rows)]
    names = {"interleaved": ("images", "texts"), "parts": ("parts",)}.get(shape, ("images", "text"))
    schema = pa.schema([(name, COLUMNS[name]) for name in names])
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(table, schema=schema), out)
    return out.getvalue()


def parquet_shards(source: ImageSource) -> list[bytes]:
    return [_parquet(cast(Any, rows), source.shape, number) for number, rows in enumerate(source.shards)]


def source_text(world: ImageWorld, index: int, source: SourceSpec) -> str:
    values: dict[str, Any] = {"name": source.name}
    if isinstance(source, ImageSource):
        values |= {
            "paths": [f"data {index}/*.{source.format}"], "modality": "image_text", "preset": world.preset,
            "layout": source.shape, "folder": f"data {index}/pictures", "min_pixels": source.min_pixels,
            "max_pixels": source.max_pixels, "max_patches": source.max_patches,
            "over_budget": source.over, "keep_whole": source.whole,
            "background": list(source.background) if source.background else None,
            "pixels": "float32" if world.floats else None, "on_error": "raise" if source.strict else None,
            "max_bad": 2**31 - 1,
        }  # fmt: skip
    else:
        values |= {"paths": [f"data {index}/*.jsonl"], "text": "text"}
    values |= {"chunk_rows": source.chunk_rows, "epochs": source.epochs}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value is not None]
    return f"[[sources]]\nweight = {source.weight}\n{''.join(lines)}"


def recipe_text(world: ImageWorld) -> str:
    flags = "".join(f"{key} = {str(value).lower()}\n" for key, value in (("bos", world.bos), ("eos", world.eos))
                    if value is not None)  # fmt: skip
    packing = f'algorithm = "{world.algorithm}"\ntoo_long = "{world.too_long}"\n'
    packing += f"bins = {world.bins}\n" if world.algorithm == "best_fit" else ""
    budgets = "".join(f"{key} = {value}\n" for key, value in (("patches", world.patches), ("images", world.images))
                      if value is not None)  # fmt: skip
    run = f'runner = "{world.runner}"\nworkers = {world.workers}\nisolate = {str(world.isolate).lower()}\n'
    return "\n".join(
        [
            f"seed = {world.seed}",
            "" if world.finite else f"lanes = {world.lanes}",
            f"[batch]\nseq_len = {world.seq_len}\nglobal_batch_size = {world.batch}",
            f"[tokenizer]\npath = {json.dumps(str(vision_tokenizer(world.tokenizer)))}\n{flags}",
            *(source_text(world, index, source) for index, source in enumerate(world.sources)),
            f'[mix]\nunit = "{world.unit}"\npiece = "{world.piece}"\non_end = "{world.on_end}"',
            f"[shuffle]\nwindow = {world.window}",
            f"[packing]\n{packing}[packing.budgets]\n{budgets}",
            f"[records]\ndocument_ids = {str(world.ids).lower()}\ncu_seqlens = {str(world.ends).lower()}",
            f"[run]\n{run}cache = {json.dumps(world.cache)}\n",
        ]
    )


@contextmanager
def built(world: ImageWorld) -> Iterator[Path]:
    """The recipe of `world`, written to a folder of its own with its data, and an empty cache."""
    with tempfile.TemporaryDirectory(prefix="zephon-images-") as name:
        folder = Path(name)
        for index, source in enumerate(world.sources):
            if isinstance(source, ImageSource):
                write_source(folder / f"data {index}", source)
            else:
                (folder / f"data {index}").mkdir()
                for number, texts in enumerate(source.shards):
                    (folder / f"data {index}" / f"{number}.jsonl").write_bytes(shard_bytes(texts, source.layout))
        recipe = folder / "recipe.toml"
        recipe.write_text(recipe_text(world), encoding="utf-8")
        yield recipe


@contextmanager
def opened(world: ImageWorld) -> Iterator[zephon.Stream]:
    with built(world) as recipe, zephon.Stream.open(recipe) as stream:
        yield stream


# --- random worlds -------------------------------------------------------------------------------------------------

SHAPES = {
    "tar": ("image_first", "image_last", "marker"),
    "jsonl": ("image_first", "image_last", "marker", "interleaved", "parts"),
    "parquet": ("image_first", "image_last", "marker", "interleaved", "parts"),
}
FAULTS = {
    "image_first": ("no image", "no text", "blank", "header", "empty"),
    "marker": ("no image", "no text", "header", "unusable row"),
    "interleaved": ("blank", "header", "unusable row"),
}


def make_img(rng: random.Random, most: int, damaged: float = 0.0) -> Img:
    damage = "data" if rng.random() < damaged else ""
    return Img(rng.choice(["JPEG", "PNG", "WEBP", "GIF"]), rng.randint(9, most), rng.randint(9, most),
               rng.randrange(24), damage)  # fmt: skip


def make_row(rng: random.Random, format: str, shape: str, longest: int, side: int, number: int, bad: float) -> Row:
    """A row of a source; `bad` is the share of rows with a damaged picture, and as many are wrong altogether."""

    def text() -> str:
        found = make_text(rng, rng.randint(1, longest)).replace("\0", "0")
        if rng.random() < 0.1:
            found += rng.choice(SPELLED)
        return found if format == "jsonl" else clean(found)

    single = format == "tar"
    images = [make_img(rng, side, bad) for _ in range(1 if single else rng.choice([1, 1, 1, 2, 3, 5]))]
    first = f"{number}:{text()}"
    parts: list[Part] = [*images, first] if shape == "image_first" else [first, *images]
    if shape in ("marker", "interleaved", "parts"):
        parts = [first]
        for img in images:
            parts += [img, text()] if rng.random() < 0.6 else [img]
        if rng.random() < 0.4:
            parts = parts[1:] if len(parts) > 2 and isinstance(parts[-1], str) else [*parts[1:], first]
        if shape != "marker" and rng.random() < 0.15:  # these may do without images
            parts = [part for part in parts if isinstance(part, str)]
    if rng.random() >= bad:
        return Row(tuple(parts))
    faults = FAULTS[{"image_last": "image_first", "parts": "interleaved"}.get(shape, shape)]
    fault = rng.choice([*faults, "lost"] if format == "jsonl" else list(faults))
    broken = [i for i, part in enumerate(parts) if isinstance(part, Img)]
    if fault in ("header", "empty", "lost") and not broken:
        return Row(tuple(parts))
    if fault in ("header", "empty"):
        parts[broken[0]] = replace(cast(Img, parts[broken[0]]), damage=fault)
        return Row(tuple(parts))
    if fault == "blank":
        return Row(tuple(part if isinstance(part, Img) else " \n" for part in parts))
    return Row(tuple(parts), fault)


@st.composite
def image_sources(
    draw: st.DrawFn, index: int, preset: str, seq_len: int, finite: bool, bad: float, formats: Sequence[str]
) -> ImageSource:
    format = draw(st.sampled_from(formats))
    shape = draw(st.sampled_from(SHAPES[format]))
    unit = PRESETS[preset].geometry.unit ** 2
    rows = draw(st.sampled_from([6, 12, 3, 1, 20]))
    longest = draw(st.sampled_from([6, seq_len // 2, 2 * seq_len]))
    seed, shards = draw(st.integers(0, 2**20)), draw(st.integers(1, 2))
    rng = random.Random(seed)
    return ImageSource(
        name=f"images {index}",
        weight=draw(st.sampled_from(["1", "0.3", "3"])),
        shards=cast(Any, cut_in_shards(cast(Any, [make_row(rng, format, shape, longest, 90, number, bad)
                                                  for number in range(rows)]), shards, seed)),
        chunk_rows=draw(st.integers(1, 4)),
        how=f"rows={rows} longest={longest} seed={seed} shards={shards} bad={bad} ",
        layout=draw(st.integers(0, 1)),
        epochs=draw(st.sampled_from([None, 1, 2])) if finite else None,
        format=format,
        shape=shape,
        min_pixels=unit,
        max_pixels=unit * draw(st.sampled_from([1, 4, 9])),
        max_patches=draw(st.sampled_from([None, None, 11])),
        over=draw(st.sampled_from(["split", "shrink", "drop"])),
        whole=draw(st.booleans()),
        background=draw(st.sampled_from([None, (0, 90, 200)])),
    )  # fmt: skip


@st.composite
def text_sources(draw: st.DrawFn, index: int, seq_len: int, finite: bool) -> SourceSpec:
    rows, longest = draw(st.sampled_from([8, 20, 2])), draw(st.sampled_from([5, seq_len, 4 * seq_len]))
    seed = draw(st.integers(0, 2**20))
    rng = random.Random(seed)
    texts = [make_text(rng, 0 if rng.random() < 0.1 else rng.randint(1, longest)) for _ in range(rows)]
    texts[0] += SPELLED[seed % 6]
    return SourceSpec(
        name=f"text {index}",
        weight=draw(st.sampled_from(["1", "0.3", "3"])),
        shards=cut_in_shards(texts, 2, seed),
        chunk_rows=draw(st.integers(1, 4)),
        how=f"rows={rows} longest={longest} seed={seed}",
        layout=draw(st.integers(0, 3)),
        epochs=draw(st.sampled_from([None, 1, 2])) if finite else None,
    )


@st.composite
def image_worlds(
    draw: st.DrawFn,
    finite: bool | None = False,
    max_lanes: int = 4,
    bad: tuple[float, ...] = (0.0, 0.15),
    formats: Sequence[str] = ("jsonl", "tar", "parquet"),
    **fixed: Any,
) -> ImageWorld:
    """Random worlds: one or two sources of images, none to two of text, in any order."""
    ends = draw(st.booleans()) if finite is None else finite
    preset = draw(st.sampled_from(["qwen3_5", "qwen2_vl", "glimmer"]))
    seq_len = draw(st.sampled_from([32, 16, 24, 56, 8]))
    kinds = draw(st.sampled_from(["it", "ti", "i", "iti", "tit", "ii"]))
    how_bad = draw(st.sampled_from(bad))
    sources = tuple(
        draw(image_sources(i, preset, seq_len, ends, how_bad, formats)) if kind == "i"
        else draw(text_sources(i, seq_len, ends))
        for i, kind in enumerate(kinds)
    )  # fmt: skip
    lanes = draw(st.sampled_from([n for n in (2, 1, 4, 3, 6) if n <= max_lanes]))
    piece, unit = draw(st.sampled_from([("document", "tokens"), ("sequence", "tokens"), ("document", "samples")]))
    world = ImageWorld(
        sources=sources,
        seed=draw(st.integers(0, 2**31 - 1)),
        lanes=lanes,
        per_lane=1 if ends else draw(st.integers(1, 2)),
        seq_len=seq_len,
        window=draw(st.sampled_from([0, 4, 16])),
        piece=piece,
        unit=unit,
        tokenizer=draw(st.sampled_from(["both", "eos", "none"])),
        on_end=draw(st.sampled_from(["renormalise", "stop"])) if ends else "repeat",
        algorithm=draw(st.sampled_from(["concat", "best_fit"])),
        bins=draw(st.sampled_from([4, 1, 2, 16])),
        too_long=draw(st.sampled_from(["split", "split", "drop"])),
        preset=preset,
        patches=draw(st.sampled_from([None, 5, 16, 23, 64])),
        images=draw(st.sampled_from([None, 2, 3, 5])),
        ends=draw(st.booleans()),
    )
    return livable(replace(world, **fixed))


def livable(world: ImageWorld) -> ImageWorld:
    """`world` with a usable row at the start of every chunk that has none, so that no source seems dead."""
    for index, source in enumerate(world.sources):
        shards = [list(rows) for rows in source.shards]
        for shard, start, count in [] if world.finite else world.chunks(source):
            if not any(world.laid(source, row)[0] for row in shards[shard][start : start + count]):
                small: Any = "ab"
                if isinstance(source, ImageSource):
                    parts = Img("PNG", 20, 20), "ok"
                    small = Row(parts[::-1] if source.shape == "image_last" else parts)
                assert world.laid(source, small)[0] is not None
                shards[shard][start] = small
        world = world.with_source(index, shards=tuple(map(tuple, shards)))
    return world


# --- the oracle ----------------------------------------------------------------------------------------------------


class NaiveBins:
    """Both ways of packing, told by what a sequence may hold: positions, costs, and room for a filler without atoms."""

    def __init__(
        self, seq_len: int, budgets: Sequence[int], filler: int, best_fit: bool, limit: int, segments: int = 10**9
    ) -> None:
        self.seq_len, self.budgets, self.filler = seq_len, tuple(budgets), filler
        self.best_fit, self.limit, self.segments = best_fit, limit, segments
        self.bins: list[list[Piece]] = []  # oldest first

    def used(self, one: Sequence[Piece]) -> tuple[int, ...]:
        """Positions and costs of a bin."""
        costs = [atom[2] for doc, start, end in one for atom in doc.atoms if start <= atom[0] < end]
        return sum(end - start for _, start, end in one), *_sum([[0] * len(self.budgets), *costs])

    def reserved(self, one: Sequence[Piece]) -> int:
        return 0 if any(start <= atom[0] < end for doc, start, end in one for atom in doc.atoms) else self.filler

    def valid(self, one: Sequence[Piece]) -> bool:
        positions, *costs = self.used(one)
        return positions + self.reserved(one) <= self.seq_len and all(
            cost <= most for cost, most in zip(costs, self.budgets, strict=True)
        )

    def full(self, one: Sequence[Piece]) -> bool:
        return self.used(one)[0] + 1 + self.reserved(one) > self.seq_len

    def reach(self, one: Sequence[Piece], piece: Piece) -> int:
        """The longest first part that may be cut there and fits."""
        doc, start, end = piece
        for stop in range(min(end, start + self.seq_len), start, -1):
            if may_cut(doc, stop) and self.valid([*one, (doc, start, stop)]):
                return stop
        return start

    def put(self, piece: Piece) -> list[list[Piece]]:
        """Packs all of a piece; the sequences that leave."""
        gone = []
        doc, start, end = piece
        while start < end:
            stop, left = self.put_part((doc, start, end))
            assert stop > start or left
            gone += [left] if left else []
            start = stop
        return gone

    def put_part(self, piece: Piece) -> tuple[int, list[Piece] | None]:
        """Packs a first part of a piece: where it ends, and the sequence that leaves."""
        return self._put_best_fit(piece) if self.best_fit else self._put_concat(piece)

    def _put_concat(self, piece: Piece) -> tuple[int, list[Piece] | None]:
        doc, start, end = piece
        self.bins = self.bins or [[]]
        stop = self.reach(self.bins[0], piece)
        if stop > start:
            join(self.bins[0], (doc, start, stop))
        assert self.bins[0], "an atom that fits no sequence"
        return stop, self.bins.pop() if stop < end or self.full(self.bins[0]) else None

    def _put_best_fit(self, piece: Piece) -> tuple[int, list[Piece] | None]:
        doc, start, _ = piece
        stop = self.reach([], piece)
        assert stop > start, "an atom that fits no sequence"
        part = (doc, start, stop)
        fitting = [one for one in self.bins if self.valid([*one, part])]
        if not fitting:
            self.bins.append([])
        best = max(fitting, key=self.used) if fitting else self.bins[-1]  # least room; the first, so oldest, of equals
        join(best, part)
        if self.full(best):
            self.bins = [one for one in self.bins if one is not best]
            return stop, best
        crowded = len(self.bins) > self.limit or sum(map(len, self.bins)) >= self.segments
        return stop, self.pop_fullest() if crowded else None

    def pop_fullest(self) -> list[Piece]:
        fullest = max(self.bins, key=lambda one: self.used(one)[0])
        self.bins = [one for one in self.bins if one is not fullest]
        return fullest


def may_cut(doc: Any, at: int) -> bool:
    return not any(atom[0] < at < atom[1] for atom in doc.atoms)


def join(one: list[Piece], piece: Piece) -> None:
    """Touching runs of one sample are one segment."""
    if one and one[-1][0] is piece[0] and one[-1][2] == piece[1]:
        piece = (piece[0], one.pop()[1], piece[2])
    one.append(piece)


class ImageOracle(LaneOracle):
    """What one lane (or a whole finite stream) delivers; `broken` counts samples with a broken image, by source."""

    world: ImageWorld

    def __init__(self, world: ImageWorld, lane: int = 0) -> None:
        super().__init__(world, lane)
        best_fit = world.algorithm == "best_fit"
        self.packer = cast(
            Any, NaiveBins(world.seq_len, world.budgets, FILLER, best_fit, world.bins, MAX_OPEN_SEGMENTS)
        )
        self.broken = Counter[str]()
        self.delivered = 0

    def _pieces(self, index: int) -> Iterator[Any]:
        source = self.world.sources[index]
        for row in self.documents(index):
            doc, counts = self.world.laid(source, row)
            self.drawn[source.name].update(counts)
            at = 0
            while doc is not None and at < doc.positions:
                end = doc.positions
                if self.world.piece == "sequence":
                    end = next(e for e in range(min(end, at + self.world.seq_len), at, -1) if may_cut(doc, e))
                if end == doc.positions:
                    self.finished[source.name].update(counts)
                yield Owned(doc, index), at, end
                at = end
            if doc is None:
                self.finished[source.name].update(counts)

    def sequence(self) -> list[Piece]:
        """The pieces of the next record; a StopIteration after the last."""
        while not self.full:
            piece = self._take()
            if piece is not None:
                self.full += self.packer.put(cast(Any, (piece[0].doc, piece[1], piece[2])))
                self.owner[id(piece[0].doc)] = piece[0]
            elif self.packer.bins:
                self.full.append(self.packer.pop_fullest())
            else:
                raise StopIteration
        return cast(Any, self.full.pop(0))

    @functools.cached_property
    def owner(self) -> dict[int, Owned]:
        return {}

    def record(self) -> Any:
        pieces = self.sequence()
        self.delivered += sum(end - start for _, start, end in pieces)
        broken = {id(doc) for doc, start, end in pieces if any(one.broken for one in inside(doc, start, end))}
        self.broken.update(self.world.sources[self.owner[one].source].name for one in broken)
        record = record_of(self.world, pieces)
        if any(sum(one is doc for one, *_ in pieces) > 1 for doc, *_ in pieces if id(doc) in broken):
            record["labels"] = record["labels"][:0]  # a test of its own says what becomes of the other segment
        return record


class Owned(NamedTuple):
    """A document and the number of its source."""

    doc: Doc
    source: int


def inside(doc: Doc, start: int, end: int) -> list[Picture]:
    return [one for one in doc.pictures if start <= one.start < end]


def null_image(world: ImageWorld) -> Doc:
    geometry = world.kind.geometry
    picture = Picture(None, 0, 3, (geometry.unit, geometry.unit), geometry, (0, 0, 0))
    return Doc([START, PAD, END, END], [False] * 4, [picture], whole=True)


def record_of(world: ImageWorld, pieces: Sequence[Piece]) -> Arrays:
    """A record, by the design alone."""
    if not any(inside(*piece) for piece in pieces):
        pieces = [*pieces, (null_image(world), 0, FILLER)]
    found: dict[str, list[Any]] = {"input": [], "labels": [], "positions": [], "document_ids": []}
    mrope, grids, pixels = list[np.ndarray](), list[tuple[int, int, int]](), list[np.ndarray]()
    broken = {id(doc) for doc, start, end in pieces if any(one.broken for one in inside(doc, start, end))}
    for number, (doc, start, end) in enumerate(pieces):
        pictures = inside(doc, start, end)
        found["input"] += doc.ids[start:end]
        following = zip(doc.ids[start + 1 : end + 1], doc.trained[start + 1 : end + 1], strict=True)
        found["labels"] += [one if yes and id(doc) not in broken else -100 for one, yes in following]
        found["positions"] += range(end - start)
        found["document_ids"] += [number] * (end - start)
        grids += [one.grid for one in pictures]
        for one in pictures:
            patches = one.patches
            pixels.append(np.zeros((one.costs[0], 3 * one.geometry.patch_size**2)) if patches is None else patches)
        mrope.append(titan_mrope(doc.ids[start:end], [one.grid for one in pictures], world.kind.geometry.merge_size))
    free = world.seq_len - len(found["input"])
    assert free >= 0
    rest = {"input": 0, "labels": -100, "positions": 0, "document_ids": -1}
    record = {name: np.array([*values, *[rest[name]] * free], np.int32) for name, values in found.items()}
    if not world.ids:
        del record["document_ids"]
    if world.ends:
        starts = [0, *np.cumsum([end - start for _, start, end in pieces]).tolist()]
        record["cu_seqlens"] = np.array([*starts, *[world.seq_len] * (world.seq_len + 1 - len(starts))], np.int32)
    if world.kind.mrope:
        record["mrope_positions"] = np.concatenate([*mrope, np.zeros((free, 3))]).astype(np.int32)
    record["grid_thw"] = np.array(grids, np.int32)
    record["pixel_values"] = np.concatenate(pixels).astype(np.uint8)
    return record


def titan_mrope(ids: list[int], grids: Sequence[tuple[int, int, int]], merge: int) -> np.ndarray:
    """TorchTitan's M-RoPE positions of one segment alone."""
    if not grids:
        return np.repeat(np.arange(len(ids))[:, None], 3, axis=1)
    collator = object.__new__(MultiModalCollator)
    collator.patch_order, collator.spatial_merge_size = "block", merge
    found = collator._build_mrope_positions(
        torch.tensor([ids]), torch.tensor(grids), None, None, image_token_id=PAD, video_token_id=VIDEO
    )
    return found[0].numpy()


def global_steps(world: ImageWorld, pad_last: bool) -> list[list[Arrays]]:
    """All global batches of a finite world."""
    records = ImageOracle(world).all_records()
    if pad_last:
        records += [record_of(world, [])] * (-len(records) % world.batch)
    whole = len(records) - len(records) % world.batch
    return [records[start : start + world.batch] for start in range(0, whole, world.batch)]


def same(found: Arrays, expected: Arrays) -> None:
    """Two records are equal: names, types, shapes, values. Labels of no length are not compared."""
    assert set(found) == set(expected)
    for name, array in expected.items():
        if not len(array):
            continue
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert np.array_equal(found[name], array), (name, found[name].tolist(), array.tolist())
