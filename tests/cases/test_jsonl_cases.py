"""JSONL as users have it: marks, odd ends, odd values, bad lines, bad bytes, joined and cut archives, hidden twins."""

import bz2
import codecs
import gzip
import io
import itertools
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.makers import (
    corpus,
    delivered,
    document,
    images,
    law,
    lines,
    lines_of,
    own_code,
    pairs,
    ranks,
    recipe,
    row,
    saved,
    seen,
    source,
    tar,
    told,
    trace,
    write,
)
from zephon import DataError, RecipeError, Stream
from zephon.command.cli import main

SKIP = {"on_error": "skip", "max_bad": 1000}
NAMES = [f"d{i}" for i in range(6)]
TEXTS = [document(name) for name in NAMES]


# --- JSL-1 ---------------------------------------------------------------------------------------------------------


@law(15)
@given(
    mark=st.booleans(),
    ends=st.lists(st.sampled_from([b"\n", b"\r\n"]), min_size=6, max_size=6),
    blanks=st.lists(st.sampled_from([b"", b"\n", b"\r\n", b"  \n", b"\t\r\n", b"\n\n \n"]), min_size=7, max_size=7),
    last=st.booleans(),
)
def test_marks_line_ends_and_blank_lines_are_harmless(
    tmp_path_factory: pytest.TempPathFactory, mark: bool, ends: list[bytes], blanks: list[bytes], last: bool
) -> None:
    """A byte-order mark changed how a file was read; one blank line made a whole file vanish behind a warning.

    https://github.com/huggingface/datasets/issues/8241, https://github.com/microsoft/graphrag/issues/2424
    """
    folder = tmp_path_factory.mktemp("dress")
    body = b"".join(blank + row(name) + end for blank, name, end in zip(blanks, NAMES, ends, strict=False))
    body = body + blanks[-1] if last else body.rstrip(b"\r\n")
    write(folder / "x.jsonl", codecs.BOM_UTF8 * mark + body)
    found = delivered(recipe(folder, source("x.jsonl")))
    assert found.texts == TEXTS
    assert not any(found.counts["s"].values())


def test_a_resume_finds_its_place_in_any_dress(tmp_path: Path) -> None:
    """After a mark, CRLF and blank lines a saved place must still mean the same document (reports: see above).

    https://github.com/huggingface/datasets/issues/8241
    """
    write(tmp_path / "x.jsonl", codecs.BOM_UTF8 + b"\r\n" + b"\r\n \r\n".join(map(row, NAMES)) + b"\r\n\r\n")
    with Stream.open(recipe(tmp_path, source("x.jsonl"), lanes=1, seq_len=16)) as stream:
        whole = trace(ranks(stream, 1), 60)  # more than one pass
        for at in range(1, 50, 7):
            first = ranks(stream, 1)
            trace(first, at)
            assert trace(ranks(stream, 1, saved(first)), 60 - at) == whole[at:]


# --- JSL-2 ---------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [None, "text", 3, 2.5, ["a"], {"k": None}, True, {}, []]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_types_of_a_field_may_change_after_any_number_of_nulls(tmp_path: Path, order: tuple[str, str]) -> None:
    """A field that is null in the first block, or the first file, is typed as null; the first value stops the load.

    https://github.com/huggingface/datasets/issues/7222, https://github.com/apache/arrow/issues/40107
    """
    parts = {
        "a": [row(f"a{i}", opt=None) for i in range(2000)],
        "b": [row(f"b{i}", opt=value) for i, value in enumerate(VALUES)],
    }
    for number, part in enumerate(order):
        lines(tmp_path / f"{number}.jsonl", parts[part])
    found = delivered(recipe(tmp_path, source("*.jsonl"), seq_len=4096))
    assert found.texts == [document(json.loads(one)["id"]) for part in order for one in parts[part]]


def test_a_map_sees_nulls_and_values_as_they_are(tmp_path: Path) -> None:
    """The same field, used: a map must get what stands in the file, not what the first block made of it.

    https://github.com/huggingface/datasets/issues/7222
    """
    lines(tmp_path / "x.jsonl", [row(f"n{i}", "t", opt=value) for i, value in enumerate(VALUES)])
    name = own_code(tmp_path, "import json\ndef f(row): return {'text': json.dumps(row['opt'])}")
    found = delivered(recipe(tmp_path, source("x.jsonl", map=f"{name}:f")))
    assert [json.loads(text) for text in found.texts] == VALUES


# --- JSL-3 ---------------------------------------------------------------------------------------------------------

ODD = {
    "NaN": b'{"text": "nan", "x": NaN}',
    "Infinity": b'{"text": "inf", "x": Infinity, "y": -Infinity}',
    "huge integer": b'{"text": "big", "x": 123456789012345678901234567890}',
    "huge exponent": b'{"text": "over", "x": 1e999}',
    "unused key twice": b'{"text": "unused", "x": 1, "x": 2}',
    "text twice": b'{"text": "first", "text": "second"}',
    "deep": b'{"text": "deep", "x": ' + b"[" * 200 + b"]" * 200 + b"}",
    "control character": b'{"text": "tab\\there", "x": "\\u0001"}',
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_odd_values_mean_what_pythons_json_says(tmp_path: Path, odd: str, policy: str) -> None:
    """NaN, Infinity and repeated keys are read by one parser and refused by the next; of two texts one vanishes.

    Our rule: as Python's `json`, so of two texts the last. It holds on the fast path and the slow one, which a row
    with NaN takes.

    https://github.com/aqlaboratory/openfold-3/issues/167, https://github.com/duckdb/duckdb/issues/11152
    """
    rows = [row("p0"), ODD[odd], ODD["NaN"], row("p1")]
    lines(tmp_path / "x.jsonl", rows)
    found = delivered(recipe(tmp_path, source("x.jsonl", on_error=policy)))
    assert found.texts == [json.loads(one)["text"] for one in rows]
    assert not found.skipped


# --- JSL-4 ---------------------------------------------------------------------------------------------------------

BAD = [row("g2") * 2, row("g3") + b" trailing", b'"a string"', b"[1, 2]", row("g5")[:50], row("g0")[:40]]
BROKEN = [row("g0"), row("g1"), *BAD[:4], row("g4"), BAD[4], row("g6"), BAD[5]]
GOOD = [document(f"g{i}") for i in (0, 1, 4, 6)]


def test_a_bad_line_costs_that_line_and_is_named(tmp_path: Path) -> None:
    """Two objects on one line killed the reader, and the run ended minutes later without a pointer to the line.

    The skip list names the row (from 0) and the byte of the fault, from which the line follows.

    https://github.com/facebookresearch/lingua/issues/42, https://github.com/thunlp/GEAR/issues/2
    """
    write(tmp_path / "docs.jsonl", b"\n".join(BROKEN))
    found = delivered(recipe(tmp_path, source("docs.jsonl", **SKIP)))
    assert found.texts == GOOD
    assert found.counts["s"]["bad row"] == 6
    assert lines_of(found.skipped, tmp_path / "docs.jsonl") == [3, 4, 5, 6, 8, 10]


@pytest.mark.parametrize("run", ["", 'runner = "threads"\nworkers = 4', "isolate = true"])
def test_a_bad_line_stops_every_rank_with_file_and_line(tmp_path: Path, run: str) -> None:
    """With "raise" the error names file, line and byte, on every rank, whoever reads.

    So in a finite stream, which every rank decides whole. A lane is read by its own rank: the launcher ends the others.

    https://github.com/facebookresearch/lingua/issues/42
    """
    lines(tmp_path / "docs.jsonl", [*(row(f"g{i}") for i in range(70)), BAD[0]])
    path = recipe(tmp_path, source("docs.jsonl"), size=2, more=f"[run]\n{run}")
    with Stream.open(path) as stream:
        for loader in ranks(stream, 2):
            with pytest.raises(DataError, match=r"docs\.jsonl, line 71, byte \d+: .*Extra data"):
                trace([loader], 60)


def test_bad_lines_are_counted_once_through_ranks_and_resumes(tmp_path: Path) -> None:
    """Counts of bad lines doubled with every worker and every resume.

    https://github.com/facebookresearch/lingua/issues/42
    """
    rows = [bad for i in range(60) for bad in (row(f"g{i}"), *([BAD[i % 6]] if i % 7 == 0 else []))]
    lines(tmp_path / "docs.jsonl", rows)
    with Stream.open(recipe(tmp_path, source("docs.jsonl", **SKIP), lanes=4, size=4)) as stream:
        whole = ranks(stream, 1)
        trace(whole, 9)
        first = ranks(stream, 4)
        trace(first, 4)
        second = ranks(stream, 2, saved(first))
        trace(second, 5)
        wanted = whole[0].stats().dropped["s"]["bad row"]
        assert wanted == sum(one.stats().dropped["s"]["bad row"] for one in second) > 0
        assert sorted(whole[0].take_skipped()) == sorted(skip for one in first + second for skip in one.take_skipped())


def test_bad_lines_behind_the_last_sequence_are_named_too(tmp_path: Path) -> None:
    """The last record of a download is the one that is cut; it must be named also where no sequence comes after it.

    https://github.com/thunlp/GEAR/issues/2
    """
    lines(tmp_path / "docs.jsonl", [row("full", "x" * 63), *BAD])  # with BOS 64 positions: one whole sequence
    found = delivered(recipe(tmp_path, source("docs.jsonl", **SKIP), seq_len=64))
    assert found.texts == ["x" * 63]
    assert len(found.skipped) == len(BAD)


def test_a_file_of_bad_lines_alone_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file whose every line is bad must not pass for a file that was read.

    https://github.com/microsoft/graphrag/issues/2424
    """
    lines(tmp_path / "docs.jsonl", BAD)
    assert "6 bad row" in told(recipe(tmp_path, source("docs.jsonl", **SKIP)), caplog)


# --- JSL-5 ---------------------------------------------------------------------------------------------------------

NOT_UTF8 = [
    b"caf\xe9",
    b"\xe6\x97",
    b"\xc0\xaf",
    b"\xed\xa0\x80",
    b"\xff",
    b"\xf8\x88\x80\x80\x80",
    b"\x80",
    b"\xfe\xff",
]


@law(20)
@given(st.lists(st.one_of(st.just(b""), st.sampled_from(NOT_UTF8), st.binary(min_size=1, max_size=4)), max_size=12))
def test_bytes_that_are_not_utf8_cost_their_record_alone(
    tmp_path_factory: pytest.TempPathFactory, inside: list[bytes]
) -> None:
    """A few Latin-1 bytes in the middle of a large file ended the run with an offset within some block.

    https://github.com/jingyaogong/minimind/issues/13
    """
    rows, wanted, bad = [row("first")], [document("first")], 0
    for raw in inside:
        one = b'{"text": "x ' + raw.translate(None, b'"\\' + bytes(range(32))) + b' y"}'
        rows += [one, row("good", "caf\u00e9 \u65e5\u672c \U0001f642")]
        try:
            wanted.append(json.loads(one.decode())["text"])
        except UnicodeDecodeError:
            bad += 1
        wanted.append("caf\u00e9 \u65e5\u672c \U0001f642")
    folder = tmp_path_factory.mktemp("bytes")
    lines(folder / "x.jsonl", [*rows, row("last")])
    found = delivered(recipe(folder, source("x.jsonl", **SKIP)))
    assert found.texts == [*wanted, document("last")]
    assert len(found.skipped) == bad
    assert all("is not valid UTF-8" in skip.reason for skip in found.skipped)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-8-sig"])
def test_other_encodings_are_named_and_never_half_read(tmp_path: Path, encoding: str) -> None:
    """A file in UTF-16 must not come out as letters with zeros between.

    https://github.com/jingyaogong/minimind/issues/13
    """
    text = "\n".join(row(f"w{i}").decode() for i in range(3))
    write(tmp_path / "x.jsonl", text.encode(encoding))
    if encoding == "utf-8-sig":
        assert len(delivered(recipe(tmp_path, source("x.jsonl"))).texts) == 3
        return
    with pytest.raises(DataError, match=r"x\.jsonl, line 1, byte 0: the row is not valid JSON"):
        delivered(recipe(tmp_path, source("x.jsonl")))


# --- JSL-6 ---------------------------------------------------------------------------------------------------------

PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
PARTS = [row(f"z{i:02}") + b"\n" for i in range(24)]
WHOLE = b"".join(PARTS)


def members(pack: Any, *cuts: int) -> list[bytes]:
    ends = [0, *cuts, len(WHOLE)]
    return [pack(WHOLE[a:b]) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("suffix", PACKERS)
def test_all_members_of_a_compressed_file_are_read(tmp_path: Path, suffix: str) -> None:
    """A .gz of joined members was read to the end of the first one, without an error.

    https://github.com/Nullus157/async-compression/issues/75, https://github.com/madler/zlib/issues/984
    """
    joined = b"".join(members(PACKERS[suffix], 700, 700, len(WHOLE) // 2 + 3))  # one of them empty, one in mid-record
    write(tmp_path / f"x.jsonl{suffix}", joined)
    path = recipe(tmp_path, source(f"x.jsonl{suffix}"))
    assert delivered(path).texts == [document(f"z{i:02}") for i in range(24)]
    with Stream.open(recipe(tmp_path, source(f"x.jsonl{suffix}"), lanes=1)) as stream:
        whole = trace(ranks(stream, 1), 30)
        first = ranks(stream, 1)
        trace(first, 21)
        assert trace(ranks(stream, 1, saved(first)), 9) == whole[21:]


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("fault", ["cut", "checksum", "zeros behind", "text behind"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_damaged_end_is_an_error_not_an_end(tmp_path: Path, suffix: str, fault: str, policy: str) -> None:
    """What follows a damaged or padded end was lost without a word.

    Our rule: damage stops the start, whatever `on_error` says, and so do zeros behind the end: a crash leaves the same.

    https://github.com/madler/zlib/issues/984
    """
    parts = members(PACKERS[suffix], 900)
    joined = b"".join(parts)
    at = {".gz": 8, ".bz2": 10, ".xz": 40}[suffix]
    damaged = {
        "cut": joined[: -len(parts[-1]) // 2],
        "checksum": joined[:-at] + bytes([joined[-at] ^ 0xFF]) + joined[1 - at :],
        "zeros behind": joined + bytes(512),
        "text behind": joined + b'{"text": "behind"}\n',
    }[fault]
    write(tmp_path / f"x.jsonl{suffix}", damaged)
    with pytest.raises(DataError, match=rf"x\.jsonl{suffix}\b.*(Get the file again|write the file again)"):
        delivered(recipe(tmp_path, source(f"x.jsonl{suffix}", on_error=policy)))


# --- JSL-7 ---------------------------------------------------------------------------------------------------------

TWIN = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(90)


def test_hidden_and_temporary_files_are_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder packed on a Mac holds a `._` twin of every file, and globs took them for data.

    https://github.com/alexa/massive/issues/8, https://github.com/mvt-project/mvt/pull/922
    """
    texts = corpus(tmp_path / "data", 2, 3)
    for name in ("._d00.jsonl", "._d01.jsonl", ".hidden.jsonl", "x.jsonl.tmp", "x.jsonl.part"):
        write(tmp_path / "data" / name, TWIN)
    for pattern in ("data/*.jsonl", "data/**/*.jsonl", "**/*.jsonl"):
        assert delivered(recipe(tmp_path, source(pattern))).texts == texts
    with pytest.raises(SystemExit) as stop:
        main(["check", str(tmp_path / "recipe.toml"), "--json"])
    lines_told = map(json.loads, capsys.readouterr().out.splitlines())
    found = [(line["shards"], line["rows"]) for line in lines_told if "shards" in line]
    assert (stop.value.code, found) == (0, [(2, 6)])


def test_hidden_twins_in_a_tar_belong_to_no_sample(tmp_path: Path) -> None:
    """The same twins in an archive became samples of their own, or gave a sample a second picture.

    https://github.com/mvt-project/mvt/pull/922
    """
    twins = [one for name, data in pairs(3) for one in ((f"._{name}", TWIN), (name, data))]
    tar(tmp_path / "pack.tar", twins)
    found, about = seen(recipe(tmp_path, images("pack.tar"), more='[packing]\nalgorithm = "best_fit"\n'))
    assert [one.text for one in found] == ["caption 0", "caption 1", "caption 2"]
    assert not any(about.counts["s"].values())


def test_a_pattern_without_a_match_is_shown(tmp_path: Path) -> None:
    """A mistyped pattern must stop the start, not train on nothing.

    https://github.com/alexa/massive/issues/8
    """
    corpus(tmp_path / "data", 1, 1)
    with pytest.raises(RecipeError, match=r"no file matches 'data/\*\.nothing'"):
        delivered(recipe(tmp_path, source("data/*.jsonl", "data/*.nothing")))


def test_gzip_as_gzip_itself_writes_it(tmp_path: Path) -> None:
    """A member with its name, comment and header checksum is a member like any other.

    https://github.com/Nullus157/async-compression/issues/75
    """
    out = io.BytesIO()
    with gzip.GzipFile("docs.jsonl", "wb", fileobj=out) as file:
        file.write(WHOLE)
    write(tmp_path / "x.jsonl.gz", out.getvalue())
    assert len(delivered(recipe(tmp_path, source("x.jsonl.gz"))).texts) == 24
