"""Decoupled DiLoCo's pure parts: fragment plan, merging, wire, messages, grace, book of lanes."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from recipes.diloco.fragments import Plan, Tensor, make_plan
from recipes.diloco.lanes import Lanes, divide
from recipes.diloco.merge import average, nesterov, radial_directional, weight
from recipes.diloco.messages import Followed, LaneAt, Merged, Message, Part, Reader, Recorded, Report, Welcome, write
from recipes.diloco.outer import GlobalModel
from recipes.diloco.rounds import Pace
from recipes.diloco.settings import Settings
from recipes.diloco.wire import BLOCK, decode, encode, encoded_bytes, from_bf16, to_bf16
from zephon.errors import UsageError

floats = st.floats(-1e3, 1e3, width=32)


def vectors(size: int) -> st.SearchStrategy[Any]:
    return arrays.arrays(np.float32, size, elements=floats)


# --- fragment plan -------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> list[Tensor]:
    sizes = draw(st.lists(st.integers(1, 60), min_size=2, max_size=7))
    embedding = [Tensor("tok_embeddings.weight", (draw(st.integers(1, 90)), 2))] if draw(st.booleans()) else []
    return [*embedding, *(Tensor(f"w{i}", (size,)) for i, size in enumerate(sizes))]


@given(model=models(), fragments=st.integers(1, 4), every=st.integers(1, 9), seed=st.randoms(use_true_random=False))
def test_a_plan_holds_every_tensor_once_and_embeddings_apart(
    model: list[Tensor], fragments: int, every: int, seed: Any
) -> None:
    apart = [one for one in model if "embed" in one.name]
    if not 1 <= fragments - len(apart) <= len(model) - len(apart):
        with pytest.raises(UsageError, match="fragments"):
            make_plan(model, fragments, every)
        return
    plan = make_plan(model, fragments, every)
    assert sorted(itertools.chain(*plan.fragments)) == sorted(model)
    assert plan.averaged == bool(apart)
    if apart:
        assert list(plan.fragments[0]) == apart
    shuffled = list(model)
    seed.shuffle(shuffled)
    assert make_plan(shuffled, fragments, every).digest == plan.digest
    due = [p for round in range(5, 5 + every) for p in plan.due(round)]
    assert sorted(due) == list(range(fragments))  # each once in H rounds, whichever they are


@given(model=models(), bins=st.integers(1, 3))
def test_the_largest_fragment_is_at_most_four_thirds_of_the_best(model: list[Tensor], bins: int) -> None:
    rest = [one for one in model if "embed" not in one.name]
    if bins > len(rest):
        return
    plan = make_plan(rest, bins, 1)
    best = min(
        max(sum(one.size for one, place in zip(rest, places, strict=True) if place == b) for b in range(bins))
        for places in itertools.product(range(bins), repeat=len(rest))
    )
    assert max(map(plan.size, range(bins))) * 3 <= best * 4


def test_gather_and_scatter_are_inverse() -> None:
    plan = make_plan([Tensor("embed", (3, 2)), Tensor("a", (2, 2)), Tensor("b", (5,))], 2, 4)
    values = {
        one.name: np.arange(one.size, dtype=np.float32).reshape(one.shape) for one in itertools.chain(*plan.fragments)
    }
    back = {name: one for p, value in enumerate(plan.gather(values)) for name, one in plan.scatter(p, value).items()}
    assert back.keys() == values.keys()
    assert all(np.array_equal(back[name], values[name]) for name in values)


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="one name"):
        make_plan([Tensor("a", (1,)), Tensor("a", (2,))], 1, 1)


def test_settings_that_cannot_hold_are_named() -> None:
    with pytest.raises(UsageError, match=r"\{'quorum': 3\}.*at most learners"):
        Settings(learners=2, quorum=3)


# --- merging -------------------------------------------------------------------------------------------------------


def parts_of(values: Sequence[Any], steps: Sequence[int], learners: Sequence[int]) -> list[Part]:
    return [
        Part(learner, 1, 0, 0, count, count * 10, one.astype("<f4").tobytes())
        for learner, one, count in zip(learners, values, steps, strict=True)
    ]


def model_of(value: Any, **changes: Any) -> GlobalModel:
    plan = Plan(((Tensor("w", (value.size,)),),), 4, False)
    return GlobalModel(Settings(fragments=1, up="float32", down="float32", **changes), plan, [value])


@given(data=st.data(), count=st.integers(1, 5), merge=st.sampled_from(["rda", "average"]))
def test_the_order_of_learners_does_not_change_a_bit(data: st.DataObject, count: int, merge: str) -> None:
    # Among numbers of 2**70 a 1 is lost or not, depending on the order of the sum; float32 hides smaller differences.
    far = arrays.arrays(np.float32, 6, elements=st.one_of(floats, st.sampled_from([2.0**70, -(2.0**70)])))
    start, *values = (data.draw(far) for _ in range(count + 1))
    steps = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    parts = parts_of(values, steps, range(count))
    digests: set[str] = set()
    for order in itertools.islice(itertools.permutations(parts), 24):
        model = model_of(start, merge=merge)
        model.merge(1, 0, order)
        digests.add(model.digest(0))
    assert len(digests) == 1


@given(delta=vectors(8), weights=st.lists(st.floats(0.1, 1e6), min_size=1, max_size=5))
def test_equal_vectors_give_the_vector(delta: Any, weights: list[float]) -> None:
    wide = delta.astype(np.float64)
    for merge in (average, radial_directional):
        assert np.allclose(merge([wide] * len(weights), weights), wide, rtol=1e-12, atol=1e-300)


@given(count=st.integers(2, 8), length=st.floats(1e-6, 1e6))
def test_orthogonal_vectors_keep_their_length_where_a_mean_shrinks(count: int, length: float) -> None:
    deltas = list(np.eye(count) * length)
    assert np.linalg.norm(radial_directional(deltas, [1.0] * count)) == pytest.approx(length)
    assert np.linalg.norm(average(deltas, [1.0] * count)) == pytest.approx(length / np.sqrt(count))


@given(data=st.data(), scale=st.sampled_from([2.0**-8, 4.0, 2.0**10]))
def test_scaled_vectors_give_the_scaled_result(data: st.DataObject, scale: float) -> None:
    deltas = [data.draw(vectors(5)).astype(np.float64) for _ in range(3)]
    for merge in (average, radial_directional):
        assert np.allclose(
            merge([one * scale for one in deltas], [1, 2, 3]), merge(deltas, [1, 2, 3]) * scale, rtol=1e-9
        )


def test_vectors_that_cancel_out_and_zeros_give_no_nan() -> None:
    one = np.array([3.0, -4.0])
    assert not radial_directional([one, -one], [1, 1]).any()
    assert not radial_directional([one * 0, one * 0], [1, 1]).any()
    tiny = np.array([1e-300, 1e-300])
    assert np.allclose(radial_directional([tiny, tiny], [1, 1]) / tiny, 1)


def test_token_weights() -> None:
    assert weight(100, 10) / weight(50, 5) == 2  # half the speed, the same batch
    assert weight(100, 10) / weight(50, 10) == 4  # half the batch, the same speed


@given(data=st.data(), lr=st.floats(0.1, 1), decay=st.floats(0, 0.99))
def test_the_outer_step_is_that_of_torch(data: st.DataObject, lr: float, decay: float) -> None:
    value, momentum = data.draw(vectors(4)).astype(np.float64), np.zeros(4)
    theirs = torch.nn.Parameter(torch.from_numpy(value.copy()))
    optimizer = torch.optim.SGD([theirs], lr=lr, momentum=decay, nesterov=decay > 0)
    for _ in range(3):
        delta = data.draw(vectors(4)).astype(np.float64)
        value, momentum = nesterov(value, momentum, delta, lr, decay)
        theirs.grad = torch.from_numpy(delta)
        optimizer.step()
    assert np.allclose(value, theirs.detach().numpy())


@given(start=vectors(9), value=vectors(9), merge=st.sampled_from(["rda", "average"]))
def test_one_learner_without_outer_step_gives_what_it_holds(start: Any, value: Any, merge: str) -> None:
    model = model_of(start, outer_lr=1.0, outer_momentum=0.0, merge=merge)
    model.merge(1, 0, parts_of([value], [3], [0]))
    far = np.abs(value) < np.abs(start) * 2.0**-28  # the difference no longer fits float64's 53 bits
    assert np.array_equal(model.values[0][~far], value[~far])


def test_nan_has_no_weight_and_is_named() -> None:
    start, good = np.ones(4, np.float32), np.full(4, 0.5, np.float32)
    model = model_of(start, outer_lr=1.0, outer_momentum=0.0)
    merge = model.merge(1, 0, parts_of([good * np.nan, good], [1, 1], [0, 3]))
    assert merge is not None
    assert (merge.used, merge.refused) == ((3,), (0,))
    assert np.array_equal(model.values[0], good)
    assert model.merge(2, 0, parts_of([good * np.inf], [1], [0])) is None


def test_an_old_version_gives_an_old_outer_gradient() -> None:
    """What a learner holds is known whichever version it built on, as long as somebody may build on it."""
    model = model_of(np.zeros(2, np.float32), outer_lr=1.0, outer_momentum=0.0)
    model.settings = Settings(fragments=1, outer_lr=1.0, outer_momentum=0.0, up="bf16", down="float32")
    held = np.array([0.5, 0.25], np.float32)
    part = Part(0, 1, 0, 0, 1, 1, encode("bf16", held, np.zeros(2, np.float32)))
    for round in (1, 2):  # the second time the global model has moved, the learner's base has not
        model.merge(round, 0, [part])
        assert np.array_equal(model.values[0], held)
    model.forget(0, 1)
    with pytest.raises(KeyError):
        model.merge(3, 0, [part])


def test_embeddings_are_averaged_and_tensors_merged_one_by_one() -> None:
    plan = make_plan([Tensor("embed", (2,)), Tensor("a", (2,)), Tensor("b", (2,))], 2, 2)
    start = [np.zeros(2, np.float32), np.zeros(4, np.float32)]
    model = GlobalModel(Settings(outer_lr=1, outer_momentum=0, up="float32", down="float32"), plan, start)
    east, north = np.array([1, 0, 1, 0], np.float32), np.array([0, 1, 0, 1], np.float32)
    for fragment, size in ((0, 2), (1, 4)):
        model.merge(1, fragment, [
            Part(learner, 1, fragment, 0, 1, 1, one[:size].tobytes()) for learner, one in enumerate((east, north))
        ])  # fmt: skip
    assert np.allclose(model.values[0], [0.5, 0.5])
    assert np.allclose(model.values[1], np.full(4, np.sqrt(0.5)))  # of each tensor length 1, not of both together


# --- wire ----------------------------------------------------------------------------------------------------------


@given(value=arrays.arrays(np.float32, 40, elements=st.floats(width=32)))
def test_bfloat16_is_that_of_torch(value: Any) -> None:
    theirs = torch.from_numpy(value).to(torch.bfloat16).float().numpy()
    assert np.array_equal(from_bf16(to_bf16(value)), theirs, equal_nan=True)


@given(value=vectors(37), base=vectors(37))
def test_float32_is_exact_and_bf16_keeps_eight_bits_of_the_difference(value: Any, base: Any) -> None:
    assert np.array_equal(decode("float32", encode("float32", value, base), base), value)
    known = decode("bf16", encode("bf16", value, base), base)
    difference = np.abs(value - base)
    assert (np.abs(known - value) <= difference * 2.0**-8 + np.abs(base) * 2.0**-22 + 1e-37).all()


@given(size=st.integers(1, 3 * BLOCK), scale=st.sampled_from([1e-7, 1e-3, 1.0]), seed=st.integers(0, 99))
def test_int4_is_within_half_a_step_of_its_block(size: int, scale: float, seed: int) -> None:
    value = (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)
    base = np.zeros(size, np.float32)
    known = decode("int4", encode("int4", value, base), base)
    for start in range(0, size, BLOCK):
        block = slice(start, start + BLOCK)
        assert np.abs(known[block] - value[block]).max() <= np.abs(value[block]).max() / 7 * 0.53


@pytest.mark.parametrize(("codec", "size", "expected"), [("float32", 10, 40), ("bf16", 10, 20), ("int4", 257, 129 + 4)])
def test_sizes_on_the_wire(codec: str, size: int, expected: int) -> None:
    zeros = np.zeros(size, np.float32)
    raw = encode(codec, zeros, zeros)
    assert len(raw) == encoded_bytes(codec, size) == expected
    assert not decode(codec, raw, zeros).any()
    with pytest.raises(ValueError, match=f"{expected} expected"):
        decode(codec, raw + b"x", zeros)


lanes_at = st.lists(
    st.builds(LaneAt, st.integers(0, 99), st.integers(0, 2**40), st.binary(max_size=9)), max_size=3
).map(tuple)
numbers = st.integers(0, 2**40)
messages = st.one_of(
    st.builds(Report, numbers, numbers, st.lists(st.tuples(numbers, numbers), max_size=2).map(tuple), lanes_at),
    st.builds(Part, numbers, numbers, numbers, numbers, numbers, numbers, st.binary(max_size=50)),
    st.builds(Welcome, numbers, st.lists(numbers, max_size=3).map(tuple), lanes_at, numbers, st.binary(max_size=20)),
    st.builds(Merged, numbers, numbers, st.binary(max_size=20)),
    st.builds(Followed, numbers),
    st.builds(Recorded, numbers, numbers, st.just((1, 2)), st.just(()), lanes_at, st.binary(max_size=20)),
)


@given(sent=st.lists(messages, max_size=6), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_messages_come_out_as_they_went_in_however_they_are_cut(sent: list[Message], cuts: list[int]) -> None:
    raw, reader = b"".join(map(write, sent)), Reader()
    edges = [0, *sorted(cuts), len(raw)]
    came = [one for start, end in itertools.pairwise(edges) for one in reader.feed(raw[start:end])]
    assert [message for message, _ in came] == sent
    assert sum(size for _, size in came) == len(raw)


@pytest.mark.parametrize(
    "head", [b'{"kind":"Nothing"}', b'{"kind":"Followed"}', b'{"kind":"Followed","order":1,"more":2}']
)
def test_what_is_no_message_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError, match="Not a message"):
        Reader().feed(len(head).to_bytes(4, "little") + bytes(8) + head)


# --- grace ---------------------------------------------------------------------------------------------------------

micros = st.integers(0, 10**9)


@given(
    step=micros, quorum=micros, sync=micros, tau=st.integers(0, 4), gamma=st.integers(0, 1000), cap=st.integers(0, 3000)
)
def test_grace_is_never_negative_and_never_beyond_its_bounds(
    step: int, quorum: int, sync: int, tau: int, gamma: int, cap: int
) -> None:
    grace = Pace(step, quorum, sync).grace(Settings(overlap=tau, grace=gamma, grace_cap=cap))
    assert 0 <= grace <= step * cap // 1000
    if quorum + sync >= tau * step:
        assert grace == 0
    else:
        assert grace <= tau * step - quorum - sync


def test_grace_of_a_typical_round() -> None:
    assert Pace(1000, 100, 400).grace(Settings(overlap=2)) == 1000  # 0.8 of 1,500, at most one step
    assert Pace(1000, 300, 900).grace(Settings(overlap=2)) == 640


# --- the book of lanes ---------------------------------------------------------------------------------------------


@given(lanes=st.integers(1, 40), learners=st.integers(1, 12))
def test_lanes_are_divided_evenly(lanes: int, learners: int) -> None:
    if lanes < learners:
        with pytest.raises(UsageError, match="more lanes"):
            divide(range(lanes), range(learners))
        return
    homes = divide(range(lanes), range(learners))
    sizes = [list(homes.values()).count(learner) for learner in range(learners)]
    assert max(sizes) - min(sizes) <= 1
    assert list(homes.values()) == sorted(homes.values())


def book(lanes: int = 4, learners: int = 2) -> Lanes:
    return Lanes([LaneAt(lane, 0, b"") for lane in range(lanes)], divide(range(lanes), range(learners)))


def step(book: Lanes, learner: int) -> None:
    book.report(learner, Report(0, 0, (), tuple(LaneAt(one.lane, one.steps + 1, b"") for one in book.owned(learner))))


def test_a_lane_of_a_living_learner_moves_in_two_halves() -> None:
    lanes = book()
    for learner in (0, 1):
        lanes.welcome(learner)
        step(lanes, learner)
    lanes.move({1: 1})
    ((told, order),) = lanes.orders([0, 1])  # first the old owner, and only it
    assert (told, [one.lane for one in order.lanes]) == (0, [0])
    step(lanes, 0)  # a step that was on its way still counts, with both lanes
    assert lanes.at[1].steps == 2
    assert lanes.orders([0, 1]) == []
    lanes.followed(0, order.order)
    ((told, order),) = lanes.orders([0, 1])
    assert (told, [(one.lane, one.steps) for one in order.lanes]) == (1, [(1, 2), (2, 1), (3, 1)])


def test_the_lanes_of_a_dead_learner_stay_where_its_last_report_left_them() -> None:
    lanes = book()
    lanes.welcome(0)
    step(lanes, 0)
    lanes.leave(0)
    assert lanes.died(0, ((0, 3), (1, 1))) == {0: 2}
    assert lanes.died(0, ((0, 3), (1, 1))) == {}  # counted once
    assert [(one.lane, one.steps) for one in lanes.welcome(0)] == [(0, 1), (1, 1)]


@pytest.mark.parametrize("wrong", [LaneAt(2, 1, b""), LaneAt(0, 2, b""), LaneAt(0, 0, b"")])
def test_a_report_that_would_lose_or_repeat_data_is_refused_whole(wrong: LaneAt) -> None:
    lanes = book()
    lanes.welcome(0)
    with pytest.raises(ValueError, match="lost or repeated"):
        lanes.report(0, Report(1, 0, (), (LaneAt(1, 1, b""), wrong)))
    assert lanes.at[1].steps == 0


def test_foreign_lanes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\[9\].*0 to 3"):
        book().move({9: 0})
