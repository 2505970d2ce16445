"""The ways that buffers may travel, each as the shard group that goes by it: whatever holds of one holds of all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from lowlevel_zero.communication import shard_group as groups
from lowlevel_zero.communication.grid import shard_group
from lowlevel_zero.communication.shard_group import SWITCH, ShardGroup

from .grid import Grid

WAYS = ("messages", "shared memory", "native", "staged messages", "staged shared memory")
# Of 2 x 2 ranks. Levels of native collectives are a device's, whose stream orders them.
OF_FOUR = (*WAYS, *(f"hybrid {way}" for way in WAYS[:2]))


def ways_of(world_size: int) -> tuple[str, ...]:
    """Those that so many ranks have."""
    return {1: ("alone",), 4: OF_FOUR}.get(world_size, WAYS)


@contextmanager
def by(way: str) -> Iterator[None]:
    """Meanwhile this rank's buffers of the host travel that way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, str(int("shared memory" in way)))
        if "native" in way:
            patch.setattr(ShardGroup, "on_gloo", lambda self, device: False)
        if "staged" in way:
            patch.setattr(groups, "is_staged", lambda device: True)
        yield


@contextmanager
def group_by(way: str, **connects: bool) -> Iterator[ShardGroup]:
    """All ranks, one of several kinds, whose buffers travel that way; ``connects``: keywords of ``connect``."""
    with by(way):
        group = ShardGroup()
        if "hybrid" in way:
            outer, inner = Grid.of(dist.get_rank(), (2, 2))
            group = shard_group(inner, outer, hybrid_shard=True)
        group.connect(**connects)
        innermost = getattr(group, "_inner", group)
        assert innermost.host_backend.shares_memory == ("shared memory" in way)
        assert innermost.on_gloo(torch.device("cpu")) == (way != "alone" and "native" not in way)
        yield group
