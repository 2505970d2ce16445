"""Unused parameters: which ones had a gradient on some rank (the presence map), and which ones a backward will reach.

Where a rank lacks a gradient at the step, the hosts all-reduce (MAX) one byte a parameter: the *presence map* of all
ranks, DDP's ``local_used_map``.

*Detection* is off at first: a sync carries all parameters, and opens without a message. Once a backward has left a
parameter without a gradient on some rank it is on, on all ranks, for good: ``optimizer.backward(loss)`` reads off the
graph which parameters it will reach, a message of the same kind opens the sync, and what no rank uses is left out of
it. There is one such message for each sync: that of a plain ``loss.backward()`` names all parameters, and a rank that
has run fewer syncs than others sends those that it lacks once the ranks have agreed on a call.

The graph shows less than the truth (a reentrant checkpoint, a Function that runs a backward of its own), or more (a
hook that swallows a gradient). Less: the gradient waits in ``p.grad`` for one more sync, before the step, and the
parameter is named from then on. More: the presence map tells.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..communication.work import Work
from .parameter_store import ParameterStore

# The class of the graph's nodes that accumulate into ``p.grad``.
_AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class UnusedParameters:
    """Detects which parameters of a shard group a backward will reach; the ranks exchange them and the presence map."""

    def __init__(self, parameters: ParameterStore, number: int) -> None:
        self._parameters = parameters
        self._number = number
        self._records = parameters.by_shard_group[number]
        self._group = parameters.shard_groups[number]
        self.learnt: set[int] = set()  # always named: their gradients came though the graph didn't show them
        self.detecting = False  # ``optimizer.backward`` looks at the graph; changes between steps, on all ranks alike
        self.lacked = False  # an ``optimizer.backward`` of this step gave some parameter no gradient, here or elsewhere

    # ---- this rank's gradients ----

    def reached(self, loss: Tensor, inputs: Tensor | Sequence[Tensor] | None) -> set[int]:
        """Return the indices of the parameters that a backward from ``loss`` may reach, by walking the graph."""
        if not loss.requires_grad:
            return set()
        leaves = [loss] if loss.grad_fn is None else _leaves(loss.grad_fn)
        found = self._indices(leaves)
        if inputs is not None:
            found &= self._indices([inputs] if isinstance(inputs, Tensor) else inputs)
        return found | self.learnt

    def _indices(self, tensors: Sequence[Tensor]) -> set[int]:
        found = (record for record in map(self._parameters.find, tensors) if record is not None)
        return {each.index for each in found if each.shard_group == self._number and each.p32.requires_grad}

    # ---- exchange between ranks ----

    def exchange(self, named: Collection[int] | None) -> Work[bytes]:
        """Start exchanging ``named`` parameters (None: all); the result has 1 where some rank names one. Communicates.

        Whether a gradient was missing travels with them.
        """
        count = len(self._records)
        buffer = bytearray((self.lacked,)) + (b"\1" * count if named is None else bytes(count))
        for index in named or ():
            buffer[1 + index] = 1

        def read(maxima: Tensor) -> bytes:
            of_any = bytes(maxima.tolist())
            self.lacked |= bool(of_any[0])
            return of_any[1:]

        return self._group.start_all_reduce_max(torch.frombuffer(buffer, dtype=torch.uint8)).then(read)


def _leaves(root: Node) -> list[Tensor]:
    """Return the leaf tensors of the graph under ``root``."""
    leaves: list[Tensor] = []
    seen = {root}
    front = [root]
    while front:
        for node, _ in front.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                if type(node) is _AccumulateGrad:
                    leaves.append(node.variable)  # type: ignore[attr-defined]
                else:
                    front.append(node)
    return leaves
