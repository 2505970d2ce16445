"""Optimizers that step each parameter by itself: one rank owns a parameter whole, and trains as one process does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.fake import fake_world
from lowlevel_zero import LowLevelZeroOptimizer, options
from lowlevel_zero.bookkeeping import gather_store
from lowlevel_zero.deepspeed import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from lowlevel_zero.layout import layout_of, memory_held, traffic_of
from lowlevel_zero.optim.splits import choose_splits
from lowlevel_zero.testing import assert_trains_alike
from tests.support import experts
from tests.support.grid import Grid
from tests.support.judging import check_run
from tests.support.numbers import DROPS, STAGES, check_masters, masters_of, trained
from tests.support.on_ranks import on_ranks
from tests.support.oracle import Result, Run, build, groups, loss_of, train_sharded
from tests.support.ranks import run_cases, run_ranks
from tests.support.saving import load_by, save_by

Make = Callable[[Any], torch.optim.Optimizer]


class ByParameter(torch.optim.SGD):
    """Scales each parameter's update to the parameter's norm, with a momentum."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    mean = state.setdefault("mean", torch.zeros_like(p))
                    mean.mul_(0.9).add_(p.grad)
                    norm = p.detach().norm() / (mean.norm() + 1e-3)
                    p.data.add_(mean, alpha=-group["lr"] * float(norm.clamp(0.1, 10)))


def by_parameter(parameters: Any) -> torch.optim.Optimizer:
    return ByParameter(parameters, lr=0.05)


def run_of(world_size: int = 2, **settings: Any) -> Run:
    """A run of a class that is known to be stepped by parameters, and isn't tried again."""
    run = Run(world_size, **{"steps": 4, "dtype": torch.float64, "optimizer": by_parameter, **settings})
    return run.with_options(split="parameters")


WAYS: dict[str, dict[str, Any]] = {
    "clipped, dropped by all": {"clip": 0.3, "drop": DROPS["total"]},
    "under no_sync": {"micro_batches": 2, "no_sync": True, "bare": True},
    "micro-batches": {"micro_batches": 2},
    "on the host": {"options": {"cpu_offload": True, "partition_grad": True}},
    "overlapped gathers": {"options": {"overlap_allgather": True, "reduce_bucket_size": 40}},
    "fp8 falls back": {"options": {"fp8_communication": True, "partition_grad": True}},
    "small buckets": {"options": {"reduce_bucket_size": 1, "partition_grad": True}},
}


def test_one_process_s_numbers_in_all_ways(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "FP8_MIN_NUMEL", 1)
    monkeypatch.setattr(gather_store, "PART", 40)  # so that a small model is gathered in several parts
    assert choose_splits(by_parameter([torch.nn.Parameter(torch.ones(2, 3))])) == ["parameters"]
    sizes = {1: "stage1", 2: "stage1", 4: "stage2"}
    runs = {
        f"{size} ranks": run_of(size, drop=DROPS["different"]).with_options(**STAGES[sizes[size]]) for size in sizes
    }
    runs |= {way: run_of(3, **{"drop": DROPS["different"], **settings}) for way, settings in WAYS.items()}
    for name, run, ran in trained(runs):
        with subtests.test(name):
            check_run(run, ran.values(), 1e-9, 1e-9)


def test_sixteen_bits_over_fp32_masters(subtests: pytest.Subtests) -> None:
    def of(dtype: torch.dtype) -> Run:
        run = run_of(2, dtype=dtype, drop=DROPS["different"], clip=0.3)
        return run.with_options(partition_grad=True, initial_scale=256.0, communication_dtype=torch.float32)

    for name, run, ran in trained({str(dtype): of(dtype) for dtype in (torch.bfloat16, torch.float16)}, masters_of):
        with subtests.test(name):
            check_masters(run, ran.values(), 1e-2)


@pytest.mark.parametrize("form", ["pair", "hybrid"])
def test_two_levels_of_ranks(form: str) -> None:
    run = run_of(4, drop=DROPS["different"])

    def train(rank: int, world_size: int) -> Result:
        return train_sharded(rank, world_size, run.with_options(**Grid.of(rank, (2, 2)).options(form)))

    check_run(run, run_ranks(train, 4), 1e-9, 1e-9)


def test_experts_are_owned_by_the_ranks_that_share_them() -> None:
    experts.check(experts.Run(optimizer=by_parameter, steps=2), 2e-5)


# ---- state ----


class Factored(torch.optim.SGD):
    """Keeps a second moment for each row, statistics in a list, and a count: states of many shapes."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, rows = self.state[p], p.grad.flatten(1) if p.dim() > 1 else p.grad.view(1, -1)
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["rows"] = torch.zeros(len(rows), dtype=p.dtype)
                    state["mean"] = torch.zeros_like(p)
                    state["all"] = [torch.zeros(2, rows.shape[1], dtype=p.dtype), None, {"n": 1}]
                state["step"] += 1
                state["rows"].mul_(0.9).add_(rows.square().mean(1))
                state["mean"].mul_(0.5).add_(p.grad)
                state["all"][0][0].add_(rows.sum(0))
                state["all"][2]["n"] += 1
                scale = (state["rows"].sqrt() + 0.1 * state["all"][2]["n"]).view(-1, *(1,) * (rows.dim() - 1))
                update = state["mean"].reshape(rows.shape) / scale + 0.01 * state["all"][0].sum(0)
                p.data.add_(update.view(p.shape), alpha=-group["lr"])


def factored(parameters: Any) -> torch.optim.Optimizer:
    return Factored(parameters, lr=0.02)


def train(model: torch.nn.Module, optimizer: Any, run: Run, steps: range, ranks: range) -> tuple[Any, Any]:
    """Train by the mean of these ranks' batches, and return the parameters, and the state dict."""
    for step in steps:
        loss = torch.stack([loss_of(model, run, step, 0, rank) for rank in ranks]).mean()
        optimizer.backward(loss) if isinstance(optimizer, LowLevelZeroOptimizer) else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same, whatever the order of their keys."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.allclose(one, other, rtol=1e-9, atol=1e-9) if isinstance(one, torch.Tensor) else bool(one == other)


def test_whole_states_go_to_another_number_of_ranks_and_to_plain_torch() -> None:
    """Owners change. Each rank has its share of six batches, so that the same are trained on 2 ranks and on 3."""

    def go_on(rank: int, world_size: int, run: Run, former: Any, steps: range) -> Any:
        model = build(run)
        optimizer = LowLevelZeroOptimizer(run.optimizer(groups(model)), model=model, stage=2, **run.options)
        if former is not None:
            model.load_state_dict(former[0])
            optimizer.load_state_dict(former[1])
        return train(model, optimizer, run, steps, range(rank, run.world_size, world_size))

    exact, rounded = (
        run_of(6, optimizer=factored, dtype=dtype, drop=DROPS["different"]) for dtype in (torch.float64, torch.bfloat16)
    )
    begun = [(run, None, range(steps)) for steps in (3, 2) for run in (exact, rounded)]
    straight, straight_rounded, first, first_rounded = (ran.values() for _, ran in run_cases(go_on, 2, begun))
    assert same(straight[0], straight[1])
    assert same(run_ranks(go_on, 2, rounded, first_rounded[0], range(2, 3))[0], straight_rounded[0])
    resumed = [(exact, first[0], range(2, 3)), (rounded, first_rounded[0], range(2, 2))]
    on_three, kept = (ran.values() for _, ran in run_cases(go_on, 3, resumed))
    assert same(on_three[2], straight[0])
    assert same(kept[2][1]["state"], first_rounded[0][1]["state"])
    model = build(exact)
    inner = factored(groups(model))
    model.load_state_dict(first[0][0])
    inner.load_state_dict(first[0][1])  # of which plain torch writes into the lists
    parameters, state = train(model, inner, exact, range(2, 3), range(6))
    assert same(parameters, straight[0][0])
    assert same(state["state"], straight[0][1]["state"])


CHECKPOINTS = {
    "states of many shapes": (factored, "checkpoint", torch.float64),
    "over fp32 masters": (factored, "checkpoint", torch.bfloat16),
    "by torch's functions": (by_parameter, "torch", torch.float64),
}
# How many ranks go on, by case. Sums of 16 bits are those of as many ranks alone.
RESUMED = {2: ["over fp32 masters"], 3: ["states of many shapes", "by torch's functions"], 1: ["states of many shapes"]}


def test_a_checkpoint_goes_on_at_another_number_of_ranks(tmp_path: Path, subtests: pytest.Subtests) -> None:
    def go_on(rank: int, world_size: int, case: str, resumes: bool) -> Any:
        optimizer, way, dtype = CHECKPOINTS[case]
        run = run_of(6, optimizer=optimizer, dtype=dtype)
        model, ranks = build(run), range(rank, 6, world_size)
        sharded = LowLevelZeroOptimizer(run.optimizer(groups(model)), model=model, **run.options)
        if resumes:
            load_by(way, tmp_path / case, model, sharded)
        else:
            train(model, sharded, run, range(2), ranks)
            save_by(way, tmp_path / case, model, sharded)
        parameters, state = train(model, sharded, run, range(2, 4), ranks)
        return parameters, state["state"]

    straight = {
        case: ran.values()[0] for (case, _), ran in run_cases(go_on, 2, [(case, False) for case in CHECKPOINTS])
    }
    for world_size, names in RESUMED.items():
        for (case, _), ran in run_cases(go_on, world_size, [(case, True) for case in names]):
            with subtests.test(case, world_size=world_size):
                assert same(ran.values()[-1], straight[case])


# ---- what else is done to an optimizer's parameters ----


class Normalising(torch.optim.SGD):
    """Takes matrices alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            assert p.dim() == 2
            p.sub_(p.grad / p.grad.norm(), alpha=0.1)


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")


@needs_muon
@on_ranks(2)
def test_groups_are_added_and_dealt_out_to_those_with_least(rank: int) -> None:
    """Muon takes matrices alone: what other ranks have in their place must not be taken for parameters."""
    sizes = [(8, 8), (4, 4), (2, 2), (2, 3)]
    p, *later = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = LowLevelZeroOptimizer(torch.optim.Muon([p], lr=0.1), partition_grad=True)
    optimizer.add_param_group({"params": later[:2]})
    optimizer.add_param_group({"params": later[2:]})
    plain = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    alone = torch.optim.Muon(plain, lr=0.1)
    for _ in range(2):
        optimizer.backward(sum((each * (rank + 1) * torch.eye(*each.shape)).sum() for each in (p, *later)))
        sum((each * 1.5 * torch.eye(*each.shape)).sum() for each in plain).backward()
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
    torch.testing.assert_close([p, *later], plain, rtol=0, atol=0)
    assert [record.split.owner for record in optimizer.sharded_parameters] == [0, 1, 1, 1]


@on_ranks(2)
def test_groups_that_have_nothing_to_train_are_added(rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].requires_grad_(False)
    optimizer = LowLevelZeroOptimizer(Normalising(model[0].parameters(), lr=0.1), model=model)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    optimizer.add_param_group({"params": []})
    start = model[0].weight.detach().clone()
    optimizer.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    torch.testing.assert_close((model[0].weight - start).norm(), torch.tensor(0.1))


@needs_muon
@on_ranks(4)
def test_every_matrix_is_stepped_once_and_by_all_ranks_alike(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []
    from torch.optim import _muon

    take = lambda x, *settings: (taken.append(tuple(x.shape)), x)[1]  # noqa: E731
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", take)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(8)))
    optimizer = LowLevelZeroOptimizer(torch.optim.Muon(model.parameters()), model=model)
    for layers, count in ((model, 2), (model[:4], 1)):
        taken.clear()
        optimizer.backward(layers(torch.randn(2, 16)).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert len(taken) == count


@needs_muon
@on_ranks(2)
def test_what_its_class_refuses_in_its_first_step_is_refused(rank: int) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Muon([model.weight])
    optimizer.add_param_group({"params": [model.bias]})
    with pytest.raises(TypeError, match="2D matrix"):
        LowLevelZeroOptimizer(optimizer, model=model)


@on_ranks(2)
def test_hooks_on_its_steps_run_once_a_step(rank: int) -> None:
    model = torch.nn.Linear(3, 2)
    wrapped = by_parameter(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(wrapped)  # which warns if it sees no step
    calls: list[str] = []
    wrapped.register_step_pre_hook(lambda *_: calls.append("before"))
    wrapped.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer = LowLevelZeroOptimizer(wrapped, model=model)
    for _ in range(2):
        optimizer.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
    assert calls == ["before", "after"] * 2


# On the owner, and on ranks that are told of its error.
_REFUSED = (ValueError, RuntimeError)


@on_ranks(2)
def test_deepspeed_s_accessors_read_and_write_whole_values_and_states_of_other_shapes(rank: int) -> None:
    model = torch.nn.Linear(5, 3).bfloat16()
    optimizer = LowLevelZeroOptimizer(factored(model.parameters()), model=model, stage=2)
    weight = model.weight
    with pytest.raises(_REFUSED, match="weight: expected it to have 'rows', it has none yet"):
        safe_set_full_optimizer_state(weight, torch.ones(3), "rows")
    optimizer.backward(model(torch.ones(2, 5).bfloat16()).sum())
    torch.testing.assert_close(safe_get_full_grad(weight), torch.full((3, 5), 2.0))
    safe_set_full_grad(weight, torch.arange(15.0).view(3, 5))
    torch.testing.assert_close(safe_get_full_grad(weight), torch.arange(15.0).view(3, 5))
    optimizer.step()
    torch.testing.assert_close(safe_get_full_optimizer_state(weight, "mean"), torch.arange(15.0).view(3, 5))
    value = torch.linspace(0, 1, 15).view(3, 5)
    safe_set_full_fp32_param(weight, value)
    torch.testing.assert_close(safe_get_full_fp32_param(weight), value)
    assert torch.equal(weight.detach(), value.bfloat16())
    for key, new in (("mean", 2 * value), ("rows", torch.arange(3.0)), ("step", torch.tensor(7.0))):
        safe_set_full_optimizer_state(weight, new, key)
        torch.testing.assert_close(safe_get_full_optimizer_state(weight, key), new)
    for key, wrong, told in (
        ("mean", value.t(), r"weight: expected value to be of shape \(3, 5\), got \(5, 3\)"),
        ("rows", value, r"weight: expected value to be of shape \(3,\), got \(3, 5\)"),
        ("median", value, "weight: expected one of its states, .*mean.*, got 'median'"),
    ):
        with pytest.raises(_REFUSED, match=told):
            safe_set_full_optimizer_state(weight, wrong, key)
    with pytest.raises(ValueError, match="step = 0.0.*step = 1.0"):
        safe_set_full_optimizer_state(weight, float(rank), "step")  # type: ignore[arg-type]


@on_ranks(2)
def test_layout_tells_each_rank_s_share(rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 6, bias=False))
    optimizer = LowLevelZeroOptimizer(by_parameter(model.parameters()), model=model)
    layout = layout_of(optimizer)
    assert [p.split.span(rank) for p in layout.parameters] == [[(0, 64), (0, 0)], [(0, 0), (0, 48)]][rank]
    assert layout.bytes == replace(memory_held(optimizer), bucket_buffers=0, gradients=layout.bytes.gradients)
    owned = "the ranks own 64, 48 elements, the fullest 1.14 of the mean, the busiest 1.14"
    assert f"of parameters that a rank owns whole {owned}" in layout.table()


@pytest.mark.parametrize("world_size", [8, 64, 1024])
def test_as_many_bytes_travel_as_adamw_s(world_size: int) -> None:
    def sent(make: Make) -> dict[str, int]:
        with fake_world(world_size):
            torch.manual_seed(0)
            layers = [torch.nn.Linear(256, out, bias=False) for _ in range(6) for out in (768, 256, 1024)]
            model = torch.nn.Sequential(*layers)
            optimizer = LowLevelZeroOptimizer(make(model.parameters()), model=model, stage=2)
            optimizer.backward(sum(layer(torch.ones(1, 256)).sum() for layer in layers))
            optimizer.step()
            return traffic_of(optimizer)

    whole, even = sent(by_parameter), sent(torch.optim.AdamW)
    assert whole.keys() == even.keys()
    assert all(whole[purpose] <= 1.02 * even[purpose] for purpose in whole)


@on_ranks(2)
def test_the_caller_s_cost_deals_out_owners(rank: int) -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(8, out, bias=False) for out in (1, 2, 3, 8))
    dear = {id(model[0].weight): 5, id(model[1].weight): 4.5}
    inner = by_parameter(model.parameters())
    optimizer = LowLevelZeroOptimizer(inner, model=model, cost=lambda p: dear.get(id(p), 1))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1, 1))]})
    assert [record.split.owner for record in optimizer.sharded_parameters] == [0, 1, 1, 0, 1]


COSTS: list[tuple[Any, type[Exception], str]] = [
    (lambda p: "much", TypeError, r"cost of weight: expected a finite number >= 0, got str 'much'"),
    (lambda p: -1, ValueError, r"cost of weight: expected a finite number >= 0, got -1"),
    (1.5, TypeError, r"cost: expected a callable that returns the cost of a parameter, or None"),
    (lambda p: torch.distributed.get_rank(), ValueError, r"weight.*costs \(0,\).*costs \(1,\)"),
]


@on_ranks(2, COSTS)
def test_a_cost_that_owners_can_t_be_dealt_out_by_is_refused(
    rank: int, cost: Any, raised: type[Exception], message: str
) -> None:
    model = torch.nn.Linear(3, 2)
    with pytest.raises(raised, match=message):
        LowLevelZeroOptimizer(by_parameter(model.parameters()), model=model, cost=cost)


Muon = type("Muon", (ByParameter,), {})


@on_ranks(2)
def test_muon_s_work_counts_as_operations(rank: int) -> None:
    """A matrix takes more than three of half the size: by elements rank 0 would get one of these too."""
    shapes = [(64, 64), (64, 32), (64, 32), (64, 32), (6, 10)]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = LowLevelZeroOptimizer(Muon([{"params": parameters[:4]}, {"params": parameters[4:], "use_muon": False}]))
    assert layout_of(optimizer).owned[0].work == 5 * 3 * 64**3
    assert [record.split.owner for record in optimizer.sharded_parameters] == [0, 1, 1, 1, 1]


class Careless(torch.optim.SGD):
    """Takes for granted that each parameter has a gradient, and looks at all shapes."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.grad.flatten(1) if p.dim() > 1 else p.grad.view(1, -1)  # type: ignore[union-attr]
                p.data.sub_(group["lr"] * (rows / (rows.norm(dim=1, keepdim=True) + 1e-6)).view(p.shape))


class Counting(Careless):
    """Its rate falls with its steps, those without any gradient included."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in (each for each in group["params"] if each.grad is not None):
                p.data.sub_(group["lr"] / group["steps"] * p.grad / p.grad.norm())


class CountingWhereItHasSome(Counting):
    """The same, but it skips steps in which a group is empty."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if all(group["params"] for group in self.param_groups):
            super().step(closure)


class NeverEmpty(Counting):
    """Looks at the first parameter of each group, and counts the steps of groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(group["params"][0].dim() == 2 for group in self.param_groups)
        super().step(closure)
        for p in (each for group in self.param_groups for each in group["params"]):
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1


class OnTheFirstDevice(torch.optim.SGD):
    """Looks at the device of each group's first parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = torch.tensor(group["lr"], device=group["params"][0].device)
            for p in (each for each in group["params"] if each.grad is not None):
                p.sub_(rate * p.grad)


class Stacking(torch.optim.SGD):
    """Stacks the norms of a group's gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            for p, norm in zip(used, torch.stack([p.grad.norm() for p in used]), strict=True):
                p.sub_(p.grad / norm, alpha=0.1)


class OfGroupsOfItsOwn(torch.optim.Optimizer):
    """Makes a group of each parameter, so no trial can make one; stacks norms, and counts a group's steps that step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([{"params": [p], "steps": 0, "dims": p.dim()} for p in params], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = torch.stack([p.norm() for p in group["params"]]).norm()
            used = [p for p in group["params"] if p.grad is not None]
            group["steps"] += len(used)
            for p in used:
                p.sub_(norm / group["steps"] * p.grad, alpha=group["lr"])


def loss_of_all(model: Any, step: int, rank: int) -> torch.Tensor:
    return torch.stack([(p.sin() * (rank + step + 1)).sum() for p in model.parameters()]).sum()


def loss_of_one_layer(model: Any, step: int, rank: int) -> torch.Tensor:
    return loss_of_all(model[step % len(model)], step, rank)


def loss_at_times(model: Any, step: int, rank: int) -> torch.Tensor:
    return loss_of_all(model, step, rank) if step % 2 else torch.zeros(())


def of_one_group(cls: Any, model: Any) -> torch.optim.Optimizer:
    return cls(model.parameters(), lr=0.1)


def of_groups(cls: Any, model: Any) -> torch.optim.Optimizer:
    return cls([{"params": list(layer.parameters())} for layer in model], lr=0.1)


def with_names(cls: Any, model: Any) -> torch.optim.Optimizer:
    return cls([{"params": list(model.parameters()), "param_names": ["first", "second"]}], lr=0.1)


def of_the_last_alone(cls: Any, model: Any) -> torch.optim.Optimizer:
    model[0].requires_grad_(False)
    return of_groups(cls, model)


class Alike(NamedTuple):
    """A class that looks at more than the parameters that a rank owns, and how it trains as in one process."""

    make: Callable[[Any, Any], torch.optim.Optimizer]
    cls: type[torch.optim.Optimizer]
    layers: Sequence[tuple[int, int]]
    loss: Callable[[Any, int, int], torch.Tensor]
    split: str = "parameters"
    world_size: int = 2
    clip: float = 0.0
    options: Mapping[str, Any] = MappingProxyType({})


ALIKE = {
    "parameters of other ranks are not there in a step": Alike(of_one_group, Careless, [(5, 3), (2, 3)], loss_of_all),
    # Each rank owns the only matrix of one group, and nothing of the third but on rank 0.
    "a class that fails on an empty group is given a parameter in it": Alike(
        of_groups, NeverEmpty, [(5, 3), (5, 4), (2, 2)], loss_of_all, world_size=4
    ),
    "a frozen group isn't empty for a class that fails on that": Alike(
        of_the_last_alone, OnTheFirstDevice, [(5, 3), (3, 4)], loss_of_all, "elements"
    ),
    "a class that fails without gradients is given one where others have some": Alike(
        with_names, Stacking, [(4, 4), (4, 4)], loss_of_one_layer
    ),
    "a class that can't be tried is given one, with a gradient where others have some": Alike(
        of_one_group, OfGroupsOfItsOwn, [(5, 3), (2, 3)], loss_of_one_layer, options={"split": "parameters"}
    ),
    "steps count on a rank that owns nothing": Alike(of_one_group, CountingWhereItHasSome, [(5, 3)], loss_of_all),
    "steps without any gradient count": Alike(of_one_group, Counting, [(5, 3)], loss_at_times),
    "steps without any gradient count where it clips": Alike(of_one_group, Counting, [(5, 3)], loss_at_times, clip=1e6),
}


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_train_alike(world_size: int, subtests: pytest.Subtests) -> None:
    cases = [(case,) for case in ALIKE if ALIKE[case].world_size == world_size]
    for (case,), ran in run_cases(train_alike, world_size, cases, one_group=True):
        with subtests.test(case):
            ran.values()


def train_alike(rank: int, world_size: int, case: str) -> None:
    make, cls, layers, loss, split, _, clip, more = ALIKE[case]

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(*sizes, bias=False) for sizes in layers))

    found = assert_trains_alike(
        lambda each: make(cls, each), model, tolerance=0, loss=loss, clip_grad_norm=clip, **more
    )
    assert {*found.splits} == {split}
    assert cls is not NeverEmpty or sum(size > 0 for size in found.states) <= 3


@on_ranks(2)
def test_what_stands_in_for_the_parameters_of_others_leaves_no_state(rank: int) -> None:
    """Each rank has nothing of its own in one of two groups."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 3, bias=False), torch.nn.Linear(5, 4, bias=False))
    optimizer = LowLevelZeroOptimizer(of_groups(NeverEmpty, model), model=model)
    for step in range(2):
        optimizer.backward(loss_of_all(model, step, rank))
        optimizer.step()
        optimizer.zero_grad()
    own = {record.p32 for record in optimizer.sharded_parameters if record.owns_some}
    assert len(own) == 1
    assert optimizer.optim.state.keys() == own
