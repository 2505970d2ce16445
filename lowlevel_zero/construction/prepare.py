"""Construction: each rank checks, the ranks agree, and then parameters become slices."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..bookkeeping.module_names import own_names, parameter_names
from ..bookkeeping.parameter_store import ParameterStore
from ..communication.agreement import CONSTRUCT, Alike, agree, agree_apart, together
from ..communication.grid import shard_group
from ..communication.shard_group import ShardGroup
from ..diagnostics.settings import described
from ..diagnostics.stall_report import seconds_of, watch
from ..experts.assignment import Assignment, assign, check_listed, dtypes_in_common, make_groups
from ..optim.splits import check_and_choose, may_write_unused
from ..options import ZeroOptions
from ..partition import Choice
from .checks import check_group, check_new, check_optimizer, check_parameters
from .sharding import Sharding, convert
from .start_line import warn_of_hooks

ADD_GROUP = "add a param group"

_BACKWARDS = Alike(
    "the same backwards before another optimizer is constructed",
    "run them alike on all ranks, or construct it after the step of those that are there",
)


# ---- checks on each rank, before anything changes ----


@contextmanager
def garbage_collector_paused() -> Iterator[None]:
    """Keep Python's cyclic garbage collector from running in the body, which would look at all new records again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def join(ranks: Any, extra: Any, communication: object, diagnostics: object) -> ShardGroup:
    """Return the data-parallel ranks as a shard group that is watched for stalls. Communicates if there are two levels.

    The ranks can only agree over it, so the options that it needs haven't been checked yet: bad ones count as defaults.
    """
    patience = seconds_of(diagnostics)
    watched = partial(watch, timeout=patience)
    group = shard_group(ranks, extra, getattr(communication, "hybrid_shard", False), watched)
    watched(group)
    return group


class Checked(NamedTuple):
    """The new parameters of an optimizer, which one rank has checked, with their splits and shard groups."""

    new: Sequence[Tensor]  # those that are to be sharded
    names: dict[Tensor, str]  # of the parameters in all groups
    choices: dict[Tensor, Choice]
    assignment: Assignment
    lines: list[list[str]]  # for each shard group, those that its ranks must have in common
    writes_unused: bool  # the optimizer may write parameters that have no gradient


def check(
    optimizer: Optimizer, model: nn.Module | None, assigned: Any, group: ShardGroup, options: ZeroOptions
) -> Checked:
    """Check an optimizer on this rank, and return its parameters' splits and shard groups. Doesn't communicate.

    ``assigned``: the caller's lists of parameters by process group.
    """
    check_optimizer(optimizer, model)
    if group.group_rank == 0:
        warn_of_hooks(optimizer)
    names = parameter_names((group["params"] for group in optimizer.param_groups), model)
    trained = [p for p in names if p.requires_grad]
    check_parameters(optimizer, trained, names, group, options, model=model)
    assignment = assign(assigned, group, names, model)
    checked = _chosen(optimizer, trained, names, options, assignment, model)
    # First, since a parameter's line may lack where it is another group's.
    checked.lines[0].insert(0, f"{len(assignment.groups)} groups in pg_to_param_list beside the data-parallel one")
    checked.lines[0] += [*options.alike(), dtypes_in_common(trained, options)]
    return checked


def add_group(
    param_group: dict[str, Any],
    optimizer: Optimizer,
    parameters: ParameterStore,
    options: ZeroOptions,
    model: nn.Module | None,
    scaled: bool,
) -> Checked:
    """Add a group to the wrapped ``optimizer``, check it on all ranks, and return what ``check`` does. Communicates.

    ``scaled``: losses are scaled, which fp16 parameters require.
    """
    groups, known_groups = parameters.shard_groups, len(optimizer.param_groups)
    with together(groups[0], ADD_GROUP) as agreed:
        check_group(param_group)
        optimizer.add_param_group(param_group)
        members = optimizer.param_groups[-1]["params"]
        check_new(members, parameters)
        names = parameter_names((each["params"] for each in optimizer.param_groups), model)
        new = [p for p in members if p.requires_grad]
        check_listed(new, names, parameters)
        known: dict[Tensor, str] = {record.p: record.name for record in parameters}
        check_parameters(optimizer, new, names, groups[0], options, known=known)
        if not scaled and any((options.forced_dtype or p.dtype) == torch.float16 for p in new):
            raise ValueError(
                "param_group: expected no fp16 parameters, since there were none at construction and losses aren't "
                "scaled: construct the optimizer with them"
            )
        assignment = Assignment([each.group for each in groups[1:]], {p: parameters.shard_group_of(p) for p in names})
        checked = _chosen(optimizer, new, names, options, assignment, None, known_groups)
        agreed += [*checked.lines[0], dtypes_in_common([*known, *new], options)]
    if len(groups) > 1:
        agree_apart(groups, checked.lines[1:], ADD_GROUP)
    return checked


def _chosen(
    optimizer: Optimizer,
    new: Sequence[Tensor],
    names: dict[Tensor, str],
    options: ZeroOptions,
    assignment: Assignment,
    model: nn.Module | None,
    known_groups: int = 0,
) -> Checked:
    """Choose the splits of ``new`` parameters, and return them with the lines that ranks must have in common.

    The first shard group's lines also tell what is common to all ranks. The first ``known_groups`` of the optimizer
    hold slices, which aren't described.
    """
    choices = check_and_choose(optimizer, new, names, options)
    writes_unused, number_of = may_write_unused(optimizer), assignment.number_of
    trained = [*new, *(part for group in optimizer.param_groups[:known_groups] for part in group["params"])]
    lines: list[list[str]] = [[] for _ in range(1 + len(assignment.groups))]
    lines[0] += [
        f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__}",
        f"trained on {', '.join(sorted({p.device.type for p in trained}))}",
        "model=None" if model is None else "model given",
        f"the optimizer may write parameters that have no gradient: {writes_unused}",
        *described(optimizer.param_groups, {names[p] for p, number in number_of.items() if number and p in names}),
    ]
    for at, group in enumerate(optimizer.param_groups[known_groups:], start=known_groups):
        for p in group["params"]:
            choice = choices.get(p)
            split = f"split by {choice.by}, costs {choice.costs}" if choice else "frozen"
            told = f"parameter {names[p]} of group {at}: {split}, {_described(p)}{_states(optimizer, p)}"
            lines[number_of.get(p, 0)].append(told)
    for tensor, name in own_names(model).items():
        if tensor not in names:
            lines[number_of.get(tensor, 0)].append(f"tensor {name} of the model: {_described(tensor)}")
    return Checked(new, names, choices, assignment, lines, writes_unused)


def _states(optimizer: Optimizer, p: Tensor) -> str:
    """Return the states of a parameter as text."""
    leaves = [
        (f"{key}{keystr(path)}", leaf)
        for key, value in (optimizer.state.get(p) or {}).items()
        for path, leaf in tree_flatten_with_path(value)[0]
    ]
    return "".join(f", state {key} {_described(leaf)}" for key, leaf in leaves)


def _described(value: object) -> str:
    """Return a tensor's device type, shape and dtype as text, or another state's type, with its value if it's plain."""
    if not isinstance(value, Tensor):
        return f"{type(value).__name__}{f' {value}' if isinstance(value, (bool, int, float, str)) else ''}"
    return f"on {value.device.type}, {tuple(value.shape)} {value.dtype}"


def agreed_verbosity(group: ShardGroup, options: ZeroOptions) -> ZeroOptions:
    """Return the options, with ``verbose`` set if any rank has set it. Communicates.

    One rank alone is verbose, as a rule. All of them look at overflows then, since they tell each other what they find.
    """
    verbose = bool(group.all_reduce_max([options.diagnostics.verbose])[0])
    return replace(options, diagnostics=replace(options.diagnostics, verbose=verbose))


def connected(ranks: ShardGroup, checked: Checked, options: ZeroOptions) -> list[ShardGroup]:
    """Return all shard groups, ``ranks`` first, ready for collectives and watched for stalls. Communicates.

    Raises on all ranks if only some have begun reductions on a device.
    """
    if ranks.has_others and not ranks.on_gloo(checked.new[0].device):
        agree(ranks, [f"{ranks.context.begun} reductions and gradient syncs begun"], None, CONSTRUCT, _BACKWARDS)
    groups, chosen = make_groups(ranks, checked.assignment.groups, checked.lines[1:]), options.communication
    for group in groups[1:]:  # the first is watched since ``join``
        watch(group, options.diagnostics.stall_timeout)
    for group in groups:
        group.connect(sums_in_fp32=chosen.reduce_scatter_with_fp32_accumulation, own=chosen.own_communicator)
    return groups


def shard(
    optimizer: Optimizer,
    parameters: ParameterStore,
    options: ZeroOptions,
    checked: Checked,
    doing: str,
    model: nn.Module | None = None,
) -> Sharding:
    """Convert new parameters, move them to padded storages, and broadcast rank 0's values. Communicates."""
    with together(parameters.shard_groups[0], doing):
        convert(optimizer.param_groups[len(parameters.groups) :], options.forced_dtype)
        sharding = Sharding(optimizer, parameters, options, checked.names, checked.choices, model)
    with together(parameters.shard_groups[0], doing):
        sharding.broadcast_initial_values()
    return sharding
