"""Reads that are tried again: storage fails for a moment, and that must cost no row and no run."""

import errno
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

from zephon.errors import DataError
from zephon.run.watch import reading

T = TypeVar("T")

logger = logging.getLogger(__name__)

WAITS = (0.1, 1.0, 5.0, 15.0)
"""Seconds before each new try: 21 s in all, which is more than a server of files takes to come back."""

PASSING = {
    errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.EREMOTEIO, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOBUFS, errno.ENOMEM,
}  # fmt: skip
"""What may not repeat. Anything else, a missing file above all, is raised at once."""


def steadily(path: str, at: int, act: Callable[[], T]) -> T:
    """What `act` returns, which reads byte `at` of a file or opens it; OSError where it fails, and goes on failing."""
    reading(path)
    for wait in WAITS:
        try:
            return act()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            logger.warning("%s, byte %d: %s; trying again in %g s.", path, at, error.strerror, wait)
            time.sleep(wait)
    return act()


def pread(fd: int, size: int, at: int, path: str) -> bytes:
    """`os.pread`, tried again where a failure may pass.

    Raises:
        DataError: it did not pass.
    """
    try:
        return steadily(path, at, functools.partial(os.pread, fd, size, at))
    except OSError as error:
        raise unreadable(path, error, at) from error


def unreadable(path: str, error: OSError, at: int = 0) -> DataError:
    """What to say of a file that cannot be read, however often one tries."""
    tries = f" in {len(WAITS) + 1} tries over {sum(WAITS):.0f} s" if error.errno in PASSING else ""
    return DataError(
        f"{path} cannot be read ({error.strerror}{tries}) at byte {at}. Left out, its rows would change the order of "
        "everything else. Mend the storage, or put the file back; the run goes on from its last state."
    )
