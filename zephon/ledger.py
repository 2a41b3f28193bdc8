"""Ledgers: which batches a run saw, one JSON object a line, and how two runs compare.

A line is `{"step": t, "lanes": {"00000": "<sha256>", ...}}`, with the `"sha256"` of the step where all lanes are known.
A run of many ranks writes one file a rank into a folder; each holds the lanes of its rank. A run that was killed and
resumed appends to its files: a step may stand there twice, and both must agree. The first line of every start holds
`"run"`: when it was, in Unix seconds, and the history of the state (what was allowed, `restore.py`). Where histories
part, steps were taken again with other data on purpose: those of the latest start count, the others are passed over.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from zephon.digest import step_digest
from zephon.errors import UsageError
from zephon.restore import HISTORY
from zephon.run.lines import LineWriter, read_lines

Steps = dict[int, dict[str, str]]


class LedgerWriter:
    """Appends to one file of a ledger.

    Args:
        path: the file; folders are made. A line that a killed run left half written is cut off.

    Raises:
        UsageError: the file is there and is no ledger.
    """

    def __init__(self, path: Path) -> None:
        self._lines, self._run = LineWriter(path, "ledger", b'{"step": ', _parse), dict[str, Any]()

    def begin(self, header: bytes) -> None:
        """Say from which state a run goes on, or starts, by its header; `write` notes it with the next step."""
        self._run = {"run": {"started": time.time(), "history": json.loads(header).get(HISTORY, [])}}

    def write(self, step: int, lanes: Mapping[int, bytes], *, whole: bool = False) -> None:
        """Add a step; `whole` says that `lanes` are all there are. On disk, as far as this process goes, on return."""
        self._lines.write([{**ledger_line(step, lanes, whole=whole), **self._run}])
        self._run = {}

    def close(self) -> None:
        self._lines.close()


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
    found: dict[tuple[int, str], dict[str, str]] = {}
    started, last = 0.0, _Past()
    for file in files:
        past = _Past()
        for step, lanes, run in read_lines(file, _parse):
            if run:
                past = run[1]
                started, last = max((started, last), run, key=itemgetter(0))
            known = found.setdefault((step, past.before(step)), {})
            for lane, digest in lanes.items():
                if known.setdefault(lane, digest) != digest:
                    raise UsageError(
                        f"{path} holds two digests for lane {lane} of step {step}: {known[lane]} and {digest}. Two "
                        "runs wrote to it, or a resume gave other data."
                    )
    return {step: lanes for (step, past), lanes in found.items() if past == last.before(step)}


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


class _Past(tuple[tuple[int, str], ...]):
    """What a run had allowed, and after which step."""

    def before(self, step: int) -> str:
        return "".join(change for after, change in self if after < step)


def _parse(line: bytes) -> tuple[int, dict[str, str], tuple[float, _Past] | None]:
    """Step, lanes, and what run goes on with this line."""
    try:
        value = json.loads(line)
        step, lanes = int(value["step"]), {f"{int(lane):05d}": str(one) for lane, one in value["lanes"].items()}
        digest = step_digest({int(lane): bytes.fromhex(one) for lane, one in lanes.items()})
        run = value.get("run")
        past = run and _Past((int(one["step"]), json.dumps(one, sort_keys=True)) for one in run["history"])
        begun = run and (float(run["started"]), past)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(
            "is no line of a ledger with lanes. Ledgers come from training ranks, from zephon run --ledger, or from "
            "zephon digest --lanes."
        ) from error
    if value.get("sha256", digest) != digest:
        raise UsageError("holds a sha256 of the step that is not that of its lanes. It was changed.")
    return step, lanes, begun
