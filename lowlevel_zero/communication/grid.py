"""A grid of ranks, an inner process group being a row and an outer one a column."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain, count, zip_longest
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .backends.backend import Backend
from .backends.staged import Staged
from .hierarchical import Nested, Replicated
from .process_groups import (
    SHARE_OF_TIMEOUT,
    backends_by_device,
    default_group,
    in_vain,
    missing,
    store_of,
    timeout_of,
    union_group,
)
from .shard_group import ShardGroup, is_staged

Ranks: TypeAlias = "dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]"

# Of this process; in a program whose ranks do the same, a try has one number on all of them.
_tries = count()

_HOST = torch.device("cpu")
_log = logging.getLogger("lowlevel_zero")
_KEYWORDS = "dp_process_group, extra_dp_group"
_REMEDY = (
    "make both by init_device_mesh(device_type, (outer size, inner size), mesh_dim_names=('outer', 'inner')) "
    "and get_group('outer'), get_group('inner')"
)


def shard_group(group: Ranks | None, extra: Ranks | None, hybrid_shard: bool, stall_timeout: float = 0.0) -> ShardGroup:
    """The shard group of the caller's process groups: of one level, or of two.

    Args:
        group: a process group; or the inner one of two; or both, ``(outer, inner)``. None: the default one.
        extra: the outer one of two; None: there is none, or it is in ``group``.
        hybrid_shard: of two levels, shard over the inner one, and have replicas on the outer one.
        stall_timeout: seconds after which a rank logs which other one it waits for; 0: never.

    Raises (on all ranks of both groups):
        TypeError, ValueError: what isn't one or two process groups of a grid that this process belongs to.
        RuntimeError: no process group is initialised, or it is so on another rank.
        TimeoutError: a rank of one of them didn't come.
    """
    if extra is None and not isinstance(group, (tuple, list)):
        if group is not None:
            _check_type(group)
        return ShardGroup(group)
    if not (dist.is_available() and dist.is_initialized()):
        return ShardGroup()  # raises
    outer, inner, grid = _met(group, extra, stall_timeout)
    # A level of one rank is none.
    if dist.get_world_size(outer) == 1:
        return ShardGroup(inner)
    if dist.get_world_size(inner) == 1 and not hybrid_shard:
        return ShardGroup(outer)
    return GridGroup(outer, inner, grid, hybrid_shard)


def check_hybrid(group: Ranks | None, extra: Ranks | None, hybrid_shard: object) -> None:
    """Raise unless ``hybrid_shard`` is a choice that there is."""
    if hybrid_shard and extra is None and not isinstance(group, (tuple, list)):
        raise ValueError(
            "hybrid_shard=True: expected two levels of ranks, got one: pass extra_dp_group, on whose ranks slices have "
            "replicas, beside dp_process_group, over which they are sharded"
        )


class GridGroup(ShardGroup):
    """Ranks of a grid that share every parameter.

    Buffers go level by level, in groups of their own. What hosts tell each other goes over a group of all ranks.

    Args:
        outer: the column of this rank.
        inner: its row.
        grid: global ranks, ``[outer][inner]``.
        replicated: each row has all slices; else each rank has one.

    Attributes:
        outer: the column.
        inner: the row.
    """

    def __init__(
        self, outer: dist.ProcessGroup, inner: dist.ProcessGroup, grid: list[list[int]], replicated: bool
    ) -> None:
        super().__init__(union_group([rank for row in grid for rank in row]))
        self.outer, self.inner = ShardGroup(outer), ShardGroup(inner)
        for level in (self.outer, self.inner):
            level.context.users.add(self)
        self._replicated = replicated
        everybody, self._backends_of_all = self.slice_ranks, self._backends
        self._backends, self.device_types = backends_by_device(inner), self.inner.device_types
        columns = [rank for column in zip(*grid, strict=True) for rank in column]
        self.slice_ranks = self.inner.slice_ranks if replicated else columns
        self.rank, self.size = self.slice_ranks.index(dist.get_rank()), len(self.slice_ranks)
        self._places = [everybody.index(rank) for rank in self.slice_ranks]

    def connect(self, shared: bool = True, sums_in_fp32: bool = False, own: bool = True) -> None:
        """Of each level, and of what hosts tell each other over a group of all ranks."""
        self.outer.connect(shared, sums_in_fp32, own)
        self.inner.connect(shared, sums_in_fp32, own)
        super().connect(False, sums_in_fp32, own)

    def _choose(self, device: torch.device, fp8: bool = False) -> Backend:
        if self.on_gloo(device) and is_staged(device):
            return Staged(self._over_levels(_HOST, fp8))
        return self._over_levels(device, fp8)

    def _over_levels(self, device: torch.device, fp8: bool) -> Backend:
        ways = self.outer.backend(device, fp8), self.inner.backend(device, fp8), self._chain(device)
        if self._replicated:
            return Replicated(*ways, self.rank, self.size)
        return Nested(*ways, self.rank, self.size, self._straight(device), self._places)

    def _straight(self, device: torch.device) -> Backend:
        """Over a group of all ranks, which may not carry what the levels do: then through the host."""
        if self.on_gloo(device):
            return self.hosts
        has_its_own = self._backends_of_all.get(device.type, "gloo") != "gloo"
        return self._native if has_its_own else Staged(self.hosts)

    def describe_backend(self, device: torch.device) -> str | None:
        """Of rows and columns."""
        across, within = self.outer.describe_backend(device), self.inner.describe_backend(device)
        return None if within is None else f"{within} within rows, {across} across them"

    def traffic(self) -> dict[str, int]:
        """Over two levels others get as many bytes as over one; replicas exchange their sums beside that."""
        sent = super().traffic()
        for purpose, nbytes in self._rows.items():
            across = (self.outer.size - 1) * nbytes
            if self._replicated:
                across = 2 * across // self.outer.size if purpose == "reduce" else 0
                sent[purpose] += across
            sent[f"{purpose}_outer"] = across
        return sent

    def _broadcast(self, tensors: Sequence[Tensor], by_way_of: torch.device) -> None:
        """From the first row to the others, then within rows."""
        self.outer.broadcast(tensors, by_way_of)
        self.inner.broadcast(tensors, by_way_of)

    def held(self) -> list[Tensor]:
        """What both levels hold."""
        return [*self.outer.held(), *self.inner.held()]

    def trim(self, for_good: bool = False) -> None:
        """Of both levels."""
        self.outer.trim(for_good)
        self.inner.trim(for_good)


# ---- from the caller's groups to a grid ----


def _met(group: Any, extra: Any, stall_timeout: float) -> tuple[dist.ProcessGroup, dist.ProcessGroup, list[list[int]]]:
    """Return the outer and the inner group, and global ranks, ``[outer][inner]``.

    The ranks tell each other through the store which groups they have: each reads what those of its row say, and
    whether those of its column, one in each row, have found the same. A collective would wait for ranks that have other
    groups; here a rank that can't go on says so to all that may ask it.
    """
    number, me = next(_tries), dist.get_rank()
    groups, grids = [store_of(default_group(), f"grid/{number}/{what}") for what in ("groups", "grids")]
    try:
        outer, inner = _pair(group, extra)
        _check_own(outer, inner)
        row, column = map(dist.get_process_group_ranks, (inner, outer))
        groups.set(str(me), json.dumps([row, column]))
        told = _told(groups, row, stall_timeout)
        columns = [each for _, each in told]
        digest = hashlib.sha256(json.dumps(columns).encode()).hexdigest()
        rows = list(map(list, zip_longest(*columns)))
        _check_grid(all(each == row for each, _ in told) and row in rows and None not in chain(*rows), row, columns)
        grids.set(str(me), json.dumps([digest]))
        _check_grid(all(each == [digest] for each in _told(grids, column, stall_timeout)), row, columns)
    except Exception as error:
        doing = "" if isinstance(error, RuntimeError) else f"rank {me} could not construct its LowLevelZeroOptimizer: "
        for store in (groups, grids):
            store.set(str(me), json.dumps(f"{doing}{error}"))
        raise
    return outer, inner, rows


def _told(store: Any, ranks: Sequence[int], stall_timeout: float) -> list[Any]:
    """Return what each of ``ranks`` has put into the store, in a few requests.

    Raises:
        RuntimeError: another rank can't go on; it says why.
        TimeoutError: one didn't come.
    """
    keys, timeout = list(map(str, ranks)), timeout_of(default_group())
    patience = min(stall_timeout, SHARE_OF_TIMEOUT * timeout)
    if patience > 0 and not _came(store, keys, patience):
        _log.warning("rank %d has waited %.3g s for %s", dist.get_rank(), patience, missing(store, ranks))
    if not _came(store, keys, timeout - patience):
        raise in_vain(store, ranks, timeout)
    told = list(map(json.loads, store.multi_get(keys)))
    for refusal in (each for each in told if isinstance(each, str)):
        raise RuntimeError(refusal)
    return told


def _came(store: Any, keys: list[str], seconds: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True


def _pair(group: Any, extra: Any) -> tuple[Any, Any]:
    """The outer and the inner one; what it raises depends on the shape of the arguments alone."""
    is_pair = isinstance(group, (tuple, list))
    if is_pair and extra is not None:
        raise ValueError("extra_dp_group: expected None beside a pair in dp_process_group, got one more group")
    if group is None:
        raise ValueError(
            "extra_dp_group: expected dp_process_group beside it, got None: pass the inner groups there, or "
            "dp_process_group=(outer, inner)"
        )
    pair = tuple(group) if is_pair else (extra, group)
    if len(pair) != 2:
        raise ValueError(f"dp_process_group: expected a process group or two, (outer, inner), got {len(pair)}")
    for one in pair:
        _check_type(one)
    return pair


def _check_type(group: object) -> None:
    if not (isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER):
        raise TypeError(
            f"{_KEYWORDS}: expected process groups, got {type(group).__name__} {group!r:.60}: pass what "
            "torch.distributed.new_group(ranks) or device_mesh.get_group(name) gives"
        )


def _check_own(outer: Any, inner: Any) -> None:
    """Raise for what this rank alone can see to be wrong."""
    for group, kind in ((outer, "outer"), (inner, "inner")):
        if dist.get_rank(group) < 0:
            raise ValueError(
                f"{_KEYWORDS}: expected groups that this process belongs to, got an {kind} one without it: {_REMEDY}"
            )
    both = set(dist.get_process_group_ranks(outer)) & set(dist.get_process_group_ranks(inner))
    if len(both) > 1:
        raise ValueError(
            f"{_KEYWORDS}: expected two groups that have this process alone in common, got ranks {sorted(both)} in "
            f"both: {_REMEDY}"
        )
    backends = [dist.get_backend_config(group) for group in (outer, inner)]
    if backends[0] != backends[1]:
        raise ValueError(f"{_KEYWORDS}: expected groups of one backend, got {backends[0]} and {backends[1]}")


def _check_grid(is_grid: bool, row: list[int], columns: list[list[int]]) -> None:
    if not is_grid:
        raise ValueError(
            f"{_KEYWORDS}: expected inner groups of one size, and outer groups that each have the ranks of one place "
            f"in all of them, got the outer groups {columns} of the ranks of an inner group, {row}: {_REMEDY}"
        )
