"""CPU seconds per million tokens of text, beside TorchTitan's own loader, alternating in one run.

    python -m benchmarks.text_speed RECIPE [--rounds 3] [--million-tokens 6]

Both read the same files with the same tokenizer into sequences of the same length. TorchTitan's loader runs as it
ships, without workers (2 workers raise its wall speed by a third and cost more CPU) and gets one concatenated source,
which is easier than the mix that Zephon makes. Imports, tokenizer load and opening of files are not counted.
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.report import about, write
from zephon import Recipe, Stream
from zephon.stream import find_files


@dataclass
class Args:
    recipe: Annotated[Path, tyro.conf.Positional]
    rounds: int = 3
    million_tokens: float = 6.0
    one: str = ""
    """Internal: run one side and print its figures."""


def main() -> None:
    args = tyro.cli(Args)
    if args.one:
        print(json.dumps({"zephon": zephon_side, "torchtitan": titan_side}[args.one](args)))
        return
    rounds: dict[str, list[dict[str, float]]] = {"zephon": [], "torchtitan": []}
    for _ in range(args.rounds):
        for side, found in rounds.items():
            command = [sys.executable, "-m", "benchmarks.text_speed", str(args.recipe), "--one", side]
            command += ["--million-tokens", str(args.million_tokens if side == "zephon" else args.million_tokens / 4)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found.append(json.loads(out.splitlines()[-1]))
            print(side, found[-1])
    cpu = {side: statistics.median(one["cpu_s_per_mtoken"] for one in found) for side, found in rounds.items()}
    wall = {side: statistics.median(one["mtokens_per_s"] for one in found) for side, found in rounds.items()}
    ratios = {"cpu": cpu["torchtitan"] / cpu["zephon"], "wall": wall["zephon"] / wall["torchtitan"]}
    print("median CPU s per Mtoken", cpu, "Mtoken/s", wall, "ratios", ratios)
    with Stream.open(args.recipe) as stream:
        write(
            "text_speed",
            {**about(stream), "rounds": rounds, "cpu_s_per_mtoken": cpu, "mtokens_per_s": wall, "ratios": ratios},
        )


def timed(batches: Any, tokens: float, count: Any) -> dict[str, float]:
    """Iterate until `tokens` have come."""
    done = 0
    wall, cpu = time.perf_counter(), time.process_time()
    while done < tokens:
        done += count(next(batches))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"tokens": done, "cpu_s_per_mtoken": cpu / done * 1e6, "mtokens_per_s": done / wall / 1e6}


def zephon_side(args: Args) -> dict[str, float]:
    with Stream.open(args.recipe) as stream:
        loader = stream.loader(local_batch_size=8 if stream.batch.global_batch_size % 8 == 0 else 1)
        return timed(loader, args.million_tokens * 1e6, lambda batch: batch["input"].size)


def titan_side(args: Args) -> dict[str, float]:
    from datasets import disable_progress_bars, load_dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    disable_progress_bars()
    recipe = Recipe.load(args.recipe)
    assert recipe.tokenizer is not None
    assert recipe.batch is not None
    files = [str(path) for spec in recipe.sources for path in find_files(spec, recipe.path.parent).values()]
    DATASETS["bench"] = DatasetConfig(
        path="bench",
        loader=lambda _: load_dataset("json", data_files=files, split="train"),
        sample_processor=lambda row: row["text"],
    )
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(recipe.tokenizer.path))
    loader = HuggingFaceTextDataLoader(
        HuggingFaceTextDataLoader.Config(dataset="bench"), dp_world_size=1, dp_rank=0, tokenizer=tokenizer,
        seq_len=recipe.batch.seq_len, local_batch_size=8,
    )  # fmt: skip
    batches = iter(loader)
    next(batches)  # opens the data set
    return timed(batches, args.million_tokens * 1e6, lambda batch: batch[1].numel())


if __name__ == "__main__":
    main()
