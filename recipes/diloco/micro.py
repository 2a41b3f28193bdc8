"""A small transformer in plain PyTorch, for runs of many learners on one CPU: benchmarks, chaos, tests."""

import math
from collections.abc import Callable

import torch
from torch import nn

from recipes.diloco.feed import open_stream
from recipes.diloco.island import TorchIsland


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after a norm, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Micro(nn.Module):
    """Logits `[batch, seq_len, vocabulary]` of token ids `[batch, seq_len]`."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def schedule(peak: float, warmup: int, total: int) -> Callable[[int], float]:
    """Learning rate by clock: a linear warm-up, then a cosine down to a tenth."""

    def lr(clock: int) -> float:
        if clock < warmup:
            return peak * (clock + 1) / warmup
        return peak * (0.55 + 0.45 * math.cos(math.pi * min(1.0, (clock - warmup) / max(1, total - warmup))))

    return lr


def make(
    learner: int,
    recipe: str,
    vocabulary: int = 512,
    width: int = 32,
    layers: int = 1,
    lr: float = 3e-3,
    steps: int = 100,
    seed: int = 0,
) -> TorchIsland:
    """An island with a model of its own; all start alike. One thread, so that sums round alike everywhere."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    stream = open_stream(recipe)
    model = Micro(vocabulary, width, layers, heads=max(1, width // 32), length=stream.batch.seq_len)
    return TorchIsland(model, stream, schedule(lr, steps // 10 + 1, steps))
