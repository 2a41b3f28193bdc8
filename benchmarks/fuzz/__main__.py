"""Fuzzes everything that reads what others wrote: is anything lost in silence, does anything hang, crash or blow up?

    python -m benchmarks.fuzz [--minutes 30] [--engines hypothesis atheris random] [--workers 2] [--targets tar parquet]

A target builds a small file from bytes, reads it as a stream does, and compares with an oracle: Python's json, its
decompressors and tarfile, pyarrow, Pillow. Each has its share of the minutes of CPU, in processes of half a minute that
take the engines in turn; what kills one, hangs or takes too much is a finding with the input that did it.

Results are one JSON file in `--out`, findings with their smallest input in base64; it exits with 1 where there are any.
`--again FILE` runs the inputs of such a file once more.
"""

import base64
import importlib.util
import json
import mmap
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tyro

from benchmarks.fuzz import law
from benchmarks.fuzz.law import Finding
from benchmarks.fuzz.worker import ENGINES, HEAD, MOST_BYTES, TARGETS, find

SLICE_S, HANG_S = 30.0, 60.0
"""Seconds that one process is asked to run, and after which an input that is still running is a hang."""


@dataclass
class Args:
    minutes: float = 30.0
    """Of CPU, in all."""
    engines: tuple[str, ...] = ()
    """Some of hypothesis, atheris, random; those that are installed where none is named."""
    workers: int = len(os.sched_getaffinity(0))
    seed: int = 1
    targets: tuple[str, ...] = tuple(TARGETS)
    out: Path = Path(__file__).parent.parent / "results"
    again: Path | None = None
    """A file of results, whose inputs are run once more, and nothing else."""


@dataclass
class Total:
    """What one target has had so far."""

    cpu_s: float = 0.0
    planned_s: float = 0.0
    """CPU seconds, those of processes that still run included."""
    executions: dict[str, int] = field(default_factory=dict[str, int])
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict[tuple[str, str], Finding])
    slices: int = 0
    failed: int = 0
    """Processes in a row that did nothing."""


def main() -> None:
    args = tyro.cli(Args)
    if args.again:
        again(args.again)
        return
    wrong = {one for one in args.engines if one not in ENGINES or not _installed(one)} | {
        *args.targets
    } - TARGETS.keys()
    if wrong:
        sys.exit(f"{wrong}: engines are {ENGINES}, as far as installed; targets are {tuple(TARGETS)}.")
    engines = args.engines or tuple(one for one in ENGINES if _installed(one))
    totals, lock, started = {name: Total() for name in args.targets}, threading.Lock(), time.perf_counter()
    with ThreadPoolExecutor(args.workers) as pool, tempfile.TemporaryDirectory(dir=_memory()) as folder:
        for job in [pool.submit(work, args, engines, totals, lock, Path(folder)) for _ in range(args.workers)]:
            job.result()
    found = [one for total in totals.values() for one in total.findings.values()]
    report(args, engines, totals, time.perf_counter() - started)
    for one in found:
        print(f"{one.target}: {one.kind} at {one.where}: {one.message[:300]}")
    if found:
        sys.exit(f"{len(found)} findings.")


def work(args: Args, engines: tuple[str, ...], totals: dict[str, Total], lock: threading.Lock, folder: Path) -> None:
    """Run slice after slice of the target that lacks most, until every one has had its share."""
    share = 60 * args.minutes / len(totals)
    while True:
        with lock:
            name = min(totals, key=lambda one: totals[one].planned_s)
            total = totals[name]
            if total.planned_s >= share:
                return
            number, seconds = total.slices, max(2.0, min(SLICE_S, share - total.planned_s))
            total.slices, total.planned_s = number + 1, total.planned_s + seconds
        engine = engines[number % len(engines)]
        one = folder / f"{name}-{number}"
        one.mkdir()
        cpu_s, count, outcomes, findings = run(name, engine, seconds, args.seed * 1000 + number, one)
        with lock:
            total.cpu_s, total.planned_s = total.cpu_s + cpu_s, total.planned_s + cpu_s - seconds
            total.executions[engine] = total.executions.get(engine, 0) + count
            for outcome, times in outcomes.items():
                total.outcomes[outcome] = total.outcomes.get(outcome, 0) + times
            for finding in findings:
                key = finding.kind, finding.where
                if key not in total.findings or len(finding.data) <= len(total.findings[key].data):
                    total.findings[key] = finding
            total.failed = 0 if count else total.failed + 1
            if total.failed == 3:
                raise RuntimeError(f"{name} does not start: {(one / 'log').read_text()[-2000:]}")
        shutil.rmtree(one, ignore_errors=True)


def run(
    name: str, engine: str, seconds: float, seed: int, folder: Path
) -> tuple[float, int, dict[str, int], list[Finding]]:
    """One process: its CPU seconds, executions, outcomes and findings."""
    (folder / "current").write_bytes(bytes(HEAD.size + MOST_BYTES))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    command = [sys.executable, "-m", "benchmarks.fuzz.worker", name, engine, str(seconds), str(seed), str(folder)]
    root = Path(__file__).parent.parent.parent
    with (folder / "log").open("wb") as log, (folder / "current").open("rb") as file:
        shared = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=root, start_new_session=True
        )
        hung, deadline = False, time.monotonic() + 2 * seconds + 4 * HANG_S
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            _, began, _ = HEAD.unpack_from(shared)
            if not hung and ((began and time.monotonic() - began > HANG_S) or time.monotonic() > deadline):
                hung = True
                os.killpg(child.pid, signal.SIGKILL)
            time.sleep(0.1)
        child.returncode = os.waitstatus_to_exitcode(status)
        count, began, size = HEAD.unpack_from(shared)
        data = shared[HEAD.size : HEAD.size + size]
    found = folder / "found"
    findings = [Finding.parse(line) for line in found.read_text().splitlines()] if found.exists() else []
    if began and child.returncode:
        what = "hang" if hung else "killed"
        where = f"exit {child.returncode}" if hung else _last_words(folder / "log", child.returncode)
        findings.append(
            Finding(name, what, where, f"{engine}, {(folder / 'log').read_text(errors='replace')[-800:]}", data)
        )
    told, outcomes = folder / "told", dict[str, int]()
    for line in told.read_text().splitlines() if told.exists() else ():
        times, outcome = line.split("\t", 1)
        outcomes[outcome] = int(times)
    return usage.ru_utime + usage.ru_stime, count, outcomes, findings


def report(args: Args, engines: tuple[str, ...], totals: dict[str, Total], wall_s: float) -> None:
    """Write the results, and print them in short."""
    now = datetime.now(UTC)
    targets: dict[str, Any] = {}
    for name, one in totals.items():
        top = dict(sorted(one.outcomes.items(), key=lambda pair: (-pair[1], pair[0]))[:12])
        targets[name] = {
            "cpu_s": round(one.cpu_s, 1), "executions": one.executions, "findings": len(one.findings), "outcomes": top,
        }  # fmt: skip
        print(
            f"{name:14} {one.cpu_s:7.1f} CPU s {sum(one.executions.values()):9} executions {len(one.findings)} findings"
        )
    cpu_s = sum(one.cpu_s for one in totals.values())
    print(f"{cpu_s / 60:.1f} minutes of CPU in {wall_s / 60:.1f} minutes")
    result = {
        "theme": "fuzz", "when": now.isoformat(timespec="seconds"),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        "seed": args.seed, "engines": engines, "workers": args.workers, "cpu_minutes": round(cpu_s / 60, 2),
        "wall_minutes": round(wall_s / 60, 2), "targets": targets,
        "findings": [
            {**one._asdict(), "data": base64.b64encode(one.data).decode()}
            for total in totals.values() for one in total.findings.values()
        ],
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    at = args.out / f"fuzz_{now:%Y-%m-%d}.json"
    at.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {at}")


def again(at: Path) -> None:
    """Run the inputs of a file of results once more, each in this process."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        for one in json.loads(at.read_text())["findings"]:
            data = base64.b64decode(one["data"])
            outcome, finding = law.broken(one["target"], find(one["target"]), data, Path(folder), law.peak())
            print(f"{one['target']}: {one['kind']} at {one['where']}: now {finding or outcome}", flush=True)


def _installed(engine: str) -> bool:
    return engine == "random" or importlib.util.find_spec(engine) is not None


def _memory() -> str | None:
    """Files in memory are the quickest, and no disk is worn."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _last_words(log: Path, code: int) -> str:
    """How a process ended, and the last line it wrote: which tells one crash from another."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit {code}: {lines[-1][:100] if lines else ''}"


if __name__ == "__main__":
    main()
