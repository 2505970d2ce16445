"""Finds the optimizers that are alive, and retires those whose parameters a new optimizer takes over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from typing import TypeAlias
from weakref import WeakValueDictionary

from torch import Tensor
from torch.distributed import get_process_group_ranks as ranks_of

from .bookkeeping.parameter_store import first_slices
from .bookkeeping.sharded_parameter import ShardedParameter
from .bookkeeping.shown_gradients import hide_gradients
from .communication.agreement import Call, raised_by_all, together
from .communication.failed_ranks import listed_ranks
from .communication.shard_group import ShardGroup
from .sharded_optimizer import ShardedOptimizer

_Key: TypeAlias = tuple[str, int]

_made = count()
_alive: WeakValueDictionary[int, ShardedOptimizer] = WeakValueDictionary()


def register(optimizer: ShardedOptimizer) -> None:
    """Add a constructed ``optimizer`` to the list that ``alive`` returns."""
    _alive[next(_made)] = optimizer


def alive() -> list[ShardedOptimizer]:
    """Return this process's optimizers that are referenced and not retired, in the order of their construction."""
    return [each for each in _alive.values() if not each.is_retired]


def records_of(tensors: Iterable[Tensor]) -> dict[ShardedOptimizer, list[ShardedParameter]]:
    """Group the records of parameters, or of slices, by the optimizer that trains them. Doesn't communicate.

    Optimizers are in the order of their construction, and records in the optimizer's own, which all ranks share.
    Tensors that no optimizer trains are left out.
    """
    sought = list(tensors)
    held: dict[ShardedOptimizer, list[ShardedParameter]] = {}
    for optimizer in alive():
        found = {record for each in sought if (record := optimizer.sharded_parameters.find(each)) is not None}
        if found:
            held[optimizer] = sorted(found, key=lambda record: (record.shard_group, record.index))
    return held


def refuse_wrapped(optimizer: object) -> None:
    """Raise ``TypeError`` if ``optimizer`` is a ``ShardedOptimizer``, or if its param groups hold slices of another."""
    groups = getattr(optimizer, "param_groups", ())
    first = (p for group in groups for p in group["params"][:1])
    held = set(map(id, chain.from_iterable(group["params"] for group in groups)))
    slices = chain.from_iterable(each.sharded_parameters.slices for each in alive())
    trained = not all(held.isdisjoint(map(id, members)) for members in slices)
    if isinstance(optimizer, ShardedOptimizer) or trained or any(p in first_slices for p in first):
        raise TypeError(
            f"optimizer: expected a plain optimizer, got {type(optimizer).__name__} that is sharded already, or shards "
            "another one: wrap each optimizer once, and make a new one from the model's parameters to train it again"
        )


def retire_former(params: Iterable[Tensor], names: Mapping[Tensor, str], group: ShardGroup) -> None:
    """Retire the optimizers that train one of ``params``. Communicates: every rank of ``group`` calls it.

    Ranks collect garbage at different times, so one rank may still have an optimizer that is gone on another. They
    finish together what is under way of each one that all of them have, and leave what others have under way to travel,
    as when an optimizer is deleted. They also find out whether a rank has another optimizer over the same process
    group, which is not retired: from now on several share it. ``names``: of the parameters, for a retired one's errors.

    Raises:
        ValueError (on all ranks, before anything is changed): another rank has one of them, and would leave it be.
    """
    former = {other: names.get(records[0].p, records[0].name) for other, records in records_of(params).items()}
    others = [each for each in alive() if each not in former]
    groups = [each.shard_group for each in others]
    beside = [each for each in groups if each is not group and each.context is group.context]
    retires, shares = group.all_reduce_max([len(former), len(beside)])
    reachable = _by_key(former, group)
    taken = {key: former[other] for key, other in reachable.items()}
    known = group.all_gather_object((taken, list(_by_key(others, group)))) if retires else []
    _check_taken(known, group)
    group.context.is_shared |= shares > 0
    if not retires:
        return
    with together(group, "finish what is under way of a former optimizer"):
        for key in known[0][0]:
            if all(key in own for own, _ in known):
                for each in reachable[key].sharded_groups:
                    each.reducer.discard(Call("zero_grad"))
    for other, name in former.items():
        _retire(other, name)


def _by_key(optimizers: Iterable[ShardedOptimizer], group: ShardGroup) -> dict[_Key, ShardedOptimizer]:
    """Return the ``optimizers`` over the ranks of ``group``, each under a key that is the same on all of these."""
    found: dict[_Key, ShardedOptimizer] = {}
    members = set(ranks_of(group.group))
    for each in optimizers:
        ranks = each.shard_group
        if ranks.context.is_alive and set(ranks_of(ranks.group)) == members:
            found[ranks.group.group_name, ranks.number] = each
    return found


def _check_taken(known: Sequence[tuple[Mapping[_Key, str], Sequence[_Key]]], group: ShardGroup) -> None:
    """Raise ``ValueError`` if one rank takes the parameters of an optimizer that another leaves be; all ranks call it.

    ``known``: for each rank, the former ones, each with the name of a parameter, and its other optimizers.
    """
    ranks = ranks_of(group.group)
    for key, name in chain.from_iterable(taken.items() for taken, _ in known):
        taking = [rank for rank, (taken, _) in zip(ranks, known, strict=True) if key in taken]
        leaving = [rank for rank, (_, left) in zip(ranks, known, strict=True) if key in left]
        if leaving:
            raise raised_by_all(
                ValueError(
                    "expected the parameters of a former optimizer on every rank, or on none, got those of the one "
                    f"that trains {name} on {listed_ranks(taking)}, and on {listed_ranks(leaving)} others, which leave "
                    "it be: pass the parameters of the same model on all ranks"
                ),
                group,
            )


def _retire(optimizer: ShardedOptimizer, name: str) -> None:
    """Remove all that ``optimizer`` and the one it wraps hold; every further use raises. Doesn't communicate."""
    let_go(optimizer)
    for group in optimizer.optim.param_groups:
        group["params"] = []
    optimizer.optim.state.clear()
    optimizer.__dict__.clear()
    optimizer.__dict__["_retired"] = (
        f"expected the optimizer that trains {name}, got a former one: a {type(optimizer).__name__} that was "
        "constructed later has taken its parameters, without their gradients and states. Call that one, and make "
        "schedulers from it; to go on with the former one's state, take its state_dict() before constructing the next"
    )


def let_go(optimizer: ShardedOptimizer) -> None:
    """Remove an optimizer's hooks and sharded gradients from its parameters, and wait for gathers under way.

    Unreduced gradients stay in ``p.grad`` unless the loss was scaled. Reductions under way are left to travel.
    """
    for each in optimizer.sharded_groups:
        each.reducer.remove_hooks()
        hide_gradients(each.records)
    for record in optimizer.sharded_parameters if optimizer.scaler is not None else ():
        record.p.grad = None
    if not optimizer.shard_group.progress.is_forked:
        with suppress(RuntimeError):  # other ranks have gone
            optimizer.finish_gathers()
        for group in optimizer.sharded_parameters.shard_groups:
            group.leave()
    optimizer.streams.join()  # before the memory of sums on the stream beside is used by others
    optimizer.sharded_groups.clear()  # its members refer to the list: such a cycle would wait for the garbage collector
