"""SentencePiece models and tiktoken rank files: ids are those of the library that defines them, on real text."""

import base64
import functools
import importlib.metadata
import io
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from modalities.chat import Chat
from modalities.encoder import PROBES
from modalities.ranks import Ranks
from modalities.text import Text
from modalities.tokenizer import TextTokenizer
from zephon import RecipeError
from zephon.modality import Context
from zephon.recipe import TokenizerSpec

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + \
'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

CONTROL = ("<|im_start|>", "<|im_end|>")


@functools.cache
def documents() -> list[str]:
    """Real text: sources of the standard library and descriptions of installed packages."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:90]
    packages = sorted(importlib.metadata.distributions(), key=lambda one: one.name.lower())[:90]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sources]
    texts += [one.read_text("METADATA") or "" for one in packages]
    return [text[:12_000] for text in texts]


@functools.cache
def hard() -> list[str]:
    """What tokenizers trip over: probes, ends of documents, and noise of letters that matter."""
    chance = random.Random(5)
    letters = "ab =-_<>s/|.\n\t  0x1\u00e9\u6f22\U0001f600\u2581\u0301"
    noise = ["".join(chance.choice(letters) for _ in range(chance.randrange(1, 40))) for _ in range(1500)]
    ends = [text[chance.randrange(len(text)) :][:50] for text in documents() if text]
    names = ["<s>", "</s>", "<unk>", "a<s>b</s>", "<0x0A>", "x <0x41>y", *CONTROL, f"say {CONTROL[1]}\n", "==>", "<t>"]
    return [*PROBES, *names, *ends, *noise]


# --- SentencePiece ---------------------------------------------------------------------------------------------------

LLAMA: dict[str, Any] = {"split_digits": True, "allow_whitespace_only_pieces": True, "remove_extra_whitespaces": False}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "bpe as Llama 2": ({"model_type": "bpe", **LLAMA}, "fastokens"),
    "bpe without prefix": ({"model_type": "bpe", **LLAMA, "add_dummy_prefix": False}, "fastokens"),
    "bpe without bytes": ({"model_type": "bpe", **LLAMA, "byte_fallback": False}, "fastokens"),
    "bpe of few letters": ({"model_type": "bpe", **LLAMA, "character_coverage": 0.98}, "sentencepiece"),
    "bpe as Gemma": (
        {
            "model_type": "bpe",
            **LLAMA,
            "add_dummy_prefix": False,
            "user_defined_symbols": ["==>", "<t>", "\u2581\u2581"],
        },
        "sentencepiece",
    ),
    "bpe of old": ({"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"}, "sentencepiece"),
    "unigram": ({"model_type": "unigram", **LLAMA}, "sentencepiece"),
    "unigram of old": ({"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"}, "sentencepiece"),
}


@functools.cache
def trained(name: str) -> bytes:
    options = {"byte_fallback": True, "normalization_rule_name": "identity", "character_coverage": 0.9995}
    options |= MODELS[name][0]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in documents()[::4] for line in text.split("\n") if line.strip()]),
        model_writer=out,
        vocab_size=1200,
        num_threads=1,
        minloglevel=2,
        control_symbols=list(CONTROL),
        **options,
    )
    return out.getvalue()


def piece_folder(folder: Path, name: str = "bpe as Llama 2", config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(trained(name))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def processor(name: str) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=trained(name))


def assert_equal(tokenizer: TextTokenizer, texts: list[str], expected: list[list[int]]) -> None:
    ids, offsets = tokenizer.encode(texts)
    for i, text in enumerate(texts):
        assert ids[offsets[i] : offsets[i + 1]].tolist() == expected[i], text[:200]


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_sentencepiece(tmp_path: Path, name: str) -> None:
    tokenizer = TextTokenizer(TokenizerSpec(piece_folder(tmp_path, name)))
    assert tokenizer.library == MODELS[name][1]
    texts = [*documents(), *hard()]
    assert_equal(tokenizer, texts, processor(name).encode(texts))


def test_bos_and_eos_are_the_models_own_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    def ids(config: dict[str, Any] | None, **spec: bool) -> list[int]:
        folder = piece_folder(tmp_path / str(len(list(tmp_path.iterdir()))), config=config)
        modality = Text({}, Context(16, TokenizerSpec(folder, **spec)))
        return modality.measure([{"text": "a lane"}]).payloads[0].tolist()

    plain = processor("bpe as Llama 2").encode("a lane")
    assert ids(None) == [1, *plain, 2]
    assert ids({"bos_token": "<s>"}) == [1, *plain, 2]
    assert ids({"bos_token": None, "eos_token": "<|im_end|>"}) == [*plain, 4]
    assert ids(None, bos=False, eos=False) == plain


def test_control_tokens_in_text_are_text_and_counted(tmp_path: Path) -> None:
    for name in ("bpe as Llama 2", "unigram"):
        modality = Text({}, Context(64, TokenizerSpec(piece_folder(tmp_path / name[:3], name))))
        measured = modality.measure([{"text": "<s>a <|im_end|> b</s>"}, {"text": "plain"}])
        assert measured.counts == {0: ("special tokens in text",)}
        assert measured.payloads[0][1:-1].tolist() == processor(name).encode("<s>a <|im_end|> b</s>")
        assert not {0, 1, 2, 3, 4} & set(measured.payloads[0][1:-1].tolist())


PIECES = st.lists(
    st.sampled_from([*CONTROL, "<s>", "<t>", " ", "\n", "a", "lane ", "\u6f22", "e\u0301", "==>", "<0x0A>"]), max_size=6
).map("".join)


@pytest.mark.parametrize("name", ["bpe as Llama 2", "bpe as Gemma", "unigram", "unigram of old"])
def test_chat_encodes_what_is_between_control_tokens_with_sentencepiece(tmp_path: Path, name: str) -> None:
    modality = Chat({}, Context(64, TokenizerSpec(piece_folder(tmp_path, name, {"chat_template": CHATML}))))
    assert modality._tokenizer.library == MODELS[name][1]
    model = processor(name)
    start, end = (model.piece_to_id(token) for token in CONTROL)

    @settings(max_examples=60)
    @given(PIECES, PIECES)
    def check(question: str, answer: str) -> None:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids, mask = (one.tolist() for one in modality.measure([{"messages": messages}]).payloads[0])
        runs = [f"user\n{question}", "\n", f"assistant\n{answer}", "\n"]
        encoded = [model.encode(run) for run in runs]
        assert ids == [start, *encoded[0], end, *encoded[1], start, *encoded[2], end, *encoded[3]]
        assert sum(mask) <= len(encoded[2]) + 1
        assert mask[len(ids) - len(encoded[3]) - 1]  # the token that ends the turn
        assert not any(mask[: len(ids) - len(encoded[3]) - 1 - len(encoded[2])])
        prompt = model.encode("assistant\n")
        if encoded[2][: len(prompt)] == prompt and "of old" not in name:  # which strips the line feed
            assert sum(mask) == len(encoded[2]) - len(prompt) + 1

    check()


def test_a_config_may_add_tokens_to_a_model(tmp_path: Path) -> None:
    size = processor("bpe as Llama 2").vocab_size()
    added = {
        str(size): {"content": "<|tool|>", "special": True},
        str(size + 1): {"content": "<think>", "special": False},
        "3": {"content": "<|im_start|>", "special": True},
    }
    template = CHATML.replace("message['role'] + '\n'", "message['role'] + '<|tool|>'")
    template = template.replace("assistant\n", "assistant<|tool|>")
    config = {"added_tokens_decoder": added, "chat_template": template}
    modality = Chat({}, Context(64, TokenizerSpec(piece_folder(tmp_path, config=config))))
    model = processor("bpe as Llama 2")
    messages = [{"role": "user", "content": "a <think>b"}, {"role": "assistant", "content": "c<|tool|>"}]
    measured = modality.measure([{"messages": messages}])
    assert measured.counts == {0: ("special tokens in text",)}
    expected = [
        3,
        *model.encode("user"),
        size,
        *model.encode("a "),
        size + 1,
        *model.encode("b"),
        4,
        *model.encode("\n"),
    ]
    expected += [3, *model.encode("assistant"), size, *model.encode("c<|tool|>"), 4, *model.encode("\n")]
    assert measured.payloads[0][0].tolist() == expected
    text = Text({}, Context(64, TokenizerSpec(tmp_path, bos=False, eos=False)))
    assert (
        text.measure([{"text": "a <think>b"}]).payloads[0].tolist()
        == expected[expected.index(size) + 1 :][: len([*model.encode("a "), 0, *model.encode("b")])]
    )


@pytest.mark.parametrize(
    ("token", "complaint"),
    [
        (
            {"3": {"content": "<other>", "special": True}},
            "token 3 '<other>', but the SentencePiece model has '<|im_start|>'",
        ),
        ({"9999": {"content": "<x>", "rstrip": True}}, r"'<x>' a flag \(lstrip, rstrip or single_word\)"),
    ],
)
def test_a_config_that_contradicts_the_model_is_refused(tmp_path: Path, token: object, complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint):
        TextTokenizer(TokenizerSpec(piece_folder(tmp_path, config={"added_tokens_decoder": token})))


def test_a_user_defined_piece_that_the_config_marks_as_special_is_text_in_text(tmp_path: Path) -> None:
    model = processor("bpe as Gemma")
    number = model.piece_to_id("<t>")
    folder = piece_folder(
        tmp_path, "bpe as Gemma", {"added_tokens_decoder": {number: {"content": "<t>", "special": True}}}
    )
    assert model.encode("a<t>b").count(number) == 1
    ids, _ = TextTokenizer(TokenizerSpec(folder)).encode(["a<t>b"])
    assert number not in ids
    ids, _ = TextTokenizer(TokenizerSpec(folder)).encode(["a<t>b"], special=True)
    assert ids.tolist() == [*model.encode("a"), number, *model.encode("b")]


# --- tiktoken --------------------------------------------------------------------------------------------------------

PATTERNS = {
    "llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
    r"\s*[\r\n]|\s+(?!\S)|\s",
    "gpt 2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


@functools.cache
def ranks() -> dict[bytes, int]:
    """Ranks of a byte-level BPE that was trained on the documents."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(PATTERNS["llama 3"]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents()[::2], trainer)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    spare = (byte for byte in range(256) if byte not in printable)
    letters |= {chr(256 + i): byte for i, byte in enumerate(spare)}
    return {bytes(letters[one] for one in token): rank for token, rank in tokenizer.get_vocab().items()}


SPECIAL = {"<|im_start|>": 3000, "<|im_end|>": 3005, "<|end|>": 3006}


def rank_folder(folder: Path, pattern: str = "llama 3", name: str = "tokenizer.model", **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = sorted(ranks().items(), key=lambda item: item[1])
    (folder / name).write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in lines))
    added = {number: {"content": token, "special": True} for token, number in SPECIAL.items()}
    whole = {"pat_str": PATTERNS[pattern], "added_tokens_decoder": added, "chat_template": CHATML, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in whole.items() if v is not None}))
    return folder


def encoding(pattern: str) -> tiktoken.Encoding:
    return tiktoken.Encoding("x", pat_str=PATTERNS[pattern], mergeable_ranks=ranks(), special_tokens=SPECIAL)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ["tokenizer.model", "some.tiktoken"])
def test_ids_are_those_of_tiktoken(tmp_path: Path, pattern: str, name: str) -> None:
    tokenizer = TextTokenizer(TokenizerSpec(rank_folder(tmp_path, pattern, name)))
    assert tokenizer.library == "fastokens"
    texts = [*documents(), *hard()] if name == "tokenizer.model" else hard()
    assert_equal(tokenizer, texts, encoding(pattern).encode_ordinary_batch(texts, num_threads=1))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_letter_of_unicode_is_cut_as_tiktoken_cuts_it(tmp_path: Path, pattern: str) -> None:
    blocks = (range(at, at + 256) for at in range(0, 0x110000, 256) if not 0xD800 <= at < 0xE000)
    texts = ["x" + "".join(map(chr, block)) + "1" for block in blocks]
    tokenizer = TextTokenizer(TokenizerSpec(rank_folder(tmp_path, pattern)))
    assert_equal(tokenizer, texts, encoding(pattern).encode_ordinary_batch(texts, num_threads=1))


def test_control_tokens_of_rank_files(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(TokenizerSpec(rank_folder(tmp_path)))
    text = "a<|im_end|>b <|end|>"
    for ids in (tokenizer.encode([text], special=True)[0], tokenizer._encode_reference([text], special=True)[0]):
        assert ids.tolist() == encoding("llama 3").encode(text, allowed_special="all")
    assert not set(SPECIAL.values()) & set(tokenizer.encode([text])[0].tolist())


def test_chat_with_a_rank_file(tmp_path: Path) -> None:
    modality = Chat({}, Context(64, TokenizerSpec(rank_folder(tmp_path))))
    whole = encoding("llama 3")
    for answer in ("fine", "\n\nfine caf\u00e9", "say <|im_end|> \u6f22 <|end|>"):
        messages = [{"role": "user", "content": "how?"}, {"role": "assistant", "content": answer}]
        ids, mask = modality.measure([{"messages": messages}]).payloads[0]
        run = whole.encode_ordinary(f"assistant\n{answer}")
        head = whole.encode("<|im_start|>user\nhow?<|im_end|>\n<|im_start|>", allowed_special="all")
        assert ids.tolist() == [*head, *run, SPECIAL["<|im_end|>"], *whole.encode_ordinary("\n")]
        assert whole.decode(ids[mask].tolist()).strip() == answer.strip() + "<|im_end|>"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"pat_str": None}, "which alone does not say what its ids are: .* has no 'pat_str' \\(the regular expression"),
        ({"added_tokens_decoder": None}, "has no 'added_tokens_decoder' \\(the control tokens by id"),
        (
            {"pat_str": "("},
            "is not a SentencePiece model or a tiktoken rank file that can be used: tiktoken cannot load",
        ),
        ({"added_tokens_decoder": {"7": "<x>"}}, "must be a table of tokens by id, .* it is {'7': '<x>'}"),
        ({"added_tokens_decoder": {"x": {"content": "<x>"}}}, "must be a table of tokens by id"),
        ({"added_tokens_decoder": {"7": {"token": "<x>"}}}, "must be a table of tokens by id"),
        ({"added_tokens_decoder": ["<x>"]}, "must be a table of tokens by id, .* it is \\['<x>'\\]"),
        ({"added_tokens_decoder": {"7": {"content": "<x>"}}}, "the ids \\[7\\] are both ranks and control tokens"),
    ],
)
def test_a_rank_file_needs_what_it_does_not_say(tmp_path: Path, config: dict[str, object], complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint):
        TextTokenizer(TokenizerSpec(rank_folder(tmp_path, **config)))


# --- which file, and what it is --------------------------------------------------------------------------------------


def test_kinds_are_told_apart_by_what_is_in_the_file(tmp_path: Path) -> None:
    assert Ranks.looks_like(b"IQ== 0\nIg== 1\n")
    assert Ranks.looks_like(b"IQ== 0\r\nIg== 1")
    assert not any(
        Ranks.looks_like(raw) for raw in (b"", b"\n\x0e\n\x05<unk>", b"IQ== 0\nnot ranks\n", trained("unigram"))
    )
    for raw in (b"", b"neither", b"IQ== 0\nIg== 1\n"):
        (tmp_path / "tokenizer.model").write_bytes(raw)
        (tmp_path / "tokenizer_config.json").write_text('{"pat_str": ".", "added_tokens_decoder": {}}')
        with pytest.raises(RecipeError, match="is not a SentencePiece model or a tiktoken rank file that can be used"):
            TextTokenizer(TokenizerSpec(tmp_path))


def test_a_tokenizer_json_comes_first_and_a_file_may_be_named(tmp_path: Path) -> None:
    folder = piece_folder(tmp_path)
    both = rank_folder(tmp_path / "both", name="a.tiktoken")
    (both / "b.model").write_bytes(trained("unigram"))
    with pytest.raises(
        RecipeError, match=r"no tokenizer\.json but a\.tiktoken, b\.model, and only one .* Name that file"
    ):
        TextTokenizer(TokenizerSpec(both))
    assert TextTokenizer(TokenizerSpec(both / "a.tiktoken")).encode(["a"])[0].tolist() == encoding("llama 3").encode(
        "a"
    )
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    assert TextTokenizer(TokenizerSpec(folder)).encode(["a"])[0].tolist() == [0]


def test_a_broken_tokenizer_json_is_refused(tmp_path: Path) -> None:
    for raw in ("{", "[]", '{"model": {"type": "Unheard"}}'):
        (tmp_path / "tokenizer.json").write_text(raw)
        with pytest.raises(RecipeError, match=r"is not a tokenizer\.json that can be used: .* Mend it"):
            TextTokenizer(TokenizerSpec(tmp_path))


def test_the_extra_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [piece_folder(tmp_path / "pieces"), rank_folder(tmp_path / "ranks")]
    for name, folder in zip(("sentencepiece", "tiktoken"), folders, strict=True):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(RecipeError, match=r"needs the library that defines its ids .* pip install -e '.\[con"):
            TextTokenizer(TokenizerSpec(folder))


def test_fingerprints_hold_all_that_decides_ids(tmp_path: Path) -> None:
    prints = [
        TextTokenizer(TokenizerSpec(piece_folder(tmp_path / "a", name))).fingerprint
        for name in ("unigram", "bpe as Gemma")
    ]
    config = {"added_tokens_decoder": {"5000": {"content": "<x>"}}}
    prints.append(TextTokenizer(TokenizerSpec(piece_folder(tmp_path / "b", "unigram", config))).fingerprint)
    prints += [TextTokenizer(TokenizerSpec(rank_folder(tmp_path / one, one))).fingerprint for one in PATTERNS]
    prints.append(TextTokenizer(TokenizerSpec(rank_folder(tmp_path / "c", added_tokens_decoder={}))).fingerprint)
    assert len({json.dumps(one, sort_keys=True) for one in prints}) == len(prints)


def test_a_model_falls_back_to_its_own_library_on_any_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = TextTokenizer(TokenizerSpec(piece_folder(tmp_path)))

    class Wrong:
        def encode_batch_flat(self, texts: list[str], **_: bool) -> tuple[bytes, bytes]:
            return b"\0\0\0\0" * len(texts), np.arange(len(texts) + 1, dtype="<u8").tobytes()

    tokenizer._fast = Wrong()
    tokenizer.compare(["some text"], "the first documents")
    assert tokenizer.library == "sentencepiece"
    assert "fastokens and sentencepiece disagree on the first documents" in caplog.text
    assert tokenizer.encode(["some text"])[0].tolist() == processor("bpe as Llama 2").encode("some text")


def test_rows_that_are_no_text_are_still_refused(tmp_path: Path) -> None:
    assert Text({}, Context(16, TokenizerSpec(piece_folder(tmp_path)))).measure([{"text": 3}]).faults
