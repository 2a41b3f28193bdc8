"""Faults on a seeded schedule: the same for the simulator, for real processes, and for the baselines beside them."""

from dataclasses import dataclass

from zephon.keyed import Draw, make_key

KINDS = ("kill", "stop", "slow", "partition")
"""SIGKILL; SIGSTOP and SIGCONT; steps that take three times as long; a network that carries nothing for a while."""


@dataclass(frozen=True, order=True, slots=True)
class Fault:
    """What happens to a learner.

    Attributes:
        at: when, in microseconds since the run began.
        learner: to whom.
        kind: one of `KINDS`.
        lasting: until the learner is started again, goes on, or is reached again; microseconds.
        lost: whether a killed learner's last words are lost; else they arrive.
    """

    at: int
    learner: int
    kind: str
    lasting: int
    lost: bool = False


def schedule(seed: int, learners: int, length: int, count: int, kinds: tuple[str, ...] = KINDS) -> list[Fault]:
    """`count` faults within the first `length` microseconds, each lasting up to a quarter of that; sorted by time.

    A learner's next fault comes after its last one is over.
    """
    draw, free, found = Draw(make_key("diloco faults", seed)), dict.fromkeys(range(learners), 0), list[Fault]()
    for at in sorted(draw.integer(length) for _ in range(count)):
        ready = [learner for learner, until in free.items() if until <= at]
        lasting = length // 40 + draw.integer(length // 4)
        kind, lost = kinds[draw.integer(len(kinds))], bool(draw.integer(2))
        if ready:
            learner = ready[draw.integer(len(ready))]
            found.append(Fault(at, learner, kind, lasting, lost))
            free[learner] = at + lasting + length // 40
    return found
