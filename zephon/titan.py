"""TorchTitan 0.3.0: a data loader, and a thin trainer that checks what only the trainer knows.

`DataLoader` wraps a `zephon.Loader`; its state goes through TorchTitan's own checkpointer, keyed by lane, so that the
distributed checkpoint does the resharding: no shared folder, no barrier. `Trainer` adds three things: start-up checks
(the final global batch size and the parallel dimensions are known nowhere else), a look at the loader's header in the
checkpoint before anything is loaded, and a ledger of what `train_step` received.
"""

# pyright: reportMissingTypeStubs=false

import functools
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import tyro
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import Validator as TitanValidator
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer as TitanTrainer

from zephon.errors import DataError, RecipeError, RestoreError, TopologyError
from zephon.recipe import Recipe
from zephon.restore import check_allowed, compare_headers
from zephon.run.dcp import KEY, read_header
from zephon.run.hashing import Ledger
from zephon.run.peers import check_peers
from zephon.run.skips import SkipWriter
from zephon.run.stop import StopSignals
from zephon.state import HEADER
from zephon.stream import Stream
from zephon.topology import check_topology

logger = logging.getLogger(__name__)

TitanBatch = tuple[dict[str, torch.Tensor], torch.Tensor]


def load_recipe(path: str, seq_len: int, trained: int, validates: bool) -> Recipe:
    """A recipe with its batch.

    Args:
        path: of the recipe; empty where it is not set.
        seq_len: TorchTitan's.
        trained: global batch size of training.
        validates: whether it is a validation's, whose batch is that of the recipe, or the least multiple of `trained`
            that its lanes divide: never of the number of ranks, which would change what a number of steps sees.
    """
    if not path:
        key = "validator.dataloader.recipe" if validates else "dataloader.recipe"
        raise RecipeError(f"{key} is not set: name the recipe, as in --{key} my.toml.")
    recipe = Recipe.load(path)
    if validates:
        trained = recipe.batch.global_batch_size if recipe.batch else math.lcm(trained, recipe.lanes)
    return recipe.with_batch(seq_len, trained, "TorchTitan")


@functools.lru_cache(maxsize=8)
def _skip_list(path: str) -> SkipWriter:
    """The list of the bad rows of all validations of this process; each validation adds those it comes to."""
    return SkipWriter(Path(path) if path else None)


@functools.lru_cache(maxsize=8)
def _open_stream(path: str, seq_len: int, trained: int, validates: bool, tokenizer: str | None) -> Stream:
    """A stream of this process: every validation shares tokenizer and index."""
    recipe = load_recipe(path and os.path.abspath(path), seq_len, trained, validates)
    return Stream(recipe.with_tokenizer(Path(tokenizer), "TorchTitan (hf_assets_path)") if tokenizer else recipe)


class DataLoader(BaseDataLoader):
    """One rank's share of a Zephon stream, as TorchTitan wants it.

    Yields `({"input", "positions"}, labels)`, each int64 `[local_batch_size, seq_len]` on the CPU; labels are already
    shifted, and -100 where there is nothing to learn.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        recipe: str = ""
        """Path of the recipe (TOML). It may leave out [batch] and [tokenizer]; where both speak they must agree."""

        allow: list[str] = field(default_factory=list[str])
        """Differences that a restore may go on with: weights, global_batch_size, records, code, codecs. Written into
        the history of the run; one that is not needed does nothing."""

        infinite: bool = True
        """Set by TorchTitan's validator: whether it stops after a number of steps."""

        global_batch_size: Annotated[int | None, tyro.conf.Suppress] = None
        """Set by `Trainer` for training. A validation has its recipe's, and is closed when it is over."""

        trained_batch_size: Annotated[int | None, tyro.conf.Suppress] = None
        """Set by `Trainer` for validations: the global batch size of training, for recipes that name none."""

        skip_list: Annotated[str, tyro.conf.Suppress] = ""
        """Set by `Trainer` for validations: the file that names the bad rows."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **others: Any,
    ) -> None:
        # TorchTitan tells training loaders, and only those, how often it saves.
        if "snapshot_every_n_steps" in others and config.global_batch_size is None:
            raise RecipeError(
                "This trainer is TorchTitan's own, which tells no loader the global batch size, so batches would "
                "change with the number of ranks. Use zephon.titan.Trainer.Config in its place."
            )
        self._allow = check_allowed(config.allow)
        path = getattr(tokenizer, "tokenizer_path", None)
        self._validates = config.global_batch_size is None
        trained = config.global_batch_size or config.trained_batch_size or local_batch_size * dp_world_size
        self.stream = _open_stream(config.recipe, seq_len, trained, self._validates, path)
        if not config.infinite and not self.stream.recipe.finite:
            raise RecipeError(
                f"{config.recipe} repeats for ever ([mix] on_end = 'repeat'), so validation over all of it would never "
                "end. Set validator.steps to a number, or on_end = 'renormalise' in the recipe."
            )
        self.before_save: Callable[[], None] = lambda: None
        """Called before a state is taken: what a run says of the steps up to it must be on disk with it."""
        self._skips, padded = _skip_list(config.skip_list), not config.infinite
        self.loader = self.stream.loader(dp_rank, dp_world_size, local_batch_size, pad_last=padded, wide=True)

    def __iter__(self) -> Iterator[TitanBatch]:
        try:
            for batch in self.loader:
                if self._validates:
                    self._skips.write(self.loader.take_skipped())
                tensors = {name: torch.from_numpy(array) for name, array in batch.items()}  # pyright: ignore[reportUnknownMemberType]
                labels = tensors.pop("labels")
                yield tensors, labels
        finally:  # TorchTitan makes a loader for every validation, and drops it
            if self._validates:
                self._skips.write(self.loader.take_skipped())
                self.loader.close()
        if self._validates and not self.loader.step:
            size, path = self.stream.batch.global_batch_size, self.stream.recipe.path
            raise DataError(
                f"{path} fills no batch of {size} sequences to validate on; validator.steps = -1 pads the last one."
            )

    def state_dict(self) -> dict[str, Any]:
        self.before_save()
        return dict(self.loader.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict, self._allow)


class Validator(TitanValidator):
    """TorchTitan's validator, with the same loss on any number of ranks.

    `steps` counts global batches; TorchTitan counts the micro-batches of a rank, so that more ranks see more data.
    Losses are added up in float64: in float32, as it comes, the mean over a few hundred batches differed between 1 and
    2 ranks by a relative 1.02e-6, though every batch gave the same loss.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanValidator.Config):
        dataloader: DataLoader.Config = field(default_factory=DataLoader.Config)  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: Config, *, loss_fn: Any, **others: Any) -> None:
        def in_float64(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
            loss, more = loss_fn(*args, **kwargs)
            return loss.double(), more

        super().__init__(config, loss_fn=in_float64, **others)  # pyright: ignore[reportUnknownMemberType, reportArgumentType]

    def prepare(self, trained_batch_size: int, skip_list: str) -> None:
        """Open what is validated on: what cannot hold stops a run at its start, not at its first validation."""
        config: Any = replace(self.dl_config, trained_batch_size=trained_batch_size, skip_list=skip_list)
        ranks, local = self.dp_world_size, self.local_batch_size
        first = DataLoader(
            config, dp_world_size=ranks, dp_rank=self.dp_rank, tokenizer=self.tokenizer, seq_len=self.seq_len,
            local_batch_size=local,
        )  # fmt: skip
        first.loader.close()
        self.dl_config, self.stream = config, first.stream
        own, micro_batches = self.config, first.stream.batch.global_batch_size // (ranks * local)
        if own.steps != -1:
            self.config = replace(own, steps=own.steps * micro_batches)


class Trainer(TitanTrainer):
    """TorchTitan's trainer with Zephon's checks and ledger. Raises `UsageError`s before the first step."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanTrainer.Config):
        dataloader: DataLoader.Config = field(default_factory=DataLoader.Config)  # pyright: ignore[reportIncompatibleVariableOverride]
        validator: Validator.Config = field(default_factory=Validator.Config)  # pyright: ignore[reportIncompatibleVariableOverride]

        ledger: bool = False
        """Write the digests of every lane's records, as `train_step` received them, to DUMP_FOLDER/ledger."""

    dataloader: DataLoader  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: Config) -> None:
        self._ledger: Ledger | None = None
        self._skips = SkipWriter(None)
        self._stop: StopSignals | None = None
        self._loaded = 0
        training = config.training
        own, needed = config.validator, list[tuple[str, Any, Any]]([("dataloader", config.dataloader, DataLoader)])
        if own.enable:
            needed += [("validator", own, Validator), ("validator.dataloader", own.dataloader, DataLoader)]
        for key, given, wanted in needed:
            if not isinstance(given, wanted.Config):
                raise RecipeError(
                    f"{key} is of {type(given)}, which sees other data on other numbers of ranks. Use "
                    f"zephon.titan.{wanted.__name__}.Config, or TorchTitan's own Trainer."
                )
        if training.global_batch_size < 1:
            raise TopologyError(
                f"training.global_batch_size is {training.global_batch_size}, which means 'local batch times ranks': "
                "batches would silently change with the number of ranks. Set it to a multiple of the recipe's lanes."
            )
        dataloader = replace(config.dataloader, global_batch_size=training.global_batch_size)
        super().__init__(replace(config, dataloader=dataloader))
        self._log_data_metrics()
        bad_of_validations = ""
        if _speaks_for_lanes(self.parallel_dims):
            rank, world = _data_rank(self.parallel_dims)
            mine = f"rank_{rank:05d}_of_{world:05d}.jsonl"
            self._skips = SkipWriter(Path(config.dump_folder, "skipped", mine))
            bad_of_validations = str(Path(config.dump_folder, "skipped_in_validation", mine))
            if config.ledger:
                loader, file = self.dataloader, Path(config.dump_folder, "ledger", mine)
                self._ledger = Ledger(loader.stream.worker, loader.loader.lanes, file)
                loader.before_save = self._ledger.flush
        if config.validator.enable and isinstance(self.validator, Validator):
            self.validator.prepare(training.global_batch_size, bad_of_validations)

    def data_metrics(self) -> dict[str, float]:
        """What TorchTitan logs beside its own: this rank's realised shares, padding, drops, and rows measured ahead."""
        loader = self.dataloader.loader
        stats = loader.stats()
        mixed = max(1, sum(stats.mixed.values()))
        metrics = {f"data/share/{name}": count / mixed for name, count in stats.mixed.items()}
        metrics |= {"data/padding": float(stats.padding), "data/rows_ahead": float(loader.rows_ahead)}
        for name, counts in stats.dropped.items():
            metrics |= {f"data/{what}/{name}": float(count) for what, count in counts.items() if count}
        return metrics

    def _log_data_metrics(self) -> None:
        """Add `data_metrics` to whatever TorchTitan logs."""
        log = self.metrics_processor.log

        def with_data(*args: Any, extra_metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
            log(*args, extra_metrics={**(extra_metrics or {}), **self.data_metrics()}, **kwargs)

        self.metrics_processor.log = with_data

    def init_distributed(self) -> ParallelDims:
        """Start process groups, then check everything that depends on their number, before the model is built."""
        dims = super().init_distributed()
        config, training = self.config, self.config.training
        path: str = config.dataloader.recipe  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        recipe = load_recipe(path, training.seq_len, training.global_batch_size, validates=False)  # pyright: ignore[reportUnknownArgumentType]
        recipe.with_tokenizer(Path(config.hf_assets_path), "TorchTitan (hf_assets_path)")
        local = config.parallelism.pipeline_parallel_microbatch_size if dims.pp_enabled else training.local_batch_size
        _, world = _data_rank(dims)
        size, parts = training.global_batch_size, None if recipe.finite else recipe.lanes
        for batch in (training.local_batch_size, local):
            check_topology(lanes=parts, global_batch=size, world=world, local_batch=batch)
        return dims

    def train(self) -> None:
        """Check vocabulary, records and checkpoint, then train."""
        ids, rows = self.tokenizer.get_vocab_size(), getattr(self.model_config, "vocab_size", None)
        if rows is not None and ids > rows:
            raise RecipeError(
                f"The tokenizer has {ids} ids, but the model has {rows} embeddings: training would fail at the first "
                "id beyond them. Use the model's own tokenizer, or a model with a larger vocabulary."
            )
        taken = inspect.signature(self.model_parts[0].forward).parameters
        extras = [name for name in self.dataloader.stream.recipe.extras if name not in taken]
        if extras:
            raise RecipeError(
                f"[records] asks for {extras}, which this model's forward does not take: TorchTitan would fail at the "
                "first step. Leave them out (it makes its masks from positions), or use a model that takes them."
            )
        check_peers(self.dataloader.stream.header(0))
        if isinstance(self.checkpointer, CheckpointManager) and self.checkpointer.enable:
            self._check_checkpoint(self.checkpointer)
        with StopSignals() as self._stop:
            super().train()
        if self.step > self.dataloader.loader.step:  # a finite stream ended: TorchTitan counts the step it cancelled
            self.step -= 1
            self._save(last=True)

    def should_continue_training(self) -> bool:
        """Whether to take another step; after a stop signal to any rank, save and end on all of them."""
        if not super().should_continue_training():
            return False
        if self._stop is None or not self._stop.agreed():
            return True
        kept = self._save(last=False)
        on = "start again to go on from there" if kept else "nothing was saved, as checkpoint.enable is off"
        logger.warning("Stopped by a signal after step %d; %s.", self.step, on)
        return False

    def _save(self, last: bool) -> bool:
        """Save what has not been saved; whether there is a checkpoint to go on from.

        Never the step that was loaded: it would be written over in place, and a kill meanwhile would leave neither.
        """
        manager = self.checkpointer
        if not isinstance(manager, CheckpointManager) or not manager.enable or manager.load_only:
            return False
        there = 0, self._loaded, int(manager.enable_first_step_checkpoint)
        if self.step not in there and self.step % manager.interval:
            if not last:
                manager.interval = self.step  # an ordinary, full save: TorchTitan's last one may hold the model alone
            manager.save(self.step, last_step=last)
        manager.maybe_wait_for_saving()
        return True

    def _check_checkpoint(self, manager: CheckpointManager) -> None:
        """Refuse a checkpoint that the loader cannot go on from, before the checkpointer loads any of it.

        Looks where TorchTitan 0.3.0 will look; model-only checkpoints (seeds, exports) hold no loader state.
        """
        folder, wanted = manager.folder, self.config.checkpoint.load_step
        step = manager._find_load_step() if wanted == -1 else wanted  # pyright: ignore[reportPrivateUsage]
        if os.path.isdir(folder) and step > 0:
            place = manager._create_checkpoint_id(step)  # pyright: ignore[reportPrivateUsage]
        elif step == -1 and manager.initial_load_path and not manager.initial_load_model_only:
            place, step = manager.initial_load_path, None
        else:
            return
        if KEY in self.config.checkpoint.exclude_from_loading:
            raise RestoreError(
                f"checkpoint.exclude_from_loading holds {KEY!r}: the model would go on from {place}, while the data "
                "silently starts again. Remove it from the list; the loader's state loads at any number of ranks."
            )
        header = read_header(place)
        saved = compare_headers(header, self.dataloader.stream.header(0), self.config.dataloader.allow).step  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]
        if step is not None and saved != step:
            raise RestoreError(f"{place} holds the loader's state of step {saved}. The checkpoint mixes two saves.")

    def batch_generator(self, data_iterable: Any) -> Iterator[TitanBatch]:
        """Called once the checkpoint is loaded: trainer and loader must stand at the same step."""
        if self.step != self.dataloader.loader.step:
            raise RestoreError(
                f"The trainer goes on from step {self.step}, but the loader from step {self.dataloader.loader.step}: "
                "the checkpoint holds no state of this loader. Load the model alone (checkpoint.initial_load_path) to "
                "start the data anew on purpose."
            )
        self._loaded = self.step
        if self._ledger:
            self._ledger.begin(self.dataloader.loader.state_dict()[HEADER])
        return super().batch_generator(data_iterable)

    def train_step(self, data_iterator: Iterator[TitanBatch]) -> None:
        super().train_step(self._noted(data_iterator) if self._ledger else data_iterator)
        if self._ledger:
            self._ledger.write(self.step)
        self._skips.write(self.dataloader.loader.take_skipped())

    def _noted(self, batches: Iterator[TitanBatch]) -> Iterator[TitanBatch]:
        """Have the ledger note what the trainer takes, before it moves tensors to a device."""
        for tensors, labels in batches:
            cast(Ledger, self._ledger).add({name: one.numpy() for name, one in {**tensors, "labels": labels}.items()})
            yield tensors, labels

    def close(self) -> None:
        super().close()
        self._skips.write(self.dataloader.loader.take_skipped())  # what a finite stream passes after its last step
        self._skips.close()
        if self._ledger:
            self._ledger.close()


def _data_rank(dims: ParallelDims) -> tuple[int, int]:
    """Data-parallel rank and number of data-parallel ranks, as TorchTitan gives them to its loaders."""
    if not dims.dp_enabled:
        return 0, 1
    mesh = dims.get_mesh("batch")
    return mesh.get_local_rank(), mesh.size()


def _speaks_for_lanes(dims: ParallelDims) -> bool:
    """Whether this rank writes ledger and skip list: the first of its tensor-, context- and pipeline-parallel peers."""
    meshes = [dims.get_optional_mesh(name) for name in ("tp", "cp", "pp")] if dist.is_initialized() else []
    return all(mesh.get_local_rank() == 0 for mesh in meshes if mesh is not None)
