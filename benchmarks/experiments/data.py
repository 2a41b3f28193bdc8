"""The corpora of the experiments, from what lies on any machine (see `recipes/demo/corpus.py`), never downloaded.

`order` is as large as what a run of experiment 2 reads, so that every run reads the same tokens about once, whatever
its order; its documents are shuffled beforehand, so that a loader that reads files from the front has no disadvantage.
`wide` is for the other experiments, with captioned pictures.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.corpus import IMAGES
from recipes.demo.corpus import SHARDS, build
from recipes.demo.pictures import MARKS, build_pairs
from zephon.keyed import make_key, permute

WEIGHTS = {"docs": 0.7, "code": 0.3}
HELD_OUT = 4
"""Of so many documents of each source one is kept back for evaluation."""


def recipe(folder: Path, template: str, lanes: int, seq_len: int, size: int) -> Path:
    """Write a recipe beside a corpus; its name says what it is."""
    kind = "images" if template is IMAGES else "text"
    path = folder / f"{kind}-{lanes}-{seq_len}-{size}.toml"
    path.write_text(template.format(lanes=lanes, seq_len=seq_len, size=size))
    return path


def order(folder: Path, megabytes: float) -> Path:
    """Texts of `megabytes` in all, 0.7 prose and 0.3 code, shuffled, and a third as much beside them held out.

    Writes `docs/` and `code/` with JSONL, `heldout/docs.jsonl`, `heldout/code.jsonl` and `tokenizer/`.
    """
    if _done(folder):
        return folder
    more = 1 + 1 / (HELD_OUT - 1)
    build(folder, megabytes * max(WEIGHTS.values()) * more, marks=MARKS)
    (folder / "heldout").mkdir()
    for name, weight in WEIGHTS.items():
        rows = _shuffled(list(_rows(folder / name)), name)
        rows = _cut(rows, megabytes * weight * more)
        kept = [row for number, row in enumerate(rows) if number % HELD_OUT]
        _write(folder / "heldout" / f"{name}.jsonl", rows[::HELD_OUT])
        for shard in range(SHARDS):
            _write(folder / name / f"shard-{shard}.jsonl", kept[shard::SHARDS])
    (folder / ".done").touch()
    return folder


def wide(folder: Path, megabytes: float, pictures: int) -> Path:
    """Texts of at most `megabytes` a source in `docs/` and `code/`, `pictures` captioned ones in `pairs/`."""
    if not _done(folder):
        build(folder, megabytes, marks=MARKS)
        build_pairs(folder / "pairs", pictures)
        (folder / ".done").touch()
    return folder


def documents(folder: Path, name: str) -> list[str]:
    """The held-out documents of a source."""
    lines = (folder / "heldout" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def _done(folder: Path) -> bool:
    """Whether a corpus is there; what an interrupted run left of it is removed."""
    if not (folder / ".done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        return False
    return True


def _rows(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.jsonl")):
        yield from file.read_text(encoding="utf-8").split("\n")[:-1]


def _shuffled(rows: list[str], name: str) -> list[str]:
    places = permute(len(rows), make_key("experiments", 7, name), np.arange(len(rows)))
    return [rows[place] for place in places]


def _cut(rows: list[str], megabytes: float) -> list[str]:
    """As many rows as make up a size."""
    sizes = np.cumsum([len(row.encode()) for row in rows])
    return rows[: int(np.searchsorted(sizes, megabytes * 1e6)) + 1]


def _write(file: Path, rows: list[str]) -> None:
    file.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
