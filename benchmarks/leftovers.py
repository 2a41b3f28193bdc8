"""What outlives a run that was killed: processes, memory files, names in shared memory, temporary files.

Processes of a run carry a mark in their environment, so that none is missed, whoever started it.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "ZEPHON_KILLS"
"""Environment variable of every process of a run: its folder."""


def what_is_left(folder: Path, shared: dict[str, int]) -> list[str]:
    """What outlives a run, by name; processes get 15 s to end, and are killed when they have been noted."""
    deadline = time.monotonic() + 15
    while marked(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [*ended(folder), *(f"temporary file {one}" for one in files_below(folder / "tmp"))]
    return left + [f"shared memory {name}" for name in names_left(shared)]


def names_left(shared: dict[str, int]) -> list[str]:
    """New names in shared memory, but those that other processes have mapped: they are none of ours."""
    new = shared_memory().items() - shared.items()
    others = (one.name for one in Path("/proc").glob("[0-9]*") if one.name != str(os.getpid()))
    maps = b"\n".join(proc(pid, "maps") for pid in others).splitlines()
    held = {int(line.split()[4]) for line in maps if b"/dev/shm/" in line}
    return [name for name, file in new & shared_memory().items() if file not in held]


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}


def shared_memory() -> dict[str, int]:
    """Names and the files behind them, by which mappings are told: a semaphore is mapped before it has its name."""
    return {one.name: one.inode() for one in os.scandir("/dev/shm")}


def marked(folder: Path) -> list[int]:
    """The living processes of all runs in or below a folder."""
    mark = f"{MARK}={folder}".encode()
    return [int(one.name) for one in Path("/proc").glob("[0-9]*") if mark in proc(one.name, "environ")]


def ended(folder: Path) -> list[str]:
    """Kill what still runs in or below a folder, and name it."""
    names = list[str]()
    for pid in marked(folder):
        words = " ".join(proc(pid, "cmdline").decode(errors="replace").split("\0")[1:4])
        names.append(f"process {words}, which holds {proc(pid, 'maps').count(b'memfd:zephon')} memory files")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return names


def children(pid: int, word: str) -> list[int]:
    """The children that the first thread of a process has started, oldest first, whose commands have a word in them."""
    every = map(int, proc(pid, f"task/{pid}/children").split())
    return [one for one in every if word.encode() in proc(one, "cmdline").replace(b"\0", b" ")]


def proc(pid: int | str, name: str) -> bytes:
    """What the kernel says of a process; nothing of one that has gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
