"""Consistent snapshots of the whole system, with markers (Chandy and Lamport, 1985), and how a run goes on from one.

The syncer records itself and sends a marker down every channel; a learner records itself when the marker comes. What
was on its way to a learner has then been adopted, since channels keep their order. What was on its way to the syncer
needs no storing: parts are read again from what the learner recorded, and the lanes of late reports are taken into the
cut.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipes.diloco.fragments import Plan, Vector
from recipes.diloco.lanes import Lanes, divide
from recipes.diloco.learner import pack, unpack
from recipes.diloco.messages import LaneAt, Marker, Part, Reader, Recorded, Report, write
from recipes.diloco.outer import GlobalModel
from recipes.diloco.settings import Settings
from zephon.errors import RestoreError
from zephon.restore import compare_headers

OF_SNAPSHOT = -1
"""Stands for the snapshot that a run went on from, where a learner is named whose optimizer state was copied."""


@dataclass
class Cut:
    """The state of a whole run.

    Attributes:
        round: rounds that were closed.
        plan: the fragments.
        values: of the global model.
        momentum: of the outer optimizer.
        clocks: the round that each fragment was last merged in.
        lanes: where every lane stands.
        learners: what the learners recorded.
    """

    round: int
    plan: Plan
    values: Sequence[Vector]
    momentum: Sequence[Vector]
    clocks: Sequence[int]
    lanes: Mapping[int, LaneAt]
    learners: dict[int, Recorded] = field(default_factory=dict[int, Recorded])

    def __post_init__(self) -> None:
        self.momentum, self.clocks, self.lanes = list(self.momentum), list(self.clocks), dict(self.lanes)

    def advance(self, lanes: Collection[LaneAt]) -> None:
        """Take in lanes that stood further than the syncer knew when it recorded itself."""
        known = dict(self.lanes)
        self.lanes = known | {one.lane: one for one in lanes if one.steps > known[one.lane].steps}

    def save(self, file: Path, header: str) -> None:
        """Write the cut, of a run on the stream that has this header; whole or not at all."""
        body = pack(self.values) + pack(self.momentum)
        whole = Recorded(0, -1, (), (), tuple(self.lanes[lane] for lane in sorted(self.lanes)), body)
        parts = [whole, *(self.learners[learner] for learner in sorted(self.learners))]
        said = b"".join(map(write, parts))
        head = {"round": self.round, "plan": self.plan.digest, "clocks": list(self.clocks), "header": header}
        head["sha256"] = _sha256(said)
        new = file.with_suffix(".new")
        new.write_bytes(json.dumps(head).encode() + b"\n" + said)
        new.replace(file)

    @staticmethod
    def load(file: Path, plan: Plan, header: str) -> "Cut":
        """Read a cut, to go on from it with such fragments and on the stream that has this header.

        Raises:
            RestoreError: there is none, or it is damaged; or of another model, other settings, or another stream, of
                which every field that differs is named.
        """
        try:
            said, _, rest = file.read_bytes().partition(b"\n")
        except OSError as error:
            raise RestoreError(f"{file} cannot be read ({error.strerror}). Name the snapshot of a run.") from error
        try:
            head: dict[str, Any] = json.loads(said)
            sound, known, stream = head["sha256"] == _sha256(rest), head["plan"] == plan.digest, str(head["header"])
        except (KeyError, TypeError, ValueError):
            head, sound, known, stream = {}, False, False, ""
        if not sound:
            raise RestoreError(f"{file} is no snapshot of a run, or is damaged. Restore from another.")
        if not known:
            raise RestoreError(
                f"{file} was written with other fragments: another model, or another number of fragments or of rounds "
                "between merges. Restore with those of the snapshot."
            )
        if stream != header:
            compare_headers(stream.encode(), json.loads(header or "{}"))
        whole, *learners = [one for one, _ in Reader().feed(rest) if isinstance(one, Recorded)]
        size = 4 * plan.total
        values, momentum = unpack(plan, whole.body[:size]), unpack(plan, whole.body[size:])
        lanes = {one.lane: one for one in whole.lanes}
        known = {one.learner: one for one in learners}
        return Cut(head["round"], plan, values, momentum, head["clocks"], lanes, known)

    def restore(self, settings: Settings) -> tuple[GlobalModel, Lanes, bytes]:
        """What a syncer goes on from, with any number of learners: model, lanes, and an inner-optimizer state.

        Work that no merge has taken yet is merged first, once for every fragment, so that none is lost; lanes are
        divided anew; every learner starts with the optimizer state of the first that recorded one.
        """
        exact = GlobalModel(_exactly(settings), self.plan, self.values, self.momentum, self.clocks)
        for fragment in range(len(self.plan.fragments)):
            parts = [self._part(one, fragment) for one in self.learners.values()]
            exact.merge(self.round, fragment, parts)
        model = GlobalModel(settings, self.plan, exact.values, exact.momentum, exact.clocks)
        homes = divide(sorted(self.lanes), range(settings.learners))
        optimizers = [one.body[4 * self.plan.total :] for _, one in sorted(self.learners.items())]
        return model, Lanes(self.lanes.values(), homes), next(filter(None, optimizers), b"")

    def _part(self, one: Recorded, fragment: int) -> Part:
        value = unpack(self.plan, one.body)[fragment]
        base = self.clocks[fragment]
        steps, tokens = one.steps[fragment], one.tokens[fragment]
        return Part(one.learner, self.round, fragment, base, steps, tokens, value.astype("<f4").tobytes())


class Snapshots:
    """The snapshots of a run: those on their way, and the last that is whole."""

    def __init__(self) -> None:
        self.done: Cut | None = None
        self._number = 0
        self._open: dict[int, tuple[Cut, set[int]]] = {}

    def begin(self, cut: Cut, learners: Collection[int]) -> Marker:
        """Record the syncer; the learners must be sent the marker now."""
        self._number += 1
        self._open[self._number] = (cut, set(learners))
        self._finish()
        return Marker(self._number)

    def report(self, learner: int, report: Report) -> None:
        """A report that was on its way when the syncer recorded itself."""
        for cut, waiting in self._open.values():
            if learner in waiting:
                cut.advance(report.lanes)

    def recorded(self, recorded: Recorded) -> None:
        """A learner has recorded itself."""
        if recorded.snapshot in self._open:
            cut, waiting = self._open[recorded.snapshot]
            cut.learners[recorded.learner] = recorded
            cut.advance(recorded.lanes)
            waiting.discard(recorded.learner)
            self._finish()

    def gone(self, learner: int) -> None:
        """A learner is gone; open snapshots do without it: its lanes stand where it last reported them."""
        for _, waiting in self._open.values():
            waiting.discard(learner)
        self._finish()

    def _finish(self) -> None:
        for number in sorted(self._open):
            cut, waiting = self._open[number]
            if not waiting:
                self.done = cut
                del self._open[number]


def elements(file: Path) -> int:
    """Elements of the model in a snapshot."""
    (whole, _), *_ = Reader().feed(file.read_bytes().partition(b"\n")[2])
    assert isinstance(whole, Recorded)
    return len(whole.body) // 8  # values and momentum


def _exactly(settings: Settings) -> Settings:
    return replace(settings, up="float32", down="float32")


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
