"""A few real documents for examples that were given no recipe: this project's own texts."""

import atexit
import json
import shutil
import tempfile
from pathlib import Path

from recipes.demo.corpus import train_tokenizer

ROOT = Path(__file__).parent.parent


def sample_recipe() -> Path:
    """Two sources, prose and code, in a temporary folder; returns the recipe."""
    folder = Path(tempfile.mkdtemp(prefix="zephon-example-"))
    atexit.register(shutil.rmtree, folder)
    sources = {"prose": sorted(ROOT.glob("*/README.md")), "code": sorted(ROOT.glob("zephon/*.py"))}
    texts = {name: [path.read_text() for path in paths] for name, paths in sources.items()}
    for name, documents in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    train_tokenizer([text for documents in texts.values() for text in documents], folder / "tokenizer")
    recipe = folder / "recipe.toml"
    recipe.write_text(
        'seed = 7\nlanes = 4\n[batch]\nseq_len = 256\nglobal_batch_size = 8\n[tokenizer]\npath = "tokenizer"\n'
        '[[sources]]\nname = "prose"\npaths = ["prose.jsonl"]\nweight = 0.6\n'
        '[[sources]]\nname = "code"\npaths = ["code.jsonl"]\nweight = 0.4\n[run]\ncache = "cache"\n'
    )
    return recipe
