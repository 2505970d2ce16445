"""The layout of a checkpoint's parameters over the ranks that saved it, or over any other number of ranks.

Buckets are a run's, which learns them: ``optimizer.layout()`` tells them.
"""

from __future__ import annotations

from ..bookkeeping.sharding import SCALARS
from ..checkpoint.objects import Settings
from ..checkpoint.saved import SavedCheckpoint
from ..layout.records import Layout, ParameterLayout, parameter_layout
from ..options import ZeroOptions
from ..partition import EvenSplit
from ..state.global_names import Ranks
from ..state.loading import MASTER
from .memory import as_dtype


def layout_in(checkpoint: SavedCheckpoint, world_size: int | None = None) -> Layout:
    """Return the layout after loading, of all optimizers' parameters, without reading tensors or a process group.

    Args:
        world_size: ranks; None: as many as shared it when it was saved (replicas aside).

    Raises:
        ValueError: fewer than one rank; another number of ranks for experts.
    """
    optimizers = checkpoint.objects.optimizers.values()
    parameters = [p for settings in optimizers for p in _parameters(checkpoint, settings, world_size)]
    return Layout(None, checkpoint.manifest.stage, tuple(parameters), ())


def _parameters(checkpoint: SavedCheckpoint, settings: Settings, world_size: int | None) -> list[ParameterLayout]:
    """Return the layouts of one optimizer's parameters; the ones that all ranks share come first."""
    everyone, experts = _ranks(checkpoint, settings, world_size), checkpoint.manifest.experts
    options = _options(settings, settings["stage"])
    ranks_of = {name: experts[name].ranks if name in experts else everyone for name in checkpoint.trained(settings)}
    order = list(dict.fromkeys(ranks_of.values()))
    names = sorted(ranks_of, key=lambda name: order.index(ranks_of[name]))
    return [_parameter(checkpoint, name, ranks_of[name], options) for name in names]


def _ranks(checkpoint: SavedCheckpoint, settings: Settings, world_size: int | None) -> Ranks:
    saved_by = settings["slices"]
    size = saved_by if world_size is None else world_size
    if size < 1:
        raise ValueError(f"world size: expected at least 1 rank, got {size}")
    if checkpoint.manifest.experts and size != saved_by:
        raise ValueError(
            f"world size: expected {saved_by}, which saved it, got {size}: by how many of these each expert would be "
            "shared isn't known"
        )
    return tuple(range(size))


def _options(settings: Settings, stage: int) -> ZeroOptions:
    """Return the options of the run that the layout depends on."""
    options = settings["options"]
    communication_dtype = as_dtype("communication_dtype", options["communication_dtype"])
    return ZeroOptions(partition_grad=stage == 2, **{**options, "communication_dtype": communication_dtype})


def _parameter(checkpoint: SavedCheckpoint, name: str, ranks: Ranks, options: ZeroOptions) -> ParameterLayout:
    entry = checkpoint.manifest.tensors[name]
    split = EvenSplit(entry.numel, len(ranks), options.slice_multiple)
    states = 0
    for key, value in checkpoint.states.get(name, {}).items():
        if key != MASTER:
            sliced = key not in SCALARS and value.shape == entry.shape
            states += split.slice_size * value.dtype.itemsize if sliced else value.nbytes
    shape, dtype = tuple(entry.shape), entry.torch_dtype
    return parameter_layout(name, shape, dtype, entry.group or 0, ranks, split, options, states)
