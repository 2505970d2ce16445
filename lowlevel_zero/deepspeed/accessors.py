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

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..bookkeeping.sharded_parameter import ShardedParameter
from ..lives import records_of
from ..optim.quantised import is_quantised
from ..sharded_group import ShardedGroup
from ..sharded_optimizer import ShardedOptimizer
from ..state.values import (
    is_slice,
    whole_gradients,
    whole_masters,
    whole_states,
)
from .owners import collective_call, is_frozen, owner_of

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

Records: TypeAlias = Sequence[ShardedParameter]


class _Values(NamedTuple):
    """A kind of values that accessors read: gradients, fp32 masters, or one optimizer state.

    Attributes:
        finish: is called before reading, to finish what is under way; communicates.
        of: the values of those that one group shares; all ranks iterate to the end.
        key: of a state.
    """

    finish: Callable[[ShardedOptimizer], None]
    of: Callable[[ShardedOptimizer, ShardedGroup, Records], Iterable[Tensor | None]]
    key: str | None = None


# ---- one parameter ----


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Gather the fp32 master of a parameter, and return it whole; None if the parameter is frozen."""
    return _read_one(param, "safe_get_full_fp32_param", _MASTERS)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Gather the gradient of a parameter, and return it whole; None if no rank has one, or it is frozen."""
    return _read_one(param, "safe_get_full_grad", _GRADIENTS)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Gather a state of a parameter, such as ``exp_avg``, and return it whole; a number is 0-d.

    None if the parameter has none yet, or is frozen.
    """
    call = f"safe_get_full_optimizer_state({optim_state_key!r})"
    return _read_one(param, call, _states(optim_state_key))


@torch.inference_mode(False)  # tensors that are made in it could not be updated later
@torch.no_grad()
def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Overwrite a parameter's fp32 master with ``value``, and the parameter with its rounded values.

    Args:
        param: the model's parameter.
        value: of its shape, floating-point, the same on every rank.
    """
    optimizer, record = owner_of(param)
    with collective_call(optimizer, [record], "safe_set_full_fp32_param"):
        _check_value(value, record)
    _finish(optimizer)
    start, stop = record.split.span(record.rank)
    with optimizer.streams.home():
        master = record.flatten(value)[start:stop].detach().to(record.p32)
        record.load_row(master.to(record.p.dtype), master)
        optimizer.sharded_group_of(record).gathers.gather([record])


@torch.inference_mode(False)  # tensors that are made in it could not be updated later
@torch.no_grad()
def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Overwrite the averaged gradient of a parameter that has one. All ranks call it."""
    optimizer, record = owner_of(param)
    with collective_call(optimizer, [record], "safe_set_full_grad"):
        _check_value(value, record)
    optimizer.finish_gradients()
    if not record.worked:
        raise ValueError(f"{record.name}: expected it to have a gradient, no rank has one: run a backward first")
    assert record.handle is not None
    record.handle.copy_(value)


@torch.inference_mode(False)  # tensors that are made in it could not be updated later
@torch.no_grad()
def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Overwrite an optimizer state of a parameter; for a state that is one number, pass one element."""
    key = optim_state_key
    optimizer, record = owner_of(param)
    state = _state(optimizer, record)
    with collective_call(optimizer, [record], f"safe_set_full_optimizer_state({key!r})") as lines:
        _check_key(optimizer, [record], key)
        held = state.get(key)
        if held is None and record.owns_some:
            raise ValueError(f"{record.name}: expected it to have {key!r}, it has none so far: step it before")
        if held is not None and is_slice(key, held, record):
            _check_value(value, record, record.split.whole_shape(held.shape, record.p.shape))
        elif held is not None:
            _number(value, held, record)
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            lines.append(f"{key} = {float(value)}")
    with optimizer.streams.home():
        if held is not None and is_slice(key, held, record):
            held.copy_(record.own_part(value))
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
    return _read_all(model, "full_grads", _GRADIENTS, device)


def full_fp32_params(model: nn.Module, *, device: torch.device | str | None = None) -> dict[str, Tensor | None]:
    """Gather all fp32 masters of a model, and return them by name; None for frozen parameters."""
    return _read_all(model, "full_fp32_params", _MASTERS, device)


def full_optimizer_states(
    model: nn.Module, optim_state_key: str, *, device: torch.device | str | None = None
) -> dict[str, Tensor | None]:
    """Gather one optimizer state of all of a model's parameters, and return it by name; None where there is none."""
    call = f"full_optimizer_states({optim_state_key!r})"
    return _read_all(model, call, _states(optim_state_key), device)


# ---- reading ----


def _finish(optimizer: ShardedOptimizer) -> None:
    optimizer.finish_syncs("read or write state")
    optimizer.finish_gathers()


def _masters_of(_: ShardedOptimizer, group: ShardedGroup, own: Records) -> Iterable[Tensor | None]:
    for record in own:
        record.follow_edits()
    return whole_masters(own, group.group)


_GRADIENTS = _Values(ShardedOptimizer.finish_gradients, lambda _, group, own: whole_gradients(own, group))
_MASTERS = _Values(_finish, _masters_of)


def _states(key: str) -> _Values:
    return _Values(_finish, lambda optimizer, group, own: whole_states(own, optimizer.optim, key, group.group), key)


def _read_one(param: Tensor, call: str, values: _Values) -> Tensor | None:
    if is_frozen(param):
        return None
    optimizer, record = owner_of(param)
    return _read(optimizer, [record], call, values)[record.p]


def _read_all(
    model: nn.Module, call: str, values: _Values, device: torch.device | str | None
) -> dict[str, Tensor | None]:
    """Return the values of all parameters of ``model`` by name, None without one. Communicates."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    named = dict(model.named_parameters())
    held = records_of(named.values())
    if not held:
        raise ValueError(
            f"model: expected parameters of a LowLevelZeroOptimizer that is alive, got a {type(model).__name__} of "
            "which none holds any: pass the module that was trained, and keep its optimizer"
        )
    found: dict[Tensor, Tensor | None] = {}
    for optimizer, records in held.items():
        found |= _read(optimizer, records, call, values, device)
    return {name: found.get(p) for name, p in named.items()}


@torch.inference_mode(False)  # tensors that are made in it could not be updated later
@torch.no_grad()
def _read(
    optimizer: ShardedOptimizer,
    records: Records,
    call: str,
    values: _Values,
    device: torch.device | str | None = None,
) -> dict[Tensor, Tensor | None]:
    """Gather values of some parameters of one optimizer, and return them by parameter. Communicates."""
    with collective_call(optimizer, records, call):
        if values.key is not None:
            _check_key(optimizer, records, values.key)
    found: dict[Tensor, Tensor | None] = {}
    with optimizer.streams.home():
        values.finish(optimizer)
        for group in optimizer.sharded_groups:
            own = [record for record in records if record.shard_group == group.number]
            for record, value in zip(own, values.of(optimizer, group, own), strict=True):
                found[record.p] = value if value is None or device is None else value.to(device)
    return found


def _state(optimizer: ShardedOptimizer, record: ShardedParameter) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.optim.state.get(record.p32, {})
    return state


# ---- checks ----


def _check_key(optimizer: ShardedOptimizer, records: Records, key: str) -> None:
    """Raise unless ``key`` names a state of these parameters that is a tensor or a number, and not quantised."""
    known = {name: value for record in records for name, value in _state(optimizer, record).items()}
    if not isinstance(key, str):
        raise TypeError(f"optim_state_key: expected a str, got {type(key).__name__} {key!r}")
    if known and key not in known:
        raise ValueError(f"{records[0].name}: expected one of its states, {', '.join(sorted(known))}, got {key!r}")
    for record in records:
        if is_quantised(_state(optimizer, record).get(key)):
            raise ValueError(
                f"{record.name}: expected a state of numbers, got {key!r}, which is quantised: read it whole, "
                "by optimizer.state_dict()"
            )
    value = known.get(key)
    if value is not None and not isinstance(value, (Tensor, int, float)):
        raise TypeError(
            f"{records[0].name}: expected {key!r} to be a tensor or a number, got a {type(value).__name__}: read it "
            "from optimizer.state_dict()"
        )


def _check_value(value: Tensor, record: ShardedParameter, shape: Sequence[int] | None = None) -> None:
    """Raise unless ``value`` is a floating-point tensor of this ``shape``; None: of the parameter's."""
    expected = tuple(record.p.shape if shape is None else shape)
    if not isinstance(value, Tensor):
        raise TypeError(f"{record.name}: expected a tensor as its value, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{record.name}: expected a floating-point value, got {value.dtype}: pass value.float()")
    if value.shape != expected:
        raise ValueError(f"{record.name}: expected a value of {expected}, got {tuple(value.shape)}")


def _number(value: object, held: object, record: ShardedParameter) -> float:
    """Return ``value`` as a float; raise ``TypeError`` unless ``value`` and the ``held`` state are single numbers."""
    for each in (held, value):
        if not (each.numel() == 1 if isinstance(each, Tensor) else isinstance(each, (int, float))):
            got = f"a tensor of {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            raise TypeError(
                f"{record.name}: expected a state that is one number, and one number for it, got {got}: pass one "
                "number, as for a step count; a state of neither one number nor the parameter's shape can't be set"
            )
    return float(value)  # type: ignore[arg-type]
