"""Workers: the stateless, costly work on micro-batches, and the runner that has it done.

A worker reads and measures rows, and materialises plans. Its results depend on its arguments alone, so it does not
matter who works, how many do, or how the work is grouped. A runner takes work and returns handles; results are asked
for in the order in which order-dependent code needs them, so it may finish them in any order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from zephon.catalogue import Catalogue
from zephon.errors import DataError
from zephon.modality import BadRowError, Modality
from zephon.types import Batch, Measured, Plan, Record, Row

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class RowReader(Protocol):
    """Random access to the rows of a source, whatever its format."""

    def read(self, rows: NDArray[np.int64]) -> list[Row]:
        """The rows with these numbers in the source, in the order asked for."""
        ...

    def place(self, row: int) -> str:
        """Where a row is, for a message."""
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


class Worker:
    """Does the work of one stream.

    Args:
        sources: the open sources, in recipe order.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)

    def measure(self, source: int, rows: NDArray[np.int64]) -> Measured:
        """Read rows of one source and size their samples.

        Raises:
            DataError: a row cannot be used; names the source and the place.
        """
        one = self._sources[source]
        try:
            return one.modality.measure(one.reader.read(rows))
        except BadRowError as error:
            place = one.reader.place(int(rows[error.row]))
            raise DataError(f"Source {one.name!r}: {place}: {error.reason}") from error

    def materialise(self, plans: Sequence[Plan]) -> Batch:
        """Build one micro-batch from plans."""
        return self._sources[0].modality.materialise(plans)

    def records(self, batch: Batch) -> list[Record]:
        """Split a micro-batch into the records that digests are made of."""
        return self._sources[0].modality.records(batch)

    def close(self) -> None:
        """Release files."""
        for source in self._sources:
            source.reader.close()


class Handle(Protocol[T_co]):
    """Work that has been given away."""

    def result(self) -> T_co:
        """Wait for the result; raises what the work raised."""
        ...


class Runner(Protocol):
    """Has work done."""

    def submit(self, work: Callable[..., T], *args: Any) -> Handle[T]:
        """Give work away; returns at once."""
        ...

    def close(self) -> None:
        """Stop; work that nobody waits for is dropped."""
        ...


class _Lazy(Generic[T]):
    def __init__(self, work: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._work, self._args = work, args

    def result(self) -> T:
        return self._work(*self._args)


class InlineRunner:
    """Does the work in the calling thread, when its result is asked for."""

    def submit(self, work: Callable[..., T], *args: Any) -> Handle[T]:
        return _Lazy(work, args)

    def close(self) -> None:
        pass


RUNNERS: dict[str, type[InlineRunner]] = {"inline": InlineRunner}
"""By the name that a recipe gives."""
