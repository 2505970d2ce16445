"""Failed ranks: find processes of this host that have ended, and name them in the errors of ranks that wait.

Ranks tell each other of their processes when they first meet. When a connection breaks, a rank looks which processes on
its host have ended. Of other hosts it knows the rank at the other end of the connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from .process_groups import context_of, default_group
from .runtime import runtime
from .work import PeerError

# The remedy where ranks make different calls, or wait in vain for one.
SAME_CALLS = (
    "let every rank make the same calls in the same order, with as many batches on each and none of the calls under "
    "«if rank == 0»"
)
_REMEDY = (
    "If that rank ran out of batches, give every rank the same number (drop_last=True, or a sampler that pads), or "
    "stop on all ranks together: docs/training.md shows a loop that ends on all ranks when one has no batch left. If "
    "it left this call out, as under «if rank == 0», make the call on every rank. Else its output, or the kernel's "
    "log, tells why it ended: start all ranks again from the newest checkpoint, as torchrun --max-restarts does by "
    "itself"
)

# What gloo, NCCL, torch's stores and control pipes say of a broken connection, which has no type of its own.
_BROKEN = re.compile(
    r"[Cc]onnection (was )?(closed|reset|refused|aborted)|Broken pipe|(Read|Write) error \[|got 0 bytes"
    r"|remote process exited|socket .*closed|process has ended"
)
# Seconds: a process closes its connections a moment before it is seen to have ended.
_PATIENCE, _PAUSE = 1.0, 0.02


class LostRank(RuntimeError):
    """The process of another rank has ended, the connection to it is broken, or a wait for it was in vain."""


def run_each(collectives: Iterable[Callable[[], object]]) -> None:
    """Run every collective, even after one fails, then raise the first error; ``LostRank`` at once. Communicates.

    The ranks of the next one wait for this rank whatever has happened in the one before.
    """
    failed: Exception | None = None
    try:
        for each in collectives:
            try:
                each()
            except LostRank:
                raise
            except Exception as error:  # of whatever type
                failed = failed or error
        if failed is not None:
            raise failed
    finally:
        failed = None  # its traceback holds this frame: a cycle would keep what it refers to alive


def ended_ranks(ranks: Sequence[int]) -> list[int]:
    """Return the global ranks, among ``ranks``, whose processes were on this host and have ended."""
    known = context_of(default_group()).processes
    return [rank for rank in ranks if rank in known and known[rank].has_ended()]


def lost_rank_error(error: BaseException, group: dist.ProcessGroup, what: object) -> LostRank | None:
    """Return an error that names lost ranks, or None if ``error`` is of no broken connection; takes up to a second."""
    if not dist.is_initialized() or isinstance(error, LostRank) or not _BROKEN.search(str(error)):
        return None
    members, deadline, pause = dist.get_process_group_ranks(group), runtime().now() + _PATIENCE, _PAUSE
    while not (ranks := ended_ranks(members)) and runtime().now() < deadline:
        runtime().sleep(pause)
        pause *= 2
    if ranks:
        lost = f"{listed_ranks(ranks)}, whose {'process has' if len(ranks) == 1 else 'processes have'} ended"
    else:
        peer = f"rank {error.rank}" if isinstance(error, PeerError) else "one of them"
        lost = (
            f"the connection to {peer}, whose end isn't seen from this host: it may have left its process group, or "
            "the network may be broken"
        )
    return LostRank(f"{what}: expected all ranks, lost {lost}. {_REMEDY}")


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text for a message, as in ``rank 3`` and ``ranks 0, 2, 5``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
