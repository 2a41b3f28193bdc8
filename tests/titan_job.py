"""Jobs that test_titan.py runs under torchrun: `titan_job.py refusals FOLDER`, `titan_job.py validate FOLDER`."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.validate import Validator as TitanValidator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer as TitanTrainer

from recipes.titan_text import micro
from zephon import UsageError
from zephon.command.rehearse import process_tree
from zephon.digest import lane_digest
from zephon.titan import DataLoader, Trainer, Validator


def config(folder: Path, recipe: Path, **changes: Any) -> Trainer.Config:
    base = micro()
    training = {"seq_len": 32, "global_batch_size": 8, "local_batch_size": 2, "steps": 6, **changes}
    base.training = TrainingConfig(mixed_precision_param="float32", disable_cuda_graphs=True, **training)
    base.checkpoint = replace(base.checkpoint, interval=3)
    base.dump_folder, base.hf_assets_path = str(folder), tokenizer_of(recipe) if recipe.exists() else ""
    base.dataloader = DataLoader.Config(recipe=str(recipe))
    return base


def tokenizer_of(recipe: Path) -> str:
    return recipe.read_text().split('path = "')[1].split('"')[0]


def write_whole(path: Path, text: str) -> Path:
    """Every rank writes the same file, while others may read it already."""
    mine = path.with_name(f"{path.name}.{os.getpid()}")
    mine.write_text(text)
    return mine.replace(path)


def few_documents(jobs: Path) -> str:
    """The recipe as a finite stream of 62 documents."""
    text = (jobs / "recipe.toml").read_text().replace("lanes = 4\n", "")
    text = text.replace("a/*.jsonl", "a/two.jsonl").replace("b/*.jsonl", "few/*.jsonl")
    return text.replace("[shuffle]", '[mix]\non_end = "renormalise"\n[shuffle]')


def run(settings: TitanTrainer.Config) -> None:
    trainer = None
    try:
        trainer = settings.build()
        trainer.train()
    finally:
        if trainer:
            trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def refusals(jobs: Path) -> None:
    recipe = jobs / "recipe.toml"
    work = jobs / "refused"

    def fresh() -> Path:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        return work

    def resumed(step: int = 3) -> Path:
        shutil.copytree(jobs / "two" / "checkpoint" / "step-3", fresh() / "checkpoint" / f"step-{step}")
        return work

    def free_recipe() -> Path:
        """The recipe without [batch], so that the trainer alone speaks."""
        text = recipe.read_text()
        (jobs / "free.toml").write_text(text[: text.index("[batch]")] + text[text.index("[tokenizer]") :])
        return jobs / "free.toml"

    def other_recipe() -> Path:
        (jobs / "other.toml").write_text(recipe.read_text().replace("seed = 7", "seed = 8"))
        return jobs / "other.toml"

    def other_loader() -> Trainer.Config:
        made = config(fresh(), recipe)
        made.dataloader = BaseDataLoader.Config()  # type: ignore[assignment]
        return made

    def other_tokenizer() -> Trainer.Config:
        made = config(fresh(), recipe)
        big_tokenizer(jobs)
        made.hf_assets_path = str(jobs / "big")
        return made

    def small_model() -> Trainer.Config:
        made = config(fresh(), big_tokenizer(jobs))
        made.hf_assets_path = str(jobs / "big")
        return made

    def endless_validation() -> Trainer.Config:
        made = config(fresh(), recipe)
        made.validator = Validator.Config(
            enable=True, freq=1, steps=-1, dataloader=DataLoader.Config(recipe=str(recipe))
        )
        return made

    def validation_of(**keys: Any) -> Trainer.Config:
        """Its recipe is opened only to be refused: the run would come to its first validation after 1000 steps."""
        made = config(fresh(), recipe)
        made.validator = Validator.Config(enable=True, freq=1000, steps=2, dataloader=DataLoader.Config(**keys))
        return made

    def stock_validation(kind: Any, loader: Any) -> Trainer.Config:
        made = config(fresh(), recipe)
        made.validator = kind(enable=True, freq=1000, steps=2, dataloader=loader)
        return made

    def odd_validation() -> Trainer.Config:
        (jobs / "three.toml").write_text(recipe.read_text().replace("lanes = 4", "lanes = 3").replace("= 8", "= 3"))
        return validation_of(recipe=str(jobs / "three.toml"))

    def no_step() -> Trainer.Config:
        made = config(resumed(), recipe)
        made.checkpoint = replace(made.checkpoint, load_step=5)
        return made

    def damaged() -> Trainer.Config:
        (resumed() / "checkpoint" / "step-3" / ".metadata").write_bytes(b"damaged")
        return config(work, recipe)

    def model_only() -> Trainer.Config:
        import torch
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": {"weight": torch.zeros(3)}}, checkpoint_id=fresh() / "checkpoint" / "step-3", no_dist=True)
        return config(work, recipe)

    def foreign_checkpoint() -> Trainer.Config:
        import torch.distributed.checkpoint as dcp

        dcp.save({"dataloader": {"dp_rank_0": b"x"}}, checkpoint_id=fresh() / "checkpoint" / "step-3", no_dist=True)
        return config(work, recipe)

    def left_out() -> Trainer.Config:
        made = config(resumed(), recipe)
        made.checkpoint = replace(made.checkpoint, exclude_from_loading=["dataloader"])
        return made

    def more_records() -> Trainer.Config:
        (jobs / "more.toml").write_text(recipe.read_text() + "[records]\ndocument_ids = true\n")
        return config(fresh(), jobs / "more.toml")

    def stock_trainer() -> TitanTrainer.Config:
        made = config(fresh(), recipe)
        names = [one.name for one in fields(TitanTrainer.Config)]
        return TitanTrainer.Config(**{name: getattr(made, name) for name in names})

    def no_recipe() -> Trainer.Config:
        made = config(fresh(), recipe)
        made.dataloader = DataLoader.Config()
        return made

    cases: dict[str, Callable[[], TitanTrainer.Config]] = {
        "lanes do not divide the global batch": lambda: config(fresh(), free_recipe(), global_batch_size=10),
        "local batch does not divide a share": lambda: config(fresh(), recipe, local_batch_size=3),
        "global batch unset": lambda: config(fresh(), recipe, global_batch_size=-1),
        "recipe and trainer disagree on seq_len": lambda: config(fresh(), recipe, seq_len=64),
        "recipe and trainer disagree on the tokenizer": other_tokenizer,
        "recipe not set": no_recipe,
        "TorchTitan's own trainer": stock_trainer,
        "no such recipe": lambda: config(fresh(), jobs / "nowhere.toml"),
        "another loader's config": other_loader,
        "TorchTitan's validator": lambda: stock_validation(
            TitanValidator.Config, DataLoader.Config(recipe=str(recipe))
        ),
        "a validator's loader": lambda: stock_validation(Validator.Config, BaseDataLoader.Config()),
        "vocabulary too small": small_model,
        "records that the model does not take": more_records,
        "validation without end": endless_validation,
        "validation recipe not set": validation_of,
        "validation that ranks cannot share": odd_validation,
        "no such step": no_step,
        "checkpoint that is damaged": damaged,
        "checkpoint of another recipe": lambda: config(resumed(), other_recipe()),
        "checkpoint without loader state": model_only,
        "checkpoint of another loader": foreign_checkpoint,
        "loader left out of loading": left_out,
        "state of another step": lambda: config(resumed(step=4), recipe),
    }
    for case, make in cases.items():
        try:
            run(make())
        except UsageError as error:
            print(json.dumps({"case": case, "error": str(error)}), flush=True)


def big_tokenizer(jobs: Path) -> Path:
    """A recipe whose tokenizer has more ids than the micro model has embeddings."""
    from tokenizers import Tokenizer

    usual = tokenizer_of(jobs / "recipe.toml")
    tokenizer = Tokenizer.from_file(f"{usual}/tokenizer.json")
    tokenizer.add_tokens([f"word{i}" for i in range(3000)])
    (jobs / "big").mkdir(exist_ok=True)
    tokenizer.save(str(jobs / "big" / "tokenizer.json"))
    text = (jobs / "recipe.toml").read_text()
    (jobs / "big.toml").write_text(text.replace(usual, str(jobs / "big")))
    return jobs / "big.toml"


def validate(folder: Path) -> None:
    recipe = folder.parent / "recipe.toml"
    write_whole(folder.parent / "validation.toml", recipe.read_text().replace("seed = 7", "seed = 99"))
    made = config(folder, recipe)
    loader = DataLoader.Config(recipe=str(folder.parent / "validation.toml"))
    made.validator = Validator.Config(enable=True, freq=2, steps=2, dataloader=loader)
    run(made)


def validate_all(folder: Path) -> None:
    """Validation over the whole of a finite recipe, with weights that stay as they are: only the data is compared."""
    recipe = folder.parent / "recipe.toml"
    write_whole(folder.parent / "all.toml", few_documents(folder.parent))
    made = config(folder, recipe)
    loader = DataLoader.Config(recipe=str(folder.parent / "all.toml"))
    made.validator = Validator.Config(enable=True, freq=2, steps=-1, dataloader=loader)
    made.optimizer = default_adamw(lr=0.0)
    run(made)


def validate_many(folder: Path) -> None:
    """One validation over many documents, after a step that changes nothing; at 8 ranks a share is one sequence."""
    made = config(folder, folder.parent / "eight.toml", local_batch_size=1, steps=1)
    loader = DataLoader.Config(recipe=str(folder.parent / "all.toml"))
    made.validator = Validator.Config(enable=True, freq=1, steps=-1, dataloader=loader)
    made.optimizer = default_adamw(lr=0.0)
    run(made)


def finite(folder: Path) -> None:
    """The documents end before the steps do."""
    recipe = write_whole(folder.parent / "finite.toml", few_documents(folder.parent))
    made = config(folder, recipe, steps=1000)
    made.checkpoint = replace(made.checkpoint, interval=1000, last_save_model_only=False)
    run(made)


class Stopped(Trainer):
    """Gets a stop signal while it loads."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().batch_generator(data_iterable)


def stopped(folder: Path) -> None:
    made = config(folder, folder.parent / "recipe.toml", steps=100)
    made.checkpoint = replace(made.checkpoint, interval=1000)
    run(Stopped.Config(**{one.name: getattr(made, one.name) for one in fields(made)}))


class Counted(Trainer):
    """Prints how many processes of its own a rank has after each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        super().train_step(data_iterator)
        print(json.dumps({"step": self.step, "children": len(process_tree(os.getpid())) - 1}), flush=True)


def validate_bad(folder: Path) -> None:
    """Two global batches a validation, of texts among which some are bad, by loaders of their own processes."""
    text = (folder.parent / "recipe.toml").read_text()
    text = text[: text.index("[batch]")] + text[text.index("[tokenizer]") :]  # no [batch]: it takes training's
    text = text.replace('paths = ["b/*.jsonl"]', 'paths = ["bad/*.jsonl"]\non_error = "skip"\nmax_bad = 1000')
    write_whole(folder.parent / "bad.toml", text.replace("[run]", "[run]\nisolate = true"))
    made = config(folder, folder.parent / "recipe.toml", steps=3)
    loader = DataLoader.Config(recipe=str(folder.parent / "bad.toml"))
    made.validator = Validator.Config(enable=True, freq=1, steps=2, dataloader=loader)
    made.checkpoint = replace(made.checkpoint, interval=1000)
    made.optimizer = default_adamw(lr=0.0)
    run(Counted.Config(**{one.name: getattr(made, one.name) for one in fields(made)}))


class Watched(Trainer):
    """Writes a digest of every micro-batch that this very rank gets, whoever its peers are."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        return self._watched(super().batch_generator(data_iterable))

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        with Path(self.config.dump_folder, f"peer_{dist.get_rank()}").open("w") as file:
            for tensors, labels in batches:
                arrays = {name: tensor.numpy() for name, tensor in {**tensors, "labels": labels}.items()}
                print(lane_digest(self.dataloader.stream.worker.records(arrays)).hex(), file=file, flush=True)
                yield tensors, labels


def context_parallel(folder: Path) -> None:
    """Two peers that share every sequence; PyTorch shards blocks of 128 positions, so 256 are the least."""
    made = config(folder, folder.parent / "long.toml", seq_len=256, steps=3)
    made.parallelism = ParallelismConfig(context_parallel_degree=2, data_parallel_shard_degree=1)
    run(Watched.Config(**{one.name: getattr(made, one.name) for one in fields(made)}))


if __name__ == "__main__":
    {
        "refusals": refusals,
        "validate": validate,
        "validate_all": validate_all,
        "validate_many": validate_many,
        "context_parallel": context_parallel,
        "finite": finite,
        "stopped": stopped,
        "validate_bad": validate_bad,
    }[sys.argv[1]](Path(sys.argv[2]))
