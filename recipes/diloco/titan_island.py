"""An island that is a TorchTitan job, of one rank or of several: TorchTitan's own `train_step`, on the island's lanes.

The trainer is Zephon's, with all its checks. What differs: the loader has the lanes that the learner owns, there is no
checkpointer (a learner starts from the syncer's fragments and a peer's optimizer state), and the learning rate follows
the learner's clock.
"""

import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from torchtitan.trainer import Trainer as TitanTrainer

from recipes.diloco.feed import Fed, Feed
from recipes.diloco.fragments import Plan, Tensor, Vector
from recipes.diloco.island import pack_state, unpack_state
from recipes.diloco.ranks import Leader
from recipes.titan_text import LossLog
from zephon.errors import UsageError
from zephon.titan import DataLoader, TitanBatch, Trainer
from zephon.types import Batch

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class TimedLog(LossLog):
    """The loss log, with the time of every line."""

    @dataclass(kw_only=True, slots=True)
    class Config(LossLog.Config):
        pass

    def _write(self, line: dict[str, float]) -> None:
        super()._write({"time": time.time(), **line})


class IslandTrainer(Trainer):
    """Zephon's trainer, driven step by step by a learner."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def batch_generator(self, data_iterable: Any) -> Iterator[TitanBatch]:
        """A learner's loader counts its own steps: it has been moved to where its lanes stand."""
        return TitanTrainer.batch_generator(self, data_iterable)


class TitanIsland(Fed):
    """A TorchTitan job; all methods are collective over its ranks.

    Args:
        config: of the job; its global batch size is that of all learners together.

    Raises:
        UsageError: the model would be cut into pipeline stages.
    """

    def __init__(self, config: IslandTrainer.Config) -> None:
        if (stages := config.parallelism.pipeline_parallel_degree) > 1:
            raise UsageError(
                f"parallelism.pipeline_parallel_degree is {stages}, but an island merges the parameters of a whole "
                "model: those of other stages would never be merged. Set it to 1; fsdp, tensor and context parallelism "
                "may shard it."
            )
        self.trainer: IslandTrainer = config.build()
        dims = self.trainer.parallel_dims
        mesh = dims.get_mesh("batch") if dims.dp_enabled else None
        place = (mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)
        self._world, local = place[1], config.training.local_batch_size
        stream = self.trainer.dataloader.stream
        self.feed = Feed(stream, *place, local)
        self._tokens, self._owned = stream.batch.global_batch_size // stream.recipe.lanes * stream.batch.seq_len, 0
        model = self.trainer.model_parts[0]
        self.parameters = {_plain(name): one for name, one in model.named_parameters()}
        self.tensors: Sequence[Tensor] = [Tensor(name, tuple(one.shape)) for name, one in self.parameters.items()]
        self.book: Callable[[dict[int, str]], None] = lambda digests: None

    def read(self, plan: Plan) -> list[Vector]:
        return plan.gather({name: _whole(one).numpy(force=True) for name, one in self.parameters.items()})

    @torch.no_grad()
    def write(self, plan: Plan, fragment: int, value: Vector) -> None:
        for name, array in plan.scatter(fragment, value).items():
            target = self.parameters[name]
            tensor = torch.from_numpy(np.array(array)).to(target.device, target.dtype)  # pyright: ignore[reportUnknownMemberType]
            if isinstance(target, DTensor):
                tensor = distribute_tensor(tensor, target.device_mesh, target.placements)
            target.copy_(tensor)

    def own(self, lanes: dict[int, bytes]) -> None:
        super().own(lanes)
        if self.feed.loader:
            self.trainer.dataloader.loader = self.feed.loader
            self._owned = len(lanes)
            sequences = len(lanes) * self._tokens // self.feed.stream.batch.seq_len
            local = self.trainer.config.training.local_batch_size
            self.trainer.gradient_accumulation_steps = sequences // (local * self._world)

    def lanes(self) -> dict[int, bytes]:
        return self._joined(super().lanes())

    def step(self, clock: int) -> int:
        trainer, loader = self.trainer, self.feed.loader
        assert loader is not None, "a learner without lanes does not step"
        batches = [next(loader) for _ in range(trainer.gradient_accumulation_steps)]
        self.book(self._joined(self.feed.digests(batches)))
        self._set_learning_rate(clock)
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(trainer.batch_generator(map(_as_titan, batches)))
        return self._owned * self._tokens

    def optimizer(self) -> bytes:
        inner = list(self.trainer.optimizers)
        return pack_state(get_optimizer_state_dict(self.trainer.model_parts[0], inner, options=_FULL))

    def load_optimizer(self, state: bytes) -> None:
        inner = list(self.trainer.optimizers)
        for one in inner:
            one.state.clear()
        if state:
            known: Any = unpack_state(state)
            set_optimizer_state_dict(self.trainer.model_parts[0], inner, known, options=_FULL)

    def share(self, what: Any) -> Any:
        """Rank 0's `what`, on every rank."""
        box = [what]
        if self._ranks() > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def _joined(self, mine: dict[int, Any]) -> dict[int, Any]:
        """The entries of all ranks, in the order of lanes."""
        if self._ranks() == 1:
            return mine
        parts: list[dict[int, Any]] = [{} for _ in range(self._ranks())]
        dist.all_gather_object(parts, mine)
        return dict(sorted(item for part in parts for item in part.items()))

    def _ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def _set_learning_rate(self, clock: int) -> None:
        for scheduler in self.trainer.lr_schedulers.schedulers:
            one = cast(LambdaLR, scheduler)
            one.last_epoch = clock
            for group, base, factor in zip(one.optimizer.param_groups, one.base_lrs, one.lr_lambdas, strict=True):
                group["lr"] = base * factor(clock)


def make(
    learner: int,
    recipe: str,
    folder: str,
    config: str = "recipes.titan_text:micro",
    assets: str = "demo/tokenizer",
    training: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
) -> Any:
    """An island from a function that gives a `zephon.titan.Trainer.Config`.

    Args:
        learner: its number; its logs go to a folder of its own below `folder`.
        recipe: the data of the whole run.
        folder: for what TorchTitan writes.
        config: "module:function".
        assets: folder of the tokenizer.
        training: fields of TorchTitan's `training` section.
        changes: dotted fields of other sections, as {"optimizer.lr": 1e-3} where plain values do.
    """
    _alone()
    module, _, name = config.partition(":")
    base: Any = getattr(importlib.import_module(module), name)()
    made = IslandTrainer.Config(**{one.name: getattr(base, one.name) for one in fields(base)})
    made.dump_folder, made.hf_assets_path = str(Path(folder, f"learner_{learner}")), assets
    made.dataloader = DataLoader.Config(recipe=recipe)
    made.training = replace(base.training, **(training or {}))
    made.checkpoint, made.ledger = replace(base.checkpoint, enable=False), False
    made.debug = replace(base.debug, seed=7)
    made.metrics = TimedLog.Config(log_freq=1, disable_color_printing=True)
    for path, value in (changes or {}).items():
        section, _, field = path.partition(".")
        setattr(made, section, replace(getattr(made, section), **{field: value}))
    Path(made.dump_folder).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    island = TitanIsland(made)
    return Leader(island, island) if dist.get_world_size() > 1 and dist.get_rank() == 0 else island


def _alone() -> None:
    """A process that no launcher has started is a job of one rank."""
    if "RANK" not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().float()


def _as_titan(batch: Batch) -> TitanBatch:
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}  # pyright: ignore[reportUnknownMemberType]
    return tensors, tensors.pop("labels")
