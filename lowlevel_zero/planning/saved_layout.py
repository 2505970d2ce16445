"""The layout of a checkpoint's parameters over the ranks that saved it, or over any other number of ranks.

Buckets are a run's, which learns them: ``layout_of(optimizer)`` tells them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..checkpoint.objects import Settings
from ..checkpoint.optimizers import Name
from ..checkpoint.saved import SavedCheckpoint
from ..layout.records import Layout, ParameterLayout
from ..optim.quantised import is_scale
from ..options import Communication, ZeroOptions
from ..partition import BY_ELEMENTS, BY_MATRICES, Choice, Split, splits_of
from ..state.global_names import Ranks
from ..state.loading import MASTER
from .memory import as_dtype


def layout_in(checkpoint: SavedCheckpoint, world_size: int | None = None) -> Layout:
    """Return the layout of a checkpoint's parameters over ``world_size`` ranks, without buckets. Reads no tensor.

    ``world_size`` None: as many ranks as shared it when it was saved (replicas aside).

    Raises:
        ValueError: another number of ranks for experts.
    """
    parameters = [p for name in checkpoint.objects.optimizers for p in _parameters(checkpoint, name, world_size)]
    return Layout(0, checkpoint.manifest.stage, tuple(parameters), ())


def _parameters(checkpoint: SavedCheckpoint, optimizer: Name, world_size: int | None) -> list[ParameterLayout]:
    """Return the layouts of one optimizer's parameters, grouped by the ranks that share them."""
    settings = checkpoint.objects.optimizers[optimizer]
    everyone, experts = _ranks(checkpoint, settings, world_size), checkpoint.manifest.experts
    names_of: dict[Ranks, list[str]] = {}
    for name in checkpoint.trained(optimizer):
        names_of.setdefault(experts[name].ranks if name in experts else everyone, []).append(name)
    options, as_saved = _options(settings), len(everyone) == settings["slices"]
    return [
        _parameter(checkpoint, name, ranks, options, split)
        for ranks, names in names_of.items()
        for name, split in zip(names, _splits(checkpoint, settings, names, len(ranks), as_saved), strict=True)
    ]


def _ranks(checkpoint: SavedCheckpoint, settings: Settings, world_size: int | None) -> Ranks:
    """Return ``world_size`` ranks, by default as many as at the save; ``ValueError`` for others with experts."""
    saved_by = settings["slices"]
    size = saved_by if world_size is None else world_size
    if checkpoint.manifest.experts and size != saved_by:
        raise ValueError(
            f"world size: expected {saved_by}, which saved it, got {size}: by how many of these each expert would be "
            "shared isn't known"
        )
    return tuple(range(size))


def _options(settings: Settings) -> ZeroOptions:
    """Return the options of the run that the layout depends on."""
    options = settings["options"]
    dtype = as_dtype("communication_dtype", options["communication_dtype"])
    travel = Communication(dtype=dtype, fp8=options["fp8_communication"])
    places = {name: options[name] for name in ("master_weights", "cpu_offload")}
    return ZeroOptions(settings["stage"], communication=travel, **places)


def _splits(
    checkpoint: SavedCheckpoint, settings: Settings, names: Sequence[str], world_size: int, as_saved: bool
) -> list[Split]:
    """Return the splits of parameters ``as_saved``, or as another number of ranks would choose them.

    (Blocks of 8-bit states may make the slices of other ranks larger: only the optimizer knows these blocks.)
    """
    saved = [settings["options"]["splits"].get(name, (BY_ELEMENTS, None, 1, ())) for name in names]
    chosen = [
        Choice(
            (entry := checkpoint.manifest.tensors[name]).numel,
            by,
            tuple(costs),
            multiple if as_saved else 1,
            tuple(entry.shape) if by == BY_MATRICES and len(entry.shape) == 3 else (),
        )
        for name, (by, _, multiple, costs) in zip(names, saved, strict=True)
    ]
    return [
        replace(split, owner=owner) if as_saved and owner is not None else split
        for split, (_, owner, _, _) in zip(splits_of(chosen, world_size), saved, strict=True)
    ]


def _parameter(
    checkpoint: SavedCheckpoint, name: str, ranks: Ranks, options: ZeroOptions, split: Split
) -> ParameterLayout:
    """Return the layout of one saved parameter, with the bytes of a rank's part of its saved states."""
    entry, stored = checkpoint.manifest.tensors[name], checkpoint.states.get(name, {})
    states = 0
    for key, value in stored.items():
        if split.owner is None and is_scale(key, stored):
            states += -(-value.numel() // split.world_size) * value.dtype.itemsize
        elif split.owner is None and value.shape == entry.shape:
            states += split.slice_size * value.dtype.itemsize if key != MASTER else 0
        elif key != MASTER:
            states += value.nbytes
    shape, dtype = tuple(entry.shape), entry.torch_dtype
    return ParameterLayout(name, shape, dtype, entry.group or 0, ranks, split, options, states)
