"""What fuzzing has found (`python -m benchmarks.fuzz`): the smallest input of each kind, and the fuzzer itself."""

import contextlib
import errno
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.fuzz import law, tables, worker
from benchmarks.fuzz.states import HEADER, RECIPE, RUNNING, STATE
from modalities.media import MediaError, media
from zephon.errors import DataError, RecipeError, RestoreError, UsageError
from zephon.formats.index import index_files
from zephon.formats.jsonl import JsonlReader
from zephon.formats.parquet import open_parquet
from zephon.recipe import Recipe
from zephon.restore import compare_headers
from zephon.run.skips import read_skips
from zephon.state import LaneState, _checksum, tag_of


def signed(numbers: bytes) -> bytes:
    body = tag_of(HEADER) + numbers
    return body + _checksum("lane_00000", body)


BODY = STATE.encode("lane_00000", tag_of(HEADER))[16:-4]
STATES = {
    "no source, and a segment": b"\0\0\1\1" + bytes(6),
    "sources that are missing": b"\2\0\0\0",
    "counters that are missing": b"\1\0\0\0\0\0\0\5",
    "segments that are missing": BODY[:-3],
    "more than there is": BODY + b"\0",
    "two rests": BODY.replace(b"\1\2\1\2", b"\2\2\1\2", 1),
    "a number written longer than it is": b"\x82\0" + BODY[1:],
    "2**60 segments": b"\1" + bytes(7) + b"\0\1" + b"\xff" * 8 + b"\x0f",
    "a number of a megabyte": b"\1" + b"\xff" * 1_000_000,
}


@pytest.mark.parametrize("case", STATES)
def test_a_lane_state_that_no_lane_writes_is_refused(case: str) -> None:
    assert LaneState.decode("lane_00000", signed(BODY), HEADER) == STATE
    with pytest.raises(RestoreError, match=r"'lane_00000'.*not those of a lane"):
        LaneState.decode("lane_00000", signed(STATES[case]), HEADER)


HEADERS: dict[str, Any] = {
    "a step that is infinite": {"step": float("inf")},
    "a step below 0": {"step": -1},
    "a step that is text": {"step": "5"},
    "a history of text": {"history": "abc"},
    "a history without fields": {"history": [{"step": 1}]},
    "a history that runs back": {"history": [{"step": 3, "fields": {}}, {"step": 2, "fields": {}}]},
    "a history of batches that are none": {"history": [{"step": 1, "fields": {"global_batch_size": ["x", "8"]}}]},
    "a batch that is null": {"global_batch_size": None},
    "a batch below 0": {"global_batch_size": -8},
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_with_an_odd_value_is_refused(case: str) -> None:
    assert compare_headers(HEADER, RUNNING).step == 5
    raw = json.dumps({**RUNNING, "step": 5, **HEADERS[case]}).encode()
    with pytest.raises(RestoreError, match="header in this checkpoint cannot be read"):
        compare_headers(raw, RUNNING, ("global_batch_size",))


@pytest.mark.parametrize("depth", [400, 100_000])
def test_a_header_that_is_nested_deeply_is_refused(depth: int) -> None:
    raw = b'{"step": 5, "global_batch_size": 8, "x": ' + b"[" * depth + b"]" * depth + b"}"
    with pytest.raises(RestoreError, match="checkpoint"):
        compare_headers(raw, RUNNING)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"max_bad = 0.01", b"max_bad = nan"),
        (b"max_bad = 0.01", b"max_bad = 1e-999999999999"),
        (b"seed = 7", b"seed = 0x" + b"f" * 5000),
        (b"weight = 0.7", b"weight = 1e-999999999999"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_the_recipe(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(RECIPE)
    Recipe.load(path)
    path.write_bytes(RECIPE.replace(old, new))
    with pytest.raises(RecipeError, match=r"recipe\.toml"):
        Recipe.load(path)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"source": null, "place": "p", "reason": "r", "step": 1, "lane": 0}',
        b'{"source": "a", "place": {}, "reason": "r", "step": 1, "lane": 0}',
        b'{"source": "a", "place": "p", "reason": "r", "step": "1", "lane": 0}',
    ],
)
def test_an_odd_line_of_a_skip_list_is_named(tmp_path: Path, line: bytes) -> None:
    good = b'{"source": "a", "place": "p", "reason": "r", "step": 1, "lane": 0}\n'
    path = tmp_path / "skips.jsonl"
    path.write_bytes(good + line + b"\n" + good)
    with pytest.raises(UsageError, match=r"skips\.jsonl, line 2"):
        read_skips(path)


def test_a_damaged_index_of_lines_is_never_believed(tmp_path: Path) -> None:
    """Offsets within the file were: two rows became one that is no JSON, and the skip list blamed the file."""
    path, cache = tmp_path / "x.jsonl", tmp_path / "cache"
    path.write_text('{"t": 1}\n{"t": 22}\n\n{"t": 333}\n')
    want = JsonlReader(index_files({"x": path}, cache)).read(np.arange(3))
    (at,) = (cache / "index").glob("*.idx")
    whole = at.read_bytes()
    for place in range(len(whole)):
        at.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert JsonlReader(index_files({"x": path}, cache)).read(np.arange(3)) == want, place
    at.write_bytes(b"[" * 100_000)
    assert JsonlReader(index_files({"x": path}, cache)).read(np.arange(3)) == want


def test_a_column_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"column": [1]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"column", b"\xc4olumn"))
    with pytest.raises(DataError, match=r"x\.parquet: the footer cannot be read .*utf-8"):
        open_parquet({"x": path})


@pytest.mark.parametrize("mask", [1, 128])
def test_every_byte_of_a_parquet_file_damaged(tmp_path: Path, mask: int) -> None:
    """One of them promised rows that its pages do not hold, which were an error of pyarrow's."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"n": list(range(8)), "t": list("abcdefgh")}), path, row_group_size=4, store_schema=False)
    raw = path.read_bytes()
    for at in range(len(raw)):
        tables.read(raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :], path)


@pytest.mark.parametrize("name", ["", ".", "sub"])
def test_a_folder_is_no_image(tmp_path: Path, name: str) -> None:
    """Reading it was a fault of the storage, which stops a run whatever `on_error` says."""
    (tmp_path / "sub").mkdir()
    with pytest.raises(MediaError, match="no regular file"):
        media(name, tmp_path)


@pytest.mark.parametrize("name", worker.TARGETS)
def test_targets_keep_the_law_on_a_few_inputs(name: str, tmp_path: Path) -> None:
    target, draw = worker.find(name), random.Random(5)
    law.broken(name, target, b"", tmp_path, 0)
    for _ in range(20):
        data = draw.randbytes(draw.choice((8, 40, 300)))
        assert law.broken(name, target, data, tmp_path, law.peak())[1] is None


def test_a_planted_fault_is_found_and_made_small(tmp_path: Path) -> None:
    def planted(data: bytes, folder: Path) -> str:
        if b"\x07" in data:
            raise OSError(errno.EIO, "planted")
        return "fine"

    assert law.broken("planted", planted, b"abc", tmp_path, 0) == ("fine", None)
    _, finding = law.broken("planted", planted, b"ab\x07" + bytes(range(50)), tmp_path, 0)
    assert finding
    assert law.shrunk(finding, planted, tmp_path, 0).data == b"\x07"
    assert law.Finding.parse(finding.line()) == finding


def test_a_session_counts_and_keeps_each_finding_once(tmp_path: Path) -> None:
    (tmp_path / "current").write_bytes(bytes(worker.HEAD.size + worker.MOST_BYTES))

    def planted(data: bytes, folder: Path) -> str:
        with contextlib.suppress(IndexError):
            assert data[0] != 7
        return f"{len(data)} bytes"

    session = worker.Session("planted", planted, 60.0, tmp_path)
    assert [session.run(data) for data in (b"x", b"yy", b"\x07x", b"\x07")] == [True, False, True, False]
    assert session.count == 4
    lines = (tmp_path / "found").read_text().splitlines()
    assert {law.Finding.parse(line).data for line in lines} == {b"\x07x", b"\x07"}


@pytest.mark.parametrize("where", ["[[sources]]\nname = 'a'\npaths = ['a']\nodd = {}", "lanes = {}", "x = [[1, {}]]"])
@pytest.mark.parametrize("number", ["0x" + "f" * 5000, "-0x" + "f" * 17, "9" * 20])
def test_a_whole_number_of_a_recipe_has_64_bits(tmp_path: Path, where: str, number: str) -> None:
    """Larger ones were taken where no limit was set; nothing could show them, or write them to a header."""
    path = tmp_path / "recipe.toml"
    path.write_text(where.format(number))
    with pytest.raises(RecipeError, match=r"recipe\.toml is not valid TOML"):
        Recipe.load(path)
