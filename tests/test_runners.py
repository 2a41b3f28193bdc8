"""Who does the work never changes data, and nobody who dies leaves anything behind."""

import gc
import mmap
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

import zephon
from benchmarks.leftovers import names_left, shared_memory
from zephon import DataError, Loader, Recipe, Stream, UsageError
from zephon.command.rehearse import process_tree
from zephon.digest import lane_digest, step_digest
from zephon.run import wire
from zephon.run.child import Child
from zephon.run.isolate import IsolatedLoader
from zephon.run.runners import ProcessRunner
from zephon.run.watch import Watch
from zephon.worker import Worker

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


def test_what_is_left_in_shared_memory_is_told_from_what_others_use() -> None:
    before = shared_memory()
    code = "import multiprocessing as m; lock = m.get_context('spawn').Lock(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert shared_memory().items() - before.items()
        assert not names_left(before)
        mine = Path("/dev/shm", f"zephon-test-{os.getpid()}")
        mine.write_bytes(b"x")
        try:
            assert names_left(before) == [mine.name]
            with mine.open("r+b") as file, mmap.mmap(file.fileno(), 0):
                assert names_left(before) == [mine.name]
        finally:
            mine.unlink()
        assert not names_left(before)
        other.communicate(b"\n")


@pytest.mark.parametrize("variant", ["process 2", "process 1 isolate"])
def test_closing_leaves_no_process_thread_or_file(recipe: Path, variant: str) -> None:
    import threading

    before, threads = set(process_tree(os.getpid())), set(threading.enumerate())
    shared, files = shared_memory(), len([*Path("/proc/self/fd").iterdir()])
    with Stream.open(with_run(recipe, variant)) as stream:
        loader = stream.loader()
        next(loader)
        assert left_over(before)
    assert not left_over(before)
    assert not set(threading.enumerate()) - threads
    assert not names_left(shared)
    del loader, stream
    gc.collect()
    assert len([*Path("/proc/self/fd").iterdir()]) <= files


def test_a_stream_that_is_dropped_leaves_no_process(recipe: Path) -> None:
    before = set(process_tree(os.getpid()))
    stream = Stream.open(with_run(recipe, "process 2"))
    loader = stream.loader()
    next(loader)
    assert left_over(before)
    del loader, stream
    gc.collect()
    assert not left_over(before)


@pytest.mark.parametrize("variant", ["process 1", "inline 1 isolate", "process 1 isolate"])
@pytest.mark.parametrize("change", ["a file more", "other code"])
def test_a_process_that_starts_later_must_find_the_same_stream(tmp_path: Path, variant: str, change: str) -> None:
    """Rows have numbers: with a file more in the middle those of a new worker were other rows, and nobody noticed."""
    path = with_run(write_recipe(tmp_path), variant)
    path.write_text(path.read_text().replace('name = "a"', 'name = "a"\nfilter = "kept:kept"'))
    (tmp_path / "kept.py").write_text("def kept(row): return True\n")
    with Stream.open(path) as stream:
        loader = stream.loader()
        next(loader)
        if change == "a file more":
            (tmp_path / "a" / "other.jsonl").write_bytes((tmp_path / "b" / "one.jsonl").read_bytes())
        else:
            (tmp_path / "kept.py").write_text("def kept(row): return 'lane' in row['text']\n")
        if isinstance(stream.runner, ProcessRunner):
            os.kill(stream.runner._crew[0]._child.process.pid, signal.SIGKILL)
        else:
            loader = stream.loader()
        field = "catalogue" if change == "a file more" else "filter.sha256"
        with pytest.raises(DataError, match=rf"(?s)finds another one.*sources\[a\]\.{field}.*Put them back"):
            for _ in range(100):
                next(loader)


def test_a_stream_that_cannot_be_opened_leaves_no_process(recipe: Path) -> None:
    before = set(process_tree(os.getpid()))
    path = with_run(recipe, "process 2")
    path.write_text(path.read_text().replace('name = "b"', 'name = "b"\ntext = "nothing"'))
    with pytest.raises(DataError, match="there is no field 'nothing'"):
        Stream.open(path)
    assert not left_over(before)


def test_a_process_that_takes_nothing_is_ended(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends may hold the lock without which nobody finds out that it hangs."""
    monkeypatch.setattr("zephon.run.child._START", 1.0)
    child = Child("worker", Recipe.load(recipe), 1.0)
    child.process.send_signal(signal.SIGSTOP)
    assert not child.send(bytes(1 << 22))
    assert child.process.wait(60) == -signal.SIGKILL
    with pytest.raises((EOFError, ConnectionError)):
        child.receive()
    child.close()


def test_a_child_that_cannot_open_its_stream_says_why_once(
    recipe: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path = with_run(recipe, "process 2")
    path.write_text(path.read_text().replace('name = "b"', 'name = "b"\ntext = "nothing"'))
    wrong = Recipe.load(path)
    runner = ProcessRunner(wrong, Watch(60))
    rows = np.arange(3)
    for _ in range(3):
        with pytest.raises(DataError, match="there is no field 'nothing'"):
            runner.submit(Worker.measure, 0, rows, rows * 0).result(60)
    runner.close()
    child = Child("loader", (wrong, {}, {}), 60)
    with pytest.raises(DataError, match="there is no field 'nothing'"):
        child.receive()
    child.close()
    assert "died" not in caplog.text
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("variant", ["inline 1", "threads 2", "process 1", "inline 1 isolate", "threads 2 isolate"])
def test_a_stream_that_is_closed_gives_nothing_more(recipe: Path, variant: str) -> None:
    with Stream.open(with_run(recipe, variant)) as stream:
        loader, fresh = stream.loader(local_batch_size=2), stream.loader()
        step([loader])
        state = loader.state_dict()
    for use in (loader.__next__, fresh.__next__, lambda: loader.load_state_dict(state), stream.loader):
        with pytest.raises(UsageError, match="The stream is closed; open it again and load the last state"):
            use()
    assert loader.state_dict() == state
    if "isolate" not in variant and variant != "inline 1":
        rows = np.arange(3)
        with pytest.raises(UsageError, match="The stream is closed"):
            stream.runner.submit(stream.worker.measure, 0, rows, rows * 0).result(20)


LIMITED = """
import os, resource, signal, sys
import numpy as np
from zephon import DataError, Stream

def limit(files):
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

what = sys.argv[2]
try:
    if what == "start":
        before = set(os.listdir("/proc/self/fd"))
        limit(max(map(int, before)) + 12)
        Stream.open(sys.argv[1])
    with Stream.open(sys.argv[1]) as stream:
        loader = stream.loader()
        next(loader)
        try:
            limit(3)
            if what == "replace":
                os.kill(stream.runner._crew[0]._child.process.pid, signal.SIGKILL)
            if what in ("send", "receive"):  # much that goes there, or comes back
                rows = np.tile(np.arange(60), 400 if what == "send" else 40)
                stream.runner.submit(stream.worker.measure, 0, rows, rows * 0).result(30)
            for _ in range(3000):
                next(loader)
        finally:
            limit(200)
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("what", "variant", "says"),
    [
        ("start", "process 64", "A worker process cannot be started"),
        ("replace", "process 1", "A worker process cannot be started"),
        ("send", "process 1", "Work cannot be sent"),
        ("receive", "process 1", "cannot be received"),
        ("batch", "inline 1 isolate", "cannot be received"),
    ],
)
def test_a_process_without_free_file_descriptors_says_so_and_does_not_hang(
    tmp_path: Path, what: str, variant: str, says: str
) -> None:
    path = with_run(write_recipe(tmp_path, seq_len=4096), variant)
    command = [sys.executable, "-c", LIMITED, str(path), what]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert says in done.stdout, done.stderr
    assert "oo many open files" in done.stdout
    assert "ulimit -n" in done.stdout
    assert "Traceback" not in done.stderr


WHERE = """
import sys
from pathlib import Path
import zephon

def where(row):
    with Path(__file__).with_name("found").open("a") as file:
        print(zephon.__file__, sys.modules["zephon.worker"].__file__, file=file)
    return True
"""


def test_a_worker_runs_the_zephon_of_its_parent(tmp_path: Path) -> None:
    """Another one that can be imported too might decide the order, in silence."""
    sources = '[[sources]]\nname = "a"\npaths = ["a/*.jsonl"]\nfilter = "where:where"\n'
    path = with_run(write_recipe(tmp_path, sources=sources), "process 1 isolate")
    (tmp_path / "where.py").write_text(WHERE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "zephon").symlink_to(Path(zephon.__file__).parent)
    code = (
        "import sys\nsys.path.insert(0, sys.argv[2])\nimport zephon\nsys.path.pop(0)\n"
        "with zephon.Stream.open(sys.argv[1]) as stream: next(stream.loader())\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path / "other")], check=True)
    found = set((tmp_path / "found").read_text().split())
    assert found == {str(tmp_path / "other" / "zephon" / name) for name in ("__init__.py", "worker.py")}


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


@pytest.mark.parametrize("variant", ["process 1", "process 1 isolate"])
def test_a_worker_that_hangs_ends_when_its_parent_is_killed(recipe: Path, variant: str) -> None:
    """It does not look at its link while it works, and the work of a user may never end."""
    (recipe.parent / "endless.py").write_text(
        "import pathlib, time\n"
        "def work(row):\n"
        "    while (here := pathlib.Path(__file__).parent / 'hang').exists():\n"
        "        try:\n"
        "            here.with_name('hangs').touch()\n"
        "            time.sleep(9)\n"
        "        except BaseException:\n"
        "            pass\n"
        "    return row\n"
    )
    path = with_run(recipe, variant, "timeout = 10\n")
    path.write_text(path.read_text().replace("weight = 0.7", 'weight = 0.7\nmap = "endless:work"'))
    code = (
        "import sys, os, pathlib, zephon\n"
        "from zephon.command.rehearse import process_tree\n"
        "stream = zephon.Stream.open(sys.argv[1]); loader = stream.loader(); next(loader)\n"
        "pathlib.Path(sys.argv[1]).with_name('hang').touch()\n"
        "print(*process_tree(os.getpid()), flush=True)\n"
        "while True: next(loader)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        family = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(family) >= 2
        wait_for((recipe.parent / "hangs").exists)
        parent.kill()
        parent.wait()
        parent.stdout.close()
        wait_for(lambda: not any(alive(pid) for pid in family))
    finally:
        for name in ("hang", "hangs"):
            (recipe.parent / name).unlink(missing_ok=True)


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
