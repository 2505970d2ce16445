"""Torch's own functions on gradients, of ``model.parameters()`` or of ``param_groups``: as without sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.gradients.sharded_gradient import ShardedGradient
from tests.support.ranks import run_cases

INF = float("inf")


class Net(nn.Module):
    """Four layers, of which some may be left out; the first one's weight isn't divisible by the ranks."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.to(dtype)

    def forward(self, x: Tensor, drop: set[int]) -> Tensor:
        x = self.frozen(x.to(self.frozen.weight.dtype))
        for at, layer in enumerate(self.layers):
            x = x if at in drop else layer(x)
        return x.float().square().mean()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def nothing(step: int, rank: int) -> set[int]:
    return set()


def layers(step: int, rank: int) -> set[int]:
    """Another one on each rank, and from the third step on one that all leave out."""
    return {(step + rank) % 3, 3} if step >= 2 else {(step + rank) % 3}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def of_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(model.parameters())


def of_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def by_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def to_zeros(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad(set_to_none=False)


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = None


Clear = Callable[[nn.Module, torch.optim.Optimizer], None]
Members = Callable[[nn.Module, torch.optim.Optimizer], list[Tensor]]


class Case:
    """One training, told by what differs from the plainest."""

    def __init__(
        self,
        what: str,
        norm_type: float = 2.0,
        *,
        members: Members = of_model,
        foreach: bool | None = None,
        clear: Clear = by_optimizer,
        drop: Callable[[int, int], set[int]] = nothing,
        bare: bool = False,
        micro_batches: int = 1,
        no_sync: bool = False,
        clip_value: bool = False,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.what, self.norm_type, self.members, self.foreach, self.clear = what, norm_type, members, foreach, clear
        self.drop, self.bare, self.micro_batches, self.no_sync = drop, bare, micro_batches, no_sync
        self.clip_value, self.dtype, self.options = clip_value, dtype, options

    def clip(self, members: list[Tensor]) -> Tensor:
        torch_clip: Any = torch.nn.utils.clip_grad_norm_
        norm: Tensor = torch_clip(members, 0.1, self.norm_type, foreach=self.foreach)
        if self.clip_value:
            torch.nn.utils.clip_grad_value_(members, 0.01, foreach=self.foreach)
        return norm


STAGE_2 = {"partition_grad": True}
CASES = [
    Case("stage 1"),
    Case("stage 2, lists", foreach=True, **STAGE_2),
    Case("one by one", foreach=False, reduce_bucket_size=1),
    Case("1-norm", 1.0, reduce_bucket_size=20, **STAGE_2),
    Case("3-norm", 3.0, foreach=True),
    Case("largest", INF, **STAGE_2),
    Case("slices", members=of_groups),
    Case("slices, lists, largest", INF, members=of_groups, foreach=True, **STAGE_2),
    Case("dropped", drop=layers),
    Case("dropped, model.zero_grad", drop=layers, clear=by_model, members=of_groups, reduce_bucket_size=1),
    Case("dropped, bare, stage 2", drop=layers, bare=True, **STAGE_2),
    Case("dropped, micro-batches", drop=layers, micro_batches=2, clear=by_hand),
    Case("bare micro-batches, model.zero_grad", bare=True, micro_batches=3, clear=by_model),
    Case("zeros", clear=to_zeros, micro_batches=2, **STAGE_2),
    Case("zeros, bare, dropped on some", clear=to_zeros, bare=True, drop=lambda step, rank: {(step + rank) % 3}),
    Case("no_sync", no_sync=True, micro_batches=2, clear=by_model),
    Case("no_sync, bare", no_sync=True, micro_batches=3, bare=True, clear=by_hand, **STAGE_2),
    Case("values", clip_value=True, drop=layers, clear=by_model),
    Case("values, lists, slices", clip_value=True, members=of_groups, foreach=True, **STAGE_2),
    Case("values on the host", clip_value=True, cpu_offload=True, **STAGE_2),
    Case("on the host", cpu_offload=True, members=of_groups, drop=layers),
    Case("gathers overlap", overlap_allgather=True, clear=by_model, drop=layers),
    Case("doubles", dtype=torch.float64, **STAGE_2),
    Case("fp16", dtype=torch.float16, initial_scale=1024.0, members=of_groups),
    Case("fp16, values", dtype=torch.float16, initial_scale=1024.0, clip_value=True, clear=by_model, **STAGE_2),
    Case("bf16 with masters", dtype=torch.bfloat16, foreach=True),
]


def train(rank: int, world_size: int, case: Case) -> None:
    """Beside plain torch, which has every rank's share of the batch: norms, and parameters in the end, are the same."""
    model, plain = Net(case.dtype), Net(case.dtype)
    half = case.dtype in (torch.float16, torch.bfloat16)
    masters = {p: p.detach().float() if half else p for p in plain.parameters() if p.requires_grad}
    optimizer = LowLevelZeroOptimizer(
        sgd(model.parameters()), model=model, **{"reduce_bucket_size": 25, **case.options}
    )
    alone = sgd(list(masters.values()))
    close = {"rtol": 0.02, "atol": 1e-3} if half else {"rtol": 1e-5, "atol": 1e-6}
    for step in range(5):
        for micro in range(case.micro_batches):
            at = 10 * step + micro
            synced = not case.no_sync or micro == case.micro_batches - 1
            loss = model(batch(at, rank), case.drop(step, rank))
            if not synced:
                with optimizer.no_sync():
                    loss.backward()
            elif case.bare:
                loss.backward()
            else:
                optimizer.backward(loss)
            shares = [plain(batch(at, each), case.drop(step, each)) for each in range(world_size)]
            torch.stack(shares).mean().backward()
        for p, master in masters.items():
            if half:
                master.grad = None if p.grad is None else p.grad.float()
        norm = case.clip(case.members(model, optimizer))
        expected = case.clip(list(masters.values()))
        torch.testing.assert_close(norm, expected, check_dtype=False, **close)
        for p, master in zip((p for p in model.parameters() if p.requires_grad), masters.values(), strict=True):
            assert (p.grad is None) == (master.grad is None)
            if isinstance(p.grad, ShardedGradient) and master.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), master.grad, check_dtype=False, **close)
        optimizer.step()
        alone.step()
        case.clear(model, optimizer)
        if half:
            plain.zero_grad()
            with torch.no_grad():
                for p, master in masters.items():
                    p.copy_(master)
        else:
            case.clear(plain, alone)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, **close)


# Each at two ranks or at three, and some of them at one.
AT = {1: CASES[::5], 2: CASES[::2], 3: CASES[1::2]}


@pytest.mark.parametrize("world_size", AT)
def test_torch_clips_and_clears_as_without_sharding(world_size: int, subtests: pytest.Subtests) -> None:
    for (case,), ran in run_cases(train, world_size, [(case,) for case in AT[world_size]], one_group=True):
        with subtests.test(case.what):
            ran.values()
