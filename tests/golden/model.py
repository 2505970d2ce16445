"""The golden curves' model and its data, by formulas that no random generator or CPU can change.

A change here changes the numbers: the curves must be made anew then.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent


def numbers(*shape: int, seed: int) -> Tensor:
    """Between -1 and 1, without a pattern, by exact arithmetic and one rounding; fp32."""
    i = torch.arange(torch.Size(shape).numel()) + 1009 + 17 * seed
    return ((i**3 + 5 * i**2) % 2003).double().div(1001).sub(1).float().view(shape)


class Counter(nn.Module):
    """Has state that isn't a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Small(nn.Module):
    """Two layers that can be dropped, between parameters of awkward kinds.

    ``rows`` (35 elements) has a second name, ``again``; ``inward`` (30) is transposed; ``scale`` is 0-d; ``frozen`` is
    not trained; ``seen`` is a buffer. Two, three and four ranks divide none of the others.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(7, 5))
        self.inward = nn.Parameter(torch.empty(6, 5).t())
        self.scale = nn.Parameter(torch.empty(()))
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(2))
        self.frozen = nn.Parameter(torch.empty(5), requires_grad=False)
        self.again = self.rows
        self.counter = Counter()
        self.register_buffer("seen", torch.empty(4))
        with torch.no_grad():
            for place, tensor in enumerate([*self.parameters(), *self.buffers()]):
                tensor.copy_(numbers(*tensor.shape, seed=seed + 3 * place) / 2)

    def forward(self, x: Tensor, drop: set[int]) -> Tensor:
        """``x``: (samples, 6); returns (samples, 5)."""
        hidden = x @ self.inward.t() * (self.scale + 1) + self.rows[: len(x)] + self.frozen
        for place, layer in enumerate(self.layers):
            if place not in drop:
                hidden = hidden + torch.tanh(layer(hidden))
        out: Tensor = hidden @ self.again.t() @ self.again
        return out


def loss_of(model: nn.Module, drop: set[int], step: int, micro: int, share: int) -> Tensor:
    """The loss of 4 samples, in fp32."""
    seed = 1 + 101 * step + 11 * micro + 3 * share
    dtype = next(model.parameters()).dtype
    out = model(numbers(4, 6, seed=seed).to(dtype), drop)
    return (out.float() - numbers(4, 5, seed=seed + 1)).square().mean()
