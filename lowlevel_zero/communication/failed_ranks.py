"""Failed ranks: which processes have ended, for the error of the ranks that are left waiting for them.

Ranks tell each other of their processes when they first meet. When a collective breaks off, the others look which of
the processes on their host are gone, and leave a note of what they have found. A rank that breaks off soon ends itself,
and breaks off further ones: its note says that it wasn't the first. Ranks of other hosts look for the first note of
all. So nobody asks the store about each rank, at a time when all ask it.

A rank that leaves without an error, since it has run out of batches, say, leaves a note too, if it is the first.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from .backends.backend import PeerError
from .process_groups import context_of, default_group, store_of
from .processes import Process
from .runtime import runtime

_REMEDY = (
    "What it has printed, or the kernel's log, may say why. Start all ranks again from the newest checkpoint, as "
    "torchrun --max-restarts does by itself"
)

_UNEVEN = (
    "uneven numbers of batches? Give every rank as many (drop_last=True, or a sampler that pads), or end together: "
    "docs/training.md shows a loop that ends on all ranks when one has no batch left"
)

# A broken connection, as gloo, NCCL, torch's stores and control pipes tell of it: nobody has a type for it.
_BROKEN = re.compile(
    r"[Cc]onnection (was )?(closed|reset|refused|aborted)|Broken pipe|(Read|Write) error \[|got 0 bytes"
    r"|remote process exited|socket .*closed|process has ended"
)
# Seconds: a process closes its connections a moment before it is seen to have ended.
_PATIENCE, _PAUSE = 1.0, 0.02

_FIRST_NOTE = "the first note"
_FIRST_TO_LEAVE = "the first rank that left without an error"


class LostRank(RuntimeError):
    """The process of another rank has ended: what needs all ranks can't be done any more."""


def know(processes: Mapping[int, Process]) -> None:
    """Learn the processes of some ranks, by global rank; from now on this rank tells when it leaves."""
    known = context_of(default_group()).processes
    if not known:
        leave = partial(_store().compare_set, _FIRST_TO_LEAVE, "", str(dist.get_rank()))
        runtime().when_left(default_group(), leave)
    known.update(processes)


def lost(ranks: Sequence[int]) -> list[int]:
    """Those of the global ``ranks`` that are seen to have ended, or, where others' end has ended them, those others.

    Asks the store about those alone whose process has ended on this host.
    """
    known = context_of(default_group()).processes
    ended = [rank for rank in ranks if rank in known and known[rank].has_ended()]
    found = (_noted(_note_of(rank), [rank]) for rank in ended)  # only now: a note is left before the end
    return sorted({rank for ranks in found for rank in ranks})


def explained(error: BaseException, group: dist.ProcessGroup, what: object) -> LostRank | None:
    """An error that says whom this rank of ``group`` has lost in ``what``; None: ``error`` is of another kind."""
    if not dist.is_initialized() or isinstance(error, LostRank) or not _BROKEN.search(str(error)):
        return None
    peer = [error.rank] if isinstance(error, PeerError) else []
    try:
        return lost_rank_error(_lost_at_last(dist.get_process_group_ranks(group)), what, peer)
    except RuntimeError:
        return LostRank(
            f"{what}: expected all ranks, lost the connection to one of them, and to the store: the process that holds "
            f"it has ended, rank 0's if torchrun's doesn't. If it has ended normally: {_UNEVEN}. Else: {_REMEDY}"
        )


def lost_rank_error(ranks: Sequence[int], what: object, peer: Sequence[int] = ()) -> LostRank:
    """The error with which this rank ends, having lost ``ranks`` in ``what``; leaves the note that it does.

    ``peer``: to whom the connection was, if that is known.
    """
    if not ranks:  # a peer that broke off itself has left a note, whoever sees its end
        peer = sorted({first for rank in peer for first in _noted(_note_of(rank), [rank])})
    note, store = json.dumps(list(ranks or peer)), _store()
    store.set(_note_of(dist.get_rank()), note)
    left = store.get(_FIRST_TO_LEAVE).decode() if store.check([_FIRST_TO_LEAVE]) else ""
    if left and (not ranks or int(left) in ranks):
        return LostRank(f"{what}: expected all ranks, but rank {left} has ended normally: {_UNEVEN}")
    if ranks:
        store.compare_set(_FIRST_NOTE, "", note)
        whom = f"{listed_ranks(ranks)}, whose {'process has' if len(ranks) == 1 else 'processes have'} ended"
    else:
        other = listed_ranks(peer) if peer else "one of them"
        whom = f"the connection to {other}, whose end isn't seen from this host, or the network is broken"
    return LostRank(f"{what}: expected all ranks, lost {whom}. {_REMEDY}")


def listed_ranks(ranks: Sequence[int]) -> str:
    """Of one or more, in words."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _lost_at_last(ranks: Sequence[int]) -> list[int]:
    """Whom the connection was lost to: seen from here, or by who was the first to notice; empty: nobody sees it."""
    deadline, pause = runtime().now() + _PATIENCE, _PAUSE
    while True:
        found: list[int] = lost(ranks) or _noted(_FIRST_NOTE, [])
        if found or runtime().now() >= deadline:
            return found
        runtime().sleep(pause)
        pause *= 2


def _store() -> Any:
    # torchrun may have kept the store from an earlier start.
    return store_of(default_group(), f"lost/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")


def _note_of(rank: int) -> str:
    return f"note of {rank}"


def _noted(key: str, otherwise: list[int]) -> list[int]:
    store = _store()
    noted: list[int] = json.loads(store.get(key)) if store.check([key]) else otherwise
    return noted
