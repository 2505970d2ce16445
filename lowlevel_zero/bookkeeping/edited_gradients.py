"""Gradients between ``synchronize`` and ``step``, which callers edit: all ranks step the same ones, in the way due."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..communication.agreement import Alike, agree
from ..communication.shard_group import ShardGroup
from .parameter_store import ParameterStore
from .sharded_parameter import ShardedParameter

STEP_OR_DROP = (
    "step what is there by «with optimizer.skip_synchronize(): optimizer.step()», or drop it by optimizer.zero_grad()"
)
_GRADIENTS = Alike("the same gradients", "edit .grad of the same slices on all ranks between synchronize and step")


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
        refuse(
            parameters.shard_groups[0],
            "expected a step under skip_synchronize after synchronize(), which has finished the reductions, got "
            f"one outside of it: {STEP_OR_DROP}",
            "step",
        )
    error = _not_dense(parameters)
    for group, records in zip(parameters.shard_groups, parameters.by_shard_group, strict=True):
        if records:
            agree(group, _described(records), error, "step", _GRADIENTS)


def refuse(group: ShardGroup, message: str, doing: str) -> None:
    """Raise, and have ranks raise that have come to another call after ``synchronize``."""
    agree(group, [], RuntimeError(message), doing)


def _not_dense(parameters: ParameterStore) -> TypeError | None:
    for record in parameters:
        gradient = record.p32.grad
        if gradient is not None and gradient.layout != torch.strided:
            return TypeError(
                f"{record.name}: expected its slice's .grad dense, got a {gradient.layout} one: "
                "assign gradient.to_dense()"
            )
    return None


def _described(records: Sequence[ShardedParameter]) -> list[str]:
    """Which parameters there is a gradient of, a line each; names of experts may differ between ranks."""
    lines = []
    for record in records:
        name = record.name if record.shard_group == 0 else f"expert parameter {record.index}"
        lines.append(f"{name}: {'no gradient' if record.p32.grad is None else 'a gradient'} to step with")
    return lines
