"""Bytes per rank: what is held, by owner, every storage counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor


def held_bytes(owners: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Bytes of the storages behind each owner's tensors.

    A storage that several tensors share counts once, for the first owner that names it: an fp32 master slice
    that is a view of its parameter adds nothing.
    """
    seen: set[int] = set()
    held: dict[str, int] = {}
    for owner, tensors in owners.items():
        held[owner] = sum(_new_bytes(tensor, seen) for tensor in tensors)
    return held


def _new_bytes(tensor: Tensor, seen: set[int]) -> int:
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()
