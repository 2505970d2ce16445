"""What a model must beat: guesses that need no network, in nats a byte, on the bytes that it is judged by."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BYTES = 256
SMOOTHINGS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def baselines(text: Tensor, windows: Tensor) -> dict[str, float]:
    """The losses of a uniform, a unigram and a bigram model, fitted on ``text`` and judged by ``windows``.

    ``text`` is uint8 [bytes]. ``windows`` is int64 [count, context + 1]; its first column is context only, as
    it is for the network. Of the smoothings that one counts which suits these very windows best: any doubt
    favours the baselines.
    """
    unigrams, bigrams = unigram_counts(text), bigram_counts(text)
    return {
        "uniform": math.log(BYTES),
        "unigram": min(unigram_loss(unigrams, windows, smoothing) for smoothing in SMOOTHINGS),
        "bigram": min(bigram_loss(bigrams, windows, smoothing) for smoothing in SMOOTHINGS),
    }


def unigram_counts(text: Tensor) -> Tensor:
    """How often each byte occurs: int64 [256]."""
    return torch.bincount(text, minlength=BYTES)


def bigram_counts(text: Tensor) -> Tensor:
    """How often each byte follows each byte: int64 [256 before, 256 after]."""
    pairs = text[:-1].int() * BYTES + text[1:]
    return torch.bincount(pairs, minlength=BYTES * BYTES).view(BYTES, BYTES)


def unigram_loss(counts: Tensor, windows: Tensor, smoothing: float) -> float:
    """Mean -log p(byte) over the windows' targets, with ``smoothing`` added to each count."""
    return -_log_shares(counts, smoothing)[windows[:, 1:]].mean().item()


def bigram_loss(counts: Tensor, windows: Tensor, smoothing: float) -> float:
    """Mean -log p(byte | the byte before) over the windows' targets, ``smoothing`` added to each count."""
    return -_log_shares(counts, smoothing)[windows[:, :-1], windows[:, 1:]].mean().item()


def _log_shares(counts: Tensor, smoothing: float) -> Tensor:
    smoothed = counts.double() + smoothing
    return (smoothed / smoothed.sum(dim=-1, keepdim=True)).log()
