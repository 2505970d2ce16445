"""The forecast: which parameters a backward will reach, read off its graph before it runs, and agreed on by the ranks.

Off, it costs nothing. It is switched on, between two steps and on all ranks alike, once a step has shown a
parameter for which somebody had no gradient. From then on every round of reductions opens with a *message*: each
rank says which parameters it may have a gradient for, and the round leaves out those that nobody named.

- A rank that has none to open says so too, in ``finish`` and ``zero_grad``, with a message that opens nothing. So all
  messages pair up one to one, in one order, and a rank learns from them of a round that only others have begun: it
  joins with zeros, and says again that it has none, until nobody has.
- A round whose loss isn't known before (a bare ``loss.backward()``) names all parameters, and needn't wait for the
  others' words.
- The graph shows less than the truth (a reentrant checkpoint, a Function that runs a backward of its own), or more (a
  hook that swallows a gradient). Less: the gradient waits in ``p.grad`` for one more round, before the step, and the
  parameter is named from then on. More: the flags tell.
- Forecasts end, for a while, longer each time, when no rank has lacked a gradient for long, or when they fail often.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from .bookkeeping.parameter_store import ParameterStore
from .calls import SILENT, WORDS
from .communication.transport import Pending
from .later_read import LaterRead

# A step in which a rank lacked a gradient earns one, to at most so many; another costs one, and a failed forecast more.
CREDIT = 32
PRICE_OF_A_MISS = 8

# A message: whether its sender opens a round, has lacked a gradient, or got one that its forecast had not named, in
# this step; what it has been called for, but within a backward; and a byte a parameter.
_OPENS, _LACKED, _MISSED, _CALL, _NAMED = 0, 1, 2, 3, 3 + WORDS

# Flags in bf16 count no further.
_COUNTED = 256


class Agreed(NamedTuple):
    """What the ranks have said together.

    Attributes:
        opens: a rank opens a round, so all run one.
        lacked: a rank has lacked a gradient.
        missed: a gradient has come that its rank's forecast had not named.
        call: the largest of what ranks have said that they were called for.
        used: by index, a byte that is 1 where a rank may have a gradient.
    """

    opens: bool
    lacked: bool
    missed: bool
    call: tuple[int, ...]
    used: bytes


class Message:
    """A message that is under way."""

    __slots__ = ("_buffer", "_pending")

    def __init__(self, buffer: bytearray, pending: Pending[Tensor]) -> None:
        self._buffer = buffer  # which the exchange overwrites
        self._pending = pending

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._pending.done()

    def wait(self) -> Agreed:
        """What all have said; returns when all have."""
        self._pending.wait()
        opens, lacked, missed = map(bool, self._buffer[:_CALL])
        return Agreed(opens, lacked, missed, tuple(self._buffer[_CALL:_NAMED]), bytes(self._buffer[_NAMED:]))


class Forecast:
    """When to forecast, what this rank may have gradients for, and what the ranks say of it.

    Args:
        parameters: the records.
        family: the one it is about.

    Attributes:
        on: rounds open with messages; changes in ``end_step`` alone.
        lacked: this rank has called ``optimizer.backward`` in this step, and it gave some parameter no gradient.
    """

    def __init__(self, parameters: ParameterStore, family: int = 0) -> None:
        self._parameters = parameters
        self._family = family
        self._records = parameters.families[family]
        self._group = parameters.shard_groups[family]
        self._leaf_type = _leaf_type(self._records[0].p)
        self._learnt: set[int] = set()
        self._fewest: LaterRead | None = None
        self._credit = 0
        self._rest = 0
        self._next_rest = CREDIT
        self.on = False
        self._begin_step()

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
        return {record.index for record in records if record is not None and record.family == self._family}

    def learn(self, indices: Collection[int]) -> None:
        """Gradients of these came, and no forecast had named them: name them always."""
        if indices:
            self._learnt.update(indices)
            self._missed = True

    # ---- what the ranks say ----

    def open_round(self, named: Collection[int] | None, call: Sequence[int] = SILENT) -> Message:
        """Start telling the others of a round, and of what it may carry; None: anything."""
        return self._tell(named, call, opens=True)

    def no_round(self, call: Sequence[int]) -> Message:
        """Start telling the others that this rank has no round to open."""
        return self._tell((), call, opens=False)

    def _tell(self, named: Collection[int] | None, call: Sequence[int], opens: bool) -> Message:
        count = len(self._records)
        buffer = bytearray(_NAMED + count) if named is not None else bytearray(b"\1" * (_NAMED + count))
        for index in named or ():
            buffer[_NAMED + index] = 1
        buffer[:_NAMED] = opens, self.lacked, self._missed, *call
        return Message(buffer, self._group.maximum(torch.frombuffer(buffer, dtype=torch.uint8)))

    # ---- when ----

    def saw(self, lacked: bool, missed: bool = False) -> None:
        """All ranks know that one lacked a gradient in this step, or that a forecast has failed."""
        self._lacked_somewhere |= lacked
        self._missed_somewhere |= missed

    def look(self, fewest: Tensor | None, driven: bool) -> None:
        """On a device, see from the flags of the step before whether all ranks had all gradients.

        On the host the ranks tell each other, where they agree on their rounds anyway.

        Args:
            fewest: on how few ranks a parameter had a gradient in this step, 0-d; None where it isn't known.
            driven: this rank called ``optimizer.backward`` in this step.
        """
        before, self._fewest = self._fewest, None if fewest is None else LaterRead(fewest)
        if before is not None and not self.on and before.read() < min(self._group.ranks, _COUNTED):
            (driven_somewhere,) = self._group.largest([driven])
            self.saw(lacked=bool(driven_somewhere))

    def end_step(self) -> None:
        """Between two steps: switch on or off, by what all ranks know alike."""
        if self.on:
            earned = -PRICE_OF_A_MISS if self._missed_somewhere else 1 if self._lacked_somewhere else -1
            self._credit = min(CREDIT, self._credit + earned)
            if self._credit <= 0:
                self.on = False
                self._rest, self._next_rest = self._next_rest, 2 * self._next_rest
        elif self._rest > 0:
            self._rest -= 1
        elif self._lacked_somewhere:
            self.on = True
            self._credit = CREDIT
        self._begin_step()

    def state(self) -> list[int]:
        """What all ranks know alike: whether it is on, and what that depends on."""
        return [int(self.on), self._credit, self._rest, self._next_rest]

    def restore(self, state: list[int] | None) -> None:
        """Go on as another run did, between two steps; None: off, as at first. All ranks call it alike."""
        on, self._credit, self._rest, self._next_rest = state or [0, 0, 0, CREDIT]
        self.on = bool(on)
        self._fewest = None
        self._learnt.clear()
        self._begin_step()

    def _begin_step(self) -> None:
        self.lacked = self._missed = self._lacked_somewhere = self._missed_somewhere = False


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
