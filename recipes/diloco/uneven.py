"""Learners that are not alike: slow ones, and ones that are there for a while only.

Source of the published figures: arXiv 2604.21428, tables 4 and 5. What the tables leave open is said at each function.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from zephon.keyed import make_key, permute

_WORDS = 1 << 52


def pace(
    step_times: NDArray[np.float64],
    quorum: int,
    *,
    overlap: int = 2,
    jitter: float = 0.1,
    steps: int = 5_000,
    seed: int = 0,
) -> float:
    """Steps of the system in the time in which its fastest learner would do one, when merges wait for a quorum.

    A step of a learner takes its step time times a normal factor of mean 1 and deviation `jitter`, drawn anew at every
    step. The merge of a step is done when `quorum` learners have finished it; a learner begins a step only if the merge
    of `overlap + 1` steps before is done. With a quorum of 1 the fastest learner waits for no one and sets the pace;
    with a quorum of all, everyone comes to follow the slowest.

    Args:
        step_times: float64 [learners], mean seconds a step.
        quorum: learners that a merge waits for, in 1 to learners.
        overlap: steps from the point at which a fragment is due to its use, at least 0.
        jitter: deviation of a step over its mean; below 0.3, so that no step takes negative time.
        steps: to simulate.
        seed: names the draws.

    Raises:
        ValueError: a value outside what is allowed.
    """
    learners = len(step_times)
    if not (1 <= quorum <= learners and overlap >= 0 and 0 <= jitter < 0.3):
        raise ValueError(
            f"quorum = {quorum}, overlap = {overlap}, jitter = {jitter}: allowed are a quorum of 1 to {learners}, an "
            "overlap of at least 0 and a jitter in [0, 0.3). Otherwise steps would wait for ever or take negative time."
        )
    took = step_times * (1 + jitter * _normal(steps, learners, seed))
    finished, merged = np.zeros(learners), np.zeros(steps)
    for step in range(steps):
        known = merged[step - overlap - 1] if step > overlap else 0.0
        finished = np.maximum(finished, known) + took[step]
        merged[step] = np.sort(finished)[quorum - 1]
    return float(steps * step_times.min() / merged[-1])


def _normal(steps: int, learners: int, seed: int) -> NDArray[np.float64]:
    """Standard normal numbers [steps, learners], by Box and Muller (1958)."""
    index = np.arange(2 * steps * learners, dtype=np.int64)
    u = (permute(_WORDS, make_key("diloco pace", seed), index) + 0.5) / _WORDS
    radius, angle = np.sqrt(-2 * np.log(u[0::2])), 2 * np.pi * u[1::2]
    return (radius * np.cos(angle)).reshape(steps, learners)


RESHARD = 2.1
"""Time an elastic job loses to stops for extra chips, over its time with them, were all its state to move (fitted to
the four published times of data-parallel; the paper's own stops and visits are not known to us)."""


def scavenged_elastic(extra: float) -> float:
    """Time of one elastic data-parallel job that extra chips help for half of its work, over its time without them.

    Whenever they come or go the job stops to move the share `extra / (1 + extra)` of its state, so that it loses
    `RESHARD` times this share of the time that it has them.

    Args:
        extra: chips that come and go over the chips that stay.
    """
    helped = 0.5 / (1 + extra)
    return 0.5 + helped * (1 + RESHARD * extra / (1 + extra))


def scavenged_decoupled(extra: float, *, base: int = 4, steps: int = 20_000, visits: int = 8, join: int = 6) -> float:
    """The same for decoupled learners, step by step: those that stay never stop for those that come.

    For half of the work the extra learners are there, in several visits. One that comes copies the model from a peer
    before its first step; the step that it is in when it leaves is lost. Without both the time is
    `0.5 + 0.5 / (1 + extra)`.

    Args:
        extra: learners that come and go over the learners that stay; times `base` a whole number.
        base: learners that stay.
        steps: of each learner, had it no help; every step takes one unit of time.
        visits: in which the extra learners are there (assumed).
        join: steps that a copy of the model takes (assumed: up to 6 cost nothing in the paper's figure 12).

    Raises:
        ValueError: the extra learners are not whole.
    """
    guests = round(base * extra)
    if guests != base * extra:
        raise ValueError(f"extra = {extra} of {base} learners is {base * extra} learners: give a whole number of them.")
    work, done, now = base * steps, 0, 0.0
    running = [(1.0, learner) for learner in range(base)]  # when each finishes its step: a heap
    for phase in range(2 * visits):
        if phase % 2:
            for guest in range(guests):
                heapq.heappush(running, (now + join + 1, base + guest))
        while done < work * (phase + 1) // (2 * visits):
            now, learner = running[0]
            heapq.heapreplace(running, (now + 1, learner))
            done += 1
        running = [(finish, learner) for finish, learner in running if learner < base]
        heapq.heapify(running)
    return now / steps
