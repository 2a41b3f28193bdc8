"""The event tape: everything that decided a run, in the order in which the syncer took it. One JSON object a line.

It is the run's one ledger. `replay` trains again from it, without any clock or network, to the same bits; `account`
adds up what every lane gave, beside the learners' own books.

    start     plan, round, lanes                       who has which lane, and where it stands
    join      learner, round, clocks, copy, lanes      a learner starts from the fragments as they are, with the
              dead                                     optimizer state of a peer (or of the snapshot, -1; or afresh,
                                                       null); and what of its lanes' steps died with it before, by its
                                                       own book
    step      learner, clock, tokens, adopted, lanes   a step that counts, and what was adopted before it
    close     round, fragment, asked, waited           a round closes, after so many microseconds of grace
    part      learner, round, fragment, base, steps,   what a learner gave
              tokens
    merge     round, fragment, learners, refused,      a new version of a fragment
              sha256
    empty     round, fragment                          nobody had anything to give
    copy      learner, to                              optimizer state for a learner that starts
    move      homes                                    lanes get other homes
    snapshot  snapshot, round
    gone, expelled, stopped   learner, round
    stop      round
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from recipes.diloco.learner import Island, Learner, pack, plan_of
from recipes.diloco.messages import LaneAt, Merged, Own, Part, Pull, Welcome
from recipes.diloco.outer import GlobalModel
from recipes.diloco.settings import Settings
from recipes.diloco.snapshot import OF_SNAPSHOT, Cut
from zephon.errors import UsageError
from zephon.run.lines import LineWriter, read_lines

Event = dict[str, Any]


class TapeError(ValueError):
    """A tape and what it should describe do not agree."""


class TapeWriter:
    """Writes the events of a new run to a file, each on disk, as far as this process goes, on return.

    Raises:
        UsageError: there is a tape already, of another run.
    """

    def __init__(self, file: Path) -> None:
        refuse_used(file.parent)
        self._lines = LineWriter(file, "tape", b'{"event": ', _parse)

    def __call__(self, event: Event) -> None:
        self._lines.write([event])

    def close(self) -> None:
        self._lines.close()


def refuse_used(folder: Path) -> None:
    """Refuse a folder that holds what a run has left.

    Raises:
        UsageError: it does.
    """
    if left := [name for name in ("tape.jsonl", "books", "snapshot.cut", "final.cut") if (folder / name).exists()]:
        raise UsageError(
            f"{folder} holds {', '.join(left)} of a run: two runs would lie there as one, and neither could be judged. "
            "Nothing was started. Name a new folder, or remove this one; to go on from its snapshot, name that in the "
            "new run's `restore`."
        )


def read_tape(file: Path) -> list[Event]:
    """The events of a file; a last line that a killed syncer left half written is left out."""
    return list(read_lines(file, _parse))


def _parse(line: bytes) -> Event:
    event = json.loads(line)
    if not isinstance(event, dict) or "event" not in event:
        raise ValueError("is no event of a tape")
    return cast(Event, event)


def replay(
    tape: Iterable[Event],
    settings: Settings,
    make_island: Callable[[int], Island],
    cut: Cut | None = None,
) -> GlobalModel:
    """Train again as a tape says.

    Args:
        tape: its events.
        settings: of the run.
        make_island: fresh islands, as the run had them.
        cut: the snapshot that the run went on from; a run that began afresh has the parameters of `make_island(0)`.

    Returns:
        The global model at the end, equal to the run's to the last bit.

    Raises:
        TapeError: something comes out otherwise than the tape says; names the first event where it does.
    """
    if cut:
        model, book, optimizer = cut.restore(settings)
        lanes = {lane: one.state for lane, one in book.at.items()}
    else:
        first, optimizer = make_island(0), b""
        plan = plan_of(first, settings)
        model, lanes = GlobalModel(settings, plan, first.read(plan)), first.first_lanes()
    player = _Player(settings, model, make_island, lanes, optimizer)
    for number, event in enumerate(tape):
        try:
            player.play(event)
        except TapeError as error:
            raise TapeError(f"Event {number} ({event['event']}, round {event.get('round')}): {error}") from None
    return model


class _Player:
    """Drives the same learners and the same merging as a run, from its tape."""

    def __init__(
        self,
        settings: Settings,
        model: GlobalModel,
        make_island: Callable[[int], Island],
        lanes: Mapping[int, bytes],
        optimizer: bytes,
    ) -> None:
        self._settings, self._model, self._make, self._first = settings, model, make_island, optimizer
        self._lanes = {lane: LaneAt(lane, 0, state) for lane, state in lanes.items()}
        self._learners: dict[int, tuple[Learner, Island]] = {}
        self._copies: dict[int, bytes] = {}
        self._parts: dict[tuple[int, int], list[Part]] = defaultdict(list)
        self._merged: dict[tuple[int, int], Merged] = {}

    def play(self, event: Event) -> None:
        kind = event["event"]
        if kind in ("gone", "expelled", "stopped"):
            self._learners.pop(event["learner"], None)
        elif play := getattr(self, f"_{kind}", None):
            play(event)

    def _start(self, event: Event) -> None:
        _same("plan", self._model.plan.digest, event["plan"])
        self._lanes = {
            one["lane"]: LaneAt(one["lane"], one["steps"], self._lanes[one["lane"]].state) for one in event["lanes"]
        }

    def _join(self, event: Event) -> None:
        learner, model = event["learner"], self._model
        _same("clocks", list(model.clocks), list(event["clocks"]))
        copy = event["copy"]
        given = b"" if copy is None else self._first if copy == OF_SNAPSHOT else self._copies.pop(learner, b"")
        lanes = tuple(self._lanes[lane] for lane in event["lanes"])
        body = pack(model.values) + given
        island = self._make(learner)
        welcome = Welcome(event["round"], tuple(model.clocks), lanes, len(given), body)
        self._learners[learner] = Learner(learner, self._settings, model.plan, welcome, island), island

    def _step(self, event: Event) -> None:
        learner, island = self._learners[event["learner"]]
        for round, fragment in event["adopted"]:
            learner.receive(self._merged[round, fragment])
        if set(event["lanes"]) != set(learner.lanes):
            learner.receive(Own(0, tuple(self._lanes[lane] for lane in event["lanes"])))
        learner.at_boundary(island)
        tokens = island.step(learner.clock)
        report = learner.stepped(island.read(self._model.plan), tokens, island.lanes())
        _same("clock and tokens", (report.clock, report.tokens), (event["clock"], event["tokens"]))
        self._lanes.update((one.lane, one) for one in report.lanes)

    def _copy(self, event: Event) -> None:
        self._copies[event["to"]] = self._learners[event["learner"]][1].optimizer()

    def _part(self, event: Event) -> None:
        if not event["steps"]:
            return  # it had just adopted the fragment
        (part,) = self._learners[event["learner"]][0].receive(Pull(event["round"], event["fragment"]))
        assert isinstance(part, Part)
        _same("part", [part.base, part.steps, part.tokens], [event["base"], event["steps"], event["tokens"]])
        self._parts[event["round"], event["fragment"]].append(part)

    def _merge(self, event: Event) -> None:
        key = event["round"], event["fragment"]
        merge = self._model.merge(*key, self._parts.pop(key, []))
        if merge is None:
            raise TapeError("nobody gave anything, but the tape has a merge")
        _same("learners", [*merge.used, -1, *merge.refused], [*event["learners"], -1, *event["refused"]])
        _same("sha256", self._model.digest(key[1]), event["sha256"])
        self._merged[key] = Merged(*key, merge.body)


def _same(what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise TapeError(f"{what} is {ours} here, {theirs} on the tape")


class Take(NamedTuple):
    """A lane step that a learner began, from its own book.

    Attributes:
        learner: who.
        lane: of which lane.
        step: which step of the lane, from 1.
        digest: SHA-256 of its records, where the book has it.
    """

    learner: int
    lane: int
    step: int
    digest: str = ""


class Account(NamedTuple):
    """What a run did with its data.

    Attributes:
        steps: lane steps that count, each once.
        tokens: in them.
        dead: lane steps that were begun by a learner which then died; each was given again, or is the next of its lane.
        named: of those, what learners have told of when they came back.
        ends: where every lane stands.
    """

    steps: int
    tokens: int
    dead: int
    named: int
    ends: dict[int, int]


def account(tape: Iterable[Event], takes: Iterable[Take]) -> Account:
    """Add up what every lane gave, from the tape and the learners' books.

    Raises:
        TapeError: a step counts that its learner never began, or the same step of a lane was not the same data.
    """
    ends: dict[int, int] = {}
    counted: dict[tuple[int, int], int] = {}
    tokens = named = 0
    for event in tape:
        if event["event"] == "start":
            ends = {one["lane"]: one["steps"] for one in event["lanes"]}
        elif event["event"] == "join":
            named += sum(count for _, count in event["dead"])
        elif event["event"] == "step":
            tokens += event["tokens"]
            for lane in event["lanes"]:
                ends[lane] += 1
                counted[lane, ends[lane]] = event["learner"]
    begun, digests = Counter[tuple[int, int, int]](), dict[tuple[int, int], str]()
    for learner, lane, step, digest in takes:
        begun[learner, lane, step] += 1
        if digests.setdefault((lane, step), digest) != digest:
            raise TapeError(f"Step {step} of lane {lane} was two things: {digests[lane, step]} and {digest}.")
    for (lane, step), learner in counted.items():
        if not begun[learner, lane, step]:
            raise TapeError(f"Step {step} of lane {lane} counts, but learner {learner} never began it.")
    return Account(len(counted), tokens, begun.total() - len(counted), named, ends)
