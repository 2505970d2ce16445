"""Monitored barrier: all ranks tell each other that they have come, through the store, before they communicate.

A collective that one rank alone calls hangs until the process group's timeout, or ends all. This one says who didn't
come, and a later one finds everything as if nothing had been. It goes in *attempts*. Each attempt has one outcome that
is written once, by compare-and-set: by the last rank to arrive, or with the reason why it is in vain by one that has
waited too long. So all that take part see the same outcome, however close the last arrival and the deadline are. An
attempt that is over stays so: who comes later finds it so, and starts the next one.

Who has come is a few numbers with a bit a rank: so a rank asks the store for little however many there are.
"""

from __future__ import annotations

import json
import time
from typing import Any, TypeAlias

import torch.distributed as dist

from .failed_ranks import explained, listed_ranks, lost, lost_rank_error
from .process_groups import context_of, store_of, timeout_of

_FIRST_LOOK, _SLOWEST_LOOK = 0.002, 0.5  # seconds between looks at the store
_SHARE = 0.25  # of what this rank has waited, between two looks
_BITS = 62  # ranks in one of the store's numbers

# Empty: all have come; else which ranks are "lost", or, in words, who has come and who is "missing".
_Outcome: TypeAlias = "dict[str, Any]"


def monitored_barrier(group: dist.ProcessGroup, name: str, timeout: float | None = None) -> None:
    """Return when every rank of ``group`` has called this with the same ``name``.

    Args:
        group: the ranks that are to come.
        name: what they come for, as in ``"save_checkpoint"``.
        timeout: seconds to wait for the last; None: as long as a collective of ``group`` may take.

    Raises:
        TimeoutError: somebody didn't come. Raised by all that did, once the first of them has waited for
            ``timeout`` seconds; the message names them. A later call finds everything as if nothing had been.
        LostRank: a rank's process has ended.
    """
    if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return
    try:
        store = _enter(group, name)
        outcome = _wait(store, group, timeout_of(group) if timeout is None else timeout)
    except RuntimeError as error:
        named = explained(error, group, name)
        if named is None:
            raise
        raise named from error
    context_of(group).barriers[name] += 1
    if "lost" in outcome:
        raise lost_rank_error(outcome["lost"], name)
    if "missing" in outcome:
        raise TimeoutError(f"{name}: expected {outcome['missing']}: call it on every rank")


def _enter(group: dist.ProcessGroup, name: str) -> Any:
    """The store of the first attempt that this rank doesn't know, and finds not, to be over."""
    attempts = context_of(group).barriers
    while True:
        store = store_of(group, f"barrier/{name}/{attempts[name]}")
        if not store.check(["outcome"]):
            return store
        attempts[name] += 1


def _wait(store: Any, group: dist.ProcessGroup, timeout: float) -> _Outcome:
    """Arrive, and wait until it is settled, or settle it: all have come, or it is in vain."""
    ranks, (word, bit) = dist.get_process_group_ranks(group), divmod(dist.get_rank(group), _BITS)
    store.add(f"came/{word}", 1 << bit)
    if store.add("count", 1) == len(ranks):
        return _settle(store, {})
    began = time.monotonic()
    while not store.check(["outcome"]):
        waited, gone = time.monotonic() - began, lost(ranks)
        if gone:
            return _settle(store, {"lost": gone})
        if waited >= timeout:
            return _settle(store, {"missing": _who_came(store, len(ranks), timeout)})
        time.sleep(min(max(_SHARE * waited, _FIRST_LOOK), _SLOWEST_LOOK, max(timeout - waited, _FIRST_LOOK)))
    return _settle(store, {})


def _settle(store: Any, outcome: _Outcome) -> _Outcome:
    """Settle the attempt unless it has been; what was settled."""
    settled: _Outcome = json.loads(store.compare_set("outcome", "", json.dumps(outcome)))
    return settled


def _who_came(store: Any, size: int, timeout: float) -> str:
    words = [int(store.add(f"came/{word}", 0)) for word in range(-(-size // _BITS))]
    by_arrival: list[list[int]] = [[], []]
    for rank in range(size):
        by_arrival[words[rank // _BITS] >> rank % _BITS & 1].append(rank)
    missing, came = map(listed_ranks, by_arrival)
    return f"all {size} ranks, got {came} and, within {timeout:g} seconds, not {missing}"
