"""The accumulators and the text workers on their own: exact shares, nothing lost, the same in any grouping."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import BOS, EOS, World, clean, exact_weights, tokenizer_folder

from zephon.mix import Mixer, integer_weights
from zephon.modality import Context, find_modality
from zephon.pack import Concat, Room
from zephon.recipe import TokenizerSpec
from zephon.types import Ref, Sample, Segment


def law(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


# --- mix -----------------------------------------------------------------------------------------------------------

WEIGHTS = st.lists(
    st.sampled_from(["1", "0.7", "0.3", "0.05", "2", "12.5", "1e-3", "0.333333333333", "1e-12", "1000000"]),
    min_size=1,
    max_size=10,
)


@law(100)
@given(WEIGHTS)
def test_weights_become_integers_by_exact_rational_arithmetic(weights: list[str]) -> None:
    found = integer_weights([Decimal(weight) for weight in weights])
    assert found == exact_weights(weights)
    assert all(type(weight) is int and weight >= 1 for weight in found)


def test_weights_scale_and_spelling_do_not_matter() -> None:
    assert integer_weights([Decimal("0.7"), Decimal("0.3")]) == integer_weights([Decimal("70.0"), Decimal(30)])
    assert integer_weights([Decimal("0.1")] * 3) == [1431655765] * 3
    assert integer_weights([Decimal("1e-30"), Decimal(1)]) == [1, 2**32]


@law(150)
@given(WEIGHTS, st.integers(0, 2**30), st.sampled_from([1, 10, 3000, 10**6]))
def test_mixer_takes_the_largest_deficit_and_keeps_every_source_within_its_bound(
    weights: list[str], seed: int, longest: int
) -> None:
    integers = exact_weights(weights)
    total, count = sum(integers), len(integers)
    mixer = Mixer(integers)
    rng = np.random.default_rng(seed)
    # sources differ in size, as real ones do: one of books, one of tweets
    sizes = [int(rng.integers(1, longest + 1)) for _ in integers]
    have, expected = [0] * count, [0] * count
    largest = 1
    for _ in range(300):
        source = mixer.pick()
        assert source == max(range(count), key=lambda i: (expected[i], -i)), "largest deficit, ties to the first"
        cost = int(rng.integers(1, sizes[source] + 1))
        mixer.charge(source, cost)
        expected = [deficit + weight * cost for deficit, weight in zip(expected, integers, strict=True)]
        expected[source] -= total * cost
        have[source] += cost
        largest = max(largest, cost)
        assert list(mixer.deficits) == expected
        assert sum(expected) == 0
        assert expected == [w * sum(have) - total * h for w, h in zip(integers, have, strict=True)]
        assert min(expected) >= -total * largest, "no source is more than one largest sample over its target"
        assert max(expected) <= total * largest * (count - 1), "nor more than S - 1 under it"


@law(50)
@given(WEIGHTS, st.lists(st.integers(1, 10**9), max_size=60), st.integers(0, 60))
def test_mixer_goes_on_from_its_deficits(weights: list[str], costs: list[int], stop: int) -> None:
    integers = exact_weights(weights)
    whole = Mixer(integers)
    part = Mixer(integers)
    saved: list[int] = []
    kept: list[int] = []
    for number, cost in enumerate(costs):
        if number == stop:
            saved = [int(deficit) for deficit in part.deficits]
            kept = list(saved)
            part = Mixer(integers, saved)
        assert part.pick() == whole.pick()
        whole.charge(whole.pick(), cost)
        part.charge(part.pick(), cost)
        if number >= stop:  # nothing is shared with the mixer that goes on
            assert saved == kept, "the list it was restored from is not its own"
    assert list(part.deficits) == list(whole.deficits)


def test_mixer_picking_changes_nothing() -> None:
    mixer = Mixer([3, 1])
    assert [mixer.pick() for _ in range(5)] == [0] * 5
    mixer.charge(0, 2)
    assert list(mixer.deficits) == [3 * 2 - 4 * 2, 2]
    assert [mixer.pick() for _ in range(5)] == [1] * 5


def test_mixer_is_exact_with_whole_numbers_far_beyond_64_bits() -> None:
    mixer = Mixer([2**32 - 1, 1])
    for _ in range(50):
        mixer.charge(0, 2**61)
    assert list(mixer.deficits) == [-50 * 2**61, 50 * 2**61]


# --- pack ----------------------------------------------------------------------------------------------------------


def sample(number: int, positions: int) -> Sample:
    return Sample(Ref(0, 0, 0, number, 0), positions, None)


Offer = tuple[Sample, int, int]


@st.composite
def offers(draw: st.DrawFn, seq_len: int) -> list[Offer]:
    """Pieces of samples as a mixer hands them over: whole, or in pieces that may touch and may be parted by others."""
    found: list[Offer] = []
    sizes = draw(st.lists(st.integers(1, 3) | st.integers(1, 5 * seq_len), min_size=1, max_size=25))
    waiting: list[Offer] = []
    for number, size in enumerate(sizes):
        one = sample(number, size)
        if draw(st.booleans()):
            found.append((one, 0, size))
            continue
        pieces = [(one, start, min(start + seq_len, size)) for start in range(0, size, seq_len)]
        found.append(pieces[0])
        if draw(st.booleans()):
            found += pieces[1:]
        else:
            found += waiting
            waiting = pieces[1:]
    return found + waiting


def flat(bins: list[list[Segment]]) -> list[Segment]:
    return [segment for one in bins for segment in one]


def unit_positions(segments: list[Segment]) -> list[tuple[int, int]]:
    return [
        (segment.sample.ref.row, position) for segment in segments for position in range(segment.start, segment.end)
    ]


def pack(packer: Concat, pieces: list[Offer]) -> list[tuple[list[Segment], list[Segment]]]:
    """Offers all pieces; for each plan that leaves, the plan and what is open right after it."""
    plans = []
    for one, start, end in pieces:
        while start < end:
            taken, plan = packer.offer(one, start, end)
            assert start < taken <= end
            start = taken
            if plan is not None:
                plans.append((plan, flat(packer.open)))
            else:
                assert start == end, "a piece is only left over when a sequence is full"
    return plans


@law(150)
@given(st.data(), st.sampled_from([1, 2, 4, 7, 16, 64]))
def test_concat_delivers_every_position_once_in_order_or_keeps_it_open(data: st.DataObject, seq_len: int) -> None:
    pieces = data.draw(offers(seq_len))
    packer = Concat(Room(seq_len), 1)
    plans = pack(packer, pieces)
    for plan, opened in plans:
        assert sum(segment.end - segment.start for segment in plan) == seq_len
        assert opened == [], "a record leaves the instant it is full"
        assert all(segment.start < segment.end for segment in plan)
        for left, right in pairwise(plan):
            assert left.sample.ref != right.sample.ref or left.end != right.start, "touching runs are one segment"
    assert sum(segment.end - segment.start for segment in flat(packer.open)) < seq_len
    delivered = [position for plan, _ in plans for position in unit_positions(plan)] + unit_positions(flat(packer.open))
    assert delivered == [(one.ref.row, position) for one, start, end in pieces for position in range(start, end)]


@law(80)
@given(st.data(), st.sampled_from([2, 5, 16]))
def test_concat_goes_on_from_its_open_segments(data: st.DataObject, seq_len: int) -> None:
    pieces = data.draw(offers(seq_len))
    stop = data.draw(st.integers(0, len(pieces)))
    first = Concat(Room(seq_len), 1)
    pack(first, pieces[:stop])
    saved = list(first.open)
    kept = list(saved)
    rest = [plan for plan, _ in pack(first, pieces[stop:])]
    for _ in range(2):  # twice from the same list: nothing is shared with a packer that goes on
        second = Concat(Room(seq_len), 1)
        second.restore(saved)
        assert [plan for plan, _ in pack(second, pieces[stop:])] == rest
        assert list(second.open) == list(first.open)
        assert saved == kept


# --- measure and materialise ---------------------------------------------------------------------------------------

LETTERS = st.characters() | st.sampled_from(["\ud800", "\udfff", "😀", "\u2028", "\0"])
WORDS = st.sampled_from(
    ["", "x", "<eos>", "<bos><eos>", "a<eos>b", "<eos", "\udc00", "\ud83d\ude00", "\ufeff", " lead", "trail "]
)
TEXTS = st.lists(st.text(LETTERS, max_size=30) | WORDS, max_size=12)


def text_worker(seq_len: int, world: World) -> Any:
    spec = TokenizerSpec(tokenizer_folder(world.tokenizer), bos=world.bos, eos=world.eos)
    return find_modality("text")({}, Context(seq_len, spec))


def sized(worker: Any, texts: list[str]) -> list[tuple[int, int, list[int], tuple[str, ...]]]:
    """Every sample that comes of `texts`: row, positions, token ids, what was counted."""
    measured = worker.measure([{"text": text} for text in texts])
    found = []
    for index, (row, positions, payload) in enumerate(
        zip(measured.rows, measured.positions, measured.payloads, strict=True)
    ):
        ids = payload[0] if isinstance(payload, tuple) else payload
        assert ids.dtype == np.int32
        found.append((int(row), int(positions), ids.tolist(), tuple(sorted(measured.counts.get(index, ())))))
    return found


WORKER_WORLDS = [
    World(sources=(), tokenizer=kind, bos=bos, eos=eos)
    for kind, bos, eos in [("both", None, None), ("both", False, None), ("both", None, False), ("eos", None, None),
                           ("eos", None, True), ("eos", None, False), ("none", None, None)]
]  # fmt: skip
WORKERS = [(world, text_worker(16, world), text_worker(16, world)) for world in WORKER_WORLDS]


@law(120)
@given(TEXTS, st.sampled_from(range(len(WORKERS))), st.data())
def test_pure_measure_gives_the_same_samples_in_any_grouping(texts: list[str], which: int, data: st.DataObject) -> None:
    world, worker, other = WORKERS[which]
    expected = sized(worker, texts)
    for row, positions, ids, counts in expected:
        text = texts[row]
        assert ids == world.tokens(text)
        assert positions == max(0, len(ids) - 1)
        assert ("surrogates" in counts) == (clean(text) != text)
        assert ("special tokens in text" in counts) == ("<eos>" in text or "<bos>" in text)
    assert [row for row, *_ in expected if len(world.tokens(texts[row])) > 1] == [
        row for row, text in enumerate(texts) if len(world.tokens(text)) > 1
    ]
    found, start = [], 0
    while start < len(texts):
        stop = data.draw(st.integers(start + 1, len(texts)))
        found += [(row + start, *rest) for row, *rest in sized(other, texts[start:stop])]
        start = stop
    assert found == expected
    shuffled = data.draw(st.permutations(range(len(texts))))
    back = sized(worker, [texts[row] for row in shuffled])
    assert sorted((shuffled[row], *rest) for row, *rest in back) == sorted(expected)


@law(60)
@given(TEXTS, st.sampled_from(range(len(WORKERS))), st.data())
def test_pure_materialise_gives_the_same_records_in_any_grouping(
    texts: list[str], which: int, data: st.DataObject
) -> None:
    world, worker, other = WORKERS[which]
    seq_len = world.seq_len
    together = worker.measure([{"text": text} for text in texts])
    alone = [other.measure([{"text": text}]) for text in texts]
    plans, separate, expected = [], [], []
    packers = Concat(Room(seq_len), 1), Concat(Room(seq_len), 1)
    tokens_of: dict[int, list[int]] = {}
    for index, row in enumerate(together.rows):
        positions = int(together.positions[index])
        ref = Ref(0, 0, 0, int(row), 0)
        tokens_of[ref.row] = world.tokens(texts[ref.row])
        lonely = [payload for payload, size in zip(alone[ref.row].payloads, alone[ref.row].positions, strict=True)
                  if size == positions]  # fmt: skip
        start = 0
        while start < positions:
            stop, plan = packers[0].offer(Sample(ref, positions, together.payloads[index]), start, positions)
            stop_too, plan_too = packers[1].offer(Sample(ref, positions, lonely[0]), start, positions)
            assert stop == stop_too
            start = stop
            if plan is not None and plan_too is not None:
                plans.append(plan)
                separate.append(plan_too)
    for plan in plans:
        record: dict[str, list[int]] = {"input": [], "labels": [], "positions": []}
        for segment in plan:
            tokens = tokens_of[segment.sample.ref.row]
            record["input"] += tokens[segment.start : segment.end]
            record["labels"] += tokens[segment.start + 1 : segment.end + 1]
            record["positions"] += range(segment.end - segment.start)
        expected.append(record)

    def lists(arrays: dict[str, np.ndarray]) -> list[dict[str, list[int]]]:
        assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}
        count = len(arrays["input"])
        return [{name: array[i].tolist() for name, array in arrays.items()} for i in range(count)]

    assert lists(worker.materialise(plans)) == expected
    assert lists(other.materialise(separate)) == expected
    assert [lists(other.materialise([plan]))[0] for plan in plans] == expected
    turned = data.draw(st.permutations(range(len(plans))))
    assert lists(worker.materialise([plans[i] for i in turned])) == [expected[i] for i in turned]
    taken = worker.materialise(plans)
    for array in taken.values():  # what was handed over is the trainer's: writing on it changes nothing later
        array[...] = -1
    assert lists(worker.materialise(plans)) == expected


@pytest.mark.parametrize(
    ("kind", "bos", "eos", "expected"),
    [
        ("both", None, None, [BOS, 104, 105, EOS]),
        ("both", False, None, [104, 105, EOS]),
        ("both", None, False, [BOS, 104, 105]),
        ("both", False, False, [104, 105]),
        ("eos", None, None, [104, 105, EOS]),
        ("none", None, None, [104, 105]),
    ],
)
def test_bos_and_eos_come_from_config_and_recipe_never_from_the_template(
    kind: str, bos: bool | None, eos: bool | None, expected: list[int]
) -> None:
    worker = text_worker(8, World(sources=(), tokenizer=kind, bos=bos, eos=eos))
    assert sized(worker, ["hi"]) == [(0, len(expected) - 1, expected, ())]
