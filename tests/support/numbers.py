"""The ways to train whose numbers are compared with the oracle's, and how masters are compared with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.oracle import Drop, Run, build, emulate, nothing, train_rank
from tests.support.ranks import run_ranks

STAGES: dict[str, dict[str, Any]] = {
    "stage1": {},
    "stage1-scatter": {"reduce_scatter": True},
    "stage2": {"partition_grad": True},
}
DROPS: dict[str, Drop] = {
    "all": nothing,
    "same": lambda step, rank: {step % 4},
    "different": lambda step, rank: {(step + rank) % 4, (2 * step + 3 * rank) % 4},
    "total": lambda step, rank: {0, 1, 2, 3} if step % 2 else {1},
    "one_rank": lambda step, rank: {0, 1, 2, 3} if rank == 0 else set(),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Unlike Adam, it feels a gradient that is wrong by a factor."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=1e-2)


def check_norms(expected: list[float], ranks: list[list[float]], rel: float) -> None:
    for norms in ranks:
        assert norms == pytest.approx(expected, rel=rel)


def masters_of(rank: int, world_size: int, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    trained = train_rank(rank, world_size, run)
    working = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    return trained.masters(), working, trained.norms


def joined(slices: list[dict[str, Tensor]], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of every rank's slices, in the shapes and strides of ``like``."""
    return {
        name: torch.as_strided(torch.cat([each[name] for each in slices])[: of.numel()], of.shape, of.stride())
        for name, of in like.items()
    }


def check_movement(run: Run, expected: dict[str, Tensor], got: dict[str, Tensor], share: float) -> None:
    """All parameters together are off by no more than ``share`` of the way they went, and each by 4 times that."""
    start = dict(build(run).named_parameters())
    ways = {name: (whole.double() - start[name].detach().double()).norm() for name, whole in expected.items()}
    offs = {name: (got[name].double() - whole.double()).norm() for name, whole in expected.items()}
    off = torch.stack(list(offs.values())).norm() / torch.stack(list(ways.values())).norm()
    assert off <= share, f"off by {off:.2g} of the way"
    for name, way in ways.items():
        assert offs[name] <= 4 * share * way, f"{name} is off by {offs[name]:.2g}, its way was {way:.2g}"


def check_sixteen_bits(run: Run, share: float) -> None:
    check_masters(run, share, run_ranks(masters_of, run.world_size, run))


def check_masters(run: Run, share: float, ranks: list[Any]) -> None:
    """``ranks`` hold what ``masters_of`` returned."""
    expected, norms = emulate(run)
    masters = joined([slices for slices, _, _ in ranks], expected)
    check_movement(run, expected, masters, share)
    check_norms(norms, [norms for _, _, norms in ranks], max(share, 1e-6))
    for _, working, _ in ranks:
        for name, master in masters.items():
            assert torch.equal(working[name], master.to(working[name].dtype)), f"{name} is not its master, rounded"


def share_of(dtype: torch.dtype, world_size: int) -> float:
    """Sums of gradients are rounded on the wire, once or at every rank: by half an epsilon each time.

    One rank adds nothing, and so rounds nothing but the last bit of fp32.
    """
    return 1.5 * torch.finfo(dtype).eps if world_size > 1 else 1e-6
