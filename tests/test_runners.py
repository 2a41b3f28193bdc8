"""Who does the work never changes data, and nobody who dies leaves anything behind."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small import with_run, write_recipe

from zephon import DataError, Loader, Stream
from zephon.command.rehearse import process_tree
from zephon.digest import lane_digest, step_digest
from zephon.run import wire
from zephon.run.isolate import IsolatedLoader
from zephon.run.runners import ProcessRunner

STEPS = 12
VARIANTS = ["inline 1", "threads 1", "threads 3", "process 1", "process 2", "inline 1 isolate", "threads 2 isolate"]


def step(loaders: list[Loader]) -> str:
    parts = [loader.step_records() for loader in loaders]
    return step_digest({lane: lane_digest(mine) for part in parts for lane, mine in part.items()})


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("runners"))


@pytest.fixture(scope="module")
def expected(recipe: Path) -> tuple[list[str], list[dict[str, bytes]]]:
    """Digest and state of every step, inline."""
    with Stream.open(recipe) as stream:
        loader = stream.loader()
        digests, states = [], []
        for _ in range(STEPS):
            digests.append(step([loader]))
            states.append(loader.state_dict())
    return digests, states


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_runner_gives_the_same_batches_and_states(
    recipe: Path, expected: tuple[list[str], list[dict[str, bytes]]], variant: str
) -> None:
    digests, states = expected
    with Stream.open(with_run(recipe, variant)) as stream:
        two = [stream.loader(rank, 2, local_batch_size=2) for rank in range(2)]
        for number in range(5):
            assert step(two) == digests[number]
            state = {key: raw for loader in two for key, raw in loader.state_dict().items()}
            assert state == states[number]
        next(two[0])  # work ahead and half a step are forgotten by a restore
        for number in (9, 2):  # forwards and backwards, while work is under way
            for loader in two:
                loader.load_state_dict(states[number])
            assert [step(two) for _ in range(2)] == digests[number + 1 : number + 3]
        assert two[0].stats().positions == 5 * 4 * 32


def left_over(before: set[int]) -> set[int]:
    """Our processes that were not there before."""
    return set(process_tree(os.getpid())) - before


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


@pytest.mark.parametrize("variant", ["process 2", "process 1 isolate"])
def test_closing_leaves_no_process_thread_or_file(recipe: Path, variant: str) -> None:
    import threading

    before, threads = set(process_tree(os.getpid())), threading.active_count()
    shared, files = {*Path("/dev/shm").iterdir()}, len([*Path("/proc/self/fd").iterdir()])
    with Stream.open(with_run(recipe, variant)) as stream:
        loader = stream.loader()
        next(loader)
        assert left_over(before)
    assert not left_over(before)
    assert threading.active_count() == threads
    assert {*Path("/dev/shm").iterdir()} <= shared
    del loader, stream
    gc.collect()
    assert len([*Path("/proc/self/fd").iterdir()]) <= files


def test_a_stream_that_cannot_be_opened_leaves_no_process(recipe: Path) -> None:
    before = set(process_tree(os.getpid()))
    path = with_run(recipe, "process 2")
    path.write_text(path.read_text().replace('name = "b"', 'name = "b"\ntext = "nothing"'))
    with pytest.raises(DataError, match="there is no field 'nothing'"):
        Stream.open(path)
    assert not left_over(before)


def test_a_worker_that_is_killed_is_replaced_and_its_work_done_again(
    recipe: Path, expected: tuple[list[str], list[dict[str, bytes]]], caplog: pytest.LogCaptureFixture
) -> None:
    digests, _ = expected
    with Stream.open(with_run(recipe, "process 2")) as stream:
        assert isinstance(stream.runner, ProcessRunner)
        loader = stream.loader()
        for number in range(STEPS):
            if number in (1, 6):
                for hand in stream.runner._crew:
                    victim = hand._child.process
                    victim.send_signal(signal.SIGKILL)
                    victim.wait()
            assert step([loader]) == digests[number]
    assert caplog.text.count("died (exit code -9)") >= 2


def test_an_isolated_loader_that_is_killed_ends_the_run_and_loses_nothing(
    recipe: Path, expected: tuple[list[str], list[dict[str, bytes]]]
) -> None:
    digests, states = expected
    with Stream.open(with_run(recipe, "inline 1 isolate")) as stream:
        loader = stream.loader()
        assert isinstance(loader, IsolatedLoader)
        assert [step([loader]) for _ in range(3)] == digests[:3]
        loader._child.process.send_signal(signal.SIGKILL)
        with pytest.raises(DataError, match=r"isolated loader died \(exit code -9"):
            for _ in range(1000):
                next(loader)
        done = loader.step
        again = stream.loader()
        again.load_state_dict(states[2])
        assert [step([again]) for _ in range(3)] == digests[3:6]
        assert done >= 3


@pytest.mark.parametrize("variant", ["process 2", "process 1 isolate"])
def test_children_end_when_their_parent_is_killed(recipe: Path, variant: str) -> None:
    code = (
        "import sys, os, zephon\n"
        "from zephon.command.rehearse import process_tree\n"
        "stream = zephon.Stream.open(sys.argv[1]); loader = stream.loader(); next(loader)\n"
        "print(*process_tree(os.getpid()), flush=True)\n"
        "while True: next(loader)\n"
    )
    command = [sys.executable, "-c", code, str(with_run(recipe, variant))]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    family = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(family) >= 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not any(alive(pid) for pid in family))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_error_in_a_child_is_the_error_of_the_run(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    with (tmp_path / "a" / "two.jsonl").open("a") as file:
        file.write("{broken\n")
    for variant in ("process 1", "inline 1 isolate"):
        with Stream.open(with_run(path, variant)) as stream:
            loader = stream.loader()
            with pytest.raises(DataError, match=r"two\.jsonl, line 41, byte \d+: the row is not valid JSON"):
                for _ in range(100):
                    next(loader)


def test_messages_carry_arrays_without_copies_and_arrays_are_writable() -> None:
    import socket

    ours, theirs = socket.socketpair()
    big, small = np.arange(300_000, dtype=np.int32), np.arange(5)
    wire.send(ours, {"big": big, "views": [big[10:20000], big[::2][:3]], "small": small, "text": "x"})
    got = wire.receive(theirs)
    assert np.array_equal(got["big"], big)
    assert np.array_equal(got["views"][0], big[10:20000])
    assert np.array_equal(got["views"][1], big[::2][:3])
    assert not got["big"].flags.owndata
    got["big"][0] = 7
    wire.send(ours, "small ones need no shared memory")
    assert wire.receive(theirs).startswith("small")
    ours.close()
    with pytest.raises(EOFError):
        wire.receive(theirs)
    theirs.close()


def test_an_isolated_loader_that_is_killed_before_a_restore_is_named(recipe: Path) -> None:
    with Stream.open(with_run(recipe, "inline 1 isolate")) as stream:
        loader = stream.loader()
        assert isinstance(loader, IsolatedLoader)
        state = loader.state_dict()
        loader._child.process.kill()
        loader._child.process.wait()
        with pytest.raises(DataError, match=r"isolated loader died \(exit code -9"):
            loader.load_state_dict(state)


def test_an_isolated_loader_that_failed_says_so_again(recipe: Path) -> None:
    with Stream.open(with_run(recipe, "inline 1 isolate")) as stream:
        loader = stream.loader()
        assert isinstance(loader, IsolatedLoader)
        loader._child.process.kill()
        for says in ("isolated loader died", "This loader failed before"):
            with pytest.raises(DataError, match=says):
                for _ in range(1000):
                    next(loader)


def test_a_link_that_another_thread_has_hung_up_has_ended() -> None:
    """The reader of a worker may be between two messages when its runner closes."""
    ours, theirs = socket.socketpair()
    wire.send(theirs, "a message")
    wire.hang_up(ours)
    with pytest.raises(EOFError):
        wire.wait(ours, 1.0)
    theirs.close()
