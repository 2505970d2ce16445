"""Buffers to be summed: a row for each rank."""

from __future__ import annotations

import torch
from torch import Tensor


def buffer_of(rank: int, world_size: int, row: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums every dtype holds exactly; different on each rank and in each row."""
    generator = torch.Generator().manual_seed(1000 * row + rank)
    return torch.randint(-9, 10, (world_size, row), generator=generator).to(dtype)
