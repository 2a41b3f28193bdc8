"""Small recipes on disk for tests that need one, not many."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from worlds import tokenizer_folder

from zephon import DataError
from zephon.types import Bad, Row
from zephon.worker import RowReader

WORDS = [
    "lane",
    "worker",
    "accumulator",
    "record",
    "segment",
    "plan",
    "chunk",
    "ref",
    "cut",
    "mix",
    "pack",
    "shuffle",
    "stream",
    "epoch",
]


def strictly(reader: RowReader, rows: NDArray[np.int64]) -> list[Row]:
    """Rows, as a source reads them that skips none."""
    found: list[Row] = []
    for number, row in zip(rows.tolist(), reader.read(rows), strict=True):
        if isinstance(row, Bad):
            raise DataError(f"{reader.place(number, row.offset)}: {row.reason}")
        found.append(row)
    return found


def documents(count: int, start: int = 0) -> list[str]:
    """`count` documents of 1 to 40 words, told apart by their first word."""
    return [
        " ".join([f"doc{start + i}", *(WORDS[(i * 7 + k * k) % len(WORDS)] for k in range(i * 13 % 40))])
        for i in range(count)
    ]


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_recipe(
    folder: Path,
    *,
    lanes: int = 4,
    size: int = 8,
    seq_len: int = 32,
    extra: str = "",
    sources: str = "",
    tail: str = "",
) -> Path:
    """A recipe with two sources (0.7 of `a`, 0.3 of `b`) unless `sources` says otherwise, and its data."""
    write_jsonl(folder / "a" / "one.jsonl", documents(60))
    write_jsonl(folder / "a" / "two.jsonl", documents(40, 60))
    write_jsonl(folder / "b" / "one.jsonl", documents(50, 1000))
    sources = sources or (
        '[[sources]]\nname = "a"\npaths = ["a/*.jsonl"]\nweight = 0.7\n'
        '[[sources]]\nname = "b"\npaths = ["b/*.jsonl"]\nweight = 0.3\n'
    )
    path = folder / "recipe.toml"
    path.write_text(
        f"seed = 7\nlanes = {lanes}\n{extra}\n"
        f"[batch]\nseq_len = {seq_len}\nglobal_batch_size = {size}\n"
        f'[tokenizer]\npath = "{tokenizer_folder("both")}"\n{sources}'
        f'[shuffle]\nwindow = 16\n{tail}\n[run]\ncache = "cache"\n'
    )
    return path


def with_run(path: Path, variant: str, more: str = "") -> Path:
    """A copy of a recipe that runs as `variant` says, "process 2 isolate" say, with `more` lines under `[run]`."""
    runner, workers, *isolate = variant.split()
    run = f'[run]\nrunner = "{runner}"\nworkers = {workers}\nisolate = {"true" if isolate else "false"}\n{more}'
    copy = path.with_name(variant.replace(" ", "-") + ".toml")
    copy.write_text(path.read_text().replace("[run]", run))
    return copy
