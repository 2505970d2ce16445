"""The one interface through which every contestant trains: forward and backward, a step, and what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lowlevel_zero.layout.held import held_bytes

from ..gpt import GPT, SIZES, make_model
from .reachable import reachable_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Setting:
    """What all contestants of one run have in common.

    Attributes:
        size: key of ``SIZES``.
        dtype: of the working parameters; bf16 means fp32 masters, for everybody.
        micro_batches: backwards a step.
        device: where parameters are: "cpu", or "cuda", each rank's own.
    """

    size: str
    dtype: str
    micro_batches: int
    device: str = "cpu"

    def fp32_model(self) -> GPT:
        """The model before anybody has touched it."""
        return make_model(SIZES[self.size])

    def rounded_model(self) -> GPT:
        """The model in fp32, as it is after it has been in the working dtype: what others' masters start from."""
        return self.model().float()

    def model(self) -> GPT:
        """The model in the working dtype."""
        return self.fp32_model().to(self.device, DTYPES[self.dtype])


HYPER = {"lr": 1e-4, "weight_decay": 0.1}


def adamw(parameters: Iterable[Tensor], implementation: str = "fused") -> AdamW:
    """The optimizer that everybody uses; ``implementation``: fused or foreach."""
    return AdamW(parameters, fused=implementation == "fused", foreach=implementation == "foreach", **HYPER)


class Peer:
    """One way of training the model, written as that library's user would write it.

    Args:
        model: what is called with a batch, and returns the loss.
        optimizer: what steps.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def forward_backward(self, batches: Sequence[Tensor]) -> Tensor:
        """All micro-batches of one step; their mean loss on this rank, 0-d."""
        total = torch.zeros((), device=batches[0].device)
        for number, batch in enumerate(batches, start=1):
            with self.reducing(last=number == len(batches)):
                loss = self.model(batch) / len(batches)
                self.backward(loss)
            total += loss.detach()
        return total

    def step(self) -> None:
        """Step, and let go of the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self) -> dict[str, int]:
        """Bytes held on this rank now, by owner, every storage counted once."""
        return held_bytes(self.tensors())

    # ---- what a library does its own way ----

    def handed_over(self) -> float:
        """Bytes that this rank has handed to others so far, by the library's own account; NaN where it has none."""
        return float("nan")

    def reducing(self, last: bool) -> AbstractContextManager[object]:
        """The context of one micro-batch."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Backward through a micro-batch's loss."""
        torch.autograd.backward(loss)

    def tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """What lives from one step to the next, or from backward to the step, by owner."""
        parameters = list(self.model.parameters())
        return {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "states": state_tensors(self.optimizer),
        }


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """The tensors in an optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def account(model: nn.Module, inner: Optimizer, *roots: object) -> Mapping[str, Iterable[Tensor]]:
    """For a library that keeps tensors in places of its own: all that ``model``, ``inner`` and ``roots`` lead to."""
    return {
        "parameters": list(model.parameters()),
        "states": state_tensors(inner),
        "whatever else": list(reachable_tensors(model, inner, *roots)),
    }
