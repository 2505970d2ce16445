"""The layout of a planned run: splits and bucket plan are made by the optimizer's own functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..bookkeeping.bucket_plan import Item, make_plan
from ..bookkeeping.gather_store import in_parts
from ..communication.backends.backend import DEVICE_BUCKET, HOST_BUCKET
from ..communication.backends.memory_pool import block_bytes
from ..communication.backends.native import Native
from ..communication.backends.shared_memory import READ_WHOLE, SharedMemory
from ..communication.fp8 import encoded_size
from ..layout.records import BucketLayout, Layout, ParameterLayout, with_buckets
from ..optim.quantised import slice_multiple
from ..optim.splits import STACK_DIMS, choice_of, choose_splits, of_16_bits
from ..options import Takes, ZeroOptions
from ..partition import Split, alignment_of, splits_of
from .state_sizes import StateSizes

_ELEMENTS = Takes(
    "a whole number of elements, at least 1", (int, float), lambda number: number >= 1 and number % 1 == 0
)


class Shape(NamedTuple):
    """A parameter of a planned run; ``group`` is the index of its param group, or None if it isn't trained.

    ``like`` is a meta tensor of its shape and strides.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    group: int | None
    like: Tensor


class PlannedRun:
    """A run that is only planned, over any number of ranks; it takes the arguments of ``estimate``.

    ``groups`` are the parameters of each of the optimizer's groups; None: those that it holds.

    Attributes:
        shapes: the parameters. If the groups hold none of them, all that are trained are in its first group.
        bucket_size: elements of a bucket.
        on_host: the parameters are on the host.

    Raises:
        TypeError, ValueError: ``model`` is something else, or has no parameters.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Tensor] | float,
        options: ZeroOptions,
        states: StateSizes,
        device: torch.device | str | None = None,
        groups: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        self.options, self.states = options, states
        named = [] if isinstance(model, (int, float)) else _named_parameters(model)
        if groups is None:  # the optimizer may be one over small parameters, which aren't stacks of matrices
            stacks = [p for _, p in named if p.dim() == STACK_DIMS and p.requires_grad]
            self._held = [*(p for group in states.optimizer.param_groups for p in group["params"]), *stacks]
        else:
            self._held = [p for members in groups for p in members]
        if device is None:
            device = named[0][1].device if named and not named[0][1].is_meta else "cuda"
        try:
            self.on_host = torch.device(device).type == "cpu"
        except RuntimeError as error:
            raise ValueError(
                f"device: expected a device that torch knows, such as cuda or cpu, got {device!r}"
            ) from error
        self.bucket_size = options.communication.bucket_size or (HOST_BUCKET if self.on_host else DEVICE_BUCKET)
        if isinstance(model, (int, float)):
            self.shapes = _cut(model, self.bucket_size, options)
        else:
            self.shapes = self._shapes(named, groups)

    def _shapes(self, named: Sequence[tuple[str, Tensor]], groups: Sequence[Sequence[Tensor]] | None) -> list[Shape]:
        """Return each parameter's name, shape, dtype and param group; the group is None if it isn't trained."""
        if groups is None:
            groups = [group["params"] for group in self.states.optimizer.param_groups]
        group_of = {p: at for at, members in enumerate(groups) for p in members}
        if group_of.keys().isdisjoint(p for _, p in named):
            group_of = {p: 0 for _, p in named}
        forced = self.options.forced_dtype
        return [
            Shape(name, p.shape, forced or p.dtype, group_of.get(p) if p.requires_grad else None, _meta(p))
            for name, p in named
        ]

    def layout(self, world_size: int) -> Layout:
        """Return the layout of the trained parameters over ``world_size`` ranks, in the first step's buckets."""
        trained = [shape for shape in self.shapes if shape.group is not None]
        splits = self._splits(trained, world_size)
        members = [self._parameter(*each, world_size) for each in zip(trained, splits, strict=True)]
        plan = make_plan([_item(p, self.options) for p in members], range(len(members))[::-1], self.bucket_size)
        return with_buckets([(members, plan)], self.options.stage)

    def _splits(self, shapes: Sequence[Shape], world_size: int) -> list[Split]:
        """Return the splits of trained parameters, as the optimizer chooses them."""
        optimizer, groups = self.states.optimizer, self.states.optimizer.param_groups
        dtypes = of_16_bits(self.options.master_dtype(shape.dtype) for shape in shapes)
        by_group, choices = choose_splits(optimizer, self.options.split, self._held, dtypes), []
        multiple = slice_multiple(optimizer)
        for name, _, dtype, group, like in shapes:
            at, p = group or 0, like.to(dtype)
            choice = choice_of(optimizer, groups[at], by_group[at], p, name, self.options.cost)
            choices.append(choice._replace(multiple=multiple(p.numel(), world_size)))
        return splits_of(choices, world_size)

    def _parameter(self, shape: Shape, split: Split, world_size: int) -> ParameterLayout:
        """Return the layout of one parameter, with the bytes of the states that a step will make."""
        options, group, dtype = self.options, shape.group or 0, self.options.master_dtype(shape.dtype)
        if not split.numel:
            states = [0] * (group + 1)
        elif split.is_flat:
            states = self.states.of_slice(dtype, split.slice_size)
        else:
            states = self.states.of_parameter(dtype, split.slice_shape(shape.shape))
        of = (shape.name, tuple(shape.shape), shape.dtype, group, tuple(range(world_size)))
        return ParameterLayout(*of, split, options, states[group])


def _named_parameters(model: nn.Module | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    """Return the parameters of a model, or of a list, by name; raise if there is none."""
    if isinstance(model, nn.Module):
        named: list[tuple[str, Tensor]] = list(model.named_parameters())
    else:
        tensors = [model] if isinstance(model, Tensor) or not isinstance(model, Iterable) else dict.fromkeys(model)
        named = [(str(at), p) for at, p in enumerate(tensors)]
    for _, p in named:
        if not isinstance(p, Tensor):
            raise TypeError(f"model_or_numel: expected a model, parameters or a number, got {type(p).__name__}")
    if not named:
        raise ValueError("model_or_numel: expected at least one parameter, got none: pass a model that has some")
    return named


def _meta(p: Tensor) -> Tensor:
    return torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")


def _cut(numel: float, bucket_size: int, options: ZeroOptions) -> list[Shape]:
    """Return parameters of ``bucket_size`` elements each, the last maybe smaller, that together have ``numel``."""
    _ELEMENTS("model_or_numel", numel)
    whole, rest = divmod(int(numel), bucket_size)
    sizes = [bucket_size] * whole + [rest] * (rest > 0)
    return [
        Shape(str(at), torch.Size([size]), options.forced_dtype or torch.float32, 0, torch.empty(size, device="meta"))
        for at, size in enumerate(sizes)
    ]


def _item(p: ParameterLayout, options: ZeroOptions) -> Item:
    fp8, travels = options.communication.in_fp8(p.split), p.communication_dtype
    alignment = alignment_of(travels, options.communication.pad_buckets_for_high_nccl_busbw)
    return Item(p.split, (p.dtype, travels, fp8, p.split.owner), travels == p.dtype, fp8, alignment)


# ---- buffers under way ----

# Blocks for a few numbers each: agreements, norms and presence maps, some of which a slower rank has yet to read.
_FEW_NUMBERS = 16


def most_under_way(layout: Layout, options: ZeroOptions, on_host: bool, micro_batches: int) -> int:
    """Return the most bytes of bucket buffers that a rank holds at once in a backward or a step.

    A device has buffers under way in a backward or in a step. NCCL all-reduces a buffer in place, which holds the
    gradients afterwards. On a host buffers lie in blocks of shared memory, which are kept for their next use, and by a
    rank that is ahead of others until these have read them.
    """
    if layout.world_size == 1:
        return 0
    in_place = options.stage == 1 and micro_batches == 1 and not on_host
    reductions = [0 if in_place else _reduction(bucket, options) for bucket in layout.buckets]
    ordered = layout.buckets if options.cpu_offload else layout.buckets[::-1]
    parts = in_parts((bucket.kind, bucket.planned.body, bucket) for bucket in ordered)
    gathers = [_gather(part, options, on_host) for part in parts]
    at_once = len(gathers) if options.communication.overlap_gathers else Native.gathers_in_flight + 1
    if on_host:
        ahead = 2 * (SharedMemory.in_flight + 1)
        meet_twice = options.stage == 1 and layout.world_size > READ_WHOLE
        rows = [bucket.row_bytes(bucket.dtype) if meet_twice else 0 for bucket in layout.buckets]
        passes = min(micro_batches, ahead)
        blocks = ((passes * reductions, ahead), (passes * rows, ahead), (gathers, 2 * at_once))
        large = sum(_most(map(block_bytes, filter(None, sizes)), most) for sizes, most in blocks)
        return large + _FEW_NUMBERS * block_bytes(1)
    return max(_most(reductions, Native.in_flight + 1), _most(gathers, at_once))


def _reduction(bucket: BucketLayout, options: ZeroOptions) -> int:
    """Return the bytes of the buffers that reduce a bucket."""
    if bucket.planned.fp8:
        return 2 * bucket.rows * bucket.row_bytes(bucket.dtype)
    exchanged = options.communication.reduce_scatter_with_fp32_accumulation and bucket.dtype.itemsize <= 2
    return bucket.buffer_bytes * (2 if exchanged else 1)


def _gather(part: Sequence[BucketLayout], options: ZeroOptions, on_host: bool) -> int:
    """Return the bytes of the buffer that gathers some buckets' parameters; ``on_host``: this rank's row alone."""
    sizes = list(chain.from_iterable(bucket.planned.sizes for bucket in part))
    if len(sizes) == 1 and not (on_host or part[0].planned.fp8):
        return 0
    dtype, wide_rows = part[0].parameter_dtype, options.communication.pad_buckets_for_high_nccl_busbw
    row = alignment_of(dtype, wide_rows).padded(sum(sizes))
    encoded = encoded_size(row) if part[0].planned.fp8 else 0
    return (1 if on_host else part[0].rows) * (row * dtype.itemsize + encoded)


def _most(sizes: Iterable[int], at_once: int) -> int:
    """Return the largest sum of ``at_once`` neighbouring sizes."""
    sums = [0] * at_once + list(accumulate(sizes, initial=0))
    return max(after - before for before, after in zip(sums, sums[at_once:], strict=False))
