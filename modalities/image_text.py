"""Images and text: a row's parts, in order, become one sample whose images are placeholders until the very end.

Measuring looks at headers alone. A run of placeholders, with the tokens around it, is an atom: it is never cut. Pixels
are decoded when a sequence is built, and travel as uint8 patches: `recipes.titan_image_text` normalises them and adds
the temporal copy on the device.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from modalities.encoder import EncodeError
from modalities.geometry import Geometry, ImageError, expand, patchify
from modalities.headers import Header, read_header
from modalities.images import codec_versions, load
from modalities.media import MediaError
from modalities.parts import Layout, Part, PartsError
from modalities.presets import PRESETS, Preset
from modalities.sequences import IGNORED, Ids, build
from modalities.spans import Picture, fit, grid_positions
from modalities.tokenizer import TextTokenizer
from zephon.errors import DataError, RecipeError, UsageError
from zephon.modality import LATE, BadRowError, Context
from zephon.recipe import SOURCE_KEYS
from zephon.section import Section, show
from zephon.types import Atom, Batch, Measured, Plan, Record, Ref, Row, Sample

logger = logging.getLogger(__name__)

COUNTERS = ("empty", "surrogates", "special tokens in text", "over budget", "shrunk to fit", "broken image")
BROKEN = COUNTERS.index("broken image")


class Style(NamedTuple):
    """What a source wants of its pictures when they are built."""

    background: tuple[int, int, int]
    strict: bool


class Mixed(NamedTuple):
    """The payload of a sample: `m` ids, which are trained, its pictures, and how they are to be built."""

    ids: Ids
    trained: NDArray[np.bool_]
    pictures: tuple[Picture, ...]
    style: Style


@dataclass(frozen=True)
class Marks:
    """Ids of the control tokens that surround and stand for images."""

    start: int
    pad: int
    end: int
    video: int | None

    @staticmethod
    def of(tokenizer: TextTokenizer, preset: Preset) -> "Marks":
        """The marks of a preset, as a tokenizer numbers them."""
        found = [tokenizer.id_of(token) for token in preset.tokens]
        missing = [token for token, number in zip(preset.tokens, found, strict=True) if number is None]
        if missing[:1] and missing != [preset.tokens[-1]]:
            raise RecipeError(
                f"The tokenizer in {tokenizer.folder} has no {', '.join(missing)}, with which this preset marks "
                "images. Use the model's own tokenizer, or another preset."
            )
        ids, _ = tokenizer.encode(preset.tokens)
        if spelled := [token for token, number in zip(preset.tokens, found, strict=True) if number in ids]:
            raise RecipeError(
                f"The tokenizer in {tokenizer.folder} makes {', '.join(spelled)} of text that spells it, so a caption "
                'could hold an image that is not there. Give these tokens "special": true among its added tokens.'
            )
        start, pad, end, video = found
        return Marks(cast(int, start), cast(int, pad), cast(int, end), video)


class ImageText:
    """Images and text, mixed freely with sources of plain text.

    Args:
        options: see "Images and text" in recipes/README.md.
        context: sequence length, tokenizer, budgets, and what the modalities of a stream share.
    """

    builds: tuple[str, ...] = ("tokens",)
    costs: tuple[str, ...] = ("patches", "images")
    cheap_materialise = False
    on_error = "skip"
    counters = COUNTERS

    def __init__(self, options: Mapping[str, Any], context: Context) -> None:
        sizes = ("min_pixels", "max_pixels", "max_patches", "max_patches_per_side")
        given = Section(options, "modality 'image_text':")
        self._layout = Layout.of(given, context.folder)
        self.preset = PRESETS[given.choice("preset", list(PRESETS), next(iter(PRESETS)))]
        asked = {name: given.number(name, 1, None) for name in sizes}
        self.geometry: Geometry = _changed(self.preset.geometry, asked)
        self._floats = given.choice("pixels", ["uint8", "float32"], "uint8") == "float32"
        self._over = given.choice("over_budget", ["split", "shrink", "drop"], "split")
        self._whole = given.take("keep_whole", bool, True)
        self._style = Style(_colour(given, "background", [255, 255, 255]), context.on_error == "raise")
        given.done(SOURCE_KEYS)
        self._tokenizer = TextTokenizer.of(context, "an image_text source")
        self.marks = Marks.of(self._tokenizer, self.preset)
        self._seq_len, self._extras = context.seq_len, context.extras
        patches, images = (context.budgets.get(name, 2**62) for name in self.costs)
        self._most = context.seq_len, patches, images
        shown = {**vars(self.geometry), "mrope": self.preset.mrope, "floats": self._floats}
        for one in sizes:
            shown.pop(one)  # sources may differ in how large their images are
        self.family = f"images {shown}"
        self.filler = self._null_image()

    def fingerprint(self) -> dict[str, Any]:
        return {
            **self._layout.fingerprint(),
            "geometry": vars(self.geometry) | {"mrope": self.preset.mrope},
            "pixels": "float32" if self._floats else "uint8",
            "background": list(self._style.background),
            "over_budget": self._over,
            "keep_whole": self._whole,
            "codecs": codec_versions(),
            "marks": vars(self.marks),
            "tokenizer": self._tokenizer.fingerprint,
        }

    def probe(self, rows: Sequence[Row]) -> None:
        """Compare the two tokenizer libraries on the first texts of the source."""
        texts = [part for row in rows for part in self._parts(row)[0] if isinstance(part, str)]
        self._tokenizer.compare([self._tokenizer.clean(text) or text for text in texts], "the first rows of a source")

    def measure(self, rows: Sequence[Row]) -> Measured:
        """One sample a row, its images sized from their headers; a row that cannot be used is a fault.

        Raises:
            BadRowError: the tokenizer fails on a text.
        """
        found, texts, faults = list[_Row](), list[str](), dict[int, str]()
        for number, row in enumerate(rows):
            parts, reason = self._parts(row)
            if reason:
                faults[number] = reason
            one = _Row(parts, [])
            found.append(one)
            for part in parts:
                if isinstance(part, str):
                    texts.append(self._cleaned(part, one.counts))
        try:
            ids, offsets = self._tokenizer.encode(texts)
        except EncodeError as error:
            owners = [number for number, one in enumerate(found) for _ in range(one.texts)]
            raise BadRowError(owners[error.text], f"{error}. Remove the row.") from error
        at, bounds = 0, offsets.tolist()
        samples: list[tuple[Mixed | None, int, tuple[Atom, ...]]] = []
        for number, one in enumerate(found):
            encoded = [ids[bounds[at + i] : bounds[at + i + 1]] for i in range(one.texts)]
            at += one.texts
            try:
                samples.append(self._sample(one, encoded))
            except ImageError as error:
                faults[number] = f"{_place(one.parts)}: {error}. Mend or remove it."
                samples.append((None, 0, ()))
        return Measured(
            range(len(found)),
            [positions for _, positions, _ in samples],
            [payload for payload, _, _ in samples],
            {i: tuple(one.counts) for i, one in enumerate(found) if one.counts},
            {i: atoms for i, (_, _, atoms) in enumerate(samples) if atoms},
            faults,
        )

    def materialise(self, plans: Sequence[Plan]) -> Batch:
        """Text as ever, then `pixel_values` uint8 [patches, 3·p²] and `grid_thw` int32 [images, 3] of all sequences.

        With `pixels = "float32"` patches are normalised and hold the temporal copy: float32 [patches, 3·t·p²].
        """
        # What is free must not look like a placeholder: runs of those say where images are.
        batch = build(plans, self._seq_len, self._extras, free=int(self.marks.pad == 0))
        spans = _spans(plans)
        pictures = [(span, picture) for span in spans for picture in span.pictures]
        grids = [self.geometry.grid(picture.height, picture.width) for _, picture in pictures]
        patches = np.empty((sum(map(math.prod, grids)), 3 * self.geometry.patch_size**2), np.uint8)
        at, broken = 0, dict[tuple[int, Ref], None]()
        for (span, picture), grid in zip(pictures, grids, strict=True):
            mine = patches[at : at + math.prod(grid)]
            if not self._draw(picture, span.sample.payload.style, mine):
                mine[:] = 0
                if picture.blob:
                    broken[span.row, span.sample.ref] = None
            at += len(mine)
        for span in spans:  # a sample may lie in several segments of a sequence
            if (span.row, span.sample.ref) in broken:
                batch["labels"][span.row, span.first : span.last] = IGNORED
        if self.preset.mrope:
            batch["mrope_positions"] = np.repeat(batch["positions"][:, :, None], 3, axis=2)
            for span in spans:
                if span.pictures:
                    mine = batch["mrope_positions"][span.row, span.first : span.last]
                    grid_positions(mine, span.start, span.pictures, self.geometry)
        batch["pixel_values"] = self._expanded(patches) if self._floats else patches
        batch["grid_thw"] = np.asarray(grids, np.int32).reshape(-1, 3)
        if broken:
            batch[LATE] = np.array([(row, ref.source, BROKEN) for row, ref in broken], np.int32)
        return batch

    def records(self, batch: Batch) -> list[Record]:
        """Split a micro-batch, int32 again where a trainer widened it; runs of placeholders say whose an image is."""
        whole = {
            name: np.ascontiguousarray(array, dtype=array.dtype if name == "pixel_values" else "<i4")
            for name, array in batch.items()
        }
        pads = whole["input"] == self.marks.pad
        runs = (pads[:, 1:] & ~pads[:, :-1]).sum(axis=1) + pads[:, 0]
        images = np.concatenate([[0], np.cumsum(runs)])
        patches = np.concatenate([[0], np.cumsum(whole["grid_thw"].prod(axis=1))])  # pyright: ignore[reportAttributeAccessIssue]
        out: list[Record] = []
        for i in range(len(pads)):
            first, end = int(images[i]), int(images[i + 1])
            record = {name: array[i] for name, array in whole.items() if name not in ("pixel_values", "grid_thw")}
            record["grid_thw"] = whole["grid_thw"][first:end]
            record["pixel_values"] = whole["pixel_values"][int(patches[first]) : int(patches[end])]
            out.append(record)
        return out

    def _parts(self, row: Row) -> tuple[list[Part], str]:
        """The parts of a row, or none and the reason."""
        try:
            parts = self._layout.parts(row)
        except (PartsError, MediaError) as error:
            return [], f"{error}. Mend or remove the row."
        if not any(isinstance(part, str) and not part.isspace() for part in parts):
            return [], "its text is blank, so that nothing of it could be trained. Remove the row."
        return parts, ""

    def _cleaned(self, text: str, counts: list[str]) -> str:
        clean = self._tokenizer.clean(text)
        if clean is not None:
            counts.append("surrogates")
        text = text if clean is None else clean
        if self._tokenizer.spelling_special([text]):
            counts.append("special tokens in text")
        return text

    def _sample(self, row: "_Row", texts: list[Ids]) -> tuple[Mixed | None, int, tuple[Atom, ...]]:
        """Size the images of a row, then lay out its tokens."""
        if not row.parts:
            return None, 0, ()
        headers = [read_header(part) for part in row.parts if not isinstance(part, str)]
        sizes = [header.shown() for header in headers]
        edges = [edge is not None for edge in (self._tokenizer.bos, self._tokenizer.eos)]
        plain = sum(map(len, texts)) + sum(edges) - 1 + 2 * len(sizes)
        fitted = fit(sizes, self.geometry, self._most, plain, self._over)
        if fitted is None:
            row.counts.append("over budget")
            return None, 0, ()
        if fitted.shrunk:
            row.counts.append("shrunk to fit")
        return self._laid_out(row.parts, texts, headers, fitted.sizes)

    def _laid_out(
        self, parts: Sequence[Part], texts: list[Ids], headers: Sequence[Header], sizes: Sequence[tuple[int, int]]
    ) -> tuple[Mixed, int, tuple[Atom, ...]]:
        bos, eos, marks = self._tokenizer.bos, self._tokenizer.eos, self.marks
        runs = [self.geometry.tokens(*size) + 2 for size in sizes]
        total = sum(map(len, texts)) + sum(runs) + (bos is not None) + (eos is not None)
        ids, trained, pictures, at = np.empty(total, np.int32), np.ones(total, np.bool_), list[Picture](), 0
        if bos is not None:
            ids[0], at = bos, 1
        waiting, ahead = iter(texts), zip(headers, sizes, runs, strict=True)
        for part in parts:
            if isinstance(part, str):
                text = next(waiting)
                end = at + len(text)
                ids[at:end] = text
            else:
                header, (height, width), run = next(ahead)
                end = at + run
                pictures.append(Picture(part, at, height, width, header))
                ids[at], ids[at + 1 : end - 1], ids[end - 1] = marks.start, marks.pad, marks.end
                trained[at:end] = False
            at = end
        if eos is not None:
            ids[at] = eos
        return Mixed(ids, trained, tuple(pictures), self._style), total - 1, self._atoms(pictures, total - 1)

    def _atoms(self, pictures: list[Picture], positions: int) -> tuple[Atom, ...]:
        costs = [(self.geometry.patches(one.height, one.width), 1) for one in pictures]
        total = tuple(map(sum, zip(*costs, strict=True))) if costs else (0, 0)
        fits = all(cost <= most for cost, most in zip((positions, *total), self._most, strict=True))
        if self._whole and fits and pictures:
            return (Atom(0, positions, total),)
        ends = [one.start + self.geometry.tokens(one.height, one.width) + 2 for one in pictures]
        return tuple(
            Atom(one.start, min(end, positions), cost) for one, end, cost in zip(pictures, ends, costs, strict=True)
        )

    def _null_image(self) -> Sample:
        """The smallest grid of black pixels, nothing of it trained: every record has an image, on every rank."""
        side, marks = self.geometry.unit, self.marks
        ids = np.array([marks.start, marks.pad, marks.end, marks.end], np.int32)
        payload = Mixed(ids, np.zeros(4, np.bool_), (Picture(None, 0, side, side),), self._style)
        atom = Atom(0, 3, (self.geometry.patches(side, side), 1))
        return Sample(Ref(-1, 0, 0, 0, 0), 3, payload, (), (atom,))

    def _draw(self, picture: Picture, style: Style, out: NDArray[np.uint8]) -> bool:
        """Write the patches of a picture to `out`; False for the null image, and one that is broken all the same."""
        if picture.blob is None:
            return False
        try:
            pixels = load(picture.blob.read(), (picture.height, picture.width), style.background, picture.header)
        except ImageError as error:
            if style.strict:
                raise DataError(f"{picture.blob.place}: {error}, and on_error = 'raise'.") from error
            logger.warning("%s: black in its place, and its sample's labels are masked: %s", picture.blob.place, error)
            return False
        patchify(pixels, self.geometry, out)
        return True

    def _expanded(self, patches: NDArray[np.uint8]) -> NDArray[np.float32]:
        import torch

        return expand(torch.from_numpy(patches), self.geometry, self.preset.mean, self.preset.std).numpy()


def _colour(given: Section, key: str, default: list[int]) -> tuple[int, int, int]:
    """Red, green and blue, from 0 to 255 each."""
    value = given.raw(key, default)
    if not isinstance(value, list) or len(value) != 3 or not all(type(one) is int and 0 <= one <= 255 for one in value):
        label = given.label(key)
        raise RecipeError(
            f"{label} must be red, green and blue from 0 to 255, as [255, 255, 255]; it is {show(value)}."
        )
    return (value[0], value[1], value[2])


def _changed(geometry: Geometry, asked: Mapping[str, int | None]) -> Geometry:
    try:
        return replace(geometry, **{name: value for name, value in asked.items() if value is not None})
    except UsageError as error:
        raise RecipeError(str(error)) from error


@dataclass(slots=True)
class _Row:
    """A row on its way: its parts and what is counted of it."""

    parts: list[Part]
    counts: list[str]

    @property
    def texts(self) -> int:
        return sum(isinstance(part, str) for part in self.parts)


class _Span(NamedTuple):
    """A segment in its record: positions `[first, last)` of sequence `row`, from position `start` of the sample on."""

    row: int
    first: int
    last: int
    sample: Sample
    start: int
    pictures: list[Picture]


def _spans(plans: Sequence[Plan]) -> list[_Span]:
    spans: list[_Span] = []
    for row, plan in enumerate(plans):
        at = 0
        for sample, start, end in plan:
            mixed = isinstance(sample.payload, Mixed)
            inside = [one for one in sample.payload.pictures if start <= one.start < end] if mixed else []
            spans.append(_Span(row, at, at + end - start, sample, start, inside))
            at += end - start
    return spans


def _place(parts: Sequence[Part]) -> str:
    blobs = [part.place for part in parts if not isinstance(part, str)]
    return blobs[0] if blobs else "a row"
