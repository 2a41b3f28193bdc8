"""Tokenizers of the Hugging Face kind: a `tokenizer.json`, whose ids the library `tokenizers` defines."""

import functools
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from modalities.encoder import Ints
from modalities.sequences import Ids


class Hub:
    """A `tokenizer.json`.

    Args:
        raw: what it holds.

    Raises:
        ValueError: it is no valid JSON, or `tokenizers` cannot load it.
    """

    name, slower = "tokenizers", 50

    def __init__(self, raw: str) -> None:
        try:
            tree = json.loads(raw)
            if tree["model"].get("dropout"):
                raise ValueError("its BPE dropout makes ids random; set dropout to null")
            if tree.get("truncation") or tree.get("padding"):  # no document may be cut or filled up
                raw = json.dumps({**tree, "truncation": None, "padding": None}, ensure_ascii=False)
            self._json = raw
            self._ready = {False: self._load(special=False)}
            added: list[dict[str, Any]] = tree.get("added_tokens") or []
            self.added = {token["content"]: int(token["id"]) for token in added}
            self.special = {token["content"]: int(token["id"]) for token in added if token.get("special")}
        except Exception as error:  # `tokenizers` raises plain exceptions
            raise ValueError(str(error)) from error
        for token, number in self.added.items():
            if (found := self._ready[False].token_to_id(token)) != number:
                raise ValueError(f"its added token {token!r} says id {number}, but `tokenizers` gives it {found}")

    def id_of(self, token: str) -> int | None:
        return self.added[token] if token in self.added else self._ready[False].token_to_id(token)

    def encode(self, texts: Sequence[str], special: bool) -> list[Ids]:
        encodings = self._tokenizer(special).encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.int32) for one in encodings]

    def locate(self, text: str) -> tuple[Ids, Ints, Ints]:
        encoding = self._tokenizer(special=True).encode(text, add_special_tokens=False)
        bounds = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
        return np.asarray(encoding.ids, np.int32), bounds[:, 0], bounds[:, 1]

    def as_is(self, text: str) -> bool:
        return text.isascii() or not self._parsed["nfc"] or unicodedata.is_normalized("NFC", text)

    @property
    def widths(self) -> Ints | None:
        return self._parsed["widths"]

    def renamed(self, names: Mapping[str, str]) -> "Hub":
        """The same tokenizer with other names for its control tokens: in the added tokens, vocabulary and merges.

        Merges that would make a control token out of letters are left out: no text can become one.
        """
        tree = json.loads(self._json)
        tree["post_processor"] = None
        for token in tree["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = tree["model"]
        if isinstance(model["vocab"], list):
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        else:
            model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if model.get("merges"):
            pairs = ((pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"])
            model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
        return Hub(json.dumps(tree))

    def fast(self) -> Any:
        import fastokens

        return fastokens.Tokenizer.from_json_str(self._json)

    def _tokenizer(self, special: bool) -> Tokenizer:
        """One instance for each way to read control tokens, since threads share it."""
        if special not in self._ready:
            self._ready[special] = self._load(special)
        return self._ready[special]

    def _load(self, special: bool) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self._json)
        tokenizer.encode_special_tokens = not special
        tokenizer.post_processor = None  # it would move the ends of tokens off white space
        return tokenizer

    @functools.cached_property
    def _parsed(self) -> dict[str, Any]:
        """Whether text is brought into form NFC first, and the bytes that each id stands for, where that is known.

        It is known for byte-level BPE, whose tokens are written with one letter a byte.
        """
        tree = json.loads(self._json)
        model, normalizers = tree["model"], list(_steps(tree.get("normalizer"), "normalizers"))
        steps = [step["type"] for step in _steps(tree.get("pre_tokenizer"), "pretokenizers")]
        affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        nfc = [step["type"] for step in normalizers] == ["NFC"]
        if model.get("type") != "BPE" or affixes or "ByteLevel" not in steps or (normalizers and not nfc):
            return {"nfc": nfc, "widths": None}
        tokens = {**model["vocab"], **self.added}
        widths = np.zeros(max(tokens.values()) + 1, np.int64)
        for token, number in model["vocab"].items():
            widths[number] = len(token)
        for token, number in self.added.items():
            widths[number] = len(token.encode())
        return {"nfc": nfc, "widths": widths}


def _steps(tree: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, however deep they are nested."""
    if tree is None:
        return
    if tree["type"] == "Sequence":
        for step in tree[inner]:
            yield from _steps(step, inner)
    else:
        yield tree
