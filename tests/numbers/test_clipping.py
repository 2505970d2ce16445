"""Clipping by the package's functions: as by torch's, over whatever a training consists of; and a step's norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowlevel_zero
from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.gradients.global_norm import GlobalNorm, clip_factor
from tests.support.experts import Run, prepare, train_alone, train_step, whole_name
from tests.support.gradients import batch
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


@on_ranks(1)
def test_what_is_listed_twice_counts_once(rank: int) -> None:
    """Parameters of an optimizer and its slices, and plain ones, as where a tied weight is in two lists."""
    sharded, plain, once = Part(0), Part(0), Part(0)
    optimizer = LowLevelZeroOptimizer(sgd(sharded.parameters()), model=sharded)
    for part in (sharded, plain, once):
        part(batch(0, rank)).square().sum().backward()
    lists = [[*sharded.parameters(), *optimizer.param_groups[0]["params"]], [*plain.parameters()] * 2]
    expected = torch.nn.utils.clip_grad_norm_(once.parameters(), 0.5)
    for each in lists:
        torch.testing.assert_close(lowlevel_zero.clip_grad_norm_(each, 0.5), expected)
        lowlevel_zero.clip_grad_value_(each, 0.2)
    torch.nn.utils.clip_grad_value_(once.parameters(), 0.2)
    for p, q, r in zip(sharded.parameters(), plain.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(optimizer.get_param_grad(p), r.grad)
        torch.testing.assert_close(q.grad, r.grad)


@on_ranks(2, product([2.0, INF, None], [True, False]))
def test_ranks_that_lack_gradients(rank: int, norm_type: float | None, clears: bool) -> None:
    """Rank 0 alone runs a plain backward in each step; torch's function would see no gradients on the others."""
    part, copied = Part(0), Part(0)
    optimizer, alone = LowLevelZeroOptimizer(sgd(part.parameters()), model=part), sgd(copied.parameters())
    for step in range(3):
        if rank == 0:
            part(batch(step, 0)).square().mean().backward()
        (copied(batch(step, 0)).square().mean() / 2).backward()
        if norm_type is None:
            lowlevel_zero.clip_grad_value_(part.parameters(), 0.01)
            torch.nn.utils.clip_grad_value_(copied.parameters(), 0.01)
        else:
            norm = lowlevel_zero.clip_grad_norm_(part.parameters(), 0.01, norm_type)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(copied.parameters(), 0.01, norm_type))
        optimizer.step()
        alone.step()
        if clears:
            optimizer.zero_grad()
            alone.zero_grad()
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


# ---- the global norm and the clip factor ----

CPU = torch.device("cpu")
SIZES = [7, 1, 0, 130]


def slices_of(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def global_norm(slices: Sequence[Tensor], unit: float | Tensor, group: ShardGroup, device: torch.device) -> Tensor:
    norm = GlobalNorm(group, device)
    norm.measure(slices, unit)
    return norm.value


def by_torch(gradients: list[Tensor], max_norm: float = math.inf) -> tuple[float, list[Tensor]]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()
    return norm, [p.grad for p in parameters if p.grad is not None]


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("world_size", [1, 3])
def test_norm_is_that_of_the_whole_gradient(world_size: int) -> None:
    def work(rank: int, _: int) -> list[Tensor]:
        return [global_norm(slices_of(rank, dtype), 0.25, ShardGroup(), CPU) for dtype in DTYPES]

    for dtype, *norms in zip(DTYPES, *run_ranks(work, world_size), strict=True):
        at_least_fp32 = torch.promote_types(dtype, torch.float32)
        whole = [piece.to(at_least_fp32) for rank in range(world_size) for piece in slices_of(rank, dtype)]
        expected, _ = by_torch(whole)
        for norm in norms:
            assert (norm.dtype, norm.dim()) == (at_least_fp32, 0)
            assert norm.item() == pytest.approx(0.25 * expected, rel=1e-12 if dtype == torch.float64 else 1e-6)
            assert torch.equal(norm, norms[0])


def test_sixteen_bit_squares_do_not_overflow() -> None:
    slices = [torch.full((4,), 60_000.0, dtype=torch.float16), torch.full((4,), 1e-7, dtype=torch.float16)]
    (norm,) = run_ranks(lambda rank, _: global_norm(slices, 1.0, ShardGroup(), CPU).item(), 1)
    assert norm == pytest.approx(120_000, rel=1e-3)


def test_squares_are_added_over_ranks_not_norms() -> None:
    norms = run_ranks(lambda rank, _: global_norm([torch.tensor([3.0 + rank])], 1.0, ShardGroup(), CPU).item(), 2)
    assert norms == [5.0, 5.0]


@on_ranks(3, [math.inf, -math.inf, math.nan])
def test_one_bad_element_on_one_rank_is_seen_by_all(rank: int, bad: float) -> None:
    slices = slices_of(rank)
    if rank == 1:
        slices[3][17] = bad
    assert not global_norm(slices, 1.0, ShardGroup(), CPU).isfinite()


@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"),
    [(0.0, 1.0, 1.0), (0.5, 1.0, 1.0), (2.0, 1.0, 0.5), (4.0, 1.0, 0.25), (math.inf, 1.0, 0.0)],
)
def test_clip_factor_is_the_table_s(norm: float, max_norm: float, factor: float) -> None:
    assert clip_factor(torch.tensor(norm), max_norm).item() == pytest.approx(factor, rel=1e-5)


class Multiplied(TorchDispatchMode):
    """Counts the elements that are multiplied, or cast."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.mul_, torch.ops.aten._to_copy):
            self.elements += result.numel()
        return result


@on_ranks(8, product(("1", "0"), (torch.float32, torch.bfloat16)), one_group=False)
def test_a_step_of_what_was_clipped_scales_this_rank_s_rows_alone(rank: int, shared: str, dtype: torch.dtype) -> None:
    numel = 4096
    p = torch.nn.Parameter(torch.zeros(numel, dtype=dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", shared)
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD([p], lr=0.5))
    expected = torch.zeros(numel)
    for step in range(2):
        gradient = torch.full((numel,), float(1 + step))
        optimizer.backward((p.float() * gradient * (1 + rank)).sum())
        mean = gradient * (1 + 8) / 2
        optimizer.clip_grad_norm_(4.0)
        expected -= 0.5 * mean * 4.0 / mean.norm()
        with Multiplied() as multiplied:
            optimizer.step()
        assert multiplied.elements < numel / 2, multiplied.elements
        optimizer.zero_grad()
    torch.testing.assert_close(p.float(), expected.to(dtype).float(), rtol=1e-2, atol=1e-4)
