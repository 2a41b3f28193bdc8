"""What the cases share: inputs of their own making, small recipes, and what a stream makes of them.

The tokenizer has one token a UTF-8 byte, so that what was delivered can be read back: a document is what lies between
two BOS, byte by byte.
"""

import hashlib
import io
import itertools
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from image_worlds import PAD, vision_tokenizer
from PIL import Image
from worlds import BOS, tokenizer_folder

from zephon import DataError, Loader, Stream
from zephon.digest import lane_digest, step_digest
from zephon.types import Record, Skip

PATCH, UNIT = 14, 28
"""Pixels of a side of a patch and of a token, with `preset = "qwen2_vl"`."""

RED, GREEN, BLUE, WHITE = (220, 30, 30), (30, 200, 40), (30, 60, 220), (250, 250, 250)
"""Of the quadrants of `quadrants`: left and right above, left and right below."""


def law(examples: int) -> settings:
    """How often a law is tried; worlds on disk are slow, and no fault of the test."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=examples, suppress_health_check=slow)


# --- texts ---------------------------------------------------------------------------------------------------------


def document(name: str, words: int = 12) -> str:
    """A text that begins and ends with its name, so that a cut or a mix-up shows; between are words of its own."""
    digest = hashlib.sha256(name.encode()).digest()
    return " ".join([f"<{name}>", *(f"w{digest[i % 32]:03d}" for i in range(words)), f"</{name}>"])


def exactly(name: str, size: int) -> str:
    """An ASCII text of so many bytes, which begins with its name where there is room."""
    letters = (
        chr(97 + byte % 26) for i in range(size // 32 + 1) for byte in hashlib.sha256(f"{name}{i}".encode()).digest()
    )
    return (f"<{name}>" + "".join(letters))[:size]


def row(name: str, text: str | None = None, **more: Any) -> bytes:
    """One line of JSONL, without its end."""
    return json.dumps({"id": name, "text": document(name) if text is None else text, **more}).encode()


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def lines(path: Path, rows: Iterable[bytes]) -> Path:
    return write(path, b"".join(one + b"\n" for one in rows))


def corpus(folder: Path, shards: int, each: int, prefix: str = "d", words: int = 12) -> list[str]:
    """Shards of JSONL with documents of their own; their texts in stored order."""
    names = [[f"{prefix}{shard}-{i}" for i in range(each)] for shard in range(shards)]
    for shard, some in enumerate(names):
        lines(folder / f"{prefix}{shard:02}.jsonl", [row(name, document(name, words)) for name in some])
    return [document(name, words) for some in names for name in some]


# --- tars and pictures ---------------------------------------------------------------------------------------------


def tar(path: Path, members: Iterable[tuple[str, bytes]], kind: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as out:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return path


def colour(number: int) -> tuple[int, int, int]:
    """A colour of its own for each of the first hundreds of numbers."""
    return 20 + number * 37 % 211, 20 + number * 71 % 211, 20 + number * 113 % 211


def encoded(image: Image.Image, kind: str = "JPEG", **more: Any) -> bytes:
    if kind == "JPEG":
        more = {"quality": 95, "subsampling": 0, **more}
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def tile(number: int, kind: str = "JPEG", width: int = UNIT, height: int = UNIT) -> bytes:
    """A picture of one colour, which tells its number."""
    return encoded(Image.new("RGB", (width, height), colour(number)), kind)


def quadrants(width: int = 2 * UNIT, height: int = 4 * UNIT) -> Image.Image:
    """Four colours, no two of which can be exchanged without being noticed."""
    image = Image.new("RGB", (width, height))
    for i, one in enumerate((RED, GREEN, BLUE, WHITE)):
        image.paste(
            one, (i % 2 * width // 2, i // 2 * height // 2, (i % 2 + 1) * width // 2, (i // 2 + 1) * height // 2)
        )
    return image


def corners(pixels: np.ndarray) -> list[tuple[int, ...]]:
    """The colours in the middle of the four quadrants, of uint8 [height, width, 3]."""
    height, width = pixels.shape[:2]
    return [tuple(map(int, pixels[y * height // 4, x * width // 4])) for y in (1, 3) for x in (1, 3)]


def near(found: Any, wanted: Any, tolerance: int) -> bool:
    """Whether two colours, or two lists of them, differ by no more than this in any channel."""
    return bool((np.abs(np.asarray(found, int) - np.asarray(wanted, int)) <= tolerance).all())


def pairs(count: int) -> list[tuple[str, bytes]]:
    """Members of a tar: `count` samples of a picture and a caption."""
    return [one for i in range(count) for one in ((f"s{i}.jpg", tile(i)), (f"s{i}.txt", f"caption {i}".encode()))]


# --- recipes -------------------------------------------------------------------------------------------------------


def source(*paths: str, name: str = "s", **keys: Any) -> str:
    """One `[[sources]]` of a recipe."""
    values = {"name": name, "paths": list(paths), **keys}
    return "[[sources]]\n" + "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()
    )


def images(*paths: str, **keys: Any) -> str:
    """A source of images and text that are delivered at the size of whole tokens, small ones not enlarged."""
    given = {"modality": "image_text", "preset": "qwen2_vl", "min_pixels": UNIT**2, "max_bad": 1000, **keys}
    return source(*paths, **given)


def recipe(
    folder: Path,
    *sources: str,
    lanes: int = 0,
    size: int = 1,
    seq_len: int = 64,
    window: int = 0,
    tokenizer: str = "both",
    more: str = "",
) -> Path:
    """A recipe for these sources: one pass over all of them in stored order, or endless lanes with `lanes`.

    `more` holds further tables; a `[run]` table among them takes the place of ours.
    """
    head = f"seed = 11\nlanes = {lanes}\n" if lanes else "seed = 11\n"
    end = "" if lanes or "[mix]" in more else '[mix]\non_end = "renormalise"\n'
    run = more if "[run]" in more else more + "\n[run]\n"
    has_images = any("image_text" in one for one in sources)
    path = vision_tokenizer(tokenizer) if has_images else tokenizer_folder(tokenizer)
    return write(
        folder / "recipe.toml",
        f'{head}[batch]\nseq_len = {seq_len}\nglobal_batch_size = {size}\n[tokenizer]\npath = "{path}"\n'
        f'{"".join(sources)}[shuffle]\nwindow = {window}\n{end}{run}\ncache = "cache"\n'.encode(),
    )


def own_code(folder: Path, body: str) -> str:
    """A module beside the recipe; its name, which no other test has: Python imports a name once a process."""
    name = "own_" + hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    write(folder / f"{name}.py", body.encode())
    return name


# --- what is delivered ---------------------------------------------------------------------------------------------


class Delivered(NamedTuple):
    """One pass: the documents in order, what was counted of each source, and the bad rows that were left out."""

    texts: list[str]
    counts: dict[str, dict[str, int]]
    skipped: list[Skip]


class Seen(NamedTuple):
    """A sample of images and text as a sequence holds it: its text, its pictures, and whether any of it is trained."""

    text: str
    pictures: list[np.ndarray]
    trained: bool


def records(path: Path) -> tuple[list[Record], Loader]:
    """All records of a finite stream, the last step filled up, and the loader that gave them."""
    with Stream.open(path) as stream:
        loader = stream.loader(pad_last=True)
        return [record for batch in loader for record in stream.worker.records(batch)], loader


def delivered(path: Path) -> Delivered:
    """One pass over a recipe of text: each document once more as it was stored."""
    found, loader = records(path)
    return Delivered(texts_in(found), loader.stats().dropped, loader.take_skipped())


def told(path: Path, log: pytest.LogCaptureFixture) -> str:
    """What a user is told of a pass that gives nothing: the error, or else what was logged."""
    try:
        found, _ = records(path)
    except DataError as error:
        return str(error)
    assert not found
    return log.text


def texts_in(found: Iterable[Record]) -> list[str]:
    """The documents in records that follow each other, pieces joined; padding is left out."""
    ids = [int(one) for record in found for one in record["input"][record["labels"] != -100]]
    starts = [i for i, one in enumerate(ids) if one == BOS]
    return [bytes(ids[a + 1 : b]).decode() for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]


def lines_of(skipped: Iterable[Skip], path: Path) -> list[int]:
    """The lines of a file that a skip list names, from 1 on: where the bytes lie that it names."""
    raw = path.read_bytes()
    places = [skip.place.rpartition(", byte ") for skip in skipped]
    assert all(place.startswith(str(path)) for place, _, _ in places)
    return [raw[: int(byte)].count(b"\n") + 1 for _, _, byte in places]


def seen(path: Path) -> tuple[list[Seen], Delivered]:
    """One pass over a recipe with images whose samples stay whole (`best_fit`): samples, and what was left out."""
    found, loader = records(path)
    samples = [one for record in found for one in samples_of(record)]
    return samples, Delivered([one.text for one in samples], loader.stats().dropped, loader.take_skipped())


def samples_of(record: Mapping[str, np.ndarray]) -> Iterator[Seen]:
    """The samples of a record, told apart by where positions start again; null images and padding are left out."""
    ids, labels = record["input"], record["labels"]
    starts = [*np.flatnonzero(record["positions"] == 0).tolist(), len(ids)]
    pictures = pictures_of(record)
    for start, end in itertools.pairwise(starts):
        mine = ids[start:end]
        inside = [next(pictures) for _ in range(_runs(mine))]
        if mine[0] == BOS:
            text = bytes(mine[mine < 256].astype(np.uint8)).decode()
            yield Seen(text, inside, bool((labels[start:end] != -100).any()))


def _runs(ids: np.ndarray) -> int:
    """How many runs of placeholders there are."""
    pads = np.concatenate([[False], ids == PAD])
    return int((pads[1:] & ~pads[:-1]).sum())


def pictures_of(record: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    """The pictures of a record, put together again from their patches: uint8 [height, width, 3]."""
    at = 0
    for _, rows, columns in record["grid_thw"].tolist():
        patches = record["pixel_values"][at : at + rows * columns].reshape(
            rows // 2, columns // 2, 2, 2, 3, PATCH, PATCH
        )
        at += rows * columns
        yield patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * PATCH, columns * PATCH, 3)


# --- steps of several ranks ----------------------------------------------------------------------------------------


def trace(loaders: Sequence[Loader], steps: int) -> list[str]:
    """SHA-256 of the next global batches."""
    found: list[str] = []
    for _ in range(steps):
        parts = [loader.step_records() for loader in loaders]
        found.append(step_digest({lane: lane_digest(mine) for part in parts for lane, mine in part.items()}))
    return found


def saved(loaders: Sequence[Loader]) -> dict[str, bytes]:
    """The state of all ranks."""
    return {key: raw for loader in loaders for key, raw in loader.state_dict().items()}


def ranks(stream: Stream, world: int, state: Mapping[str, bytes] | None = None) -> list[Loader]:
    """The loaders of all ranks, from the beginning or from a state."""
    loaders = [stream.loader(rank, world) for rank in range(world)]
    for loader in loaders if state else ():
        loader.load_state_dict(state or {})
    return loaders
