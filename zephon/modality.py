"""The contract of a modality: the stateless work on samples, and how one is found.

A modality is a class, found under the entry point group `zephon.modalities` by the name that a recipe gives. It sees
rows and plans, never lanes, ranks or order. Whatever it returns must depend on its arguments alone: the same rows give
the same samples in any grouping and in any process.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, TypeVar

from zephon.errors import RecipeError, nearest
from zephon.recipe import TokenizerSpec
from zephon.types import Batch, Measured, Plan, Record, Row, Sample

T = TypeVar("T")

GROUP = "zephon.modalities"

LATE = "_late"
"""Name of what `materialise` counts, among the arrays of a micro-batch."""


class BadRowError(ValueError):
    """Raised by `measure` for a row that it cannot use.

    Args:
        row: number of the row in the micro-batch.
        reason: what is wrong with it.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row, self.reason = row, reason


@dataclass(frozen=True, slots=True)
class Context:
    """What a modality is told about the stream it works for.

    Attributes:
        seq_len: positions of a sequence.
        tokenizer: the recipe's tokenizer, if it names one.
        extras: arrays that records are to hold beside the usual ones.
        budgets: most of each cost that a sequence holds beside positions; what is not in it has no limit.
        folder: the recipe's, where relative paths start.
        on_error: what becomes of a bad row of this source, "raise" or "skip".
    """

    seq_len: int
    tokenizer: TokenizerSpec | None
    extras: tuple[str, ...] = ()
    budgets: Mapping[str, int] = field(default_factory=dict[str, int])
    folder: Path = Path()
    on_error: str = "raise"
    _shared: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])

    def share(self, key: Hashable, make: Callable[[], T]) -> T:
        """Load what is costly once for all sources of a stream."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]


class Modality(Protocol):
    """Stateless work on the samples of one source.

    Args:
        options: the keys of the source that the core does not know; an unknown one is a `RecipeError`.
        context: what it is told about the stream.
    """

    family: str
    """Modalities of one family share payloads and records, so that their sources can share sequences."""

    builds: tuple[str, ...]
    """Other families whose samples it can build: those of text may share the sequences of one that knows images."""

    costs: tuple[str, ...]
    """Names of what an atom costs beside positions, in the order of `Atom.costs`."""

    filler: Sample | None
    """What ends a record without any atom, where a model needs media in every one."""

    cheap_materialise: bool
    """Whether building a micro-batch costs less than sending it to another process: then it is never given away."""

    on_error: str
    """What becomes of a bad row where the recipe does not say: "raise" or "skip"."""

    counters: tuple[str, ...]
    """Names of what `measure` and `materialise` count, in the order in which they are stored."""

    def __init__(self, options: Mapping[str, Any], context: Context) -> None: ...

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must agree on: options and hashes of files, as JSON values."""
        ...

    def probe(self, rows: Sequence[Row]) -> None:
        """Look at the first rows of the source before anything is delivered; may settle what `measure` uses."""
        ...

    def measure(self, rows: Sequence[Row]) -> Measured:
        """Turn raw rows into sized samples: at least one a row, of 0 positions where there is nothing to deliver.

        A row that cannot be used gives an empty sample and a word in `faults`.

        Raises:
            BadRowError: one row cannot be used; the others are then measured again without it.
        """
        ...

    def materialise(self, plans: Sequence[Plan]) -> Batch:
        """Build one micro-batch.

        `LATE`, int32 [n, 3], may be among its arrays: sequence in the micro-batch, source, and number of one of its
        `counters` that is raised by what was found only now. The loader takes it out and counts.
        """
        ...

    def records(self, batch: Batch) -> list[Record]:
        """Split a micro-batch into records with the dtypes that digests are made of."""
        ...


@functools.cache
def find_modality(name: str) -> type[Modality]:
    """The class that an entry point names.

    Raises:
        RecipeError: no such entry point, or what it needs is not installed.
    """
    known = {point.name: point for point in entry_points(group=GROUP)}
    if name not in known:
        raise RecipeError(
            f"Unknown modality {name!r}; installed are {sorted(known)}.{nearest(name, known)} A modality is a class "
            f"under the entry point group {GROUP!r} of an installed package."
        )
    try:
        return known[name].load()
    except ImportError as error:
        raise RecipeError(
            f"The modality {name!r} cannot be loaded: {error}. Install what it needs, for those that come with Zephon "
            f"with: pip install -e '.[image]' in a checkout."
        ) from error
