"""Who owns which lane, and where each lane stands. A lane moves only from where its last reported step left it.

A lane has an owner (the learner that trains on it now, or nobody) and a home (the learner that should have it). A dead
learner's lanes have no owner and stay where they are until it returns, unless they are given another home. A lane of a
living learner changes its owner in two halves: the old one is told, lets go and reports that it has; only then is the
new one told. So no step of a lane is ever trained on by two learners that both count.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from recipes.diloco.messages import LaneAt, Own, Report
from zephon.errors import UsageError


def divide(lanes: Sequence[int], learners: Sequence[int]) -> dict[int, int]:
    """The home of every lane: consecutive runs, as even as they can be.

    Raises:
        UsageError: fewer lanes than learners.
    """
    if len(lanes) < len(learners):
        raise UsageError(
            f"{len(lanes)} lanes for {len(learners)} learners: some would have no data. Use a recipe with more lanes."
        )
    return {lane: learners[i * len(learners) // len(lanes)] for i, lane in enumerate(sorted(lanes))}


class Lanes:
    """The syncer's book of lanes.

    Args:
        lanes: where every lane stands.
        homes: which learner should have which lane.
    """

    def __init__(self, lanes: Iterable[LaneAt], homes: Mapping[int, int]) -> None:
        self.at = {one.lane: one for one in lanes}
        self.homes = dict(homes)
        self._owners: dict[int, int] = {}
        self._told: dict[int, tuple[int, frozenset[int]]] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._orders = 0

    def owned(self, learner: int) -> list[LaneAt]:
        """The lanes that a learner owns, ascending."""
        return [self.at[lane] for lane in sorted(self._owners) if self._owners[lane] == learner]

    def welcome(self, learner: int) -> tuple[LaneAt, ...]:
        """The lanes that a learner starts with: those that are at home with it and have no owner."""
        for lane, home in self.homes.items():
            if home == learner and lane not in self._owners:
                self._owners[lane] = learner
        lanes = tuple(self.owned(learner))
        self._orders += 1
        self._told[learner] = (self._orders, frozenset(one.lane for one in lanes))
        return lanes

    def leave(self, learner: int) -> None:
        """A learner is gone: its lanes stand where its last report left them."""
        for one in self.owned(learner):
            self._let_go(learner, one)
        self._told.pop(learner, None)

    def died(self, learner: int, taken: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Steps by lane that a learner had begun before it was gone, by its own book, and never reported."""
        dead = {lane: steps - self._left.get((learner, lane), steps) for lane, steps in taken}
        self._left.update(((learner, lane), steps) for lane, steps in taken)  # counted once
        return {lane: count for lane, count in sorted(dead.items()) if count > 0}

    def report(self, learner: int, report: Report) -> None:
        """Take a step of all lanes of a learner into the book.

        Raises:
            ValueError: it reports a lane that it does not own, or not the next step of one.
        """
        for one in report.lanes:
            if self._owners.get(one.lane) != learner or one.steps != self.at[one.lane].steps + 1:
                raise ValueError(
                    f"Learner {learner} reports step {one.steps} of lane {one.lane}, which stands at "
                    f"{self.at[one.lane].steps} and belongs to {self._owners.get(one.lane)}: data would be lost or "
                    "repeated."
                )
        self.at.update((one.lane, one) for one in report.lanes)

    def followed(self, learner: int, order: int) -> None:
        """A learner has let go of what it was told to let go of."""
        last, lanes = self._told[learner]
        if order == last:
            for one in self.owned(learner):
                if one.lane not in lanes:
                    self._let_go(learner, one)

    def move(self, homes: Mapping[int, int]) -> None:
        """Give lanes new homes; `orders` says who must be told.

        Raises:
            UsageError: a lane that is none of the run's.
        """
        foreign = sorted(homes.keys() - self.homes.keys())
        if foreign:
            raise UsageError(f"No such lanes: {foreign}. This run has the lanes 0 to {max(self.homes)}.")
        self.homes.update(homes)

    def orders(self, present: Collection[int]) -> list[tuple[int, Own]]:
        """What the learners that are present must be told now, so that lanes come home."""
        found: list[tuple[int, Own]] = []
        wanted: dict[int, set[int]] = {learner: set() for learner in present}
        for lane, home in self.homes.items():
            if home in wanted and (lane not in self._owners or lane in self._told[home][1]):
                wanted[home].add(lane)
        for learner in sorted(present):
            if wanted[learner] != self._told[learner][1]:
                free = sorted(wanted[learner])
                self._owners.update(dict.fromkeys(free, learner))
                self._orders += 1
                self._told[learner] = (self._orders, frozenset(free))
                found.append((learner, Own(self._orders, tuple(self.at[lane] for lane in free))))
        return found

    def _let_go(self, learner: int, lane: LaneAt) -> None:
        self._left[learner, lane.lane] = lane.steps
        del self._owners[lane.lane]
