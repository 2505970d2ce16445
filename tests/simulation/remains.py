"""What a simulation leaves behind: looked for when all jobs have ended, and again when their groups are destroyed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator

from torch import Tensor

from lowlevel_zero.communication.backends.memory_pool import Memory

from .network import Network


def descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def tensors(but: Iterable[object]) -> tuple[str, ...]:
    """Those that have been made since ``gc.freeze`` and live on, without those that share memory with ``but``."""
    known = {each.untyped_storage()._cdata for each in _tensors_in(list(but))}
    made = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
    found = [each for each in made if each.untyped_storage()._cdata not in known]
    return tuple(sorted(f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in found))


def _tensors_in(value: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    for each in (*parts, *getattr(value, "__dict__", {}).values()):
        yield from _tensors_in(each, seen)


def blocks(network: Network) -> tuple[str, ...]:
    """Blocks of shared memory that can't be given back, but for one of each rank's.

    That one holds the last few numbers that ranks have agreed on: peers say that they have read
    it in their next record. With its pool a rank's memory is given back whole.
    """
    pools = [each for each in gc.get_objects() if issubclass(type(each), Memory)]
    pipes = [network.pipes[pool.pipe.descriptor] for pool in pools]
    while any(records for pipe in pipes for records in pipe.coming.values()):
        for pool in pools:
            pool.pipe.collect()
    for pool in pools:
        pool.trim()
    found = []
    for memory in (network.memories[pool.address.descriptor] for pool in pools):
        for offset, nbytes in sorted(memory.resident.items(), key=lambda each: each[1])[1:]:
            found.append(f"rank {memory.rank}: {nbytes} bytes at {offset}")
    return tuple(found)
