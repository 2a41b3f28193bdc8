"""Exact and fast encoding: the library that defines the ids of a tokenizer, and a fast one where it gives the same.

Every kind of tokenizer has a library that defines its ids: `tokenizers` for a tokenizer.json, `sentencepiece` for its
models, `tiktoken` for rank files. fastokens encodes 3 to 50 times faster. It is used only where it gives the same ids
on probe strings and on the first documents of every source; on any difference the stream falls back to the library
that defines them and says so. Ids are therefore always those of the defining library.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from modalities.sequences import Ids

logger = logging.getLogger(__name__)

Ints: TypeAlias = NDArray[np.int64]

COMPARED_CHARS = 2048
"""Of each text on which two libraries are compared: a first batch must not wait for whole books. One of 400,000
characters among the first 64 documents took 0.9 of the 1.0 s to it."""

PROBES = (
    "",
    " ",
    "plain words, with punctuation; and numbers 1234567890 3.14159 1,000,000.",
    # normalisation forms
    "caf\u00e9 cafe\u0301 \u212b A\u030a \ufb01 fi \u1e9b\u0323 \u00bd \uff21\uff22\uff23 \u2460",
    # special tokens in text
    "<|endoftext|> <s> </s> <|im_start|>system <|begin_of_text|> [INST] <pad> <unk> <bos> <eos>",
    # runs of white space
    "  two   three    four\ttab\t\ttabs\nline\n\nlines\n\n\n\r\ncarriage\r\r trailing   ",
    " \n \n  \t \u00a0\u2003\u3000\u200b\ufeff mixed blanks",
    # emoji: joined, flags, skin tones, variation selectors
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f1eb\U0001f1f7",
    "\U0001f44d\U0001f3fd \u2764\ufe0f",
    # right to left
    "\u0627\u0644\u0644\u063a\u0629 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea",
    "\u202eabc\u202c \u0661\u0662\u0663",
    # rare scripts
    "\u6f22\u5b57 \u304b\u306a\u30ab\u30ca \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u10e5\u10d0\u10e0 \u1200\u1208 \u13e3\u13b3\u13a9 \u16a0\u16a2 \U00010330\U00010331 \U00012000",
    # long runs without spaces
    "a" * 3000,
    "\u6f22" * 1000,
    "=" * 500 + "-" * 500 + "_" * 300,
    # code, contractions, addresses, control characters
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # comment\n\n\nclass A:\n\tpass\n",
    "don't can't WE'LL I'M it's y'all \u2019s O'Neill 'quoted' \"double\" ``back``",
    "https://example.org/a/b?c=d&e=f#g user@example.org C:\\path\\file.txt",
    "\x00\x01\x1f\x7f\x85\u2028\u2029\ufffd\ufffe\U0010ffff",
    # what SentencePiece writes for a blank and for bytes
    "\u2581 \u2581\u2581a b\u2581c<0x0A>d <0xFF>",
)
"""Strings on which tokenizers of different libraries have been seen to differ."""


NEVER = re.compile(r"(?!)")
"""Finds nothing."""


class EncodeError(ValueError):
    """A library failed on a text.

    Args:
        text: number of the text among those that were to be encoded.
        reason: what the library said.
    """

    def __init__(self, text: int, reason: str) -> None:
        super().__init__(f"the tokenizer fails on it: {reason}")
        self.text, self.reason = text, reason


class Library(Protocol):
    """The library that defines the ids of one kind of tokenizer, with one tokenizer loaded."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def slower(self) -> int:
        """How many times slower than fastokens it is, roughly."""
        ...

    @property
    def special(self) -> Mapping[str, int]:
        """The control tokens, by what they are written as."""
        ...

    @property
    def added(self) -> Mapping[str, int]:
        """These, and the other tokens that are found in a text before anything else is done with it."""
        ...

    @property
    def widths(self) -> Ints | None:
        """Bytes of text that each id stands for, where tokens cut the text as it is; else None."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of a token, if there is such a one."""
        ...

    def encode(self, texts: Sequence[str], special: bool) -> list[Ids]:
        """The ids of every text; `special` says whether control tokens in it count as such, or as text."""
        ...

    def locate(self, text: str) -> tuple[Ids, Ints, Ints]:
        """Ids with control tokens, and the characters `[start, end)` of each; a token may share them with the next."""
        ...

    def as_is(self, text: str) -> bool:
        """Whether this text is cut as it is, without being normalised first."""
        ...

    def renamed(self, names: Mapping[str, str]) -> "Library":
        """The same tokenizer with other names for its control tokens, so that no text can spell them."""
        ...

    def fast(self) -> Any:
        """The same tokenizer in fastokens; whatever it raises means that there is none."""
        ...


class Encoder:
    """A tokenizer in two libraries: one that defines the ids, and a fast one as long as both agree.

    Args:
        library: the one that defines the ids; kept as `defining`.
    """

    def __init__(self, library: Library) -> None:
        self.defining = library
        self._fast: Any = None
        try:
            self._fast = library.fast()
            _keep_to_one_thread(self._fast)
        except Exception as error:  # whatever the native library raises, the other one still works
            logger.warning(
                "fastokens cannot load this tokenizer (%s); using %s, about %d times slower.",
                error,
                library.name,
                library.slower,
            )
        self.compare(PROBES, "probe strings")

    @property
    def library(self) -> str:
        """Which library encodes: `fastokens`, or the one that defines the ids."""
        return self.defining.name if self._fast is None else "fastokens"

    def encode(self, texts: Sequence[str], special: bool = False) -> tuple[Ids, Ints]:
        """Encode texts in one native call, without adding anything to them.

        Args:
            texts: what to encode.
            special: whether control tokens that they spell count as such; otherwise they are text.

        Returns:
            int32 [tokens], the ids of all texts one after the other, and int64 [texts + 1], where each begins.

        Raises:
            EncodeError: the library fails on a text.
        """
        return _blaming(self._encode_reference if self._fast is None else self._encode_fast, texts, special)

    def _encode_fast(self, texts: Sequence[str], special: bool) -> tuple[Ids, Ints]:
        ids, offsets = self._fast.encode_batch_flat(
            list(texts), add_special_tokens=False, split_special_tokens=not special
        )
        return np.frombuffer(ids, "<u4").astype(np.int32, copy=False), np.frombuffer(offsets, "<u8").astype(np.int64)

    def compare(self, texts: Sequence[str], where: str, special: bool = False) -> None:
        """Fall back to the library that defines the ids if the fast one differs on the start of any of `texts`."""
        if self._fast is None or not texts:
            return
        texts = [text[:COMPARED_CHARS] for text in texts]
        try:
            reference = _blaming(self._encode_reference, texts, special)
        except EncodeError as error:  # there are no ids to compare with
            self.compare([*texts[: error.text], *texts[error.text + 1 :]], where, special)
            return
        try:
            same = all(map(np.array_equal, self.encode(texts, special), reference))
        except EncodeError:
            same = False
        if not same:
            self._fast = None
            logger.warning(
                "fastokens and %s disagree on %s; using %s, which is exact but about %d times slower. "
                "Please report the tokenizer to the authors of fastokens.",
                self.defining.name,
                where,
                self.defining.name,
                self.defining.slower,
            )

    def _encode_reference(self, texts: Sequence[str], special: bool = False) -> tuple[Ids, Ints]:
        parts = self.defining.encode(texts, special)
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return np.concatenate([np.empty(0, np.int32), *parts]), offsets


_PANIC = "PanicException"
"""What a library in Rust raises where it panics: no `Exception`, and in no module that could be imported."""


def _blaming(
    encode: Callable[[Sequence[str], bool], tuple[Ids, Ints]], texts: Sequence[str], special: bool
) -> tuple[Ids, Ints]:
    """Encode, and where that fails say on which text. tiktoken panics on a million blanks, which is no `Exception`."""
    try:
        return encode(texts, special)
    except BaseException as error:
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or type(error).__name__ == _PANIC):
            raise  # Ctrl-C, or the watchdog
        if len(texts) == 1:
            raise EncodeError(0, str(error) or type(error).__name__) from error
        for i, text in enumerate(texts):
            try:
                _blaming(encode, [text], special)
            except EncodeError as found:
                raise EncodeError(i, found.reason) from error
        raise


def _keep_to_one_thread(fast: Any) -> None:
    """Have fastokens encode in the thread that calls it, as long as the process lives.

    Left alone it starts a thread for every core at its first batch, in each of a node's ranks, which `[run] workers`
    could not bound; and two threads on two hyperthreads took 0.046 CPU s per Mtoken of short documents, one 0.031, for
    a wall clock of 0.025 and 0.031. It counts the cores that its caller may run on, which is the only way to tell it.
    """
    try:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
    except (AttributeError, OSError):  # not Linux, or not allowed here: then it keeps its threads
        return
    try:
        fast.encode_batch_flat(["a", "b"], add_special_tokens=False)
    finally:
        os.sched_setaffinity(0, cores)


def spelled(tokens: Mapping[str, int] | Sequence[str]) -> re.Pattern[str]:
    """Finds tokens as tokenizers do: from left to right, the longest first."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else NEVER


def runs(text: str, tokens: re.Pattern[str]) -> Iterator[tuple[int, str, bool]]:
    """Cut a text at tokens: where each part begins, the part, and whether it is a token; empty parts are left out."""
    at = 0
    for match in tokens.finditer(text):
        if match.start() > at:
            yield at, text[at : match.start()], False
        yield match.start(), match[0], True
        at = match.end()
    if at < len(text):
        yield at, text[at:], False


def encode_runs(
    texts: Sequence[str],
    tokens: re.Pattern[str],
    ids: Mapping[str, int],
    plain: Callable[[list[str]], Sequence[Sequence[int]]],
) -> list[Ids]:
    """Encode texts around tokens: each has its own id, and every run between two of them is encoded by itself."""
    if tokens is NEVER:
        return [np.asarray(one, np.int32) for one in plain(list(texts))]
    cut = [list(runs(text, tokens)) for text in texts]
    encoded = iter(plain([part for parts in cut for _, part, token in parts if not token]))
    out: list[Ids] = []
    for parts in cut:
        pieces = [np.asarray([ids[part]] if token else next(encoded), np.int32) for _, part, token in parts]
        out.append(np.concatenate(pieces) if pieces else np.empty(0, np.int32))
    return out
