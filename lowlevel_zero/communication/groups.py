"""Process groups beside the caller's own, over the same ranks: each for what needs an order of its own."""

from __future__ import annotations

from typing import cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

_control: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_messages: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_apart: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def backends_by_device(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend by device type, as in ``{"cpu": "gloo", "cuda": "nccl"}``."""
    config = dist.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether its other ranks aren't there."""
    return "fake" in backends_by_device(group).values()


def gloo_group(ranks: list[int]) -> dist.ProcessGroup:
    """A new gloo group of these global ranks; made by all of them, and by nobody else."""
    return cast(dist.ProcessGroup, dist.new_group(ranks, backend="gloo", use_local_synchronization=True))


def gloo_like(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new gloo group of the same ranks; made by all of them, and by nobody else."""
    return gloo_group(dist.get_process_group_ranks(group))


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group over the same ranks, for what the hosts tell each other; made once per group.

    Ranks that disagree on how many wires there are can still agree on it here, since neither waits for the
    other's wires. It is gloo wherever the data travels, so that it never synchronises a device.
    """
    return group if dist.get_world_size(group) == 1 else _made_once(_control, group)


def message_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """One more, where wires don't travel over gloo: for what tells of rounds; made once per group."""
    return _made_once(_messages, group)


def group_apart(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """And one for what a thread beside training tells; made once per group, by all of its ranks.

    Two threads can't share a group: its collectives must come in the same order on every rank.
    """
    return _made_once(_apart, group)


def _made_once(
    made: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup], group: dist.ProcessGroup
) -> dist.ProcessGroup:
    if is_fake(group):
        return group
    if group not in made:
        made[group] = gloo_like(group)
    return made[group]
