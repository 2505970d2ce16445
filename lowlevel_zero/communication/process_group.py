"""What torch keeps to itself about a process group, its store and timeout, and what this package keeps for one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

T = TypeVar("T")

# By group: one record of each kind that was asked for.
_records: WeakKeyDictionary[dist.ProcessGroup, dict[type[Any], Any]] = WeakKeyDictionary()


def of_group(group: dist.ProcessGroup, kind: type[T]) -> T:
    """The only ``kind`` that this process has for ``group``: made when first asked for, and gone with the group.

    It must not hold ``group``, which it would keep alive.
    """
    records = _records.setdefault(group, {})
    if kind not in records:
        records[kind] = kind()
    record: T = records[kind]
    return record


def default_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    return dist.distributed_c10d._get_default_group()


def store_of(group: dist.ProcessGroup) -> Any:
    """The key-value store over which ``group`` was made: the one place that knows where torch keeps it."""
    return dist.distributed_c10d._get_process_group_store(group)


def prefixed(prefix: str, group: dist.ProcessGroup) -> Any:
    """The store of ``group``, in which all keys begin with ``prefix``."""
    return dist.distributed_c10d.PrefixStore(prefix, store_of(group))


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that a collective of ``group`` may take, on the devices where it may take least."""
    return min(_timeout_on(group, device) for device in group._device_types)


def _timeout_on(group: dist.ProcessGroup, device: torch.device) -> float:
    options = None
    with suppress(RuntimeError):  # made with its first tensor
        options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None) or dist.constants.default_pg_timeout
    return float(timeout.total_seconds())
