"""How large an image becomes, and how its pixels become the patches that a vision encoder reads.

All sizes are (height, width) in pixels. A *unit* is a square of `patch_size * merge_size` pixels: one token of the
language model, `merge_size ** 2` patches of the vision encoder.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from zephon.errors import UsageError

MAX_ASPECT = 200
"""Longer side over shorter side, as Qwen-VL, transformers and TorchTitan have it."""

Size = tuple[int, int]
"""(height, width)"""


class ImageError(ValueError):
    """An image cannot be used; says what was found and why that does not do. Whoever has the row names it."""


@dataclass(frozen=True)
class Geometry:
    """What a vision encoder expects of an image.

    Attributes:
        patch_size: pixels of a patch's side.
        merge_size: patches of a unit's side.
        temporal: frames of a patch; an image is repeated that often.
        order: `"block"`: the patches of a unit follow each other, units row by row (Qwen-VL); `"raster"`: patches row
            by row.
        min_pixels: an image with fewer is enlarged.
        max_pixels: an image with more is made smaller. As in TorchTitan, an image whose shorter side is one unit can
            have more; the caps below hold always.
        max_patches: cap for one image, None for none.
        max_patches_per_side: cap for either side, None for none.

    Raises:
        UsageError: a value is not possible.
    """

    patch_size: int
    merge_size: int
    temporal: int
    order: Literal["block", "raster"]
    min_pixels: int
    max_pixels: int
    max_patches: int | None = None
    max_patches_per_side: int | None = None

    def __post_init__(self) -> None:
        if self.order not in ("block", "raster"):
            raise UsageError(f"The order of patches is 'block' or 'raster', not {self.order!r}.")
        if min(self.patch_size, self.merge_size, self.temporal, self.min_pixels) < 1:
            raise UsageError(f"Sizes of an image geometry are at least 1: {self}.")
        if self.max_pixels < self.min_pixels:
            raise UsageError(f"max_pixels = {self.max_pixels} is less than min_pixels = {self.min_pixels}.")
        for name, cap, least in (
            ("max_patches", self.max_patches, self.merge_size**2),
            ("max_patches_per_side", self.max_patches_per_side, self.merge_size),
        ):
            if cap is not None and cap < least:
                raise UsageError(f"{name} = {cap} leaves no room for one token, which takes {least}.")

    @property
    def unit(self) -> int:
        """Pixels of a unit's side."""
        return self.patch_size * self.merge_size

    def target(self, height: int, width: int, max_patches: int | None = None) -> Size:
        """The size that an image is resized to: a whole number of units a side.

        First the rule of Qwen-VL, with every result of TorchTitan's `resize_to_pixel_budget`: sides rounded to units,
        half to even; above `max_pixels` or below `min_pixels` both scaled, then rounded down or up. It divides and
        takes roots in float64 exactly where TorchTitan does. IEEE 754 has one correctly rounded result for both, so
        every machine gets the same integers. Then the caps, in integers alone: where one is exceeded, the image is
        scaled down to it with its own aspect, sides rounded down to units, at least one unit each.

        Args:
            height: of the image as it is shown, that is turned as its EXIF says.
            width: likewise.
            max_patches: a tighter cap, for an image that has to fit into what is left of a sample.

        Raises:
            ImageError: a side is zero, the aspect is beyond 1 : 200, or `max_patches` leaves no room for one unit.
        """
        rows, columns = self._budget(height, width)
        caps = [cap for cap in (self.max_patches, max_patches) if cap is not None]
        room = min(caps, default=rows * columns * self.merge_size**2) // self.merge_size**2
        if room < 1:
            raise ImageError(f"an image takes at least {self.merge_size**2} patches, there is room for {max_patches}")
        if rows * columns > room:
            rows = max(min(rows, math.isqrt(room * height // width), room), 1)
            columns = max(min(columns, math.isqrt(room * width // height), room // rows), 1)
        side = (self.max_patches_per_side or max(rows, columns) * self.merge_size) // self.merge_size
        if max(rows, columns) > side:
            longer = max(height, width)
            rows, columns = (
                max(min(units, side, side * pixels // longer), 1)
                for units, pixels in ((rows, height), (columns, width))
            )
        return rows * self.unit, columns * self.unit

    def _budget(self, height: int, width: int) -> Size:
        """Rows and columns of units by the pixel budget."""
        if height < 1 or width < 1:
            raise ImageError(f"an image of {height:,} by {width:,} pixels (height by width) is empty")
        unit, tall, wide = self.unit, height, width
        if tall < unit or wide < unit:
            scale = max(unit / wide, unit / tall)
            wide, tall = int(wide * scale), int(tall * scale)
        if max(tall, wide) / min(tall, wide) > MAX_ASPECT:
            raise ImageError(
                f"an image of {height:,} by {width:,} pixels (height by width) is too narrow: one side may be "
                f"{MAX_ASPECT} times the other, counted from {unit} pixels up"
            )
        rows, columns = max(round(tall / unit), 1), max(round(wide / unit), 1)
        pixels = rows * columns * unit * unit
        if pixels > self.max_pixels:
            beta = math.sqrt((tall * wide) / self.max_pixels)
            return max(math.floor(tall / beta / unit), 1), max(math.floor(wide / beta / unit), 1)
        if pixels < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (tall * wide))
            return math.ceil(tall * beta / unit), math.ceil(wide * beta / unit)
        return rows, columns

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Patches of a target size: (1, rows, columns), the `grid_thw` of an image."""
        return 1, height // self.patch_size, width // self.patch_size

    def patches(self, height: int, width: int) -> int:
        """How many patches an image of a target size has."""
        return height * width // self.patch_size**2

    def tokens(self, height: int, width: int) -> int:
        """How many positions of a sequence an image of a target size takes."""
        return height * width // self.unit**2


def patchify(pixels: NDArray[np.uint8], geometry: Geometry, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Cut an image into patches in the order of the model.

    Patches are channel-first, (channel, row, column), so that normalised and repeated over frames (`expand`) they are
    TorchTitan's `vision_to_patches`: (channel, frame, row, column). A row of a patch moves as one item of 16 bytes (14
    for patches of 14), not byte by byte: 0.27 ms for 0.25 Mpixel where one transposing copy takes 0.37.

    Args:
        pixels: uint8 [height, width, 3] of any strides, sides in whole units.
        geometry: of the model.
        out: uint8 [patches, 3 * patch_size ** 2] to write to, contiguous; made where left out.

    Returns:
        uint8 [patches, 3 * patch_size ** 2].

    Raises:
        ValueError: `pixels` or `out` have another shape.
    """
    (height, width, channels), side, merge = pixels.shape, geometry.patch_size, geometry.merge_size
    if height % geometry.unit or width % geometry.unit or channels != 3:
        raise ValueError(f"pixels of shape {pixels.shape} are not RGB in whole units of {geometry.unit} pixels")
    shape = (geometry.patches(height, width), 3 * side**2)
    out = np.empty(shape, np.uint8) if out is None else out
    if out.shape != shape or not out.flags.c_contiguous:
        raise ValueError(f"patches go to a contiguous array of shape {shape}, not {out.shape}")
    item = np.dtype(np.complex128 if side == 16 else f"V{side}")  # numpy copies complex128 fastest of 16 bytes
    rows = np.ascontiguousarray(pixels.transpose(2, 0, 1)).view(item)  # [channel, height, column of patches]
    down, across = height // geometry.unit, width // geometry.unit
    if geometry.order == "block":
        parts = rows.reshape(3, down, merge, side, across, merge).transpose(1, 4, 2, 5, 0, 3)
    else:
        parts = rows.reshape(3, down * merge, side, across * merge).transpose(1, 3, 0, 2)
    np.copyto(out.view(item).reshape(parts.shape), parts)
    return out


def expand(patches: torch.Tensor, geometry: Geometry, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Patches as the vision encoder takes them: normalised, repeated over frames. For the trainer's device.

    Args:
        patches: uint8 [patches, 3 * patch_size ** 2] on any device.
        geometry: of the model.
        mean: of each channel, from 0 to 1.
        std: of each channel.

    Returns:
        float32 [patches, 3 * temporal * patch_size ** 2], (channel, frame, row, column), on the same device: the
        values of TorchTitan's `process_image`, by the same operations in the same order.
    """
    planes = patches.view(-1, 3, 1, geometry.patch_size**2)
    of_channel = torch.tensor((tuple(mean), tuple(std)), dtype=torch.float32, device=patches.device)
    centre, spread = of_channel.view(2, 3, 1, 1)
    values = planes.to(torch.float32).mul_(1.0 / 255).sub_(centre).div_(spread)
    return values.expand(-1, -1, geometry.temporal, -1).reshape(len(patches), -1)
