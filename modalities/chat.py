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

_CUTS = 2
"""How `_cut` finds its place; another number where it would find another one."""


@dataclass(slots=True)
class _Row:
    """A row on its way: its conversation, what is counted of it, why it is bad, its tokens and which are trained."""

    number: int
    talk: Talk
    fault: str = ""
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

    def until(self, turns: int) -> Talk:
        """The conversation up to so many turns of the assistant, at least one."""
        return self.talk.first(self.talk.assistants()[turns - 1] + 1)

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
            **({"cuts": _CUTS} if self._too_long == "cut" else {}),
            "template": self._template.fingerprint,
            "tokenizer": self._tokenizer.fingerprint,
        }

    def probe(self, rows: Sequence[Row]) -> None:
        """Compare the two tokenizer libraries on the first conversations of the source."""
        found = [self._read(i, row) for i, row in enumerate(rows)]
        self._writer.compare(list(self._written([(one, one.talk) for one in found if one.talk.assistants()]).values()))

    def measure(self, rows: Sequence[Row]) -> Measured:
        """One sample a row. A row without a conversation, or one that cannot be written or told apart, is a fault.

        Raises:
            BadRowError: the tokenizer fails on a row.
        """
        found = [self._read(i, row) for i, row in enumerate(rows)]
        spoken = [one for one in found if one.talk.assistants()]
        samples = self._samples([(one, one.talk) for one in spoken])
        for one in spoken:
            one.sample = samples.get(one.number, one.sample)
        long = [one for one in spoken if one.positions > self._seq_len]
        if self._too_long == "cut":
            self._cut(long)
        elif self._too_long == "drop":
            for one in long:
                one.drop(_LONG)
        for one in found:
            if not one.sample[1][1:].any() and not one.fault and _LONG not in one.counts:
                one.drop(_NONE)
        return Measured(
            range(len(found)),
            [one.positions for one in found],
            [one.sample for one in found],
            {one.number: tuple(one.counts) for one in found if one.counts and not one.fault},
            faults={one.number: one.fault for one in found if one.fault},
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
            return _Row(number, Talk([], None), str(error))
        found = _Row(number, talk)
        everything = "\0".join(itertools.chain(strings(talk.messages), strings(talk.tools)))
        if self._tokenizer.clean(everything) is not None:
            found.talk = talk.mapped(lambda text: self._tokenizer.clean(text) or text)
            found.counts.append(_SURROGATES)
        if self._tokenizer.spelling_special([everything]):
            found.counts.append(_SPELLS)
        return found

    def _written(self, asked: Sequence[tuple[_Row, Talk]]) -> dict[int, Written]:
        """What the template makes of conversations, by number of the row; those that it refuses are faults."""
        out: dict[int, Written] = {}
        for row, talk in asked:
            try:
                out[row.number] = self._writer.write(talk, spells=_SPELLS in row.counts)
            except RenderError as error:
                row.fault = f"{error}. Mend or remove the row."
        return out

    def _samples(self, asked: Sequence[tuple[_Row, Talk]]) -> dict[int, Sample]:
        """Write and encode; by number of the row, without those that are faults."""
        written = self._written(asked)
        try:
            return dict(zip(written, self._writer.encode(list(written.values())), strict=True))
        except EncodeError as error:
            raise BadRowError(list(written)[error.text], f"{error}. Remove the row.") from error

    def _cut(self, rows: Sequence[_Row]) -> None:
        """Leave out whole turns from the end, so that each ends with the assistant's last turn that fits.

        That turn is found by halving, all rows at once: one call of the tokenizer a round. Where the template writes
        less of a turn that others follow, as Qwen 3's does of thoughts, more may be shorter: each is tried in turn.
        """
        fits: dict[int, Sample] = {}
        open_ = [(row, 0, row.turns, self._grows(row)) for row in rows]  # turns that fit, turns that may
        while open_ := [one for one in open_ if one[1] < one[2] and not one[0].fault]:
            tried = [(low + high + 1) // 2 if grows else high for _, low, high, grows in open_]
            samples = self._samples([(one[0], one[0].until(turns)) for one, turns in zip(open_, tried, strict=True)])
            after: list[tuple[_Row, int, int, bool]] = []
            for (row, low, high, grows), turns in zip(open_, tried, strict=True):
                sample = samples.get(row.number)
                if sample and len(sample[0]) - 1 <= self._seq_len:
                    fits[row.number] = sample
                    after.append((row, turns, high, grows))
                else:
                    after.append((row, low, turns - 1, grows))
            open_ = after
        for row in rows:
            if row.number in fits:
                row.sample = fits[row.number]
                row.counts.append(_CUT)
            elif not row.fault:
                row.drop(_LONG)

    def _grows(self, row: _Row) -> bool:
        """Whether what the template writes of each turn stays as it is when others follow."""
        talks = [row.until(turns) for turns in range(1, row.turns + 1)]
        try:
            texts = [self._writer.write(talk, spells=_SPELLS in row.counts).text for talk in talks]
        except RenderError:
            return False
        return all(after.startswith(before) for before, after in itertools.pairwise(texts))
