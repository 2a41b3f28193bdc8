"""What families of vision-language models expect of images: geometry, marks, normalisation."""

from dataclasses import dataclass

from modalities.geometry import Geometry


@dataclass(frozen=True)
class Preset:
    """One family of models.

    Attributes:
        geometry: how images become patches.
        mrope: whether positions count in time, height and width (`mrope_positions`).
        mean, std: of each channel, by which a model's pixels are normalised from [0, 1].
        tokens: control tokens before an image, in its place and behind it; last the one for videos, which a tokenizer
            need not have.
    """

    geometry: Geometry
    mrope: bool
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    tokens: tuple[str, str, str, str] = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


PRESETS = {
    "qwen3_5": Preset(Geometry(16, 2, 2, "block", min_pixels=65_536, max_pixels=16_777_216), mrope=True),
    "qwen2_vl": Preset(
        Geometry(14, 2, 2, "block", min_pixels=3_136, max_pixels=1_003_520),
        mrope=True,
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
    ),
    "glimmer": Preset(
        Geometry(14, 2, 2, "raster", min_pixels=784, max_pixels=3_136, max_patches=4_096, max_patches_per_side=512),
        mrope=False,
    ),
}
"""The defaults of TorchTitan 0.3's `qwen3_5` and `muse_glimmer` configurations and of transformers' Qwen2-VL
processor; a source may change the sizes."""
