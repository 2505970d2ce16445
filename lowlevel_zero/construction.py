"""Construction: what must hold beforehand, on this rank and between ranks; then slices are taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .bookkeeping.checks import check_group, check_optimizer, check_parameters
from .bookkeeping.module_names import own_names, parameter_names
from .bookkeeping.parameter_store import ParameterStore
from .bookkeeping.sharding import Sharding, convert
from .communication.agreement import CONSTRUCT, Alike, agree, agree_apart, together
from .communication.shard_group import ShardGroup
from .diagnostics.debug_checks import checked
from .diagnostics.settings import described
from .optim.elementwise import check_steps_slices
from .optim.quantised import slice_multiple
from .options import ZeroOptions
from .sharded_group import ShardedGroup

_log = logging.getLogger("lowlevel_zero")

ADD_GROUP = "add a param group"

_BACKWARDS = Alike(
    "the same backwards before another optimizer is constructed",
    "run them alike on all ranks, or construct it after the step of those that are there",
)


# ---- an optimizer and its parameters are taken in: checked on each rank, before anything changes ----


def check(optimizer: Optimizer, model: nn.Module | None, group: ShardGroup, options: ZeroOptions) -> dict[Tensor, str]:
    """Return the names of the parameters in all groups; raise for one that can't be sharded over ``group``'s ranks."""
    check_optimizer(optimizer, model)
    names = parameter_names((group["params"] for group in optimizer.param_groups), model)
    trained = [p for p in names if p.requires_grad]
    check_parameters(optimizer, trained, names, group, options, model=model)
    check_steps_slices(optimizer, trained, names, options.assume_elementwise)
    return names


def add_group(
    param_group: dict[str, Any],
    optimizer: Optimizer,
    parameters: ParameterStore,
    options: ZeroOptions,
    model: nn.Module | None,
    scaled: bool,
) -> dict[Tensor, str]:
    """Add a group to the wrapped ``optimizer``, check it on all ranks, and return the names of all parameters.

    ``scaled``: losses are scaled, which fp16 parameters require.
    """
    group = parameters.shard_groups[0]
    with together(group, ADD_GROUP) as agreed:
        check_group(param_group, parameters)
        optimizer.add_param_group(param_group)
        names = parameter_names((each["params"] for each in optimizer.param_groups), model)
        new = [p for p in optimizer.param_groups[-1]["params"] if p.requires_grad]
        known: dict[Tensor, str] = {record.p: record.name for record in parameters}
        check_parameters(optimizer, new, names, group, options, known=known)
        check_steps_slices(optimizer, new, names, options.assume_elementwise)
        if not scaled and any((options.forced_dtype or p.dtype) == torch.float16 for p in new):
            raise ValueError(
                "param_group: expected no fp16 parameters, since there were none at construction and losses aren't "
                "scaled: construct the optimizer with them"
            )
        numbers = range(len(parameters.shard_groups))
        lines = [list(describe(optimizer, names, None, parameters.shard_group_of, at)) for at in numbers]
        agreed += lines[0]
    if len(numbers) > 1:
        agree_apart(parameters.shard_groups, lines[1:], ADD_GROUP)
    return names


def agree_on_reductions(group: ShardGroup, device: torch.device) -> None:
    """Raise on all ranks where one alone has begun reductions on a device, which those of construction would meet."""
    if group.has_others and not group.on_gloo(device):
        agree(group, [f"{group.context.reductions} reductions begun"], None, CONSTRUCT, _BACKWARDS)


def connected(groups: Sequence[ShardGroup], options: ZeroOptions) -> list[ShardGroup]:
    """Return the shard groups, ready for collectives; with ``debug`` they compare the ranks before each one."""
    groups = [checked(each, options) for each in groups]
    for group in groups:
        group.connect(sums_in_fp32=options.reduce_scatter_with_fp32_accumulation, own=options.own_communicator)
    return groups


def shard(
    optimizer: Optimizer,
    parameters: ParameterStore,
    options: ZeroOptions,
    names: dict[Tensor, str],
    doing: str,
    model: nn.Module | None = None,
) -> Sharding:
    """Move new parameters to padded storages and broadcast rank 0's values; then slices may be taken."""
    with together(parameters.shard_groups[0], doing):
        convert(optimizer.param_groups[len(parameters.groups) :], options.forced_dtype)
        sharding = Sharding(optimizer, parameters, options, names, partial(slice_multiple, optimizer))
        sharding.include_untrained(model)
    with together(parameters.shard_groups[0], doing):
        sharding.broadcast_initial_values()
    return sharding


# ---- what has to be alike on all ranks ----


def describe(
    optimizer: Optimizer,
    names: dict[Tensor, str],
    model: nn.Module | None,
    number_of: Callable[[Tensor], int] = lambda _: 0,
    number: int = 0,
) -> Iterator[str]:
    """Yield a line for all that the ranks of the shard group ``number`` must have in common.

    These are parameters, their states, and buffers. What all ranks must have in common, the optimizer's class, the
    settings of its groups and the type of the device, is among the lines of shard group 0.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if number == 0:
        yield f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__}"
        yield f"trained on {', '.join(sorted({p.device.type for p in trained}))}"
        yield "model=None" if model is None else "model given"
        yield from described(optimizer.param_groups)
    for at, group in enumerate(optimizer.param_groups):
        for p in (p for p in group["params"] if number_of(p) == number):
            state = ", ".join(f"{key} {_described(value)}" for key, value in optimizer.state.get(p, {}).items())
            kind = "trainable" if p.requires_grad else "frozen"
            yield f"parameter {names[p]} of group {at}: {kind}, {_described(p)}" + (f", state {state}" if state else "")
    for tensor, name in own_names(model).items():
        if number_of(tensor) == number:
            yield f"tensor {name} of the model: {_described(tensor)}"


def _described(value: object) -> str:
    """Describe a state or a tensor as far as ranks must agree on it; the index of its device may differ."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"on {value.device.type}, {tuple(value.shape)} {value.dtype}"


def log_start(groups: Sequence[ShardedGroup], parameters: ParameterStore, options: ZeroOptions) -> None:
    """Log one line on the first rank, and a warning where fp8 is rounded by the host."""
    ranks = parameters.shard_groups[0]
    if ranks.group_rank == 0:
        way = ranks.describe_backend(parameters.records[0].padded.device)
        if options.fp8_communication and way is not None:
            _log.warning(
                "fp8_communication: rounding on the host takes longer than it saves, but over a link between hosts of "
                "less than about 4 Gbit/s"
            )
        _log.info(
            "ZeRO stage %d: %s elements in %d parameters over %d ranks, %d buckets%s",
            2 if options.partition_grad else 1,
            f"{sum(record.split.numel for record in parameters):,}",
            len(parameters.records),
            ranks.ranks,
            sum(len(each.reducer.plan.whole.buckets) for each in groups),
            "" if way is None else f", by {way}",
        )
