"""What a row holds: of an image the address of its bytes (a cell, a member of a tar file, a path, or bytes at hand);
text, however it is stored."""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from zephon.formats.blobs import path_blob
from zephon.formats.lines import ROW_BYTES
from zephon.formats.steady import steadily, unreadable
from zephon.types import Blob

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}
"""What is the fault of the row that names a path; all else is a fault of the storage, which must cost no row."""


class MediaError(ValueError):
    """A value names no image that could be read, or holds no text."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes that are at hand: a `zephon.types.Blob`."""

    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def place(self) -> str:
        return f"{len(self.data)} bytes in the row"

    def head(self, size: int) -> bytes:
        return self.data[:size]

    def read(self) -> bytes:
        return self.data


def media(value: object, folder: Path) -> Blob:
    """The address of what `value` names.

    Args:
        value: a blob, bytes, a path below `folder`, or `{"bytes": ..., "path": ...}` as Hugging Face stores images.
        folder: where paths start.

    Raises:
        MediaError: it is none of these, or no such file; paths never leave `folder`.
        DataError: a file is there, or may be, but the storage fails.
    """
    if isinstance(value, dict):
        cell = cast(dict[str, Any], value)
        if not {"bytes", "path"} & cell.keys():
            raise MediaError(f"a table with neither 'bytes' nor 'path', but {sorted(cell)}")
        value = cell["bytes"] if cell.get("bytes") is not None else cell.get("path")
    if isinstance(value, bytes):
        return Bytes(value)
    if isinstance(value, str):
        return _file(value, folder)
    if value is None or not all(hasattr(value, name) for name in ("head", "read", "place")):
        raise MediaError(f"no image: {value!r:.40}")
    return cast(Blob, value)


def text_of(value: object) -> str:
    """The text that `value` holds: a string, or a binary cell or member of a tar file in UTF-8.

    Raises:
        MediaError: it is none of these.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes) and not hasattr(value, "read"):
        raise MediaError(f"must be a string, it is {value!r:.60}")
    raw = value if isinstance(value, bytes) else cast(Blob, value).head(ROW_BYTES + 1)
    if len(raw) > ROW_BYTES:
        raise MediaError(f"holds more than the {ROW_BYTES:,} bytes that are read of a text")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MediaError(f"is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}") from error


def _file(path: str, folder: Path) -> Blob:
    if path.startswith(("http:", "https:")):
        raise MediaError(f"{path:.200}: images are not fetched from the net while training; store them first")
    root = folder.resolve()

    def find() -> Blob:
        at = (root / path).resolve(strict=True)  # behind a loop of links the other form resolves nothing
        if not at.is_relative_to(root):
            raise MediaError(f"{path:.200} leads out of {root}, where this source's images lie")
        return path_blob(at)

    try:
        return steadily(f"{root}/{path}", 0, find)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise unreadable(f"{root}/{path}", error) from error
        raise MediaError(f"{path:.200}: {error.strerror}") from error
    except MediaError:
        raise
    except (ValueError, RuntimeError) as error:
        raise MediaError(f"{path:.200}: {error}") from error
