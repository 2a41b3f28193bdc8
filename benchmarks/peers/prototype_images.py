"""The yardstick for images: tarfile reads, torchvision decodes and resizes, numpy cuts into patches. No framework.

The operators and settings are the fastest that give TorchTitan's pixels: uint8 all the way, the resize on a
channels-last view. Sequences are filled with whole samples, in the order of the tars; nothing is shuffled, mixed,
checked or kept.
"""

import math
import tarfile
from collections.abc import Iterator
from typing import Any

from common import MAX_PIXELS, MIN_PIXELS, Clock, Run, Work, main
from prototype import encoder

SIDE, MERGE = 16, 2
AROUND = 2  # tokens around the placeholders of an image


def target(height: int, width: int) -> tuple[int, int]:
    """Height and width in units of merged patches, within the budget of pixels."""
    unit = SIDE * MERGE
    rows, columns = max(round(height / unit), 1), max(round(width / unit), 1)
    pixels = rows * columns * unit * unit
    if pixels > MAX_PIXELS:
        shrink = math.sqrt(height * width / MAX_PIXELS)
        rows, columns = math.floor(height / shrink / unit), math.floor(width / shrink / unit)
    elif pixels < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (height * width))
        rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
    return rows * unit, columns * unit


def samples(work: Work) -> Iterator[tuple[bytes, str]]:
    """Image and caption of every pair, for ever."""
    while True:
        for file in work.files("tar"):
            held: dict[str, bytes] = {}
            with tarfile.open(file) as tar:
                for member in tar:
                    held[member.name.rsplit(".", 1)[1]] = tar.extractfile(member).read()  # type: ignore[union-attr]
                    if {"jpg", "txt"} <= held.keys():
                        yield held["jpg"], held["txt"].decode()
                        held = {}


def prototype(work: Work, clock: Clock) -> Run:
    import numpy as np
    import torch
    from torch.nn.functional import interpolate
    from torchvision.io import ImageReadMode, decode_jpeg

    clock.lap("imports")
    encode = encoder(work.tokenizer, fast=True)
    clock.lap("tokenizer")

    def patches_of(image: bytes) -> Any:
        pixels = decode_jpeg(torch.frombuffer(bytearray(image), dtype=torch.uint8), ImageReadMode.RGB)
        size = target(*pixels.shape[1:])
        pixels = pixels[None].contiguous(memory_format=torch.channels_last)
        small = interpolate(pixels, size, mode="bicubic", antialias=True)[0].numpy()
        down, across = size[0] // (SIDE * MERGE), size[1] // (SIDE * MERGE)
        parts = small.reshape(3, down, MERGE, SIDE, across, MERGE, SIDE).transpose(1, 4, 2, 5, 0, 3, 6)
        return np.ascontiguousarray(parts).reshape(-1, 3 * SIDE * SIDE)

    def batches() -> Iterator[dict[str, Any]]:
        waiting, cut = samples(work), work.batch * work.seq_len
        parts: list[Any] = []
        captions: list[str] = []
        length = 0
        while True:
            image, caption = next(waiting)
            parts.append(patches_of(image))
            captions.append(caption)
            length += len(parts[-1]) // MERGE**2 + AROUND
            if length >= cut * 0.9:  # captions are a tenth
                ids, _ = encode(captions)
                yield {"pixel_values": np.concatenate(parts), "images": len(parts), "positions": length + len(ids)}
                parts, captions, length = [], [], 0

    def look(batch: Any) -> dict[str, int]:
        pixels = batch["pixel_values"]
        return {
            "images": batch["images"], "patches": len(pixels), "pixel_bytes": pixels.nbytes, "slots": len(pixels),
            "positions": batch["positions"], "sequences": math.ceil(batch["positions"] / work.seq_len),
        }  # fmt: skip

    return Run(batches(), look)


if __name__ == "__main__":
    main(prototype)
