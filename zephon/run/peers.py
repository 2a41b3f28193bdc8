"""What ranks check of each other at the start."""

import hashlib
import socket
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from zephon.errors import RestoreError
from zephon.restore import differences
from zephon.state import encode_header


def check_peers(header: Mapping[str, Any]) -> None:
    """Check that all ranks have opened the same stream: one collective of 32 bytes a rank.

    Args:
        header: of this rank's stream.

    Raises:
        RestoreError: names the ranks that differ from most, and how.
    """
    if not dist.is_initialized():
        return
    sums = _gather(hashlib.sha256(encode_header(header)).digest())
    if len(set(sums)) == 1:
        return
    most = max(sums, key=sums.count)  # of as many, the one with the lowest rank
    headers = _gather((socket.gethostname(), header))
    usual = headers[sums.index(most)][1]
    odd = [
        f"  rank {rank} on {host}, {key}: {here}, elsewhere {before}"
        for rank, ((host, its), one) in enumerate(zip(headers, sums, strict=True))
        if one != most
        for key, (before, here) in differences(usual, its).items()
    ]
    raise RestoreError(
        f"{len(sums) - sums.count(most)} of {len(sums)} ranks have opened another stream than the others:\n"
        + "\n".join(odd)
        + "\nTheir batches would not fit together. Give all ranks the same recipe, files and library versions."
    )


def _gather(mine: Any) -> list[Any]:
    """What every rank has, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)  # pyright: ignore[reportUnknownMemberType]
    return everyone
