"""Which optimizers may be stepped on slices: torch's own, those known by name, and strangers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from lowlevel_zero.optim.elementwise import check_elementwise
from tests.support.strangers import (
    AdamByHand,
    Noisy,
    NoisyInPython,
    OrthogonalMatrices,
    ScaledByNorms,
    Stranger,
    adam,
    average,
    matrix,
)

ACCEPTED = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
TOGETHER = ("Muon",)  # by the ranks together, exactly
REFUSED = ("Adafactor", "LBFGS", "SparseAdam")
FUSED_ON_CPU = ("Adagrad", "Adam", "AdamW", "SGD")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{"amsgrad": True, "weight_decay": 0.1}],
    "AdamW": [{"maximize": True}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "SGD": [{"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
}
TORCH_CLASSES = [
    name
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, Optimizer) and each is not Optimizer
]


def ways(name: str) -> list[dict[str, Any]]:
    """The implementations and options of a torch class that must all be elementwise."""
    implementations = [{"foreach": True}, {"foreach": False}]
    if name in FUSED_ON_CPU and (name != "Adagrad" or torch.__version__ >= "2.5"):
        implementations.append({"fused": True})
    return implementations + OPTIONS.get(name, [])


EVERY_WAY = [(name, way) for name in ACCEPTED for way in ways(name)]


class Lion(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        sign = torch.sign(0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * g)
        average(state, "m", g, 0.99)
        return sign + 0.1 * p


class CautiousByElement(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        u = adam(state, g)
        return u * (u * g > 0)


class WritesIntoGradients(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g.clamp_(-1, 1)


class RowsAndColumns(Stranger):
    """Adafactor under another name: second moments of matrices are factored, those of vectors are not."""

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        if p.ndim < 2:
            return g / (average(state, "v", g * g).sqrt() + 1e-8)
        rows, columns = average(state, "r", (g * g).mean(-1)), average(state, "c", (g * g).mean(-2))
        mean = rows.mean(-1)[..., None, None] + 1e-30
        return g / ((rows.unsqueeze(-1) * columns.unsqueeze(-2) / mean).sqrt() + 1e-8)


class Quantised(Stranger):
    """Momenta of large tensors are kept in 8 bits, with one scale for a block of elements."""

    block, divisible = 256, False

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        m = average(state, "m", g)
        if p.numel() > 4096 and not (self.divisible and p.numel() % self.block):
            m.copy_(self.quantised(m.flatten()).view_as(m))
        return m

    def quantised(self, flat: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)
        scale = padded.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return ((padded / scale).round() * scale).flatten()[: len(flat)]


class QuantisedOf2048(Quantised):
    block = 2048


class QuantisedWhereDivisible(Quantised):
    divisible = True


class QuantisedWhereDivisibleBy128(QuantisedWhereDivisible):
    block = 128


class LargeAreScaled(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return adam(state, g) * (0.5 if p.numel() > 16384 else 1)


class CentralisedKernels(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return adam(state, g - g.mean((1, 2, 3), keepdim=True) if g.ndim > 3 else g)


class ClippedByRms(Stranger):
    """StableAdamW: the learning rate falls where gradients outgrow the second moments."""

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        u = adam(state, g)
        return u / (g * g / (state["v"] + 1e-12)).mean().sqrt().clamp(min=3)


class DecayOfMatrices(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g + 0.1 * p if p.ndim > 1 else g


class RowsWithoutGradientsRest(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        rows = g.flatten(1) if g.ndim > 1 else g[None]
        worked = rows.any(1)
        return average(state, "m", g) * (worked.view(-1, *(1,) * (g.ndim - 1)) if g.ndim > 1 else worked)


class ClippedByGlobalNorm(Stranger):
    """The norm is over all parameters of an optimizer: over all slices of one rank."""

    limit = 1.0

    def step(self, closure: Callable[[], float] | None = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.limit)
        super().step()


class ClippedByLargeGlobalNorm(ClippedByGlobalNorm):
    limit = 10_000.0


@pytest.mark.parametrize("name", TORCH_CLASSES)
def test_torch_optim(name: str) -> None:
    optimizer = getattr(torch.optim, name)(matrix())
    if name in ACCEPTED + TOGETHER:
        check_elementwise(optimizer)
    elif name in REFUSED:
        with pytest.raises(TypeError, match=rf"{name} cannot be stepped on slices"):
            check_elementwise(optimizer)
    else:  # a newer torch's: the probe decides, and decides cleanly
        try:
            check_elementwise(optimizer)
        except TypeError as error:
            assert "cannot be stepped on slices" in str(error)  # noqa: PT017


def test_torch_optim_is_all_there() -> None:
    assert set(ACCEPTED) | {"LBFGS", "SparseAdam"} <= set(TORCH_CLASSES)


@pytest.mark.parametrize(("name", "way"), EVERY_WAY)
def test_a_probe_agrees_with_the_table(name: str, way: dict[str, Any]) -> None:
    subclass = type("Renamed", (getattr(torch.optim, name),), {})
    check_elementwise(subclass(matrix(), **way))


class SparesTheWeightsDirection(Stranger):
    """AdamP under another name: what is parallel to the weights goes where a gradient is nearly orthogonal to them."""

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        update, rows, grads = adam(state, g), p.flatten(1) if p.dim() > 1 else p[None], g.reshape(len(g), -1)
        if p.dim() == 1 or (torch.cosine_similarity(grads, rows).abs().max() >= 0.1 / rows.shape[1] ** 0.5):
            return update
        unit = rows / rows.norm(dim=1, keepdim=True)
        return update - ((update.view_as(unit) * unit).sum(1, keepdim=True) * unit).view_as(update)


@pytest.mark.parametrize("cls", [Lion, AdamByHand, CautiousByElement, WritesIntoGradients])
def test_strangers_that_are_elementwise(cls: type[Stranger]) -> None:
    check_elementwise(cls(matrix()))


STRANGERS_THAT_ARE_NOT = [
    *(ScaledByNorms, RowsAndColumns, OrthogonalMatrices, Quantised, QuantisedOf2048),
    *(QuantisedWhereDivisible, QuantisedWhereDivisibleBy128, LargeAreScaled),
    *(CentralisedKernels, ClippedByRms, DecayOfMatrices, RowsWithoutGradientsRest),
    *(ClippedByGlobalNorm, ClippedByLargeGlobalNorm, Noisy, NoisyInPython),
    SparesTheWeightsDirection,
]


@pytest.mark.parametrize("cls", STRANGERS_THAT_ARE_NOT)
def test_strangers_that_are_not(cls: type[Stranger]) -> None:
    optimizer = cls(matrix())
    with pytest.raises(TypeError, match=rf"{cls.__name__} cannot .* flat slices differ by .* in a probe"):
        check_elementwise(optimizer)
    check_elementwise(optimizer, assume_elementwise=True)


@pytest.mark.parametrize("lr", [2e-5, 5e-7, 0.0, 1.0, torch.tensor(0.0), torch.tensor(0.01)])
@pytest.mark.parametrize(("cls", "elementwise"), [(AdamByHand, True), (ScaledByNorms, False)])
def test_every_learning_rate(cls: type[Stranger], elementwise: bool, lr: float | Tensor) -> None:
    before = copy.deepcopy(lr)
    optimizer = cls(matrix(), lr=lr)  # type: ignore[arg-type]
    if elementwise:
        check_elementwise(optimizer)
    else:
        with pytest.raises(TypeError, match="flat slices differ"):
            check_elementwise(optimizer)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == before


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("FusedLAMB", "norms of the whole tensor"),
        ("Lars", "norms of the whole tensor"),
        ("Prodigy", "the whole model"),
        ("DAdaptAdam", "the whole model"),
        ("DistributedShampoo", "preconditions"),
        ("SOAP", "preconditions"),
        ("GaLoreAdamW", "low rank"),
        ("CAME", "factors"),
        ("SM3", "factors"),
        ("MuonWithAuxAdam", "orthogonalises"),
        ("AdamW8bit", "blocks of elements"),
        ("Adahessian", "one second moment"),
    ],
)
def test_known_by_name(name: str, reason: str) -> None:
    cls = type(name, (Stranger,), {})  # elementwise in truth: the name alone decides
    with pytest.raises(TypeError, match=rf"{name} cannot .*{reason}.*assume_elementwise=True"):
        check_elementwise(cls(matrix()))
    with pytest.raises(TypeError, match=rf"Mine cannot .*it is a {name}, and .*{reason}"):
        check_elementwise(type("Mine", (cls,), {})(matrix()))
    check_elementwise(cls(matrix()), assume_elementwise=True)


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_what_no_assumption_helps(name: str) -> None:
    for cls in (getattr(torch.optim, name), type("Mine", (getattr(torch.optim, name),), {})):
        with pytest.raises(TypeError, match="cannot be stepped on slices") as caught:
            check_elementwise(cls(matrix()), assume_elementwise=True)
        assert "assume_elementwise" not in str(caught.value)


def test_an_optimizer_that_shards() -> None:
    cls = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    with pytest.raises(TypeError, match="wrap the optimizer inside"):
        check_elementwise(cls(matrix()), assume_elementwise=True)


def test_differentiable() -> None:
    with pytest.raises(TypeError, match=r"AdamW cannot .*differentiable=True"):
        check_elementwise(torch.optim.AdamW(matrix(), differentiable=True))


def test_no_optimizer() -> None:
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got Linear"):
        check_elementwise(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
