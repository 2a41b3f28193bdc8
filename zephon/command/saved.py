"""States in a folder, for runs without TorchTitan's checkpointer: one folder a step, one file a key.

Ranks write into the same folder at once, each the lanes it owns; what they share, the header, is the same bytes. A step
counts once all its files are there, so a save that was killed half-way is passed over for the one before.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from zephon.errors import UsageError
from zephon.loader import Loader
from zephon.state import HEADER, lane_key


def write_state(loaders: Sequence[Loader], folder: Path) -> None:
    """Keep the state of some ranks of a run."""
    at = folder / f"step-{loaders[0].step}"
    at.mkdir(parents=True, exist_ok=True)
    for loader in loaders:
        for key, raw in loader.state_dict().items():
            private = at / f".{key}.{os.getpid()}"
            try:
                with private.open("wb") as file:
                    file.write(raw)
                    file.flush()
                    os.fsync(file.fileno())
                private.replace(at / key)
            finally:
                private.unlink(missing_ok=True)


def read_state(folder: Path) -> dict[str, bytes]:
    """The latest complete state in a folder.

    Raises:
        UsageError: there is none.
    """
    steps = [
        (int(found[1]), path) for path in folder.glob("step-*") if (found := re.fullmatch(r"step-(\d+)", path.name))
    ]
    for _, path in sorted(steps, reverse=True):
        files = {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".")}
        if _complete(files):
            return files
    raise UsageError(f"{folder} holds no complete state: no folder step-N in it has {HEADER!r} and every lane.")


def _complete(files: dict[str, bytes]) -> bool:
    try:
        lanes = int(json.loads(files[HEADER])["lanes"])
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError):
        return False
    return all(lane_key(lane) in files for lane in range(lanes))
