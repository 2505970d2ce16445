"""The state of the coming step, which all shard groups of one optimizer share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import ClassVar
from weakref import WeakSet

from torch import Tensor

from ..loss_scaler import LossScaler

_LOST = (
    "expected the whole gradients of every backward, lost some on this rank to an error before ({}): call "
    "optimizer.zero_grad() on every rank, and begin the step anew"
)

_UNDEFINED = (
    "expected parameters and states that every rank has stepped or loaded to the end, but this rank has failed in the "
    "midst of it ({}), and they are undefined: load a checkpoint on every rank, of the model and of the optimizer"
)
TO_ZEROS = "zero_grad(set_to_none=False)"
# Calls that may be made whatever an error has left of the gradients, and, with one more, of the parameters.
CLEARS = ("zero_grad", TO_ZEROS)
_RECOVERIES = (*CLEARS, "load_state_dict")


class Damage(Flag):
    """The damage that an error has done on this rank."""

    CALL = auto()  # a call has ended by it, and nothing is lost
    GRADIENTS = auto()  # gradients of the step are lost, until zero_grad
    PARAMETERS = auto()  # parameters and states are undefined, until a checkpoint has been loaded


@dataclass
class Failure:
    """The damage that errors have done on this rank; the ranks tell each other at their next agreement."""

    causes: dict[Damage, str] = field(default_factory=dict)  # the damage there is, with the first error that did it
    deferred: Exception | None = None  # leaves the call under way as soon as this rank has done what its peers wait for

    def note(self, error: BaseException | None, damage: Damage = Damage.CALL) -> None:
        """Record that ``error`` has ended a call, or has done ``damage``."""
        for each in Damage:
            if each in damage:
                self.causes.setdefault(each, f"{type(error).__name__}: {error}")

    def defer(self, error: BaseException) -> None:
        """Record that ``error`` has cost gradients, and keep it for ``raise_deferred``; raise an interrupt at once."""
        self.note(error, Damage.GRADIENTS)
        if not isinstance(error, Exception):
            raise error
        self.deferred = self.deferred or error

    def raise_deferred(self) -> None:
        """Raise the error that ``defer`` kept, if any."""
        error, self.deferred = self.deferred, None
        if error is not None:
            raise error

    def mend(self, damage: Damage) -> None:
        """Clear ``damage``, which all ranks have repaired."""
        self.causes = {each: cause for each, cause in self.causes.items() if each not in damage}

    @property
    def words(self) -> str:
        """Return the first error that did damage there is, for messages; empty if all is well."""
        return next(iter(self.causes.values()), "")

    def refusal(self, call: str, uses_gradients: bool) -> RuntimeError | None:
        """Return the error that keeps this rank from making ``call`` because of earlier damage, or None."""
        if Damage.PARAMETERS in self.causes and call not in _RECOVERIES:
            return RuntimeError(_UNDEFINED.format(self.causes[Damage.PARAMETERS]))
        if uses_gradients and Damage.GRADIENTS in self.causes:
            return RuntimeError(_LOST.format(self.causes[Damage.GRADIENTS]))
        return None


@dataclass(eq=False, repr=False)
class StepState:
    """The phase and the failure of one optimizer's coming step, shared by its shard groups."""

    in_backward: ClassVar[list[StepState]] = []  # of the optimizers whose ``backward`` runs, the innermost last
    alive: ClassVar[WeakSet[StepState]] = WeakSet()  # of all optimizers of this process

    _average: float  # what sums over the ranks are to be multiplied with to be averages
    scaler: LossScaler | None  # of the loss; None: there is none
    warns_of_used: bool  # this rank is to tell, once, of a backward that adds to gradients a step has used
    complete: bool = False  # each ``g`` is complete on all ranks, and no gradient has come since
    syncs: bool = True  # gradients are reduced (False under ``no_sync``: hooks do nothing)
    has_come: bool = False  # a gradient has, in the backward under way or the last one
    agreed: bool = False  # the ranks have agreed on the call under way
    failure: Failure = field(default_factory=Failure)  # what errors have left on this rank
    wake: Callable[[], None] | None = None  # brings back what sleeps on the host; None: nothing does

    def __post_init__(self) -> None:
        StepState.alive.add(self)

    @contextmanager
    def syncing(self, syncs: bool) -> Iterator[None]:
        """Reduce the gradients of backwards in the body, or leave them in ``p.grad`` if ``syncs`` is False."""
        before, self.syncs = self.syncs, syncs
        try:
            yield
        finally:
            self.syncs = before

    def wake_up(self) -> None:
        """Bring back what sleeps on the host, if anything does."""
        if self.wake is not None:
            self.wake()
            self.wake = None

    @property
    def is_alone(self) -> bool:
        """Return whether this process has no other optimizer."""
        return len(StepState.alive) == 1

    def refuse_unscaled(self, name: str) -> None:
        """Raise for a gradient of a plain ``loss.backward()`` if losses are scaled, since the step would unscale it."""
        if self.scaler is not None and self not in StepState.in_backward:
            error = RuntimeError(
                f"{name}: expected the backward of a model with fp16 parameters through optimizer.backward(loss), "
                "which scales the loss, got a gradient from another: call that instead of loss.backward()"
            )
            self.failure.note(error, Damage.GRADIENTS)
            raise error

    def gradient_scale(self) -> float | Tensor:
        """Return the factor for sums over the ranks: that of the options' reduction, divided by any loss scale."""
        return self._average if self.scaler is None else self._average / self.scaler.scale


def refuse_compiled(what: str) -> None:
    """Raise ``RuntimeError`` that names ``what`` under compiled autograd, which would trace the reducer's hooks."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    names = ("compiled_autograd_enabled", "compiled_autograd_enabled_count", "in_compiled_autograd_region")
    if compiled is not None and any(map(vars(compiled).get, names)):
        raise RuntimeError(
            f"{what}: expected a backward that autograd runs, got one that compiled autograd compiles, with the hooks "
            "that reduce gradients: run it outside of torch.compile, or set "
            "torch._dynamo.config.compiled_autograd = False"
        )
