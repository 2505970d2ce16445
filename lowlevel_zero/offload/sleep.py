"""Sleep: masters, states, gradients and buffers move to the host and back, so that others may use the device.

Storages move, and the tensors over them follow by ``tensor.data``: so they stay the same objects, of the same values,
wherever they are. Nothing communicates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..bookkeeping.sharded_parameter import ShardedParameter
from ..bookkeeping.storages import tensors_in
from ..sharded_group import ShardedGroup
from ..streams import Streams

KINDS = ("masters", "states", "gradients", "buffers")

_HOST = torch.device("cpu")


def check_kinds(include: Collection[str]) -> None:
    """Raise ``ValueError`` unless ``include`` is a collection of names in ``KINDS``."""
    wrong = [include] if isinstance(include, str) else [each for each in include if each not in KINDS]
    if wrong:
        raise ValueError(f"include: expected some of {KINDS}, got {wrong[0]!r}: pass a tuple of these")


class Asleep:
    """Tensors whose memory is on the host until they are woken."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._moved: list[tuple[torch.device, list[ReferenceType[Tensor]]]] = []

    def take(self, tensors: Iterable[Tensor], pinned: bool, non_blocking: bool) -> int:
        """Move the memory of ``tensors`` to the host, wait for that, and return the bytes.

        If it fails, ``wake`` brings back what has been moved.
        """
        moved = 0
        with self._streams.home():
            for members in _by_storage(tensors):
                device = members[0].device
                self._moved.append((device, list(map(ref, members))))
                moved += _move(members, _HOST, pinned and self._streams.pins, non_blocking)
            self._streams.mark().synchronize()
        return moved

    def wake(self) -> None:
        """Copy offloaded tensors that are still referenced back to their devices; the host doesn't wait.

        After a failure it may be called again.
        """
        with torch.inference_mode(False), torch.no_grad(), self._streams.home():
            while self._moved:
                device, members = self._moved[-1]
                alive = [member for each in members if (member := each()) is not None]
                if alive:
                    _move(alive, device, False, True)
                self._moved.pop()


def movable(
    kinds: Collection[str], optim: Optimizer, records: Sequence[ShardedParameter], groups: Sequence[ShardedGroup]
) -> list[Tensor]:
    """Return the masters, states and gradients, as ``kinds`` names them, that offloading frees device memory of.

    Some optimizers count their steps on the host, and states that are offloaded are there already.
    """
    held: dict[str, Iterable[Tensor]] = {
        "masters": [record.p32 for record in records],
        "states": tensors_in(list(optim.state.values())),
        "gradients": chain.from_iterable(group.gradients.held() for group in groups),
    }
    devices = {record.padded.device for record in records}
    stay = {record.padded.untyped_storage().data_ptr() for record in records}
    found = [each for kind, tensors in held.items() if kind in kinds for each in tensors if each.device in devices]
    return [each for each in found if each.untyped_storage().data_ptr() not in stay]


def _by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return lists of tensors that share a storage, each tensor once; tensors without memory are left out."""
    found: dict[int, dict[Tensor, None]] = {}
    for each in tensors:
        found.setdefault(each.untyped_storage().data_ptr(), {})[each] = None
    return [list(members) for address, members in found.items() if address]


def _move(members: Sequence[Tensor], device: torch.device, pin: bool, non_blocking: bool) -> int:
    """Copy the storage that all ``members`` share to ``device``, make them use the copy, and return its bytes."""
    lead = members[0].detach()
    old = torch.empty(0, dtype=torch.uint8, device=lead.device).set_(lead.untyped_storage())
    new = torch.empty(len(old), dtype=old.dtype, device=device, pin_memory=pin).copy_(old, non_blocking=non_blocking)
    for each in members:
        like = torch.empty(0, dtype=each.dtype, device=device)
        each.data = like.set_(new.untyped_storage(), each.storage_offset(), each.shape, each.stride())
    return len(old)
