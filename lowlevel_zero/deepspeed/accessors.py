"""Accessors: a parameter's gradient, fp32 master and optimizer state, read and written by the parameter alone.

Names and arguments are those of ``deepspeed.utils`` (DeepSpeed 0.19); ``full_grads`` and its like read a whole model in
a few large messages. A value has the parameter's shape, on its device; a 16-bit one is returned as fp32. Returned
values are copies.

Every rank calls a function, for the same parameter. Gradients are averaged over the ranks, summed over micro-batches
and unscaled. They are there from backward to ``zero_grad``; ``step`` leaves them clipped.

If a function raises on one rank, it raises on all, and nothing has been changed then.

Raises:
    TypeError: a parameter that is no tensor, or a value of the wrong type.
    ValueError: no optimizer that is alive trains the parameter (of a frozen one the ``safe_get`` functions return None,
        as DeepSpeed's do); a value of the wrong shape; a state that isn't there; or numbers that differ between ranks.
    RuntimeError: another rank's error; ranks that make different calls, and each one's call; or a backward is going on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..bookkeeping.sharded_parameter import ShardedParameter, take_back
from ..communication.agreement import Alike, Call, agree_apart, together
from ..lives import records_of
from ..optim.quantised import is_quantised
from ..sharded_group import ShardedGroup
from ..sharded_optimizer import ShardedOptimizer
from ..state.values import is_slice, whole_gradients, whole_masters, whole_states

__all__ = [
    "full_fp32_params",
    "full_grads",
    "full_optimizer_states",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
]

_CALLS = Alike("the same call", "call it for the same parameters on every rank, in the same order")

Records: TypeAlias = Sequence[ShardedParameter]
Keys: TypeAlias = tuple[str, ...]  # of one parameter's states, sorted
# Yields the whole gradients, masters or states of some parameters that one group shares; all ranks iterate to the end.
Gather: TypeAlias = Callable[[ShardedOptimizer, ShardedGroup, Records], Iterable[Tensor | None]]


# ---- one parameter ----


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Gather the fp32 master of a parameter, and return it whole; None if the parameter is frozen. Communicates."""
    return _read_one(param, "safe_get_full_fp32_param", _masters)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Gather a parameter's averaged gradient, and return it whole; None if it is frozen or has none. Communicates."""
    return _read_one(param, "safe_get_full_grad", _gradients)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Gather a state of a parameter, such as ``exp_avg``, and return it whole; a number is 0-d. Communicates.

    None if the parameter has none yet, or is frozen.
    """
    call = f"safe_get_full_optimizer_state({optim_state_key!r})"
    return _read_one(param, call, partial(_states, optim_state_key), optim_state_key)


@torch.inference_mode(False)  # tensors that are made in it could not be updated later
@torch.no_grad()
def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Overwrite a parameter's fp32 master with ``value``, and the parameter with it, rounded. Communicates.

    Args:
        param: the model's parameter.
        value: of its shape, floating-point, the same on every rank.
    """
    optimizer, record = _owner_of(param)
    with _collective_call(optimizer, record, "safe_set_full_fp32_param"):
        _check_value(value, record)
    _finish(optimizer)
    start, stop = record.split.span(record.rank)
    with optimizer.streams.home():
        master = record.flatten(value)[start:stop].detach().to(record.p32)
        record.load_row(master.to(record.p.dtype), master)
        optimizer.gradients.group_of(record).gathers.gather([record])


@torch.inference_mode(False)  # tensors that are made in it could not be updated later
@torch.no_grad()
def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Overwrite a parameter's averaged gradient with ``value``; raise ``ValueError`` if it has none. Communicates."""
    optimizer, record = _owner_of(param)
    with _collective_call(optimizer, record, "safe_set_full_grad"):
        _check_value(value, record)
    optimizer.calls.finish_gradients(Call("look at gradients"))
    if not record.worked:
        raise ValueError(f"{record.name}: expected it to have a gradient, no rank has one: run a backward first")
    assert record.handle is not None
    record.handle.copy_(value)


@torch.inference_mode(False)  # tensors that are made in it could not be updated later
@torch.no_grad()
def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Overwrite a state that a parameter has; for a state that is one number, pass one element. Communicates."""
    key = optim_state_key
    optimizer, record = _owner_of(param)
    state = _state(optimizer, record)
    with _collective_call(optimizer, record, f"safe_set_full_optimizer_state({key!r})") as lines:
        _check_key(optimizer, record, key)
        held = state.get(key)
        if held is None and record.owns_some:
            raise ValueError(
                f"{record.name}: expected it to have {key!r}, it has none yet: call optimizer.step() first"
            )
        if held is not None and is_slice(key, held, record):
            _check_value(value, record, record.p.shape if record.split.owner is None else held.shape)
        elif held is not None:
            _check_number(value, held, record)
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            lines.append(f"{key} = {float(value)}")
    with optimizer.streams.home():
        if held is not None and is_slice(key, held, record):
            held.copy_(value if record.split.owner is not None else record.shaped(record.slice_of(value)))
        elif isinstance(held, Tensor):
            held.fill_(float(value))
        elif held is not None:
            state[key] = type(held)(float(value))


# ---- a whole model ----


def full_grads(model: nn.Module, *, device: torch.device | str | None = None) -> dict[str, Tensor | None]:
    """Gather all gradients of a model, and return them by name; as ``safe_get_full_grad``, in messages of 64 MiB.

    A rank holds the result and one message. With ``device="cpu"`` the result is on the host, and the device holds no
    more than one message and its tensors.

    Args:
        model: any module; its parameters may belong to several optimizers.
        device: where to put the tensors; None: on their parameters'.

    Returns:
        An entry for each of ``model.named_parameters()``; None where there is no gradient, or no optimizer.
    """
    return _read_all(model, "full_grads", _gradients, device)


def full_fp32_params(model: nn.Module, *, device: torch.device | str | None = None) -> dict[str, Tensor | None]:
    """Gather all fp32 masters of a model, and return them by name; None for frozen parameters. Communicates."""
    return _read_all(model, "full_fp32_params", _masters, device)


def full_optimizer_states(
    model: nn.Module, optim_state_key: str, *, device: torch.device | str | None = None
) -> dict[str, Tensor | None]:
    """Gather one state of all of a model's parameters, and return it by name; None where it's missing. Communicates."""
    call = f"full_optimizer_states({optim_state_key!r})"
    return _read_all(model, call, partial(_states, optim_state_key), device, optim_state_key)


# ---- reading ----


def _finish(optimizer: ShardedOptimizer) -> None:
    optimizer.calls.finish_syncs("read or write state")
    optimizer.finish_gathers()


def _gradients(_: ShardedOptimizer, group: ShardedGroup, own: Records) -> Iterable[Tensor | None]:
    return whole_gradients(own, group)


def _masters(_: ShardedOptimizer, group: ShardedGroup, own: Records) -> Iterable[Tensor | None]:
    for record in own:
        record.follow_edits()
    return whole_masters(own, group.group)


def _states(key: str, optimizer: ShardedOptimizer, group: ShardedGroup, own: Records) -> Iterable[Tensor | None]:
    return whole_states(own, optimizer.optim, key, group.group)


def _read_one(param: Tensor, call: str, gather: Gather, key: str | None = None) -> Tensor | None:
    if isinstance(param, nn.Parameter) and not param.requires_grad and not records_of([param]):  # it is frozen
        return None
    optimizer, record = _owner_of(param)
    return _read(optimizer, record, call, gather, key=key)[record.p]


def _read_all(
    model: nn.Module, call: str, gather: Gather, device: torch.device | str | None, key: str | None = None
) -> dict[str, Tensor | None]:
    """Return the values of a model's parameters by name, None without one; raise if none is sharded. Communicates."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    named = dict(model.named_parameters())
    held = records_of(named.values())
    if not held:
        raise ValueError(
            f"model: expected parameters of a LowLevelZeroOptimizer that is alive, got a {type(model).__name__} "
            "without any: pass the module that was trained, and keep a reference to its optimizer"
        )
    found: dict[Tensor, Tensor | None] = {}
    known: dict[Keys, str] = {}
    for optimizer, records in held.items():
        found |= _read(optimizer, records, call, gather, device, key)
        if key is not None:
            for of_rank in optimizer.shard_group.all_gather_object(_known_keys(optimizer, records)):
                known |= {keys: name for keys, name in of_rank.items() if keys not in known}
    if key is not None:
        _check_known(known, key)
    return {name: found.get(p) for name, p in named.items()}


@torch.inference_mode(False)  # tensors that are made in it could not be updated later
@torch.no_grad()
def _read(
    optimizer: ShardedOptimizer,
    of: ShardedParameter | Records,
    call: str,
    gather: Gather,
    device: torch.device | str | None = None,
    key: str | None = None,
) -> dict[Tensor, Tensor | None]:
    """Gather values of one parameter, or of a model's, of one optimizer; return them by parameter. Communicates."""
    with _collective_call(optimizer, of, call):
        if key is not None:
            _check_key(optimizer, of, key)
    records = _records(of)
    found: dict[Tensor, Tensor | None] = {}
    with optimizer.streams.home():
        if gather is _gradients:
            optimizer.calls.finish_gradients(Call("look at gradients"))
        else:
            _finish(optimizer)
        for group in optimizer.sharded_groups:
            own = [record for record in records if record.shard_group == group.number]
            for record, value in zip(own, gather(optimizer, group, own), strict=True):
                found[record.p] = value if value is None or device is None else value.to(device)
    return found


def _state(optimizer: ShardedOptimizer, record: ShardedParameter) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.optim.state.get(record.p32, {})
    return state


# ---- calls of all ranks ----


def _owner_of(param: Tensor) -> tuple[ShardedOptimizer, ShardedParameter]:
    """Return the living optimizer that trains ``param``, and its record; raise if none does. Doesn't communicate."""
    if not isinstance(param, Tensor):
        raise TypeError(f"param: expected a parameter of the model, got {type(param).__name__}")
    for optimizer, (record,) in records_of([param]).items():
        return optimizer, record
    kind = f"a {tuple(param.shape)} tensor"
    if not param.requires_grad:
        raise ValueError(
            f"param: expected a parameter that an optimizer trains, got {kind} with requires_grad=False, of which no "
            "LowLevelZeroOptimizer has a slice: read and write it as it is"
        )
    raise ValueError(
        f"param: expected a parameter of a LowLevelZeroOptimizer that is alive, got {kind} that none holds: pass the "
        "model's own parameter, not a copy or a view, and keep a reference to its optimizer"
    )


def _records(of: ShardedParameter | Records) -> Records:
    return [of] if isinstance(of, ShardedParameter) else of


@contextmanager
def _collective_call(optimizer: ShardedOptimizer, of: ShardedParameter | Records, call: str) -> Iterator[list[str]]:
    """Run checks in the body; raise on all ranks if one fails, or they make different calls. Communicates.

    The call is one of a single parameter, or of a model's, whose experts may be fewer on other ranks. The body may add
    to the lines that have to be alike on all ranks that share the parameter.

    Raises:
        ValueError: the lines of ranks differ.
        RuntimeError: ranks make different calls; another rank's body has raised (this one's own error is raised as it
            is); or a backward is going on.
    """
    groups, records = optimizer.sharded_parameters.shard_groups, _records(of)
    if isinstance(of, ShardedParameter):
        doing, compared, is_shared_by_all = f"{call} of {of.name}", records, of.shard_group == 0
    else:
        compared, is_shared_by_all = [record for record in records if record.shard_group == 0], len(groups) == 1
        doing = f"{call} of a model"
    told: list[str] = []
    with together(optimizer.shard_group, f"call {doing}", _CALLS) as lines:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{doing}: expected it after backward, got it within one: call it after the backward, not in a hook"
            )
        optimizer.step_state.wake_up()
        if any(record.p.data_ptr() != record.address for record in records):
            take_back(optimizer.sharded_parameters)  # all of them, which may have changed places
        lines.append(f"{call}, optimizer {optimizer.shard_group.number}")
        lines += [f"{call} of {record.common_name}" for record in compared]
        yield told
        lines += told if is_shared_by_all else []
    if not is_shared_by_all:
        numbers = range(1, len(groups))
        of_experts = [[each.name for each in records if each.shard_group == number] for number in numbers]
        if told:  # of a single parameter
            of_experts[records[0].shard_group - 1] += told
        agree_apart(groups, of_experts, f"call {doing}", _CALLS)


# ---- checks ----


def _check_key(optimizer: ShardedOptimizer, of: ShardedParameter | Records, key: str) -> None:
    """Raise if a parameter's states have none named ``key``, or one that is quantised, or neither tensor nor number."""
    if not isinstance(key, str):
        raise TypeError(f"optim_state_key: expected a str, got {type(key).__name__} {key!r}")
    if isinstance(of, ShardedParameter):  # the keys of a model's depend on all ranks
        _check_known(_known_keys(optimizer, [of]), key)
    for record in _records(of):
        value = _state(optimizer, record).get(key)
        if is_quantised(value):
            raise ValueError(
                f"{record.name}: expected a state of numbers, got {key!r}, which is quantised: read it whole, "
                "by optimizer.state_dict()"
            )
        if value is not None and not isinstance(value, (Tensor, int, float)):
            raise TypeError(
                f"{record.name}: expected {key!r} to be a tensor or a number, got a {type(value).__name__}: read it "
                "from optimizer.state_dict()"
            )


def _known_keys(optimizer: ShardedOptimizer, records: Records) -> dict[Keys, str]:
    """Map each tuple of state keys on this rank to the name of the first parameter that has these keys."""
    known: dict[Keys, str] = {}
    for record in records:
        if state := _state(optimizer, record):
            known.setdefault(tuple(sorted(state)), record.name)
    return known


def _check_known(known: Mapping[Keys, str], key: str) -> None:
    """Raise if parameters have states, but none named ``key``."""
    if known and not any(key in keys for keys in known):
        keys, name = next(iter(known.items()))
        raise ValueError(f"{name}: expected one of its states, {', '.join(keys)}, got {key!r}")


def _check_value(value: Tensor, record: ShardedParameter, shape: Sequence[int] | None = None) -> None:
    """Raise unless ``value`` is a floating-point tensor of this ``shape``; None: of the parameter's."""
    expected = tuple(record.p.shape if shape is None else shape)
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"{record.name}: expected value to be a tensor of a floating-point dtype, got {got}: pass "
            "torch.tensor(...).float()"
        )
    if value.shape != expected:
        raise ValueError(
            f"{record.name}: expected value to be of shape {expected}, got {tuple(value.shape)}: pass all numbers"
        )


def _check_number(value: object, held: object, record: ShardedParameter) -> None:
    """Raise ``TypeError`` unless ``value`` and the ``held`` state are single numbers."""
    for each in (held, value):
        if not (each.numel() == 1 if isinstance(each, Tensor) else isinstance(each, (int, float))):
            got = f"a tensor of {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            raise TypeError(
                f"{record.name}: expected a state and a value that are single numbers, got {got}: pass one number, as "
                "for a step count; only single numbers and states of the parameter's shape can be set"
            )
