"""What must hold before an optimizer is built, on this rank and between ranks; nothing here changes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .agreement import agree as agree  # its place until everybody has the new one
from .agreement import together as together
from .bookkeeping.module_names import own_names
from .bookkeeping.storages import overlapping
from .communication.collectives import ShardGroup
from .communication.compression import check_fp8
from .optim.elementwise import MUON, full_name
from .wrapping import WrappingOptimizer, alive


def check_optimizer(optimizer: object, model: object) -> None:
    """Raise unless ``optimizer`` is a torch optimizer with parameters to train and ``model`` a plain module."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, WrappingOptimizer):
        raise TypeError(
            f"optimizer: expected a plain optimizer, got {type(optimizer).__name__}, which shards one already: "
            "wrap each optimizer once"
        )
    if any(isinstance(other, WrappingOptimizer) and other.optim is optimizer for other in alive()):
        raise TypeError(
            f"optimizer: expected a plain optimizer, got the {type(optimizer).__name__} that another one "
            "wraps, and which holds slices by now: wrap each optimizer once"
        )
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
    check_matrices(optimizer, trained, parameter_names(optimizer, model))


def check_matrices(optimizer: Optimizer, parameters: Sequence[Tensor], names: dict[Tensor, str]) -> None:
    """Raise if ``optimizer`` steps matrices alone, for the first parameter that isn't one."""
    others = [p for p in parameters if p.dim() != 2]
    if others and full_name(optimizer) == MUON:
        raise ValueError(
            f"{names[others[0]]}: expected a matrix, which Muon steps, got shape {tuple(others[0].shape)}: "
            "give what isn't one to an optimizer of its own, such as torch.optim.AdamW"
        )


def parameter_names(optimizer: Optimizer, model: nn.Module | None) -> dict[Tensor, str]:
    """A name for each parameter of ``optimizer``: the model's own, else its place in the param groups."""
    of_model = own_names(model)
    return {
        p: of_model.get(p, f"param_groups[{at}]['params'][{place}]")
        for at, group in enumerate(optimizer.param_groups)
        for place, p in enumerate(group["params"])
    }


def check_parameters(
    parameters: Sequence[Tensor],
    names: Mapping[Tensor, str],
    group: ShardGroup,
    fp8: bool,
    known: Mapping[Tensor, str] | None = None,
) -> None:
    """Raise for the first parameter that can't be sharded over ``group``, or sent in fp8 if that is wanted.

    ``known`` are those, by name, that the optimizer shards already.
    """
    for p in parameters:
        _check_parameter(p, names[p], group)
    everything = {**(known or {}), **{p: names[p] for p in parameters}}
    _check_one_device(everything)
    if fp8:
        check_fp8(dict.fromkeys(p.device for p in parameters))
    pair = overlapping(list(everything))
    if pair is not None:
        one, other = (list(everything.values())[place] for place in pair)
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
    if not group.serves(p.device):
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


def check_dense_gradients(model: nn.Module | None, names: dict[Tensor, str]) -> None:
    """Raise for an embedding of ``model`` whose gradient would be sparse."""
    for module in model.modules() if model is not None else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight in names:
            raise ValueError(
                f"{names[module.weight]}: expected a dense gradient, got {type(module).__name__}(sparse=True): "
                "build it with sparse=False (a slice of a sparse gradient can't be reduced)"
            )


def check_steps_on_host(optimizer: Optimizer) -> None:
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


def describe(
    optimizer: Optimizer,
    names: dict[Tensor, str],
    model: nn.Module | None,
    family_of: Callable[[Tensor], int] = lambda _: 0,
    family: int = 0,
) -> Iterator[str]:
    """What has to be alike on all ranks that share a family, a line each: parameters with their states, and buffers.

    The optimizer's class and the settings of its groups have to be on all ranks: they are the first family's. So has
    the type of the device that is trained on.
    """
    described = _Descriptions()
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if family == 0:
        yield f"optimizer {full_name(optimizer)}"
        yield f"trained on {', '.join(sorted({p.device.type for p in trained}))}"
        yield "model=None" if model is None else "model given"
    for at, group in enumerate(optimizer.param_groups):
        if family == 0:
            yield from (f"{key} of group {at}: {_setting(group[key])}" for key in sorted(group) if key != "params")
        for p in (p for p in group["params"] if family_of(p) == family):
            state = ", ".join(f"{key} {described(value)}" for key, value in optimizer.state.get(p, {}).items())
            kind = "trainable" if p.requires_grad else "frozen"
            yield f"parameter {names[p]} of group {at}: {kind}, {described(p)}" + (f", state {state}" if state else "")
    for tensor, name in own_names(model).items():
        if family_of(tensor) == family:
            yield f"tensor {name} of the model: {described(tensor)}"


def _setting(value: object) -> str:
    """A setting of a param group, as far as it can be compared."""
    if isinstance(value, Tensor):
        number = f" {value.item()}" if value.numel() == 1 and value.device.type != "meta" else ""
        return f"a tensor{number}, {tuple(value.shape)} {value.dtype}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_setting, value))})"
    return repr(value) if isinstance(value, (bool, int, float, str, NoneType)) else type(value).__name__


class _Descriptions:
    """Tensors in words: shape, dtype and device, whose number is that in which this rank's devices come."""

    def __init__(self) -> None:
        self._devices: dict[torch.device, str] = {}

    def __call__(self, value: object) -> str:
        if not isinstance(value, Tensor):
            return type(value).__name__
        if value.device not in self._devices:
            others = sum(device.type == value.device.type for device in self._devices)
            self._devices[value.device] = value.device.type + (f" (device {others + 1} of this rank)" if others else "")
        return f"on {self._devices[value.device]}, {tuple(value.shape)} {value.dtype}"
