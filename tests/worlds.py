"""Random worlds for the law tests, and a plain-Python oracle that says what the contract makes of them.

Nothing here is taken from the product but the visible order (`SourceOrder.group`): chunks, token ids, the mixer's
rule, packing and records are written out again, slowly, from the design.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

import zephon
from zephon.catalogue import ChunkTable
from zephon.digest import lane_digest, step_digest
from zephon.order import SourceOrder
from zephon.pack import MAX_OPEN_SEGMENTS

BOS, EOS = 256, 257
Record = dict[str, list[int]]


# --- the tokenizer: one token per UTF-8 byte, its id the byte ------------------------------------------------------


def byte_letters() -> dict[int, str]:
    """The printable letter that byte-level tokenizers write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    spare = 256
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(spare)
            spare += 1
    return letters


@functools.cache
def tokenizer_folder(kind: str) -> Path:
    """A folder with the byte tokenizer; `kind` says what its config defines: "both", "eos" or "none".

    Its post-processor adds special tokens, which the loader must not use.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"zephon-tokenizer-{kind}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in byte_letters().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<bos>", "<eos>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> <bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"both": {"bos_token": "<bos>", "eos_token": "<eos>"}, "eos": {"eos_token": "<eos>"}, "none": None}[kind]
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def clean(text: str) -> str:
    return "".join("\ufffd" if 0xD800 <= ord(letter) <= 0xDFFF else letter for letter in text)


# --- worlds --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class SourceSpec:
    name: str
    weight: str
    shards: tuple[tuple[str, ...], ...]  # texts of each shard, shards in name order
    chunk_rows: int | None
    how: str = ""  # what the texts were made from, for the reader of a failing example
    layout: int = 0  # seed of the line endings, blank lines and the like
    epochs: int | None = None  # of a finite stream; None leaves the key out, which means 1

    @property
    def rows(self) -> int:
        return sum(map(len, self.shards))

    def __repr__(self) -> str:  # short: a failing example is made again from `how`, or by running the test again
        sizes = [len(texts) for texts in self.shards]
        epochs = f" epochs={self.epochs}" if self.epochs is not None else ""
        return f"<{self.name}: weight={self.weight} shards={sizes} chunk_rows={self.chunk_rows}{epochs} {self.how}>"


@dataclass(frozen=True)
class World:
    """What a recipe says. A finite world (`on_end` not "repeat") is digested as B lanes of one record: `lanes` is B."""

    sources: tuple[SourceSpec, ...]
    seed: int = 0
    lanes: int = 2
    per_lane: int = 1
    seq_len: int = 16
    window: int = 0
    piece: str = "document"
    unit: str = "tokens"
    tokenizer: str = "both"
    bos: bool | None = None
    eos: bool | None = None
    cache: str = "cache"
    on_end: str = "repeat"
    algorithm: str = "concat"
    bins: int = 32
    too_long: str = "split"
    runner: str = "inline"
    workers: int = 1
    isolate: bool = False

    def __post_init__(self) -> None:
        assert not self.finite or self.per_lane == 1

    @property
    def finite(self) -> bool:
        return self.on_end != "repeat"

    @property
    def order_lanes(self) -> int:
        """L in every formula of the order: a finite stream is one."""
        return 1 if self.finite else self.lanes

    @property
    def batch(self) -> int:
        return self.lanes * self.per_lane

    @property
    def degrees(self) -> list[int]:
        return divisors(self.lanes)

    def chunks(self, source: SourceSpec) -> list[tuple[int, int, int]]:
        """The chunks of a source: (shard, first row, rows)."""
        size = self._chunk_rows(source)
        found = []
        for shard, texts in enumerate(source.shards):
            for start in range(0, len(texts), size):
                found.append((shard, start, min(size, len(texts) - start)))
        return found

    def order(self, source: SourceSpec) -> SourceOrder:
        table = ChunkTable([len(texts) for texts in source.shards], self._chunk_rows(source))
        epochs = source.epochs or 1 if self.finite else None
        lanes = self.order_lanes
        return SourceOrder(source.name, table, seed=self.seed, lanes=lanes, window=self.window, epochs=epochs)

    def _chunk_rows(self, source: SourceSpec) -> int:
        return source.chunk_rows or max(1, min(1024, source.rows // (4 * self.order_lanes)))

    def tokens(self, text: str) -> list[int]:
        has_bos = self.tokenizer == "both" and self.bos is not False
        has_eos = self.tokenizer != "none" and self.eos is not False
        return [BOS] * has_bos + list(clean(text).encode()) + [EOS] * has_eos if text else []

    def accepts(self, text: str) -> bool:
        """Whether a document reaches the mixer."""
        positions = len(self.tokens(text)) - 1
        return positions >= 1 and (self.too_long == "split" or positions <= self.seq_len)

    def largest_sample(self) -> int:
        largest = max(len(self.tokens(text)) - 1 for source in self.sources for part in source.shards for text in part)
        return min(largest, self.seq_len) if self.piece == "sequence" else largest

    def with_source(self, index: int, **changes: Any) -> World:
        sources = list(self.sources)
        sources[index] = replace(sources[index], **changes)
        return replace(self, sources=tuple(sources))


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


LETTERS = 'abcdefgh XYZ.,éß漢😀\u2028\u0085\r\n\t"\\\0'
ODD = ["\ud800", "\udfff", "\ud83d", "<eos>", "<bos>", "\ufeff", "\u2029"]


def make_text(rng: random.Random, length: int) -> str:
    text = "".join(rng.choices(LETTERS, k=length))
    if length > 2 and rng.random() < 0.2:
        at = rng.randrange(length)
        text = text[:at] + rng.choice(ODD) + text[at:]
    return json.loads(json.dumps(text))  # a high and a low surrogate side by side are one letter in JSON


def make_texts(seed: int, rows: int, longest: int, empty: float) -> list[str]:
    rng = random.Random(seed)
    return [make_text(rng, 0 if rng.random() < empty else rng.randint(1, longest)) for _ in range(rows)]


def cut_in_shards(texts: Sequence[str], shards: int, seed: int) -> tuple[tuple[str, ...], ...]:
    rng = random.Random(seed)
    cuts = sorted(rng.randint(0, len(texts)) for _ in range(shards - 1))
    return tuple(tuple(texts[a:b]) for a, b in zip([0, *cuts], [*cuts, len(texts)], strict=True))


def livable(world: World) -> World:
    """`world` with some empty documents filled, so that no lane can draw a source n times without a position."""
    for index, source in enumerate(world.sources):
        chunks = world.chunks(source)
        shards = [list(texts) for texts in source.shards]
        n, lanes = len(chunks), world.lanes
        bad = [c for c, (s, a, k) in enumerate(chunks) if not any(map(world.accepts, shards[s][a : a + k]))]
        allowed = 0 if n < lanes else min(n // lanes - 1, (n - 1) // 2)
        for chunk in bad[allowed:] if world.window else bad:
            shard, start, _ = chunks[chunk]
            shards[shard][start] = "filled" if world.accepts("filled") else "ab"
        world = world.with_source(index, shards=tuple(map(tuple, shards)))
    return world


@st.composite
def source_specs(draw: st.DrawFn, index: int, seq_len: int, lanes: int) -> SourceSpec:
    size = draw(st.sampled_from(["few", "few", "some", "many"]))
    rows = draw(st.integers(1, {"few": 6, "some": 40, "many": 500}[size]))
    longest = draw(st.sampled_from([3, 12, seq_len, 3 * seq_len, 30 * seq_len if rows <= 40 else 2 * seq_len]))
    empty = draw(st.sampled_from([0.0, 0.1, 0.4]))
    seed = draw(st.integers(0, 2**20))
    shards = draw(st.integers(1, 4))
    return SourceSpec(
        name=f"source {index}",
        weight=draw(st.sampled_from(["1", "0.7", "0.3", "0.05", "2", "12.5", "1e-3"])),
        shards=cut_in_shards(make_texts(seed, rows, longest, empty), shards, seed),
        chunk_rows=draw(st.none() | st.integers(1, 8) | st.integers(1, 64)),
        how=f"rows={rows} longest={longest} empty={empty} seed={seed} shards={shards}",
        layout=draw(st.integers(0, 3)),
    )


@st.composite
def worlds(draw: st.DrawFn, max_sources: int = 5, max_lanes: int = 16) -> World:
    lanes = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 12, 16, 5, 9) if n <= max_lanes]))
    seq_len = draw(st.sampled_from([4, 5, 8, 16, 31, 64]))
    count = draw(st.integers(1, max_sources))
    tokenizer = draw(st.sampled_from(["both", "eos", "none"]))
    piece, unit = draw(
        st.sampled_from(
            [("document", "tokens"), ("sequence", "tokens"), ("document", "samples"), ("document", "tokens")]
        )
    )
    return livable(
        World(
            sources=tuple(draw(source_specs(index, seq_len, lanes)) for index in range(count)),
            seed=draw(st.integers(0, 2**31 - 1)),
            lanes=lanes,
            per_lane=draw(st.integers(1, 3)),
            seq_len=seq_len,
            window=draw(st.sampled_from([0, 1, 4, 16, 64])),
            piece=piece,
            unit=unit,
            tokenizer=tokenizer,
            bos=draw(st.sampled_from([None, True, False])) if tokenizer == "both" else None,
            eos=draw(st.sampled_from([None, True, False])) if tokenizer != "none" else None,
        )
    )


@st.composite
def best_fit_worlds(draw: st.DrawFn, max_sources: int = 4, max_lanes: int = 8) -> World:
    """Random worlds that pack with best fit; some of documents of one shape only."""
    world = draw(worlds(max_sources, max_lanes))
    world = replace(
        world,
        algorithm="best_fit",
        bins=draw(st.sampled_from([1, 2, 3, 5, 32])),
        too_long=draw(st.sampled_from(["split", "split", "drop"])),
    )
    shape = draw(st.sampled_from(["any", "any", "any", "longer", "same", "one position"]))
    if shape == "any":
        return livable(world)
    extra = len(world.tokens("")) - 1  # positions of a document beyond its letters
    length = {"longer": 2 * world.seq_len, "same": draw(st.integers(1, world.seq_len)), "one position": 1}[shape]
    for index, source in enumerate(world.sources):
        rng = random.Random(source.layout)
        letters = [max(0, length - extra) + (rng.randrange(world.seq_len) if shape == "longer" else 0)] * source.rows
        texts = ["".join(rng.choices("abcdef ", k=count)) for count in letters]
        shards = cut_in_shards(texts, len(source.shards), source.layout)
        world = world.with_source(index, shards=shards, how=f"{source.how} all {shape} {length}")
    return livable(replace(world, too_long="split") if shape == "longer" else world)


@st.composite
def finite_worlds(draw: st.DrawFn, max_sources: int = 4, max_batch: int = 12) -> World:
    """Random finite worlds: one decision stream, which ends after at most some hundred records."""
    batch = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 12) if n <= max_batch]))
    seq_len = draw(st.sampled_from([4, 8, 16, 31, 64]))
    tokenizer = draw(st.sampled_from(["both", "eos", "none"]))
    piece, unit = draw(st.sampled_from([("document", "tokens"), ("sequence", "tokens"), ("document", "samples")]))
    return World(
        sources=tuple(
            draw(finite_sources(index, seq_len)) for index in range(draw(st.sampled_from([2, 1, 3, 4][:max_sources])))
        ),
        seed=draw(st.integers(0, 2**31 - 1)),
        lanes=batch,  # of one record each: how a finite stream is digested
        seq_len=seq_len,
        window=draw(st.sampled_from([0, 1, 4, 16, 64])),
        piece=piece,
        unit=unit,
        tokenizer=tokenizer,
        on_end=draw(st.sampled_from(["renormalise", "renormalise", "stop"])),
        algorithm=draw(st.sampled_from(["concat", "best_fit"])),
        bins=draw(st.sampled_from([4, 2, 1, 32])),
        too_long=draw(st.sampled_from(["split", "split", "split", "drop"])),
    )


@st.composite
def finite_sources(draw: st.DrawFn, index: int, seq_len: int) -> SourceSpec:
    rows = draw(st.sampled_from([1, 5, 8, 13, 21, 34, 55, 2, 3]))
    longest = draw(st.sampled_from([seq_len, 3 * seq_len, 12, 3]))
    empty = draw(st.sampled_from([0.0, 0.0, 0.0, 0.3, 0.3, 1.0]))
    seed = draw(st.integers(0, 2**20))
    shards = draw(st.integers(1, 3))
    return SourceSpec(
        name=f"source {index}",
        weight=draw(st.sampled_from(["1", "0.7", "0.3", "0.05", "12.5"])),
        shards=cut_in_shards(make_texts(seed, rows, longest, empty), shards, seed),
        chunk_rows=draw(st.none() | st.integers(1, 8)),
        how=f"rows={rows} longest={longest} empty={empty} seed={seed} shards={shards}",
        layout=draw(st.integers(0, 3)),
        epochs=draw(st.sampled_from([None, None, 1, 2, 3])),
    )


def plain_world(**changes: Any) -> World:
    """A small fixed world with two sources, for tests that vary one thing."""
    sources = (
        SourceSpec("web", "0.7", cut_in_shards(make_texts(1, 60, 40, 0.1), 3, 1), chunk_rows=3),
        SourceSpec("books", "0.3", cut_in_shards(make_texts(2, 25, 150, 0.0), 2, 2), chunk_rows=2),
    )
    world = World(sources=sources, seed=7, lanes=4, per_lane=2, seq_len=24, window=8)
    return livable(replace(world, **changes))


def plain_finite(**changes: Any) -> World:
    """A small fixed finite world, for tests that vary one thing."""
    sources = (
        SourceSpec("web", "0.7", cut_in_shards(make_texts(1, 40, 40, 0.1), 3, 1), chunk_rows=3),
        SourceSpec("books", "0.3", cut_in_shards(make_texts(2, 9, 90, 0.0), 2, 2), chunk_rows=2, epochs=2),
    )
    world = World(sources=sources, seed=7, lanes=4, seq_len=24, window=8, on_end="renormalise")
    return replace(world, **changes)


# --- writing a world to a folder -----------------------------------------------------------------------------------


def shard_bytes(texts: Sequence[str], layout: int) -> bytes:
    """JSON lines; `layout` 1 to 3 adds what a reader must see through: CR LF, a BOM, blank lines, no last newline."""
    rng = random.Random(layout)
    lines = []
    for number, text in enumerate(texts):
        raw = layout > 0 and not any(0xD800 <= ord(letter) <= 0xDFFF for letter in text)
        row: dict[str, Any] = {"id": number, "text": text, "other": [text[:3], None]} if layout == 2 else {"text": text}
        line = json.dumps(row, ensure_ascii=not raw).encode()
        if layout == 2:
            line = line.replace(b'"text": ', b'"text":\r ')
        lines.append(line + (b"\r\n" if layout == 1 else b"\n"))
        if layout and rng.random() < 0.2:
            lines.append(rng.choice([b"\n", b"\r\n", b"  \n", b" \t \n"]))
    data = b"".join(lines)
    if layout == 3 and texts:
        data = data.rstrip(b"\r\n\t ")
    return (b"\xef\xbb\xbf" if layout == 1 else b"") + data


def recipe_text(world: World) -> str:
    flags = "".join(f"{key} = {str(value).lower()}\n" for key, value in (("bos", world.bos), ("eos", world.eos))
                    if value is not None)  # fmt: skip
    lanes = "" if world.finite else f"lanes = {world.lanes}\n"
    parts = [
        f"seed = {world.seed}\n{lanes}",
        f"[batch]\nseq_len = {world.seq_len}\nglobal_batch_size = {world.batch}\n",
        f"[tokenizer]\npath = {json.dumps(str(tokenizer_folder(world.tokenizer)))}\n{flags}",
    ]
    for index, source in enumerate(world.sources):
        chunk = "" if source.chunk_rows is None else f"chunk_rows = {source.chunk_rows}\n"
        chunk += "" if source.epochs is None else f"epochs = {source.epochs}\n"
        parts.append(
            f'[[sources]]\nname = {json.dumps(source.name)}\npaths = ["data {index}/*.jsonl"]\ntext = "text"\n'
            f"weight = {source.weight}\n{chunk}"
        )
    packing = f'[packing]\nalgorithm = "{world.algorithm}"\n'
    packing += f"bins = {world.bins}\n" if world.algorithm == "best_fit" else ""
    packing += f'too_long = "{world.too_long}"\n' if world.too_long != "split" else ""
    run = f'[run]\nrunner = "{world.runner}"\nworkers = {world.workers}\nisolate = {str(world.isolate).lower()}\n'
    parts += [
        f'[mix]\nunit = "{world.unit}"\npiece = "{world.piece}"\non_end = "{world.on_end}"\n',
        f"[shuffle]\nwindow = {world.window}\n",
        packing,
        f"{run}cache = {json.dumps(world.cache)}\n",
    ]
    return "\n".join(parts)


def write_world(world: World, folder: Path) -> Path:
    for index, source in enumerate(world.sources):
        data = folder / f"data {index}"
        data.mkdir()
        # 'part 10' sorts before 'part 9': shards are written out of order and named so that only sorting restores it
        names = sorted(f"part {10 - number}.jsonl" for number in range(len(source.shards)))
        for name, texts in reversed(list(zip(names, source.shards, strict=True))):
            (data / name).write_bytes(shard_bytes(texts, source.layout))
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe_text(world), encoding="utf-8")
    return recipe


@contextmanager
def built(world: World) -> Iterator[Path]:
    """The recipe of `world`, written to a folder of its own with its data, and an empty cache."""
    with tempfile.TemporaryDirectory(prefix="zephon-world-") as folder:
        yield write_world(world, Path(folder))


@contextmanager
def opened(world: World) -> Iterator[zephon.Stream]:
    with built(world) as recipe, zephon.Stream.open(recipe) as stream:
        yield stream


# --- running -------------------------------------------------------------------------------------------------------


def merge(states: Sequence[Mapping[str, bytes]]) -> dict[str, bytes]:
    """What a distributed checkpoint holds: every key of every rank; a key that two ranks write must agree."""
    merged: dict[str, bytes] = {}
    for state in states:
        for key, value in state.items():
            assert isinstance(key, str)
            assert type(value) is bytes
            assert merged.setdefault(key, value) == value, f"two ranks disagree on {key}"
    return merged


class Fleet:
    """All ranks of one run, side by side. A finite stream must end on all of them at the same step."""

    def __init__(
        self, stream: zephon.Stream, world: int, state: Mapping[str, bytes] | None = None, *, pad_last: bool = False
    ) -> None:
        self.loaders = [stream.loader(rank, world, pad_last=pad_last) for rank in range(world)]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(state)

    def records(self) -> dict[int, list[dict[str, np.ndarray]]] | None:
        """The records of the next global step, by lane; None at the end."""
        parts = [next_records(loader) for loader in self.loaders]
        ended = {part is None for part in parts}
        assert len(ended) == 1, "some ranks go on after others have ended"
        found: dict[int, list[dict[str, np.ndarray]]] = {}
        for part in parts:
            if part is None:
                return None
            assert not set(part) & set(found), "two ranks own a lane"
            found.update(part)
        return found

    def step(self) -> str:
        """The digest of the next global step; a StopIteration at the end."""
        records = self.records()
        if records is None:
            raise StopIteration
        return step_digest({lane: lane_digest(mine) for lane, mine in records.items()})

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def to_end(self, limit: int = 5000) -> list[str]:
        """The digests of all steps that are left."""
        found = []
        while (records := self.records()) is not None:
            found.append(step_digest({lane: lane_digest(mine) for lane, mine in records.items()}))
            assert len(found) < limit, "a finite stream goes on and on"
        return found

    def state(self) -> dict[str, bytes]:
        return merge([loader.state_dict() for loader in self.loaders])

    def common_stats(self) -> Any:
        """The statistics of a finite stream, which every rank makes all decisions of: the same on all."""
        first, *others = [loader.stats() for loader in self.loaders]
        assert all(other == first for other in others)
        return first

    def stats(self) -> dict[str, Any]:
        """The sums of all ranks' statistics."""
        total: dict[str, Any] = {"records": 0, "positions": 0, "padding": 0, "mixed": Counter(), "dropped": {}}
        for loader in self.loaders:
            stats = loader.stats()
            for key in ("records", "positions", "padding"):
                total[key] += getattr(stats, key)
            total["mixed"].update(stats.mixed)
            for source, counts in stats.dropped.items():
                total["dropped"].setdefault(source, Counter()).update(counts)
        return total


def check_resumes(opening: Any, world: Any, data: st.DataObject, longest: int = 8, after: int = 3) -> None:
    """Three resumes, each at another degree, give the steps, states and statistics of the run that went on.

    Args:
        opening: opens the stream of a world; a new folder and an empty cache each time.
        world: has degrees.
        data: draws where the run stops, and on how many ranks it goes on.
        longest: the last step at which it may stop.
        after: steps behind the last stop.
    """
    stops = sorted(data.draw(st.lists(st.integers(0, longest), min_size=3, max_size=3), label="stops"))
    count = stops[-1] + after
    degrees = [data.draw(st.sampled_from(world.degrees), label="degree") for _ in range(5)]
    with opening(world) as stream:
        fleet, expected, states, stats = Fleet(stream, degrees[0]), [], [], []
        for _ in range(count):
            states.append(fleet.state())
            stats.append(fleet.stats())
            expected.append(fleet.step())
    state, done = None, 0
    for degree, stop in zip(degrees[1:], [*stops, count], strict=True):
        with opening(world) as stream:
            fleet = Fleet(stream, degree, state)
            assert [loader.step for loader in fleet.loaders] == [done] * degree
            assert fleet.steps(stop - done) == expected[done:stop]
            if stop < count:
                state = fleet.state()
                assert state == states[stop], "the bytes depend on more than the stream"
                assert fleet.stats() == stats[stop]
                assert max(len(value) for key, value in state.items() if key != "header") <= 4096
            done = stop


def next_records(loader: zephon.Loader) -> dict[int, list[dict[str, np.ndarray]]] | None:
    try:
        return loader.step_records()
    except StopIteration:
        return None


def digests(world: World, degree: int, count: int) -> list[str]:
    with opened(world) as stream:
        return Fleet(stream, degree).steps(count)


def record_lists(record: Mapping[str, np.ndarray]) -> Record:
    return {name: array.tolist() for name, array in record.items()}


# --- the oracle ----------------------------------------------------------------------------------------------------


def exact_weights(weights: Sequence[str]) -> list[int]:
    exact = [Fraction(Decimal(weight)) for weight in weights]
    return [max(1, round(2**32 * weight / sum(exact))) for weight in exact]


Piece = tuple[list[int], int, int]  # tokens of one document, and the positions of it that are meant


def size(pieces: Sequence[Piece]) -> int:
    return sum(end - start for _, start, end in pieces)


class NaivePacker:
    """Both ways of packing. `bins` is in order of opening."""

    def __init__(self, world: World) -> None:
        self.seq_len, self.best_fit, self.limit = world.seq_len, world.algorithm == "best_fit", world.bins
        self.bins: list[list[Piece]] = []

    def put(self, piece: Piece) -> list[list[Piece]]:
        """Packs all of a piece; the sequences that leave."""
        return self._put_best_fit(*piece) if self.best_fit else self._put_concat(*piece)

    def _put_concat(self, tokens: list[int], start: int, end: int) -> list[list[Piece]]:
        gone = []
        while start < end:
            if not self.bins:
                self.bins.append([])
            (one,) = self.bins
            stop = min(end, start + self.seq_len - size(one))
            if one and one[-1][0] is tokens and one[-1][2] == start:  # touching runs of one sample are one segment
                one[-1] = (tokens, one[-1][1], stop)
            else:
                one.append((tokens, start, stop))
            if size(one) == self.seq_len:
                gone.append(self.bins.pop())
            start = stop
        return gone

    def _put_best_fit(self, tokens: list[int], start: int, end: int) -> list[list[Piece]]:
        gone = []
        while end - start >= self.seq_len:
            gone.append([(tokens, start, start + self.seq_len)])
            start += self.seq_len
        if start == end:
            return gone
        fitting = [one for one in self.bins if size(one) + end - start <= self.seq_len]
        if not fitting:
            fitting = [[]]
            self.bins += fitting
        best = max(fitting, key=size)
        best.append((tokens, start, end))
        if size(best) == self.seq_len or len(self.bins) > self.limit or sum(map(len, self.bins)) >= MAX_OPEN_SEGMENTS:
            gone.append(self.pop_fullest())
        return gone

    def pop_fullest(self) -> list[Piece]:
        fullest = max(self.bins, key=size)  # the first, so the oldest, of equals
        self.bins = [one for one in self.bins if one is not fullest]
        return fullest


class LaneOracle:
    """What one lane (or a whole finite stream) delivers, computed the slow and obvious way."""

    def __init__(self, world: World, lane: int = 0) -> None:
        self.world, self.lane = world, lane
        self.weights = exact_weights([source.weight for source in world.sources])
        self.deficits = [0] * len(world.sources)
        self.alive = list(range(len(world.sources)))
        self.pieces = [self._pieces(index) for index in range(len(world.sources))]
        self.packer = NaivePacker(world)
        self.full: list[list[Piece]] = []  # sequences that are packed and not delivered yet
        self.mixed = dict.fromkeys((source.name for source in world.sources), 0)
        self.drawn = {source.name: Counter() for source in world.sources}  # counters of documents begun or dropped
        self.finished = {source.name: Counter() for source in world.sources}  # the same, of documents done with

    def documents(self, index: int) -> Iterator[str]:
        source = self.world.sources[index]
        chunks, order = self.world.chunks(source), self.world.order(source)
        for group in range(order.groups) if self.world.finite else itertools.count():
            rows = order.group(self.lane, group)
            for chunk, row in zip(rows.chunk.tolist(), rows.row.tolist(), strict=True):
                shard, start, size = chunks[chunk]
                assert 0 <= row < size
                yield source.shards[shard][start + row]

    def _pieces(self, index: int) -> Iterator[Piece]:
        name, seq_len = self.world.sources[index].name, self.world.seq_len
        for text in self.documents(index):
            tokens = self.world.tokens(text)
            positions = len(tokens) - 1
            counts = {
                "empty": positions < 1,
                "too long": positions > seq_len and self.world.too_long != "split",
                "surrogates": clean(text) != text,
                "special tokens in text": "<eos>" in text or "<bos>" in text,
            }
            self.drawn[name].update(counts)
            size = seq_len if self.world.piece == "sequence" else positions
            if self.world.accepts(text):
                for start in range(0, positions, size):
                    yield tokens, start, min(start + size, positions)
            self.finished[name].update(counts)

    def _take(self) -> Piece | None:
        """The next piece of the mix; None at the end of a finite stream."""
        while self.alive:
            index = max(self.alive, key=lambda i: (self.deficits[i], -i))
            piece = next(self.pieces[index], None)
            if piece is not None:
                break
            if self.world.on_end == "stop":
                return None
            self.alive.remove(index)
            self.weights[index] = self.deficits[index] = 0
        else:
            return None
        _, start, end = piece
        cost = end - start if self.world.unit == "tokens" else 1
        self.deficits = [have + weight * cost for have, weight in zip(self.deficits, self.weights, strict=True)]
        self.deficits[index] -= sum(self.weights) * cost
        self.mixed[self.world.sources[index].name] += end - start
        return piece

    def open_positions(self) -> int:
        """Positions that have left the mixer and are not delivered."""
        return sum(map(size, [*self.full, *self.packer.bins]))

    def record(self) -> Record:
        """The next record; a StopIteration after the last, which may be padded."""
        while not self.full:
            piece = self._take()
            if piece is not None:
                self.full += self.packer.put(piece)
            elif self.packer.bins:
                self.full.append(self.packer.pop_fullest())
            else:
                raise StopIteration
        record: Record = {"input": [], "labels": [], "positions": []}
        for tokens, start, end in self.full.pop(0):
            record["input"] += tokens[start:end]
            record["labels"] += tokens[start + 1 : end + 1]
            record["positions"] += range(end - start)
        empty = masked(self.world)
        return {name: values + empty[name][len(values) :] for name, values in record.items()}

    def all_records(self) -> list[Record]:
        found = []
        while True:
            try:
                found.append(self.record())
            except StopIteration:
                return found


def masked(world: World) -> Record:
    """The record that pads the last step of a validation run."""
    zeros = [0] * world.seq_len
    return {"input": zeros, "labels": [-100] * world.seq_len, "positions": zeros}


def global_steps(world: World, pad_last: bool) -> list[list[Record]]:
    """All global batches of a finite world, by the oracle."""
    records = LaneOracle(world).all_records()
    if pad_last:
        records += [masked(world)] * (-len(records) % world.batch)
    whole = len(records) - len(records) % world.batch
    return [records[start : start + world.batch] for start in range(0, whole, world.batch)]
