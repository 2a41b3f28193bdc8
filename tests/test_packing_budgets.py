"""Packing under budgets: atoms are never cut, no sequence is over a budget, and each holds media or the filler.

The packers alone, on random samples: first against a slow reading of the rule (`image_worlds.NaiveBins`), then against
what must hold whatever the rule is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_worlds import NaiveBins, may_cut

import zephon
from zephon.pack import MAX_OPEN_SEGMENTS, BestFit, Bin, Concat, Room, uncut
from zephon.types import Atom, Ref, Sample, Segment

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
Run = tuple[int, int, int]  # number of the sample, start, end; the filler's number is -1
Piece = tuple[Sample, int, int]
Packers = BestFit | Concat


def law(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=QUIET)


# --- random samples ------------------------------------------------------------------------------------------------


def sample(number: int, positions: int, atoms: Sequence[tuple[int, int, tuple[int, ...]]] = ()) -> Sample:
    return Sample(Ref(number, 0, 0, 0, 0), positions, None, (), tuple(Atom(*one) for one in atoms))


def filler(positions: int, costs: tuple[int, ...]) -> Sample:
    return sample(-1, positions, [(0, positions, costs)])


@st.composite
def rooms(draw: st.DrawFn) -> Room:
    seq_len = draw(st.sampled_from([12, 5, 30, 64]))
    budgets = tuple(draw(st.lists(st.sampled_from([6, 2, 3, 20, 2**62]), max_size=2)))
    costs = tuple(draw(st.integers(0, min(4, most - 1))) for most in budgets)
    return Room(seq_len, budgets, draw(st.none() | st.integers(1, 4).map(lambda size: filler(size, costs))))


@st.composite
def samples(draw: st.DrawFn, room: Room, number: int) -> Sample:
    """A sample of text, of text and atoms, or one that is an atom as a whole; every atom fits a sequence."""
    cost = st.tuples(*(st.integers(0, min(most, 7)) for most in room.budgets))
    kind = draw(st.sampled_from(["text", "mixed", "mixed", "whole"]))
    if kind == "text":
        return sample(number, draw(st.integers(1, 3 * room.seq_len)))
    if kind == "whole":
        size = draw(st.integers(1, room.seq_len))
        return sample(number, size, [(0, size, draw(cost))])
    atoms, at = list[tuple[int, int, tuple[int, ...]]](), draw(st.integers(0, 6))
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, room.seq_len) | st.integers(1, min(5, room.seq_len)))
        atoms.append((at, at + size, draw(cost)))
        at += size + draw(st.sampled_from([0, 1, 3, room.seq_len]))
    return sample(number, atoms[-1][1] + draw(st.integers(0, 5)), atoms)


@st.composite
def offered(draw: st.DrawFn, room: Room, most: int = 16) -> list[Piece]:
    """Pieces as a mixer hands them over: whole samples, or pieces up to a sequence that others may part."""
    found, waiting = list[Piece](), list[Piece]()
    for number in range(draw(st.integers(1, most))):
        one = draw(samples(room, number))
        if draw(st.integers(0, 2)):
            found.append((one, 0, one.positions))
            continue
        pieces, start = list[Piece](), 0
        while start < one.positions:
            end = uncut(one, start, start + room.seq_len) if one.positions - start > room.seq_len else one.positions
            pieces.append((one, start, end))
            start = end
        found += [pieces[0], *waiting]
        waiting = pieces[1:]
    return found + waiting


def packer_of(kind: str, room: Room, limit: int) -> Packers:
    return BestFit(room, limit) if kind == "best_fit" else Concat(room, limit)


def naive_of(kind: str, room: Room, limit: int) -> NaiveBins:
    size = room.filler.positions if room.filler else 0
    return NaiveBins(room.seq_len, room.budgets, size, kind == "best_fit", limit, MAX_OPEN_SEGMENTS)


def runs(segments: Sequence[Any]) -> list[Run]:
    return [(one.ref.source, start, end) for one, start, end in segments]


def offer(packer: Packers, piece: Piece) -> list[list[Segment]]:
    """Offers all of a piece; the plans that leave."""
    one, start, end = piece
    plans = []
    while start < end:
        taken, plan = packer.offer(one, start, end)
        assert start <= taken <= end
        assert taken > start or plan is not None, "it would be asked for ever"
        start = taken
        plans += [] if plan is None else [plan]
    return plans


def flushed(packer: Packers) -> list[list[Segment]]:
    plans = []
    while (plan := packer.flush()) is not None:
        plans.append(plan)
        assert len(plans) < 2000
    return plans


def atoms_in(one: Sample, start: int, end: int) -> list[Atom]:
    return [atom for atom in one.atoms if start <= atom.start < end]


def positions(segments: Sequence[Any]) -> int:
    return sum(end - start for _, start, end in segments)


def ended(naive: NaiveBins, room: Room, plan: Sequence[Any]) -> list[Run]:
    """The runs of a plan of the oracle, the filler with it where there is no atom."""
    needs = naive.filler and not any(atoms_in(*piece) for piece in plan)
    return runs(plan) + ([(-1, 0, naive.filler)] if needs else [])


KINDS = pytest.mark.parametrize("kind", ["concat", "best_fit"])
LIMITS = st.sampled_from([2, 1, 4, 32])


# --- against the rule ----------------------------------------------------------------------------------------------


@KINDS
@law(150)
@given(st.data(), rooms(), LIMITS)
def test_packer_follows_the_rule_step_by_step(kind: str, data: st.DataObject, room: Room, limit: int) -> None:
    packer, naive = packer_of(kind, room, limit), naive_of(kind, room, limit)
    for piece in data.draw(offered(room)):
        expected = naive.put(piece)
        assert [runs(plan) for plan in offer(packer, piece)] == [ended(naive, room, plan) for plan in expected]
        assert [runs(one) for one in packer.open] == [runs(one) for one in naive.bins if one]
    while any(naive.bins):
        plan = packer.flush()
        assert plan is not None
        assert runs(plan) == ended(naive, room, naive.pop_fullest())
    assert packer.flush() is None


@law(200)
@given(st.data(), rooms())
def test_bin_reaches_as_far_as_a_valid_sequence_goes(data: st.DataObject, room: Room) -> None:
    naive, one = naive_of("concat", room, 1), Bin(room)
    held: list[Any] = []
    for number in range(data.draw(st.integers(1, 6))):
        new = data.draw(samples(room, number))
        starts = [at for at in range(new.positions) if may_cut(new, at)]
        start = data.draw(st.sampled_from(starts), label="start")
        ends = [at for at in range(start + 1, new.positions + 1) if may_cut(new, at)]
        end = data.draw(st.sampled_from(ends), label="end")
        reached = one.reach(new, start, end)
        assert reached == naive.reach(held, (new, start, end))
        assert Bin(room, [Segment(*piece) for piece in held]).reach(new, start, end) == reached
        if reached > start:
            one.add(new, start, reached)
            held.append((new, start, reached))
        used = naive.used(held)
        assert one.room == room.seq_len - used[0]
        assert one.left == tuple(most - cost for most, cost in zip(room.budgets, used[1:], strict=True))
        assert one.reserved == naive.reserved(held)
        assert one.full == naive.full(held)
    assert runs(one.leave()) == ended(naive, room, held)


@law(200)
@given(st.data(), rooms())
def test_uncut_is_the_last_place_that_may_be_cut(data: st.DataObject, room: Room) -> None:
    one = data.draw(samples(room, 0))
    start = data.draw(st.sampled_from([at for at in range(one.positions) if may_cut(one, at)]))
    end = data.draw(st.integers(start + 1, one.positions))
    found = uncut(one, start, end)
    before = [at for at in range(start + 1, end + 1) if may_cut(one, at)]
    behind = [at for at in range(end, one.positions + 1) if may_cut(one, at)]
    assert found == (before[-1] if before else behind[0])


# --- whatever the rule is ------------------------------------------------------------------------------------------


def check_plan(room: Room, plan: Sequence[Segment]) -> None:
    """A plan is within all budgets, cuts no atom, and holds an atom or ends in the filler, and not both."""
    assert plan
    assert positions(plan) <= room.seq_len
    atoms = [atom for piece in plan for atom in atoms_in(*piece)]
    for number, most in enumerate(room.budgets):
        assert sum(atom.costs[number] for atom in atoms) <= most
    for one, start, end in plan:
        assert start < end <= one.positions
        assert may_cut(one, start)
        assert may_cut(one, end)
    for left, right in pairwise(plan):
        assert left.sample.ref != right.sample.ref or left.end != right.start, "touching runs are one segment"
    if room.filler:
        own = [one for one, *_ in plan if one is room.filler]
        real = [atom for piece in plan if piece[0] is not room.filler for atom in atoms_in(*piece)]
        assert len(own) == (not real)
        assert not own or plan[-1] == (room.filler, 0, room.filler.positions)


def without_filler(plan: Sequence[Segment]) -> list[Run]:
    return [one for one in runs(plan) if one[0] >= 0]


def units(found: Sequence[Run]) -> list[tuple[int, int]]:
    return [(number, at) for number, start, end in found for at in range(start, end)]


@law(120)
@given(st.data(), rooms())
def test_concat_delivers_every_position_once_in_order_and_ends_early_only_before_what_does_not_fit(
    data: st.DataObject, room: Room
) -> None:
    pieces = data.draw(offered(room))
    packer, plans = Concat(room, 1), list[list[Segment]]()
    for piece in pieces:
        plans += offer(packer, piece)
        assert len(packer.open) <= 1
    tail = packer.open
    plans += flushed(packer)
    assert len(plans[len(plans) - len(tail) :]) == len(tail)
    every = [unit for one in plans for unit in units(without_filler(one))]
    assert every == [unit for one in pieces for unit in units(runs([one]))]
    for plan in plans:
        check_plan(room, plan)
    by_number = {one.ref.source: one for one, *_ in pieces}
    done = 0
    for plan in plans[: len(plans) - len(tail)]:
        mine = without_filler(plan)
        done += sum(end - start for _, start, end in mine)
        if positions(plan) == room.seq_len or done == len(every):
            continue
        number, at = every[done]  # what comes next begins with an atom, after text that may not fit beside the filler
        atom = next(one for one in by_number[number].atoms if one.end > at)
        real = [one for piece in plan if piece[0] is not room.filler for one in atoms_in(*piece)]
        left = room.seq_len - sum(end - start for _, start, end in mine)
        costs = [most - sum(one.costs[i] for one in real) for i, most in enumerate(room.budgets)]
        assert atom.start == at
        assert atom.end - at > left or any(a > b for a, b in zip(atom.costs, costs, strict=True))


@law(120)
@given(st.data(), rooms(), LIMITS)
def test_best_fit_delivers_every_piece_once_and_whole(data: st.DataObject, room: Room, limit: int) -> None:
    pieces = data.draw(offered(room))
    packer, plans = BestFit(room, limit), list[list[Segment]]()
    for piece in pieces:
        plans += offer(packer, piece)
        assert len(packer.open) <= limit
        assert sum(map(len, packer.open)) < MAX_OPEN_SEGMENTS
        for one in packer.open:
            assert positions(one) < room.seq_len
            check_plan(Room(room.seq_len, room.budgets), one)
    plans += flushed(packer)
    for plan in plans:
        check_plan(room, plan)
    found = Counter(unit for plan in plans for unit in units(without_filler(plan)))
    assert found == Counter(unit for one in pieces for unit in units(runs([one])))
    alone = naive_of("best_fit", room, 1)
    delivered = {one for plan in plans for one in runs(plan)}
    for one, start, end in pieces:
        while start < end:  # what fits a sequence is whole; else as much as an empty one holds, again and again
            stop = alone.reach([], (one, start, end))
            number = one.ref.source
            assert any(a <= start and stop <= b for other, a, b in delivered if other == number)
            start = stop


@KINDS
@law(100)
@given(st.data(), rooms(), LIMITS)
def test_packer_goes_on_from_its_open_bins_at_any_point(kind: str, data: st.DataObject, room: Room, limit: int) -> None:
    pieces = data.draw(offered(room))
    stop = data.draw(st.integers(0, len(pieces)))
    first = packer_of(kind, room, limit)
    for piece in pieces[:stop]:
        offer(first, piece)
    rest: list[Piece] = list(pieces[stop:])
    if rest and data.draw(st.booleans()):  # in the middle of a piece: what is left of it is offered first
        one, start, end = rest.pop(0)
        taken, _ = first.offer(one, start, end)
        rest = [(one, taken, end), *rest] if taken < end else rest
    saved = first.open
    kept = [tuple(one) for one in saved]
    expected = [[runs(plan) for plan in offer(first, piece)] for piece in rest]
    assert saved == kept, "what was saved is not the packer's own"
    end_of_all = [runs(plan) for plan in flushed(first)]
    for _ in range(2):  # twice from the same lists: nothing is shared with a packer that goes on
        second = packer_of(kind, room, limit)
        second.restore(saved)
        assert second.open == kept
        assert [[runs(plan) for plan in offer(second, piece)] for piece in rest] == expected
        assert [runs(plan) for plan in flushed(second)] == end_of_all
        assert saved == kept


@law(60)
@given(st.data(), rooms(), LIMITS)
def test_best_fit_goes_on_in_the_middle_of_a_flush(data: st.DataObject, room: Room, limit: int) -> None:
    first = BestFit(room, limit)
    for piece in data.draw(offered(room)):
        offer(first, piece)
    for _ in range(data.draw(st.integers(0, len(first.open)))):
        first.flush()
    second = BestFit(room, limit)
    second.restore(first.open)
    assert [runs(plan) for plan in flushed(second)] == [runs(plan) for plan in flushed(first)]


# --- by hand -------------------------------------------------------------------------------------------------------

NULL = filler(3, (4, 1))
ROOM = Room(12, (16, 2), NULL)


def test_an_empty_sequence_is_the_filler_alone() -> None:
    assert ROOM.empty() == [Segment(NULL, 0, 3)]
    assert Room(12).empty() == []
    assert ROOM.plain == 9
    assert Room(12).plain == 12


def test_concat_worked_out_by_hand() -> None:
    image = (4, 1)
    steps: list[tuple[Sample, list[list[Run]]]] = [
        (sample(0, 7), []),
        (sample(1, 6, [(3, 6, image)]), [[(0, 0, 7), (1, 0, 2), (-1, 0, 3)]]),  # its image ends at 13: text up to 9
        (sample(2, 2, [(0, 2, (12, 1))]), []),
        (sample(3, 2, [(0, 2, image)]), [[(1, 2, 6), (2, 0, 2)]]),  # a third image
        (sample(4, 9), []),
        (sample(5, 4, [(0, 4, image)]), [[(3, 0, 2), (4, 0, 9)]]),  # 11 of 12: the image does not fit
        (sample(6, 9), [[(5, 0, 4), (6, 0, 8)]]),
        (sample(7, 8), [[(6, 8, 9), (7, 0, 8), (-1, 0, 3)]]),  # full: what is left is the filler's
    ]
    packer = Concat(ROOM, 1)
    for one, plans in steps:
        assert [runs(plan) for plan in offer(packer, (one, 0, one.positions))] == plans
    assert packer.open == []


def test_an_image_takes_the_place_that_was_kept_for_the_filler() -> None:
    packer = Concat(ROOM, 1)
    assert offer(packer, (sample(0, 12, [(9, 12, (4, 1))]), 0, 12)) == [
        [Segment(sample(0, 12, [(9, 12, (4, 1))]), 0, 12)]
    ]


def test_best_fit_takes_the_bin_with_least_room_then_least_of_each_budget_then_the_oldest() -> None:
    packer = BestFit(ROOM, 8)
    for number, cost in enumerate([(4, 1), (8, 1), (8, 1)]):
        assert offer(packer, (sample(number, 7, [(0, 7, cost)]), 0, 7)) == []
    assert offer(packer, (sample(3, 2), 0, 2)) == []  # least patches left: 1, older than 2
    assert [runs(one) for one in packer.open] == [[(0, 0, 7)], [(1, 0, 7), (3, 0, 2)], [(2, 0, 7)]]
    assert offer(packer, (sample(4, 4, [(0, 4, (9, 1))]), 0, 4)) == []  # over the patches of 2
    assert [runs(one) for one in packer.open] == [[(0, 0, 7), (4, 0, 4)], [(1, 0, 7), (3, 0, 2)], [(2, 0, 7)]]
    assert [runs(plan) for plan in offer(packer, (sample(5, 1), 0, 1))] == [[(0, 0, 7), (4, 0, 4), (5, 0, 1)]]


def test_best_fit_keeps_room_for_the_filler_beside_text() -> None:
    packer = BestFit(ROOM, 8)
    assert offer(packer, (sample(0, 8), 0, 8)) == []
    assert offer(packer, (sample(1, 2), 0, 2)) == []
    assert [runs(one) for one in packer.open] == [[(0, 0, 8)], [(1, 0, 2)]]
    assert [runs(plan) for plan in offer(packer, (sample(2, 25), 0, 25))] == [
        [(2, 0, 9), (-1, 0, 3)],
        [(2, 9, 18), (-1, 0, 3)],
        [(1, 0, 2), (2, 18, 25), (-1, 0, 3)],
    ]


@KINDS
@pytest.mark.parametrize(
    "atoms", [[(0, 13, (4, 1))], [(0, 2, (17, 1))], [(0, 2, (4, 3))], [(0, 2, (4, 1)), (2, 4, (17, 1))]]
)
def test_an_atom_that_no_sequence_holds_is_an_error_that_names_its_sample(
    kind: str, atoms: list[tuple[int, int, tuple[int, ...]]]
) -> None:
    with pytest.raises(zephon.DataError, match=r"41.*must not be cut"):
        packer = packer_of(kind, ROOM, 2)
        for _ in range(3):
            offer(packer, (sample(41, 13, atoms), 0, 13))


def test_best_fit_holds_no_more_segments_than_its_bound() -> None:
    room = Room(4000, (10**6, 10**6), NULL)
    packer, plans = BestFit(room, 1024), list[list[Segment]]()
    for number in range(1200):
        one = sample(number, 2, [(0, 2, (1, 1))] if number % 3 else [])
        plans += offer(packer, (one, 0, 2))
        assert sum(map(len, packer.open)) < MAX_OPEN_SEGMENTS
    for plan in plans:
        check_plan(room, plan)
    assert len(plans) >= 3
