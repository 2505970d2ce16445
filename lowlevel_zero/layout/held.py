"""Bytes by owner: the ones that a rank holds now, each storage counted once, and one parameter's by arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..bookkeeping.parameter_store import ParameterStore
from ..options import ZeroOptions
from ..partition import EvenSplit
from ..sharded_group import ShardedGroup


@dataclass(frozen=True)
class Held:
    """Bytes that one rank holds, by the owners that ``optimizer.memory_held()`` names."""

    parameters: int = 0  # whole parameters with their padding
    gradients: int = 0  # reduced ones: slices in stage 2, whole ones in stage 1
    masters: int = 0  # slices that aren't their parameters' own rows
    states: int = 0  # the optimizer's states of slices; 0 before the first step

    def __add__(self, other: Held) -> Held:
        """Return the sum by owner."""
        return Held(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.masters + other.masters,
            self.states + other.states,
        )

    @property
    def total(self) -> int:
        """The bytes of all owners together."""
        return self.parameters + self.gradients + self.masters + self.states


NOTHING = Held()


def held_of(
    split: EvenSplit, dtype: torch.dtype, options: ZeroOptions, states: int, reduced: torch.dtype | None = None
) -> Held:
    """Return the bytes that a rank holds of a parameter after a backward.

    Args:
        split: which elements each rank owns.
        dtype: the parameter's.
        options: the optimizer's.
        states: bytes of the slice's states.
        reduced: dtype of the reduced gradient; None: the one in which gradients travel.
    """
    master = master_dtype(dtype, options)
    apart = options.cpu_offload or master != dtype or options.in_fp8(split.numel, split.world_size)
    rows = split.slice_size if options.keeps_row_only else split.padded_numel
    return Held(
        parameters=split.padded_numel * dtype.itemsize,
        gradients=rows * (reduced or options.communication_dtype or dtype).itemsize,
        masters=split.slice_size * master.itemsize if apart else 0,
        states=states,
    )


def master_dtype(dtype: torch.dtype, options: ZeroOptions) -> torch.dtype:
    """Return the dtype of the master slice of a parameter of ``dtype``."""
    return torch.promote_types(dtype, torch.float32) if options.master_weights else dtype


# ---- what is held now ----


def memory_held(optim: Optimizer, parameters: ParameterStore, groups: Sequence[ShardedGroup]) -> dict[str, int]:
    """Return the bytes that this rank holds now, by owner, each storage counted once.

    Args:
        optim: the wrapped optimizer.
        parameters: the records.
        groups: the same records by shard group.
    """
    gradients = [each for each in (record.unreduced for record in parameters) if each is not None]
    for group in groups:
        gradients += group.gradients.held()
        gradients += [tensor for work in group.reducer.under_way() for tensor in work.tensors]
    return held_bytes(
        {
            "parameters": [
                *(p for members in parameters.groups for p in members),
                *(record.padded for record in parameters),
            ],
            "gradients": gradients,
            "masters": [record.p32 for record in parameters],
            "states": [tensor for state in optim.state.values() for tensor in state_tensors(state)],
            "bucket_buffers": [buffer for ranks in parameters.shard_groups for buffer in ranks.held()],
        }
    )


def held_bytes(owners: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Return the bytes of the storages behind each owner's tensors.

    A storage that several tensors share counts once, for the first owner that names it: an fp32 master slice
    that is a view of its parameter adds nothing.
    """
    seen: set[int] = {0}  # of an empty storage
    held: dict[str, int] = {}
    for owner, tensors in owners.items():
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        held[owner] = sum(size for address, size in storages.items() if address not in seen)
        seen |= storages.keys()
    return held


def state_tensors(state: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors of a state that have memory: of a quantised state, the tensors that its subclass wraps."""
    for value in state.values():
        if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor):
            yield value
