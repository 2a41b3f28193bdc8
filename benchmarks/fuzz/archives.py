"""Tar: the samples that `tarfile` and webdataset's rule for names give, or a refusal."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.fuzz.feed import Feed
from benchmarks.fuzz.law import equal, refused
from benchmarks.fuzz.rows import clear
from zephon.errors import ZephonError
from zephon.formats import tar as reading
from zephon.formats.tar import TarReader, index_tars
from zephon.types import Bad

NAMES = (
    b"a.jpg", b"a.txt", b"a.json", b"b.jpg", b"b.txt", b"dir/a.jpg", b"./a.jpg", b"a.b/c.txt", b"noext", b".hidden",
    b"a.TXT", b"a.seg.png", b"../up.jpg", b"/abs.jpg", b"__meta__.json", b"dir/", b"\xff.jpg", b"a.__key__", b"n" * 100,
    b"a..jpg", b"x.cls", b"a .txt", b"", b"a\n.txt", b"a/.txt",
)  # fmt: skip
KINDS = (
    b"0",
    b"0",
    b"0",
    b"\0",
    b"1",
    b"2",
    b"3",
    b"5",
    b"6",
    b"7",
    b"L",
    b"K",
    b"x",
    b"g",
    b"X",
    b"S",
    b"D",
    b"V",
    b"A",
)
CONTENTS = (b"hello", b"", b'{"a": 1}', b"7", b"\xff\xfe", b"x" * 600, b"[" * 3000, b"\xef\xbb\xbf{}", b"9" * 5000)
_KEYS = (b"path", b"size", b"linkpath", b"mtime", b"GNU.sparse.major", b"comment", b"hdrcharset")


def _header(name: bytes, kind: bytes, size: bytes, feed: Feed) -> bytes:
    """512 bytes; the checksum is right, but for once in many times."""
    fields = [
        (name, 100), (b"0000644", 8), (b"0000000", 8), (b"0000000", 8), (size, 12), (b"00000000000", 12), (b" " * 8, 8),
        (kind, 1), (feed.take(8) if feed.chance(10) else b"", 100),
        (feed.pick((b"ustar\x0000", b"ustar  \0", b"", b"ustar\0xx")), 8), (b"", 32 + 32 + 8 + 8),
        (feed.pick((b"", b"", b"", b"prefix", b"../p", b"/p")), 155), (b"", 12),
    ]  # fmt: skip
    block = feed.edit(b"".join(part[:size].ljust(size, b"\0") for part, size in fields), 1)[:512].ljust(512, b"\0")
    if feed.chance(30):
        return block
    total = sum(block[:148]) + 256 + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


def _record(feed: Feed) -> bytes:
    """A record of an extended header, with a right length at most times."""
    body = b" " + feed.pick(_KEYS) + b"=" + feed.pick((b"a.jpg", b"5", b"99999999999999999999", b"-1", b"\xff")) + b"\n"
    size = len(body) + 1
    while len(b"%d" % size) + len(body) != size:
        size += 1
    return b"%d" % (size + feed.pick((0, 0, 0, 0, 1, -1, 1000))) + body


def _built(feed: Feed) -> bytes:
    parts = list[bytes]()
    for _ in range(feed.number(6)):
        name, kind = feed.pick(NAMES), feed.pick(KINDS) if feed.chance(2) else b"0"
        content = feed.pick(CONTENTS)
        if kind in b"xgX":
            content = b"".join(_record(feed) for _ in range(1 + feed.number(2)))
        elif kind in b"LK":
            content = feed.pick((b"long/" + b"n" * 120 + b".jpg\0", b"a.jpg\0", b"../up.jpg\0", b"\0", b"unended"))
        size = b"%011o\0" % len(content)
        if feed.chance(8):
            size = feed.pick(
                (
                    b"777777777777",
                    b"\x80" + b"\xff" * 11,
                    b"\xff" * 12,
                    b"\x80" + b"\0" * 4 + b"\x7f" * 7,
                    b"",
                    b"00000000010 ",
                )
            )
        parts += [_header(name, kind, size, feed), content, bytes(-len(content) % 512)]
    return b"".join(parts) + bytes(512 * feed.pick((2, 20, 1, 0)))


def _wanted(raw: bytes) -> list[tuple[str, dict[str, bytes]]]:
    """Samples as webdataset makes them of what `tarfile` reads."""
    split, out = reading._splitter(), list[tuple[str, dict[str, bytes]]]()  # pyright: ignore[reportPrivateUsage]
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:", errorlevel=2) as archive:
        for one in _members(archive):
            if not one.isreg() or reading._META.match(one.name):  # pyright: ignore[reportPrivateUsage]
                continue
            key, suffix = split(one.name)
            if key is None:
                continue
            if not out or out[-1][0] != key:
                out.append((key, {}))
            file = archive.extractfile(one)
            out[-1][1][suffix.lower()] = file.read() if file else b""
    return out


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members; an archive may end behind a header that is for all members, and then has no more."""
    try:
        yield from archive
    except tarfile.ReadError as error:
        if str(error) != "end of file header":
            raise


def tar(data: bytes, folder: Path) -> str:
    """An archive that is built member by member, or any bytes."""
    feed, path = Feed(data), folder / "file.tar"
    clear(folder)
    raw = feed.rest() if feed.chance(8) else _built(feed)
    if feed.chance(4):
        raw = feed.edit(raw, 2)
    path.write_bytes(raw)
    reader = None
    try:
        index = index_tars({path.name: path}, folder / "cache")[0]
        reader = TarReader([index])
        count = index.shard.rows
        found = reader.read(np.arange(count))
        for i, row in enumerate(found):
            equal("a place", (str(path) in reader.place(i), str(path) in reader.address(i)), (True, True))
            again = reader.read(np.array([i]))[0]
            equal("a row alone", repr(again), repr(row))
        ours = list[tuple[str, dict[str, bytes]]]()
        for row in range(count):
            first, end = int(index.starts[row]), int(index.starts[row + 1])
            held = {
                index.suffixes[n]: index.file.read(at, size) for at, size, n in index.members[:, first:end].T.tolist()
            }
            ours.append((index.key(row), held))
    except ZephonError as error:
        return refused(error, path)
    finally:
        if reader:
            reader.close()
    try:
        wanted = _wanted(raw)
    except (tarfile.TarError, EOFError, ValueError, OSError, OverflowError) as error:
        if isinstance(error, UnicodeDecodeError):
            return "the oracle cannot read a name"  # of a PAX record in another encoding, which ours leaves out
        wanted = f"{type(error).__name__}: {error}" if count else []
    equal("samples", ours, wanted)
    return f"{count} samples, {sum(isinstance(row, Bad) for row in found)} bad"
