"""The ways to train whose numbers are compared with the oracle's, and how masters are compared with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.judging import check_share
from tests.support.oracle import Drop, Run, build, nothing, train_rank
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


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=1e-2)


def masters_of(rank: int, world_size: int, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    trained = train_rank(rank, world_size, run)
    working = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    return trained.masters(), working, trained.norms


def joined(slices: list[dict[str, Tensor]], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of every rank's slices, in the shapes and strides of ``like``."""
    return {
        name: torch.as_strided(torch.cat([each[name] for each in slices])[: of.numel()], of.shape, of.stride())
        for name, of in like.items()
        if name in slices[0]
    }


def check_sixteen_bits(run: Run, share: float) -> None:
    """Masters and norms are the emulation's to ``share``, a tenth of what any mistake does or less."""
    ranks = run_ranks(masters_of, run.world_size, run)
    masters = joined([slices for slices, _, _ in ranks], dict(build(run).named_parameters()))
    check_share(run, [(masters, norms) for _, _, norms in ranks], share, max(share, 1e-6))
    for _, working, _ in ranks:
        for name, master in masters.items():
            assert torch.equal(working[name], master.to(working[name].dtype)), f"{name} is not its master, rounded"


def share_of(dtype: torch.dtype, world_size: int) -> float:
    """Sums of gradients are rounded on the wire, once or at every rank: by half an epsilon each time.

    One rank adds nothing, and so rounds nothing but the last bit of fp32.
    """
    return 1.5 * torch.finfo(dtype).eps if world_size > 1 else 1e-6
