"""Between backward and step: gradients that are synchronized, edited by hand, clipped and stepped as they are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.gradients.sharded_gradient import ShardedGradient
from tests.support.ranks import run_cases, run_cases_expecting, run_ranks, run_ranks_expecting

STAGES: dict[str, dict[str, Any]] = {"stage 1": {}, "stage 2": {"partition_grad": True}}


def slices(optimizer: LowLevelZeroOptimizer) -> list[Tensor]:
    return [p32 for group in optimizer.optim.param_groups for p32 in group["params"]]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.arange(5.0))
        self.other = nn.Parameter(torch.arange(5.0))
        self.dropped = nn.Parameter(torch.arange(3.0))

    def forward(self, x: float) -> Tensor:
        return x * (self.used.sum() + 2 * self.other.sum())


def two(rank: int, **options: Any) -> tuple[Two, LowLevelZeroOptimizer]:
    """Return a model and its optimizer after a backward whose average gradients are 1.5 and 3."""
    model = Two()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = LowLevelZeroOptimizer(sgd, model=model, initial_scale=4, **{"partition_grad": True, **options})
    optimizer.backward(model(1.0 + rank))
    return model, optimizer


def test_gradients_may_be_taken_away_added_and_exchanged(subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, offload: bool) -> None:
        model, optimizer = two(rank, cpu_offload=offload)
        optimizer.synchronize()
        used, other, dropped = slices(optimizer)
        assert dropped.grad is None
        used.grad, other.grad = other.grad, used.grad
        dropped.grad = torch.ones_like(dropped)
        assert optimizer.get_param_grad(model.used).tolist() == [3.0] * 5
        assert optimizer.get_param_grad(model.dropped).tolist() == [1.0] * 3
        with optimizer.skip_synchronize():
            optimizer.step()
        assert model.used.tolist() == [value - 3.0 for value in range(5)]
        assert model.other.tolist() == [value - 1.5 for value in range(5)]
        assert model.dropped.tolist() == [value - 1.0 for value in range(3)]
        assert optimizer.get_grad_norm() == pytest.approx((5 * 9 + 5 * 2.25 + 3) ** 0.5)
        before = model.used.detach().clone()
        optimizer.zero_grad()
        optimizer.backward(model(1.0))
        optimizer.synchronize()
        used.grad = None
        with optimizer.skip_synchronize():
            optimizer.step()
        assert torch.equal(model.used, before)
        assert model.other.tolist() == [value - 3.5 for value in range(5)]
        assert optimizer.get_grad_norm() == pytest.approx(20**0.5)

    for (offload,), ran in run_cases(work, 2, [(False,), (True,)], one_group=True):
        with subtests.test(offload=offload):
            ran.values()


def test_edited_gradients_are_clipped_by_their_global_norm(subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, by_option: bool, offload: bool) -> None:
        clip = {"clip_grad_norm": 1.0} if by_option else {}
        model, optimizer = two(rank, cpu_offload=offload, **clip)
        optimizer.synchronize()
        used, other, _ = slices(optimizer)
        used.grad.fill_(3.0)
        other.grad = torch.full_like(other, 4.0)
        if not by_option:
            assert optimizer.clip_grad_norm_(1.0).item() == pytest.approx(125**0.5)
            factor = 125**-0.5
            torch.testing.assert_close(used.grad[:2], torch.full((2,), 3 * factor))
            torch.testing.assert_close(other.grad[:2], torch.full((2,), 4 * factor))
        with optimizer.skip_synchronize():
            optimizer.step()
        assert optimizer.get_grad_norm() == pytest.approx(125**0.5 if by_option else 1.0)
        torch.testing.assert_close(model.used.detach(), torch.arange(5.0) - 3 * 125**-0.5)
        torch.testing.assert_close(model.other.detach(), torch.arange(5.0) - 4 * 125**-0.5)

    # Five elements on two ranks: the sixth is padding, which an edit may reach and nobody may count.
    for (by_option, offload), ran in run_cases(work, 2, product((False, True), (False, True)), one_group=True):
        with subtests.test(by_option=by_option, offload=offload):
            ran.values()


def test_an_overflow_skips_the_step_whatever_became_of_it(subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, stage: str, offload: bool, fused: bool) -> None:
        model = Two().half()
        adam = torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused)
        options = {"initial_scale": 4, "hysteresis": 1, "cpu_offload": offload, **STAGES[stage]}
        optimizer = LowLevelZeroOptimizer(adam, model=model, **options)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.backward(model(60_000.0 if rank == 0 else 1.0))
        optimizer.synchronize()
        for p32 in slices(optimizer):
            if p32.grad is not None:
                torch.nan_to_num_(p32.grad, 0.0, 1.0, -1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        assert all(map(torch.equal, before, model.parameters()))
        assert optimizer.loss_scale == 2
        optimizer.backward(model(1.0))
        optimizer.synchronize()
        assert slices(optimizer)[0].grad[:2].tolist() == [1.0, 1.0]
        with optimizer.skip_synchronize():
            optimizer.step()
        assert not torch.equal(before[0], model.used)
        assert torch.equal(before[2], model.dropped)

    cases = [("stage 1", False, True), ("stage 2", False, False), ("stage 1", True, False)]
    for (stage, offload, fused), ran in run_cases(work, 2, cases, one_group=True):
        with subtests.test(stage=stage, offload=offload, fused=fused):
            ran.values()


def test_an_abandoned_gradient_of_another_optimizer_stays_where_it_is() -> None:
    """As a GAN's: its backward passes through this model, whose gradients nobody wants."""

    def work(rank: int, world_size: int) -> None:
        model, optimizer = two(rank)
        other = nn.Linear(1, 1)
        another = LowLevelZeroOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), model=other)
        optimizer.synchronize()
        another.backward(model(1.0) * other(torch.ones(1)).sum())
        assert model.used.grad is not None
        with optimizer.skip_synchronize():
            optimizer.step()
        assert model.used.tolist() == [value - 1.5 for value in range(5)]
        optimizer.zero_grad()
        assert model.used.grad is None

    run_ranks(work, 2)


# Mistakes


def twice(model: Two, optimizer: LowLevelZeroOptimizer) -> None:
    optimizer.synchronize()
    optimizer.synchronize()


def step_that_synchronizes(model: Two, optimizer: LowLevelZeroOptimizer) -> None:
    optimizer.synchronize()
    optimizer.step()


def driven_backward(model: Two, optimizer: LowLevelZeroOptimizer) -> None:
    optimizer.synchronize()
    optimizer.backward(model(1.0))


def bare_backward(model: Two, optimizer: LowLevelZeroOptimizer) -> None:
    optimizer.synchronize()
    model(1.0).backward()


def nothing_to_skip(model: Two, optimizer: LowLevelZeroOptimizer) -> None:
    with optimizer.skip_synchronize():
        optimizer.step()


def skipped_twice(model: Two, optimizer: LowLevelZeroOptimizer) -> None:
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
        optimizer.step()


def without_sync(model: Two, optimizer: LowLevelZeroOptimizer) -> None:
    with optimizer.no_sync():
        optimizer.synchronize()


Mistake = Callable[[Two, LowLevelZeroOptimizer], None]

MISTAKES: list[tuple[Mistake, str]] = [
    (twice, "expected step or zero_grad after synchronize(), got another synchronize()"),
    (step_that_synchronizes, "with optimizer.skip_synchronize(): optimizer.step()"),
    (driven_backward, "call synchronize() after the last backward of a step"),
    (bare_backward, "call synchronize() after the last backward of a step"),
    (nothing_to_skip, "call optimizer.synchronize() after the last backward"),
    (skipped_twice, "call optimizer.synchronize() after the last backward"),
    (without_sync, "outside of no_sync"),
]


def test_a_mistake_is_refused_on_all_ranks(subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, mistake: Mistake, message: str) -> None:
        model, optimizer = two(rank)
        try:
            mistake(model, optimizer)
        finally:
            optimizer.zero_grad()  # ends what is under way

    for (mistake, message), ran in run_cases_expecting(work, 2, MISTAKES):
        with subtests.test(mistake.__name__):
            for error in ran.raised():
                assert error.type == "RuntimeError"
                assert message in error.message


def test_a_refused_call_changes_nothing() -> None:
    def work(rank: int, world_size: int) -> None:
        for mistake in (twice, step_that_synchronizes, driven_backward, bare_backward):
            model, optimizer = two(rank)
            gradient = 3.0
            with pytest.raises(RuntimeError, match="synchronize"):
                mistake(model, optimizer)
            assert slices(optimizer)[1].grad[:2].tolist() == [gradient, gradient]
            assert all(isinstance(p.grad, ShardedGradient) for p in (model.used, model.other))
            with optimizer.skip_synchronize():
                optimizer.step()
            assert model.other.tolist() == [value - gradient for value in range(5)]

    run_ranks(work, 2)


def test_ranks_must_leave_the_same_gradients() -> None:
    def work(rank: int, world_size: int) -> None:
        _, optimizer = two(rank)
        optimizer.synchronize()
        if rank == 1:
            slices(optimizer)[1].grad = None
        with optimizer.skip_synchronize():
            optimizer.step()

    for error in run_ranks_expecting(work, 2):
        assert error.type == "ValueError"
        assert "other: a gradient" in error.message
        assert "other: no gradient" in error.message
        assert "same slices on all ranks" in error.message


def test_a_sparse_gradient_is_refused() -> None:
    def work(rank: int, world_size: int) -> None:
        _, optimizer = two(rank)
        optimizer.synchronize()
        if rank == 1:
            slices(optimizer)[1].grad = slices(optimizer)[1].grad.to_sparse()
        with optimizer.skip_synchronize():
            optimizer.step()

    other, own = run_ranks_expecting(work, 2)
    assert "rank 1 could not step" in other.message
    assert own.type == "TypeError"
    assert "other: expected its slice's .grad dense" in own.message
