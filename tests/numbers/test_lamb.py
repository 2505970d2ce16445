"""LAMB: in one process what the formulas say, over slices what it is in one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.optim import Lamb
from tests.support import experts
from tests.support.grid import Grid
from tests.support.judging import check_run
from tests.support.numbers import DROPS, STAGES, check_masters, masters_of, trained
from tests.support.oracle import Result, Run, build, train_rank, train_sharded
from tests.support.ranks import run_ranks

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nvlamb": {"use_nvlamb": True, "weight_decay": 0.0, "bias_correction": False},
    "undecayed": {"weight_decay": 0.0, "grad_averaging": False},
    "clamped": {"min_coeff": 0.5, "max_coeff": 0.7, "betas": (0.5, 0.9)},
    "l2": {"adam_w_mode": False, "weight_decay": 0.3, "eps": 1e-3},
    "tensor lr": {"lr": torch.tensor(0.02)},
}


def lamb(**settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: Lamb(parameters, **{"lr": 0.01, **settings})


def colossalais(**settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    from colossalai.nn.optimizer import Lamb as Theirs  # which takes seconds to import

    return lambda parameters: Theirs(parameters, **{"lr": 0.01, "weight_decay": 0.1, **settings})


# ---- by the formulas ----


def by_hand(p: Tensor, gradients: list[Tensor], **settings: Any) -> Tensor:
    """One parameter after a step for each gradient, told anew."""
    given = {key: value.default for key, value in _parameters_of(Lamb).items()} | {"lr": 0.01} | settings
    beta1, beta2 = given["betas"]
    decay, mean, square = given["weight_decay"], torch.zeros_like(p), torch.zeros_like(p)
    for step, gradient in enumerate(gradients, start=1):
        g = gradient if given["adam_w_mode"] else gradient + decay * p
        mean = beta1 * mean + ((1 - beta1) if given["grad_averaging"] else 1) * g
        square = beta2 * square + (1 - beta2) * g**2
        corrections = (1 - beta1**step, 1 - beta2**step) if given["bias_correction"] else (1, 1)
        update = mean / corrections[0] / ((square / corrections[1]).sqrt() + given["eps"])
        if given["adam_w_mode"]:
            update = update + decay * p
        ratio = 1.0
        if (decay or given["use_nvlamb"]) and p.norm() > 0 and update.norm() > 0:
            ratio = max(float(p.norm() / update.norm()), given["min_coeff"])
            ratio = ratio if given["max_coeff"] is None else min(ratio, given["max_coeff"])
        p = p - float(given["lr"]) * ratio * update
    return p


def _parameters_of(cls: type) -> dict[str, Any]:
    return {key: p for key, p in inspect.signature(cls).parameters.items() if key != "params"}


@pytest.mark.parametrize("settings", SETTINGS)
def test_one_process_follows_the_formulas(settings: str) -> None:
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (), (7,), (0, 2))]
    starts += [torch.zeros(4, dtype=torch.float64), torch.randn(6, 2, generator=generator, dtype=torch.float64).t()]
    params = [nn.Parameter(start.clone()) for start in starts]
    optimizer = Lamb(params, **{"lr": 0.01, **SETTINGS[settings]})
    gradients = [[torch.randn(s.shape, generator=generator, dtype=s.dtype) for s in starts] for _ in range(5)]
    for each in gradients:
        for p, gradient in zip(params, each, strict=True):
            p.grad = gradient.clone()
        assert optimizer.step(lambda: 3.5) == 3.5
    for place, start in enumerate(starts):
        expected = by_hand(start, [each[place] for each in gradients], **SETTINGS[settings])
        torch.testing.assert_close(params[place].detach(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr": -1}, "lr: expected a number >= 0, got -1"),
        ({"lr": float("nan")}, "lr: expected"),
        ({"eps": -1e-9}, "eps: expected"),
        ({"weight_decay": -0.1}, "weight_decay: expected"),
        ({"betas": (0.9, 1.0)}, r"betas: expected two numbers from 0 to below 1, got \(0.9, 1.0\)"),
        ({"min_coeff": -1}, "min_coeff: expected"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "max_coeff: expected at least min_coeff, 2.0, or None, got 1.0"),
    ],
)
def test_numbers_out_of_range(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Lamb([nn.Parameter(torch.ones(1))], **settings)


def test_a_sparse_gradient() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="expected a dense gradient"):
        Lamb([p]).step()


# ---- over slices ----


def run_of(world_size: int, make: Callable[[Any], torch.optim.Optimizer], **settings: Any) -> Run:
    return Run(world_size, steps=4, optimizer=make, **settings)


def test_slices_are_stepped_as_the_whole(subtests: pytest.Subtests) -> None:
    def of(world_size: int, settings: str) -> Run:
        stage, drop = list(STAGES)[(world_size + len(settings)) % 3], list(DROPS)[(2 * world_size + len(settings)) % 5]
        run = run_of(world_size, lamb(**SETTINGS[settings]), drop=DROPS[drop], clip=0.3)
        return run.with_options(reduce_bucket_size=50, **STAGES[stage])

    runs = {f"{size} ranks, {settings}": of(size, settings) for size, settings in zip(cycle((1, 2, 3, 4)), SETTINGS)}
    run = run_of(2, lamb(), micro_batches=2)
    runs["on the host"] = run.with_options(cpu_offload=True)
    runs["overlapped gathers"] = run.with_options(overlap_allgather=True, partition_grad=True)
    for name, run, ran in trained(runs):
        with subtests.test(name):
            check_run(run, ran.values(), 5e-6)


@pytest.mark.colossalai
def test_colossalai_s_own(subtests: pytest.Subtests) -> None:
    def of(world_size: int, settings: dict[str, Any]) -> Run:
        return run_of(world_size, colossalais(**settings), drop=DROPS["different"]).with_options(partition_grad=True)

    settings: list[dict[str, Any]] = [{}, {"bias_correction": True}, {"adam": True, "weight_decay": 0}]
    for name, run, ran in trained({str(each): of(3, each) for each in settings}):
        with subtests.test(name):
            check_run(run, ran.values(), 5e-6)


def test_sixteen_bits_over_fp32_masters(subtests: pytest.Subtests) -> None:
    """With gradients in fp32 on the wire: else its rounding is what would be seen."""
    run = replace(run_of(2, lamb(eps=1e-2)), steps=3)
    run = run.with_options(partition_grad=True, initial_scale=256.0, communication_dtype=torch.float32)
    runs = {str(dtype): replace(run, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)}
    for name, each, ran in trained(runs, masters_of):
        with subtests.test(name):
            check_masters(each, ran.values(), 1e-4)


def test_memory_behind_a_parameter_s_end_counts_for_nothing() -> None:
    def work(rank: int, world_size: int) -> None:
        padded = torch.full((8,), 100.0)
        padded[:7] = torch.arange(7.0)
        p, plain = nn.Parameter(padded[:7]), nn.Parameter(torch.arange(7.0))
        ours, optimizer = LowLevelZeroOptimizer(Lamb([p], lr=0.1)), Lamb([plain], lr=0.1)
        for _ in range(2):
            ours.backward(p.square().sum())
            plain.square().sum().backward()
            for each in (ours, optimizer):
                each.step()
                each.zero_grad()
        torch.testing.assert_close(p, plain)

    run_ranks(work, 2)


def test_all_norms_travel_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, world_size: int) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []
        sum_scalar = ShardGroup.sum_scalar

        def spy(self: ShardGroup, value: Tensor) -> Any:
            shapes.append(tuple(value.shape))
            return sum_scalar(self, value)

        monkeypatch.setattr(ShardGroup, "sum_scalar", spy)
        train_rank(rank, world_size, replace(run_of(world_size, lamb(), drop=lambda *_: {1}), steps=1))
        return shapes

    trained = sum(p.requires_grad and p.numel() > 0 for p in build(run_of(2, lamb())).parameters())
    # The norm of the gradients, and two numbers for each of those that worked, in groups that decay.
    for shapes in run_ranks(work, 2):
        assert sorted(len(shape) for shape in shapes) == [0, 2]
        (of_parameters,) = [shape for shape in shapes if shape]
        assert of_parameters[1] == 2
        assert 0 < of_parameters[0] < trained


# ---- state ----


# ---- which optimizers ----


def test_a_subclass_is_refused_with_what_to_use_instead() -> None:
    def wrap(rank: int, world_size: int) -> str:
        model = nn.Linear(2, 2)
        with pytest.raises(TypeError) as caught:
            LowLevelZeroOptimizer(type("Mine", (Lamb,), {})(model.parameters()), model=model)
        return str(caught.value)

    assert "Mine cannot be stepped on slices" in run_ranks(wrap, 1)[0]
    assert "it is a Lamb, and it scales" in run_ranks(wrap, 1)[0]
    assert "Use lowlevel_zero.optim.Lamb, which the ranks step together" in run_ranks(wrap, 1)[0]


@pytest.mark.parametrize("form", ["pair", "hybrid"])
def test_two_levels_of_ranks(form: str) -> None:
    run = replace(run_of(4, lamb(), drop=DROPS["different"]), steps=4)

    def train(rank: int, world_size: int) -> Result:
        return train_sharded(rank, world_size, run.with_options(**Grid.of(rank, (2, 2)).options(form)))

    check_run(run, run_ranks(train, 4), 5e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_norms_of_experts_are_those_of_the_ranks_that_share_them(size: int) -> None:
    experts.check(experts.Run(4, size, optimizer=lamb(eps=1e-3)), 2e-5)
