"""One optimizer, or several that train a model together, and their schedulers, by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from ..communication.shard_group import ShardGroup
from ..optimizer import LowLevelZeroOptimizer

# The callers' argument; and the name of an optimizer in a checkpoint: its place in a list, its key in a dict, or, the
# only one, None.
Optimizers: TypeAlias = LowLevelZeroOptimizer | Sequence[LowLevelZeroOptimizer] | Mapping[str, LowLevelZeroOptimizer]
Name: TypeAlias = int | str | None


def by_name(given: Any) -> dict[Name, object]:
    """Return optimizers or schedulers by name, sorted alike on all ranks; a list of one counts as that one."""
    if isinstance(given, Mapping):
        return {name: given[name] for name in sorted(given, key=str)}
    if isinstance(given, (list, tuple)) and len(given) != 1:
        return dict(enumerate(given))
    return {None: given[0] if isinstance(given, (list, tuple)) else given}


def group_of(given: Any) -> ShardGroup:
    """Return the shard group of the first ``LowLevelZeroOptimizer`` in ``given``; ``TypeError`` if there is none."""
    ours = [each for each in by_name(given).values() if isinstance(each, LowLevelZeroOptimizer)]
    if not ours:
        raise _not_ours("optimizer", given)
    return ours[0].shard_group


def has_written(optimizers: Iterable[LowLevelZeroOptimizer]) -> bool:
    """Return whether this rank's caller has written one of their parameters since the ranks agreed last."""
    return any(record.writes for each in optimizers for record in each.sharded_parameters)


def check_arguments(
    model: object, optimizer: Any, scheduler: Any, rank_state: object
) -> tuple[dict[Name, LowLevelZeroOptimizer], dict[Name, Stateful | None]]:
    """Check the arguments of a save or a load, and return the optimizers and the schedulers by name."""
    optimizers = _optimizers(model, optimizer)
    if not (rank_state is None or isinstance(rank_state, dict)):
        raise TypeError(
            f"rank_state: expected a dict of what this rank keeps, got {type(rank_state).__name__}: pass one, as in "
            "rank_state={'sampler': sampler.state_dict()}"
        )
    return optimizers, _schedulers(scheduler, optimizers)


def _optimizers(model: object, given: Any) -> dict[Name, LowLevelZeroOptimizer]:
    """Check that a model's optimizers are this package's and over the same ranks, and return them by name.

    Raises:
        TypeError: something isn't a module, an optimizer of this package's, or its name.
        ValueError: they aren't of the same ranks.
    """
    optimizers: dict[Name, LowLevelZeroOptimizer] = {}
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: expected a torch.nn.Module, got {type(model).__name__}: pass the module that was trained"
        )
    for name, optimizer in by_name(given).items():
        if isinstance(given, Mapping) and not isinstance(name, str):
            raise TypeError(
                f"optimizer: expected a dict of optimizers by name, got a {type(name).__name__} as key, {name!r:.40}"
            )
        if not isinstance(optimizer, LowLevelZeroOptimizer):
            raise _not_ours(called(name), optimizer)
        optimizers[name] = optimizer
    if len({tuple(dist.get_process_group_ranks(each.shard_group.group)) for each in optimizers.values()}) > 1:
        raise ValueError(
            "optimizer: expected optimizers over the same ranks, got optimizers over different ones: save each to a "
            "path of its own"
        )
    return optimizers


def _schedulers(scheduler: Any, optimizers: Collection[Name]) -> dict[Name, Stateful | None]:
    """Return each optimizer's scheduler, or None; ``ValueError`` unless named as the optimizers are."""
    if scheduler is None:
        return dict.fromkeys(optimizers)
    found = by_name(scheduler)
    if not (isinstance(scheduler, Mapping) and found.keys() <= set(optimizers)):
        remedy = "give each optimizer's own, or None for one without"
        check_names("scheduler", found, optimizers, "as optimizer is", remedy)
    return {name: cast("Stateful | None", found.get(name)) for name in optimizers}


def check_names(kind: str, got: Collection[Name], expected: Collection[Name], why: str, remedy: str) -> None:
    """Raise ``ValueError`` unless optimizers or schedulers have the ``expected`` names."""
    if set(got) != set(expected):
        raise ValueError(f"{kind}: expected {names_text(expected, kind)}, {why}, got {names_text(got, kind)}: {remedy}")


def called(name: Name, kind: str = "optimizer") -> str:
    """Return the name of an optimizer, or of its scheduler, for messages."""
    return kind if name is None else f"{kind}[{name!r}]"


def names_text(names: Collection[Name], kind: str) -> str:
    """Return the number and names of optimizers or schedulers, for messages."""
    if set(names) == {None}:
        return f"one {kind}"
    if all(isinstance(name, int) for name in names):
        return f"a list of {len(names)} {kind}s"
    return f"a dict of {kind}s by {', '.join(map(repr, names))}"


def _not_ours(name: str, got: object) -> TypeError:
    return TypeError(
        f"{name}: expected a LowLevelZeroOptimizer, got {type(got).__name__}: wrap it first, or use torch.save or "
        "torch.distributed.checkpoint for a plain one"
    )
