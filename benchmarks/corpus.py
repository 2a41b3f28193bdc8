"""Build a larger corpus than the demo's from this machine, with a recipe of 64 lanes and one of 1 lane.

python -m benchmarks.corpus OUT [--megabytes 60]
"""

from pathlib import Path
from typing import Annotated

import tyro

from recipes.demo.corpus import build

_HEAD = """seed = 7
lanes = {lanes}
[batch]
seq_len = {seq_len}
global_batch_size = {size}
[tokenizer]
path = "tokenizer"
[[sources]]
name = "docs"
paths = ["docs/*.jsonl"]
"""

TEXT = f"""{_HEAD}weight = 0.7
[[sources]]
name = "code"
paths = ["code/*.jsonl"]
weight = 0.3
"""

IMAGES = f"""{_HEAD}weight = 0.5
[[sources]]
name = "pairs"
paths = ["pairs/*.tar"]
modality = "image_text"
preset = "qwen3_5"
min_pixels = 4096    # the smallest images are 4 tokens,
max_pixels = 36864   # the largest 36
weight = 0.5
[mix]
piece = "sequence"
[packing]
algorithm = "best_fit"
bins = 16
[packing.budgets]
patches = 512
images = 8
"""
"""Recipes of the demonstration's corpora: texts alone, and with captioned pictures."""


def make(out: Path, megabytes: float) -> Path:
    """The corpus; returns the recipe of 64 lanes."""
    print(build(out, megabytes, vocab=32_000))
    (out / "lanes1.toml").write_text(TEXT.format(lanes=1, seq_len=2048, size=8))
    (out / "lanes64.toml").write_text(TEXT.format(lanes=64, seq_len=2048, size=64))
    return out / "lanes64.toml"


def main(out: Annotated[Path, tyro.conf.Positional], megabytes: float = 60.0) -> None:
    """Build a corpus from this machine's texts, a tokenizer, and recipes of 1 and of 64 lanes.

    Args:
        out: Folder to make.
        megabytes: Of each source.
    """
    make(out, megabytes)


if __name__ == "__main__":
    tyro.cli(main)
