"""``lowlevel_zero.clip_grad_norm_`` and ``clip_grad_value_``: torch's, over whatever a training consists of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowlevel_zero
from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.experts import Run, prepare, train_alone, train_step, whole_name
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks

INF = float("inf")


class Part(nn.Module):
    """Two layers, the second of which may be left out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden) if whole else hidden[:, :3]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loss_at(parts: list[Part], step: int, rank: int) -> Tensor:
    """The second part leaves a layer out on some ranks, and in one step on all."""
    x = parts[0](batch(step, rank))
    x = parts[1](x, whole=step != 2 and (step + rank) % 2 == 0)
    return parts[2](x).square().mean()


@on_ranks(
    3,
    [
        (2.0, False, {}),
        (1.0, True, {"partition_grad": True, "reduce_bucket_size": 10}),
        (INF, True, {"cpu_offload": True}),
        (2.5, False, {"partition_grad": True, "overlap_allgather": True}),
    ],
)
def test_several_optimizers_and_a_plain_one(rank: int, norm_type: float, slices: bool, options: dict[str, Any]) -> None:
    """Three parts: two with sharded optimizers, of which one leaves layers out; the third's are all ranks' alike."""
    parts, copies = [Part(seed) for seed in range(3)], [Part(seed) for seed in range(3)]
    sharded = [LowLevelZeroOptimizer(sgd(part.parameters()), model=part, **options) for part in parts[:2]]
    plain, alone = sgd(parts[2].parameters()), [sgd(part.parameters()) for part in copies]
    for step in range(4):
        loss = loss_at(parts, step, rank)
        with sharded[0].backward_pass(loss), sharded[1].backward_pass(loss):
            loss.backward()
        torch.stack([loss_at(copies, step, each) for each in range(3)]).mean().backward()
        for p, q in zip(parts[2].parameters(), copies[2].parameters(), strict=True):
            p.grad = q.grad.clone() if q.grad is not None else None
        first: list[Any] = [p for group in sharded[0].param_groups for p in group["params"]]
        members = [*(first if slices else parts[0].parameters()), *parts[1].parameters(), *parts[2].parameters()]
        others = [p for part in copies for p in part.parameters()]
        norm = lowlevel_zero.clip_grad_norm_(members, 0.05, norm_type, foreach=slices)
        expected = torch.nn.utils.clip_grad_norm_(others, 0.05, norm_type)
        torch.testing.assert_close(norm, expected)
        some = [*parts[1].parameters(), *parts[2].parameters()]
        torch.testing.assert_close(
            lowlevel_zero.clip_grad_norm_(some, INF), torch.nn.utils.clip_grad_norm_(others[4:], INF)
        )
        lowlevel_zero.clip_grad_value_(members, 0.005)
        torch.nn.utils.clip_grad_value_(others, 0.005)
        for optimizer in (*sharded, plain, *alone):
            optimizer.step()
            optimizer.zero_grad()
    for part, copied in zip(parts, copies, strict=True):
        for p, q in zip(part.parameters(), copied.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@on_ranks(2, [2.0, INF])
def test_ranks_that_lack_gradients(rank: int, norm_type: float) -> None:
    """Rank 0 alone has run a plain backward; torch's function would see no gradients on the others."""
    part, copied = Part(0), Part(0)
    optimizer, alone = LowLevelZeroOptimizer(sgd(part.parameters()), model=part), sgd(copied.parameters())
    if rank == 0:
        part(batch(0, 0)).square().mean().backward()
    (copied(batch(0, 0)).square().mean() / 2).backward()
    norm = lowlevel_zero.clip_grad_norm_(part.parameters(), 0.01, norm_type)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(copied.parameters(), 0.01, norm_type))
    optimizer.step()
    alone.step()
    for p, q in zip(part.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@on_ranks(2)
def test_the_largest_element_by_the_name_that_torch_takes(rank: int) -> None:
    part = Part(0)
    optimizer = LowLevelZeroOptimizer(sgd(part.parameters()), model=part)
    optimizer.backward(part(batch(0, rank)).sum())
    clips: list[Any] = [lowlevel_zero.clip_grad_norm_, torch.nn.utils.clip_grad_norm_]
    ours, torchs = (float(each(part.parameters(), INF, norm_type="inf")) for each in clips)
    assert ours == torchs > 0


@on_ranks(2)
def test_norms_that_are_not_finite_are_refused_with_gradients_as_they_were(rank: int) -> None:
    part = Part(0)
    optimizer = LowLevelZeroOptimizer(sgd(part.parameters()), model=part)
    optimizer.backward(part(batch(0, rank)).sum() * (INF if rank == 0 else 1.0))
    with pytest.raises(RuntimeError, match="that is finite, got (inf|nan)"):
        lowlevel_zero.clip_grad_norm_(part.parameters(), 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type: expected a number above 0"):
        lowlevel_zero.clip_grad_norm_(part.parameters(), 1.0, 0.0)
    before = optimizer.get_param_grad(part.second.bias)
    assert before is not None
    assert before.isinf().all()
    assert lowlevel_zero.clip_grad_norm_([], 1.0) == 0.0
    assert lowlevel_zero.clip_grad_norm_(nn.Parameter(torch.ones(2)), 1.0) == 0.0


def clip_experts(rank: int, world_size: int, run: Run, norm_type: float) -> tuple[list[float], dict[str, Tensor]]:
    """Every rank has experts of its own; the norm is that of all."""
    trained = prepare(rank, run)
    model, optimizer, layout = trained
    norms = []
    for step in range(run.steps):
        train_step(trained, run, step, rank)
        norms.append(float(lowlevel_zero.clip_grad_norm_(model.parameters(), 0.1, norm_type)))
        if step == 0:
            with pytest.raises(RuntimeError, match=r"experts .* lowlevel_zero.clip_grad_norm_"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return norms, {whole_name(name, layout): p.detach().clone() for name, p in model.named_parameters()}


def test_experts() -> None:
    run = Run(clip=0.1, steps=3)
    expected = train_alone(run)
    for norms, parameters in run_ranks(clip_experts, run.world_size, Run(steps=3), 2.0):
        assert norms == pytest.approx(expected.norms, rel=1e-4)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected.parameters[name], rtol=1e-4, atol=1e-5)
