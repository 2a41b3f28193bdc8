"""What learners and the syncer say to each other. Every channel keeps the order in which messages were sent.

learner ─▶ syncer     Hello, Report, Part, Copy, Followed, Recorded, Bye
syncer ─▶ learner     Welcome, Pull, Merged, CopyFor, Own, Marker, Stop, Expelled
driver ◀▶ driver      Describe, Description: before there is a syncer, which knows neither model nor lanes
operator ─▶ driver    Move, Expel
"""

import base64
from dataclasses import dataclass, fields
from typing import Any, get_args

from recipes.diloco.wire import Frames, frame


@dataclass(frozen=True, slots=True)
class LaneAt:
    """Where a lane stands: steps of it that have been trained on and reported, and the loader's state after them."""

    lane: int
    steps: int
    state: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """A learner is there and has nothing yet. `taken` is its own book of lanes: steps that it has begun, by lane."""

    learner: int
    plan: str
    taken: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Welcome:
    """All that a learner starts from: rounds, lanes, and in `body` the fragments and a peer's optimizer state.

    Attributes:
        round: rounds that are closed.
        clocks: the version of each fragment.
        lanes: the lanes that it owns.
        optimizer: bytes of optimizer state at the end of `body`; none where no peer could give it.
    """

    round: int
    clocks: tuple[int, ...]
    lanes: tuple[LaneAt, ...]
    optimizer: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Report:
    """A learner has made a step: sent after every one.

    Attributes:
        clock: its clock (Lamport's): one more a step, never behind a round that it has adopted.
        tokens: that this step has trained on.
        adopted: rounds and fragments that it adopted before this step, since its last report.
        lanes: the lanes that it owns, after this step.
    """

    clock: int
    tokens: int
    adopted: tuple[tuple[int, int], ...]
    lanes: tuple[LaneAt, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """The syncer asks for a fragment, for a round."""

    round: int
    fragment: int


@dataclass(frozen=True, slots=True)
class Part:
    """What a learner holds of a fragment, as it was after its last step; empty when it has just adopted it.

    Attributes:
        learner: who.
        round: for which round.
        fragment: which fragment.
        base: the version that `body` is relative to.
        steps: inner steps since that version was adopted.
        tokens: trained on in these steps.
        body: the fragment, encoded.
    """

    learner: int
    round: int
    fragment: int
    base: int
    steps: int
    tokens: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Merged:
    """A new version of a fragment, relative to the one before; sent to every learner, whether it took part or not."""

    round: int
    fragment: int
    body: bytes


@dataclass(frozen=True, slots=True)
class CopyFor:
    """A learner is asked for its optimizer state, for one that starts."""

    learner: int


@dataclass(frozen=True, slots=True)
class Copy:
    """The optimizer state that was asked for."""

    learner: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Own:
    """The lanes that a learner owns from its next step on."""

    order: int
    lanes: tuple[LaneAt, ...]


@dataclass(frozen=True, slots=True)
class Followed:
    """A learner owns what `order` says, and has let go of everything else."""

    order: int


@dataclass(frozen=True, slots=True)
class Marker:
    """Record yourself for a snapshot (Chandy and Lamport, 1985)."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """A learner as it was when the marker came: in `body` its fragments (float32), then its optimizer state.

    Attributes:
        snapshot: which one.
        learner: who.
        steps: inner steps of each fragment that no merge has taken yet.
        tokens: the same in tokens.
        lanes: where its lanes stand.
        body: fragments and optimizer state.
    """

    snapshot: int
    learner: int
    steps: tuple[int, ...]
    tokens: tuple[int, ...]
    lanes: tuple[LaneAt, ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class Stop:
    """The run has ended: stop after the step in hand."""


@dataclass(frozen=True, slots=True)
class Bye:
    """A learner has stopped because it was told to."""


@dataclass(frozen=True, slots=True)
class Expelled:
    """The syncer has given this learner up: what it has not reported does not count. It may say Hello again."""


@dataclass(frozen=True, slots=True)
class Describe:
    """A learner is asked what it trains."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a learner trains: names and shapes of its parameters, their values, all lanes before their first step.

    `header` is what the stream of these lanes says of itself.
    """

    header: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    lanes: tuple[LaneAt, ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class Move:
    """Give lanes new homes: pairs of lane and learner."""

    homes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Expel:
    """Give a learner up."""

    learner: int


Message = (
    Hello | Welcome | Report | Pull | Part | Merged | CopyFor | Copy | Own | Followed | Marker | Recorded | Stop | Bye
    | Expelled | Describe | Description | Move | Expel
)  # fmt: skip
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def write(message: Message) -> bytes:
    """A message as a frame: its numbers as JSON, its `body` as it is."""
    values: dict[str, Any] = {one.name: getattr(message, one.name) for one in fields(message)}
    body: bytes = values.pop("body", b"")
    if lanes := values.get("lanes"):
        values["lanes"] = [[one.lane, one.steps, base64.b64encode(one.state).decode()] for one in lanes]
    return frame({"kind": type(message).__name__, **values}, body)


class Reader:
    """Messages from a byte stream."""

    def __init__(self) -> None:
        self._frames = Frames()

    def feed(self, raw: bytes) -> list[tuple[Message, int]]:
        """Take more bytes; give the messages that are whole now, each with its size in bytes.

        Raises:
            ValueError: what came is no message of ours.
        """
        return [(_read(head, body), size) for head, body, size in self._frames.feed(raw)]


def _read(head: dict[str, Any], body: bytes) -> Message:
    try:
        kind = _KINDS[head.pop("kind")]
        if "lanes" in head:
            head["lanes"] = [LaneAt(lane, steps, base64.b64decode(state)) for lane, steps, state in head["lanes"]]
        values: dict[str, Any] = {name: _tuples(value) for name, value in head.items()}
        if any(one.name == "body" for one in fields(kind)):
            values["body"] = body
        return kind(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"Not a message of this protocol: {str(head)[:200]}") from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
