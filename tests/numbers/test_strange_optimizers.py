"""Optimizers of unusual habits: each trains over several ranks as in one process, or is refused by what differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, save_checkpoint
from lowlevel_zero.optim.splits import choose_splits, may_write_unused
from lowlevel_zero.testing import assert_trains_alike
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_cases, run_ranks
from tests.support.rules import Net, Rule, normalised, over_parameters, ruled


def by_norms(base: type[Rule]) -> type[Rule]:
    """The same class, of updates that depend on the whole parameter."""
    return ruled(lambda p, update, state: normalised(update), base=base)


class Slow(Rule):
    """Draws parameters to slow weights in every third step, those without a gradient too."""

    every = 3

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if group["count"] % self.every == 0:
                    slow.lerp_(p, 0.5)
                    p.data.copy_(slow)


class SlowFromTheSecondStep(Rule):
    """Makes slow weights when it needs them first, in its second step, and draws parameters to them in every second."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"] if self.count % 2 == 0):
            slow = self.state[p].setdefault("slow", p.detach().clone())
            slow.lerp_(p, 0.5)
            p.copy_(slow)


class SlowSeldom(Slow):
    """The same in every 25th step."""

    every = 25


class Around(Slow):
    """The same around another optimizer, whose groups it has."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        Optimizer.__init__(self, inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    def begin(self) -> None:
        self.inner.step()

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        return torch.zeros_like(p)


def late(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    """Divides by the whole gradient's norm from the 51st step on."""
    state["seen"] = state.get("seen", 0) + 1
    return gradient.sign() if state["seen"] <= 50 else gradient / gradient.norm()


class LateByItself(Rule):
    """The same, by a count of its own."""

    count = 0

    def begin(self) -> None:
        self.count += 1

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        return late(p, gradient, {"seen": self.count - 1})


class Counting(Rule):
    """Keeps one count of all steps among the states, for all parameters."""

    def begin(self) -> None:
        self.state["count"] = self.state.get("count", 0) + 1

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        return gradient / self.state["count"]


CountingNorms = ruled(lambda p, update, state: update / (update.norm() + 1e-6) * update.abs().max(), base=Counting)


class CountingByItself(Rule):
    """Keeps the count in an attribute, which it adds to its state dict."""

    count = 0

    def begin(self) -> None:
        self.count += 1

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        return gradient / self.count

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.count = state_dict["count"]


class CountingGroups(CountingByItself):
    """Counts the steps of each group that has parameters."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.count: Any = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for at, group in enumerate(self.param_groups):
            if group["params"]:
                self.count[at] = self.count.get(at, 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"] / self.count[at])


class CountingUses(CountingGroups):
    """Counts the steps that have gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.count[0] = self.count.get(0, 0) + bool(used)
        for p in used:
            p.sub_(p.grad, alpha=0.05 / self.count[0])


class CountingParameters(CountingByItself):
    """Counts the steps of all parameters together, of which each rank steps others."""

    def begin(self) -> None:
        self.count += sum(len(group["params"]) for group in self.param_groups)

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        return normalised(gradient)


class Box:
    """Holds a momentum."""

    def __init__(self, momentum: Tensor) -> None:
        self.momentum = momentum


class ByPlace(Rule):
    """Keeps momenta in a list of its own, by the parameter's place."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.momenta: dict[int, Tensor] = {}

    def begin(self) -> None:
        self.place_of = {id(p): at for at, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        momentum = self.momenta.setdefault(self.place_of[id(p)], torch.zeros_like(p)).mul_(0.9).add_(gradient)
        return normalised(momentum)


def by_attributes(model: nn.Module, normalise: bool = False) -> Optimizer:
    """Scale updates, and normalise them, as attributes of the parameter tell."""

    def update(p: Any, gradient: Tensor, state: Any) -> Tensor:
        return getattr(p, "scale", 1.0) * (normalised(gradient) if getattr(p, "normalise", False) else gradient.sign())

    for number, p in enumerate(model.parameters()):
        p.scale, p.normalise = 0.5 * number, normalise and not number  # type: ignore[attr-defined]
    return ruled(update)(model.parameters())


class SkipsEmptyGroups(Rule):
    """Counts the steps of groups that have parameters, of which each has its own norm."""

    def begin(self) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["steps"] = group.get("steps", 0) + 1

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        return normalised(gradient)


class ByNames(Rule):
    """Decays what is called a weight."""

    def begin(self) -> None:
        held = [(group["params"], group.get("param_names", group["params"])) for group in self.param_groups]
        self.name_of = {id(p): name for params, names in held for p, name in zip(params, names, strict=True)}

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        return gradient + (p if "weight" in str(self.name_of[id(p)]) else 0)


class ClippingEach(Rule):
    """Clips each parameter by its norm, to what its group says."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * p.grad * (group["clip"] / p.grad.norm()).clamp(max=1))


def clipping_the_last(model: nn.Module) -> Optimizer:
    *others, last = model.parameters()
    return ClippingEach([{"params": others, "clip": 1e9}, {"params": [last], "clip": 0.01}])


class OfTwoKinds(Optimizer):
    """Orthogonalises matrices, and steps others by signs; each kind of groups has its own keys, as in Jordan's file."""

    def __init__(self, param_groups: Any) -> None:
        for group in param_groups:
            assert {*group} == {"params", "lr", "matrices", "momentum" if group["matrices"] else "decay"}
        super().__init__(param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if group["matrices"]:
                    rows, columns = p.shape
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).mul_(group["momentum"]).add_(p.grad)
                    left, _, right = torch.linalg.svd(mean, full_matrices=False)
                    p.sub_(group["lr"] * max(1, rows / columns) ** 0.5 * left @ right)
                else:
                    p.mul_(1 - group["decay"]).sub_(group["lr"] * p.grad.sign())


def in_two(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [model.up.weight, model.down.weight]
    return matrices, [p for p in model.parameters() if all(p is not each for each in matrices)]


def of_two_kinds(model: nn.Module) -> Optimizer:
    matrices, others = in_two(model)
    groups = [
        {"params": others, "matrices": False, "decay": 0.1},
        {"params": matrices, "matrices": True, "momentum": 0.9},
    ]
    return OfTwoKinds([{**group, "lr": 0.02} for group in groups])


class MarkedAtConstruction(Rule):
    """Takes two lists of parameters, and marks them in their states, as Moonshot's Muon does."""

    def __init__(self, matrices: Any, others: Any, lr: float = 0.02) -> None:
        super().__init__([*matrices, *others], lr)
        for p in matrices:
            self.state[p]["is_matrix"] = True
        for p in others:
            self.state[p]["is_matrix"] = False

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        if not state["is_matrix"]:
            return gradient.sign()
        rows, columns = p.shape
        mean = state.setdefault("mean", torch.zeros_like(p)).mul_(0.9).add_(gradient)
        left, _, right = torch.linalg.svd(mean, full_matrices=False)
        return max(1, rows / columns) ** 0.5 * left @ right


class OfOneSize(Rule):
    """Makes groups of parameters of one size out of a list, as Jordan's Muon did first."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        params = list(params)
        sizes = {p.numel(): [each for each in params if each.numel() == p.numel()] for p in params}
        super().__init__([{"params": members, "size": size} for size, members in sizes.items()], lr)

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        return normalised(gradient)


def over_names(model: nn.Module) -> Optimizer:
    model.embedding.weight.requires_grad_(False)
    names, params = zip(*model.named_parameters(), strict=True)
    return ByNames([{"params": list(params), "param_names": list(names)}])


ALIKE: dict[str, tuple[Callable[[nn.Module], Optimizer], str, int]] = {
    "slow weights": (over_parameters(Slow), "elements", 12),
    "slow weights that are made late": (over_parameters(SlowFromTheSecondStep), "elements", 6),
    "slow weights by norms": (over_parameters(by_norms(Slow)), "parameters", 12),
    "slow weights around another": (lambda m: Around(SGD(m.parameters(), lr=0.05, momentum=0.9)), "elements", 8),
    "a count among states": (over_parameters(Counting), "elements", 6),
    "a count among states, by norms": (over_parameters(CountingNorms), "parameters", 6),
    "momenta by place": (over_parameters(ByPlace), "parameters", 6),
    "names, one of them of a frozen parameter": (over_names, "elements", 6),
    "groups that are empty on some ranks": (
        lambda model: SkipsEmptyGroups([{"params": [p]} for p in model.parameters()]),
        "parameters",
        6,
    ),
    "groups of two kinds, one of matrices alone": (of_two_kinds, "parameters", 6),
    "marks in states, and two lists": (lambda model: MarkedAtConstruction(*in_two(model)), "parameters", 6),
    "groups of the constructor's own": (over_parameters(OfOneSize), "parameters", 6),
    "attributes of parameters": (by_attributes, "elements", 6),
    "attributes of parameters, by norms": (partial(by_attributes, normalise=True), "parameters", 6),
}


@on_ranks(2, ALIKE)
def test_it_trains_as_in_one_process(rank: int, case: str) -> None:
    make, split, steps = ALIKE[case]
    found = assert_trains_alike(make, Net, steps, tolerance=0, stage=2)
    assert {*found.splits} == {split}


def boxed(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    momentum: Tensor = state.setdefault("box", Box(torch.zeros_like(p))).momentum
    return momentum.mul_(0.9).add_(gradient)


def by_dimensions(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    """Orthogonalises matrices, and decays nothing else than these."""
    if p.dim() != 2:
        return gradient.sign()
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    return left @ right + 0.1 * p


def seeded(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    """Drops updates at random, by generators of its own, which begin anew with each parameter."""
    state["step"] = state.get("step", 0) + 1
    return gradient * (torch.rand(p.shape, generator=torch.Generator().manual_seed(state["step"])) < 0.5)


def by_numbers(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    """Decays what has more than one number, and has another rate for a scalar."""
    return (1 if p.dim() else 3) * gradient.sign() + (p if p.numel() > 1 else 0)


def by_position(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    return gradient * (torch.arange(p.numel()).view(p.shape) % 5 + 1)


WHOLE = [*map(ruled, (boxed, by_dimensions, seeded, by_numbers, by_position, late)), LateByItself]


@pytest.mark.parametrize("make", [*map(over_parameters, WHOLE), clipping_the_last])
def test_a_rank_owns_whole_what_can_t_be_stepped_by_elements(make: Callable[[nn.Module], Optimizer]) -> None:
    assert {*choose_splits(make(Net()))} == {"parameters"}


class OfTheFirst(Rule):
    """Keeps the count of all steps with the first parameter."""

    def begin(self) -> None:
        self.first = self.state[self.param_groups[0]["params"][0]]
        self.first["count"] = self.first.get("count", 0) + 1

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        return gradient / gradient.norm() / self.first["count"]


class Sharpness(Rule):
    """Needs a closure."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step()


class WithItsOwnStateDict(Around):
    """Has the inner optimizer's states in a state dict of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}


class TogetherSeldom(Rule):
    """Clips by the norm over all gradients, where that is large."""

    def begin(self) -> None:
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = torch.stack(norms or [torch.ones(())]).norm()

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        return gradient.sign() * (1e4 / self.norm).clamp(max=1.0)


class TogetherByShape(Rule):
    """Divides by the norm over all gradients of one shape."""

    def begin(self) -> None:
        self.norms: dict[torch.Size, list[Tensor]] = {}
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.norms.setdefault(p.shape, []).append(p.grad.norm())

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        return gradient / torch.stack(self.norms[p.shape]).norm()


class DecaysGroups(Rule):
    """Decays all parameters of groups that say so, those without a gradient too."""

    decay = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1 - group.get("decay", self.decay * group["lr"]))


class DecaysAll(DecaysGroups):
    """The same of all groups, by a share of their rate."""

    decay = 1e-4


@pytest.mark.parametrize(("cls", "lr"), [(SlowSeldom, 0.05), (DecaysAll, 0.0), (DecaysAll, 1e-4)])
def test_a_class_that_writes_unused_parameters_is_known_whatever_its_rate_is(cls: type[Rule], lr: float) -> None:
    """A schedule may have set the rate to 0 before it begins."""
    assert may_write_unused(cls(Net().parameters(), lr=lr))


@on_ranks(2)
def test_an_added_group_may_be_one_of_which_unused_parameters_are_written(rank: int) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = LowLevelZeroOptimizer(DecaysGroups(first.parameters()))
    optimizer.add_param_group({"params": list(second.parameters()), "decay": 0.1})
    start = second.weight.detach().clone()
    optimizer.backward(first(torch.ones(1, 4)).sum())
    optimizer.step()
    optimizer.verify()
    assert torch.equal(second.weight, start * 0.9)


class Clipping(Rule):
    """Clips by the norm over all gradients, if it is told to, and records that under another name."""

    def __init__(self, params: Any, clip: float = 0.0) -> None:
        super().__init__(params)
        self.max_norm = clip

    def begin(self) -> None:
        if self.max_norm:
            torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.max_norm)


class LogsInGroups(Rule):
    """Keeps the last gradient's norm in the param group."""

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        self.param_groups[0]["norm"] = float(gradient.norm())
        return gradient


def stochastic(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    """Rounds at random."""
    return torch.round(64 * gradient + torch.rand_like(p)) / 64


class ByName(Rule):
    """Keeps momenta among its states under names of its own."""

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        place = next(at for at, own in enumerate(self.param_groups[0]["params"]) if own is p)
        momentum: Tensor = self.state.setdefault(f"momentum of {place}", torch.zeros_like(p))
        return momentum.mul_(0.9).add_(gradient)


def with_a_step_of_its_own(model: nn.Module) -> Optimizer:
    """Clip by the norm over all gradients, then step."""
    optimizer = SGD(model.parameters(), lr=0.05)
    plain = optimizer.step

    def step(closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.1)
        plain()

    optimizer.step = step  # type: ignore[assignment, method-assign]
    return optimizer


def under_two_names(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    """Keeps each momentum under two names."""
    if not state:
        state["momentum"] = state["shown"] = torch.zeros_like(p)
    state["momentum"].mul_(0.9).add_(gradient)
    shown: Tensor = state["shown"]
    return shown


REFUSED: dict[str, tuple[Callable[[nn.Module], Optimizer], str]] = {
    "a state with the first": (over_parameters(OfTheFirst), "keeps a state with one parameter that others .* lack"),
    "a closure": (over_parameters(Sharpness), "its step needs a closure"),
    "states in another": (
        lambda model: WithItsOwnStateDict(SGD(model.parameters(), lr=0.05)),
        "it wraps another optimizer, SGD, whose states its own state dict alone has",
    ),
    "one state of two names": (
        over_parameters(ruled(under_two_names)),
        "its states 'momentum' and 'shown' are one tensor",
    ),
    "states of no parameter": (over_parameters(ByName), "its state 'momentum of 0', which is of no parameter, has"),
    "a norm over those of one shape": (
        lambda model: TogetherByShape(model.up.parameters()),
        "its updates depend on other parameters",
    ),
    "a norm over all": (over_parameters(TogetherSeldom), "its updates depend on other parameters"),
    "a norm over all, by an option of another name": (
        lambda model: Clipping(model.parameters(), clip=0.1),
        "its updates depend on other parameters",
    ),
    "a step of the instance's own": (with_a_step_of_its_own, "its step was replaced on the instance, .* a subclass"),
    "settings that follow from a parameter": (over_parameters(LogsInGroups), "it sets 'norm' of its param groups"),
    "random numbers": (over_parameters(ruled(stochastic)), "random numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_what_differs(case: str) -> None:
    make, reason = REFUSED[case]
    with pytest.raises(TypeError, match=f"cannot be sharded: .*{reason}"):
        choose_splits(make(Net()))


@on_ranks(2)
def test_an_optimizer_around_one_that_has_stepped_is_refused(rank: int) -> None:
    model = nn.Linear(4, 3)
    inner = SGD(model.parameters(), lr=0.05, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    inner.step()
    with pytest.raises(ValueError, match="weight: expected no states of the SGD inside Around yet, got some"):
        LowLevelZeroOptimizer(Around(inner), model=model)


def test_a_scheduler_and_a_compiler_leave_a_known_class_known() -> None:
    optimizer = SGD(Net().parameters(), lr=0.05)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    assert choose_splits(optimizer) == ["elements"]
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    assert choose_splits(optimizer) == ["elements"]


def count_of(optimizer: Any) -> int:
    state_dict = optimizer.state_dict()
    found = state_dict["count"] if "count" in state_dict else state_dict["state"]["count"]
    return min(found.get(at, 0) for at in range(len(optimizer.param_groups))) if isinstance(found, dict) else found


COUNTING = {
    Counting: "elements",
    CountingNorms: "parameters",
    CountingByItself: "elements",
    CountingGroups: "parameters",
}


def test_a_count_goes_on_at_another_number_of_ranks(tmp_path: Path, subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, cls: type[Rule], steps: range) -> tuple[int, Tensor]:
        model = nn.Linear(4, 3)
        groups = [{"params": [p]} for p in model.parameters()]
        optimizer = LowLevelZeroOptimizer(cls(groups), model=model, split=COUNTING[cls])
        if steps.start:
            load_checkpoint(tmp_path / cls.__name__, model, optimizer)
        for _ in steps:
            optimizer.backward(model(torch.ones(1, 4)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        if steps.stop == 3:
            save_checkpoint(tmp_path / cls.__name__, model, optimizer)
        return count_of(optimizer), model.weight.detach().clone()

    straight, on_two, on_three = (
        run_cases(work, size, [(cls, steps) for cls in COUNTING], one_group=True)
        for size, steps in ((1, range(5)), (2, range(3)), (3, range(3, 5)))
    )
    for at, cls in enumerate(COUNTING):
        with subtests.test(cls.__name__):
            assert [count for count, _ in on_two[at][1].values()] == [3, 3]
            for count, weight in on_three[at][1].values():
                assert count == 5
                torch.testing.assert_close(weight, straight[at][1].values()[0][1])


@on_ranks(2, [Counting, CountingByItself])
def test_a_count_goes_to_plain_torch_and_back(rank: int, cls: type[Rule]) -> None:
    model = nn.Linear(4, 3)
    optimizer, plain = LowLevelZeroOptimizer(cls(model.parameters()), model=model), cls(nn.Linear(4, 3).parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    plain.load_state_dict(optimizer.state_dict())
    assert count_of(plain) == 1
    if cls is Counting:
        plain.state["count"] = 7
    else:
        plain.count = 7
    optimizer.load_state_dict(plain.state_dict())
    assert count_of(optimizer) == 7
    assert cls is CountingByItself or optimizer.state["count"] == 7


@on_ranks(2)
def test_a_count_of_steps_with_gradients_goes_on_where_a_rank_s_own_have_none(rank: int) -> None:
    """In each step one of two layers is used, each of another rank."""

    def loss(model: Any, step: int, rank: int) -> Tensor:
        total: Tensor = model[step % 3 > 0].weight.sin().sum()
        return total

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))

    assert_trains_alike(over_parameters(CountingUses), model, 7, tolerance=0, loss=loss, split="parameters")


@on_ranks(2, ["state_dict", "save_checkpoint", "Sharded"])
def test_a_count_that_differs_between_ranks_is_refused_by_name_when_it_is_saved(
    rank: int, by: str, tmp_path: Path
) -> None:
    model = nn.Linear(4, 3)
    model.more = nn.Parameter(torch.ones(2))
    optimizer = LowLevelZeroOptimizer(CountingParameters(model.parameters()), model=model, split="parameters")
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    save = {
        "state_dict": optimizer.state_dict,
        "save_checkpoint": partial(save_checkpoint, tmp_path / "run", model, optimizer),
        "Sharded": Sharded(optimizer).state_dict,
    }[by]
    with pytest.raises(ValueError, match=r"CountingParameters.state_dict\(\)\['count'\]: 1» where rank 1 has .*: 2»"):
        save()


class AveragingByItself(Rule):
    """Averages marked gradients over the ranks, which has no effect where they have the same."""

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        if not getattr(p, "averaged", False):
            return gradient
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


@on_ranks(2, timeout=30)
def test_an_optimizer_that_communicates_by_itself_is_refused(rank: int) -> None:
    model = Net()
    for p in model.down.parameters():  # another rule steps those before
        p.averaged = True  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="could not be tried \\(its step communicates by itself\\)"):
        choose_splits(AveragingByItself(model.parameters()))


class TriedInVain(Rule):
    """Fails on rank 1 where it steps others than the model's parameters, as a trial does."""

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        if dist.get_rank() == 1 and p.dim() > 1:
            raise MemoryError("no memory for a trial")
        return gradient


def test_ranks_of_which_one_fails_to_try_the_class_refuse_it_together() -> None:
    """A rank that takes the class to write unused parameters would gather them, and wait for the others."""

    def work(rank: int, world_size: int) -> str:
        model = Net()
        inner = TriedInVain(model.parameters())
        with pytest.raises(ValueError, match="expected the same model, optimizer and options") as caught:
            LowLevelZeroOptimizer(inner, model=model, split="elements")
        return str(caught.value)

    first, second = run_ranks(work, 2)
    assert first == second
    assert "«the optimizer may write parameters that have no gradient: False»" in first
