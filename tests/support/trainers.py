"""What tests of trainers share: ranks as a launcher starts them, small models, and their data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.support.oracle import adamw as adamw
from tests.support.oracle import parameters_of

VOCABULARY, LENGTH = 31, 8

weights = parameters_of


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """The environment that torchrun gives a rank, and accelerate's singletons as they are in a new process."""
    before = dict(os.environ)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (rank, rank, world_size, world_size)), strict=True))
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        forget()


def when_launched(call: Callable[..., Any], *args: Any) -> Callable[[int, int], None]:
    """``call(*args)`` of a rank that a launcher has started, for ``check_refusals``."""

    def on_rank(rank: int, world_size: int) -> None:
        with launched(rank, world_size):
            call(*args)

    return on_rank


def forget() -> None:
    """Nothing is left of accelerate's singletons."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def gpt2(**config: Any) -> GPT2LMHeadModel:
    """Two layers, with dropout."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **ends, "use_cache": False, **config}))


def llama(**config: Any) -> LlamaForCausalLM:
    """Two layers; the embedding isn't the head's."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    own = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **own, **config}))


class LayerDrop(nn.Module):
    """A stack of layers, of which each rank leaves out others in each step, by numbers of its own.

    Args:
        rank: whose numbers.
        kept: the part of the layers that is kept, on average.
    """

    def __init__(self, rank: int, kept: float = 0.5) -> None:
        super().__init__()
        self.kept = kept
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, VOCABULARY)
        self.drawn = torch.Generator().manual_seed(rank)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            if self.kept == 1 or torch.rand((), generator=self.drawn) < self.kept:
                hidden = hidden + torch.tanh(layer(hidden))
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def sentences(number: int) -> list[dict[str, Tensor]]:
    """So many rows of a corpus."""
    tokens = torch.randint(VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """SGD, in which a wrong factor shows."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def gentle(parameters: Any) -> torch.optim.Optimizer:
    """AdamW, whose ``eps`` keeps small gradients' rounding small."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def check_ends(expected: dict[str, Tensor], got: dict[str, Tensor], tolerance: float) -> None:
    """Check that both have the same weights, each element to ``tolerance``."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=tolerance, rtol=0, msg=name)


Make = Callable[[Any], torch.optim.Optimizer]
