"""torch 2.4's distributed checkpoint, which doesn't ask tensors what a rank has of them, as later ones do."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..state.boxes import BoxedTensor


def ask_boxed_tensors() -> None:
    """Let the default planners ask boxed tensors: three functions are all that these know of tensors."""
    planner: Any = default_planner
    write, read, find = planner._create_write_items, planner._create_read_items, planner.find_state_dict_object

    def create_write_items(name: str, value: Any) -> Any:
        return value.__create_write_items__(name, value) if isinstance(value, BoxedTensor) else write(name, value)

    def create_read_items(name: str, described: Any, value: Any) -> Any:
        if isinstance(value, BoxedTensor):
            return create_read_items_for_chunk_list(name, described, value.__create_chunk_list__())
        return read(name, described, value)

    def find_object(state_dict: dict[str, Any], index: Any) -> Any:
        value = state_dict.get(index.fqn)
        return value.__get_tensor_shard__(index) if isinstance(value, BoxedTensor) else find(state_dict, index)

    planner._create_write_items, planner._create_read_items = create_write_items, create_read_items
    planner.find_state_dict_object = find_object
