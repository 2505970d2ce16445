"""Calls: before they do it, the ranks tell each other what they have been called for, and whether it can be done."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from .communication.collectives import ShardGroup

# By name, what brings a rank to agree on rounds; the place is what travels.
_NAMES = (
    "step",
    "zero_grad",
    "clip_grad_norm_",
    "synchronize",
    "add_param_group",
    "load_state_dict",
    "get_param_grad",
    "look at gradients",
    "state_dict",
    "read or write state",
)
# What numbers stay below, of which the maximum comes back.
_MOST = 2**31


class Call(NamedTuple):
    """What this rank has been called for.

    Attributes:
        name: one of a few.
        error: why it can't be done; None: it can.
    """

    name: str
    error: Exception | None = None

    @property
    def looks(self) -> bool:
        """Whether its caller wants to see a gradient, for which a device's host waits anyway."""
        return self.name in ("get_param_grad", "look at gradients")

    def check(self) -> None:
        """Raise this rank's ``error``, if there is one."""
        if self.error is not None:
            raise self.error

    def agree(self, group: ShardGroup) -> None:
        """Raise, on all ranks of ``group``, if one of them can't do what it was called for, or was called for another.

        In one order with the calls of other optimizers over the same ranks. Communicates.

        Raises:
            Exception: this rank's own ``error``.
            RuntimeError: another rank's, or who was called for what.
        """
        number = group.number * len(_NAMES) + _NAMES.index(self.name)
        most, inverse, failed = group.largest([number, _MOST - number, self.error is not None])
        if failed or most + inverse != _MOST:
            self._raise(group)

    def _raise(self, group: ShardGroup) -> NoReturn:
        error = self.error
        reason = None if error is None else f"{type(error).__name__}: {error}"
        told: list[_Told] = group.exchange(_Told(self.name, group.number, reason))
        if error is not None:
            raise error
        for rank, each in enumerate(told):
            if each.reason is not None:
                raise RuntimeError(f"rank {rank} could not {each.name}: {each.reason}")
        several = len({each.optimizer for each in told}) > 1
        came = (f"{each.name} of optimizer {each.optimizer}" if several else each.name for each in told)
        raise RuntimeError(
            "expected the same call on every rank, got "
            + "; ".join(f"rank {rank} to {call}" for rank, call in enumerate(came))
            + ": let every rank make the same calls in the same order, and begin the step anew with "
            "optimizer.zero_grad() on all"
        )


class _Told(NamedTuple):
    """What a rank tells of its call: name, number of the optimizer, and why it can't be done."""

    name: str
    optimizer: int
    reason: str | None
