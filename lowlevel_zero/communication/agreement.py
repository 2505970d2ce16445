"""Agreement: what the ranks must have alike, and what each was called for; if one can't do it, all raise."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from operator import neg
from typing import NamedTuple

from .shard_group import ShardGroup

NORMS = "take norms of p.grad"


class Alike(NamedTuple):
    """What has to be the same on every rank, and what to do where it isn't; for messages."""

    what: str
    remedy: str


CONSTRUCT = "construct its LowLevelZeroOptimizer"

BUILDS = Alike(
    "the same model, optimizer and options", "build them alike, in the same order, before constructing the optimizer"
)


def agree(
    group: ShardGroup,
    lines: Sequence[str],
    error: Exception | None,
    doing: str = CONSTRUCT,
    alike: Alike = BUILDS,
) -> None:
    """Raise on every rank if one has an error, or if their ``lines`` differ.

    One small exchange where all is well, of a digest. Only when it shows that something is wrong do the ranks exchange
    what.

    Raises:
        Exception: this rank's own ``error``.
        RuntimeError: another rank's error, by its rank; or who was called for what.
        ValueError: the first line that differs, by its ranks.
    """
    if error is None and group.ranks == 1:
        return
    if _agreed(group, error, "\n".join(lines)) is not None:
        return
    statements = group.all_gather_object(_Statement(doing, group.number, _reason(error), lines=list(lines)))
    if error is not None:
        try:
            raise error
        finally:
            error = None  # its traceback holds this frame: a cycle would keep alive what failed to be built
    _raise_others(statements)
    raise ValueError(_first_difference([each.lines or () for each in statements], alike))


def _agreed(group: ShardGroup, error: Exception | None, same: str, most: tuple[int, ...] = (0, 0)) -> list[int] | None:
    """The maximum of every rank's ``most``; None: a rank has an error, or not the ``same`` as the others.

    One small exchange, of one size whatever it is for: ranks that came for different things find that out here.
    """
    own = struct.unpack("=4I", hashlib.sha256(same.encode()).digest()[:16])
    bounds = [*own, *map(neg, own)]
    any_failed, *agreed = group.all_reduce_max([error is not None, *bounds, *most])
    return None if any_failed or agreed[: len(bounds)] != bounds else agreed[len(bounds) :]


@contextmanager
def together(group: ShardGroup, doing: str, alike: Alike = BUILDS) -> Iterator[list[str]]:
    """Every rank enters; if the body raises on one of them, or their lines differ, all raise as ``agree`` does.

    The body communicates on all ranks alike, whatever it raises, or not at all. It is given the list of lines to
    fill with what has to be alike.
    """
    lines: list[str] = []
    error: Exception | None = None
    try:
        yield lines
    except Exception as raised:  # of whatever type: the others would wait for ever
        error = raised
    try:
        agree(group, lines, error, doing, alike)
    finally:
        error = None  # as in agree


def _first_difference(by_rank: Iterable[Sequence[str]], alike: Alike) -> str:
    """Name the first place where a rank's lines are not rank 0's."""
    for expected, *others in zip_longest(*by_rank, fillvalue="nothing more"):
        for rank, got in enumerate(others, 1):
            if got != expected:
                return (
                    f"expected {alike.what} on every rank; rank 0 has «{expected}» where "
                    f"rank {rank} has «{got}»: {alike.remedy}"
                )
    raise AssertionError("digests differ, lines don't")


def agree_apart(groups: Sequence[ShardGroup], lines: Sequence[Iterable[str]], doing: str) -> None:
    """Raise on all ranks of the first of ``groups`` if ``lines`` differ in one of the others.

    Args:
        groups: all shard groups of an optimizer.
        lines: what has to be alike in each but the first.
        doing: what for, as ``agree`` has it.
    """
    error: Exception | None = None
    for group, own in zip(groups[1:], lines, strict=True):
        try:
            agree(group, list(own), error, doing)
        except (RuntimeError, ValueError) as raised:
            error = raised
    agree(groups[0], (), error, doing)


class Call(NamedTuple):
    """What this rank has been called for.

    Attributes:
        name: one of a few.
        error: why it can't be done; None: it can.
    """

    name: str
    error: Exception | None = None

    def agree(self, group: ShardGroup, progress: Progress, cleared: Sequence[str] = ()) -> Progress:
        """Raise, on all ranks of ``group``, if one of them can't do what it was called for, or was called for another.

        In one order with the calls of other optimizers over the same ranks. Communicates.

        Args:
            group: the ranks.
            progress: how far this one has come.
            cleared: the names that ``progress.cleared`` is of.

        Returns:
            How far the ranks have come: the most syncs, and whether any rank lacks a gradient.

        Raises:
            Exception: this rank's own ``error``.
            RuntimeError: another rank's, or who was called for what.
        """
        number = group.number
        same = f"{self.name} of {number}, {progress.steps}, {progress.cleared}"
        most = _agreed(group, self.error, same, (progress.syncs, progress.lacks))
        if most is None:
            mine = _Statement(self.name, number, _reason(self.error), progress.steps, list(cleared))
            statements = group.all_gather_object(mine)
            if self.error is not None:
                raise self.error
            _raise_others(statements)
            _raise_cleared(statements)
            raise _different_calls(_last_calls(statements))
        syncs, lacks = most
        return Progress(syncs, bool(lacks), progress.steps, progress.cleared)


class Progress(NamedTuple):
    """How far a rank has come with one optimizer.

    Attributes:
        syncs: gradient syncs that it has closed in this step.
        lacks: whether a backward has left one of its parameters without a gradient.
        steps: steps since gradients were cleared.
        cleared: stands for the parameters whose ``p.grad`` has been set to None, since the ranks agreed last.
    """

    syncs: int
    lacks: bool
    steps: int
    cleared: int


class _Statement(NamedTuple):
    """What a rank says of its call, once something is wrong.

    Attributes:
        name: of the call.
        optimizer: its number.
        reason: why the call can't be done; None: it can.
        steps: since gradients were cleared.
        cleared: parameters whose ``p.grad`` has been set to None.
        lines: what has to be alike on all ranks; None: the call is one of a few that compare nothing more.
    """

    name: str
    optimizer: int
    reason: str | None
    steps: int = 0
    cleared: Sequence[str] = ()
    lines: Sequence[str] | None = None


def _reason(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _raise_others(statements: Sequence[_Statement]) -> None:
    """Raise another rank's error, or that some compare lines where others do something else."""
    for rank, each in enumerate(statements):
        if each.reason is not None:
            raise RuntimeError(f"rank {rank} could not {each.name}: {each.reason}")
    if len({each.lines is None for each in statements}) > 1:
        raise _different_calls([each.name for each in statements])


def _raise_cleared(statements: Sequence[_Statement]) -> None:
    """Raise if the ranks have cleared different gradients, before one and the same call."""
    if len({(each.name, each.optimizer) for each in statements}) == 1 and any(
        each.cleared != statements[0].cleared for each in statements
    ):
        told = "; ".join(
            f"rank {rank} has set that of {each.cleared[0]} and {len(each.cleared) - 1} others"
            if each.cleared
            else f"rank {rank} none"
            for rank, each in enumerate(statements)
        )
        raise RuntimeError(
            f"expected p.grad to be set to None for the same parameters on every rank, got: {told}: drop gradients "
            "alike on all ranks, or all of them by optimizer.zero_grad()"
        )


def _different_calls(calls: Sequence[str]) -> RuntimeError:
    clip = "; where a rank has run no backward, torch.nn.utils.clip_grad_norm_ finds no gradients: clip by "
    return RuntimeError(
        "expected the same call on every rank, got "
        + "; ".join(f"rank {rank} to {call}" for rank, call in enumerate(calls))
        + ": let every rank make the same calls in the same order, and begin the step anew with "
        "optimizer.zero_grad() on all" + (f"{clip}lowlevel_zero.clip_grad_norm_" if NORMS in calls else "")
    )


def _last_calls(statements: Sequence[_Statement]) -> list[str]:
    """Each rank's call, where they differ: the call itself, or a ``zero_grad`` before it, which doesn't communicate."""
    if len({each.optimizer for each in statements}) > 1:
        return [f"{each.name} of optimizer {each.optimizer}" for each in statements]
    if len({each.name for each in statements}) > 1:
        return [each.name for each in statements]
    fewest = min(each.steps for each in statements)
    return ["zero_grad" if each.steps == fewest else each.name for each in statements]
