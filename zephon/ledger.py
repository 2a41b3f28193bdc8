"""Ledgers: which batches a run saw, one JSON object a line, and how two runs compare.

A line is `{"step": t, "lanes": {"00000": "<sha256>", ...}}`, with the `"sha256"` of the step where all lanes are known.
A run of many ranks writes one file a rank into a folder; each holds the lanes of its rank. A run that was killed and
resumed appends to its files: a step may stand there twice, and both must agree.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from zephon.digest import step_digest
from zephon.errors import UsageError

Steps = dict[int, dict[str, str]]

_START = b'{"step": '  # every line of a ledger


class LedgerWriter:
    """Appends to one file of a ledger.

    Args:
        path: the file; folders are made. A line that a killed run left half written is cut off.

    Raises:
        UsageError: the file is there and is no ledger.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("a+b")
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        if not _START.startswith(self._file.read(len(_START))):
            self._file.close()
            raise UsageError(f"{path} is there and is no ledger; it is left as it is. Choose another file.")
        self._file.truncate(end - _torn(self._file, end))

    def write(self, step: int, lanes: Mapping[int, bytes], *, whole: bool = False) -> None:
        """Add a step; `whole` says that `lanes` are all there are. On disk, as far as this process goes, on return."""
        self._file.write((json.dumps(ledger_line(step, lanes, whole=whole)) + "\n").encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def ledger_line(step: int, lanes: Mapping[int, bytes], *, whole: bool) -> dict[str, Any]:
    """One step as a ledger says it."""
    digest = {"sha256": step_digest(lanes)} if whole else {}
    return {"step": step, **digest, "lanes": {f"{lane:05d}": lanes[lane].hex() for lane in sorted(lanes)}}


def read_ledger(path: Path) -> Steps:
    """Lane digests by step, from a file or from all files of a folder.

    Raises:
        UsageError: nothing there, a line is damaged, or two lines disagree on a lane of a step.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise UsageError(f"{path} is neither a ledger file nor a folder with *.jsonl ledgers.")
    steps: Steps = {}
    for file in files:
        for step, lanes in _lines(file):
            known = steps.setdefault(step, {})
            for lane, digest in lanes.items():
                if known.setdefault(lane, digest) != digest:
                    raise UsageError(
                        f"{path} holds two digests for lane {lane} of step {step}: {known[lane]} and {digest}. Two "
                        "runs wrote to it, or a resume gave other data."
                    )
    return steps


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two ledgers compare.

    Attributes:
        compared: steps that both hold.
        step: first of them that differs, or None.
        lanes: the lanes that differ in it.
        only: steps that only one of them holds.
        lacking: whether these lanes differ only in that one ledger lacks them.
        incomplete: steps of both in which lanes are missing that other steps have.
    """

    compared: int
    step: int | None
    lanes: list[str]
    only: int
    lacking: bool
    incomplete: int


def compare_ledgers(a: Steps, b: Steps) -> Comparison:
    """Find the first step and the lanes in which two ledgers differ; a lane that one of them lacks differs."""
    both = sorted(a.keys() & b.keys())
    only = len(a.keys() ^ b.keys())
    known = {lane for steps in (a, b) for lanes in steps.values() for lane in lanes}
    every = {f"{lane:05d}" for lane in range(max(map(int, known), default=-1) + 1)}
    incomplete = sum(not (every and every <= a[step].keys() | b[step].keys()) for step in both)
    for step in both:
        lanes = sorted(lane for lane in a[step].keys() | b[step].keys() if a[step].get(lane) != b[step].get(lane))
        if lanes:
            lacking = not any(lane in a[step] and lane in b[step] for lane in lanes)
            return Comparison(len(both), step, lanes, only, lacking, incomplete)
    return Comparison(len(both), None, [], only, False, incomplete)


def _lines(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    raw = file.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]  # a killed run may leave half a line
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            value = json.loads(line)
            step, lanes = int(value["step"]), {f"{int(lane):05d}": str(one) for lane, one in value["lanes"].items()}
            digest = step_digest({int(lane): bytes.fromhex(one) for lane, one in lanes.items()})
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise UsageError(
                f"{file}, line {number} is no line of a ledger with lanes. Ledgers come from training ranks, from "
                "zephon run --ledger, or from zephon digest --lanes."
            ) from error
        if value.get("sha256", digest) != digest:
            raise UsageError(f"{file}, line {number}: the sha256 of the step is not that of its lanes. It was changed.")
        yield step, lanes


def _torn(file: IO[bytes], end: int) -> int:
    """Bytes behind the last line end."""
    tail = 0
    while tail < end:
        size = min(65536, end - tail)
        file.seek(end - tail - size)
        at = file.read(size).rfind(b"\n")
        if at >= 0:
            return tail + size - at - 1
        tail += size
    return tail
