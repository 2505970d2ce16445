"""Construction: what must hold beforehand, on this rank and between ranks, and the parts that a step is made of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import rooms
from .bookkeeping.bucket_store import BucketStore, Reduction, StepOnDevice
from .bookkeeping.gather_store import GatherStore
from .bookkeeping.gradient_store import GradientStore
from .bookkeeping.module_names import own_names
from .bookkeeping.parameter_store import ParameterStore
from .bookkeeping.sharded_parameter import ShardedParameter
from .bookkeeping.step_observer import StepObserver
from .bookkeeping.step_state import StepState
from .bookkeeping.storages import overlapping
from .communication.fp8 import check_fp8
from .communication.shard_group import ShardGroup
from .options import ZeroOptions
from .reducer import Reducer
from .streams import Streams

_log = logging.getLogger("lowlevel_zero")


# ---- checks on this rank, which change nothing ----


def check_optimizer(optimizer: object, model: object) -> None:
    """Raise unless ``optimizer`` is a torch optimizer with parameters to train and ``model`` a plain module."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "expected construction outside of torch.inference_mode, whose tensors can't be updated later, got it within"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module or None, got {type(model).__name__}")
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "model: expected the bare module, got DistributedDataParallel, which would reduce every gradient twice: "
            "pass model.module and drop the wrapper"
        )
    own = set() if model is None else set(model.parameters())
    if model is not None and not any(p in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "model: expected the module whose parameters the optimizer holds, got one that it holds none of: "
            "make the optimizer from model.parameters() of this very module"
        )
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained:
        raise ValueError(
            "optimizer: expected at least one parameter with requires_grad=True, got none: "
            "unfreeze what is to be trained before constructing the optimizer"
        )


def parameter_names(groups: Iterable[Iterable[Tensor]], model: nn.Module | None) -> dict[Tensor, str]:
    """A name for each parameter of param ``groups``: the model's own, else its place there."""
    of_model = own_names(model)
    return {
        p: of_model.get(p, f"param_groups[{at}]['params'][{place}]")
        for at, members in enumerate(groups)
        for place, p in enumerate(members)
    }


def check_new_parameters(
    optimizer: Optimizer,
    new: Sequence[Tensor],
    names: dict[Tensor, str],
    group: ShardGroup,
    options: ZeroOptions,
    *,
    model: nn.Module | None = None,
    known: Mapping[Tensor, str] | None = None,
) -> None:
    """Raise for the first parameter that can't be sharded, and for an ``optimizer`` that can't step slices.

    Args:
        optimizer: has them in its groups.
        new: the parameters.
        names: of all parameters of ``optimizer``.
        group: the ranks to shard over.
        options: the caller's choices.
        model: the module they belong to; None: there is none, or it has been checked.
        known: those that are sharded already, by name.
    """
    for p in new:
        _check_parameter(p, names[p], group)
    everything = {**(known or {}), **{p: names[p] for p in new}}
    _check_one_device(everything)
    if options.fp8_communication:
        check_fp8(dict.fromkeys(p.device for p in new))
    _check_own_memory(everything)
    check_has_values(model)
    _check_dense_gradients(model, names)
    if options.cpu_offload:
        _check_steps_on_host(optimizer)
    rooms.check_steps_slices(optimizer, new, names, options.assume_elementwise)


def check_group(param_group: Any, parameters: ParameterStore) -> None:
    """Raise unless it is a group as torch has them, of parameters that are new; make a list of its parameters."""
    if not isinstance(param_group, dict) or "params" not in param_group:
        got = list(param_group) if isinstance(param_group, dict) else type(param_group).__name__
        raise TypeError(
            f"param_group: expected a dict with 'params', got {got}: pass {{'params': [p, ...], 'lr': ...}}"
        )
    params = param_group["params"]
    param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
    for p in param_group["params"]:
        record = parameters.find(p)
        if record is not None:
            raise ValueError(f"{record.name}: expected a parameter this optimizer doesn't have yet, got one it has")


def _check_own_memory(named: Mapping[Tensor, str]) -> None:
    """Raise for two parameters that share memory."""
    pair = overlapping(list(named))
    if pair is not None:
        one, other = (list(named.values())[place] for place in pair)
        raise ValueError(
            f"{other}: expected memory of its own, got some that {one} holds too: "
            "tie weights by using one Parameter object in both places"
        )


def _check_one_device(named: Mapping[Tensor, str]) -> None:
    """Raise for the first parameter that isn't on the first one's device: hooks run on one thread a device."""
    first, device = next(((name, p.device) for p, name in named.items()), ("", None))
    for p, name in named.items():
        if p.device != device:
            raise ValueError(
                f"{name}: expected it on {device}, where {first} is, got it on {p.device}: an optimizer trains the "
                "parameters of one device: move the model to one (model.to(device)), or freeze what is elsewhere"
            )


def _check_parameter(p: Tensor, name: str, group: ShardGroup) -> None:
    if not p.is_leaf:
        raise ValueError(f"{name}: expected a leaf tensor, got the result of an operation: pass a torch.nn.Parameter")
    if p.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense parameter, got layout {p.layout}")
    if is_traceable_wrapper_subclass(p):
        raise TypeError(
            f"{name}: expected a plain tensor, got a {type(p).__name__}, which shards or wraps one by itself: leave "
            "fully_shard, tensor parallelism or quantisation out, or train this parameter by another optimizer"
        )
    if p.is_inference():
        raise ValueError(
            f"{name}: expected a parameter that can be trained, got one made under torch.inference_mode: make the "
            "model outside of it"
        )
    if p.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(
            f"{name}: expected float16, bfloat16, float32 or float64, got {p.dtype}: "
            "freeze it (requires_grad=False) or convert the model"
        )
    if p.device.type not in group.device_types:
        raise ValueError(
            f"{name}: expected a parameter on {' or '.join(group.device_types)}, which the process group serves, "
            f"got one on {p.device}: move the model first, or initialise the group with a backend for "
            f"{p.device.type}"
        )


def check_has_values(model: nn.Module | None) -> None:
    """Raise for a parameter or buffer of ``model`` that has no values, trained or not: ranks start from rank 0's."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()) if model is not None else ():
        if tensor.is_meta:
            raise ValueError(f"{name}: expected values, got a tensor on meta: materialise the model first (to_empty)")


def _check_dense_gradients(model: nn.Module | None, names: dict[Tensor, str]) -> None:
    """Raise for an embedding of ``model`` whose gradient would be sparse."""
    for module in model.modules() if model is not None else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight in names:
            raise ValueError(
                f"{names[module.weight]}: expected a dense gradient, got {type(module).__name__}(sparse=True): "
                "build it with sparse=False (a slice of a sparse gradient can't be reduced)"
            )


def _check_steps_on_host(optimizer: Optimizer) -> None:
    """Raise for settings of ``optimizer`` that the host has no kernels for."""
    for at, group in enumerate(optimizer.param_groups):
        if group.get("capturable"):
            raise ValueError(
                f"cpu_offload=True: expected an optimizer that can step on the host, got capturable=True in param "
                f"group {at}, whose kernels are the device's: leave capturable out"
            )
        tensors = [key for key, value in group.items() if isinstance(value, Tensor) and value.device.type != "cpu"]
        if tensors:
            raise ValueError(
                f"cpu_offload=True: expected settings on the host, got {tensors[0]} of param group {at} as a tensor on "
                f"{group[tensors[0]].device}: pass a number or a tensor on the host"
            )


# ---- what has to be alike on all ranks ----


def describe(
    optimizer: Optimizer,
    names: dict[Tensor, str],
    model: nn.Module | None,
    number_of: Callable[[Tensor], int] = lambda _: 0,
    number: int = 0,
) -> Iterator[str]:
    """What has to be alike in the shard group of this ``number``, a line each: parameters, their states, and buffers.

    The optimizer's class and the settings of its groups have to be on all ranks: they are the first group's. So has
    the type of the device that is trained on.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if number == 0:
        yield f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__}"
        yield f"trained on {', '.join(sorted({p.device.type for p in trained}))}"
        yield "model=None" if model is None else "model given"
    for at, group in enumerate(optimizer.param_groups):
        if number == 0:
            yield from (f"{key} of group {at}: {_setting(group[key])}" for key in sorted(group) if key != "params")
        for p in (p for p in group["params"] if number_of(p) == number):
            state = ", ".join(f"{key} {_described(value)}" for key, value in optimizer.state.get(p, {}).items())
            kind = "trainable" if p.requires_grad else "frozen"
            yield f"parameter {names[p]} of group {at}: {kind}, {_described(p)}" + (f", state {state}" if state else "")
    for tensor, name in own_names(model).items():
        if number_of(tensor) == number:
            yield f"tensor {name} of the model: {_described(tensor)}"


def _setting(value: object) -> str:
    """A setting of a param group, as far as it can be compared."""
    if isinstance(value, Tensor):
        number = f" {value.item()}" if value.numel() == 1 and value.device.type != "meta" else ""
        return f"a tensor{number}, {tuple(value.shape)} {value.dtype}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_setting, value))})"
    return repr(value) if isinstance(value, (bool, int, float, str, NoneType)) else type(value).__name__


def _described(value: object) -> str:
    """A state, or a tensor by what has to be alike; which of a rank's devices it is on may differ."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"on {value.device.type}, {tuple(value.shape)} {value.dtype}"


# ---- what a step is made of: parameters by the ranks that share them ----

# Collectives of several groups come in their order on every rank, and none waits for another's in the midst of a
# backward: each rank belongs to one group of every number, so whatever the groups, nobody waits in a circle.


class ShardedGroup(NamedTuple):
    """The parameters that one shard group shares, with what takes their gradients to new values.

    Attributes:
        number: its place among the shard groups; 0 is that of all data-parallel ranks.
        group: the ranks.
        records: the parameters.
        gradients: what reductions leave.
        reducer: turns backwards into that.
        gathers: brings stepped slices back.
    """

    number: int
    group: ShardGroup
    records: Sequence[ShardedParameter]
    gradients: GradientStore
    reducer: Reducer
    gathers: GatherStore


class GroupMaker(NamedTuple):
    """What all groups of an optimizer have in common.

    Attributes:
        parameters: the records.
        options: the caller's choices.
        streams: what all of it happens on.
        stepping: where shards and masters are.
        state: of the optimizer's step.
        observer: is told of each bucket buffer.
    """

    parameters: ParameterStore
    options: ZeroOptions
    streams: Streams
    stepping: StepOnDevice
    state: StepState
    observer: StepObserver

    def extend(self, groups: list[ShardedGroup]) -> None:
        """Take records that are new into the plans and hooks of ``groups``, and add groups that had none before."""
        known = {each.number for each in groups}
        for each in groups:
            each.reducer.extend()
        new = [
            number for number, records in enumerate(self.parameters.by_shard_group) if records and number not in known
        ]
        groups += map(self._new_group, new)
        groups.sort(key=lambda each: each.number)

    def _new_group(self, number: int) -> ShardedGroup:
        parameters, options = self.parameters, self.options
        group, records = parameters.shard_groups[number], parameters.by_shard_group[number]
        gradients = GradientStore(records, self.stepping.bucket_type(), self.state, self.streams)
        how = Reduction(group, options.keeps_row_only, options.gradient_predivide_factor, self.streams, self.observer)
        buckets = BucketStore(records, how, self.stepping.bucket_type())
        reducer = Reducer(parameters, options, gradients, buckets, number, self.state)
        wide = options.pad_buckets_for_high_nccl_busbw
        gathers = GatherStore(group, self.streams, self.stepping, options.overlap_allgather, wide)
        return ShardedGroup(number, group, records, gradients, reducer, gathers)


def release(groups: Sequence[ShardedGroup], ranks: Sequence[ShardGroup]) -> None:
    """The optimizer is gone: let others have the memory of bucket buffers, when nothing is under way any more.

    Args:
        groups: of the optimizer.
        ranks: all of its shard groups, those included that have no parameters to train.
    """
    reducers = {each.number: each.reducer for each in groups}
    for number, group in enumerate(ranks):
        group.leave(reducers[number].under_way() if number in reducers else ())


def log_start(groups: Sequence[ShardedGroup], parameters: ParameterStore, options: ZeroOptions) -> None:
    """One line, on the first of all ranks, and one more where fp8 is rounded by the host."""
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
