"""How parameters are split for an optimizer: torch's own, those known by name, and strangers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from lowlevel_zero.optim.probe import probe_elements
from lowlevel_zero.optim.splits import choose_splits
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
WHOLE = ("Adafactor", "Muon")
REFUSED = ("LBFGS", "SparseAdam")
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
    implementations: list[dict[str, Any]] = [{}, {"foreach": True}]
    if name in FUSED_ON_CPU and (name != "Adagrad" or torch.__version__ >= "2.5"):
        implementations.append({"fused": True})
    return implementations + OPTIONS.get(name, [])


EVERY_WAY = [(name, way) for name in ACCEPTED for way in ways(name)]


Direction = Callable[..., Tensor]


def directed(direction: Direction) -> type[Stranger]:
    """A class that takes its direction from a function of parameter, gradient, state and group."""
    return type(direction.__name__, (Stranger,), {"direction": lambda self, *of: direction(*of)})


@directed
def Lion(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    sign = torch.sign(0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * g)
    average(state, "m", g, 0.99)
    return sign + 0.1 * p


@directed
def CautiousByElement(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    u = adam(state, g)
    return u * (u * g > 0)


@directed
def WritesIntoGradients(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    return g.clamp_(-1, 1)


@directed
def RowsAndColumns(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    """Adafactor under another name: second moments of matrices are factored, those of vectors are not."""
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


@directed
def LargeAreScaled(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    return adam(state, g) * (0.5 if p.numel() > 16384 else 1)


@directed
def CentralisedKernels(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    return adam(state, g - g.mean((1, 2, 3), keepdim=True) if g.ndim > 3 else g)


@directed
def ClippedByRms(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    """StableAdamW: the learning rate falls where gradients outgrow the second moments."""
    u = adam(state, g)
    return u / (g * g / (state["v"] + 1e-12)).mean().sqrt().clamp(min=3)


@directed
def DecayOfMatrices(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    return g + 0.1 * p if p.ndim > 1 else g


@directed
def LittleDecayOfMatrices(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    return g + 1e-5 * p if p.ndim > 1 else g


@directed
def ScaledIfTall(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    """As Muon does."""
    return g.sign() * max(1, len(p) / p.shape[1]) ** 0.5 if p.ndim == 2 else g.sign()


@directed
def CentralisedIfWide(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    return adam(state, g - g.mean() if p.ndim == 2 and len(p) < p.shape[1] else g)


@directed
def RowsWithoutGradientsRest(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
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
    if name in ACCEPTED:
        assert choose_splits(optimizer) == ["elements"]
    elif name in WHOLE:
        assert choose_splits(optimizer) == ["parameters"]
    elif name in REFUSED:
        with pytest.raises(TypeError, match=rf"{name} cannot be sharded"):
            choose_splits(optimizer)
    else:  # a newer torch's: the probe decides, and decides cleanly
        try:
            choose_splits(optimizer)
        except TypeError as error:
            assert "cannot be sharded" in str(error)  # noqa: PT017


def test_torch_optim_is_all_there() -> None:
    assert set(ACCEPTED) | {"LBFGS", "SparseAdam"} <= set(TORCH_CLASSES)


@pytest.mark.parametrize(("name", "way"), EVERY_WAY)
def test_a_probe_agrees_with_the_table(name: str, way: dict[str, Any]) -> None:
    subclass = type("Renamed", (getattr(torch.optim, name),), {})
    assert choose_splits(subclass(matrix(), **way)) == ["elements"]


@directed
def SparesTheWeightsDirection(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    """AdamP under another name: what is parallel to the weights goes where a gradient is nearly orthogonal to them."""
    update, rows, grads = adam(state, g), p.flatten(1) if p.dim() > 1 else p[None], g.reshape(len(g), -1)
    if p.dim() == 1 or (torch.cosine_similarity(grads, rows).abs().max() >= 0.1 / rows.shape[1] ** 0.5):
        return update
    unit = rows / rows.norm(dim=1, keepdim=True)
    return update - ((update.view_as(unit) * unit).sum(1, keepdim=True) * unit).view_as(update)


@pytest.mark.parametrize("cls", [Lion, AdamByHand, CautiousByElement, WritesIntoGradients])
def test_strangers_that_are_elementwise(cls: type[Stranger]) -> None:
    assert choose_splits(cls(matrix())) == ["elements"]


THAT_LOOK_AROUND = (ClippedByGlobalNorm, ClippedByLargeGlobalNorm, Noisy, NoisyInPython)
STRANGERS_THAT_ARE_NOT = [
    *(ScaledByNorms, RowsAndColumns, OrthogonalMatrices, Quantised, QuantisedOf2048),
    *(QuantisedWhereDivisible, QuantisedWhereDivisibleBy128, LargeAreScaled),
    *(CentralisedKernels, ClippedByRms, DecayOfMatrices, LittleDecayOfMatrices, RowsWithoutGradientsRest),
    *(ScaledIfTall, CentralisedIfWide),
    *(ClippedByGlobalNorm, ClippedByLargeGlobalNorm, Noisy, NoisyInPython),
    SparesTheWeightsDirection,
]


@pytest.mark.parametrize("cls", STRANGERS_THAT_ARE_NOT)
def test_strangers_that_are_not(cls: type[Stranger]) -> None:
    optimizer = cls(matrix())
    assert re.search("flat slices differ by .* in a probe", str(probe_elements(optimizer)))
    if cls in THAT_LOOK_AROUND:
        with pytest.raises(TypeError, match=rf"{cls.__name__} cannot .* beside others and without them differs by"):
            choose_splits(optimizer)
    else:
        assert choose_splits(optimizer) == ["parameters"]
    assert choose_splits(optimizer, "elements") == ["elements"]
    assert choose_splits(optimizer, "parameters") == ["parameters"]


@pytest.mark.parametrize("dim", [3, 5, 7])
def test_a_rule_for_as_many_dimensions_as_a_parameter_has_is_found(dim: int) -> None:
    @directed
    def CentralisedByDimension(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
        return adam(state, g - g.mean() if p.ndim == dim else g)

    others = [*matrix(), torch.nn.Parameter(torch.ones(4))]
    assert choose_splits(CentralisedByDimension(others)) == ["elements"]
    kernel = torch.nn.Parameter(torch.ones((2,) * dim))
    assert choose_splits(CentralisedByDimension([*others, kernel])) == ["parameters"]


@directed
def FactoredIfLarge(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    """Second moments of matrices are factored where both sides are large, as optax does."""
    if p.ndim < 2 or min(p.shape) < 256:
        return adam(state, g)
    rows, columns = average(state, "r", (g * g).mean(-1)), average(state, "c", (g * g).mean(-2))
    return g / ((rows[:, None] * columns / rows.mean()).sqrt() + 1e-8)


@directed
def CentralisedIfLarge(p: Tensor, g: Tensor, state: Any, group: Any) -> Tensor:
    return adam(state, g - g.mean() if p.numel() > 120_000 else g)


LARGE: list[tuple[type[Stranger], list[tuple[int, ...]], str]] = [
    (FactoredIfLarge, [(300, 300)], "parameters"),
    (FactoredIfLarge, [(50_000, 128), (768, 256), (768,)], "parameters"),
    (FactoredIfLarge, [(50_000, 128), (768,)], "elements"),
    (CentralisedIfLarge, [(10**6,)], "parameters"),
    (CentralisedIfLarge, [(512, 256, 3, 3)], "parameters"),
    (AdamByHand, [(10**6, 10**6), (1, 10**9), (), (0, 3)], "elements"),
]


@pytest.mark.parametrize(("cls", "shapes", "split"), LARGE)
def test_a_rule_for_large_parameters_is_found(cls: type[Stranger], shapes: list[tuple[int, ...]], split: str) -> None:
    others = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    assert choose_splits(cls([{"params": matrix()}, {"params": others, "decay": 0.1}])) == [split] * 2


@pytest.mark.parametrize("chosen", ["elements", None])
def test_a_group_s_own_split_comes_before_that_of_all(chosen: str | None) -> None:
    first, second = ([torch.nn.Parameter(torch.zeros(2, 3))] for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": first, "split": "parameters"}, {"params": second}])
    assert choose_splits(optimizer, chosen) == ["parameters", "elements"]


class HoldsAndScales(ScaledByNorms):
    """Steps the parameters that it was made with, which a rank's own aren't."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)
        self.all = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for p in self.all:
            if p.grad is not None:
                p.sub_(1e-3 * self.direction(p, p.grad, self.state[p], {}))


class CountsBusySteps(ScaledByNorms):
    """Its rate falls with the steps in which some parameter had a gradient: a rank may own none that had."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        group = self.param_groups[0]
        group["busy"] = group.get("busy", 0) + any(p.grad is not None for p in group["params"])
        for p in (each for each in group["params"] if each.grad is not None):
            p.sub_(group["lr"] / group["busy"] * self.direction(p, p.grad, self.state[p], group))


class ScalesSomeById(ScaledByNorms):
    """Remembers the ids of parameters that it steps by their norms, which no fresh parameter of a probe has."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)
        self.scaled = {id(p) for group in self.param_groups for p in group["params"][::2]}

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return super().direction(p, g, state, group) if id(p) in self.scaled else g.sign()


LIST = "expected {} to find its parameters in param_groups, .* found a separate list in .{}: let it loop over"


@pytest.mark.parametrize(
    ("cls", "told"),
    [
        (HoldsAndScales, LIST.format("HoldsAndScales", "all")),
        (ScalesSomeById, LIST.format("ScalesSomeById", "scaled")),
        (CountsBusySteps, "CountsBusySteps cannot be sharded"),
    ],
)
def test_what_no_rank_can_step_alone(cls: type[Stranger], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        choose_splits(cls([*matrix(), *matrix()]))


def test_groups_may_differ() -> None:
    groups = [{"params": matrix(), "split": "elements"}, {"params": matrix(), "split": "parameters"}]
    assert choose_splits(AdamByHand([*groups, {"params": matrix()}])) == ["elements", "parameters", "elements"]
    assert choose_splits(AdamByHand([*groups, {"params": matrix()}]), "parameters")[2] == "parameters"
    with pytest.raises(
        ValueError, match="split of param group 0: expected None, 'elements', 'parameters' or 'matrices', got 'ro"
    ):
        choose_splits(AdamByHand([{"params": matrix(), "split": "rows"}]))


LRS = [2e-5, 5e-7, 0.0, 1.0, torch.tensor(0.0), torch.tensor(0.01)]


@pytest.mark.parametrize(("lr", "cls"), list(zip(LRS, [AdamByHand, ScaledByNorms] * 3, strict=True)))
def test_every_learning_rate(cls: type[Stranger], lr: float | Tensor) -> None:
    before = copy.deepcopy(lr)
    optimizer = cls(matrix(), lr=lr)  # type: ignore[arg-type]
    found = probe_elements(optimizer)
    assert found is None if cls is AdamByHand else "flat slices differ" in str(found)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == before


@pytest.mark.parametrize(
    ("name", "split", "reason"),
    [
        ("FusedLAMB", "parameters", "norms of the whole tensor"),
        ("Lars", "parameters", "norms of the whole tensor"),
        ("Prodigy", "", "the whole model"),
        ("DAdaptAdam", "", "the whole model"),
        ("SWATS", "", "late in a run"),
        ("DistributedShampoo", "parameters", "preconditions"),
        ("SOAP", "parameters", "preconditions"),
        ("GaLoreAdamW", "parameters", "low rank"),
        ("CAME", "parameters", "factors"),
        ("SM3", "parameters", "factors"),
        ("MuonWithAuxAdam", "parameters", "orthogonalises"),
        ("AdamW8bit", "parameters", "blocks of elements"),
    ],
)
def test_known_by_name(name: str, split: str, reason: str) -> None:
    cls = type(name, (Stranger,), {})  # elementwise in truth: the name alone decides
    mine = type("Mine", (cls,), {})
    if split:
        assert choose_splits(cls(matrix())) == choose_splits(mine(matrix())) == [split]
    else:
        with pytest.raises(TypeError, match=rf"{name} cannot .*{reason}.*split='elements'"):
            choose_splits(cls(matrix()))
        with pytest.raises(TypeError, match=rf"Mine cannot .*it is a {name}, and .*{reason}"):
            choose_splits(mine(matrix()))
    assert choose_splits(cls(matrix()), "elements") == ["elements"]


def test_kernels_that_cannot_be_tried_on_the_host_are_known_by_their_full_names() -> None:
    class FusedAdam(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("expected CUDA tensors")

    with pytest.raises(TypeError, match="could not be tried|expected CUDA"):
        choose_splits(FusedAdam(matrix()))
    FusedAdam.__module__, FusedAdam.__qualname__ = "apex.optimizers.fused_adam", "FusedAdam"
    assert choose_splits(FusedAdam(matrix())) == ["elements"]


def with_a_step_of_its_own() -> Optimizer:
    optimizer = torch.optim.LBFGS(matrix())
    plain = optimizer.step
    optimizer.step = lambda closure: plain(closure)  # type: ignore[method-assign]
    return optimizer


NEVER: dict[str, tuple[Callable[[], Any], str]] = {
    **{name: (lambda name=name: getattr(torch.optim, name)(matrix()), "cannot be sharded") for name in REFUSED},
    **{
        f"a subclass of {name}": (
            lambda name=name: type("Mine", (getattr(torch.optim, name),), {})(matrix()),
            "cannot be sharded",
        )
        for name in REFUSED
    },
    "an LBFGS whose step was replaced": (with_a_step_of_its_own, "LBFGS cannot be sharded: it needs a closure"),
    "one that shards": (
        lambda: type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})(matrix()),
        "wrap the optimizer inside",
    ),
    "differentiable": (
        lambda: torch.optim.AdamW(matrix(), differentiable=True),
        r"AdamW cannot .*differentiable=True",
    ),
    "no optimizer": (lambda: torch.nn.Linear(1, 1), r"expected a torch.optim.Optimizer, got Linear"),
}


@pytest.mark.parametrize("case", NEVER)
def test_what_no_choice_helps(case: str) -> None:
    make, message = NEVER[case]
    for chosen in (None, "elements", "parameters"):
        with pytest.raises(TypeError, match=message) as caught:
            choose_splits(make(), chosen)
        assert "split=" not in str(caught.value)


class KeepsMore(torch.optim.Optimizer):
    """A momentum whose state is a tensor of another shape, or in a dict."""

    def __init__(self, params: Any, lr: float = 1e-2, nested: bool = False) -> None:
        super().__init__(params, {"lr": lr, "nested": nested})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    both = p.new_zeros(2, *p.shape)
                    state["momenta"] = {"fast": both[0].clone(), "slow": both[1].clone()} if group["nested"] else both
                momenta = state["momenta"]
                for key, beta in zip(momenta if group["nested"] else range(2), (0.5, 0.9), strict=True):
                    momenta[key].mul_(beta).add_(p.grad)
                    p.sub_(momenta[key], alpha=group["lr"])


@pytest.mark.parametrize("nested", [False, True])
def test_states_that_slices_cannot_be_joined_to_ask_for_whole_parameters(nested: bool) -> None:
    """Their steps are elementwise."""
    assert choose_splits(KeepsMore(matrix(), nested=nested)) == ["parameters"]
