"""Storage that fails for a moment: reads are tried again, and nothing becomes a skip."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import documents, write_jsonl
from test_bad_rows import deliver, recipe

from modalities.media import media
from zephon import DataError, Stream
from zephon.formats import steady
from zephon.formats.index import index_files
from zephon.formats.jsonl import JsonlReader


def flaky(code: int, every: int, times: int) -> Callable[..., bytes]:
    """A pread that fails so many times in a row at every so many calls."""
    real, calls, left = os.pread, 0, 0

    def pread(*args: Any) -> bytes:
        nonlocal calls, left
        if left:
            left -= 1
            raise OSError(code, os.strerror(code))
        calls += 1
        if calls % every == 0:
            left = times - 1
            raise OSError(code, os.strerror(code))
        return real(*args)

    return pread


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady.time, "sleep", lambda _: None)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("times", [1, len(steady.WAITS)])
def test_a_failure_that_passes_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, times: int
) -> None:
    write_jsonl(tmp_path / "x.jsonl", documents(60))
    with Stream.open(recipe(tmp_path)) as stream:
        expected = deliver([stream.loader()], 8)
        assert expected[1] == []
    monkeypatch.setattr(os, "pread", flaky(code, 3, times))
    with Stream.open(recipe(tmp_path)) as stream:
        assert deliver([stream.loader()], 8) == expected


@pytest.mark.parametrize(("code", "times"), [(errno.EIO, 99), (errno.EACCES, 1)])
def test_a_failure_that_stays_stops_the_run_and_skips_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, times: int
) -> None:
    write_jsonl(tmp_path / "x.jsonl", documents(60))
    with Stream.open(recipe(tmp_path)) as stream:
        loader = stream.loader()
        deliver([loader], 1)
        monkeypatch.setattr(os, "pread", flaky(code, 1, times))
        with pytest.raises(DataError, match=r"Source 'a': .*x\.jsonl cannot be read \("):
            deliver([loader], 200)
        assert loader.take_skipped() == []


def failing(function: Callable[..., Any], code: int, times: int, what: str) -> Callable[..., Any]:
    """A function that fails so many times for the files whose path holds `what`."""
    left = times

    def call(path: Any, *args: Any, **named: Any) -> Any:
        nonlocal left
        if left and what in str(path):
            left -= 1
            raise OSError(code, os.strerror(code))
        return function(path, *args, **named)

    return call


@pytest.mark.parametrize("name", ["stat", "lstat", "open"])
def test_a_picture_named_by_path_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A failure of the storage cost the row, in the order of one rank alone, and the list of bad rows blamed it."""
    (tmp_path / "fresh.jpg").write_bytes(b"bytes")
    monkeypatch.setattr(os, name, failing(getattr(os, name), errno.EIO, 2, "fresh.jpg"))
    assert media("fresh.jpg", tmp_path).read() == b"bytes"
    monkeypatch.setattr(os, name, failing(getattr(os, name), errno.ESTALE, 99, "other.jpg"))
    (tmp_path / "other.jpg").write_bytes(b"bytes")
    with pytest.raises(DataError, match=r"other\.jpg cannot be read \(Stale file handle in 5 tries"):
        media("other.jpg", tmp_path).read()


def test_a_picture_behind_a_closed_door_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "stat", failing(os.stat, errno.EACCES, 99, "a.jpg"))
    (tmp_path / "a.jpg").write_bytes(b"bytes")
    with pytest.raises(DataError, match=r"a\.jpg cannot be read \(Permission denied\)"):
        media("a.jpg", tmp_path)


@pytest.mark.parametrize("times", [len(steady.WAITS), 99])
def test_a_shard_that_is_opened_again_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    files = [write_jsonl(tmp_path / f"{name}.jsonl", documents(2)) for name in "xyz"]
    reader = JsonlReader(index_files({file.name: file for file in files}, tmp_path / "cache"), open_files=1)
    reader.read(np.arange(6))  # y and x are closed again
    monkeypatch.setattr(os, "open", failing(os.open, errno.EIO, times, "y.jsonl"))
    if times == 99:
        with pytest.raises(DataError, match=r"y\.jsonl cannot be read \(Input/output error in 5 tries"):
            reader.read(np.arange(6))
    else:
        assert len(reader.read(np.arange(6))) == 6
