"""tiktoken rank files (`*.tiktoken`, or the `tokenizer.model` of Llama 3), whose ids the library `tiktoken` defines.

A rank file holds bytes and their ranks, nothing else: how text is cut before (a pattern) and the control tokens must be
said beside it, in tokenizer_config.json. Ids come from `tiktoken` and fastokens, not from a conversion: the one in
`transformers` reads the possessive `{1,3}+` of the cl100k pattern otherwise (184 of 8,595 texts came out differently).
"""

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modalities.encoder import Ints, encode_runs, spelled
from modalities.sequences import Ids

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?")


class Ranks:
    """A rank file with a pattern and control tokens.

    Args:
        raw: the bytes of the file.
        pattern: a regular expression that cuts text into words before anything is merged.
        special: control tokens and their ids.

    Raises:
        ImportError: the extra `convert` is not installed.
        ValueError: the pattern is no regular expression, or ranks and ids do not fit together.
    """

    name, slower = "tiktoken", 3

    def __init__(self, raw: bytes, pattern: str, special: Mapping[str, int]) -> None:
        import tiktoken

        self._raw, self._pattern, self.special, self.added = raw, pattern, special, special
        lines = (line.split() for line in raw.splitlines() if line.strip())
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        if taken := {number for number in special.values() if number in set(ranks.values())}:
            raise ValueError(f"the ids {sorted(taken)} are both ranks and control tokens")
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise ValueError(f"{len(missing)} single bytes have no rank, so not every text can be encoded")
        try:
            self._encoding = tiktoken.Encoding("ranks", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        except BaseException as error:  # a bad pattern is a panic of the native library, which is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ValueError(f"tiktoken cannot load it: {error}") from error
        self.widths: Ints | None = np.zeros(max(*ranks.values(), *special.values()) + 1, np.int64)
        for token, rank in ranks.items():
            self.widths[rank] = len(token)
        for token, number in special.items():
            self.widths[number] = len(token.encode())
        self._ranks = ranks
        self._found = {False: spelled(()), True: spelled(special)}

    @staticmethod
    def looks_like(raw: bytes) -> bool:
        """Whether a file holds ranks: a base64 word and a number in every line (the first 100 are looked at)."""
        lines = raw[:65536].split(b"\n")[:100]
        lines = lines[:-1] if len(lines) > 1 else lines
        return bool(raw) and all(_LINE.fullmatch(line) for line in lines)

    def id_of(self, token: str) -> int | None:
        return self.special.get(token, self._ranks.get(token.encode()))

    def encode(self, texts: Sequence[str], special: bool) -> list[Ids]:
        plain = self._encoding.encode_ordinary
        return encode_runs(texts, self._found[special], self.special, lambda parts: [plain(part) for part in parts])

    def locate(self, text: str) -> tuple[Ids, Ints, Ints]:
        raise AssertionError("tokens of a rank file cut every text as it is, so their widths always say where they are")

    def as_is(self, text: str) -> bool:
        return True

    def renamed(self, names: Mapping[str, str]) -> "Ranks":
        return Ranks(self._raw, self._pattern, {names.get(token, token): at for token, at in self.special.items()})

    def fast(self) -> Any:
        import tempfile

        import fastokens

        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:  # it reads paths only
            file.write(self._raw)
            file.flush()
            return fastokens.Tokenizer.from_tiktoken(file.name, pattern=self._pattern, special_tokens={**self.special})
