"""The network: a byte-level GPT whose layers are dropped at random while it trains.

It is small and plain on purpose, but has what a sharded optimizer can stumble over: tied weights (the
embedding is also the output projection), parameters that shall not decay, and layers without a gradient in
some steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


class LayerDrop(nn.Module):
    """A stack of layers; a training pass leaves each out with probability ``rate``, an evaluation none.

    "Reducing Transformer Depth on Demand with Structured Dropout", Fan, Grave and Joulin, 2019. The draw is
    made on the host, by a generator of its own: it costs no device synchronisation, and ranks that seed it
    alike drop the same layers.
    """

    def __init__(self, layers: list[nn.Module], rate: float, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.rate = rate
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn = 0
        self.dropped = 0

    def draw(self) -> list[bool]:
        """One flag a layer: whether the next training pass keeps it."""
        kept: list[bool] = torch.rand(len(self.layers), generator=self.generator).ge(self.rate).tolist()
        self.drawn += len(kept)
        self.dropped += kept.count(False)
        return kept

    def forward(self, x: Tensor) -> Tensor:
        kept = self.draw() if self.training else [True] * len(self.layers)
        for layer, keep in zip(self.layers, kept, strict=True):
            if keep:
                x = layer(x)
        return x


class Rotary(nn.Module):
    """Turns pairs of channels by an angle that grows with the position (RoFormer, Su et al., 2021).

    In two minutes a model sees too few bytes to learn a table of positions; turning needs no learning.
    """

    cosine: Tensor  # [context, channels of a head / 2]
    sine: Tensor  # likewise

    def __init__(self, context: int, channels: int) -> None:
        super().__init__()
        speeds = 10_000.0 ** -(torch.arange(0, channels, 2) / channels)
        angles = torch.outer(torch.arange(context), speeds)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, heads, time, channels]
        cosine, sine = self.cosine[: x.size(-2)], self.sine[: x.size(-2)]
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


class Attention(nn.Module):
    """Causal self-attention: a byte sees itself and those before it."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.rotary = Rotary(context, width // heads)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        by_head = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = by_head.unbind()
        mixed = F.scaled_dot_product_attention(self.rotary(query), self.rotary(key), value, is_causal=True)
        merged: Tensor = self.merge(mixed.transpose(1, 2).flatten(-2))
        return merged


class Block(nn.Module):
    """One pre-norm transformer layer. It starts as the identity: to drop it is no shock to a young model."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads, context)
        self.before_mlp = nn.LayerNorm(width)
        merge = nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), merge)
        nn.init.zeros_(self.attention.merge.weight)
        nn.init.zeros_(merge.weight)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        x = x + self.attention(self.before_attention(x))
        x = x + self.mlp(self.before_mlp(x))
        return x


class GPT(nn.Module):
    """From bytes to the logits of each one's successor."""

    def __init__(
        self, layers: int, width: int, heads: int, context: int, layer_drop: float = 0.0, drop_seed: int = 0
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(BYTES, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.stack = LayerDrop([Block(width, heads, context) for _ in range(layers)], layer_drop, drop_seed)
        self.norm = nn.LayerNorm(width)

    def forward(self, text: Tensor) -> Tensor:  # [batch, time] int64 -> [batch, time, 256]
        return F.linear(self.norm(self.stack(self.embedding(text))), self.embedding.weight)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two param groups: matrices decay; biases and norms, which only shift and scale, do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
    """``prompt`` and ``count`` more bytes, each drawn from the model, on the host as ever."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        window = torch.tensor([text[-model.context :]], device=model.embedding.weight.device)
        logits = model(window)[0, -1].float().cpu()
        text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return bytes(text)
