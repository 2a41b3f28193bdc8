"""Every error that Zephon raises on purpose.

    ZephonError
    ├── UsageError (ValueError)      the user asked for something that cannot hold; nothing was read or changed
    │   ├── RecipeError              a key, value or path of the recipe
    │   ├── TopologyError            ranks, lanes and batches do not fit together
    │   └── RestoreError             a checkpoint does not belong to this run
    └── DataError (RuntimeError)     a source holds something that cannot be delivered

A message says what was given, what is allowed, what would happen otherwise, and what to do.
The command line turns a `UsageError` into exit code 2, a `DataError` into exit code 1.
"""

import difflib
from collections.abc import Iterable


class ZephonError(Exception):
    """Base of all errors that Zephon raises on purpose."""


class UsageError(ZephonError, ValueError):
    """The request itself cannot hold."""


class RecipeError(UsageError):
    """A key, value or path of the recipe is wrong."""


class TopologyError(UsageError):
    """Ranks, lanes and batches do not fit together."""


class RestoreError(UsageError):
    """A checkpoint does not belong to this run."""


class DataError(ZephonError, RuntimeError):
    """A source holds something that cannot be delivered."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """A hint with the closest allowed name, or an empty string when none is close."""
    close = difflib.get_close_matches(given, sorted(allowed), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
