"""What callers may ask a low-level ZeRO optimizer, under ColossalAI's names; thin over the records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .agreement import Call
from .bookkeeping.parameter_store import ParameterStore, ShardedParameter
from .diagnostics.guards import Guard
from .families import Families, ShardedGroup
from .grad_norm import GlobalNorm
from .loss_scaler import LossScaler
from .options import ZeroOptions
from .planning.layout import Layout, Owned, Shared, layout_of
from .planning.memory import held_bytes
from .state.sharded import scale_as_numbers
from .state.whole import Pinned, State, load_state_shards, packed_groups, whole_gradients, whole_state_shards


class CallerNames:
    """Look-ups under ColossalAI 0.5.0's names. Maps are keyed by ``id()`` because its callers look up so.

    Those of gradients and of the state dict communicate: every rank calls them, in the same order. The others tell what
    this rank has, and may be asked of one rank alone.
    """

    optim: Optimizer
    _options: ZeroOptions
    _norm: GlobalNorm | None
    _scaler: LossScaler | None
    _parameters: ParameterStore
    _families: Families
    _guard: Guard

    def get_grad_norm(self, norm_type: float = 2, **_: Any) -> float | None:
        """Global L2 norm of the last step's gradients, unscaled, before clipping; None before the first step.

        Waits for the device, and for the others to take that step. inf or NaN if the step was skipped.
        """
        if norm_type != 2:
            raise ValueError(f"norm_type: expected 2, the norm that steps compute, got {norm_type}")
        return None if self._norm is None else self._norm.value.item()

    @torch.no_grad()
    def get_param_grad(self, working_param: Tensor) -> Tensor | None:
        """The whole averaged, unscaled gradient of a parameter, of its shape and dtype, or None if no rank has one.

        Every rank calls it, after backward: reductions are finished, and in stage 2 the slices are gathered.
        """
        record = self._parameters[working_param]
        self._guard.enter("get_param_grad")
        self._families.finish(Call("get_param_grad"))
        family = self._families.of(record)
        (whole,) = whole_gradients([record], family.gradients, family.group)
        return None if whole is None else whole.to(record.p.dtype)

    @property
    def loss_scale(self) -> float:
        """The loss scale; 1 unless a parameter is fp16. Waits for the device."""
        return 1.0 if self._scaler is None else self._scaler.loss_scale

    @property
    def working_to_master_param(self) -> dict[int, Tensor]:
        """``id(p)`` to ``p32``."""
        return {id(record.p): record.p32 for record in self._parameters}

    @property
    def master_to_working_param(self) -> dict[int, Tensor]:
        """``id(p32)`` to ``p``."""
        return {id(record.p32): record.p for record in self._parameters}

    def get_working_to_master_map(self) -> dict[int, Tensor]:
        """``id(p)`` to ``p32``, the slice of ``[s]`` elements that this rank's optimizer steps."""
        return self.working_to_master_param

    def get_master_to_working_map(self) -> dict[int, Tensor]:
        """``id(p32)`` to ``p``."""
        return self.master_to_working_param

    def get_param_padding_map(self) -> dict[int, int]:
        """``id(p)`` to the number of elements that its storage is padded with."""
        return {id(record.p): record.split.padding for record in self._parameters}

    def get_param_padding_size(self, param: Tensor) -> int:
        """The number of elements that ``param``'s storage is padded with."""
        return self._parameters[param].split.padding

    def get_working_grads_by_group_id(self, group_id: int) -> list[Tensor]:
        """This rank's slices ``[s]`` of the averaged gradients of one param group; dropped layers are left out.

        Every rank calls it, after backward: reductions are finished.
        """
        return [self._own(record) for record in self._finished() if record.group == group_id]

    def get_working_grad_by_param_id(self, param_id: int) -> Tensor | None:
        """This rank's slice ``[s]`` of the averaged gradient of the parameter with that ``id()``, or None.

        Every rank calls it, after backward: reductions are finished.
        """
        return next((self._own(record) for record in self._finished() if id(record.p) == param_id), None)

    def get_partitioned_gradients_by_param_id(self, group_id: int, param_id: int) -> list[Tensor]:
        """The averaged gradient's slices that this rank holds: every rank's in stage 1, its own in stage 2.

        Stage 1 has the others' until a step or a second ``clip_grad_norm_``. Every rank calls it, after backward:
        reductions are finished.
        """
        for record in self._finished():
            if record.group == group_id and id(record.p) == param_id:
                rows = self._families.of(record).gradients.averaged_rows(record)
                return [self._own(record)] if rows is None else list(rows.to(record.p.dtype).unbind())
        return []

    def state_dict_shard(
        self, max_shard_size: int = 1024, pinned_state_dicts: Pinned | None = None, only_on_master: bool = False
    ) -> Iterator[tuple[dict[int, State], float]]:
        """``state_dict()["state"]`` in pieces of at most ``max_shard_size`` MiB, each with its size in MiB.

        Every rank calls it, and iterates to the end. The other arguments are ``state_dict``'s.
        """
        self._families.even_out(Call("state_dict"))
        return whole_state_shards(self.optim, self._parameters, max_shard_size, pinned_state_dicts, only_on_master)

    @torch.no_grad()
    def load_state_dict_shards(
        self,
        param_groups: Sequence[Mapping[str, Any]],
        shards: Iterable[Mapping[Any, State]],
        loss_scale: Mapping[str, Any] | None = None,
        fp8: bool = False,
    ) -> None:
        """Load what ``packed_groups()``, ``state_dict_shard()`` and ``loss_scale_state()`` gave; no communication.

        Any number of ranks may have saved it. Without a ``loss_scale`` the present one stays. ``fp8``: parameters
        travelled in fp8 in that run.

        Raises:
            ValueError: it is another optimizer's, or no loss scale; nothing has been changed then.
        """
        if loss_scale is not None:
            LossScaler().load_state_dict(loss_scale)
        load_state_shards(self.optim, self._parameters, param_groups, shards, fp8)
        if self._scaler is not None and loss_scale is not None:
            self._scaler.load_state_dict(loss_scale)

    def loss_scale_state(self) -> State | None:
        """The loss scale and its counts, as numbers; None unless a parameter is fp16. Waits for the device."""
        return scale_as_numbers(self._scaler)

    def packed_groups(self) -> list[State]:
        """``state_dict()["param_groups"]``."""
        return packed_groups(self.optim, self._parameters)

    def unwrap(self) -> Optimizer:
        """The wrapped optimizer, which holds slices."""
        return self.optim

    @torch.no_grad()
    def update_master_params(self, model: nn.Module) -> None:
        """Overwrite the master slices of ``model``'s parameters with what the parameters hold now."""
        for p in model.parameters():
            record = self._parameters.find(p)
            if record is not None:
                record.refresh_master()

    def _force_wait_all_gather(self) -> None:
        """Return when the parameters are up to date: after ``step`` they are, but with ``overlap_allgather``."""
        self._families.finish_gathers()

    def memory_held(self) -> dict[str, int]:
        """Bytes held on this rank now, by owner, every storage counted once. No communication."""
        records = self._parameters.records
        members = [p for group in self._parameters.groups for p in group]
        kept = [record.p.grad for record in records if record.p.grad is not None]
        return held_bytes(
            {
                "parameters": members,
                "gradients": [*kept, *self._families.gradients_held()],
                "masters": [record.p32 for record in records],
                "states": [tensor for state in self.optim.state.values() for tensor in _tensors(state)],
                "wires": [wire for ranks in self._parameters.shard_groups for wire in ranks.held()],
            }
        )

    def layout(self) -> Layout:
        """Who owns what: each parameter's slices, place in the wires and bytes, as this rank has them now.

        No communication. See ``Layout`` for its ``table()``, ``json()`` and ``picture(path)``.
        """
        shared = [
            Shared(tuple(family.group.slice_ranks), self._owned(family), family.reducer.plan.whole)
            for family in self._families
        ]
        return layout_of(shared, self._options, dist.get_rank())

    def _owned(self, family: ShardedGroup) -> list[Owned]:
        return [
            Owned(
                name=record.name,
                shape=tuple(record.p.shape),
                dtype=record.p.dtype,
                wire_dtype=record.wire_dtype,
                split=record.split,
                group=record.group,
                p32_bytes=0 if record.shares_storage else record.p32.nbytes,
                state_bytes=sum(value.nbytes for value in _tensors(self.optim.state.get(record.p32, {}))),
            )
            for record in family.records
        ]

    def traffic(self) -> dict[str, int]:
        """Bytes of wires that this rank has handed to others so far, by purpose: "reduce", "gather", and Muon's "step".

        Counted alike on every backend, without what a backend adds; an all-reduce counts as a reduce-scatter and a
        gather. Over two levels "reduce_outer" and "gather_outer" are those among them that crossed the outer one.
        """
        by_group = [ranks.traffic() for ranks in self._parameters.shard_groups]
        purposes = dict.fromkeys(purpose for sent in by_group for purpose in sent)
        return {purpose: sum(sent.get(purpose, 0) for sent in by_group) for purpose in purposes}

    def _finished(self) -> list[ShardedParameter]:
        """Records with a gradient, all of which are complete. Communicates: how many rounds there are, others know."""
        self._guard.enter("look at gradients")
        self._families.finish(Call("look at gradients"))
        return self._parameters.working()

    def _own(self, record: ShardedParameter) -> Tensor:
        own: Any = self._families.of(record).gradients.averaged(record)
        return own.to(record.p.dtype)  # type: ignore[no-any-return]


def _tensors(state: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]
