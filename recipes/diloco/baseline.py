"""Synchronous data-parallel training under the same faults, with TorchTitan: what one does without decoupled learners.

Elastic: when a rank dies the job is formed again at once with the ranks that are left, from the last checkpoint; when
the machine is back and the job has made a step, it saves, stops, and is formed again with all. Plain: it waits until
the machine is back. Zephon's loader gives both the same global batches on any number of ranks.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from recipes.diloco.client import idle
from recipes.diloco.faults import Fault
from recipes.diloco.processes import die_with_parent
from recipes.diloco.titan_island import TimedLog
from recipes.titan_text import micro
from zephon.command.rehearse import process_tree
from zephon.titan import Trainer

_TICK = 0.03


class PacedTrainer(Trainer):
    """A trainer whose steps take a least time, shared among the ranks that there are."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator: Any) -> None:
        began = time.monotonic()
        super().train_step(data_iterator)
        whole = float(os.environ["DILOCO_PACE"]) * int(os.environ["DILOCO_RANKS"])
        idle(began + whole / int(os.environ["WORLD_SIZE"]) - time.monotonic())


def paced() -> PacedTrainer.Config:
    """The micro run of `recipes.titan_text`, paced, with a save every `DILOCO_SAVE` steps."""
    base = micro()
    made = PacedTrainer.Config(**{one.name: getattr(base, one.name) for one in fields(base)})
    made.metrics = TimedLog.Config(log_freq=1, disable_color_printing=True)
    made.debug = replace(base.debug, seed=7)
    made.checkpoint = replace(base.checkpoint, interval=int(os.environ["DILOCO_SAVE"]), keep_latest_k=2)
    made.ledger = False
    return made


@dataclass
class DataParallel:
    """One synchronous run.

    Attributes:
        folder: where it lives.
        recipe: its data.
        assets: folder of the tokenizer.
        ranks: when all are there.
        training: fields of TorchTitan's `training` section.
        pace: least seconds of a step with all ranks.
        save: steps between checkpoints.
        elastic: whether it goes on with fewer ranks.
    """

    folder: Path
    recipe: Path
    assets: Path
    ranks: int
    training: dict[str, Any]
    pace: float
    save: int
    elastic: bool

    def run(self, faults: list[Fault], seconds: float) -> int:
        """Run for `seconds` after the first step, under faults.

        Returns:
            How often the whole job stood still.
        """
        self.folder.mkdir(parents=True)
        job, stops, back, made = self._start(self.ranks), 0, 0.0, 0
        while not self._steps():
            if job.poll() is not None:
                raise RuntimeError(f"The job ended before its first step; see {self.folder}/log.txt.")
            time.sleep(_TICK)
        began, waiting, slow = time.monotonic(), list(faults), (0, 0.0)
        try:
            while (now := time.monotonic()) < began + seconds:
                if waiting and now >= began + waiting[0].at / 1e6:
                    fault = waiting.pop(0)
                    until = now + fault.lasting / 1e6
                    if fault.kind == "kill":
                        self._kill_rank(job, fault.learner)
                        job.wait()
                        stops, back = stops + 1, until
                        if self.elastic:
                            job, made = self._start(self.ranks - 1), self._steps()
                    else:
                        slow = (fault.learner, until)
                if back and now >= back and (not self.elastic or self._steps() > made):
                    back = 0.0
                    if self.elastic:  # room for the machine that is back
                        _end(job)
                        stops += 1
                    job = self._start(self.ranks)
                self._drag(job, *slow, now)
                time.sleep(_TICK)
        finally:
            _kill(job)
        return stops

    def _steps(self) -> int:
        log = self.folder / "loss.jsonl"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def _start(self, ranks: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "recipes.diloco.baseline", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=localhost:0", "-m", "torchtitan.train", "--module", "recipes.diloco.baseline"]
        command += ["--config", "paced", "--dump_folder", str(self.folder), "--dataloader.recipe", str(self.recipe)]
        command += ["--hf_assets_path", str(self.assets)]
        command += [word for name, value in self.training.items() for word in (f"--training.{name}", str(value))]
        ours = {"DILOCO_PACE": str(self.pace), "DILOCO_RANKS": str(self.ranks), "DILOCO_SAVE": str(self.save)}
        environment = os.environ | ours | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _drag(self, job: subprocess.Popen[bytes], rank: int, until: float, now: float) -> None:
        """Stop a rank two thirds of the time."""
        ranks = _ranks(job) if until else []
        if rank < len(ranks):
            stopped = now < until and int(now / _TICK) % 3
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[rank], signal.SIGSTOP if stopped else signal.SIGCONT)

    def _kill_rank(self, job: subprocess.Popen[bytes], rank: int) -> None:
        ranks = _ranks(job)
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(ranks[min(rank, len(ranks) - 1)], signal.SIGKILL)
        if not ranks:  # still starting
            _kill(job)


def _ranks(job: subprocess.Popen[bytes]) -> list[int]:
    """Processes of the ranks, in the order in which they were started."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def _end(job: subprocess.Popen[bytes]) -> None:
    """Have a job save at its next step and stop; killed where it does not within a minute."""
    for pid in _ranks(job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGTERM)
    try:
        job.wait(60)
    except subprocess.TimeoutExpired:
        _kill(job)


def _kill(job: subprocess.Popen[bytes]) -> None:
    for pid in reversed(process_tree(job.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait()


if __name__ == "__main__":  # torchrun, which dies with whoever started it
    die_with_parent()
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *sys.argv[1:]])
