"""Accessors: a parameter's gradient, fp32 master and optimizer state, read and written by the parameter alone.

Names and arguments are those of ``deepspeed.utils`` (DeepSpeed 0.19); ``full_grads`` and its like read a whole model in
a few large messages. A *full* value has the parameter's shape, on its device. A *local* one is this rank's slice,
``[s]`` with ``s = ceil(numel / world_size)``, in memory order, zeros for padding. What is 16-bit is given as fp32. What
is given is a copy.

Every rank calls a function, for the same parameter, but for ``safe_get_local_fp32_param`` and
``safe_get_local_optimizer_state``, which don't communicate. Who finds itself alone raises ``TimeoutError``, which names
the others, and so do all that came; ranks that call different things raise ``ValueError``, which says who called
what; and what one rank refuses, all refuse. Nothing has been changed then.

Gradients are averaged over the ranks, summed over micro-batches and unscaled. They are there from backward to
``zero_grad``; ``step`` leaves them clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .bookkeeping.parameter_store import ShardedParameter
from .construction import ShardedGroup
from .optimizer import LowLevelZeroOptimizer
from .owners import Records, at_once, is_frozen, owner_of, owners_of
from .state.values import at_least_fp32, copied_state, fill_slice, whole_gradients, whole_masters, whole_states
from .state.whole import is_slice

# Gathers travel beside reductions, of which a plain backward may have started more on one rank than on another.
_STATE = "read or write state"


class _What(NamedTuple):
    """What may be read.

    Attributes:
        check: raises, before the ranks talk, for what can't be read.
        read: gets it, of each parameter; all ranks iterate to the end.
    """

    check: Callable[[LowLevelZeroOptimizer, Records], None]
    read: Callable[[LowLevelZeroOptimizer, Records], Iterator[Tensor | None]]


# ---- one parameter, whole ----


def safe_get_full_fp32_param(param: Tensor, *, timeout: float | None = None) -> Tensor:
    """The fp32 master of a parameter.

    Args:
        param: the model's parameter.
        timeout: seconds to wait for the other ranks to call this; None: as long as their process group would.

    Raises (all of these functions):
        TypeError: not a tensor.
        ValueError: no optimizer that is alive trains ``param``; or ranks that call different things.
        TimeoutError: not every rank called it; the message says which did.
        RuntimeError: another rank's error.
    """
    master = _read_one(param, "safe_get_full_fp32_param", _MASTERS, timeout)
    assert master is not None
    return master


def safe_get_full_grad(param: Tensor, *, timeout: float | None = None) -> Tensor | None:
    """The gradient of a parameter; None if no rank has one, as of a dropped layer, or it is frozen."""
    if is_frozen(param):
        return None
    return _read_one(param, "safe_get_full_grad", _GRADIENTS, timeout)


def safe_get_full_optimizer_state(
    param: Tensor, optim_state_key: str, *, timeout: float | None = None
) -> Tensor | None:
    """A state of a parameter, as ``exp_avg``; a number, as ``step``, is 0-d. None if the optimizer has none for it yet.

    Raises:
        ValueError: there are states, and none is called so.
    """
    return _read_one(param, f"safe_get_full_optimizer_state({optim_state_key!r})", _states_of(optim_state_key), timeout)


def safe_set_full_fp32_param(param: Tensor, value: Tensor, *, timeout: float | None = None) -> None:
    """Overwrite a parameter: its fp32 master with ``value``, and itself, on all ranks, with what that rounds to.

    Args:
        param: the model's parameter.
        value: of its shape, floating-point, the same on every rank.
        timeout: seconds to wait for the other ranks to call this; None: as long as their process group would.

    Raises:
        TypeError, ValueError: a wrong dtype or shape.
    """
    optimizer, record = owner_of(param)
    with at_once(optimizer, [record], "safe_set_full_fp32_param", timeout):
        _check_value(value, record, param.shape)
        record.check_home()
    _put_master(optimizer, record, record.slice_of(value))


def safe_set_full_grad(param: Tensor, value: Tensor, *, timeout: float | None = None) -> None:
    """Overwrite the gradient of a parameter that has one; ``value`` as above. A later backward adds to it."""
    _set_gradient(param, value, "safe_set_full_grad", False, timeout)


def safe_set_full_optimizer_state(
    param: Tensor, value: Tensor, optim_state_key: str, *, timeout: float | None = None
) -> None:
    """Overwrite a state of a parameter that has been stepped; ``value`` as above, or, for a number, one element."""
    _set_state(param, value, optim_state_key, "safe_set_full_optimizer_state", False, timeout)


# ---- one parameter, this rank's slice ----


@torch.no_grad()
def safe_get_local_fp32_param(param: Tensor) -> Tensor:
    """This rank's slice of the fp32 master; doesn't communicate."""
    optimizer, record = owner_of(param)
    with optimizer.streams.home():
        record.follow_edits()
        return at_least_fp32(record.p32.detach().to(record.padded.device, copy=True))


@torch.no_grad()
def safe_get_local_grad(param: Tensor, *, timeout: float | None = None) -> Tensor | None:
    """This rank's slice of the averaged gradient; every rank calls it, since reductions may have to be finished."""
    if is_frozen(param):
        return None
    optimizer, record = owner_of(param)
    with at_once(optimizer, [record], "safe_get_local_grad", timeout):
        record.check_home()
    optimizer.finish_gradients()
    with optimizer.streams.home():
        return optimizer.sharded_group_of(record).gradients.averaged(record)


@torch.no_grad()
def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's slice of a state; a number is 0-d; None if there is none yet. Doesn't communicate."""
    optimizer, record = owner_of(param)
    _check_key(optimizer, [record], key=optim_state_key)
    with optimizer.streams.home():
        return copied_state(_state(optimizer, record).get(optim_state_key), record)


def safe_set_local_fp32_param(param: Tensor, value: Tensor, *, timeout: float | None = None) -> None:
    """Overwrite a parameter, of which every rank gives its slice, ``[s]``: the masters, and what they round to."""
    optimizer, record = owner_of(param)
    with at_once(optimizer, [record], "safe_set_local_fp32_param", timeout):
        _check_value(value, record, record.p32.shape)
        record.check_home()
    _put_master(optimizer, record, value)


def safe_set_local_grad(param: Tensor, value: Tensor, *, timeout: float | None = None) -> None:
    """Overwrite the gradient of a parameter that has one: every rank gives its slice, ``[s]``."""
    _set_gradient(param, value, "safe_set_local_grad", True, timeout)


def safe_set_local_optimizer_state(
    param: Tensor, value: Tensor, optim_state_key: str, *, timeout: float | None = None
) -> None:
    """Overwrite a state of a parameter: every rank gives its slice, ``[s]``, or, for a number, the same element."""
    _set_state(param, value, optim_state_key, "safe_set_local_optimizer_state", True, timeout)


# ---- a whole model ----


def full_grads(
    model: nn.Module, *, device: torch.device | str | None = None, timeout: float | None = None
) -> dict[str, Tensor | None]:
    """``safe_get_full_grad`` of all of a model's parameters, by name, in messages of about 64 MiB.

    A rank holds the result and one message. With ``device="cpu"`` the result is on the host, and the device holds no
    more than a message and what it brought.

    Args:
        model: any module; its parameters may belong to several optimizers.
        device: where to put the tensors; None: on their parameters'.
        timeout: seconds to wait for the other ranks to call this; None: as long as their process group would.

    Returns:
        An entry for each of ``model.named_parameters()``; None where there is no gradient, or no optimizer.

    Raises:
        ValueError: no parameter belongs to an optimizer that is alive.
    """
    return _read_all(model, "full_grads", _GRADIENTS, device, timeout)


def full_fp32_params(
    model: nn.Module, *, device: torch.device | str | None = None, timeout: float | None = None
) -> dict[str, Tensor | None]:
    """``safe_get_full_fp32_param`` of all of a model's parameters, as ``full_grads``; None of frozen ones."""
    return _read_all(model, "full_fp32_params", _MASTERS, device, timeout)


def full_optimizer_states(
    model: nn.Module,
    optim_state_key: str,
    *,
    device: torch.device | str | None = None,
    timeout: float | None = None,
) -> dict[str, Tensor | None]:
    """``safe_get_full_optimizer_state`` of all of a model's parameters, as ``full_grads``; None where there is none."""
    return _read_all(model, f"full_optimizer_states({optim_state_key!r})", _states_of(optim_state_key), device, timeout)


# ---- what is read ----


def _read_one(param: Tensor, call: str, what: _What, timeout: float | None) -> Tensor | None:
    optimizer, record = owner_of(param)
    (value,) = _read(optimizer, [record], call, what, timeout)
    return value


def _read_all(
    model: nn.Module, call: str, what: _What, device: torch.device | str | None, timeout: float | None
) -> dict[str, Tensor | None]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    named = dict(model.named_parameters())
    held = owners_of(named.values())
    if not held:
        raise ValueError(
            f"model: expected parameters of a LowLevelZeroOptimizer that is alive, got a {type(model).__name__} of "
            "which none holds any: pass the module that was trained, and keep its optimizer"
        )
    values: dict[Tensor, Tensor | None] = {}
    for optimizer, records in held.items():
        read_now = _read(optimizer, records, call, what, timeout, device)
        values.update(zip((record.p for record in records), read_now, strict=True))
    return {name: values.get(p) for name, p in named.items()}


def _read(
    optimizer: LowLevelZeroOptimizer,
    records: Records,
    call: str,
    what: _What,
    timeout: float | None,
    device: torch.device | str | None = None,
) -> list[Tensor | None]:
    """Values of some parameters of one optimizer, on ``device``."""
    with at_once(optimizer, records, call, timeout):
        what.check(optimizer, records)
    with torch.no_grad(), optimizer.streams.home():
        values = what.read(optimizer, records)
        return [value if value is None or device is None else value.to(device) for value in values]


def _gradients(optimizer: LowLevelZeroOptimizer, records: Records) -> Iterator[Tensor | None]:
    optimizer.finish_gradients()
    for group, own in _by_group(optimizer, records):
        yield from whole_gradients(own, group)


def _masters(optimizer: LowLevelZeroOptimizer, records: Records) -> Iterator[Tensor | None]:
    optimizer.finish_syncs(_STATE)
    optimizer.finish_gathers()
    for record in records:
        record.follow_edits()
    for group, own in _by_group(optimizer, records):
        yield from whole_masters(own, group.group)


def _states(optimizer: LowLevelZeroOptimizer, records: Records, key: str) -> Iterator[Tensor | None]:
    optimizer.finish_syncs(_STATE)
    for group, own in _by_group(optimizer, records):
        yield from whole_states(own, optimizer.optim, key, group.group)


def _by_group(
    optimizer: LowLevelZeroOptimizer, records: Records
) -> Iterator[tuple[ShardedGroup, list[ShardedParameter]]]:
    """Records, which come in the order of their groups, by group."""
    for group in optimizer.sharded_groups:
        own = [record for record in records if record.family == group.number]
        if own:
            yield group, own


def _states_of(key: str) -> _What:
    return _What(partial(_check_key, key=key), partial(_states, key=key))


def _state(optimizer: LowLevelZeroOptimizer, record: ShardedParameter) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.optim.state.get(record.p32, {})
    return state


# ---- what is written ----


@torch.no_grad()
def _put_master(optimizer: LowLevelZeroOptimizer, record: ShardedParameter, own: Tensor) -> None:
    """Let ``p32`` be a slice ``[s]``, and ``p`` what all ranks' round to. Communicates."""
    optimizer.finish_syncs(_STATE)
    optimizer.finish_gathers()
    start, stop = record.split.span(record.rank)
    with optimizer.streams.home():
        master = own[: stop - start].detach().to(record.p32)
        record.load_row(master.to(record.p.dtype), master)
        if record.split.numel:
            gathers = optimizer.sharded_group_of(record).gathers
            gathers.start_gather((), [record])
            gathers.finish()


@torch.no_grad()
def _set_gradient(param: Tensor, value: Tensor, call: str, is_local: bool, timeout: float | None) -> None:
    optimizer, record = owner_of(param)
    with at_once(optimizer, [record], call, timeout):
        _check_value(value, record, record.p32.shape if is_local else param.shape)
    optimizer.finish_gradients()
    with optimizer.streams.home():
        own = optimizer.sharded_group_of(record).gradients.averaged(record)
        if own is None:
            raise ValueError(f"{record.name}: expected it to have a gradient, no rank has one: run a backward first")
        fill_slice(own, value if is_local else record.slice_of(value), record)
        optimizer.sharded_group_of(record).gradients.overwrite(record, own)


@torch.no_grad()
def _set_state(param: Tensor, value: Tensor, key: str, call: str, is_local: bool, timeout: float | None) -> None:
    optimizer, record = owner_of(param)
    state = _state(optimizer, record)
    with at_once(optimizer, [record], f"{call}({key!r})", timeout) as lines:
        _check_key(optimizer, [record], key)
        held = state.get(key)
        if held is None:
            raise ValueError(f"{record.name}: expected it to have {key!r}, it has none so far: step it before")
        if is_slice(key, held, record):
            _check_value(value, record, record.p32.shape if is_local else param.shape)
        else:
            lines.append(f"{key} = {_number(value, held, record)}")
    with optimizer.streams.home():
        if is_slice(key, held, record):
            fill_slice(held, value if is_local else record.slice_of(value), record)
        elif isinstance(held, Tensor):
            held.copy_(torch.as_tensor(value, device=held.device).reshape(held.shape))
        else:
            state[key] = type(held)(value)


# ---- what is refused ----


def _check_home(optimizer: LowLevelZeroOptimizer, records: Records) -> None:
    for record in records:
        record.check_home()


def _check_key(optimizer: LowLevelZeroOptimizer, records: Records, key: str) -> None:
    """Raise unless ``key`` may be a state's: one of those that there are, if there are any."""
    known = {name: value for record in records for name, value in _state(optimizer, record).items()}
    if not isinstance(key, str):
        raise TypeError(f"optim_state_key: expected a str, got {type(key).__name__} {key!r}")
    if known and key not in known:
        raise ValueError(f"{records[0].name}: expected one of its states, {', '.join(sorted(known))}, got {key!r}")
    value = known.get(key)
    if value is not None and not isinstance(value, (Tensor, int, float)):
        raise TypeError(f"{records[0].name}: expected {key!r} to be a tensor or a number, it is {type(value).__name__}")


def _check_value(value: object, record: ShardedParameter, shape: torch.Size) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{record.name}: expected a tensor as its value, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{record.name}: expected a floating-point value, got {value.dtype}: pass value.float()")
    if value.shape != shape:
        whole = tuple(record.p.shape)
        raise ValueError(
            f"{record.name}: expected a value of {tuple(shape)}, got {tuple(value.shape)} (it is {whole} as a whole, "
            f"{tuple(record.p32.shape)} as a slice)"
        )


def _number(value: object, held: object, record: ShardedParameter) -> float:
    """The one number that ``value`` is, for a state that is one."""
    for each in (held, value):
        if not (each.numel() == 1 if isinstance(each, Tensor) else isinstance(each, (int, float))):
            got = f"a tensor of {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            raise TypeError(f"{record.name}: expected a state that is one number, and one number for it, got {got}")
    return float(value)  # type: ignore[arg-type]


_MASTERS = _What(_check_home, _masters)
_GRADIENTS = _What(_check_home, _gradients)
