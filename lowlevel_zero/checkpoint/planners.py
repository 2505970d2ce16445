"""torch.distributed.checkpoint's planners, told of boxed tensors: torch 2.4's don't ask a tensor what it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..state.boxes import BoxedTensor


class SavePlanner(DefaultSavePlanner):
    """Saves nested dicts; ``dcp.save`` of torch 2.4 needs it for what has boxed tensors in it."""

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
    """Loads nested dicts; ``dcp.load`` of torch 2.4 needs it for what has boxed tensors in it."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        boxed, rest = _parted(self.state_dict)
        items = list(create_default_local_load_plan(rest, self.metadata, not self.allow_partial_load).items)
        for name, tensor in boxed.items():
            described: Any = self.metadata.state_dict_metadata.get(name)
            if described is not None:
                items += create_read_items_for_chunk_list(name, described, tensor.__create_chunk_list__())
            elif not self.allow_partial_load:
                raise RuntimeError(f"{name}: expected it in the checkpoint, found none")
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, BoxedTensor) else super().lookup_tensor(index)


def _parted(state_dict: dict[str, Any]) -> tuple[dict[str, BoxedTensor], dict[str, Any]]:
    """The boxed tensors, and the rest."""
    boxed = {name: each for name, each in state_dict.items() if isinstance(each, BoxedTensor)}
    return boxed, {name: each for name, each in state_dict.items() if name not in boxed}
