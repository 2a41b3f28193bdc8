"""What hangs is named, with its source, and stops the run; or it is done again, and nothing changes."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
from small import write_recipe

from zephon import DataError, RecipeError, Stream, UsageError
from zephon.digest import lane_digest
from zephon.run.child import Child
from zephon.run.isolate import IsolatedLoader
from zephon.run.runners import ProcessRunner, ThreadRunner
from zephon.run.watch import SIGNAL, Watch

HANG = """
import os
from pathlib import Path

HERE = Path(__file__).parent

def hangs(row):
    if row["text"].startswith("doc1007 "):
        with (HERE / "hung").open("a") as file:
            file.write("x")
        if (HERE / "once").exists() and (HERE / "hung").stat().st_size > 1:
            return True
        os.close(os.open(HERE / "fifo", os.O_RDONLY))  # waits for a writer, as reads wait for storage that is gone
    return True
"""

SOURCES = """
[[sources]]
name = "a"
paths = ["a/*.jsonl"]
[[sources]]
name = "b"
paths = ["b/*.jsonl"]
filter = "hangs:hangs"
"""

VARIANTS = ["inline 1", "threads 2", "process 2", "inline 1 isolate", "threads 1 isolate", "process 1 isolate"]


def with_run(path: Path, variant: str, timeout: int = 1) -> Path:
    return small.with_run(path, variant, f"timeout = {timeout}")


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A recipe whose source b waits for ever over one row, behind the 64 rows that are read at the start."""
    path = write_recipe(tmp_path, sources=SOURCES)
    lines = (tmp_path / "b" / "one.jsonl").read_text().splitlines(keepends=True)
    lines.append(lines.pop(7))
    others = (tmp_path / "a" / "two.jsonl").read_text()
    (tmp_path / "b" / "one.jsonl").write_text(others + "".join(lines))
    (tmp_path / "hangs.py").write_text(HANG)
    os.mkfifo(tmp_path / "fifo")
    sys.modules.pop("hangs", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    with contextlib.suppress(OSError):  # let go of a thread that was left behind
        os.close(os.open(tmp_path / "fifo", os.O_WRONLY | os.O_NONBLOCK))


def deliver(path: Path, steps: int = 30) -> list[dict[int, bytes]]:
    with Stream.open(path) as stream:
        loader = stream.loader()
        return [{lane: lane_digest(mine) for lane, mine in loader.step_records().items()} for _ in range(steps)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_work_that_hangs_stops_the_run_and_is_named(
    hanging: Path, variant: str, caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    with pytest.raises(DataError, match=r"Source 'b': measuring \d+ rows, from .*one\.jsonl.*\[run\] timeout") as error:
        deliver(with_run(hanging, variant))
    assert "last read" in str(error.value) or "process" in variant
    assert time.monotonic() - started < 20
    if variant == "inline 1":
        assert "s so far, of 1." in caplog.text


@pytest.mark.parametrize("variant", ["threads 2", "process 3"])
def test_closing_does_not_wait_for_work_that_hangs(
    hanging: Path, variant: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As after Ctrl-C, or any other error, long before `[run] timeout`."""
    found: list[BaseException | None] = []

    def deliver_until_it_fails() -> None:
        try:
            while True:
                next(loader)
        except BaseException as error:
            found.append(error)

    hung, stream = hanging.with_name("hung"), Stream.open(with_run(hanging, variant, timeout=600))
    loader = stream.loader()
    waits = threading.Thread(target=deliver_until_it_fails, daemon=True)
    waits.start()
    while not hung.exists():
        waits.join(0.01)
        assert waits.is_alive()
    started = time.monotonic()
    stream.close()
    assert time.monotonic() - started < 8
    waits.join(10)
    assert "The stream is closed" in str(*found)
    if variant == "threads 2":
        assert "leaves behind, with its thread: Source 'b': measuring" in caplog.text


def test_what_waits_behind_a_thread_that_hangs_fails_with_it_and_another_takes_its_place() -> None:
    """The loader may wait for what is behind it: that never began, so nobody found that it did not end."""
    before, ends = set(threading.enumerate()), threading.Event()
    runner = ThreadRunner(1, Watch(0.2))
    for future in [runner.submit(ends.wait), runner.submit(len, "behind"), runner.submit(len, "it")]:
        with pytest.raises(DataError, match=r"^wait: no end in 0\.2 s"):
            future.result()
    assert runner.submit(len, "later").result() == 5
    ends.set()
    runner.close()
    left = [one for one in threading.enumerate() if one not in before and one.name == "zephon-worker"]
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left)


@pytest.mark.parametrize("timeout", [0, 60])
def test_closing_waits_for_a_thread_that_works(timeout: int) -> None:
    """It may be amid a read."""
    works, done = threading.Event(), list[str]()

    def work() -> None:
        works.set()
        time.sleep(0.3)
        done.append("done")

    watch = Watch(timeout)
    runner = ThreadRunner(2, watch)
    runner.submit(work)
    works.wait()
    watch.closed = True
    runner.close()
    assert done
    with pytest.raises(UsageError, match="The stream is closed"):
        runner.submit(work).result()


@pytest.mark.parametrize("variant", ["process 1", "process 2", "process 1 isolate"])
def test_a_worker_that_hangs_once_is_replaced_and_nothing_changes(hanging: Path, variant: str) -> None:
    hanging.with_name("once").touch()
    hung = hanging.with_name("hung")
    hung.write_text("xx")
    expected = deliver(with_run(hanging, "inline 1"))
    hung.write_text("")
    assert deliver(with_run(hanging, variant)) == expected
    assert hung.stat().st_size >= 2


def test_a_worker_that_is_stopped_is_replaced_and_nothing_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_recipe(tmp_path)
    found: list[dict[int, bytes]] = []
    with Stream.open(with_run(path, "process 2")) as stream:
        assert isinstance(stream.runner, ProcessRunner)
        loader = stream.loader()
        while any(hand._child._silence > 1 for hand in stream.runner._crew):  # they have not shown any life yet
            found.append({lane: lane_digest(mine) for lane, mine in loader.step_records().items()})
        for hand in stream.runner._crew:
            hand._child.process.send_signal(signal.SIGSTOP)
        while caplog.text.count("no sign of life") < 2 or len(found) < 30:
            found.append({lane: lane_digest(mine) for lane, mine in loader.step_records().items()})
    assert found == deliver(with_run(path, "inline 1"), len(found))


def test_a_worker_that_is_found_to_hang_while_its_runner_closes_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process would never hear that the runner has closed, and closing would wait for it for ever."""
    closing, close = threading.Event(), Child.close

    def receive(self: Child) -> None:
        closing.wait()
        raise TimeoutError

    def told(self: Child, patience: float = 3.0) -> int:
        closing.set()
        return close(self, patience)

    monkeypatch.setattr(Child, "receive", receive)
    monkeypatch.setattr(Child, "close", told)
    with Stream.open(with_run(write_recipe(tmp_path), "process 1")) as stream:
        assert isinstance(stream.runner, ProcessRunner)
        (hand,) = stream.runner._crew
        closer = threading.Thread(target=stream.runner.close, daemon=True)
        closer.start()
        closer.join(20)
        assert not closer.is_alive()
        assert hand._child.process.poll() is not None


def test_a_stopped_worker_is_replaced_although_its_link_is_full(tmp_path: Path) -> None:
    """Who sends holds the lock and waits for the worker to read; the watchdog must not wait for that lock."""
    with Stream.open(with_run(write_recipe(tmp_path), "process 1")) as stream:
        assert isinstance(stream.runner, ProcessRunner)
        (hand,) = stream.runner._crew
        rows = np.arange(3)
        assert stream.runner.submit(stream.worker.measure, 0, rows, rows * 0).result(60)
        hand._child.process.send_signal(signal.SIGSTOP)
        found: list[BaseException | None] = []
        much = [2**40 + i for i in range(300_000)]  # a megabyte of pickle, and no rows: an error, if it is read at all
        sender = threading.Thread(
            target=lambda: found.append(stream.runner.submit(stream.worker.measure, 0, much, much).exception(60)),
            daemon=True,
        )
        sender.start()
        sender.join(60)
        assert found
        assert isinstance(found[0], RuntimeError)
        assert stream.runner.submit(stream.worker.measure, 0, rows, rows * 0).result(60)


def test_an_isolated_loader_that_is_stopped_ends_the_run(tmp_path: Path) -> None:
    with Stream.open(with_run(write_recipe(tmp_path), "inline 1 isolate")) as stream:
        loader = stream.loader()
        assert isinstance(loader, IsolatedLoader)
        loader.step_records()
        child = loader._child.process
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(DataError, match="no sign of life"):
            while True:
                next(loader)
        assert child.poll() == -signal.SIGKILL
        with pytest.raises(DataError, match="failed before"):
            next(loader)


def test_time_in_which_the_whole_process_is_stopped_does_not_count() -> None:
    code = (
        "import time\nfrom zephon.run.watch import Watch\n"
        "def work():\n"
        "    print('works', flush=True)\n"
        "    for _ in range(20): time.sleep(0.02)\n"
        "Watch(1).do(work, ())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout
        job.stdout.readline()
        job.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(1.5)
        job.send_signal(signal.SIGCONT)
        assert job.wait(60) == 0


def test_a_job_that_is_stopped_and_goes_on_is_no_hang(tmp_path: Path) -> None:
    path = with_run(write_recipe(tmp_path), "process 1 isolate", timeout=1)
    code = (
        "import sys, time\nfrom zephon import Stream\n"
        "with Stream.open(sys.argv[1]) as stream:\n"
        "    loader = stream.loader()\n"
        "    for step in range(2000):\n"
        "        loader.step_records()\n"
        "        if step % 200 == 0: print(step, flush=True)\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert job.stdout
    with job:
        job.stdout.readline()
        os.killpg(job.pid, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(2)
        os.killpg(job.pid, signal.SIGCONT)
        assert job.wait(60) == 0


def test_work_in_another_thread_is_logged_when_it_cannot_be_interrupted(caplog: pytest.LogCaptureFixture) -> None:
    watch, release = Watch(0.1), threading.Event()
    thread = threading.Thread(target=watch.do, args=(release.wait, ()))
    thread.start()
    while "cannot be interrupted" not in caplog.text:
        thread.join(0.01)
    release.set()
    thread.join()


def test_an_interrupt_of_the_user_is_not_mistaken(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs in the background
    try:
        with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
            Watch(60).do(signal.raise_signal, (signal.SIGINT,))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not caplog.text


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler])
def test_it_does_not_matter_who_has_the_interrupt_signal(handler: Any) -> None:
    """A shell has jobs in the background ignore it; Ray and others take it over."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(DataError, match="no end in"):
            Watch(0.05).do(threading.Event().wait, ())
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_comes_late_hits_nothing_else() -> None:
    watch = Watch(0.05)
    with pytest.raises(DataError, match="no end in"):
        watch.do(_busy, (watch,))
    signal.raise_signal(SIGNAL)
    assert watch.do(signal.raise_signal, (SIGNAL,)) is None


def _busy(watch: Watch) -> None:
    """Work that swallows whatever interrupts it."""
    with contextlib.suppress(BaseException):
        while not any(note.error for note in watch._notes.values()):
            pass


def test_a_task_that_catches_every_exception_is_given_up_all_the_same() -> None:
    with pytest.raises(DataError, match="no end in"):
        Watch(0.05).do(_stubborn, ())


def _stubborn() -> None:
    while True:
        with contextlib.suppress(Exception):
            threading.Event().wait()


def test_a_handler_of_the_user_for_our_signal_stays(caplog: pytest.LogCaptureFixture) -> None:
    watch, seen = Watch(0.05), threading.Event()
    before = signal.signal(SIGNAL, lambda *_: seen.set())
    try:
        watch.do(_waits_for, (lambda: "cannot be interrupted" in caplog.text,))
    finally:
        signal.signal(SIGNAL, before)
    assert not seen.is_set()


def _waits_for(what: Callable[[], bool]) -> None:
    while not what():
        threading.Event().wait(0.01)


def test_a_timeout_is_a_number_of_seconds(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="timeout"):
        Stream.open(with_run(write_recipe(tmp_path), "inline 1", timeout=-1))
    with Stream.open(with_run(write_recipe(tmp_path), "inline 1", timeout=0)) as stream:
        loader = stream.loader()
        assert loader.step_records()
        assert not stream.watch._notes
