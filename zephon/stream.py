"""The stream: a recipe that is open. Independent of ranks; loaders of several ranks may share one."""

import functools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import numpy as np

from zephon.catalogue import Catalogue
from zephon.errors import DataError, RecipeError, nearest
from zephon.feed import AHEAD_BYTES, FEED_BYTES
from zephon.formats.index import Progress
from zephon.formats.sources import find_files, open_sources
from zephon.lane import TOO_LONG, LaneSource, Mix
from zephon.loader import Loader
from zephon.mix import integer_weights
from zephon.modality import Context, Modality, find_modality
from zephon.order import ORDER_VERSION, SourceOrder
from zephon.pack import ALGORITHMS, Packer, Room
from zephon.plugin import Named, find_named
from zephon.recipe import BatchSpec, PackingSpec, Recipe, SourceSpec
from zephon.restore import HISTORY
from zephon.run.budget import Budget
from zephon.run.isolate import IsolatedLoader
from zephon.run.runners import InlineRunner, make_runner
from zephon.run.watch import Watch
from zephon.state import FORMAT_VERSION, LaneState, Position, SourceState
from zephon.transform import BAD_ROW, Transform
from zephon.types import Bad, Plan, Ref
from zephon.worker import Runner, Source, Worker

logger = logging.getLogger(__name__)

PROBED_ROWS = 64
"""First rows of every source that its modality sees at start-up."""

SCANNED_ROWS = 1024
"""Rows measured at once when a source must be searched for a usable row."""


class Stream:
    """The global stream of a recipe: catalogue, modalities, workers, and everything that decides order.

    Args:
        recipe: a recipe with a batch.
        progress: told how far indexing has come.

    Raises:
        UsageError: the recipe cannot hold.
        DataError: the first rows of a source cannot be used.
    """

    def __init__(self, recipe: Recipe, progress: Progress | None = None) -> None:
        started = time.perf_counter()
        if recipe.batch is None:
            raise RecipeError(f"{recipe.path} has no [batch], and nothing else says seq_len and global_batch_size.")
        self.recipe, self.batch = recipe, recipe.batch
        self.budget, self.watch = Budget.of(recipe.run.memory), Watch(recipe.run.timeout)
        # Workers first: they start while we load the tokenizer ourselves. An isolated loader has workers of its own.
        self.runner = InlineRunner(self.watch) if recipe.run.isolate else make_runner(recipe, self.watch)
        try:
            self._open(recipe, recipe.batch, progress)
        except BaseException:
            self.runner.close()  # a stream that cannot be opened leaves no process, and no file open
            for source in getattr(self, "sources", ()):
                source.reader.close()
            raise
        self.startup_s = time.perf_counter() - started
        """Seconds that opening took: tokenizer, index, first rows."""

    def _open(self, recipe: Recipe, batch: BatchSpec, progress: Progress | None) -> None:
        context = Context(batch.seq_len, recipe.tokenizer, recipe.extras, recipe.packing.budgets, recipe.path.parent)
        modalities = [_modality(recipe, spec, context) for spec in recipe.sources]
        files = {spec.name: find_files(spec, recipe.path.parent) for spec in recipe.sources}
        opened = open_sources(files, recipe.run.cache, progress, self.budget)
        self.sources = tuple(
            Source(
                spec.name,
                Catalogue.of(opened[spec.name].shards, lanes=recipe.lanes, chunk_rows=spec.chunk_rows),
                opened[spec.name].reader,
                modality,
                _transforms(spec, recipe.path.parent),
                recipe.seed,
            )
            for spec, modality in zip(recipe.sources, modalities, strict=True)
        )
        self.worker = Worker(self.sources)
        self.room = _room(recipe.packing, batch.seq_len, self.worker.builder)
        for spec, source in zip(recipe.sources, self.sources, strict=True):
            first = np.arange(min(PROBED_ROWS, source.catalogue.rows))
            measured = Worker([source]).measure(0, first, first * 0)
            bad = {measured.rows[i]: i for i, counts in measured.counts.items() if BAD_ROW in counts}
            if bad and _policy(spec) == "raise":
                row = min(bad)
                why = cast(Bad, measured.payloads[bad[row]])
                raise DataError(f"Source {source.name!r}: {source.reader.place(row, why.offset)}: {why.reason}")
            if not source.transforms:  # the rows of a map are its own affair; every text is still compared on probes
                rows = source.reader.read(np.array([i for i in first.tolist() if i not in bad], np.int64))
                source.modality.probe([row for row in rows if not isinstance(row, Bad)])
        self.watch.name_task = self.worker.describe
        self.builder: Runner = InlineRunner(self.watch) if self.worker.builder.cheap_materialise else self.runner
        self._packer = _packer(recipe.packing, recipe.path.parent)
        weights = integer_weights([spec.weight for spec in recipe.sources])
        self.mix = Mix(
            weights,
            by_samples=recipe.mix.unit == "samples",
            piece=batch.seq_len if recipe.mix.piece == "sequence" else None,
            longest=None if recipe.packing.too_long == "split" else (self.room.plain, batch.seq_len),
            drop_longer=recipe.packing.too_long == "drop",
            stop=recipe.mix.on_end == "stop",
        )
        self.lane_sources = tuple(self._lane_source(i, source) for i, source in enumerate(self.sources))
        self._loaders: WeakSet[Loader] = WeakSet()
        self.runner.expect(self.header(0))

    @staticmethod
    def open(
        path: str | os.PathLike[str], *, batch: BatchSpec | None = None, progress: Progress | None = None
    ) -> "Stream":
        """Open a recipe file; `batch` stands in for a recipe without one."""
        recipe = Recipe.load(path)
        if batch:
            recipe = recipe.with_batch(batch.seq_len, batch.global_batch_size, "the caller")
        return Stream(recipe, progress)

    def loader(
        self,
        rank: int = 0,
        world: int = 1,
        local_batch_size: int | None = None,
        pad_last: bool = False,
        wide: bool = False,
        lanes: Sequence[int] | None = None,
    ) -> Loader:
        """The loader of one data-parallel rank; in a process of its own where the recipe says `isolate = true`."""
        kind = IsolatedLoader if self.recipe.run.isolate else Loader
        loader = kind(
            self, rank=rank, world=world, local_batch_size=local_batch_size, pad_last=pad_last, wide=wide, lanes=lanes
        )
        self._loaders.add(loader)
        return loader

    def has_usable_row(self, source: int) -> bool:
        """Whether any row of a source gives a sample that is delivered; reads on until it finds one."""
        rows = self.sources[source].catalogue.rows
        for start in range(0, rows, SCANNED_ROWS):
            block = np.arange(start, min(start + SCANNED_ROWS, rows))
            measured = self.worker.measure(source, block, block * 0)
            most = self.mix.longest or (2**62, 2**62)
            if any(0 < size <= most[i in measured.atoms] for i, size in enumerate(measured.positions)):
                return True
        return False

    def ahead_bytes(self, feeds: int) -> int:
        """Raw bytes that a loader of so many feeds may measure ahead: that changes time and memory, never data."""
        return min(max(AHEAD_BYTES, feeds * FEED_BYTES), self.budget.ahead) // max(1, len(self._loaders))

    def making_bytes(self) -> int:
        """Bytes of micro-batches that each of the stream's loaders may have in the making; one it may always have."""
        return self.budget.making // max(1, len(self._loaders))

    @property
    def parts(self) -> int:
        """How many parts of a global batch ranks can share: its lanes, or its records where the stream is finite."""
        return self.batch.global_batch_size if self.recipe.finite else self.recipe.lanes

    def packer(self) -> Packer:
        """A fresh packer."""
        return self._packer.value(self.room, self.recipe.packing.bins)

    def tell_end(self, plans: list[Plan], state: LaneState, steps: int) -> None:
        """Say what a training run leaves out at the end of a finite stream, or why there was nothing in it."""
        if not plans and not steps:
            noted = [
                f"{count} {what} in {known.name!r}"
                for known, source in zip(self.lane_sources, state.sources, strict=True)
                for what, count in zip(known.counters, source.counters, strict=True)
                if count
            ]
            logger.warning("The stream ends without a single position: %s.", ", ".join(noted) or "no row in it has any")
        filler = self.room.filler
        refs = dict.fromkeys(one.sample.ref for plan in plans for one in plan if one.sample is not filler)
        if not refs:
            return
        shown = ", ".join(self.lane_sources[ref.source].place(ref, 0) for ref in list(refs)[:8])
        logger.warning(
            "The stream ends with %d of %d sequences of a global batch; they are dropped: %d sample(s), among them %s.",
            len(plans), self.batch.global_batch_size, len(refs), shown,
        )  # fmt: skip

    def start(self) -> LaneState:
        """The state of every lane before its first record."""
        return LaneState(tuple(SourceState(Position(), 0, 0, 0, (0,) * len(one.counters)) for one in self.lane_sources))

    def header(self, step: int, history: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """What a checkpoint says about the stream it was taken from, and what its run was allowed."""
        recipe = self.recipe
        return {
            "format": FORMAT_VERSION,
            "step": step,
            "lanes": recipe.lanes,
            "global_batch_size": self.batch.global_batch_size,
            "seq_len": self.batch.seq_len,
            "order": {
                "version": ORDER_VERSION,
                "seed": recipe.seed,
                "window": recipe.window,
                "sources": [
                    {
                        "name": source.name,
                        "modality": spec.modality,
                        "epochs": spec.epochs,
                        "catalogue": source.catalogue.fingerprint,
                        "options": source.modality.fingerprint(),
                        **{one.kind: one.fingerprint() for one in source.transforms},
                    }
                    for source, spec in zip(self.sources, recipe.sources, strict=True)
                ],
            },
            "mix": {
                "unit": recipe.mix.unit,
                "piece": recipe.mix.piece,
                "on_end": recipe.mix.on_end,
                "sources": [spec.name for spec in recipe.sources],  # their order breaks ties
                "weights": {spec.name: str(spec.weight.normalize()) for spec in recipe.sources},
            },
            "packing": _packing_header(recipe.packing, self._packer),
            **({"records": list(recipe.extras)} if recipe.extras else {}),
            **({HISTORY: [*history]} if history else {}),
        }

    def close(self) -> None:
        """Stop loaders and workers, and release files."""
        self.watch.closed = True
        for loader in list(self._loaders):
            loader.close()
        self.runner.close()
        self.worker.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lane_source(self, number: int, source: Source) -> LaneSource:
        recipe, chunks = self.recipe, source.catalogue.chunks
        epochs = recipe.sources[number].epochs
        order = SourceOrder(
            source.name, chunks, seed=recipe.seed, lanes=recipe.lanes, window=recipe.window, epochs=epochs
        )
        counters = source.counters + ((TOO_LONG,) if recipe.packing.too_long == "drop" else ())

        def place(ref: Ref, offset: int) -> str:
            return source.reader.place(int(chunks.rows(np.array([ref.chunk]), np.array([ref.row]))[0]), offset)

        most = recipe.sources[number].max_bad if _policy(recipe.sources[number]) == "skip" else None
        usable = functools.cache(lambda: self.has_usable_row(number))
        return LaneSource(source.name, order, counters, usable, place, most)


def _policy(spec: SourceSpec) -> str:
    """What becomes of the bad rows of a source: "raise" or "skip"."""
    return spec.on_error or find_modality(spec.modality).on_error


def _modality(recipe: Recipe, spec: SourceSpec, context: Context) -> Modality:
    try:
        kind = find_modality(spec.modality)
        return kind(spec.options, replace(context, on_error=_policy(spec)))
    except RecipeError as error:
        raise RecipeError(f"{recipe.path}: source {spec.name!r}: {error}") from None


def _transforms(spec: SourceSpec, folder: Path) -> tuple[Transform, ...]:
    named = (("filter", spec.filter), ("map", spec.map))
    return tuple(Transform(kind, name, folder) for kind, name in named if name)


def _room(packing: PackingSpec, seq_len: int, builder: Modality) -> Room:
    """What a sequence holds: budgets in the order of the builder's costs."""
    for name in packing.budgets:
        if name not in builder.costs:
            raise RecipeError(
                f"[packing.budgets] {name}: the sources of this recipe cost no {name!r}; they cost positions"
                f"{''.join(f' and {cost}' for cost in builder.costs)}.{nearest(name, builder.costs)}"
            )
    budgets, filler = tuple(packing.budgets.get(name, 2**62) for name in builder.costs), builder.filler
    least = (filler.positions + 1, *filler.atoms[0].costs) if filler else (0, *(0 for _ in budgets))
    for name, given, needed in zip(("seq_len", *builder.costs), (seq_len, *budgets), least, strict=True):
        if given < needed:
            raise RecipeError(
                f"{name} = {given}, but at least {needed} are needed: every record that holds no media ends with a "
                "small picture."
            )
    return Room(seq_len, budgets, filler)


def _packer(packing: PackingSpec, folder: Path) -> Named:
    if packing.algorithm in ALGORITHMS:
        return Named(ALGORITHMS[packing.algorithm], None)
    wanted = "a class {0}(room, bins) as zephon.pack.Packer describes it"
    return find_named("[packing] algorithm", packing.algorithm, folder, wanted)


def _packing_header(packing: PackingSpec, packer: Named) -> dict[str, Any]:
    """What of packing decides data; bins only where they are used."""
    bins = {"bins": packing.bins} if packing.algorithm != "concat" else {}
    code = {"sha256": packer.sha256} if packer.sha256 else {}
    budgets = {"budgets": dict(packing.budgets)} if packing.budgets else {}
    return {"algorithm": packing.algorithm, "too_long": packing.too_long, **bins, **code, **budgets}
