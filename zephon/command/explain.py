"""`zephon explain`: the plan of a stream as a picture, with the cost of every stage measured on its own data."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from zephon.digest import lane_digest
from zephon.feed import TASK_BYTES
from zephon.loader import Loader
from zephon.run.runners import InlineRunner
from zephon.stream import Stream
from zephon.types import Bad, Batch, Measured, Plan, Row
from zephon.worker import RowReader, Source, Worker

_SAMPLED_ROWS = 512  # of each source, spread over it evenly, to estimate its tokens
_TOKENS = 3_000_000  # measured, to tell what the stages cost


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """What a source contributes. Tokens are estimated from `_SAMPLED_ROWS` rows; epochs are per billion tokens."""

    name: str
    share: float
    rows: int
    tokens: int
    mean_tokens: float
    epochs_per_billion: float


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What `explain` found: the sources, and what every stage costs."""

    sources: list[SourcePlan]
    cpu_s_per_mtoken: dict[str, float]


class _TimedReader:
    """A reader that notes the CPU time of reading."""

    def __init__(self, reader: RowReader) -> None:
        self._reader, self.reading = reader, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, rows: NDArray[np.int64]) -> list[Row | Bad]:
        started = time.process_time()
        found = self._reader.read(rows)
        self.reading += time.process_time() - started
        return found


class _TimedWorker(Worker):
    """A worker that notes the CPU time of its work, and how many tokens it measured."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.readers = [_TimedReader(source.reader) for source in sources]
        super().__init__(
            [replace(one, reader=cast(RowReader, reader)) for one, reader in zip(sources, self.readers, strict=True)]
        )
        self.measuring = self.building = 0.0
        self.measured = 0

    def measure(self, source: int, rows: NDArray[np.int64], epochs: NDArray[np.int64]) -> Measured:
        started = time.process_time()
        found = super().measure(source, rows, epochs)
        self.measuring += time.process_time() - started
        self.measured += sum(found.positions)
        return found

    def materialise(self, plans: Sequence[Plan]) -> Batch:
        started = time.process_time()
        batch = super().materialise(plans)
        self.building += time.process_time() - started
        return batch


def explain(stream: Stream) -> StreamPlan:
    """Sample the sources and time the stages, in this process. The stream is of no other use afterwards."""
    weights = [float(spec.weight) for spec in stream.recipe.sources]
    means = list[float]()
    totals = list[tuple[int, int]]()
    for number, source in enumerate(stream.sources):
        rows = source.catalogue.rows
        some = np.unique(np.linspace(0, rows - 1, min(rows, _SAMPLED_ROWS)).astype(np.int64))
        total = sum(stream.worker.measure(number, some, some * 0).positions)
        means.append(total / len(some))
        totals.append((rows, round(total / len(some) * rows)))
    # Shares are of what the mix counts in; epochs follow from the tokens that this comes to.
    by_tokens = [weight * (mean if stream.mix.by_samples else 1) for weight, mean in zip(weights, means, strict=True)]
    sources = [
        SourcePlan(
            source.name, weight / sum(weights), *total, mean, 1e9 * part / max(1e-9, sum(by_tokens)) / max(1, total[1])
        )
        for source, weight, total, mean, part in zip(stream.sources, weights, totals, means, by_tokens, strict=True)
    ]
    gc.disable()  # as TorchTitan's trainer does
    try:
        return StreamPlan(sources, _stages(stream))
    finally:
        gc.enable()


def _stages(stream: Stream) -> dict[str, float]:
    """CPU seconds per million tokens of every stage."""
    worker = stream.worker = _TimedWorker(stream.sources)
    stream.runner = stream.builder = InlineRunner(stream.watch)
    loading = hashing = 0.0
    loader = Loader(stream)
    while loader.stats().positions < _TOKENS:
        started = time.process_time()
        try:
            records = loader.step_records()
        except StopIteration:
            break
        loaded = time.process_time()
        for mine in records.values():
            lane_digest(mine)
        loading, hashing = loading + loaded - started, hashing + time.process_time() - loaded
    million = max(1, loader.stats().positions) / 1e6
    measured = max(1, worker.measured) / 1e6  # rows are measured ahead, more than were delivered
    reading = sum(reader.reading for reader in worker.readers)
    return {
        "read": reading / measured,
        "measure": (worker.measuring - reading) / measured,
        "mix and pack": (loading - worker.measuring - worker.building) / million,
        "materialise": worker.building / million,
        "digest": hashing / million,
    }


def show(stream: Stream, plan: StreamPlan, console: Console) -> None:
    """Draw the plan, from the sources down to the ranks."""
    recipe, batch, run = stream.recipe, stream.batch, stream.recipe.run
    table = Table("source", "share", "rows", "tokens (est.)", "mean", "epochs per Gtoken", expand=True)
    for one in plan.sources:
        bar = "█" * round(one.share * 20)
        cells = (
            f"{one.rows:,}",
            f"{one.tokens / 1e6:,.1f} M",
            f"{one.mean_tokens:,.0f}",
            f"{one.epochs_per_billion:.2f}",
        )
        table.add_row(escape(one.name), f"{one.share:6.1%} {bar}", *cells)
    ahead = {"inline": "when asked for", "threads": f"ahead, in {run.workers} threads"}
    work = ahead.get(run.runner, f"ahead, in {run.workers} processes")
    seconds = plan.cpu_s_per_mtoken
    packing = f"{recipe.packing.algorithm} into {batch.seq_len:,} positions"
    lanes = "one finite decision stream" if recipe.finite else f"{recipe.lanes} lane{'s' * (recipe.lanes > 1)}"
    stages = [
        (f"source order   window {recipe.window} rows, seed {recipe.seed}", None),
        (f"read and parse   tasks of {TASK_BYTES >> 10} KiB, {work}", seconds["read"]),
        ("measure   tokenise, one native call a task", seconds["measure"]),
        (f"mix and pack   {lanes}; {recipe.mix.unit}, whole {recipe.mix.piece}s; {packing}", seconds["mix and pack"]),
        (
            f"materialise   {'with the loader' if stream.worker.builder.cheap_materialise else work}",
            seconds["materialise"],
        ),
        ("digest   only for ledgers", seconds["digest"]),
    ]
    total = sum(seconds.values())
    flow = Table.grid(padding=(0, 2))
    for text, cost in stages:
        mark = "" if cost is None else f"{cost:.4f}  {'▇' * round(20 * cost / total)}"
        flow.add_row("▼", escape(text), mark)
    where = "in a process of its own" if run.isolate else "in the training process"
    worlds = f"{batch.global_batch_size} sequences a step for any number of ranks that divides {stream.parts}"
    body = Group(table, "", flow, "", f"loader   {where}; {worlds}")
    console.print(Panel(body, title=escape(str(recipe.path)), subtitle="CPU seconds per million tokens, measured here"))
