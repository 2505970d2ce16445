"""The splits of a parameter over ranks, the choice of owners, and the width of buffer rows.

``EvenSplit`` gives each rank a row of every parameter: flat elements, or as many matrices of a stack. ``WholeSplit``
gives a parameter to one rank. They answer the same questions, so nothing else asks which of the two it has.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

# By matrices: as many of a stack [E, m, n] to each rank where the ranks divide E; other parameters whole.
BY_ELEMENTS, BY_PARAMETERS, BY_MATRICES = "elements", "parameters", "matrices"
# Measures of a parameter, as many for each: the cost of its step first.
Costs: TypeAlias = tuple[float, ...]

# torch's optimizers that step slices as they step what is whole. Their state is per parameter, step counters included.
ELEMENTWISE = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
    *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
)
# Bytes of a GPU's cache line, in which its memory is read.
ROW_BYTES = 128
# Elements. NCCL reaches its bandwidth with messages that are multiples of large powers of 2 (Megatron-LM's measure).
WIDE_ROW = 2**16
# Elements between whole parameters in a bucket: a cache line of fp32.
_ROUND = 16
# Elements in a bucket of one owner at least: smaller messages cost more than they save by leaving earlier.
_LEAST_WHOLE = 2**18
# In a row, unless the unit is one element: with more ranks rows are shorter.
_LEAST_UNITS = 64


@dataclass(frozen=True)
class EvenSplit:
    """The split of a flat parameter into rows, one for each rank: it is padded to ``[world_size, slice_size]``.

    Rank ``r`` owns row ``r``. With ``multiple`` 1 this is the split that ``torch.chunk`` makes of the unpadded
    parameter, and so also the layout of a 1-D ``DTensor`` with ``Shard(0)``: the first ranks hold whole slices, the one
    that meets the end a shorter one, those after it nothing but padding.

    A stack of matrices, ``[E, m, n]``, of which the ranks divide ``E``, may be split so, too: a row is then
    ``E / world_size`` whole matrices, and the optimizer steps slices of shape ``[E / world_size, m, n]``.
    """

    owner: ClassVar[None] = None  # each rank owns a row

    numel: int  # elements of the parameter, without padding
    world_size: int  # ranks that share it
    multiple: int = 1  # rows are multiples of this number of elements
    matrix: tuple[int, ...] = ()  # the shape of one matrix of a stack; (): slices are flat
    costs: Costs = ()  # of a stack: by these an owner is chosen if a number of ranks doesn't divide it

    @property
    def by(self) -> str:
        """Return "elements", or "matrices" of a stack."""
        return BY_MATRICES if self.matrix else BY_ELEMENTS

    @property
    def is_flat(self) -> bool:
        """Return whether the optimizer steps 1-D slices."""
        return not self.matrix

    @cached_property
    def slice_size(self) -> int:
        """Return the elements of a row: ``ceil(numel / world_size)``, rounded up to a ``multiple``."""
        return -(-self.numel // (self.world_size * self.multiple)) * self.multiple

    @property
    def padded_numel(self) -> int:
        """Return the elements of the storage behind the parameter, padding included."""
        return self.slice_size * self.world_size

    @property
    def padding(self) -> int:
        """Return the elements of padding at the end of the storage."""
        return self.padded_numel - self.numel

    def span(self, rank: int) -> tuple[int, int]:
        """Return the first and one-past-last element of the flat parameter that ``rank`` owns, without padding."""
        start = min(rank * self.slice_size, self.numel)
        return start, min(start + self.slice_size, self.numel)

    @property
    def rows(self) -> int:
        """Return the number of rows of a bucket buffer."""
        return self.world_size

    @property
    def short(self) -> int:
        """Return the padding to append to a gradient before packing; 0 if ``multiple`` is 1, as packing pads then."""
        return self.padding if self.multiple > 1 else 0

    def room(self, bucket_size: int) -> int:
        """Return the number of elements of parameters that fill a bucket: ``bucket_size`` itself."""
        return bucket_size

    def own_row(self, rows: Tensor, rank: int) -> Tensor:
        """Return ``rank``'s row of ``rows``, ``[columns]``, as a view."""
        return rows[rank]

    def slice_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of the slices that the optimizer steps of a parameter of this ``shape``."""
        return torch.Size((shape[0] // self.world_size, *self.matrix) if self.matrix else (self.slice_size,))

    def shaped(self, flat: Tensor, like: Tensor) -> Tensor:
        """Return ``flat`` itself, or a view of it as matrices of a stack, with the strides of the stack ``like``."""
        if not self.matrix:
            return flat
        return torch.as_strided(flat, self.slice_shape(like.shape), like.stride(), flat.storage_offset())

    def reduce(self, group: Any, buffer: Tensor, fp8: bool, about: Any) -> Any:
        """Start a reduce-scatter of a bucket buffer; each rank gets its row. Communicates."""
        return group.reduce_scatter(buffer, fp8, about)

    def gather(
        self, group: Any, own: Sequence[Tensor], rows: Sequence[Tensor], fp8: bool, row: Alignment, about: Any
    ) -> Any:
        """Start an all-gather of the ranks' slices ``own`` into ``rows``, each ``[rows, s]``. Communicates."""
        return group.gather(own, rows, fp8, row, about)


@dataclass(frozen=True)
class WholeSplit:
    """The split that gives one rank all ``numel`` elements of a parameter.

    A bucket of such parameters has one owner and one row. Its gradients are reduced to the owner, whose optimizer steps
    tensors of the parameters' own shapes, and the owner broadcasts the result.
    """

    numel: int  # elements of the parameter
    world_size: int  # ranks that share it
    owner: int  # the rank that owns it
    costs: Costs = ()  # the measures of it by which owners were dealt out, the cost of its step first
    by: str = BY_PARAMETERS  # or "matrices" of a stack, whose number the ranks don't divide
    is_flat: ClassVar[bool] = False
    multiple: ClassVar[int] = 1
    padding: ClassVar[int] = 0
    rows: ClassVar[int] = 1

    @property
    def slice_size(self) -> int:
        """Return the columns of the parameter in a bucket buffer: ``numel`` rounded up to a multiple of 16.

        The rounding of some matrix products depends on the address.
        """
        return -(-self.numel // _ROUND) * _ROUND

    @property
    def short(self) -> int:
        """Return the padding elements that must be appended to the gradient before it is packed."""
        return self.slice_size - self.numel

    @property
    def padded_numel(self) -> int:
        """Return the elements of the storage behind the parameter; there is no padding."""
        return self.numel

    def room(self, bucket_size: int) -> int:
        """Return the elements of one owner's full bucket: ``bucket_size`` / ranks, but at least 2**18 or all of it."""
        return max(bucket_size // self.world_size, min(bucket_size, _LEAST_WHOLE))

    def span(self, rank: int) -> tuple[int, int]:
        """Return the first and one-past-last element of the flat parameter that ``rank`` owns: all or none."""
        return (0, self.numel) if rank == self.owner else (0, 0)

    def own_row(self, rows: Tensor, rank: int) -> Tensor:
        """Return a view of ``rank``'s part of ``rows``: all columns on the owner, else an empty tensor."""
        return rows[0] if rank == self.owner else rows[0, :0]

    def slice_shape(self, shape: torch.Size) -> torch.Size:
        """Return ``shape``, that of the tensor which the owner's optimizer steps."""
        return shape

    def shaped(self, flat: Tensor, like: Tensor) -> Tensor:
        """Return a view of the owner's part with the shape and strides of ``like``; an empty one unchanged."""
        if flat.numel() < self.numel:
            return flat
        return torch.as_strided(flat, like.shape, like.stride(), flat.storage_offset())

    def reduce(self, group: Any, buffer: Tensor, fp8: bool, about: Any) -> Any:
        """Start reducing a bucket buffer to the owner, which gets ``[row]``; others get ``[0]``. Communicates."""
        return group.reduce(buffer, self.owner, about)

    def gather(
        self, group: Any, own: Sequence[Tensor], rows: Sequence[Tensor], fp8: bool, row: Alignment, about: Any
    ) -> Any:
        """Start the owner's broadcast of ``own``, without fp8, into ``rows``, each ``[1, numel]``. Communicates."""
        return group.broadcast_from(self.owner, own, [each[0] for each in rows], about)


Split: TypeAlias = EvenSplit | WholeSplit


# ---- which split a parameter gets ----


class Choice(NamedTuple):
    """The facts that decide the split of one parameter."""

    numel: int  # its elements
    by: str  # "elements", "parameters" or "matrices"
    costs: Costs = ()  # the measures of it by which owners are dealt out, the cost of its step first
    multiple: int = 1  # slices by elements are multiples of this number of elements
    stack: tuple[int, ...] = ()  # [E, m, n] of a stack that may be cut between its matrices


def splits_of(choices: Sequence[Choice], world_size: int, former: Iterable[Split] = ()) -> list[Split]:
    """Return the split of each parameter that ``world_size`` ranks share, alike on each rank. Doesn't communicate.

    ``former``: the splits of parameters that these ranks share already.
    """
    sizes = [(choice.numel, world_size, choice.multiple) for choice in choices]
    shared = {size: EvenSplit(*size) for size in set(sizes)}  # of thousands of parameters few differ in size
    splits: list[Split] = [shared[size] for size in sizes]
    for at, choice in enumerate(choices):
        if choice.stack and choice.stack[0] % world_size == 0:
            splits[at] = EvenSplit(choice.numel, world_size, matrix=choice.stack[1:], costs=choice.costs)
    whole = [at for at, choice in enumerate(choices) if choice.by != BY_ELEMENTS and splits[at].is_flat]
    owned = [(split.owner, split.costs) for split in former if split.owner is not None]
    for at, owner in zip(whole, deal_out([choices[at].costs for at in whole], world_size, owned), strict=True):
        splits[at] = WholeSplit(choices[at].numel, world_size, owner, choices[at].costs, choices[at].by)
    return splits


def deal_out(costs: Sequence[Costs], world_size: int, owned: Iterable[tuple[int, Costs]] = ()) -> list[int]:
    """Assign items to ranks, the costliest first, each to the rank with the least cost so far; return the owners.

    Each measure of an item counts as a share of that measure's sum over all items. The largest of an item's shares is
    its size, and the largest of a rank's shares is what the rank has. So every measure is level at once. With one
    measure the fullest rank has at most 4/3 of the least possible (Graham, 1969).

    ``costs``: the measures of each item, in any units. ``owned``: owners and measures of items dealt out before.
    """
    before = list(owned)
    sums = [sum(measure) or 1 for measure in zip(*costs, *(each for _, each in before), strict=True)]
    loads = [[0.0] * len(sums) for _ in range(world_size)]

    def take(rank: int, measures: Costs) -> float:
        loads[rank] = [load + each / total for load, each, total in zip(loads[rank], measures, sums, strict=True)]
        return max(loads[rank])

    for rank, measures in before:
        take(rank, measures)
    heap = [(max(load, default=0.0), rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    sizes = [max(each / total for each, total in zip(measures, sums, strict=True)) for measures in costs]
    owners = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -sizes[place]):
        _, owner = heap[0]
        owners[place] = owner
        heapq.heapreplace(heap, (take(owner, costs[place]), owner))
    return owners


class Owned(NamedTuple):
    """One rank's share of the parameters that are stepped whole."""

    elements: int = 0  # of these parameters
    work: float = 0.0  # the cost of their steps


def owned_by_rank(splits: Iterable[Split], world_size: int) -> list[Owned]:
    """Return each rank's share of the parameters that one rank steps whole."""
    shares = [Owned()] * world_size
    for split in splits:
        if split.owner is not None:
            elements, work = shares[split.owner]
            shares[split.owner] = Owned(elements + split.numel, work + (split.costs[0] if split.costs else 0.0))
    return shares


# ---- how wide a row of a bucket buffer is, so that copies and collectives begin at round addresses ----


class Alignment(NamedTuple):
    """The units, in elements, of which the width of a buffer row is a multiple."""

    short: int = 1  # of a row up to ``wide``; a power of 2, less for a short row, so that padding stays below 2%
    wide: int = 1  # of a wider one

    def padded(self, columns: int) -> int:
        """Return ``columns`` rounded up to a unit: ``wide`` where they are more, else ``short``, or less for a few."""
        unit = self.wide if columns > self.wide else self.short
        while 1 < unit <= self.short and unit * _LEAST_UNITS > columns:
            unit //= 2
        return -(-columns // unit) * unit


END_TO_END = Alignment()


@cache
def alignment_of(dtype: torch.dtype, wide_rows: bool = False) -> Alignment:
    """Return the alignment of rows of ``dtype``: a cache line; if ``wide_rows``, 2**16 elements for rows above that."""
    unit = ROW_BYTES // dtype.itemsize
    return Alignment(unit, WIDE_ROW if wide_rows else unit)
