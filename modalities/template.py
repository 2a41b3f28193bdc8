"""Chat templates: the program beside a tokenizer that writes a conversation as one text.

Templates are written in Jinja and made for `transformers`; they are run in the same environment, with two exceptions.
What would make data depend on more than the row is left out: the clock (`strftime_now`), the filter `random` and the
function `lipsum`. A template that only asks whether there is a clock goes its other way.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Template as Compiled
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from modalities.talk import Talk
from zephon.errors import RecipeError

_START, _END = "zephon_generation_start", "zephon_generation_end"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CAPTURES = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)


class RenderError(ValueError):
    """A template cannot write a conversation; says why."""


class Template:
    """The chat template of a tokenizer.

    Args:
        folder: where `chat_template.jinja` (and `additional_chat_templates/`) may lie; these come first.
        config: what tokenizer_config.json says: `chat_template`, and the tokens that a template may name.

    Raises:
        RecipeError: there is no template, or it cannot be used.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._where = folder
        self._sources = _sources(folder, config)
        self._variables = {name: token for name in _NAMED if (token := _content(config.get(name))) is not None}
        self._environment = _environment()
        self._compiled = {name: self._compile(name, source) for name, source in self._sources.items()}
        self._parts = False
        self._parts = self._wants_parts()

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides what is written: the templates, and the tokens they are given."""
        said = json.dumps([self._sources, self._variables], sort_keys=True)
        return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()

    def marks_turns(self, talk: Talk) -> bool:
        """Whether the template for this conversation marks the assistant's turns with `{% generation %}`."""
        return self._compiled[self._chosen(talk)][1]

    def render(self, talk: Talk, *, prompt: bool = False, marks: tuple[str, str] = ("", "")) -> str:
        """Write a conversation.

        Args:
            talk: the conversation.
            prompt: whether to add what the assistant's next turn begins with (`add_generation_prompt`).
            marks: what to write before and behind what `{% generation %}` encloses.

        Raises:
            RenderError: the template refused, or failed.
        """
        compiled, _ = self._compiled[self._chosen(talk)]
        messages = [_in_parts(message) for message in talk.messages] if self._parts else talk.messages
        given = {**self._variables, _START: marks[0], _END: marks[1]}
        try:
            return compiled.render(
                messages=messages, tools=talk.tools, documents=None, add_generation_prompt=prompt, **given
            )
        except Exception as error:  # a template is a program: it may fail in any way
            why = f"{error}".rstrip(".") or type(error).__name__
            if "strftime_now" in why:
                why += " (data must not depend on the day they are read: write a date into the template)"
            raise RenderError(f"the chat template cannot write it: {why}") from error

    def _chosen(self, talk: Talk) -> str:
        return "tool_use" if talk.tools is not None and "tool_use" in self._compiled else "default"

    def _compile(self, name: str, source: str) -> tuple[Compiled, bool]:
        """Compile a template; the second value is whether it marks the assistant's turns."""
        try:
            tree = self._environment.parse(source)
            compiled = self._environment.from_string(source)
        except TemplateSyntaxError as error:  # also: an unknown filter
            raise RecipeError(f"Chat template {name!r} of {self._where} cannot be used: {error}.") from error
        for kind in _CAPTURES:
            if any(_is_mark(inner) for block in tree.find_all(kind) for inner in block.find_all(nodes.Name)):
                raise RecipeError(
                    f"Chat template {name!r} of {self._where} has {{% generation %}} inside a macro, call, filter or "
                    "set block, where it may still change before it is written. Move the tag out of the block."
                )
        return compiled, any(_is_mark(inner) for inner in tree.find_all(nodes.Name))

    def _wants_parts(self) -> bool:
        """Whether the template wants content as a list of parts; found out by trying.

        Raises:
            RecipeError: it writes the content of messages in neither form, or asks for the time.
        """
        words = {"user": "Xq4question", "assistant": "Xq4answer"}
        silent = False
        for parts in (False, True):
            self._parts = parts
            try:
                text = self.render(Talk([{"role": role, "content": word} for role, word in words.items()], None))
            except RenderError as error:
                if "strftime_now" in str(error):
                    raise RecipeError(f"{self._where}: {error}.") from error
                continue
            if all(word in text for word in words.values()):
                return parts
            silent = True
        if silent:
            raise RecipeError(
                f"The chat template of {self._where} does not write what a user and an assistant say, neither as a "
                "string nor as a list of parts. Use the template that the model was made for."
            )
        return False  # it refuses the trial conversation; rows will say why


def _is_mark(name: nodes.Name) -> bool:
    return name.name == _START


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message if content is None else {**message, "content": [{"type": "text", "text": content}]}


def _content(token: object) -> str | None:
    """A token of the config, which may be a string or an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates by name, as `transformers` finds them: files first, then tokenizer_config.json.

    Raises:
        RecipeError: there is none, none that is the default, or one cannot be read.
    """
    files = {path.name.removesuffix(".jinja"): path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files = {"default": folder / "chat_template.jinja"} | files
    found: Any = {name: _text(path) for name, path in files.items()}
    if not found:
        found = config.get("chat_template")
        if isinstance(found, list):
            found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        elif isinstance(found, str):
            found = {"default": found}
    if not isinstance(found, dict) or not all(isinstance(one, str) for pair in found.items() for one in pair):
        raise RecipeError(
            f"{folder} has no chat template, and a chat source needs one: neither chat_template.jinja nor a "
            "chat_template in tokenizer_config.json. Take it from the model's chat variant, or use modality 'text'."
        )
    if "default" not in found:
        raise RecipeError(
            f"{folder} has the chat templates {sorted(found)}, but none named 'default', so nothing says which one is "
            "meant. Name one of them 'default'."
        )
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"The chat template {path} cannot be read: {error}. Put a whole one in its place.") from error


class _Generation(Extension):
    """The tag `{% generation %}`, which encloses what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in (_START, _END))
        return [start, nodes.Scope(body, lineno=line), end]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: letters as they are, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
