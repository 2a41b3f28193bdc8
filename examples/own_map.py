"""Your own filter and map: plain functions in a module beside the recipe, named there as `module:function`.

python examples/own_map.py
"""

from _data import sample_recipe

import zephon
from zephon.digest import lane_digest, step_digest

FUNCTIONS = '''
def long_enough(row):
    """A filter: whether the row stays."""
    return len(row["text"]) >= 2000


def window(row, draw):
    """A map: 40 lines from a drawn place. `draw` is keyed by seed, epoch and row, so every run draws the same."""
    lines = row["text"].splitlines()
    start = draw.integer(max(1, len(lines) - 40))
    return {"text": "\\n".join(lines[start : start + 40])}
'''

recipe = sample_recipe()
(recipe.parent / "my_functions.py").write_text(FUNCTIONS)
code = 'paths = ["code.jsonl"]\n'
named = code + 'filter = "my_functions:long_enough"\nmap = "my_functions:window"\n'
recipe.write_text(recipe.read_text().replace(code, named))


def first_steps(stream: zephon.Stream, steps: int) -> list[str]:
    loader = stream.loader()
    parts = [loader.step_records() for _ in range(steps)]
    for name, counts in loader.stats().dropped.items():
        print(f"  {name}: {counts}")
    return [step_digest({lane: lane_digest(records) for lane, records in part.items()}) for part in parts]


found: list[list[str]] = []
for runner in ("inline", "threads"):  # who does the work changes no draw
    recipe.write_text(recipe.read_text().replace('[run]\nrunner = "inline"', "[run]"))
    recipe.write_text(recipe.read_text().replace("[run]", f'[run]\nrunner = "{runner}"'))
    with zephon.Stream.open(recipe) as stream:
        print(f"runner {runner}")
        found.append(first_steps(stream, 8))
        print("  digests", *(digest[:8] for digest in found[-1]))
assert found[0] == found[1]
