"""Unused parameters: which ones had a gradient on some rank (the presence map), and which ones a backward will reach.

At ``step`` the hosts all-reduce (MAX) one byte a parameter, beside the gradients: the *presence map* of all ranks,
DDP's ``local_used_map``. It also tells whether a rank has lacked a gradient.

*Detection* is off at first: a sync carries all parameters, and opens without a message. Once a step has shown a
parameter for which some rank had no gradient it is on, on all ranks, for good: ``optimizer.backward(loss)`` reads off
the graph which parameters it will reach, a message of the same kind opens the sync, and what no rank uses is left out
of it. A sync whose loss isn't known before (of a plain ``loss.backward()``) names all parameters. Messages then pair
up one to one: a rank whose presence map, at ``step``, meets another's opening message joins that sync with zeros, and
sends its map again, until no rank opens a sync.

The graph shows less than the truth (a reentrant checkpoint, a Function that runs a backward of its own), or more (a
hook that swallows a gradient). Less: the gradient waits in ``p.grad`` for one more sync, before the step, and the
parameter is named from then on. More: the presence map tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from .bookkeeping.parameter_store import ParameterStore
from .communication.work import Work

# A message: whether its sender opens a sync; whether it has lacked a gradient in this step; and a byte a parameter.
_MAP = 2


class Said(NamedTuple):
    """What the ranks have said together.

    Attributes:
        opens: a rank opens a sync, so all run one.
        lacked: a rank has lacked a gradient.
        used: by index, a byte that is 1 where a rank may have a gradient, or, if no sync is opened, has had one.
    """

    opens: bool
    lacked: bool
    used: bytes


class Message:
    """A message that is under way."""

    __slots__ = ("_buffer", "_pending", "_said")

    def __init__(self, buffer: bytearray, pending: Work[Tensor]) -> None:
        self._buffer = buffer  # which the all-reduce overwrites
        self._pending = pending
        self._said: Said | None = None

    @property
    def read(self) -> bool:
        """Whether it has been waited for."""
        return self._said is not None

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self.read or self._pending.done()

    def wait(self) -> Said:
        """What all have said; returns when all have. May be called again."""
        if self._said is None:
            self._pending.wait()
            opens, lacked = map(bool, self._buffer[:_MAP])
            self._said = Said(opens, lacked, bytes(self._buffer[_MAP:]))
        return self._said


class UnusedParameters:
    """What this rank may have gradients for, and what the ranks tell each other of it.

    Args:
        parameters: the records.
        number: index of the shard group that it is about.

    Attributes:
        detecting: ``optimizer.backward`` looks at the graph first; changes between steps alone, on all ranks alike.
        lacked: this rank has called ``optimizer.backward`` in this step, and it gave some parameter no gradient.
    """

    def __init__(self, parameters: ParameterStore, number: int = 0) -> None:
        self._parameters = parameters
        self._number = number
        self._records = parameters.by_shard_group[number]
        self._group = parameters.shard_groups[number]
        self._leaf_type = _leaf_type(self._records[0].p)
        self._learnt: set[int] = set()
        self._unread: deque[Message] = deque()
        self._before: Message | None = None
        self._last: Message | None = None
        self.detecting = False
        self.lacked = False

    # ---- what this rank may have gradients for ----

    def reached(self, loss: Tensor, inputs: Tensor | Sequence[Tensor] | None) -> set[int]:
        """Indices of the parameters that a backward from ``loss`` may give a gradient, as far as can be told."""
        if not loss.requires_grad:
            return set()
        leaves = [loss] if loss.grad_fn is None else _leaves(loss.grad_fn, self._leaf_type)
        found = self._indices(leaves)
        if inputs is not None:
            found &= self._indices([inputs] if isinstance(inputs, Tensor) else inputs)
        return found | self._learnt

    def _indices(self, tensors: Sequence[Tensor]) -> set[int]:
        records = map(self._parameters.find, tensors)
        return {record.index for record in records if record is not None and record.shard_group == self._number}

    def learn(self, indices: Collection[int]) -> None:
        """Gradients of these came, and the graph hadn't shown them: name them always."""
        self._learnt.update(indices)

    # ---- what the ranks say ----

    def open_sync(self, named: Collection[int] | None) -> Message:
        """Start telling the others of a sync, and of what it may carry; None: anything."""
        used = bytearray(b"\1" * len(self._records) if named is None else len(self._records))
        for index in named or ():
            used[index] = 1
        return self._tell(1, used)

    def no_sync(self) -> Message:
        """Start telling the others that this rank has no sync to open, and its presence map."""
        self._last = self._tell(0, bytearray([record.worked for record in self._records]))
        return self._last

    def _tell(self, opens: int, used: bytearray) -> Message:
        buffer = bytearray((opens, self.lacked)) + used
        message = Message(buffer, self._group.start_all_reduce_max(torch.frombuffer(buffer, dtype=torch.uint8)))
        self._unread.append(message)
        return message

    def read_up_to(self, last: Message) -> Said:
        """Take in all messages up to ``last``, one of them, and return what it said; waits for the ranks."""
        while self._unread and not last.read:
            self._unread.popleft().wait()
        return last.wait()

    def presence(self) -> bytes:
        """By index, a byte that isn't 0 where some rank has had a gradient since ``zero_grad``; waits for the ranks."""
        assert self._last is not None
        return self.read_up_to(self._last).used

    # ---- when ----

    def end_step(self, wait: bool) -> None:
        """Between two steps: start to detect, if a rank has lacked a gradient.

        Args:
            wait: look at this step's last message, not at the one before's, which has long been there; alike on all
                ranks.
        """
        told = self._last if wait else self._before
        self._before, self._last = (None, None) if wait else (self._last, None)
        if told is not None and self.read_up_to(told).lacked:
            self.detecting = True
        self.lacked = False

    def restore(self, detecting: bool) -> None:
        """Go on as another run did, between two steps. All ranks call it alike."""
        self.detecting = detecting
        self._before = self._last = None
        self._learnt.clear()
        self.lacked = False


def _leaf_type(p: nn.Parameter) -> type:
    """The class of the graph's nodes that accumulate into ``p.grad``."""
    with torch.inference_mode(False), torch.enable_grad():
        node = p.view_as(p).grad_fn
    assert node is not None
    return type(node.next_functions[0][0])


def _leaves(root: Node, leaf_type: type) -> list[Tensor]:
    """The leaf tensors of the graph under ``root``, in about a fifth of a microsecond a node."""
    leaves: list[Tensor] = []
    seen = {root}
    front = [root]
    while front:
        for node, _ in front.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                if type(node) is leaf_type:
                    leaves.append(node.variable)  # type: ignore[attr-defined]
                else:
                    front.append(node)
    return leaves
