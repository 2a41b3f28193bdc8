"""SentencePiece models (`tokenizer.model`), whose ids the library `sentencepiece` defines.

A conversion to a tokenizer.json is used for speed alone, and only where it is exact. It is not for Unigram: both
libraries look for the best-scored cut, but `sentencepiece` adds scores in 32 bits and `tokenizers` in 64, so that ties
("==============", 0.2 % of real documents) fall differently. Nor with a table of normalisations (`nmt_nfkc`):
`tokenizers` applies it to whole graphemes and loses combining marks. Such models are encoded by `sentencepiece` itself.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modalities.encoder import Ints, encode_runs, runs, spelled
from modalities.sequences import Ids
from zephon.errors import RecipeError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # types of pieces in the model's file
_BPE = 2  # type of model
_BLANK = "\u2581"


class Pieces:
    """A SentencePiece model, and the tokens that a tokenizer_config.json adds to it.

    Control tokens are the model's own control pieces, its unknown piece, and what the config marks as special. They
    have their ids where control tokens count; what is between two of them is encoded by itself, with the blank that
    the model puts before every text.

    Args:
        raw: bytes of the model.
        added: tokens by id, as `added_tokens_decoder` has them.
        names: other names for control tokens.

    Raises:
        ImportError: the extra `convert` is not installed.
        RecipeError: the config contradicts the model.
        ValueError: no such model.
    """

    name, slower, widths = "sentencepiece", 8, None

    def __init__(self, raw: bytes, added: Mapping[int, Mapping[str, Any]], names: Mapping[str, str] | None = None):
        from sentencepiece import SentencePieceProcessor

        try:
            schema: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")  # generated, without types
        except Exception as error:  # protobuf is missing, or older than what it was generated with
            raise ImportError(str(error)) from error
        self._raw, self._tokens = raw, added
        self._model = schema.ModelProto()
        try:
            self._model.ParseFromString(raw)
        except Exception as error:  # a class of its own in each implementation of protobuf
            raise ValueError(str(error)) from error
        if not self._model.pieces:
            raise ValueError("it has no pieces")
        self.special: dict[str, int] = {
            piece.piece: number for number, piece in enumerate(self._model.pieces) if piece.type in (_UNKNOWN, _CONTROL)
        }
        self.added = dict(self.special)
        for number, token in sorted(added.items()):
            self._add(number, token)
        self._processor: Any = SentencePieceProcessor(model_proto=self._model.SerializeToString())
        if names:
            self.special = {names.get(token, token): number for token, number in self.special.items()}
            self.added = {names.get(token, token): number for token, number in self.added.items()}
        plain = {token: number for token, number in self.added.items() if token not in self.special}
        self._found = {False: spelled(plain), True: spelled(self.added)}

    def id_of(self, token: str) -> int | None:
        number = self.added.get(token, self._processor.piece_to_id(token))
        return number if token in self.added or number != self._processor.unk_id() else None

    def encode(self, texts: Sequence[str], special: bool) -> list[Ids]:
        return encode_runs(texts, self._found[special], self.added, self._plain)

    def locate(self, text: str) -> tuple[Ids, Ints, Ints]:
        ids: list[int] = []
        bounds: list[tuple[int, int]] = []
        for at, part, token in runs(text, self._found[True]):
            if token:
                ids.append(self.added[part])
                bounds.append((at, at + len(part)))
                continue
            pieces = self._processor.encode(part, return_type="proto").pieces
            letters = _letters(part)
            end = len(part)
            found: list[tuple[int, int]] = []
            for piece in reversed(pieces):  # all bytes of a letter stand at the last of them
                end = letters[piece.end] if piece.end > piece.begin else end
                found.append((letters[piece.begin], end))
            ids += [piece.id for piece in pieces]
            bounds += [(at + start, at + end) for start, end in reversed(found)]
        table = np.asarray(bounds, np.int64).reshape(-1, 2)
        return np.asarray(ids, np.int32), table[:, 0], table[:, 1]

    def as_is(self, text: str) -> bool:
        return False

    def renamed(self, names: Mapping[str, str]) -> "Pieces":
        return Pieces(self._raw, self._tokens, names)

    def fast(self) -> Any:
        import fastokens

        return fastokens.Tokenizer.from_json_str(json.dumps(self._converted()))

    @property
    def bos(self) -> str | None:
        """What the model itself writes before a text, if anything."""
        number = self._processor.bos_id()
        return self._processor.id_to_piece(number) if number >= 0 else None

    @property
    def eos(self) -> str | None:
        """What the model itself writes behind a text, if anything."""
        number = self._processor.eos_id()
        return self._processor.id_to_piece(number) if number >= 0 else None

    def _plain(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode(texts, num_threads=1)

    def _add(self, number: int, token: Mapping[str, Any]) -> None:
        """Take one token of the config; a piece of the model that it marks as special becomes a control piece."""
        content, special = token["content"], bool(token.get("special"))
        if any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            raise RecipeError(
                f"tokenizer_config.json gives {content!r} a flag (lstrip, rstrip or single_word) that SentencePiece "
                "does not know. Save the tokenizer as a tokenizer.json, or remove the flag."
            )
        if number < len(self._model.pieces):
            piece = self._model.pieces[number]
            if piece.piece != content:
                raise RecipeError(
                    f"tokenizer_config.json names token {number} {content!r}, but the SentencePiece model has "
                    f"{piece.piece!r} there. Make them agree, or save the tokenizer as a tokenizer.json."
                )
            if not special:
                return
            if piece.type == _USER_DEFINED:
                piece.type = _CONTROL
        self.added[content] = number
        if special:
            self.special[content] = number

    def _converted(self) -> dict[str, Any]:
        """The model as a tokenizer.json.

        Raises:
            ValueError: that could not be exact.
        """
        trainer, normalizer = self._model.trainer_spec, self._model.normalizer_spec
        kinds = {piece.type for piece in self._model.pieces}
        if trainer.model_type != _BPE or normalizer.precompiled_charsmap:
            raise ValueError("a Unigram model or a table of normalisations cannot be converted exactly")
        plain = normalizer.escape_whitespaces and not normalizer.remove_extra_whitespaces
        if not plain or trainer.treat_whitespace_as_suffix or kinds & {_USER_DEFINED, _UNUSED}:
            raise ValueError("its white space or its user-defined pieces cannot be converted exactly")
        if len(self.added) > len(self.special):
            raise ValueError("tokens that are added but not special cannot be converted exactly")
        normal = {piece.piece for piece in self._model.pieces if piece.type == _NORMAL}
        if not {*"<0x123456789ABCDEF>", *"".join(self.special)} <= normal:  # fastokens then finds whole names in text
            raise ValueError("letters of its control tokens and bytes are no pieces")
        names = {number: token for token, number in self.special.items()}
        vocab = {names.get(i, piece.piece): i for i, piece in enumerate(self._model.pieces)}
        steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}]
        if normalizer.add_dummy_prefix:
            steps.insert(0, {"type": "Prepend", "prepend": _BLANK})
        return {
            "version": "1.0",
            "added_tokens": [
                {"id": number, "content": token, "special": True, "normalized": False}
                | {"single_word": False, "lstrip": False, "rstrip": False}
                for token, number in sorted(self.special.items(), key=lambda item: item[1])
            ],
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "model": {
                "type": "BPE",
                "unk_token": names[trainer.unk_id],
                "fuse_unk": True,
                "byte_fallback": trainer.byte_fallback,
                "vocab": vocab,
                "merges": self._merges(),
            },
        }

    def _merges(self) -> list[list[str]]:
        """Pairs of pieces that make a piece, best score first; only normal pieces are ever merged."""
        normal = {piece.piece: (-piece.score, i) for i, piece in enumerate(self._model.pieces) if piece.type == _NORMAL}
        ranked = [
            (*rank, token[:cut], token[cut:])
            for token, rank in normal.items()
            for cut in range(1, len(token))
            if token[:cut] in normal and token[cut:] in normal
        ]
        return [[left, right] for _, _, left, right in sorted(ranked)]


def _letters(text: str) -> list[int]:
    """For every byte of a text in UTF-8, and its end, the number of the letter that begins there (or goes on)."""
    out: list[int] = []
    for number, letter in enumerate(text):
        out += [number] * len(letter.encode())
    return [*out, len(text)]
