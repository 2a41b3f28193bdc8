"""Resumes: any number of them, from any pass, exactly where it was, once, and never onto other data."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from worlds import tokenizer_folder

from cases.makers import (
    corpus,
    document,
    images,
    lines,
    own_code,
    pairs,
    ranks,
    recipe,
    row,
    saved,
    source,
    tar,
    texts_in,
    trace,
    write,
)
from zephon import Loader, Stream
from zephon.command.cli import main
from zephon.errors import RestoreError
from zephon.types import Record


def threads(count: int) -> str:
    return f'[run]\nrunner = "threads"\nworkers = {count}\n' if count else ""


def taken(loader: Loader, stream: Stream, steps: int) -> list[Record]:
    """The records of the next steps of a loader that is alone; of all that are left with -1."""
    return [
        one for batch in itertools.islice(loader, None if steps < 0 else steps) for one in stream.worker.records(batch)
    ]


# --- RSM-1 ---------------------------------------------------------------------------------------------------------


def formats(folder: Path) -> dict[str, str]:
    """One source of each format, and what the recipe calls it."""
    names = [f"d{i}" for i in range(60)]
    for i in range(3):
        mine = names[20 * i : 20 * i + 20]
        lines(folder / f"j/{i}.jsonl", map(row, mine))
        (folder / "p").mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": [document(one) for one in mine]}), folder / f"p/{i}.parquet", row_group_size=6)
        tar(folder / f"t/{i}.tar", [(f"{one}.txt", document(one).encode()) for one in mine])
    tar(folder / "i/0.tar", pairs(30))
    return {
        "jsonl": source("j/*.jsonl"), "parquet": source("p/*.parquet"), "tar": source("t/*.tar", text="txt"),
        "images": images("i/*.tar"),
    }  # fmt: skip


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar", "images"])
def test_five_legs_are_one_run(tmp_path: Path, kind: str, workers: int) -> None:
    """The first resume was right, but from then on the saved place stayed at zero, and the second started anew.

    https://github.com/pytorch/torchtitan/issues/3907, https://github.com/huggingface/datasets/issues/8308
    """
    path = recipe(tmp_path, formats(tmp_path)[kind], lanes=2, size=2, window=16, more=threads(workers))
    with Stream.open(path) as stream:
        whole = trace(ranks(stream, 1), 30)
    state, joined, states = None, list[str](), list[dict[str, bytes]]()
    for leg in range(5):
        with Stream.open(path) as stream:
            loaders = ranks(stream, 1 + leg % 2, state)
            joined += trace(loaders, 6)
            states.append(state := saved(loaders))
    assert joined == whole
    assert all(a != b for i, a in enumerate(states) for b in states[:i])


def test_legs_of_the_command_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same with states on disk, as `zephon digest --save --resume` keeps them.

    https://github.com/pytorch/torchtitan/issues/3907
    """
    path, out = recipe(tmp_path, formats(tmp_path)["jsonl"], lanes=4, size=4, window=16), list[dict[str, object]]()

    def digest(steps: int, dp: int, *more: str) -> None:
        with pytest.raises(SystemExit) as stop:
            main(["digest", str(path), "--steps", str(steps), "--dp", str(dp), *more])
        assert not stop.value.code
        out.extend(json.loads(line) for line in capsys.readouterr().out.splitlines())

    digest(12, 1)
    whole, out[:] = list(out), []
    for leg, dp in enumerate((2, 4, 1), 1):
        digest(
            4 * leg,
            dp,
            "--save",
            str(tmp_path / "states"),
            *(["--resume", str(tmp_path / "states")] if leg > 1 else []),
        )
    assert out == whole


# --- RSM-2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("at", [1, 5, 6, 7, 13, 20, 31])
def test_the_pass_is_part_of_the_place(tmp_path: Path, mixed: bool, at: int) -> None:
    """A checkpoint from the second or a later pass resumed at the start of the data.

    https://github.com/pytorch/torchtitan/issues/1357, https://github.com/mosaicml/streaming/issues/869
    """
    corpus(tmp_path / "a", 3, 4, "a", words=8)  # some 6 steps a pass
    corpus(tmp_path / "b", 1, 50, "b")
    sources = [source("a/*.jsonl", name="a"), *([source("b/*.jsonl", name="b")] if mixed else [])]
    with Stream.open(recipe(tmp_path, *sources, lanes=2, size=2, seq_len=64, window=4)) as stream:
        whole = trace(ranks(stream, 1), 40)
        first = ranks(stream, 2)
        trace(first, at)
        again = ranks(stream, 1, saved(first))
        before = sum(loader.stats().mixed["a"] for loader in first)
        assert again[0].stats().mixed["a"] == before  # what was mixed goes on from the saved number, over all passes
        assert trace(again, 40 - at) == whole[at:]
    assert len(set(whole)) == 40


# --- RSM-3 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("at", [1, 20, 49, 50, 51, 60])
def test_a_shuffled_stream_loses_and_repeats_nothing(tmp_path: Path, mapped: bool, at: int) -> None:
    """After a resume the shuffle buffer started empty, or rows came again; a map made a thousand rows be jumped over.

    https://github.com/huggingface/datasets/issues/7901, https://github.com/huggingface/datasets/pull/8408,
    https://github.com/huggingface/datasets/issues/8145
    """
    names = [f"d{i:03}" for i in range(200)]
    lines(tmp_path / "x.jsonl", [row(name, f"<{name}> some words more") for name in names])
    keys = {"map": own_code(tmp_path, "def f(row): return dict(row)") + ":f"} if mapped else {}
    path = recipe(tmp_path, source("x.jsonl", **keys), size=1, seq_len=64, window=50)
    with Stream.open(path) as stream:
        loader = stream.loader(pad_last=True)
        before = taken(loader, stream, at)
        state = loader.state_dict()
    with Stream.open(path) as stream:
        again = stream.loader(pad_last=True)
        again.load_state_dict(state)
        found = texts_in(before + taken(again, stream, -1))
        assert found == texts_in(taken(stream.loader(pad_last=True), stream, -1))
    assert sorted(found) == [f"<{name}> some words more" for name in names]
    assert sum(map(len, state.values())) < 4096
    assert not any(b"some words" in raw for raw in state.values())


# --- RSM-4 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 4])
@pytest.mark.parametrize("twice", [False, True])
def test_a_resume_shortens_no_later_epoch(tmp_path: Path, workers: int, twice: bool) -> None:
    """After a resume in mid-epoch every later epoch was short as well: the skip was applied again each time.

    https://github.com/Lightning-AI/litData/issues/316, https://github.com/huggingface/datasets/issues/7447,
    https://github.com/allenai/open-instruct/pull/681
    """
    names = [f"d{i:03}" for i in range(100)]
    for i in range(4):
        lines(tmp_path / f"{i}.jsonl", [row(name, f"<{name}> " + "x" * 8) for name in names[25 * i : 25 * i + 25]])
    # 15 letters and BOS are 16 positions: a batch is four documents, an epoch 25 batches
    path = recipe(tmp_path, source("*.jsonl", epochs=3), size=4, seq_len=16, window=32, more=threads(workers))
    with Stream.open(path) as stream:
        loader = stream.loader()
        found = taken(loader, stream, 21)
        state = loader.state_dict()
        again = stream.loader()
        for _ in range(1 + twice):
            again.load_state_dict(state)
        iter(again)
        found += taken(again, stream, -1)
    texts = texts_in(found)
    assert [sorted(texts[i : i + 100]) for i in (0, 100, 200)] == [[f"<{name}> " + "x" * 8 for name in names]] * 3
    assert len(texts) == 300


# --- RSM-5 ---------------------------------------------------------------------------------------------------------


def shards(folder: Path, names: str = "abc", change: Callable[[str], str] = str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for shard, name in zip(names, "abcd", strict=False):
        texts = [document(f"{name}{i}") for i in range(6)]
        lines(folder / f"{shard}.jsonl", [row("d", change(text) if name == "b" else text) for text in texts])


def recipe_with(folder: Path, data: Path, change: str) -> Path:
    path = recipe(folder, source(f"{data}/*.jsonl", weight=2), lanes=2, size=2, seq_len=32)
    text = path.read_text()
    if change == "another source":
        text = text.replace("[shuffle]", source(f"{data}/*.jsonl", name="more") + "[shuffle]")
    if change == "tokenizer":
        text = text.replace(str(tokenizer_folder("both")), str(tokenizer_folder("eos")))
    old_new = {"seq_len": ("seq_len = 32", "seq_len = 16"), "seed": ("seed = 11", "seed = 12"),
               "batch": ("global_batch_size = 2", "global_batch_size = 4"), "lanes": ("lanes = 2", "lanes = 1"),
               "window": ("window = 0", "window = 8"), "name": ('name = "s"', 'name = "z"')}  # fmt: skip
    path.write_text(text.replace(*old_new[change]) if change in old_new else text)
    return path


CATALOGUE = "order.sources[s].catalogue"
SAYS = {
    "added": f"{CATALOGUE}.shards: 3 -> 4",
    "removed": f"{CATALOGUE}.shards: 3 -> 2",
    "renamed": CATALOGUE,
    "bytes": CATALOGUE,
    "swapped": CATALOGUE,
    "seq_len": "seq_len: 32 -> 16",
    "tokenizer": "tokenizer",
    "seed": "seed: 11 -> 12",
    "batch": "global_batch_size: 2 -> 4",
    "lanes": "lanes: 2 -> 1",
    "window": "window: 0 -> 8",
    "name": "sources[z]",
    "another source": "sources[more]",
}
"""Changes, and what the message says of them."""


@pytest.mark.parametrize("change", SAYS)
def test_a_state_is_refused_for_other_data_or_another_recipe(tmp_path: Path, change: str) -> None:
    """The old place was applied to new data, so that the first N documents were skipped in silence.

    Whatever would change the order is refused, each difference named. Other data or another order has no override.

    https://github.com/Lightning-AI/litData/issues/263, https://github.com/NVIDIA-NeMo/RL/pull/2519,
    https://github.com/allenai/OLMo-core/pull/435
    """
    shards(tmp_path / "data")
    with Stream.open(recipe_with(tmp_path, tmp_path / "data", "")) as stream:
        first = ranks(stream, 1)
        trace(first, 3)
        state = saved(first)
    names = {"added": "abcd", "removed": "ab", "renamed": "axc", "swapped": "bac"}.get(change, "abc")
    shards(tmp_path / "data", names, str.swapcase if change == "bytes" else str)
    other = recipe_with(tmp_path, tmp_path / "data", change)
    with Stream.open(other) as stream, pytest.raises(RestoreError, match="would silently change the data") as error:
        ranks(stream, 1, state)
    assert SAYS[change] in str(error.value)


@pytest.mark.parametrize("change", ["folder", "touched", "weight scaled", "cache lost"])
def test_what_changes_no_data_may_change(tmp_path: Path, change: str) -> None:
    """The same content at another path, or with other times, goes on.

    https://github.com/allenai/OLMo-core/pull/435
    """
    shards(tmp_path / "data")
    with Stream.open(recipe_with(tmp_path, tmp_path / "data", "")) as stream:
        whole = trace(ranks(stream, 1), 12)
        first = ranks(stream, 2)
        trace(first, 5)
        state = saved(first)
    where = tmp_path / ("elsewhere/deep" if change == "folder" else "data")
    shards(where)
    if change == "touched":
        write(where / "a.jsonl", (where / "a.jsonl").read_bytes())
    if change == "cache lost":
        shutil.rmtree(tmp_path / "cache")
    with Stream.open(recipe_with(tmp_path, where, "")) as stream:
        assert trace(ranks(stream, 1, state), 7) == whole[5:]


def test_other_weights_and_batches_may_be_allowed_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Users change a mix in mid-run on purpose: by name, logged, and with every source where it was.

    https://github.com/NVIDIA-NeMo/RL/pull/2519, https://github.com/allenai/OLMo-core/pull/435
    """
    corpus(tmp_path / "a", 1, 20, "a")
    corpus(tmp_path / "b", 1, 20, "b")

    def mixed(weight: int, size: int = 2) -> Path:
        sources = source("a/*.jsonl", name="a", weight=weight), source("b/*.jsonl", name="b")
        return recipe(tmp_path, *sources, lanes=1, size=size, seq_len=32)

    with Stream.open(mixed(1)) as stream:
        (first,) = ranks(stream, 1)
        before = taken(first, stream, 6)
        state = first.state_dict()
    for weight, size, allow in ((9, 2, "weights"), (1, 4, "global_batch_size")):
        with Stream.open(mixed(weight, size)) as stream:
            loader = stream.loader()
            with pytest.raises(RestoreError, match=allow):
                loader.load_state_dict(state)
            loader.load_state_dict(state, (allow,))
            texts = texts_in(before + taken(loader, stream, 4))[:-1]  # the last is cut by the end
        for name in "ab":  # each source went on: its documents in stored order, none left out, none twice
            mine = [text for text in texts if text.startswith(f"<{name}0-")]
            assert mine == [document(f"{name}0-{i % 20}") for i in range(len(mine))]
        assert allow in caplog.text
