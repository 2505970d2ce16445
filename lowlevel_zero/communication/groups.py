"""Process groups beside the caller's own, over the same ranks: one for each, whoever uses it.

Ranks find each other by a group's name, which must be the same on all of them. The names that torch makes up tell how
many groups a rank has, so those made here are named after the caller's group instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .process_group import default_group, of_group, store_of, timeout_of

_PREFIX = "lowlevel_zero/"


class _Made:
    """Groups that were made beside one of the caller's.

    Attributes:
        side: the one of the same ranks.
        unions: those of several levels, by their ranks.
    """

    def __init__(self) -> None:
        self.side: dist.ProcessGroup | None = None
        self.unions: dict[tuple[int, ...], dist.ProcessGroup] = {}


def backends_by_device(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend by device type, as in ``{"cpu": "gloo", "cuda": "nccl"}``."""
    config = dist.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether its other ranks aren't there."""
    return "fake" in backends_by_device(group).values()


def side_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The gloo group over the same ranks, made by all of them when they first ask for it; of one rank, ``group``.

    It is gloo wherever the data travels, so that what hosts tell each other never synchronises a device. Its messages
    from rank to rank have tags, and so an order for each use. Its collectives have one order: they are for
    checkpoints alone, of which one is written or read at a time, be it in a thread.
    """
    if dist.get_world_size(group) == 1 or is_fake(group) or group.group_name.startswith(_PREFIX):
        return group
    made = of_group(group, _Made)
    if made.side is None:
        made.side = _gloo_group(f"side/{group.group_name}", dist.get_process_group_ranks(group), group)
    return made.side


def union_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of these global ranks: the default one if it is of all, else one of gloo's, made by them alone."""
    default = default_group()
    if len(ranks) == dist.get_world_size():
        return default
    unions, members = of_group(default, _Made).unions, tuple(sorted(ranks))
    if members not in unions:
        name = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
        unions[members] = _gloo_group(f"union/{default.group_name}/{name}", list(members), default)
    return unions[members]


def _gloo_group(name: str, ranks: list[int], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of these global ranks, with the store and timeout of another; ``name`` is theirs alone."""
    torchs: Any = dist.distributed_c10d
    name = _PREFIX + name
    made, _ = torchs._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend("gloo"),
        store_of(like),
        name,
        timeout=timedelta(seconds=timeout_of(like)),
        pg_tag=name,  # or torch would give it to who asks for any group of these ranks
    )
    assert isinstance(made, dist.ProcessGroup)
    torchs._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made
