"""`[run] memory`: how many bytes the queues and caches of a stream may hold in all, and who gets what.

What a lane holds open, and what is being worked on just now (a row group, an image while it is decoded), comes on top:
it is bounded by the recipe, not by a queue.
"""

from typing import NamedTuple

MEMORY = 2 * 1024**3
"""Bytes that a stream may use where a recipe does not say."""


class Budget(NamedTuple):
    """Bytes in each place. Time depends on them, data never does.

    Attributes:
        ahead: raw bytes of rows that have been measured and not mixed.
        members: decompressed members of compressed files.
        groups: decoded row groups of Parquet files.
        making: micro-batches that are being built, or are ready in the loader's process.
        waiting: micro-batches between an isolated loader and the trainer.
    """

    ahead: int
    members: int
    groups: int
    making: int
    waiting: int

    @staticmethod
    def of(memory: int) -> "Budget":
        """Shares of `memory` bytes. Row groups get most: with 64 lanes on a rank they need 445 to 777 MB of text."""
        eighth = memory // 8
        return Budget(ahead=eighth, members=eighth, groups=3 * eighth, making=2 * eighth, waiting=eighth)
