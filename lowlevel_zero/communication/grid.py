"""A grid of ranks: each rank has an inner process group, its row, and an outer one, its column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from .agreement import CONSTRUCT, Alike, agree, together
from .backends.backend import HOST_BUCKET, Backend, Kind
from .backends.hybrid import Hybrid
from .backends.staged import Staged, is_staged
from .process_groups import await_all, backends_by_device, store_of, timeout_of, union_group
from .progress import AGREEMENT
from .shard_group import ShardGroup

Ranks: TypeAlias = "dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]"

_HOST = torch.device("cpu")
_KEYWORDS = "dp_process_group, extra_dp_group"
_REMEDY = (
    "make both by init_device_mesh(device_type, (outer size, inner size), mesh_dim_names=('outer', 'inner')) "
    "and get_group('outer'), get_group('inner')"
)
_HYBRID = Alike("the same hybrid_shard", "pass the same Communication on all ranks")
_COLUMNS = Alike("an outer group for each place in inner groups of one size", _REMEDY)


def shard_group(
    group: Ranks | None,
    extra: Ranks | None,
    hybrid_shard: bool,
    watch: Callable[[ShardGroup], object] = lambda _: None,
) -> ShardGroup:
    """Return the shard group of one process group, or of two that form a grid. Communicates if there are two.

    Args:
        group: a process group; or the inner one of two; or both, ``(outer, inner)``. None: the default one.
        extra: the outer one of two; None: there is none, or it is in ``group``.
        hybrid_shard: shard over the inner group of two, and replicate over the outer one; else shard over all ranks.
        watch: watches a shard group for stalls, while two process groups are compared.

    Raises (on all ranks of both groups):
        TypeError, ValueError: what isn't one or two process groups of a grid that this process belongs to.
        RuntimeError: no process group is initialised, or another rank has other groups.
        TimeoutError: a rank of one of them didn't come.
    """
    if extra is None and not isinstance(group, (tuple, list)):
        if group is not None:
            _check_type(group)
        return ShardGroup(group)
    if not (dist.is_available() and dist.is_initialized()):
        return ShardGroup()  # raises
    outer, inner = _pair(group, extra)
    ranks = _ranks_of_grid(outer, inner, hybrid_shard, watch)
    if dist.get_world_size(outer) == 1:
        return ShardGroup(inner)
    return HybridGroup(outer, inner, ranks) if hybrid_shard else ShardGroup(union_group(ranks, inner))


def check_hybrid(group: Ranks | None, extra: Ranks | None, hybrid_shard: object) -> None:
    """Raise ``ValueError`` if ``hybrid_shard`` is chosen without two process groups."""
    if hybrid_shard and extra is None and not isinstance(group, (tuple, list)):
        raise ValueError(
            "hybrid_shard=True: expected two levels of ranks, got one: pass extra_dp_group, on whose ranks slices have "
            "replicas, beside dp_process_group, over which they are sharded"
        )


class HybridGroup(ShardGroup):
    """The ranks of a grid, whose rows each hold all slices.

    Buffers travel in the groups of this rank's row, ``inner``, and column, ``outer``. Hosts agree over a group of all
    ``ranks``.
    """

    def __init__(self, outer: dist.ProcessGroup, inner: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        super().__init__(union_group(ranks, inner))
        self._outer, self._inner = ShardGroup(outer), ShardGroup(inner)
        for level in self.levels:
            level.context.users.add(self)
        self._backends, self.device_types = backends_by_device(inner), self._inner.device_types
        self.slice_ranks = self._inner.slice_ranks
        self.rank, self.size = self._inner.rank, self._inner.size
        self.holders = [ranks[place :: self.size] for place in range(self.size)]
        self._host_bucket = HOST_BUCKET

    @property
    def levels(self) -> Sequence[ShardGroup]:
        """Return the shard groups of the column and the row, by which the first rank's values reach all ranks."""
        return self._outer, self._inner

    def _make_groups(self, sums_in_fp32: bool) -> None:
        """Set up backends for buffers in this rank's row and column, and agree on a bucket's size. Communicates.

        One row may share memory where another sends messages, for which larger buckets are best.
        """
        agreements = self._agreements()
        for level in self.levels:
            level.connect(sums_in_fp32, self._owns_data)
        own = torch.tensor([level.bucket_size(_HOST) for level in self.levels], device="cpu")
        self._host_bucket = int(agreements.maximum(own, Kind.AGREEMENT).wait().max())

    def bucket_size(self, device: torch.device) -> int:
        """Return the default size of a gradient bucket on ``device``: a host's is the largest of any rank's level."""
        return self._host_bucket if device.type == "cpu" else super().bucket_size(device)

    def _choose(self, device: torch.device, fp8: bool = False) -> Backend:
        """Return the backend for ``device``: the outer and the inner groups' together, by way of the host on gloo."""
        staged = self.on_gloo(device) and is_staged(device)
        carrying = _HOST if staged else device
        outer, inner = self._outer.backend(carrying, fp8), self._inner.backend(carrying, fp8)
        hybrid = Hybrid(outer, inner, self._direct(carrying).chain)
        return Staged(hybrid) if staged else hybrid

    def describe_backend(self, device: torch.device) -> str | None:
        """Return as text how buffers of ``device`` travel within rows and across; None: by native collectives."""
        across, within = self._outer.describe_backend(device), self._inner.describe_backend(device)
        return None if within is None else f"{within} within rows, {across} across them"

    def traffic(self) -> dict[str, int]:
        """Return the bytes of buffers that this rank has sent; ``_outer`` keys count bytes between inner groups."""
        sent = super().traffic()
        across = 2 * (self._outer.size - 1) * self._rows["sum"] // self._outer.size
        return {**sent, "reduce": sent["reduce"] + across, "reduce_outer": across, "gather_outer": 0}


# ---- from the caller's groups to a grid ----


def _ranks_of_grid(
    outer: dist.ProcessGroup, inner: dist.ProcessGroup, hybrid_shard: bool, watch: Callable[[ShardGroup], object]
) -> list[int]:
    """Return the global ranks of the grid, row by row; raise on all ranks if there is none. Communicates.

    The ranks of a row tell each other their columns, and those of a column, one in each row, compare what they have
    found. An error in a row is told in all of its columns.
    """
    _check_membership(outer, inner)
    row, column = ShardGroup(inner), ShardGroup(outer)
    watch(row)
    watch(column)
    _meet(row, column, row)  # at last all ranks of its row have met their columns
    with together(column, CONSTRUCT, _COLUMNS) as found:
        with together(row, CONSTRUCT, _HYBRID) as chosen:
            _check_pair(outer, inner)
            chosen.append(f"hybrid_shard={bool(hybrid_shard)}")
        columns = row.all_gather_object(column.slice_ranks)
        rows = list(map(list, zip_longest(*columns)))
        if row.slice_ranks not in rows or None in chain(*rows):
            raise ValueError(
                f"{_KEYWORDS}: expected inner groups of one size, and outer groups that each have the ranks of one "
                f"place in all of them, got the outer groups {columns} of the ranks of an inner group, "
                f"{row.slice_ranks}: {_REMEDY}"
            )
        found += [f"outer groups {columns}", *chosen]
    return list(chain(*rows))


def _check_membership(outer: dist.ProcessGroup, inner: dist.ProcessGroup) -> None:
    """Raise ``ValueError`` unless this process is in both groups; if in one, its other ranks raise. May communicate."""
    for group, other, kind in ((outer, inner, "outer"), (inner, outer, "inner")):
        if dist.get_rank(group) < 0:
            error = ValueError(
                f"{_KEYWORDS}: expected groups that this process belongs to, got an {kind} one without it: {_REMEDY}"
            )
            if dist.get_rank(other) >= 0:
                level = ShardGroup(other)
                _meet(*(level, level) if other is inner else (level,))  # as its other ranks do
                agree(level, (), error)
            raise error


def _meet(*levels: ShardGroup) -> None:
    """Wait in each shard group for all of its ranks, through the store; raise ``TimeoutError`` if one doesn't come."""
    for level in levels:
        come = partial(await_all, store_of(level.group, "grid"), level.slice_ranks, timeout_of(level.group))
        level.progress.run(AGREEMENT, come)


def _pair(group: Any, extra: Any) -> tuple[Any, Any]:
    """Return ``(outer, inner)`` from the arguments; raise ``ValueError`` or ``TypeError`` if they aren't two groups."""
    is_pair = isinstance(group, (tuple, list))
    if is_pair and extra is not None:
        raise ValueError(
            "extra_dp_group: expected None beside a pair in dp_process_group, got one more group: leave one of them out"
        )
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
    """Raise ``TypeError`` unless ``group`` is a process group, or torch's mark for one without this rank."""
    if not (isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER):
        raise TypeError(
            f"{_KEYWORDS}: expected process groups, got {type(group).__name__} {group!r:.60}: pass what "
            "torch.distributed.new_group(ranks) or device_mesh.get_group(name) gives"
        )


def _check_pair(outer: dist.ProcessGroup, inner: dist.ProcessGroup) -> None:
    """Raise ``ValueError`` if two groups have more than this process in common, or differ in their backends."""
    both = set(dist.get_process_group_ranks(outer)) & set(dist.get_process_group_ranks(inner))
    if len(both) > 1:
        raise ValueError(
            f"{_KEYWORDS}: expected two groups that have this process alone in common, got ranks {sorted(both)} in "
            f"both: {_REMEDY}"
        )
    backends = [dist.get_backend_config(group) for group in (outer, inner)]
    if backends[0] != backends[1]:
        raise ValueError(f"{_KEYWORDS}: expected groups of one backend, got {backends[0]} and {backends[1]}")
