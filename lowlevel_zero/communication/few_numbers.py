"""A few numbers of every host, reduced over the ranks: by mail between processes of one host, else by gloo.

gloo's threads have to be woken on every rank in turn, which on busy cores takes milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .transport import Pending, then

if TYPE_CHECKING:  # it needs what only Linux has
    from .shared_memory import SharedMemory


def reduce_few(
    few: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, fast: SharedMemory | None, kind: int
) -> Pending[Tensor]:
    """Start reducing ``few`` (1-D, on the host) in place; all ranks do so with as many, and get the same bits.

    Args:
        few: the numbers.
        op: ``SUM`` or ``MAX``.
        group: a gloo group of the ranks, whose order of collectives this follows.
        fast: what is used instead, where there is one on all ranks, with an order for each ``kind``.
        kind: what the numbers are about.
    """
    if fast is None:
        work = cast(dist.Work, dist.all_reduce(few, op=op, group=group, async_op=True))
        return Pending((work,), (few,), lambda: few)

    def reduced(told: list[Tensor]) -> Tensor:
        rows = torch.stack(told)
        return few.copy_(rows.amax(dim=0) if op == dist.ReduceOp.MAX else rows.sum(dim=0))

    return then(fast.everybody_s(few, kind), reduced)
