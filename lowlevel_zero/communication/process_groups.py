"""Process groups: what this package keeps for each, what torch keeps to itself about one, and groups beside them.

Ranks find each other by a group's name, which must be the same on all of them. The names that torch makes up tell how
many groups a rank has, so those made here are named after the caller's group instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .backends.backend import Alone, HostBackend
from .backends.memory_pool import Memory
from .processes import Process
from .runtime import runtime
from .work import Work

_PREFIX = "lowlevel_zero/"


class GroupContext:
    """What this process keeps for one process group, whoever uses it; it doesn't hold the group itself.

    Attributes:
        beside: by name, groups that were made beside it.
        agreements: how the hosts agree, in one order for all optimizers; until they have met, each for itself.
        pool: memory that all ranks see; or why there is none; None: nobody has asked.
        abandoned: collectives under way that nobody will wait for.
        shard_groups: numbers those made of it, alike on all ranks.
        processes: of the default group: those of other ranks, by global rank.
        writing: what a thread is writing over the side group; None: nothing, as far as anybody has asked.
    """

    def __init__(self) -> None:
        self.beside: dict[str, dist.ProcessGroup] = {}
        self.agreements: HostBackend = Alone(0, 1)
        self.pool: Memory | str | None = None
        self.abandoned: list[Work[Any]] = []
        self.shard_groups = count(1)
        self.processes: dict[int, Process] = {}
        self.writing: Future[Any] | None = None


_contexts: WeakKeyDictionary[dist.ProcessGroup, GroupContext] = WeakKeyDictionary()


def context_of(group: dist.ProcessGroup) -> GroupContext:
    """The only context of ``group``: made when first asked for, and gone with the group."""
    return _contexts.setdefault(group, GroupContext())


# ---- what torch knows of a group ----


def default_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    return dist.distributed_c10d._get_default_group()


def backends_by_device(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend by device type, as in ``{"cpu": "gloo", "cuda": "nccl"}``."""
    config = dist.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether its other ranks aren't there."""
    return "fake" in backends_by_device(group).values()


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def store_of(group: dist.ProcessGroup, prefix: str = "") -> Any:
    """The key-value store over which ``group`` was made; with a ``prefix`` before all keys."""
    store = dist.distributed_c10d._get_process_group_store(group)
    return dist.distributed_c10d.PrefixStore(_PREFIX + prefix, store) if prefix else store


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that a collective of ``group`` may take, on the devices where it may take least."""
    return min(_timeout_on(group, device) for device in group._device_types)


def _timeout_on(group: dist.ProcessGroup, device: torch.device) -> float:
    options = None
    with suppress(RuntimeError):  # made with its first tensor
        options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None) or dist.constants.default_pg_timeout
    return float(timeout.total_seconds())


# ---- groups beside the caller's ----


def side_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The gloo group over the same ranks, made by all of them when they first ask for it; of one rank, ``group``.

    It is gloo wherever the data travels, so that what hosts tell each other never synchronises a device. Its messages
    from rank to rank have tags, and so an order for each use. Its collectives have one order: they are for
    checkpoints alone, of which one is written or read at a time, be it in a thread.
    """
    if dist.get_world_size(group) == 1 or is_fake(group) or group.group_name.startswith(_PREFIX):
        return group
    return _group_beside(group, "side", "gloo", dist.get_process_group_ranks(group))


def data_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group over the same ranks that carries buffers on devices, made by all of them when they first ask for it.

    NCCL's communicators have one order of collectives each. A reduction starts when this rank is ready, and the caller
    may be at collectives of its own then, as of SyncBatchNorm in backward: on one communicator the two could pair up.
    It is made once, whatever number of optimizers there are. gloo's devices need none: it carries messages with tags.

    Where ``init_process_group`` was given a device, NCCL splits the communicator of all ranks, which all would have to
    take part in: for some of them it is ``group`` itself.
    """
    devices = {device: backend for device, backend in backends_by_device(group).items() if backend != "gloo"}
    splits = getattr(default_group(), "bound_device_id", None) is not None
    size = dist.get_world_size(group)
    if not devices or size == 1 or is_fake(group) or (splits and size < dist.get_world_size()):
        return group
    backends = ",".join(f"{device}:{backend}" for device, backend in devices.items())
    return _group_beside(group, "data", backends, dist.get_process_group_ranks(group))


def buffer_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The gloo group over the same ranks that carries hosts' buffers from rank to rank, where no memory is shared.

    A connection carries what it is given in one order: what hosts agree on would wait until all buffers before it have
    left. Where devices' buffers have a group of their own, the few of the host have no further one.
    """
    if set(backends_by_device(group).values()) != {"gloo"}:
        return side_group(group)
    return _group_beside(group, "buffers", "gloo", dist.get_process_group_ranks(group))


def union_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of these global ranks: the default one if it is of all, else one of gloo's, made by them alone."""
    default, members = default_group(), sorted(ranks)
    if len(ranks) == dist.get_world_size():
        return default
    name = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
    return _group_beside(default, f"union/{name}", "gloo", members)


def _group_beside(like: dist.ProcessGroup, name: str, backend: str, ranks: list[int]) -> dist.ProcessGroup:
    """A group of ``ranks`` with the store and timeout of another, made when first asked for; ``name`` is theirs."""
    torchs: Any = dist.distributed_c10d
    beside = context_of(like).beside
    name = f"{_PREFIX}{name}/{like.group_name}"
    if name in beside:
        return beside[name]
    made, _ = torchs._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(runtime().backend(backend)),
        store_of(like),
        name,
        timeout=timedelta(seconds=timeout_of(like)),
        pg_tag=name,  # or torch would give it to who asks for any group of these ranks
    )
    assert isinstance(made, dist.ProcessGroup)
    torchs._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    beside[name] = made
    return made


def start_alone() -> None:
    """Have this process, which was started without others, be a default group of one rank, unless there is a group."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
