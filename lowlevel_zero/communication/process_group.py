"""What torch keeps to itself about a process group: its key-value store, and how long its collectives may take."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist


def store_of(group: dist.ProcessGroup) -> Any:
    """The key-value store over which ``group`` was made: the one place that knows where torch keeps it."""
    return dist.distributed_c10d._get_process_group_store(group)


def prefixed(prefix: str, group: dist.ProcessGroup) -> Any:
    """The store of ``group``, in which all keys begin with ``prefix``."""
    return dist.distributed_c10d.PrefixStore(prefix, store_of(group))


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def timeout_of(group: dist.ProcessGroup, device_type: str = "cpu") -> float:
    """Seconds that a collective of ``group`` may take for tensors of a device."""
    options = None
    with suppress(RuntimeError):  # it serves no such device
        options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    timeout = getattr(options, "_timeout", None) or dist.constants.default_pg_timeout
    return float(timeout.total_seconds())
