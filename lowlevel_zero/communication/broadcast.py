"""Broadcasts of rank 0's values into tensors of any kind, on any device, by their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .failed_ranks import run_each
from .flat_buffers import as_bytes
from .progress import BROADCAST
from .shard_group import ShardGroup

_MESSAGE_BYTES = 64 * 2**20  # in one message


class Broadcast:
    """A broadcast of the first rank's values to all ranks of a shard group; ``run`` communicates.

    Now bytes of tensors that the group doesn't carry where they are, or only by gloo from a device, are copied: to the
    host in the latter case, else to ``by_way_of``, a device that the group serves.
    """

    def __init__(self, ranks: ShardGroup, tensors: Sequence[Tensor], by_way_of: torch.device) -> None:
        host = torch.device("cpu")

        def where(device: torch.device) -> torch.device:
            return host if ranks.on_gloo(device) else device if device.type in ranks.device_types else by_way_of

        places = {device: where(device) for device in {tensor.device for tensor in tensors}}  # of thousands of tensors
        self._ranks = ranks
        self._tensors = [tensor.detach() for tensor in tensors if tensor.numel()] if ranks.has_others else []
        self._carried = [as_bytes(tensor).to(places[tensor.device]) for tensor in self._tensors]

    def run(self) -> None:
        """Overwrite all tensors with the first rank's values. Communicates in large messages.

        On a device they are the first collective of the group that carries buffers: now all ranks are sure to come, as
        they have to when NCCL begins; the first reduction may be started by one that runs a backward alone.
        """
        if not self._tensors:
            return
        spread = partial(run_each, [partial(_spread, level, self._carried) for level in self._ranks.levels])
        self._ranks.progress.run(BROADCAST, spread)
        for tensor, data in zip(self._tensors, self._carried, strict=True):
            if data.data_ptr() != tensor.data_ptr():
                tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def _spread(level: ShardGroup, carried: Sequence[Tensor]) -> None:
    """Overwrite byte tensors with rank 0's, over the groups of ``level`` that carry their devices. Communicates."""
    for device in dict.fromkeys(data.device for data in carried if level.has_others):
        share = [data for data in carried if data.device == device]
        dist._broadcast_coalesced(level.group_of(device), share, _MESSAGE_BYTES, 0)  # type: ignore[attr-defined]
