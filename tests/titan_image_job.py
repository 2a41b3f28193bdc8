"""Jobs that test_titan_images.py runs under torchrun: `titan_image_job.py NAME FOLDER`."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from titan_job import run
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets.multimodal.mm_datasets import MM_DATASETS, MMDataLoader
from torchtitan.trainer import Trainer as TitanTrainer

from recipes.titan_image_text import ImageTextTrainer, ImageTextValidator, glimmer_micro, qwen_micro
from zephon.titan import DataLoader


def config(folder: Path, base: ImageTextTrainer.Config, recipe: str = "recipe.toml", **training: Any) -> Any:
    settings = {"seq_len": 96, "global_batch_size": 4, "local_batch_size": 2, "steps": 6, **training}
    base.training = TrainingConfig(mixed_precision_param="float32", disable_cuda_graphs=True, **settings)
    base.checkpoint = replace(base.checkpoint, interval=3)
    base.dump_folder, base.hf_assets_path = str(folder), str(folder.parent / "tokenizer")
    base.dataloader = DataLoader.Config(recipe=str(folder.parent / recipe))
    return base


class Watched(ImageTextTrainer):
    """Notes how many images that are not the null image each rank gets in a step."""

    @dataclass(kw_only=True, slots=True)
    class Config(ImageTextTrainer.Config):
        pass

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        seen: list[int] = []

        def noted() -> Iterator[Any]:
            for tensors, labels in data_iterator:
                seen.append(int((tensors["grid_thw"].prod(dim=1) > 4).sum()))
                yield tensors, labels

        super().train_step(noted())
        with Path(self.config.dump_folder, f"images_{dist.get_rank()}.jsonl").open("a") as file:
            print(json.dumps(seen), file=file)


def watched(made: Any) -> Watched.Config:
    return Watched.Config(**{one.name: getattr(made, one.name) for one in fields(ImageTextTrainer.Config)})


def qwen(folder: Path) -> None:
    run(config(folder, qwen_micro()))


def glimmer(folder: Path) -> None:
    run(config(folder, glimmer_micro(), "glimmer.toml"))


def uneven(folder: Path) -> None:
    """The second of two ranks never has an image."""
    run(watched(config(folder, qwen_micro(), "turns.toml", steps=50, local_batch_size=1, global_batch_size=2)))


def validate(folder: Path, recipe: str = "finite.toml") -> None:
    made = config(folder, qwen_micro(), steps=4)
    made.optimizer = default_adamw(lr=0.0)
    loader = DataLoader.Config(recipe=str(folder.parent / recipe))
    made.validator = ImageTextValidator.Config(enable=True, freq=4, steps=-1, dataloader=loader)
    run(made)


def validate_glimmer(folder: Path) -> None:
    """Images for another model in the validation: refused before anything is trained."""
    validate(folder, "finite-glimmer.toml")


def validate_text(folder: Path) -> None:
    """No images in the validation, whose model needs them."""
    validate(folder, "finite-text.toml")


def geometry(folder: Path) -> None:
    """Patches of another model: refused before anything is trained."""
    run(config(folder, qwen_micro(), "glimmer.toml"))


def context(folder: Path) -> None:
    made = config(folder, qwen_micro())
    made.parallelism = replace(made.parallelism, context_parallel_degree=2, data_parallel_shard_degree=1)
    run(made)


def _alone(folder: Path, steps: int) -> Any:
    """The run that both loaders are given: samples alone in their sequences, in the order of the files."""
    made = config(folder, qwen_micro(), "alone.toml", steps=steps, global_batch_size=2, seq_len=160)
    made.checkpoint = replace(made.checkpoint, interval=10_000)
    return made


def seed(folder: Path) -> None:
    """Initial weights that both start from: loaders draw from the generator that initialises models."""
    made = _alone(folder, 200)
    made.checkpoint = replace(made.checkpoint, create_seed_checkpoint=True)
    trainer = made.build()
    trainer.checkpointer.save(0, last_step=True)
    trainer.close()
    dist.destroy_process_group()


def ours(folder: Path) -> None:
    run(_alone(folder, 200))


def stock(folder: Path) -> None:
    """TorchTitan's own multimodal loader on the same files."""
    from datasets import load_dataset

    def load(path: str) -> Any:
        files = sorted(str(file) for file in Path(path).glob("*.tar"))
        return load_dataset("webdataset", data_files={"train": files}, split="train", streaming=True)

    MM_DATASETS["pairs"] = replace(MM_DATASETS["cc12m"], path=str(folder.parent / "one"), loader=load)
    made = _alone(folder, 200)
    loader = MMDataLoader.Config(
        dataset="pairs", max_images_per_batch=8, patch_size=16, temporal_patch_size=2, spatial_merge_size=2,
        min_pixels=4096, max_pixels=16384, image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5),
        build_mrope_positions=True,
    )  # fmt: skip
    names = [one.name for one in fields(TitanTrainer.Config)]
    run(TitanTrainer.Config(**{name: getattr(made, name) for name in names} | {"dataloader": loader}))


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
