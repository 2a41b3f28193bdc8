"""Conversations: which tokens of them are trained.

python examples/chat.py
"""

import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import zephon

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALKS = [
    [("user", "What is a lane?"), ("assistant", "A logical stream that ranks host.")],
    [("system", "Be brief."), ("user", "And a cut?"), ("assistant", "A flush point."), ("user", "Thanks!")],
    [("user", "How does a turn end?"), ("assistant", "With <|im_end|>, which is text when I say it.")],
    [("user", "Is anybody there?")],  # no answer: nothing to train on
]


def tokenizer(folder: Path, texts: list[str]) -> Tokenizer:
    """A small byte-level BPE with a chat template, as a folder that `transformers` would read."""
    out = Tokenizer(models.BPE())
    out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    out.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    out.train_from_iterator(texts, trainer)
    folder.mkdir()
    out.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    return out


with tempfile.TemporaryDirectory(prefix="zephon-example-") as name:
    folder = Path(name)
    rows = [{"messages": [{"role": role, "content": content} for role, content in talk]} for talk in TALKS]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    vocabulary = tokenizer(folder / "tokenizer", [content for talk in TALKS for _, content in talk])
    (folder / "recipe.toml").write_text(
        'seed = 7\nlanes = 1\n[batch]\nseq_len = 160\nglobal_batch_size = 1\n[tokenizer]\npath = "tokenizer"\n'
        '[[sources]]\nname = "talks"\npaths = ["talks.jsonl"]\nmodality = "chat"\nloss = "all"  # or "last"\n'
        '[run]\ncache = "cache"\n'
    )
    with zephon.Stream.open(folder / "recipe.toml") as stream:
        loader = stream.loader()
        batch = next(loader)
        print("what is trained stands between > and <\n")
        marked, open_ = "", False
        for token, label in zip(batch["input"][0], batch["labels"][0], strict=True):
            marked += vocabulary.decode([int(token)], skip_special_tokens=False)
            if (label != -100) != open_:
                open_ = not open_
                marked += ">" if open_ else "<"
        print(marked)
        print("\ntrained", int((batch["labels"] != -100).sum()), "of", batch["labels"].size, "positions")
