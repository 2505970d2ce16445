"""How a probe tries an optimizer: with which options, by what twin, and what it leaves alone."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lowlevel_zero.optim.probe import probe_elements
from lowlevel_zero.optim.splits import choose_splits
from lowlevel_zero.optim.trials import writes_without_gradients
from lowlevel_zero.optim.twins import with_one_each
from tests.support.strangers import (
    AdamByHand,
    Noisy,
    NoisyInNumpy,
    NoisyInPython,
    OrthogonalMatrices,
    ScaledByNorms,
    Stranger,
    adam,
    check_elementwise,
    matrix,
)

# Options that switch


def test_a_switch_in_one_group_is_found() -> None:
    groups = [{"params": matrix(), "whiten": False, "name": f"layer {i}"} for i in range(8)]
    check_elementwise(OrthogonalMatrices(groups))
    groups[-1]["whiten"] = True
    with pytest.raises(TypeError, match="flat slices differ"):
        check_elementwise(OrthogonalMatrices(groups))


def test_groups_that_differ_in_numbers_are_tried_once() -> None:
    sizes = []

    class Counting(AdamByHand):
        def step(self, closure: Callable[[], float] | None = None) -> None:
            sizes.append(len(self.param_groups))
            super().step()

    decay = [{"params": matrix(), "lr": 0.9**i, "weight_decay": 0.1 * (i % 2)} for i in range(40)]
    check_elementwise(Counting(decay))
    assert max(sizes) == 2


class PairsNames(AdamByHand):
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            assert len(group.get("param_names", group["params"])) == len(group["params"])
        super().step()


def of_names() -> Optimizer:
    params = list(torch.nn.Linear(2, 2).parameters())
    return PairsNames([{"params": params, "param_names": ["weight", "bias"]}])


# Ways to make a twin


class OddConstructor(Stranger):
    """What its constructor is told shows in nothing but an object that it keeps."""

    def __init__(self, tag: str, params: Any, *, centralise: bool) -> None:
        super().__init__(params)
        self.recipe = {"centralise": centralise, "tag": [tag]}

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return adam(state, g - g.mean() if self.recipe["centralise"] else g)


class RecordsByAnotherName(AdamByHand):
    """As lion_pytorch's Lion does with ``decoupled_weight_decay``; it keeps nothing at all of ``kernels``."""

    def __init__(self, params: Any, lr: float = 1e-3, kernels: bool = False, decoupled: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.wd_is_decoupled = decoupled


ScaledAndRecorded = type("ScaledAndRecorded", (RecordsByAnotherName,), {"direction": ScaledByNorms.direction})


class Recipe:
    """What a class of it does is told by a flag that it alone has."""

    def __init__(self, centralise: bool) -> None:
        self.centralise, self.own = centralise, self.__call__

    def __call__(self, g: Tensor) -> Tensor:
        return g - g.mean() if self.centralise else g


def recursive(centralise: bool) -> Callable[[Tensor], Tensor]:
    """A function that holds itself, and a variable that has no value yet."""

    def way(g: Tensor, again: bool = True) -> Tensor:
        if again:
            return way(g, again=False)
        return g - g.mean() if centralise else g + never if g.dim() > 9 else g

    if way is None:
        never = 0.0
    return way


class ChoosesAFunction(Stranger):
    """Keeps nothing of its argument but what it has chosen by it."""

    def __init__(self, params: Any, way: str = "", centralise: bool = False) -> None:
        super().__init__(params)
        ways: dict[str, Any] = {
            "function": (lambda g: g - g.mean()) if centralise else (lambda g: g),
            "partial": partial(self.centralised, by=float(centralise)),
            "method": self.centralised if centralise else self.plain,
            "object": Recipe(centralise),
            "method of an object": Recipe(centralise).__call__,
            "recursive function": recursive(centralise),
            "tensor in a function": partial(torch.lerp, weight=torch.tensor([float(centralise)] * 2)),
            "optimizer in a function": lambda g: self.centralised(g) if centralise else g,
        }
        self.way, self.chosen = way, ways[way] if way else None

    @staticmethod
    def plain(g: Tensor) -> Tensor:
        return g

    def centralised(self, g: Tensor, by: float = 1.0) -> Tensor:
        return g - by * g.mean()

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return self.chosen(g)


class HandsOn(torch.optim.AdamW):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class HandsKeywordsOn(torch.optim.AdamW):
    def __init__(self, params: Any, clips: dict[str, float] | None = None, **options: Any) -> None:
        super().__init__(params, **options)
        self.clips = clips


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


class HoldsItsParameters(AdamByHand):
    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)
        self.all = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for p in self.all:
            p.sub_(1e-3 if p.grad is None else 1e-3 * self.direction(p, p.grad, self.state[p], {}))


class FlagsInState(Stranger):
    """Muon's own file marks its parameters so."""

    def __init__(self, params: Any, others: Any = ()) -> None:
        super().__init__([*params, *others])
        for p in params:
            self.state[p]["whiten"] = True

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return adam(state, g - g.mean() if state.get("whiten") else g)


def with_a_tensor(optimizer: Any) -> Optimizer:
    optimizer.table = torch.ones(3)
    return optimizer  # type: ignore[no-any-return]


def flagged(flag: bool) -> Optimizer:
    params: list[Any] = matrix()
    for p in params:
        p.whiten = flag
    return LooksAtFlags(params)


class LooksAtFlags(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g - g.mean() if p.whiten else g


class BoundByNumbers(Stranger):
    """Does otherwise where a parameter's number is very small or large."""

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g if 1 <= p.scale <= 4 else g - g.mean()


def numbered(*scales: float) -> Optimizer:
    params: list[Any] = [p for _ in scales for p in matrix()]
    for p, scale in zip(params, scales, strict=True):
        p.scale = scale
    return BoundByNumbers(params)


class CentralisedByHook(AdamByHand):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.register_step_pre_hook(self.centralise)

    def centralise(self, *_: Any) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad.sub_(p.grad.mean())


class Warns(AdamByHand):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        warnings.warn("out of date", stacklevel=1)
        return super().direction(p, g, state, group)


class HoldsAModel(AdamByHand):
    """Its constructor wants more than numbers."""

    def __init__(self, params: Any, model: torch.nn.Module) -> None:
        super().__init__(params)
        self.model = model


class Raises(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        raise ZeroDivisionError("the moon is full")


class Rests(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return torch.zeros_like(g)


class Explodes(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g / 0


Mine = type("Mine", (torch.optim.Adagrad,), {})
COPIED = ("function", "partial", "method", "object", "method of an object", "recursive function")

TRIED: dict[str, Callable[[], Optimizer]] = {
    "an odd constructor": lambda: OddConstructor("a", matrix(), centralise=False),
    "a constructor that takes no groups": lambda: FlagsInState([], matrix()),
    "names of parameters are no option": of_names,
    "an option that is recorded nowhere takes its default": lambda: RecordsByAnotherName(matrix(), decoupled=True),
    # AdamW's defaults hold a name that its constructor doesn't take.
    "a constructor hands its arguments on": lambda: HandsOn(matrix(), 0.1),
    "a constructor hands keywords on": lambda: HandsKeywordsOn(matrix(), lr=0.1, clips={"matrix": 1.0}),
    "a state at construction": lambda: StateAtConstruction(matrix(), lr=0.1),
    "kernels that a graph may capture": lambda: type("Mine", (torch.optim.AdamW,), {})(matrix(), capturable=True),
    "Adagrad's state at construction": lambda: Mine(matrix(), initial_accumulator_value=1.0),
    "a parameter's flag that isn't set": lambda: flagged(False),
    "numbers of parameters that bind nowhere": lambda: numbered(2.0, 4.0, 1.0, 3.0),
    "a large parameter is held": lambda: HoldsItsParameters([torch.nn.Parameter(torch.ones(500, 500))]),
    "a warning is no failure": lambda: Warns(matrix()),  # pytest makes errors of warnings
    "the model is not copied": lambda: AdamByHand([torch.nn.Parameter(torch.empty(10**6, 10**6, device="meta"))]),
    "half precision is tried in fp32": lambda: AdamByHand([torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]),
}


@pytest.mark.parametrize("case", TRIED)
def test_what_is_elementwise_is_found_to_be(case: str) -> None:
    check_elementwise(TRIED[case]())


RECORDED = r"could not be tried .*got tag, centralise, which neither .* record"
FOUND: dict[str, tuple[Callable[[], Optimizer], str]] = {
    "an odd constructor": (lambda: OddConstructor("a", matrix(), centralise=True), "flat slices differ"),
    "an odd constructor, and a tensor": (
        lambda: with_a_tensor(OddConstructor("a", matrix(), centralise=False)),
        RECORDED,
    ),
    "an option that is recorded nowhere": (lambda: ScaledAndRecorded(matrix(), decoupled=True), "flat slices differ"),
    "a state at construction": (lambda: StateAtConstruction(matrix(), centralise=True), "flat slices differ"),
    "a hook of the class's own": (lambda: CentralisedByHook(matrix()), "flat slices differ"),
    "a parameter's flag that is set": (lambda: flagged(True), "flat slices differ"),
    "a parameter's small number": (lambda: numbered(2.0, 4.0, 0.5, 3.0), "flat slices differ"),
    "a parameter's large number": (lambda: numbered(2.0, 1.0, 4.5, 3.0), "flat slices differ"),
    "flags in a state": (lambda: FlagsInState(matrix(), matrix()), "flat slices differ"),
    "flags in a state, and a tensor": (
        lambda: with_a_tensor(FlagsInState(matrix())),
        r"could not be tried \(its constructor takes no param groups \(TypeError: .*\), and its table can't be copied",
    ),
    "an attribute that holds a model": (
        lambda: HoldsAModel(matrix(), torch.nn.Linear(1000, 1000, device="meta")),
        "its option model is a Linear, which a probe does not copy",
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_is_not_elementwise_is_found_by_what_differs(case: str) -> None:
    make, message = FOUND[case]
    with pytest.raises(TypeError, match=message):
        check_elementwise(make())


@pytest.mark.parametrize("way", COPIED)
def test_what_an_argument_that_is_recorded_nowhere_has_chosen_is_tried(way: str) -> None:
    check_elementwise(ChoosesAFunction(matrix(), way))
    with pytest.raises(TypeError, match="flat slices differ"):
        check_elementwise(ChoosesAFunction(matrix(), way, centralise=True))


@pytest.mark.parametrize("way", ["tensor in a function", "optimizer in a function"])
def test_what_it_has_chosen_and_can_t_be_copied_is_told(way: str) -> None:
    optimizer = ChoosesAFunction(matrix(), way, centralise=True)
    told = (
        "got centralise, which neither .* record, and its chosen, which may follow from that, is a (function|partial),"
    )
    with pytest.raises(TypeError, match=f"could not be tried .*{told}.*pass split='elements' or"):
        choose_splits(optimizer)


def test_a_method_that_it_has_chosen_is_its_twin_s_own() -> None:
    """Else a copy of the optimizer would be stepped by, and its parameters be copied."""
    made: Any = with_one_each(ChoosesAFunction(matrix(), "method", centralise=True), matrix())
    assert made.chosen.__self__ is made


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


@pytest.mark.parametrize(
    ("cls", "told"),
    [
        (Raises, "ZeroDivisionError: the moon is full"),
        (Rests, "hardly moved"),
        (Explodes, "infinity or NaN"),
    ],
)
def test_what_cannot_be_tried(cls: type[Stranger], told: str) -> None:
    optimizer = cls(matrix())
    with pytest.raises(
        TypeError, match=rf"{cls.__name__} cannot .*could not be tried .*{told}.*pass split='elements' or"
    ):
        choose_splits(optimizer)
    assert choose_splits(optimizer, "elements") == ["elements"]
    assert choose_splits(optimizer, "parameters") == ["parameters"]


# What a probe leaves alone


def trained(cls: type[Optimizer]) -> tuple[torch.nn.Linear, Optimizer]:
    model = torch.nn.Linear(5, 3)
    optimizer = cls(model.parameters(), lr=torch.tensor(0.01))  # type: ignore[call-arg]
    for _ in range(3):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("cls", [AdamByHand, ScaledByNorms, Raises, Mine])
def test_nothing_of_the_optimizer_changes(cls: type[Optimizer]) -> None:
    model, optimizer = trained(cls) if cls is not Raises else (torch.nn.Linear(5, 3), Raises(matrix()))
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # patches the instance's step
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the hook ran"))
    attributes, groups = dict(vars(optimizer)), [dict(group) for group in optimizer.param_groups]
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    assert (probe_elements(optimizer) is None) == (cls not in (ScaledByNorms, Raises))
    after = model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert dict(vars(optimizer)) == attributes
    assert all(a[key] is b[key] for a, b in zip(optimizer.param_groups, groups, strict=True) for key in b)


def test_nothing_of_an_optimizer_changes_that_is_copied() -> None:
    parameters = [*matrix(), *matrix()]
    optimizer = FlagsInState(parameters[:1], parameters[1:])
    attributes = dict(vars(optimizer))
    before = copy.deepcopy((parameters, [optimizer.state.get(p) for p in parameters], optimizer.param_groups))
    assert choose_splits(optimizer) == ["parameters"]
    assert dict(vars(optimizer)) == attributes
    assert [*optimizer.state] == parameters[:1]
    after = parameters, [optimizer.state.get(p) for p in parameters], optimizer.param_groups
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("cls", [AdamByHand, Noisy, NoisyInPython, NoisyInNumpy])
def test_random_numbers_go_on(cls: type[Stranger]) -> None:
    optimizer, before = cls(matrix()), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1:3])
    assert (probe_elements(optimizer) is None) == (cls is AdamByHand)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert str(np.random.get_state()[1:3]) == str(before[2])


def test_random_numbers_of_a_device_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated one: that a step of the class draws some, or seeds it, changes nothing."""
    state = {0: 5, 1: 7}

    class Draws(AdamByHand):
        def step(self, closure: Any = None) -> None:
            state[1] += 1
            super().step(closure)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state[device])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda before, device: state.update({device: before}))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: state.update(dict.fromkeys(state, seed)))
    check_elementwise(Draws(matrix()))
    assert not writes_without_gradients(Draws(matrix()))
    assert state == {0: 5, 1: 7}


def test_no_device_is_seeded_that_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the seed when it starts, in place of the one that its user has given before."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded"))
    assert not writes_without_gradients(AdamByHand(matrix()))


def test_hooks_of_all_optimizers_do_not_run() -> None:
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: pytest.fail("the hook ran")),
        register_optimizer_step_post_hook(lambda *_: pytest.fail("the hook ran")),
    ]
    try:
        check_elementwise(AdamByHand(matrix()))
        assert len(_global_optimizer_pre_hooks) == len(_global_optimizer_post_hooks) == 1
    finally:
        for hook in hooks:
            hook.remove()


class MakesPlainTensors(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g / state.setdefault("steps", torch.zeros(())).add_(1)


@pytest.mark.parametrize(
    ("cls", "dtype"),
    [(MakesPlainTensors, torch.bfloat16), (type("Mine", (torch.optim.AdamW,), {}), torch.float64)],
)
def test_surroundings_do_not_matter(cls: type[Stranger], dtype: torch.dtype) -> None:
    optimizer = cls(matrix())
    torch.set_default_dtype(dtype)
    try:
        with torch.no_grad(), torch.device("meta"):
            check_elementwise(optimizer)
    finally:
        torch.set_default_dtype(torch.float32)


class NormalisesHalfPrecision(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g / (g.norm() + 1e-6) if p.dtype == torch.bfloat16 else g


class RoundsHalfPrecisionAtRandom(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return (g.float() * (1 + 2**-8 * torch.rand_like(g.float()))).to(g.dtype) if p.dtype == torch.bfloat16 else g


def test_half_precision_parameters_without_masters_are_tried_as_they_are() -> None:
    assert choose_splits(AdamByHand(matrix()), dtypes=[torch.bfloat16, torch.float16]) == ["elements"]
    assert choose_splits(NormalisesHalfPrecision(matrix())) == ["elements"]
    assert choose_splits(NormalisesHalfPrecision(matrix()), dtypes=[torch.bfloat16]) == ["parameters"]
    with pytest.raises(TypeError, match="it draws random numbers for torch.bfloat16; and of whole .* random numbers"):
        choose_splits(RoundsHalfPrecisionAtRandom(matrix()), dtypes=[torch.bfloat16])
