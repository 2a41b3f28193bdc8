"""Tar files: the samples that WebDataset finds and no fewer, addresses that hold, and damage that is named."""

import io
import json
import os
import pickle
import re
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import strictly

from zephon import DataError
from zephon.errors import RecipeError
from zephon.formats import blobs, tar
from zephon.formats.blobs import File, FileBlob, OpenFiles
from zephon.formats.lines import ROW_BYTES
from zephon.formats.tar import TarIndex, TarReader, index_tars
from zephon.types import Blob, Row

FORMATS = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT, "ustar": tarfile.USTAR_FORMAT}
LONG = "folder" * 20 + "/" + "n" * 60  # needs the prefix of ustar
LONGER = "folder/" + "n" * 300

Members = Iterable[tuple[str, bytes]]


def write_tar(path: Path, members: Members, kind: str = "pax", end: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=FORMATS[kind]) as out:
        for name, data in members:
            add(out, name, data)
    if not end:
        raw = path.read_bytes()
        path.write_bytes(raw[: out.offset - 1024])
    return path


def add(out: tarfile.TarFile, name: str, data: bytes = b"", **info: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in info.items():
        setattr(member, key, value)
    out.addfile(member, io.BytesIO(data))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def index_of(path: Path, cache: Path | None = None) -> TarIndex:
    return index_tars({path.name: path}, cache or path.parent / "cache")[0]


def samples(path: Path, cache: Path | None = None) -> list[Row]:
    index = index_of(path, cache)
    return strictly(TarReader([index]), np.arange(index.shard.rows))


def raw(index: TarIndex) -> list[dict[str, object]]:
    """Every sample of a file, and what each member holds, before anything is decoded."""
    out: list[dict[str, object]] = []
    for row in range(index.shard.rows):
        first, end = int(index.starts[row]), int(index.starts[row + 1])
        sample: dict[str, object] = {"__key__": index.key(row)}
        for at, size, suffix in index.members[:, first:end].T.tolist():
            sample[index.suffixes[suffix]] = index.file.read(at, size)
        out.append(sample)
    return out


def by_webdataset(path: Path) -> list[dict[str, object]]:
    from webdataset.tariterators import group_by_keys, tar_file_expander

    with path.open("rb") as file:
        found = [dict(sample) for sample in group_by_keys(tar_file_expander([{"url": "x", "stream": file}]))]
    for sample in found:
        del sample["__url__"]
    return found


def simple(count: int = 3) -> list[tuple[str, bytes]]:
    """Samples of an image (anything that is not a text), a text and an object."""
    return [
        (f"{i:04}.{suffix}", data)
        for i in range(count)
        for suffix, data in (
            ("jpg", bytes([i + 1]) * (700 + i)),
            ("txt", f"text {i} \u00e4".encode()),
            ("json", json.dumps({"i": i}).encode()),
        )
    ]


ODD: list[tuple[str, bytes]] = [
    ("a.jpg", b"1"),
    ("a.TXT", b"upper"),
    ("a.b.seg.png", b"2"),
    ("nosuffix", b"3"),
    (".hidden.txt", b"4"),
    ("a.json", b"{}"),
    ("__meta__.txt", b"not skipped: it has a suffix"),
    ("__meta__", b"skipped"),
    ("__meta__/x.txt", b"skipped"),
    ("sub/__meta__/x.txt", b"kept"),
    ("./dot/a.txt", b"5"),
    ("dir.with.dots/a.txt", b"6"),
    ("dir.with.dots/a.x.y", b""),
    ("dir.with.dots/b.", b"no letters in the suffix"),
    ("b.txt", b"7"),
    ("a.txt", b"the same key again, apart: another sample"),
    ("\u00e9\u4e2d/\U0001f600.txt", b"8"),
    ("with space\tand tab.txt", b"9"),
    (f"{LONG}.jpg", b"10"),
    (f"{LONG}.txt", b"11"),
]


@pytest.mark.parametrize("kind", FORMATS)
def test_samples_are_those_of_webdataset(tmp_path: Path, kind: str) -> None:
    names = [*ODD, *([] if kind == "ustar" else [(f"{LONGER}.jpg", b"12"), (f"{LONGER}.{'s' * 200}", b"13")])]
    path = write_tar(tmp_path / "x.tar", names, kind)
    found = raw(index_of(path))
    assert found == by_webdataset(path)
    assert [sample["__key__"] for sample in found][:3] == ["a", "__meta__", "sub/__meta__/x"]
    assert len(found) == (11 if kind == "ustar" else 12)
    assert raw(index_of(path)) == found  # from the cache


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves files to the collector
def test_what_webdataset_writes_and_decodes(tmp_path: Path) -> None:
    import webdataset

    written = [
        {"__key__": f"k/{i:03}", "txt": f"text {i} \u2028", "json": {"i": [i, None, 0.1]}, "cls": i, "bin": bytes([i])}
        for i in range(20)
    ]
    path = tmp_path / "x.tar"
    with webdataset.TarWriter(str(path)) as out:
        for sample in written:
            out.write(sample)
    expected = [dict(one) for one in webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False).decode()]
    for one in expected:
        assert {key for key in one if key.startswith("__")} <= {"__key__", "__url__", "__local_path__"}
    ours = samples(path)
    assert len(ours) == len(expected) == 20
    for mine, theirs in zip(ours, expected, strict=True):
        read = {key: value.read() if isinstance(value, FileBlob) else value for key, value in mine.items()}
        assert read == {key: value for key, value in theirs.items() if key not in ("__url__", "__local_path__")}


def test_the_rule_for_meta_files_is_still_webdatasets() -> None:
    import inspect

    from webdataset import tariterators

    default = inspect.signature(tariterators.tar_file_iterator).parameters["skip_meta"].default
    assert default == tar._META.pattern


_PARTS = st.sampled_from(["a", "b", "A", "__m__", ".", "/", "\u00e9", "x.", ".txt", ".JPG", ".json.gz", "n" * 60])


@given(
    st.lists(st.tuples(st.lists(_PARTS, min_size=1, max_size=5).map("".join), st.binary(max_size=600)), max_size=12),
    st.sampled_from(sorted(FORMATS)),
    st.booleans(),
)
@settings(max_examples=200)
def test_any_names_make_the_samples_of_webdataset(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes]], kind: str, end: bool
) -> None:
    members = [(name, data) for name, data in members if not name.startswith("/") and ".." not in name.split("/")]
    path = tmp_path_factory.mktemp("any") / "x.tar"
    try:
        write_tar(path, members, kind, end)
    except ValueError:  # ustar cannot say it
        return
    try:
        expected = by_webdataset(path) if path.stat().st_size else []
    except ValueError:
        with pytest.raises(DataError, match="is the second"):
            index_of(path)
        return
    assert raw(index_of(path)) == expected


def test_folders_devices_and_labels_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as out:
        add(out, "./", type=tarfile.DIRTYPE)
        add(out, "d.x/", type=tarfile.DIRTYPE)
        add(out, "fifo.x", type=tarfile.FIFOTYPE)
        add(out, "label.x", type=b"V")
        add(out, "dumped.x", b"names", type=b"D")
        add(out, "a.txt", b"1")
        add(out, "d.y/", type=tarfile.AREGTYPE)  # how old archives say folder
        add(out, "a.bin", b"22", type=tarfile.CONTTYPE)
    assert raw(index_of(path)) == [{"__key__": "a", "txt": b"1", "bin": b"22"}] == by_webdataset(path)


def test_pax_headers_say_what_a_plain_one_cannot(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    headers = {"comment": "c", "mtime": "1.5"}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers=headers) as out:
        add(out, "a.txt", b"1")
        add(out, "b.txt", b"22", pax_headers={"path": "c/d.txt", "SCHILY.xattr.user": "x=\ny"})
        add(out, "plain.txt", b"333" * 400, pax_headers={"size": "1200"})
    assert raw(index_of(path)) == by_webdataset(path)
    assert [one["__key__"] for one in samples(path)] == ["a", "c/d", "plain"]


def test_rows_hold_texts_and_addresses(tmp_path: Path) -> None:
    members = [
        ("k.jpg", b"\xff\xd8image"),
        ("k.txt", "\u00e4 \u2028".encode()),
        ("k.caption", b""),
        ("k.meta.json", b'\xef\xbb\xbf{"a": [NaN, "\\ud800", 1e400]}'),
        ("k.cls", b" 12\n"),
        ("k.txt.gz", b"compressed"),
        ("k.npy", b""),
    ]
    path = write_tar(tmp_path / "x.tar", members)
    (row,) = samples(path)
    texts = {key: row[key] for key in ("__key__", "txt", "caption", "cls")}
    assert texts == {"__key__": "k", "txt": "\u00e4 \u2028", "caption": "", "cls": 12}
    meta = row["meta.json"]
    assert isinstance(meta, dict)
    assert meta["a"][1:] == ["\ud800", float("inf")]
    for suffix, data in (("jpg", b"\xff\xd8image"), ("txt.gz", b"compressed"), ("npy", b"")):
        blob = row[suffix]
        assert isinstance(blob, FileBlob)
        like: Blob = blob
        assert (like.size, like.read(), like.head(2), like.head(10**9), like.head(0)) == (
            *(len(data), data, data[:2], data, b""),
        )
        assert re.fullmatch(rf".*/x\.tar, member k\.{re.escape(suffix)}, byte \d+", like.place)
        assert path.read_bytes()[blob.offset : blob.offset + blob.size] == data
    assert TarReader([index_of(path)]).place(0) == f"{path}, sample k, byte 512"


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("k.txt", b"caf\xe9", r"k\.txt, byte 512: a member with this suffix is UTF-8 text, which .*0xe9"),
        ("k.x.json", b'{"a": ', r"k\.x\.json, byte 512: .* is JSON, which this one is not \(Expecting value"),
        ("k.json", b"\xff\xfe{\0}\0", r"is JSON, which this one is not \('utf-8' codec"),
        ("k.json", b"[" * 200_000, "is JSON, which this one is not"),
        ("k.cls", b"dog", "is a whole number, which this one is not"),
        ("k.id", b"1" * 5000, "is a whole number, which this one is not"),
    ],
)
def test_a_text_that_is_none_is_named(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    with pytest.raises(DataError, match=says):
        samples(write_tar(tmp_path / "x.tar", [(name, data)]))


@given(st.data())
@settings(max_examples=30)
def test_rows_come_in_the_order_asked_for(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("order")
    counts = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=3).filter(any))
    files: dict[str, Path] = {}
    keys: list[str] = []
    for shard, count in enumerate(counts):
        names = [f"{shard}-{i}" for i in range(count)]
        keys += names
        sizes = [data.draw(st.sampled_from([0, 1, 9000, 40_000])) for _ in names]
        files[f"{shard}.tar"] = write_tar(
            folder / f"{shard}.tar",
            [
                part
                for name, size in zip(names, sizes, strict=True)
                for part in ((f"{name}.txt", name.encode()), (f"{name}.bin", bytes(size)), (f"{name}.id", b"7"))
            ],
        )
    picks = data.draw(st.lists(st.integers(0, len(keys) - 1), min_size=1, max_size=20))
    rows = TarReader(index_tars(files, folder / "cache")).read(np.asarray(picks))
    assert [(row["__key__"], row["txt"], row["id"]) for row in rows] == [(keys[i], keys[i], 7) for i in picks]


def test_texts_that_lie_together_are_read_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near = [(f"{i:03}.{suffix}", b"1") for i in range(50) for suffix in ("txt", "json")]
    far = [(f"f{i:03}.{suffix}", b"1" * size) for i in range(5) for suffix, size in (("jpg", 30_000), ("txt", 1))]
    reader = TarReader([index_of(write_tar(tmp_path / "x.tar", [*near, *far]))])
    calls: list[int] = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: calls.append(size) or real(fd, size, at))
    reader.read(np.arange(50))
    assert len(calls) == 1
    reader.read(np.arange(50, 55))
    assert len(calls) == 6
    assert sum(calls[1:]) == 5  # not the images


def damages(path: Path) -> Iterable[tuple[str, int, bytes]]:
    """Every block of a file: zeroed, filled, one bit turned, gone, doubled, the last one."""
    good = path.read_bytes()
    for at in range(0, len(good), 512):
        block, rest = good[at : at + 512], good[at + 512 :]
        for name, new in (("zero", bytes(512)), ("ones", b"\xff" * 512), ("gone", b""), ("twice", block * 2)):
            yield name, at, good[:at] + new + rest
        for bit in (0, 124 * 8 + 2, 148 * 8 + 3, 156 * 8, 345 * 8 + 7):
            turned = bytearray(block)
            turned[bit // 8] ^= 1 << bit % 8
            yield "bit", at, good[:at] + bytes(turned) + rest
        yield "cut", at, good[:at]
        yield "cut inside", at, good[: at + 300]


@pytest.mark.parametrize("kind", FORMATS)
def test_damage_is_an_error_or_changes_nothing(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    names = [(f"{'q' * 120 if i == 1 else 'p'}/{name}", data) for i in range(3) for name, data in simple(i + 1)[-3:]]
    path = write_tar(tmp_path / "x.tar", names, kind)
    with tarfile.open(path) as found:
        all_members = found.getmembers()
    path.write_bytes(path.read_bytes()[: (max(one.offset_data + one.size for one in all_members) // 512 + 3) * 512])
    layout = [(one["__key__"], *one) for one in raw(index_of(path))]
    extended, content = set[int](), set[int]()  # long names have no checksum, nor has what members hold
    for one in all_members:
        extended |= set(range(one.offset + 512, one.offset_data - 512, 512))
        content |= set(range(one.offset_data, one.offset_data + one.size))
    errors, named = list[str](), True
    for number, (what, at, bad) in enumerate(damages(path)):
        damaged = tmp_path / f"{number}.tar"
        damaged.write_bytes(bad)
        caplog.clear()
        try:
            found = [(one["__key__"], *one) for one in raw(index_of(damaged))]
        except DataError as error:
            errors.append(str(error))
            named &= bool(re.match(rf"{re.escape(str(damaged))}, byte \d+: ", errors[-1]))
        else:
            if what.startswith("cut") and "if it was cut just there" in caplog.text:
                flat = [key for sample in found for key in sample]  # between two members nothing shows, which is said
                assert flat == [key for sample in layout for key in sample][: len(flat)]
            elif what == "bit" and at in extended:
                assert len(found) >= len(layout)
            else:
                assert found == layout, (what, at)
                assert at in content or at >= len(path.read_bytes()) - 1024 or what == "bit", (what, at)
    assert named
    assert len(errors) > 50


def test_a_file_cut_at_any_byte_is_named_or_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tar(tmp_path / "x.tar", [("a.txt", b"1" * 600), ("b.txt", b"2")])
    good, whole = path.read_bytes()[:3584], {0: 0, 1536: 1}
    cut, silent = tmp_path / "cut.tar", set[int]()
    for size in range(0, len(good), 7):
        for at in {size, *(n for n in range(size, size + 7) if n % 512 in (0, 1, 511))}:
            cut.write_bytes(good[:at])
            caplog.clear()
            try:
                rows = index_of(cut).shard.rows
            except DataError:
                continue
            else:
                silent.add(at)
                assert rows == (2 if at >= 2560 else whole[at])
                assert ("if it was cut just there" in caplog.text) == (at in (0, 1536, 2560))
    assert {at for at in silent if at < 2560} == {0, 1536}


def test_an_archive_without_samples_has_no_rows(tmp_path: Path) -> None:
    for name, content in (("end", bytes(1024)), ("padded", bytes(10240)), ("nothing", b""), ("odd", bytes(700))):
        path = tmp_path / f"{name}.tar"
        path.write_bytes(content)
        assert index_of(path).shard.rows == 0
        assert len(TarReader([index_of(path)]).read(np.arange(0))) == 0


def refused() -> dict[str, tuple[Any, str]]:
    def with_member(name: str, data: bytes = b"", **info: Any) -> Any:
        def build(path: Path) -> None:
            with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as out:
                add(out, "a.txt", b"1")
                add(out, name, data, **info)

        return build

    def raw_member(change: Any) -> Any:
        def build(path: Path) -> None:
            member = tarfile.TarInfo("b.txt")
            header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
            change(header)
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
            path.write_bytes(write_tar(path, [("a.txt", b"1")]).read_bytes()[:1024] + header + bytes(1024))

        return build

    def negative(header: bytearray) -> None:
        header[124:136] = b"\xff" * 12

    def huge(header: bytearray) -> None:
        header[124:136] = b"\x80" + (2**60).to_bytes(11, "big")

    def long_huge(header: bytearray) -> None:
        header[156:157], header[124:136] = b"L", b"\x80" + (2**40).to_bytes(11, "big")

    def pax(data: bytes) -> Any:
        return with_member("x", data, type=tarfile.XHDTYPE)

    def joined(path: Path) -> None:
        path.write_bytes(write_tar(path, simple(1)).read_bytes() * 2)

    return {
        "symlink": (with_member("b.txt", type=tarfile.SYMTYPE, linkname="a.txt"), r"byte 1024: .*'b.txt' is a link"),
        "hard link": (with_member("b.txt", type=tarfile.LNKTYPE, linkname="a.txt"), r"byte 1024: .* is a link"),
        "absolute": (with_member("/b.txt"), r"byte 1024: .*'/b.txt' has a path that leads out"),
        "parent": (with_member("c/../b.txt"), "has a path that leads out of the archive"),
        "parents": (with_member("../b.txt"), "has a path that leads out of the archive"),
        "twice": (with_member("a.TXT"), r"byte 1024: .*'a.TXT' is the second 'txt' of its sample"),
        "key": (with_member("a.__key__"), "has a suffix of webdataset's own"),
        "bad": (with_member("a.__bad__", b"1"), "has a suffix of webdataset's own"),
        "sparse": (with_member("b.txt", type=tarfile.GNUTYPE_SPARSE), r"is stored with holes \(tar --sparse\)"),
        "pax sparse": (pax(b"22 GNU.sparse.major=1\n"), "an extended header, and the archive ends before its member"),
        "volume": (with_member("b.txt", b"2", type=b"M"), r"byte 1024: .* is of kind b'M'"),
        "long name": (with_member("/" * 9 + "a/" * 500_000), "has a path that leads out"),
        "longer name": (with_member("a/" * 3000 + "b.txt"), r"'(a/)+' \(and so on\) has a name of 6005 characters"),
        "negative": (raw_member(negative), r"byte 1024: 'b.txt' holds -1 bytes by its header"),
        "huge": (raw_member(huge), r"byte 1024: 'b.txt' holds 1152921504606846976 bytes by its header"),
        "huge name": (raw_member(long_huge), "holds 1099511627776 bytes by its header"),
        "long without end": (with_member("x", b"abc", type=b"L"), "a long name should follow, not b'abc'"),
        "long empty": (with_member("x", b"\0", type=b"L"), "a long name should follow"),
        "pax length": (pax(b"99 path=b.txt\n"), "an extended header should hold a record, not b'99 path=b"),
        "pax text": (pax(b"hello"), "an extended header should hold a record"),
        "pax size": (pax(b"11 size=-5\n"), "an extended header should hold a record"),
        "pax alone": (pax(b"14 path=b.txt\n"), r"byte 1024: an extended header, and the archive ends"),
        "joined": (joined, r"byte 10240: behind the end of the archive comes .*tar -A joins"),
        "text": (lambda path: path.write_bytes(b"hello " * 300), r"byte 0: no header, but b'hello he'"),
        "gzip": (lambda path: path.write_bytes(b"\x1f\x8b\x08" + b"x" * 600), r"byte 0: no header, but b'\\x1f"),
    }


@pytest.mark.parametrize("case", refused())
def test_what_a_sample_cannot_have_is_refused(tmp_path: Path, case: str) -> None:
    build, says = refused()[case]
    path = tmp_path / "x.tar"
    build(path)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}, .*{says}"):
        index_of(path)
    with pytest.raises(DataError, match=says):
        index_of(path)  # nothing of it was kept


def test_sparse_members_of_pax_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as out:
        add(out, "a.bin", b"1" * 20, pax_headers={"GNU.sparse.major": "1", "GNU.sparse.name": "a.bin"})
    with pytest.raises(DataError, match="is stored with holes"):
        index_of(path)


def test_files_without_a_suffix_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tar(tmp_path / "x.tar", [*simple(1), ("LICENSE", b"1"), ("README", b"2")])
    assert index_of(path).shard.rows == 1
    assert "2 files without a suffix, such as 'LICENSE', belong to no sample" in caplog.text


def test_the_index_is_made_once_and_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, scans = write_tar(tmp_path / "x.tar", simple(4)), list[Path]()
    real = tar._scan
    monkeypatch.setattr(tar, "_scan", lambda at, *more: scans.append(at) or real(at, *more))
    first, again = index_of(path), index_of(path)
    assert len(scans) == 1
    assert again.shard == first.shard
    assert raw(again) == raw(first)
    stat = path.stat()
    write_tar(path, [("z" + name[1:], data) for name, data in simple(4)])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert index_of(path).key(0).startswith("z")
    assert len(scans) == 2
    monkeypatch.setattr(tar, "_LAYOUT", "tar 2")
    index_of(path)
    assert len(scans) == 3
    assert len(list((tmp_path / "cache" / "index").iterdir())) == 1


def test_the_hash_is_of_headers_and_size_wherever_the_file_lies(tmp_path: Path) -> None:
    one = write_tar(tmp_path / "x.tar", simple(2))
    same = write_tar(tmp_path / "other" / "y.tar", simple(2))
    named = write_tar(tmp_path / "z.tar", [(name.replace("0", "9"), data) for name, data in simple(2)])
    longer = tmp_path / "longer.tar"
    longer.write_bytes(one.read_bytes() + bytes(512))
    hashes = [index_of(path).shard.sha256 for path in (one, same, named, longer)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    assert index_of(one).shard.bytes == one.stat().st_size


def test_a_damaged_index_is_made_again(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", simple(2))
    good = raw(index_of(path))
    file = next((tmp_path / "cache" / "index").glob("*.idx"))
    whole = file.read_bytes()
    for bad in (b"", b"{", b"[]\n", whole[:-8], whole[:-3], whole + b"x", whole + bytes(8)):
        file.write_bytes(bad)
        assert raw(index_of(path)) == good
    for at in range(0, len(whole), 5):
        bad = bytearray(whole)
        bad[at] ^= 0x11
        file.write_bytes(bad)
        assert raw(index_of(path)) == good
        assert file.read_bytes() == whole


def test_a_known_file_needs_no_webdataset_and_no_torch(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", simple(2))
    code = (
        "import sys, pathlib\n"
        "sys.modules['webdataset'] = None\n"
        "from zephon.formats.tar import index_tars\n"
        "print(index_tars({'x': pathlib.Path(sys.argv[1])}, pathlib.Path(sys.argv[2]))[0].shard.rows)\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "cache")]
    cold = subprocess.run(command, capture_output=True, text=True)
    assert "pip install -e '.[image]'" in cold.stderr
    index_of(path)
    warm = subprocess.run(command, capture_output=True, text=True, check=True)
    assert warm.stdout == "2\n"


def test_a_missing_webdataset_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "webdataset.tariterators", None)
    with pytest.raises(RecipeError, match=r"samples are found by the rules of the package webdataset.*\[image\]"):
        index_of(write_tar(tmp_path / "x.tar", simple(1)))


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{i}.tar": write_tar(tmp_path / f"{i}.tar", simple(20)) for i in range(3)}
    monkeypatch.setattr(tar, "_TOLD", 5000)
    told: list[tuple[int, int]] = []
    index_tars(files, tmp_path / "cache", lambda done, total: told.append((done, total)))
    total = sum(path.stat().st_size for path in files.values())
    assert told[-1] == (total, total)
    assert len(told) > 6
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_file_that_changes_while_it_is_indexed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "x.tar", simple(2))
    real = tar._scan

    def change(at: Path, *more: Any) -> object:
        found = real(at, *more)
        os.utime(at, ns=(0, 0))
        return found

    monkeypatch.setattr(tar, "_scan", change)
    with pytest.raises(DataError, match="was changed while it was indexed"):
        index_of(path)


def test_one_bad_file_stops_the_others(tmp_path: Path) -> None:
    files = {f"{i}.tar": write_tar(tmp_path / f"{i}.tar", simple(30)) for i in range(12)}
    files["3.tar"].write_bytes(b"hello " * 1000)
    with pytest.raises(DataError, match=r"3\.tar, byte 0"):
        index_tars(files, tmp_path / "cache")


def test_a_large_index_is_mapped(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", ((f"{i:06}.txt", b"") for i in range(6000)))
    index_of(path)
    assert isinstance(index_of(path).starts, np.memmap)
    assert [row["__key__"] for row in TarReader([index_of(path)]).read(np.array([5999, 17]))] == ["005999", "000017"]


def test_threads_share_readers_and_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{i:02}.tar": write_tar(tmp_path / f"{i:02}.tar", simple(10)) for i in range(12)}
    shared = OpenFiles(3)
    monkeypatch.setattr(blobs, "OPEN", shared)
    reader, start = TarReader(index_tars(files, tmp_path / "cache")), threading.Barrier(4)

    def work(seed: int) -> bool:
        start.wait()
        rng, good = np.random.default_rng(seed), True
        for _ in range(100):
            picks = rng.integers(0, 120, 6)
            rows = reader.read(picks)
            good &= [row["json"] for row in rows] == [{"i": int(i) % 10} for i in picks]
            images = [row["jpg"] for row in rows]
            good &= all(isinstance(one, FileBlob) and one.head(5) == one.read()[:5] for one in images)
        return good

    before = open_files()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert len(shared._files) == 3
    assert open_files() - before == 3


def test_closing_a_reader_closes_its_files_and_addresses_still_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = OpenFiles(100)
    monkeypatch.setattr(blobs, "OPEN", shared)
    monkeypatch.setattr(tar, "OPEN", shared)
    files = {f"{i}.tar": write_tar(tmp_path / f"{i}.tar", simple(2)) for i in range(20)}
    before = open_files()
    reader = TarReader(index_tars(files, tmp_path / "cache"))
    rows = reader.read(np.arange(40))
    assert open_files() - before == 20
    reader.close()
    assert open_files() == before
    blob = rows[39]["jpg"]
    assert isinstance(blob, FileBlob)
    assert blob.read() == bytes([2]) * 701
    reader.close()


def test_an_address_is_small_and_holds_in_other_processes(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", simple(100))
    images = [row["jpg"] for row in samples(path)]
    sent = pickle.dumps(images)
    assert len(sent) < 60 * len(images)
    assert pickle.loads(sent) == images
    code = "import pickle, sys; print([one.read()[0] for one in pickle.load(sys.stdin.buffer)])"
    out = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert json.loads(out.stdout) == list(range(1, 101))
    with pytest.raises(AttributeError):
        images[0].size = 3  # type: ignore[union-attr, misc]


def test_what_measuring_reads_is_counted(tmp_path: Path) -> None:
    """Texts count whole: by their first 4 KiB, a task held 256 of them of 1 MiB each, whatever [run] memory allowed."""
    texts = [(f"{i}.txt", b"x" * 2**20) for i in range(4)]
    assert TarReader([index_of(write_tar(tmp_path / "texts.tar", texts))]).row_bytes == 2**20
    pictures = [(f"{i}.{suffix}", bytes(size)) for i in range(4) for suffix, size in (("jpg", 2**20), ("txt", 100))]
    assert TarReader([index_of(write_tar(tmp_path / "pictures.tar", pictures))]).row_bytes == 4096 + 100
    long = [("a.txt", bytes(ROW_BYTES + 1)), ("b.txt", b"x" * 50)]  # nothing of the first is ever read
    assert TarReader([index_of(write_tar(tmp_path / "long.tar", long))]).row_bytes == 25


def test_a_file_that_changes_is_never_read_on_silently(tmp_path: Path) -> None:
    path, other = tmp_path / "x.tar", tmp_path / "other.tar"
    write_tar(path, simple(3))
    good = path.read_bytes()

    def opened() -> tuple[TarReader, Blob]:
        path.write_bytes(good)
        reader = TarReader([index_of(path)])
        blob = reader.read(np.array([1]))[0]["jpg"]
        assert isinstance(blob, FileBlob)
        assert len(blob.read()) == 701
        return reader, blob

    def refuse(reader: TarReader, blob: Blob, says: str) -> None:
        for act in (lambda: reader.read(np.arange(2)), blob.read, lambda: blob.head(3)):
            with pytest.raises(DataError, match=f"{re.escape(str(path))} {says}"):
                act()

    reader, blob = opened()
    path.write_bytes(good[:2000])  # cut, in place
    refuse(reader, blob, "was changed or cut while the run reads it")
    reader, blob = opened()
    with path.open("r+b") as file:  # as long as before, in place
        file.write(b"other")
    os.utime(path, ns=(1, 1))
    refuse(reader, blob, "was changed or cut while the run reads it")
    reader, blob = opened()
    other.write_bytes(bytes(len(good)))
    other.replace(path)  # the old one is still open, and what it holds is what was indexed
    assert len(blob.read()) == 701
    reader.close()
    refuse(reader, blob, "was changed or cut while the run reads it")
    reader, blob = opened()
    reader.close()
    path.unlink()
    refuse(reader, blob, r"cannot be read \(No such file")


def test_an_address_beyond_the_file_is_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", simple(1))
    blob = FileBlob(File(str(path), path.stat().st_size, path.stat().st_mtime_ns), 10_000, 1000, "a.jpg")
    assert len(blob.head(5)) == 5
    with pytest.raises(DataError, match="was changed or cut"):
        blob.read()
