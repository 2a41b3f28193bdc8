"""The stream: a recipe that is open. Independent of ranks; loaders of several ranks may share one."""

import glob
import logging
import os
import time
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from zephon.catalogue import Catalogue
from zephon.errors import RecipeError
from zephon.feed import AHEAD_BYTES
from zephon.index import LineIndex, Progress, index_files
from zephon.jsonl import JsonlReader
from zephon.lane import Lane, LaneSource, Mix
from zephon.loader import Loader
from zephon.mix import integer_weights
from zephon.modality import Context, find_modality
from zephon.order import ORDER_VERSION, SourceOrder
from zephon.recipe import BatchSpec, Recipe, SourceSpec
from zephon.state import FORMAT_VERSION, LaneState
from zephon.worker import RUNNERS, Source, Worker

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
        context = Context(recipe.batch.seq_len, recipe.tokenizer)
        if len({spec.modality for spec in recipe.sources}) > 1:
            raise RecipeError("All sources of a recipe must be of one modality.")
        modalities = [find_modality(spec.modality)(spec.options, context) for spec in recipe.sources]
        indexes = _index(recipe, progress)
        self.sources = tuple(
            Source(
                spec.name,
                Catalogue.of(spec.name, [one.shard for one in index], lanes=recipe.lanes, chunk_rows=spec.chunk_rows),
                JsonlReader(index),
                modality,
            )
            for spec, index, modality in zip(recipe.sources, indexes, modalities, strict=True)
        )
        for source in self.sources:
            first = np.arange(min(PROBED_ROWS, source.catalogue.rows))
            Worker([source]).measure(0, first)
            source.modality.probe(source.reader.read(first))
        self.worker = Worker(self.sources)
        self.runner = RUNNERS[recipe.run.runner]()
        weights = integer_weights([spec.weight for spec in recipe.sources])
        piece = recipe.batch.seq_len if recipe.mix.piece == "sequence" else None
        self.mix = Mix(weights, recipe.mix.unit == "samples", piece)
        self.lane_sources = tuple(self._lane_source(i, source) for i, source in enumerate(self.sources))
        self._loaders: WeakSet[Loader] = WeakSet()
        self._usable: dict[int, bool] = {}
        self.startup_s = time.perf_counter() - started
        """Seconds that opening took: tokenizer, index, first rows."""

    @staticmethod
    def open(
        path: str | os.PathLike[str], *, batch: BatchSpec | None = None, progress: Progress | None = None
    ) -> "Stream":
        """Open a recipe file; `batch` stands in for a recipe without one."""
        recipe = Recipe.load(path)
        if batch:
            recipe = recipe.with_batch(batch.seq_len, batch.global_batch_size, "the caller")
        return Stream(recipe, progress)

    def loader(self, rank: int = 0, world: int = 1, local_batch_size: int | None = None) -> Loader:
        """The loader of one data-parallel rank."""
        loader = Loader(self, rank, world, local_batch_size)
        self._loaders.add(loader)
        return loader

    def has_usable_row(self, source: int) -> bool:
        """Whether any row of a source gives a position; reads on until it finds one, and remembers the answer."""
        if source not in self._usable:
            rows = self.sources[source].catalogue.rows
            blocks = (np.arange(start, min(start + SCANNED_ROWS, rows)) for start in range(0, rows, SCANNED_ROWS))
            self._usable[source] = any(any(self.worker.measure(source, block).positions) for block in blocks)
        return self._usable[source]

    def ahead_bytes(self) -> int:
        """Raw bytes that each of the stream's loaders may measure ahead, which changes time and memory, never data."""
        return AHEAD_BYTES // max(1, len(self._loaders))

    def start(self) -> LaneState:
        """The state of every lane before its first record."""
        return Lane.start(self.lane_sources)

    def header(self, step: int) -> dict[str, Any]:
        """What a checkpoint says about the stream it was taken from."""
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
                        "catalogue": source.catalogue.fingerprint,
                        "options": source.modality.fingerprint(),
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
            "packing": {"algorithm": recipe.packing},
        }

    def close(self) -> None:
        """Stop workers and release files."""
        self.runner.close()
        self.worker.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lane_source(self, number: int, source: Source) -> LaneSource:
        recipe, chunks = self.recipe, source.catalogue.chunks
        order = SourceOrder(source.name, chunks, seed=recipe.seed, lanes=recipe.lanes, window=recipe.window)
        return LaneSource(source.name, order, source.modality.counters, lambda: self.has_usable_row(number))


def find_files(spec: SourceSpec, folder: Path) -> dict[str, Path]:
    """The files of a source by shard name, sorted: names are relative to the deepest folder that holds them all.

    Raises:
        RecipeError: a pattern matches nothing, or a file has no known format.
    """
    found: set[str] = set()
    for pattern in spec.paths:
        matches = glob.glob(str(folder / Path(pattern).expanduser()), recursive=True)
        files = [os.path.normpath(match) for match in matches if os.path.isfile(match)]
        if not files:
            raise RecipeError(
                f"Source {spec.name!r}: no file matches {pattern!r} (looked from {folder.resolve()}). "
                "Paths are relative to the recipe; ** crosses folders."
            )
        found.update(files)
    for path in sorted(found):
        if not path.endswith((".jsonl", ".ndjson")):
            raise RecipeError(f"Source {spec.name!r}: {path} is none of the known formats: .jsonl, .ndjson.")
    paths = [Path(path) for path in found]
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return dict(sorted((path.relative_to(common).as_posix(), path) for path in paths))


def _index(recipe: Recipe, progress: Progress | None) -> list[list[LineIndex]]:
    """The index of every source; all files are indexed together, a file that two sources share only once."""
    files = [find_files(spec, recipe.path.parent) for spec in recipe.sources]
    out: list[list[LineIndex]] = []
    for spec, mine in zip(recipe.sources, files, strict=True):
        index = index_files(mine, recipe.run.cache, progress)
        if not any(one.shard.rows for one in index):
            raise RecipeError(f"Source {spec.name!r} has no rows in {len(mine)} files. Remove it, or give it data.")
        out.append(index)
    return out
