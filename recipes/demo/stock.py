"""The demo's task given to TorchTitan's own loader, for comparison.

The same model, corpus, weights and batch. Its trainer writes what `train_step` received, one digest a row, so that two
runs can be compared even if only the order inside a global batch changed.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HFDataSource, InterleavedHuggingFaceTextDataLoader
from torchtitan.trainer import Trainer

from recipes.titan_text import micro


def _load(path: str) -> Any:
    return load_dataset("json", data_files=path, split="train", cache_dir="demo/cache/datasets")


def _text(sample: dict[str, Any]) -> str:
    return sample["text"]


for _name in ("docs", "code"):
    DATASETS[f"demo_{_name}"] = DatasetConfig(
        path=f"demo/{_name}/*.jsonl", loader=partial(_load), sample_processor=_text
    )


class RowTrainer(Trainer):
    """TorchTitan's trainer; appends the digests of the rows of every step to DUMP_FOLDER/rows/rank_N.jsonl."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        rows: list[str] = []

        def watched() -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            for tensors, labels in data_iterator:
                columns = torch.stack([tensors["input"], tensors["positions"], labels], dim=1).numpy()
                rows.extend(hashlib.sha256(row.tobytes()).hexdigest() for row in columns)
                yield tensors, labels

        super().train_step(watched())
        file = Path(self.config.dump_folder, "rows", f"rank_{torch.distributed.get_rank()}.jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:
            out.write(json.dumps({"step": self.step, "rows": rows}) + "\n")


def stock() -> Trainer.Config:
    """`micro` with TorchTitan's interleaved loader."""
    ours = micro()
    sources = [HFDataSource(dataset="demo_docs", weight=0.7), HFDataSource(dataset="demo_code", weight=0.3)]
    loader = InterleavedHuggingFaceTextDataLoader.Config(sources=sources, seed=7)
    keep = {one.name: getattr(ours, one.name) for one in fields(Trainer.Config) if one.name != "dataloader"}
    return RowTrainer.Config(**keep, dataloader=loader)
