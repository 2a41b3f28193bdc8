"""The loader: one data-parallel rank's share of every global batch.

Rank `r` of `G` owns the lanes `l` with `l * G // L == r`. Global batch `t = 1, 2, ...` is the records
`[(t - 1) * B / L, t * B / L)` of every lane; a rank's share of it is lane-major, cut into micro-batches.
"""

import contextlib
import functools
import itertools
import logging
from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zephon.errors import DataError, RestoreError, TopologyError, UsageError
from zephon.feed import Feeder
from zephon.lane import Lane, Mark
from zephon.modality import LATE
from zephon.restore import batch_sizes, compare_headers
from zephon.state import HEADER, LaneState, encode_header, lane_key, tag_of
from zephon.topology import check_topology, owned_lanes
from zephon.types import Batch, Plan, Record, Skip
from zephon.worker import Handle

if TYPE_CHECKING:
    from zephon.stream import Stream

logger = logging.getLogger(__name__)

UNTAKEN = 1000
"""Bad rows that a loader keeps for who takes them, and what one step adds: a run of weeks must not fill the memory."""

RESTORE_TASKS = 8
"""Tasks for each source that measure again what a state names as open, one for so many lanes when the first of them
goes on: the first batch after a restore waits for one task, not for all."""


class Stats(NamedTuple):
    """What a rank's lanes have delivered since the beginning of the run.

    Attributes:
        records: records delivered; of all ranks together for a finite stream, which every rank decides whole.
        positions: positions delivered; the rest of the records is padding.
        padding: positions that hold no sample.
        mixed: positions that each source gave, those not yet delivered included.
        dropped: counters of each source: what was left out or changed, and why. What is found only when a record is
            built is, for a finite stream, counted from the last start of this rank on.
    """

    records: int
    positions: int
    padding: int
    mixed: dict[str, int]
    dropped: dict[str, dict[str, int]]


class Loader:
    """An iterator over the micro-batches of one rank; endless where sources repeat.

    Args:
        stream: the stream, which loaders may share.
        rank: data-parallel rank; tensor-, context- and pipeline-parallel peers have the same one.
        world: number of data-parallel ranks.
        local_batch_size: sequences of a micro-batch; all of a rank's share at once where left out.
        pad_last: at the end of a finite stream, fill the last global batch with masked records (validation), instead of
            dropping it (training).
        wide: deliver what is int32 as int64, which embeddings and losses want; made where the batch is made, so that a
            trainer beside an isolated loader takes it as it is. Digests and states do not change.
        lanes: the lanes of this loader's island, which its ranks share; all where left out. A step of an island is
            `B / L` records of each of its lanes. Lanes move between islands that stand elsewhere: states say step 0
            and may be joined; `step`, and records and positions of `stats`, count from where lanes were loaded.

    Raises:
        TopologyError: ranks, lanes and batches do not fit.
    """

    def __init__(
        self,
        stream: "Stream",
        rank: int = 0,
        world: int = 1,
        local_batch_size: int | None = None,
        pad_last: bool = False,
        wide: bool = False,
        lanes: Sequence[int] | None = None,
    ) -> None:
        self._finite, self._share = stream.recipe.finite, stream.batch.global_batch_size // stream.parts
        island = list(range(stream.parts)) if lanes is None else sorted(set(lanes))
        if lanes is not None and (self._finite or not island or not 0 <= island[0] <= island[-1] < stream.parts):
            raise TopologyError(
                f"An island cannot have the lanes {list(lanes)}: it needs at least one of 0 to {stream.parts - 1}, of "
                "a stream that repeats its sources."
            )
        parts, size, shared = len(island), len(island) * self._share, None if self._finite else len(island)
        self._local = check_topology(lanes=shared, global_batch=size, world=world, local_batch=local_batch_size)
        if not 0 <= rank < world:
            raise TopologyError(f"rank must be from 0 to {world - 1}, it is {rank}.")
        self._stream, self._pad_last, self._wide = stream, pad_last, wide
        self._island = lanes is not None
        self.lanes = [island[place] for place in owned_lanes(rank, world, parts)]
        """The lanes of this rank, ascending; for a finite stream, its records of a global batch."""
        self._hosted = [0] if self._finite else self.lanes
        self._per_step = len(self.lanes) * self._share // self._local
        self._history: list[dict[str, Any]] = []
        self._begin(0, {lane: stream.start() for lane in self._hosted})

    @property
    def step(self) -> int:
        """The last global step that has been handed over whole."""
        return self._step

    @property
    def between_steps(self) -> bool:
        """Whether no micro-batch of an unfinished step has been handed over."""
        return not self._handed

    @property
    def rows_ahead(self) -> int:
        """Rows that have been measured, or asked for, and not mixed yet."""
        return sum(feed.ahead for lane in self._lanes for feed in lane.feeds)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        """The next micro-batch: named arrays, `[local_batch_size, seq_len]` int32 for text.

        Raises:
            DataError: something cannot be delivered. After any error only a new loader goes on, from the last state.
            UsageError: the stream is closed.
        """
        self._stream.watch.check_open()
        if self._failed:
            raise self._unusable() from self._failed
        try:
            batch = self._next_handle().result()
            self._feeder.top_up()
        except StopIteration:
            self._skipped, self._behind = self._skipped + self._behind, []
            raise
        except BaseException as error:
            self._failed = error
            passed = [one for _, skipped in self._sealed for one in skipped]
            self._skipped += passed + self._passed(self._lanes)  # what is wrong may be that there are too many
            raise
        late: list[list[int]] = batch.pop(LATE).tolist() if LATE in batch else []
        for sequence, source, counter in late:
            lane = 0 if self._finite else self.lanes[(self._handed * self._local + sequence) // self._share]
            self._late[lane][source, counter] += 1
        if self._wide:
            batch = {name: one.astype(np.int64) if one.dtype == np.int32 else one for name, one in batch.items()}
        self._batch_bytes = sum(array.nbytes for array in batch.values())
        self._handed += 1
        if self._handed == self._per_step:
            self._handed, self._step = 0, self._step + 1
            self._marks, skipped = self._sealed.popleft()
            self._note(skipped)
            self._late_states = {lane: Counter(late) for lane, late in self._late.items() if late}
        return batch

    def take_skipped(self) -> list[Skip]:
        """The bad rows left out in steps handed over since this was last called, in order; after an error, all others
        too that lanes have come to. To be called now and then: of `UNTAKEN` ones only the last is told."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def _note(self, skipped: list[Skip]) -> None:
        """Keep the bad rows of a step for who takes them; where nobody does, they are told and forgotten."""
        if len(self._skipped) >= UNTAKEN:
            last = self._skipped[-1]
            logger.warning(
                "%d bad rows were left out that nobody took (take_skipped), the last in step %d: %s: %s They are "
                "counted in the state, but listed nowhere.", len(self._skipped), last.step, last.place, last.reason,
            )  # fmt: skip
            self._skipped = []
        self._skipped += skipped

    def _unusable(self) -> DataError:
        return DataError(
            f"This loader failed before ({self._failed!r}) and may have lost its place. Make a new one and load "
            "the last state."
        )

    def step_records(self) -> dict[int, list[Record]]:
        """One whole global step: the records of each lane of this rank.

        Raises:
            RestoreError: some micro-batches of the step have been handed over already.
        """
        self._check_between_steps()
        records = [one for _ in range(self._per_step) for one in self._stream.worker.records(next(self))]
        return {lane: records[i * self._share : (i + 1) * self._share] for i, lane in enumerate(self.lanes)}

    def state_dict(self) -> dict[str, bytes]:
        """The state after the last global step that was handed over: `header`, and `lane_NNNNN` for each lane.

        Raises:
            RestoreError: some micro-batches of a step have been handed over, but not all.
        """
        self._check_between_steps()
        header = encode_header(self._stream.header(0 if self._island else self._step, self._history))
        tag = tag_of(header)
        # Ranks of a finite stream write the same bytes, while each builds, and so counts, only its own records.
        states = self._states(counted=not self._finite).items()
        return {HEADER: header, **{(key := lane_key(lane)): state.encode(key, tag) for lane, state in states}}

    def _states(self, counted: bool = True) -> dict[int, LaneState]:
        """States after the last step that was handed over, with what was `counted` when their records were built."""
        late = self._late_states if counted else {}
        return {
            lane.number: lane.state(self._marks[lane.number]).with_late(late.get(lane.number, {}))
            for lane in self._lanes
        }

    def _check_between_steps(self) -> None:
        if self._handed:
            raise RestoreError(
                f"{self._handed} of the {self._per_step} micro-batches of step {self._step + 1} have been handed over. "
                "States and whole steps exist between global steps only; take the rest of the step first."
            )

    def load_state_dict(self, state: Mapping[str, bytes], allow: Iterable[str] = ()) -> None:
        """Go on from a state; more lanes than this rank owns may be in it.

        Args:
            state: what `state_dict` gave, of this rank or of all.
            allow: differences that the run may go on with, by name (`zephon.restore.PERMISSIONS`).

        Raises:
            RestoreError: it belongs to another stream, or lacks a lane.
        """
        if HEADER not in state:
            raise RestoreError(f"The state lacks {HEADER!r}; it holds {sorted(state)}.")
        restored = compare_headers(state[HEADER], self._stream.header(0), allow)
        keys = {lane: lane_key(lane) for lane in self._hosted}
        if missing := [key for key in keys.values() if key not in state]:
            raise RestoreError(
                f"The state lacks {missing}; it holds {sorted(state)}. A rank saves its own lanes: merge the states of "
                "all ranks of the run that saved."
            )
        states = {lane: LaneState.decode(key, state[key], state[HEADER]) for lane, key in keys.items()}
        if "weights" in restored.allowed:
            states = {lane: one.without_deficits() for lane, one in states.items()}
        self._history = [{**one, "step": 0} for one in restored.history] if self._island else restored.history
        self._begin(0 if self._island else restored.step, states)

    def stats(self) -> Stats:
        """What has been delivered, from the states: exact, and the same however far workers are ahead."""
        names = [source.name for source in self._stream.sources]
        mixed, dropped = dict.fromkeys(names, 0), {name: dict[str, int]() for name in names}
        waiting = 0
        for state in self._states().values():
            waiting += sum(one.end - one.start for one in state.waiting)
            for source, known in zip(state.sources, self._stream.lane_sources, strict=True):
                mixed[known.name] += source.mixed
                for counter, number in zip(known.counters, source.counters, strict=True):
                    dropped[known.name][counter] = dropped[known.name].get(counter, 0) + number
        # A finite stream is decided whole on every rank, so its figures are those of all ranks together.
        records = batch_sizes(self._history, self._stream.batch.global_batch_size, self._step)
        if not self._finite:
            records = records // self._stream.parts * len(self.lanes)
        positions = sum(mixed.values()) - waiting - self._loaded
        return Stats(records, positions, records * self._stream.batch.seq_len - positions, mixed, dropped)

    def close(self) -> None:
        """Release what this loader alone holds; it gives no more batches."""
        self._failed = self._failed or UsageError("it was closed")
        self._ahead.clear()
        with contextlib.suppress(ValueError):  # another thread is deciding: that ends by itself
            self._plans.close()

    def _begin(self, step: int, states: dict[int, LaneState]) -> None:
        stream = self._stream
        stream.watch.check_open()
        self._step, self._handed, self._loaded = step, 0, 0
        self._failed: BaseException | None = None
        self._sealed: deque[tuple[dict[int, Mark], list[Skip]]] = deque()
        self._skipped: list[Skip] = []
        self._behind: list[Skip] = []  # what a finite stream passes after its last step
        self._decided = step
        self._late = {lane: Counter[tuple[int, int]]() for lane in states}
        self._late_states: dict[int, Counter[tuple[int, int]]] = {}
        self._feeder = Feeder(stream.sources, stream.worker, stream.runner, stream.ahead_bytes)
        self._lanes = lanes = list[Lane]()
        some = -(-len(states) // RESTORE_TASKS)
        for first in range(0, len(states), some):
            mine = dict(itertools.islice(states.items(), first, first + some))
            refs = [one.ref for state in mine.values() for one in state.waiting]
            samples = functools.cache(functools.partial(self._feeder.fetch, refs))  # not before a lane goes on
            for number, state in mine.items():
                lane = Lane(number, stream.lane_sources, stream.mix, stream.packer(), state, samples, self._feeder.fill)
                lanes.append(lane)
                for feed in lane.feeds:
                    self._feeder.feeds[feed.source].append(feed)
        self._marks = {lane.number: lane.mark() for lane in lanes}
        self._plans = self._decide_finite(lanes[0]) if self._finite else self._decide(lanes)
        self._ahead: deque[Handle[Batch]] = deque()
        self._batch_bytes = 0
        if self._island:
            self._loaded = Loader.stats(self).positions

    def _next_handle(self) -> Handle[Batch]:
        """The oldest micro-batch in the making; as many more are set to work as the builder takes at once."""
        builder = self._stream.builder
        room = self._stream.making_bytes()
        while len(self._ahead) <= builder.tasks:
            if self._ahead and (len(self._ahead) + 1) * self._batch_bytes > room:
                break
            try:
                plans = list(itertools.islice(self._plans, self._local))
            except Exception as error:
                failed = Future[Batch]()
                failed.set_exception(error)
                self._ahead.append(failed)  # in its turn: what was decided before is delivered before
                break
            if not plans:
                break
            self._ahead.append(builder.submit(self._stream.worker.materialise, plans))
            if len(self._ahead) == 1 and not self._step and not self._handed:
                break  # the first batch does not wait for the decisions of others
        if not self._ahead:
            raise StopIteration
        return self._ahead.popleft()

    def _decide(self, lanes: list[Lane]) -> Generator[Plan]:
        """Plans of all steps to come, lane-major within a step; marks are set aside as each lane ends its share."""
        while True:
            marks: dict[int, Mark] = {}
            for lane in lanes:
                for left in reversed(range(self._share)):
                    plan = lane.next_plan()
                    assert plan is not None, "lanes repeat their sources"
                    if not left:
                        marks[lane.number] = lane.mark()
                        if len(marks) == len(lanes):
                            self._seal(marks, lanes)
                    yield plan

    def _seal(self, marks: dict[int, Mark], lanes: list[Lane]) -> None:
        """Set aside the marks after a step that is decided, and the bad rows that its lanes came to."""
        self._decided += 1
        self._sealed.append((marks, self._passed(lanes)))

    def _passed(self, lanes: list[Lane]) -> list[Skip]:
        """The bad rows that lanes came to since this was last asked."""
        names = [source.name for source in self._stream.sources]
        found = [
            Skip(names[source], why.place, why.reason, self._decided, lane.number)
            for lane in lanes for source, why in lane.skipped
        ]  # fmt: skip
        for lane in lanes:
            lane.skipped.clear()
        return found

    def _decide_finite(self, lane: Lane) -> Generator[Plan]:
        """This rank's plans of one decision stream, which every rank decides whole: all end at the same step."""
        size = self._stream.batch.global_batch_size
        mine = slice(self.lanes[0], self.lanes[-1] + 1)
        while True:
            plans: list[Plan] = []
            while len(plans) < size and (plan := lane.next_plan()) is not None:
                plans.append(plan)
            if len(plans) < size and not (plans and self._pad_last):
                self._stream.tell_end(plans, lane.state(lane.mark()), self._decided)
                self._decided += 1
                self._behind = self._passed([lane])
                return
            self._seal({0: lane.mark()}, [lane])
            yield from (plans + [self._stream.room.empty()] * (size - len(plans)))[mine]
