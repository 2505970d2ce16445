"""Checks of an optimizer, its parameters and its model on this rank. They raise, and change nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.shown_gradients import check_grad_dtype
from ..bookkeeping.step_state import StepState
from ..bookkeeping.storages import overlapping
from ..communication.shard_group import ShardGroup
from ..options import ZeroOptions


def check_optimizer(optimizer: object, model: object) -> None:
    """Raise unless a torch ``optimizer`` trains parameters of a bare ``model``, or of None; also within a backward."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "expected construction outside of torch.inference_mode, whose tensors can't be updated later, got it "
            "within: construct the optimizer before the with block"
        )
    if StepState.in_backward or torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "expected construction outside of backward and of optimizer.backward_pass, got it within: construct it "
            "when that backward is over"
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
            "model: expected the module whose parameters the optimizer holds, got one without any of them: "
            "make the optimizer from model.parameters() of the same module"
        )
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained:
        raise ValueError(
            "optimizer: expected at least one parameter with requires_grad=True, got none: "
            "unfreeze the parameters to train before constructing the optimizer"
        )


def check_parameters(
    optimizer: Optimizer,
    new: Sequence[Tensor],
    names: dict[Tensor, str],
    group: ShardGroup,
    options: ZeroOptions,
    *,
    model: nn.Module | None = None,
    known: Mapping[Tensor, str] | None = None,
) -> None:
    """Raise for the first of the ``new`` parameters that can't be sharded, or if ``optimizer`` can't step on the host.

    ``model``: the module they belong to, unless it has been checked; ``known``: parameters that are sharded already.
    """
    _check_once(optimizer, names)
    for p in new:
        _check_parameter(p, names[p], group)
    everything = {**(known or {}), **{p: names[p] for p in new}}
    _check_one_device(everything)
    _check_own_memory(everything)
    check_has_values(model)
    _check_dense_gradients(model, names)
    if options.cpu_offload:
        _check_steps_on_host(optimizer)


def check_group(param_group: Any) -> None:
    """Raise ``TypeError`` unless ``param_group`` is a dict with parameters."""
    if not isinstance(param_group, dict) or "params" not in param_group:
        got = list(param_group) if isinstance(param_group, dict) else type(param_group).__name__
        raise TypeError(
            f"param_group: expected a dict with 'params', got {got}: pass {{'params': [p, ...], 'lr': ...}}"
        )


def check_new(params: Sequence[Tensor], parameters: ParameterStore) -> None:
    """Raise ``ValueError`` if one of the parameters of a new group has a record already."""
    known = next(filter(None, map(parameters.find, params)), None)
    if known is not None:
        raise ValueError(
            f"{known.name}: expected a parameter this optimizer doesn't have yet, got one it has: leave it out of the "
            "new group"
        )


def _check_once(optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
    """Raise ``ValueError`` if a parameter is in the param groups twice, which torch lets pass with a warning."""
    counts = Counter(p for group in optimizer.param_groups for p in group["params"])
    twice = next((p for p, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{names[twice]}: expected it once in the param groups, got it twice: leave one out")


def _check_own_memory(named: Mapping[Tensor, str]) -> None:
    """Raise ``ValueError`` if two parameters share memory."""
    pair = overlapping(list(named))
    if pair is not None:
        one, other = (list(named.values())[place] for place in pair)
        raise ValueError(
            f"{other}: expected memory of its own, got memory that {one} uses too: "
            "tie weights by using one Parameter object in both places"
        )


def _check_one_device(named: Mapping[Tensor, str]) -> None:
    """Raise ``ValueError`` unless all parameters are on one device: hooks run on one thread a device."""
    first, device = next(((name, p.device) for p, name in named.items()), ("", None))
    for p, name in named.items():
        if p.device != device:
            raise ValueError(
                f"{name}: expected it on {device}, where {first} is, got it on {p.device}: an optimizer trains the "
                "parameters of one device: move the model to one (model.to(device)), or freeze those on other devices"
            )


def _check_parameter(p: Tensor, name: str, group: ShardGroup) -> None:
    """Raise ``ValueError`` or ``TypeError`` unless ``p`` is a dense floating-point leaf on a device of the group."""
    if not p.is_leaf:
        raise ValueError(f"{name}: expected a leaf tensor, got the result of an operation: pass a torch.nn.Parameter")
    if p.layout != torch.strided:
        raise ValueError(
            f"{name}: expected a dense parameter, got layout {p.layout}: make it dense (to_dense), or freeze it"
        )
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
    check_grad_dtype(p, name)
    if p.device.type not in group.device_types:
        raise ValueError(
            f"{name}: expected a parameter on {' or '.join(group.device_types)}, which the process group serves, "
            f"got one on {p.device}: move the model first, or initialise the group with a backend for "
            f"{p.device.type}"
        )


def check_has_values(model: nn.Module | None) -> None:
    """Raise ``ValueError`` if a parameter or buffer of ``model`` is on meta, isn't dense, or is a conjugate view."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()) if model is not None else ():
        if tensor.is_meta:
            raise ValueError(f"{name}: expected values, got a tensor on meta: materialise the model first (to_empty)")
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{name}: expected a dense tensor, got layout {tensor.layout}: keep it as a plain attribute instead of "
                "a buffer, or make it dense (to_dense)"
            )
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"{name}: expected a tensor that can be broadcast, got a conjugate or negative view: "
                "materialise it with resolve_conj().resolve_neg()"
            )


def _check_dense_gradients(model: nn.Module | None, names: dict[Tensor, str]) -> None:
    """Raise ``ValueError`` if an embedding of ``model`` would have a sparse gradient."""
    for module in model.modules() if model is not None else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight in names:
            raise ValueError(
                f"{names[module.weight]}: expected a dense gradient, got {type(module).__name__}(sparse=True): "
                "build it with sparse=False (a slice of a sparse gradient can't be reduced)"
            )


def _check_steps_on_host(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` if an optimizer that is to step on the host has ``capturable``, or settings on a device."""
    for at, group in enumerate(optimizer.param_groups):
        if group.get("capturable"):
            raise ValueError(
                f"cpu_offload=True: expected an optimizer that can step on the host, got capturable=True in param "
                f"group {at}, whose kernels run on the device only: leave capturable out"
            )
        tensors = [key for key, value in group.items() if isinstance(value, Tensor) and value.device.type != "cpu"]
        if tensors:
            raise ValueError(
                f"cpu_offload=True: expected settings on the host, got {tensors[0]} of param group {at} as a tensor on "
                f"{group[tensors[0]].device}: pass a number or a tensor on the host"
            )
