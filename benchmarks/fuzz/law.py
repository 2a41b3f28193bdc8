"""What every target must keep to, whatever the bytes: the check of one execution, and of what it raises."""

import json
import resource
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zephon.errors import ZephonError

CPU_S, MEMORY = 10.0, 256 * 1024**2
"""Most that one input of a few KiB may take: seconds of CPU, and bytes above what the process had at its start."""

Target = Callable[[bytes, Path], str]
"""Does one execution in a folder of its own; returns what came of it in a word. Anything raised is a finding."""


class LossError(AssertionError):
    """Something was lost, invented, counted twice or not named."""


class Finding(NamedTuple):
    """An input that broke the law.

    Attributes:
        target: what it was given to.
        kind: a class of exception, or "hang", "killed", "slow", "memory".
        where: the innermost line of ours, which tells one finding from another.
        message: what was said.
        data: the input.
    """

    target: str
    kind: str
    where: str
    message: str
    data: bytes

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps({**self._asdict(), "data": self.data.hex()}) + "\n"

    @staticmethod
    def parse(line: str) -> "Finding":
        """The inverse of `line`."""
        values = json.loads(line)
        return Finding(**{**values, "data": bytes.fromhex(values["data"])})


def peak() -> int:
    """Most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refused(error: ZephonError, path: Path) -> str:
    """The kind of a refusal; it must name the file.

    Raises:
        LossError: it does not.
    """
    if str(path) not in str(error):
        raise LossError(f"a refusal that does not name its file: {type(error).__name__}: {error}") from error
    return f"refused: {type(error).__name__}"


def equal(what: str, ours: object, theirs: object) -> None:
    """Compare with the oracle.

    Raises:
        LossError: they differ; says both.
    """
    if ours != theirs:
        raise LossError(f"{what}: {ours!r:.600} where the oracle has {theirs!r:.600}")


def broken(name: str, target: Target, data: bytes, folder: Path, base: int) -> tuple[str, Finding | None]:
    """Run one input; what came of it, and the finding if it broke the law.

    Args:
        name: of the target.
        target: what is run.
        data: the input.
        folder: a folder of its own.
        base: bytes in memory at the start.
    """
    before, start = peak(), time.process_time()
    try:
        outcome = target(data, folder)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return "finding", Finding(name, type(error).__name__, _where(error), str(error)[:2000], data)
    took, after = time.process_time() - start, peak()
    if took > CPU_S:
        return "finding", Finding(name, "slow", outcome, f"{took:.1f} s of CPU, {CPU_S} are allowed", data)
    if after > before and after - base > MEMORY:
        told = f"{(after - base) >> 20} MiB above the start, {MEMORY >> 20} are allowed"
        return "finding", Finding(name, "memory", outcome, told, data)
    return outcome, None


def shrunk(finding: Finding, target: Target, folder: Path, base: int, seconds: float = 5.0) -> Finding:
    """The same finding with a smaller input: runs of bytes left out, then bytes made 0, while it stays the same."""
    end, best = time.monotonic() + seconds, finding
    if finding.kind in ("slow", "memory"):
        return best

    def better(data: bytes) -> bool:
        nonlocal best
        found = broken(best.target, target, data, folder, base)[1] if time.monotonic() < end else None
        if found and (found.kind, found.where) == (best.kind, best.where):
            best = found
            return True
        return False

    size = len(best.data) // 2
    while size:
        at = 0
        while at < len(best.data):
            if not better(best.data[:at] + best.data[at + size :]):
                at += size
        size //= 2
    for at in range(len(best.data)):
        if best.data[at]:
            better(best.data[:at] + b"\0" + best.data[at + 1 :])
    return best


def _where(error: BaseException) -> str:
    """The innermost frame of ours, and the kinds of errors that led there."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames if "/zephon/" in one.filename or "/modalities/" in one.filename][-1:]
    test = [one for one in frames if "/benchmarks/fuzz/" in one.filename and not one.filename.endswith("law.py")][-1:]
    return " < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in (*ours, *test) or frames[-1:])
