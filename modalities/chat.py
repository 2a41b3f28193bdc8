"""Chat: the messages of a row become one sample of token ids, of which the assistant's turns are trained.

The tokenizer's own chat template writes the conversation and alone decides about BOS and EOS. Its control tokens are
control ids; control tokens that messages spell are text. Ids are those of `transformers`' `apply_chat_template`.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modalities.control import Sample, Writer, Written
from modalities.encoder import EncodeError
from modalities.sequences import build, split
from modalities.talk import BadTalkError, Talk, read_talk, strings
from modalities.template import RenderError, Template
from modalities.tokenizer import TextTokenizer
from zephon.modality import BadRowError, Context
from zephon.recipe import SOURCE_KEYS
from zephon.section import Section
from zephon.types import Batch, Measured, Plan, Record, Row

_NONE, _SURROGATES, _SPELLS, _CUT, _LONG = (
    "no assistant turn",
    "surrogates",
    "special tokens in text",
    "cut at a turn",
    "conversation too long",  # "too long" is the packer's word
)


@dataclass(slots=True)
class _Row:
    """A row on its way: its conversation, what is counted of it, and its tokens and which are trained."""

    number: int
    talk: Talk
    counts: list[str] = field(default_factory=list[str])
    sample: Sample = (np.empty(0, np.int32), np.empty(0, np.bool_))

    @property
    def positions(self) -> int:
        return max(0, len(self.sample[0]) - 1)

    @property
    def turns(self) -> int:
        """Turns of the assistant after which something can be left out."""
        turns = self.talk.assistants()
        return len(turns) - (turns[-1:] == [len(self.talk.messages) - 1])

    def drop(self, reason: str) -> None:
        """Deliver nothing of it."""
        self.counts.append(reason)
        self.sample = self.sample[0][:0], self.sample[1][:0]


class Chat:
    """Conversations, written by the chat template of the tokenizer.

    Args:
        options: `messages` and `tools`, names of fields; `loss`, `all` or `last`, which turns of the assistant are
            trained; `too_long`, what happens to more positions than a sequence has: `keep` (it is cut as any document),
            `cut` (turns are left out from the end until it fits) or `drop`.
        context: sequence length, tokenizer, and what the modalities of a stream share.
    """

    family = "tokens"
    builds: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()
    filler = None
    cheap_materialise = True
    on_error = "raise"
    counters = (_NONE, _SURROGATES, _SPELLS, _CUT, _LONG)

    def __init__(self, options: Mapping[str, Any], context: Context) -> None:
        given = Section(options, "modality 'chat':")
        self._messages, self._tools = given.take("messages", str, "messages"), given.take("tools", str, "tools")
        self._loss = given.choice("loss", ["all", "last"], "all")
        self._too_long = given.choice("too_long", ["keep", "cut", "drop"], "keep")
        given.done(SOURCE_KEYS)
        self._seq_len, self._extras = context.seq_len, context.extras
        self._tokenizer = TextTokenizer.of(context, "a chat source")
        self._template: Template = context.share(
            ("chat template", context.tokenizer), lambda: Template(self._tokenizer.folder, self._tokenizer.config)
        )
        self._tokenizer.check_special()
        self._writer = Writer(self._tokenizer, self._template, last=self._loss == "last")

    def fingerprint(self) -> dict[str, Any]:
        return {
            "messages": self._messages,
            "tools": self._tools,
            "loss": self._loss,
            "too_long": self._too_long,
            "template": self._template.fingerprint,
            "tokenizer": self._tokenizer.fingerprint,
        }

    def probe(self, rows: Sequence[Row]) -> None:
        """Compare the two tokenizer libraries on the first conversations of the source."""
        found = [self._read(i, row) for i, row in enumerate(rows)]
        self._writer.compare([self._write(one, one.talk) for one in found if one.talk.assistants()])

    def measure(self, rows: Sequence[Row]) -> Measured:
        """One sample a row.

        Raises:
            BadRowError: a row has no conversation, the template refuses it, its turns cannot be told apart, or the
                tokenizer fails on it.
        """
        found = [self._read(i, row) for i, row in enumerate(rows)]
        spoken = [one for one in found if one.talk.assistants()]
        written = [self._write(one, one.talk) for one in spoken]
        for one, sample in zip(spoken, self._encode(spoken, written), strict=True):
            one.sample = sample
        long = [one for one in spoken if one.positions > self._seq_len]
        if self._too_long == "cut":
            self._cut(long)
        elif self._too_long == "drop":
            for one in long:
                one.drop(_LONG)
        for one in found:
            if not one.sample[1][1:].any() and _LONG not in one.counts:
                one.drop(_NONE)
        return Measured(
            range(len(found)),
            [one.positions for one in found],
            [one.sample for one in found],
            {one.number: tuple(one.counts) for one in found if one.counts},
        )

    def materialise(self, plans: Sequence[Plan]) -> Batch:
        return build(plans, self._seq_len, self._extras)

    def records(self, batch: Batch) -> list[Record]:
        return split(batch)

    def _read(self, number: int, row: Row) -> _Row:
        """The conversation of a row, its strings clean, and what is counted of them."""
        try:
            talk = read_talk(row, self._messages, self._tools)
        except BadTalkError as error:
            raise BadRowError(number, str(error)) from error
        found = _Row(number, talk)
        everything = "\0".join(itertools.chain(strings(talk.messages), strings(talk.tools)))
        if self._tokenizer.clean(everything) is not None:
            found.talk = talk.mapped(lambda text: self._tokenizer.clean(text) or text)
            found.counts.append(_SURROGATES)
        if self._tokenizer.spelling_special([everything]):
            found.counts.append(_SPELLS)
        return found

    def _write(self, row: _Row, talk: Talk) -> Written:
        try:
            return self._writer.write(talk, spells=_SPELLS in row.counts)
        except RenderError as error:
            raise BadRowError(row.number, f"{error}. Mend or remove the row.") from error

    def _encode(self, rows: Sequence[_Row], written: Sequence[Written]) -> list[Sample]:
        try:
            return self._writer.encode(written)
        except EncodeError as error:
            raise BadRowError(rows[error.text].number, f"{error}. Remove the row.") from error

    def _cut(self, rows: Sequence[_Row]) -> None:
        """Leave out whole turns from the end, so that each ends with the assistant's last turn that fits.

        That turn is found by halving, all rows at once: one call of the tokenizer a round.
        """
        fits: dict[int, Sample] = {}
        open_ = [(row, 0, row.turns) for row in rows]  # turns that fit, turns that may
        while open_ := [(row, low, high) for row, low, high in open_ if low < high]:
            tried = [(row, (low + high + 1) // 2) for row, low, high in open_]
            written = [self._write(row, row.talk.first(row.talk.assistants()[turns - 1] + 1)) for row, turns in tried]
            after: list[tuple[_Row, int, int]] = []
            samples = self._encode([row for row, _ in tried], written)
            for (row, low, high), (_, turns), sample in zip(open_, tried, samples, strict=True):
                if len(sample[0]) - 1 <= self._seq_len:
                    fits[row.number] = sample
                    after.append((row, turns, high))
                else:
                    after.append((row, low, turns - 1))
            open_ = after
        for row in rows:
            if row.number in fits:
                row.sample = fits[row.number]
                row.counts.append(_CUT)
            else:
                row.drop(_LONG)
