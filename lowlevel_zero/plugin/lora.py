"""LoRA adapters: their parameters are added to an optimizer that was made before them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.optim import Optimizer

from .boosted import BoostedOptimizer

_log = logging.getLogger("lowlevel_zero")


def add_lora_parameters(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Add each adapter's parameters to the param group of the weight that it adapts. Doesn't communicate.

    An adapter of a weight that the optimizer doesn't have is left out, and logged. A boosted optimizer has them.

    Raises:
        ValueError: the model has no adapters.
    """
    if not isinstance(model, PeftModel):
        raise ValueError(
            f"model: expected what booster.enable_lora returned, got a {type(model).__name__}: "
            "boost the model with the adapters, or make another plugin for the model without them"
        )
    if optimizer is None or isinstance(optimizer, BoostedOptimizer):
        return
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    names = {p: name for name, p in model.named_parameters()}
    left_out = []
    for added, origins in _adapters(model):
        if not added.requires_grad or added in group_of:
            continue
        group = next((group_of[p] for p in origins if p in group_of), None)
        if group is None:
            left_out.append(names[added])
        else:
            group["params"].append(added)
            group_of[added] = group
    if left_out:
        _log.warning(
            "LoRA: %d parameters adapt weights that the optimizer doesn't have, and will not be trained: %s, ...",
            len(left_out),
            left_out[0],
        )


def _adapters(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[nn.Parameter]]]:
    """Yield each parameter of an adapter, or of a ``modules_to_save`` copy, with the parameters of its base."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            origins = list(module.get_base_layer().parameters())
            known = set(origins)
            yield from ((p, origins) for p in module.parameters() if p not in known)
        elif isinstance(module, ModulesToSaveWrapper):
            originals = dict(module.original_module.named_parameters())
            for copy in module.modules_to_save.values():
                yield from ((p, [originals[name]]) for name, p in copy.named_parameters() if name in originals)
