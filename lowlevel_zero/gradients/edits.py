"""Gradients between ``synchronize`` and ``step``, which callers edit: all ranks step the same ones, in the way due."""

from __future__ import annotations

import torch

from ..bookkeeping.parameter_store import ParameterStore
from ..communication.agreement import Alike, agree
from ..communication.shard_group import ShardGroup
from ..reducer import DOUBLE_REDUCTION

_STEP_OR_DROP = (
    "step what is there by «with optimizer.skip_synchronize(): optimizer.step()», or drop it by optimizer.zero_grad()"
)
_REFUSED = {
    "run a backward": f"backward: {DOUBLE_REDUCTION}",
    "synchronize": "expected step or zero_grad after synchronize(), got another synchronize(), which has nothing to "
    f"finish: {_STEP_OR_DROP}",
    "step": "expected a step under skip_synchronize after synchronize(), which has finished the reductions, got one "
    f"outside of it: {_STEP_OR_DROP}",
}
_GRADIENTS = Alike("the same gradients", "edit .grad of the same slices on all ranks between synchronize and step")


def refuse(group: ShardGroup, doing: str) -> None:
    """Raise for a call after ``synchronize``, and have ranks raise that have come to another one."""
    of_p_grad = (
        f"expected p.grad to be left alone after synchronize(), got a call to {doing}: clip by "
        "optimizer.clip_grad_norm_, or edit .grad of the slices in optimizer.param_groups"
    )
    agree(group, [], RuntimeError(_REFUSED.get(doing, of_p_grad)), doing)


def check_edits(parameters: ParameterStore, synchronized: bool, skips: bool) -> None:
    """Raise, on all ranks, unless all step, in the way that is due, gradients of the same parameters.

    Args:
        parameters: whose gradients they are.
        synchronized: ``synchronize`` has been called.
        skips: the step is one under ``skip_synchronize``.
    """
    if not synchronized:
        raise RuntimeError(
            "expected synchronize() before a step under skip_synchronize, which steps what that leaves, got none: "
            "call optimizer.synchronize() after the last backward, or step without skip_synchronize"
        )
    if not skips:
        refuse(parameters.shard_groups[0], "step")
    error = _not_dense(parameters)
    for group, records in zip(parameters.shard_groups, parameters.by_shard_group, strict=True):
        if records:
            lines = []
            for record in records:
                held = "no gradient" if record.p32.grad is None else "a gradient"
                lines.append(f"{record.common_name}: {held} to step with")
            agree(group, lines, error, "step", _GRADIENTS)


def _not_dense(parameters: ParameterStore) -> TypeError | None:
    for record in parameters:
        gradient = record.p32.grad
        if gradient is not None and gradient.layout != torch.strided:
            return TypeError(
                f"{record.name}: expected its slice's .grad dense, got a {gradient.layout} one: "
                "assign gradient.to_dense()"
            )
    return None
