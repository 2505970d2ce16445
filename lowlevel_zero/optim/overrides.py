"""bitsandbytes' settings for single parameters, which are carried over to the parameters' slices.

``GlobalOptimManager`` keeps them by a parameter's id, by its module, or by its place in the param groups; transformers'
``Trainer`` has 32-bit states for every embedding so. A slice is another tensor, in another place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import finalize

from torch import Tensor
from torch.optim import Optimizer

from ..bookkeeping.parameter_store import ParameterStore

# Others decide where states are quantised, which slices have to know beforehand, or look at whole tensors.
_CARRIED = {"alpha", "betas", "eps", "lr", "skip_zeros", "t_alpha", "t_beta3", "weight_decay"}


def overrides_of(optimizer: Any, p: Tensor) -> dict[str, object]:
    """Return the settings that bitsandbytes' manager has for ``p`` instead of its group's; empty if none."""
    manager = getattr(optimizer, "mng", None)
    if manager is None:
        return {}
    found: dict[str, object] = {}
    for module, name, settings in manager.module_weight_config_triple:
        if getattr(module, name, None) is p:
            found.update(settings)
    found.update(manager.pid2config.get(id(p), {}))
    return found


def check_overrides(optimizer: Any, new: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
    """Raise ``ValueError`` if a slice can't have its parameter's setting; else make the next step read it again."""
    for p in new:
        overrides = overrides_of(optimizer, p)
        for key, value in overrides.items():
            carried = key in _CARRIED or (key, value) == ("optim_bits", 32)
            if not carried and value != getattr(optimizer.args, key, None):
                raise ValueError(
                    f"{names.get(p, 'a parameter')}: expected a setting of its own that its slices can have, got "
                    f"{key}={value!r} from bitsandbytes' GlobalOptimManager: override {', '.join(sorted(_CARRIED))} or "
                    "optim_bits=32, or give the parameter to an optimizer that is made with it"
                )
        if overrides:
            optimizer.initialized = False  # the next step carries them over


def carry_overrides(optimizer: Optimizer, parameters: ParameterStore) -> None:
    """Make a bitsandbytes optimizer copy its parameters' own settings to their slices in its first step.

    bitsandbytes looks at its manager then, and so do settings come along that are made until then.
    """
    if hasattr(optimizer, "mng"):
        optimizer.check_overrides = partial(_carry, optimizer, parameters)  # type: ignore[attr-defined]


def _carry(optimizer: Any, parameters: ParameterStore) -> None:
    """Register bitsandbytes' overrides of parameters for their slices; drop those by place in the param groups."""
    manager = optimizer.mng
    check_overrides(optimizer, [record.p for record in parameters], {record.p: record.name for record in parameters})
    for record in parameters:
        overrides = overrides_of(optimizer, record.p)
        if overrides:
            if id(record.p32) not in manager.pid2config:  # after this one, another tensor may get its id
                finalize(record.p32, manager.pid2config.pop, id(record.p32), None)
            manager.pid2config[id(record.p32)] = overrides
    for at, group in enumerate(optimizer.param_groups):
        for place in range(len(group["params"])):  # where frozen parameters are left out, later ones change places
            manager.index2config.pop((at, place), None)
