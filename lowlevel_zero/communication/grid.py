"""A grid of ranks: each rank has an inner process group, its row, and an outer one, its column."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import chain, zip_longest
from math import inf
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .backends.backend import Backend
from .backends.hybrid import Hybrid
from .backends.staged import Staged
from .failed_ranks import run_each
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
from .runtime import runtime
from .shard_group import ShardGroup, is_staged

Ranks: TypeAlias = "dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]"

_LOOK, _NAP = 1.0, 0.01  # seconds between looks at whether ranks are elsewhere, and where they still are

_HOST = torch.device("cpu")
_log = logging.getLogger("lowlevel_zero")
_KEYWORDS = "dp_process_group, extra_dp_group"
_REMEDY = (
    "make both by init_device_mesh(device_type, (outer size, inner size), mesh_dim_names=('outer', 'inner')) "
    "and get_group('outer'), get_group('inner')"
)


def shard_group(group: Ranks | None, extra: Ranks | None, hybrid_shard: bool, stall_timeout: float = 0.0) -> ShardGroup:
    """Return the shard group of one process group, or of two that form a grid. Communicates if there are two.

    Args:
        group: a process group; or the inner one of two; or both, ``(outer, inner)``. None: the default one.
        extra: the outer one of two; None: there is none, or it is in ``group``.
        hybrid_shard: shard over the inner group of two, and replicate over the outer one; else shard over all ranks.
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
    outer, inner, ranks = _find_grid(group, extra, hybrid_shard, stall_timeout)
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

    Buffers travel in the groups of a row and of a column. Hosts agree over a group of all ranks.

    Args:
        outer: the column of this rank.
        inner: the row of this rank.
        ranks: the global ranks of the grid.
    """

    def __init__(self, outer: dist.ProcessGroup, inner: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        super().__init__(union_group(ranks))
        self._outer, self._inner = ShardGroup(outer), ShardGroup(inner)
        for level in (self._outer, self._inner):
            level.context.users.add(self)
        self._backends, self.device_types = backends_by_device(inner), self._inner.device_types
        self.slice_ranks = self._inner.slice_ranks
        self.rank, self.size = self._inner.rank, self._inner.size
        self.holders = [ranks[place :: self.size] for place in range(self.size)]

    def connect(self, shared: bool = True, sums_in_fp32: bool = False, own: bool = True) -> None:
        """Choose the backends within a row and across rows. Communicates: all ranks call it."""
        self._outer.connect(shared, sums_in_fp32, own)
        self._inner.connect(shared, sums_in_fp32, own)
        super().connect(shared=False, own=False)  # no buffers travel in the group of all ranks

    def _choose(self, device: torch.device, fp8: bool = False) -> Backend:
        """Return the backend for ``device``: the outer and the inner groups' together, by way of the host on gloo."""
        staged = self.on_gloo(device) and is_staged(device)
        carrying = _HOST if staged else device
        outer, inner = self._outer.backend(carrying, fp8), self._inner.backend(carrying, fp8)
        hybrid = Hybrid(outer, inner, self._chain(carrying))
        return Staged(hybrid) if staged else hybrid

    def describe_backend(self, device: torch.device) -> str | None:
        """Return as text how buffers of ``device`` travel within rows and across them."""
        across, within = self._outer.describe_backend(device), self._inner.describe_backend(device)
        return None if within is None else f"{within} within rows, {across} across them"

    def traffic(self) -> dict[str, int]:
        """Return the bytes of buffers that this rank has sent; ``_outer`` keys count bytes between inner groups."""
        sent = super().traffic()
        across = 2 * (self._outer.size - 1) * self._rows["reduce"] // self._outer.size
        return {**sent, "reduce": sent["reduce"] + across, "reduce_outer": across, "gather_outer": 0}

    def _spread(self, carried: Sequence[Tensor]) -> None:
        """Broadcast the first row's bytes across rows, and then the first rank's within rows. Communicates."""
        run_each(partial(level.spread, carried) for level in (self._outer, self._inner))

    def held(self) -> list[Tensor]:
        """Return the memory held for buffers within a row and across rows."""
        return [*self._outer.held(), *self._inner.held()]

    def trim(self, for_good: bool = False) -> None:
        """Free idle memory of buffers within a row and across rows."""
        self._outer.trim(for_good)
        self._inner.trim(for_good)


# ---- from the caller's groups to a grid ----


def _find_grid(
    group: Any, extra: Any, hybrid_shard: bool, stall_timeout: float
) -> tuple[dist.ProcessGroup, dist.ProcessGroup, list[int]]:
    """Return the outer and the inner group, and the grid's global ranks. Communicates through the store.

    The ranks tell each other through the store which groups they have: each reads what those of its row say, and
    whether those of its column, one in each row, have found the same. A collective would wait for ranks that have other
    groups; here a rank that can't go on says so to all that may ask it.

    Each try has a number, under which its ranks meet. A rank may have made grids with others before, or have waited in
    vain, so its next number is in the store: ranks that meet go on to the largest number of their row and column.
    """
    me = str(dist.get_rank())
    numbers = store_of(default_group(), "grid/next")
    number = _next_try(numbers, [int(me)])
    try:
        outer, inner = _pair(group, extra)
        _check_own(outer, inner)
        row, column = map(dist.get_process_group_ranks, (inner, outer))
        mates = {*row, *column}
        found = None
        while found is None:
            numbers.set(me, str(number))
            groups, grids = _stores_of_try(number)
            own = {"row": row, "column": column, "hybrid": bool(hybrid_shard)}
            groups.set(me, json.dumps(own))
            told = _told(groups, row, stall_timeout, partial(_is_over, numbers, mates, number))
            if told is not None:
                columns = [each["column"] for each in told]
                rows = list(map(list, zip_longest(*columns)))
                is_grid = all(each["row"] == row for each in told) and row in rows and None not in chain(*rows)
                _check_grid(is_grid, row, columns)
                _check_hybrid_alike(row, told)
                digest = hashlib.sha256(json.dumps(columns).encode()).hexdigest()
                grids.set(me, json.dumps({**own, "digest": digest}))
                # Those of its row may be past this try already: they have waited for other columns.
                found = _told(grids, column, stall_timeout, partial(_is_over, numbers, column, number))
            number = number if found else max(number + 1, _next_try(numbers, mates))
        _check_grid(all(each["digest"] == digest for each in found), row, columns)
        _check_hybrid_alike(column, found)
    except Exception as error:
        doing = "" if isinstance(error, RuntimeError) else f"rank {me} could not construct its LowLevelZeroOptimizer: "
        groups, grids = _stores_of_try(number)
        groups.set(me, json.dumps(None if isinstance(error, TimeoutError) else f"{doing}{error}"))
        grids.set(me, json.dumps(f"{doing}{error}"))
        raise
    finally:
        numbers.set(me, str(number + 1))
    return outer, inner, list(chain(*rows))


def _next_try(numbers: Any, ranks: Iterable[int]) -> int:
    """Return the largest number of a try that one of ``ranks`` is at, or comes to next."""
    there = [key for key in map(str, ranks) if numbers.check([key])]
    return max(map(int, numbers.multi_get(there)), default=0)


def _is_over(numbers: Any, ranks: Iterable[int], number: int) -> bool:
    """Return whether one of ``ranks`` is past the try of a ``number``."""
    return _next_try(numbers, ranks) > number


def _stores_of_try(number: int) -> tuple[Any, Any]:
    """Return the stores in which the ranks of one try tell each other their groups and their grids.

    An entry is a dict; or a rank's refusal, as text; or None, where the rank has waited in vain and left the try.
    """
    groups, grids = (store_of(default_group(), f"grid/{number}/{what}") for what in ("groups", "grids"))
    return groups, grids


def _told(store: Any, ranks: Sequence[int], stall_timeout: float, is_over: Callable[[], bool]) -> list[Any] | None:
    """Wait for the entries of ``ranks`` in the store, and return them; None: the try is over without one of them.

    Raises:
        RuntimeError: another rank can't go on; it says why.
        TimeoutError: one didn't come.
    """
    timeout = timeout_of(default_group())
    patience = min(stall_timeout, SHARE_OF_TIMEOUT * timeout) or inf
    began, waited = runtime().now(), 0.0
    while len(told := _entries(store, ranks)) < len(ranks) and not (waited and is_over()):
        lacking = [rank for rank in ranks if rank not in told]
        if waited >= timeout:
            raise in_vain(lacking, timeout)
        if waited >= patience:
            _log.warning("rank %d has waited %.3g s for %s", dist.get_rank(), patience, missing(lacking))
            patience = inf
        if any(store.check([str(rank)]) for rank in lacking):
            runtime().sleep(_NAP)  # one of them is making another grid first
        with suppress(RuntimeError):
            seconds = min(max(_LOOK, waited / 2), patience - waited, timeout - waited)
            store.wait(list(map(str, lacking)), timedelta(seconds=seconds))
        waited = runtime().now() - began
    if len(told) < len(ranks):
        told = _entries(store, ranks)  # all were there before any of the ranks went on to another try
    for refusal in (each for each in told.values() if isinstance(each, str)):
        raise RuntimeError(refusal)
    return None if None in told.values() or len(told) < len(ranks) else list(told.values())


def _entries(store: Any, ranks: Sequence[int]) -> dict[int, Any]:
    """Return the entries in the store by rank; leave out ranks that are making another grid, without this one."""
    me = dist.get_rank()
    there = [rank for rank in ranks if store.check([str(rank)])]
    entries = zip(there, map(json.loads, store.multi_get(list(map(str, there)))), strict=True)
    return {rank: of for rank, of in entries if not isinstance(of, dict) or me in of["row"] or me in of["column"]}


def _check_hybrid_alike(ranks: Sequence[int], told: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if only some of ``ranks`` have chosen ``hybrid_shard``."""
    chosen = [rank for rank, each in zip(ranks, told, strict=True) if each["hybrid"]]
    others = [rank for rank in ranks if rank not in chosen]
    if chosen and others:
        raise ValueError(
            f"hybrid_shard: expected the same on every rank, got True on ranks {chosen} and False on ranks {others}: "
            "pass the same Communication on all ranks"
        )


def _pair(group: Any, extra: Any) -> tuple[Any, Any]:
    """Return the outer and the inner group from the caller's arguments; raise for other arguments."""
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


def _check_own(outer: Any, inner: Any) -> None:
    """Raise ``ValueError`` for two groups that can't be a row and a column, as far as this rank knows."""
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
    """Raise ``ValueError`` unless inner and outer groups form a grid."""
    if not is_grid:
        raise ValueError(
            f"{_KEYWORDS}: expected inner groups of one size, and outer groups that each have the ranks of one place "
            f"in all of them, got the outer groups {columns} of the ranks of an inner group, {row}: {_REMEDY}"
        )
