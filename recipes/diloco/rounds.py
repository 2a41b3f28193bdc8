"""When a round closes: quorum, measured times, grace. Integers only; times are microseconds of the driver's clock."""

from dataclasses import dataclass

from recipes.diloco.settings import LEASE, Settings


def smooth(mean: int, new: int) -> int:
    """A running average that forgets with weight 1/8."""
    return mean + (new - mean) // 8


@dataclass(slots=True)
class Pace:
    """Running averages of a syncer, in microseconds.

    Attributes:
        step: an inner step of the learner that sets the pace; 0 where none has been measured yet.
        quorum: from the first learner that was ready for a round until as many were as the quorum asks for.
        sync: from the close of a round until the last learner that answers has answered, which is when it is merged.
    """

    step: int = 0
    quorum: int = 0
    sync: int = 0

    def grace(self, settings: Settings) -> int:
        """How long a round may wait for learners beyond the quorum (paper, equation 3).

        A merged fragment is late after `overlap` steps; what quorum and merging leave of that is slack, of which a
        share may be spent. Never negative; 0 before a step has been measured.
        """
        slack = settings.overlap * self.step - self.quorum - self.sync
        return min(max(0, slack * settings.grace // 1000), self.step * settings.grace_cap // 1000)

    def patience(self, settings: Settings) -> int:
        """After how long a learner that owes an answer is passed over: as many steps as a fragment may take."""
        return max(1, settings.overlap) * self.step

    def farewell(self, settings: Settings) -> int:
        """How long a learner that was told to stop may be silent, so that every run ends: as long as its lease."""
        return max(1, (settings.lease or LEASE) * self.step)


@dataclass(slots=True)
class Member:
    """What the syncer knows of a learner that takes part.

    Attributes:
        clock: its clock, from its last report.
        bases: the version of each fragment that it builds on.
        heard: when it was heard of last.
        reported: when it reported a step last, or started.
        step: running average of the time between its reports.
        fresh: whether it has made a step since the last round closed.
    """

    clock: int
    bases: list[int]
    heard: int
    reported: int
    step: int = 0
    fresh: bool = False

    def silent(self, now: int) -> bool:
        """Whether it is overdue by so much that no round should wait for it: four of its own steps."""
        return bool(self.step) and now - self.heard > 4 * self.step
