"""What failing hardware costs a training job: a closed form, and a simulation of every failure and return.

A *learner* is a synchronous job on a share of the chips. A failed chip takes its slice out of the learner. An *elastic*
learner stops, goes on with the slices that are left, and stops again to take the slice back; one that is not elastic
waits for a replacement. M learners fail and stop independently: no learner waits for another.

Goodput is the share of the chips' time that goes to training: a learner that stands still loses all its chips, a
missing slice its own. Uptime is the share of the time in which at least K learners run.

Source: "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv 2604.21428: failures at a constant rate a chip,
returns after an exponentiated Weibull time, stops to shrink and to grow. Its values of the last two are not known to
us: `Fleet` says which of ours are fitted.
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zephon.keyed import Key, make_key, permute

YEAR = 365.25 * 24 * 3600.0
_BLOCK = 4096  # draws made at once: one by one, a table takes 40 s in place of 4
_WORDS = 1 << 52


@dataclass(frozen=True)
class Fleet:
    """How chips fail and come back. Times in seconds."""

    mtbi: float = YEAR
    """Mean time between interruptions of one chip (published)."""
    slice_chips: int = 256
    """Chips that a failure takes out together (assumed; 64 to 1,024 change no cell by more than 1 point)."""
    downscale: float = 12.8
    """Stop of a learner to go on without a slice (fitted, with `upscale`, to the elastic and decoupled rows)."""
    upscale: float = 12.8
    """Stop of a learner to take a slice back, or to start again with a replacement (fitted, see `downscale`)."""
    return_scale: float = 300.0
    """Scale of the Weibull time until a slice is back, where the learner goes on without it (assumed; 60 to 1,200 s
    change no cell by more than 1 point)."""
    replace_scale: float = 55.0
    """The same where the learner waits for it: a spare that stands ready (fitted to the row that is not elastic)."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(
                    f"{name} is {value}; it must be above 0: a fleet without it has no goodput to compute."
                )


@dataclass(frozen=True)
class Outcome:
    """What a simulation saw. Shares lie in [0, 1]."""

    goodput: float
    uptime: float
    failures: int


def steady_goodput(chips: float, learners: int, fleet: Fleet, *, elastic: bool = True) -> float:
    """Goodput of `learners` independent learners on `chips` chips together, in closed form.

    A learner of n chips runs for the share g of the time. Failures stop it at the rate λg with λ = n / mtbi. As many
    slices come back, and stop it if it is running then: λg². Events during a stop cost nothing more. Hence
    `1 - g = λ·downscale·g + λ·upscale·g²`; not elastic: `1 - g = λ·R·g`, R the mean replacement and restart. Missing
    slices are left out: they cost 0.3 points at most.
    """
    rate = chips / learners / fleet.mtbi
    if not elastic:
        return 1 / (1 + rate * (fleet.replace_scale * weibull_mean() + fleet.upscale))
    down, up = rate * fleet.downscale, rate * fleet.upscale
    return 2 / (1 + down + math.sqrt((1 + down) ** 2 + 4 * up))


def steady_uptime(chips: float, learners: int, fleet: Fleet, *, quorum: int = 1, elastic: bool = True) -> float:
    """Share of the time in which at least `quorum` of the learners run, each independently for its goodput's share."""
    runs = steady_goodput(chips, learners, fleet, elastic=elastic)
    return sum(math.comb(learners, up) * runs**up * (1 - runs) ** (learners - up) for up in range(quorum, learners + 1))


def simulate(
    chips: int,
    learners: int,
    fleet: Fleet,
    *,
    elastic: bool = True,
    quorum: int = 1,
    failures: int = 20_000,
    seed: int = 0,
) -> Outcome:
    """Play every failure and return of a fleet that begins whole.

    Args:
        chips: of the whole fleet.
        learners: that share the chips evenly.
        fleet: how chips fail and come back.
        elastic: whether a learner goes on without a missing slice.
        quorum: learners that must run for the system to count as up.
        failures: that would strike the whole fleet if it never stopped; sets the simulated time. At 20,000 the goodput
            of two seeds differs by some 0.2 points.
        seed: names the draws, which are the same on every machine.

    Raises:
        ValueError: the quorum is not one of 1 to `learners`, or there is a learner without a chip.
    """
    if not 1 <= quorum <= learners <= chips:
        raise ValueError(
            f"quorum = {quorum}, learners = {learners}, chips = {chips}: the quorum lies in 1 to learners, and every "
            "learner needs a chip. Otherwise nothing would ever run."
        )
    horizon = failures * fleet.mtbi / chips
    spans, struck = list[tuple[float, float]](), 0
    useful = 0.0
    for learner in range(learners):
        key = make_key("diloco failures", seed, chips, learners, int(elastic), learner)
        for start, end, share, failed in _spans(chips / learners, fleet, elastic, horizon, key):
            spans.append((start, end))
            useful += share * (end - start)
            struck += failed
    return Outcome(useful / (learners * horizon), _covered(np.array(spans), quorum) / horizon, struck)


def _spans(
    chips: float, fleet: Fleet, elastic: bool, horizon: float, key: Key
) -> Iterator[tuple[float, float, float, bool]]:
    """When one learner runs: start, end, share of its chips that run, and whether a failure ends it."""
    slices = max(1, round(chips / fleet.slice_chips))
    mean = fleet.mtbi / (chips / slices)  # time between the failures of one slice
    draws = _uniform(key)
    scale = fleet.return_scale if elastic else fleet.replace_scale
    away: list[float] = []  # when each missing slice is back: a heap
    now = 0.0
    while now < horizon:
        live = slices - len(away)
        # The rate is constant while nothing changes, so that a draw left over at a change may be thrown away.
        failure = now - math.log(next(draws)) * mean / live if live else math.inf
        end = min(failure, away[0] if away else math.inf, horizon)
        if live:
            yield now, end, live / slices, end == failure
        if end == failure:
            heapq.heappush(away, end + scale * weibull(next(draws)))
        if end == horizon:
            return
        now = end + fleet.downscale if end == failure and elastic else away[0] + fleet.upscale
        while away and away[0] <= now:  # whatever comes back during the stop is taken along
            heapq.heappop(away)


def _uniform(key: Key) -> Iterator[float]:
    """Numbers in (0, 1): a keyed permutation of counted numbers, so that they need no state and no generator."""
    for start in itertools.count(0, _BLOCK):
        words = permute(_WORDS, key, np.arange(start, start + _BLOCK, dtype=np.int64))
        yield from ((words + 0.5) / _WORDS).tolist()


def weibull(u: float, a: float = 1.5, c: float = 1.2) -> float:
    """The quantile `u` of the exponentiated Weibull time of scale 1: `(-ln(1 - u^(1/a)))^(1/c)`.

    Mudholkar and Srivastava (1993). The shapes are assumed: only the mean shows in the results.
    """
    return (-math.log1p(-(u ** (1 / a)))) ** (1 / c)


def weibull_mean(points: int = 10_000) -> float:
    """Mean of `weibull` over evenly spaced quantiles."""
    return sum(weibull((i + 0.5) / points) for i in range(points)) / points


def _covered(spans: NDArray[np.float64], quorum: int) -> float:
    """Time that at least `quorum` of the spans, float64 [n, 2], cover."""
    times = spans.T.ravel()
    steps = np.repeat([1, -1], len(spans))
    order = np.argsort(times, kind="stable")
    running = np.cumsum(steps[order])[:-1]
    return float(np.diff(times[order])[running >= quorum].sum())
