"""Captioned pictures in tar files, from what any machine with Python and matplotlib has.

Every sample is another crop of a real photograph or drawing (matplotlib's sample pictures, and those that other
installed packages bring), re-encoded as JPEG; its caption says what it shows. The same packages give the same files.
"""

import io
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from webdataset.writer import TarWriter

from zephon.keyed import Draw, make_key

MARKS = ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Control tokens by which models of the Qwen-VL family know images."""

SHARDS = 2
_PLACES = (("top", "middle", "bottom"), ("left", "centre", "right"))
_LEAST_BYTES = 8_000  # smaller ones are icons and test patterns


def build_pairs(folder: Path, samples: int = 240, shards: int = SHARDS) -> int:
    """Write `samples` pairs of .jpg and .txt to `folder`; returns from how many pictures they come."""
    pool = list(_pictures())
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        with TarWriter(str(folder / f"shard-{shard}.tar"), mtime=0) as tar:
            for number in range(shard, samples, shards):
                picture, caption = _crop(*pool[number % len(pool)], Draw(make_key("demo pictures", 7, number)))
                tar.write({"__key__": f"{number:06d}", "jpg": picture, "txt": caption})
    return len(pool)


def _pictures() -> Iterator[tuple[Image.Image, str]]:
    """Pictures of installed packages with what they show, by their names."""
    packages = Path(sysconfig.get_paths()["purelib"])
    files = sorted((packages / "matplotlib").rglob("sample_data/*"))
    files += sorted((packages / "networkx").rglob("*.png")) + sorted((packages / "sympy").rglob("*.png"))
    for path in files:
        if path.suffix in (".jpg", ".png") and path.stat().st_size >= _LEAST_BYTES:
            name = path.stem.removeprefix("test_").removeprefix("display_").replace("_", " ")
            yield Image.open(path).convert("RGB"), name.lower()


def _crop(picture: Image.Image, name: str, draw: Draw) -> tuple[bytes, str]:
    """A part of a picture, and a sentence that says which."""
    share = 55 + draw.integer(46)  # percent of each side
    size = [side * share // 100 for side in picture.size]
    left, top = (draw.integer(whole - part + 1) for whole, part in zip(picture.size, size, strict=True))
    mirrored = draw.integer(2) == 1
    part = picture.crop((left, top, left + size[0], top + size[1]))
    part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else part
    scale = 96 + draw.integer(160)  # pixels of the shorter side
    part = part.resize([max(32, side * scale // min(part.size)) for side in part.size], Image.Resampling.LANCZOS)
    file = io.BytesIO()
    part.save(file, "JPEG", quality=75 + draw.integer(20))
    where = " ".join(
        words[min(2, 3 * at // max(1, whole - length + 1))]
        for words, at, whole, length in zip(_PLACES, (top, left), picture.size[::-1], size[::-1], strict=True)
    )
    kind = "mirrored" if mirrored else "plain"
    return file.getvalue(), f"The {where} of a picture of {name}, {share} percent of it, {kind}."
