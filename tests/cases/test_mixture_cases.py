"""Mixtures: what ends a stream, extreme weights, what a weight counts, and an order of its own for every pass."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.makers import (
    corpus,
    delivered,
    exactly,
    law,
    lines,
    own_code,
    ranks,
    recipe,
    records,
    row,
    saved,
    source,
    texts_in,
    trace,
)
from zephon import RecipeError, Stream


def names(texts: list[str]) -> list[str]:
    """The names that documents begin with."""
    return [text.split()[0].strip("<>") for text in texts]


# --- MIX-1 ---------------------------------------------------------------------------------------------------------


@law(15)
@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    end=st.sampled_from(["stop", "renormalise"]),
    epochs=st.integers(1, 2),
)
def test_every_end_does_what_its_name_says(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], weights: list[int], end: str, epochs: int
) -> None:
    """A policy called "until all are used up, without repeats" stopped with the shortest source.

    https://github.com/huggingface/datasets/issues/7954
    """
    folder, sources = tmp_path_factory.mktemp("ends"), []
    for i, count in enumerate(counts):
        corpus(folder / f"s{i}", 1, count, f"s{i}")
        sources.append(source(f"s{i}/*.jsonl", name=f"s{i}", weight=weights[i], epochs=epochs))
    path = recipe(folder, *sources, size=2, more=f'[mix]\non_end = "{end}"\nunit = "samples"\n')
    found = Counter(names(delivered(path).texts))
    whole = {f"s{i}0-{k}": epochs for i, count in enumerate(counts) for k in range(count)}
    used = [all(found[f"s{i}0-{k}"] == epochs for k in range(count)) for i, count in enumerate(counts)]
    assert all(found[name] <= epochs for name in found)
    assert found == whole if end == "renormalise" else any(used)
    with Stream.open(path) as stream:
        assert len({sum(1 for _ in stream.loader(rank, 2, pad_last=True)) for rank in range(2)}) == 1


@pytest.mark.parametrize(("weights", "last"), [((8, 1, 1), "a"), ((1, 8, 1), "b"), ((1, 1, 8), "c")])
def test_which_source_ends_a_stream_follows_from_the_weights(
    tmp_path: Path, weights: tuple[int, ...], last: str
) -> None:
    """Stop at the first: the one whose documents last shortest at its share.

    https://github.com/huggingface/datasets/issues/7954
    """
    for name in "abc":
        corpus(tmp_path / name, 1, 4, name)
    sources = [source(f"{name}/*.jsonl", name=name, weight=weight) for name, weight in zip("abc", weights, strict=True)]
    found = names(delivered(recipe(tmp_path, *sources, more='[mix]\non_end = "stop"\nunit = "samples"\n')).texts)
    assert [name[0] for name in found].count(last) == 4
    assert len(found) < 9


# --- MIX-2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["0.999 0.0005 0.0005", "0.1 0.8 0.1", "0.000001 1 1", "1e-6 1 1", "1e25 1 1"])
def test_extreme_weights_are_kept_to_a_document(tmp_path: Path, weights: str) -> None:
    """A tiny source was asked for more than it has, or one that is never drawn tripped a check.

    https://github.com/NVIDIA/Megatron-LM/issues/705, https://github.com/NVIDIA/Megatron-LM/pull/1007
    """
    given_weights, text = [float(weight) for weight in weights.split()], ""
    for i, (count, weight) in enumerate(zip((1000, 3, 10), weights.split(), strict=True)):
        lines(tmp_path / f"s{i}.jsonl", [row(f"d{k}", "x") for k in range(count)])  # 2 positions each
        text += source(f"s{i}.jsonl", name=f"s{i}") + f"weight = {weight}\n"
    with Stream.open(recipe(tmp_path, text, lanes=1, seq_len=20)) as stream:
        (loader,) = ranks(stream, 1)
        for steps in (1, 3, 60, 136):  # 2,000 documents in all
            trace([loader], steps)
            assert loader.stats().padding == 0  # so what was mixed is what was delivered, and the open tail
            drawn = [mixed / 2 for mixed in loader.stats().mixed.values()]
            targets = [sum(drawn) * weight / sum(given_weights) for weight in given_weights]
            assert all(abs(one - target) <= 2 for one, target in zip(drawn, targets, strict=True))


@pytest.mark.parametrize("weight", ["0", "0.0", "-1", "nan", "inf", "-inf", '"1"', "true", "1e-40"])
def test_weights_that_cannot_hold_are_refused(tmp_path: Path, weight: str) -> None:
    """Weight 0 is refused too: a source that is never drawn is left out of the recipe.

    https://github.com/NVIDIA/Megatron-LM/issues/705
    """
    corpus(tmp_path, 1, 3)
    text = source("*.jsonl", name="a") + source("*.jsonl", name="b") + f"weight = {weight}\n"
    with pytest.raises(RecipeError, match=r"\[\[sources\]\] number 2: weight must be"):
        delivered(recipe(tmp_path, text))


# --- MIX-3 ---------------------------------------------------------------------------------------------------------


def two_sources(folder: Path, weights: tuple[Any, Any], unit: str) -> Path:
    lines(folder / "short.jsonl", [row(f"s{i}", exactly(f"s{i}", 100)) for i in range(100)])
    lines(folder / "long.jsonl", [row(f"l{i}", exactly(f"l{i}", 1000)) for i in range(20)])
    sources = [source(f"{name}.jsonl", name=name) + f"weight = {weight}\n"
               for name, weight in zip(("short", "long"), weights, strict=True)]  # fmt: skip
    return recipe(folder, *sources, lanes=1, size=4, seq_len=256, window=16, more=f'[mix]\nunit = "{unit}"\n')


@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_a_weight_counts_what_the_recipe_says_and_only_ratios_matter(tmp_path: Path, unit: str) -> None:
    """Users could not tell what a weight counts; doubling all weights must change nothing at all.

    https://github.com/mosaicml/llm-foundry/issues/426, https://github.com/mosaicml/streaming/issues/431
    """
    traces = []
    for weights in ((9, 1), ("0.9", "0.1"), (18, 2), ("9e-3", "1e-3")):
        with Stream.open(two_sources(tmp_path, weights, unit)) as stream:
            (loader,) = ranks(stream, 1)
            traces.append(trace([loader], 30))
            mixed = loader.stats().mixed
    assert traces == [traces[0]] * 4
    drawn = {"short": mixed["short"] / 101, "long": mixed["long"] / 1001}
    if unit == "samples":
        assert abs(drawn["short"] - 0.9 * sum(drawn.values())) <= 2
    else:
        assert abs(mixed["short"] - 0.9 * sum(mixed.values())) <= 1001


@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_the_plan_shows_the_passes_of_every_source(tmp_path: Path, unit: str) -> None:
    """Nobody could tell how long an epoch of a mixture is: `zephon explain` says passes a billion tokens.

    https://github.com/mosaicml/streaming/issues/431
    """
    from zephon.command.explain import explain

    with Stream.open(two_sources(tmp_path, (9, 1), unit)) as stream:
        plan = {one.name: one.epochs_per_billion for one in explain(stream).sources}
    tokens = {"short": 101, "long": 1001}
    shares = {"short": 9, "long": 1} if unit == "tokens" else {"short": 9 * 101, "long": 1001}
    for name, rows in (("short", 100), ("long", 20)):
        wanted = 1e9 * shares[name] / sum(shares.values()) / (rows * tokens[name])
        assert plan[name] == pytest.approx(wanted, rel=0.01)


# --- MIX-4 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["", 'runner = "threads"\nworkers = 3'])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("window", [0, 16])
def test_every_pass_has_an_order_of_its_own(tmp_path: Path, run: str, filtered: bool, window: int) -> None:
    """Each epoch repeated the same order, since the seed of the shuffle did not hold the epoch, on some paths only.

    Two passes may give a document twice within a few rows: nothing keeps them apart.

    https://github.com/pytorch/torchtitan/pull/2556, https://github.com/lancedb/lancedb/issues/3705
    """
    texts = corpus(tmp_path, 4, 10)
    keys: dict[str, Any] = {"epochs": 3}
    if filtered:
        texts = [text for text in texts if not text.startswith("<d1-")]
        keys["filter"] = own_code(tmp_path, "def f(row): return not row['id'].startswith('d1-')") + ":f"

    def passes(seed: int) -> list[list[str]]:
        path = recipe(tmp_path, source("*.jsonl", **keys), window=window, more=f"[run]\n{run}\n")
        path.write_text(path.read_text().replace("seed = 11", f"seed = {seed}"))
        found = delivered(path).texts
        return [found[i : i + len(texts)] for i in range(0, len(found), len(texts))]

    orders = passes(11)
    assert [sorted(one) for one in orders] == [sorted(texts)] * 3
    assert orders == passes(11)
    if window:
        assert all(a != b for a, b in itertools.combinations([*orders, *passes(12), texts], 2))
    else:
        assert orders == [texts] * 3


def test_a_resume_in_the_second_pass_has_the_order_of_the_second(tmp_path: Path) -> None:
    """Starting again at pass 2 gave the order of pass 1; alone and inside a mixture.

    https://github.com/pytorch/torchtitan/pull/2556
    """
    corpus(tmp_path / "a", 2, 6, "a")
    corpus(tmp_path / "b", 2, 30, "b")
    for sources in ([source("a/*.jsonl")], [source("a/*.jsonl", name="a"), source("b/*.jsonl", name="b")]):
        with Stream.open(recipe(tmp_path, *sources, lanes=2, size=2, window=8)) as stream:
            whole = trace(ranks(stream, 1), 40)
            first = ranks(stream, 2)
            trace(first, 23)
            assert trace(ranks(stream, 1, saved(first)), 17) == whole[23:]


def test_every_pass_has_every_document_whole(tmp_path: Path) -> None:
    """A document is trained whole in each pass, none of it from the neighbour's row.

    https://github.com/lancedb/lancedb/issues/3705
    """
    texts = corpus(tmp_path, 1, 7)
    found, _ = records(recipe(tmp_path, source("*.jsonl", epochs=4), seq_len=16, window=4))
    assert Counter(texts_in(found)) == dict.fromkeys(texts, 4)
