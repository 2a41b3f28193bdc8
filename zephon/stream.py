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
from zephon.formats.compressed import CODECS, codec_of
from zephon.formats.index import LineIndex, Progress, index_files
from zephon.formats.jsonl import KEPT_BYTES, OPEN_FILES, JsonlReader, MemberCache
from zephon.isolate import IsolatedLoader
from zephon.lane import TOO_LONG, Lane, LaneSource, Mix
from zephon.loader import Loader
from zephon.mix import integer_weights
from zephon.modality import Context, Modality, find_modality
from zephon.order import ORDER_VERSION, SourceOrder
from zephon.pack import Packer, make_packer
from zephon.recipe import BatchSpec, PackingSpec, Recipe, SourceSpec
from zephon.runners import InlineRunner, make_runner
from zephon.state import FORMAT_VERSION, LaneState
from zephon.transform import Transform
from zephon.types import Plan, Ref
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
        self.runner = make_runner(recipe)  # first: processes start while we load the tokenizer ourselves
        try:
            self._open(recipe, recipe.batch, progress)
        except BaseException:
            self.runner.close()  # a stream that cannot be opened leaves no process
            raise
        self.startup_s = time.perf_counter() - started
        """Seconds that opening took: tokenizer, index, first rows."""

    def _open(self, recipe: Recipe, batch: BatchSpec, progress: Progress | None) -> None:
        context = Context(batch.seq_len, recipe.tokenizer, recipe.extras)
        modalities = [_modality(recipe, spec, context) for spec in recipe.sources]
        if len(families := {modality.family for modality in modalities}) > 1:
            raise RecipeError(
                f"Sources of the families {sorted(families)} cannot share sequences; use one recipe for each."
            )
        indexes, kept = _index(recipe, progress), MemberCache(KEPT_BYTES)
        self.sources = tuple(
            Source(
                spec.name,
                Catalogue.of(spec.name, [one.shard for one in index], lanes=recipe.lanes, chunk_rows=spec.chunk_rows),
                JsonlReader(index, kept, max(2, OPEN_FILES // len(recipe.sources))),
                modality,
                _transforms(spec, recipe.path.parent),
                recipe.seed,
            )
            for spec, index, modality in zip(recipe.sources, indexes, modalities, strict=True)
        )
        for source in self.sources:
            first = np.arange(min(PROBED_ROWS, source.catalogue.rows))
            Worker([source]).measure(0, first, first * 0)
            if not source.transforms:  # the rows of a map are its own affair; every text is still compared on probes
                source.modality.probe(source.reader.read(first))
        self.worker = Worker(self.sources)
        self.builder: Runner = InlineRunner() if modalities[0].cheap_materialise else self.runner
        weights = integer_weights([spec.weight for spec in recipe.sources])
        piece = batch.seq_len if recipe.mix.piece == "sequence" else None
        self.mix = Mix(
            weights,
            by_samples=recipe.mix.unit == "samples",
            piece=piece,
            longest=None if recipe.packing.too_long == "split" else batch.seq_len,
            drop_longer=recipe.packing.too_long == "drop",
            stop=recipe.mix.on_end == "stop",
        )
        self.lane_sources = tuple(self._lane_source(i, source) for i, source in enumerate(self.sources))
        self._loaders: WeakSet[Loader] = WeakSet()
        self._usable: dict[int, bool] = {}

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
        self, rank: int = 0, world: int = 1, local_batch_size: int | None = None, pad_last: bool = False
    ) -> Loader:
        """The loader of one data-parallel rank; in a process of its own where the recipe says `isolate = true`."""
        kind = IsolatedLoader if self.recipe.run.isolate else Loader
        loader = kind(self, rank=rank, world=world, local_batch_size=local_batch_size, pad_last=pad_last)
        self._loaders.add(loader)
        return loader

    def has_usable_row(self, source: int) -> bool:
        """Whether any row of a source gives a position; reads on until it finds one, and remembers the answer."""
        if source not in self._usable:
            rows = self.sources[source].catalogue.rows
            blocks = (np.arange(start, min(start + SCANNED_ROWS, rows)) for start in range(0, rows, SCANNED_ROWS))
            self._usable[source] = any(any(self.worker.measure(source, block, block * 0).positions) for block in blocks)
        return self._usable[source]

    def ahead_bytes(self) -> int:
        """Raw bytes that each of the stream's loaders may measure ahead, which changes time and memory, never data."""
        return AHEAD_BYTES // max(1, len(self._loaders))

    @property
    def parts(self) -> int:
        """How many parts of a global batch ranks can share: its lanes, or its records where the stream is finite."""
        return self.batch.global_batch_size if self.recipe.finite else self.recipe.lanes

    def packer(self) -> Packer:
        """A fresh packer."""
        return make_packer(self.recipe.packing.algorithm, self.batch.seq_len, self.recipe.packing.bins)

    def tell_dropped(self, plans: list[Plan]) -> None:
        """Say which samples a training run leaves out at the end of a finite stream."""
        refs = list(dict.fromkeys(segment.sample.ref for plan in plans for segment in plan))
        if not refs:
            return
        shown = ", ".join(self.lane_sources[ref.source].place(ref) for ref in refs[:8])
        logger.warning(
            "The stream ends with %d of %d sequences of a global batch; they are dropped: %d sample(s), among them %s.",
            len(plans), self.batch.global_batch_size, len(refs), shown,
        )  # fmt: skip

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
            "packing": _packing_header(recipe.packing),
            **({"records": list(recipe.extras)} if recipe.extras else {}),
        }

    def close(self) -> None:
        """Stop loaders and workers, and release files."""
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

        def place(ref: Ref) -> str:
            return source.reader.place(int(chunks.rows(np.array([ref.chunk]), np.array([ref.row]))[0]))

        return LaneSource(source.name, order, counters, lambda: self.has_usable_row(number), place)


def _modality(recipe: Recipe, spec: SourceSpec, context: Context) -> Modality:
    try:
        return find_modality(spec.modality)(spec.options, context)
    except RecipeError as error:
        raise RecipeError(f"{recipe.path}: source {spec.name!r}: {error}") from None


def _transforms(spec: SourceSpec, folder: Path) -> tuple[Transform, ...]:
    named = (("filter", spec.filter), ("map", spec.map))
    return tuple(Transform(kind, name, folder) for kind, name in named if name)


def _packing_header(packing: PackingSpec) -> dict[str, Any]:
    """What of packing decides data; bins only where they are used."""
    bins = {"bins": packing.bins} if packing.algorithm == "best_fit" else {}
    return {"algorithm": packing.algorithm, "too_long": packing.too_long, **bins}


def find_files(spec: SourceSpec, folder: Path) -> dict[str, Path]:
    """The files of a source by shard name, sorted: names are relative to the deepest folder that holds them all.

    Raises:
        RecipeError: a pattern matches nothing, a file has no known format, or is there both plain and compressed.
    """
    root, found = folder.absolute(), dict[str, str]()
    for pattern in spec.paths:
        wanted = Path(pattern).expanduser()
        matches = glob.glob(
            str(wanted if wanted.is_absolute() else Path(glob.escape(str(root))) / wanted), recursive=True
        )
        files = sorted((match for match in matches if os.path.isfile(match)), key=lambda match: (len(match), match))
        if not files and any(os.path.isdir(match) for match in matches):
            raise RecipeError(
                f"Source {spec.name!r}: {pattern!r} is a folder. Name its files, as in {pattern + '/*.jsonl'!r}."
            )
        if not files:
            raise RecipeError(
                f"Source {spec.name!r}: no file matches {pattern!r} (looked from {root}). "
                "Paths are relative to the recipe; ** crosses folders."
            )
        for match in files:  # a file that links lead to twice counts once, under its shortest name
            found.setdefault(os.path.realpath(match), match)
    same: dict[str, str] = {}
    for path in sorted(found.values()):
        codec = codec_of(path)
        plain = path.removesuffix(codec.suffix) if codec else path
        if not plain.endswith((".jsonl", ".ndjson")):
            also = ", ".join(one.suffix for one in CODECS)
            raise RecipeError(
                f"Source {spec.name!r}: {path} is none of the known formats: .jsonl, .ndjson, or these with {also}."
            )
        if (other := same.setdefault(plain, path)) != path:
            raise RecipeError(
                f"Source {spec.name!r} has both {other} and {path}: the same rows twice. Narrow the pattern, or rename "
                "one of them if they are not the same."
            )
        if codec:
            codec.decoder()  # says now what must be installed for it
    paths = [Path(path) for path in found.values()]
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return dict(sorted((path.relative_to(common).as_posix(), path) for path in paths))


def _index(recipe: Recipe, progress: Progress | None) -> list[list[LineIndex]]:
    """The index of every source; all files are indexed together, a file that two sources share only once."""
    files = [find_files(spec, recipe.path.parent) for spec in recipe.sources]
    every = {str(path): path for mine in files for path in mine.values()}
    indexed = dict(zip(every, index_files(every, recipe.run.cache, progress), strict=True))
    out: list[list[LineIndex]] = []
    for spec, mine in zip(recipe.sources, files, strict=True):
        index = [indexed[str(path)].named(name) for name, path in mine.items()]
        if not any(one.shard.rows for one in index):
            raise RecipeError(f"Source {spec.name!r} has no rows in {len(mine)} files. Remove it, or give it data.")
        out.append(index)
    return out
