"""A guard that does not depend on the clock of the machine: CPU of the loader beside a minimal loop, in one process.

The loop does the work that cannot be left out: parse rows, tokenise them in batches, lay ids out in arrays. It mixes,
shuffles and packs nothing, and has no state. The best of several turns counts, and there are up to 60 turns. Beside
other tests the loader looks half as dear again even so, as they share its caches: it runs alone. Bounds are a quarter
above what was measured when they were set.
"""

import json
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from modalities.tokenizer import TextTokenizer
from zephon import Stream
from zephon.recipe import TokenizerSpec

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SEQ_LEN, LEAST, ROUNDS = 512, 4, 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 MB of Python's own sources as whole files and cut into short documents, and a tokenizer trained on some."""
    root = tmp_path_factory.mktemp("speed")
    texts, size = list[str](), 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        texts.append(text)
        size += len(text)
        if size > 12e6:
            break
    short = [text[at : at + 250] for text in texts for at in range(0, len(text), 250)]
    for name, documents in (("long", texts), ("short", short)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts[:60], trainer)
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return root


def recipe(folder: Path, kind: str, lanes: int) -> Path:
    path = folder / f"{kind}{lanes}.toml"
    path.write_text(
        f"lanes = {lanes}\n[batch]\nseq_len = {SEQ_LEN}\nglobal_batch_size = {max(8, lanes)}\n[tokenizer]\n"
        f'path = "tokenizer.json"\n[[sources]]\nname = "a"\npaths = ["{kind}.jsonl"]\nweight = 0.7\n'
        f'[[sources]]\nname = "b"\npaths = ["{kind}.jsonl"]\nweight = 0.3\n[run]\ncache = "cache"\n'
    )
    return path


def loop(rows: list[bytes], tokenizer: TextTokenizer, tokens: int) -> Callable[[], float]:
    """CPU seconds a token of the minimal loop."""

    def run() -> float:
        started, done, at = time.process_time(), 0, 0
        rest = np.empty(0, np.int32)
        while done < tokens:
            texts = [orjson.loads(row)["text"] for row in rows[at : at + 256]]
            at = at + 256 if at + 256 < len(rows) else 0
            ids, _ = tokenizer.encode(texts)
            rest = np.concatenate([rest, ids])
            whole = (len(rest) - 1) // (8 * SEQ_LEN) * 8 * SEQ_LEN
            for first in range(0, whole, 8 * SEQ_LEN):
                done += rest[first : first + 8 * SEQ_LEN].reshape(8, SEQ_LEN).copy().size
                rest[first + 1 : first + 1 + 8 * SEQ_LEN].reshape(8, SEQ_LEN).copy()
            rest = rest[whole:]
        return (time.process_time() - started) / done

    return run


@pytest.mark.parametrize(
    ("kind", "lanes", "bound"),
    [("long", 1, 2.2), ("long", 64, 4.2), ("short", 1, 7.7), ("short", 64, 8.2)],  # 1.8, 3.3, 6.2, 6.6
)
def test_the_loader_costs_little_beside_the_work_itself(folder: Path, kind: str, lanes: int, bound: float) -> None:
    tokens = 1_500_000
    rows = (folder / f"{kind}.jsonl").read_bytes().splitlines()
    with Stream.open(recipe(folder, kind, lanes)) as stream:
        minimal = loop(rows, TextTokenizer(TokenizerSpec(folder)), tokens)
        loader = stream.loader(local_batch_size=8)

        def ours(tokens: int = tokens) -> float:
            started, done = time.process_time(), 0
            while done < tokens:
                done += next(loader)["input"].size
            return (time.process_time() - started) / done

        minimal(), ours(10_000_000)  # until all lanes have read ahead
        both, ratio = list[tuple[float, float]](), bound + 1
        while ratio > bound and len(both) < ROUNDS:  # in turns; a loader that got dearer is so in every one
            both.append((ours(), minimal()))
            ratio = min(one for one, _ in both) / min(one for _, one in both) if len(both) >= LEAST else ratio
    assert ratio <= bound, f"{kind}, {lanes} lanes: {ratio:.2f} times the CPU of the minimal loop, bound {bound}"
