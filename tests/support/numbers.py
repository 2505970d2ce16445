"""The ways to train whose numbers are compared with the oracle's, and how masters are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tests.support.judging import check_share
from tests.support.oracle import Drop, Run, build, nothing, parameters_of, train_rank, train_sharded
from tests.support.ranks import Ran, run_cases, run_ranks

STAGES: dict[str, dict[str, Any]] = {
    "stage1": {},
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


Masters = tuple[dict[str, Tensor], dict[str, Tensor], list[float]]
"""A rank's master slices, its parameters, and the norm of each step's gradients."""


class _Sized(Protocol):
    @property
    def world_size(self) -> int: ...


R = TypeVar("R", bound=_Sized)


def trained(
    runs: Mapping[str, R], by: Callable[..., Any] = train_sharded, *args: Any, timeout: float = 60.0
) -> Iterator[tuple[str, R, Ran]]:
    """Do ``by(rank, world_size, run, *args)`` for each run, those of one world size in one launch of ranks.

    Gives each with its name and what became of it, to be looked at in a subtest.
    """
    for world_size in sorted({run.world_size for run in runs.values()}):
        named = [(name, run) for name, run in runs.items() if run.world_size == world_size]
        done = run_cases(by, world_size, [(run, *args) for _, run in named], timeout=timeout, one_group=True)
        yield from ((name, run, ran) for (name, run), (_, ran) in zip(named, done, strict=True))


def masters_of(rank: int, world_size: int, run: Run) -> Masters:
    trained = train_rank(rank, world_size, run)
    return trained.masters(), parameters_of(trained.model), trained.norms


def joined(slices: list[dict[str, Tensor]], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of every rank's slices, in the shapes and strides of ``like``."""
    return {
        name: torch.as_strided(
            torch.cat([_flat(each[name], of) for each in slices])[: of.numel()], of.shape, of.stride()
        )
        for name, of in like.items()
        if name in slices[0]
    }


def _flat(own: Tensor, of: Tensor) -> Tensor:
    """Return a slice, matrices of a stack or an owner's whole tensor, in memory order."""
    return own.as_strided((own.numel(),), (1,)) if own.dim() == of.dim() else own


def check_sixteen_bits(run: Run, share: float) -> None:
    """Masters and norms are the emulation's to ``share``, a tenth of what any mistake does or less."""
    check_masters(run, run_ranks(masters_of, run.world_size, run), share)


def check_masters(run: Run, ranks: list[Masters], share: float) -> None:
    """As ``check_sixteen_bits``, of ``ranks`` that have run."""
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
