"""The loader: who owns what, when state exists, what a restore refuses. The laws themselves are in test_laws.py."""

from pathlib import Path

import numpy as np
import pytest
from small import documents, write_jsonl, write_recipe

import zephon
from zephon import DataError, RecipeError, RestoreError, Stream, TopologyError
from zephon.digest import lane_digest, step_digest
from zephon.feed import Feeder
from zephon.recipe import divisors
from zephon.topology import check_topology, owned_lanes


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    return Stream.open(write_recipe(tmp_path))


def digests(stream: Stream, steps: int, world: int = 1, state: dict[str, bytes] | None = None) -> list[str]:
    loaders = [stream.loader(rank, world) for rank in range(world)]
    for loader in loaders:
        if state:
            loader.load_state_dict(state)
    out = []
    while loaders[0].step < steps:
        out.append(
            step_digest({lane: lane_digest(mine) for one in loaders for lane, mine in one.step_records().items()})
        )
    return out


def test_ranks_own_consecutive_lanes() -> None:
    assert owned_lanes(0, 2, 8) == [0, 1, 2, 3]
    assert owned_lanes(3, 4, 8) == [6, 7]
    assert [owned_lanes(rank, 8, 8) for rank in range(8)] == [[rank] for rank in range(8)]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_micro_batches_are_slices_of_the_lane_major_share(stream: Stream) -> None:
    share = stream.loader(1, 2).step_records()  # lanes 2 and 3, two records each
    rows = [record["input"] for lane in (2, 3) for record in share[lane]]
    loader = stream.loader(1, 2, local_batch_size=1)
    for row in rows:
        assert np.array_equal(next(loader)["input"], row[None])
    assert loader.step == 1


@pytest.mark.parametrize(
    ("world", "local", "says"),
    [
        (3, None, r"3 data-parallel ranks cannot share 4 lanes.*work are \[1, 2, 4\]; the nearest to 3: 2 and 4"),
        (8, None, r"8 data-parallel ranks cannot share 4 lanes.*nearest to 8: 4"),
        (0, None, "0 data-parallel ranks"),
        (
            2,
            3,
            r"share of a global batch is 8 / 2 = 4 sequences, which a local batch of 3 does not divide.*\[1, 2, 4\]",
        ),
        (2, 8, "nearest to 8: 4"),
        (2, 0, "a local batch of 0"),
    ],
)
def test_topologies_that_cannot_hold(stream: Stream, world: int, local: int | None, says: str) -> None:
    with pytest.raises(TopologyError, match=f"(?s){says}"):
        check_topology(lanes=4, global_batch=8, world=world, local_batch=local)
    with pytest.raises(TopologyError):
        stream.loader(0, world, local)


def test_ranks_share_the_sequences_of_a_finite_stream() -> None:
    with pytest.raises(TopologyError, match=r"cannot share the 8 sequences of a global batch.*work are \[1, 2, 4, 8\]"):
        check_topology(lanes=None, global_batch=8, world=3, local_batch=None)
    assert check_topology(lanes=None, global_batch=8, world=4, local_batch=None) == 2


def test_a_rank_beyond_the_world(stream: Stream) -> None:
    with pytest.raises(TopologyError, match="rank must be from 0 to 1, it is 2"):
        stream.loader(2, 2)


def test_a_state_exists_between_steps_only(stream: Stream) -> None:
    loader = stream.loader(0, 2, local_batch_size=2)
    before = loader.state_dict()
    next(loader)
    with pytest.raises(RestoreError, match="1 of the 2 micro-batches of step 1 have been handed over"):
        loader.state_dict()
    next(loader)
    assert loader.state_dict().keys() == before.keys() == {"header", "lane_00000", "lane_00001"}
    assert loader.state_dict() != before


def test_the_header_is_the_same_on_all_ranks_and_lanes_agree_with_it(stream: Stream) -> None:
    loaders = [stream.loader(rank, 4) for rank in range(4)]
    for loader in loaders:
        loader.step_records()
    whole = stream.loader()
    whole.step_records()
    states = [loader.state_dict() for loader in loaders]
    assert {state["header"] for state in states} == {whole.state_dict()["header"]}
    assert {key: raw for state in states for key, raw in state.items()} == whole.state_dict()


def test_a_state_is_a_snapshot(stream: Stream) -> None:
    loader = stream.loader()
    loader.step_records()
    state = loader.state_dict()
    kept = dict(state)
    expected = digests(stream, 6, state=state)
    for _ in range(3):
        loader.step_records()
    assert state == kept
    assert digests(stream, 6, state=state) == expected


def test_a_restore_measures_open_samples_only_when_it_goes_on(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = stream.loader()
    loader.step_records()
    state, stats = loader.state_dict(), loader.stats()
    expected = digests(stream, 3, state=state)
    measured: list[int] = []
    measure = stream.worker.measure

    def noted(source: int, rows: np.ndarray, epochs: np.ndarray) -> object:
        measured.append(len(rows))
        return measure(source, rows, epochs)

    monkeypatch.setattr(stream.worker, "measure", noted)
    loader = stream.loader()
    loader.load_state_dict(state)
    assert (loader.state_dict(), loader.stats(), measured) == (state, stats, [])
    assert digests(stream, 3, state=loader.state_dict()) == expected
    assert measured


def change(tmp_path: Path, what: str) -> Stream:
    path = tmp_path / "recipe.toml"
    text = path.read_text()
    if what == "data":
        write_jsonl(tmp_path / "b" / "one.jsonl", documents(49, 1000))
        return Stream.open(path)
    old, new = {
        "seed": ("seed = 7", "seed = 8"),
        "lanes": ("lanes = 4", "lanes = 2"),
        "seq_len": ("seq_len = 32", "seq_len = 16"),
        "global_batch_size": ("global_batch_size = 8", "global_batch_size = 4"),
        "window": ("window = 16", "window = 8"),
        "weights": ("weight = 0.3", "weight = 0.4"),
        "piece": ("[shuffle]", '[mix]\npiece = "sequence"\n[shuffle]'),
        "name": ('name = "b"', 'name = "c"'),
        "text": ('name = "b"', 'name = "b"\ntext = "text"\nchunk_rows = 2'),
        "eos": ("[[sources]]", "eos = false\n[[sources]]"),
    }[what]
    path.write_text(text.replace(old, new, 1))
    return Stream.open(path)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("seed", r"order\.seed: 7 -> 8"),
        ("lanes", "lanes: 4 -> 2"),
        ("seq_len", "seq_len: 32 -> 16"),
        ("global_batch_size", "global_batch_size: 8 -> 4"),
        ("window", r"order\.window: 16 -> 8"),
        ("weights", r'mix\.weights\.b: "0\.3" -> "0\.4"'),
        ("piece", r'mix\.piece: "document" -> "sequence"'),
        ("name", r'order\.sources\[b\]\.name: "b" -> \(absent\)'),
        ("data", r"order\.sources\[b\]\.catalogue\.rows: 50 -> 49"),
        ("text", r"order\.sources\[b\]\.catalogue\.chunk_rows: 3 -> 2"),
        ("eos", r"order\.sources\[a\]\.options\.tokenizer\.eos: 257 -> null"),
    ],
)
def test_a_restore_refuses_another_stream_field_by_field(tmp_path: Path, what: str, says: str) -> None:
    with Stream.open(write_recipe(tmp_path)) as stream:
        loader = stream.loader()
        loader.step_records()
        state = loader.state_dict()
    with change(tmp_path, what) as other, pytest.raises(RestoreError, match=f"(?s)checkpoint at step 1 .*{says}"):
        other.loader().load_state_dict(state)


def test_a_restore_refuses_cut_mixed_and_missing_states(stream: Stream) -> None:
    loader = stream.loader()
    one = loader.state_dict()
    loader.step_records()
    two = loader.state_dict()
    fresh = stream.loader()
    with pytest.raises(RestoreError, match="'lane_00002' was not written together with the header"):
        fresh.load_state_dict({**two, "lane_00002": one["lane_00002"]})
    with pytest.raises(RestoreError, match=r"The state lacks \['lane_00001'\]"):
        fresh.load_state_dict({key: raw for key, raw in two.items() if key != "lane_00001"})
    with pytest.raises(RestoreError, match="cut, damaged"):
        fresh.load_state_dict({**two, "lane_00002": two["lane_00002"][:-1]})
    with pytest.raises(RestoreError, match="another lane's"):
        fresh.load_state_dict({**two, "lane_00001": two["lane_00002"], "lane_00002": two["lane_00001"]})
    with pytest.raises(RestoreError, match="cut, damaged"):
        fresh.load_state_dict({**two, "lane_00002": two["lane_00002"] + b"\0"})
    with pytest.raises(RestoreError, match="cannot be read"):
        fresh.load_state_dict({**two, "header": b"{"})
    assert digests(stream, 4, state=two) == digests(stream, 4)[1:]


def test_a_source_that_gives_nothing_is_named(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    write_jsonl(tmp_path / "b" / "one.jsonl", [""] * 50)
    text = path.read_text().replace("path = ", "bos = false\npath = ")
    path.write_text(text)
    with Stream.open(path) as stream:
        loader = stream.loader()
        with pytest.raises(DataError, match=r"Source 'b' gave lane \d no usable sample in 3\d draws.*empty"):
            for _ in range(20):
                loader.step_records()


def test_a_bad_row_deep_in_a_source_is_named(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    write_jsonl(tmp_path / "b" / "one.jsonl", documents(80))
    with (tmp_path / "b" / "one.jsonl").open("a") as file:
        file.write('{"txt": "other field"}\n')
    with Stream.open(path) as stream:
        loader = stream.loader()
        with pytest.raises(
            DataError,
            match=r"Source 'b': .*one\.jsonl, line 81, byte \d+: there is no field 'text'; the row has \['txt'\]",
        ):
            for _ in range(200):
                loader.step_records()


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        (
            '[[sources]]\nname = "a"\npaths = ["nowhere/*.jsonl"]\n',
            r"Source 'a': no file matches 'nowhere/\*\.jsonl' \(looked from",
        ),
        ('[[sources]]\nname = "a"\npaths = ["recipe.toml"]\n', r"recipe\.toml is none of the known formats: \.jsonl"),
        ('[[sources]]\nname = "a"\npaths = ["empty.jsonl"]\n', "Source 'a' has no rows in 1 files"),
        (
            '[[sources]]\nname = "a"\npaths = ["a/*.jsonl"]\ntxt = "x"\n',
            "source 'a': modality 'text': txt is not a known key",
        ),
        ('[[sources]]\nname = "a"\npaths = ["a/*.jsonl"]\nmodality = "txt"\n', "Unknown modality 'txt'"),
        ('[[sources]]\nname = "a"\npaths = ["a/*.jsonl"]\ntext = "body"\n', "there is no field 'body'; the row has"),
    ],
)
def test_sources_that_cannot_hold(tmp_path: Path, sources: str, says: str) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises((RecipeError, DataError), match=says):
        Stream.open(write_recipe(tmp_path, sources=sources))


def test_patterns_may_overlap_and_cross_folders(tmp_path: Path) -> None:
    sources = '[[sources]]\nname = "all"\npaths = ["**/*.jsonl", "a/one.jsonl"]\n'
    with Stream.open(write_recipe(tmp_path, sources=sources)) as stream:
        shards = [shard.name for shard in stream.sources[0].catalogue.shards]
    assert shards == ["a/one.jsonl", "a/two.jsonl", "b/one.jsonl"]


def test_the_stream_does_not_depend_on_where_the_data_lies(tmp_path: Path) -> None:
    with (
        Stream.open(write_recipe(tmp_path / "here")) as here,
        Stream.open(write_recipe(tmp_path / "far" / "away")) as there,
    ):
        assert here.header(0) == there.header(0)
        assert digests(here, 3) == digests(there, 3)


def test_stats_add_up(stream: Stream) -> None:
    loader = stream.loader()
    for _ in range(20):
        loader.step_records()
    stats = loader.stats()
    assert stats.records == 20 * 8
    assert stats.padding == 0
    assert stats.positions == 20 * 8 * 32
    waiting = sum(stats.mixed.values()) - stats.positions
    assert waiting >= 0
    resumed = stream.loader()
    resumed.load_state_dict(loader.state_dict())
    assert resumed.stats() == stats


def test_a_loader_that_failed_says_so_ever_after(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in the middle of a step must not make it skip what was under way."""
    loader = stream.loader(local_batch_size=2)
    loader.step_records()
    state = loader.state_dict()
    real = type(stream.worker).materialise

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(stream.worker), "materialise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(loader)
    monkeypatch.setattr(type(stream.worker), "materialise", real)
    for _ in range(2):
        with pytest.raises(DataError, match=r"failed before \(KeyboardInterrupt\(\)\).*load the last state"):
            next(loader)
    assert loader.state_dict() == state
    loader.load_state_dict(state)  # as good as new
    assert digests(stream, 3, state=state)[0] == step_digest(
        {lane: lane_digest(mine) for lane, mine in loader.step_records().items()}
    )


def test_document_ids_and_cumulative_lengths_on_request(tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path, tail='[packing]\nalgorithm = "best_fit"\n[records]\ndocument_ids = true\ncu_seqlens = true'
    )
    with Stream.open(path) as stream:
        loader = stream.loader()
        for _ in range(5):
            batch = next(loader)
            for ids, positions, bounds, labels in zip(
                batch["document_ids"], batch["positions"], batch["cu_seqlens"], batch["labels"], strict=True
            ):
                starts = [*np.flatnonzero((positions == 0) & (labels >= 0)).tolist(), int((labels >= 0).sum())]
                assert bounds.tolist() == starts + [32] * (33 - len(starts))
                assert ids.tolist() == [
                    *np.repeat(np.arange(len(starts) - 1), np.diff(starts)).tolist(), *[-1] * (32 - starts[-1])
                ]  # fmt: skip
        assert stream.header(0)["records"] == ["document_ids", "cu_seqlens"]


def test_public_names() -> None:
    assert zephon.__all__ == sorted(zephon.__all__)
    assert all(hasattr(zephon, name) for name in zephon.__all__)


def test_a_batch_that_a_stop_keeps_from_being_handed_over_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while rows are asked for: the state must not be one step on, or a resume would leave a batch out."""
    with Stream.open(write_recipe(tmp_path)) as stream:
        loader = stream.loader()
        next(loader)
        before = loader.state_dict()

        def stopped(_: Feeder) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Feeder, "top_up", stopped)
        with pytest.raises(KeyboardInterrupt):
            next(loader)
        assert (loader.step, loader.state_dict()) == (1, before)
