"""Which ranks, lanes and batches fit together, and which lanes a rank hosts."""

from zephon.errors import TopologyError
from zephon.recipe import divisors


def owned_lanes(rank: int, world: int, lanes: int) -> list[int]:
    """The lanes of a rank, ascending."""
    return [lane for lane in range(lanes) if lane * world // lanes == rank]


def check_topology(*, lanes: int | None, global_batch: int, world: int, local_batch: int | None) -> int:
    """Check that ranks and batches fit, and settle the local batch size; a finite stream has no `lanes`.

    Returns:
        Sequences of a micro-batch: `local_batch`, or a rank's whole share where it is None.

    Raises:
        TopologyError: says the nearest values that work.
    """
    if world < 1 or (lanes or global_batch) % world:
        works = divisors(lanes or global_batch)
        what = f"{lanes} lanes" if lanes else f"the {global_batch} sequences of a global batch"
        raise TopologyError(
            f"{world} data-parallel ranks cannot share {what} evenly, so ranks would get batches of different sizes. "
            f"The numbers of ranks that work are {works}; the nearest to {world}: {_near(world, works)}."
        )
    share = global_batch // world
    if local_batch is None:
        return share
    if local_batch < 1 or share % local_batch:
        works = divisors(share)
        raise TopologyError(
            f"A rank's share of a global batch is {global_batch} / {world} = {share} sequences, which a local batch of "
            f"{local_batch} does not divide. The local batches that work are {works}; the nearest to {local_batch}: "
            f"{_near(local_batch, works)}. Any of them gives the same data."
        )
    return local_batch


def _near(given: int, works: list[int]) -> str:
    below = [one for one in works if one < given][-1:]
    above = [one for one in works if one > given][:1]
    return " and ".join(str(one) for one in below + above)
