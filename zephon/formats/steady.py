"""Reads that are tried again: storage fails for a moment, and that must cost no row and no run."""

import errno
import logging
import os
import time

from zephon.errors import DataError
from zephon.run.watch import reading

logger = logging.getLogger(__name__)

WAITS = (0.1, 1.0, 5.0, 15.0)
"""Seconds before each new try: 21 s in all, which is more than a server of files takes to come back."""

PASSING = {
    errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.EREMOTEIO, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOBUFS, errno.ENOMEM,
}  # fmt: skip
"""What may not repeat. Anything else, a missing file above all, is raised at once."""


def pread(fd: int, size: int, at: int, path: str) -> bytes:
    """`os.pread`, tried again where a failure may pass.

    Raises:
        DataError: it did not pass.
    """
    reading(path)
    for wait in (*WAITS, None):
        try:
            return os.pread(fd, size, at)
        except OSError as error:
            if wait is None or error.errno not in PASSING:
                tries = f" in {len(WAITS) + 1} tries over {sum(WAITS):.0f} s" if wait is None else ""
                raise DataError(
                    f"{path} cannot be read ({error.strerror}{tries}) at byte {at}. Left out, its rows would change "
                    "the order of everything else. Mend the storage; the run goes on from its last state."
                ) from error
            logger.warning("%s, byte %d: %s; trying again in %g s.", path, at, error.strerror, wait)
            time.sleep(wait)
    raise AssertionError
