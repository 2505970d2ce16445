"""Which optimizers may be stepped on slices: torch's own, and strangers, of which a probe changes nothing."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowlevel_zero.optim.elementwise import check_elementwise

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


def matrix() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 4))]


def ways(name: str) -> list[dict[str, Any]]:
    """The implementations and options of a torch class that must all be elementwise."""
    implementations = [{"foreach": True}, {"foreach": False}]
    if name in FUSED_ON_CPU and (name != "Adagrad" or torch.__version__ >= "2.5"):
        implementations.append({"fused": True})
    return implementations + OPTIONS.get(name, [])


EVERY_WAY = [(name, way) for name in ACCEPTED for way in ways(name)]


class Stranger(Optimizer):
    """An optimizer that a class below tells only a direction to go."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * self.direction(p, p.grad, self.state[p], group))

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g


def average(state: dict[str, Any], key: str, value: Tensor, beta: float = 0.9) -> Tensor:
    """An exponential average, kept in the state."""
    mean = state.setdefault(key, torch.zeros_like(value)).lerp_(value, 1 - beta)
    assert isinstance(mean, Tensor)
    return mean


def adam(state: dict[str, Any], g: Tensor) -> Tensor:
    return average(state, "m", g) / (average(state, "v", g * g, 0.99).sqrt() + 1e-8)


# Strangers that are elementwise


class Lion(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        sign = torch.sign(0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * g)
        average(state, "m", g, 0.99)
        return sign + 0.1 * p


class SignMomentum(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return average(state, "m", g).sign()


class AdamByHand(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return adam(state, g)


class CautiousByElement(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        u = adam(state, g)
        return u * (u * g > 0)


class WritesIntoGradients(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g.clamp_(-1, 1)


# Strangers that are not


class ScaledByNorms(Stranger):
    """LAMB under another name."""

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        u = adam(state, g)
        return u * (p.norm() / u.norm()).clamp(max=10)


class RowsAndColumns(Stranger):
    """Adafactor under another name: second moments of matrices are factored, those of vectors are not."""

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        if p.ndim < 2:
            return g / (average(state, "v", g * g).sqrt() + 1e-8)
        rows, columns = average(state, "r", (g * g).mean(-1)), average(state, "c", (g * g).mean(-2))
        mean = rows.mean(-1)[..., None, None] + 1e-30
        return g / ((rows.unsqueeze(-1) * columns.unsqueeze(-2) / mean).sqrt() + 1e-8)


class OrthogonalMatrices(Stranger):
    """Muon under another name: matrices are orthogonalised, all else is Adam's."""

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        if p.ndim != 2 or not group.get("whiten", True):
            return adam(state, g)
        x = average(state, "m", g)
        x = x / (x.norm() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x


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


class Centralised(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return adam(state, g - g.mean())


class CentralisedKernels(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return adam(state, g - g.mean((1, 2, 3), keepdim=True) if g.ndim > 3 else g)


class Cautious(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        u = adam(state, g)
        mask = (u * g > 0).float()
        return u * mask / mask.mean()


class ClippedByRms(Stranger):
    """StableAdamW: the learning rate falls where gradients outgrow the second moments."""

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        u = adam(state, g)
        return u / (g * g / (state["v"] + 1e-12)).mean().sqrt().clamp(min=3)


class DecayOfMatrices(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g + 0.1 * p if p.ndim > 1 else g


class ScaledByFanIn(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g / p.shape[-1]


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


class Noisy(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g + torch.randn_like(g)


class NoisyInPython(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g * random.random()


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


@pytest.mark.parametrize(("name", "way"), EVERY_WAY)
def test_whole_equals_halves(name: str, way: dict[str, Any]) -> None:
    """The table again, without the probe's code."""
    cls, generator = getattr(torch.optim, name), torch.Generator().manual_seed(1)
    whole = torch.randn(31, 10, generator=generator).requires_grad_()
    halves = [half.detach().clone().requires_grad_() for half in whole.flatten().chunk(2)]
    start, optimizers = whole.detach().clone(), [cls([tensor], **way) for tensor in (whole, *halves)]
    for _ in range(20):
        whole.grad = torch.randn(31, 10, generator=generator) + 0.5
        for half, grad in zip(halves, whole.grad.flatten().chunk(2), strict=True):
            half.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(whole, start)
    torch.testing.assert_close(torch.cat(halves), whole.flatten(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls", [Lion, SignMomentum, AdamByHand, CautiousByElement, WritesIntoGradients])
def test_strangers_that_are_elementwise(cls: type[Stranger]) -> None:
    check_elementwise(cls(matrix()))


STRANGERS_THAT_ARE_NOT = [
    *(ScaledByNorms, RowsAndColumns, OrthogonalMatrices, Quantised, QuantisedOf2048),
    *(QuantisedWhereDivisible, QuantisedWhereDivisibleBy128, LargeAreScaled, Centralised),
    *(CentralisedKernels, Cautious, ClippedByRms, DecayOfMatrices, ScaledByFanIn, RowsWithoutGradientsRest),
    *(ClippedByGlobalNorm, ClippedByLargeGlobalNorm, Noisy, NoisyInPython),
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


# Options that switch


def test_a_switch_in_one_group_is_found() -> None:
    groups = [{"params": matrix(), "whiten": False, "name": f"layer {i}"} for i in range(30)]
    check_elementwise(OrthogonalMatrices(groups))
    groups[-1]["whiten"] = True
    with pytest.raises(TypeError, match="flat slices differ"):
        check_elementwise(OrthogonalMatrices(groups))


@pytest.mark.parametrize("groups", [6, 40])
def test_groups_that_differ_in_numbers_are_tried_once(groups: int) -> None:
    sizes = []

    class Counting(AdamByHand):
        def step(self, closure: Callable[[], float] | None = None) -> None:
            sizes.append(len(self.param_groups))
            super().step()

    decay = [{"params": matrix(), "lr": 0.9**i, "weight_decay": 0.1 * (i % 2)} for i in range(groups)]
    check_elementwise(Counting(decay))
    assert set(sizes) == {2}


class PairsNames(AdamByHand):
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            assert len(group.get("param_names", group["params"])) == len(group["params"])
        super().step()


def test_names_of_parameters_are_no_option() -> None:
    params = list(torch.nn.Linear(2, 2).parameters())
    check_elementwise(PairsNames([{"params": params, "param_names": ["weight", "bias"]}]))


# Ways to make a twin


class OddConstructor(Stranger):
    """What its constructor is told shows in nothing but an object that it keeps."""

    def __init__(self, tag: str, params: Any, *, centralise: bool) -> None:
        super().__init__(params)
        self.recipe = {"centralise": centralise, "tag": [tag]}

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return adam(state, g - g.mean() if self.recipe["centralise"] else g)


def test_an_odd_constructor() -> None:
    with pytest.raises(
        TypeError, match=r"could not be tried .*tag, centralise is recorded nowhere.*assume_elementwise"
    ):
        check_elementwise(OddConstructor("a", matrix(), centralise=False))


class StateAtConstruction(Stranger):
    """As Adagrad does."""

    def __init__(self, params: Any, *, centralise: bool = False, **options: Any) -> None:
        super().__init__(params, **options)
        self._centralise = centralise
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["m"] = torch.zeros_like(p)

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return state["m"].add_(g - g.mean() if self._centralise else g)


def test_state_at_construction() -> None:
    check_elementwise(StateAtConstruction(matrix(), lr=0.1))
    check_elementwise(type("Mine", (torch.optim.Adagrad,), {})(matrix(), initial_accumulator_value=1.0))
    with pytest.raises(TypeError, match="flat slices differ"):
        check_elementwise(StateAtConstruction(matrix(), centralise=True))


def test_state_at_construction_and_a_secret() -> None:
    class Secretive(StateAtConstruction):
        def __init__(self, params: Any, secret: int) -> None:
            super().__init__(params)

    told = r"could not be tried .*secret is recorded nowhere.*assume_elementwise=True"
    with pytest.raises(TypeError, match=told):
        check_elementwise(Secretive(matrix(), 7))


class HoldsItsParameters(AdamByHand):
    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)
        self.all = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for p in self.all:
            p.sub_(1e-3 if p.grad is None else 1e-3 * self.direction(p, p.grad, self.state[p], {}))


@pytest.mark.parametrize("side", [4, 500])
def test_an_optimizer_that_holds_its_parameters(side: int) -> None:
    weight = torch.nn.Parameter(torch.ones(side, side))
    check_elementwise(HoldsItsParameters([weight]))
    assert weight.eq(1).all()


class FlagsInState(Stranger):
    """Muon's own file marks its parameters so."""

    def __init__(self, params: Any, others: Any = ()) -> None:
        super().__init__([*params, *others])
        for p in params:
            self.state[p]["whiten"] = True

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return adam(state, g - g.mean() if state.get("whiten") else g)


def test_flags_in_state_are_not_overlooked() -> None:
    with pytest.raises(TypeError, match="cannot be stepped on slices"):
        check_elementwise(FlagsInState(matrix()))


def test_a_hook_of_its_own_belongs_to_an_optimizer() -> None:
    class CentralisedByHook(AdamByHand):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.register_step_pre_hook(self.centralise)

        def centralise(self, *_: Any) -> None:
            for p in self.param_groups[0]["params"]:
                p.grad.sub_(p.grad.mean())

    with pytest.raises(TypeError, match="flat slices differ"):
        check_elementwise(CentralisedByHook(matrix()))


def test_a_native_handle_is_not_freed() -> None:
    freed = []

    class Native(AdamByHand):
        handles = 0

        def __init__(self, params: Any, lr: float = 1e-3) -> None:
            super().__init__(params, lr=lr)
            self.handle = Native.handles = Native.handles + 1

        def __del__(self) -> None:
            freed.append(self.handle)

    optimizer = Native(matrix())
    check_elementwise(optimizer)
    assert optimizer.handle not in freed
    assert len(freed) == Native.handles - 1 > 0


class Raises(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        raise ZeroDivisionError("the moon is full")


class Warns(AdamByHand):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        warnings.warn("out of date", stacklevel=1)
        return super().direction(p, g, state, group)


def test_a_warning_is_no_failure() -> None:
    check_elementwise(Warns(matrix()))  # pytest makes errors of warnings


class Rests(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return torch.zeros_like(g)


class Explodes(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g / 0


class NeedsClosure(Stranger):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


@pytest.mark.parametrize(
    ("cls", "told"),
    [
        (Raises, "ZeroDivisionError: the moon is full"),
        (Rests, "hardly moved"),
        (Explodes, "infinite or NaN"),
        (NeedsClosure, "closure"),
    ],
)
def test_what_cannot_be_tried(cls: type[Stranger], told: str) -> None:
    optimizer = cls(matrix())
    with pytest.raises(
        TypeError, match=rf"{cls.__name__} cannot .*could not be tried .*{told}.*assume_elementwise=True"
    ):
        check_elementwise(optimizer)
    check_elementwise(optimizer, assume_elementwise=True)


# What a probe leaves alone


def trained(cls: type[Optimizer]) -> tuple[torch.nn.Linear, Optimizer]:
    model = torch.nn.Linear(5, 3)
    optimizer = cls(model.parameters(), lr=torch.tensor(0.01))  # type: ignore[call-arg]
    for _ in range(3):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("cls", [AdamByHand, ScaledByNorms, Raises, type("Mine", (torch.optim.Adagrad,), {})])
def test_nothing_of_the_optimizer_changes(cls: type[Optimizer]) -> None:
    model, optimizer = trained(cls) if cls is not Raises else (torch.nn.Linear(5, 3), Raises(matrix()))
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # patches the instance's step
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the hook ran"))
    attributes, groups = dict(vars(optimizer)), [dict(group) for group in optimizer.param_groups]
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    try:
        check_elementwise(optimizer)
    except TypeError:
        assert cls in (ScaledByNorms, Raises)
    after = model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert dict(vars(optimizer)) == attributes
    assert all(a[key] is b[key] for a, b in zip(optimizer.param_groups, groups, strict=True) for key in b)


@pytest.mark.parametrize("cls", [AdamByHand, Noisy, NoisyInPython])
def test_random_numbers_go_on(cls: type[Stranger]) -> None:
    optimizer, before = cls(matrix()), (torch.get_rng_state(), random.getstate())
    try:
        check_elementwise(optimizer)
    except TypeError:
        assert cls is not AdamByHand
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_global_hooks_do_not_run_and_stay() -> None:
    calls = []
    registered = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        optimizer = AdamByHand(matrix())
        check_elementwise(optimizer)
        assert calls == []
        optimizer.param_groups[0]["params"][0].grad = torch.ones(4, 4)
        optimizer.step()
        assert calls == [1]
    finally:
        registered.remove()


def test_the_model_is_not_copied() -> None:
    huge = torch.nn.Parameter(torch.empty(10**6, 10**6, device="meta"))
    check_elementwise(AdamByHand([huge]))


def test_an_attribute_that_holds_a_model_is_not_copied() -> None:
    with pytest.raises(TypeError, match="its option model is a Linear, which a probe does not copy"):
        check_elementwise(HoldsAModel(matrix(), torch.nn.Linear(1000, 1000, device="meta")))


class HoldsAModel(AdamByHand):
    """Its constructor wants more than numbers."""

    def __init__(self, params: Any, model: torch.nn.Module) -> None:
        super().__init__(params)
        self.model = model


class MakesPlainTensors(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g / state.setdefault("steps", torch.zeros(())).add_(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cls", [MakesPlainTensors, type("Mine", (torch.optim.AdamW,), {})])
def test_surroundings_do_not_matter(cls: type[Stranger], dtype: torch.dtype) -> None:
    optimizer = cls(matrix())
    torch.set_default_dtype(dtype)
    try:
        with torch.no_grad(), torch.device("meta"):
            check_elementwise(optimizer)
    finally:
        torch.set_default_dtype(torch.float32)


def test_half_precision_parameters_are_tried_in_fp32() -> None:
    check_elementwise(AdamByHand([torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]))
