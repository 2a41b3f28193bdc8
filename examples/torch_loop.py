"""A plain PyTorch loop: train a little, save model and data together, resume, and get the same losses.

python examples/torch_loop.py [RECIPE]
"""

import io
import sys

import torch
from _data import sample_recipe

import zephon

recipe = sys.argv[1] if len(sys.argv) > 1 else sample_recipe()
STEPS, SAVE = 8, 4
VOCABULARY = 2048  # of the sample's tokenizer; your own may need more


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 64), torch.nn.Linear(64, VOCABULARY))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: zephon.Loader, until: int) -> list[float]:
    losses: list[float] = []
    while loader.step < until:
        batch = {name: torch.from_numpy(array).long() for name, array in next(loader).items()}
        logits = model(batch["input"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


with zephon.Stream.open(recipe) as stream:
    model, optimizer = make()
    loader = stream.loader()
    train(model, optimizer, loader, SAVE)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}, saved)
    whole = train(model, optimizer, loader, STEPS)

    state = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    model, optimizer = make()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader = stream.loader()
    loader.load_state_dict(state["data"])
    resumed = train(model, optimizer, loader, STEPS)

print("uninterrupted", [f"{loss:.6f}" for loss in whole])
print("resumed      ", [f"{loss:.6f}" for loss in resumed])
assert whole == resumed
