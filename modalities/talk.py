"""A conversation: messages and tools as a row has them, checked, in the form that chat templates expect."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from zephon.errors import nearest

Message: TypeAlias = dict[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which data sets keep what an assistant thought; templates read the first or the second."""


class BadTalkError(ValueError):
    """A row holds no conversation that can be used; says why."""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation.

    Attributes:
        messages: each an object with `role`, `content` and whatever else the template reads.
        tools: descriptions of tools, or None where the row has none.
    """

    messages: list[Message]
    tools: list[Any] | None

    def first(self, count: int) -> "Talk":
        """Its first messages alone."""
        return Talk(self.messages[:count], self.tools)

    def mapped(self, change: Callable[[str], str]) -> "Talk":
        """The same conversation with every string in it changed, keys of inner objects included."""
        messages = [{key: _mapped(value, change) for key, value in message.items()} for message in self.messages]
        return Talk(messages, _mapped(self.tools, change))

    def assistants(self) -> list[int]:
        """The numbers of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]


def read_talk(row: Mapping[str, object], messages: str, tools: str) -> Talk:
    """The conversation of a row.

    Content that comes in parts of type text is joined to one string. Keys without a value count as missing, and what an
    assistant thought is found under all the names that templates read, both as in `transformers`.

    Args:
        row: the row.
        messages: the field with the list of messages.
        tools: the field with the list of tools, which a row need not have.

    Raises:
        BadTalkError: says what the row has, what is expected and what to do.
    """
    found = row.get(messages)
    if not isinstance(found, list):
        raise BadTalkError(_complaint(row, messages))
    described = row.get(tools)
    if described is not None and not (isinstance(described, list) and all(isinstance(one, dict) for one in described)):
        raise BadTalkError(
            f"field {tools!r} must be a list of objects, it is {described!r:.60}. Templates read tools as JSON "
            "objects: parse them, or name another field with tools = in the recipe."
        )
    return Talk([_message(i, one) for i, one in enumerate(found)], described)


def _complaint(row: Mapping[str, object], field: str) -> str:
    if field in row:
        return (
            f"field {field!r} must be a list of messages, each with role and content; it is {row[field]!r:.60}. "
            "Mend or remove the row."
        )
    fields = str(sorted(row)[:20])[:400]
    return (
        f"there is no field {field!r}; the row has {fields}.{nearest(field, row)} "
        "Name the right field with messages = in the recipe."
    )


def _message(number: int, message: object) -> Message:
    """One message, checked."""
    if not isinstance(message, dict):
        raise BadTalkError(
            f"message {number} must be an object with role and content, it is {message!r:.60}. Mend or remove the row."
        )
    out: Message = {key: value for key, value in message.items() if value is not None}
    if not isinstance(out.get("role"), str):
        raise BadTalkError(
            f"message {number} has no role that is a string; it has {sorted(message)}. A message is "
            '{"role": "user", "content": "..."}: convert the data (from and value are ShareGPT\'s names).'
        )
    if "content" in out:
        out["content"] = _content(number, out["content"])
    elif not out.get("tool_calls"):
        raise BadTalkError(
            f"message {number} ({out['role']}) has neither content nor tool_calls; it has {sorted(message)}. "
            "Mend or remove the row."
        )
    thought = next((out[key] for key in _REASONING if key in out), None)
    return out if thought is None else {"thinking": thought, **out, "reasoning_content": thought}


def _content(number: int, content: object) -> str:
    """The content as one string."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str):
            raise BadTalkError(
                f"the content of message {number} must be a string or a list of "
                f'{{"type": "text", "text": "..."}}; it holds {part!r:.60}. Other parts need another modality.'
            )
    return "".join(text for text in texts if isinstance(text, str))


def strings(value: object) -> Iterator[str]:
    """All strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def unused_letters(talk: Talk) -> Iterator[str]:
    """Letters of the last private plane that no string of a conversation has."""
    text = "".join([*strings(talk.messages), *strings(talk.tools)])
    return (letter for letter in map(chr, range(0x100000, 0x10FFFE)) if letter not in text)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inner, change) for inner in value]
    return value
