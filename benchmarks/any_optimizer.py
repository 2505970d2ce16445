"""The table of docs/any-optimizer.md: many optimizers, each trained on two ranks and in one process.

Needs the packages of requirements-trainers.lock. Prints the table::

    python -m benchmarks.any_optimizer
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lowlevel_zero.testing import assert_trains_alike

HEAD = (
    "optimizer",
    "split",
    "two ranks against one process",
    "bytes sent in a step",
    "state bytes of each rank",
)
_STEPS = 6
_TOLERANCE = 1e-4  # of a parameter's way


class Small(nn.Module):
    """The parameters of two small transformer blocks, a convolution and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(nn.ModuleDict(_block(16)) for _ in range(2))
        self.conv = nn.Conv2d(2, 4, 3)


class Wide(nn.Module):
    """Parameters that are large enough for their states to be quantised, and one that isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.out = nn.Embedding(96, 64), nn.Linear(64, 192), nn.Linear(64, 8)


def _block(width: int) -> dict[str, nn.Module]:
    return {
        "norm": nn.LayerNorm(width),
        "qkv": nn.Linear(width, 3 * width),
        "out": nn.Linear(width, width),
        "up": nn.Linear(width, 4 * width),
        "down": nn.Linear(4 * width, width),
    }


class Matrices(nn.Module):
    """The matrices of it alone, which ``torch.optim.Muon`` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(p for p in Small().parameters() if p.dim() == 2)


def cases() -> Iterator[tuple[str, Callable[[nn.Module], Optimizer], type[nn.Module], dict[str, Any]]]:
    """Yield a name, a maker of an optimizer, a model, and further arguments for the wrapper."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes
        import pytorch_optimizer
        import schedulefree
        import torchao.optim
    yield "`torch.optim.AdamW`", partial(_of_parameters, torch.optim.AdamW), Small, {}
    yield "`torch.optim.Adafactor`", partial(_of_parameters, torch.optim.Adafactor), Small, {}
    if hasattr(torch.optim, "Muon"):
        yield "`torch.optim.Muon`", partial(_of_parameters, torch.optim.Muon), Matrices, {}
    names = "SOAP Shampoo ScalableShampoo CAME LARS Lamb NovoGrad AdamP SGDP Adan StableAdamW"
    for name in names.split():
        yield f"`pytorch_optimizer.{name}`", partial(_of_parameters, getattr(pytorch_optimizer, name)), Small, {}
    mini = partial(pytorch_optimizer.AdamMini, lr=1e-2, num_heads=2)
    yield '`pytorch_optimizer.AdamMini`, `split="parameters"`', mini, Small, {"split": "parameters"}
    yield "`schedulefree.AdamWScheduleFree`", partial(_of_parameters, schedulefree.AdamWScheduleFree), Small, {}
    for cls in (torch.optim.AdamW, torchao.optim.AdamW8bit, bitsandbytes.optim.AdamW8bit):
        name, is_small = f"{cls.__module__.partition('.')[0]}.optim.{cls.__name__}", cls is torch.optim.AdamW
        model = Small if is_small else Wide
        yield f'`{name}`, `split="parameters"`', partial(_of_parameters, cls), model, {"split": "parameters"}


def _of_parameters(cls: Callable[..., Optimizer], model: nn.Module) -> Optimizer:
    return cls(model.parameters(), lr=1e-2)


def row(
    name: str, make: Callable[[nn.Module], Optimizer], model: type[nn.Module], options: dict[str, Any]
) -> list[str]:
    """Return the cells of one optimizer; ``AssertionError`` where it doesn't train alike."""
    # torchao would compile its steps, for minutes.
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        found = assert_trains_alike(make, model, _STEPS, tolerance=_TOLERANCE, stage=2, **options)
    exact = "bit for bit" if found.difference == 0 else f"off by {found.difference:.0e} of the way"
    return [name, *dict.fromkeys(found.splits), exact, f"{found.sent:,.0f}", " / ".join(f"{n:,}" for n in found.states)]


def line(cells: Sequence[str]) -> str:
    """Return a line of the table."""
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    print(line(HEAD), line(["---"] * len(HEAD)), sep="\n")
    for case in cases():
        print(line(row(*case)), flush=True)


if __name__ == "__main__":
    main()
