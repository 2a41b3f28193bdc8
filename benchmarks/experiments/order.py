"""2. What order costs: one model on the same tokens, at several numbers of ranks, with the stock loader and with ours.

Every run reads a corpus about once. A loader that gives every number of ranks the same batches leaves only the order
in which gradients are summed; one that does not trains on another order of the data. `spread` is the largest
difference between numbers of ranks in a held-out score, the mean over initial seeds. The floor is the same with our
loader on one rank, where only the size of the micro-batches changes, and so the order of the sums.

Decided before anything was measured:

- all batches of ours must be equal, and none but the stock loader's may differ;
- the same run twice must have the same losses;
- the spread with ours is at the floor if it is not above it, or if the 95 % interval of their difference holds 0;
- the stock loader's spread is larger if the 95 % interval of the ratio of its spread to ours lies above 1.
"""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.corpus import TEXT
from benchmarks.experiments import data, jobs
from benchmarks.experiments.evaluate import evaluate
from benchmarks.experiments.spread import Array, spread
from zephon.ledger import read_ledger

SEQ_LEN, BATCH, LANES, LOCAL = 128, 16, 8, 2
FLOOR = (4, 8, 16)
"""Micro-batches of the floor, beside `LOCAL`."""
LEAST = {"docs": 2.0**-23, "code": 2.0**-23, "cloze": 0.01}
"""Held-out scores, losses in nats a token and the cloze in points, and the smallest difference worth a ratio: the
rounding of float32, and about one answer."""


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    steps: int
    megabytes: float
    seeds: tuple[int, ...]
    ranks: tuple[int, ...]
    resize: tuple[int, int]
    floor: tuple[int, ...] = FLOOR
    judged: tuple[str, ...] = ("docs", "code", "cloze")


QUICK = Sizes(12, 0.3, (1,), (1, 2), (2, 1), (16,), ("docs", "code"))  # after 12 steps no model knows a word
FULL = Sizes(150, 0.9, (1, 2, 3), (1, 2, 4, 8), (2, 4))


@dataclass(frozen=True)
class Run:
    """One training run; `ranks` are its numbers of ranks, the second from the middle of the run on."""

    loader: str
    ranks: tuple[int, ...]
    seed: int
    local: int = LOCAL
    again: bool = False

    @property
    def name(self) -> str:
        parts = [self.loader, "to".join(map(str, self.ranks)), f"seed{self.seed}"]
        parts += [f"local{self.local}"] * (self.local != LOCAL) + ["again"] * self.again
        return "-".join(parts)


def measure(out: Path, sizes: Sizes) -> dict[str, Any]:
    """Train and score everything that is not there yet; returns what it means."""
    corpus = data.order(out / "corpus", sizes.megabytes)
    work = Work(out, corpus, data.recipe(corpus, TEXT, LANES, SEQ_LEN, BATCH), sizes)
    runs = planned(sizes)
    work.together([work.seed(seed) for seed in sizes.seeds])
    work.together([work.run(run) for run in runs if run.ranks == (1,)])
    for run in sorted(runs, key=lambda run: len(run.ranks)):  # those that go on from another come last
        work.run(run)()
    found = {run: work.run(run)() for run in runs}
    losses = {run.name: one["loss"] for run, one in found.items()}
    return {**conclude(found, sizes), "facts": facts(corpus, sizes), "losses": losses}


def planned(sizes: Sizes) -> list[Run]:
    """All runs."""
    runs: list[Run] = []
    for seed in sizes.seeds:
        for loader in ("ours", "stock"):
            runs += [Run(loader, (ranks,), seed) for ranks in sizes.ranks]
            runs.append(Run(loader, sizes.resize, seed))
        runs += [Run("ours", (1,), seed, local) for local in sizes.floor]
        runs.append(Run("ours", (1,), seed, again=True))
    return runs


@dataclass(frozen=True)
class Work:
    """Where runs live and how they are made."""

    out: Path
    corpus: Path
    recipe: Path
    sizes: Sizes

    def together(self, makes: list[Callable[[], Any]]) -> None:
        """Do work of one process each side by side, as many as there are cores; on a GPU one by one."""
        workers = 1 if torch.accelerator.is_available() else os.cpu_count()
        with ThreadPoolExecutor(workers) as pool:
            for done in [pool.submit(make) for make in makes]:
                done.result()

    def seed(self, seed: int) -> Callable[[], Any]:
        """Initial weights, from which all runs of a seed start."""

        def make() -> dict[str, Any]:
            folder = self.out / "runs" / f"seed{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            options = ("--checkpoint.create_seed_checkpoint", "--debug.seed", seed)
            jobs.train(folder, self.corpus, 1, "text", *self.options("ours", LOCAL), *options)
            return {"seed": seed}

        return lambda: jobs.once(self.out / "results" / f"seed{seed}.json", make)

    def run(self, run: Run) -> Callable[[], dict[str, Any]]:
        """One run, scored."""
        return lambda: jobs.once(self.out / "results" / f"{run.name}.json", lambda: self.train(run))

    def train(self, run: Run) -> dict[str, Any]:
        half, steps = self.sizes.steps // 2, self.sizes.steps
        source = self.out / "runs" / f"seed{run.seed}" / "checkpoint" / "step-0"
        more: list[object] = []
        if len(run.ranks) == 2:  # goes on from the middle of the run on the first number of ranks
            source = self.out / "runs" / Run(run.loader, run.ranks[:1], run.seed).name / "checkpoint" / f"step-{half}"
            more = ["--checkpoint.exclude_from_loading", "dataloader"] * (run.loader == "stock")
        elif run.ranks == self.sizes.resize[:1] and run.local == LOCAL and not run.again:
            more = ["--checkpoint.interval", half]
        folder = jobs.start_from(source, self.out / "runs" / run.name)
        config = "text" if run.loader == "ours" else "stock"
        jobs.train(folder, self.corpus, run.ranks[-1], config, *self.options(run.loader, run.local), *more)
        ledger = read_ledger(folder / "ledger") if run.loader == "ours" else jobs.rows(folder)
        losses = {row["step"]: row["loss"] for row in jobs.lines(folder / "loss.jsonl")}
        scores = evaluate(folder / "checkpoint" / f"step-{steps}", self.corpus)
        return {"loss": losses, "scores": scores, "ledger": ledger}

    def options(self, loader: str, local: int) -> list[object]:
        recipe = ["--dataloader.recipe", self.recipe] if loader == "ours" else []
        values = {"steps": self.sizes.steps, "seq_len": SEQ_LEN, "global_batch_size": BATCH, "local_batch_size": local}
        return [*recipe, *(part for name, value in values.items() for part in (f"--training.{name}", value))]


def facts(corpus: Path, sizes: Sizes) -> dict[str, Any]:
    """What was trained on."""
    tokens = sizes.steps * BATCH * SEQ_LEN
    held = {name: len(data.documents(corpus, name)) for name in data.WEIGHTS}
    return {"steps": sizes.steps, "tokens a run": tokens, "held-out documents": held, "seeds": len(sizes.seeds)}


Found = dict[Run, dict[str, Any]]


def conclude(found: Found, sizes: Sizes) -> dict[str, Any]:
    """Spreads with intervals, how batches compare, and the verdicts."""
    equal = {loader: equal_steps(found, sizes, loader) for loader in ("ours", "stock")}
    twice = [abs(difference(found, seed)) for seed in sizes.seeds]
    spreads = {metric: spread(*scored(found, sizes, metric), least=least) for metric, least in LEAST.items()}
    verdicts = {
        "all batches of ours are equal": all(same == expected for same, expected in equal["ours"].values()),
        "batches of the stock loader differ": all(same < expected for same, expected in equal["stock"].values()),
        "the same run twice has the same losses": max(twice) == 0,
    }
    for metric in sizes.judged:
        verdicts[f"{metric}: ours is at or below the floor"] = spreads[metric]["ours less floor"][1] <= 0
        verdicts[f"{metric}: the stock loader's spread is larger"] = spreads[metric]["stock by ours"][1] > 1
    return {"verdicts": verdicts, "spreads": spreads, "twice": max(twice), "equal steps": equal}


def equal_steps(found: Found, sizes: Sizes, loader: str) -> dict[str, tuple[int, int]]:
    """Of every run but the first: steps with the batch of the first, and steps that it should have trained."""
    first = Run(loader, sizes.ranks[:1], sizes.seeds[0])
    batches = found[first]["ledger"]
    rows: dict[str, tuple[int, int]] = {}
    for run, one in found.items():
        if run.loader == loader and replace(run, seed=first.seed) != first:
            expected = sizes.steps - (sizes.steps // 2 if len(run.ranks) == 2 else 0)
            rows[run.name] = sum(batches.get(step) == batch for step, batch in one["ledger"].items()), expected
    return rows


def difference(found: Found, seed: int) -> float:
    """Largest difference of the loss between the same run and itself."""
    a, b = (found[Run("ours", (1,), seed, again=again)]["loss"] for again in (False, True))
    return max(abs(a[step] - b[step]) for step in a)


def scored(found: Found, sizes: Sizes, metric: str) -> tuple[dict[str, Array], Array]:
    """Scores of all runs by what is compared, each [seeds, runs, windows], and the weights [windows] they are over."""
    first = sizes.ranks[:1]
    compared: dict[str, Callable[[int], list[Run]]] = {
        "ours": lambda seed: [Run("ours", (ranks,), seed) for ranks in sizes.ranks],
        "stock": lambda seed: [Run("stock", (ranks,), seed) for ranks in sizes.ranks],
        "floor": lambda seed: [Run("ours", first, seed, local) for local in (LOCAL, *sizes.floor)],
        "ours resized": lambda seed: [Run("ours", ranks, seed) for ranks in (sizes.resize[:1], sizes.resize)],
        "stock resized": lambda seed: [Run("stock", ranks, seed) for ranks in (sizes.resize[:1], sizes.resize)],
    }

    def row(run: Run, name: str) -> list[float]:
        scores = found[run]["scores"]
        sets = data.WEIGHTS if metric == "cloze" else (metric,)
        return [number for one in sets for number in scores[one][name]]

    name, scale = ("right", 100.0) if metric == "cloze" else ("loss", 1.0)
    tables = {
        kind: scale * np.array([[row(run, name) for run in runs(seed)] for seed in sizes.seeds])
        for kind, runs in compared.items()
    }
    items = np.array(row(Run("ours", first, sizes.seeds[0]), "items"))
    return tables, items if metric == "cloze" else np.ones(len(items))
