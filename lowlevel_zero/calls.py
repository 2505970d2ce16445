"""Calls: with their rounds the ranks tell each other what they have been called for, and whether it can be done."""

from __future__ import annotations

from collections.abc import Sequence
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
# Numbers travel as bytes, and their maximum comes back.
_MOST = 255
_OPTIMIZERS = (_MOST - 1) // len(_NAMES)

WORDS = 3


class Call(NamedTuple):
    """What this rank has been called for.

    Attributes:
        name: one of a few.
        error: why it can't be done; None: it can.
    """

    name: str
    error: Exception | None = None

    def words(self, group: ShardGroup) -> tuple[int, int, int]:
        """What is told of it, in bytes, of which all ranks get the largest; zeros say nothing.

        ``group`` tells optimizers apart, as far as a byte goes.
        """
        number = group.number % _OPTIMIZERS * len(_NAMES) + _NAMES.index(self.name) + 1
        return number, _MOST - number, int(self.error is not None)

    def check(self) -> None:
        """Raise this rank's ``error``, if there is one."""
        if self.error is not None:
            raise self.error

    def settle(self, largest: Sequence[int], group: ShardGroup) -> None:
        """Raise, on all ranks of ``group``, if one of them can't do what it was called for, or was called for another.

        Raises:
            Exception: this rank's own ``error``.
            RuntimeError: another rank's, or who was called for what.
        """
        number, inverse, failed = largest
        if failed or number + inverse != _MOST:
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


# Said within a backward, which isn't a call that ranks agree on.
SILENT = (0,) * WORDS
