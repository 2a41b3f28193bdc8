"""Are images those of TorchTitan, transformers and Pillow, and what does one cost from bytes to patches?

    python -m benchmarks.image_parity SHARD.tar ... [--images N] [--rounds N]

Parity is measured on the pictures as they are, with the presets' own budgets; cost with at most 262,144 pixels (512 by
512), in rounds that alternate. CPU time, one thread.
"""

import argparse
import io
import os
import statistics
import tarfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchtitan.hf_datasets.multimodal.utils import image as titan
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from benchmarks import report
from modalities.geometry import Geometry, expand, patchify
from modalities.headers import read_header
from modalities.images import codec_versions, load
from modalities.presets import PRESETS

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")
HALF = (0.5, 0.5, 0.5)


@dataclass
class Member:
    """A file in a tar file, read where it lies."""

    fd: int
    offset: int
    size: int
    place: str

    def head(self, size: int) -> bytes:
        return os.pread(self.fd, min(size, self.size), self.offset)

    def read(self) -> bytes:
        return self.head(self.size)


def members(paths: list[Path]) -> list[Member]:
    found = []
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        with tarfile.open(path) as tar:
            found += [
                Member(fd, one.offset_data, one.size, one.name) for one in tar if one.name.lower().endswith(SUFFIXES)
            ]
    return found


def patches(data: bytes, size: tuple[int, int], geometry: Geometry) -> NDArray[np.uint8]:
    return patchify(load(data, geometry.target(*size)), geometry)


def by_titan(data: bytes, geometry: Geometry) -> tuple[torch.Tensor, list[int]]:
    image = titan.process_image(
        data,
        patch_size=geometry.patch_size,
        merge_size=geometry.merge_size,
        min_pixels=geometry.min_pixels,
        max_pixels=geometry.max_pixels,
    )
    assert image is not None
    found, grid = titan.vision_to_patches(
        image, geometry.patch_size, geometry.temporal, geometry.merge_size, geometry.order
    )
    return found, grid.tolist()


def floor(data: bytes, size: tuple[int, int]) -> torch.Tensor:
    """The two operators alone, in the layout that torch resizes fastest; without patches."""
    stored = torch.ops.image.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), 3, False)
    return titan.TVF.resize(stored, list(size), interpolation=titan.TVF.InterpolationMode.BICUBIC, antialias=True)


class Transformers:
    """The Qwen2-VL processor; normalised by 0.5, so that one level of 255 is the same everywhere."""

    def __init__(self, geometry: Geometry) -> None:
        self._processor = Qwen2VLImageProcessor(
            patch_size=geometry.patch_size,
            merge_size=geometry.merge_size,
            temporal_patch_size=geometry.temporal,
            size={"shortest_edge": geometry.min_pixels, "longest_edge": geometry.max_pixels},
            image_mean=list(HALF),
            image_std=list(HALF),
        )

    def __call__(self, data: bytes, geometry: Geometry) -> tuple[torch.Tensor, list[int]]:
        found = self._processor(images=[Image.open(io.BytesIO(data))], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"][0].tolist()


def by_pillow(data: bytes, geometry: Geometry) -> tuple[torch.Tensor, list[int]]:
    with Image.open(io.BytesIO(data)) as image:
        height, width = geometry.target(image.height, image.width)
        pixels = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC))
    found = torch.from_numpy(patchify(pixels, geometry))
    return expand(found, geometry, HALF, HALF), list(geometry.grid(height, width))


def parity(pictures: list[Member], name: str, other: Callable[..., Any]) -> dict[str, Any]:
    """Differences in levels of 255; `grids` counts the images whose grids differ."""
    geometry, grids, means, most = PRESETS[name].geometry, 0, list[float](), 0.0
    for picture in pictures:
        size = read_header(picture).shown()
        ours = expand(torch.from_numpy(patches(picture.read(), size, geometry)), geometry, HALF, HALF)
        theirs, grid = other(picture.read(), geometry)
        if grid != list(geometry.grid(*geometry.target(*size))):
            grids += 1
            continue
        gap = (ours - theirs).abs_().mul_(127.5)
        means.append(gap.mean().item())
        most = max(most, gap.max().item())
    return {
        "images": len(pictures),
        "other grid": grids,
        "largest mean of an image": round(max(means, default=0), 5),
        "mean": round(statistics.fmean(means), 5),
        "largest": round(most, 3),
    }


def cost(pictures: list[Member], rounds: int) -> dict[str, Any]:
    """CPU ms an image, median of the rounds."""
    geometry = replace(PRESETS["qwen3_5"].geometry, max_pixels=262_144)
    files = [one.read() for one in pictures]
    sizes = [read_header(one).shown() for one in pictures]
    targets = [geometry.target(*size) for size in sizes]
    loaded = [load(data, target) for data, target in zip(files, targets, strict=True)]
    stages: dict[str, Callable[[int], object]] = {
        "ours: header, decode, resize, patchify": lambda i: patches(
            pictures[i].read(), read_header(pictures[i]).shown(), geometry
        ),
        "least possible: torchvision's decode and resize": lambda i: floor(files[i], targets[i]),
        "of that: header, from the tar": lambda i: read_header(pictures[i]).shown(),
        "of that: target size": lambda i: geometry.target(*sizes[i]),
        "of that: decode": lambda i: load(files[i], sizes[i]),
        "of that: decode and resize": lambda i: load(files[i], targets[i]),
        "of that: patchify": lambda i: patchify(loaded[i], geometry),
        "TorchTitan: process_image": lambda i: titan.process_image(files[i], max_pixels=262_144),
        "TorchTitan: process_image, vision_to_patches": lambda i: by_titan(files[i], geometry),
        "Pillow, its patches normalised": lambda i: by_pillow(files[i], geometry),
        "trainer's part: expand": lambda i: expand(torch.from_numpy(ours[i]), geometry, HALF, HALF),
    }
    ours = [patchify(pixels, geometry) for pixels in loaded]
    taken: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(rounds):
        for name, stage in stages.items():
            start = time.process_time()
            for i in range(len(pictures)):
                stage(i)
            taken[name].append((time.process_time() - start) / len(pictures) * 1e3)
    return {
        "images": len(pictures),
        "mean source pixels": round(statistics.fmean(h * w for h, w in sizes)),
        "mean target pixels": round(statistics.fmean(h * w for h, w in targets)),
        "cpu ms an image": {
            name: {"median": round(statistics.median(all_), 4), "least": round(min(all_), 4)}
            for name, all_ in taken.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tars", nargs="+", type=Path)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of torchvision.io, which TorchTitan calls
    pictures = list(islice(members(options.tars), options.images))
    result: dict[str, Any] = {"codecs": codec_versions(), "parity in levels of 255": {}}
    for title, name, other in (
        ("TorchTitan, qwen3_5", "qwen3_5", by_titan),
        ("TorchTitan, glimmer", "glimmer", by_titan),
        ("TorchTitan, qwen2_vl", "qwen2_vl", by_titan),
        ("transformers, qwen2_vl", "qwen2_vl", Transformers(PRESETS["qwen2_vl"].geometry)),
        ("Pillow, qwen2_vl", "qwen2_vl", by_pillow),
    ):
        result["parity in levels of 255"][title] = found = parity(pictures, name, other)
        print(f"{title:24} {found}", flush=True)
    result["cost"] = cost(pictures[:48], options.rounds)
    for name, one in result["cost"]["cpu ms an image"].items():
        print(f"{name:46} {one['median']:8.3f} (least {one['least']:.3f})")
    report.write("image_parity", result)


if __name__ == "__main__":
    main()
