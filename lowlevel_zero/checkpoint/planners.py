"""torch.distributed.checkpoint's planners, told of boxed tensors: torch 2.4's don't ask a tensor what it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .boxes import BoxedTensor


class SavePlanner(DefaultSavePlanner):
    """Saves a nest of dicts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=True, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        everything = self.state_dict
        boxed, self.state_dict = _parted(everything)
        plan = super().create_local_plan()
        self.state_dict = everything
        own = [item for name, tensor in boxed.items() for item in tensor.__create_write_items__(name, tensor)]
        self.plan = replace(plan, items=[*plan.items, *own])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, BoxedTensor) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Loads tensors by the names that they have in the files."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        everything = self.state_dict
        boxed, self.state_dict = _parted(everything)
        plan = super().create_local_plan()
        self.state_dict = everything
        items = list(plan.items)
        for name, tensor in boxed.items():
            described = self.metadata.state_dict_metadata[name]
            assert isinstance(described, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, described, tensor.__create_chunk_list__())
        return replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, BoxedTensor) else super().lookup_tensor(index)


def _parted(state_dict: dict[str, Any]) -> tuple[dict[str, BoxedTensor], dict[str, Any]]:
    """The boxed tensors, and the rest."""
    boxed = {name: each for name, each in state_dict.items() if isinstance(each, BoxedTensor)}
    return boxed, {name: each for name, each in state_dict.items() if name not in boxed}
