"""The tokenizer of a stream: which kind of file it is, what it adds to a document, and what its control tokens are.

Special tokens spelled out in raw text are text, not control ids. BOS and EOS come from the tokenizer's own config.
"""

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np

from modalities.encoder import PROBES, Encoder, Ints, Library, spelled
from modalities.hub import Hub
from modalities.pieces import Pieces
from modalities.ranks import Ranks
from zephon.errors import RecipeError
from zephon.modality import Context
from zephon.recipe import TokenizerSpec

_SURROGATE = re.compile("[\ud800-\udfff]")


class TextTokenizer(Encoder):
    """A tokenizer: a `tokenizer.json`, a SentencePiece model or a tiktoken rank file.

    Args:
        spec: where it lies, and whether to add BOS and EOS.

    Raises:
        RecipeError: no such tokenizer, or one that cannot be used exactly.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        file = _find(spec)
        raw = file.read_bytes()
        self.folder = file.parent
        self.config = _config(self.folder / "tokenizer_config.json")
        self._own, more = _open(file, raw, self.config)
        self._sha256 = hashlib.sha256(raw + json.dumps(more, sort_keys=True).encode() if more else raw).hexdigest()
        self.bos = _edge(spec.bos, "bos", self.config, self._own, file)
        self.eos = _edge(spec.eos, "eos", self.config, self._own, file)
        special = self._own.special
        self.special, self._added = spelled(special), spelled(self._own.added)
        self._letters = sorted({"|" if "|" in one else one[0] for one in special})  # each holds one; text, seldom "|"
        self._names = {token: _name(i, token) for i, token in enumerate(special)}
        self.hidden = self._leaks()
        super().__init__(self._own.renamed(self._names) if self.hidden else self._own)
        self.compare(self._contexts(), "control tokens")

    @staticmethod
    def of(context: Context, who: str) -> "TextTokenizer":
        """The tokenizer of a stream, loaded once for all of its sources; `who` needs it.

        Raises:
            RecipeError: the recipe names none.
        """
        spec = context.tokenizer
        if spec is None:
            raise RecipeError(f"There is no [tokenizer]; {who} needs one.")
        return context.share(("tokenizer", spec), lambda: TextTokenizer(spec))

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Hash of the file, the ids of BOS and EOS, and the library that defines ids; fastokens gives the same ones."""
        library = f"{self._own.name} {version(self._own.name)}"
        return {"sha256": self._sha256, "bos": self.bos, "eos": self.eos, "library": library}

    def id_of(self, token: str) -> int | None:
        """The id of a token, if there is such a one."""
        return self._own.id_of(token)

    def clean(self, text: str) -> str | None:
        """The text with lone surrogates replaced by U+FFFD, or None where there are none (nearly always)."""
        if text.isascii():
            return None
        try:
            text.encode()
        except UnicodeEncodeError:
            return _SURROGATE.sub("\ufffd", text)
        return None

    def spelling_special(self, texts: Sequence[str]) -> list[int]:
        """Which texts spell out a special token. Looks for a letter first: 0.1 us a KB, where two letters take 1 us."""
        found = set[int]()
        for letter in self._letters:
            found.update([i for i, text in enumerate(texts) if letter in text and self.special.search(text)])
        return sorted(found)

    def check_special(self) -> None:
        """Compare the libraries on texts in which control tokens count as such, before conversations are encoded."""
        texts = [*PROBES, *self._contexts()]
        self.compare([self.hide(text) or text for text in texts] if self.hidden else texts, "control tokens", True)

    def _contexts(self) -> list[str]:
        """Texts with every control token."""
        return [f"a {token} b\n{token}c" for token in self._own.special]

    @property
    def widths(self) -> Ints | None:
        """Bytes of text that each id stands for, where tokens cut the text as it is; else None."""
        return self._own.widths

    def hide(self, text: str) -> str | None:
        """The text with private names, just as long, for its control tokens; None where it already spells such names.

        `private` finds the names again, and nothing else: what the text spells afterwards is text.
        """
        if self._private_names.search(text):
            return None
        return self._added.sub(lambda found: self._names.get(found[0], found[0]), text)

    @functools.cached_property
    def private(self) -> Encoder:
        """The same tokenizer with private names for its control tokens; made when it is first needed.

        Raises:
            RecipeError: it would give other ids.
        """
        encoder = self if self.hidden else Encoder(self._own.renamed(self._names))
        texts = [*PROBES, *self._contexts()]
        own, private = self._own.encode(texts, special=True), [self.hide(text) or text for text in texts]
        encoder.compare(private, "control tokens", special=True)
        ids, offsets = encoder.encode(private, special=True)
        for i, text in enumerate(texts):
            if not np.array_equal(own[i], ids[offsets[i] : offsets[i + 1]]):
                raise RecipeError(
                    f"This tokenizer cannot keep control tokens that a text spells apart from its own: {text!r} would "
                    "get other ids. Remove such texts, or use another tokenizer."
                )
        return encoder

    @functools.cached_property
    def _private_names(self) -> re.Pattern[str]:
        return spelled(list(self._names.values()))

    def _leaks(self) -> bool:
        """Whether text that spells a control token would become one all the same.

        A Unigram model has them among its pieces and finds them there, however they are switched off. Such a tokenizer
        is used with private names for its control tokens, which no text spells.
        """
        encoded = self._own.encode(list(self._own.special), special=False)
        return any(number in ids for number, ids in zip(self._own.special.values(), encoded, strict=True))


def _name(number: int, token: str) -> str:
    """A private name for a control token: as long as its own, and the first letter belongs to no other."""
    return chr(0xF0000 + number) + "\U000ffffd" * (len(token) - 1)


def _find(spec: TokenizerSpec) -> Path:
    """The file of a tokenizer: a `tokenizer.json` where there is one, else the only model or rank file."""
    path = spec.path
    if spec.file.is_file():
        return spec.file
    if path.is_file():
        return path
    found = sorted({*path.glob("*.model"), *path.glob("*.tiktoken")}) if path.is_dir() else []
    if len(found) > 1:
        raise RecipeError(
            f"{path} holds no tokenizer.json but {', '.join(file.name for file in found)}, and only one of them can be "
            "meant. Name that file in [tokenizer] path."
        )
    if not found:
        raise RecipeError(
            f"[tokenizer] path must be a folder with a tokenizer.json, or that file; {path} is neither. A folder may "
            "also hold a SentencePiece model (*.model) or a tiktoken rank file (*.tiktoken)."
        )
    return found[0]


def _open(file: Path, raw: bytes, config: dict[str, Any]) -> tuple[Library, Any]:
    """Open a file with the library that defines its ids; the second value is what else decides ids, for its hash."""
    try:
        if file.suffix == ".json":
            return Hub(raw.decode("utf-8")), None
        added = _added(config, file)
        if Ranks.looks_like(raw):
            _complete(config, file)
            special = {token["content"]: number for number, token in added.items()}
            return Ranks(raw, config["pat_str"], special), [config["pat_str"], special]
        pieces = Pieces(raw, added)
        for which, token in (("bos_token", pieces.bos), ("eos_token", pieces.eos)):
            config.setdefault(which, token)
        return pieces, added
    except ImportError as error:
        raise RecipeError(
            f"{file} is no tokenizer.json, so it needs the library that defines its ids ({error}). "
            "Install it with: pip install -e '.[convert]' in a checkout."
        ) from error
    except RecipeError:
        raise
    except ValueError as error:
        known = "a tokenizer.json" if file.suffix == ".json" else "a SentencePiece model or a tiktoken rank file"
        raise RecipeError(f"{file} is not {known} that can be used: {error}. Mend it, or name another.") from error


def _added(config: dict[str, Any], file: Path) -> dict[int, dict[str, Any]]:
    """The tokens by id that tokenizer_config.json adds to those of a file."""
    found = config.get("added_tokens_decoder", {})
    try:
        added = {int(number): token for number, token in found.items()}
        if all(isinstance(token["content"], str) for token in added.values()):
            return added
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise RecipeError(
        f"added_tokens_decoder of tokenizer_config.json beside {file} must be a table of tokens by id, as "
        f'{{"100257": {{"content": "<|endoftext|>"}}}}, it is {found!r:.200}. The ids of its tokens would be a guess.'
    )


def _complete(config: dict[str, Any], file: Path) -> None:
    """A rank file says neither how text is cut into words nor what the control tokens are."""
    needed = {
        "pat_str": "the regular expression that tiktoken is given as pat_str",
        "added_tokens_decoder": 'the control tokens by id, as {"100257": {"content": "<|endoftext|>"}}; {} for none',
    }
    for key, meaning in needed.items():
        if key not in config:
            raise RecipeError(
                f"{file} is a tiktoken rank file, which alone does not say what its ids are: tokenizer_config.json "
                f"beside it has no {key!r} ({meaning}). Take it from the model's own code and write it there."
            )


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise RecipeError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise RecipeError(f"{file} must be a JSON object, it is {config!r:.40}.")
    return cast(dict[str, Any], config)


def _edge(wanted: bool | None, which: str, config: dict[str, Any], library: Library, file: Path) -> int | None:
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
    if not isinstance(content, str):
        raise RecipeError(
            f"{which}_token in tokenizer_config.json beside {file} must be a token, it is {content!r:.40}."
        )
    number = library.id_of(content)
    if number is None:
        raise RecipeError(f"tokenizer_config.json names {content!r} as {which}_token, but {file} has no such token.")
    return number
