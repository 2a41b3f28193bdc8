"""WebDataset tars: dots in names, members twice, cut archives, missing members, scattered members, long names."""

import itertools
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.makers import (
    Delivered,
    Seen,
    colour,
    images,
    law,
    lines,
    near,
    own_code,
    pairs,
    recipe,
    row,
    seen,
    tar,
    tile,
    told,
    write,
)
from zephon import DataError

WHOLE = '[packing]\nalgorithm = "best_fit"\n'


def read(folder: Path, *patterns: str, seq_len: int = 128, **keys: Any) -> tuple[list[Seen], Delivered]:
    found, about = seen(recipe(folder, images(*patterns, **keys), more=WHOLE, seq_len=seq_len))
    return sorted(found, key=lambda one: one.text), about


def numbers(found: Sequence[Seen]) -> list[int]:
    """The numbers in captions, each of which is checked against the colour of its picture."""
    out = [int(one.text.split()[1]) for one in found]
    for number, one in zip(out, found, strict=True):
        assert near(one.pictures[0].reshape(-1, 3).mean(0), colour(number), 6)
        assert len(one.pictures) == 1
    return out


def reasons(about: Delivered) -> dict[str, str]:
    """Why a sample was left out, by the key that its place names."""
    return {skip.place.split("sample ")[1].split(",")[0]: skip.reason for skip in about.skipped}


# --- TAR-1 ---------------------------------------------------------------------------------------------------------


def test_a_dot_in_a_name_is_reported_with_key_and_fields(tmp_path: Path) -> None:
    """The part of `track 2.0.jpg` behind its first dot became the extension, and the picture was missing.

    Our rule is webdataset's: the first dot of the last part of a name ends the key.

    https://github.com/webdataset/webdataset/issues/237
    """
    seg = [("s0.seg.png", tile(9, "PNG")), ("s1.seg.png", tile(9, "PNG"))]
    odd = [("track 2.0 (live).jpg", tile(7)), ("track 2.0 (live).txt", b"caption 7"), ("README", b"notes")]
    members = [*pairs(1), seg[0], *pairs(2)[2:], seg[1], *odd, (".hidden.json", b"{}"), *pairs(3)[4:]]
    tar(tmp_path / "shard.tar", members)
    found, about = read(tmp_path, "shard.tar")
    assert numbers(found) == [0, 1, 2]
    assert list(reasons(about)) == ["track 2"]
    assert "its fields ['0 (live).jpg', '0 (live).txt']" in reasons(about)["track 2"]
    found, about = read(tmp_path, "shard.tar", image="0 (live).jpg", text="0 (live).txt")  # the recipe may ask for it
    assert numbers(found) == [7]
    found, about = read(tmp_path, "shard.tar", image="seg.png")
    assert [near(one.pictures[0][0, 0], colour(9), 6) for one in found] == [True, True]


# --- TAR-2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("twice", ["s1.jpg", "s1.JPG", "s1.txt"])
def test_a_member_twice_is_named_before_the_run(tmp_path: Path, policy: str, twice: str) -> None:
    """A name that occurs twice raised from the grouping, past the error handler, and a second error hid the first.

    Our rule: such an archive is refused when it is indexed, whatever `on_error` says.

    https://github.com/webdataset/webdataset/issues/205, https://github.com/webdataset/webdataset/issues/286
    """
    members = pairs(4)
    members.insert(4, (twice, tile(1)))
    tar(tmp_path / "shard.tar", members)
    with pytest.raises(
        DataError, match=rf"shard\.tar, byte \d+: the member '{twice}' is the second '\w+' of its sample"
    ):
        read(tmp_path, "shard.tar", on_error=policy)


# --- TAR-3 ---------------------------------------------------------------------------------------------------------


def places(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as file:
        return {member.name: member for member in file.getmembers()}


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("cut", ["in data", "in a header", "text"])
def test_a_cut_archive_stops_the_start_by_name(tmp_path: Path, policy: str, cut: str) -> None:
    """A shard cut short ended the run with a read error, or its second half was missing and nobody was told.

    Our rule: a damaged file stops the start, since the order of all others depends on its rows.

    https://github.com/webdataset/webdataset/issues/142, https://github.com/mafintosh/tar-stream/issues/82
    """
    raw, at = tar(tmp_path / "a.tar", pairs(6)).read_bytes(), places(tmp_path / "a.tar")
    ends = {"in data": at["s3.jpg"].offset_data + 100, "in a header": at["s3.txt"].offset + 200}
    write(tmp_path / "b.tar", raw[: ends[cut]] if cut in ends else b"<html>404 not found</html>" * 50)
    with pytest.raises(DataError, match=r"b\.tar, byte \d+: .*The file is cut, damaged, no tar archive"):
        read(tmp_path, "*.tar", on_error=policy)


@pytest.mark.parametrize(
    ("cut", "whole", "bad"),
    [("between samples", 4, []), ("between members", 4, ["s4"]), ("no end", 6, []), ("empty", 0, []), ("zeros", 0, [])],
)
def test_a_cut_between_members_is_told_and_no_half_sample_comes(
    tmp_path: Path, cut: str, whole: int, bad: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Cut on a block border, an archive looks whole; an empty shard must not end an epoch either.

    https://github.com/mafintosh/tar-stream/issues/82
    """
    raw, at = tar(tmp_path / "a.tar", pairs(6)).read_bytes(), places(tmp_path / "a.tar")
    last = at["s5.txt"].offset_data + 512
    ends = {"between samples": at["s4.jpg"].offset, "between members": at["s4.txt"].offset, "no end": last, "empty": 0}
    write(tmp_path / "b.tar", raw[: ends[cut]] if cut in ends else bytes(1024))
    found, about = read(tmp_path, "*.tar")
    assert numbers(found) == sorted([*range(6), *range(whole)])
    assert list(reasons(about)) == bad
    assert ("b.tar ends at byte" in caplog.text) == (cut != "zeros")


# --- TAR-4 ---------------------------------------------------------------------------------------------------------


@law(12)
@given(st.lists(st.sampled_from(["whole", "no jpg", "no txt", "empty jpg", "extra"]), min_size=1, max_size=12))
def test_a_missing_member_costs_its_sample_alone(tmp_path_factory: pytest.TempPathFactory, kinds: list[str]) -> None:
    """Some samples lack a member; the reader raised a KeyError deep inside, or filled in something that failed later.

    https://github.com/huggingface/datasets/issues/6900
    """
    kinds, folder, members = ["whole", *kinds], tmp_path_factory.mktemp("tar"), []
    for i, kind in enumerate(kinds):
        members += [] if kind == "no jpg" else [(f"s{i}.jpg", b"" if kind == "empty jpg" else tile(i))]
        members += [] if kind == "no txt" else [(f"s{i}.txt", f"caption {i}".encode())]
        members += [(f"s{i}.json", json.dumps({"i": i}).encode())] if kind != "whole" else []
    tar(folder / "shard.tar", members)
    found, about = read(folder, "shard.tar")
    assert sorted(numbers(found)) == [i for i, kind in enumerate(kinds) if kind in ("whole", "extra")]
    says = {"no jpg": "there is no image", "no txt": "there is no text", "empty jpg": "an empty file"}
    bad = {f"s{i}": says[kind] for i, kind in enumerate(kinds) if kind in says}
    assert reasons(about).keys() == bad.keys()
    assert all(bad[key] in reason for key, reason in reasons(about).items())


def test_an_optional_member_that_is_absent_is_absent(tmp_path: Path) -> None:
    """A sample without the optional text had the text "None".

    https://github.com/huggingface/datasets/issues/6900
    """
    rows = [
        (f"s{i}.{suffix}", data)
        for i in range(6)
        for suffix, data in (("jpg", tile(i)), ("txt", f"caption {i}".encode()), ("json", b"{}"))
        if suffix != "txt" or i % 2 == 0
    ]
    tar(tmp_path / "shard.tar", rows)
    name = own_code(tmp_path, "def f(row): return row | {'text': row.get('txt', 'caption ' + row['__key__'][1:])}")
    found, about = read(tmp_path, "shard.tar", text="text", map=f"{name}:f")
    assert numbers(found) == [0, 1, 2, 3, 4, 5]
    assert not about.skipped


# --- TAR-5 ---------------------------------------------------------------------------------------------------------


@law(15)
@given(st.permutations(pairs(4)))
def test_scattered_members_never_make_half_samples(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes]]
) -> None:
    """Where the members of a sample do not follow each other, two halves with one key came, with no warning.

    Our rule is webdataset's: members of a key that follow each other are a sample. Halves are bad rows, by key.

    https://github.com/webdataset/webdataset/issues/140, https://github.com/ray-project/ray/pull/65044
    """
    folder = tmp_path_factory.mktemp("tar")
    tar(folder / "shard.tar", [*members, ("s9.jpg", tile(9)), ("s9.txt", b"caption 9")])
    keys = [name.split(".")[0] for name, _ in members]
    whole = sorted(int(a[1:]) for a, b in itertools.pairwise(keys) if a == b)
    found, about = read(folder, "shard.tar")
    assert numbers(found) == [*whole, 9]
    halves = sorted(skip.place.split("sample ")[1].split(",")[0] for skip in about.skipped)
    assert halves == sorted(key for key in keys if int(key[1:]) not in whole)
    if halves:
        with pytest.raises(DataError, match=r"shard\.tar, sample s\d, byte \d+: there is no (image|text)"):
            read(folder, "shard.tar", on_error="raise")


def test_an_archive_of_halves_alone_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All texts first, then all pictures: no sample is whole, and the run must say so.

    https://github.com/webdataset/webdataset/issues/140
    """
    tar(tmp_path / "shard.tar", sorted(pairs(4), key=lambda one: one[0].split(".")[1]))
    assert "8 bad row" in told(recipe(tmp_path, images("shard.tar"), more=WHOLE), caplog)


# --- TAR-6 ---------------------------------------------------------------------------------------------------------

KINDS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}
NAMES = {
    "90": ["a" * 90],
    "differ at the end": ["b" * 120 + "-1", "b" * 120 + "-2"],
    "folders": ["dir/" * 60 + "x", "dir/" * 60 + "y"],
    "accents": ["\u00e9t\u00e9-" + "c" * 110, "\u00e9t\u00e9-" + "c" * 109 + "d", "\U0001f642" * 30],
    "prefix": ["p" * 60 + "/" + "q" * 70 + "1", "p" * 60 + "/" + "q" * 70 + "2"],
    "not UTF-8": ["caf\udce9", "caf\udce8"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", NAMES)
def test_long_and_strange_names_come_through(tmp_path: Path, kind: str, names: str) -> None:
    """Names over 100 characters were cut by readers that do not know the records for long names; keys collided.

    https://github.com/adamhathcock/sharpcompress/issues/836, https://github.com/Quantco/pixi-pack/issues/258
    """
    keys = NAMES[names]
    members = [
        (f"{key}.{suffix}", data)
        for i, key in enumerate(keys)
        for suffix, data in (("jpg", tile(i)), ("txt", f"caption {i}".encode()))
    ]
    try:
        tar(tmp_path / "shard.tar", members, KINDS[kind])
    except ValueError:
        assert (kind, names) not in (("gnu", names), ("pax", names), ("ustar", "90"), ("ustar", "prefix"))
        return  # ustar cannot say it
    name = own_code(tmp_path, "def f(row): return row | {'text': row['txt'] + ' ' + ascii(row['__key__'])}")
    found, _ = read(tmp_path, "shard.tar", map=f"{name}:f", text="text", seq_len=2048)
    assert numbers(found) == list(range(len(keys)))
    assert [one.text.split(" ", 2)[2] for one in found] == [ascii(key) for key in keys]


def test_rows_of_jsonl_beside_a_tar_are_another_source(tmp_path: Path) -> None:
    """A pattern that also matches the notes beside the archives is refused, not half read.

    https://github.com/webdataset/webdataset/issues/237
    """
    tar(tmp_path / "a.tar", pairs(1))
    lines(tmp_path / "a.jsonl", [row("x")])
    with pytest.raises(Exception, match="files of several formats"):
        read(tmp_path, "a.*")
