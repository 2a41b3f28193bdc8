"""Compressed sources: the same rows as the plain file, however it is cut into members; nothing is lost in silence."""

import bz2
import contextlib
import gzip
import importlib
import itertools
import json
import lzma
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import strictly, write_recipe

from zephon import DataError, Stream, UsageError
from zephon.digest import lane_digest, step_digest
from zephon.errors import RecipeError
from zephon.formats import compressed, index
from zephon.formats.cache import ByteCache
from zephon.formats.compressed import Copies
from zephon.formats.index import LineIndex, index_files
from zephon.formats.jsonl import JsonlReader

zstd: Any = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda raw: gzip.compress(raw, 1, mtime=0),
    ".zst": lambda raw: zstd.compress(raw, options={zstd.CompressionParameter.checksum_flag: 1}),
    ".bz2": bz2.compress,
    ".xz": lambda raw: lzma.compress(raw, preset=0),
}
SUFFIXES = list(COMPRESS)
ROWS = [{"n": i, "text": f"row {i} caf\u00e9 \u2028 " + "x" * (i * 37 % 50)} for i in range(30)]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
SKIPPED = b"\x5a\x2a\x4d\x18\x05\0\0\0hello"  # a zstd frame that holds no text
BGZF_END = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")


def pack(raw: bytes, suffix: str, cuts: list[int] | None = None) -> bytes:
    """`raw` as one member for each stretch between `cuts`."""
    edges = [0, *sorted(cuts or []), len(raw)]
    return b"".join(COMPRESS[suffix](raw[a:b]) for a, b in itertools.pairwise(edges))


def cut(raw: bytes, *cuts: int) -> list[bytes]:
    return [raw[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(raw)])]


def write(folder: Path, suffix: str, raw: bytes = TEXT, cuts: list[int] | None = None) -> Path:
    path = folder / f"x.jsonl{suffix}"
    path.write_bytes(pack(raw, suffix, cuts) if suffix else raw)
    return path


def find(path: Path, cache: Path) -> LineIndex:
    return index_files({"x": path}, cache)[0]


def read(path: Path, cache: Path) -> list[dict[str, object]]:
    found = find(path, cache)
    reader = JsonlReader([found])
    rows = [dict(row) for row in strictly(reader, np.arange(found.shard.rows))]
    reader.close()
    return rows


def copies(cache: Path) -> list[str]:
    return sorted(one.name for one in (cache / "decompressed").glob("*"))


@pytest.fixture
def tiny_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of more than 100 bytes need a copy."""
    monkeypatch.setattr(index, "MEMBER_BYTES", 100)
    monkeypatch.setattr(index, "JOINED_BYTES", 0)


PARTS = [b'{"a":1}', b"\n", b"\r\n", b" ", b"\t", b"\r", b"\x0b", '{"b":"\u2028 caf\u00e9 \U0001f600"}'.encode(), b"x"]


@settings(max_examples=60)
@given(st.data())
def test_every_form_gives_what_the_plain_file_gives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("forms")
    raw = b"".join([b"\xef\xbb\xbf"] * data.draw(st.booleans()) + data.draw(st.lists(st.sampled_from(PARTS))))
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=8))  # within rows, letters, the mark; empty members
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_BLOCK", data.draw(st.integers(4, 12)))
        patch.setattr(index, "MEMBER_BYTES", data.draw(st.sampled_from([3, 10, 1000])))
        patch.setattr(index, "JOINED_BYTES", data.draw(st.sampled_from([0, 5, 1000])))
        patch.setattr(compressed, "_IN", data.draw(st.integers(1, 40)))
        patch.setattr(compressed, "_OUT", data.draw(st.integers(1, 40)))
        plain = find(write(folder, "", raw), folder / "cache")
        wanted = np.asarray(
            data.draw(st.lists(st.integers(0, plain.shard.rows - 1)) if plain.shard.rows else st.just([]))
        )
        rows = JsonlReader([plain])._raw(wanted.astype(np.int64))
        files = {suffix: write(folder, suffix, raw, cuts) for suffix in SUFFIXES}
        for found in (
            *index_files(files, folder / "cache"),
            *index_files(files, folder / "cache"),
        ):  # made, then cached
            assert found.starts.tolist() == plain.starts.tolist()
            assert (found.shard.rows, found.shard.bytes) == (plain.shard.rows, len(raw))
            assert found.shard.sha256 == plain.shard.sha256
            assert (found.members is None) == (found.copy is not None)
            reader = JsonlReader([found], ByteCache(20, 20))
            assert reader._raw(wanted.astype(np.int64)) == rows
            reader.close()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("raw", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_no_error(tmp_path: Path, suffix: str, raw: bytes) -> None:
    assert read(write(tmp_path, suffix, raw), tmp_path / "cache") == []
    (tmp_path / f"x.jsonl{suffix}").write_bytes(b"")
    assert read(tmp_path / f"x.jsonl{suffix}", tmp_path / "cache") == []


def test_what_tools_write_between_members_is_harmless(tmp_path: Path) -> None:
    half = len(TEXT) // 2
    a, b, none = pack(TEXT[:half], ".zst"), pack(TEXT[half:], ".zst"), pack(b"", ".zst")
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(SKIPPED + none + a + SKIPPED * 3 + b + none + SKIPPED)
    assert read(path, tmp_path / "cache") == ROWS
    named = tmp_path / "y.jsonl.gz"
    with named.open("wb") as file, gzip.GzipFile("a name", "wb", fileobj=file) as out:
        out.write(TEXT)
    assert read(named, tmp_path / "cache") == ROWS


def outcome(path: Path, cache: Path) -> list[dict[str, object]] | None:
    """The rows of a file, or None where it is refused."""
    try:
        return read(path, cache)
    except DataError:
        return None


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_was_cut_anywhere_is_refused_or_ends_with_a_whole_member(tmp_path: Path, suffix: str) -> None:
    lines = TEXT.splitlines(keepends=True)
    packed = [COMPRESS[suffix](b"".join(lines[i : i + 2])) for i in (0, 2, 4)]
    ends = {sum(map(len, packed[:n])): 2 * n for n in range(4)}
    whole, path = b"".join(packed), tmp_path / f"x.jsonl{suffix}"
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert outcome(path, tmp_path / "cache") == (ROWS[: ends[size]] if size in ends else None), size


@pytest.mark.usefixtures("tiny_members")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_was_cut_leaves_no_copy(tmp_path: Path, suffix: str) -> None:
    whole, path = pack(TEXT, suffix), tmp_path / f"x.jsonl{suffix}"
    for size in range(1, len(whole), 7):
        path.write_bytes(whole[:size])
        assert outcome(path, tmp_path / "cache") is None
    assert copies(tmp_path / "cache") == []
    path.write_bytes(whole)
    assert read(path, tmp_path / "cache") == ROWS


def plan(size: int, every: int) -> list[int]:
    return list(range(every, size, every))


@pytest.mark.skipif(not shutil.which("xz"), reason="needs the xz tool")
@pytest.mark.parametrize(
    "options", ["-T2 --block-size=4KiB", "-T1 --block-list=1KiB,9KiB,0 --check=none", "-T1 --x86 --lzma2", "-9e"]
)
def test_what_the_xz_tool_writes_is_read(tmp_path: Path, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks in one stream count as one member."""
    raw, path = TEXT * 12, tmp_path / "x.jsonl.xz"
    run = ["xz", *options.split()]
    path.write_bytes(
        b"".join(subprocess.run(run, input=part, capture_output=True, check=True).stdout for part in cut(raw, 13_000))
    )
    assert read(path, tmp_path / "cache") == ROWS * 12
    assert copies(tmp_path / "cache") == []
    monkeypatch.setattr(index, "MEMBER_BYTES", 10_000)
    assert read(path, tmp_path / "other") == ROWS * 12
    assert len(copies(tmp_path / "other")) == 1


@pytest.mark.parametrize("zeros", [1, 4, 70_000])
def test_zeros_behind_xz_streams_are_refused(tmp_path: Path, zeros: int) -> None:
    """The format allows some; a crash and an unfinished download leave them in the place of rows."""
    path, (a, b) = tmp_path / "x.jsonl.xz", map(lzma.compress, cut(TEXT, 900))
    says = r"x\.jsonl\.xz: behind the xz data, which ends at compressed byte {}, comes something else: b'\\x00"
    for whole, end in ((a + bytes(zeros) + b, len(a)), (a + b + bytes(zeros), len(a + b))):
        path.write_bytes(whole)
        with pytest.raises(DataError, match=says.format(end) if zeros > 7 else "compressed byte"):
            read(path, tmp_path / "cache")


def test_a_zstd_file_with_a_seek_table_is_read_by_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MEMBER_BYTES", 150)
    monkeypatch.setattr(index, "JOINED_BYTES", 0)
    parts = cut(TEXT, *plan(len(TEXT), 150))
    frames = [pack(part, ".zst") for part in parts]
    sizes = b"".join(len(n).to_bytes(4, "little") for pair in zip(frames, parts, strict=True) for n in pair)
    table = sizes + len(frames).to_bytes(4, "little") + b"\0" + 0x8F92EAB1.to_bytes(4, "little")
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(b"".join(frames) + 0x184D2A5E.to_bytes(4, "little") + len(table).to_bytes(4, "little") + table)
    found = find(path, tmp_path / "cache")
    assert found.members is not None
    assert found.members[1].tolist()[: len(frames)] == [0, *plan(len(TEXT), 150)]
    assert read(path, tmp_path / "cache") == ROWS
    assert copies(tmp_path / "cache") == []


def test_blocks_of_a_bzip2_stream_are_read_from_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MEMBER_BYTES", 150_000)
    path = tmp_path / "x.jsonl.bz2"
    path.write_bytes(bz2.compress(TEXT * 100, 1))  # in blocks of 100 kB, which begin at any bit
    assert read(path, tmp_path / "cache") == ROWS * 100
    assert len(copies(tmp_path / "cache")) == 1


def test_a_bgzip_file_that_was_cut_between_members_is_refused(tmp_path: Path) -> None:
    def member(raw: bytes) -> bytes:
        squeeze = zlib.compressobj(1, zlib.DEFLATED, -15)
        body = squeeze.compress(raw) + squeeze.flush()
        head = BGZF_END[:16] + (len(body) + 25).to_bytes(2, "little")
        return head + body + zlib.crc32(raw).to_bytes(4, "little") + len(raw).to_bytes(4, "little")

    lines = TEXT.splitlines(keepends=True)
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(b"".join(map(member, lines)) + BGZF_END)
    assert read(path, tmp_path / "cache") == ROWS
    whole = b"".join(map(member, lines[:2]))
    for size in range(1, len(whole) + len(BGZF_END)):
        path.write_bytes((whole + BGZF_END)[:size])
        with pytest.raises(DataError, match=r"x\.jsonl\.gz ends at compressed byte \d+, in the middle of"):
            read(path, tmp_path / "cache")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_damaged_byte_is_refused_or_makes_no_difference(tmp_path: Path, suffix: str) -> None:
    whole, path = pack(TEXT[:300], suffix, [150]), tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(pack(TEXT[:300] + b'"}', suffix))
    right = [TEXT[:300].split(b"\n")[i] for i in range(3)]
    for at in range(0, len(whole), 2):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        with contextlib.suppress(DataError):
            reader = JsonlReader([find(path, tmp_path / "cache")])
            assert [row.rstrip() for row in reader._raw(np.arange(3))] == right, at


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("garbage", [b"\0" * 20, b'{"text": "appended"}\n', b"B"])
def test_anything_behind_the_members_is_refused(tmp_path: Path, suffix: str, garbage: bytes) -> None:
    path = write(tmp_path, suffix, cuts=[50])
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + garbage)
    says = rf"x\.jsonl{suffix}: behind .* ends at compressed byte {size}, comes something else|in the middle of"
    with pytest.raises(DataError, match=says):
        read(path, tmp_path / "cache")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_plain_file_with_a_false_suffix_is_named(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"x.jsonl{suffix}").write_bytes(TEXT)
    with pytest.raises(DataError, match=r"""is no \w+ file, as its suffix says: it starts with b'{"n": 0,'"""):
        read(tmp_path / f"x.jsonl{suffix}", tmp_path / "cache")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("limit", [50, 10_000])
def test_a_bad_row_is_named_by_line_and_decompressed_byte(
    tmp_path: Path, suffix: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MEMBER_BYTES", limit)
    raw = b'{"text": "good"}\n \n\n{"text": "bad \xff"}\n' + TEXT
    path = write(tmp_path, suffix, raw, [25])
    with pytest.raises(DataError, match=rf"x\.jsonl{suffix}, line 4, decompressed byte 34: .* 0xff is not valid UTF-8"):
        read(path, tmp_path / "cache")
    found = find(path, tmp_path / "cache")
    assert (found.copy is None) == (limit == 10_000)
    assert JsonlReader([found]).place(1) == f"{path}, line 4, decompressed byte 20"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_changes_under_the_run_is_named(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "JOINED_BYTES", 0)
    path = write(tmp_path, suffix, cuts=[100, 200, 300])
    reader = JsonlReader([find(path, tmp_path / "cache")], ByteCache(0, 0))
    assert reader.read(np.array([29])) == ROWS[29:]
    path.write_bytes(pack(TEXT[50:], suffix, [140, 170, 290]))
    monkeypatch.setattr(LineIndex, "check", lambda *_: None)  # a change that size and time do not show
    with pytest.raises(DataError, match=rf"x\.jsonl{suffix}.* compressed byte"):
        reader.read(np.arange(30))


def test_the_cached_table_of_members_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "JOINED_BYTES", 0)
    path, cache = write(tmp_path, ".gz", cuts=list(range(50, 500, 50))), tmp_path / "cache"
    made = find(path, cache)
    file = next((cache / "index").glob("*.idx"))
    whole = file.read_bytes()
    for raw in (whole[:-8], whole + b"\0" * 8, whole[:100]):
        file.write_bytes(raw)
        assert read(path, cache) == ROWS
        assert file.read_bytes() == whole
    mapped = find(path, cache)
    assert np.array_equal(mapped.members, made.members)
    assert made.members is not None
    assert mapped.members.tolist() == made.members.tolist()
    assert mapped.members[0, -1] == path.stat().st_size
    assert mapped.members[1, -1] == len(TEXT)


def test_kept_members_stay_below_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "JOINED_BYTES", 0)
    found = find(write(tmp_path, ".gz", cuts=list(range(0, len(TEXT), 90))), tmp_path / "cache")
    for limit in (0, 89, 90, 400, 10_000):
        kept = ByteCache(limit, limit)
        reader = JsonlReader([found], kept)
        for row in np.random.default_rng(limit).integers(0, 30, 200).tolist():
            assert reader.read(np.array([row])) == [ROWS[row]]
            sizes = [size for _, size in kept._kept.values()]
            assert kept.bytes == sum(sizes) == sum(len(member) for member, _ in kept._kept.values())
            assert kept.bytes <= limit or len(sizes) == 1  # one that is larger is kept alone


def test_threads_share_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MEMBER_BYTES", 3000)
    monkeypatch.setattr(index, "JOINED_BYTES", 0)
    files: dict[str, Path] = {}
    for i, suffix in enumerate(["", *SUFFIXES] * 3):
        raw = b"".join(json.dumps({"n": 100 * i + k, "x": "y" * k}).encode() + b"\n" for k in range(100))
        files[f"{i:02}"] = tmp_path / f"{i:02}.jsonl{suffix}"
        files[f"{i:02}"].write_bytes(pack(raw, suffix, [1000, 2000, 3000, 5500] if i < 10 else []) if suffix else raw)
    before = len(list(Path("/proc/self/fd").iterdir()))
    indexes = index_files(files, tmp_path / "cache")
    assert {one.copy is None for one in indexes} == {True, False}
    reader, start = JsonlReader(indexes, ByteCache(10_000, 10_000), open_files=2), threading.Barrier(8)

    def work(seed: int) -> bool:
        start.wait()
        rng = np.random.default_rng(seed)
        picks = [rng.integers(0, 1500, 20) for _ in range(150)]
        return all([row["n"] for row in reader.read(pick)] == pick.tolist() for pick in picks)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    reader.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.usefixtures("tiny_members")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_copy_is_made_once_and_again_where_it_is_gone(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, cache = write(tmp_path, suffix), tmp_path / "cache"
    with caplog.at_level("INFO"):
        assert read(path, cache) == ROWS
    assert f"decompressing it into {cache / 'decompressed'}" in caplog.text
    assert f"{len(TEXT) / 1e6:.1f} MB" in caplog.text
    [name] = copies(cache)
    at = cache / "decompressed" / name
    assert at.read_bytes() == TEXT
    first = at.stat().st_ino
    os.utime(at, (1, 1))
    assert read(path, cache) == ROWS
    assert at.stat().st_ino == first
    assert at.stat().st_mtime > 1  # so that it is not the first to go
    at.write_bytes(TEXT[:-1])
    assert read(path, cache) == ROWS
    at.unlink()
    assert read(path, cache) == ROWS
    path.write_bytes(pack(TEXT * 2, suffix))
    assert read(path, cache) == ROWS * 2


@pytest.mark.usefixtures("tiny_members")
def test_copies_stay_below_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    paths: list[Path] = []
    for i in range(4):
        (tmp_path / str(i)).mkdir()
        paths.append(write(tmp_path / str(i), ".gz"))
    monkeypatch.setattr(compressed, "COPIES_BYTES", 2 * len(TEXT) + 10)
    a, b = find(paths[0], cache), find(paths[1], cache)
    with pytest.raises(UsageError, match=r"Others, which are in use, take 0\.0 MB\. Nothing of it was kept"):
        find(paths[2], cache)
    assert len(copies(cache)) == 2
    for one in (cache / "decompressed").iterdir():
        os.utime(one, (2, 2))
    kept = JsonlReader([a])
    JsonlReader([b]).close()  # nobody has it open any more
    find(paths[1], cache)
    c = find(paths[2], cache)
    assert len(copies(cache)) == 2
    assert kept.read(np.arange(30)) == ROWS
    assert JsonlReader([c]).read(np.arange(30)) == ROWS
    kept.close()
    first, second = find(paths[2], cache), find(paths[3], cache)
    assert len(copies(cache)) == 2
    del first, second


@pytest.mark.usefixtures("tiny_members")
def test_a_copy_without_room_says_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write(tmp_path, ".gz", TEXT * 1000), tmp_path / "cache"
    monkeypatch.setattr(index, "_BLOCK", 100_000)
    for name, value, says in (
        ("COPIES_BYTES", 1_000_000, r"about [12]\.\d MB, would exceed .*: 1\.0 MB in all"),
        ("COPIES_SHARE", 0.0, r"0\.0 MB in all \(at most 64 GiB, and 0% of the free disk\)"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(compressed, name, value)
            with pytest.raises(UsageError, match=says) as caught:
                find(path, cache)
        assert "as cache in [run] of the recipe" in str(caught.value)
        assert "| bgzip > " in str(caught.value)
        assert copies(cache) == []
    monkeypatch.setattr(index, "MEMBER_BYTES", 2 << 20)
    command = str(caught.value).split("needs no copy: `")[1].split("`")[0]
    subprocess.run(command, shell=True, check=True)
    made = find(tmp_path / "parts-x.jsonl.gz", cache)
    assert made.copy is None
    assert made.shard.sha256 == find(path, cache).shard.sha256


def test_the_commands_that_errors_name_work(tmp_path: Path) -> None:
    raw = TEXT * 1000
    for codec in compressed.CODECS:
        path = write(tmp_path, codec.suffix, raw)
        if shutil.which(codec.tool):
            command = compressed.CompressedFile(path, codec).recompress().split("`")[1]
            subprocess.run(command, shell=True, check=True)
            found = find(tmp_path / f"parts-{path.name}", tmp_path / "cache")
            assert found.members is not None
            assert found.members.shape[1] - 1 > 1
            assert found.shard.bytes == len(raw)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MEMBER_BYTES", 100)
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UsageError, match=r"Cannot decompress .*x\.jsonl\.gz into .*cache/decompressed"):
        read(write(tmp_path, ".gz"), tmp_path / "cache")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_unpacks_to_much_takes_little_memory(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_BLOCK", 1 << 18)
    monkeypatch.setattr(compressed, "COPIES_BYTES", 24 << 20)
    bomb, path = write(tmp_path, suffix, b"\n" * (32 << 20)), tmp_path / f"y.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](b" " * (4 << 20)) * 8)
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="would exceed"):
            find(bomb, tmp_path / "cache")
        assert find(path, tmp_path / "cache").shard.rows == 0
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()
    assert copies(tmp_path / "cache") == []


def _die_while_copying(path: Path, cache: Path, where: str) -> None:
    index.MEMBER_BYTES, index._BLOCK = 100, 256
    calls = iter(range(10))

    def take(self: Copies, size: int) -> bool:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def die(_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "in the middle":
        Copies._take = take
    else:
        setattr(os, "fsync" if where == "before it has its name" else "utime", die)
    find(path, cache)


@pytest.mark.usefixtures("tiny_members")
@pytest.mark.parametrize("where", ["in the middle", "before it has its name", "before its index is kept"])
def test_a_writer_that_was_killed_leaves_nothing_that_stays(tmp_path: Path, where: str) -> None:
    path, cache = write(tmp_path, ".zst"), tmp_path / "cache"
    child = multiprocessing.get_context("spawn").Process(target=_die_while_copying, args=(path, cache, where))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    [left] = copies(cache)
    assert (".tmp-" in left) == (where != "before its index is kept")
    assert read(path, cache) == ROWS
    assert copies(cache) == [left.split(".tmp-")[0]]


def _copy_in_child(path: Path, cache: Path, go: Any, out: Any) -> None:
    index.MEMBER_BYTES = 100
    wrote, real = 0, Copies.write

    def write(self: Copies, *args: Any) -> Any:
        nonlocal wrote
        wrote += 1
        return real(self, *args)

    Copies.write = write
    go.wait()
    out.put((read(path, cache) == ROWS * 50, wrote))


def test_processes_that_start_at_once_make_one_copy(tmp_path: Path) -> None:
    path, cache = write(tmp_path, ".xz", TEXT * 50), tmp_path / "cache"
    context = multiprocessing.get_context("spawn")
    go, out = context.Barrier(4), context.Queue()
    children = [context.Process(target=_copy_in_child, args=(path, cache, go, out)) for _ in range(4)]
    for child in children:
        child.start()
    found = [out.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert sorted(found) == [(True, 0), (True, 0), (True, 0), (True, 1)]
    assert len(copies(cache)) == 1


@pytest.mark.parametrize("limit", [100, 10_000])
def test_progress_is_told_in_compressed_bytes(tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MEMBER_BYTES", limit)
    monkeypatch.setattr(index, "_BLOCK", 500)
    monkeypatch.setattr(compressed, "_IN", 50)
    files = {suffix: write(tmp_path, suffix, cuts=[400, 800]) for suffix in SUFFIXES}
    told: list[tuple[int, int]] = []
    index_files(files, tmp_path / "cache", lambda done, total: told.append((done, total)))
    size = sum(path.stat().st_size for path in files.values())
    assert told == sorted(told)
    assert told[-1] == (size, size)
    assert len(told) > 8


def test_a_fault_in_one_file_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_BLOCK", 500)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    bad = tmp_path / "a.jsonl.gz"
    bad.write_bytes(b"no gzip")
    files = {"a": bad} | {suffix: write(tmp_path, suffix) for suffix in SUFFIXES}
    with pytest.raises(DataError, match="is no gzip file"):
        index_files(files, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.idx"))


def digests(recipe: Path) -> Iterator[str]:
    with Stream.open(recipe) as stream:
        loader = stream.loader()
        for _ in range(12):
            yield step_digest({lane: lane_digest(mine) for lane, mine in loader.step_records().items()})


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("limit", [100, 1 << 20])
def test_order_does_not_depend_on_compression(
    tmp_path: Path, suffix: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path)
    plain = list(digests(recipe))
    for path in [*tmp_path.rglob("*.jsonl")]:
        if "cache" not in path.parts:
            path.with_name(path.name + suffix).write_bytes(pack(path.read_bytes(), suffix, [100, 3000]))
            path.unlink()
    recipe.write_text(recipe.read_text().replace(".jsonl", f".jsonl{suffix}"))
    monkeypatch.setattr(index, "MEMBER_BYTES", limit)
    assert list(digests(recipe)) == plain
    assert bool(copies(tmp_path / "cache")) == (limit == 100)


def test_the_same_rows_plain_and_compressed_are_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("a/*.jsonl", "a/*"))
    (tmp_path / "a" / "one.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(RecipeError, match=r"'a' has both .*one\.jsonl and .*one\.jsonl\.gz: the same rows twice"):
        Stream.open(recipe)


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "a" / "three.jsonl.zst").write_bytes(b"")
    recipe.write_text(recipe.read_text().replace("a/*.jsonl", "a/*"))
    monkeypatch.setitem(sys.modules, zstd.__name__, None)
    compressed._zstd.cache_clear()
    with pytest.raises(RecipeError, match=r"pip install -e '.\[zstd\]'"):
        Stream.open(recipe)
    compressed._zstd.cache_clear()
