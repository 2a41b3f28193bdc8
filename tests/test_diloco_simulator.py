"""Decoupled DiLoCo on a virtual clock: whatever fails, a run ends, replays bit for bit, accounts for every lane."""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diloco_toys import TOKENS, Toy, toys
from hypothesis import given, settings
from hypothesis import strategies as st
from small import write_recipe

from recipes.diloco import bigram, micro
from recipes.diloco.faults import Fault, schedule
from recipes.diloco.feed import Feed, open_stream
from recipes.diloco.fragments import make_plan
from recipes.diloco.learner import Learner, pack
from recipes.diloco.messages import LaneAt, Welcome
from recipes.diloco.settings import Settings
from recipes.diloco.simulate import Network, Simulation
from recipes.diloco.snapshot import OF_SNAPSHOT, Cut
from recipes.diloco.syncer import Syncer
from recipes.diloco.tape import Account, Event, Take, TapeError, account, replay
from zephon.errors import RestoreError, UsageError

SECOND = 1_000_000
USUAL = Settings(learners=4, rounds=30, every=6, fragments=5)


def run(changed: Settings = USUAL, **options: Any) -> Simulation:
    return Simulation(changed, toys(), **options).run()


def events(sim: Simulation, kind: str) -> list[Event]:
    return [one for one in sim.tape if one["event"] == kind]


def check(sim: Simulation, cut: Cut | None = None) -> Account:
    """The two laws of every run: its tape replays to the same bits, and every lane step counts once or is dead."""
    model = replay(sim.tape, sim.settings, toys(), cut)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(model.values, sim.syncer.model.values, strict=True))
    added = account(sim.tape, [Take(*one) for one in sim.takes])
    assert added.ends == {lane: one.steps for lane, one in sim.syncer.lanes.at.items()}
    assert added.tokens == added.steps * TOKENS
    return added


def move(sim: Simulation, homes: dict[int, int]) -> None:
    with contextlib.suppress(UsageError):  # it would leave fewer learners with lanes than the quorum
        sim.tell(sim.syncer.move(homes, sim.now))


# --- laws ----------------------------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> tuple[Settings, dict[str, Any], list[tuple[int, dict[int, int]]]]:
    """Settings, options of a simulation, and moves of lanes."""
    learners = draw(st.integers(1, 5))
    changed = Settings(
        learners=learners,
        rounds=draw(st.integers(5, 25)),
        every=draw(st.integers(1, 8)),
        fragments=draw(st.integers(2, 5)),
        quorum=draw(st.integers(1, learners)),
        overlap=draw(st.integers(0, 3)),
        grace=draw(st.sampled_from([0, 800, 1000])),
        alpha=draw(st.sampled_from([0.0, 0.5])),
        merge=draw(st.sampled_from(["rda", "average"])),
        up=draw(st.sampled_from(["float32", "bf16", "int4"])),
        down=draw(st.sampled_from(["float32", "bf16"])),
    )
    length = changed.rounds * SECOND
    paces = draw(st.lists(st.integers(1, 30), min_size=learners, max_size=learners))
    moves = st.tuples(
        st.integers(0, length), st.dictionaries(st.integers(0, 7), st.integers(0, learners - 1), max_size=3)
    )
    options = {
        "step_time": lambda learner, count: paces[learner] * SECOND // 10 + count % 7,
        "network": Network(draw(st.integers(0, SECOND // 2)), draw(st.sampled_from([0, 2_000, 50_000]))),
        "faults": schedule(draw(st.integers(0, 10**6)), learners, length, draw(st.integers(0, 8))),
    }
    return changed, options, draw(st.lists(moves, max_size=3))


@settings(max_examples=120)
@given(world=runs())
def test_every_run_ends_replays_and_accounts_for_every_lane(
    world: tuple[Settings, dict[str, Any], list[tuple[int, dict[int, int]]]],
) -> None:
    changed, options, moves = world
    sim = Simulation(changed, toys(), **options)
    for at, homes in moves:
        sim.at(at, lambda homes=homes: move(sim, homes))
    sim.run(until=1000 * changed.rounds * SECOND)
    assert sim.syncer.done
    added = check(sim)
    assert added.named <= added.dead
    assert sim.syncer.round == changed.rounds


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20)
def test_a_run_depends_on_its_arguments_alone(seed: int) -> None:
    faults = schedule(seed, 4, 30 * SECOND, 6)
    one, two = run(faults=faults), run(faults=faults)
    assert one.tape == two.tape
    assert one.takes == two.takes


def test_one_learner_without_outer_step_is_plain_training(tmp_path: Path) -> None:
    """On a real model and real data: the same parameters, bit for bit, as a loop without any DiLoCo."""
    recipe = write_recipe(tmp_path)
    made = lambda learner: micro.make(learner, str(recipe), vocabulary=260, steps=8)  # noqa: E731
    alone = Settings(
        learners=1, rounds=8, every=2, fragments=4, outer_lr=1, outer_momentum=0, up="float32", down="float32"
    )
    sim = Simulation(alone, made).run()
    plain = made(0)
    plain.own(plain.first_lanes())
    merged: dict[int, Any] = {}
    for clock in range(alone.rounds):
        plain.step(clock)
        merged |= {fragment: plain.read(sim.plan)[fragment] for fragment in sim.plan.due(clock + 1)}
    assert len(events(sim, "step")) == alone.rounds
    assert [np.array_equal(one, merged[p]) for p, one in enumerate(sim.syncer.model.values)] == [True] * 4


def test_a_healthy_fleet_never_waits_and_always_merges_all() -> None:
    sim = run(network=Network(20_000, 1_000_000))
    assert {one["waited"] for one in events(sim, "close")} == {0}
    assert sim.syncer.pace.step == pytest.approx(SECOND, rel=0.02)
    assert 30_000 <= sim.syncer.pace.sync <= 60_000  # there and back takes 40 ms
    assert {tuple(one["learners"]) for one in events(sim, "merge")} == {(0, 1, 2, 3)}
    assert len(events(sim, "merge")) == sum(len(sim.plan.due(round)) for round in range(1, 31))
    assert check(sim).dead == 0


# --- nothing waits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kill", "stop", "partition"])
def test_the_others_go_on_at_their_pace(kind: str) -> None:
    forever = Fault(at=5_300_000, learner=2, kind=kind, lasting=3600 * SECOND)
    healthy, hurt = run(), Simulation(USUAL, toys(), faults=[forever])
    hurt.run(until=100 * SECOND)
    assert hurt.syncer.stopped
    steps = Counter(one["learner"] for one in events(hurt, "step"))
    usual = Counter(one["learner"] for one in events(healthy, "step"))
    assert {learner: steps[learner] for learner in (0, 1, 3)} == {learner: usual[learner] for learner in (0, 1, 3)}
    assert steps[2] == 5
    rounds = [one["round"] for one in events(hurt, "close")]
    assert rounds == [one["round"] for one in events(healthy, "close")]


def test_rounds_keep_the_pace_of_the_fastest() -> None:
    """Learners that are out of step do not make rounds come faster, nor does a slow one make them come slower."""
    sim = run(step_time=lambda learner, count: (1_000_000, 1_000_001, 1_300_000, 2_700_000)[learner])
    assert 30 * SECOND <= sim.now <= 34 * SECOND


def test_the_slow_go_on_where_the_fast_left_off() -> None:
    """A slow learner's clock is never behind the rounds that it has adopted, so its next step is ready for the next."""
    sim = Simulation(
        replace(USUAL, learners=2, rounds=40), toys(),
        step_time=lambda learner, count: SECOND * (1 + 2 * learner),
        faults=[Fault(20_300_000, 0, "kill", 3600 * SECOND)],
    )  # fmt: skip
    sim.run(until=20 * SECOND)
    before = sim.syncer.round
    sim.run(until=51 * SECOND)
    assert before >= 18
    assert sim.syncer.round >= before + 9


def test_grace_lets_the_slow_take_part_at_no_cost_in_time() -> None:
    times = (1_000_000, 1_000_000, 1_180_000, 1_180_000)
    taking: dict[int, float] = {}
    for grace in (0, 800):
        sim = run(replace(USUAL, grace=grace), step_time=lambda learner, count: times[learner])
        merges = events(sim, "merge")
        taking[grace] = sum(len(one["learners"]) for one in merges) / len(merges)
        assert len(merges[0]["learners"]) == (4 if grace else 1)
        assert sim.now <= 31 * SECOND  # 30 rounds, and the step in hand
    assert taking[800] > 3.6 > taking[0]


def test_below_the_quorum_merges_pause_and_training_goes_on() -> None:
    dead = [Fault(5_300_000, learner, "kill", 10 * SECOND) for learner in (1, 2)]
    sim = run(replace(USUAL, quorum=3), faults=dead)
    closes = [event for event in sim.tape if event["event"] in ("gone", "close", "join", "step")][5:]
    gone = closes.index(next(one for one in closes if one["event"] == "gone"))
    back = closes.index(next(one for one in closes[gone:] if one["event"] == "join"))
    between = Counter(one["event"] for one in closes[gone:back])
    assert between["close"] == 0
    assert between["step"] >= 16  # two learners, at least eight seconds
    check(sim)


def test_no_more_rounds_in_flight_than_the_overlap_allows() -> None:
    sim = run(network=Network(latency=1_500_000))
    flying: set[int] = set()
    for event in sim.tape:
        if event["event"] == "close":
            flying.add(event["round"])
            assert len(flying) <= USUAL.overlap
        elif event["event"] in ("merge", "empty"):
            flying.discard(event["round"])


# --- leaving and coming back ---------------------------------------------------------------------------------------


def test_a_learner_comes_back_from_the_syncers_fragments_and_a_peers_optimizer() -> None:
    taken: dict[int, list[bytes]] = {}

    class Watched(Toy):
        def load_optimizer(self, state: bytes) -> None:
            taken.setdefault(0, []).append(state)
            super().load_optimizer(state)

        def optimizer(self) -> bytes:
            taken.setdefault(1, []).append(super().optimizer())
            return taken[1][-1]

    sim = Simulation(USUAL, lambda learner: Watched(), faults=[Fault(5_300_000, 1, "kill", 4 * SECOND)]).run()
    (copy,), (back,) = events(sim, "copy"), events(sim, "join")[4:]
    assert (copy["learner"], copy["to"], back["copy"]) == (0, 1, 0)
    assert [state for state in taken[0] if state] == taken[1]
    assert taken[1][0].strip(b"\0")
    assert back["round"] >= 9
    assert back["dead"] == [(2, 1), (3, 1)]
    added = check(sim)
    assert (added.dead, added.named) == (2, 2)


def test_the_lanes_of_a_dead_learner_can_be_handed_on() -> None:
    sim = Simulation(USUAL, toys(), faults=[Fault(5_300_000, 1, "kill", 3600 * SECOND)])
    sim.at(8 * SECOND, lambda: sim.tell(sim.syncer.move({2: 0, 3: 3}, sim.now)))
    sim.run(until=60 * SECOND)
    added = check(sim)
    assert min(added.ends[lane] for lane in (2, 3)) >= 5 + 20  # 5 steps by the dead one, the rest by others
    assert len({one for one in sim.takes if one[1:] == (2, 6)}) == 2  # begun by both, counted for the second


def test_who_is_given_up_starts_again_and_what_it_had_not_reported_is_dead() -> None:
    """Cut off, given up, its lanes handed on; when it is reached again, its queued reports do not count."""
    sim = Simulation(USUAL, toys(), faults=[Fault(5_300_000, 1, "partition", 8 * SECOND)])

    def give_up() -> None:
        sim.tell(sim.syncer.expel(1, sim.now))
        sim.tell(sim.syncer.move({2: 0}, sim.now))

    sim.at(9 * SECOND, give_up)
    sim.run()
    back = events(sim, "join")[-1]
    assert back["learner"] == 1
    assert back["lanes"] == [3]
    assert dict(back["dead"])[2] >= 7
    check(sim)


def test_who_is_silent_for_too_long_is_given_up_and_starts_again_when_it_is_reached() -> None:
    sim = run(replace(USUAL, lease=8), faults=[Fault(5_300_000, 1, "stop", 20 * SECOND)])
    (given_up,) = events(sim, "expelled")
    assert 9 <= given_up["round"] <= 15
    assert [(one["learner"], one["dead"]) for one in events(sim, "join")[4:]] == [(1, [(2, 1), (3, 1)])]
    assert min(check(sim).ends.values()) >= 9


@pytest.mark.parametrize("lease", [8, 0])
def test_a_learner_that_hangs_when_it_is_told_to_stop_holds_up_no_end(lease: int) -> None:
    sim = Simulation(replace(USUAL, lease=lease), toys(), faults=[Fault(28_300_000, 1, "stop", 10**6 * SECOND)])
    sim.run(until=1000 * SECOND)
    assert sim.syncer.done
    assert [one["learner"] for one in events(sim, "expelled")] == [1]
    assert events(sim, "stop")
    check(sim)


def test_a_learner_that_joins_late_takes_lanes_from_the_living() -> None:
    sim = Simulation(USUAL, toys())
    sim.at(5 * SECOND, lambda: sim.tell(sim.syncer.move({1: 9, 5: 9}, sim.now)))
    sim.at(6 * SECOND, lambda: sim.start(9))
    sim.run()
    assert {one["learner"] for one in events(sim, "step") if 1 in one["lanes"]} == {0, 9}
    assert [one["lanes"] for one in events(sim, "step") if one["learner"] == 9][-1] == [1, 5]
    check(sim)


def test_a_peer_that_dies_while_it_is_asked_for_a_copy_holds_up_nobody() -> None:
    faults = [Fault(5_300_000, 3, "kill", 2 * SECOND), Fault(7_350_000, 0, "kill", 3600 * SECOND, lost=True)]
    sim = Simulation(USUAL, toys(), faults=faults, network=Network(100_000))
    sim.run(until=60 * SECOND)
    assert [one["copy"] for one in events(sim, "join")[4:]] == [1]
    check(sim)


# --- snapshots -----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), at=st.integers(1, 28), learners=st.integers(1, 6), delay=st.integers(0, SECOND))
def test_a_run_goes_on_from_a_snapshot_with_any_number_of_learners(
    tmp_path_factory: pytest.TempPathFactory, seed: int, at: int, learners: int, delay: int
) -> None:
    sim = Simulation(USUAL, toys(), faults=schedule(seed, 4, 30 * SECOND, 4), network=Network(delay))
    sim.at(at * SECOND, lambda: sim.tell(sim.syncer.snapshot()))
    sim.run()
    cut = sim.syncer.snapshots.done
    assert cut is not None
    _check_cut(sim, cut)
    file = tmp_path_factory.mktemp("cut") / "snapshot.cut"
    cut.save(file, "")
    cut = Cut.load(file, sim.plan, "")
    changed = replace(USUAL, learners=learners, rounds=8)
    model, lanes, optimizer = cut.restore(changed)
    tape: list[Event] = []
    again = Simulation.of(Syncer(changed, model, lanes, tape.append, cut.round, optimizer), tape, toys()).run()
    check(again, cut)
    assert again.syncer.round == cut.round + 8


def _check_cut(sim: Simulation, cut: Cut) -> None:
    """Every lane of a learner that recorded itself stands where that learner's own step left it."""
    steps = dict.fromkeys(range(8), 0)
    for event in sim.tape:
        if event["event"] == "snapshot":
            break
        for lane in event["lanes"] if event["event"] == "step" else ():
            steps[lane] += 1
    assert all(cut.lanes[lane].steps >= known for lane, known in steps.items())
    for one in cut.learners.values():
        for lane in one.lanes:
            assert cut.lanes[lane.lane] == lane
            assert int.from_bytes(lane.state, "little") == lane.steps


def test_work_that_was_not_merged_is_not_lost_by_a_restore() -> None:
    sim = Simulation(replace(USUAL, every=1000, outer_lr=1, outer_momentum=0, up="float32", down="float32"), toys())
    sim.at(5_500_000, lambda: sim.tell(sim.syncer.snapshot()))
    sim.run(until=8 * SECOND)
    cut = sim.syncer.snapshots.done
    assert cut is not None
    assert {one.steps for one in cut.learners.values()} == {(6,) * 5}  # recorded at the end of the step in hand
    model, _, _ = cut.restore(sim.settings)
    assert all(not np.array_equal(now, before) for now, before in zip(model.values, cut.values, strict=True))


def test_a_snapshot_of_other_fragments_or_a_torn_one_is_refused(tmp_path: Path) -> None:
    sim = Simulation(USUAL, toys())
    sim.at(3 * SECOND, lambda: sim.tell(sim.syncer.snapshot()))
    sim.run()
    cut = sim.syncer.snapshots.done
    assert cut is not None
    cut.save(tmp_path / "cut", "")
    with pytest.raises(RestoreError, match="other fragments"):
        Cut.load(tmp_path / "cut", replace(sim.plan, every=7), "")
    raw = (tmp_path / "cut").read_bytes()
    (tmp_path / "cut").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(RestoreError, match="no snapshot of a run, or is damaged"):
        Cut.load(tmp_path / "cut", sim.plan, "")
    with pytest.raises(RestoreError, match=r"nowhere cannot be read \(No such file"):
        Cut.load(tmp_path / "nowhere", sim.plan, "")


def test_a_snapshot_of_another_stream_is_refused_field_by_field(tmp_path: Path) -> None:
    sim = Simulation(USUAL, toys())
    sim.at(3 * SECOND, lambda: sim.tell(sim.syncer.snapshot()))
    cut = sim.run().syncer.snapshots.done
    assert cut is not None
    path = write_recipe(tmp_path, lanes=8, size=16)
    header = Feed(open_stream(str(path))).header.decode()
    cut.save(tmp_path / "cut", header)
    Cut.load(tmp_path / "cut", sim.plan, header)
    other = tmp_path / "other.toml"
    other.write_text(path.read_text().replace("seed = 7", "seed = 8").replace("seq_len = 32", "seq_len = 16"))
    with pytest.raises(RestoreError, match=r"(?s)order\.seed: 7 -> 8.*seq_len: 32 -> 16.*silently change the data"):
        Cut.load(tmp_path / "cut", sim.plan, Feed(open_stream(str(other))).header.decode())


def test_who_comes_back_where_nobody_can_give_a_copy_begins_afresh() -> None:
    """Not with what the run went on from, nor with what it had before it was gone: nothing on the tape says that."""
    sim = Simulation(USUAL, toys())
    sim.at(9 * SECOND, lambda: sim.tell(sim.syncer.snapshot()))
    cut = sim.run().syncer.snapshots.done
    assert cut is not None
    changed, tape = replace(USUAL, learners=1, quorum=1, rounds=12), list[Event]()
    model, lanes, optimizer = cut.restore(changed)
    again = Simulation.of(Syncer(changed, model, lanes, tape.append, cut.round, optimizer), tape, toys())
    again.at(4 * SECOND, lambda: again.kill(0))
    again.at(6 * SECOND, lambda: again.start(0))
    again.run()
    assert [one["copy"] for one in events(again, "join")] == [OF_SNAPSHOT, None]
    check(again, cut)


@pytest.mark.parametrize("kind", ["toy", "bigram", "micro"])
def test_an_island_that_has_trained_begins_afresh(kind: str, tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path, lanes=2, size=4))
    makes = {"toy": toys(), "bigram": partial(bigram.make, recipe=recipe), "micro": partial(micro.make, recipe=recipe)}
    used, fresh = makes[kind](0), makes[kind](0)
    plan = make_plan(used.tensors, 2, 2)
    begin = used.read(plan)
    lanes = dict(list(used.first_lanes().items())[:2])
    used.own(lanes)
    used.step(0)
    used.step(1)
    assert used.optimizer() != fresh.optimizer()
    welcome = Welcome(0, (0, 0), tuple(LaneAt(lane, 0, state) for lane, state in lanes.items()), 0, pack(begin))
    for island in (used, fresh):
        Learner(0, USUAL, plan, welcome, island)
    for island in (used, fresh):
        island.step(0)
    assert all(map(np.array_equal, used.read(plan), fresh.read(plan)))
    assert used.optimizer() == fresh.optimizer()


# --- the laws can fail ---------------------------------------------------------------------------------------------


def _drop_adoption(tape: list[Event]) -> None:
    next(one for one in tape if one["event"] == "step" and one["adopted"])["adopted"] = ()


def _drop_part(tape: list[Event]) -> None:
    tape.remove(next(one for one in tape if one["event"] == "part"))


def _drop_step(tape: list[Event]) -> None:
    tape.remove([one for one in tape if one["event"] == "step"][9])


def _swap_lanes(tape: list[Event]) -> None:
    steps = [one for one in tape if one["event"] == "step"]
    steps[0]["lanes"], steps[1]["lanes"] = steps[1]["lanes"], steps[0]["lanes"]


def _other_plan(tape: list[Event]) -> None:
    tape[0]["plan"] = "0" * 64


@pytest.mark.parametrize("spoil", [_drop_adoption, _drop_part, _drop_step, _swap_lanes, _other_plan])
def test_a_tape_that_was_changed_does_not_replay(spoil: Callable[[list[Event]], None]) -> None:
    tape = [dict(one) for one in run().tape]
    spoil(tape)
    with pytest.raises(TapeError, match="Event"):
        replay(tape, USUAL, toys())


def test_an_account_that_does_not_add_up_says_so() -> None:
    sim = run()
    takes = [Take(*one) for one in sim.takes]
    with pytest.raises(TapeError, match="never began"):
        account(sim.tape, takes[1:])
    with pytest.raises(TapeError, match="was two things"):
        account(sim.tape, [*takes, takes[0]._replace(digest="other")])


def test_a_run_that_hangs_says_so() -> None:
    sim = Simulation(USUAL, toys(), faults=[Fault(1, learner, "kill", 1) for learner in range(4)])
    sim.start = lambda learner: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="hangs"):
        sim.run()


class Quick(Toy):
    """A toy whose step costs next to nothing."""

    def step(self, clock: int) -> int:
        self._lanes = {lane: steps + 1 for lane, steps in self._lanes.items()}
        self.values = {name: value * np.float32(0.99) for name, value in self.values.items()}
        return TOKENS * len(self._lanes)


def test_thousands_of_learners() -> None:
    """The syncer's work grows with what it is told, not with its square: 2,000 learners, 100 faults."""
    many = Settings(learners=2000, rounds=6, every=6, fragments=3, quorum=1000)
    sim = Simulation(
        many, lambda learner: Quick(lanes=2000),
        step_time=lambda learner, count: SECOND + learner * 7919 % 150_000,
        faults=schedule(1, 2000, 6 * SECOND, 100),
    ).run()  # fmt: skip
    assert sim.syncer.round == 6
    assert np.mean([len(one["learners"]) for one in events(sim, "merge")]) > 1800
    assert account(sim.tape, [Take(*one) for one in sim.takes]).steps > 10_000
