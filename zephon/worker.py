"""Workers: the stateless, costly work on micro-batches, and the runner that has it done.

A worker reads and measures rows, and materialises plans. Its results depend on its arguments alone, so it does not
matter who works, how many do, or how the work is grouped. A runner takes work and returns handles; results are asked
for in the order in which order-dependent code needs them, so it may finish them in any order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from zephon.catalogue import Catalogue
from zephon.errors import DataError, RecipeError
from zephon.keyed import Draw, make_key
from zephon.modality import BadRowError, Modality
from zephon.transform import BAD_ROW, FILTERED, Transform, spread, transform
from zephon.types import Bad, Batch, Measured, Plan, Record, Row

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class RowReader(Protocol):
    """Random access to the rows of a source, whatever its format."""

    @property
    def row_bytes(self) -> int:
        """Bytes that are read to measure a row, on average, at least 1: an image counts by its header."""
        ...

    def read(self, rows: NDArray[np.int64]) -> list[Row | Bad]:
        """The rows with these numbers in the source, in the order asked for; what is none is `Bad` in its place.

        Raises:
            DataError: a file cannot be read, or is no longer what was opened: that is never the fault of a row.
        """
        ...

    def place(self, row: int, offset: int = 0) -> str:
        """Where a row is, or byte `offset` of it, as a person looks for it; may read much of the file."""
        ...

    def address(self, row: int, offset: int = 0) -> str:
        """The same without reading anything."""
        ...

    def close(self) -> None:
        """Release files."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """A source that is open: what is known of it, how its rows are read, and what is made of them."""

    name: str
    catalogue: Catalogue
    reader: RowReader
    modality: Modality
    transforms: tuple[Transform, ...] = ()
    seed: int = 0

    @property
    def counters(self) -> tuple[str, ...]:
        """What measuring counts."""
        return (*self.modality.counters, *((FILTERED,) if self.transforms else ()), BAD_ROW)


class Worker:
    """Does the work of one stream.

    Args:
        sources: the open sources, in recipe order.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        self.builder = _builder([source.modality for source in sources])
        """The modality that builds records: the one that can build the samples of all."""

    def measure(self, source: int, rows: NDArray[np.int64], epochs: NDArray[np.int64]) -> Measured:
        """Read rows of one source, filter and map them, and size their samples; a bad row gives an empty one.

        Args:
            source: number of the source.
            rows: int64, numbers of rows in the source.
            epochs: int64, how often the source had been drawn before, for each row; keys randomness in user functions.

        Raises:
            DataError: a file cannot be read; names the source.
        """
        one = self._sources[source]
        try:
            return self._measure(one, rows, epochs)
        except DataError as error:
            raise DataError(f"Source {one.name!r}: {error}") from error

    def _measure(self, one: Source, rows: NDArray[np.int64], epochs: NDArray[np.int64]) -> Measured:
        found = one.reader.read(rows)
        bad = {i: row for i, row in enumerate(found) if isinstance(row, Bad)} if Bad in set(map(type, found)) else {}

        def draws(i: int, name: str) -> Draw:
            return Draw(make_key("user", one.seed, one.name, name, int(epochs[i]), int(rows[i])))

        kept: list[Row] = cast(list[Row], found)
        origin: Sequence[int] = range(len(found))
        if bad or one.transforms:
            good = {i: row for i, row in enumerate(kept) if i not in bad}
            kept, origin = transform(one.transforms, good, draws, bad)
        measured = Measured([], [], [])
        while kept:
            try:
                measured = one.modality.measure(kept)
                break
            except BadRowError as error:
                at = origin[error.row]
                bad[at] = Bad(error.reason)
                kept = [row for row, i in zip(kept, origin, strict=True) if i != at]
                origin = [i for i in origin if i != at]
        for sample, reason in measured.faults.items():
            bad.setdefault(origin[measured.rows[sample]], Bad(reason))
        bad = {i: why._replace(place=one.reader.address(int(rows[i]), why.offset)) for i, why in bad.items()}
        return spread(measured, origin, len(found), bad) if bad or one.transforms else measured

    def materialise(self, plans: Sequence[Plan]) -> Batch:
        """Build one micro-batch from plans."""
        return self.builder.materialise(plans)

    def records(self, batch: Batch) -> list[Record]:
        """Split a micro-batch into the records that digests are made of."""
        return self.builder.records(batch)

    def describe(self, work: str, args: Sequence[Any]) -> str:
        """Which source and shard a call of `measure` or `materialise` works on, for a message."""
        if work != "measure":
            plans = cast(Sequence[Plan], args[0])
            names = {self._sources[one.ref.source].name for plan in plans for one in plan if one.ref.source >= 0}
            return f"Building {len(plans)} sequences from {sorted(names)}"
        source, rows = self._sources[cast(int, args[0])], cast(NDArray[np.int64], args[1])
        return f"Source {source.name!r}: measuring {len(rows)} rows, from {source.reader.address(int(rows[0]))} on"

    def close(self) -> None:
        """Release files."""
        for source in self._sources:
            source.reader.close()


def _builder(modalities: Sequence[Modality]) -> Modality:
    families = {modality.family for modality in modalities}
    for modality in modalities:
        if families <= {modality.family, *modality.builds}:
            return modality
    raise RecipeError(
        f"The sources make samples of {sorted(families)}, and no modality among theirs builds sequences that hold all "
        "of them. Use one recipe for each, or the same options for sources of one modality."
    )


class Handle(Protocol[T_co]):
    """Work that has been given away."""

    def result(self) -> T_co:
        """Wait for the result; raises what the work raised."""
        ...


class Runner(Protocol):
    """Has work done."""

    tasks: int
    """How many tasks it takes at once beyond the one that is waited for; 0 where nothing is done ahead."""

    def submit(self, work: Callable[..., T], *args: Any) -> Handle[T]:
        """Give work away; returns at once."""
        ...

    def expect(self, header: Mapping[str, Any]) -> None:
        """Told what the stream is, once it is open: processes that open it by themselves must find the same."""

    def close(self) -> None:
        """Stop; work that nobody waits for is dropped."""
        ...
