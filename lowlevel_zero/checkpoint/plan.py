"""The plan of a checkpoint's files: which rank writes which part of each tensor, and at which offset.

The plan follows from the splits of the tensors by arithmetic. Each rank computes its own part of it, and the first rank
computes all of it for ``torch.distributed.checkpoint``'s ``.metadata``. No rank is asked for its plan.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..partition import EvenSplit
from ..state.boxes import Box, BoxedTensor, Shape, Spans, boxes_in_memory, one_box
from .tensor_bytes import TensorBytes

TENSORS = "__{}_0.distcp"  # the file of each rank's tensors

# The keys under which torch's tools find a value, as in ("model", "0.weight").
Keys = tuple[Any, ...]


class PlannedTensor(NamedTuple):
    """A tensor of a checkpoint, dense; ``split`` cuts its elements, in memory order, into a part for each writer."""

    path: Keys
    dtype: torch.dtype
    shape: Shape
    strides: Shape
    split: Spans
    writers: Sequence[int]

    def boxes(self, part: int) -> Iterator[tuple[Box, TensorBytes]]:
        """Yield the boxes of one part, in memory order, and the layout of each one's bytes."""
        start, stop = self.split.span(part)
        if start < stop or not torch.Size(self.shape).numel():
            for box, strides in boxes_in_memory(self.shape, self.strides, start, stop):
                yield box, TensorBytes(self.dtype, box.sizes, strides)


@dataclass
class Share:
    """The part of a checkpoint that rank ``rank`` writes.

    Attributes:
        plan: the tensors that all ranks have a part of; when the first rank writes, the tensors of all ranks.
        experts: the tensors of this rank's parameters that fewer ranks share.
        values: by the keys of the tensors that this rank writes, the elements of its parts, 1-D.
        tied: keys of further names of tensors, with the keys of the first name.
        files: the content of further files, by name.
        pickles: by keys, what isn't a tensor but is to be found by torch's tools; behind this rank's tensors.
    """

    rank: int
    plan: list[PlannedTensor] = field(default_factory=list)
    experts: list[PlannedTensor] = field(default_factory=list)
    values: dict[Keys, Tensor] = field(default_factory=dict)
    tied: dict[Keys, Keys] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    pickles: dict[Keys, bytes] = field(default_factory=dict)

    def add(self, path: Keys, tensor: Tensor, writers: Sequence[int], is_expert: bool = False) -> None:
        """Plan a tensor whose parts ``writers`` write, the first all of an undivided one; keep this rank's values."""
        boxes = tensor if isinstance(tensor, BoxedTensor) else one_box(tensor)
        split: Spans = boxes.split_by if boxes.numel() else EvenSplit(0, 1)
        ranks = writers[: split.world_size]
        planned = PlannedTensor(path, boxes.dtype, tuple(boxes.shape), boxes.strides, split, ranks)
        (self.experts if is_expert else self.plan).append(planned)
        if self.rank in ranks:
            self.values[path] = boxes.local


def name_of(path: Keys) -> str:
    """Join keys by dots to the name that ``torch.distributed.checkpoint`` gives a value."""
    return ".".join(map(str, path))


def metadata_of(share: Share, ranks: int) -> bytes:
    """Return the pickled content of ``.metadata``, torch.distributed.checkpoint's index of what ``ranks`` ranks write.

    ``share``: the first rank's, with the tensors of all ranks. Each rank writes its parts in this order.
    """
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Keys] = {}
    ends = [0] * ranks
    aliases: dict[Keys, list[Keys]] = {}
    for alias, path in share.tied.items():
        aliases.setdefault(path, []).append(alias)
    for tensor in share.plan:
        named = {name_of(path): path for path in (tensor.path, *aliases.get(tensor.path, ()))}
        chunks: list[ChunkStorageMetadata] = []
        for part, writer in enumerate(tensor.writers):
            for box, layout in tensor.boxes(part):
                place = _StorageInfo(TENSORS.format(writer), ends[writer], layout.length)
                places.update({MetadataIndex(name, torch.Size(box.offsets), len(chunks)): place for name in named})
                chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
                ends[writer] += layout.length
        paths |= named
        tensors = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
        described |= dict.fromkeys(named, tensors)
    for path, content in share.pickles.items():
        name = name_of(path)
        paths[name] = path
        described[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _StorageInfo(TENSORS.format(0), ends[0], len(content))
        ends[0] += len(content)
    return pickle.dumps(Metadata(described, paths, places))
