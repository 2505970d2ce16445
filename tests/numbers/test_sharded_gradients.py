"""Torch's own clipping, of ``model.parameters()`` or of ``param_groups``, step after step: as without sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_cases

INF = float("inf")


class Net(nn.Module):
    """Four layers, of which some may be left out; three ranks don't divide the size of a weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.to(dtype)

    def forward(self, x: Tensor, drop: set[int]) -> Tensor:
        x = x.to(self.layers[0].weight.dtype)
        for at, layer in enumerate(self.layers):
            x = x if at in drop else layer(x)
        return x.float().square().mean()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def drops(step: int, rank: int) -> set[int]:
    """Drop another layer on each rank, and from the third step on one that all leave out."""
    return {(step + rank) % 3, 3} if step >= 2 else {(step + rank) % 3}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


class Case:
    """One training: which norm is clipped, whether values are, and whether of this rank's slices."""

    def __init__(
        self,
        what: str,
        norm_type: float = 2.0,
        slices: bool = True,
        foreach: bool | None = None,
        clips_values: bool = False,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.what, self.norm_type, self.slices, self.foreach = what, norm_type, slices, foreach
        self.clips_values, self.dtype, self.options = clips_values, dtype, options

    def clip(self, members: list[Tensor]) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(members, 0.1, self.norm_type, foreach=self.foreach)
        if self.clips_values:
            torch.nn.utils.clip_grad_value_(members, 0.01, foreach=self.foreach)
        return norm


STAGE_2 = {"partition_grad": True}
CASES = [
    (Case("slices"),),
    (Case("slices in lists, the largest", INF, foreach=True, **STAGE_2),),
    (Case("slices one by one, the 1-norm", 1.0, foreach=False, reduce_bucket_size=1),),
    (Case("parameters in lists, the 3-norm", 3.0, slices=False, foreach=True, overlap_allgather=True),),
    (Case("values of slices in lists", clips_values=True, foreach=True, **STAGE_2),),
    (Case("values of parameters on the host", clips_values=True, slices=False, cpu_offload=True, **STAGE_2),),
    (Case("slices in fp16", dtype=torch.float16, initial_scale=1024.0, clips_values=True),),
]


def train(rank: int, world_size: int, case: Case) -> None:
    """Train beside plain torch, which has every rank's share of the batch, and compare norms and parameters."""
    model, plain = Net(case.dtype), Net(case.dtype)
    half = case.dtype != torch.float32
    masters = {p: p.detach().float() if half else p for p in plain.parameters()}
    optimizer = LowLevelZeroOptimizer(
        sgd(model.parameters()), model=model, **{"reduce_bucket_size": 25, **case.options}
    )
    alone = sgd(list(masters.values()))
    close = {"rtol": 0.02, "atol": 1e-3} if half else {"rtol": 1e-5, "atol": 1e-6}
    for step in range(5):
        optimizer.backward(model(batch(step, rank), drops(step, rank)))
        torch.stack([plain(batch(step, each), drops(step, each)) for each in range(world_size)]).mean().backward()
        for p, master in masters.items():
            master.grad = None if p.grad is None else p.grad.float()
        slices = [p for group in optimizer.param_groups for p in group["params"]]
        norm = case.clip(slices if case.slices else list(model.parameters()))
        torch.testing.assert_close(norm, case.clip(list(masters.values())), check_dtype=False, **close)
        optimizer.step()
        alone.step()
        optimizer.zero_grad()
        plain.zero_grad()
        with torch.no_grad():
            for p, master in masters.items():
                p.copy_(master)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, **close)


def test_torch_clips_as_without_sharding(subtests: pytest.Subtests) -> None:
    for (case,), ran in run_cases(train, 3, CASES, one_group=True):
        with subtests.test(case.what):
            ran.values()
