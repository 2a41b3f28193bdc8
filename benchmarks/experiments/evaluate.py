"""Held-out evaluation of a checkpoint of `runs.small`: losses on prose and code, and a word cloze.

Documents that no run trains on are cut into windows of 128 positions; what is left over at a document's end is not
scored. The loss is the mean over a window, in nats a token. The cloze: where the text goes on with a word that is one
token, the model has to give it a higher probability than nine other such words of the same set, drawn by key. Chance
is 10 %, and all models get the same items.
"""

import functools
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.distributed.checkpoint.state_dict_loader import load

from benchmarks.experiments.data import WEIGHTS, documents
from benchmarks.experiments.runs import small
from zephon.keyed import Draw, make_key

WINDOW, CHOICES, BATCH = 128, 10, 32
SPACE = "Ġ"
"""How a byte-level tokenizer writes the space before a word."""

_ONE = threading.Lock()
"""Runs end side by side; they are scored one after the other."""

Scores = dict[str, dict[str, list[float]]]


def evaluate(checkpoint: Path, corpus: Path) -> Scores:
    """Scores of a model.

    Args:
        checkpoint: TorchTitan's folder `step-N`.
        corpus: folder with `heldout/` and `tokenizer/`.

    Returns:
        For each set "loss", "right" and "items", one number a window: nats a token, and of the cloze the answers that
        were right and how many there were.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with _ONE:
        model = _model(checkpoint).to(device)
        return {name: _score(model, *_items(corpus, name), device) for name in WEIGHTS}


def _model(checkpoint: Path) -> Any:
    model = small().model.build()
    model.init_weights(buffer_device=None)  # for what a checkpoint does not hold
    state = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads in one process, as it should
        load(state, checkpoint_id=checkpoint, no_dist=True)
    model.load_state_dict(state)
    return model.eval()


@functools.lru_cache(maxsize=4)
def _items(corpus: Path, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Windows [n, 129] of a set, where in their labels the cloze asks [n, 128], and the choices there [n, 128, 10]."""
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer" / "tokenizer.json"))
    pieces: list[list[int]] = []
    for text in documents(corpus, name):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        pieces += [ids[at : at + WINDOW + 1] for at in range(0, len(ids) - WINDOW, WINDOW)]
    windows = np.array(pieces, np.int64)
    spelled = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
    words = np.array([token[:1] == SPACE and token[1:].isascii() and token[1:].isalpha() for token in spelled])
    goes_on = np.array([token[:1].isascii() and token[:1].isalnum() for token in spelled])
    asked = np.zeros((len(windows), WINDOW), bool)
    asked[:, :-1] = words[windows[:, 1:-1]] & ~goes_on[windows[:, 2:]]
    pool = windows[:, 1:][asked]
    draw = Draw(make_key("experiments cloze", 7, name))
    choices = np.zeros((*asked.shape, CHOICES), np.int64)
    for window, at in np.argwhere(asked):
        chosen = [int(windows[window, at + 1])]
        while len(chosen) < CHOICES:
            other = int(pool[draw.integer(len(pool))])
            if other not in chosen:
                chosen.append(other)
        choices[window, at] = chosen
    return windows, asked, choices


@torch.no_grad()
def _score(model: Any, windows: Any, asked: Any, choices: Any, device: torch.device) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = {"loss": [], "right": [], "items": []}
    for at in range(0, len(windows), BATCH):
        ids, places, others = (torch.from_numpy(one[at : at + BATCH]).to(device) for one in (windows, asked, choices))
        positions = torch.arange(WINDOW, device=device).expand(len(ids), -1)
        logits = model(ids[:, :-1], positions=positions, attention_masks=model.get_attention_masks(positions)).float()
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        best = logits.gather(2, others).argmax(dim=2) == 0  # the answer stands first
        rows["loss"] += losses.reshape(len(ids), -1).double().mean(dim=1).tolist()
        rows["right"] += (best & places).sum(dim=1).tolist()
        rows["items"] += places.sum(dim=1).tolist()
    return rows
