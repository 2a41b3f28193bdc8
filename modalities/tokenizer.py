"""Exact and fast tokenisation: one native call for many texts.

fastokens encodes 50 times faster than `tokenizers` (0.031 against 1.69 CPU s per Mtoken). It is used only where it
gives the same ids as `tokenizers`, the reference, on probe strings and on the first documents of every source; on any
difference the stream falls back to the reference and says so. Ids are therefore always those of the reference.

Special tokens spelled out in raw text are text, not control ids. BOS and EOS come from the tokenizer's own config.
"""

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Reference

from zephon.errors import RecipeError
from zephon.recipe import TokenizerSpec

logger = logging.getLogger(__name__)

Ids = NDArray[np.int32]

PROBES = (
    "",
    " ",
    "plain words, with punctuation; and numbers 1234567890 3.14159 1,000,000.",
    # normalisation forms
    "caf\u00e9 cafe\u0301 \u212b A\u030a \ufb01 fi \u1e9b\u0323 \u00bd \uff21\uff22\uff23 \u2460",
    # special tokens in text
    "<|endoftext|> <s> </s> <|im_start|>system <|begin_of_text|> [INST] <pad> <unk> <bos> <eos>",
    # runs of white space
    "  two   three    four\ttab\t\ttabs\nline\n\nlines\n\n\n\r\ncarriage\r\r trailing   ",
    " \n \n  \t \u00a0\u2003\u3000\u200b\ufeff mixed blanks",
    # emoji: joined, flags, skin tones, variation selectors
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f1eb\U0001f1f7",
    "\U0001f44d\U0001f3fd \u2764\ufe0f",
    # right to left
    "\u0627\u0644\u0644\u063a\u0629 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea",
    "\u202eabc\u202c \u0661\u0662\u0663",
    # rare scripts
    "\u6f22\u5b57 \u304b\u306a\u30ab\u30ca \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u10e5\u10d0\u10e0 \u1200\u1208 \u13e3\u13b3\u13a9 \u16a0\u16a2 \U00010330\U00010331 \U00012000",
    # long runs without spaces
    "a" * 3000,
    "\u6f22" * 1000,
    "=" * 500 + "-" * 500 + "_" * 300,
    # code, contractions, addresses, control characters
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # comment\n\n\nclass A:\n\tpass\n",
    "don't can't WE'LL I'M it's y'all \u2019s O'Neill 'quoted' \"double\" ``back``",
    "https://example.org/a/b?c=d&e=f#g user@example.org C:\\path\\file.txt",
    "\x00\x01\x1f\x7f\x85\u2028\u2029\ufffd\ufffe\U0010ffff",
)
"""Strings on which fast tokenizers have been seen to differ from the reference."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class TextTokenizer:
    """A tokenizer of the Hugging Face kind (`tokenizer.json`).

    Args:
        spec: where it lies, and whether to add BOS and EOS.

    Raises:
        RecipeError: no such tokenizer, or one that would first have to be converted.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        file = _find(spec)
        raw = file.read_bytes()
        self._json = raw.decode("utf-8")
        self._sha256 = hashlib.sha256(raw).hexdigest()
        self._reference_ready: Reference | None = None
        config = _config(file.parent / "tokenizer_config.json")
        added = {token["content"]: int(token["id"]) for token in json.loads(self._json).get("added_tokens", [])}
        self.bos = _edge(spec.bos, "bos", config, added, file)
        self.eos = _edge(spec.eos, "eos", config, added, file)
        special = [token["content"] for token in json.loads(self._json).get("added_tokens", []) if token.get("special")]
        self._special = re.compile(
            "|".join(re.escape(one) for one in sorted(special, key=len, reverse=True)) or r"(?!)"
        )
        self._hints = sorted({one[:2] for one in special})
        self._fast = self._load_fast()

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Hash of the file and the ids of BOS and EOS; not which library encodes, since the ids are the same."""
        return {"sha256": self._sha256, "bos": self.bos, "eos": self.eos}

    @property
    def library(self) -> str:
        """Which library encodes: `fastokens` or `tokenizers`."""
        return "tokenizers" if self._fast is None else "fastokens"

    def encode(self, texts: Sequence[str]) -> tuple[Ids, NDArray[np.int64]]:
        """Encode texts, without BOS and EOS, in one native call.

        Returns:
            int32 [tokens], the ids of all texts one after the other, and int64 [texts + 1], where each begins.
        """
        if self._fast is None:
            return self._encode_reference(texts)
        ids, offsets = self._fast.encode_batch_flat(list(texts), add_special_tokens=False, split_special_tokens=True)
        return np.frombuffer(ids, "<u4").astype(np.int32, copy=False), np.frombuffer(offsets, "<u8").astype(np.int64)

    def clean(self, text: str) -> str | None:
        """The text with lone surrogates replaced by U+FFFD, or None where there are none (nearly always)."""
        if text.isascii():
            return None
        try:
            text.encode()
        except UnicodeEncodeError:
            return _SURROGATE.sub("\ufffd", text)
        return None

    def spells_special(self, text: str) -> bool:
        """Whether a special token is spelled out in the text. Looks for two-letter hints first: `in` is memchr-fast."""
        return any(hint in text for hint in self._hints) and self._special.search(text) is not None

    def compare(self, texts: Sequence[str], where: str) -> None:
        """Fall back to the reference if the fast library differs on any of `texts`."""
        if self._fast is None or not texts:
            return
        fast, reference = self.encode(texts), self._encode_reference(texts)
        if not (np.array_equal(fast[0], reference[0]) and np.array_equal(fast[1], reference[1])):
            self._fast = None
            logger.warning(
                "fastokens and tokenizers disagree on %s; using tokenizers, which is exact but about 50 times slower. "
                "Please report the tokenizer to the authors of fastokens.",
                where,
            )

    def _load_fast(self) -> Any:
        import fastokens

        try:
            self._fast = fastokens.Tokenizer.from_json_str(self._json)
        except Exception as error:  # whatever the native library raises, the reference still works
            logger.warning("fastokens cannot load this tokenizer (%s); using tokenizers, about 50 times slower.", error)
            return None
        self.compare(PROBES, "probe strings")
        return self._fast

    def _encode_reference(self, texts: Sequence[str]) -> tuple[Ids, NDArray[np.int64]]:
        if self._reference_ready is None:
            self._reference_ready = Reference.from_str(self._json)
            self._reference_ready.encode_special_tokens = True
            self._reference_ready.no_truncation()
            self._reference_ready.no_padding()
        encodings = self._reference_ready.encode_batch_fast(list(texts), add_special_tokens=False)
        parts = [np.asarray(one.ids, dtype=np.int32) for one in encodings]
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return np.concatenate([np.empty(0, np.int32), *parts]), offsets


def _find(spec: TokenizerSpec) -> Path:
    path, file = spec.path, spec.file
    if file.is_file():
        return file
    folder = path if path.is_dir() else path.parent
    models = sorted(folder.glob("*.model")) if folder.is_dir() else []
    if models:
        raise RecipeError(
            f"{folder} holds {models[0].name}, a SentencePiece or tiktoken model, but no tokenizer.json. Convert it "
            f"once: transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})."
        )
    raise RecipeError(f"[tokenizer] path must be a folder with a tokenizer.json, or that file; {path} is neither.")


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise RecipeError(f"{file} is not valid JSON: {error}.") from error


def _edge(wanted: bool | None, which: str, config: dict[str, Any], added: dict[str, int], file: Path) -> int | None:
    """The id of BOS or EOS where it is to be added: where the config defines it, unless the recipe decides."""
    token = config.get(f"{which}_token")
    content = token.get("content") if isinstance(token, dict) else token
    if wanted is False or (wanted is None and content is None):
        return None
    if content is None:
        raise RecipeError(
            f"[tokenizer] {which} = true, but tokenizer_config.json beside {file} defines no {which}_token. "
            f"Name it there, or set {which} = false."
        )
    number = added.get(content, Reference.from_file(str(file)).token_to_id(content) if content not in added else None)
    if number is None:
        raise RecipeError(f"tokenizer_config.json names {content!r} as {which}_token, but {file} has no such token.")
    return number
