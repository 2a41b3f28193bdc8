"""Images as spans of positions: how large each may be so that its sample fits, and where its tokens lie in space."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from modalities.geometry import Geometry
from modalities.headers import Header
from zephon.types import Blob


class Picture(NamedTuple):
    """An image of a sample.

    Attributes:
        blob: where its bytes are; None for the null image, which is black.
        start: position of the token before its placeholders.
        height, width: pixels after resizing.
        header: what the file says of itself.
    """

    blob: Blob | None
    start: int
    height: int
    width: int
    header: Header | None = None


class Fitted(NamedTuple):
    """Sizes (height, width) after resizing, and whether images were made smaller than the budget of pixels asks."""

    sizes: list[tuple[int, int]]
    shrunk: bool


def fit(
    sizes: Sequence[tuple[int, int]], geometry: Geometry, most: tuple[int, int, int], plain: int, policy: str
) -> Fitted | None:
    """Target sizes for the images of one sample, so that it can be packed.

    An image that no sequence holds is always made smaller, or its sample dropped: it cannot be cut. A sample that is
    too much as a whole is split between images, shrunk until it fits (split where even the smallest images are too
    many), or dropped.

    Args:
        sizes: height and width of every image, in pixels, as its header says.
        geometry: how images become patches.
        most: positions, patches and images of a sequence.
        plain: positions of the sample without placeholders.
        policy: "split", "shrink" or "drop".

    Returns:
        None where the sample is to be dropped.
    """
    seq_len, patches, images = most
    unit = geometry.merge_size**2
    alone = min(patches, (seq_len - 2) * unit)  # with the tokens around it
    wanted = [geometry.target(*size) for size in sizes]
    capped = [
        target if geometry.patches(*target) <= alone else geometry.target(*size, max_patches=alone)
        for size, target in zip(sizes, wanted, strict=True)
    ]
    if any(geometry.patches(*size) > alone for size in capped):
        return None

    def fits(targets: list[tuple[int, int]]) -> bool:
        cost = sum(geometry.patches(*target) for target in targets)
        return cost <= patches and plain + cost // unit <= seq_len and len(targets) <= images

    if policy == "split" or fits(wanted):
        return Fitted(capped, capped != wanted)
    if policy == "drop":
        return None
    low, high = unit, alone // unit * unit  # patches an image may have: the most with which all fit, by halving
    if not fits([geometry.target(*size, max_patches=low) for size in sizes]):
        return Fitted(capped, capped != wanted)
    while low < high:
        middle = (low + high + unit) // 2 // unit * unit
        if fits([geometry.target(*size, max_patches=middle) for size in sizes]):
            low = middle
        else:
            high = middle - unit
    return Fitted([geometry.target(*size, max_patches=low) for size in sizes], True)


def grid_positions(out: NDArray[np.generic], start: int, pictures: Sequence[Picture], geometry: Geometry) -> None:
    """Positions in time, height and width (Qwen-VL's M-RoPE) of one segment, written into `out`, int32 [size, 3].

    Text counts on all three axes alike; the placeholders of an image share the time of its first one and spread over
    rows and columns; what follows goes on behind the largest of them.

    Args:
        out: the rows of the segment.
        start: position of the sample with which the segment begins.
        pictures: its images, ascending.
        geometry: how images become patches.
    """
    side = geometry.unit
    at = following = 0
    for picture in pictures:
        run = picture.start + 1 - start
        out[at:run] = np.arange(following, following + run - at, dtype=np.int32)[:, None]
        following += run - at
        rows, columns = picture.height // side, picture.width // side
        out[run : run + rows * columns] = _grid(rows, columns) + np.int32(following)
        following += max(rows, columns)
        at = run + rows * columns
    out[at:] = np.arange(following, following + len(out) - at, dtype=np.int32)[:, None]


@functools.lru_cache(maxsize=512)
def _grid(rows: int, columns: int) -> NDArray[np.int32]:
    """int32 [rows * columns, 3]: 0, row and column."""
    out = np.zeros((rows * columns, 3), np.int32)
    out[:, 1] = np.repeat(np.arange(rows), columns)
    out[:, 2] = np.tile(np.arange(columns), rows)
    return out
