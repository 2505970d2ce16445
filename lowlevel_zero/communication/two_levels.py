"""TwoLevels: a shard group over a grid of ranks, an inner process group being a row and an outer one a column."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..streams import streams_of
from .collectives import ShardGroup
from .groups import union_group
from .levels import Levels, Nested, Replicated
from .progress import NORM
from .roll_call import Alarm, call_roll
from .sequel import OnStream, OnThread, Sequel
from .staging import Staged
from .transport import Pending, Transport

Ranks: TypeAlias = "dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]"

# Of this process; in a program whose ranks do the same, a try has one number on all of them.
_tries = count()

_HOST = torch.device("cpu")
_KEYWORDS = "dp_process_group, extra_dp_group"
_REMEDY = (
    "make both by init_device_mesh(device_type, (outer size, inner size), mesh_dim_names=('outer', 'inner')) "
    "and get_group('outer'), get_group('inner')"
)


def shard_group(group: Ranks | None, extra: Ranks | None, hybrid_shard: bool) -> ShardGroup:
    """The shard group of the caller's process groups: of one level, or of two.

    Args:
        group: a process group; or the inner one of two; or both, ``(outer, inner)``. None: the default one.
        extra: the outer one of two; None: there is none, or it is in ``group``.
        hybrid_shard: of two levels, shard over the inner one, and have replicas on the outer one.

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
    alarm = Alarm(f"two levels, try {next(_tries)}")
    try:
        outer, inner = _pair(group, extra)
        grid = _grid(outer, inner, alarm)
    except (TypeError, ValueError) as error:
        alarm.give(f"rank {dist.get_rank()} could not construct its LowLevelZeroOptimizer: {error}")
        raise
    # A level of one rank is none.
    if dist.get_world_size(outer) == 1:
        return ShardGroup(inner)
    if dist.get_world_size(inner) == 1 and not hybrid_shard:
        return ShardGroup(outer)
    return TwoLevels(outer, inner, grid, hybrid_shard)


def check_hybrid(group: Ranks | None, extra: Ranks | None, hybrid_shard: object) -> None:
    """Raise unless ``hybrid_shard`` is a choice that there is."""
    if hybrid_shard and extra is None and not isinstance(group, (tuple, list)):
        raise ValueError(
            "hybrid_shard=True: expected two levels of ranks, got one: pass extra_dp_group, on whose ranks slices have "
            "replicas, beside dp_process_group, over which they are sharded"
        )


class TwoLevels(ShardGroup):
    """Ranks of a grid that share every parameter.

    Wires go level by level, in groups of their own. What hosts tell each other goes over a group of all ranks.

    Args:
        outer: the column of this rank.
        inner: its row.
        grid: global ranks, ``[outer][inner]``.
        replicated: each row has all slices; else each rank has one.

    Attributes:
        made_of: these arguments.
    """

    def __init__(
        self, outer: dist.ProcessGroup, inner: dist.ProcessGroup, grid: list[list[int]], replicated: bool
    ) -> None:
        super().__init__(union_group([rank for row in grid for rank in row]))
        self._outer, self._inner = ShardGroup(outer), ShardGroup(inner)
        self._replicated = replicated
        self._grid = grid
        self._backends_of_all = self._backends
        self.made_of = outer, inner, grid, replicated
        self._backends = self._inner._backends
        self._levels: dict[tuple[str, bool], Levels] = {}
        self._sequels: dict[str, Sequel] = {}
        self._sent.update({"reduce_outer": 0, "gather_outer": 0})
        self.rank, self.size = self._inner.rank, self._inner.size
        if not replicated:
            self.rank, self.size = self.rank * self._outer.size + self._outer.rank, self.ranks
        self._places = [self._global_ranks.index(rank) for rank in self.slice_ranks]

    @property
    def slices(self) -> dist.ProcessGroup | None:
        """Slices are numbered within rows first, and groups have ranks in order."""
        return self._inner.group if self._replicated else None

    @property
    def slice_ranks(self) -> list[int]:
        """Of one row, or column after column of the grid."""
        if self._replicated:
            return self._inner.slice_ranks
        return [rank for column in zip(*self._grid, strict=True) for rank in column]

    def way_of(self, device: torch.device) -> str | None:
        """Level by level."""
        across, within = self._outer.way_of(device), self._inner.way_of(device)
        return None if within is None else f"{within} within rows, {across} across them"

    def own_wires(self, shared: bool = True, sums_in_fp32: bool = False) -> None:
        """Of each level, and of what hosts tell each other over a group of all ranks."""
        self._outer.own_wires(shared, sums_in_fp32)
        self._inner.own_wires(shared, sums_in_fp32)
        super().own_wires(shared=False)
        self._levels.clear()

    def release(self) -> None:
        """Let another instance have all of them."""
        for level in (self._outer, self._inner):
            level.release()
        super().release()

    def held(self) -> list[Tensor]:
        """What both levels hold."""
        return [*self._outer.held(), *self._inner.held()]

    def rest(self) -> None:
        """Have both levels give memory back."""
        self._outer.rest()
        self._inner.rest()

    def sum_scalar(self, value: Tensor) -> Pending[Tensor]:
        """Over the slices, each once: over a row where rows are replicas, else over all ranks."""
        if self._replicated:
            return self._begun(NORM, None, value, lambda: self._inner.sum_scalar(value))
        if self._on_gloo(value.device):
            return super().sum_scalar(value)
        sequel = self._sequel(value.device)
        start = partial(sequel.after, self._inner.sum_scalar(value), self._outer.sum_scalar)
        return self._begun(NORM, None, value, start)

    def broadcast(self, tensors: Sequence[Tensor], by_way_of: torch.device) -> None:
        """From the first row to the others, then within rows."""
        self._outer.broadcast(tensors, by_way_of)
        self._inner.broadcast(tensors, by_way_of)

    def _transport(self, device: torch.device, fp8: bool = False) -> Transport:
        if not self._on_gloo(device):
            return self._over_levels(device, fp8)
        host = self._over_levels(_HOST, fp8)
        return host if device.type == "cpu" else Staged(host)

    def _over_levels(self, device: torch.device, fp8: bool) -> Levels:
        if (device.type, fp8) not in self._levels:
            ways = self._outer._transport(device, fp8), self._inner._transport(device, fp8), self._sequel(device)
            self._levels[device.type, fp8] = (
                Replicated(*ways, self.rank, self.size)
                if self._replicated
                else Nested(*ways, self.rank, self.size, self._straight(device), self._places)
            )
        return self._levels[device.type, fp8]

    def _straight(self, device: torch.device) -> Transport:
        """Over a group of all ranks, which may not carry what the levels do: then through the host."""
        if self._on_gloo(device):
            return self._hosts
        has_its_own = self._backends_of_all.get(device.type, "gloo") != "gloo"
        return self._native if has_its_own else Staged(self._hosts)

    def _sequel(self, device: torch.device) -> Sequel:
        if device.type not in self._sequels:
            self._sequels[device.type] = OnThread() if device.type == "cpu" else OnStream(streams_of([device]))
        return self._sequels[device.type]

    def _note_sent(self, purpose: str, row: int, times: int = 1) -> None:
        """Over two levels others get as many bytes as over one; replicas exchange their sums beside that."""
        super()._note_sent(purpose, row, times)
        across = times * (self._outer.size - 1) * row
        if self._replicated:
            across = 2 * (self._outer.size - 1) * row // self._outer.size if purpose == "reduce" else 0
            self._sent[purpose] += across
        self._sent[f"{purpose}_outer"] += across


# ---- from the caller's groups to a grid ----


class _Told(NamedTuple):
    """What a rank tells of itself.

    Attributes:
        rank: its global rank.
        outer: global ranks of its outer group.
    """

    rank: int
    outer: list[int]


def _pair(group: Any, extra: Any) -> tuple[Any, Any]:
    """The outer and the inner one; what it raises depends on the shape of the arguments alone."""
    if isinstance(group, (tuple, list)) and extra is not None:
        raise ValueError("extra_dp_group: expected None beside a pair in dp_process_group, got one more group")
    if group is None and not isinstance(extra, (tuple, list)):
        raise ValueError(
            "extra_dp_group: expected dp_process_group beside it, got None: pass the inner groups there, or "
            "dp_process_group=(outer, inner)"
        )
    pair = (extra, group)
    for one, other in ((group, extra), (extra, group)):
        if isinstance(one, (tuple, list)) and other is None:
            pair = tuple(one)
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


def _grid(outer: Any, inner: Any, alarm: Alarm) -> list[list[int]]:
    """Global ranks, ``[outer][inner]``, if both groups and those of all of their ranks form a grid.

    A row's ranks tell each other of their columns, and then a column's of their rows: so each rank knows of all, and
    all find the same wrong. Only stores are used: a collective would wait for whoever has other groups.
    """
    _check_own(outer, inner)
    told = json.dumps(_Told(dist.get_rank(), dist.get_process_group_ranks(outer)))
    row = json.dumps(call_roll(inner, "inner process group", word=told, alarm=alarm))
    words = call_roll(outer, "outer process group", word=row, alarm=alarm)
    rows = [[_Told(*json.loads(word)) for word in json.loads(row)] for row in words]
    _check_grid(rows)
    return [[each.rank for each in row] for row in rows]


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


def _check_grid(rows: list[list[_Told]]) -> None:
    """Raise unless everybody's outer group is one place of all rows."""
    for place, told in ((place, told) for row in rows for place, told in enumerate(row)):
        column = [row[place].rank if place < len(row) else None for row in rows]
        if told.outer != column or len(rows[0]) != max(map(len, rows)):
            raise ValueError(
                f"{_KEYWORDS}: expected inner groups of one size, and outer groups that each have the ranks of one "
                f"place in all of them, got inner groups {[[each.rank for each in row] for row in rows]} and, on rank "
                f"{told.rank}, the outer one {told.outer}: {_REMEDY}"
            )
