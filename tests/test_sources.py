"""Which files are a source, and how those of all sources are opened: one format each, every file indexed once."""

import json
import os
import subprocess
import sys
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import documents, write_jsonl, write_recipe
from test_tar import simple, write_tar

from zephon import DataError, Stream
from zephon.digest import lane_digest, step_digest
from zephon.errors import RecipeError
from zephon.formats import index, tar
from zephon.formats.blobs import FileBlob
from zephon.formats.sources import find_files, open_sources
from zephon.recipe import SourceSpec


def spec(*paths: str, name: str = "s") -> SourceSpec:
    return SourceSpec(name, paths, Decimal(1), "text", None, None, None, None, None, 0, {})


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


def test_files_are_named_below_their_common_folder(tmp_path: Path) -> None:
    touch(tmp_path, "w/b/1.tar", "w/a/2.tar", "w/a/1.tar")
    found = find_files(spec("w/**/*.tar"), tmp_path)
    assert found == {name: tmp_path / "w" / name for name in ("a/1.tar", "a/2.tar", "b/1.tar")}
    assert list(found) == sorted(found)


@pytest.mark.parametrize("names", [("a.jsonl", "b.tar"), ("a.parquet", "b.jsonl.gz"), ("a.tar", "b.parquet")])
def test_a_source_has_one_format(tmp_path: Path, names: tuple[str, ...]) -> None:
    touch(tmp_path, *names)
    with pytest.raises(
        RecipeError, match=r"'s' has files of several formats: .*a\..*b\..*make a source of each"
    ) as one:
        find_files(spec("*"), tmp_path)
    assert all(str(tmp_path / name) in str(one.value) for name in names)


def test_two_suffixes_of_one_format_are_no_mix(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "b.ndjson", "c.jsonl.gz")
    assert list(find_files(spec("*"), tmp_path)) == ["a.jsonl", "b.ndjson", "c.jsonl.gz"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.tar.gz", r"`gzip -dk .*a\.tar\.gz`"),
        ("a.tar.zst", "`zstd -dk"),
        ("a.tar.xz", "`xz -dk"),
        ("a.tar.bz2", "`bzip2 -dk"),
        ("a.tgz", "`gzip -dk"),
        ("a.txz", "`xz -dk"),
        ("a.parquet.gz", "`gzip -dk"),
        ("a.json", r"none of the known formats: \.jsonl, \.ndjson, these with \.gz.*\.tar \(WebDataset\), \.parquet"),
        ("a.gz", "none of the known formats"),
        ("a.TAR", "none of the known formats"),
        ("tar", "none of the known formats"),
    ],
)
def test_what_is_not_read_is_refused_with_a_way_out(tmp_path: Path, name: str, says: str) -> None:
    touch(tmp_path, name)
    with pytest.raises(RecipeError, match=f"Source 's': .*{name} is .*{says}"):
        find_files(spec("*"), tmp_path)


def link(at: Path, to: str) -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    at.symlink_to(to)


@pytest.mark.parametrize(
    ("make", "pattern", "says"),
    [
        (lambda at: link(at / "b.jsonl", "nowhere"), "*.jsonl", r"b\.jsonl cannot be read \(No such file"),
        (lambda at: link(at / "b.jsonl", "nowhere"), "b.jsonl", r"b\.jsonl cannot be read \(No such file"),
        (lambda at: link(at / "d", "nowhere"), "*/*.jsonl", "d cannot be read .*so that rows might be missing"),
        (lambda at: link(at / "d" / "e", "nowhere"), "**/*.jsonl", "e cannot be read"),
        (lambda at: os.mkfifo(at / "b.jsonl"), "*.jsonl", r"b\.jsonl is a pipe"),
        (lambda at: (at / "b.jsonl").mkdir(), "*.jsonl", r"b\.jsonl is a folder\. Name its files"),
        (lambda at: (at / "b.parquet").mkdir(), "*", r"b\.parquet is a folder"),
        (lambda at: (at / "d").mkdir(), "d*", r"'d\*' is a folder\. Name its files, as in 'd\*/\*\.jsonl'"),
    ],
)
def test_what_matches_and_cannot_be_read_is_refused(tmp_path: Path, make: Any, pattern: str, says: str) -> None:
    touch(tmp_path, "a.jsonl", "c/a.jsonl")
    make(tmp_path)
    with pytest.raises(RecipeError, match=f"Source 's': .*{says}"):
        find_files(spec(pattern), tmp_path)


def test_a_folder_that_may_not_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `glob` does of it is nothing; whoever runs the tests may be root, who may list everything."""
    touch(tmp_path, "a/x.jsonl", "b/x.jsonl")
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).rstrip("/").endswith("/b"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for pattern in ("*/*.jsonl", "**/*.jsonl", "**", "b/*"):
        with pytest.raises(RecipeError, match=r"b/? cannot be read \(Permission denied\)"):
            find_files(spec(pattern), tmp_path)
    assert list(find_files(spec("a/*"), tmp_path)) == ["x.jsonl"]


def test_folders_and_links_that_do_no_harm_are_passed_over(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "d/b.jsonl", "d/notes")
    link(tmp_path / "d" / "loop", "..")
    link(tmp_path / "d" / "again.jsonl", "b.jsonl")
    assert list(find_files(spec("*.jsonl", "d/*.jsonl"), tmp_path)) == ["a.jsonl", "d/b.jsonl"]
    assert list(find_files(spec("**/*.jsonl"), tmp_path)) == ["a.jsonl", "d/b.jsonl"]


def test_sources_of_several_formats_are_opened_together(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "t" / "1.jsonl", documents(5))
    write_tar(tmp_path / "i" / "1.tar", simple(3))
    write_tar(tmp_path / "i" / "2.tar", simple(2))
    files = {name: find_files(spec(*paths), tmp_path) for name, paths in {"i": ["i/*"], "t": ["t/*"]}.items()}
    opened = open_sources(files, tmp_path / "cache")
    assert {name: [shard.name for shard in one.shards] for name, one in opened.items()} == {
        "i": ["1.tar", "2.tar"],
        "t": ["1.jsonl"],
    }
    assert [shard.rows for shard in opened["i"].shards] == [3, 2]
    assert [row["text"] for row in opened["t"].reader.read(np.arange(5))] == documents(5)
    rows = opened["i"].reader.read(np.array([4, 0]))
    assert [row["json"] for row in rows] == [{"i": 1}, {"i": 0}]
    assert all(isinstance(row["jpg"], FileBlob) for row in rows)
    for one in opened.values():
        one.reader.close()


def test_a_file_that_two_sources_share_is_indexed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, scans = write_tar(tmp_path / "x.tar", simple(3)), list[Path]()
    real = tar._scan
    monkeypatch.setattr(tar, "_scan", lambda at, *more: scans.append(at) or real(at, *more))
    opened = open_sources({"a": {"x.tar": path}, "b": {"y/x.tar": path}}, tmp_path / "cache")
    assert len(scans) == 1
    assert [one.shards[0].name for one in opened.values()] == ["x.tar", "y/x.tar"]
    assert opened["a"].shards[0].sha256 == opened["b"].shards[0].sha256


def test_jsonl_files_of_all_sources_are_indexed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: {"x": write_jsonl(tmp_path / f"{name}.jsonl", documents(4))} for name in "abc"}
    builds: list[int] = []
    real = index._build_all
    monkeypatch.setattr(index, "_build_all", lambda found, *more: builds.append(len(found)) or real(found, *more))
    told: list[tuple[int, int]] = []
    opened = open_sources(files, tmp_path / "cache", lambda *both: told.append(both))
    assert builds == [3]
    assert len({total for _, total in told}) == 1
    readers = [one.reader for one in opened.values()]
    assert [vars(reader)["_files"]._limit for reader in readers] == [512 // 3] * 3


def test_a_source_without_rows_is_named(tmp_path: Path) -> None:
    empty = write_tar(tmp_path / "x.tar", [("README", b"no sample")])
    with pytest.raises(RecipeError, match="Source 'b' has no rows in 1 files. Remove it, or give it data"):
        open_sources({"a": {"x": write_tar(tmp_path / "y.tar", simple(1))}, "b": {"x": empty}}, tmp_path / "cache")


def test_text_alone_imports_neither_tar_nor_parquet(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", documents(3))
    code = (
        "import pathlib, sys\n"
        "from zephon.formats.sources import open_sources\n"
        "open_sources({'x': {'x': pathlib.Path(sys.argv[1])}}, pathlib.Path(sys.argv[2]))\n"
        "assert not {'zephon.formats.tar', 'webdataset', 'torch', 'pyarrow', 'zephon.formats.parquet'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.jsonl"), str(tmp_path / "cache")], check=True)


def tar_recipe(folder: Path, run: str = "") -> Path:
    """A recipe that mixes texts of samples with images and texts of lines."""
    for shard in range(3):
        mine = [(f"{i:04}", text) for i, text in enumerate(documents(60)) if i % 3 == shard]
        parts = [
            part
            for key, text in mine
            for part in ((f"{key}.jpg", b"\xff\xd8" * 3000), (f"{key}.txt", text.encode()), (f"{key}.json", b"{}"))
        ]
        write_tar(folder / "wds" / f"{shard}.tar", parts)
    sources = (
        '[[sources]]\nname = "tar"\npaths = ["wds/*.tar"]\nweight = 0.6\ntext = "txt"\n'
        '[[sources]]\nname = "lines"\npaths = ["b/*.jsonl"]\nweight = 0.4\n'
    )
    path = write_recipe(folder, sources=sources)
    path.write_text(path.read_text() + run)
    return path


def test_text_of_tars_and_lines_mixes_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    def digests(world: int, runner: str = "", steps: int = 4) -> list[str]:
        run = f'runner = "{runner}"\nworkers = 2\n' if runner else ""
        with Stream.open(tar_recipe(tmp_path, run)) as stream:
            loaders = [stream.loader(rank=rank, world=world) for rank in range(world)]
            return [
                step_digest({lane: lane_digest(mine) for one in loaders for lane, mine in one.step_records().items()})
                for _ in range(steps)
            ]

    alone = digests(1)
    assert digests(2, "threads") == alone
    assert digests(4, "process") == alone


def test_a_bad_sample_is_named_with_its_source_tar_and_key(tmp_path: Path) -> None:
    path = tar_recipe(tmp_path)
    with tarfile.open(tmp_path / "wds" / "1.tar", "a") as out:
        out.addfile(tarfile.TarInfo("zz1.caption.md"))
    says = r"Source 'tar': .*wds/1\.tar, sample zz1, byte \d+: there is no field 'txt'; the row has"
    with pytest.raises(DataError, match=says):
        Stream.open(path)  # among its first rows


def test_a_moved_folder_gives_the_same_catalogue(tmp_path: Path) -> None:
    found: list[object] = []
    for folder in ("one", "two"):
        with Stream.open(tar_recipe(tmp_path / folder)) as stream:
            found.append(json.dumps(stream.header(0)))
    assert found[0] == found[1]
