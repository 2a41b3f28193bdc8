"""3. Throughput beside TorchTitan's own loaders: inside real training, and alone.

Inside training: seconds of a step, and of them the seconds that the trainer waits for its data, as TorchTitan counts
both; medians over the steps behind a warm-up, all runs in turns on one rank. Alone: the comparison of
`benchmarks/peers`, with the corpus of these experiments. Of images, TorchTitan's loader fills each sequence with one
sample and padding, ours with many: the share of positions that is data stands beside them.

Decided before anything was measured: training waits for our data no longer than for TorchTitan's, and alone ours
costs less CPU a token and an image.
"""

import json
import shutil
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.corpus import IMAGES, TEXT
from benchmarks.experiments import data, jobs
from benchmarks.experiments.saves import places
from benchmarks.peers.__main__ import convert, in_process
from benchmarks.peers.common import Work
from benchmarks.peers.sides import Side

TRAINED = {"text": (TEXT, 256, 8, 8), "images": (IMAGES, 256, 8, 2)}
"""Recipe, sequence length, global and local batch."""


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    steps: int
    warm: int
    rounds: int
    scale: float
    megabytes: float
    pictures: int


QUICK = Sizes(10, 4, 1, 0.02, 0.5, 64)
FULL = Sizes(30, 5, 2, 1.0, 8.0, 960)


def measure(out: Path, sizes: Sizes) -> dict[str, Any]:
    """Run what is not there yet; returns medians, and the verdicts."""
    corpus = data.wide(out / "corpus", sizes.megabytes, sizes.pictures)
    trained: dict[str, list[dict[str, Any]]] = {}
    alone: dict[str, list[dict[str, Any]]] = {}
    sides = alone_sides(sizes.scale)
    for number in range(sizes.rounds):
        for config in ("text", "stock", "images", "stock_images"):
            file = out / "results" / f"trained-{config}-{number}.json"
            trained.setdefault(config, []).append(jobs.once(file, partial(train, out, corpus, config, sizes)))
        for name, side in sides.items():
            file = out / "results" / f"alone-{name.replace(' ', '-')}-{number}.json"
            alone.setdefault(name, []).append(jobs.once(file, partial(run_alone, out, corpus, side)))
    rows = {name: medians(found) for name, found in trained.items()}
    loaders = {name: medians(found) for name, found in alone.items()}
    verdicts = {
        "training waits no longer for our text": rows["text"]["data_s"] <= rows["stock"]["data_s"],
        "training waits no longer for our images": rows["images"]["data_s"] <= rows["stock_images"]["data_s"],
        "our text costs less CPU": cost(loaders, "text, ours") < cost(loaders, "text, stock"),
        "our images cost less CPU": cost(loaders, "images, ours") < cost(loaders, "images, stock"),
    }
    return {"verdicts": verdicts, "trained": rows, "alone": loaders}


def medians(found: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def cost(loaders: dict[str, dict[str, float]], name: str) -> float:
    return loaders[name]["cpu_s_per_unit"]


def train(out: Path, corpus: Path, config: str, sizes: Sizes) -> dict[str, float]:
    """One training run; medians of its steps."""
    kind = "images" if "images" in config else "text"
    template, seq_len, size, local = TRAINED[kind]
    folder = out / "runs" / config
    shutil.rmtree(folder, ignore_errors=True)
    values = {"steps": sizes.steps, "seq_len": seq_len, "global_batch_size": size, "local_batch_size": local}
    options = [part for name, value in values.items() for part in (f"--training.{name}", value)]
    if not config.startswith("stock"):
        options += ["--dataloader.recipe", data.recipe(corpus, template, 8, seq_len, size)]
    jobs.train(folder, corpus, 1, config, *options)
    steps = jobs.lines(folder / "times.jsonl")[sizes.warm :]
    step, wait = (statistics.median(row[name] for row in steps) for name in ("step_s", "data_s"))
    return {"step_s": step, "data_s": wait, "data_share": wait / step, "tokens_s": size * seq_len / step}


def alone_sides(scale: float) -> dict[str, Side]:
    """Loaders without a trainer, all in our own environment."""
    text, fast = {"format": "jsonl", "runner": "inline"}, {"fast": True, "workers": 0}
    sides = {
        "text, ours": Side("ours", "", 30_000_000, 4_000_000, text),
        "text, stock": Side("titan", "", 4_000_000, 500_000, fast | {"fast": False}),
        "text, stock + fastokens": Side("titan", "", 8_000_000, 1_000_000, fast),
        "images, ours": Side("ours", "", 3000, 600, {"format": "tar", "runner": "inline"}),
        "images, stock": Side("titan_images", "", 1000, 200, {"workers": 0}),
    }
    return {
        name: side._replace(amount=max(1, int(side.amount * scale)), warm=max(1, int(side.warm * scale)))
        for name, side in sides.items()
    }


def run_alone(out: Path, corpus: Path, side: Side) -> dict[str, Any]:
    """One loader in a process of its own, at sequences of 2,048 and batches of 8, as in `benchmarks/peers`.

    Raises:
        JobFailedError: it did not end well.
    """
    files = places(out, corpus)
    tokenizer = without_bos(out, corpus)
    eos = next(
        one["id"] for one in json.loads((tokenizer / "tokenizer.json").read_text())["added_tokens"]
        if one["content"] == "<|end_of_text|>"
    )  # fmt: skip
    folders = {"jsonl": files["jsonl"], "parquet": convert("", "parquet", files["jsonl"]), "tar": files["tar"]}
    unit = "images" if side.options.get("format") == "tar" or side.file == "titan_images" else "tokens"
    work = Work(folders, str(tokenizer), eos, str(out / "runs"), side.amount, side.warm, unit, options=side.options)
    row = in_process(work, side, 300.0)
    if "failed" in row:
        raise jobs.JobFailedError(f"{side.file}: {row['failed']}")
    kept = ("per_s", "cpu_s_per_unit", "peak_mb", "first_batch_s", "token_fill")
    return {name: row[name] for name in kept if name in row}


def without_bos(out: Path, corpus: Path) -> Path:
    """The tokenizer without BOS, which not all sides of `benchmarks/peers` add."""
    folder = out / "tokenizer"
    shutil.copytree(corpus / "tokenizer", folder, dirs_exist_ok=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": None}))
    return folder
