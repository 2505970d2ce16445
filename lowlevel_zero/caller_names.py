"""The members by which ColossalAI's callers know a low-level ZeRO optimizer, thin over the records."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .bookkeeping.gradient_store import GradientStore
from .bookkeeping.parameter_store import ParameterStore, ShardedParameter
from .reducer import Reducer


class CallerNames:
    """Look-ups under ColossalAI 0.5.0's names. Maps are keyed by ``id()`` because its callers look up so."""

    _parameters: ParameterStore
    _gradients: GradientStore
    _reducer: Reducer

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
        """This rank's slices ``[s]`` of the averaged gradients of one param group; dropped layers are left out."""
        return [grad for record in self._settled() if record.group == group_id for grad in [self._own(record)]]

    def get_working_grad_by_param_id(self, param_id: int) -> Tensor | None:
        """This rank's slice ``[s]`` of the averaged gradient of the parameter with that ``id()``, or None."""
        return next((self._own(record) for record in self._settled() if id(record.p) == param_id), None)

    def get_partitioned_gradients_by_param_id(self, group_id: int, param_id: int) -> list[Tensor]:
        """The averaged gradient's slices that this rank holds: every rank's in stage 1, its own in stage 2."""
        for record in self._settled():
            if record.group == group_id and id(record.p) == param_id:
                rows = self._gradients.averaged_rows(record)
                return [self._own(record)] if rows is None else list(rows.to(record.p.dtype).unbind())
        return []

    def update_master_params(self, model: nn.Module) -> None:
        """Overwrite the master slices of ``model``'s parameters with what the parameters hold now."""
        for p in model.parameters():
            record = self._parameters.find(p)
            if record is not None:
                record.refresh_master()

    def _settled(self) -> list[ShardedParameter]:
        """Records with a gradient, as far as this rank's own rounds tell; doesn't communicate."""
        self._reducer.drain()
        self._gradients.resolve()
        return self._parameters.working()

    def _own(self, record: ShardedParameter) -> Tensor:
        own: Any = self._gradients.averaged(record)
        return own.to(record.p.dtype)  # type: ignore[no-any-return]
