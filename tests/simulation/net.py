"""The model of a part, its batches and its loss: small, smooth, and with gradients that feel every weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.simulation.calls import BOTH, WITH_LOSS, all_calls
from tests.simulation.program import NOTHING, Part, Program, Weight

SCALE = 2.0**8  # of fp16 losses
LEARNING_RATE = 0.125


class OwnSGD(torch.optim.SGD):
    """A class of the user's own, which treats elements alone, as a probe has to find out."""


class Normalized(torch.optim.Optimizer):
    """Momentum of gradients divided by norms: of each parameter, which is stepped whole, or each matrix of a stack."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the parameters that have a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    norm = p.grad.norm(dim=(1, 2) if p.dim() == 3 else None, keepdim=True)
                    average.mul_(0.5).add_(p.grad / (norm + 1.0))
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(average, alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=0.5),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=0.1),
    "fused adamw": lambda groups: torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=0.1, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=LEARNING_RATE, initial_accumulator_value=0.1),
    "own sgd": lambda groups: OwnSGD(groups, lr=LEARNING_RATE, momentum=0.5),
    "normalized": lambda groups: Normalized(groups, lr=LEARNING_RATE),
}


class Net(nn.Module):
    """Residual layers of weights of any shape, and a state of the user's own, which may refuse to be loaded."""

    refuses: Exception | None = None

    def __init__(self, part: Part, seed: int) -> None:
        super().__init__()
        self.weights = Weights(initial_values(part, seed))

    def get_extra_state(self) -> str:
        """What checkpoints have beside the weights."""
        return "the user's own"

    def set_extra_state(self, state: str) -> None:
        """Take it, or raise what was asked for."""
        if self.refuses is not None:
            raise self.refuses

    def __getitem__(self, at: int) -> nn.Parameter:
        return self.weights[at]


class Weights(nn.Module):
    """Parameters named by their numbers: an ``nn.ParameterList`` that is quick to build and to look into."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._in_order = list(parameters)
        for at, p in enumerate(self._in_order):
            self.register_parameter(str(at), p)

    def __getitem__(self, at: int) -> nn.Parameter:
        return self._in_order[at]

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._in_order)


def initial_values(part: Part, seed: int) -> list[nn.Parameter]:
    """The parameters of a new model of a part."""
    generator = torch.Generator().manual_seed(seed)
    return [_made(weight, generator, part.nudge) for weight in part.weights]


def _made(weight: Weight, generator: torch.Generator, nudge: float) -> nn.Parameter:
    shape = weight.shape[::-1] if weight.transposed else weight.shape
    values = ((1 + nudge) * torch.randn(shape, generator=generator)).to(dtype_of(weight))
    flipped = values.permute(tuple(reversed(range(values.dim())))) if weight.transposed else values
    return nn.Parameter(flipped, requires_grad=weight.role == "trained")


def dtype_of(weight: Weight) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, weight.dtype)
    return dtype


class Batch(NamedTuple):
    """What one rank's backward computes with: a number, and a factor for each weight, of its shape and dtype."""

    start: float
    factors: list[Tensor]


class Batches:
    """The batches of a program, by part, place and rank: the same for the ranks and for the reference."""

    def __init__(self, program: Program) -> None:
        self._parts = program.parts
        self._numels = [[math.prod(weight.shape) for weight in part.weights] for part in program.parts]
        self._made: dict[tuple[int, int, int], Batch] = {}
        ways = ((rank, refused) for rank in range(program.ranks) for refused in (False, True))
        for rank, refused in ways:  # now, since what ranks make is looked for when they have ended
            for place, call in enumerate(all_calls(program, rank, refused)):
                if call is not None and call.name in WITH_LOSS:
                    for number in range(len(program.parts)) if call.name in BOTH else [call.of]:
                        self._made[number, place, rank] = self._draw(number, place, rank)

    def of(self, number: int, place: int, rank: int) -> Batch:
        return self._made[number, place, rank]

    def _draw(self, number: int, place: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(1 + number + 2 * (rank + 8 * place))
        numels = self._numels[number]
        start, *factors = torch.randn(1 + sum(numels), generator=generator).split([1, *numels])
        shaped = zip(factors, numels, self._parts[number].weights, strict=True)
        return Batch(
            float(start),
            [
                (factor / max(1, numel) ** 0.5).view(weight.shape).to(dtype_of(weight))
                for factor, numel, weight in shaped
            ],
        )


# A layer adds to a number, for each of its weights, half the sine of that number and the weight's product with its
# factor. The loss is the square of the last number.


def loss_of(part: Part, weights: Sequence[Tensor], drops: int, batch: Batch, hidden: Tensor | None = None) -> Tensor:
    """The loss of one rank's batch; ``drops``: layers that are left out; ``hidden``: what goes into the first."""
    last = run_layers(part, weights, drops, batch, hidden)
    return last * last


def run_layers(part: Part, weights: Sequence[Tensor], drops: int, batch: Batch, hidden: Tensor | None = None) -> Tensor:
    """The number that comes out of the layers."""
    last = torch.full((), batch.start, dtype=torch.float64) if hidden is None else hidden
    if part.recomputed and not last.requires_grad:  # else no gradient would be computed
        last = last.detach().requires_grad_()
    for members in layers_of(part, drops):
        run = partial(_run_layer, members, weights, batch)
        last = checkpoint(run, last, use_reentrant=True) if part.recomputed else run(last)
    return last


def _run_layer(members: Sequence[int], weights: Sequence[Tensor], batch: Batch, last: Tensor) -> Tensor:
    for at in members:
        product = (weights[at] * batch.factors[at]).sum(dtype=torch.float64)
        last = torch.add(last, torch.sin(last + product), alpha=0.5)
    return last


def layers_of(part: Part, drops: int) -> list[tuple[int, ...]]:
    """The weights that a loss uses, by layer, one after the other."""
    return [] if drops == NOTHING else [each for place, each in enumerate(part.layers) if not drops >> place & 1]


class Use(NamedTuple):
    """One use of a weight: its key, its factor, and what is taken the cosine of."""

    weight: int
    factor: Tensor
    angle: float


@torch.no_grad()
def forward(part: Part, weights: Sequence[Tensor], drops: int, batch: Batch, start: float) -> tuple[float, list[Use]]:
    """The same by hand: what comes out of the layers that ``start`` goes into, and what its derivatives follow from."""
    found = []
    for at in chain.from_iterable(layers_of(part, drops)):
        angle = start + (weights[at] * batch.factors[at]).sum(dtype=torch.float64).item()
        found.append(Use(at, batch.factors[at], angle))
        start += 0.5 * math.sin(angle)
    return start, found


def derivatives(uses: Sequence[Use], slope: float) -> tuple[float, list[tuple[int, Tensor]]]:
    """By hand, the derivative before the layers and those of the weights, from the ``slope`` behind the layers."""
    found = []
    for weight, factor, angle in reversed(uses):
        inner = 0.5 * math.cos(angle) * slope
        found.append((weight, factor * inner))
        slope += inner
    return slope, found


def groups_of(part: Part, weights: list[Any], late: bool = False) -> list[dict[str, Any]]:
    """The param groups of a fresh optimizer over ``weights``, which may be None: not this rank's."""
    groups: list[dict[str, Any]] = [{"params": [], **settings_of(at)} for at in range(part.groups)]
    for weight, p in zip(part.weights, weights, strict=True):
        if weight.role != "late" and p is not None:
            groups[weight.group % part.groups]["params"].append(p)
    return groups


def late_group(part: Part, weights: list[Any]) -> dict[str, Any]:
    """What joins by ``add_param_group``."""
    return {"params": [weights[at] for at in part.late if weights[at] is not None], **settings_of(part.groups)}


def settings_of(group: int) -> dict[str, float]:
    """The settings that a param group starts with."""
    return {"weight_decay": 0.1 / (1 + group), "lr": LEARNING_RATE / (1 + group)}
