"""What feeds an island: its own lanes of a Zephon stream."""

import functools
from collections.abc import Sequence

from zephon import Loader, Stream
from zephon.digest import lane_digest
from zephon.run.skips import SkipWriter
from zephon.state import HEADER, encode_header, lane_key, tag_of
from zephon.types import Batch


@functools.lru_cache(4)
def open_stream(recipe: str) -> Stream:
    """A stream that the islands of a process share."""
    return Stream.open(recipe)


class Feed:
    """The lanes of an island: a loader that is made anew whenever they change.

    Args:
        stream: all lanes of the run.
        rank: data-parallel rank in the island.
        world: data-parallel ranks of the island.
        local_batch_size: sequences of a micro-batch; all of a step at once where left out.
    """

    def __init__(self, stream: Stream, rank: int = 0, world: int = 1, local_batch_size: int | None = None) -> None:
        self.stream, self._place = stream, (rank, world, local_batch_size)
        self.header = encode_header(stream.header(0))
        self.loader: Loader | None = None
        self._skips = SkipWriter(None)

    def first_lanes(self) -> dict[int, bytes]:
        """The state of every lane of the run before its first step."""
        start, tag = self.stream.start(), tag_of(self.header)
        return {lane: start.encode(lane_key(lane), tag) for lane in range(self.stream.recipe.lanes)}

    def own(self, lanes: dict[int, bytes]) -> None:
        """Own exactly these lanes, each from its state."""
        if self.loader:
            if {lane_key(lane): state for lane, state in lanes.items()} == self._state():
                return
            self.loader.close()
        self.loader = self.stream.loader(*self._place, wide=True, lanes=sorted(lanes)) if lanes else None
        if self.loader:
            self.loader.load_state_dict({HEADER: self.header} | {lane_key(one): lanes[one] for one in lanes})

    def lanes(self) -> dict[int, bytes]:
        """The state of every lane of this rank, after the last whole step; bad rows up to it are logged."""
        state = self._state()
        self._skips.write(self.loader.take_skipped() if self.loader else [])
        return {lane: state[lane_key(lane)] for lane in self.loader.lanes} if self.loader else {}

    def digests(self, batches: Sequence[Batch]) -> dict[int, str]:
        """SHA-256 of what every lane of this rank gave to a step, from all of its micro-batches."""
        lanes = self.loader.lanes if self.loader else []
        records = [one for batch in batches for one in self.stream.worker.records(batch)]
        share = len(records) // max(1, len(lanes))
        return {lane: lane_digest(records[i * share : (i + 1) * share]).hex() for i, lane in enumerate(lanes)}

    def _state(self) -> dict[str, bytes]:
        state = self.loader.state_dict() if self.loader else {}
        return {key: value for key, value in state.items() if key != HEADER}


class Fed:
    """What every island on a feed does with lanes."""

    feed: Feed

    @property
    def header(self) -> str:
        """What the stream says of itself, as in a checkpoint."""
        return self.feed.header.decode()

    def first_lanes(self) -> dict[int, bytes]:
        """The state of every lane of the run before its first step."""
        return self.feed.first_lanes()

    def own(self, lanes: dict[int, bytes]) -> None:
        """Own exactly these lanes, each from its state."""
        self.feed.own(lanes)

    def lanes(self) -> dict[int, bytes]:
        """The state of every lane, after the last whole step."""
        return self.feed.lanes()
