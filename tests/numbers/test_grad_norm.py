"""The global norm and the clip factor: against what torch says of the whole gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.stepper import GlobalNorm, clip_factor
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_cases, run_ranks

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


@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_a_step_of_what_was_clipped_scales_this_rank_s_rows_alone(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", "0" if way == "messages" else "1")
    numel = 4096

    def work(rank: int, world_size: int, dtype: torch.dtype) -> None:
        p = torch.nn.Parameter(torch.zeros(numel, dtype=dtype))
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD([p], lr=0.5))
        expected = torch.zeros(numel)
        for step in range(2):
            gradient = torch.full((numel,), float(1 + step))
            optimizer.backward((p.float() * gradient * (1 + rank)).sum())
            mean = gradient * (1 + world_size) / 2
            optimizer.clip_grad_norm_(4.0)
            expected -= 0.5 * mean * 4.0 / mean.norm()
            with Multiplied() as multiplied:
                optimizer.step()
            assert multiplied.elements < numel / 2, multiplied.elements
            optimizer.zero_grad()
        torch.testing.assert_close(p.float(), expected.to(dtype).float(), rtol=1e-2, atol=1e-4)

    for _, ran in run_cases(work, 4, [(torch.float32,), (torch.bfloat16,)], one_group=True):
        ran.values()
