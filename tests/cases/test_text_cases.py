"""Texts and tokens: control tokens that a text spells, half characters, endless words, texts without content."""

import base64
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import BOS, EOS, tokenizer_folder

from cases.makers import (
    delivered,
    document,
    images,
    law,
    lines,
    own_code,
    ranks,
    recipe,
    records,
    row,
    source,
    tar,
    tile,
    told,
    trace,
    write,
)
from modalities.encoder import Encoder
from modalities.ranks import Ranks
from modalities.tokenizer import TextTokenizer
from zephon import DataError, Stream
from zephon.recipe import TokenizerSpec

SKIP = {"on_error": "skip", "max_bad": 1000}


SPELLED, KINDS = ["<eos>", "<bos>", "<", "eos>", "<EOS>", " ", "mid", "\n"], st.sampled_from(["both", "eos"])


# --- TXT-1 ---------------------------------------------------------------------------------------------------------


@law(20)
@given(st.lists(st.lists(st.sampled_from(SPELLED), min_size=1, max_size=9), min_size=1, max_size=6), KINDS)
def test_text_cannot_make_control_ids(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[str]], kind: str
) -> None:
    """Web text that spells a control token was encoded as that token: documents ended early, or got false roles.

    https://github.com/huggingface/tokenizers/issues/1347, https://github.com/google-deepmind/gemma/pull/770
    """
    folder, texts = tmp_path_factory.mktemp("spelled"), ["".join(one) for one in parts]
    lines(folder / "x.jsonl", [row("d", text) for text in texts])
    found, loader = records(recipe(folder, source("x.jsonl"), tokenizer=kind))
    trained = [record["labels"] != -100 for record in found]
    ids = [int(one) for record, mask in zip(found, trained, strict=True) for one in record["input"][mask]]
    labels = [int(one) for record, mask in zip(found, trained, strict=True) for one in record["labels"][mask]]
    assert EOS not in ids
    assert labels.count(EOS) == len(texts)  # once a document, at its end
    assert ids.count(BOS) == (len(texts) if kind == "both" else 0)
    assert bytes(one for one in ids if one < 256).decode() == "".join(texts)
    spelled = sum("<eos>" in text or "<bos>" in text for text in texts)
    assert loader.stats().dropped["s"]["special tokens in text"] == spelled


# --- TXT-2 ---------------------------------------------------------------------------------------------------------

ESCAPES = {
    r"\ud83d": "\ufffd", r"\ude42": "\ufffd", r"\ude42\ud83d": "\ufffd\ufffd", r"\ud83d\ude42": "\U0001f642",
    r"\ud83d\ud83d\ude42": "\ufffd\U0001f642", r"\ud83d\ude42\ude42": "\U0001f642\ufffd", r"\u0000": "\0",
    r"\ufffe": "\ufffe", r"\uffff": "\uffff", r"\u00e9": "\u00e9", r"e\u0301": "e\u0301", r"\ufeff": "\ufeff",
}  # fmt: skip


def test_half_characters_become_the_replacement_character(tmp_path: Path) -> None:
    r"""A JSON escape such as \ud83d alone gives half a character; the tokenizer refused it with an unrelated error.

    https://github.com/openai/tiktoken/issues/82, https://github.com/huggingface/transformers/pull/43459
    """
    lines(tmp_path / "x.jsonl", [f'{{"text": "a {escape} z"}}'.encode() for escape in ESCAPES])
    found = delivered(recipe(tmp_path, source("x.jsonl")))
    assert found.texts == [f"a {wanted} z" for wanted in ESCAPES.values()]  # nothing is normalised
    assert found.counts["s"]["surrogates"] == 5


# --- TXT-3 ---------------------------------------------------------------------------------------------------------

RUNS = {"a": "a", "caret": "^", "space": " ", "newline": "\n", "cjk": "\u6f22\u5b57", "zeros": "0", "base64": "QUJDRA"}


@pytest.mark.parametrize("run", RUNS)
def test_long_runs_without_a_space_come_through(tmp_path: Path, run: str) -> None:
    """Long runs without a space took hours in the tokenizer, or made it panic past every handler.

    https://github.com/jzhang38/TinyLlama/issues/62, https://github.com/openai/tiktoken/issues/195
    """
    text = RUNS[run] * (200_000 // len(RUNS[run].encode()))
    lines(tmp_path / "x.jsonl", [row("first"), row("d", text), row("last")])
    found = delivered(recipe(tmp_path, source("x.jsonl"), seq_len=4096))
    assert found.texts == [document("first"), text, document("last")]


def test_the_time_of_a_document_grows_with_its_length(tmp_path: Path) -> None:
    """Very long documents took minutes to hours, since the time grew with the square of the length.

    https://github.com/hiyouga/LlamaFactory/issues/2255, https://github.com/openai/tiktoken/issues/15
    """
    taken: dict[int, float] = {}
    for size in (1, 4):
        text = document("long", 60_000 * size)
        lines(tmp_path / "x.jsonl", [row("d", text)])
        path = recipe(tmp_path, source("x.jsonl"), seq_len=4096)
        started = time.process_time()
        assert delivered(path).texts == [text]
        taken[size] = time.process_time() - started
    assert taken[4] < 8 * taken[1] + 0.5


BLANKS = " " * 1_000_000
"""On which tiktoken panics: its pattern's search overflows a stack, which no handler of `Exception` sees."""


def rank_tokenizer(folder: Path) -> Path:
    """One token a byte, as tiktoken has it, with the pattern of a real model."""
    ranks_of = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
    config = {"pat_str": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
              "added_tokens_decoder": {"256": {"content": "<bos>"}, "257": {"content": "<eos>"}},
              "bos_token": "<bos>", "eos_token": "<eos>"}  # fmt: skip
    write(folder / "tok/tokenizer_config.json", json.dumps(config).encode())
    return write(folder / "tok/x.tiktoken", ranks_of).parent


def test_a_panic_of_the_tokenizer_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million blanks made the tokenizer panic, past every handler, and the run ended without a name.

    https://github.com/openai/tiktoken/issues/15, https://github.com/openai/tiktoken/issues/195
    """
    monkeypatch.setattr(Ranks, "fast", None)  # the library that defines the ids then encodes, and warns that it is slow
    lines(tmp_path / "x.jsonl", [row("a"), row("b", BLANKS), row("c")])
    for policy in ("skip", "raise"):
        path = recipe(tmp_path, source("x.jsonl", on_error=policy, max_bad=9))
        path.write_text(path.read_text().replace(str(tokenizer_folder("both")), str(rank_tokenizer(tmp_path))))
        if policy == "raise":
            with pytest.raises(
                DataError, match=r"x\.jsonl, line 2, byte \d+: the tokenizer fails on it: .*StackOverflow"
            ):
                delivered(path)
        else:
            found = delivered(path)
            assert found.texts == [document("a"), document("c")]
            assert ["row 1" in skip.place for skip in found.skipped] == [True]


def test_other_errors_of_a_tokenizer_name_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library raises, in text, captions and conversations.

    https://github.com/openai/tiktoken/issues/15
    """

    class PanicException(BaseException):
        pass

    def fails(self: Encoder, texts: Sequence[str], special: bool) -> Any:
        if any("poison" in text for text in texts):
            raise PanicException("odd")
        return Encoder._encode_reference(self, texts, special)

    monkeypatch.setattr(Encoder, "_encode_fast", fails)
    tar(tmp_path / "x.tar", [(f"{name}.{kind}", data) for name in ("good", "poison")
                             for kind, data in (("jpg", tile(1)), ("txt", name.encode()))])  # fmt: skip
    lines(tmp_path / "x.jsonl", [row("good"), row("poison")])
    for one, place in ((source("x.jsonl"), r"x\.jsonl, line 2"), (images("x.tar", on_error="raise"), "sample poison")):
        with pytest.raises(DataError, match=rf"{place}, byte \d+: the tokenizer fails on it: odd"):
            delivered(recipe(tmp_path, one))


def test_a_tokenizer_that_is_interrupted_blames_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog's end of a task was taken for a failure on a text, and every text was tried once more.

    https://github.com/openai/tiktoken/issues/15
    """

    class GivenUpError(BaseException):
        pass

    def hangs(self: Encoder, texts: Sequence[str], special: bool) -> Any:
        calls.append(len(texts))
        raise GivenUpError

    calls = list[int]()
    tokenizer = TextTokenizer(TokenizerSpec(tokenizer_folder("both")))
    monkeypatch.setattr(Encoder, "_encode_fast", hangs)
    with pytest.raises(GivenUpError):
        tokenizer.encode(["a", "b", "c"])
    assert calls == [3]


def test_what_fails_in_a_map_names_the_row(tmp_path: Path) -> None:
    """Errors in a user's own work on a document must name it.

    https://github.com/openai/tiktoken/issues/15
    """
    name = own_code(tmp_path, "def f(row): return {'text': row['text'] + 3}")
    lines(tmp_path / "x.jsonl", [row("a")])
    with pytest.raises(DataError, match=r"(?s)x\.jsonl, line 1, byte 0: map .*TypeError: can only concatenate str"):
        delivered(recipe(tmp_path, source("x.jsonl", map=f"{name}:f")))


# --- TXT-4 ---------------------------------------------------------------------------------------------------------

ODD: list[dict[str, Any]] = [{"text": None}, {}, {"text": 5}, {"text": ["a"]}, {"text": {}}, {"text": False}]
BLANK = [" ", "\n\n", "\u200b", "\t \r\n"]


def test_texts_without_content_are_left_out_and_counted(tmp_path: Path) -> None:
    """Missing texts gave zero tokens; code that looks at the last token failed, or an end token alone was trained.

    Blank texts are texts. What is no text is a bad row, with its reason.

    https://github.com/openai/gpt-2-output-dataset/issues/51, https://github.com/axolotl-ai-cloud/axolotl/pull/3751,
    https://github.com/unslothai/unsloth/pull/7183
    """
    rows = [one for i, odd in enumerate(ODD) for one in (row(f"g{i}"), json.dumps(odd).encode())]
    lines(tmp_path / "x.jsonl", rows + [row("b", text) for text in BLANK])
    found = delivered(recipe(tmp_path, source("x.jsonl", **SKIP)))
    assert found.texts == [document(f"g{i}") for i in range(len(ODD))] + BLANK
    says = ["it is None", "there is no field 'text'", "it is 5", "it is ['a']", "it is {}", "it is False"]
    assert len(found.skipped) == len(says)
    assert all(one in skip.reason for one, skip in zip(says, found.skipped, strict=True))


@pytest.mark.parametrize("kind", ["none", "eos", "both"])
def test_an_empty_text_has_no_position(tmp_path: Path, kind: str) -> None:
    """Of an empty text only control tokens are left, and a sequence of those must not be trained on.

    https://github.com/unslothai/unsloth/pull/7183
    """
    lines(tmp_path / "x.jsonl", [row("a", "xy"), row("b", ""), row("c", "z."), row("d", "")])
    found, loader = records(recipe(tmp_path, source("x.jsonl"), tokenizer=kind))
    trained = int(sum((record["labels"] != -100).sum() for record in found))
    assert trained == 2 * {"none": 1, "eos": 2, "both": 3}[kind]
    assert loader.stats().dropped["s"]["empty"] == 2


@pytest.mark.parametrize("kind", ["none", "eos", "both"])
def test_a_source_of_empty_texts_is_told(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A source in which every text is empty must not loop for ever, nor pass for a source that was read.

    https://github.com/openai/gpt-2-output-dataset/issues/51
    """
    lines(tmp_path / "x.jsonl", [row(f"e{i}", "") for i in range(5)])
    assert "5 empty" in told(recipe(tmp_path, source("x.jsonl"), tokenizer=kind), caplog)
    endless = recipe(tmp_path, source("x.jsonl"), lanes=2, size=2, tokenizer=kind)
    with Stream.open(endless) as stream, pytest.raises(DataError, match="no usable sample .* empty"):
        trace(ranks(stream, 1), 1)
