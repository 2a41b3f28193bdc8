"""Your own accumulator: a packer, which decides what shares a sequence. Named in the recipe as `module:Class`.

python examples/own_packer.py
"""

from _data import sample_recipe

import zephon
from zephon.digest import lane_digest, step_digest

PACKER = '''
from zephon.pack import Bin


class OneSource:
    """Sequences of one source each: a sequence ends early where the next piece is of another.

    A packer sees refs and lengths, never tokens. All that it remembers is in `open`, from which `restore` starts again.
    """

    def __init__(self, room, bins):
        self.room, self.bin = room, Bin(room)

    @property
    def open(self):
        return [list(self.bin.segments)] if self.bin.segments else []

    def offer(self, sample, start, end):
        """Take positions [start, end) of a sample, or the first part; say how far, and give what is complete."""
        if self.bin.segments and self.bin.segments[0].sample.ref.source != sample.ref.source:
            return start, self.flush()
        taken = self.bin.reach(sample, start, end)
        if taken > start:
            self.bin.add(sample, start, taken)
        return taken, self.flush() if taken < end or self.bin.full else None

    def flush(self):
        done, self.bin = self.bin, Bin(self.room)
        return done.leave() if done.segments else None

    def restore(self, bins):
        self.bin = Bin(self.room, [segment for one in bins for segment in one])
'''

recipe = sample_recipe()
(recipe.parent / "my_packer.py").write_text(PACKER)
recipe.write_text(recipe.read_text().replace("[run]", '[packing]\nalgorithm = "my_packer:OneSource"\n[run]'))


def digests(stream: zephon.Stream, world: int, steps: int, state: dict[str, bytes]) -> list[str]:
    """What all ranks of a run get, from a state on."""
    loaders = [stream.loader(rank, world) for rank in range(world)]
    for loader in loaders if state else ():
        loader.load_state_dict(state)
    parts = [[loader.step_records() for loader in loaders] for _ in range(steps)]
    state.update({key: raw for loader in loaders for key, raw in loader.state_dict().items()})
    return [step_digest({i: lane_digest(one[i]) for one in part for i in one}) for part in parts]


with zephon.Stream.open(recipe) as stream:
    whole = digests(stream, 1, 8, {})
    kept: dict[str, bytes] = {}
    first, rest = digests(stream, 4, 4, kept), digests(stream, 2, 4, kept)
    assert first + rest == whole
    print("8 steps on 1 rank, 4 on 4 and 4 on 2:", *(one[:8] for one in whole))
    print("largest state of a lane:", max(map(len, kept.values())), "bytes")
