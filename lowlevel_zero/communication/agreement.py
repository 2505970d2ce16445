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


class Call(NamedTuple):
    """What this rank has been called for.

    Attributes:
        name: one of a few.
        error: why it can't be done; None: it can.
    """

    name: str
    error: Exception | None = None


class SyncProgress(NamedTuple):
    """How far a rank has come with one optimizer.

    Attributes:
        syncs: gradient syncs that it has closed in this step.
        lacks: whether a backward has left one of its parameters without a gradient.
        steps: steps since gradients were cleared.
        cleared: names of the parameters whose ``p.grad`` has been set to None, since the ranks agreed last.
    """

    syncs: int = 0
    lacks: bool = False
    steps: int = 0
    cleared: Sequence[str] = ()


_NONE = SyncProgress()


class _Statement(NamedTuple):
    """What a rank says of its call: in a digest, and in full once something is wrong.

    Attributes:
        name: of the call.
        optimizer: its number.
        lines: what has to be alike on all ranks; None: the call is one of a few that compare nothing more.
        steps, cleared: as in ``SyncProgress``.
        reason: why the call can't be done; None: it can.
    """

    name: str
    optimizer: int
    lines: Sequence[str] | None
    steps: int
    cleared: Sequence[str]
    reason: str | None = None


def agree(
    group: ShardGroup,
    lines: Sequence[str] | None,
    error: Exception | None,
    doing: str = CONSTRUCT,
    alike: Alike = BUILDS,
    progress: SyncProgress = _NONE,
) -> SyncProgress:
    """Raise on every rank if one has an error, or if their ``lines`` differ, or, without any, what they do.

    One small exchange where all is well, of a digest, and of one size whatever it is for: ranks that came for different
    things find that out here. Only when it shows that something is wrong do the ranks exchange what. In one order with
    the calls of other optimizers over the same ranks.

    Returns:
        ``progress`` with the most syncs of any rank, and whether any lacks a gradient.

    Raises:
        Exception: this rank's own ``error``.
        RuntimeError: another rank's error, by its rank; or who was called for what.
        ValueError: the first line that differs, by its ranks.
    """
    if error is None and group.ranks == 1:
        return progress
    mine = _Statement(doing, group.number, lines, progress.steps, progress.cleared)
    same = mine if lines is None else lines  # of experts each rank may name others
    digest = struct.unpack("=4I", hashlib.sha256(repr(same).encode()).digest()[:16])
    bounds = [*digest, *map(neg, digest)]
    most = group.all_reduce_max([error is not None, *bounds, progress.syncs, progress.lacks])
    if most[:-2] == [0, *bounds]:
        return progress._replace(syncs=most[-2], lacks=bool(most[-1]))
    reason = None if error is None else f"{type(error).__name__}: {error}"
    statements = group.all_gather_object(mine._replace(reason=reason))
    try:
        raise _what_differs(statements, alike) if error is None else error
    finally:
        error = None  # its traceback holds this frame: a cycle would keep alive what failed to be built


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


def _what_differs(statements: Sequence[_Statement], alike: Alike) -> Exception:
    """Another rank's error; or where the ranks' statements differ."""
    for rank, each in enumerate(statements):
        if each.reason is not None:
            return RuntimeError(f"rank {rank} could not {each.name}: {each.reason}")
    names, lines = [each.name for each in statements], [each.lines for each in statements if each.lines is not None]
    if 0 < len(lines) < len(statements):
        return _different_calls(names)
    if any(own != lines[0] for own in lines):
        return ValueError(_first_difference(lines, alike))
    if len({(each.name, each.optimizer) for each in statements}) == 1:
        cleared = [each.cleared for each in statements]
        if any(each != cleared[0] for each in cleared):
            return _different_gradients(cleared)
    return _different_calls(_last_calls(statements))


def _different_gradients(cleared: Sequence[Sequence[str]]) -> RuntimeError:
    told = "; ".join(
        f"rank {rank} has set that of {names[0]} and {len(names) - 1} others" if names else f"rank {rank} none"
        for rank, names in enumerate(cleared)
    )
    return RuntimeError(
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
