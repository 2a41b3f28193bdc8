"""Packing (an accumulator): which segments share a sequence.

A packer sees refs and lengths only. `offer` takes as much of a piece as it wants, says how far it came, and hands out a
plan when a sequence is complete. What it still holds open is a list of segments, which is all its state.
"""

from typing import Protocol

from zephon.types import Plan, Sample, Segment


class Packer(Protocol):
    """What every packing algorithm offers."""

    open: list[Segment]
    """Segments that are placed but not yet delivered, in the order in which `restore` wants them."""

    def offer(self, sample: Sample, start: int, end: int) -> tuple[int, Plan | None]:
        """Place positions `[start, end)` of a sample, or the first part of them.

        Returns:
            Where the part that was taken ends, and a completed plan if there is one.
        """
        ...

    def restore(self, segments: list[Segment]) -> None:
        """Take up the open segments of a checkpoint."""
        ...


class Concat:
    """Concatenate, then split: every sequence is full, every position is delivered, in order.

    After a plan leaves, nothing is open: the rest of the piece has not been taken yet.
    """

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len
        self._room = seq_len
        self.open: list[Segment] = []

    def offer(self, sample: Sample, start: int, end: int) -> tuple[int, Plan | None]:
        taken = min(end, start + self._room)
        last = self.open[-1] if self.open else None
        if last and last.sample.ref == sample.ref and last.end == start:
            self.open[-1] = Segment(sample, last.start, taken)  # touching runs of one sample are one segment
        else:
            self.open.append(Segment(sample, start, taken))
        self._room -= taken - start
        if self._room:
            return taken, None
        plan, self.open, self._room = self.open, [], self._seq_len
        return taken, plan

    def restore(self, segments: list[Segment]) -> None:
        self.open = list(segments)
        self._room = self._seq_len - sum(segment.end - segment.start for segment in segments)


PACKERS: dict[str, type[Concat]] = {"concat": Concat}
"""By the name that a recipe gives."""
