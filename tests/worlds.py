"""Random worlds for the law tests, and a plain-Python oracle that says what the contract makes of them.

Nothing here is taken from the product but the visible order (`SourceOrder.group`): chunks, token ids, the mixer's
rule, packing and records are written out again, slowly, from the design.
"""

from __future__ import annotations

import atexit
import functools
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

    @property
    def rows(self) -> int:
        return sum(map(len, self.shards))

    def __repr__(self) -> str:  # short: a failing example is made again from `how`, or by running the test again
        sizes = [len(texts) for texts in self.shards]
        return f"<{self.name}: weight={self.weight} shards={sizes} chunk_rows={self.chunk_rows} {self.how}>"


@dataclass(frozen=True)
class World:
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

    @property
    def batch(self) -> int:
        return self.lanes * self.per_lane

    @property
    def degrees(self) -> list[int]:
        return divisors(self.lanes)

    def chunks(self, source: SourceSpec) -> list[tuple[int, int, int]]:
        """The chunks of a source: (shard, first row, rows)."""
        size = source.chunk_rows or max(1, min(1024, source.rows // (4 * self.lanes)))
        found = []
        for shard, texts in enumerate(source.shards):
            for start in range(0, len(texts), size):
                found.append((shard, start, min(size, len(texts) - start)))
        return found

    def order(self, source: SourceSpec) -> SourceOrder:
        size = source.chunk_rows or max(1, min(1024, source.rows // (4 * self.lanes)))
        table = ChunkTable([len(texts) for texts in source.shards], size)
        return SourceOrder(source.name, table, seed=self.seed, lanes=self.lanes, window=self.window)

    def tokens(self, text: str) -> list[int]:
        has_bos = self.tokenizer == "both" and self.bos is not False
        has_eos = self.tokenizer != "none" and self.eos is not False
        return [BOS] * has_bos + list(clean(text).encode()) + [EOS] * has_eos

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

    def usable(text: str) -> bool:
        return len(world.tokens(text)) >= 2

    for index, source in enumerate(world.sources):
        chunks = world.chunks(source)
        shards = [list(texts) for texts in source.shards]
        n, lanes = len(chunks), world.lanes
        bad = [c for c, (s, a, k) in enumerate(chunks) if not any(usable(text) for text in shards[s][a : a + k])]
        allowed = 0 if n < lanes else min(n // lanes - 1, (n - 1) // 2)
        for chunk in bad[allowed:] if world.window else bad:
            shard, start, _ = chunks[chunk]
            shards[shard][start] = "filled"
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


def plain_world(**changes: Any) -> World:
    """A small fixed world with two sources, for tests that vary one thing."""
    sources = (
        SourceSpec("web", "0.7", cut_in_shards(make_texts(1, 60, 40, 0.1), 3, 1), chunk_rows=3),
        SourceSpec("books", "0.3", cut_in_shards(make_texts(2, 25, 150, 0.0), 2, 2), chunk_rows=2),
    )
    world = World(sources=sources, seed=7, lanes=4, per_lane=2, seq_len=24, window=8)
    return livable(replace(world, **changes))


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
    parts = [
        f"seed = {world.seed}\nlanes = {world.lanes}\n",
        f"[batch]\nseq_len = {world.seq_len}\nglobal_batch_size = {world.batch}\n",
        f"[tokenizer]\npath = {json.dumps(str(tokenizer_folder(world.tokenizer)))}\n{flags}",
    ]
    for index, source in enumerate(world.sources):
        chunk = "" if source.chunk_rows is None else f"chunk_rows = {source.chunk_rows}\n"
        parts.append(
            f'[[sources]]\nname = {json.dumps(source.name)}\npaths = ["data {index}/*.jsonl"]\ntext = "text"\n'
            f"weight = {source.weight}\n{chunk}"
        )
    parts += [
        f'[mix]\nunit = "{world.unit}"\npiece = "{world.piece}"\non_end = "repeat"\n',
        f"[shuffle]\nwindow = {world.window}\n",
        '[packing]\nalgorithm = "concat"\n',
        f'[run]\nrunner = "inline"\nworkers = 1\ncache = {json.dumps(world.cache)}\n',
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
    """All ranks of one run, side by side."""

    def __init__(self, stream: zephon.Stream, world: int, state: Mapping[str, bytes] | None = None) -> None:
        self.loaders = [stream.loader(rank, world) for rank in range(world)]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(state)

    def step(self) -> str:
        """The digest of the next global step."""
        lanes: dict[int, bytes] = {}
        for loader in self.loaders:
            for lane, records in loader.step_records().items():
                assert lane not in lanes
                lanes[lane] = lane_digest(records)
        return step_digest(lanes)

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def state(self) -> dict[str, bytes]:
        return merge([loader.state_dict() for loader in self.loaders])

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


def digests(world: World, degree: int, count: int) -> list[str]:
    with opened(world) as stream:
        return Fleet(stream, degree).steps(count)


def record_lists(record: Mapping[str, np.ndarray]) -> Record:
    return {name: array.tolist() for name, array in record.items()}


# --- the oracle ----------------------------------------------------------------------------------------------------


def exact_weights(weights: Sequence[str]) -> list[int]:
    exact = [Fraction(Decimal(weight)) for weight in weights]
    return [max(1, round(2**32 * weight / sum(exact))) for weight in exact]


class LaneOracle:
    """What one lane delivers, computed the slow and obvious way."""

    def __init__(self, world: World, lane: int) -> None:
        self.world, self.lane = world, lane
        self.weights = exact_weights([source.weight for source in world.sources])
        self.deficits = [0] * len(world.sources)
        self.pieces = [self._pieces(index) for index in range(len(world.sources))]
        self.rest: tuple[list[int], int, int] | None = None  # what of the current piece is not placed yet
        self.open: list[tuple[list[int], int, int]] = []  # segments of the sequence under construction
        self.mixed = dict.fromkeys((source.name for source in world.sources), 0)
        self.drawn = {source.name: Counter() for source in world.sources}  # counters of documents begun or dropped
        self.finished = {source.name: Counter() for source in world.sources}  # the same, of documents done with

    def documents(self, index: int) -> Iterator[str]:
        source = self.world.sources[index]
        chunks, order = self.world.chunks(source), self.world.order(source)
        group = 0
        while True:
            rows = order.group(self.lane, group)
            for chunk, row in zip(rows.chunk.tolist(), rows.row.tolist(), strict=True):
                shard, start, size = chunks[chunk]
                assert 0 <= row < size
                yield source.shards[shard][start + row]
            group += 1

    def _pieces(self, index: int) -> Iterator[tuple[list[int], int, int]]:
        name, seq_len = self.world.sources[index].name, self.world.seq_len
        for text in self.documents(index):
            tokens = self.world.tokens(text)
            positions = len(tokens) - 1
            counts = {
                "empty": positions < 1,
                "surrogates": clean(text) != text,
                "special tokens in text": "<eos>" in text or "<bos>" in text,
            }
            self.drawn[name].update(counts)
            size = seq_len if self.world.piece == "sequence" else positions
            if positions >= 1:
                for start in range(0, positions, size):
                    yield tokens, start, min(start + size, positions)
            self.finished[name].update(counts)

    def _take(self) -> tuple[list[int], int, int]:
        index = max(range(len(self.deficits)), key=lambda i: (self.deficits[i], -i))
        tokens, start, end = next(self.pieces[index])
        cost = end - start if self.world.unit == "tokens" else 1
        self.deficits = [have + weight * cost for have, weight in zip(self.deficits, self.weights, strict=True)]
        self.deficits[index] -= sum(self.weights) * cost
        self.mixed[self.world.sources[index].name] += end - start
        return tokens, start, end

    def open_positions(self) -> int:
        waiting = [*self.open, self.rest] if self.rest else self.open
        return sum(end - start for _, start, end in waiting)

    def record(self) -> Record:
        room = self.world.seq_len
        while room := self.world.seq_len - sum(end - start for _, start, end in self.open):
            tokens, start, end = self.rest or self._take()
            stop = min(end, start + room)
            self.rest = (tokens, stop, end) if stop < end else None
            if self.open and self.open[-1][0] is tokens and self.open[-1][2] == start:
                start = self.open.pop()[1]
            self.open.append((tokens, start, stop))
        record: Record = {"input": [], "labels": [], "positions": []}
        for tokens, start, end in self.open:
            record["input"] += tokens[start:end]
            record["labels"] += tokens[start + 1 : end + 1]
            record["positions"] += range(end - start)
        self.open = []
        return record
