"""Gradients that a caller assigns, scales or takes from elsewhere: as in one process, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowlevel_zero
from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_cases


def made(count: int = 2, **options: Any) -> tuple[list[nn.Parameter], LowLevelZeroOptimizer]:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(count)]
    return parameters, LowLevelZeroOptimizer(torch.optim.SGD(parameters, lr=1.0), **options)


def weighted(parameters: list[nn.Parameter]) -> Tensor:
    return torch.stack([(at + 1) * p.sum() for at, p in enumerate(parameters)]).sum()


def assign_between(rank: int, world_size: int, plain: bool, none_first: bool, stage: int) -> list[float]:
    """Assign the gradients of parameters 0 and 2 between two backwards."""
    parameters, optimizer = made(3, stage=stage)
    for at in range(2):
        if plain:
            weighted(parameters).backward()
        else:
            optimizer.backward(weighted(parameters))
        for p in parameters[::2] if at == 0 else ():
            if none_first:
                p.grad = None
            p.grad = torch.full((4,), 100.0)
    optimizer.step()
    return [p[0].item() for p in parameters]


def test_one_between_two_backwards_takes_the_place_of_the_sum(subtests: pytest.Subtests) -> None:
    cases = [(plain, none_first, stage) for plain in (False, True) for none_first in (False, True) for stage in (1, 2)]
    for case, ran in run_cases(assign_between, 2, cases, timeout=30):
        with subtests.test(case=case):
            assert list(ran.values()) == [[-101.0, -4.0, -103.0]] * 2


@on_ranks(2)
def test_one_of_a_slice_outlives_a_refused_step(rank: int) -> None:
    parameters, optimizer = made()
    optimizer.backward(weighted(parameters))
    for p32 in optimizer.param_groups[0]["params"]:
        p32.grad = torch.full_like(p32, 0.25)
    optimizer.param_groups[0]["lr"] = 1.0 + rank
    with pytest.raises(ValueError, match="expected the same settings"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    if rank == 1:  # which the other rank hasn't done, though the values are the same
        with torch.no_grad():
            parameters[1].add_(1).sub_(1)
    optimizer.step()
    assert [p[0].item() for p in parameters] == [-0.25, -0.25]


@on_ranks(2)
def test_another_parameter_s_is_refused(rank: int) -> None:
    (p, q), optimizer = made()
    optimizer.backward(q.sum())
    p.grad = q.grad
    for call in (optimizer.step, lambda: optimizer.backward(p.sum()), lambda: (p.sum() + q.sum()).backward()):
        with pytest.raises(RuntimeError, match="assigned by hand: write it by"):
            call()
        optimizer.zero_grad()
        optimizer.backward(q.sum())
        p.grad = q.grad


@pytest.mark.parametrize("beside", ["a plain gradient", "another optimizer"])
@on_ranks(2)
def test_a_norm_that_differs_by_rank_is_refused(rank: int, beside: str) -> None:
    (p,), optimizer = made(1)
    (q,) = [nn.Parameter(torch.ones(4))]
    groups = [dist.new_group([each]) for each in range(2)]
    if beside == "another optimizer":
        other = LowLevelZeroOptimizer(torch.optim.SGD([q], lr=1.0), dp_process_group=groups[rank])
        other.backward(q.sum() * (1 + 9 * rank))
    else:
        (q.sum() * (1 + 9 * rank)).backward()
    optimizer.backward(p.sum())
    lowlevel_zero.clip_grad_norm_([p, q], 1.0)
    with pytest.raises(RuntimeError, match="expected the same edits of p.grad on every rank, .* from 2.83 on rank"):
        optimizer.step()


@on_ranks(2)
def test_an_operator_in_place_on_its_data(rank: int) -> None:
    (p, q), optimizer = made()
    optimizer.backward(8 * p.sum() + 8 * q.sum())
    p.grad.data *= 0.5  # type: ignore[union-attr]
    optimizer.param_groups[0]["params"][1].grad.data -= 2.0
    with pytest.raises(RuntimeError, match=r"expected p.grad.copy_\(tensor\)"):
        p.grad.data = torch.ones(4)  # type: ignore[union-attr]
    optimizer.step()
    assert [p[0].item(), q[0].item()] == [-4.0, -6.0]
