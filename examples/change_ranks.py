"""Save on 2 ranks, go on with 4, and see that every global batch stays the same.

python examples/change_ranks.py [RECIPE]
"""

import sys

from _data import sample_recipe

import zephon
from zephon.digest import lane_digest, step_digest

recipe = sys.argv[1] if len(sys.argv) > 1 else sample_recipe()


def global_step(loaders: list[zephon.Loader]) -> str:
    """The digest of one global batch: each rank hands over its lanes."""
    parts = [loader.step_records() for loader in loaders]
    return step_digest({lane: lane_digest(records) for part in parts for lane, records in part.items()})


with zephon.Stream.open(recipe) as stream:
    two = [stream.loader(rank, 2) for rank in range(2)]
    for step in range(1, 4):
        print(f"step {step} on 2 ranks  {global_step(two)[:16]}")
    state = {key: raw for loader in two for key, raw in loader.state_dict().items()}
    print(f"saved {len(state)} keys, {sum(map(len, state.values()))} bytes in all")

    four = [stream.loader(rank, 4) for rank in range(4)]
    for loader in four:
        loader.load_state_dict(state)  # each rank takes the lanes it owns now
    for step in range(4, 7):
        before, after = global_step(two), global_step(four)
        print(f"step {step} on 2 ranks  {before[:16]}   on 4 ranks  {after[:16]}")
        assert before == after
