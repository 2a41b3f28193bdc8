"""Real processes on one machine: a syncer and its learners, started, watched, started again.

    python -m recipes.diloco.processes RUN                 # the whole run
    python -m recipes.diloco.processes syncer RUN          # its parts, as the line above starts them
    python -m recipes.diloco.processes learner RUN NUMBER

No process outlives the one that started it, whatever kills that.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from recipes.diloco.client import CONNECT, NotWelcomeError, RunOverError, SocketClient
from recipes.diloco.learner import Island, Learner
from recipes.diloco.ranks import follow, lead_out
from recipes.diloco.run import Run
from recipes.diloco.server import Server
from zephon.errors import UsageError

_PR_SET_PDEATHSIG = 1
_LIMIT = 600.0  # seconds that a run may take
_AGAIN = 0.2  # seconds between two tries to join
_LAST = 30.0  # seconds that a learner may take to end behind the run
_SOON, _FAILURES = 120.0, 3  # a learner that fails so soon after so many starts fails for a reason of its own

_USAGE, _ERROR = 2, "error: "

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a trainer of this process, or torchrun around it, has set: learners would take themselves for its ranks."""


def die_with_parent() -> None:
    """Have the kernel kill this process, even a stopped one, when its parent is gone (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it went before we asked
        sys.exit(1)


class Processes:
    """The processes of a run. A context manager: on leaving it, none is left.

    Args:
        run: the run; its folder must be new.
    """

    def __init__(self, run: Run) -> None:
        run.save()
        (run.folder / "log").mkdir(exist_ok=True)
        self.run = run
        self.syncer = self._start("syncer", ["syncer", str(run.folder)])
        self.learners: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, learner: int, port: int | None = None) -> subprocess.Popen[bytes]:
        """Start a learner, for the first time or again; `port` stands in for the syncer's own."""
        command = ["learner", str(self.run.folder), str(learner), *([str(port)] if port else [])]
        self.learners[learner] = self._start(f"learner_{learner}", command)
        return self.learners[learner]

    def kill(self, learner: int) -> None:
        """SIGKILL, and wait until it is dead."""
        self.learners[learner].kill()
        self.learners[learner].wait()

    def wait(self, seconds: float = _LIMIT) -> None:
        """Wait for the end of the run; learners that then hang are killed.

        Raises:
            TimeoutError: it did not end in time.
            UsageError: the syncer could not begin as it was told to.
            RuntimeError: the syncer failed.
        """
        try:
            code = self.syncer.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"The run in {self.run.folder} did not end within {seconds:.0f} s.") from None
        for one in self.learners.values():
            try:
                one.wait(_LAST)
            except subprocess.TimeoutExpired:  # stopped, say: the run has ended without it
                one.kill()
                one.wait()
        self.refuse("syncer", code)
        if code:
            raise RuntimeError(f"The syncer ended with {code}: {self.log('syncer')[-2000:]}")

    def log(self, name: str) -> str:
        """What a process has said."""
        return (self.run.folder / "log" / f"{name}.txt").read_text()

    def refuse(self, name: str, code: int | None) -> None:
        """Raise the UsageError with which a process has ended."""
        if code == _USAGE:
            raise UsageError(self.log(name).rpartition(_ERROR)[2].strip())

    def stop(self) -> None:
        """Kill what still runs."""
        for one in (self.syncer, *self.learners.values()):
            if one.poll() is None:
                one.kill()
            one.wait()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        ours = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
        environment = ours | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (self.run.folder / "log" / f"{name}.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "recipes.diloco.processes", *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            )  # fmt: skip


def learn(run: Run, number: int, port: int | None) -> None:
    """One learner, until the run ends; one that is given up starts again from what the syncer has."""
    island = run.make_island(number)
    if int(os.environ.get("RANK", "0")):
        follow(island)
        return
    with contextlib.suppress(RunOverError):
        while True:
            client, learner = _join(run, number, port, island)
            client.train(learner, island)
            client.close()
            if not learner.expelled:
                break
    lead_out(island)


def _join(run: Run, number: int, port: int | None, island: Island) -> tuple[SocketClient, Learner]:
    """Join, trying again for as long as a syncer may take to come up."""
    give_up = time.monotonic() + CONNECT
    while True:
        client = SocketClient(run, number, port)
        try:
            return client, client.join(island)
        except NotWelcomeError:
            client.close()
            if time.monotonic() > give_up:
                raise
            time.sleep(_AGAIN)


def whole(run: Run) -> None:
    """The whole run: learners that end before it does are started again, at most once a second.

    Raises:
        UsageError: a learner or the syncer could not begin as it was told to.
        RuntimeError: the syncer failed, or a learner fails whenever it is started, which another start would not mend.
    """
    with Processes(run) as processes:
        began, failed = dict[int, float](), Counter[int]()
        for learner in range(run.settings.learners):
            processes.start(learner)
            began[learner] = time.monotonic()
        while processes.syncer.poll() is None:
            time.sleep(1.0)
            for learner, process in list(processes.learners.items()):
                if not (code := process.poll()):
                    continue
                if learner not in failed:  # the first time: later a file may be gone for a moment
                    processes.refuse(f"learner_{learner}", code)
                own_fault = code > 0 and time.monotonic() - began[learner] < _SOON
                failed[learner] = failed[learner] + 1 if own_fault else 0
                if failed[learner] >= _FAILURES:
                    log = processes.log(f"learner_{learner}")[-2000:]
                    raise RuntimeError(f"Learner {learner} failed {_FAILURES} times, soon after each start:\n{log}")
                print(f"learner {learner} ended with {code}; it is started again", flush=True)
                processes.start(learner)
                began[learner] = time.monotonic()
        processes.wait()


def main(arguments: list[str]) -> None:
    """Do what the command line says; exit code 2 where it cannot be begun like that."""
    try:
        _do(arguments)
    except UsageError as error:
        print(f"{_ERROR}{error}", file=sys.stderr, flush=True)
        sys.exit(_USAGE)


def _do(arguments: list[str]) -> None:
    match arguments:
        case ["syncer", folder]:
            die_with_parent()
            Server(Run.load(Path(folder))).serve()
        case ["learner", folder, number, *port]:
            die_with_parent()
            run = Run.load(Path(folder))
            if run.ranks > 1 and "RANK" not in os.environ:  # the signal stays set across exec
                torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={run.ranks}", "--rdzv-backend=c10d"]
                torchrun += ["--rdzv-endpoint=localhost:0", "-m", "recipes.diloco.processes"]
                os.execv(sys.executable, [sys.executable, *torchrun, *arguments])
            learn(run, int(number), int(port[0]) if port else None)
        case [folder] if not folder.startswith("-"):
            whole(Run.load(Path(folder)))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
