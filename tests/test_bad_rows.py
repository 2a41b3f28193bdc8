"""Bad rows: each costs itself, is named once, and is the same for every number of ranks, runner and resume."""

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import documents, write_jsonl
from test_tar import write_tar
from worlds import tokenizer_folder

from zephon import DataError, Loader, RecipeError, Stream
from zephon.digest import lane_digest
from zephon.loader import UNTAKEN
from zephon.run.skips import SkipWriter, read_skips
from zephon.transform import BAD_ROW
from zephon.types import Skip

BAD_LINES = (
    b'{"text": "cut', b'{"text": "bad \xff"}', b"[1, 2]", b"null", b'"text"', b"true", b'{"a": 1} {"b": 2}', b"3.5",
    b"{",
    b'{"text": "x"} trailing', b"{text: 1}", b"[" * 5000, b'{"n": ' + b"9" * 5000 + b"}", b'{"text": 3}',
    b'{"text": null}',
    b'{"txt": "x"}', b'{"text": ["a"]}', b'{"text": {"a": 1}}', b'{"text": true}', b"\xef\xbb\xbf{}",
)  # fmt: skip
"""Twenty kinds."""

WAYS = ("", 'runner = "threads"\nworkers = 2', 'runner = "process"\nworkers = 2', "isolate = true")


def write_lines(path: Path, good: Sequence[str], bad: dict[int, bytes]) -> None:
    """Good documents, with bad lines before those of some numbers."""
    lines: list[bytes] = []
    for i, text in enumerate(good):
        lines += [bad[i]] if i in bad else []
        lines.append(json.dumps({"text": text}).encode())
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def recipe(folder: Path, keys: str = 'on_error = "skip"\nmax_bad = 1000', lanes: int = 4, run: str = "") -> Path:
    path = folder / "recipe.toml"
    path.write_text(
        f"seed = 3\nlanes = {lanes}\n[batch]\nseq_len = 32\nglobal_batch_size = {2 * lanes}\n[tokenizer]\n"
        f'path = "{tokenizer_folder("both")}"\n[[sources]]\nname = "a"\npaths = ["*.jsonl"]\n{keys}\n'
        f'[shuffle]\nwindow = 16\n[run]\ncache = "cache"\n{run}\n'
    )
    return path


def deliver(loaders: list[Loader], steps: int) -> tuple[list[dict[int, bytes]], list[Skip]]:
    """Digests of steps, and the bad rows that were left out in them."""
    digests: list[dict[int, bytes]] = []
    for _ in range(steps):
        records = [loader.step_records() for loader in loaders]
        digests.append({lane: lane_digest(mine) for one in records for lane, mine in one.items()})
    return digests, sorted(skip for loader in loaders for skip in loader.take_skipped())


def test_good_rows_are_delivered_as_if_the_bad_ones_were_not_measured(tmp_path: Path) -> None:
    write_lines(tmp_path / "x.jsonl", documents(40), dict(zip(range(0, 40, 2), BAD_LINES, strict=True)))
    path = recipe(tmp_path, 'on_error = "skip"\nmax_bad = 20\nepochs = 1')
    path.write_text(path.read_text().replace("lanes = 4\n", '[mix]\non_end = "renormalise"\n', 1))
    with Stream.open(path) as stream:
        loader = stream.loader(pad_last=True)
        inputs = [record["input"].tolist() for batch in loader for record in stream.worker.records(batch)]
        stats, skips = loader.stats(), loader.take_skipped()
    text = "".join(chr(one) if one < 256 else "\0" for row in inputs for one in row)
    assert all(document in text for document in documents(40) if len(document) < 20)
    assert stats.dropped["a"][BAD_ROW] == len(skips) == len(BAD_LINES)
    assert len({skip.place for skip in skips}) == len(BAD_LINES)
    assert {skip.place.split(", ")[1] for skip in skips} == {f"row {3 * i}" for i in range(20)}
    lines = (tmp_path / "x.jsonl").read_bytes()
    for skip in skips:  # the byte is that of the fault, or of the row
        row, byte = int(skip.place.split("row ")[1].split(",")[0]), int(skip.place.rsplit(" ", 1)[1])
        start = sum(len(line) + 1 for line in lines.split(b"\n")[:row])
        assert start <= byte <= start + len(lines.split(b"\n")[row])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_bad_rows_are_skipped_alike_on_any_ranks_and_after_resumes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("bad")
    count = data.draw(st.integers(20, 120))
    places = data.draw(st.dictionaries(st.integers(0, count - 1), st.sampled_from(BAD_LINES), max_size=count // 2))
    write_lines(folder / "x.jsonl", documents(count), places)
    with Stream.open(recipe(folder)) as stream:
        whole = deliver([stream.loader()], 6)
        assert {skip.place for skip in whole[1]} <= {
            skip.place for skip in deliver([stream.loader(rank, 2) for rank in range(2)], 6)[1]
        }
        at, world, again = data.draw(st.integers(1, 5)), *data.draw(st.permutations([1, 2, 4]))[:2]
        first = [stream.loader(rank, world) for rank in range(world)]
        digests, skips = deliver(first, at)
        state = {key: raw for loader in first for key, raw in loader.state_dict().items()}
        second = [stream.loader(rank, again) for rank in range(again)]
        for loader in second:
            loader.load_state_dict(state)
        more, others = deliver(second, 6 - at)
        assert (digests + more, sorted(skips + others)) == whole
        counted = sum(loader.stats().dropped["a"][BAD_ROW] for loader in second)
        assert counted == len(whole[1])


@pytest.mark.parametrize("run", WAYS)
def test_runners_skip_alike(tmp_path: Path, run: str) -> None:
    write_lines(tmp_path / "x.jsonl", documents(80), dict(zip(range(0, 80, 4), BAD_LINES, strict=True)))
    with Stream.open(recipe(tmp_path)) as stream:
        expected = deliver([stream.loader()], 5)
    with Stream.open(recipe(tmp_path, run=run)) as stream:
        assert deliver([stream.loader(rank, 2) for rank in range(2)], 5) == expected


@pytest.mark.parametrize(("keys", "says"), [("", "is not valid JSON"), ('on_error = "raise"', "line 1, byte 9")])
def test_text_raises_where_nothing_else_is_said(tmp_path: Path, keys: str, says: str) -> None:
    write_lines(tmp_path / "x.jsonl", documents(9), {0: b'{"text": "cut'})
    with pytest.raises(DataError, match=says):
        Stream.open(recipe(tmp_path, keys))


@pytest.mark.parametrize("run", WAYS)
def test_a_bad_row_stops_a_run_when_a_lane_comes_to_it(tmp_path: Path, run: str) -> None:
    """Not when it is read ahead, which depends on ranks and runners."""
    write_lines(tmp_path / "x.jsonl", documents(400), {390: b"{"})
    with Stream.open(recipe(tmp_path)) as stream:
        loader, skips = stream.loader(), list[Skip]()
        while not skips:
            loader.step_records()
            skips = loader.take_skipped()
    for world in (1, 2, 4):
        with Stream.open(recipe(tmp_path, "", run=run)) as stream:
            loaders = [stream.loader(rank, world) for rank in range(world)]
            done = 0
            with pytest.raises(DataError, match=r"^Source 'a': .*x\.jsonl, line 391, byte \d+: .*JSON"):
                for done in range(skips[0].step):  # noqa: B007
                    for loader in loaders:
                        loader.step_records()
            assert done == skips[0].step - 1


@pytest.mark.parametrize(
    ("limit", "stops"), [("3", True), ("999", False), ("0.001", True), ("0.9", False), ("0", True)]
)
def test_too_many_bad_rows_stop_the_run_and_can_be_allowed(tmp_path: Path, limit: str, stops: bool) -> None:
    write_lines(tmp_path / "x.jsonl", documents(100), dict.fromkeys(range(0, 100, 2), b"{"))
    with Stream.open(recipe(tmp_path, f'on_error = "skip"\nmax_bad = {limit}', lanes=1)) as stream:
        loader = stream.loader()
        state = loader.state_dict()
        if not stops:
            deliver([loader], 150)
            return
        with pytest.raises(DataError, match=r"Source 'a': lane 0 has come to \d+ bad rows, more than max_bad = .*Mend"):
            deliver([loader], 150)
        assert loader.take_skipped(), "of the step that was not handed over"
    with Stream.open(recipe(tmp_path, 'on_error = "skip"\nmax_bad = 1000', lanes=1)) as stream:
        loader = stream.loader()
        loader.load_state_dict(state)  # a higher limit is no other stream
        deliver([loader], 150)


def test_a_share_is_of_at_least_a_thousand_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "x.jsonl", documents(400), dict.fromkeys(range(10), b"{"))
    with Stream.open(recipe(tmp_path, 'on_error = "skip"', lanes=1)) as stream:
        deliver([stream.loader()], 60)  # 10 of 1,000: one per cent, the default


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ('on_error = "ignore"', "on_error must be one of 'raise', 'skip'"),
        ("max_bad = -1", "max_bad must be a number from 0 on"),
        ("max_bad = 1.5", "is a share above 1"),
        ("max_bad = true", "max_bad must be a number"),
        ('max_bad = "1%"', "max_bad must be a number"),
    ],
)
def test_policies_that_cannot_hold(tmp_path: Path, keys: str, says: str) -> None:
    write_jsonl(tmp_path / "x.jsonl", documents(9))
    with pytest.raises(RecipeError, match=says):
        Stream.open(recipe(tmp_path, keys))


def test_functions_of_the_users_may_fail_on_a_row(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", documents(60))
    (tmp_path / "picky.py").write_text(
        'def check(row):\n    if int(row["text"].split()[0][3:]) % 7 == 0:\n        raise ValueError("a seventh")\n'
        "    return True\n"
    )
    with Stream.open(recipe(tmp_path, 'on_error = "skip"\nmax_bad = 1000\nfilter = "picky:check"')) as stream:
        _, skips = deliver([stream.loader(rank, 2) for rank in range(2)], 20)
    assert {int(skip.place.split("row ")[1].split(",")[0]) for skip in skips} <= set(range(0, 60, 7))
    assert len({skip.place for skip in skips}) > 4
    assert all("a seventh" in skip.reason for skip in skips)


def test_tars_and_parquet_skip_rows_too(tmp_path: Path) -> None:
    good = [(f"k{i}.txt", b"good text") for i in range(20)]
    write_tar(tmp_path / "x.tar", [*good[:7], ("bad.txt", b"caf\xe9"), *good[7:]])
    cells = pa.array([b"good", b"caf\xe9", b"good"] * 5, pa.binary())
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.utf8(), 15, cells.buffers())}), tmp_path / "x.parquet")
    for pattern, rows in (("*.tar", 1), ("*.parquet", 5)):
        path = recipe(tmp_path, 'on_error = "skip"\nmax_bad = 1000\ntext = "txt"', lanes=1)
        text = path.read_text().replace("*.jsonl", pattern)
        path.write_text(text if pattern == "*.tar" else text.replace('text = "txt"', ""))
        with Stream.open(path) as stream:
            _, skips = deliver([stream.loader()], 30)
        assert len({skip.place for skip in skips}) == rows
        assert all("UTF-8" in skip.reason for skip in skips)


@pytest.mark.parametrize("run", ["", "isolate = true"])
def test_bad_rows_that_nobody_takes_are_told_and_do_not_pile_up(
    tmp_path: Path, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "some good text"}\n' + b"{\n" * 20)
    with Stream.open(recipe(tmp_path, 'on_error = "skip"\nmax_bad = 100000', lanes=1, run=run)) as stream:
        loader, other = stream.loader(), stream.loader()
        taken = list[Skip]()
        for _ in range(50):
            next(loader)
            next(other)
            taken += other.take_skipped()
        left = loader.take_skipped()
    told = [record.args for record in caplog.records if "nobody took" in record.msg]
    assert 0 < len(left) < 2 * UNTAKEN < len(taken)
    assert sum(cast(tuple[int], args)[0] for args in told) + len(left) == len(taken)
    assert left == taken[-len(left) :]


def test_skip_lists_count_a_row_once(tmp_path: Path) -> None:
    one, two = Skip("a", "x.jsonl, row 3, byte 9", "bad", 5, 0), Skip("a", "x.jsonl, row 4, byte 20", "bad", 6, 1)
    for name, skips in (("rank_0", [one, two]), ("rank_1", [one._replace(step=9, lane=3)])):
        writer = SkipWriter(tmp_path / "skipped" / f"{name}.jsonl")
        writer.write(skips)
        writer.close()
    with (tmp_path / "skipped" / "rank_1.jsonl").open("a") as file:
        file.write('{"source": "half')  # a run that was killed
    assert read_skips(tmp_path / "skipped") == [one, two]


@pytest.mark.parametrize("torn", [b'{"sou', b'{"source": "half', b'{"source": "a", "place": "' + b"x" * 200_000])
def test_a_torn_line_of_a_skip_list_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    """A kill or a full disk tore it; the run goes on with the same list, which then was none for good."""
    one, two = Skip("a", "x.jsonl, row 3, byte 9", "bad", 5, 0), Skip("a", "x.jsonl, row 4, byte 20", "bad", 6, 1)
    path = tmp_path / "skipped.jsonl"
    for before in ([one], []):
        path.write_bytes(b"".join(json.dumps(row._asdict()).encode() + b"\n" for row in before) + torn)
        writer = SkipWriter(path)
        writer.write([two])
        writer.close()
        assert read_skips(path) == [*before, two]


def test_a_run_without_bad_rows_leaves_an_empty_skip_list(tmp_path: Path) -> None:
    for _ in range(2):
        SkipWriter(tmp_path / "skipped" / "rank_0.jsonl").close()
    assert read_skips(tmp_path / "skipped") == []


def test_a_writer_that_is_dropped_loses_nothing_and_leaves_no_file_open(tmp_path: Path) -> None:
    """An open file would be a ResourceWarning, and with it a failure."""
    one = Skip("a", "a.jsonl, line 1, byte 0", "no JSON", 1, 0)
    SkipWriter(tmp_path / "skips.jsonl").write([one])
    gc.collect()
    assert read_skips(tmp_path / "skips.jsonl") == [one]
