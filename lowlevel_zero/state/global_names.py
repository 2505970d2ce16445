"""Global names: one name for every tensor over all ranks, even if experts of several groups share a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ..communication.shard_group import ShardGroup

T = TypeVar("T")
Ranks = tuple[int, ...]


class Expert(NamedTuple):
    """A tensor that only some of the data-parallel ranks have: its name there, and their numbers in slice order."""

    name: str
    ranks: Ranks


def global_names(
    groups: Sequence[ShardGroup], number_of: Mapping[str, int]
) -> tuple[dict[str, str], dict[str, Expert]]:
    """Return dicts from own names to globally unique ones, and from these to experts. Communicates for several groups.

    What all ranks share has its own name, and so has an expert whose name is nobody else's, as where each rank's
    experts have the numbers of the whole model: who loads it finds it at any layout. Of experts that have a name in
    common the ones in the group of the lowest ranks are ``<name>@0``, the next ones ``<name>@1``, and so on.

    Args:
        groups: the shard groups; all ranks make the call.
        number_of: the shard groups' numbers by the names of this rank's tensors, and aliases of them.

    Raises:
        ValueError: something has such a name already; on all ranks.
    """
    place = {rank: at for at, rank in enumerate(groups[0].slice_ranks)}
    ranks_of = [tuple(place[rank] for rank in group.slice_ranks) for group in groups]
    own = {name: ranks_of[number] for name, number in number_of.items() if number}
    holders: dict[str, list[Ranks]] = {}
    for name, ranks in (each for ranks_own in from_all_ranks(groups, own) for each in ranks_own.items()):
        if ranks not in holders.setdefault(name, []):
            holders[name].append(ranks)
    names, experts = {name: name for name in number_of}, {}
    for name, held in holders.items():
        for at, ranks in enumerate(held):
            tagged = name if len(held) == 1 else f"{name}@{at}"
            if tagged != name and (tagged in holders or tagged in number_of):
                raise ValueError(
                    f"{tagged}: expected another name, since {name} of {len(held)} groups' experts would be told apart "
                    "by it: call it something else"
                )
            experts[tagged] = Expert(name, ranks)
            if own.get(name) == ranks:
                names[name] = tagged
    return names, experts


def with_experts(shared: Sequence[str], others: Iterable[Iterable[str]]) -> list[str]:
    """Return ``shared`` with all further names of ``others``, each before the shared name that follows it there."""
    before: dict[str | None, list[str]] = {name: [] for name in (*shared, None)}
    for names in others:
        experts: list[str] = []
        for name in (*names, None):
            if name is None or name in before:
                before[name] += experts
                experts = []
            else:
                experts.append(name)
    return list(dict.fromkeys(name for at in before for name in (*before[at], at) if name is not None))


def from_all_ranks(groups: Sequence[ShardGroup], experts: T) -> list[T]:
    """Return every rank's ``experts``. Communicates; with one shard group it returns an empty list at once."""
    return [] if len(groups) == 1 else groups[0].all_gather_object(experts)
