"""Text: a row's text becomes one sample of token ids.

A sample of `m` tokens, BOS and EOS included, has `m - 1` positions; `sequences.py` says how they are laid out.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from modalities.encoder import EncodeError
from modalities.media import MediaError, text_of
from modalities.sequences import build, split
from modalities.tokenizer import TextTokenizer
from zephon.errors import nearest
from zephon.modality import BadRowError, Context
from zephon.recipe import SOURCE_KEYS
from zephon.section import Section
from zephon.types import Batch, Measured, Plan, Record, Row


class Text:
    """Plain text from one field of a row.

    Args:
        options: `text`, the name of the field.
        context: sequence length, tokenizer, and what the modalities of a stream share.
    """

    family = "tokens"
    builds: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()
    filler = None
    cheap_materialise = True
    on_error = "raise"
    counters = ("empty", "surrogates", "special tokens in text")

    def __init__(self, options: Mapping[str, Any], context: Context) -> None:
        given = Section(options, "modality 'text':")
        self._field = given.take("text", str, "text")
        given.done(SOURCE_KEYS)
        self._seq_len, self._extras = context.seq_len, context.extras
        self._tokenizer = TextTokenizer.of(context, "a text source")

    def fingerprint(self) -> dict[str, Any]:
        return {"text": self._field, "tokenizer": self._tokenizer.fingerprint}

    def probe(self, rows: Sequence[Row]) -> None:
        """Compare the two tokenizer libraries on the first documents of the source."""
        texts, _, _ = self._texts(rows)
        self._tokenizer.compare(texts, "the first documents of a source")

    def measure(self, rows: Sequence[Row]) -> Measured:
        """One sample a row; a row whose field is missing or holds no text is a fault.

        Raises:
            BadRowError: the tokenizer fails on a text.
        """
        texts, counts, faults = self._texts(rows)
        try:
            ids, offsets = self._tokenizer.encode(texts)
        except EncodeError as error:
            raise BadRowError(error.text, f"{error}. Remove the row.") from error
        ids, offsets = self._with_edges(ids, offsets)
        bounds = offsets.tolist()
        lengths = np.diff(offsets)
        positions = np.maximum(lengths - 1, 0).tolist()
        payloads = [ids[start:end] for start, end in itertools.pairwise(bounds)]
        for i in np.flatnonzero(lengths <= 2).tolist():
            if not texts[i]:  # between BOS and EOS too there is nothing to learn
                positions[i], payloads[i] = 0, ids[:0]
            if not positions[i] and i not in faults:
                counts.setdefault(i, []).append("empty")
        noted = {i: tuple(names) for i, names in counts.items()}
        return Measured(range(len(texts)), positions, payloads, noted, faults=faults)

    def materialise(self, plans: Sequence[Plan]) -> Batch:
        return build(plans, self._seq_len, self._extras)

    def records(self, batch: Batch) -> list[Record]:
        return split(batch)

    def _texts(self, rows: Sequence[Row]) -> tuple[list[str], dict[int, list[str]], dict[int, str]]:
        """Text of every row, what is noted of it, and why those without are bad."""
        found = [row.get(self._field) for row in rows]
        texts, faults = cast(list[str], found), dict[int, str]()
        if set(map(type, found)) != {str}:
            texts = []
            for i, value in enumerate(found):
                try:
                    texts.append(text_of(value))
                except MediaError as error:
                    texts.append("")
                    faults[i] = self._complaint(rows[i], error)
        counts: dict[int, list[str]] = {}
        for i in [i for i, ascii in enumerate(map(str.isascii, texts)) if not ascii]:
            if (cleaned := self._tokenizer.clean(texts[i])) is not None:
                texts[i] = cleaned
                counts.setdefault(i, []).append("surrogates")
        for i in self._tokenizer.spelling_special(texts):
            counts.setdefault(i, []).append("special tokens in text")
        return texts, counts, faults

    def _complaint(self, row: Row, error: MediaError) -> str:
        if self._field in row:
            return f"field {self._field!r} {error}. Mend or remove the row."
        return (
            f"there is no field {self._field!r}; the row has {_some(sorted(row))}.{nearest(self._field, row)} "
            "Name the right field with text = in the recipe."
        )

    def _with_edges(
        self, ids: NDArray[np.int32], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Put BOS before and EOS behind every text."""
        bos, eos = self._tokenizer.bos, self._tokenizer.eos
        extra = (bos is not None) + (eos is not None)
        if not extra:
            return ids, offsets
        texts = len(offsets) - 1
        moved = offsets + extra * np.arange(texts + 1)
        out = np.empty(len(ids) + extra * texts, np.int32)
        lead = int(bos is not None)
        if len(ids) > _LONG * texts:
            bounds = zip(moved[:-1].tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
            for to, start, end in bounds:
                out[to + lead : to + lead + end - start] = ids[start:end]
        else:
            kept = np.ones(len(out), bool)
            if bos is not None:
                kept[moved[:-1]] = False
            if eos is not None:
                kept[moved[1:] - 1] = False
            out[kept] = ids
        if bos is not None:
            out[moved[:-1]] = bos
        if eos is not None:
            out[moved[1:] - 1] = eos
        return out, moved


def _some(names: list[str]) -> str:
    return str(names[:20])[:400] + (" and more" if len(names) > 20 else "")


_LONG = 200
"""Mean tokens above which copying text by text beats one masked copy (0.4 us a text against 2 ns a token)."""
