"""TorchTitan's runs of the experiments, for its `--module` and `--config`: the same task with its own loader and ours.

The folder of the corpus comes in the environment, as `jobs.DATA`; steps, batches, seeds and checkpoints are
set on the command line. On a machine with GPUs the same configurations run on them.
"""

import json
import os
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import load_dataset
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.multimodal.mm_datasets import MM_DATASETS, MMDataLoader
from torchtitan.hf_datasets.text_datasets import DATASETS, HFDataSource, InterleavedHuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.llama3 import _build_llama3_layers, model_registry
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer as TitanTrainer

from benchmarks.experiments.data import WEIGHTS
from benchmarks.experiments.jobs import DATA
from recipes.demo.stock import RowTrainer
from recipes.titan_image_text import ImageTextTrainer, qwen_micro
from recipes.titan_text import LossLog, complete_run
from zephon.titan import DataLoader, Trainer

DIM, LAYERS, HEADS, VOCAB = 128, 2, 4, 2048


class StepLog(LossLog):
    """Loss of every step, and beside it seconds of the step and of waiting for its data, as TorchTitan counts them."""

    @dataclass(kw_only=True, slots=True)
    class Config(LossLog.Config):
        pass

    def log(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        """Write before TorchTitan resets its clocks."""
        row = {"step": step, "step_s": time.perf_counter() - self.time_last_log, "data_s": sum(self.data_loading_times)}
        if dist.get_rank() == 0:
            with Path(self._file.parent, "times.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        MetricsProcessor.log(self, step, global_avg_loss, *args, **kwargs)
        self._write({"step": step, "loss": global_avg_loss})


def data() -> Path:
    """Folder of the corpus."""
    return Path(os.environ[DATA])


def small() -> ModelSpec:
    """Llama 3 with 2 layers of width 128: 0.9 M parameters, 0.5 M of them embeddings."""
    spec = model_registry("debugmodel")
    stock: Any = spec.model
    layers = _build_llama3_layers(
        n_layers=LAYERS, dim=DIM, n_heads=HEADS, hidden_dim=3 * DIM, attn_backend="flex",
        rope=ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=8192, theta=500000, scaling="llama"),
    )  # fmt: skip
    model = replace(
        stock, dim=DIM, layers=layers, vocab_size=VOCAB, norm=replace(stock.norm, normalized_shape=DIM),
        tok_embeddings=replace(stock.tok_embeddings, num_embeddings=VOCAB, embedding_dim=DIM),
        lm_head=replace(stock.lm_head, in_features=DIM, out_features=VOCAB),
    )  # fmt: skip
    return replace(spec, flavor="small", model=model)


def text() -> Trainer.Config:
    """Text with our loader; the recipe is named on the command line."""
    settings = dict[str, Any](
        training=TrainingConfig(mixed_precision_param="float32", disable_cuda_graphs=True),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=20, decay_ratio=0.5, min_lr_factor=0.1),
        metrics=StepLog.Config(log_freq=1, disable_color_printing=True),
        ledger=True,
    )
    made = complete_run(small(), "", str(data() / "tokenizer"), **settings)
    made.checkpoint = replace(made.checkpoint, enable=True, interval=100_000, last_save_model_only=True)
    made.activation_checkpoint = None  # recomputing took a third of a step
    return made


def stock() -> TitanTrainer.Config:
    """The same task with TorchTitan's interleaved loader; the trainer writes digests of the rows of every step."""
    for name in WEIGHTS:
        path = str(data() / name / "*.jsonl")
        DATASETS[f"experiment_{name}"] = DatasetConfig(path=path, loader=_load, sample_processor=_text)
    sources = [HFDataSource(dataset=f"experiment_{name}", weight=weight) for name, weight in WEIGHTS.items()]
    loader = InterleavedHuggingFaceTextDataLoader.Config(sources=sources, seed=7)
    return RowTrainer.Config(**_without_ours(text()), dataloader=loader)


def images() -> ImageTextTrainer.Config:
    """Text and images with our loader."""
    made = qwen_micro()
    made.hf_assets_path = str(data() / "tokenizer")
    made.metrics = StepLog.Config(log_freq=1, disable_color_printing=True)
    made.dataloader = DataLoader.Config(recipe="")
    made.checkpoint = replace(made.checkpoint, enable=True, interval=100_000)
    return made


def stock_images() -> TitanTrainer.Config:
    """Captioned images with TorchTitan's multimodal loader, which packs no texts and pads every sample instead."""
    MM_DATASETS["experiment"] = replace(MM_DATASETS["cc12m"], path=str(data() / "pairs"), loader=_load_tars)
    loader = MMDataLoader.Config(
        dataset="experiment", max_images_per_batch=64, patch_size=16, temporal_patch_size=2, spatial_merge_size=2,
        min_pixels=4096, max_pixels=36864, image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5),
        build_mrope_positions=True,
    )  # fmt: skip
    return TitanTrainer.Config(**_without_ours(images()), dataloader=loader)


def _without_ours(made: Any) -> dict[str, Any]:
    """Everything that TorchTitan's own trainer takes, but for the loader and the validator that goes with it."""
    names = {one.name for one in fields(TitanTrainer.Config)} - {"dataloader", "validator"}
    return {name: getattr(made, name) for name in names}


def _text(row: dict[str, Any]) -> str:
    return row["text"]


def _load(path: str) -> Any:
    cache = Path(path).parents[1] / "cache"
    return load_dataset("json", data_files=path, split="train", cache_dir=str(cache))


def _load_tars(path: str) -> Any:
    files = sorted(str(file) for file in Path(path).glob("*.tar"))
    return load_dataset("webdataset", data_files={"train": files}, split="train", streaming=True)
