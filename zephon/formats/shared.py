"""A cache folder that many processes use at once: names of one's own, a lock, and what the killed have left."""

import contextlib
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Generator
from pathlib import Path

logger = logging.getLogger(__name__)


def private_name(at: Path) -> Path:
    """Where to write what will be renamed to `at`: no other thread, process or machine takes this name."""
    return at.with_name(f"{at.name}.tmp-{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}")


@contextlib.contextmanager
def alone(cache: Path) -> Generator[bool]:
    """Hold the cache folder while indexing; yields whether the file system could lock it."""
    fd, locked = -1, False
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fd = os.open(cache, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Another process indexes files of %s; waiting for it.", cache.parent)
            fcntl.flock(fd, fcntl.LOCK_EX)
        locked = True
    except OSError as error:
        logger.info("No lock on %s (%s); every process indexes for itself.", cache, error)
    try:
        yield locked
    finally:
        if fd >= 0:
            os.close(fd)


def sweep(cache: Path) -> None:
    """Remove what indexers of this machine left when they were killed; nobody else writes while we hold the lock."""
    for left in cache.glob(f"*.tmp-{socket.gethostname()}-*"):
        with contextlib.suppress(OSError):
            left.unlink()
