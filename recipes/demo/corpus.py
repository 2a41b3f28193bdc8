"""A small real corpus and a real tokenizer from what any machine with Python has.

Two sources: `docs` (package descriptions, README and documentation files, docstrings of modules) and `code` (Python
sources of the standard library and installed packages). The same machine image gives the same files.
"""

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 2048
SHARDS = 2
_MOST_CHARACTERS = 20_000  # of one document
_LEAST_CHARACTERS = 200
_BOS, _EOS = "<|begin_of_text|>", "<|end_of_text|>"


def build(folder: Path, megabytes: float = 4.0, vocab: int = VOCAB, marks: tuple[str, ...] = ()) -> dict[str, int]:
    """Write `docs/`, `code/` and `tokenizer/` under `folder`, at most `megabytes` a source.

    `marks` are control tokens of the tokenizer beside BOS and EOS.

    Returns:
        Documents of each source.
    """
    counts: dict[str, int] = {}
    texts: list[str] = []
    for name, documents in (("docs", _docs()), ("code", _code())):
        chosen: list[str] = []
        left = megabytes * 1e6
        for text in documents:
            chosen.append(text)
            left -= len(text)
            if left < 0:
                break
        (folder / name).mkdir(parents=True, exist_ok=True)
        for shard in range(SHARDS):
            lines = (json.dumps({"text": text}, ensure_ascii=False) for text in chosen[shard::SHARDS])
            (folder / name / f"shard-{shard}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        counts[name] = len(chosen)
        texts += chosen[:300]
    train_tokenizer(texts, folder / "tokenizer", vocab, marks)
    return counts


def _roots() -> list[Path]:
    paths = sysconfig.get_paths()
    return [Path(paths["stdlib"]), Path(paths["purelib"])]


def _files(root: Path, *endings: str) -> Iterator[Path]:
    """Files below `root` in a fixed order; the standard library does not include the packages installed below it."""
    for path in sorted(root.rglob("*")):
        below = path.relative_to(root).parts
        if (
            path.name.endswith(endings)
            and path.is_file()
            and not (root.name != "site-packages" and "site-packages" in below)
        ):
            yield path


def _read(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text[:_MOST_CHARACTERS] if len(text) >= _LEAST_CHARACTERS else None


def _docs() -> Iterator[str]:
    stdlib, packages = _roots()
    for path in _files(packages, "METADATA", ".md", ".rst"):
        if text := _read(path):
            yield text
    for path in _files(stdlib, ".py"):
        source = _read(path)
        try:
            docstring = ast.get_docstring(ast.parse(source)) if source else None
        except (SyntaxError, ValueError):  # the cut may fall inside a statement
            continue
        if docstring and len(docstring) >= _LEAST_CHARACTERS:
            yield docstring


def _code() -> Iterator[str]:
    for root in _roots():
        for path in _files(root, ".py"):
            if text := _read(path):
                yield text


def train_tokenizer(texts: list[str], folder: Path, vocab: int = VOCAB, marks: tuple[str, ...] = ()) -> None:
    """Train a byte-level BPE of `vocab` entries and write it as a folder that `transformers` would read."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[_BOS, _EOS, *marks], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _BOS, "eos_token": _EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
