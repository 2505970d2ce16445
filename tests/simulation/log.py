"""What one rank did: an entry for each call that it made, and what it holds in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from tests.simulation.program import Call


class Error(NamedTuple):
    """An exception that left a call.

    Attributes:
        type: the name of its class.
        text: its message.
        stack: the functions of the package that it left, the outermost first.
    """

    type: str
    text: str
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.type}: {self.text}"


@dataclass
class Entry:
    """One call that a rank made.

    Attributes:
        place: the row of the program, or a place of the closing behind the last one.
        told: what the call returned, if that is compared.
        held: after a step or a ``zero_grad``, the bytes of gradients that this rank holds.
        absent: the call wasn't made, since it had nothing to do: no sharded gradient stood in ``p.grad``, say.
        outlived: names of the process groups that outlive the one which they were made for.
        error: what left the call.
    """

    place: int
    call: Call
    told: Tensor | None = None
    held: int = 0
    absent: bool = False
    outlived: tuple[str, ...] = ()
    error: Error | None = None


@dataclass
class Log:
    """One rank's calls in order, and what it holds in the end.

    Attributes:
        parameters: values by part and weight.
        slices: by part and weight, this rank's slices of the master and of the optimizer's states, by name.
        starts: by part and weight, the first element of these slices.
    """

    entries: list[Entry] = field(default_factory=list)
    parameters: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    slices: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    starts: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def errors(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.error is not None]
