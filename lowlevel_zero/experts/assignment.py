"""The assignment of parameters to shard groups, read from ``pg_to_param_list``, checked and agreed on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..bookkeeping.module_names import own_names
from ..bookkeeping.parameter_store import ParameterStore
from ..communication.agreement import CONSTRUCT, agree_apart
from ..communication.shard_group import ShardGroup
from ..options import ZeroOptions

_KEYWORD = "pg_to_param_list"


class Assignment(NamedTuple):
    """The shard group of each parameter that isn't shared by all data-parallel ranks.

    Attributes:
        groups: the process groups of the shard groups 1, 2, …, in the order in which the optimizer has their
            parameters, which is the same on all ranks. All data-parallel ranks are shard group 0.
        number_of: the number of the shard group by parameter. Buffers and frozen parameters of a module that is one
            group's alone have its number, too.
        listed: the parameters that the caller has listed, under whichever group.
    """

    groups: Sequence[dist.ProcessGroup]
    number_of: dict[Tensor, int]
    listed: Collection[Tensor] = ()


def dtypes_in_common(trained: Iterable[Tensor], options: ZeroOptions) -> str:
    """Return a line that says whether ``trained`` parameters include fp16 and fp64, for all ranks to compare.

    Losses are scaled if there are fp16 parameters, and norms are in fp64 if one is.
    """
    dtypes = {options.forced_dtype or p.dtype for p in trained}
    return f"dtypes { ({dtype: dtype in dtypes for dtype in (torch.float16, torch.float64)}) }"


def data_parallel_group(given: Any, pg_to_param_list: Any, optimizer: object) -> dist.ProcessGroup | None:
    """Return ``given``, or the largest group of a mapping with all the optimizer's parameters, or None. Raises nothing.

    It is the group of all data-parallel ranks; None: the default one. The largest has the ranks of all others:
    ColossalAI's callers pass it so. Frozen parameters count, since one rank alone may have frozen its own.
    """
    if given is not None or not isinstance(pg_to_param_list, Mapping) or not isinstance(optimizer, Optimizer):
        return given  # type: ignore[no-any-return]  # whatever it is, the checks find it
    with suppress(Exception):  # whatever is wrong with the arguments, the checks find it, where the ranks agree on it
        listed = {p for members in pg_to_param_list.values() for p in members}
        if all(p in listed for group in optimizer.param_groups for p in group["params"]):
            ranks = {pg: set(_ranks(pg)) for pg in pg_to_param_list if isinstance(pg, dist.ProcessGroup)}
            largest = [pg for pg in ranks if all(ranks[pg] >= others for others in ranks.values())]
            return min(largest, key=lambda pg: pg.group_name, default=None)  # the same one on all ranks
    return None


def assign(pg_to_param_list: Any, dp: ShardGroup, names: dict[Tensor, str], model: nn.Module | None) -> Assignment:
    """Read and check ``pg_to_param_list``, and return each parameter's shard group. Doesn't communicate.

    ``dp`` are the data-parallel ranks, who share what isn't listed, or is listed under another group of all of them.
    Parameters of the optimizer, whose ``names`` these are, may be listed, and others of ``model``.

    Raises:
        TypeError, ValueError: it isn't such a mapping, or has other parameters or ranks than these.
    """
    if pg_to_param_list is None:
        return Assignment((), {})
    parameters = set() if model is None else set(model.parameters())
    known = {tensor: name for tensor, name in own_names(model).items() if tensor in parameters}
    known.update(names)
    group_of = _groups_by_parameter(pg_to_param_list, dp, known)
    in_order = [group_of[p] for p in (*names, *known) if p in group_of]
    groups = [pg for pg in dict.fromkeys(in_order) if set(_ranks(pg)) != set(_ranks(dp.group))]
    if groups and dp.ranks > dp.size:
        raise ValueError(
            f"hybrid_shard=True: expected no {_KEYWORD}, got process groups of fewer ranks in it: pass "
            f"hybrid_shard=False, or leave {_KEYWORD} out"
        )
    number = {pg: at for at, pg in enumerate(groups, 1)}
    number_of = {p: 0 for p in names if p.requires_grad} | {p: number.get(pg, 0) for p, pg in group_of.items()}
    add_companions(number_of, model)
    return Assignment(groups, {tensor: at for tensor, at in number_of.items() if at}, set(group_of))


def _groups_by_parameter(
    pg_to_param_list: Any, dp: ShardGroup, known: dict[Tensor, str]
) -> dict[Tensor, dist.ProcessGroup]:
    """Return the process group of each listed parameter; raise if one is unknown or listed twice."""
    if not isinstance(pg_to_param_list, Mapping):
        raise TypeError(
            f"{_KEYWORD}: expected a dict of lists by process group, got {type(pg_to_param_list).__name__}: pass such "
            "a dict, or None if there are no experts; pass the module as model only"
        )
    found: dict[Tensor, dist.ProcessGroup] = {}
    for pg, members in pg_to_param_list.items():
        _check_entry(pg, members, dp)
        for p in members:
            if not isinstance(p, Tensor):
                raise TypeError(
                    f"{_KEYWORD}: expected a list of parameters for each process group, got one that has a "
                    f"{type(p).__name__}, {p!r:.40}: list nn.Parameters, not their names or modules"
                )
            if p not in known:
                raise ValueError(
                    f"{_KEYWORD}: expected parameters of the optimizer, got a {tuple(p.shape)} tensor that it doesn't "
                    "hold: list the same Parameter objects that the optimizer was made from"
                )
            if p in found:
                raise ValueError(
                    f"{known[p]}: expected it in one list of {_KEYWORD}, once, found it again: list it once"
                )
            found[p] = pg
    return found


def _check_entry(pg: Any, members: Any, dp: ShardGroup) -> None:
    """Raise unless an entry is a list of parameters under a group of some of the data-parallel ranks."""
    if not isinstance(members, (list, tuple)):
        raise TypeError(
            f"{_KEYWORD}: expected a list of parameters for each process group, got {type(members).__name__}: pass "
            "{group: [parameters]}"
        )
    if pg == dist.GroupMember.NON_GROUP_MEMBER:
        if members:
            raise ValueError(
                f"{_KEYWORD}: expected process groups that this rank belongs to, got parameters under another one: "
                "list only this rank's parameters, under groups that it belongs to"
            )
        return
    if not isinstance(pg, dist.ProcessGroup):
        raise TypeError(
            f"{_KEYWORD}: expected process groups as keys, got {type(pg).__name__} {pg!r:.40}: pass what "
            "torch.distributed.new_group(ranks) returns"
        )
    outside = sorted(set(_ranks(pg)) - set(_ranks(dp.group)))
    if outside:
        raise ValueError(
            f"{_KEYWORD}: expected groups within the data-parallel one, of ranks {_ranks(dp.group)}, got one with "
            f"ranks {outside} too: pass the group of all of them as dp_process_group"
        )


def add_companions(number_of: dict[Tensor, int], model: nn.Module | None) -> None:
    """Add to ``number_of`` the buffers and frozen parameters of modules that belong to one shard group.

    A module with all of the model's parameters is the model itself, or wraps it: what has no number in it is shared by
    all data-parallel ranks.
    """
    whole = 0 if model is None else len(list(model.parameters()))
    for module in model.modules() if model is not None else ():
        parameters = list(module.parameters())
        numbers = {number_of.get(p) for p in parameters}
        if len(parameters) < whole:
            numbers.discard(None)  # frozen ones, or another optimizer's
        if len(numbers) == 1:
            (number,) = numbers
            for tensor in (*parameters, *module.buffers()):
                if number:
                    number_of.setdefault(tensor, number)


def check_listed(new: Iterable[Tensor], names: Mapping[Tensor, str], parameters: ParameterStore) -> None:
    """Raise ``ValueError`` if one of the ``new`` parameters belongs to the experts, but isn't listed under a group.

    While it was frozen it was assigned to the experts of its module. A frozen layer that all ranks share is, too.
    """
    for p in new:
        if parameters.shard_group_of(p) and p not in parameters.listed:
            raise ValueError(
                f"{names[p]}: expected it in a list of {_KEYWORD}, since all other trained parameters of its module "
                "are experts', got it in none: construct the optimizer with it listed under the experts' group, or, "
                "if all data-parallel ranks share it, under their group"
            )


# ---- groups ----


def make_groups(
    dp: ShardGroup, groups: Sequence[dist.ProcessGroup], lines: Sequence[Iterable[str]]
) -> list[ShardGroup]:
    """Return all shard groups, ``dp`` first. Communicates: every rank of ``dp`` calls it.

    ``lines`` must be alike on all ranks of a group; there are some for each of the further ``groups``.

    Raises (on all ranks):
        ValueError: the groups of one number don't part the data-parallel ranks, or lines differ in one.
        RuntimeError: lines differ in another rank's group.
    """
    if not groups:
        return [dp]
    _check_parts(dp, groups)
    made = [dp, *map(ShardGroup, groups)]
    agree_apart(made, lines, CONSTRUCT)
    return made


def _check_parts(dp: ShardGroup, groups: Sequence[dist.ProcessGroup]) -> None:
    """Raise ``ValueError`` on all ranks unless all members of each group list parameters under it. Communicates."""
    own = [(_ranks(pg), pg.group_name) for pg in groups]
    gathered = dict(zip(_ranks(dp.group), dp.all_gather_object(own), strict=True))
    for at in range(len(groups)):
        for rank, theirs in gathered.items():
            members, _ = theirs[at]
            differing = [member for member in members if gathered[member][at] != theirs[at]]
            if differing:
                of_other, _ = gathered[differing[0]][at]
                other = "another one of the same ranks" if of_other == members else f"one of ranks {of_other}"
                raise ValueError(
                    f"{_KEYWORD}: expected all members of a group to list their parameters under it, but rank {rank} "
                    f"has the group of ranks {members} where rank {differing[0]} has {other}: make the "
                    "groups alike on all ranks, and list parameters in the same order under them"
                )


def _ranks(pg: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(pg)
