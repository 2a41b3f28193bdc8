"""States in a folder, for runs without TorchTitan's checkpointer: one folder a step, one file a key.

Ranks write into the same folder at once, each the lanes it owns; what they share, the header, is the same bytes. A step
counts once all its files are there, those of one save, so a save that was killed half-way is passed over for the one
before.
"""

import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from zephon.errors import UsageError
from zephon.loader import Loader
from zephon.run.lines import naming
from zephon.state import HEADER, lane_key, tag_of

logger = logging.getLogger(__name__)


def write_state(loaders: Sequence[Loader], folder: Path) -> None:
    """Keep the state of some ranks of a run."""
    at = folder / f"step-{loaders[0].step}"
    at.mkdir(parents=True, exist_ok=True)
    for loader in loaders:
        for key, raw in loader.state_dict().items():
            with naming(at / key):
                _keep(at / key, raw)


def _keep(at: Path, raw: bytes) -> None:
    """Write a file that is there whole or not at all; while it is written it has no name that a kill could leave.

    Only where other bytes are there already, or where the file system has no files without names, is it renamed.
    """
    private, folder, fd = at.with_name(f".{at.name}.{os.getpid()}"), os.open(at.parent, os.O_RDONLY | os.O_CLOEXEC), -1
    try:
        try:
            fd = os.open(at.parent, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o666)
        except OSError:
            fd = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with open(fd, "wb", closefd=False) as file:
            file.write(raw)
        os.fsync(fd)
        if not private.exists() and not _named(fd, at.name, folder):
            if at.read_bytes() == raw:
                return
            _named(fd, private.name, folder)
        if private.exists():
            private.replace(at)
    finally:
        os.close(folder)
        if fd >= 0:
            os.close(fd)
        private.unlink(missing_ok=True)


def _named(fd: int, name: str, folder: int) -> bool:
    """Give an open file a name; False where that is taken. Only where a folder is named does Python follow links."""
    try:
        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        return False
    return True


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
        logger.warning("%s lacks files, or mixes those of two saves: passed over.", path)
    raise UsageError(
        f"{folder} holds no complete state: no folder step-N in it has {HEADER!r} and every lane, written by one save."
    )


def _complete(files: dict[str, bytes]) -> bool:
    try:
        lanes = int(json.loads(files[HEADER])["lanes"])
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError):
        return False
    tag = tag_of(files[HEADER])  # which lanes begin with; what is damaged is not passed over, but refused
    return all(files.get(lane_key(lane), b"").startswith(tag) for lane in range(lanes))
