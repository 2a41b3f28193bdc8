"""Text pre-training with TorchTitan: `torchrun -m torchtitan.train --module recipes.titan_text --config NAME`.

Each function returns a complete run. Point it at your data with `--dataloader.recipe PATH`; every other field of
TorchTitan's configuration can be overridden in the same way.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model_spec import ModelSpec

from recipes import cpu
from zephon.titan import DataLoader, Trainer

cpu.install()


class LossLog(MetricsProcessor):
    """TorchTitan's metrics; also loss (unrounded) and data metrics as JSON lines in DUMP_FOLDER/loss.jsonl."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, *, dump_folder: str, **kwargs: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **kwargs)
        self._file = Path(dump_folder, "loss.jsonl")

    def log(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        super().log(step, global_avg_loss, *args, **kwargs)
        extra = {name: value for name, value in (kwargs.get("extra_metrics") or {}).items() if name.startswith("data/")}
        self._write({"step": step, "loss": global_avg_loss, **extra})

    def log_validation(self, loss: float, step: int, *args: Any, **kwargs: Any) -> None:
        super().log_validation(loss, step, *args, **kwargs)
        self._write({"step": step, "validation_loss": loss})

    def _write(self, line: dict[str, float]) -> None:
        import torch.distributed as dist

        if dist.get_rank() == 0:
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def with_vocabulary(spec: ModelSpec, size: int, layers: Any) -> ModelSpec:
    """A micro model: the `layers` of a debug model, and a vocabulary of `size`."""
    stock: Any = spec.model
    model = replace(
        stock,
        layers=layers,
        vocab_size=size,
        tok_embeddings=replace(stock.tok_embeddings, num_embeddings=size),
        lm_head=replace(stock.lm_head, out_features=size),
    )
    return replace(spec, flavor="micro", model=model)


def complete_run(
    spec: ModelSpec, recipe: str, assets: str, config: type[Trainer.Config] = Trainer.Config, **kwargs: Any
) -> Any:
    """A `config` with what all runs share."""
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    # The last save holds the loader too: a longer run can go on from it.
    shared = {"checkpoint": CheckpointManager.Config(interval=500, last_save_model_only=False)}
    return config(
        model_spec=spec,
        hf_assets_path=assets,
        loss=ChunkedLossWrapper.Config(loss_fn=loss),
        dataloader=DataLoader.Config(recipe=recipe),
        **{**shared, **kwargs},
    )


def on_cpu(seq_len: int) -> dict[str, Any]:
    """What runs of micro models on the CPU share."""
    return {
        "training": TrainingConfig(
            local_batch_size=2,
            global_batch_size=8,
            seq_len=seq_len,
            steps=40,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        "optimizer": default_adamw(lr=1e-3),
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=4),
        "metrics": LossLog.Config(log_freq=1, disable_color_printing=True),
        "checkpoint": CheckpointManager.Config(enable=True, interval=20, last_save_model_only=False),
        "ledger": True,
    }


def micro() -> Trainer.Config:
    """2.5 M parameters on the CPU: what `make demo` trains."""
    spec = model_registry("debugmodel")
    spec = with_vocabulary(spec, 2048, cast(Any, spec.model).layers[:2])
    return complete_run(spec, "demo/recipe.toml", "demo/tokenizer", **on_cpu(seq_len=128))


def debug() -> Trainer.Config:
    """TorchTitan's stock debug model (6 M parameters, vocabulary of 2,048) on one GPU or the CPU."""
    return complete_run(
        model_registry("debugmodel"),
        recipe="demo/recipe.toml",
        assets="demo/tokenizer",
        training=TrainingConfig(local_batch_size=8, global_batch_size=8, seq_len=2048, steps=10),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8, min_lr_factor=0.0),
        metrics=LossLog.Config(log_freq=1),
        parallelism=ParallelismConfig(pipeline_parallel_schedule="Interleaved1F1B"),
        checkpoint=CheckpointManager.Config(interval=10, last_save_model_only=False),
    )


def llama3_1b() -> Trainer.Config:
    """Llama 3 1B on 64 lanes: 64 sequences of 8,192 tokens a step (0.5 M tokens) on 1 to 64 ranks."""
    return complete_run(
        model_registry("1B"),
        recipe="recipes/text.toml",
        assets="./assets/hf/Llama-3.2-1B",
        training=TrainingConfig(local_batch_size=1, global_batch_size=64, seq_len=8192, steps=40_000),
        optimizer=default_adamw(lr=4e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1000),
        metrics=MetricsProcessor.Config(enable_tensorboard=True),
    )


def llama3_8b() -> Trainer.Config:
    """Llama 3 8B on 64 lanes: 128 sequences of 8,192 tokens a step (1 M tokens) on 1 to 64 ranks."""
    return complete_run(
        model_registry("8B"),
        recipe="recipes/text.toml",
        assets="./assets/hf/Llama-3.1-8B",
        training=TrainingConfig(local_batch_size=1, global_batch_size=128, seq_len=8192, steps=40_000),
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2000),
        metrics=MetricsProcessor.Config(enable_tensorboard=True),
    )
