"""Build a larger corpus than the demo's from this machine, with a recipe of 64 lanes and one of 1 lane.

python -m benchmarks.corpus OUT [MEGABYTES A SOURCE]
"""

import sys
from pathlib import Path

from recipes.demo.corpus import build

RECIPE = """seed = 7
lanes = {lanes}
[batch]
seq_len = 2048
global_batch_size = {size}
[tokenizer]
path = "tokenizer"
[[sources]]
name = "docs"
paths = ["docs/*.jsonl"]
weight = 0.7
[[sources]]
name = "code"
paths = ["code/*.jsonl"]
weight = 0.3
"""


def make(out: Path, megabytes: float) -> Path:
    """The corpus; returns the recipe of 64 lanes."""
    print(build(out, megabytes, vocab=32_000))
    (out / "lanes1.toml").write_text(RECIPE.format(lanes=1, size=8))
    (out / "lanes64.toml").write_text(RECIPE.format(lanes=64, size=64))
    return out / "lanes64.toml"


def main() -> None:
    make(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)


if __name__ == "__main__":
    main()
