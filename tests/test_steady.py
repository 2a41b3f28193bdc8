"""Storage that fails for a moment: reads are tried again, and nothing becomes a skip."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import documents, write_jsonl
from test_bad_rows import deliver, recipe

from zephon import DataError, Stream
from zephon.formats import steady


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
