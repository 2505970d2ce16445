"""The records of an optimizer's parameters, found by parameter or by slice."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..communication.shard_group import ShardGroup
from .sharded_parameter import ShardedParameter

# The first slice of every param group, also of an optimizer that is gone, where the one that it wrapped still holds it.
first_slices: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()


@dataclass(eq=False, repr=False)
class ParameterStore:
    """The records of an optimizer's parameters, and the parameters of its groups as the caller gave them.

    There is one shard group, or, with experts, several: the first is all data-parallel ranks, and each rank belongs to
    one group of every index.
    """

    shard_groups: Sequence[ShardGroup]  # the ranks that share parameters
    _shard_group_of: Mapping[Tensor, int]  # the shard groups' indices of tensors that aren't of the first
    listed: Collection[Tensor] = ()  # the parameters that the caller has listed under a shard group
    records: list[ShardedParameter] = field(default_factory=list)  # the trainable ones, in order of registration
    groups: list[list[nn.Parameter]] = field(default_factory=list)  # frozen ones too: the order a state dict counts in
    slices: list[list[Tensor]] = field(default_factory=list)  # each param group's master slices
    frozen: list[nn.Parameter] = field(default_factory=list)  # without a record, as they were when their group came
    _record_of: dict[Tensor, ShardedParameter] = field(default_factory=dict)  # by parameter, and by slice

    def __post_init__(self) -> None:
        # A record's ``index`` is its place in the list of its shard group.
        self.by_shard_group: list[list[ShardedParameter]] = [[] for _ in self.shard_groups]

    def __iter__(self) -> Iterator[ShardedParameter]:
        return iter(self.records)

    @property
    def on_host(self) -> bool:
        """Return whether all parameters are on the host, which is the same on all ranks."""
        return all(record.padded.device.type == "cpu" for record in self.records)

    def shard_group_of(self, tensor: Tensor) -> int:
        """Return the index of the shard group of a parameter, master slice or buffer; 0 for an unknown tensor."""
        record = self._record_of.get(tensor)
        return self._shard_group_of.get(tensor, 0) if record is None else record.shard_group

    def add(self, record: ShardedParameter) -> None:
        """Add a record, whose ``p32`` has its final form."""
        self.records.append(record)
        self.by_shard_group[record.shard_group].append(record)
        members = self.slices[record.group]
        if not members:
            first_slices[record.p32] = None
        members.append(record.p32)
        self._record_of[record.p] = self._record_of[record.p32] = record

    def move_to_new_group(self, members: list[nn.Parameter]) -> None:
        """Append a param group of ``members``, and take those out of earlier groups that had them as frozen."""
        taken = set(members)
        self.groups = [[p for p in group if p not in taken] for group in self.groups]
        self.groups.append(members)
        self.slices.append([])
        self.frozen = [p for p in self.frozen if p not in taken] + [p for p in members if not p.requires_grad]

    def find(self, tensor: Tensor) -> ShardedParameter | None:
        """Return the record of a parameter, or of a master slice, or None."""
        return self._record_of.get(tensor)

    def __getitem__(self, tensor: Tensor) -> ShardedParameter:
        """Return the record of a parameter, or of a master slice; ``ValueError`` if there is none."""
        record = self._record_of.get(tensor)
        if record is None:
            raise ValueError(
                f"expected a trainable parameter of this optimizer, got a {tuple(tensor.shape)} tensor it doesn't "
                "hold: pass the model's own parameter, not a copy or a view"
            )
        return record
