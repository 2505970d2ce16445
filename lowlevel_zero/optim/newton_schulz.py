"""Muon's arithmetic on one matrix: torch's own where it has it, so that both stay alike, else the same here."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

# What a matrix is orthogonalised in.
DTYPE = torch.bfloat16


def _torchs(name: str, otherwise: Any) -> Any:
    with suppress(ImportError):  # torch before 2.9
        return getattr(importlib.import_module("torch.optim._muon"), name, otherwise)
    return otherwise


def newton_schulz(update: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """A matrix of ``update``'s singular vectors, all of whose singular values are about 1 (Jordan et al., 2024).

    Args:
        update: 2-D; it may be overwritten if it is ``DTYPE``.
        coefficients: a, b and c of the polynomial ``aX + b(XX')X + c(XX')(XX')X``.
        steps: how often it is applied.
        eps: least norm to divide by.

    Returns:
        of ``update``'s shape, ``DTYPE``.
    """
    a, b, c = coefficients
    tall = update.shape[0] > update.shape[1]
    x = update.to(DTYPE).T if tall else update.to(DTYPE)
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def rate_for(lr: Any, rule: str | None, shape: Sequence[int]) -> Any:
    """``lr`` as it is for a matrix of ``shape``, by ``torch.optim.Muon``'s ``adjust_lr_fn``."""
    rows, columns = shape
    ratio = 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    return lr * ratio


orthogonalise = _torchs("_zeropower_via_newtonschulz", newton_schulz)
adjusted_rate = _torchs("_adjust_lr", rate_for)


def flops(shape: Sequence[int]) -> int:
    """What orthogonalising a matrix of ``shape`` costs, in multiples of one kind."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)
