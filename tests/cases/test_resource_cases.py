"""Memory that stays flat, resumes that read little, few open files, and an index that is made once."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cases.makers import (
    corpus,
    delivered,
    document,
    exactly,
    images,
    lines,
    pairs,
    ranks,
    recipe,
    row,
    saved,
    source,
    tar,
    trace,
    write,
)
from zephon import DataError, Stream
from zephon.command.rehearse import process_tree
from zephon.formats import parquet
from zephon.formats.cache import ByteCache
from zephon.recipe import Recipe


def threads(count: int) -> str:
    return f'[run]\nrunner = "threads"\nworkers = {count}\n'


# --- RES-1 ---------------------------------------------------------------------------------------------------------


def test_memory_is_flat_while_parquet_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory rose for as long as a file was read; batches that were let go stayed allocated.

    https://github.com/apache/arrow/issues/39808, https://github.com/huggingface/datasets/issues/4883
    """
    monkeypatch.setattr(parquet, "GROUPS", ByteCache(parquet.KEPT_BYTES, 0))  # what other tests read is none of ours
    ballast, texts = ["x" * 20_000] * 50, [exactly(f"r{i}", 500) for i in range(3000)]
    with pq.ParquetWriter(
        tmp_path / "x.parquet", pa.schema([("text", "string"), ("more", "string")]), use_dictionary=False
    ) as out:
        for i in range(0, 3000, 50):  # 60 groups of a megabyte, decoded
            out.write_table(pa.table({"text": texts[i : i + 50], "more": ballast}))
    more = threads(2) + 'memory = "64MiB"\n'  # of which 24 are for decoded groups
    held, peaks = pa.total_allocated_bytes(), list[int]()
    with Stream.open(
        recipe(tmp_path, source("x.parquet"), lanes=2, size=2, seq_len=4096, window=64, more=more)
    ) as stream:
        loader = stream.loader()
        for _ in range(6):  # three passes
            peak = 0
            for _ in range(92):
                next(loader)
                peak = max(peak, pa.total_allocated_bytes() - held)
            peaks.append(peak)
        state = loader.state_dict()
    assert max(peaks) < 24 * 2**20 + 8e6
    assert max(peaks[4:]) <= 1.1 * max(peaks[2:4])
    assert sum(map(len, state.values())) < 4096
    assert pa.total_allocated_bytes() - held < 1e6


def test_a_stream_that_cannot_be_opened_keeps_no_memory(tmp_path: Path) -> None:
    """What was decoded for a start that failed must not stay, nor what its readers were lent.

    https://github.com/apache/arrow/issues/39808
    """
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "x.parquet")
    before = parquet.GROUPS.bytes
    with pytest.raises(DataError, match="must be a string"):
        Stream.open(recipe(tmp_path, source("x.parquet")))
    assert parquet.GROUPS.bytes == before


def test_counters_and_caches_do_not_grow(tmp_path: Path) -> None:
    """The parent grew: counters, keys of samples, lists of errors.

    https://github.com/huggingface/datasets/issues/4883
    """
    import gc

    tar(tmp_path / "x.tar", [*pairs(20), ("bad.jpg", b""), ("bad.txt", b"x")])
    with Stream.open(recipe(tmp_path, images("x.tar", max_bad=10**6), lanes=1, seq_len=32)) as stream:
        (loader,) = ranks(stream, 1)
        counts: list[int] = []
        for _ in range(4):
            for _ in range(80):
                next(loader)
            loader.take_skipped()
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[3] - counts[1] < 100


# --- RES-2 ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read of a file gave."""
    real, found = os.pread, list[int]()

    def pread(*args: Any) -> bytes:
        data = real(*args)
        found.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", pread)
    return found


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("algorithm", ["concat", "best_fit"])
def test_a_resume_reads_no_more_late_than_early(
    tmp_path: Path, kind: str, algorithm: str, read_bytes: list[int]
) -> None:
    """A resume read and threw away everything before the saved step: hours for a long run.

    https://github.com/hiyouga/LlamaFactory/issues/6352, https://github.com/huggingface/transformers/issues/21934,
    https://github.com/AnswerDotAI/ModernBERT/issues/246
    """
    import gzip

    for shard in range(10):
        texts = [document(f"{shard}-{i}", 200) for i in range(300)]
        if kind == "parquet":
            pq.write_table(pa.table({"text": texts}), tmp_path / f"{shard}.parquet",
                           row_group_size=30)  # fmt: skip
        else:
            raw = b"".join(row("d", text) + b"\n" for text in texts)
            write(tmp_path / f"{shard}.{kind}", gzip.compress(raw) if kind.endswith("gz") else raw)
    more = f'[packing]\nalgorithm = "{algorithm}"\n'
    path = recipe(tmp_path, source(f"*.{kind}"), lanes=2, size=2, seq_len=1024, window=32, more=more)
    states: dict[int, dict[str, bytes]] = {}
    wanted: dict[int, list[str]] = {}
    with Stream.open(path) as stream:
        loaders = ranks(stream, 1)
        total = stream.sources[0].catalogue.bytes
        for at in (2, 700, 1400):
            trace(loaders, at - loaders[0].step)
            states[at] = saved(loaders)
            wanted[at] = trace(loaders, 1)
    costs: dict[int, int] = {}
    for at, state in states.items():
        with Stream.open(path) as stream:
            read_bytes.clear()
            assert trace(ranks(stream, 1, state), 1) == wanted[at]
            costs[at] = sum(read_bytes)
    assert max(costs.values()) < 2 * total / 10  # two of ten shards
    assert costs[1400] <= 2 * costs[2] + total / 20


# --- RES-3 ---------------------------------------------------------------------------------------------------------

LIMITED = """
import sys
from zephon import Stream
with Stream.open(sys.argv[1]) as stream:
    loader = stream.loader()
    for _ in range(40):
        next(loader)
print("done")
"""


def test_a_thousand_shards_need_few_open_files(tmp_path: Path) -> None:
    """Workers died of a bus error where /dev/shm was small, or of files that stayed open.

    https://github.com/pytorch/pytorch/issues/5040
    """
    for i in range(1000):
        lines(tmp_path / f"d/{i:04}.jsonl", [row(f"d{i}")])
    path = recipe(tmp_path, source("d/*.jsonl"), lanes=4, size=4, window=64, more=threads(4))
    command = ["bash", "-c", 'ulimit -n 64; exec "$@"', "-", sys.executable, "-c", LIMITED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr[-2000:]


def test_nothing_is_put_into_shared_memory(tmp_path: Path) -> None:
    """Arrays between processes lie in memory files without a name, which the size of /dev/shm does not bound.

    https://github.com/pytorch/pytorch/issues/5040
    """

    def mapped(pid: int) -> set[str]:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[-1] for line in lines if "/dev/shm/" in line}

    corpus(tmp_path, 2, 40)
    before = mapped(os.getpid())  # another test's torch may have some
    with Stream.open(
        recipe(tmp_path, source("*.jsonl"), lanes=2, size=8, seq_len=8192, more="[run]\nisolate = true\n")
    ) as stream:
        loader = stream.loader()
        for _ in range(30):
            assert sum(array.nbytes for array in next(loader).values()) > 700_000  # far more than a message takes
        family = process_tree(os.getpid())
        assert len(family) > 1
        assert all(mapped(pid) <= before for pid in family)


# --- RES-4 ---------------------------------------------------------------------------------------------------------


class KilledError(Exception):
    pass


def test_an_index_is_made_once_goes_on_after_a_kill_and_is_shared(tmp_path: Path, read_bytes: list[int]) -> None:
    """With thousands of shards the start took hours, hung at the last one, and every rank loaded all of the index.

    https://github.com/NVIDIA/Megatron-Energon/issues/165, https://github.com/NVIDIA/Megatron-Energon/issues/127,
    https://github.com/mosaicml/streaming/issues/662
    """
    for i in range(400):
        lines(tmp_path / f"d/{i // 100}/{i:04}.jsonl", [row(f"d{i}-0"), row(f"d{i}-1")])
    path = recipe(tmp_path, source("d/**/*.jsonl"), lanes=4, size=4)
    with Stream.open(path) as stream:
        expected = trace(ranks(stream, 4), 10)
    whole = sorted((one.name, one.read_bytes()) for one in (tmp_path / "cache").rglob("*") if one.is_file())
    fresh = tmp_path / "other"
    path.write_text(path.read_text().replace('cache = "cache"', 'cache = "other"'))

    def killed(done: int, total: int) -> None:
        if done > total / 2:
            raise KilledError

    with pytest.raises(KilledError):
        Stream(Recipe.load(path), killed)
    half = len([one for one in fresh.rglob("*") if one.is_file()])
    assert half > 50
    with Stream.open(path) as stream:
        assert trace(ranks(stream, 1), 10) == expected
    assert sorted((one.name, one.read_bytes()) for one in fresh.rglob("*") if one.is_file()) == whole


def test_a_damaged_shard_among_many_is_named(tmp_path: Path) -> None:
    """The run cannot start without it; those that are whole are indexed when it has been mended.

    https://github.com/NVIDIA/Megatron-Energon/issues/127
    """
    for i in range(60):
        tar(tmp_path / f"{i:03}.tar", [(f"{k}.txt", f"text {i} {k}".encode()) for k in range(2)])
    good = (tmp_path / "030.tar").read_bytes()
    write(tmp_path / "030.tar", b"\0" * 100 + b"damaged" * 100)
    path = recipe(tmp_path, source("*.tar", text="txt"))
    with pytest.raises(DataError, match=r"030\.tar, byte 0: no header"):
        delivered(path)
    write(tmp_path / "030.tar", good)
    assert len(delivered(path).texts) == 120


def test_files_are_not_all_opened_by_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm start opens what its rows lie in, and no more.

    https://github.com/mosaicml/streaming/issues/662
    """
    corpus(tmp_path, 300, 3)
    path = recipe(tmp_path, source("*.jsonl"), lanes=4, size=4, seq_len=32, window=8)
    with Stream.open(path) as stream:
        trace(ranks(stream, 1), 1)
    real, opened = os.open, set[str]()

    def noted(name: Any, *args: Any, **more: Any) -> int:
        if str(name).endswith(".jsonl"):
            opened.add(str(name))
        return real(name, *args, **more)

    monkeypatch.setattr(os, "open", noted)
    with Stream.open(path) as stream:
        trace([stream.loader(1, 4)], 2)
    assert 0 < len(opened) < 100
