"""The goodput simulator: laws of the two models, their agreement, and the published table."""

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.diloco import goodput
from recipes.diloco.failures import Fleet, simulate, steady_goodput, steady_uptime, weibull, weibull_mean
from recipes.diloco.uneven import pace, scavenged_decoupled, scavenged_elastic

LIVELY = settings(max_examples=25, deadline=None)
FLEETS = st.builds(
    Fleet,
    mtbi=st.floats(1e6, 1e9),
    slice_chips=st.sampled_from([1, 64, 256]),
    downscale=st.floats(0.1, 100),
    upscale=st.floats(0.1, 100),
    return_scale=st.floats(1, 1_000),
    replace_scale=st.floats(1, 1_000),
)
WORLDS = {"chips": st.integers(1_000, 1_000_000), "learners": st.integers(1, 8), "fleet": FLEETS}


@given(**WORLDS, elastic=st.booleans(), seed=st.integers(0, 9))
@LIVELY
def test_shares_are_shares_and_uptime_covers_goodput(
    chips: int, learners: int, fleet: Fleet, elastic: bool, seed: int
) -> None:
    up = [
        simulate(chips, learners, fleet, elastic=elastic, quorum=quorum, failures=100, seed=seed)
        for quorum in range(1, learners + 1)
    ]
    assert len({one.goodput for one in up}) == 1  # the quorum is a way to look, it changes nothing
    assert 0 < up[0].goodput <= up[0].uptime + 1e-9
    assert up[0].uptime <= 1 + 1e-9
    assert all(fewer.uptime <= more.uptime + 1e-9 for more, fewer in itertools.pairwise(up))


@given(**WORLDS, elastic=st.booleans())
@LIVELY
def test_a_simulation_is_a_function_of_its_seed(chips: int, learners: int, fleet: Fleet, elastic: bool) -> None:
    one, same, other = (
        simulate(chips, learners, fleet, elastic=elastic, failures=200, seed=seed) for seed in (1, 1, 2)
    )
    assert one == same
    assert one.goodput != other.goodput


@given(**WORLDS, elastic=st.booleans())
@LIVELY
def test_the_closed_form_solves_its_equation_and_falls_with_chips(
    chips: int, learners: int, fleet: Fleet, elastic: bool
) -> None:
    runs = steady_goodput(chips, learners, fleet, elastic=elastic)
    rate = chips / learners / fleet.mtbi
    lost = rate * runs * (fleet.downscale + fleet.upscale * runs)
    if not elastic:
        lost = rate * runs * (fleet.replace_scale * weibull_mean() + fleet.upscale)
    assert 1 - runs == pytest.approx(lost, abs=1e-9)
    assert steady_goodput(2 * chips, learners, fleet, elastic=elastic) < runs
    assert steady_goodput(2 * chips, 2 * learners, fleet, elastic=elastic) == pytest.approx(runs)


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize(("chips", "learners"), [(150_000, 1), (2_400_000, 1), (1_200_000, 8)])
def test_simulation_and_closed_form_agree(chips: int, learners: int, elastic: bool) -> None:
    fleet = Fleet(
        slice_chips=16, return_scale=1_000, downscale=5, upscale=20
    )  # slices too small for their loss to show
    seen = simulate(chips, learners, fleet, elastic=elastic, failures=40_000)
    assert seen.goodput == pytest.approx(steady_goodput(chips, learners, fleet, elastic=elastic), abs=0.006)
    assert seen.uptime == pytest.approx(steady_uptime(chips, learners, fleet, elastic=elastic), abs=0.006)


def test_missing_slices_cost_their_share() -> None:
    fleet = Fleet(slice_chips=1_000, downscale=1e-6, upscale=1e-6, return_scale=3_600)
    away = 1_000 * 3_600 * weibull_mean() / fleet.mtbi  # slices fail so often and are away so long
    seen = simulate(100_000, 1, fleet, failures=20_000)
    assert seen.goodput == pytest.approx(1 / (1 + away), abs=0.003)


def test_a_learner_of_one_slice_cannot_shrink() -> None:
    fleet = Fleet(slice_chips=256, return_scale=86_400)
    seen = simulate(256, 1, fleet, failures=2_000)
    away = 86_400 * weibull_mean() + fleet.upscale
    assert seen.goodput == pytest.approx(1 / (1 + away * 256 / fleet.mtbi), abs=0.02)
    assert seen.goodput == seen.uptime


def test_failures_come_at_the_stated_rate() -> None:
    gentle = Fleet(downscale=1e-3, upscale=1e-3, return_scale=1e-3)
    assert simulate(600_000, 4, gentle, failures=20_000).failures == pytest.approx(20_000, rel=0.02)


def test_returns_follow_an_exponentiated_weibull() -> None:
    for u in (0.1, 0.5, 0.9):
        assert (1 - math.exp(-(weibull(u) ** 1.2))) ** 1.5 == pytest.approx(u)
    assert weibull_mean() == pytest.approx(weibull_mean(200_000), rel=1e-3)


@pytest.mark.parametrize("wrong", [{"quorum": 3}, {"quorum": 0}, {"learners": 11}])
def test_worlds_in_which_nothing_runs_are_refused(wrong: dict[str, int]) -> None:
    asked = {"chips": 10, "learners": 2, "quorum": 1, **wrong}
    with pytest.raises(ValueError, match="the quorum lies in 1 to learners"):
        simulate(asked["chips"], asked["learners"], Fleet(), quorum=asked["quorum"])


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_fleet_without_times_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="downscale is .* must be above 0"):
        Fleet(downscale=value)


def test_the_published_table_is_met() -> None:
    found = goodput.compute(goodput.Args(failures=20_000))
    for kind in ("simulated", "closed"):
        cells, errors = np.array(found[kind]), found["errors"][kind]
        rms, worst = errors["all 30 cells"]
        assert rms <= 2
        assert worst <= 5
        at = goodput.CHIPS.index(1_200_000)
        assert abs(cells[1, at] - 58) <= 2
        assert abs(cells[4, at] - 88) <= 2
        assert (np.diff(cells, axis=0) > 0).all()  # every row above the one before, as published
        assert (np.diff(cells, axis=1) < 0).all()
    assert (np.array(found["uptime_simulated"])[3:] > 99).all()
    assert (np.array(found["uptime_simulated"])[4:] > 99.99).all()


def test_errors_are_measured_against_the_published_cells() -> None:
    cells = [[float(cell) for cell in row.cells] for row in goodput.PUBLISHED]
    assert all(pair == (0, 0) for pair in goodput.distances(cells).values())
    cells[0][2] += 3
    found = goodput.distances(cells)
    assert found["all 30 cells"] == (pytest.approx(3 / math.sqrt(30)), 3)
    assert found["the 25 of elastic and decoupled rows"] == (0, 0)


@pytest.mark.parametrize("slice_chips", [64, 1_024])
def test_the_size_of_a_slice_hardly_matters(slice_chips: int) -> None:
    ours, other = (
        simulate(2_400_000, 2, fleet, failures=50_000).goodput
        for fleet in (Fleet(), replace(Fleet(), slice_chips=slice_chips))
    )
    assert other == pytest.approx(ours, abs=0.01)


@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=6), st.integers(0, 3), st.data())
@LIVELY
def test_the_quorum_th_fastest_sets_the_pace_of_even_steps(
    times: list[float], overlap: int, data: st.DataObject
) -> None:
    quorum = data.draw(st.integers(1, len(times)))
    seen = pace(np.array(times), quorum, overlap=overlap, jitter=0, steps=400)
    assert seen == pytest.approx(min(times) / sorted(times)[quorum - 1], rel=0.02)


def test_slow_learners_as_published() -> None:
    times = np.array(goodput.SLOW_STEPS)
    for quorum, published in goodput.SLOW.values():
        assert 100 * pace(times, quorum) == pytest.approx(published, abs=1)
    assert pace(times, 8, overlap=0) < pace(times, 8, overlap=2)  # room to wait takes up what steps vary by


@pytest.mark.parametrize("wrong", [{"quorum": 0}, {"quorum": 3}, {"overlap": -1}, {"jitter": 0.5}])
def test_paces_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="allowed are a quorum of 1 to 2"):
        pace(np.ones(2), **{"quorum": 1, **wrong})  # pyright: ignore[reportArgumentType]


@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 20))
@LIVELY
def test_scavenged_learners_come_close_to_the_bound(guests: int, base: int, visits: int) -> None:
    extra = guests / base
    bound = 0.5 + 0.5 / (1 + extra)
    free = scavenged_decoupled(extra, base=base, steps=2_000, visits=visits, join=0)
    assert bound - 0.002 * visits <= free <= bound + 0.002 * visits  # steps that a visit's end cuts
    slow = scavenged_decoupled(extra, base=base, steps=2_000, visits=visits, join=20)
    assert free < slow <= 1 if guests else free == slow == 1


@pytest.mark.parametrize(("extra", "published"), goodput.SCAVENGED.items())
def test_scavenged_times_as_published(extra: float, published: tuple[float, float]) -> None:
    assert scavenged_elastic(extra) == pytest.approx(published[0], abs=0.026)
    assert scavenged_decoupled(extra) == pytest.approx(published[1], abs=0.008)


def test_half_a_learner_is_refused() -> None:
    with pytest.raises(ValueError, match="give a whole number"):
        scavenged_decoupled(0.3, base=4)


def test_the_command_says_what_is_fitted_and_writes_what_it_prints(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "recipes.diloco.goodput",
        "--failures",
        "500",
        "--json",
        str(tmp_path / "out.json"),
    ]
    command += ["--picture", str(tmp_path / "out.png"), "--downscale", "20"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "fitted" in said
    assert "20 s, 12.8 s" in said
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["fleet"]["downscale"] == 20
    assert len(found["simulated"]) == len(goodput.PUBLISHED)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
