"""A finite pass for validation: every row exactly once, on 1 rank and on 4.

python examples/finite_validation.py
"""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
from _data import sample_recipe
from tokenizers import Tokenizer

import zephon
from zephon.types import Batch


def finite_recipe() -> tuple[Path, list[str]]:
    """A finite recipe in place of the sample's endless one, and its rows: the lines of the sample's texts."""
    recipe = sample_recipe()
    rows: list[str] = []
    for source in ("prose", "code"):
        file = recipe.parent / f"{source}.jsonl"
        texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
        lines = [line[:200] for text in texts for line in text.splitlines() if line.strip()][:150]
        mine = [f"{source} {number}: {line}" for number, line in enumerate(lines)]
        file.write_text("".join(json.dumps({"text": row}) + "\n" for row in mine))
        rows += mine
    text = recipe.read_text().replace("lanes = 4\n", "")  # a finite stream is one decision stream
    text = text.replace('paths = ["code.jsonl"]\n', 'paths = ["code.jsonl"]\nepochs = 1\n')  # the default
    # "renormalise": a source that has ended leaves the mix to the others; "stop" would end with the first.
    recipe.write_text(text + '[mix]\non_end = "renormalise"\n[packing]\nalgorithm = "best_fit"\n')
    return recipe, rows


def texts_of(batch: Batch, tokenizer: Tokenizer) -> list[str]:
    """The rows in a batch, whole as best-fit keeps them: one starts where positions are 0, and padding is masked."""
    found: list[str] = []
    for ids, labels, positions in zip(batch["input"], batch["labels"], batch["positions"], strict=True):
        kept = np.flatnonzero(labels != -100)
        starts = kept[positions[kept] == 0].tolist()
        for start, end in itertools.pairwise([*starts, len(kept)]):
            found.append(tokenizer.decode([*ids[start:end].tolist(), int(labels[end - 1])]))
    return found


recipe, rows = finite_recipe()
tokenizer = Tokenizer.from_file(str(recipe.parent / "tokenizer" / "tokenizer.json"))
with zephon.Stream.open(recipe) as stream:
    for world in (1, 4):
        # pad_last fills the last global batch with masked sequences; training drops it instead.
        loaders = [stream.loader(rank, world, pad_last=True) for rank in range(world)]
        seen = Counter(text for loader in loaders for batch in loader for text in texts_of(batch, tokenizer))
        steps = {loader.step for loader in loaders}
        step, padding = loaders[0].step, loaders[0].stats().padding
        print(f"{world} rank(s): {seen.total()} rows in {step} steps, {padding} padded positions")
        assert seen == Counter(rows), "every row exactly once"
        assert len(steps) == 1, "all ranks end at the same step"
