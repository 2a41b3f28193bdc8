"""Jobs of the experiments: TorchTitan under torchrun, and results that are made once, so that a run can go on."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = "ZEPHON_EXPERIMENT"
"""Environment variable that names the folder of the corpus to a job."""

REPOSITORY = Path(__file__).parents[2]


class JobFailedError(RuntimeError):
    """A training job ended with another exit code than 0; holds the end of its log."""


def once(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `file` holds, or what `make` gives, which is then written to it: a result is there whole or not at all."""
    if not file.exists():
        result = make()
        file.parent.mkdir(parents=True, exist_ok=True)
        half = file.with_suffix(".half")
        half.write_text(json.dumps(result))
        half.rename(file)
        print(f"done: {file.stem}", flush=True)
    return json.loads(file.read_text())


def environment(**more: str) -> dict[str, str]:
    """Of every process: one thread each, since ranks share the cores, and nothing from the network."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


def train(folder: Path, data: Path, ranks: int, config: str, *options: object) -> str:
    """Run one job of `runs.py` on `ranks` processes to its end, from whatever checkpoint `folder` holds.

    Returns:
        Its log.

    Raises:
        JobFailedError: it did not end well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "-m", "torchtitan.train", "--module", "benchmarks.experiments.runs"]
    command += ["--config", config, "--dump_folder", str(folder), *map(str, options)]
    file = folder / "log.txt"
    with file.open("wb") as log:
        code = subprocess.call(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environment(**{DATA: str(data)})
        )
    text = file.read_text(errors="replace")
    if code:
        said = f"{' '.join(command[4:])} ended with exit code {code}; its log, {file}, ends in\n{text[-3000:]}"
        raise JobFailedError(said)
    return text


def start_from(checkpoint: Path, folder: Path) -> Path:
    """An empty folder for a run, but for a checkpoint `.../step-N` that it starts from."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkpoint, folder / "checkpoint" / checkpoint.name)
    return folder


def lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def rows(folder: Path) -> dict[str, str]:
    """For a run of the stock loader, a digest of every step over its rows in any order: other places do not count."""
    found: dict[str, list[str]] = {}
    for file in sorted((folder / "rows").glob("*.jsonl")):
        for line in lines(file):
            found.setdefault(str(line["step"]), []).extend(line["rows"])
    return {step: hashlib.sha256("".join(sorted(mine)).encode()).hexdigest() for step, mine in found.items()}
