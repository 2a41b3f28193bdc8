"""Row index and reader: every row is found exactly once, whatever the file looks like, and bad ones are named."""

import itertools
import json
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import strictly

from zephon import DataError
from zephon.formats import index, sources
from zephon.formats.index import LineIndex, index_files
from zephon.formats.jsonl import JsonlReader
from zephon.run.budget import Budget


def read_all(path: Path, cache: Path) -> list[dict[str, object]]:
    reader = open_reader({path.name: path}, cache)
    rows = sum(one.shard.rows for one in reader._indexes)
    out = strictly(reader, np.arange(rows))
    reader.close()
    return [dict(row) for row in out]


def open_reader(files: dict[str, Path], cache: Path) -> JsonlReader:
    return JsonlReader(index_files(files, cache))


def expected(raw: bytes) -> list[bytes]:
    """The rule, written the slow way: LF ends a row, one byte-order mark at byte 0, blank lines are none."""
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    return [line for line in raw.split(b"\n") if line.strip(b" \t\r\n\x0b\x0c")]


@given(
    st.lists(
        st.sampled_from(
            [b'{"a":1}', b"\n", b"\r\n", b" ", b"\t", b"\r", b"\x0b", b'{"b":"\xe2\x80\xa8"}', b"{}", b"x"]
        ),
        max_size=30,
    ),
    st.booleans(),
    st.integers(1, 9),
)
def test_rows_are_lines_that_are_not_blank(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], mark: bool, block: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    raw = (b"\xef\xbb\xbf" if mark else b"") + b"".join(parts)
    path = folder / "x.jsonl"
    path.write_bytes(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_BLOCK", block + 3)  # rows and blank lines fall across blocks everywhere
        found = index_files({"x": path}, folder / "cache")[0]
    starts = found.starts.tolist()
    rows = [raw[a:b].strip(b" \t\r\n\x0b\x0c") for a, b in itertools.pairwise(starts)]
    assert rows == [line.strip(b" \t\r\n\x0b\x0c") for line in expected(raw)]
    assert found.shard.bytes == len(raw)


def test_byte_order_mark_crlf_and_blank_lines_are_harmless(tmp_path: Path) -> None:
    rows = [{"text": f"row {i} \u2028 \u0085 caf\u00e9"} for i in range(6)]
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    dresses = {
        "plain": b"\n".join(lines) + b"\n",
        "no-end": b"\n".join(lines),
        "bom": b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n",
        "crlf": b"\r\n".join(lines) + b"\r\n",
        "blank": b"\n\n" + b"\n  \n\t\n\n".join(lines) + b"\n\n\n",
        "all": b"\xef\xbb\xbf\r\n" + b"\r\n \r\n".join(lines) + b"\r\n\r\n",
    }
    for name, raw in dresses.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(raw)
        assert read_all(path, tmp_path / "cache") == rows, name


@given(st.data())
def test_rows_come_in_the_order_asked_for(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("order")
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any))
    files: dict[str, Path] = {}
    texts: list[str] = []
    for shard, size in enumerate(sizes):
        mine = [f"{shard}-{row}-" + "x" * (row * 977 % 30_000) for row in range(size)]  # gaps near and far
        texts += mine
        files[f"s{shard}"] = folder / f"s{shard}.jsonl"
        files[f"s{shard}"].write_text("".join(json.dumps({"t": text}) + "\n" for text in mine))
    wanted = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=30))
    reader = open_reader(files, folder / "cache")
    assert [row["t"] for row in reader.read(np.asarray(wanted))] == [texts[i] for i in wanted]
    reader.close()


def test_many_shards_need_few_open_files(tmp_path: Path) -> None:
    files = {f"{i:03d}": tmp_path / f"{i:03d}.jsonl" for i in range(200)}
    for i, path in enumerate(files.values()):
        path.write_text(json.dumps({"t": i}) + "\n")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in ("cold", "warm"):
        reader = JsonlReader(index_files(files, tmp_path / "cache"), open_files=64)
        assert [row["t"] for row in reader.read(np.arange(200))] == list(range(200))
        assert len(list(Path("/proc/self/fd").iterdir())) - before <= 64
        reader.close()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "cut', "byte 29: the row is not valid JSON: Unterminated string"),
        (b'{"text": "bad \xff"}', r"byte 34: the row is not valid JSON: byte 0xff is not valid UTF-8"),
        (b"[1, 2]", "byte 20: a row must be a JSON object, this one is an array"),
        (b"null", "a row must be a JSON object, this one is null"),
        (b'"text"', "this one is a string"),
        (b"true", "this one is a truth value"),
        (b'{"a": 1} {"b": 2}', "byte 29: the row is not valid JSON: Extra data"),
        (b'{"n": ' + b"9" * 5000 + b"}", "the row is not valid JSON: Exceeds the limit"),
        (b"[" * 100_000, "byte 20: the row is not valid JSON: the JSON is nested too deeply"),
    ],
)
def test_a_bad_row_names_file_line_and_byte(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "good"}\n \n\n' + line + b'\n{"text": "good"}\n'.replace(b"x", b""))
    with pytest.raises(DataError, match=rf"x\.jsonl, line 4, .*{says}"):
        read_all(path, tmp_path / "cache")


def test_json_that_python_reads_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'{"text": "nan", "score": NaN, "other": -Infinity}\n{"text": "big", "n": 123456789012345678901234567890}\n'
        b'{"text": "over", "n": 1e999}\n{"text": "first", "text": "last"}\n{"text": "\\ud800 alone"}\n'
    )
    assert [row["text"] for row in read_all(path, tmp_path / "cache")] == ["nan", "big", "over", "last", "\ud800 alone"]


def test_a_file_that_was_cut_under_the_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    reader = open_reader({"x": path}, tmp_path / "cache")
    os.truncate(path, 20)
    with pytest.raises(DataError, match="was changed while the run reads it"):
        reader.read(np.array([1]))


def test_the_index_is_made_once_and_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "x.jsonl", tmp_path / "cache"
    path.write_text('{"t": 1}\n' * 3)
    scans: list[Path] = []
    real = index.scan_block
    monkeypatch.setattr(index, "scan_block", lambda at, *block: scans.append(at) or real(at, *block))
    first = index_files({"x": path}, cache)[0]
    again = index_files({"x": path}, cache)[0]
    assert len(scans) == 1
    assert again.shard == first.shard
    assert again.starts.tolist() == first.starts.tolist()
    stat = path.stat()
    path.write_text('{"t":  1}' + "\n" + '{"t": 1}\n{"t":1}\n')  # as long as before
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # and as old
    assert path.stat().st_size == stat.st_size
    changed = index_files({"x": path}, cache)[0]
    assert len(scans) == 2
    assert changed.shard.sha256 != first.shard.sha256


@pytest.mark.parametrize("damage", [b"", b"{", b"not json\n", b'{"format": 1}\n' + b"\0" * 32])
def test_a_damaged_index_is_made_again(tmp_path: Path, damage: bytes) -> None:
    path, cache = tmp_path / "x.jsonl", tmp_path / "cache"
    path.write_text('{"t": 1}\n' * 3)
    good = index_files({"x": path}, cache)[0]
    file = next((cache / "index").glob("*.idx"))
    whole = file.read_bytes()
    for raw in (damage, whole[:-3], whole + b"x"):
        file.write_bytes(raw)
        assert index_files({"x": path}, cache)[0].starts.tolist() == good.starts.tolist()
    assert file.read_bytes() == whole


def test_an_index_of_another_format_is_made_again_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, cache = tmp_path / "x.jsonl", tmp_path / "cache"
    path.write_text('{"t": 1}\n' * 3)
    with monkeypatch.context() as patch:
        patch.setattr(index, "_FORMAT", 1)
        index_files({"x": path}, cache)
    file = next((cache / "index").glob("*.idx"))
    file.write_bytes(file.read_bytes().replace(b'"members"', b'"unknown"'))
    assert index_files({"x": path}, cache)[0].shard.rows == 3
    assert b'"format": 4' in file.read_bytes()
    assert not caplog.records


def test_what_killed_indexers_left_is_swept(tmp_path: Path) -> None:
    path, cache = tmp_path / "x.jsonl", tmp_path / "cache"
    path.write_text('{"t": 1}\n')
    index_files({"x": path}, cache)
    file = next((cache / "index").glob("*.idx"))
    left = file.with_name(f"{file.name}.tmp-{os.uname().nodename}-99999")
    left.write_bytes(b"half")
    path.write_text('{"t": 1}\n' * 2)
    index_files({"x": path}, cache)
    assert [one.name for one in (cache / "index").iterdir()] == [file.name]


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, cache = tmp_path / "x.jsonl", tmp_path / "cache"
    path.write_text('{"t": 1}\n')
    cache.write_text("a file where the folder should be")
    assert index_files({"x": path}, cache)[0].shard.rows == 1
    assert "Cannot keep the index" in caplog.text


def _index_in_child(
    path: Path, cache: Path, go: "threading.Barrier", out: "multiprocessing.Queue[tuple[int, str]]"
) -> None:
    go.wait()
    found = index_files({"x": path}, cache)[0]
    out.put((found.shard.rows, found.shard.sha256))


def test_many_processes_may_start_at_once(tmp_path: Path) -> None:
    path, cache = tmp_path / "x.jsonl", tmp_path / "cache"
    path.write_text('{"t": "some text"}\n' * 20_000)
    context = multiprocessing.get_context("spawn")
    go, out = context.Barrier(6), context.Queue()
    children = [context.Process(target=_index_in_child, args=(path, cache, go, out)) for _ in range(6)]
    for child in children:
        child.start()
    found = {out.get(timeout=60) for _ in children}
    for child in children:
        child.join()
    assert len(found) == 1
    assert next(iter(found))[0] == 20_000
    assert len(list((cache / "index").iterdir())) == 1


def test_progress_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"t": 1}\n' * 10)
    told: list[tuple[int, int]] = []
    index_files({"x": path}, tmp_path / "cache", lambda done, total: told.append((done, total)))
    assert told == [(90, 90)]


def test_threads_share_a_reader_of_more_files_than_may_be_open(tmp_path: Path) -> None:
    files = {f"{i:02}": tmp_path / f"{i:02}.jsonl" for i in range(12)}
    for i, path in enumerate(files.values()):
        path.write_text("".join(json.dumps({"n": 50 * i + k}) + "\n" for k in range(50)))
    reader, start = JsonlReader(index_files(files, tmp_path / "cache"), open_files=2), threading.Barrier(8)

    def work(seed: int) -> bool:
        start.wait()
        rng = np.random.default_rng(seed)
        picks = [rng.integers(0, 600, 5) for _ in range(300)]
        return all([row["n"] for row in reader.read(pick)] == pick.tolist() for pick in picks)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert len(reader._files._files) == 2
    reader.close()


def test_a_large_index_is_mapped_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n" * 40_000)
    index_files({"x": path}, tmp_path / "cache")
    warm: LineIndex = index_files({"x": path}, tmp_path / "cache")[0]
    assert isinstance(warm.starts, np.memmap)


def test_a_file_that_changes_is_never_read_on_silently(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"t": 1}\n' * 100)
    reader = open_reader({"x": path}, tmp_path / "cache")
    assert len(reader.read(np.arange(100))) == 100
    os.utime(path, ns=(0, 0))  # a change of the same size, in place
    with pytest.raises(DataError, match="was changed while the run reads it"):
        reader.read(np.arange(3))
    other = tmp_path / "other.jsonl"
    other.write_text('{"t": 2}\n' * 101)
    reader = open_reader({"x": path}, tmp_path / "cache")
    other.replace(path)
    with pytest.raises(DataError, match="was changed while the run reads it"):
        reader.read(np.arange(3))


def test_a_file_that_changes_while_others_are_indexed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new state was taken for the one that was indexed, and rows came out as halves of others."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"t": 1}\n' * 100)
    real = sources.index_files

    def change(*args: Any) -> object:
        found = real(*args)
        path.write_text('{"t": 22}\n' * 90)
        return found

    monkeypatch.setattr(sources, "index_files", change)
    opened = sources._open_jsonl({"s": {"x": path}}, tmp_path / "cache", None, Budget.of(2**31))
    with pytest.raises(DataError, match="was changed while the run reads it"):
        opened["s"].reader.read(np.arange(3))


def test_a_file_that_grows_while_it_is_indexed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"t": 1}\n' * 10)
    real = index.scan_block

    def grow(at: Path, *block: int) -> object:
        with path.open("a") as file:
            file.write('{"t": 2}\n')
        return real(at, *block)

    monkeypatch.setattr(index, "scan_block", grow)
    with pytest.raises(DataError, match="was changed while it was indexed"):
        index_files({"x": path}, tmp_path / "cache")


def test_an_offset_that_is_damaged_under_the_run_is_an_error_not_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_MAPPED_BYTES", 0)
    path, cache = tmp_path / "x.jsonl", tmp_path / "cache"
    path.write_text('{"t": 1}\n' * 3)
    index_files({"x": path}, cache)
    reader, at = open_reader({"x": path}, cache), next((cache / "index").glob("*.idx"))
    with at.open("r+b") as file:
        file.seek(-9, 2)
        file.write(b"\x40")  # the last row would begin at 2**62
    with pytest.raises(DataError, match="cached index of .* is damaged"):
        reader.read(np.arange(3))
