"""Which format a file has, and how the files of all sources are opened: the one place that knows every format."""

import contextlib
import errno
import glob
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import NamedTuple

from zephon.catalogue import Shard
from zephon.errors import RecipeError
from zephon.formats.cache import ByteCache
from zephon.formats.compressed import CODECS, codec_of
from zephon.formats.index import Progress, index_files
from zephon.formats.jsonl import KEPT_BYTES, OPEN_FILES, JsonlReader
from zephon.recipe import SourceSpec
from zephon.run.budget import MEMORY, Budget
from zephon.worker import RowReader

_Sources = Mapping[str, dict[str, Path]]  # files by the name of their source, and by that of their shard

_FORMATS = {".jsonl": "JSONL", ".ndjson": "JSONL", ".tar": "tar", ".parquet": "Parquet"}
_SHORT = {".tgz": "gzip", ".tbz": "bzip2", ".tbz2": "bzip2", ".txz": "xz", ".tzst": "zstd"}


class Opened(NamedTuple):
    """A source whose files are indexed: its shards, and what reads its rows."""

    shards: list[Shard]
    reader: RowReader


def find_files(spec: SourceSpec, folder: Path) -> dict[str, Path]:
    """The files of a source by shard name, sorted: names are relative to the deepest folder that holds them all.

    Raises:
        RecipeError: a pattern matches nothing, or what cannot be read; a file has no known format, or is there both
            plain and compressed; the files are of several formats.
    """
    root, found = folder.absolute(), dict[str, str]()
    for pattern in spec.paths:
        wanted = Path(glob.escape(str(root))) / pattern
        files = sorted(_matches(wanted, spec.name), key=lambda file: (len(file), file))
        if not files and any(map(os.path.isdir, glob.iglob(str(wanted), recursive=True))):
            raise RecipeError(
                f"Source {spec.name!r}: {pattern!r} is a folder. Name its files, as in {pattern + '/*.jsonl'!r}."
            )
        if not files:
            raise RecipeError(
                f"Source {spec.name!r}: no file matches {pattern!r} (looked from {root}). "
                "Paths are relative to the recipe; ** crosses folders."
            )
        for match in files:  # a file that links lead to twice counts once, under its shortest name
            found.setdefault(os.path.realpath(match), match)
    same, kinds = dict[str, str](), dict[str, str]()
    for path in sorted(found.values()):
        kinds.setdefault(_format(path, spec.name), path)
        codec = codec_of(path)
        plain = path.removesuffix(codec.suffix) if codec else path
        if (other := same.setdefault(plain, path)) != path:
            raise RecipeError(
                f"Source {spec.name!r} has both {other} and {path}: the same rows twice. Narrow the pattern, or rename "
                "one of them if they are not the same."
            )
        if codec:
            codec.decoder()  # says now what must be installed for it
    if len(kinds) > 1:
        raise RecipeError(
            f"Source {spec.name!r} has files of several formats: {', '.join(f'{k} ({p})' for k, p in kinds.items())}. "
            "A source has one. Narrow the pattern, or make a source of each."
        )
    paths = [Path(path) for path in found.values()]
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return dict(sorted((path.relative_to(common).as_posix(), path) for path in paths))


def _matches(pattern: Path, source: str) -> list[str]:
    """The files that match. What `glob` passes over in silence, though data may lie there, is refused."""
    parts, files = pattern.parts, list[str]()
    first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    for end in range(first, len(parts) + (parts[-1] == "**")):
        for folder in glob.iglob(os.path.join(*parts[:end]), recursive=True):
            with _refusing(folder, source), contextlib.suppress(NotADirectoryError):
                os.scandir(folder).close()
    for match in glob.iglob(str(pattern), recursive=True):
        if os.path.isfile(match):
            files.append(match)
        elif not os.path.isdir(match) or match.endswith((*_FORMATS, *_SHORT, *(codec.suffix for codec in CODECS))):
            with _refusing(match, source):
                Path(match).stat()  # fails where it is a link to nothing
                what = "a folder. Name its files" if os.path.isdir(match) else "a pipe, socket or device. Remove it"
                raise RecipeError(f"Source {source!r}: {match} is {what}, or narrow the pattern {str(pattern)!r}.")
    return files


@contextlib.contextmanager
def _refusing(path: str, source: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ELOOP:  # a loop of links leads to nothing that is not found without it
            raise RecipeError(
                f"Source {source!r}: {path} cannot be read ({error.strerror}), so that rows might be missing. Mend the "
                "link, its permissions or the storage, remove it, or narrow the pattern."
            ) from error


def _format(path: str, source: str) -> str:
    """The format of a file, by its suffix; a codec's is passed over."""
    tools = {**_SHORT, **{codec.suffix: codec.tool for codec in CODECS}}
    packed = next((suffix for suffix in tools if path.endswith(suffix)), "")
    kind = next((name for suffix, name in _FORMATS.items() if path.removesuffix(packed).endswith(suffix)), None)
    if packed in _SHORT or (packed and kind and kind != "JSONL"):
        raise RecipeError(
            f"Source {source!r}: {path} is compressed as a whole, so a sample would cost all that comes before it. "
            f"Only JSONL may be. Decompress it once (`{tools[packed]} -dk {path}`) and name what that gives: it is "
            "hardly larger, since what it holds is compressed already."
        )
    if not kind:
        also = ", ".join(codec.suffix for codec in CODECS)
        raise RecipeError(
            f"Source {source!r}: {path} is none of the known formats: .jsonl, .ndjson, these with {also}, .tar "
            "(WebDataset), .parquet."
        )
    return kind


def open_sources(
    sources: _Sources, cache: Path, progress: Progress | None = None, budget: Budget = Budget.of(MEMORY)
) -> dict[str, Opened]:
    """Index and open the files of every source, which `find_files` found.

    Files of one format are indexed together, one that several sources share once; `progress` starts anew with each
    format. What a format needs is imported for it alone: text should not wait for pyarrow.

    Raises:
        DataError: a file is damaged.
        RecipeError: a source has no rows.
    """
    kinds = {name: _format(str(next(iter(files.values()))), name) for name, files in sources.items()}
    opened = dict[str, Opened]()
    for kind, open_all in (("JSONL", _open_jsonl), ("tar", _open_tar), ("Parquet", _open_parquet)):
        if mine := {name: files for name, files in sources.items() if kinds[name] == kind}:
            opened |= open_all(mine, cache, progress, budget)
    for name, files in sources.items():
        if not any(shard.rows for shard in opened[name].shards):
            raise RecipeError(f"Source {name!r} has no rows in {len(files)} files. Remove it, or give it data.")
    return opened


def _open_jsonl(sources: _Sources, cache: Path, progress: Progress | None, budget: Budget) -> dict[str, Opened]:
    indexed = {one.shard.path: one for one in index_files(_every(sources), cache, progress)}
    most = min(KEPT_BYTES, budget.members)
    kept = ByteCache(most, most)
    share, opened = max(2, OPEN_FILES // len(sources)), dict[str, Opened]()
    for source, files in sources.items():
        mine = [indexed[str(path)].named(name) for name, path in files.items()]
        opened[source] = Opened([one.shard for one in mine], JsonlReader(mine, kept, share))
    return opened


def _open_tar(sources: _Sources, cache: Path, progress: Progress | None, budget: Budget) -> dict[str, Opened]:
    from zephon.formats.tar import TarReader, index_tars

    indexed, opened = {one.shard.path: one for one in index_tars(_every(sources), cache, progress)}, dict[str, Opened]()
    for source, files in sources.items():
        mine = [indexed[str(path)].named(name) for name, path in files.items()]
        opened[source] = Opened([one.shard for one in mine], TarReader(mine))
    return opened


def _open_parquet(sources: _Sources, _: Path, progress: Progress | None, budget: Budget) -> dict[str, Opened]:
    from zephon.formats.parquet import open_parquet

    most = budget.groups // len(sources)
    return {source: Opened(*open_parquet(files, progress, most)) for source, files in sources.items()}


def _every(sources: _Sources) -> dict[str, Path]:
    return {str(path): path for files in sources.values() for path in files.values()}
