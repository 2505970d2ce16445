"""Parameters that the caller writes, moves or adds in mid-run: masters follow, and keep the low bits of the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_cases
from tests.support.scripts import STAGES, Alone, Case, Script, Together, adamw, check_each, momentum, net, steps


def load(model: nn.Module) -> None:
    model.load_state_dict(net(seed=7).to(next(model.parameters()).dtype).state_dict())


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.clamp_(-0.2, 0.2)


@torch.no_grad()
def set_one_element(model: nn.Module) -> None:
    model[1].weight[2, 3] = 1.5


def assign(model: nn.Module) -> None:
    """New memory, of other strides here and there, and partly of other values."""
    for p in model.parameters():
        p.data = torch.where(p.data > 0.1, p.data * 0.5, p.data).t().contiguous().t()


def copy_there_and_back(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model.double().to(dtype)


EDITS = {
    "load_state_dict": load,
    "clamp": clamp,
    "one_element": set_one_element,
    "assigned": assign,
    "there_and_back": copy_there_and_back,
}


def test_edits_of_a_sixteen_bit_model_reach_the_masters_and_leave_the_rest_its_low_bits(
    subtests: pytest.Subtests,
) -> None:
    """A step with a rate of 0 takes edits over and changes nothing else."""

    def train(rank: int, world_size: int, edit: str) -> list[tuple[Tensor, Tensor, Tensor]]:
        model = net().bfloat16()
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        steps(Together(rank), model, optimizer, [0])
        slices = [optimizer.get_working_to_master_map()[id(p)] for p in model.parameters()]
        before = [own.clone() for own in slices]
        EDITS[edit](model)
        edited = [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups[0]["lr"] = 0.0
        steps(Together(rank), model, optimizer, [1])
        return list(zip(before, edited, slices, strict=True))

    for (edit,), ran in run_cases(train, 3, [(name,) for name in EDITS], one_group=True):
        with subtests.test(edit):
            for parts in zip(*ran.values(), strict=True):
                edited = parts[0][1].flatten()
                before, after = (torch.cat([part[at] for part in parts])[: edited.numel()] for at in (0, 2))
                kept = before.bfloat16() == edited
                assert torch.equal(after, torch.where(kept, before, edited.float()))


# How a group of one layer may be handed over.
WAYS_TO_ADD: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda layer: layer.parameters(),
    "one": lambda layer: layer.weight,
}


def test_a_group_may_be_a_generator_or_one_parameter(subtests: pytest.Subtests) -> None:
    """The layer was frozen at construction, and handed over with the others."""

    def script_of(way: str) -> Script:
        def script(side: Alone) -> nn.Module:
            model = net()
            model[1].requires_grad_(False)
            held = [p for p in model.parameters() if p.requires_grad or isinstance(side, Together)]
            optimizer = side.wrap(torch.optim.SGD(held, lr=0.05, momentum=0.9), model)
            steps(side, model, optimizer, range(2))
            (model[1].weight if way == "one" else model[1]).requires_grad_(True)
            optimizer.add_param_group({"params": WAYS_TO_ADD[way](model[1]), "lr": 0.1})
            steps(side, model, optimizer, range(2, 4))
            assert len(optimizer.state_dict()["state"]) == (7 if way == "one" else 8)
            return model

        return script

    check_each({way: Case(script_of(way), STAGES["stage2"]) for way in WAYS_TO_ADD}, subtests)


@on_ranks(2)
def test_adding_what_is_there_already_is_refused_and_changes_nothing(rank: int) -> None:
    model = net()
    optimizer = LowLevelZeroOptimizer(adamw(model[:2]), model=model)
    with pytest.raises(ValueError, match=r"1\.weight.*one it has"):
        optimizer.add_param_group({"params": [model[2].weight, model[1].weight]})
    steps(Together(rank), model, optimizer, range(1))
    assert len(optimizer.param_groups) == 1


@on_ranks(2, (torch.float32, torch.bfloat16))
def test_a_later_parameter_takes_the_dtype_that_is_forced(rank: int, dtype: torch.dtype) -> None:
    """Also one of fp16, whose loss would have to be scaled if it stayed so."""
    model, late = net(), nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = LowLevelZeroOptimizer(momentum(model), model=model, forced_dtype=dtype)
    optimizer.add_param_group({"params": [late]})
    assert late.dtype == dtype
    optimizer.backward((late * (rank + 1.0)).sum())
    optimizer.step()
    assert (late < 1).all()


@on_ranks(2)
def test_the_name_of_an_unfrozen_parameter_goes_to_its_new_group(rank: int) -> None:
    model = net()
    model[1].requires_grad_(False)
    names = {p: name for name, p in model.named_parameters()}
    groups = [{"params": list(each.parameters())} for each in (model[:2], model[2:])]
    named = [{**group, "param_names": [names[p] for p in group["params"]]} for group in groups]
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(named, lr=0.1), model=model)
    model[1].weight.requires_grad_(True)
    optimizer.add_param_group({"params": [model[1].weight], "param_names": ["1.weight"]})
    steps(Together(rank), model, optimizer, [0])
    told = [group["param_names"] for group in optimizer.state_dict()["param_groups"]]
    assert told == [["0.weight", "0.bias", "1.bias"], [names[p] for p in model[2:].parameters()], ["1.weight"]]


@on_ranks(1)
def test_an_unfrozen_parameter_is_told_of_though_another_group_has_come_since(rank: int) -> None:
    """It would stay as it is, and keep its gradients."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = LowLevelZeroOptimizer(momentum(model[:3]), model=model)
    model[0].weight.requires_grad_(True)
    optimizer.add_param_group({"params": model[3].parameters()})
    with pytest.raises(RuntimeError, match=r"^0\.weight: expected it frozen.* optimizer\.add_param_group"):
        steps(Together(rank), model, optimizer, [0])
    optimizer.add_param_group({"params": model[0].weight})
    steps(Together(rank), model, optimizer, [0])


@on_ranks(2, [torch.float32, torch.bfloat16])
def test_parameters_that_exchange_their_memory_keep_each_other_s_values(rank: int, dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.full((4,), float(at), dtype=dtype)) for at in range(3)]
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(parameters, lr=0.5))
    memory = [p.data for p in parameters]
    for at, p in enumerate(parameters):
        p.data = memory[(at + 1) % 3]
    optimizer.backward(torch.stack([p.sum() for p in parameters]).sum())
    optimizer.step()
    assert [p[0].item() for p in parameters] == [0.5, 1.5, -0.5]


class Replacing(torch.optim.Optimizer):
    """An optimizer that doesn't write in place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


@on_ranks(2, ["elements", "parameters"])
def test_edits_reach_an_optimizer_that_gives_its_parameters_other_memory(rank: int, split: str) -> None:
    model, alone, x = nn.Linear(5, 3), nn.Linear(5, 3), torch.randn(4, 5)
    alone.load_state_dict(model.state_dict())
    optimizer, of_alone = (
        LowLevelZeroOptimizer(Replacing(model.parameters()), split=split),
        Replacing(alone.parameters()),
    )
    for edit in (lambda p: None, lambda p: p.mul_(0.5), lambda p: p.copy_(torch.full_like(p, 0.25))):
        with torch.no_grad():
            for p in (*model.parameters(), *alone.parameters()):
                edit(p)
        optimizer.backward(model(x[2 * rank :][:2]).square().mean())
        alone(x).square().mean().backward()
        for each in (optimizer, of_alone):
            each.step()
            each.zero_grad()
    torch.testing.assert_close([*model.parameters()], [*alone.parameters()], rtol=0, atol=1e-6)


class Listing(torch.optim.SGD):
    """Has a list of parameters of its own."""

    def __init__(self, params: Any) -> None:
        self.mine = list(params)
        super().__init__(self.mine, lr=0.1)


@on_ranks(2)
def test_an_optimizer_with_a_list_of_parameters_of_its_own_is_refused(rank: int) -> None:
    with pytest.raises(TypeError, match=r"expected Listing to find its parameters in param_groups.* in .mine: let"):
        LowLevelZeroOptimizer(Listing(nn.Linear(3, 3).parameters()))


# ---- parameters that were moved to memory of other strides, such as channels_last ----

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CALLS = ("state_dict", "backward after", "backward before", "read", "edit", "no_sync", "load", "assign")


class Both:
    """A model that is trained on two ranks, and one that is trained in one process, on the same batch."""

    def __init__(self, rank: int, start: str, then: str, split: str | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=FORMATS[start])
        self.alone = copy.deepcopy(self.model)
        self.x, self.rank, self.then = torch.randn(4, 2, 3, 3), rank, then
        adam = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.optimizer = LowLevelZeroOptimizer(adam, model=self.model, split=split)
        self.of_alone = torch.optim.Adam(self.alone.parameters(), lr=0.1)

    def backward(self) -> None:
        self.optimizer.backward(self.model(self.x[2 * self.rank :][:2]).square().mean())
        self.alone(self.x).square().mean().backward()

    def step(self) -> None:
        for each in (self.optimizer, self.of_alone):
            each.step()
            each.zero_grad()

    def move(self) -> None:
        for model in (self.model, self.alone):
            model.weight.data = model.weight.data.to(memory_format=FORMATS[self.then])

    def after(self, call: str) -> tuple[Tensor, Tensor]:
        """Train, move the weight, make a call, and return the same of both."""
        self.backward()
        self.step()
        if call in ("backward before", "read", "edit"):
            self.backward()
        if call == "no_sync":
            with self.optimizer.no_sync():
                self.backward()
        saved = [copy.deepcopy(each.state_dict()) for each in (self.optimizer, self.of_alone)]
        self.move()
        if call == "state_dict":
            whole, of_alone = (each.state_dict()["state"][0]["exp_avg"] for each in (self.optimizer, self.of_alone))
            return whole, of_alone
        if call == "read":
            return self.model.weight.grad.clone(), self.alone.weight.grad.clone()  # type: ignore[union-attr]
        if call == "edit":
            for model in (self.model, self.alone):
                model.weight.grad.add_(model.weight.detach())  # type: ignore[union-attr]
        if call == "load":
            self.optimizer.load_state_dict(saved[0])
            self.of_alone.load_state_dict(saved[1])
        if call == "assign":
            for model in (self.model, self.alone):
                model.weight.data = torch.arange(24.0).view(3, 2, 2, 2) / 20
        if call in ("backward after", "no_sync", "load", "assign"):
            self.backward()
        self.step()
        return self.model.weight.detach().clone(), self.alone.weight.detach().clone()


def train(rank: int, world_size: int, start: str, split: str | None) -> list[float]:
    (then,) = FORMATS.keys() - {start}
    made: list[Any] = [(call, Both(rank, start, then, split)) for call in CALLS]
    return [float((own - alone).abs().max()) for call, both in made for own, alone in [both.after(call)]]


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_numbers_are_those_of_one_process(subtests: pytest.Subtests) -> None:
    cases = [(start, split) for start in FORMATS for split in (None, "parameters")]
    for (start, split), ran in run_cases(train, 2, cases, timeout=30):
        for differences in ran.values():
            for call, difference in zip(CALLS, differences, strict=True):
                with subtests.test(start=start, split=split, call=call):
                    assert difference < 1e-6
