"""Who owns what of a checkpoint: the layout of the run that saved it, or at any other number of ranks."""

from __future__ import annotations

import torch

from ...bookkeeping.bucket_plan import Item, completed, make_plan
from ...bookkeeping.sharding import SCALARS
from ...checkpoint.manifest import SavedTensor
from ...checkpoint.objects import Settings
from ...checkpoint.whole import StoredTensor, WholeCheckpoint
from ...options import ZeroOptions
from ...partition import EvenSplit, alignment_of
from ...state.global_names import Ranks
from ...state.whole import MASTER
from ..layout import Layout, Owned, Shared, joined, layout_of
from ..memory import as_dtype


def layout_in(checkpoint: WholeCheckpoint, world_size: int | None = None, bucket_size: int | None = None) -> Layout:
    """The layout after loading it; no tensor is read, and no process group needed.

    Args:
        world_size: ranks; None: as many as shared it when it was saved (replicas aside).
        bucket_size: elements of a bucket; None: the run's, where the checkpoint tells, else the default.

    Raises:
        ValueError: fewer than one rank, or one element; another number of ranks for experts.
    """
    parts = [_layout_of(checkpoint, each, world_size, bucket_size) for each in checkpoint.objects.optimizers.values()]
    return joined(parts)


def _layout_of(
    checkpoint: WholeCheckpoint, settings: Settings, world_size: int | None, bucket_size: int | None
) -> Layout:
    """That of one optimizer."""
    saved_by = settings.get("slices", checkpoint.manifest.world_size)
    size = saved_by if world_size is None else world_size
    if size < 1:
        raise ValueError(f"world size: expected at least 1 rank, got {size}")
    experts = checkpoint.manifest.experts
    if experts and size != saved_by:
        raise ValueError(
            f"world size: expected {saved_by}, which saved it, got {size}: by how many of these each expert would be "
            "shared isn't known"
        )
    options = _options(settings, settings.get("stage", checkpoint.manifest.stage), bucket_size)
    by_ranks: dict[Ranks, list[str]] = {}
    for name in checkpoint.trained(settings):
        by_ranks.setdefault(experts[name].ranks if name in experts else tuple(range(size)), []).append(name)
    shared = [_shared(checkpoint, ranks, names, _order(settings, names), options) for ranks, names in by_ranks.items()]
    return layout_of(shared, options)


def _shared(
    checkpoint: WholeCheckpoint, ranks: Ranks, names: list[str], order: list[int], options: ZeroOptions
) -> Shared:
    owned = [_owned(checkpoint, name, len(ranks), options) for name in names]
    return Shared(ranks, owned, make_plan([_item(each, options) for each in owned], order, options.reduce_bucket_size))


def _options(settings: Settings, stage: int, bucket_size: int | None) -> ZeroOptions:
    """Those of the run; defaults where the checkpoint, an older one, doesn't tell."""
    told = dict(settings.get("options", {}))
    told["communication_dtype"] = as_dtype("communication_dtype", told.get("communication_dtype"))
    saved_size = told.pop("bucket_size", ZeroOptions.reduce_bucket_size)
    told["reduce_bucket_size"] = saved_size if bucket_size is None else bucket_size
    return ZeroOptions(partition_grad=stage == 2, **told)


def _order(settings: Settings, names: list[str]) -> list[int]:
    """In which buckets are filled: as the run had learnt, as far as it had."""
    plans = [settings["plan"], *settings.get("other_plans", ())]
    plan = next((plan for plan in plans if plan is not None and set(plan["order"]) == set(names)), None)
    if plan is None:
        return list(range(len(names)))[::-1]
    index = {name: at for at, name in enumerate(names)}
    order = [index[name] for name in plan["order"]]
    forecasts = bool(plan["forecast"] and plan["forecast"][0])
    return completed(order[: plan["came"]], len(order)) if forecasts else order


def _item(owned: Owned, options: ZeroOptions) -> Item:
    dtype, fp8 = owned.communication_dtype, options.in_fp8(owned.split.numel, owned.split.world_size)
    alignment = alignment_of(dtype, options.pad_buckets_for_high_nccl_busbw)
    return Item(owned.split, (owned.dtype, dtype, fp8), owned.dtype == dtype, fp8, alignment)


def _owned(checkpoint: WholeCheckpoint, name: str, world_size: int, options: ZeroOptions) -> Owned:
    entry = checkpoint.manifest.tensors[name]
    split, dtype = EvenSplit(entry.numel, world_size), entry.torch_dtype
    master = torch.promote_types(dtype, torch.float32) if options.master_weights else dtype
    copied = options.cpu_offload or master != dtype or options.in_fp8(entry.numel, world_size)
    states = {key: value for key, value in checkpoint.state(name).items() if isinstance(value, StoredTensor)}
    return Owned(
        name=name,
        shape=entry.shape,
        dtype=dtype,
        communication_dtype=options.communication_dtype or dtype,
        split=split,
        group=entry.group or 0,
        p32_bytes=split.slice_size * master.itemsize if copied else 0,
        state_bytes=sum(_bytes(key, value, entry, split) for key, value in states.items() if key != MASTER),
    )


def _bytes(key: str, value: StoredTensor, entry: SavedTensor, split: EvenSplit) -> int:
    """Of one rank's slice, or of what isn't sliced all."""
    sliced = key not in SCALARS and value.shape == entry.shape
    return split.slice_size * value.dtype.itemsize if sliced else value.nbytes
