"""Ranks and workers: the same batches on any number of them, tiny sources, numbers that cannot be."""

from pathlib import Path
from typing import Any

import pytest

from cases.makers import corpus, delivered, exactly, lines, ranks, recipe, row, saved, source, texts_in, trace
from zephon import Stream
from zephon.command.cli import main
from zephon.errors import RestoreError, TopologyError, UsageError

PACKINGS = ["concat", "best_fit"]


def threads(count: int) -> str:
    return f'[run]\nrunner = "threads"\nworkers = {count}\n' if count else ""


# --- ELA-1 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", PACKINGS)
def test_batches_do_not_depend_on_ranks_or_workers(tmp_path: Path, algorithm: str) -> None:
    """The order depended on ranks and workers, or each worker delivered all the data.

    https://github.com/allenai/OLMo/pull/268, https://github.com/huggingface/datasets/issues/3423
    """
    for shard in range(5):
        lengths = [30, 90, 10, 64, 200] * 8
        lines(tmp_path / f"{shard}.jsonl", [row("d", exactly(f"{shard}-{i}", size)) for i, size in enumerate(lengths)])
    found = set[tuple[str, ...]]()
    for workers in (0, 1, 2, 5):
        more = f'[packing]\nalgorithm = "{algorithm}"\n' + threads(workers)
        with Stream.open(recipe(tmp_path, source("*.jsonl"), lanes=8, size=8, window=32, more=more)) as stream:
            found |= {tuple(trace(ranks(stream, world), 20)) for world in (1, 2, 4, 8)}
    assert len(found) == 1


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_document_comes_once_whatever_the_ranks(tmp_path: Path, world: int) -> None:
    """Ranks repeated each other's documents.

    https://github.com/huggingface/datasets/issues/3423
    """
    texts = [f"<{i:03}> " + "x" * 9 for i in range(128)]  # with BOS 16 positions: a record is a document
    lines(tmp_path / "x.jsonl", [row("d", text) for text in texts])
    with Stream.open(recipe(tmp_path, source("x.jsonl"), size=8, seq_len=16, window=64)) as stream:
        held = [
            text
            for loader in ranks(stream, world)
            for batch in loader
            for text in texts_in(stream.worker.records(batch))
        ]
    assert sorted(held) == sorted(texts)


# --- ELA-2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(8, 1), (8, 2), (8, 4), (8, 8), (1, 8), (4, 2)])
def test_a_run_goes_on_with_any_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    """A run saved on many devices must go on, or be looked into, on few; places were kept by rank.

    https://github.com/mosaicml/streaming/issues/393, https://github.com/allenai/OLMo/pull/176,
    https://github.com/AI-Hypercomputer/maxtext/issues/1760
    """
    corpus(tmp_path, 8, 30)
    with Stream.open(recipe(tmp_path, source("*.jsonl"), lanes=8, size=8, window=32)) as stream:
        alone = ranks(stream, 1)
        whole = trace(alone, 7)
        first = ranks(stream, before)
        assert trace(first, 7) == whole
        assert saved(first) == saved(alone)  # one shape, whoever wrote it
        assert trace(ranks(stream, after, saved(first)), 13) == trace(alone, 13)


def test_another_global_batch_is_refused(tmp_path: Path) -> None:
    """Steps would mean other documents.

    https://github.com/AI-Hypercomputer/maxtext/issues/1760
    """
    corpus(tmp_path, 2, 8)
    with Stream.open(recipe(tmp_path, source("*.jsonl"), lanes=2, size=2)) as stream:
        state = saved(ranks(stream, 1))
    other = recipe(tmp_path, source("*.jsonl"), lanes=2, size=4)
    with Stream.open(other) as stream, pytest.raises(RestoreError, match="global_batch_size: 2 -> 4"):
        ranks(stream, 1, state)


# --- ELA-3 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "peers"), [(4, 2), (2, 4), (1, 8)])
def test_peers_of_a_replica_have_the_same_batches(tmp_path: Path, data: int, peers: int) -> None:
    """Ranks that share a replica got other data, or samples were counted once for each of them.

    A loader knows the data-parallel rank alone, which peers share; TorchTitan gives it that coordinate.

    https://github.com/pytorch/torchtitan/issues/48, https://github.com/mosaicml/streaming/pull/619
    """
    corpus(tmp_path, 4, 40)
    with Stream.open(recipe(tmp_path, source("*.jsonl"), lanes=8, size=8)) as stream:
        whole = trace(ranks(stream, 1), 15)
        groups = [[stream.loader(rank, data) for rank in range(data)] for _ in range(peers)]
        traces = [trace(group, 10) for group in groups]
        assert traces == [whole[:10]] * peers
        assert sum(loader.stats().records for loader in groups[0]) == 10 * 8
        states = [saved(group) for group in groups]
        assert all(one == states[0] for one in states)
        assert trace(ranks(stream, 8, states[-1]), 5) == whole[10:]


# --- ELA-4 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[5], [1, 1], [1], [3, 0, 2]])
@pytest.mark.parametrize("mixed", [False, True])
def test_sources_may_be_smaller_than_the_machine(
    tmp_path: Path, rows: list[int], mixed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer samples or shards than ranks and workers gave an index error, idle workers, or the same data everywhere.

    https://github.com/NVIDIA/Megatron-Energon/pull/145, https://github.com/huggingface/datasets/issues/8669,
    https://github.com/huggingface/datasets/issues/7868
    """
    for i, count in enumerate(rows):
        lines(tmp_path / f"tiny/{i}.jsonl", [row(f"t{i}-{k}") for k in range(count)])
    corpus(tmp_path / "large", 4, 50, "l")
    sources = [source("tiny/*.jsonl", name="t"), *([source("large/*.jsonl", name="l")] if mixed else [])]
    found = delivered(recipe(tmp_path, *sources, size=4, more=threads(4)))
    assert len(found.texts) == len(set(found.texts)) == sum(rows) + 200 * mixed
    with Stream.open(recipe(tmp_path, *sources, lanes=4, size=4, more=threads(4))) as stream:
        assert trace(ranks(stream, 4), 25) == trace(ranks(stream, 1), 25)
    with pytest.raises(SystemExit) as stop:
        main(["check", str(tmp_path / "recipe.toml"), "--dp", "4"])
    assert stop.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert ("for 4 lanes: every lane walks all of it by itself" in told) == (sum(rows) < 4)


# --- ELA-5 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "world", "local", "says"),
    [
        (-1, 4, None, "rank must be from 0 to 3, it is -1"),
        (4, 4, None, "rank must be from 0 to 3, it is 4"),
        (0, 0, None, "0 data-parallel ranks cannot share 4 lanes"),
        (0, -2, None, "-2 data-parallel ranks cannot share 4 lanes"),
        (0, 3, None, r"the nearest to 3: 2 and 4"),
        (0, 8, None, r"The numbers of ranks that work are \[1, 2, 4\]"),
        (0, 1, 3, r"a local batch of 3 does not divide. The local batches that work are \[1, 2, 4, 8\]"),
        (0, 1, 0, "a local batch of 0 does not divide"),
        (0, 1, -1, "a local batch of -1 does not divide"),
    ],
)
def test_ranks_that_cannot_be_are_refused(tmp_path: Path, rank: int, world: int, local: int | None, says: str) -> None:
    """A wrong rank was accepted, and that process read the whole data set.

    https://github.com/huggingface/datasets/pull/8438, https://github.com/huggingface/datasets/issues/6990
    """
    corpus(tmp_path, 1, 8)
    path = recipe(tmp_path, source("*.jsonl"), lanes=4, size=8)
    with Stream.open(path) as stream, pytest.raises(TopologyError, match=says):
        stream.loader(rank, world, local)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("global_batch_size = 8", "global_batch_size = 0", "global_batch_size must be from 1"),
        ("global_batch_size = 8", "global_batch_size = 9", "9 is not a multiple of lanes = 4"),
        ("seq_len = 64", "seq_len = 0", r"\[batch\] seq_len must be from 1"),
        ("seq_len = 64", 'seq_len = "64"', "seq_len must be a whole number, it is '64'"),
        ("seq_len = 64", "seq_len = 64.0", "seq_len must be a whole number"),
        ("seq_len = 64", "seq_len = 64\nsequnce_len = 64", "Did you mean 'seq_len'"),
        ("window = 0", "windw = 0", "Did you mean 'window'"),
        ("lanes = 4", "lanes = 0", "lanes must be from 1"),
        ("[run]", '[run]\nrunner = "process"\nworkers = -1', "workers must be from 1 to 1024, it is -1"),
        ("[run]", '[run]\nrunner = "proces"', "Did you mean 'process'"),
    ],
)
def test_numbers_that_cannot_be_end_the_command_before_any_work(
    tmp_path: Path, old: str, new: str, says: str, caplog: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranges are checked, with the setting's name, before data is read or a worker started.

    https://github.com/huggingface/datasets/issues/6990
    """
    path = recipe(tmp_path, source("nothing/*.jsonl"), lanes=4, size=8)  # the data would be missed next
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UsageError, match=says):
        Stream.open(path)
    with pytest.raises(SystemExit) as stop:
        main(["check", str(path)])
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err
