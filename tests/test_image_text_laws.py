"""The laws of streams that mix text and images, on random worlds, against a plain-Python oracle (`image_worlds.py`).

Beside the laws: every record holds an image, none is over its budgets, a run of placeholders is never cut, its pixels
are those of its image, and a broken image changes no plan.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_worlds import (
    END,
    FILLER,
    PAD,
    START,
    Arrays,
    Doc,
    ImageOracle,
    ImageSource,
    ImageWorld,
    Img,
    Row,
    built,
    file_bytes,
    global_steps,
    image_worlds,
    livable,
    make_row,
    may_cut,
    null_image,
    opened,
    patches_of,
    record_of,
    same,
    stored,
    titan_mrope,
    vision_tokenizer,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from worlds import Fleet, SourceSpec, byte_letters, check_resumes, cut_in_shards, divisors, make_texts, merge

import zephon
from modalities.geometry import ImageError, expand
from modalities.headers import read_header
from modalities.images import load
from modalities.media import Bytes
from zephon.digest import lane_digest, step_digest
from zephon.modality import Context, find_modality
from zephon.recipe import TokenizerSpec
from zephon.state import _WORDS
from zephon.types import Ref, Sample, Segment

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
COUNTED = ("empty", "bad row", "over budget", "shrunk to fit", "too long")


def law(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=QUIET)


# --- a fixed world -------------------------------------------------------------------------------------------------


def rows_of(seed: int, count: int, format: str, shape: str, bad: float = 0.0, longest: int = 12) -> list[Row]:
    rng = random.Random(seed)
    return [make_row(rng, format, shape, longest, 80, number, bad) for number in range(count)]


def source_of(name: str, format: str, shape: str, rows: Sequence[Row], **more: Any) -> ImageSource:
    shards = cast(Any, cut_in_shards(cast(Any, rows), 2, len(rows)))
    given: dict[str, Any] = {"weight": "1", "chunk_rows": 2, "min_pixels": 1024, "max_pixels": 4096}
    return ImageSource(name=name, shards=shards, format=format, shape=shape, **{**given, **more})


def plain_images(bad: float = 0.0, **changes: Any) -> ImageWorld:
    """Text, captioned pairs in tars, interleaved documents in Parquet and marked texts in JSONL."""
    sources = (
        SourceSpec("text", "1", cut_in_shards(make_texts(1, 30, 40, 0.1), 3, 1), chunk_rows=3),
        source_of("pairs", "tar", "image_first", rows_of(2, 12, "tar", "image_first", bad)),
        source_of("pages", "parquet", "interleaved", rows_of(3, 9, "parquet", "interleaved", bad)),
        source_of("marked", "jsonl", "marker", rows_of(4, 9, "jsonl", "marker", bad), over="shrink", whole=False),
    )
    world = ImageWorld(sources=sources, seed=7, lanes=4, per_lane=2, seq_len=40, window=8, patches=48, images=4)
    return livable(replace(world, **changes))


# --- what every record must be -------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A segment of a record, read from its arrays alone."""

    ids: list[int]
    labels: list[int]
    mrope: list[list[int]] | None
    images: list[tuple[list[int], np.ndarray]]  # grid and patches of each

    @property
    def filler(self) -> bool:
        return self.ids == [START, PAD, END] and set(self.labels) == {-100} and not self.images[0][1].any()


def segments(world: ImageWorld, record: Arrays) -> list[Found]:
    """Cut a record at its `document_ids`, and deal out its images to runs of placeholders, in order."""
    ids, numbers = record["input"].tolist(), record["document_ids"].tolist()
    grids, patches = record["grid_thw"].tolist(), record["pixel_values"]
    merge, at, found = world.unit_patches, 0, list[Found]()
    for number in range(max(numbers) + 1):
        where = [i for i, one in enumerate(numbers) if one == number]
        assert where == list(range(where[0], where[0] + len(where)))
        assert record["positions"][where].tolist() == list(range(len(where)))
        mine, images = [ids[i] for i in where], []
        for size in placeholder_runs(mine):
            t, rows, columns = grid = grids.pop(0)
            assert (t, rows * columns) == (1, size * merge)
            images.append((grid, patches[at : at + rows * columns]))
            at += rows * columns
        mrope = record["mrope_positions"][where].tolist() if world.kind.mrope else None
        found.append(Found(mine, record["labels"][where].tolist(), mrope, images))
    assert not grids
    assert at == len(patches)
    return found


def placeholder_runs(ids: list[int]) -> Iterator[int]:
    """Sizes of the runs of placeholders; each has its marks around it, but for one that ends a sample without EOS."""
    at = 0
    while at < len(ids):
        assert ids[at] not in (PAD, END)
        if ids[at] == START:
            end = at + 1
            while end < len(ids) and ids[end] == PAD:
                end += 1
            assert end > at + 1
            assert end == len(ids) or ids[end] == END
            yield end - at - 1
            at = end
        at += 1


def check(world: ImageWorld, record: Arrays) -> list[Found]:
    """What holds for every record of a recipe with images, told without order, mix or packing."""
    side = world.kind.geometry.patch_size
    assert {name: array.dtype for name, array in record.items()} == {
        name: np.dtype(np.uint8 if name == "pixel_values" else np.int32) for name in record
    }
    assert ("mrope_positions" in record) == world.kind.mrope
    assert record["pixel_values"].shape[1:] == (3 * side**2,)
    assert record["grid_thw"].shape[1:] == (3,)
    assert 1 <= len(record["grid_thw"]) <= world.budgets[1]
    assert len(record["pixel_values"]) <= world.budgets[0]
    used = world.seq_len - int((record["document_ids"] < 0).sum())
    for name, rest in (("input", 0), ("labels", -100), ("positions", 0), ("document_ids", -1)):
        assert record[name].shape == (world.seq_len,)
        assert (record[name][used:] == rest).all()
    found = segments(world, record)
    nulls = [one.filler for one in found]
    if not world.damaged:  # a broken image of the smallest size may look like the null image
        assert sum(nulls) == (not any(one.images for one in found if not one.filler))
        assert not any(nulls[:-1])
    assert not np.isin(record["labels"], (START, PAD, END)).any()
    for one in found:
        assert all(label == -100 for label, token in zip(one.labels, one.ids[1:], strict=False) if token >= START)
        if one.mrope is not None:
            grids = cast(Any, [grid for grid, _ in one.images])
            assert one.mrope == titan_mrope(one.ids, grids, world.kind.geometry.merge_size).tolist()
    return found


def docs(world: ImageWorld) -> list[Doc]:
    """Every sample of a world that is delivered, once."""
    laid = [world.laid(source, row)[0] for source in world.sources for shard in source.shards for row in shard]
    return [doc for doc in laid if doc is not None]


# --- 4. conservation -----------------------------------------------------------------------------------------------


@law(60)
@given(image_worlds(), st.sampled_from([5, 1, 2, 8]), st.data())
def test_conservation_every_record_is_what_a_naive_reading_of_the_design_says(
    world: ImageWorld, count: int, data: st.DataObject
) -> None:
    oracles = [ImageOracle(world, lane) for lane in range(world.lanes)]
    with opened(world) as stream:
        fleet = Fleet(stream, data.draw(st.sampled_from(world.degrees), label="degree"))
        for _ in range(count):
            for lane, mine in (fleet.records() or {}).items():
                for record in mine:
                    same(record, oracles[lane].record())
                    check(world, record)
        stats = fleet.stats()
    delivered = sum(oracle.delivered for oracle in oracles)
    assert stats["records"] == count * world.batch
    assert stats["positions"] == delivered
    assert stats["positions"] + stats["padding"] == count * world.batch * world.seq_len
    assert sum(stats["mixed"].values()) == delivered + sum(oracle.open_positions() for oracle in oracles)
    for index, source in enumerate(world.sources):
        assert stats["mixed"][source.name] == sum(oracle.mixed[source.name] for oracle in oracles)
        counted = stats["dropped"][source.name]
        assert counted.get("broken image", 0) == sum(oracle.broken[source.name] for oracle in oracles)
        least = sum((oracle.finished[source.name] for oracle in oracles), start=Counter[str]())
        most = least.copy()
        for oracle in oracles:  # up to the next sample that is accepted, which may or may not be looked at already
            before = oracle.finished[source.name].copy()
            next(oracle.pieces[index])
            most.update(oracle.drawn[source.name])
            most.subtract(before)
        for counter in COUNTED:
            assert least[counter] <= counted.get(counter, 0) <= most[counter], (source.name, counter)


@law(30)
@given(image_worlds(finite=True), st.booleans(), st.data())
def test_conservation_a_finite_stream_is_what_a_naive_reading_of_the_design_says(
    world: ImageWorld, pad_last: bool, data: st.DataObject
) -> None:
    expected = global_steps(world, pad_last)
    with opened(world) as stream:
        fleet = Fleet(stream, data.draw(st.sampled_from(world.degrees), label="degree"), pad_last=pad_last)
        for step in expected:
            found = fleet.records()
            assert found is not None
            for lane, record in enumerate(step):
                same(found[lane][0], record)
                check(world, found[lane][0])
        assert fleet.records() is None
        assert {loader.step for loader in fleet.loaders} == {len(expected)}


@law(25)
@given(image_worlds(finite=True, on_end="renormalise", bad=(0.0,)))
def test_conservation_a_validation_delivers_every_position_and_every_image_exactly_epochs_times(
    world: ImageWorld,
) -> None:
    """Told from the data alone, without order, mix or packing. A sample that fits, and is to stay whole, does."""
    pairs, images = Counter[Any](), Counter[Any]()
    whole, parts = set[tuple[int, ...]](), list[Doc]()
    for source in world.sources:
        for doc in (world.laid(source, row)[0] for shard in source.shards for row in shard):
            if doc is None:
                continue
            labels = [one if yes else -100 for one, yes in zip(doc.ids, doc.trained, strict=True)][1:]
            for pair in zip(doc.ids, labels, strict=False):
                pairs[pair] += source.epochs or 1
            for one in doc.pictures:
                assert one.patches is not None
                images[one.grid, one.patches.tobytes()] += source.epochs or 1
            if doc.atoms and doc.atoms[0][:2] == (0, doc.positions):
                whole.add(tuple(doc.ids[:-1]))
            else:
                parts.append(doc)
    found_pairs, found_images = Counter[Any](), Counter[Any]()
    with opened(world) as stream:
        fleet = Fleet(stream, world.degrees[-1], pad_last=True)
        while (step := fleet.records()) is not None:
            for one in (one for lane in step.values() for record in lane for one in check(world, record)):
                if one.filler:
                    continue
                found_pairs.update(zip(one.ids, one.labels, strict=True))
                found_images.update((tuple(grid), patches.tobytes()) for grid, patches in one.images)
                if one.images and tuple(one.ids) not in whole:
                    assert any(is_part(doc, one.ids) for doc in parts)
        assert fleet.common_stats().positions == pairs.total()
    assert found_images == images
    assert found_pairs == pairs


def is_part(doc: Doc, ids: list[int]) -> bool:
    """Whether `ids` are a part of a sample between two places where it may be cut."""
    return any(
        doc.ids[start : start + len(ids)] == ids and may_cut(doc, start) and may_cut(doc, start + len(ids))
        for start in range(doc.positions - len(ids) + 1)
    )


# --- 1. elastic ----------------------------------------------------------------------------------------------------


@law(20)
@given(image_worlds(finite=None, max_lanes=6), st.booleans())
def test_elastic_every_degree_gives_the_same_digests(world: ImageWorld, pad_last: bool) -> None:
    found = {}
    with opened(world) as stream:
        for degree in world.degrees:
            fleet = Fleet(stream, degree, pad_last=pad_last and world.finite)
            found[degree] = fleet.to_end() if world.finite else fleet.steps(3), fleet.state()
            counts = Counter[str]()
            for loader in fleet.loaders:
                for name, dropped in loader.stats().dropped.items():
                    counts[name] += dropped.get("broken image", 0)
            found[degree] += (counts,)
    assert all(one == found[1] for one in found.values())


# --- 2. resumable --------------------------------------------------------------------------------------------------


def broken_images(fleet: Fleet) -> dict[str, int]:
    """The sum over ranks, by source."""
    counted = [loader.stats().dropped for loader in fleet.loaders]
    return {name: sum(one[name].get("broken image", 0) for one in counted) for name in counted[0]}


@law(14)
@given(image_worlds(), st.data())
def test_resumable_three_times_each_at_another_degree(world: ImageWorld, data: st.DataObject) -> None:
    check_resumes(opened, world, data, longest=5, after=2)


@law(15)
@given(image_worlds(finite=True, bad=(0.0,)), st.data())
def test_resumable_a_finite_stream_ends_at_the_same_step_with_the_same_statistics(
    world: ImageWorld, data: st.DataObject
) -> None:
    before, after = (data.draw(st.sampled_from(world.degrees), label="degree") for _ in range(2))
    with opened(world) as stream:
        fleet = Fleet(stream, before, pad_last=True)
        expected, states = [], [fleet.state()]
        while (records := fleet.records()) is not None:
            expected.append(step_digest({lane: lane_digest(mine) for lane, mine in records.items()}))
            states.append(fleet.state())
        stats = fleet.common_stats()
        stop = data.draw(st.integers(0, len(expected)), label="stop")
        fleet = Fleet(stream, after, states[stop], pad_last=True)
        assert fleet.to_end() == expected[stop:]
        assert fleet.state() == states[-1]
        assert fleet.common_stats() == stats


# --- 3. execution never changes data -------------------------------------------------------------------------------


def micro_batches(
    stream: zephon.Stream, degree: int, local: int | None, steps: int
) -> tuple[list[list[str]], dict[str, bytes]]:
    """Digests of the records of each rank, in order, taken micro-batch by micro-batch, and the state in the end."""
    found, loaders = [], [stream.loader(rank, degree, local) for rank in range(degree)]
    for loader in loaders:
        mine = list[str]()
        while loader.step < steps:
            batch = next(loader)
            assert "_late" not in batch
            assert len(batch["input"]) == (local or len(batch["input"]))
            if len(mine) % 2:  # a trainer has widened it
                batch = {name: one.astype(np.int64) if one.dtype == np.int32 else one for name, one in batch.items()}
            mine += [lane_digest([record]).hex() for record in stream.worker.records(batch)]
        found.append(mine)
    return found, merge([loader.state_dict() for loader in loaders])


@law(10)
@given(image_worlds(), st.data())
def test_execution_micro_batches_threads_and_read_ahead_do_not_matter(world: ImageWorld, data: st.DataObject) -> None:
    degree = data.draw(st.sampled_from(world.degrees), label="degree")
    locals_ = st.sampled_from(divisors(world.batch // degree))
    with opened(world) as stream:
        expected = micro_batches(stream, degree, None, 3)
        fleet = Fleet(stream, 1)
        fleet.steps(3)
        stats = fleet.stats()
        assert fleet.state() == expected[1]
        assert micro_batches(stream, degree, data.draw(locals_, label="local"), 3) == expected
    with opened(replace(world, runner="threads", workers=data.draw(st.integers(1, 3)))) as stream:
        assert micro_batches(stream, degree, data.draw(locals_, label="local"), 3) == expected
        fleet = Fleet(stream, degree)
        fleet.steps(3)
        assert fleet.stats() == stats


@pytest.mark.parametrize(
    ("runner", "workers", "isolate", "changes"),
    [
        ("process", 1, False, {"algorithm": "best_fit", "bins": 3}),
        ("threads", 2, True, {"on_end": "renormalise", "per_lane": 1}),
    ],
)
def test_execution_processes_give_what_one_inline_rank_gives(
    runner: str, workers: int, isolate: bool, changes: dict[str, Any]
) -> None:
    world = plain_images(bad=0.2, **changes)
    with opened(world) as stream:
        fleet = Fleet(stream, 1, pad_last=world.finite)
        expected, states, stats = [], [], []
        while len(expected) < 6 and (records := fleet.records()) is not None:
            expected.append(step_digest({lane: lane_digest(mine) for lane, mine in records.items()}))
            states.append(fleet.state())
            stats.append(fleet.stats())
    assert len(expected) > 3
    assert sum(one.get("broken image", 0) for one in stats[-1]["dropped"].values()) > 1
    with opened(replace(world, runner=runner, workers=workers, isolate=isolate)) as stream:
        begin = 0 if world.finite else 2
        fleet = Fleet(stream, 1, states[begin - 1] if begin else None, pad_last=world.finite)
        for step in range(begin, len(expected)):
            assert fleet.step() == expected[step]
            assert fleet.state() == states[step]
            assert fleet.stats() == stats[step]


def test_execution_what_was_handed_over_is_the_trainers_to_write_on() -> None:
    world = plain_images()
    with opened(world) as stream:
        expected = Fleet(stream, 1).steps(4)
        loader, found = stream.loader(), []
        for _ in range(4):
            records = loader.step_records()
            found.append(step_digest({lane: lane_digest(mine) for lane, mine in records.items()}))
            for array in (array for lane in records.values() for record in lane for array in record.values()):
                array[...] = 1
    assert found == expected


# --- 5. bounded ----------------------------------------------------------------------------------------------------


def test_bounded_a_lane_needs_at_most_4_kib_with_many_sources_and_many_open_bins() -> None:
    rows = [Row((Img("PNG", 20, 20, number), f"{number}")) for number in range(40)]
    sources = tuple(
        source_of(f"s{i}", "jsonl", "image_first", rows, chunk_rows=8) if i % 3 == 0
        else SourceSpec(f"s{i}", "1", (tuple(make_texts(i, 60, 5, 0.0)),), 16)
        for i in range(20)
    )  # fmt: skip
    world = ImageWorld(sources=sources, lanes=1, seq_len=4096, window=64, algorithm="best_fit", bins=1024, images=2)
    with opened(world) as stream:
        loader = stream.loader()
        sizes = []
        for _ in range(40):
            loader.step_records()
            sizes.append(len(loader.state_dict()["lane_00000"]))
    assert max(sizes) <= 4096


def test_bounded_state_and_memory_do_not_grow_with_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modalities.image_text.logger.disabled", True)  # pytest keeps what is logged
    world = plain_images(bad=0.2, lanes=1, per_lane=1)
    with opened(world) as stream:
        loader = stream.loader()
        sizes: list[int] = []

        def run(steps: int) -> int:
            for _ in range(steps):
                next(loader)
                sizes.append(len(loader.state_dict()["lane_00000"]))
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        list(map(_WORDS.__getitem__, range(1 << 12)))  # all that the encoder keeps, whatever has been encoded before
        tracemalloc.start()
        try:
            early, late = run(80), run(240)
        finally:
            tracemalloc.stop()
    assert max(sizes[80:]) <= max(sizes[:80]) + 16
    assert late - early < 240 * 400
    assert max(sizes) < 400


# --- 6. independence -----------------------------------------------------------------------------------------------


def captions(world: ImageWorld, count: int) -> list[list[str]]:
    """The documents of source "A" in order of delivery, lane by lane: with concat, the order at the mixer's output."""
    found: list[list[str]] = [[] for _ in range(world.lanes)]
    with opened(world) as stream:
        loader = stream.loader()
        tokens: list[list[int]] = [[] for _ in range(world.lanes)]
        for _ in range(count):
            for lane, records in loader.step_records().items():
                for one in (one for record in records for one in segments(world, record) if not one.filler):
                    tokens[lane] += one.ids
    for lane, ids in enumerate(tokens):
        text = bytes(0 if one == 256 else one if one < 256 else 1 for one in ids)
        found[lane] = [one.replace(b"\1", b"").decode() for one in text.split(b"\0")[1:-1] if b"A" in one]
    return found


def named(name: str, rows: int, weight: str, format: str, shape: str, most: int) -> ImageSource:
    rng = random.Random(f"{name} {rows} {format}")
    made = []
    for number in range(rows):
        images = [Img("PNG", 20, 20 + rng.randint(0, most), number % 9) for _ in range(rng.choice([1, 2]))]
        made.append(Row((*images[: 1 if format == "tar" else 2], f"{name}{number}")))
    return source_of(name, format, shape, made, weight=weight)


@law(6)
@given(st.data())
def test_independence_the_order_inside_a_source_does_not_depend_on_the_others(data: st.DataObject) -> None:
    format, shape = data.draw(st.sampled_from([("tar", "image_first"), ("jsonl", "parts"), ("parquet", "interleaved")]))
    kept = named("A", data.draw(st.integers(1, 14), label="rows"), "0.5", format, shape, 40)
    world = ImageWorld(
        sources=(kept, named("B", data.draw(st.integers(1, 9)), "0.5", "jsonl", "image_first", 40)),
        seed=data.draw(st.integers(0, 99)),
        lanes=data.draw(st.sampled_from([1, 2, 3])),
        per_lane=2,
        seq_len=data.draw(st.sampled_from([24, 48])),
        window=data.draw(st.sampled_from([0, 2, 16])),
        patches=data.draw(st.sampled_from([None, 16, 40])),
    )
    other = named("B", data.draw(st.integers(1, 9)), data.draw(st.sampled_from(["0.05", "3"])), "tar", "image_last", 9)
    text = SourceSpec("C", "0.7", (("c", "cc", "ccc" * 20),), 1)
    expected = captions(world, 6)
    for sources in [(kept,), (other, kept), (text, replace(kept, weight="4"), other)]:
        found = captions(replace(world, sources=sources), 6)
        for lane in range(world.lanes):
            both = min(len(expected[lane]), len(found[lane]))
            assert found[lane][:both] == expected[lane][:both]
    assert sum(map(len, expected)) > 3


# --- 7. pure -------------------------------------------------------------------------------------------------------


def modality(world: ImageWorld, folder: Path, **options: Any) -> Any:
    budgets = {name: most for name, most in (("patches", world.patches), ("images", world.images)) if most}
    spec = TokenizerSpec(vision_tokenizer(world.tokenizer))
    given = {"preset": world.preset, "layout": "parts", "min_pixels": 1024, "max_pixels": 9216, **options}
    return find_modality("image_text")(given, Context(world.seq_len, spec, (), budgets, folder, "skip"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_pixel": 4096}, r"max_pixel is not a known key; .* takes layout, .*Did you mean 'max_pixels'\?"),
        ({"weigth": 1}, r"every source takes name, .*Did you mean 'weight'\?"),
        ({"preset": "qwen"}, "preset must be one of 'qwen3_5'"),
        ({"min_pixels": 0}, "min_pixels must be from 1"),
        ({"keep_whole": 1}, "keep_whole must be true or false, it is 1"),
        ({"image": []}, r"image must be the name of a field, or a list .*, it is \[\]"),
        ({"text": ["txt", 3]}, "text must be the name of a field, or a list"),
        ({"marker": ""}, "marker is empty"),
        ({"background": [255, 255]}, r"background must be red, green and blue from 0 to 255, .* it is \[255, 255\]"),
        ({"background": [255, 255, True]}, "background must be red, green and blue"),
        ({"background": [0, 0, 256]}, "background must be red, green and blue"),
        ({"background": "white"}, "background must be red, green and blue .* it is 'white'"),
    ],
)
def test_options_are_strict(options: dict[str, Any], says: str) -> None:
    with pytest.raises(zephon.RecipeError, match=f"modality 'image_text': .*{says}"):
        modality(ImageWorld(sources=(), seq_len=40, patches=40, images=5, tokenizer="eos"), Path(), **options)


def in_memory(row: Row) -> dict[str, Any]:
    return stored(row, "parts", lambda _, img: {"bytes": b"" if img is None else file_bytes(img), "path": None})


def made(worker: Any, groups: Sequence[Sequence[int]], rows: Sequence[dict[str, Any]]) -> dict[int, Any]:
    """What comes of rows, given in groups: size, counters, atoms and the built record of each."""
    found = {}
    for group in groups:
        measured = worker.measure([rows[i] for i in group])
        plans, kept = [], []
        for index, (row, size) in enumerate(zip(measured.rows, measured.positions, strict=True)):
            number, atoms = group[row], measured.atoms.get(index, ())
            about = int(size), measured.counts.get(index, ()), atoms, measured.faults.get(index)
            if not size:
                found[number] = about
                continue
            sample = Sample(Ref(0, 0, 0, number, 0), size, measured.payloads[index], (), atoms)
            end = size if size <= 40 else min([40, *(atom.start for atom in atoms if atom.start < 40 < atom.end)])
            plans.append([Segment(sample, 0, end)] if end else [])
            kept.append((number, about))
        batch = worker.materialise(plans)
        late = batch.pop("_late", np.empty((0, 3), np.int32)).tolist()
        records = worker.records(batch) if plans else []
        for i, ((number, about), record) in enumerate(zip(kept, records, strict=True)):
            found[number] = *about, lane_digest([record]).hex(), [one[1:] for one in late if one[0] == i]
    return found


@law(12)
@given(st.integers(0, 2**20), st.data())
def test_pure_the_same_rows_give_the_same_samples_in_any_grouping_and_any_thread(
    seed: int, data: st.DataObject
) -> None:
    world = ImageWorld(sources=(), seq_len=40, patches=40, images=5, tokenizer="eos")
    rows = [in_memory(row) for row in rows_of(seed, 10, "jsonl", "parts", 0.2) if row.fault != "lost"]
    numbers = list(range(len(rows)))
    worker, other = modality(world, Path(), over_budget="shrink"), modality(world, Path(), over_budget="shrink")
    expected = made(worker, [numbers], rows)
    assert sorted(expected) == numbers
    order, groups = data.draw(st.permutations(numbers)), []
    while order:
        size = data.draw(st.integers(1, len(order)))
        groups.append(order[:size])
        order = order[size:]
    assert made(other, groups, rows) == expected
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(lambda one: made(worker, [[one]], rows), numbers * 2):
            assert all(expected[number] == one for number, one in found.items())


CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from image_worlds import opened
from test_image_text_laws import plain_images
from worlds import Fleet
with opened(plain_images(bad=0.2)) as stream:
    json.dump(Fleet(stream, 2).steps(3), sys.stdout)
"""


def test_pure_another_process_with_another_hash_seed_gives_the_same_digests() -> None:
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "TZ": "Asia/Tokyo", "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=180)
    with opened(plain_images(bad=0.2)) as stream:
        assert json.loads(run.stdout) == Fleet(stream, 1).steps(3)


# --- the null image ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["qwen3_5", "qwen2_vl", "glimmer"])
@pytest.mark.parametrize("algorithm", ["concat", "best_fit"])
def test_null_image_ends_every_record_without_images(preset: str, algorithm: str) -> None:
    sources = (
        SourceSpec("text", "1000", (tuple(make_texts(5, 20, 60, 0.0)),), 4),
        source_of("rare", "jsonl", "image_first", [Row((Img("PNG", 60, 60), "a"))], min_pixels=None, max_pixels=None),
    )
    world = ImageWorld(sources=sources, lanes=1, per_lane=2, seq_len=24, preset=preset, algorithm=algorithm)
    geometry = world.kind.geometry
    with opened(world) as stream:
        loader = stream.loader()
        found = [record for _ in range(4) for record in loader.step_records()[0]]
    nulls = 0
    for record in found:
        *_, last = check(world, record)
        if last.filler:
            nulls += 1
            ((grid, patches),) = last.images
            assert grid == [1, geometry.merge_size, geometry.merge_size]
            assert patches.shape == (geometry.merge_size**2, 3 * geometry.patch_size**2)
            assert last.mrope in (None, [[0, 0, 0], [1, 1, 1], [2, 2, 2]])
    assert nulls > 4
    if algorithm == "concat":  # text fills all that the null image leaves, but before an image that must not be cut
        assert sum(record["document_ids"][-1] < 0 for record in found) <= len(found) - nulls


def test_null_image_pads_the_last_step_of_a_validation() -> None:
    sources = (source_of("only", "jsonl", "image_first", [Row((Img("PNG", 20, 20), "a"))]),)
    world = ImageWorld(sources=sources, lanes=4, seq_len=24, on_end="renormalise")
    with opened(world) as stream:
        records = Fleet(stream, 4, pad_last=True).records()
    assert records is not None
    for lane in (1, 2, 3):
        same(records[lane][0], record_of(world, []))
        assert [one.filler for one in check(world, records[lane][0])] == [True]
    assert null_image(world).positions == FILLER


# --- budgets -------------------------------------------------------------------------------------------------------


def with_budget(rows: Sequence[Row], over: str, whole: bool = True, **changes: Any) -> ImageWorld:
    source = source_of("only", "jsonl", "parts", rows, over=over, whole=whole, epochs=1, chunk_rows=1)
    world = ImageWorld(sources=(source,), lanes=1, seq_len=32, on_end="renormalise", tokenizer="eos", patches=24)
    return replace(world, **changes)


def delivered(world: ImageWorld) -> tuple[list[list[Found]], dict[str, int]]:
    with opened(world) as stream:
        fleet, found = Fleet(stream, 1, pad_last=True), []
        while (step := fleet.records()) is not None:
            found += [check(world, record) for lane in step.values() for record in lane]
        return found, fleet.common_stats().dropped["only"]


BIG = Img("PNG", 64, 64)  # 4 tokens, 16 patches
POLICY = [Row((BIG, "ab", BIG, "cd")), Row((Img("PNG", 30, 30), "ef"))]


@pytest.mark.parametrize("algorithm", ["concat", "best_fit"])
def test_over_budget_split_parts_a_sample_between_its_images(algorithm: str) -> None:
    found, counted = delivered(with_budget(POLICY, "split", algorithm=algorithm))
    grids = [[grid for one in record for grid, _ in one.images if not one.filler] for record in found]
    assert sorted(grid for record in grids for grid in record) == [[1, 2, 2], [1, 4, 4], [1, 4, 4]]
    assert all(sum(rows * columns for _, rows, columns in record) <= 24 for record in grids)
    assert not counted["shrunk to fit"]
    assert not counted["over budget"]


def test_over_budget_shrink_keeps_a_sample_whole_and_counts_it() -> None:
    found, counted = delivered(with_budget(POLICY, "shrink"))
    assert counted["shrunk to fit"] == 1
    assert not counted["over budget"]
    both = [one for record in found for one in record if len(one.images) == 2]
    ((first, _), (second, _)) = both[0].images  # 24 patches: the most for two of one shape is 2 x 2 tokens each, 32
    assert first == second == [1, 2, 2]
    assert len(both) == 1
    assert len(both[0].ids) == 2 * 3 + 4
    assert sum(len(one.images) for record in found for one in record if not one.filler) == 3


def test_over_budget_shrink_splits_what_is_too_much_even_at_its_smallest() -> None:
    rows = [Row((BIG, "a", BIG, "b", BIG, "c"))]
    found, counted = delivered(with_budget(rows, "shrink", patches=5))
    assert [sum(not one.filler for one in record) for record in found] == [1, 1, 1]
    assert counted["shrunk to fit"] == 1


def test_over_budget_drop_leaves_a_sample_out_and_counts_it() -> None:
    found, counted = delivered(with_budget(POLICY, "drop"))
    assert sum(len(one.images) for record in found for one in record if not one.filler) == 1
    assert counted["over budget"] == 1
    assert not counted["shrunk to fit"]


@pytest.mark.parametrize("over", ["split", "shrink"])
def test_over_budget_an_image_that_no_sequence_holds_is_made_smaller(over: str) -> None:
    rows = [Row((Img("PNG", 90, 90), "a"))]
    found, counted = delivered(with_budget(rows, over, patches=11))
    assert counted["shrunk to fit"] == 1
    ((grid, _),) = [image for record in found for one in record if not one.filler for image in one.images]
    assert grid[1] * grid[2] <= 11


@pytest.mark.parametrize("budget", ["patches", "images", "seq_len"])
def test_budgets_that_do_not_hold_the_null_image_are_refused(budget: str) -> None:
    least = {"patches": 3, "images": 0, "seq_len": 3}[budget]
    with pytest.raises(zephon.RecipeError, match=budget), opened(replace(plain_images(), **{budget: least})):
        pass


def test_a_budget_of_one_image_is_enough() -> None:
    rows = [Row((Img("PNG", 33, 33, 1), "a")), Row(("only text",)), Row((Img("PNG", 33, 33, 2), "b", Img("PNG", 9, 9)))]
    found, _ = delivered(with_budget(rows, "split", images=1, patches=4))
    assert found
    assert {sum(len(one.images) for one in record) for record in found} == {1}


def test_keep_whole_a_sample_that_fits_is_never_cut() -> None:
    rows = [Row((Img("PNG", 33, 33 * (1 + i % 2), i), "x" * (i % 23), f"{i}")) for i in range(30)]
    for algorithm in ("concat", "best_fit"):
        world = with_budget(rows, "split", algorithm=algorithm, patches=None, lanes=2)
        whole = {tuple(doc.ids[:-1]) for doc in docs(world)}
        found, _ = delivered(world)
        segments_of = [tuple(one.ids) for record in found for one in record if not one.filler]
        assert set(segments_of) == whole
        assert len(segments_of) == len(rows)


def test_keep_whole_false_cuts_text_but_no_run_of_placeholders() -> None:
    rows = [Row((f"{i}", Img("PNG", 60, 60, i), "x" * (i % 23))) for i in range(30)]
    found, _ = delivered(with_budget(rows, "split", whole=False, patches=None, lanes=2))
    pieces = [one for record in found for one in record if not one.filler]
    assert len(pieces) > len(rows)
    assert sum(len(one.images) for one in pieces) == len(rows)


# --- pixels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["qwen3_5", "qwen2_vl", "glimmer"])
@pytest.mark.parametrize(("format", "shape"), [("tar", "image_last"), ("jsonl", "marker"), ("parquet", "parts")])
def test_pixels_are_those_of_the_image_at_its_target_size(format: str, shape: str, preset: str) -> None:
    kinds = [Img(kind, 41, 77, seed) for kind in ("JPEG", "PNG", "WEBP", "GIF") for seed in range(4)]
    rows = [Row((f"{i}:", img) if shape != "marker" else (f"{i}:", img, "!")) for i, img in enumerate(kinds)]
    source = source_of("only", format, shape, rows, background=(10, 200, 30), min_pixels=784, max_pixels=9000)
    world = ImageWorld(sources=(source,), lanes=1, seq_len=64, on_end="renormalise", preset=preset, tokenizer="eos")
    geometry = world.geometry(source)
    target = geometry.target(41, 77)
    found = {}
    for record in delivered(replace(world, sources=(source,)))[0]:
        for one in (one for one in record if not one.filler):
            (image,) = one.images
            found[int(bytes(i for i in one.ids if i < 256).split(b":")[0])] = image
    assert sorted(found) == list(range(len(kinds)))
    for number, img in enumerate(kinds):
        grid, patches = found[number]
        assert grid == list(geometry.grid(*target))
        assert np.array_equal(patches, patches_of(img, target, (10, 200, 30), geometry))


def test_pixels_as_floats_are_normalised_and_hold_the_temporal_copy() -> None:
    world = plain_images(bad=0.2, lanes=1)
    with opened(world) as plain, opened(replace(world, sources=world.sources, floats=True)) as floats:
        one, other = plain.loader(), floats.loader()
        for _ in range(3):
            for record, expanded in zip(one.step_records()[0], other.step_records()[0], strict=True):
                values = expand(torch.from_numpy(record["pixel_values"].copy()), world.kind.geometry, (0.5,) * 3,
                                (0.5,) * 3)  # fmt: skip
                assert expanded["pixel_values"].dtype == np.float32
                assert np.array_equal(expanded["pixel_values"], values.numpy())
                assert all(np.array_equal(record[name], expanded[name]) for name in record if name != "pixel_values")


# --- odd tokenizers, filters and maps ------------------------------------------------------------------------------


def test_placeholders_may_have_id_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a record leaves free is no placeholder: a model would look for its image."""
    names = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<eos>"]
    vocabulary = {name: number for number, name in enumerate([*names, *byte_letters().values()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("image_worlds.vision_tokenizer", lambda kind: tmp_path)
    rows = [Row((Img("PNG", 20, 20, i), "x" * (3 * i + 1))) for i in range(6)]
    world = ImageWorld(sources=(source_of("only", "jsonl", "image_first", rows),), lanes=2, seq_len=24)
    with opened(world) as stream:
        loader = stream.loader()
        for _ in range(3):
            for record in (record for lane in loader.step_records().values() for record in lane):
                pads = record["input"] == 0
                runs = int((pads[1:] & ~pads[:-1]).sum()) + int(pads[0])
                assert runs == len(record["grid_thw"])
                assert len(record["pixel_values"]) == record["grid_thw"].prod(axis=1).sum()


def test_a_tokenizer_that_makes_marks_of_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caption could hold an image that is not there."""
    tree = json.loads((vision_tokenizer("eos") / "tokenizer.json").read_text())
    for token in tree["added_tokens"]:
        token["special"] = token["content"] != "<|image_pad|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    monkeypatch.setattr(sys.modules[__name__], "vision_tokenizer", lambda kind: tmp_path)
    with pytest.raises(zephon.RecipeError, match=r'makes <\|image_pad\|> of text .*Give these tokens "special": true'):
        modality(ImageWorld(sources=(), seq_len=40, patches=40, images=5, tokenizer="eos"), Path())


def test_fields_and_markers_have_the_names_that_a_recipe_gives(tmp_path: Path) -> None:
    world = ImageWorld(sources=(), seq_len=40, tokenizer="none")
    img = Img("PNG", 30, 30)
    (tmp_path / "one.png").write_bytes(file_bytes(img))
    worker = modality(world, tmp_path, layout="marker", image=["pic", "other"], text="words", marker="[x]")
    rows = [{"words": "a[x]<image>b", name: "one.png", "text": "no", "image": "no.png"} for name in ("pic", "other")]
    measured = worker.measure(rows)
    for number in range(2):
        sample = Sample(Ref(0, 0, 0, number, 0), measured.positions[number], measured.payloads[number])
        batch = worker.materialise([[Segment(sample, 0, sample.positions)]])
        assert batch["input"][0, :6].tolist() == [97, START, PAD, END, *b"<i"]
        assert batch["pixel_values"].any()


HOOKS = """
def keep(row):
    return "drop" not in row[TEXT]

def change(row):
    return {**row, TEXT: row[TEXT].upper()}
"""


@pytest.mark.parametrize(
    ("format", "shape"), [("tar", "image_first"), ("jsonl", "image_first"), ("parquet", "image_first")]
)
def test_filters_and_maps_see_rows_with_images_and_keep_what_must_not_be_cut(format: str, shape: str) -> None:
    rows = [Row((Img("PNG", 40, 40, i), f"{i} drop" if i % 3 == 0 else f"{i} take" + "k" * i)) for i in range(9)]
    world = with_budget(rows, "split").with_source(0, format=format, shape=shape)
    with built(world) as recipe:
        text = "txt" if format == "tar" else "text"
        (recipe.parent / f"hooks_{format}.py").write_text(HOOKS.replace("TEXT", repr(text)))
        hooks = f'filter = "hooks_{format}:keep"\nmap = "hooks_{format}:change"\n[mix]'
        recipe.write_text(recipe.read_text().replace("[mix]", hooks))
        with zephon.Stream.open(recipe) as stream:
            fleet, found = Fleet(stream, 1, pad_last=True), list[Found]()
            while (step := fleet.records()) is not None:
                found += [one for lane in step.values() for record in lane for one in check(world, record)]
            counted = fleet.common_stats().dropped["only"]
    texts = [bytes(i for i in one.ids if i < 256).decode() for one in found if not one.filler]
    assert sorted(texts) == [f"{i} TAKE" + "K" * i for i in range(9) if i % 3]
    assert all(len(one.images) == 1 for one in found)
    assert counted["filtered"] == 3


# --- beside TorchTitan ---------------------------------------------------------------------------------------------


def titan_tokenizer() -> Any:
    from torchtitan.components.tokenizer import MultiModalTokenizer

    config = MultiModalTokenizer.Config(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        pad_token="<eos>",
    )
    return MultiModalTokenizer(config, tokenizer_path=str(vision_tokenizer("titan")))


@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities")
@law(25)
@given(st.integers(0, 2**20), st.sampled_from(["qwen3_5", "qwen2_vl"]))
def test_titan_ids_labels_and_grids_are_those_of_its_own_processor(seed: int, preset: str) -> None:
    from torchtitan.hf_datasets.multimodal.mm_datasets import _process_mm_sample
    from torchtitan.hf_datasets.multimodal.utils.image import resize_to_pixel_budget, vision_to_patches

    rng = random.Random(seed)
    parts: list[str | Img] = []
    for _ in range(rng.randint(1, 4)):
        parts.append("".join(rng.choices("abc .,é漢😀\n", k=rng.randint(0, 8))) + "z")
        if rng.random() < 0.7:
            parts += [Img(rng.choice(["JPEG", "PNG"]), rng.randint(9, 90), rng.randint(9, 90), 0)]
    if rng.random() < 0.5:
        parts.append(parts.pop(0))
    first = next(i for i, part in enumerate(parts) if isinstance(part, str))
    parts[first] = "a" + cast(str, parts[first])  # TorchTitan strips texts
    world = ImageWorld(sources=(), seq_len=4096, preset=preset, tokenizer="eos")
    source = source_of("x", "jsonl", "parts", [Row(tuple(parts))], max_pixels=9216)
    geometry = world.geometry(source)
    worker = modality(world, Path())
    measured = worker.measure([in_memory(Row(tuple(parts)))])
    titan = _process_mm_sample(
        texts=[part if isinstance(part, str) else None for part in parts],
        images=[None if isinstance(part, str) else file_bytes(part) for part in parts],
        tokenizer=titan_tokenizer(),
        patch_size=geometry.patch_size,
        temporal_patch_size=geometry.temporal,
        spatial_merge_size=geometry.merge_size,
        min_pixels=1024,
        max_pixels=9216,
        image_mean=(0.5,) * 3,
        image_std=(0.5,) * 3,
        resize_fn=resize_to_pixel_budget,
        max_patches=4096,
        max_patches_per_side=512,
    )
    assert titan is not None
    (size,) = measured.positions
    assert size == len(titan["input_ids"]) - 1
    plan = [Segment(Sample(Ref(0, 0, 0, 0, 0), size, measured.payloads[0]), 0, size)]
    batch = worker.materialise([plan])
    assert batch["input"][0, :size].tolist() == titan["input_ids"][:-1].tolist()
    assert batch["labels"][0, :size].tolist() == titan["labels"][1:].tolist()
    assert batch["positions"][0, :size].tolist() == titan["positions"][:-1].tolist()
    grids = [
        vision_to_patches(one, geometry.patch_size, geometry.temporal, geometry.merge_size)[1].tolist()
        for one in titan["pixel_values"]
    ]
    assert batch["grid_thw"].tolist() == grids
    assert (
        batch["mrope_positions"][0, :size].tolist()
        == titan_mrope(titan["input_ids"][:-1].tolist(), cast(Any, grids), geometry.merge_size).tolist()
    )


def test_titan_its_tokenizer_gives_the_ids_of_ours() -> None:
    tokenizer = titan_tokenizer()
    assert (tokenizer.vision_start_id, tokenizer.image_id, tokenizer.vision_end_id) == (START, PAD, END)
    assert tokenizer.encode("a<|image_pad|>é") == [97, PAD, 0xC3, 0xA9]


# --- broken images -------------------------------------------------------------------------------------------------


def test_broken_damaged_files_have_a_whole_header_and_cannot_be_decoded() -> None:
    for kind in ("JPEG", "PNG", "WEBP", "GIF"):
        for seed in range(6):
            img = Img(kind, 40, 30 + seed, seed, "data")
            assert read_header(Bytes(file_bytes(img))).shown() == (40, 30 + seed)
            with pytest.raises(ImageError):
                load(file_bytes(img), (40, 30))


def mended(world: ImageWorld) -> ImageWorld:
    """The same world with nothing damaged behind a header."""

    def mend(row: Any) -> Any:
        if isinstance(row, str):
            return row
        parts = [replace(one, damage="") if isinstance(one, Img) and one.damage == "data" else one for one in row.parts]
        return row._replace(parts=tuple(parts))

    for index, source in enumerate(world.sources):
        shards = tuple(tuple(mend(row) for row in rows) for rows in source.shards)
        world = world.with_source(index, shards=cast(Any, shards))
    return world


@law(15)
@given(image_worlds(finite=None, bad=(0.3,), formats=("jsonl", "tar")))
def test_broken_images_keep_every_plan(world: ImageWorld) -> None:
    """In a world whose images are whole, the same records but for pixels and labels."""
    with opened(world) as one, opened(mended(world)) as other:
        found, whole = Fleet(one, 1, pad_last=world.finite), Fleet(other, 1, pad_last=world.finite)
        for _ in range(4):
            broken, right = found.records(), whole.records()
            assert (broken is None) == (right is None)
            for lane in broken or {}:
                for bad, good in zip((broken or {})[lane], (right or {})[lane], strict=True):
                    assert {name: array.shape for name, array in bad.items()} == {
                        name: array.shape for name, array in good.items()
                    }
                    for name in good:
                        if name not in ("labels", "pixel_values"):
                            assert np.array_equal(bad[name], good[name]), name
                    for damaged, fine in zip(segments(world, bad), segments(world, good), strict=True):
                        assert damaged.labels == fine.labels or set(damaged.labels) == {-100}
                        for (_, a), (_, b) in zip(damaged.images, fine.images, strict=True):
                            assert np.array_equal(a, b) or not a.any()
        assert [loader.stats().records for loader in found.loaders] == [
            loader.stats().records for loader in whole.loaders
        ]


def with_broken(**changes: Any) -> ImageWorld:
    """Every third image of two sources is broken, one image a sample."""

    def rows(kind: str) -> list[Row]:
        return [Row((Img(kind, 30, 30, i, "data" if i % 3 == 0 else ""), f"{i} abc")) for i in range(9)]

    sources = (
        source_of("a", "jsonl", "image_first", rows("PNG"), epochs=1 if changes.get("on_end") else None),
        source_of("b", "tar", "image_last", rows("JPEG"), epochs=2 if changes.get("on_end") else None),
        SourceSpec("text", "1", (tuple(make_texts(3, 9, 9, 0.0)),), 3),
    )
    return replace(ImageWorld(sources=sources, lanes=4, per_lane=2, seq_len=24, window=4), **changes)


@pytest.mark.parametrize("algorithm", ["concat", "best_fit"])
@pytest.mark.parametrize("pad_last", [False, True])
def test_broken_images_of_a_finite_stream_are_counted_once_whatever_the_ranks(algorithm: str, pad_last: bool) -> None:
    world = with_broken(on_end="renormalise", per_lane=1, algorithm=algorithm, bins=2)
    found = {}
    with opened(world) as stream:
        for degree in world.degrees:
            fleet = Fleet(stream, degree, pad_last=pad_last)
            fleet.to_end()
            found[degree] = broken_images(fleet)
    assert all(one == found[1] for one in found.values())
    if pad_last:
        assert found[1] == {"a": 3, "b": 6, "text": 0}


@pytest.mark.parametrize("local", [1, 2, None])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_broken_images_of_lanes_are_counted_once_through_resumes(degree: int, local: int | None) -> None:
    world = with_broken()
    local = local if local is None or world.batch // degree % local == 0 else 1
    oracles = [ImageOracle(world, lane) for lane in range(world.lanes)]
    with opened(world) as stream:
        state: dict[str, bytes] | None = None
        counted = dict.fromkeys(("a", "b", "text"), 0)
        for turn in range(4):
            fleet = Fleet(stream, degree)
            fleet.loaders = [stream.loader(rank, degree, local) for rank in range(degree)]
            for loader in fleet.loaders:
                if turn == 2:  # a loader that is sent back in the middle of a step counts nothing of what it had done
                    fleet_steps(loader, 3)
                if state is not None:
                    loader.load_state_dict(state)
            if turn != 2:
                assert broken_images(fleet) == counted
                fleet.steps(2)
            else:
                fleet.steps(1)
                for loader in fleet.loaders:
                    loader.load_state_dict(state or {})
                assert broken_images(fleet) == counted
                fleet.steps(2)
            for oracle in oracles:
                for _ in range(2 * world.per_lane):
                    oracle.record()
            now = {one.name: sum(oracle.broken[one.name] for oracle in oracles) for one in world.sources}
            assert broken_images(fleet) == now
            assert sum(now.values()) > sum(counted.values())
            state, counted = fleet.state(), now
            for loader in fleet.loaders:  # part of a step changes no statistics, as it changes no state
                if local == 1 and degree < 4:
                    next(loader)
            assert broken_images(fleet) == now


def fleet_steps(loader: zephon.Loader, batches: int) -> None:
    for _ in range(batches):
        next(loader)


def test_broken_images_of_a_finite_stream_are_counted_from_the_last_start_on() -> None:
    """Ranks of a finite stream write the same state, while each knows of its own records alone."""
    world = with_broken(on_end="renormalise", per_lane=1)
    with opened(world) as stream:
        fleet = Fleet(stream, 2, pad_last=True)
        fleet.steps(2)
        state, early = fleet.state(), broken_images(fleet)
        assert sum(early.values()) > 0
        fleet.to_end()
        expected = broken_images(fleet)
        fleet = Fleet(stream, 2, state, pad_last=True)
        assert not sum(broken_images(fleet).values())
        fleet.to_end()
        assert broken_images(fleet) == {name: expected[name] - early[name] for name in expected}


def test_broken_all_positions_of_a_sample_in_a_record_are_masked_and_no_others() -> None:
    world = with_broken(on_end="renormalise", per_lane=1)
    damaged = {i for i in range(9) if i % 3 == 0}
    masked = 0
    with opened(world) as stream:
        fleet = Fleet(stream, 1, pad_last=True)
        while (step := fleet.records()) is not None:
            for record in (record for lane in step.values() for record in lane):
                for one in check(world, record):
                    if one.filler or not one.images:
                        continue
                    number = int(bytes(i for i in one.ids if i < 256).split()[0])
                    ((_, patches),) = one.images
                    assert patches.any() == (number not in damaged)
                    assert (set(one.labels) == {-100}) == (number in damaged)
                    masked += number in damaged
    assert masked == 9


@pytest.mark.parametrize("algorithm", ["concat", "best_fit"])
def test_broken_a_sample_in_two_segments_of_one_record_is_masked_in_both(algorithm: str) -> None:
    """The beginning of a long sample and its end may share a record, parted by another sample or for want of room."""
    end = Img("PNG", 20, 20, 1, "data")
    if algorithm == "best_fit":
        row = Row(("abcdefg", Img("PNG", 60, 200, 0), "hijkkkk", end, "l"))  # 7, 14 and 12 positions of 18
        sources: tuple[SourceSpec, ...] = (source_of("only", "jsonl", "parts", [row], whole=False, max_pixels=65536),)
    else:  # pieces of 16 and 5 positions, with 3 of text between them
        sources = (
            source_of("only", "jsonl", "parts", [Row(("abcdefghijklmnopqr", end, "l"))], whole=False, weight="3"),
            SourceSpec("text", "1", (("wxyz",),), 1),
        )
    world = ImageWorld(sources=sources, lanes=1, seq_len=18, on_end="renormalise", algorithm=algorithm, bins=4)
    world = replace(world, piece="sequence", tokenizer="none", seq_len=18 if algorithm == "best_fit" else 16)
    with opened(world) as stream:
        fleet, oracle, twice = Fleet(stream, 1, pad_last=True), ImageOracle(world), 0
        while (step := fleet.records()) is not None:
            pieces = oracle.sequence()
            twice += len(pieces) > len({id(doc) for doc, *_ in pieces})
            same(step[0][0], record_of(world, pieces))
    assert twice == 1


def test_broken_in_one_source_does_not_stop_a_run_whose_other_source_is_strict() -> None:
    world = with_broken(on_end="renormalise", per_lane=1)
    good = source_of("good", "jsonl", "image_first", [Row((Img("PNG", 30, 30, i), f"{i}")) for i in range(9)])
    for sources in [(replace(good, strict=True), *world.sources), (*world.sources, replace(good, strict=True))]:
        with opened(replace(world, sources=sources)) as stream:
            fleet = Fleet(stream, 2, pad_last=True)
            fleet.to_end()
            assert broken_images(fleet) == {"a": 3, "b": 6, "text": 0, "good": 0}


# --- what is left out, and on_error --------------------------------------------------------------------------------

ONE = Img("PNG", 20, 20)
LEFT_OUT: dict[str, tuple[str, str, Row]] = {
    "an unreadable header": ("jsonl", "image_first", Row((Img("PNG", 20, 20, 1, "header"), "a"))),
    "an empty file": ("tar", "image_first", Row((Img("PNG", 20, 20, 1, "empty"), "a"))),
    "a cell that is no image": ("parquet", "parts", Row((Img("PNG", 20, 20, 1, "header"), "a"))),
    "a path that names nothing": ("jsonl", "marker", Row((ONE, "a"), "lost")),
    "a pair without image": ("tar", "image_first", Row((ONE, "a"), "no image")),
    "a pair without text": ("tar", "image_last", Row((ONE, "a"), "no text")),
    "a row without image": ("jsonl", "image_last", Row((ONE, "a"), "no image")),
    "a row without text": ("parquet", "image_first", Row((ONE, "a"), "no text")),
    "blank text": ("jsonl", "image_first", Row((ONE, " \n\t"))),
    "no text at all": ("parquet", "interleaved", Row((ONE,))),
    "a marker too many": ("tar", "marker", Row(("a", ONE), "unusable row")),
    "lists of two lengths": ("jsonl", "interleaved", Row(("a", ONE), "unusable row")),
    "a part of no known type": ("jsonl", "parts", Row(("a", ONE), "unusable row")),
}


def with_fault(case: str, **more: Any) -> ImageWorld:
    format, shape, bad = LEFT_OUT[case]
    first = shape in ("image_first", "parts", "interleaved")
    good = [Row((Img("PNG", 25, 25, i), f"good {i}") if first else (f"good {i}", Img("PNG", 25, 25, i)))
            for i in range(4)]  # fmt: skip
    rows = [*good[:2], bad, *good[2:]]
    source = replace(source_of("only", format, shape, rows, **more), shards=cast(Any, (tuple(rows),)))
    return ImageWorld(sources=(source,), lanes=1, seq_len=64, on_end="renormalise")


@pytest.mark.parametrize("case", LEFT_OUT)
def test_left_out_and_counted_and_no_other_sample_is_touched(case: str) -> None:
    world = with_fault(case)
    found, counted = delivered(world)
    texts = [bytes(i for i in one.ids if i < 256).decode() for record in found for one in record if not one.filler]
    assert sorted(texts) == [f"good {i}" for i in range(4)]
    assert {name: number for name, number in counted.items() if number} == {"bad row": 1}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_on_error_raise_names_the_file_of_a_row_that_cannot_be_used(case: str) -> None:
    world = with_fault(case, strict=True)
    with pytest.raises(zephon.DataError, match=rf"only.*data 0.*{world.sources[0].format}"), opened(world) as stream:
        Fleet(stream, 1, pad_last=True).to_end()


@pytest.mark.parametrize(("format", "shape"), [("tar", "image_first"), ("jsonl", "parts"), ("parquet", "image_last")])
@pytest.mark.parametrize("runner", ["inline", "threads"])
def test_on_error_raise_names_the_file_of_a_broken_image(format: str, shape: str, runner: str) -> None:
    rows = [Row((Img("PNG", 25, 25, 1), "good")), Row((Img("PNG", 25, 25, 1, "data"), "bad"))]
    if shape == "image_last":
        rows = [Row(row.parts[::-1]) for row in rows]
    source = replace(source_of("only", format, shape, rows, strict=True), shards=cast(Any, (tuple(rows),)))
    world = ImageWorld(sources=(source,), lanes=1, seq_len=64, on_end="renormalise", runner=runner)
    with opened(world) as stream:
        fleet = Fleet(stream, 1, pad_last=True)
        with pytest.raises(zephon.DataError, match=r"data 0.*(part 10|pictures)"):
            fleet.to_end()
        with pytest.raises(zephon.DataError):
            fleet.step()


@pytest.mark.parametrize("case", LEFT_OUT)
def test_on_error_raise_stops_every_runner_behind_the_same_records(case: str) -> None:
    """What was decided before a bad row is delivered before it stops the run, though its building is under way."""
    format, shape, bad = LEFT_OUT[case]
    first = shape in ("image_first", "parts", "interleaved")
    good = [Row((ONE, f"good {i}") if first else (f"good {i}", ONE)) for i in range(70)]
    source = replace(source_of("only", format, shape, [*good, bad], strict=True), shards=cast(Any, ((*good, bad),)))
    world = ImageWorld(sources=(source,), lanes=1, seq_len=32)
    found: list[list[bytes]] = []
    for runner in ("inline", "threads"):
        with opened(replace(world, runner=runner)) as stream:
            batches = list[bytes]()
            with pytest.raises(zephon.DataError, match="only"):
                batches.extend(batch["input"].tobytes() for batch in stream.loader())
            found.append(batches)
    assert found[0] == found[1]
    assert len(found[0]) > 10


def test_refusal_a_state_of_other_budgets_sizes_or_policies_is_refused_by_field() -> None:
    world = plain_images()
    with opened(world) as stream:
        state = Fleet(stream, 1).state()
    cases: list[tuple[ImageWorld, str]] = [
        (replace(world, patches=44), "patches"),
        (replace(world, images=5), "images"),
        (world.with_source(1, over="drop"), "pairs"),
        (world.with_source(1, whole=False), "pairs"),
        (world.with_source(1, max_pixels=5000), "pairs"),
        (world.with_source(2, background=(0, 0, 0)), "pages"),
        (replace(world, floats=True), "pairs"),
    ]
    for other, names in cases:
        with opened(other) as stream, pytest.raises(zephon.RestoreError, match=f"(?s){names}"):
            stream.loader().load_state_dict(state)


def test_a_folder_of_images_may_move() -> None:
    world = plain_images()
    with (
        built(world) as one,
        built(world) as other,
        zephon.Stream.open(one) as here,
        zephon.Stream.open(other) as there,
    ):
        fleet = Fleet(here, 1)
        fleet.steps(2)
        assert Fleet(there, 2, fleet.state()).steps(2) == fleet.steps(2)
