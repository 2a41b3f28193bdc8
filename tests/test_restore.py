"""A restore is locked: every field of the header counts, and what may differ after all is allowed by name."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_worlds import vision_tokenizer
from PIL import Image
from small import documents, write_jsonl, write_recipe

from zephon import Loader, RestoreError, Stream, UsageError
from zephon.command.cli import main
from zephon.digest import lane_digest
from zephon.restore import PERMISSIONS, compare_headers, differences
from zephon.types import Record

Records = dict[int, list[Record]]


def delivered(loaders: list[Loader], steps: int) -> Records:
    """The records of every lane over some steps."""
    found: Records = {}
    for _ in range(steps):
        for lane, mine in chain.from_iterable(loader.step_records().items() for loader in loaders):
            found.setdefault(lane, []).extend(mine)
    return found


def same(a: Records, b: Records) -> bool:
    return {lane: lane_digest(mine) for lane, mine in a.items()} == {
        lane: lane_digest(mine) for lane, mine in b.items()
    }


def edited(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert old in text
    copy = path.with_name("edited.toml")
    copy.write_text(text.replace(old, new, 1))
    return copy


def saved(path: Path, steps: int = 3) -> dict[str, bytes]:
    with Stream.open(path) as stream:
        loader = stream.loader()
        delivered([loader], steps)
        return loader.state_dict()


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A header that has every kind of field."""
    folder = tmp_path_factory.mktemp("rich")
    write_jsonl(folder / "a.jsonl", documents(60))
    Image.new("RGB", (40, 40)).save(folder / "one.png")
    (folder / "b.jsonl").write_text(json.dumps({"text": "a dot", "image": "one.png"}) + "\n")
    (folder / "staying.py").write_text("def kept(row): return True\ndef same(row): return row\n")
    (folder / "recipe.toml").write_text(
        f'lanes = 2\n[batch]\nseq_len = 96\nglobal_batch_size = 2\n[tokenizer]\npath = "{vision_tokenizer("both")}"\n'
        '[[sources]]\nname = "a"\npaths = ["a.jsonl"]\nfilter = "staying:kept"\nmap = "staying:same"\n'
        '[[sources]]\nname = "b"\npaths = ["b.jsonl"]\nmodality = "image_text"\npreset = "qwen3_5"\n'
        '[packing]\nalgorithm = "best_fit"\n[packing.budgets]\npatches = 256\n[records]\ncu_seqlens = true\n'
        '[run]\ncache = "cache"\n'
    )
    with Stream.open(folder / "recipe.toml") as stream:
        return json.loads(json.dumps(stream.header(5)))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, one in value.items() for leaf in leaves(one, (*path, key))]
    if isinstance(value, list):
        return [leaf for i, one in enumerate(value) for leaf in leaves(one, (*path, i))]
    return [path]


def changed(header: Mapping[str, Any], path: tuple[Any, ...]) -> tuple[bytes, Any, Any]:
    copy = json.loads(json.dumps(header))
    at = copy
    for key in path[:-1]:
        at = at[key]
    old = at[path[-1]]
    new = not old if isinstance(old, bool) else old + 1 if isinstance(old, int) else f"{old}x" if old else 7
    at[path[-1]] = new
    return json.dumps(copy).encode(), old, new


def test_every_field_changed_alone_is_refused_with_both_values(rich: dict[str, Any]) -> None:
    seen = set()
    for path in leaves(rich):
        raw, old, new = changed(rich, path)
        if path == ("step",):
            assert compare_headers(raw, rich).step == 6
            continue
        with pytest.raises(RestoreError) as refusal:
            compare_headers(raw, rich)
        lines = [line for line in str(refusal.value).splitlines() if line.startswith("  ")]
        if path[-1] == "name" and "filter" not in path and "map" not in path:  # it names the fields of a source
            assert f"[{new}]" in str(refusal.value)
        else:
            assert len(lines) == 1
            assert f": {json.dumps(new)} -> {json.dumps(old)}" in lines[0]
        seen.add(path[-1])
    fields = {
        "seed",
        "window",
        "version",
        "modality",
        "rows",
        "bytes",
        "shards",
        "sha256",
        "library",
        "pillow",
        "merge_size",
    }
    assert fields <= seen
    for name, one in PERMISSIONS.items():
        raw, _, _ = changed(rich, next(path for path in leaves(rich) if _matches(one.fields, path, rich)))
        with pytest.raises(RestoreError, match=rf"\(--allow {name}\)(?s:.*)--allow {name}: {one.meaning[:20]}"):
            compare_headers(raw, rich)
        assert compare_headers(raw, rich, [name]).allowed == {name}


def _matches(pattern: str, path: tuple[Any, ...], header: dict[str, Any]) -> bool:
    fields = differences(json.loads(changed(header, path)[0]), header)
    return len(fields) == 1 and any(re.fullmatch(pattern, field) for field in fields)


def test_other_shares_go_on_where_every_source_is(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    state = saved(path, 6)
    other = edited(path, "weight = 0.7", "weight = 0.1")
    with Stream.open(other) as stream:
        loader = stream.loader()
        with pytest.raises(RestoreError, match=r'mix\.weights\.a: "0\.7" -> "0\.1"   \(--allow weights\)'):
            loader.load_state_dict(state)
        loader.load_state_dict(state, ["weights"])
        before = loader.stats()
        expected = delivered([loader], 40)
        after = loader.stats()
        mixed = {name: after.mixed[name] - before.mixed[name] for name in after.mixed}
        assert abs(mixed["a"] / sum(mixed.values()) - 0.25) < 0.03
        history = json.loads(loader.state_dict()["header"])["history"]
        assert history == [{"step": 6, "allowed": ["weights"], "fields": {"mix.weights.a": ['"0.7"', '"0.1"']}}]
        for world in (2, 4):
            loaders = [stream.loader(rank, world) for rank in range(world)]
            for one in loaders:
                one.load_state_dict(state, ["weights"])
            assert same(delivered(loaders, 40), expected)
        # The next restore needs no permission, keeps the history, and an old one that is left there does nothing.
        again = stream.loader()
        again.load_state_dict(loader.state_dict(), ["weights", "code"])
        assert json.loads(again.state_dict()["header"])["history"] == history
        late = again.state_dict()
    with Stream.open(path) as stream, pytest.raises(RestoreError, match="--allow weights"):
        stream.loader().load_state_dict(late)


def test_a_source_keeps_its_own_order_when_shares_change(tmp_path: Path) -> None:
    """Documents of b, told apart by their first word, come in the order in which they would have come."""
    path = write_recipe(tmp_path, lanes=1, size=4)
    state = saved(path, 2)
    with Stream.open(path) as stream:
        plain = stream.loader()
        plain.load_state_dict(state)
        usual = starts(stream, delivered([plain], 60))
    with Stream.open(edited(path, "weight = 0.3", "weight = 3")) as stream:
        loader = stream.loader()
        loader.load_state_dict(state, ["weights"])
        other = starts(stream, delivered([loader], 20))
    shorter = min(len(usual), len(other))
    assert shorter >= 10
    assert usual[:shorter] == other[:shorter]


def starts(stream: Stream, found: Records) -> list[tuple[int, ...]]:
    """The first tokens of every document of source b: it spells its number, 1000 and more."""
    del stream
    row = [(int(t), int(p)) for record in found[0] for t, p in zip(record["input"], record["positions"], strict=True)]
    tokens = [token for token, _ in row]
    begins = [i for i, token in enumerate(tokens) if token == 256 and i + 8 < len(tokens)]
    words = [bytes(one for one in tokens[i + 1 : i + 8] if one < 256) for i in begins]
    return [tuple(word) for word in words if word.startswith(b"doc10")]


def test_another_batch_size_goes_on_where_every_lane_is(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    with Stream.open(path) as stream:
        expected = delivered([stream.loader()], 3 + 10)
    state = saved(path, 3)
    with Stream.open(edited(path, "global_batch_size = 8", "global_batch_size = 20")) as stream:
        loader = stream.loader()
        with pytest.raises(RestoreError, match=r"global_batch_size: 8 -> 20   \(--allow global_batch_size\)"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, ["global_batch_size"])
        found = delivered([loader], 4)
        assert loader.step == 7
        stats = loader.stats()
        assert stats.records == 3 * 8 + 4 * 20
        assert stats.padding == 0
        half = stream.loader(1, 2)
        half.load_state_dict(loader.state_dict())
        assert half.stats().records == stats.records // 2
    assert same(found, {lane: mine[6:] for lane, mine in expected.items()})


def test_a_finite_stream_keeps_its_batch_size(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, tail='[mix]\non_end = "renormalise"')
    path.write_text(path.read_text().replace("lanes = 4\n", ""))
    state = saved(path)
    with Stream.open(edited(path, "global_batch_size = 8", "global_batch_size = 4")) as stream:
        for allow in ([], ["global_batch_size"]):
            with pytest.raises(RestoreError, match="of a finite stream cannot change") as refusal:
                stream.loader().load_state_dict(state, allow)
            assert "--allow" not in str(refusal.value)


def test_no_permission_is_offered_where_it_would_be_in_vain(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    state = saved(path)
    with Stream.open(edited(edited(path, "seed = 7", "seed = 8"), "weight = 0.7", "weight = 0.1")) as stream:
        for allow in ([], ["weights"]):
            with pytest.raises(RestoreError, match=r"order\.seed: 7 -> 8\n") as refusal:
                stream.loader().load_state_dict(state, allow)
            assert "--allow" not in str(refusal.value)


def test_other_arrays_beside_the_same_sequences(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, tail="[records]\ncu_seqlens = false")
    state = saved(path)
    with Stream.open(path) as stream:
        plain = stream.loader()
        plain.load_state_dict(state)
        usual = delivered([plain], 5)
    with Stream.open(edited(path, "cu_seqlens = false", "document_ids = true")) as stream:
        loader = stream.loader()
        loader.load_state_dict(state, ["records"])
        found = delivered([loader], 5)
    for lane, mine in found.items():
        for record, before in zip(mine, usual[lane], strict=True):
            assert np.array_equal(record["document_ids"] >= 0, record["labels"] >= 0)
            assert all(np.array_equal(record[name], array) for name, array in before.items())


def test_code_that_changed_and_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = '[[sources]]\nname = "a"\npaths = ["a/*.jsonl"]\nfilter = "kept:kept"\n'
    path = write_recipe(tmp_path, sources=source)
    (tmp_path / "kept.py").write_text("def kept(row): return len(row['text']) % 3 > 0\n")
    sys.modules.pop("kept", None)
    state = saved(path)
    (tmp_path / "kept.py").write_text("# Every third one goes.\ndef kept(row): return len(row['text']) % 3 > 0\n")
    with Stream.open(path) as stream:
        loader = stream.loader()
        with pytest.raises(RestoreError, match=r"order\.sources\[a\]\.filter\.sha256: .*\(--allow code\)"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, ["code"])
        assert delivered([loader], 2)


@pytest.mark.parametrize("now", ["[row]", "[{'text': row['text'][:9]}] * 3"])
def test_code_that_changed_and_does_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: str) -> None:
    """Rows that give fewer samples, and shorter ones, than the state has in its bins."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = '[[sources]]\nname = "a"\npaths = ["a/*.jsonl"]\nmap = "mapped:mapped"\n'
    path = write_recipe(tmp_path, sources=source, tail='[packing]\nalgorithm = "best_fit"')
    (tmp_path / "mapped.py").write_text("def mapped(row): return [row] * 3\n")
    state = saved(path)
    (tmp_path / "mapped.py").write_text(f"def mapped(row): return {now}\n")
    with Stream.open(path) as stream:
        loader = stream.loader()
        loader.load_state_dict(state, ["code"])
        with pytest.raises(
            RestoreError, match=r"Source 'a': .*one\.jsonl.*positions up to \d+ of sample \d of this row"
        ):
            delivered([loader], 2)


@pytest.mark.parametrize(
    ("text", "before", "now", "reason"),
    [
        ("a" * 15, "[row] * 5", "[row]", r"one\.jsonl.*positions up to 0 of sample 2 of this row, which has none"),
        (
            "a" * 127,
            "[row]",
            "[{'text': row['text'][:9]}]",
            r"one\.jsonl.*positions up to 65 of sample 0 of this row, which has 10",
        ),
    ],
)
def test_code_that_changed_what_a_lane_is_amid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, before: str, now: str, reason: str
) -> None:
    """The state stands between two samples of a row, or within one, and nothing waits in the packer."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = '[[sources]]\nname = "a"\npaths = ["a/one.jsonl"]\nmap = "amid:amid"\n'
    path = write_recipe(tmp_path, sources=source, tail='[mix]\npiece = "sequence"')
    write_jsonl(tmp_path / "a" / "one.jsonl", [text] * 8)
    (tmp_path / "amid.py").write_text(f"def amid(row): return {before}\n")
    state = saved(path)
    (tmp_path / "amid.py").write_text(f"def amid(row): return {now}\n")
    with Stream.open(path) as stream:
        loader = stream.loader()
        loader.load_state_dict(state, ["code"])
        with pytest.raises(RestoreError, match=reason):
            delivered([loader], 2)


def test_an_isolated_loader_takes_up_what_was_allowed(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    state = saved(path)
    other = edited(path, "weight = 0.7", "weight = 2")
    with Stream.open(other) as stream:
        inline = stream.loader()
        inline.load_state_dict(state, ["weights"])
        expected, kept = delivered([inline], 5), inline.state_dict()
    isolated = edited(other, "[run]", "[run]\nisolate = true")
    with Stream.open(isolated) as stream:
        loader = stream.loader()
        loader.load_state_dict(state, ["weights"])
        assert same(delivered([loader], 5), expected)
        assert loader.state_dict() == kept


def test_permissions_are_named(tmp_path: Path) -> None:
    with Stream.open(write_recipe(tmp_path)) as stream:
        loader = stream.loader()
        state = loader.state_dict()
        with pytest.raises(UsageError, match=r"'wieghts' cannot be allowed\. Did you mean 'weights'\?(?s:.*)codecs: "):
            loader.load_state_dict(state, ["wieghts"])


def test_the_command_line_allows_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_recipe(tmp_path)
    other = edited(path, "weight = 0.7", "weight = 2")

    def run(recipe: Path, *more: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["digest", str(recipe), "--steps", "4", *more])
        return int(ended.value.code or 0)

    states = str(tmp_path / "states")
    assert run(path, "--save", states, "--save-at", "2") == 0
    assert run(other, "--resume", states) == 2
    assert "--allow weights: every source goes on where it is" in " ".join(capsys.readouterr().err.split())
    with caplog.at_level(logging.WARNING):
        assert run(other, "--resume", states, "--allow", "weights") == 0
    assert "Going on from step 2 with other weights" in caplog.text
    assert run(other, "--resume", states, "--allow", "wights") == 2


PEERS = """
import sys
from pathlib import Path
import torch.distributed as dist
from zephon import RestoreError, Stream
from zephon.run.peers import check_peers

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
with Stream.open(folder / "recipe.toml") as stream:
    check_peers(stream.header(0))
name = "odd.toml" if rank == 1 else "recipe.toml"
with Stream.open(folder / name) as stream:
    try:
        check_peers(stream.header(0))
    except RestoreError as error:
        print(error)
dist.destroy_process_group()
"""


def test_the_odd_rank_is_named_on_all(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    edited(path, "seed = 7", "seed = 8").rename(tmp_path / "odd.toml")
    ranks = [
        subprocess.Popen([sys.executable, "-c", PEERS, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    told = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert told[0] == told[1] == told[2]
    assert told[0].startswith("1 of 3 ranks have opened another stream")
    assert "  rank 1 on " in told[0]
    assert "order.seed: 8, elsewhere 7" in told[0]
