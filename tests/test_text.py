"""Tokenisation is exact and text records are what the contract says."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from worlds import BOS, EOS, tokenizer_folder

from modalities.encoder import COMPARED_CHARS, PROBES
from modalities.text import Text
from modalities.tokenizer import TextTokenizer
from zephon import RecipeError
from zephon.modality import Context, find_modality
from zephon.recipe import TokenizerSpec
from zephon.types import Ref, Sample, Segment

HARD = [*PROBES, "<eos> in text <bos>", "\U0001f600" * 50, "a\u0301" * 30, "\r\n" * 20, " " * 200, "0" * 100]


def text(folder: Path, options: dict[str, object] | None = None, **spec: bool) -> Text:
    return Text(options or {}, Context(16, TokenizerSpec(folder, **spec)))


def ids_of(modality: Text, value: str) -> list[int]:
    return modality.measure([{"text": value}]).payloads[0].tolist()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real BPE, trained on real text: the sources of this project."""
    from recipes.demo.corpus import train_tokenizer

    folder = tmp_path_factory.mktemp("trained")
    train_tokenizer([path.read_text() for path in sorted(Path(__file__).parent.parent.glob("zephon/*.py"))], folder)
    return folder


def test_the_fast_library_is_used_and_gives_the_ids_of_the_reference(trained: Path) -> None:
    tokenizer = TextTokenizer(TokenizerSpec(trained))
    assert tokenizer.library == "fastokens"
    reference = Tokenizer.from_file(str(trained / "tokenizer.json"))
    reference.encode_special_tokens = True
    texts = HARD + [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    ids, offsets = tokenizer.encode(texts)
    for i, value in enumerate(texts):
        assert ids[offsets[i] : offsets[i + 1]].tolist() == reference.encode(value, add_special_tokens=False).ids


def test_it_falls_back_loudly_on_any_difference(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = TextTokenizer(TokenizerSpec(trained))
    reference, _ = tokenizer._encode_reference(["some text"])

    class Wrong:
        def encode_batch_flat(self, texts: list[str], **_: bool) -> tuple[bytes, bytes]:
            return b"\0\0\0\0" * len(texts), np.arange(len(texts) + 1, dtype="<u8").tobytes()

    tokenizer._fast = Wrong()
    tokenizer.compare(["some text"], "the first documents")
    assert tokenizer.library == "tokenizers"
    assert "disagree on the first documents" in caplog.text
    assert tokenizer.encode(["some text"])[0].tolist() == reference.tolist()


def test_the_start_does_not_wait_for_whole_books(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference takes a second for 2 M characters: it sees the start of every first document alone."""
    tokenizer, seen = TextTokenizer(TokenizerSpec(trained)), list[int]()
    encode = tokenizer.defining.encode

    def noted(texts: Sequence[str], special: bool = False) -> list[Any]:
        seen.extend(map(len, texts))
        return encode(texts, special)

    monkeypatch.setattr(tokenizer.defining, "encode", noted)
    tokenizer.compare(["word " * 10**5, "a book " * 10**5, "short"], "the first documents of a source")
    assert seen == [COMPARED_CHARS, COMPARED_CHARS, 5]


def test_it_falls_back_loudly_when_the_fast_library_cannot_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A WordLevel model, which fastokens does not know."""
    from tokenizers import models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with caplog.at_level(logging.WARNING):
        loaded = TextTokenizer(TokenizerSpec(tmp_path))
    assert loaded.library == "tokenizers"
    assert "using tokenizers" in caplog.text
    assert loaded.encode(["a b a", "c"])[0].tolist() == [0, 1, 0, 2]


def test_bos_and_eos_come_from_the_config_and_never_from_the_template() -> None:
    assert ids_of(text(tokenizer_folder("both")), "ab") == [BOS, 97, 98, EOS]
    assert ids_of(text(tokenizer_folder("eos")), "ab") == [97, 98, EOS]
    assert ids_of(text(tokenizer_folder("none")), "ab") == [97, 98]


def test_the_recipe_overrules_the_config() -> None:
    both = tokenizer_folder("both")
    assert ids_of(text(both, bos=False), "ab") == [97, 98, EOS]
    assert ids_of(text(both, eos=False), "ab") == [BOS, 97, 98]
    assert ids_of(text(both, bos=True, eos=True), "ab") == [BOS, 97, 98, EOS]
    with pytest.raises(RecipeError, match="bos = true, but tokenizer_config.json .* defines no bos_token"):
        text(tokenizer_folder("eos"), bos=True)


def test_config_may_hold_tokens_as_objects_and_must_name_known_ones(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder("none") / "tokenizer.json").read_bytes())
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<eos>", "special": True}}))
    assert ids_of(text(tmp_path), "a") == [97, EOS]
    config.write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(RecipeError, match="names '</s>' as eos_token, but .* has no such token"):
        text(tmp_path)
    config.write_text("{")
    with pytest.raises(RecipeError, match=r"tokenizer_config\.json is not valid JSON"):
        text(tmp_path)


def test_special_tokens_in_text_are_text_and_counted() -> None:
    measured = text(tokenizer_folder("both")).measure([{"text": "a<eos>b"}, {"text": "plain"}])
    assert measured.payloads[0].tolist() == [BOS, *b"a<eos>b", EOS]
    assert measured.counts == {0: ("special tokens in text",)}


def test_lone_surrogates_become_replacement_characters_and_are_counted() -> None:
    measured = text(tokenizer_folder("none")).measure([{"text": "a\ud800b"}, {"text": "caf\u00e9"}])
    assert measured.payloads[0].tolist() == list("a\ufffdb".encode())
    assert measured.counts == {0: ("surrogates",)}


def test_texts_of_fewer_than_two_tokens_have_no_position() -> None:
    measured = text(tokenizer_folder("none")).measure([{"text": ""}, {"text": "a"}, {"text": "ab"}])
    assert list(measured.positions) == [0, 0, 1]
    assert measured.counts == {0: ("empty",), 1: ("empty",)}


@pytest.mark.parametrize("length", [3, 3000])  # copied with a mask, and text by text
def test_edges_are_put_around_every_text(length: int) -> None:
    texts = ["x" * length, "", "y" * length]
    for kind, bos, eos in (("both", [BOS], [EOS]), ("eos", [], [EOS]), ("none", [], [])):
        modality = text(tokenizer_folder(kind))
        measured = modality.measure([{"text": one} for one in texts])
        found = [ids.tolist() for ids in measured.payloads]
        assert found == [[*bos, *one.encode(), *eos] if one else [] for one in texts]


def test_a_bad_row_says_what_the_row_has() -> None:
    modality = text(tokenizer_folder("both"), {"text": "content"})
    rows = [{"content": "good"}, {"contents": "x", "id": 3}, {"content": None}, {"content": "good"}, {"content": 3}]
    measured = modality.measure(rows)
    assert sorted(measured.faults) == [1, 2, 4]
    assert "no field 'content'; the row has ['contents', 'id']. Did you mean 'contents'" in measured.faults[1]
    assert "field 'content' must be a string, it is None" in measured.faults[2]
    assert [measured.positions[i] for i in (1, 2, 4)] == [0, 0, 0]
    assert measured.positions[0] == measured.positions[3] > 0
    assert not measured.counts  # a fault is not an empty document


def test_unknown_options_are_refused() -> None:
    with pytest.raises(
        RecipeError, match="modality 'text': txet is not a known key; modality 'text' takes text,.*Did you mean 'text'"
    ):
        text(tokenizer_folder("both"), {"txet": "x"})
    with pytest.raises(RecipeError, match="every source takes.* on_error, max_bad.*Did you mean 'on_error'"):
        text(tokenizer_folder("both"), {"on_eror": "skip"})
    with pytest.raises(RecipeError, match="modality 'text': text must be a string, it is 3"):
        text(tokenizer_folder("both"), {"text": 3})
    with pytest.raises(RecipeError, match="needs one"):
        Text({}, Context(16, None))


def test_a_tokenizer_that_is_not_there_or_must_be_converted(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"must be a folder with a tokenizer\.json, or that file"):
        text(tmp_path)
    with pytest.raises(RecipeError, match=r"must be a folder with a tokenizer\.json"):
        text(tmp_path / "nowhere")
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(RecipeError, match=r"tokenizer\.model is not a SentencePiece model or a tiktoken rank file"):
        text(tmp_path)


def test_records_hold_inputs_shifted_labels_and_positions_from_zero() -> None:
    modality = text(tokenizer_folder("both"))
    measured = modality.measure([{"text": "abcdef"}, {"text": "xy"}])  # 7 and 3 positions
    one, two = (Sample(Ref(0, 0, 0, i, 0), measured.positions[i], measured.payloads[i]) for i in range(2))
    batch = modality.materialise([[Segment(one, 2, 7), Segment(two, 0, 3)]])
    assert {name: (array.dtype.str, array.shape) for name, array in batch.items()} == dict.fromkeys(
        ("input", "labels", "positions"), ("<i4", (1, 16))
    )
    assert batch["input"][0].tolist() == [*b"bcdef", BOS, *b"xy", *[0] * 8]
    assert batch["labels"][0].tolist() == [*b"cdef", EOS, *b"xy", EOS, *[-100] * 8]
    assert batch["positions"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, *[0] * 8]


def test_records_narrow_what_a_trainer_widened() -> None:
    modality = text(tokenizer_folder("both"))
    measured = modality.measure([{"text": "abcdef"}])
    batch = modality.materialise([[Segment(Sample(Ref(0, 0, 0, 0, 0), 7, measured.payloads[0]), 0, 7)]])
    wide = {name: array.astype(np.int64) for name, array in batch.items()}
    for a, b in zip(modality.records(batch), modality.records(wide), strict=True):
        assert all(np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_an_unknown_modality_is_refused_with_the_nearest_name() -> None:
    installed = r"\['chat', 'image_text', 'text'\]"
    with pytest.raises(RecipeError, match=rf"Unknown modality 'txt'; installed are {installed}\. Did you mean 'text'"):
        find_modality("txt")


def test_a_long_text_without_spaces_takes_linear_time(trained: Path) -> None:
    tokenizer = TextTokenizer(TokenizerSpec(trained))
    ids, _ = tokenizer.encode(["ab" * 2_000_000])  # 4 MB in one pre-token: seconds if quadratic would be hours
    assert tokenizer.library == "fastokens"
    assert len(ids) > 100_000


def edited(folder: Path, **changes: object) -> Path:
    """The byte tokenizer with changes at the top of its file."""
    tree = json.loads((tokenizer_folder("both") / "tokenizer.json").read_text())
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            value = {**tree[key], **value}
        tree[key] = value
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder


def test_truncation_and_padding_of_a_tokenizer_cut_no_document(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    assert len(ids_of(text(edited(tmp_path, truncation=truncation)), "x" * 100)) == 100


def test_a_tokenizer_whose_ids_are_random_or_ambiguous_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="dropout makes ids random"):
        text(edited(tmp_path, model={"dropout": 0.1}))
    gap = {"content": "<far>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    with pytest.raises(RecipeError, match="says id 3000, but `tokenizers` gives it"):
        text(edited(tmp_path, added_tokens=[{"id": 3000, "special": True, **gap}]))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"model": {}, "added_tokens": null}'])
def test_a_damaged_tokenizer_is_refused_with_its_name(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(RecipeError, match=r"tokenizer\.json is not a tokenizer\.json that can be used"):
        text(tmp_path)


@pytest.mark.parametrize("config", [None, [], 3, {"bos_token": ["a"]}, {"eos_token": 5}, {"bos_token": True}])
def test_a_strange_config_is_refused(tmp_path: Path, config: object) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder("both") / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match="must be a"):
        text(tmp_path)


def test_a_modality_that_lacks_what_it_needs_says_what_to_install() -> None:
    code = (
        "import sys\nfor name in ('torch', 'torchvision', 'PIL'): sys.modules[name] = None\n"
        "from zephon.modality import find_modality\n"
        "try:\n    find_modality('image_text')\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("RecipeError The modality 'image_text' cannot be loaded")
    assert "pip install -e '.[image]'" in done.stdout


def test_fastokens_is_used_where_cores_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    assert TextTokenizer(TokenizerSpec(tokenizer_folder("both"))).library == "fastokens"
