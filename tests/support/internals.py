"""What tests switch in the package that no option does. Each of these raises if what it replaces is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping import bucket_plan, gather_store
from lowlevel_zero.bookkeeping.unused_parameters import UnusedParameters
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.communication.work import Work
from lowlevel_zero.partition import Alignment
from tests.support.patching import patch_rank

T = TypeVar("T")


def pack_without_alignment(patch: pytest.MonkeyPatch) -> None:
    """Slices lie end to end in buckets, whose rows end with the last."""
    for module in (bucket_plan, gather_store):
        patch.setattr(module, "alignment_of", lambda *_: Alignment())


def always_detect(patch: pytest.MonkeyPatch) -> None:
    """Unused parameters are detected from the start."""
    build = UnusedParameters.__init__

    def built(self: UnusedParameters, parameters: Any, number: int) -> None:
        build(self, parameters, number)
        self.detecting = True

    patch.setattr(UnusedParameters, "__init__", built)


def with_and_without_detection(train: Callable[..., T]) -> Callable[..., tuple[T, T]]:
    """For ``run_ranks``: ``train`` done by each rank as it is, and once more with detection from the start."""

    def both(rank: int, world_size: int, *args: Any) -> tuple[T, T]:
        plain = train(rank, world_size, *args)
        with pytest.MonkeyPatch.context() as patch:
            always_detect(patch)
            return plain, train(rank, world_size, *args)

    return both


def as_on_a_device(optimizer: LowLevelZeroOptimizer) -> LowLevelZeroOptimizer:
    """On a device reductions of several shard groups start in one order."""
    for group in optimizer.sharded_groups:
        patch_rank(group.reducer.syncs, "in_order", True)
    return optimizer


def finish_late(patch: pytest.MonkeyPatch, done: bool = False) -> None:
    """Reductions look unfinished until somebody waits for them; ``done``: or finished at once, so somebody does."""
    for name in ("reduce_scatter", "all_reduce"):
        begin = getattr(ShardGroup, name)

        def begun(*args: Any, begin: Callable[..., Work[Any]] = begin) -> Work[Any]:
            work = begin(*args)
            work.ready = lambda: done
            return work

        patch.setattr(ShardGroup, name, begun)
