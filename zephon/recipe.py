"""The recipe: a TOML file that says all of a stream, read into frozen dataclasses.

Strict: an unknown key, a wrong type or an impossible value is an error that names the key, what is allowed and the
nearest right name. Everything but `[run]` decides which data a run sees, and is part of every checkpoint.
"""

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

from zephon.errors import RecipeError
from zephon.run.budget import MEMORY
from zephon.run.watch import TIMEOUT
from zephon.section import Section, show


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """`[batch]`: sequence length in positions, and sequences per optimizer step over all ranks (B)."""

    seq_len: int
    global_batch_size: int


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """`[tokenizer]`: a folder or a `tokenizer.json`. `bos` and `eos` say whether to add them; None: where defined."""

    path: Path
    bos: bool | None = None
    eos: bool | None = None

    @property
    def file(self) -> Path:
        """The `tokenizer.json` that is meant, whether or not it is there."""
        return self.path / "tokenizer.json" if self.path.suffix != ".json" else self.path


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One `[[sources]]`. `epochs` is None where the stream repeats; `options` are its modality's, which checks them.

    `max_bad` is how many bad rows a lane may skip: a number, or a share of the rows it has come to.
    """

    name: str
    paths: tuple[str, ...]
    weight: Decimal
    modality: str
    chunk_rows: int | None
    epochs: int | None
    filter: str | None
    map: str | None
    on_error: str | None
    max_bad: Fraction | int
    options: Mapping[str, Any]


SOURCE_KEYS = tuple(one.name for one in fields(SourceSpec) if one.name != "options")
"""The keys that every source takes, whatever its modality."""


@dataclass(frozen=True, slots=True)
class MixSpec:
    """`[mix]`: what a share is counted in, how large a piece enters the mix, what happens when a source ends."""

    unit: str
    piece: str
    on_end: str


@dataclass(frozen=True, slots=True)
class PackingSpec:
    """`[packing]`: the algorithm, its open bins, what becomes of samples longer than a sequence, and budgets.

    `algorithm` is "concat", "best_fit" or a class of the user's, as "module:Class". `budgets` says how much of each
    cost a sequence holds beside its positions, by name.
    """

    algorithm: str
    bins: int
    too_long: str
    budgets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RunSpec:
    """`[run]`: how the work is done; can never change data."""

    runner: str = "inline"
    workers: int = 1
    isolate: bool = False
    memory: int = MEMORY
    cache: Path = field(default_factory=lambda: Path("~/.cache/zephon").expanduser())
    timeout: float = TIMEOUT


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole recipe. `path` is the file it came from; relative paths in it start at its folder."""

    path: Path
    seed: int
    lanes: int
    sources: tuple[SourceSpec, ...]
    mix: MixSpec
    window: int
    packing: PackingSpec
    run: RunSpec
    batch: BatchSpec | None = None
    tokenizer: TokenizerSpec | None = None
    extras: tuple[str, ...] = ()
    """`[records]`: arrays that records hold beside `input`, `labels` and `positions`."""

    @property
    def finite(self) -> bool:
        """Whether the stream ends: one decision stream then takes the place of lanes."""
        return self.mix.on_end != "repeat"

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Recipe":
        """Read and check a recipe file.

        Raises:
            RecipeError: names the key, what is allowed, and the nearest right name.
        """
        at = Path(path)
        try:
            text = at.read_bytes().decode("utf-8-sig")
            values = tomllib.loads(text.replace("\r\n", "\n"), parse_float=Decimal)
            _check_integers(values)
        except OSError as error:
            raise RecipeError(f"Cannot read the recipe {at}: {error.strerror}.") from error
        except (ValueError, ArithmeticError, RecursionError) as error:  # not TOML, not UTF-8, numbers too large
            raise RecipeError(f"{at} is not valid TOML: {error}.") from error
        try:
            return _recipe(values, at)
        except (RuntimeError, ValueError, ArithmeticError) as error:  # a home folder that nobody has, numbers too large
            raise RecipeError(f"{at}: {error}") from None

    def with_batch(self, seq_len: int, global_batch_size: int, who: str) -> "Recipe":
        """The recipe with the batch that `who` asks for; where both speak they must agree."""
        asked = BatchSpec(seq_len, global_batch_size)
        if self.batch and self.batch != asked:
            raise RecipeError(
                f"{self.path} says seq_len = {self.batch.seq_len}, global_batch_size = {self.batch.global_batch_size}, "
                f"but {who} says {seq_len} and {global_batch_size}. Make them agree, or leave out the recipe's [batch]."
            )
        _check_batch(asked, self.lanes)
        return replace(self, batch=asked)

    def with_tokenizer(self, path: Path, who: str) -> "Recipe":
        """The recipe with the tokenizer that `who` uses; where both speak they must name the same one."""
        if self.tokenizer is None:
            return replace(self, tokenizer=TokenizerSpec(path))
        ours, theirs = self.tokenizer.file.resolve(), TokenizerSpec(path).file.resolve()
        same = ours == theirs or (ours.is_file() and theirs.is_file() and ours.read_bytes() == theirs.read_bytes())
        if not same:
            raise RecipeError(
                f"{self.path} takes its tokenizer from {ours}, but {who} from {theirs}. The model would read ids of "
                "another vocabulary. Make them agree, or leave [tokenizer] out of the recipe."
            )
        return self


def _check_integers(value: object) -> None:
    """TOML's integers have 64 bits; Python reads larger ones, and cannot even show those of thousands of digits."""
    if isinstance(value, dict):
        value = list(cast(dict[str, object], value).values())
    if isinstance(value, list):
        for one in cast(list[object], value):
            _check_integers(one)
    elif isinstance(value, int) and value.bit_length() > 63:
        raise ValueError(f"a whole number of {value.bit_length()} bits; 63 and a sign are allowed")


def _recipe(values: dict[str, Any], path: Path) -> Recipe:
    top = Section(values, "the recipe")
    seed = top.number("seed", 0, 0, most=2**63 - 1)
    mix = _mix(top.raw("mix", {}))
    finite = mix.on_end != "repeat"
    lanes = top.number("lanes", 1, 1 if finite else ..., most=65536)
    if finite and lanes != 1:
        raise RecipeError(
            f"lanes = {lanes}, but [mix] on_end = {mix.on_end!r} makes the stream finite: lanes would end unevenly, so "
            "it is one decision stream, and record j of a global batch goes to rank j·G // B. Leave lanes out."
        )
    batch = _batch(top.raw("batch", None), lanes)
    tokenizer = _tokenizer(top.raw("tokenizer", None), path.parent)
    sources = _sources(top.raw("sources"), finite)
    shuffle = Section(top.raw("shuffle", {}), "[shuffle]")
    window = shuffle.number("window", 0, 256)
    shuffle.done()
    packing = _packing(top.raw("packing", {}))
    records = Section(top.raw("records", {}), "[records]")
    extras = tuple(name for name in ("document_ids", "cu_seqlens") if records.take(name, bool, False))
    records.done()
    run = _run(top.raw("run", {}), path.parent)
    top.done()
    return Recipe(path, seed, lanes, sources, mix, window, packing, run, batch, tokenizer, extras)


def _batch(values: object, lanes: int) -> BatchSpec | None:
    if values is None:
        return None
    section = Section(values, "[batch]")
    batch = BatchSpec(section.number("seq_len", 1), section.number("global_batch_size", 1))
    section.done()
    _check_batch(batch, lanes)
    return batch


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    low = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return low + [number // one for one in reversed(low) if one * one != number]


def _check_batch(batch: BatchSpec, lanes: int) -> None:
    size = batch.global_batch_size
    if size < 1 or batch.seq_len < 1:
        raise RecipeError(f"seq_len = {batch.seq_len} and global_batch_size = {size} must both be at least 1.")
    if size % lanes:
        below = size // lanes * lanes
        near = f"{below} or {below + lanes}" if below else str(lanes)
        raise RecipeError(
            f"global_batch_size = {size} is not a multiple of lanes = {lanes}: some lanes would give more sequences to "
            f"a step than others. Sizes near it that work are {near}; numbers of lanes that work are {divisors(size)}."
        )


def _tokenizer(values: object, folder: Path) -> TokenizerSpec | None:
    if values is None:
        return None
    section = Section(values, "[tokenizer]")
    path = folder / Path(section.take("path", str)).expanduser()
    spec = TokenizerSpec(path, section.take("bos", bool, None), section.take("eos", bool, None))
    section.done()
    return spec


def _sources(values: object, finite: bool) -> tuple[SourceSpec, ...]:
    if not isinstance(values, list) or not values:
        raise RecipeError("sources must be one or more [[sources]] tables.")
    sources = [_source(one, i, finite) for i, one in enumerate(values)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(
                f"Two sources are named {name!r}. A name keys the order of a source, so each needs its own."
            )
    return tuple(sources)


def _source(values: object, number: int, finite: bool) -> SourceSpec:
    section = Section(values, f"[[sources]] number {number + 1}:")
    name = section.take("name", str)
    if any(ord(letter) < 32 for letter in name):
        raise RecipeError(f"{section.label('name')} must be a printable word, it is {name!r}.")
    paths = tuple(str(Path(one).expanduser()) for one in section.words("paths", "a list of path patterns"))
    weight = section.raw("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | Decimal):
        raise RecipeError(f"{section.label('weight')} must be a number, it is {show(weight)}.")
    weight = Decimal(weight)
    if not (weight.is_finite() and weight > 0 and abs(weight.adjusted()) <= 30):
        raise RecipeError(
            f"{section.label('weight')} must be from 1e-30 to 1e30 (only ratios count), it is {weight}. Remove the "
            "source to leave it out."
        )
    modality = section.take("modality", str, "text")
    chunk_rows = section.number("chunk_rows", 1, None)
    functions = section.take("filter", str, None), section.take("map", str, None)
    epochs: int | None = section.number("epochs", 1, 1 if finite else None)
    if epochs and not finite:
        raise RecipeError(
            f"{section.label('epochs')} = {epochs}, but [mix] on_end = 'repeat' draws every source for ever. Use "
            "on_end = 'stop' or 'renormalise', or leave epochs out."
        )
    bad = section.choice("on_error", ["raise", "skip"], None), _max_bad(section)
    return SourceSpec(name, paths, weight, modality, chunk_rows, epochs, *functions, *bad, section.rest())  # pyright: ignore[reportUnknownArgumentType]


def _max_bad(section: Section) -> Fraction | int:
    value = section.raw("max_bad", Decimal("0.01"))
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or value != value or not 0 <= value < 2**31:
        raise RecipeError(f"{section.label('max_bad')} must be a number from 0 on, it is {show(value)}.")
    if isinstance(value, int):
        return value
    if value > 1:
        raise RecipeError(
            f"{section.label('max_bad')} = {value} is a share above 1. Use a share such as 0.01, or a whole number of "
            "rows."
        )
    if value and value.adjusted() < -30:  # 1e-999999999 as a fraction would fill the memory
        raise RecipeError(f"{section.label('max_bad')} must be 0 or from 1e-30 on, it is {value}.")
    return Fraction(value)


def _mix(values: object) -> MixSpec:
    section = Section(values, "[mix]")
    unit = section.choice("unit", ["tokens", "samples"], "tokens")
    piece = section.choice("piece", ["document", "sequence"], "document")
    on_end = section.choice("on_end", ["repeat", "stop", "renormalise"], "repeat")
    section.done()
    if unit == "samples" and piece == "sequence":
        raise RecipeError(
            "[mix] unit = 'samples' counts whole samples, but piece = 'sequence' cuts them: a long document would "
            "count many times. Use piece = 'document', or unit = 'tokens'."
        )
    return MixSpec(unit, piece, on_end)


def _packing(values: object) -> PackingSpec:
    section = Section(values, "[packing]")
    algorithm = section.choice("algorithm", ["concat", "best_fit"], "concat", or_named=True)
    bins = section.number("bins", 1, 32, most=1024)
    too_long = section.choice("too_long", ["split", "drop", "error"], "split")
    table = Section(section.raw("budgets", {}), "[packing.budgets]")
    budgets = {name: table.number(name, 1) for name in table.names}
    section.done()
    return PackingSpec(algorithm, bins, too_long, budgets)


def _run(values: object, folder: Path) -> RunSpec:
    section, usual = Section(values, "[run]"), RunSpec()
    runner = section.choice("runner", ["inline", "threads", "process"], usual.runner)
    workers = section.number("workers", 1, usual.workers, most=1024)
    isolate = section.take("isolate", bool, usual.isolate)
    memory = section.size("memory", 64 * 1024**2, usual.memory)
    timeout = section.number("timeout", 0, usual.timeout)
    cache = Path(section.take("cache", str, str(usual.cache))).expanduser()
    section.done()
    if runner == "inline" and workers != 1:
        raise RecipeError(
            f"[run] workers = {workers}, but the inline runner works in the loader's own thread: use 1, "
            "or runner = 'threads' or 'process'."
        )
    return RunSpec(runner, workers, isolate, memory, folder / cache, timeout)
