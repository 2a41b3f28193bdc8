"""The syncer as a state machine: messages in, messages out. Time comes in as microseconds with every call.

Round `t` closes when `quorum` learners have clocks of at least `t` and either every learner that is heard of has made a
step since the last round, or the grace window is over. The learners that have made one are asked for the fragments
that are due; what they hold is merged as soon as all have answered or died, or patience is over. Meanwhile the next
round is being collected. A learner's clock is Lamport's, so rounds keep the pace of the fastest learner: one a step.
"""

from collections.abc import Callable, Sequence
from typing import Any

from recipes.diloco.fragments import Plan
from recipes.diloco.lanes import Lanes
from recipes.diloco.learner import pack
from recipes.diloco.messages import (
    Bye,
    Copy,
    CopyFor,
    Expelled,
    Followed,
    Hello,
    Merged,
    Message,
    Part,
    Pull,
    Recorded,
    Report,
    Stop,
    Welcome,
)
from recipes.diloco.outer import GlobalModel
from recipes.diloco.rounds import Member, Pace, smooth
from recipes.diloco.settings import Settings
from recipes.diloco.snapshot import OF_SNAPSHOT, Cut, Snapshots
from zephon.errors import UsageError

Out = list[tuple[int, Message]]
Event = dict[str, Any]


class _Merging:
    """A fragment of a closed round, waiting for the learners that were asked."""

    def __init__(self, asked: Sequence[int], now: int, deadline: int) -> None:
        self.waiting, self.closed, self.answered, self.deadline = set(asked), now, now, deadline
        self.parts: list[Part] = []


class Syncer:
    """Owns the global model and the book of lanes; tells learners, never waits for them.

    Args:
        settings: of the run.
        model: the global model.
        lanes: the book of lanes.
        tape: takes one event after the other (`tape.py`).
        round: rounds that are closed already.
        optimizer: inner-optimizer state for the learners that start the run; none where they start afresh.
    """

    def __init__(
        self,
        settings: Settings,
        model: GlobalModel,
        lanes: Lanes,
        tape: Callable[[Event], None],
        round: int = 0,
        optimizer: bytes = b"",
    ) -> None:
        self.settings, self.model, self.lanes, self.pace = settings, model, lanes, Pace()
        self.members: dict[int, Member] = {}
        self.snapshots = Snapshots()
        self.stopped, self._stopped_at = False, 0
        self._tape, self._optimizer = tape, optimizer
        self._round = round + 1  # the one that is being collected
        self._last, self._started = round + settings.rounds, False
        self._ready_at: int | None = None
        self._quorum_at: int | None = None
        self._awaited: set[int] = set()
        self._ready: set[int] = set()
        self._merging: dict[tuple[int, int], _Merging] = {}
        self._arrived: dict[int, Hello] = {}
        self._copies: dict[int, tuple[int, int]] = {}  # who starts: who was asked for a copy, and until when
        homes = [{"lane": one.lane, "home": lanes.homes[one.lane], "steps": one.steps} for one in lanes.at.values()]
        self._tape({"event": "start", "plan": self.plan.digest, "round": round, "lanes": homes})

    @property
    def plan(self) -> Plan:
        """The fragments."""
        return self.model.plan

    @property
    def round(self) -> int:
        """Rounds that are closed."""
        return self._round - 1

    @property
    def done(self) -> bool:
        """Whether all rounds are merged and every learner that was told to stop has said so or is gone."""
        return self.stopped and not self.members and not self._merging

    @property
    def deadline(self) -> int | None:
        """When `tick` must be called next, if nothing comes before; microseconds."""
        times = [one.deadline for one in self._merging.values()] + [until for _, until in self._copies.values()]
        times += self._farewells().values()
        if self._quorum_at is not None and self._may_close():
            times.append(self._quorum_at + self.pace.grace(self.settings))
        return min(times, default=None)

    def receive(self, learner: int, message: Message, now: int) -> Out:
        """Take a message of a learner.

        Raises:
            ValueError: it breaks the protocol; the channel should be closed, and `gone` called.
        """
        if isinstance(message, Hello):
            return self._hello(learner, message, now)
        if learner not in self.members:
            return []  # sent before it was given up
        self.members[learner].heard = now
        out: Out = []
        if isinstance(message, Report):
            out = self._report(learner, message, now)
        elif isinstance(message, Part):
            out = self._part(learner, message, now)
        elif isinstance(message, Copy):
            out = self._copy(learner, message, now)
        elif isinstance(message, Followed):
            self.lanes.followed(learner, message.order)
            out = [*self.lanes.orders(self.members)]
        elif isinstance(message, Recorded):
            self.snapshots.recorded(message)
        elif isinstance(message, Bye):
            out = self._leave(learner, now, "stopped")
        return out + self._advance(now)

    def gone(self, learner: int, now: int) -> Out:
        """A learner's channel is closed: it is dead, or was given up."""
        return (self._leave(learner, now, "gone") + self._advance(now)) if self._knows(learner) else []

    def expel(self, learner: int, now: int) -> Out:
        """Give a learner up, though its channel stands: what it has not reported will not count."""
        if learner not in self.members:
            return []
        return [(learner, Expelled()), *self._leave(learner, now, "expelled"), *self._advance(now)]

    def move(self, homes: dict[int, int], now: int) -> Out:
        """Give lanes new homes, as of each lane's last reported step; a stated event on the tape.

        Raises:
            UsageError: no such lane, or fewer learners would have lanes than the quorum needs.
        """
        left = len(set((self.lanes.homes | homes).values()))
        if left < self.settings.quorum:
            raise UsageError(
                f"Only {left} learners would have lanes, but the quorum is {self.settings.quorum}: no round would ever "
                "close again. Leave lanes to more learners."
            )
        self.lanes.move(homes)
        self._tape({"event": "move", "homes": sorted(homes.items())})
        return [*self.lanes.orders(self.members), *self._advance(now)]

    def snapshot(self) -> Out:
        """Begin a consistent snapshot of the whole system; it is in `snapshots.done` once all have answered."""
        marker = self.snapshots.begin(
            Cut(self.round, self.plan, self.model.values, self.model.momentum, self.model.clocks, self.lanes.at),
            self.members,
        )
        self._tape({"event": "snapshot", "snapshot": marker.snapshot, "round": self.round})
        return [(learner, marker) for learner in sorted(self.members)]

    def tick(self, now: int) -> Out:
        """Nothing came until `deadline`."""
        out: Out = []
        for learner, (_, until) in sorted(self._copies.items()):
            if now >= until:
                out += self._welcome(learner, now, b"")  # rather without a copy than never
        for key, one in sorted(self._merging.items()):
            if now >= one.deadline:
                out += self._merge(*key, now)
        for learner, until in self._farewells().items():
            if now >= until:
                out += self.expel(learner, now)
        return out + self._advance(now)

    def _farewells(self) -> dict[int, int]:
        """Until when the learners of a run that is over may say so."""
        left = sorted(self.members.items()) if self.stopped else ()
        return {one: max(self._stopped_at, member.heard) + self.pace.farewell(self.settings) for one, member in left}

    def _knows(self, learner: int) -> bool:
        return learner in self.members or learner in self._arrived or learner in self._copies

    def _hello(self, learner: int, hello: Hello, now: int) -> Out:
        if hello.plan != self.plan.digest:
            raise ValueError(
                f"Learner {learner} cuts the model into other fragments ({hello.plan[:12]}, the syncer "
                f"{self.plan.digest[:12]}): it trains another model, or has other settings. Start it with the same."
            )
        out = self._leave(learner, now, "gone") if self._knows(learner) else []
        self._arrived[learner] = hello
        if not self._started:
            if len(self._arrived) < self.settings.learners:
                return out
            self._started = True
            for one in sorted(self._arrived):
                out += self._welcome(one, now, self._optimizer)
            return out
        peers = [peer for peer, one in sorted(self.members.items()) if one.step and not one.silent(now)]
        if not peers or self.stopped:
            return out + self._welcome(learner, now, b"")
        self._copies[learner] = (peers[0], now + self.settings.every * self.pace.step)
        return [*out, (peers[0], CopyFor(learner))]

    def _copy(self, peer: int, copy: Copy, now: int) -> Out:
        if self._copies.get(copy.learner, (None,))[0] != peer:
            return []
        self._tape({"event": "copy", "learner": peer, "to": copy.learner})
        return self._welcome(copy.learner, now, copy.body)

    def _welcome(self, learner: int, now: int, optimizer: bytes) -> Out:
        peer, _ = self._copies.pop(learner, (OF_SNAPSHOT, 0))
        hello = self._arrived.pop(learner)
        dead = self.lanes.died(learner, hello.taken)
        lanes = self.lanes.welcome(learner)
        clocks = tuple(self.model.clocks)
        self.members[learner] = Member(self.round, list(clocks), now, now)
        self._tape(
            {
                "event": "join", "learner": learner, "round": self.round, "clocks": clocks,
                "dead": sorted(dead.items()), "copy": peer if optimizer else None, "lanes": [one.lane for one in lanes],
            }
        )  # fmt: skip
        body = pack(self.model.values) + optimizer
        out: Out = [(learner, Welcome(self.round, clocks, lanes, len(optimizer), body))]
        if self.stopped:
            out.append((learner, Stop()))
        return [*out, *self.lanes.orders(self.members)]

    def _report(self, learner: int, report: Report, now: int) -> Out:
        member = self.members[learner]
        member.reported, since = now, now - member.reported
        self.lanes.report(learner, report)
        self.snapshots.report(learner, report)
        for round, fragment in report.adopted:
            member.bases[fragment] = round
        member.clock, member.fresh = report.clock, True
        member.step = smooth(member.step, since) if member.step else max(1, since)
        self.pace.step = self.pace.step or member.step
        self._awaited.discard(learner)
        if report.clock >= self._round:
            self._ready.add(learner)
        self._tape(
            {
                "event": "step", "learner": learner, "clock": report.clock, "tokens": report.tokens,
                "adopted": report.adopted, "lanes": [one.lane for one in report.lanes],
            }
        )  # fmt: skip
        return []

    def _part(self, learner: int, part: Part, now: int) -> Out:
        merging = self._merging.get((part.round, part.fragment))
        if merging is None or learner not in merging.waiting:
            return []  # came after patience was over
        self._tape(
            {
                "event": "part", "learner": learner, "round": part.round, "fragment": part.fragment,
                "base": part.base, "steps": part.steps, "tokens": part.tokens,
            }
        )  # fmt: skip
        merging.waiting.discard(learner)
        merging.parts.append(part)
        merging.answered = now
        return [] if merging.waiting else self._merge(part.round, part.fragment, now)

    def _leave(self, learner: int, now: int, why: str) -> Out:
        self._arrived.pop(learner, None)
        self._copies.pop(learner, None)
        if self.members.pop(learner, None) is None:
            return []
        self.lanes.leave(learner)
        self._awaited.discard(learner)
        self._ready.discard(learner)
        self.snapshots.gone(learner)
        self._tape({"event": why, "learner": learner, "round": self.round})
        out: Out = []
        for starter, (peer, _) in sorted(self._copies.items()):
            if peer == learner:
                out += self._hello(starter, self._arrived[starter], now)
        for key, one in sorted(self._merging.items()):
            if learner in one.waiting:
                one.waiting.discard(learner)
                out += [] if one.waiting else self._merge(*key, now)
        return [*out, *self.lanes.orders(self.members)]

    def _may_close(self) -> bool:
        """Whether the quorum is there, not too many rounds are in flight, and no fragment is in two of them."""
        flying = {round for round, _ in self._merging}
        twice = {fragment for _, fragment in self._merging} & {*self.plan.due(self._round)}
        enough = len(self._ready) >= self.settings.quorum and self._round <= self._last
        return enough and not twice and len(flying) < max(1, self.settings.overlap)

    def _advance(self, now: int) -> Out:
        """Close what can be closed."""
        out: Out = []
        while not self.stopped:
            if self._ready and self._ready_at is None:
                self._ready_at = now
            if len(self._ready) >= self.settings.quorum and self._ready_at is not None and self._quorum_at is None:
                self._quorum_at = now
                self.pace.quorum = smooth(self.pace.quorum, now - self._ready_at)
                silent = {one for one, member in self.members.items() if member.silent(now)}
                self._awaited = self.members.keys() - silent - self._with_a_step()
            if self._quorum_at is None or not self._may_close():
                break
            if self._awaited and now < self._quorum_at + self.pace.grace(self.settings):
                break
            out += self._close(now, now - self._quorum_at)
        if not self.stopped and self._round > self._last and not self._merging:
            self.stopped, self._stopped_at = True, now
            self._tape({"event": "stop", "round": self.round})
            out += [(learner, Stop()) for learner in sorted(self.members)]
        return out

    def _with_a_step(self) -> set[int]:
        """Learners that have made a step since the last round closed, or are a round ahead: it was made in grace."""
        return {learner for learner, one in self.members.items() if one.fresh or one.clock >= self._round}

    def _close(self, now: int, waited: int) -> Out:
        round, out = self._round, Out()
        self.pace.step = min(one.step for one in self.members.values() if one.step)
        asked = sorted(self._with_a_step())
        for fragment in self.plan.due(round):
            self._merging[round, fragment] = _Merging(asked, now, now + self.pace.patience(self.settings))
            out += [(learner, Pull(round, fragment)) for learner in asked]
            self._tape({"event": "close", "round": round, "fragment": fragment, "asked": asked, "waited": waited})
        for one in self.members.values():
            one.fresh = False
        if self.settings.lease:
            lease = self.settings.lease * self.pace.step
            for learner in [learner for learner, one in self.members.items() if now - one.heard > lease]:
                out += [(learner, Expelled()), *self._leave(learner, now, "expelled")]
        self._round += 1
        self._ready = {learner for learner, one in self.members.items() if one.clock >= self._round}
        self._ready_at = self._quorum_at = None
        return out

    def _merge(self, round: int, fragment: int, now: int) -> Out:
        merging = self._merging.pop((round, fragment))
        self.pace.sync = smooth(self.pace.sync, merging.answered - merging.closed)
        merge = self.model.merge(round, fragment, merging.parts)
        if merge is None:
            self._tape({"event": "empty", "round": round, "fragment": fragment})
            return []
        self.model.forget(fragment, min((one.bases[fragment] for one in self.members.values()), default=round))
        self._tape(
            {
                "event": "merge", "round": round, "fragment": fragment, "learners": merge.used,
                "refused": merge.refused, "sha256": self.model.digest(fragment),
            }
        )  # fmt: skip
        return [(learner, Merged(round, fragment, merge.body)) for learner in sorted(self.members)]
