"""Parquet from many writers: files without rows, text in every type, columns that differ from file to file."""

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cases.makers import delivered, document, ranks, recipe, source, tar, trace
from zephon import DataError, RecipeError, Stream

TEXTS = [document(f"t{i}") for i in range(6)]
SKIP = {"on_error": "skip", "max_bad": 1000}


def table(path: Path, group: int = 2, **columns: Any) -> None:
    pq.write_table(pa.table(columns), path, row_group_size=group)


# --- PQT-1 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("empties", [1, 3])
def test_files_without_rows_are_read_as_nothing(tmp_path: Path, at: int, empties: int) -> None:
    """A file without rows has no row group, and code that asks for the first one fails.

    https://github.com/huggingface/dataset-viewer/issues/2709
    """
    parts = [TEXTS[:2], TEXTS[2:]]
    for _ in range(empties):
        parts.insert(at, [])
    for number, part in enumerate(parts):
        table(tmp_path / f"{number}.parquet", text=pa.array(part, pa.string()))
    path = recipe(tmp_path, source("*.parquet"), size=3)
    assert delivered(path).texts == TEXTS
    with Stream.open(path) as stream:
        assert trace(ranks(stream, 3), 1) == trace(ranks(stream, 1), 1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_source_without_rows_is_refused(tmp_path: Path, count: int) -> None:
    """Nothing but files without rows: an error before the first step.

    https://github.com/huggingface/dataset-viewer/issues/2709
    """
    for number in range(count):
        table(tmp_path / f"{number}.parquet", text=pa.array([], pa.string()))
    with pytest.raises(RecipeError, match=f"Source 's' has no rows in {count} files"):
        delivered(recipe(tmp_path, source("*.parquet")))


# --- PQT-2 ---------------------------------------------------------------------------------------------------------

STRINGS = {
    "string": pa.array(TEXTS),
    "large": pa.array(TEXTS, pa.large_string()),
    "view": pa.array(TEXTS, pa.string_view()),
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "large dictionary": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
}
BINARIES = {
    "binary": pa.array([text.encode() for text in TEXTS]),
    "large binary": pa.array([text.encode() for text in TEXTS], pa.large_binary()),
    "binary view": pa.array([text.encode() for text in TEXTS], pa.binary_view()),
    "binary dictionary": pa.array([text.encode() for text in TEXTS]).dictionary_encode(),
}


@pytest.mark.parametrize("kinds", [STRINGS, BINARIES])
@pytest.mark.parametrize("backwards", [False, True])
def test_text_is_text_however_it_is_stored(tmp_path: Path, kinds: dict[str, pa.Array], backwards: bool) -> None:
    """One text column comes as string, large string, dictionary or bytes from different writers; readers refuse some.

    https://github.com/ray-project/ray/pull/64212, https://github.com/Eventual-Inc/Daft/issues/4746
    """
    for number, name in enumerate(sorted(kinds, reverse=backwards)):
        table(tmp_path / f"{number}.parquet", text=kinds[name])
    assert delivered(recipe(tmp_path, source("*.parquet"), seq_len=512)).texts == TEXTS * len(kinds)


def test_strings_and_bytes_in_one_source_are_refused_at_the_start(tmp_path: Path) -> None:
    """Our rule: columns are compared as Parquet stores them, and bytes are no strings for a filter or map.

    https://github.com/ray-project/ray/pull/64212
    """
    table(tmp_path / "0.parquet", text=STRINGS["string"])
    table(tmp_path / "1.parquet", text=BINARIES["binary"])
    with pytest.raises(DataError, match=r"Column 'text' differs .*String in .*0\.parquet, .*None in .*1\.parquet"):
        delivered(recipe(tmp_path, source("*.parquet")))


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (pa.array([["a", "b"]]), r"\['a', 'b'\]"),
        (pa.array([[]], pa.list_(pa.string())), r"\[\]"),
        (pa.array([{"role": "user", "text": "hi"}]), "'role': 'user'"),
        (pa.array([[{"text": None}]]), "'text': None"),
        (pa.array([12]), "it is 12"),
        (pa.array([1.5]), "it is 1.5"),
        (pa.array([True]), "it is True"),
        (pa.array([None], pa.string()), "it is None"),
        (pa.array([b"caf\xe9"]), "is not UTF-8: byte 3 is 0xe9"),
    ],
)
def test_what_is_no_text_is_a_bad_row_and_never_written_out(tmp_path: Path, cell: pa.Array, says: str) -> None:
    """Lists and numbers in the text column must not be trained on as "12" or "['a', 'b']".

    https://github.com/Eventual-Inc/Daft/issues/4746
    """
    table(tmp_path / "x.parquet", text=pa.concat_arrays([cell, cell]))
    with pytest.raises(DataError, match=rf"x\.parquet, row 0 \(row group 0\): field 'text' .*{says}"):
        delivered(recipe(tmp_path, source("*.parquet")))


def test_nulls_are_counted_and_their_neighbours_stay(tmp_path: Path) -> None:
    """A null in the text column follows the rule for missing text.

    https://github.com/Eventual-Inc/Daft/issues/4746
    """
    table(tmp_path / "x.parquet", text=pa.array(["x", None, "y", None, None, "z"]))
    found = delivered(recipe(tmp_path, source("*.parquet", **SKIP)))
    assert found.texts == ["x", "y", "z"]
    assert [skip.place.split("row ")[1].split()[0] for skip in found.skipped] == ["1", "3", "4"]


def test_text_may_be_a_member_of_a_tar_with_any_suffix(tmp_path: Path) -> None:
    """The same rule elsewhere: what is not decoded by its suffix is text if it is UTF-8.

    https://github.com/Eventual-Inc/Daft/issues/4746
    """
    tar(tmp_path / "x.tar", [("a.md", "caf\u00e9".encode()), ("b.md", b"caf\xe9"), ("c.md", b"last")])
    found = delivered(recipe(tmp_path, source("x.tar", text="md", **SKIP)))
    assert found.texts == ["caf\u00e9", "last"]
    assert [skip.reason for skip in found.skipped] == [
        "field 'md' is not UTF-8: byte 3 is 0xe9. Mend or remove the row."
    ]


# --- PQT-3 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(["base", "reordered", "nulls"])))
def test_order_of_columns_and_of_files_does_not_matter(tmp_path: Path, order: tuple[str, ...]) -> None:
    """Whether a read works, and what it gives, depended on which file comes first.

    https://github.com/pola-rs/polars/issues/24050
    """
    columns = {
        "base": {"id": ["b"], "text": ["base"], "src": ["web"]},
        "reordered": {"src": ["web"], "text": ["reordered"], "id": ["r"]},
        "nulls": {"id": ["n"], "text": ["nulls"], "src": pa.nulls(1)},
    }
    for number, name in enumerate(order):
        table(tmp_path / f"{number}.parquet", **columns[name])
    assert delivered(recipe(tmp_path, source("*.parquet"))).texts == list(order)


OTHER = {
    "extra": {"text": ["x"], "src": ["web"], "score": [0.5]},
    "lacking": {"text": ["x"]},
    "other type": {"text": ["x"], "src": [1]},
    "no text": {"body": ["x"], "src": ["web"]},
}


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_other_columns_are_refused_at_the_start_by_file_and_column(
    tmp_path: Path, other: str, first: bool, policy: str
) -> None:
    """A shard with other columns failed in a worker, far into the run.

    Our rule: the files of a source have the same columns, those that nobody uses included, since a filter or map may.

    https://github.com/pola-rs/polars/issues/24050
    """
    names = ("b.parquet", "a.parquet") if first else ("a.parquet", "b.parquet")
    table(tmp_path / names[0], text=["x"], src=["web"])
    table(tmp_path / names[1], **OTHER[other])
    with pytest.raises(DataError, match=r"Column '\w+' differs between files of one source: .*\.parquet, .*\.parquet"):
        delivered(recipe(tmp_path, source("*.parquet", on_error=policy)))
