"""The bandwidth model: closed forms beside the simulated link, the published numbers, predicted and real bytes."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from diloco_toys import Toy
from hypothesis import given, settings
from hypothesis import strategies as st
from small import write_recipe

from recipes.diloco import processes, traffic
from recipes.diloco.bandwidth import (
    MODEL,
    SETTINGS,
    UTILISATIONS,
    DataParallel,
    Decoupled,
    claims,
    four_regions,
    narrowest,
    on_the_wire,
)
from recipes.diloco.fragments import Plan, Tensor, Vector, make_plan
from recipes.diloco.run import Run
from recipes.diloco.settings import Settings
from recipes.diloco.simulate import Network, Simulation
from recipes.diloco.traffic import BARE_INT4, BF16, INT4, Format, Traffic, decoupled, ring
from recipes.diloco.wire import encode, encoded_bytes

RINGS = st.builds(
    DataParallel,
    params=st.floats(1e6, 1e12),
    sites=st.integers(2, 64),
    step=st.floats(0.1, 30),
    buckets=st.integers(1, 64),
    latency=st.sampled_from([0.0, 1e-4]),
)
STARS = st.builds(
    lambda per, fragments, **rest: Decoupled(every=per * fragments, fragments=fragments, **rest),
    per=st.integers(1, 4),
    fragments=st.integers(1, 12),
    params=st.floats(1e6, 1e12),
    kind=st.sampled_from([BF16, BARE_INT4, INT4]),
    step=st.floats(0.1, 30),
    overlap=st.integers(0, 8),
)
SHARES = st.floats(0.3, 0.98)


@given(RINGS, SHARES)
def test_the_closed_form_of_a_ring_is_the_simulated_link(link: DataParallel, target: float) -> None:
    needs = link.needs(target)
    if needs < math.inf:
        assert link.utilisation(needs) == pytest.approx(target, rel=1e-6)


@given(STARS, SHARES)
@settings(max_examples=50, deadline=None)
def test_the_closed_form_of_a_star_is_the_simulated_link(link: Decoupled, target: float) -> None:
    assert link.utilisation(link.needs(target)) == pytest.approx(target, rel=0.02)


@given(st.one_of(RINGS, STARS), st.floats(1e6, 1e14))
@settings(max_examples=50, deadline=None)
def test_a_faster_link_is_never_worse_and_none_is_better_than_computing(
    link: DataParallel | Decoupled, bandwidth: float
) -> None:
    slow, fast = link.utilisation(bandwidth), link.utilisation(2 * bandwidth)
    assert 0 < slow <= fast + 1e-9 <= 1 + 2e-9


@given(RINGS, SHARES)
@settings(max_examples=25, deadline=None)
def test_bisection_finds_the_closed_form(link: DataParallel, target: float) -> None:
    needs = link.needs(target)
    if needs < math.inf:
        assert narrowest(link.utilisation, target) == pytest.approx(needs, rel=2e-4)


def test_what_no_link_reaches_is_refused() -> None:
    slow = DataParallel(1e9, 2, buckets=16, latency=0.1)
    assert slow.needs(0.99) == math.inf
    with pytest.raises(ValueError, match="out of reach on any link"):
        narrowest(slow.utilisation, 0.99)


def test_a_late_fragment_is_waited_for_after_the_overlap_and_not_before() -> None:
    """One fragment every 4 steps of 1 s that takes 3 s to send: hidden with an overlap of 2 steps, not with 1."""
    bandwidth = 16 * 1e9 / 3
    hidden, late = (Decoupled(1e9, every=4, fragments=1, overlap=overlap).utilisation(bandwidth) for overlap in (2, 1))
    assert hidden == 1
    assert late == pytest.approx(4 / 5)


def test_uneven_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of the fragments"):
        Decoupled(1e9, every=24, fragments=5)


def test_the_published_numbers_are_met() -> None:
    for claim in claims():
        assert abs(claim.off) <= 0.02, claim
        assert claim.assumed, "every one of them rests on something that is not published"
    assert {claim.published for claim in claims()} == {198, 0.84, 236, 104, 1.7, 60, 242}


@pytest.mark.parametrize("link", [2e9, 5e9])
def test_twelve_billion_over_four_regions(link: float) -> None:
    found = four_regions(link)
    assert found["faster"] > 20
    assert found["shortest"] < found["longest"]
    run = Decoupled(12e9, step=found["shortest"])
    assert run.utilisation(link * 1.0001) > 0.999
    assert run.utilisation(link * 0.9) < 0.95
    slow = DataParallel(12e9, 4, step=found["longest"])
    assert 1 / slow.utilisation(link) == pytest.approx(20)


def test_bandwidths_of_every_setting_agree_in_both_ways() -> None:
    for name, setting in SETTINGS.items():
        for target in UTILISATIONS:
            played = narrowest(setting.utilisation, target)
            assert played == pytest.approx(setting.needs(target), rel=1e-3), (name, target)


@given(st.integers(0, 5_000))
@settings(deadline=None)
def test_a_format_is_as_long_as_what_the_wire_carries(values: int) -> None:
    for kind, codec in ((BF16, "bf16"), (INT4, "int4")):
        assert kind.bytes(values) == encoded_bytes(codec, values)
        vector = np.linspace(-1, 1, values, dtype=np.float32)
        assert kind.bytes(values) == len(encode(codec, vector, np.zeros_like(vector)))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=9), st.integers(0, 30), st.integers(0, 100))
def test_merges_are_counted_as_the_plan_counts_them(sizes: list[int], more: int, steps: int) -> None:
    every = len(sizes) + more
    plan = make_plan([Tensor(f"{i}", (size,)) for i, size in enumerate(sizes)], len(sizes), every)
    parts = [plan.size(part) for part in range(len(sizes))]
    due = [part for step in range(1, steps + 1) for part in plan.due(step)]
    found = decoupled(parts, every=every, steps=steps, up=INT4)
    assert found == Traffic(sum(INT4.bytes(parts[part]) for part in due), sum(2 * parts[part] for part in due))
    assert found.total == found.up + found.down


@given(st.integers(1, 10**12), st.integers(1, 64), st.integers(1, 48))
def test_a_ring_passes_every_part_on_twice(values: int, learners: int, steps: int) -> None:
    sent = ring(values, learners=learners, steps=steps)
    assert sent.up == sent.down == pytest.approx(2 * values * 2 * (1 - 1 / learners) * steps)


def test_bytes_beside_a_ring_of_eight() -> None:
    less = {name: reference.up / ours.up for name, (ours, reference) in on_the_wire().items()}
    assert less["bf16 both ways"] == pytest.approx(42, rel=1e-6)
    assert less["int4 up, bf16 down"] == pytest.approx(42 * 16 / 4.0625, rel=1e-6)
    ours, reference = on_the_wire()["bf16 both ways"]
    assert reference.total / ours.total == pytest.approx(42, rel=1e-6)


class Wide(Toy):
    """An island whose messages are far longer than their heads."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Sequence[Tensor] = [Tensor(f"layers.{i}", (10_000 + 256 * i,)) for i in range(24)]
        self.values = {one.name: np.zeros(one.shape, np.float32) for one in self.tensors}

    def step(self, clock: int) -> int:
        self._lanes = {lane: steps + 1 for lane, steps in self._lanes.items()}
        self.values = {name: value + np.float32(0.01) for name, value in self.values.items()}
        return 1

    def optimizer(self) -> bytes:
        return b""

    def read(self, plan: Plan) -> list[Vector]:
        return plan.gather(self.values)


@pytest.mark.parametrize(("up", "kind", "less"), [("bf16", BF16, 42.0), ("int4", INT4, 165.4)])
def test_bytes_counted_on_a_run_are_those_predicted(up: str, kind: Format, less: float) -> None:
    run = Simulation(Settings(learners=8, rounds=48, up=up), lambda learner: Wide(), network=Network()).run()
    sizes = [run.plan.size(part) for part in range(24)]
    predicted, reference = decoupled(sizes, every=24, steps=48, up=kind), ring(sum(sizes), learners=8, steps=48)
    for learner in range(8):
        sent = {
            way: sum(size for (one, direction, message), size in run.bytes.items()
                     if (one, direction) == (learner, way) and message != "Welcome")
            for way in ("up", "down")
        }  # fmt: skip
        assert sent["up"] == pytest.approx(predicted.up, rel=0.05)
        assert sent["down"] == pytest.approx(predicted.down, rel=0.05)
        assert sum(sent.values()) == pytest.approx(predicted.total, rel=0.05)
        assert reference.up / sent["up"] == pytest.approx(less, rel=0.05)
        bodies = run.bytes[learner, "up", "Part"], run.bytes[learner, "down", "Merged"]
        assert bodies == (pytest.approx(predicted.up, rel=0.025), pytest.approx(predicted.down, rel=0.01))


@pytest.mark.slow
def test_bytes_counted_by_processes_are_those_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path / "data", lanes=8, size=8)
    options = {"recipe": str(recipe), "vocabulary": 4096, "width": 16}
    shape = Settings(learners=4, rounds=32, every=16, fragments=4, up="int4", down="bf16")
    run = Run(tmp_path / "run", shape, "recipes.diloco.bigram:make", options, pace=0.5)
    run.save()
    with pytest.raises(SystemExit, match=r"has no traffic\.json"):
        traffic.main(run.folder)
    processes.whole(run)
    predicted, reference = traffic.beside(run)
    found = traffic.counted(run)
    assert list(found) == [0, 1, 2, 3]
    for one in found.values():
        assert one.up == pytest.approx(predicted.up, rel=0.1)  # heads are 7 % of so small a model
        assert one.total == pytest.approx(predicted.total, rel=0.05)
        assert reference.total / one.total == pytest.approx(reference.total / predicted.total, rel=0.05)
    traffic.main(run.folder)
    assert "of predicted" in capsys.readouterr().out


def test_the_command_shows_inputs_and_writes_what_it_prints(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.diloco.bandwidth", "--json", str(tmp_path / "out.json")]
    said = subprocess.run(
        [*command, "--picture", str(tmp_path / "out.png")], check=True, capture_output=True, text=True
    )
    assert "met only if" in said.stdout
    assert "16 buckets" in said.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert [one["published"] for one in found["claims"]][:2] == [198, 0.84]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert MODEL == 5e9
