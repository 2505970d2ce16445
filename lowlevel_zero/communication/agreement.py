"""Agreement: ranks compare their calls and what must be alike; where one rank has an error, all ranks raise."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, count, zip_longest
from operator import neg
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch.distributed import get_process_group_ranks

from .failed_ranks import SAME_CALLS, LostRank, listed_ranks, run_each
from .shard_group import ShardGroup

T = TypeVar("T", bound=BaseException)
_Counted: TypeAlias = Sequence[tuple[str, int]]

NORMS = "take norms of p.grad"

_TIMES = {0: "not", 1: "once"}
_LISTED = 8  # ranks whose values a message lists, at most


# An error that an agreement raises on all ranks of a process group has that group's name and the moment among its
# attributes. A caller may raise the same error again later, alone.
_AGREED_IN = "_lowlevel_zero_agreed_in"
_moments = count()


class Alike(NamedTuple):
    """A requirement that all ranks must meet alike, and the remedy if they don't, as text for messages."""

    what: str
    remedy: str


CONSTRUCT = "construct its LowLevelZeroOptimizer"

BUILDS = Alike(
    "the same model, optimizer and options", "build them alike, in the same order, before constructing the optimizer"
)

SETTINGS = Alike(
    "the same settings of param groups and of the loss scale",
    "set them alike on all ranks, as by a scheduler that is fed a metric averaged over the ranks, and call step again",
)

_CLEARED = (
    "expected p.grad to be set to None for the same parameters on every rank, got it for {}: drop gradients alike on "
    "all ranks, or all of them by optimizer.zero_grad()"
)
_EDITED = (
    "expected the same edits of p.grad on every rank, got {}: decide on edits alike on all ranks, as by a value that "
    "they have in common, and begin the step anew with optimizer.zero_grad()"
)
_WRITTEN = (
    "{}: expected weights to be written on every rank or on none since the last step, and equally often, got {}: write "
    "the same values on all ranks (model.load_state_dict on each, or broadcast them from one), or load a checkpoint by "
    "lowlevel_zero.checkpoint.load_checkpoint, and make the call again"
)


class Digested(NamedTuple):
    """Settings by name, with the digest that the ranks compare instead of them."""

    settings: Mapping[str, str] = {}
    digest: bytes = b""

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> Digested:
        """Return ``settings``, which must be in the order of their names, with their SHA-256 digest."""
        return cls(settings, hashlib.sha256("\n".join(map(": ".join, settings.items())).encode()).digest())


class Call(NamedTuple):
    """A public call that all ranks make, as they agree on it.

    Attributes:
        name: names the call in messages.
        error: the reason why this rank can't make the call; None: it can.
        settings: the settings of param groups and of the loss scale, if the call uses them.
        written: records of the parameters that were written since the last agreement, if the call uses them.
    """

    name: str
    error: Exception | None = None
    settings: Digested = Digested()
    written: Sequence[Any] = ()


class SyncProgress(NamedTuple):
    """One rank's progress in the step, and what its user has changed since the last agreement.

    Attributes:
        syncs: the number of gradient syncs that were closed in this step.
        lacks: whether a backward has left one of the rank's parameters without a gradient.
        settings: as in ``Call``.
        cleared: the parameters whose ``p.grad`` was set to None, and when, in words; each with how often.
        written: names of the parameters that were written, each with how often.
        edited: the edits of ``p.grad``, in words, each with how often.
    """

    syncs: int = 0
    lacks: bool = False
    settings: Digested = Digested()
    cleared: _Counted = ()
    written: _Counted = ()
    edited: _Counted = ()


_NONE = SyncProgress()


class _Statement(NamedTuple):
    """A rank's account of its call, which the ranks exchange if their digests differ.

    Attributes:
        optimizer: the number of its shard group; 0: it has none yet.
        lines: lines that must be alike on all ranks; None: the ranks compare their progress.
        progress: the rank's progress; syncs and missing gradients may differ between ranks.
        reason: the reason why the rank can't make the call; None: it can.
        failed: the error by which an earlier call failed on this rank, in words; empty: none did.
    """

    name: str
    optimizer: int
    lines: Sequence[str] | None
    progress: SyncProgress
    reason: str | None = None
    failed: str = ""


class UnevenWrites(RuntimeError):
    """Raised on all ranks if some have written parameters more often than others since the last agreement.

    Attributes:
        names: the parameters that ranks have not written equally often.
    """

    def __init__(self, message: str, names: Collection[str]) -> None:
        super().__init__(message)
        self.names = names


def agree(
    group: ShardGroup,
    lines: Sequence[str] | None,
    error: Exception | None,
    doing: str = CONSTRUCT,
    alike: Alike = BUILDS,
    progress: SyncProgress = _NONE,
    failed: str = "",
) -> SyncProgress:
    """Compare calls, or ``lines``, between ranks; raise on all if they differ or one has an error. Communicates.

    Ranks exchange a digest, of one size whatever the call, so ranks that make different calls meet here. They exchange
    their whole accounts only where something differs. Agreements of all optimizers over the same ranks have one order.
    With the digest goes the number of shard groups, so the next one has the same number on all ranks, whatever one of
    them alone has done before.

    Returns:
        ``progress`` with the largest number of syncs of any rank, and whether any rank lacks a gradient.

    Raises:
        Exception: this rank's own ``error``.
        UnevenWrites: ranks have not written parameters equally often, and nothing else is wrong.
        RuntimeError: another rank has an error, or the ranks make different calls.
        ValueError: lines or settings differ.
    """
    if error is None and group.ranks == 1:
        return progress
    settings, *done = progress[2:]
    same = (doing, group.number, settings.digest, done) if lines is None else lines
    digest = struct.unpack("=4I", hashlib.sha256(repr(same).encode()).digest()[:16])
    bounds = [*digest, *map(neg, digest)]
    told = [error is not None, *bounds, progress.syncs, progress.lacks, group.context.shard_groups]
    *most, group.context.shard_groups = group.all_reduce_max(told)
    if most[:-2] == [0, *bounds]:
        return progress._replace(syncs=most[-2], lacks=bool(most[-1]))
    reason = None if error is None else f"{type(error).__name__}: {error}"
    statements = group.all_gather_object(_Statement(doing, group.number, lines, progress, reason, failed))
    try:
        ranks = get_process_group_ranks(group.group)
        raise raised_by_all(_difference(statements, ranks, alike) if error is None else error, group)
    finally:
        error = None  # its traceback holds this frame: a cycle would keep alive what failed to be built


def raised_by_all(error: T, group: ShardGroup) -> T:
    """Mark ``error`` as one that every rank of ``group`` raises, and return it."""
    vars(error)[_AGREED_IN] = (group.group.group_name, next(_moments))
    return error


def moment() -> int:
    """Return a number that is larger than all that were returned before."""
    return next(_moments)


def is_raised_by_all(error: BaseException, group: ShardGroup, since: int) -> bool:
    """Return whether ``error`` was marked by an agreement of ``group`` after the moment ``since``."""
    name, agreed = vars(error).get(_AGREED_IN, ("", -1))
    return bool(name == group.group.group_name and agreed > since)


class Lines(list[str]):
    """Lines that must be alike on all ranks.

    Attributes:
        marked: the body may set it on one rank; afterwards it tells, on all, whether any rank has.
    """

    marked = False


@contextmanager
def together(group: ShardGroup, doing: str, alike: Alike = BUILDS) -> Iterator[Lines]:
    """Run the body on every rank; if it raises on one, or their lines differ, all ranks raise. Communicates.

    The body communicates on all ranks alike, whatever it raises, or not at all; it may be nested. It fills the list of
    lines that must be alike.
    """
    lines = Lines()
    error: Exception | None = None
    entered = moment()
    try:
        yield lines
    except LostRank:
        raise  # it ends this process, from which the others learn it: they may not come to an agreement any more
    except Exception as raised:  # of whatever type: the others would wait for ever
        if is_raised_by_all(raised, group, entered):
            raise  # all ranks have raised there: agreeing once more, this one would wait for nobody
        error = raised
    try:
        lines.marked = agree(group, lines, error, doing, alike, SyncProgress(lacks=lines.marked)).lacks
    finally:
        error = None  # as in agree


def agree_apart(
    groups: Sequence[ShardGroup], lines: Sequence[Iterable[str]], doing: str, alike: Alike = BUILDS
) -> None:
    """Raise on all ranks of ``groups[0]`` if in another group its ``lines`` differ between ranks. Communicates."""
    with together(groups[0], doing):
        pairs = zip(groups[1:], lines, strict=True)
        run_each(partial(agree, group, list(own), None, doing, alike) for group, own in pairs)


def first_difference(by_rank: Sequence[Sequence[str]], ranks: Sequence[int], alike: Alike) -> str:
    """Return an error message about the first line that isn't the same on all ``ranks``, with the lines of up to 9."""
    for expected, *others in zip_longest(*by_rank, fillvalue="nothing more"):
        differ = [place for place, got in enumerate(others, 1) if got != expected]
        if differ:
            others_too = differ if len(by_rank) > _LISTED else list(range(1, len(by_rank)))
            shown = [differ[0], *(place for place in others_too if place != differ[0])][:_LISTED]
            told = ", ".join(f"rank {ranks[place]} has «{others[place - 1]}»" for place in shown)
            return f"expected {alike.what} on every rank; rank {ranks[0]} has «{expected}» where {told}: {alike.remedy}"
    raise AssertionError("digests differ, lines don't")


def _difference(statements: Sequence[_Statement], ranks: Sequence[int], alike: Alike) -> Exception:
    """Return the error to raise here: for the first rank that states a reason, or else for the first difference."""
    for rank, each in zip(ranks, statements, strict=True):
        if each.reason is not None:
            return RuntimeError(f"rank {rank} could not {each.name}: {each.reason}")
    lines = [each.lines for each in statements if each.lines is not None]
    calls = {(each.name, each.optimizer) for each in statements}
    if len(calls) > 1 or 0 < len(lines) < len(statements):
        return _different_calls(statements, ranks)
    if any(own != lines[0] for own in lines):
        return ValueError(first_difference(lines, ranks, alike))
    return _different_progress([each.progress for each in statements], ranks)


def _different_progress(done: Sequence[SyncProgress], ranks: Sequence[int]) -> Exception:
    """Return the error for settings, cleared or edited gradients, or writes of parameters that differ between ranks."""
    settings = [each.settings.settings for each in done]
    if any(each != settings[0] for each in settings):
        names = sorted(set().union(*settings))
        lines = [[f"{name}: {own.get(name, 'nothing')}" for name in names] for own in settings]
        return ValueError(first_difference(lines, ranks, SETTINGS))
    for by_rank, message in (([each.cleared for each in done], _CLEARED), ([each.edited for each in done], _EDITED)):
        names, told = _uneven(by_rank, ranks)
        if names:
            return RuntimeError(message.format(f"{names[0]} {told}"))
    names, told = _uneven([each.written for each in done], ranks)
    assert names, "digests differ, statements don't"
    return UnevenWrites(_WRITTEN.format(names[0], told), names)


def _uneven(by_rank: Sequence[_Counted], ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the actions that ranks took unequally often, and a text with the counts of the first one by rank."""
    done = [dict(own) for own in by_rank]
    names = [name for name in dict.fromkeys(chain(*done)) if len({own.get(name) for own in done}) > 1]
    numbers = [own.get(names[0], 0) for own in done] if names else []
    told = [
        f"{_TIMES.get(number, f'{number} times')} on "
        + listed_ranks([rank for rank, own in zip(ranks, numbers, strict=True) if own == number])
        for number in sorted(set(numbers), reverse=True)
    ]
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return names, " and ".join(told) + more


def _different_calls(statements: Sequence[_Statement], ranks: Sequence[int]) -> RuntimeError:
    """Return the error for ranks that have made different calls: it lists each rank's call."""
    several = len({each.optimizer for each in statements if each.optimizer}) > 1
    calls = [
        each.name
        + (f" of optimizer {each.optimizer}" if several and each.optimizer else "")
        + (f", after a call that failed there ({each.failed})" if each.failed else "")
        for each in statements
    ]
    clip = "; where a rank has run no backward, torch.nn.utils.clip_grad_norm_ finds no gradients: clip by "
    return RuntimeError(
        "expected the same call on every rank, got "
        + "; ".join(f"rank {rank} to {call}" for rank, call in zip(ranks, calls, strict=True))
        + f": {SAME_CALLS}, and begin the step anew with optimizer.zero_grad() on all"
        + (f"{clip}lowlevel_zero.clip_grad_norm_" if NORMS in [each.name for each in statements] else "")
    )
