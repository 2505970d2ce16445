"""Whether all ranks of a process group see each other's memory, as the processes of one host do: all alike, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .backends.backend import HostBackend

if TYPE_CHECKING:
    from .backends.memory_pool import Memory, Pool

T = TypeVar("T")


def open_pool(rank: int, size: int, timeout: float, ranks: HostBackend) -> Pool | str:
    """Memory that every rank can see every other's of, else why not; alike on all, which all call it."""
    own: Memory | str = _or_why_not(lambda: _memory_pool().Memory(size))
    addresses = ranks.all_gather_object(own if isinstance(own, str) else own.address)
    refusals = _refusals(addresses)
    if isinstance(own, str) or refusals:
        return refusals
    pool: Pool | str = _or_why_not(lambda: _memory_pool().Pool(own, rank, addresses, timeout))
    return _refusals(ranks.all_gather_object(pool if isinstance(pool, str) else None)) or pool


def _memory_pool() -> Any:
    """The module, which needs what only Linux has."""
    from .backends import memory_pool

    return memory_pool


def _or_why_not(make: Callable[[], T]) -> T | str:
    try:
        return make()
    except (ImportError, AttributeError) as error:
        return f"not on its system: {error}"
    except (OSError, ValueError) as error:  # other hosts, containers or users
        return str(error)


def _refusals(answers: list[object]) -> str:
    """Which ranks have said that they can't, and why; empty: none has."""
    return "; ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str))
