"""Packing: borders that do not come from token values, positions that start again, no token lost, one rule for long."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import tokenizer_folder

from cases.makers import exactly, images, law, lines, pairs, ranks, recipe, records, row, source, tar, told, trace
from zephon import DataError, Stream
from zephon.types import Record

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=9)
PACKINGS = ["concat", "best_fit"]


def write(folder: Path, lengths: list[int]) -> None:
    lines(folder / "x.jsonl", [row(f"d{i}", exactly("", length)) for i, length in enumerate(lengths)])


def packing(algorithm: str, more: str = "") -> str:
    return f'[packing]\nalgorithm = "{algorithm}"\n{more}\n[records]\ndocument_ids = true\ncu_seqlens = true\n'


def borders(record: Record) -> list[int]:
    """Where documents or their pieces begin, and where the last one ends, as `cu_seqlens` says."""
    return sorted({0, *record["cu_seqlens"].tolist()})


# --- PCK-1 ---------------------------------------------------------------------------------------------------------


def with_dot_as_eos(folder: Path) -> Path:
    """The byte tokenizer, with "." for EOS: it stands within texts as well."""
    out = folder / "dotted"
    out.mkdir()
    (out / "tokenizer.json").write_bytes((tokenizer_folder("none") / "tokenizer.json").read_bytes())
    (out / "tokenizer_config.json").write_text(json.dumps({"eos_token": "."}))
    return out


@pytest.mark.parametrize("kind", ["both", "eos", "none", "dot"])
@pytest.mark.parametrize("algorithm", PACKINGS)
def test_borders_are_those_of_documents_whatever_the_tokens_say(tmp_path: Path, kind: str, algorithm: str) -> None:
    """Borders were looked for by the end token; where it was shifted out, or stood within a document, masks were wrong.

    https://github.com/pytorch/torchtitan/issues/3130
    """
    texts = [f"d{n}. " + "ab. " * n for n in range(1, 9)]
    lines(tmp_path / "x.jsonl", [row("d", text) for text in texts])
    path = recipe(
        tmp_path, source("x.jsonl"), seq_len=64, more=packing(algorithm), tokenizer=kind if kind != "dot" else "none"
    )
    if kind == "dot":
        path.write_text(path.read_text().replace(str(tokenizer_folder("none")), str(with_dot_as_eos(tmp_path))))
    extra = {"both": 2, "eos": 1, "dot": 1, "none": 0}[kind]
    lengths = Counter(len(text) + extra - 1 for text in texts)
    found, _ = records(path)
    pieces = Counter[int]()
    for record in found:
        used = int((record["labels"] != -100).sum())
        ends = [end for end in borders(record) if end <= used]
        assert np.flatnonzero(record["positions"][:used] == 0).tolist() == ends[:-1] if ends[-1] == used else ends
        assert (np.diff(record["document_ids"][:used]) == np.isin(np.arange(1, used), ends)).all()
        pieces.update(b - a for a, b in itertools.pairwise(ends))
    if algorithm == "best_fit":
        assert pieces == lengths
    else:
        assert sum(size * n for size, n in pieces.items()) == sum(size * n for size, n in lengths.items())


# --- PCK-2 ---------------------------------------------------------------------------------------------------------


@law(15)
@given(lengths=LENGTHS, algorithm=st.sampled_from(PACKINGS))
def test_positions_start_again_with_every_document(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], algorithm: str
) -> None:
    """Positions ran on through a packed sequence, so that documents were trained where they never are in use.

    A piece of a cut document starts at 0 as well, as the mask cannot see what came before.

    https://github.com/huggingface/nanoVLM/issues/201, https://github.com/pytorch/torchtitan/pull/2560
    """
    folder = tmp_path_factory.mktemp("positions")
    write(folder, lengths)
    found, _ = records(recipe(folder, source("x.jsonl"), seq_len=32, more=packing(algorithm)))
    for record in found:
        assert {record[name].shape for name in ("input", "labels", "positions", "document_ids")} == {(32,)}
        used = int((record["labels"] != -100).sum())
        ends = [end for end in borders(record) if end <= used]
        ends += [used] if ends[-1] < used else []
        wanted = [i for a, b in itertools.pairwise(ends) for i in range(b - a)]
        assert record["positions"][:used].tolist() == wanted
        assert not record["positions"][used:].any()


def test_placeholders_of_images_count_as_positions(tmp_path: Path) -> None:
    """An image takes its tokens' positions, within the document that it belongs to.

    https://github.com/huggingface/nanoVLM/issues/201
    """
    tar(tmp_path / "p.tar", pairs(5))
    found, _ = records(recipe(tmp_path, images("p.tar"), seq_len=64, more='[packing]\nalgorithm = "best_fit"\n'))
    size = 1 + 3 + len("caption 0")  # BOS, three for the image, the text; EOS is a label only
    for record in found:
        for start in np.flatnonzero(record["input"] == 256).tolist():
            assert record["positions"][start : start + size].tolist() == list(range(size))


# --- PCK-3 ---------------------------------------------------------------------------------------------------------


@law(8)
@given(lengths=LENGTHS)
def test_the_same_predictions_at_every_length(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    """Samples were a token longer than asked, and the number of tokens depended on the sequence length.

    https://github.com/NVIDIA/Megatron-LM/issues/399, https://github.com/mosaicml/llm-foundry/issues/553
    """
    folder = tmp_path_factory.mktemp("lengths")
    write(folder, lengths)
    texts = [exactly("", length).encode() for length in lengths]
    wanted = [pair for text in texts for pair in itertools.pairwise([256, *text, 257])]
    for seq_len in (1, 2, 31, 32, 33, 100):
        found, loader = records(recipe(folder, source("x.jsonl"), seq_len=seq_len))
        assert all(record["input"].shape == record["labels"].shape == (seq_len,) for record in found)
        held = [
            (int(a), int(b))
            for record in found
            for a, b in zip(record["input"], record["labels"], strict=True)
            if b != -100
        ]
        assert held == wanted  # all predictions, in order, none twice
        stats = loader.stats()
        assert (stats.positions, stats.padding) == (len(wanted), -len(wanted) % seq_len)


# --- PCK-4 ---------------------------------------------------------------------------------------------------------

SIZES = [10, 20, 70, 30, 64, 65, 5, 128, 40, 200, 63, 12, 33, 90, 50, 7, 300, 25, 60, 18]


@pytest.mark.parametrize("algorithm", PACKINGS)
@pytest.mark.parametrize("run", ["", 'runner = "threads"\nworkers = 4'])
@pytest.mark.parametrize("too_long", ["split", "drop"])
def test_long_documents_have_one_rule_and_are_counted(tmp_path: Path, algorithm: str, run: str, too_long: str) -> None:
    """Long documents were dropped in one mode and cut in another, and nobody saw how many.

    Our rules are "split" (nothing is lost), "drop" and "error"; cutting the rest off is a map.

    https://github.com/axolotl-ai-cloud/axolotl/pull/2211, https://github.com/axolotl-ai-cloud/axolotl/pull/1066
    """
    write(tmp_path, SIZES)
    more = packing(algorithm, f'too_long = "{too_long}"') + f"[run]\n{run}\n"
    found, loader = records(recipe(tmp_path, source("x.jsonl"), seq_len=64, tokenizer="eos", more=more))
    trained = sum(int((record["labels"] != -100).sum()) for record in found)
    kept = [size for size in SIZES if too_long == "split" or size <= 64]  # with EOS, `size` positions
    assert trained == sum(kept)
    assert loader.stats().dropped["s"].get("too long", 0) == len(SIZES) - len(kept)


@pytest.mark.parametrize("algorithm", PACKINGS)
def test_dropping_every_document_is_told(tmp_path: Path, algorithm: str, caplog: pytest.LogCaptureFixture) -> None:
    """With long documents alone, dropping them must neither loop for ever nor end without a word.

    https://github.com/axolotl-ai-cloud/axolotl/pull/1066
    """
    write(tmp_path, [70, 90, 65])
    more = packing(algorithm, 'too_long = "drop"')
    path = recipe(tmp_path, source("x.jsonl"), seq_len=64, tokenizer="eos", more=more)
    assert "3 too long" in told(path, caplog)
    path = recipe(tmp_path, source("x.jsonl"), seq_len=64, tokenizer="eos", more=more, lanes=2, size=2)
    with Stream.open(path) as stream, pytest.raises(DataError, match="too long"):
        trace(ranks(stream, 1), 1)


def test_a_long_document_as_an_error_is_named(tmp_path: Path) -> None:
    """The third rule stops the run at the first one, with its line and both lengths.

    https://github.com/axolotl-ai-cloud/axolotl/pull/2211
    """
    write(tmp_path, SIZES)
    path = recipe(tmp_path, source("x.jsonl"), seq_len=64, tokenizer="eos", more='[packing]\ntoo_long = "error"\n')
    with pytest.raises(DataError, match=r"x\.jsonl, line 3, byte \d+: the sample has 70 positions, more than the 64"):
        records(path)
