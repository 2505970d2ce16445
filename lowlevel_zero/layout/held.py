"""Bytes by owner, and the account of the bytes that an optimizer holds and sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.shown_gradients import unreduced
from ..bookkeeping.storages import tensors_in
from ..options import ZeroOptions
from ..sharded_group import ShardedGroup


class Sharded(Protocol):
    """The attributes of a ``LowLevelZeroOptimizer`` that its accounts are read from."""

    optim: Optimizer
    options: ZeroOptions
    sharded_parameters: ParameterStore
    sharded_groups: list[ShardedGroup]


@dataclass(frozen=True)
class Held:
    """The bytes that one rank holds, by owner."""

    parameters: int = 0  # whole parameters with their padding
    gradients: int = 0  # reduced gradients: slices in stage 2, whole buckets in stage 1
    masters: int = 0  # slices that don't share their parameters' memory
    states: int = 0  # the wrapped optimizer's states of slices; 0 before the first step
    bucket_buffers: int = 0  # memory that is kept for bucket buffers

    def __add__(self, other: Held) -> Held:
        """Return the sum by owner."""
        return Held(*(getattr(self, owner) + getattr(other, owner) for owner in OWNERS))

    @property
    def total(self) -> int:
        """Return the bytes of all owners together."""
        return sum(getattr(self, owner) for owner in OWNERS)


NOTHING = Held()
OWNERS = tuple(vars(NOTHING))
OF_PARAMETERS = OWNERS[:4]  # the owners whose bytes belong to single parameters


# ---- the accounts of an optimizer ----


def memory_held(optimizer: Sharded) -> Held:
    """Return the bytes that this rank holds now, by owner, each storage counted once. Doesn't communicate."""
    parameters = optimizer.sharded_parameters
    gradients = [each for each in map(unreduced, parameters) if each is not None]
    for group in optimizer.sharded_groups:
        gradients += group.gradients.held()
        gradients += [tensor for each in group.reducer.syncs.buckets.in_flight for tensor in each.work.tensors]
    owners: dict[str, Sequence[Tensor]] = {
        "parameters": [
            *(p for members in parameters.groups for p in members),
            *(record.padded for record in parameters),
        ],
        "gradients": gradients,
        "masters": [record.p32 for record in parameters],
        "states": list(tensors_in(list(optimizer.optim.state.values()))),
        "bucket_buffers": [buffer for ranks in parameters.shard_groups for buffer in ranks.held()],
    }
    return Held(**held_bytes(owners))


def traffic_of(optimizer: Sharded) -> dict[str, int]:
    """Return the bytes of bucket buffers that this rank has sent so far, by purpose. Doesn't communicate.

    The purposes are "reduce" and "gather". Bytes are counted alike on every backend, and an all-reduce
    as a reduce-scatter and a gather. With hybrid sharding "reduce_outer" and "gather_outer" are the bytes among
    them that crossed the outer level.
    """
    sent: Counter[str] = Counter()
    for group in optimizer.sharded_parameters.shard_groups:
        sent.update(group.traffic())
    return dict(sent)


def held_bytes(owners: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Return the bytes of the storages behind each owner's tensors; a shared one counts for its first owner alone.

    So an fp32 master slice that is a view of its parameter adds nothing.
    """
    seen: set[int] = set()
    held: dict[str, int] = {}
    for owner, tensors in owners.items():
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        held[owner] = sum(size for address, size in storages.items() if address not in seen)
        seen |= storages.keys()
    return held
