"""What of a written conversation is the assistant's: as the template marks it, or by writing it in steps.

A turn of the assistant is what the model has to write: from where the generation prompt ends to the token that ends the
turn, which is included. Where the template does not say so itself, that is found by writing the beginning of the
conversation with and without the turn. A template that writes a beginning otherwise than within the whole is refused
for that conversation; nothing is guessed.
"""

import re
from typing import TypeAlias

from modalities.talk import Talk, unused_letters
from modalities.template import RenderError, Template

Spans: TypeAlias = list[tuple[int, int]]
"""Characters `[start, end)`, in ascending order."""


class Turns:
    """Finds what the assistant writes.

    Args:
        template: writes conversations.
        control: finds control tokens in what it has written.
        last: only the last turn.
    """

    def __init__(self, template: Template, control: re.Pattern[str], *, last: bool) -> None:
        self._template, self._control, self._last = template, control, last
        self._closing = self._learn()

    def find(self, talk: Talk) -> tuple[str, Spans]:
        """Write a conversation that has a turn of the assistant, and say which characters are to be trained.

        Raises:
            RenderError: the template cannot write it, or the turns cannot be told apart exactly.
        """
        return self._marked(talk) if self._template.marks_turns(talk) else self._stepwise(talk)

    def _marked(self, talk: Talk) -> tuple[str, Spans]:
        """By `{% generation %}`; a control token right behind such a part ends the turn and belongs to it."""
        letters = unused_letters(talk)
        marks = next(letters), next(letters)
        parts: list[str] = []
        spans: Spans = []
        at, opened = 0, -1
        for part in re.split(f"([{''.join(marks)}])", self._template.render(talk, marks=marks)):
            if part not in marks:
                parts.append(part)
                at += len(part)
                continue
            if (part == marks[0]) != (opened < 0):
                raise RenderError("the {% generation %} tags of the chat template enclose one another")
            if part == marks[1]:
                spans.append((opened, at))
            opened = at if part == marks[0] else -1
        text = "".join(parts)
        spans = [(start, self._with_end(text, start, end)) for start, end in spans]
        turns = talk.assistants()
        if self._last and len(spans) != len(turns):
            raise RenderError(
                f"the chat template marks {len(spans)} parts for {len(turns)} turns of the assistant, so the last "
                "turn (loss = 'last') cannot be told apart. Use loss = 'all', or a template with one part a turn"
            )
        return text, [span for span in (spans[-1:] if self._last else spans) if span[0] < span[1]]

    def _with_end(self, text: str, start: int, end: int) -> int:
        """Where a marked part ends, with the token that ends the turn where it is not yet inside."""
        if any(token.end() == end for token in self._control.finditer(text, start, end)):
            return end
        following = self._control.match(text, end)
        return following.end() if following else end

    def _stepwise(self, talk: Talk) -> tuple[str, Spans]:
        """By writing the conversation up to every turn, and with it."""
        text = self._template.render(talk)
        turns = talk.assistants()
        spans: Spans = []
        for turn in turns[-1:] if self._last else turns:
            start = self._begin(talk, turn, text)
            if spans and start < spans[-1][1]:
                raise RenderError(f"the chat template lets message {turn} begin within the turn before it")
            spans.append((start, self._end(talk, turn, text, start)))
        return text, [span for span in spans if span[0] < span[1]]

    def _begin(self, talk: Talk, turn: int, text: str) -> int:
        """Where a turn begins: behind everything before it and the generation prompt."""
        try:
            before = self._template.render(talk.first(turn), prompt=True)
        except RenderError as error:
            raise RenderError(f"what comes before message {turn} cannot be written alone: {error}") from error
        if not text.startswith(before):
            at = next((i for i, pair in enumerate(zip(text, before, strict=False)) if pair[0] != pair[1]), len(text))
            raise RenderError(
                f"the chat template writes what comes before message {turn} otherwise alone than within the whole "
                f"conversation ({before[at : at + 30]!r} against {text[at : at + 30]!r} at character {at}), so what "
                "the assistant wrote cannot be told apart exactly. Use a template with {% generation %}"
                + ("" if self._last else ", or loss = 'last'")
            )
        return len(before)

    def _end(self, talk: Talk, turn: int, text: str, start: int) -> int:
        """Where a turn ends: with its last control token if only white space follows, which separates turns."""
        whole = turn + 1 == len(talk.messages)
        through = text if whole else self._template.render(talk.first(turn + 1))
        if len(through) >= start and text.startswith(through):
            last = max((token.end() for token in self._control.finditer(text, start, len(through))), default=start)
            return last if last > start and not text[last : len(through)].strip() else len(through)
        first = self._control.search(text, start)
        if first and first[0] == self._closing:  # nothing but text until the turn is over
            return first.end()
        raise RenderError(
            f"the chat template writes message {turn} otherwise at the end of a conversation than within it, and no "
            "single token ends it, so what the assistant wrote cannot be told apart exactly. Use a template with "
            "{% generation %}" + ("" if self._last else ", or loss = 'last'")
        )

    def _learn(self) -> str | None:
        """The token that ends a turn of the assistant: the last one of a short conversation, if there is one."""
        talk = Talk([{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}], None)
        try:
            text = self._template.render(talk)
        except RenderError:
            return None
        tokens = list(self._control.finditer(text, text.find("answer")))
        return tokens[0][0] if len(tokens) == 1 and not text[tokens[0].end() :].strip() else None
