"""Input that attacks: bombs cost bounded memory and time, and nothing leads out of its folder or runs code."""

import ast
import bz2
import gzip
import importlib
import io
import lzma
import os
import re
import resource
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from modalities import images
from modalities.geometry import ImageError
from modalities.headers import read_header
from modalities.images import load
from modalities.media import Bytes, MediaError, media, text_of
from zephon import DataError
from zephon.errors import UsageError
from zephon.formats import compressed, jsonl, lines, parquet, tar
from zephon.formats.blobs import path_blob
from zephon.formats.index import index_files
from zephon.formats.jsonl import JsonlReader
from zephon.formats.parquet import open_parquet
from zephon.formats.tar import TarReader, index_tars
from zephon.types import Bad

zstd: Any = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

MIB = 1024 * 1024
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda raw: gzip.compress(raw, 1, mtime=0),
    ".zst": lambda raw: zstd.compress(raw, 1),
    ".bz2": lambda raw: bz2.compress(raw, 1),
    ".xz": lambda raw: lzma.compress(raw, preset=0),
}


@contextmanager
def at_most(size: int, cpu_s: float) -> Iterator[None]:
    """Fail where Python's own memory grows by more, or more CPU is taken."""
    tracemalloc.start()
    started = time.process_time()
    try:
        yield
        took, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= size, f"{peak / MIB:.1f} MiB"
    assert took <= cpu_s, f"{took:.1f} s"


def bad(row: object) -> str:
    assert isinstance(row, Bad), row
    return row.reason


@pytest.mark.parametrize("suffix", ["", *PACK])
def test_a_line_that_is_too_long_is_a_bad_row_and_is_not_read(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 10 GB in one line it is the same: blocks of 32 MiB, and a copy on disk where it is compressed."""
    monkeypatch.setattr(jsonl, "ROW_BYTES", MIB)
    path = tmp_path / f"bomb.jsonl{suffix}"
    text = b'{"n": 1}\n{"n": "' + bytes(12 * MIB).replace(b"\0", b"x") + b'"}\n{"n": 3}\n'
    path.write_bytes(PACK[suffix](text) if suffix else text)
    index = index_files({"x": path}, tmp_path / "cache")[0]
    reader = JsonlReader([index])
    reader.read(np.arange(1))  # what is imported when it is first needed is no memory of a row
    with at_most(MIB, 1.0):
        first, long, last = reader.read(np.arange(3))
    assert (first, last) == ({"n": 1}, {"n": 3})
    assert "longer than 1,048,576 bytes" in bad(long)
    assert str(path) in reader.place(1)
    reader.close()


def test_the_limit_of_a_line_is_what_the_documentation_says() -> None:
    assert lines.ROW_BYTES == jsonl.ROW_BYTES == tar.ROW_BYTES == 64 * MIB


@pytest.mark.parametrize("suffix", PACK)
def test_a_bomb_stops_at_the_limit_of_copies_and_leaves_nothing(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "COPIES_BYTES", 4 * MIB)
    path = tmp_path / f"bomb.jsonl{suffix}"
    path.write_bytes(PACK[suffix](b"x" * (40 * MIB)))
    with pytest.raises(UsageError, match=rf"bomb\.jsonl{suffix}: .*would exceed what copies .* may take: 4\.2 MB"):
        index_files({"x": path}, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "decompressed").iterdir())


def test_rows_nested_without_end_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_bytes(b'{"a":' * 1_000_000 + b"\n" + b"[" * 4_000_000 + b"\n" + b'{"n": 1}\n')
    reader = JsonlReader(index_files({"x": path}, tmp_path / "cache"))
    with at_most(100 * MIB, 5.0):
        one, two, good = reader.read(np.arange(3))
    assert good == {"n": 1}
    assert "not valid JSON" in bad(one)
    assert "not valid JSON" in bad(two)


def png(width: int, height: int, body: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_a_picture_with_more_pixels_than_the_limit_is_refused_by_its_header() -> None:
    bomb = png(60_000, 60_000, zlib.compress(bytes(100 * MIB), 9))
    assert len(bomb) < 110_000
    for read in (lambda: read_header(Bytes(bomb)).shown(), lambda: load(bomb, (28, 28))):
        with at_most(MIB, 0.5), pytest.raises(ImageError, match="60,000 by 60,000 .*at most 89,478,485 in all"):
            read()


def test_pixels_beyond_what_a_header_says_are_not_unpacked() -> None:
    small = png(8, 8, zlib.compress(bytes(200 * MIB), 9))
    with at_most(8 * MIB, 0.5):
        assert load(small, (8, 8)).shape == (8, 8, 3)


def test_a_jpeg_of_thousands_of_scans_is_refused() -> None:
    """Each pass over 89 Mpixel takes some 60 ms, so a megabyte of them would take an hour."""
    file = io.BytesIO()
    Image.new("L", (2048, 2048), 100).save(file, "JPEG", progressive=True)
    raw = file.getvalue()
    assert load(raw, (28, 28)).shape == (28, 28, 3)
    last = raw[raw.rindex(b"\xff\xda") : -2]
    with at_most(8 * MIB, 0.5), pytest.raises(ImageError, match="30,0.. scans; at most 100"):
        load(raw[:-2] + 30_000 * last + raw[-2:], (28, 28))
    assert images.MAX_SCANS == 100


def test_a_file_that_is_too_large_for_a_picture_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.write(png(8, 8, b""))
        file.truncate(8 * 1024**3)  # holes: it takes no disk
    with at_most(MIB, 0.5), pytest.raises(ImageError, match="8,589,934,592 bytes; at most 1,073,741,824"):
        read_header(path_blob(path)).shown()


def test_a_dictionary_that_makes_gigabytes_of_kilobytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.parquet"
    text = pa.array(["x" * MIB])
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(400), pa.int32()), text).cast(pa.string())
    pq.write_table(pa.table({"text": column}), path, compression="zstd", store_schema=False)
    del column
    assert path.stat().st_size < 10_000
    monkeypatch.setattr(parquet, "REFUSED_BYTES", 20 * MIB)
    _, reader = open_parquet({"x": path})
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match=r"bomb\.parquet: row group 0 holds more than 20971520 bytes"):
        reader.read(np.arange(1))
    reader.close()
    assert pa.total_allocated_bytes() - before < MIB
    assert pa.default_memory_pool().max_memory() < 2**31  # the column above, not 400 copies more


def test_a_page_that_lies_about_its_size_is_an_error_that_names_file_and_group(tmp_path: Path) -> None:
    """A page can say at most 2 GiB, in 32 bits; what is not filled takes no memory."""
    path = tmp_path / "lie.parquet"
    table = pa.table({"text": pa.array(["y" * (2 * MIB)] * 2)})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    raw = path.read_bytes()
    assert raw[4:7] == b"\x15\0\x15"  # of the page header: its kind, then its size in four bytes
    path.write_bytes(raw[:7] + b"\xfe\xff\xff\x7f" + raw[11:])  # 128 MiB
    _, reader = open_parquet({"x": path})
    found = attempt(lambda: reader.read(np.arange(1))[0])
    assert re.search(r"lie\.parquet: row group 0 cannot be read", found)
    reader.close()


def attempt(read: Callable[[], object]) -> str:
    """What is said, whether as a bad row or as an error."""
    try:
        return bad(read())
    except DataError as error:
        return str(error)


def header(name: str, size: bytes = b"", **info: Any) -> bytes:
    member = tarfile.TarInfo(name)
    for key, value in info.items():
        setattr(member, key, value)
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    if size:
        block[124:136] = size
    block[148:156] = b"%06o\0 " % (256 + sum(block[:148]) + sum(block[156:512]))
    return bytes(block)


END = bytes(1024)
GOOD = header("a.txt", b"%011o\0" % 5) + b"hello" + bytes(507)
ATTACKS = {
    "8 EB": (header("b.txt", b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7), "holds 9223372036854775807 bytes"),
    "a size below 0": (header("b.txt", b"\xff" * 12), "holds -1 bytes"),
    "an absolute path": (header("/etc/b.txt"), "leads out of the archive"),
    "a parent path": (header("x/../../b.txt"), "leads out of the archive"),
    "a symbolic link": (header("b.txt", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "is a link"),
    "a hard link": (header("b.txt", type=tarfile.LNKTYPE, linkname="a.txt"), "is a link"),
    "holes": (header("b.txt", type=tarfile.GNUTYPE_SPARSE), "is stored with holes"),
    "a name of a megabyte and more": (header("b.txt", b"%011o\0" % (2 * MIB), type=tarfile.GNUTYPE_LONGNAME)
                                      + b"n" * 2 * MIB, "holds 2097152 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", ATTACKS)
def test_a_hostile_member_is_refused_by_file_and_byte(tmp_path: Path, case: str) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(GOOD + ATTACKS[case][0] + END)
    with at_most(8 * MIB, 2.0), pytest.raises(DataError, match=rf"x\.tar, byte 1024: .*{ATTACKS[case][1]}"):
        index_tars({"x": path}, tmp_path / "cache")


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_devices_hold_nothing_and_nothing_is_made_of_them(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(GOOD + header("null.jpg", type=kind, devmajor=1, devminor=3) + END)
    index = index_tars({"x": path}, tmp_path / "cache")[0]
    assert TarReader([index]).read(np.arange(index.shard.rows)) == [{"__key__": "a", "txt": "hello"}]
    assert {one.name for one in tmp_path.iterdir()} == {"x.tar", "cache"}


def test_a_text_that_is_too_long_is_a_bad_row_and_is_not_read(tmp_path: Path) -> None:
    path, size = tmp_path / "x.tar", 3 * 1024**3
    with path.open("wb") as file:
        file.write(GOOD + header("b.txt", b"%011o\0" % size))
        file.seek(size, os.SEEK_CUR)  # holes: it takes no disk
        file.write(header("c.txt", b"%011o\0" % 5) + b"third" + bytes(507) + END)
    reader = TarReader(index_tars({"x": path}, tmp_path / "cache"))
    reader.read(np.arange(1))  # as above
    with at_most(MIB, 0.5):
        first, long, last = reader.read(np.arange(3))
    assert (first, last) == ({"__key__": "a", "txt": "hello"}, {"__key__": "c", "txt": "third"})
    assert "member b.txt, byte 1536, holds 3,221,225,472 bytes; of a text 67,108,864" in bad(long)


@pytest.mark.parametrize(
    "name",
    [
        "../secret/secret.jpg",
        "out/secret.jpg",
        "link.jpg",
        "sub/../../secret/secret.jpg",
        "ABSOLUTE",
        "loop",
        "none",
        "loop/../out/secret.jpg",
        "loop/../up.jpg",
    ],
)
def test_no_path_of_a_row_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    root, secret = tmp_path / "images", tmp_path / "secret"
    (root / "sub").mkdir(parents=True)
    secret.mkdir()
    (secret / "secret.jpg").write_bytes(b"secret")
    (root / "a.jpg").write_bytes(b"a")
    for link, to in (
        ("out", secret),
        ("link.jpg", secret / "secret.jpg"),
        ("loop", "loop"),
        ("in.jpg", root / "a.jpg"),
    ):
        (root / link).symlink_to(to)
    assert media("in.jpg", root).read() == b"a"  # links within the folder are harmless
    with pytest.raises(MediaError):
        media(str(secret / "secret.jpg") if name == "ABSOLUTE" else name, root)


def test_a_text_is_bounded_whatever_its_member_is_called(tmp_path: Path) -> None:
    """Only members that are decoded as texts were; `text = "html"` read whatever there was."""
    for size in (lines.ROW_BYTES, lines.ROW_BYTES + 1):
        with (tmp_path / "page.html").open("wb") as file:
            file.truncate(size)
        blob = path_blob(tmp_path / "page.html")
        if size == lines.ROW_BYTES:
            assert len(text_of(blob)) == size
        else:
            with pytest.raises(MediaError, match="holds more than the 67,108,864 bytes"):
                text_of(blob)


def test_a_pipe_or_a_device_is_no_image_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(MediaError, match="no regular file"):
        media("pipe.jpg", tmp_path)
    with pytest.raises(OSError, match="no regular file"):
        path_blob(Path("/dev/zero"))


def test_nothing_that_is_stored_can_run_code() -> None:
    """Pickles go between a run's own processes alone (`zephon/run/wire.py`), over sockets without a name."""
    code = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    root, found = Path(__file__).parent.parent, set[str]()
    for package in ("zephon", "modalities"):
        for path in (root / package).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)):
                names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                found |= {str(path.relative_to(root)) for name in names if name.split(".")[0] in code}
            assert not re.search(r"allow_pickle=True|torch\.load\(|\b(eval|exec)\(", text), path
    assert found == {"zephon/run/wire.py"}


@pytest.mark.slow
def test_a_gigabyte_in_one_line_takes_little_memory(tmp_path: Path) -> None:
    """The whole way in a process of its own, with nothing lowered: 1 GiB of one member and one line."""
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b'{"n": 1}\n{"n": "')
        for _ in range(1024):
            file.write(b"x" * MIB)
        file.write(b'"}\n{"n": 3}\n')
    code = (
        "import resource, sys, numpy as np\nfrom pathlib import Path\nfrom zephon.formats.index import index_files\n"
        "from zephon.formats.jsonl import JsonlReader\nfrom zephon.types import Bad\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "reader = JsonlReader(index_files({'x': Path(sys.argv[1])}, Path(sys.argv[2])))\n"
        "rows = reader.read(np.arange(3))\n"
        "assert rows[0] == {'n': 1} and isinstance(rows[1], Bad) and rows[2] == {'n': 3}, rows\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "cache")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 256 * MIB
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime < 120
