"""Process groups: this package's context of each group, and the further groups that it makes for one.

Ranks find each other by a group's name, which must be the same on all of them. The names that torch makes up tell how
many groups a rank has, so those made here are named after the caller's group instead.

All that is made for a group ends with it: threads, groups beside it, shared memory. ``GroupContext`` owns them. Whoever
uses them holds them weakly, so that an optimizer that outlives its process group keeps nothing of it.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
import torch.distributed as dist

from .backends.backend import HostBackend, destroyed
from .backends.memory_pool import Memory
from .processes import Process
from .runtime import Threads, runtime

_PREFIX = "lowlevel_zero/"
_NEVER_SENT = 2**31 - 1  # a message's tag
SHARE_OF_TIMEOUT = 0.4  # of a group's own, after which a rank has told what it waits for

# Seconds that threads get to finish what peers may never do their part of: at a group's end, at that of the process;
# and to end when broken off.
_PATIENCE, _AT_EXIT, _AFTER_BREAK = 5.0, 10.0, 2.0


class GroupContext:
    """The threads, groups and shared memory made for one process group; they end when it is destroyed.

    Attributes:
        threads: the threads that work for the group.
        users: the shard groups that begin collectives over it; ``leave`` ends these.
        beside: the groups that were made beside it, by name.
        agreements: carries agreements, in one order for all optimizers; None: the ranks haven't met.
        exchanges: the number of its exchanges that were begun, alike on all ranks where they make the same call.
        pool: shared memory of all ranks; or the reason why there is none; None: not opened yet.
        shard_groups: the number of its shard groups that were connected; an agreement makes it alike on all ranks.
        processes: in the default group's context, the processes of ranks by global rank.
        begun: the number of reductions, and of gradient syncs, that were begun over it.
        is_shared: several optimizers have reduced gradients over it; alike on all ranks.
        stall_timeout: that of the shard group that was watched last; None: none was.
        is_alive: the process group hasn't been destroyed.
        lost: the message that tells how a rank was lost, or waited for in vain; empty: none was.
        process: the PID of the process that made this, which alone may speak to the other ranks.
        writing: the checkpoint that a thread is writing over the side group; None: none, or its end is known.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)
        self.threads = Threads()
        self.users: WeakSet[Any] = WeakSet()
        self.beside: dict[str, dist.ProcessGroup] = {}
        self.agreements: HostBackend | None = None
        self.exchanges = 0
        self.pool: Memory | str | None = None
        self.shard_groups = 0
        self.begun = 0
        self.is_shared = False
        self.processes: dict[int, Process] = {}
        self.writing: Future[Any] | None = None
        self.stall_timeout: float | None = None
        self.is_alive = True
        self.lost = ""
        self.process = os.getpid()

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the process group; raise ``RuntimeError`` if it has been destroyed."""
        group = self._group()
        if not is_alive(group):
            raise destroyed()
        return group

    def end(self) -> None:
        """Finish collectives under way, and end all threads, memory and groups made for this group, unless in a fork.

        In a fork of the process that made it nothing is ended: threads stayed there, and memory and pipes are the
        parent's.
        """
        self.is_alive = False
        if os.getpid() != self.process:
            return
        deadline, leaving = runtime().now() + _PATIENCE, Threads()
        for user in list(self.users):
            user.leave(leaving)
        self.end_threads(deadline, leaving)
        self.end_threads(deadline, self.threads)
        beside, self.beside = self.beside, {}
        self.agreements = self.pool = None
        for each in beside.values():
            with suppress(RuntimeError):  # whatever has become of its peers
                if is_alive(each):
                    dist.destroy_process_group(each)

    def end_threads(self, deadline: float, threads: Threads) -> None:
        """Wait for the tasks of ``threads`` until the ``deadline``, then break them off; do nothing in a fork."""
        if os.getpid() == self.process and not threads.end(deadline - runtime().now()):
            self._break_off()
            threads.end(_AFTER_BREAK)

    def _break_off(self) -> None:
        """Make threads that wait for peers raise, by closing gloo's connections."""
        self.threads.broken_off = True
        own = self._group()
        for group in (own, *self.beside.values()):
            if group is None or not group.group_name.startswith(_PREFIX):
                continue
            with suppress(RuntimeError):  # gloo has no other way: a wait in vain closes all connections of a group
                # torch may have forgotten the group already, and then doesn't tell its backend by name.
                if isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo):
                    peer = (group.rank() + 1) % group.size()
                    group.recv([torch.empty(1, device="cpu")], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


class _Entry(str):
    """A value in torch's map of groups; its deletion tells that torch has forgotten the group.

    Attributes:
        before: the value that it stands for, which may be another module's entry of this kind.
    """

    before: str


_contexts: WeakKeyDictionary[dist.ProcessGroup, GroupContext] = WeakKeyDictionary()


def context_of(group: dist.ProcessGroup) -> GroupContext:
    """Return the context of ``group``; it is made by the first call, and ends with the group."""
    context = _contexts.get(group)
    if context is None:
        context = _contexts[group] = GroupContext(group)
        configs = dist.distributed_c10d._world.pg_backend_config
        entry = _Entry(configs[group])
        entry.before, configs[group] = configs[group], entry
        finalize(entry, context.end).atexit = False
    return context


@atexit.register
def _end_all_threads() -> None:
    """End all threads before the interpreter ends."""
    deadline = runtime().now() + _AT_EXIT
    for context in list(_contexts.values()):
        context.end_threads(deadline, context.threads)


# ---- what torch knows of a group ----


def default_group() -> dist.ProcessGroup:
    """Return torch's default process group."""
    return dist.distributed_c10d._get_default_group()


def backends_by_device(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend for each device type, as in ``{"cpu": "gloo", "cuda": "nccl"}``."""
    config = dist.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


def is_fake(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` is a fake one, without other processes."""
    return "fake" in backends_by_device(group).values()


def is_alive(group: dist.ProcessGroup | None) -> TypeGuard[dist.ProcessGroup]:
    """Return whether ``group`` is a process group that hasn't been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def store_of(group: dist.ProcessGroup, prefix: str = "") -> dist.distributed_c10d.Store:
    """Return the key-value store of ``group``, with ``prefix`` before all keys."""
    store = dist.distributed_c10d._get_process_group_store(group)
    return dist.distributed_c10d.PrefixStore(_PREFIX + prefix, store) if prefix else store


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of ``group`` in seconds, the shortest of its devices'; torch's default if none is known."""
    timeouts = []
    for device in group._device_types:
        options = None
        with suppress(RuntimeError):  # a device's communicator is made with its first tensor
            options = getattr(group._get_backend(device), "options", None)
        timeouts.append(getattr(options, "_timeout", None) or dist.constants.default_pg_timeout)
    return float(min(timeouts).total_seconds())


# ---- groups beside the caller's ----


def await_all(store: Any, ranks: Sequence[int], timeout: float) -> None:
    """Wait, through the store, until all ``ranks`` have called this; raise ``TimeoutError`` if one hasn't in time.

    torch would keep the store's only connection busy while it waits for the others: a thread couldn't report which
    ranks are missing. Each try has a number, and one end for all ranks: all have come, or one of them has given it up.

    Raises:
        TimeoutError: a rank hasn't called it within ``timeout`` seconds; it may be called again.
    """
    began, me = runtime().now(), str(dist.get_rank())
    for number in count():
        over = f"{number}/over"
        if store.check([over]):
            continue
        if store.add(f"{number}/count", 1) == len(ranks):
            store.compare_set(over, "", "all")
        store.set(f"{number}/{me}", "")  # last: a rank whose end keeps the others waiting lacks it
        while not store.check([over]):
            waited = runtime().now() - began
            if waited > timeout and store.compare_set(over, "", me) == me.encode():
                lacking = ", ".join(str(rank) for rank in ranks if not store.check([f"{number}/{rank}"]))
                raise TimeoutError(
                    f"expected all ranks, waited {timeout:g} seconds in vain for rank {lacking} to construct its "
                    f"LowLevelZeroOptimizer. Not there yet: rank {lacking}: construct it on every rank"
                )
            runtime().sleep(max(0.001, waited / 20))
        if store.get(over) == b"all":
            return


def side_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group over the same ranks for small messages. Communicates when it is first made.

    It is gloo wherever the data travels, so that what hosts tell each other never synchronises a device. Its messages
    from rank to rank have tags, and so an order for each use. Its collectives have one order: they are for
    checkpoints alone, of which one is written or read at a time, be it in a thread.
    """
    is_own = group.group_name.startswith(_PREFIX) and set(backends_by_device(group).values()) == {"gloo"}
    if is_own or dist.get_world_size(group) == 1 or is_fake(group):
        return group
    return beside(group, "side", "gloo")


def data_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group beside ``group`` for devices' buffers, or itself if all are on gloo. Communicates when first made.

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
    return beside(group, "data", backends)


def buffer_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group for hosts' buffers: its own if all are on gloo, else the side group. May communicate.

    A connection carries what it is given in one order: what hosts agree on would wait until all buffers before it have
    left. Where devices' buffers have a group of their own, the few of the host have no further one.
    """
    if set(backends_by_device(group).values()) != {"gloo"}:
        return side_group(group)
    return beside(group, "buffers", "gloo")


def union_group(ranks: Sequence[int], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of global ``ranks`` with ``like``'s backends, maybe the default. Communicates when first made.

    The default group stands for it where it has all of them, and such backends.
    """
    default, members = default_group(), sorted(ranks)
    if len(ranks) == dist.get_world_size() and backends_by_device(like) == backends_by_device(default):
        return default
    backends = dist.get_backend_config(like)
    name = hashlib.sha256(f"{backends} {members}".encode()).hexdigest()[:16]
    return beside(default, f"union/{name}", backends, members)


def beside(
    group: dist.ProcessGroup, purpose: str, backend: str, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """Return a further group for one ``purpose``, named after ``group``. Communicates when it is first made.

    It has the other's store and timeout, and ends when that is destroyed. ``ranks``: its global ones; None: those of
    ``group``.
    """
    torchs: Any = dist.distributed_c10d
    made = context_of(group).beside
    name = f"{_PREFIX}{purpose}/{group.group_name}"
    if name not in made:
        members, timeout = list(dist.get_process_group_ranks(group) if ranks is None else ranks), timeout_of(group)
        await_all(store_of(group, f"come/{name}"), members, timeout)
        one, _ = torchs._new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            members,
            dist.Backend(runtime().backend(backend)),
            store_of(group),
            name,
            timeout=timedelta(seconds=timeout),
            pg_tag=name,  # else torch would return it to callers that ask for any group of these ranks
        )
        torchs._world.pg_group_ranks[one] = {rank: place for place, rank in enumerate(members)}
        made[name] = one
    return made[name]


def start_alone() -> None:
    """Initialise a default process group of one rank, this process, unless there is a default group."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
