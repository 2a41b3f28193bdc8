"""Save after a step, drop everything, go on from the state: the same batches come.

python examples/resume.py [RECIPE]
"""

import sys
import tempfile
from pathlib import Path

from _data import sample_recipe

import zephon
from zephon.digest import lane_digest, step_digest

recipe = sys.argv[1] if len(sys.argv) > 1 else sample_recipe()
SAVE, STEPS = 3, 6


def digests(loader: zephon.Loader, until: int) -> list[str]:
    """The digest of every global batch up to step `until`."""
    found: list[str] = []
    while loader.step < until:
        found.append(step_digest({lane: lane_digest(records) for lane, records in loader.step_records().items()}))
        print(f"  step {loader.step}  {found[-1][:16]}")
    return found


with tempfile.TemporaryDirectory(prefix="zephon-example-") as name:
    saved = Path(name)
    print("a run that saves, and ends")
    with zephon.Stream.open(recipe) as stream:
        loader = stream.loader()
        digests(loader, SAVE)
        for key, raw in loader.state_dict().items():  # plain bytes: any checkpointer can hold them
            (saved / key).write_bytes(raw)
            print(f"  saved {key}: {len(raw)} bytes")

    print("a new stream and a new loader go on from the files")
    with zephon.Stream.open(recipe) as stream:
        loader = stream.loader()
        loader.load_state_dict({file.name: file.read_bytes() for file in saved.iterdir()})
        resumed = digests(loader, STEPS)

print("a run that was never interrupted")
with zephon.Stream.open(recipe) as stream:
    whole = digests(stream.loader(), STEPS)
assert resumed == whole[SAVE:]
print(f"steps {SAVE + 1} to {STEPS} are equal")
