"""Hangs and failures: threads before workers, storage that fails, workers that die, runs that were killed."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from worlds import tokenizer_folder

from benchmarks.leftovers import names_left, shared_memory
from cases.makers import corpus, document, images, lines, own_code, pairs, ranks, recipe, row, source, tar, trace
from modalities.tokenizer import TextTokenizer
from zephon import DataError, Stream
from zephon.command.rehearse import process_tree
from zephon.formats import steady
from zephon.recipe import TokenizerSpec
from zephon.run.runners import ProcessRunner


def run(runner: str, workers: int = 1, more: str = "") -> str:
    return f'[run]\nrunner = "{runner}"\nworkers = {workers}\n{more}\n'


def children() -> set[int]:
    return set(process_tree(os.getpid()))


# --- HNG-1 ---------------------------------------------------------------------------------------------------------


def test_workers_start_after_the_parent_has_used_threads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The tokenizer had been used before workers were forked; its threads did not survive, and workers waited for ever.

    Ours are started anew, never forked.

    https://github.com/huggingface/tokenizers/issues/187, https://github.com/allenai/allennlp/issues/4330
    """
    import torch

    tokenizer = TextTokenizer(TokenizerSpec(tokenizer_folder("both")))
    tokenizer.defining.encode([document(f"d{i}") for i in range(500)], special=False)  # the library's own threads
    torch.matmul(torch.ones(300, 300), torch.ones(300, 300))
    pq.write_table(pa.table({"text": ["x"] * 100}), tmp_path / "x.parquet")
    pq.read_table(tmp_path / "x.parquet")
    waiting = threading.Event()
    other = threading.Thread(target=waiting.wait)
    other.start()
    corpus(tmp_path, 4, 20)
    try:
        with Stream.open(recipe(tmp_path, source("*.jsonl"), lanes=2, size=4)) as stream:
            expected = trace(ranks(stream, 1), 5)
        for _ in range(2):  # and a second one after the first
            with Stream.open(recipe(tmp_path, source("*.jsonl"), lanes=2, size=4, more=run("process", 2))) as stream:
                assert trace(ranks(stream, 2), 5) == expected
    finally:
        waiting.set()
        other.join()
    assert "fork" not in capfd.readouterr().err.lower()


# --- HNG-2 ---------------------------------------------------------------------------------------------------------


def stored(folder: Path, kind: str) -> Path:
    """A recipe with a source of this kind, and 2 ranks' worth of data."""
    if kind == "jsonl":
        corpus(folder, 4, 25)
        return recipe(folder, source("*.jsonl"), lanes=4, size=4, window=16)
    if kind == "parquet":
        pq.write_table(
            pa.table({"text": [document(f"d{i}") for i in range(100)]}), folder / "x.parquet", row_group_size=5
        )
        return recipe(folder, source("*.parquet"), lanes=4, size=4, window=16)
    tar(folder / "x.tar", pairs(60))
    return recipe(folder, images("x.tar"), lanes=4, size=4, window=16)


def failing(after: int, times: float, code: int = errno.EIO) -> Callable[..., bytes]:
    """A pread that fails so many times after so many calls."""
    real, calls = os.pread, 0

    def pread(*args: Any) -> bytes:
        nonlocal calls
        calls += 1
        if after < calls <= after + times:
            raise OSError(code, os.strerror(code))
        return real(*args)

    return pread


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady.time, "sleep", lambda _: None)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar"])
def test_a_read_that_fails_once_changes_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A read timed out on one rank; the others sat in a collective for half an hour.

    https://github.com/pytorch/torchtitan/issues/3338
    """
    path = stored(tmp_path, kind)
    with Stream.open(path) as stream:
        expected = trace(ranks(stream, 4), 20)
    with Stream.open(path) as stream:
        loaders = ranks(stream, 4)
        found = trace(loaders, 2)
        monkeypatch.setattr(os, "pread", failing(0, 1))
        assert found + trace(loaders, 18) == expected
    assert caplog.text.count("trying again") == 1


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar"])
def test_reads_that_fail_for_ever_end_the_run_by_name(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    """Reads are tried again for 21 s; then the error comes on that rank, with file and number of tries.

    https://github.com/pytorch/torchtitan/issues/3338
    """
    with Stream.open(stored(tmp_path, kind)) as stream:
        loader = stream.loader(2, 4)
        trace([loader], 1)
        monkeypatch.setattr(os, "pread", failing(0, float("inf")))
        with pytest.raises(DataError, match=r"(\.jsonl|x\.parquet|x\.tar)\b.* in 5 tries over 21 s"):
            trace([loader], 300)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar"])
def test_short_reads_give_the_same_bytes(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may give less than was asked for.

    https://github.com/pytorch/torchtitan/issues/3338
    """
    path, real = stored(tmp_path, kind), os.pread
    with Stream.open(path) as stream:
        expected = trace(ranks(stream, 4), 20)
    with Stream.open(path) as stream:
        loaders = ranks(stream, 4)
        monkeypatch.setattr(os, "pread", lambda fd, size, at: real(fd, max(1, size // 2), at))
        assert trace(loaders, 20) == expected


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar"])
def test_a_read_that_blocks_is_named_within_the_timeout(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that never comes back ends the run after `[run] timeout`, with its file.

    https://github.com/pytorch/torchtitan/issues/3338
    """
    path, real, never = stored(tmp_path, kind), os.pread, threading.Event()
    path.write_text(path.read_text().replace("[run]", "[run]\ntimeout = 1"))
    with Stream.open(path) as stream:
        loader = stream.loader(2, 4)
        trace([loader], 1)
        monkeypatch.setattr(os, "pread", lambda *args: real(*args) if never.wait(20) else b"")
        with pytest.raises(DataError, match=r"(\.jsonl|x\.parquet|x\.tar)\b.*\[run\] timeout"):
            trace([loader], 300)


# --- HNG-3 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_dies_is_replaced_and_nothing_changes(
    tmp_path: Path, blow: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker killed for memory blocked the training, or ended it with a message about signals only.

    https://github.com/NVIDIA/Megatron-Energon/issues/119, https://github.com/NVIDIA/Megatron-LM/issues/1657
    """
    corpus(tmp_path, 4, 50)
    before = children()
    with Stream.open(recipe(tmp_path, source("*.jsonl"), lanes=2, size=2)) as stream:
        expected = trace(ranks(stream, 1), 300)
    with Stream.open(recipe(tmp_path, source("*.jsonl"), lanes=2, size=2, more=run("process", 2))) as stream:
        loaders = ranks(stream, 1)
        found = trace(loaders, 5)
        assert isinstance(stream.runner, ProcessRunner)
        victim = stream.runner._crew[0]._child.process
        victim.send_signal(blow)
        victim.wait()
        assert found + trace(loaders, 295) == expected
    assert caplog.text.count(f"died (exit code {-blow})") == 1
    assert children() == before


@pytest.mark.parametrize("work", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_document_that_kills_workers_is_not_tried_for_ever(tmp_path: Path, work: str) -> None:
    """The same document killed one worker after the other; the error must name it and the status.

    https://github.com/NVIDIA/Megatron-Energon/issues/119
    """
    lines(tmp_path / "x.jsonl", [row(f"d{i}") for i in range(70)] + [row("deadly")])
    name = own_code(tmp_path, f"import os\ndef f(row):\n    if row['id'] == 'deadly': {work}\n    return row\n")
    before = children()
    path = recipe(tmp_path, source("x.jsonl", map=f"{name}:f"), lanes=1, more=run("process", 1))
    says = r"x\.jsonl.* died 4 times .*exit code (3|-9)"
    with Stream.open(path) as stream, pytest.raises((DataError, RuntimeError), match=says):
        trace(ranks(stream, 1), 200)
    assert children() == before


def test_what_a_map_raises_in_a_worker_names_the_document(tmp_path: Path) -> None:
    """An exception in a worker comes with file and line, not as a signal.

    https://github.com/NVIDIA/Megatron-LM/issues/1657
    """
    lines(tmp_path / "x.jsonl", [row(f"d{i}") for i in range(70)] + [row("odd")])
    name = own_code(tmp_path, "def f(row): return {'text': row['text'], 'n': 1 / (row['id'] != 'odd')}")
    path = recipe(tmp_path, source("x.jsonl", map=f"{name}:f"), lanes=1, more=run("process", 1))
    with Stream.open(path) as stream, pytest.raises(DataError, match=r"(?s)x\.jsonl, line 71, .*ZeroDivisionError"):
        trace(ranks(stream, 1), 200)


# --- HNG-4 ---------------------------------------------------------------------------------------------------------

VICTIM = """
import sys
from zephon import Stream
with Stream.open(sys.argv[1]) as stream:
    loaders = [stream.loader(rank, 2) for rank in range(2)]
    while True:
        for loader in loaders:
            next(loader)
        print("step", flush=True)
"""


def test_a_start_does_not_depend_on_how_the_last_run_ended(tmp_path: Path) -> None:
    """After a killed run the next start failed or hung over shared memory and lock files that were left.

    https://github.com/mosaicml/streaming/issues/781, https://github.com/mosaicml/llm-foundry/issues/436
    """
    corpus(tmp_path, 4, 25)
    path = recipe(tmp_path, source("*.jsonl"), lanes=2, size=4, more=run("process"))
    shared = shared_memory()
    cached: list[int] = []
    for _ in range(2):
        victim = subprocess.Popen([sys.executable, "-c", VICTIM, str(path)], stdout=subprocess.PIPE)
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"step\n"
        victim.kill()
        victim.wait()
        victim.stdout.close()
        cached.append(len(list((tmp_path / "cache").rglob("*"))))
    assert cached[0] == cached[1]
    with Stream.open(path) as one, Stream.open(path) as two:  # two at once, in one process
        first, second = ranks(one, 2), ranks(two, 1)
        traces = [trace(loaders, 1) for _ in range(6) for loaders in (first, second)]
    with Stream.open(recipe(tmp_path, source("*.jsonl"), lanes=2, size=4)) as stream:
        alone = trace(ranks(stream, 1), 6)
    assert traces == [[digest] for digest in alone for _ in range(2)]
    assert not names_left(shared)
