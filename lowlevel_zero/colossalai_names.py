"""ColossalAI's API (0.5.0), whose callers look parameters up by ``id()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from .bookkeeping.sharded_parameter import ShardedParameter
from .communication.agreement import Call
from .sharded_optimizer import ShardedOptimizer


class ColossalNames(ShardedOptimizer):
    """A ``ShardedOptimizer`` with the methods that ColossalAI's callers call.

    Those of gradients and of the state dict communicate: every rank calls them, in the same order. The others return
    what this rank has, and may be called on one rank alone.
    """

    def get_grad_norm(self, norm_type: float = 2, **_: Any) -> float | None:
        """Return the L2 norm of the last step's gradients, unscaled and before clipping; None before a step.

        Waits for the device, and for the others to take that step. inf or NaN if the step was skipped.
        """
        if norm_type != 2:
            raise ValueError(f"norm_type: expected 2, since a step computes the L2 norm alone, got {norm_type}")
        return None if self.last_norm is None else self.last_norm.value.item()

    def get_param_grad(self, working_param: Tensor) -> Tensor | None:
        """Gather a parameter's averaged gradient, and return it whole, or None if no rank has one. Communicates.

        Every rank calls it, after backward: reductions are finished, and in stage 2 the slices are gathered.
        """
        return self.gradients.whole(self.sharded_parameters[working_param], "get_param_grad")

    def get_working_grads_by_group_id(self, group_id: int) -> list[Tensor]:
        """Finish reductions; return copies of this rank's slices of a group's averaged gradients. Communicates."""
        return [own for _, own in self._own_gradients(lambda record: record.group == group_id)]

    def get_working_grad_by_param_id(self, param_id: int) -> Tensor | None:
        """Finish reductions; return a copy of this rank's slice of ``id(p)``'s gradient, or None. Communicates."""
        return next((own for _, own in self._own_gradients(lambda record: id(record.p) == param_id)), None)

    def get_partitioned_gradients_by_param_id(self, group_id: int, param_id: int) -> list[Tensor]:
        """Return the slices of a gradient that this rank holds: stage 1, all ranks'; stage 2, its own. Communicates.

        An empty list if there is none. Stage 1 has the others' until a step or a second ``clip_grad_norm_``.
        """
        for record, own in self._own_gradients(lambda each: each.group == group_id and id(each.p) == param_id):
            rows = self.gradients.group_of(record).gradients.averaged_rows(record)
            return [own] if rows is None else list(rows.to(record.p.dtype).unbind())
        return []

    def _own_gradients(self, wanted: Callable[[ShardedParameter], bool]) -> Iterator[tuple[ShardedParameter, Tensor]]:
        """Finish reductions, and yield this rank's averaged slices of the wanted parameters. Communicates."""
        self.guard.enter("look at gradients")
        self.calls.finish_gradients(Call("look at gradients"))
        for record in filter(wanted, self.sharded_parameters):
            own = self.gradients.group_of(record).gradients.averaged(record)
            if own is not None:
                yield record, own.to(record.p.dtype)

    def get_working_to_master_map(self) -> dict[int, Tensor]:
        """Map ``id(p)`` to ``p32``, the slice, ``[s]``, that this rank's optimizer steps."""
        return {id(record.p): record.p32 for record in self.sharded_parameters}

    def get_master_to_working_map(self) -> dict[int, Tensor]:
        """Map ``id(p32)`` to the parameter ``p``."""
        return {id(record.p32): record.p for record in self.sharded_parameters}

    working_to_master_param = property(get_working_to_master_map)
    master_to_working_param = property(get_master_to_working_map)

    def get_param_padding_map(self) -> dict[int, int]:
        """Map ``id(p)`` to the number of elements of padding behind the parameter."""
        return {id(record.p): record.split.padding for record in self.sharded_parameters}

    def get_param_padding_size(self, param: Tensor) -> int:
        """Return the number of elements of padding behind ``param``."""
        return self.sharded_parameters[param].split.padding

    def state_dict_shard(
        self,
        max_shard_size: int = 1024,
        pinned_state_dicts: dict[int, dict[str, Any]] | None = None,
        only_on_master: bool = False,
    ) -> Iterator[tuple[dict[int, StateDict], float]]:
        """Return an iterator that gathers states, in pieces of ``max_shard_size`` MiB, and yields them and their sizes.

        Every rank calls it, and iterates to the end: both communicate. The other arguments are ``state_dict``'s.
        """
        self.calls.finish_syncs("state_dict")
        return self.whole_state.shards(max_shard_size, pinned_state_dicts, only_on_master)

    def unwrap(self) -> Optimizer:
        """Return the wrapped optimizer, whose param groups hold slices."""
        return self.optim
