"""From a row of images and text to its parts in order: captioned pairs, marked texts, interleaved documents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from modalities.media import MediaError, media, text_of
from zephon.section import Section
from zephon.types import Blob, Row

Part: TypeAlias = str | Blob

LAYOUTS = ["image_first", "image_last", "marker", "interleaved", "parts"]

IMAGE_FIELDS = ["jpg", "jpeg", "png", "webp", "gif", "bmp", "image", "images"]
TEXT_FIELDS = ["txt", "text", "caption", "texts", "parts", "content"]
_NAMES = "the name of a field, or a list of names of which a row has one"


class PartsError(ValueError):
    """A row is not what its layout says."""


@dataclass(frozen=True)
class Layout:
    """How rows hold images and text.

    Attributes:
        kind: one of `LAYOUTS`.
        image: fields that may hold the image or the images; the first that a row has.
        text: fields that may hold the text; the first that a row has.
        marker: what stands for an image in a text.
        folder: where paths of images start.
    """

    kind: str
    image: tuple[str, ...]
    text: tuple[str, ...]
    marker: str
    folder: Path

    @staticmethod
    def of(given: Section, folder: Path) -> "Layout":
        """The layout that a source asks for; `folder` is the recipe's."""
        return Layout(
            given.choice("layout", LAYOUTS, LAYOUTS[0]),
            given.words("image", _NAMES, IMAGE_FIELDS),
            given.words("text", _NAMES, TEXT_FIELDS),
            given.take("marker", str, "<image>"),
            folder / Path(given.take("folder", str, ".")).expanduser(),
        )

    def fingerprint(self) -> dict[str, Any]:
        """What decides data; folders may move."""
        return {"layout": self.kind, "image": list(self.image), "text": list(self.text), "marker": self.marker}

    def parts(self, row: Row) -> list[Part]:
        """The parts of a row, in order; texts without a letter are left out.

        Raises:
            PartsError: the row is not what the layout says.
            MediaError: an image cannot be addressed.
        """
        if self.kind == "parts":
            parts = [self._part(one) for one in _list(self._value(row, self.text, "text"), "parts")]
        elif self.kind == "interleaved":
            parts = self._interleaved(row)
        elif self.kind == "marker":
            parts = self._marked(_text(self._value(row, self.text, "text")), self._images(row))
        else:
            images, text = self._images(row), _text(self._value(row, self.text, "text"))
            parts = [*images, text] if self.kind == "image_first" else [text, *images]
        return [part for part in parts if part != ""]

    def _value(self, row: Mapping[str, object], names: Sequence[str], what: str) -> object:
        for name in names:
            if row.get(name) is not None:
                return row[name]
        shown = [name for name in row if not name.startswith("__")]
        raise PartsError(f"there is no {what}: none of {list(names)} is among its fields {shown[:20]}")

    def _images(self, row: Row) -> list[Part]:
        value = self._value(row, self.image, "image")
        found = cast(list[object], value) if isinstance(value, list) else [value]
        if not found:
            raise PartsError("its list of images is empty")
        return [media(one, self.folder) for one in found]

    def _interleaved(self, row: Row) -> list[Part]:
        """Two lists of one length, each with None where the other has something."""
        images = _list(self._value(row, self.image, "image"), "images")
        texts = _list(self._value(row, self.text, "text"), "texts")
        if len(images) != len(texts):
            raise PartsError(f"it has {len(images)} images and {len(texts)} texts; both lists must be of one length")
        parts = list[Part]()
        for image, text in zip(images, texts, strict=True):
            if image is not None and text is not None:
                raise PartsError("an entry is both image and text; one of the two must be null")
            if image is not None:
                parts.append(media(image, self.folder))
            elif text is not None:
                parts.append(_text(text))
        return parts

    def _marked(self, text: str, images: list[Part]) -> list[Part]:
        pieces = text.split(self.marker)
        if len(pieces) - 1 != len(images):
            raise PartsError(
                f"its text has {len(pieces) - 1} times {self.marker!r}, but there are {len(images)} images"
            )
        parts: list[Part] = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            parts += [image, piece]
        return parts

    def _part(self, value: object) -> Part:
        """A string, or a table with a type and the field of that name."""
        if isinstance(value, str):
            return value
        one = cast(dict[str, Any], value) if isinstance(value, dict) else {}
        kind = one.get("type")
        if kind == "text":
            return _text(one.get("text"))
        if kind == "image":
            return media(one.get("image", one if {"bytes", "path"} & one.keys() else None), self.folder)
        raise PartsError(f"a part must be a string or have type 'text' or 'image', it is {value!r:.60}")


def _list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise PartsError(f"its {what} must be a list, they are {value!r:.60}")
    return cast(list[object], value)


def _text(value: object) -> str:
    try:
        return text_of(value)
    except MediaError as error:
        raise PartsError(f"its text {error}") from error
