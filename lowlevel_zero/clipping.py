"""Clipping like torch's, over parameters of several optimizers, and plain ones, together.

``torch.nn.utils``'s own functions do the same where every rank has run the same backwards. These also finish a step
whose plain backwards weren't as many on each rank, see to experts, and take parameters whose gradients are sharded with
others in one list.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import methodcaller

import torch
from torch import Tensor

from .bookkeeping.gradient_store import GradientStore
from .bookkeeping.sharded_parameter import ShardedParameter
from .gradients.global_norm import clip_factor
from .lives import records_of
from .sharded_optimizer import ShardedOptimizer


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients down to a joint norm of ``max_norm``; return the norm before. Communicates: every rank calls it.

    Args:
        parameters: of models, or slices from ``optimizer.param_groups``; of one optimizer, of several, or of none.
        max_norm: of all of them, which gradients are scaled down to.
        norm_type: above 0, or inf; ``"inf"`` is understood, too.
        error_if_nonfinite: raise where the norm is inf or NaN; the host waits for it. Nothing is changed then.
        foreach: of parameters that aren't sharded, as torch takes it.

    Returns:
        The norm before, 0-d: of whole gradients, averaged and unscaled.
    """
    norm_type = float(norm_type)
    sharded, plain = _parted(parameters)
    norms = [optimizer.gradients.norm(records, norm_type) for optimizer, records in sharded.items()]
    own = [p.grad for p in plain if p.grad is not None]
    for gradient in own:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(gradient, norm_type, dtype=dtype))
    if not norms:
        return torch.zeros((), device="cpu")
    norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"expected a norm of order {norm_type} that is finite, got {float(norm)}: set error_if_nonfinite=False to "
            "scale by it anyway"
        )
    factor = clip_factor(norm, max_norm)
    told = f" from {float(norm):.3g}" if norm.is_cpu else ""  # which a plain gradient may make another on each rank
    for optimizer, records in sharded.items():
        multiply = partial(GradientStore.multiply, factor=factor)
        optimizer.gradients.change(records, f"clip_grad_norm_ to {max_norm:.3g}{told}", multiply)
    if own and foreach:
        torch._foreach_mul_(own, factor)
    else:
        for gradient in own:
            gradient.mul_(factor.to(gradient.device))
    return norm


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Clamp each element of the averaged gradients to ``[-clip_value, clip_value]``. Communicates.

    Args:
        parameters: as ``clip_grad_norm_`` takes them.
        clip_value: the largest that is left.
        foreach: of parameters that aren't sharded, as torch takes it.
    """
    sharded, plain = _parted(parameters)
    for optimizer, records in sharded.items():
        clamp = [methodcaller("clamp_", -float(clip_value), float(clip_value))]
        edit = partial(GradientStore.edit, edits=dict.fromkeys(records, clamp))
        optimizer.gradients.finish("lowlevel_zero.clip_grad_value_")
        optimizer.gradients.change(records, f"clip_grad_value_ to {clip_value:.3g}", edit)
    own = [p for p in plain if p.grad is not None]
    if own:  # torch refuses an empty list
        torch.nn.utils.clip_grad_value_(own, clip_value, foreach=foreach)


def _parted(
    parameters: Tensor | Iterable[Tensor],
) -> tuple[dict[ShardedOptimizer, list[ShardedParameter]], list[Tensor]]:
    """Split parameters into records by optimizer, in the same order on all ranks, and plain parameters."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    sharded = records_of(given)
    found = {tensor for records in sharded.values() for record in records for tensor in (record.p, record.p32)}
    return sharded, [each for each in dict.fromkeys(given) if each not in found]
