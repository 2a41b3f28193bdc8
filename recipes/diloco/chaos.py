"""Kill, stop, slow and cut off learners of a real run on a seeded schedule, then check everything.

    python -m recipes.diloco.chaos [--seed 0] [--runs 1] [--learners 4] [--recipe my.toml]

Every learner talks to the syncer through a relay of ours, which can be told to carry nothing for a while. SIGKILL,
SIGSTOP and SIGCONT come from outside; a slowed learner is stopped two thirds of the time. A run passes when it ends,
the tape trains again to the same bits, every lane step that counts was given once, all others are counted as dead, and
no process is left. Exit code 1 otherwise.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from recipes.diloco.faults import KINDS, Fault, schedule
from recipes.diloco.judge import judge
from recipes.diloco.processes import Processes
from recipes.diloco.run import Run
from recipes.diloco.settings import Settings

_TICK = 0.03  # seconds between two looks; also how long a slowed learner runs or stands


class Relay:
    """Carries bytes between learners and the syncer, in order, and nothing at all while it is cut.

    Args:
        port_file: where the syncer says which port it listens on.
    """

    def __init__(self, port_file: Path) -> None:
        self._port_file, self._open = port_file, threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def cut(self) -> None:
        """Carry nothing until `heal`."""
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    def close(self) -> None:
        """Once both ends of every connection are gone, or it waits for them."""
        self._open.set()
        with self._listener, contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # to close it alone leaves a thread in `accept` for ever
        for thread in self._threads:
            thread.join()

    def _begin(self, work: Callable[..., None], *args: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", int(self._port_file.read_text())))
                except OSError:
                    near.close()
                    continue
                self._begin(self._connect, near, far)

    def _connect(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            back = self._begin(self._carry, far, near)
            self._carry(near, far)
            back.join()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while raw := source.recv(1 << 16):
                self._open.wait()
                target.sendall(raw)
        for one in (source, target):  # whoever dies takes the other way with it, as with one connection
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@dataclass
class Hurt:
    """What is being done to a learner now."""

    fault: Fault
    until: float


def hurt(processes: Processes, faults: list[Fault], seconds: float = 300.0) -> list[Fault]:
    """Do what a schedule says to a run, until it ends.

    Returns:
        The faults that came while the run lasted.

    Raises:
        TimeoutError: the run does not end.
        RuntimeError: a learner ends by itself.
    """
    with contextlib.ExitStack() as stack:
        relays = {
            learner: stack.enter_context(contextlib.closing(Relay(processes.run.folder / "port")))
            for learner in range(processes.run.settings.learners)
        }
        stack.callback(processes.stop)
        return _hurt(processes, faults, seconds, relays)


def _hurt(processes: Processes, faults: list[Fault], seconds: float, relays: dict[int, Relay]) -> list[Fault]:
    for learner, relay in relays.items():
        processes.start(learner, relay.port)
    tape = processes.run.folder / "tape.jsonl"
    limit = time.monotonic() + seconds
    while not tape.exists() or b'"step"' not in tape.read_bytes():
        _check(processes, limit, ())
    began, done, hurts = time.monotonic(), list[Fault](), dict[int, Hurt]()
    waiting = list(faults)
    while processes.syncer.poll() is None:
        now = time.monotonic()
        _check(processes, began + seconds, hurts)
        while waiting and began + waiting[0].at / 1e6 <= now:
            fault = waiting.pop(0)
            hurts[fault.learner] = Hurt(fault, now + fault.lasting / 1e6)
            _strike(processes, relays[fault.learner], fault)
            done.append(fault)
        for learner, one in sorted(hurts.items()):
            if now >= one.until:
                _mend(processes, relays[learner], one.fault)
                del hurts[learner]
            elif one.fault.kind == "slow":
                phase = int((now - began) / _TICK) % 3
                _signal(processes.learners[learner], signal.SIGCONT if phase == 0 else signal.SIGSTOP)
    for learner, one in hurts.items():
        if one.fault.kind != "kill":
            _mend(processes, relays[learner], one.fault)
    processes.wait(60)
    return done


def _strike(processes: Processes, relay: Relay, fault: Fault) -> None:
    if fault.kind == "kill":
        processes.kill(fault.learner)
    elif fault.kind == "partition":
        relay.cut()
    else:
        _signal(processes.learners[fault.learner], signal.SIGSTOP)


def _mend(processes: Processes, relay: Relay, fault: Fault) -> None:
    if fault.kind == "kill":
        processes.start(fault.learner, relay.port)
    elif fault.kind == "partition":
        relay.heal()
    else:
        _signal(processes.learners[fault.learner], signal.SIGCONT)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _check(processes: Processes, until: float, hurts: Collection[int]) -> None:
    """Wait a moment; raises where the run takes too long, or a learner ends that nobody has killed."""
    if time.monotonic() > until:
        raise TimeoutError(f"The run in {processes.run.folder} does not go on: {processes.log('syncer')[-2000:]}")
    for learner, process in processes.learners.items():
        if process.poll() and learner not in hurts:
            said = processes.log(f"learner_{learner}")[-2000:]
            raise RuntimeError(f"Learner {learner} ended by itself with {process.returncode}: {said}")
    time.sleep(_TICK)


def leftovers(folder: Path) -> Iterator[int]:
    """Processes whose command line names a folder."""
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in one.read_bytes() and int(one.parent.name) != os.getpid():
                yield int(one.parent.name)


@dataclass
class Options:
    """What to run."""

    recipe: Path = Path("demo/recipe.toml")
    """The data; `make demo` leaves one."""

    folder: Path = Path("demo-chaos")
    """Where runs are kept; emptied first."""

    seed: int = 0
    """Of the first run's faults; each further run has the next."""

    runs: int = 1
    """How many runs."""

    learners: int = 4
    """Learners of a run."""

    faults: int = 6
    """Faults of a run."""

    seconds: float = 6.0
    """Time over which the faults are spread; a run takes a little longer."""

    island: str = "recipes.diloco.bigram:make"
    """What trains."""

    vocabulary: Annotated[int, tyro.conf.Suppress] = 2048


def one_run(options: Options, seed: int) -> str:
    """One run: its faults, its end, its account; raises where anything is wrong."""
    pace = 0.05
    settings = Settings(learners=options.learners, rounds=int(options.seconds / pace), every=8, fragments=4)
    folder = options.folder / f"seed_{seed:03d}"
    kwargs = {"recipe": str(options.recipe), "vocabulary": options.vocabulary}
    run = Run(folder, settings, options.island, kwargs, snapshot_every=20, pace=pace)
    faults = schedule(seed, options.learners, int(options.seconds * 1e6), options.faults)
    began = time.monotonic()
    with Processes(run) as processes:
        done = hurt(processes, faults)
    took = time.monotonic() - began
    added = judge(run)
    left = list(leftovers(folder))
    if left:
        raise RuntimeError(f"Processes {left} of {folder} are left.")
    kinds = ", ".join(f"{sum(one.kind == kind for one in done)} {kind}" for kind in KINDS)
    return (
        f"seed {seed}: {kinds}; {added.steps} lane steps count, {added.dead} died ({added.named} told); replay equal; "
        f"{took:.1f} s"
    )


def main(options: Options) -> None:
    """Run, say, and fail where anything is wrong."""
    shutil.rmtree(options.folder, ignore_errors=True)
    for seed in range(options.seed, options.seed + options.runs):
        print(one_run(options, seed), flush=True)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except KeyboardInterrupt:
        sys.exit("stopped by Ctrl-C")
