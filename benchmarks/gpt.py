"""The model that everybody trains: a plain GPT, in the sizes that are measured, and the tokens it is fed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """One model, and the tokens of one micro-batch on one rank."""

    layers: int
    width: int
    heads: int
    batch: int
    context: int


SIZES = {
    "tiny": Size(layers=2, width=32, heads=2, batch=2, context=16),
    "6m": Size(layers=8, width=256, heads=8, batch=1, context=16),
    "25m": Size(layers=8, width=512, heads=8, batch=2, context=64),
    "85m": Size(layers=12, width=768, heads=12, batch=2, context=64),
    "85m-8k": Size(layers=12, width=768, heads=12, batch=8, context=1024),
    "300m-8k": Size(layers=24, width=1024, heads=16, batch=8, context=1024),
    "1b": Size(layers=20, width=2048, heads=16, batch=1, context=64),
}


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, context, width]`` to the same."""
        x = x + self.project(self._attend(self.norm1(x)))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        q, k, v = self.mix(x).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, context, width)


class GPT(nn.Module):
    """Predicts the next byte; the output projection is the embedding (Radford et al., 2019)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, context + 1]`` tokens to their mean loss, 0-d fp32: all of it inside, so any wrapper fits."""
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_model(size: Size) -> GPT:
    """The same fp32 model at every call, on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(size)


def make_batches(size: Size, micro_batches: int, rank: int) -> list[Tensor]:
    """A rank's tokens of one step, the same at every call."""
    generator = torch.Generator().manual_seed(1 + rank)
    shape = (size.batch, size.context + 1)
    return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(micro_batches)]
