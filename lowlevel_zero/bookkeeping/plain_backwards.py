"""Plain backwards: tells the end of a ``loss.backward()``, of which the hooks of its parameters alone hear."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from weakref import ReferenceType, WeakMethod, ref

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle


class PlainBackwards:
    """Calls ``ended`` at the end of each watched backward; where one is nested in another, at the end of the other.

    Activation checkpoints nest backwards: the one around them may bring no gradient itself.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = WeakMethod(ended)  # its object holds this one
        self.running: set[int] = set()  # those that have begun, and haven't come to their end

    def watch(self) -> bool:
        """Watch for the end of the running backward; return whether it wasn't watched before."""
        task = torch._C._current_graph_task_id()
        if task in self.running:
            return False
        self.running.add(task)
        Variable._execution_engine.queue_callback(partial(self._end, task))
        return True

    def _end(self, task: int) -> None:
        """Call ``ended`` after an outermost backward; after one nested in a node's backward, watch the outer one."""
        self.running.discard(task)
        node, ended = torch._C._current_autograd_node(), self._ended()
        if node is not None:
            hooks: list[RemovableHandle] = []
            act = partial(PlainBackwards._watch_around, ref(self), hooks)
            hooks.append(node.register_hook(act))
            # torch 2.4 runs no hook that a node gets while it runs: there the next node's does it.
            hooks += [each.register_prehook(act) for each, _ in node.next_functions if each is not None]
        elif ended is not None:
            ended()

    @staticmethod
    def _watch_around(backwards: ReferenceType[PlainBackwards], hooks: list[RemovableHandle], *_: object) -> None:
        """Watch the backward around a nested one: the first of these hooks does it, and takes all away."""
        while hooks:
            hooks.pop().remove()
        self = backwards()
        if self is not None:
            self.watch()
