"""Images and text with TorchTitan: `torchrun -m torchtitan.train --module recipes.titan_image_text --config NAME`.

Pixels come from the loader as uint8 patches, each image once. What TorchTitan's models want instead, normalised floats
with the temporal copy, padded to the largest image of the micro-batch, is made on the device, of a sixth of the bytes.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import MultiModalTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.protocols.model_spec import ModelSpec

from modalities.geometry import expand
from modalities.image_text import ImageText
from recipes import cpu
from recipes.titan_text import complete_run, on_cpu, with_vocabulary
from zephon import RecipeError, Stream
from zephon.titan import Trainer, Validator

cpu.install()
cpu.stub_fla()

from torchtitan.models import muse_glimmer, qwen3_5  # noqa: E402

Tensors = dict[str, Any]


def for_model(tensors: Tensors, builder: ImageText, special_tokens: dict[str, int]) -> Tensors:
    """What the model's forward takes, from what the loader gives.

    `pixel_values` uint8 [patches, 3·p²] becomes float32 [images, most patches, 3·t·p²], zero behind an image's own;
    `grid_thw` [images, 3] stays; `special_tokens` are the ids by which models find placeholders.
    """
    out = {name: value for name, value in tensors.items() if name != "pixel_values"}
    patches, grid = tensors["pixel_values"], tensors["grid_thw"]
    if patches.dtype == torch.uint8:
        patches = expand(patches, builder.geometry, builder.preset.mean, builder.preset.std)
    counts = grid.prod(dim=1)
    places = torch.arange(int(counts.max()), device=patches.device)
    padded = patches.new_zeros(len(grid), len(places), patches.shape[1])
    padded[places[None, :] < counts[:, None]] = patches
    return {**out, "pixel_values": padded, "special_tokens": special_tokens}


def special_tokens(tokenizer: Any, builder: ImageText) -> dict[str, int]:
    """TorchTitan's names for the control tokens, by id.

    Raises:
        RecipeError: TorchTitan marks images with other tokens than the loader.
    """
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in tokenizer.TOKEN_FIELDS}
    marks = builder.marks
    ours = {"vision_start_id": marks.start, "image_id": marks.pad, "vision_end_id": marks.end}
    if any(ids[name] != number for name, number in ours.items()):
        raise RecipeError(f"TorchTitan marks images with {ids}, the recipe's preset with {ours}. Make them agree.")
    return ids


class ImageTextValidator(Validator):
    """The validator of image-text runs."""

    builder: ImageText
    """Of what is validated on; set by the trainer when it has checked it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def post_dataloading_process(self, input_dict: Tensors, labels: torch.Tensor, model_parts: Any) -> Any:
        prepared = for_model(input_dict, self.builder, special_tokens(self.tokenizer, self.builder))
        return super().post_dataloading_process(prepared, labels, model_parts)


class ImageTextTrainer(Trainer):
    """The trainer of image-text runs: pixels are made ready on the device."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        validator: ImageTextValidator.Config = field(default_factory=ImageTextValidator.Config)  # pyright: ignore[reportIncompatibleVariableOverride]

    def train(self) -> None:
        """Check that loader, validation and model cut images alike, then train."""
        self._builder = self._checked(self.dataloader.stream)
        self._special = special_tokens(self.tokenizer, self._builder)
        if isinstance(validator := getattr(self, "validator", None), ImageTextValidator):
            validator.builder = self._checked(validator.stream)
            if validator.builder.preset != self._builder.preset:
                raise RecipeError(
                    f"{validator.stream.recipe.path}, on which is validated, prepares images for another model than "
                    f"{self.dataloader.stream.recipe.path}, on which is trained: losses would say nothing. Take one "
                    "preset in the image_text sources of both."
                )
        super().train()

    def _checked(self, stream: Stream) -> ImageText:
        """What builds a stream's records, if it is for this model."""
        builder = builder_of(stream)
        special_tokens(self.tokenizer, builder)
        check_geometry(builder, cast(Any, self.model_config).vision_encoder, stream.recipe.path)
        return builder

    def post_dataloading_process(self, input_dict: Tensors, labels: torch.Tensor) -> Any:
        return super().post_dataloading_process(for_model(input_dict, self._builder, self._special), labels)


def builder_of(stream: Stream) -> ImageText:
    """The modality that builds a stream's records.

    Raises:
        RecipeError: the recipe has no images.
    """
    builder = stream.worker.builder
    if not isinstance(builder, ImageText):
        raise RecipeError(
            f"{stream.recipe.path}: no source has modality = 'image_text'. Train or validate on it with "
            "recipes.titan_text."
        )
    return builder


def check_geometry(builder: ImageText, encoder: Any, recipe: Path) -> None:
    """Refuse a recipe whose patches are not those of the model's vision encoder.

    Raises:
        RecipeError: names both.
    """
    if encoder is None:
        raise RecipeError("This model has no vision encoder. Use one that has, or recipes.titan_text.")
    names = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    if not hasattr(encoder, names[1]):
        names = ("patch_size", "patch_temporal", "downsample_factor")  # Glimmer's words
    theirs = tuple(getattr(encoder, name) for name in names)
    ours = (builder.geometry.patch_size, builder.geometry.temporal, builder.geometry.merge_size)
    if ours != theirs:
        raise RecipeError(
            f"{recipe} cuts images into patches of {ours[0]} pixels, {ours[1]} frames and {ours[2]}×{ours[2]} to a "
            f"token, the model's encoder wants {theirs[0]}, {theirs[1]} and {theirs[2]}×{theirs[2]}. Take the "
            "preset of the model in every image_text source."
        )


def _run(spec: ModelSpec, recipe: str, assets: str, **kwargs: Any) -> ImageTextTrainer.Config:
    tokenizer = MultiModalTokenizer.Config(**qwen3_5.QWEN3_5_SPECIAL_TOKENS)  # Glimmer's are the same
    return complete_run(spec, recipe, assets, ImageTextTrainer.Config, tokenizer=tokenizer, **kwargs)


def qwen_micro() -> ImageTextTrainer.Config:
    """Qwen 3.5's debug model on the CPU, cut to its two layers of full attention: what `make demo-vlm` trains."""
    spec = qwen3_5.model_registry("debugmodel")
    full = [layer for layer in cast(Any, spec.model).layers if layer.attention is not None]
    spec = with_vocabulary(spec, 2048, full)
    return _run(spec, "demo-vlm/recipe.toml", "demo-vlm/tokenizer", **on_cpu(seq_len=256))


def glimmer_micro() -> ImageTextTrainer.Config:
    """Muse Glimmer's multimodal debug model on the CPU, on what `make demo-vlm` leaves."""
    spec = muse_glimmer.model_registry("debugmodel_mm", attn_backend="flex")
    return _run(spec, "demo-vlm/glimmer.toml", "demo-vlm/tokenizer", **on_cpu(seq_len=256))


def qwen3_5_4b() -> ImageTextTrainer.Config:
    """Qwen 3.5 4B on 64 lanes: 64 sequences of 8,192 tokens a step on 1 to 64 ranks."""
    return _run(
        qwen3_5.model_registry("4B"),
        "recipes/image_text.toml",
        "./assets/hf/Qwen3.5-4B",
        training=TrainingConfig(local_batch_size=1, global_batch_size=64, seq_len=8192, steps=40_000),
        optimizer=default_adamw(lr=2e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1000),
        metrics=MetricsProcessor.Config(enable_tensorboard=True),
    )


def glimmer_30b() -> ImageTextTrainer.Config:
    """Muse Glimmer 30B on 64 lanes, on 8 to 64 ranks; name a recipe whose image sources have `preset = "glimmer"`."""
    return _run(
        muse_glimmer.model_registry("30B_mm", attn_backend="flex"),
        "",
        "./assets/hf/Muse-Glimmer-30B",
        training=TrainingConfig(local_batch_size=1, global_batch_size=64, seq_len=8192, steps=40_000),
        parallelism=ParallelismConfig(spmd_backend="spmd_types"),
        optimizer=default_adamw(lr=2e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1000),
        metrics=MetricsProcessor.Config(enable_tensorboard=True),
    )
