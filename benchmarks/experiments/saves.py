"""4. What resilience costs: bytes of state, time to save and to restore, by steps, lanes and images, beside peers.

A step is 8 sequences of 256 positions, or one of each lane where there are more lanes. Saving is `state_dict()` or what
a peer calls it; its bytes are those of the values, pickled where they are no bytes. Restoring is from nothing but an
open tokenizer to the first batch, and `fresh` the same without a state.

Decided before anything was measured: our state at the last step is at most twice that at the first one, and so is the
time to restore, or it is under half a second.
"""

import json
import statistics
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.corpus import IMAGES, TEXT
from benchmarks.experiments import data, jobs
from benchmarks.peers import venvs
from benchmarks.peers.__main__ import convert
from benchmarks.state import first_batch
from zephon import Stream
from zephon.digest import lane_digest
from zephon.loader import Loader

SEQ_LEN, BATCH = 256, 8
PEERS = {
    "stock": "", "stock, images": "", "zephon 0.2.0": "zephon", "grain": "grain",
    "datasets": "datasets", "mosaic": "mosaic", "litdata": "litdata", "energon": "energon",
}  # fmt: skip
"""What is measured beside ours, and in which environment of `benchmarks/peers`; "" is our own. TorchTitan's packing of
images is left out: it gives no sequence before the data ends (see there)."""


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    steps: tuple[int, ...]
    lanes: tuple[int, ...]
    image_steps: tuple[int, ...]
    image_lanes: tuple[int, ...]
    megabytes: float
    pictures: int
    repeats: int = 5


QUICK = Sizes((2, 20), (1, 8), (2, 6), (8,), 0.5, 64, repeats=3)
FULL = Sizes((10, 100, 1000), (1, 8, 64, 256), (10, 100), (1, 8, 64), 8.0, 960)


def measure(out: Path, sizes: Sizes, peers: bool) -> dict[str, Any]:
    """Measure what is not there yet; returns a row for every loader and step, and the verdicts."""
    corpus = data.wide(out / "corpus", sizes.megabytes, sizes.pictures)
    rows: list[dict[str, Any]] = []
    for kind, template, every, steps in (
        ("text", TEXT, sizes.lanes, sizes.steps), ("images", IMAGES, sizes.image_lanes, sizes.image_steps),
    ):  # fmt: skip
        for lanes in every:
            recipe = data.recipe(corpus, template, lanes, SEQ_LEN, max(BATCH, lanes))
            file = out / "results" / f"ours-{kind}-{lanes}.json"
            rows += jobs.once(file, partial(ours, recipe, kind, lanes, steps, sizes.repeats))["rows"]
    files = places(out, corpus)
    for name, venv in PEERS.items():
        if peers or not venv:
            file = out / "results" / f"{name.replace(', ', '-').replace(' ', '-')}.json"
            rows += jobs.once(file, partial(peer, name, venv, files, sizes))["rows"]
    first, last = ({key(row): row for row in rows if row["loader"] == "ours" and row["step"] == step(sizes, row, at)}
                   for at in (0, -1))  # fmt: skip
    verdicts = {
        "our state does not grow with steps": all(
            last[one]["state_bytes"] <= 2 * first[one]["state_bytes"] for one in first
        ),
        "our restore does not grow with steps": all(
            last[one]["restore_s"] <= max(0.5, 2 * first[one]["restore_s"]) for one in first
        ),
    }
    return {"verdicts": verdicts, "rows": rows}


def key(row: dict[str, Any]) -> tuple[str, int]:
    return row["kind"], row["lanes"]


def step(sizes: Sizes, row: dict[str, Any], at: int) -> int:
    return (sizes.steps if row["kind"] == "text" else sizes.image_steps)[at]


def ours(recipe: Path, kind: str, lanes: int, steps: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Our loader, all lanes on one rank."""
    rows: list[dict[str, Any]] = []
    with Stream.open(recipe) as stream:
        loader = stream.loader()
        fresh = first_batch(stream, None, 1, repeats)["wall"]
        for step in steps:
            while loader.step < step:
                next(loader)
            state, took = loader.state_dict(), list[float]()
            for _ in range(repeats):
                started = time.perf_counter()
                loader.state_dict()
                took.append(time.perf_counter() - started)
            rows.append({
                "loader": "ours", "kind": kind, "lanes": lanes, "step": step, "save_ms": 1e3 * statistics.median(took),
                "state_bytes": sum(map(len, state.values())), "fresh_s": fresh,
                "restore_s": first_batch(stream, state, 1, repeats)["wall"],
                "exact": goes_on(stream, loader, state),
            })  # fmt: skip
    return {"rows": rows}


def goes_on(stream: Stream, loader: Loader, state: dict[str, bytes]) -> bool:
    """Whether a loader from a state gives the records next that the loader itself gives."""
    resumed = stream.loader()
    resumed.load_state_dict(state)
    mine, its = (
        {lane: lane_digest(records) for lane, records in one.step_records().items()} for one in (loader, resumed)
    )
    return mine == its


def places(out: Path, corpus: Path) -> dict[str, str]:
    """The corpus as files of one folder, and in formats of peers that read no JSONL, which are made when asked for."""
    flat = out / "jsonl"
    flat.mkdir(parents=True, exist_ok=True)
    for name in data.WEIGHTS:
        for file in (corpus / name).glob("*.jsonl"):
            link = flat / f"{name}-{file.name}"
            link.unlink(missing_ok=True)
            link.symlink_to(file)
    return {"jsonl": str(flat), "tar": str(corpus / "pairs"), "tokenizer": str(corpus / "tokenizer")}


def peer(name: str, venv: str, files: dict[str, str], sizes: Sizes) -> dict[str, Any]:
    """One peer, in a process of its environment.

    Raises:
        JobFailedError: it did not end well.
    """
    if venv:
        venvs.build(venv)
    kind = {"mosaic": "mds", "litdata": "litdata", "energon": "energon"}.get(name, "parquet")
    work = {**files, "peer": name, "seq_len": SEQ_LEN, "batch": BATCH, "repeats": sizes.repeats}
    work["data"] = convert(venv if kind != "parquet" else "", kind, files["jsonl"])
    work["steps"] = sizes.image_steps if "images" in name else sizes.steps
    environment = jobs.environment(PYTHONPATH=str(jobs.REPOSITORY / "benchmarks" / "peers"))
    command = [venvs.python_of(venv), Path(__file__).with_name("peer_saves.py"), json.dumps(work)]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=venvs.ROOT, check=False, timeout=900
    )
    if ended.returncode:
        raise jobs.JobFailedError(f"{name} ended with exit code {ended.returncode}:\n{ended.stderr[-3000:]}")
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"step"')]
    kind = "images" if "images" in name else "text"
    return {"rows": [{"loader": name, "kind": kind, "lanes": 1, **row} for row in rows]}
