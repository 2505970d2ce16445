"""Names of a model's tensors without the wrappers around the model or around modules in it.

``torch.compile``, activation checkpointing, ``DistributedDataParallel`` and their like are modules that hold another
one, and put the name of that attribute into every name below. Whether a run uses them must not show in what it saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import combinations
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

T = TypeVar("T")

_COMPILED, _CHECKPOINTED, _MODULE = "_orig_mod", "_checkpoint_wrapped_module", "module"

# By the full name of a wrapper's class the attribute that holds what it wraps. A model's own attribute may be called
# "module" too, so names alone don't tell; and importing all of these classes would take seconds.
_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": _COMPILED,
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": _CHECKPOINTED,
    "torch.nn.parallel.distributed.DistributedDataParallel": _MODULE,
    "torch.nn.parallel.data_parallel.DataParallel": _MODULE,
    "colossalai.interface.model.ModelWrapper": _MODULE,
}


class NamedModule(NamedTuple):
    """A module of a model, with its name along one of the paths to it."""

    name: str  # its own; empty for the model, and for what wrappers around that hold
    key: str  # what its entries in ``model.state_dict()`` begin with; activation checkpointing leaves itself out there
    module: nn.Module  # a wrapper has the name of the module that it wraps


def named_modules(model: nn.Module, name: str = "", key: str = "") -> Iterator[NamedModule]:
    """Yield every module of ``model``, by every path to it, depth first; wrappers don't add to names."""
    yield NamedModule(name, key, model)
    inside = _attribute_of(model)
    for attribute, child in model._modules.items():
        if child is not None:
            own_name = name if attribute == inside else joined(name, attribute)
            own_key = key if attribute == inside == _CHECKPOINTED else joined(key, attribute)
            yield from named_modules(child, own_name, own_key)


def named_tensors(model: nn.Module, persistent: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield every name of every parameter, then of every buffer, or only ``persistent`` ones, with the tensor."""
    everywhere = list(named_modules(model))
    for name, _, module in everywhere:
        yield from ((joined(name, own), p) for own, p in module._parameters.items() if p is not None)
    for name, _, module in everywhere:
        without = module._non_persistent_buffers_set if persistent else ()
        buffers = ((own, buffer) for own, buffer in module._buffers.items() if own not in without)
        yield from ((joined(name, own), buffer) for own, buffer in buffers if buffer is not None)


def own_names(model: nn.Module | None) -> dict[Tensor, str]:
    """Map every parameter, and then every buffer, to its first name; empty without a model."""
    found: dict[Tensor, str] = {}
    for name, tensor in () if model is None else named_tensors(model):
        found.setdefault(tensor, name)
    return found


def parameter_names(groups: Iterable[Iterable[Tensor]], model: nn.Module | None) -> dict[Tensor, str]:
    """Map each parameter of param ``groups`` to a name: the model's, else its place in the groups."""
    of_model = own_names(model)
    return {
        p: of_model.get(p, f"param_groups[{at}]['params'][{place}]")
        for at, members in enumerate(groups)
        for place, p in enumerate(members)
    }


def state_dict_for(model: nn.Module, state_dict: Mapping[str, T]) -> dict[str, T]:
    """Return ``state_dict`` with the names that ``model.load_state_dict`` expects, whatever wraps either.

    So a plain model's loads into one that is compiled, and the other way round. What the model doesn't have keeps its
    name.
    """
    key_of = {
        joined(named.name, entry): joined(named.key, entry)
        for named in named_modules(model)
        for entry in (*named.module._parameters, *named.module._buffers, "_extra_state")
    }
    names = matched(state_dict, key_of)
    return {key_of.get(names[name], name): value for name, value in state_dict.items()}


def matched(saved: Iterable[str], own: Collection[str]) -> dict[str, str]:
    """Map each ``saved`` name to the same name in ``own``, without what DDP, FSDP and torch.compile add to names.

    What stands for none of them keeps its name, but for attributes that nothing but a wrapper has.
    """
    saved = list(saved)
    found = {name: name for name in saved if name in own}
    taken = set(found)
    for name in saved:
        if name not in found:
            likely = [each for each in _without_wrappers(name) if each not in taken]
            found[name] = next((each for each in likely if each in own), likely[0] if likely else name)
            taken.add(found[name])
    return found


def joined(path: str, name: str) -> str:
    """Return the full name of the entry ``name`` of the module at ``path``."""
    return f"{path}.{name}" if path else name


def _attribute_of(module: nn.Module) -> str | None:
    """Return the attribute in which a wrapper holds its module; None if ``module`` is no wrapper."""
    classes = (f"{each.__module__}.{each.__qualname__}" for each in type(module).__mro__)
    return next((_WRAPPERS[each] for each in classes if each in _WRAPPERS), None)


def _without_wrappers(name: str) -> Iterator[str]:
    """Yield ``name`` without wrappers' parts: first with all its parts ``module``, then without some of them."""
    parts = [part for part in name.split(".") if part not in (_COMPILED, _CHECKPOINTED)]
    at = [place for place, part in enumerate(parts[:-1]) if part == _MODULE]
    for count in range(len(at) + 1):
        for left_out in combinations(at, count):
            yield ".".join(part for place, part in enumerate(parts) if place not in left_out)
