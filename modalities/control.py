"""Control tokens in conversations: the template's own are control ids, those that messages spell are text.

Nearly no message spells one. Then the written conversation is encoded as it is, with control tokens, as `transformers`
does. Where one does, letters that the row does not have stand for what it spells while the template works, so that the
template's own tokens can be told apart exactly; these get private names, and the tokenizer knows them by no others.
Everything keeps its length, so characters are counted alike in all forms of a text.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from modalities.encoder import EncodeError, Encoder, Ints
from modalities.sequences import Ids
from modalities.talk import Talk, unused_letters
from modalities.template import RenderError, Template
from modalities.tokenizer import TextTokenizer
from modalities.turns import Spans, Turns

Sample: TypeAlias = tuple[Ids, NDArray[np.bool_]]
"""Token ids, and which of them are trained."""


@dataclass(frozen=True, slots=True)
class Written:
    """A conversation as its template wrote it.

    Attributes:
        text: what is in it.
        spans: characters of it that are trained.
        private: the same with private names for the template's control tokens, where these must be told apart.
    """

    text: str
    spans: Spans
    private: str | None


class Writer:
    """Writes conversations and encodes them.

    Args:
        tokenizer: encodes.
        template: writes.
        last: train the assistant's last turn alone.
    """

    def __init__(self, tokenizer: TextTokenizer, template: Template, *, last: bool) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._turns = Turns(template, tokenizer.special, last=last)

    def write(self, talk: Talk, *, spells: bool) -> Written:
        """Write a conversation that has a turn of the assistant.

        Args:
            talk: the conversation.
            spells: whether one of its strings spells a control token.

        Raises:
            RenderError: the template cannot write it, or not in a way that keeps control tokens apart.
        """
        if not spells:
            text, spans = self._turns.find(talk)
            return Written(text, spans, self._hidden(text) if self._tokenizer.hidden else None)
        disguised, undo = self._disguise(talk)
        written, spans = self._turns.find(disguised)
        text = undo(written)
        if text != self._template.render(talk):
            raise RenderError(
                "it spells a control token, and the chat template does more with it than write it, so it cannot be "
                "told from the template's own. Remove the token from the row"
            )
        return Written(text, spans, undo(self._hidden(written)))

    def encode(self, written: Sequence[Written]) -> list[Sample]:
        """Encode conversations: ids, and which of them are trained: those that share a character with a span.

        One call of the tokenizer for all conversations but those that spell control tokens, which need another one.

        Raises:
            EncodeError: the tokenizer fails on one of them.
        """
        out: dict[int, Sample] = {}
        plain = [i for i, one in enumerate(written) if one.private is None]
        apart = [i for i, one in enumerate(written) if one.private is not None]
        for chosen in (plain, apart):
            if chosen:
                encoder = self._tokenizer if chosen is plain else self._tokenizer.private
                try:
                    found = self._by_width([written[i] for i in chosen], encoder)
                except EncodeError as error:
                    raise EncodeError(chosen[error.text], error.reason) from error
                for i, sample in zip(chosen, found, strict=True):
                    out[i] = sample or _by_place(written[i], encoder)
        return [out[i] for i in range(len(written))]

    def compare(self, written: Sequence[Written]) -> None:
        """Compare the libraries of the tokenizer on conversations."""
        texts = [one.text for one in written if one.private is None]
        self._tokenizer.compare(texts, "the first conversations of a source", special=True)

    def _by_width(self, written: Sequence[Written], encoder: Encoder) -> list[Sample | None]:
        """Widths of tokens say where they are; None for a text that the tokenizer does not cut as it is."""
        widths = self._tokenizer.widths
        if widths is None:
            return [None] * len(written)
        flat, offsets = encoder.encode([one.private or one.text for one in written], special=True)
        out: list[Sample | None] = []
        for i, one in enumerate(written):
            ids = flat[offsets[i] : offsets[i + 1]]
            ends = np.cumsum(widths[ids])
            size = len(one.text) if one.text.isascii() else len(one.text.encode())
            exact = encoder.defining.as_is(one.text) and size == (ends[-1] if len(ends) else 0)
            mask = _trained(ends - widths[ids], ends, _in_bytes(one.text, one.spans)) if exact else None
            out.append(None if mask is None else (ids, mask))
        return out

    def _disguise(self, talk: Talk) -> tuple[Talk, Callable[[str], str]]:
        """Letters that the conversation does not have, in place of the control tokens that it spells; and the way back.

        Every token gets a letter of its own, repeated so that its length stays.
        """
        letters, unused = dict[str, str](), unused_letters(talk)

        def disguise(found: re.Match[str]) -> str:
            token = found[0]
            if token not in letters:
                letters[token] = next(unused)
            return letters[token] * len(token)

        disguised = talk.mapped(lambda text: self._tokenizer.special.sub(disguise, text))
        tokens = {letter * len(token): token for token, letter in letters.items()}
        found = re.compile("|".join(tokens))
        return disguised, lambda text: found.sub(lambda one: tokens[one[0]], text)

    def _hidden(self, text: str) -> str:
        hidden = self._tokenizer.hide(text)
        if hidden is None:
            raise RenderError(
                "it holds letters of private Unicode planes in an order that stands for a control token here. "
                "Remove them from the row"
            )
        return hidden


def _by_place(written: Written, encoder: Encoder) -> Sample:
    """The library that defines the ids says where tokens are; slower."""
    ids, starts, ends = encoder.defining.locate(written.private or written.text)
    return ids, _trained(starts, ends, written.spans)


def _trained(starts: Ints, ends: Ints, spans: Spans) -> NDArray[np.bool_]:
    """Tokens that share a place with a span; `starts` and `ends` ascend."""
    trained = np.zeros(len(starts), bool)
    for start, end in spans:
        trained[np.searchsorted(ends, start, side="right") : np.searchsorted(starts, end, side="left")] = True
    return trained


def _in_bytes(text: str, spans: Spans) -> Spans:
    """Spans of characters as spans of bytes."""
    if text.isascii():
        return spans
    out: Spans = []
    letter, byte = 0, 0
    for start, end in spans:
        byte += len(text[letter:start].encode())
        out.append((byte, byte := byte + len(text[start:end].encode())))
        letter = end
    return out
