"""LowLevelZeroPlugin: ColossalAI's keywords, checks before boosting, and the boosted pair."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from colossalai.booster.plugin import LowLevelZeroPlugin as ColossalAIsPlugin
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase
from colossalai.cluster import ProcessGroupMesh
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.logging import get_dist_logger
from peft import PeftModel
from torch import nn
from torch.optim import Optimizer

from ..bookkeeping.module_names import parameter_names
from ..loss_scaler import LossScaler
from ..options import ZeroOptions
from .boosted import BoostedModel, BoostedOptimizer
from .checkpoint_io import BoostedCheckpointIO
from .files import all_or_none
from .host_accelerator import complete_cpu_accelerator
from .lora import add_lora_parameters

PRECISIONS = ["fp16", "bf16", "fp32"]
# Keywords of the plugin that are the optimizer's, by name and meaning.
_OPTIMIZERS_OWN = frozenset(inspect.signature(BoostedOptimizer).parameters)


class LowLevelZeroPlugin(ColossalAIsPlugin):  # type: ignore[misc]  # ColossalAI ships no types
    """A plugin for ``colossalai.booster.Booster`` that trains with this package's ZeRO, on CUDA, NPU or CPU.

    Keywords, meanings and defaults are those of ColossalAI 0.5.0's ``LowLevelZeroPlugin``. On a machine without
    an accelerator it completes ColossalAI's CPU accelerator (see ``host_accelerator.py``).

    Args:
        stage: 1 or 2.
        precision: "fp16", "bf16" or "fp32": what the model is converted to.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale:
            the dynamic loss scale of fp16.
        max_norm: clip gradients to this global norm; 0: don't.
        norm_type: of that norm; 2 alone.
        reduce_bucket_size_in_m: size of a communication bucket in units of 2**20 elements.
        communication_dtype: dtype in which gradients travel; None: each parameter's own.
        overlap_communication: reduce during backward.
        overlap_allgather: gather updated parameters while the next forward runs.
        cpu_offload: step on the host, where masters, the gradients that step them and optimizer state live then.
        master_weights: step fp32 copies of 16-bit slices.
        verbose: log skipped steps.
        cast_inputs: convert floating-point inputs of the model to its dtype.
        fp8_communication: gradients and updated parameters travel in fp8.
        use_fp8: not available yet.
        extra_dp_size: rows of ranks, each of which reduces gradients within before they cross; it divides the world
            size. Optimizer state is sharded over all ranks, as with 1.

    Raises:
        ValueError, TypeError: a value out of range, or of the wrong type.
        NotImplementedError: an option that isn't available yet.
    """

    def __init__(
        self,
        stage: int = 1,
        precision: str = "fp16",
        initial_scale: float = 2**32,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: float = 12,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        cpu_offload: bool = False,
        master_weights: bool = True,
        verbose: bool = False,
        cast_inputs: bool = True,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        extra_dp_size: int = 1,
    ) -> None:
        keywords = locals()
        _check_choices(stage, precision, norm_type, extra_dp_size, use_fp8)
        self.zero_optim_kwargs = _optimizer_options(keywords)
        _check_process_group(extra_dp_size)
        DPPluginBase.__init__(self)  # ColossalAI's own plugin would set up its optimizer's options
        complete_cpu_accelerator()
        if extra_dp_size > 1:
            self.pg_mesh = ProcessGroupMesh(extra_dp_size, self.world_size // extra_dp_size)
            self.zero_optim_kwargs["extra_dp_group"] = self.pg_mesh.get_group_along_axis(0)
            self.zero_optim_kwargs["dp_process_group"] = self.pg_mesh.get_group_along_axis(1)
        self.stage = stage
        self.precision = precision
        self.cast_inputs = cast_inputs
        self.verbose = verbose
        self.use_fp8 = use_fp8
        self.lora_enabled = False
        self.logger = get_dist_logger()

    # ---- what Booster asks ----

    def support_no_sync(self) -> bool:
        """Yes, in both stages."""
        return True

    def supported_devices(self) -> list[str]:
        """Where it runs."""
        return ["cuda", "npu", "cpu"]

    def get_checkpoint_io(self) -> BoostedCheckpointIO:
        """What saves and loads boosted models and optimizers."""
        return BoostedCheckpointIO()

    # ---- boosting ----

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, Optimizer | None, Callable[..., Any] | None, Any, Any]:
        """Convert and wrap the model, and shard the optimizer: what ``Booster.boost`` calls, on every rank.

        What has been boosted before passes through, so a boosted model may get its optimizer later, or several. A new
        optimizer retires those that have trained its parameters.

        Raises:
            ValueError, TypeError: the two don't belong together, were boosted by another plugin, or can't be sharded;
                on a mistake of one rank, all raise.
        """
        with all_or_none("boost its model and optimizer"):
            module = model.module if isinstance(model, BoostedModel) else model
            _check_pair(module, optimizer)
            if self.lora_enabled:
                self._add_lora(module, optimizer)
        boosted = BoostedModel(module, self.precision, cast_inputs=self.cast_inputs) if module is model else model
        if optimizer is not None and not isinstance(optimizer, BoostedOptimizer):
            optimizer = BoostedOptimizer(optimizer, **self.zero_optim_kwargs, model=module)
        return boosted, optimizer, criterion, dataloader, lr_scheduler

    def no_sync(self, model: nn.Module | None, optimizer: OptimizerWrapper) -> AbstractContextManager[None]:
        """A context in which gradients accumulate in ``p.grad``, unreduced; stage 2 then keeps them whole."""
        if not isinstance(optimizer, BoostedOptimizer):
            raise TypeError(
                f"optimizer: expected the one that booster.boost returned, got {type(optimizer).__name__}: "
                "call booster.no_sync(model, optimizer) after boosting"
            )
        return optimizer.no_sync()

    # ---- LoRA ----

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
    ) -> nn.Module:
        """Add LoRA adapters to a model, new ones or those saved in ``pretrained_dir``, before boosting it.

        The optimizer may exist already: boosting gives it the adapters' parameters.
        """
        if isinstance(model, ModelWrapper):
            raise ValueError(
                f"model: expected one that isn't boosted yet, got a {type(model).__name__}: "
                "call booster.enable_lora before booster.boost"
            )
        return super().enable_lora(model, pretrained_dir, lora_config, bnb_quantization_config)  # type: ignore[no-any-return]

    def _add_lora(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        if not isinstance(model, PeftModel):
            raise ValueError(
                f"model: expected what booster.enable_lora returned, got a {type(model).__name__}: "
                "boost the model with the adapters, or make a plugin of its own for the one without"
            )
        if optimizer is not None and not isinstance(optimizer, BoostedOptimizer):
            add_lora_parameters(model, optimizer)


def _optimizer_options(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's options among the plugin's; raises now for what would be refused when boosting."""
    options = {name: value for name, value in keywords.items() if name in _OPTIMIZERS_OWN}
    options["clip_grad_norm"] = keywords["max_norm"]
    options["reduce_bucket_size"] = int(keywords["reduce_bucket_size_in_m"] * 2**20)
    options["partition_grad"] = keywords["stage"] == 2
    ZeroOptions.chosen(options)
    LossScaler.chosen(options)
    return options


def _check_choices(stage: object, precision: object, norm_type: object, extra_dp_size: object, use_fp8: object) -> None:
    if stage not in (1, 2):
        raise ValueError(f"stage: expected 1 or 2, got {stage!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    if norm_type != 2:
        raise ValueError(f"norm_type: expected 2, the norm that gradients are clipped by, got {norm_type!r}")
    if not isinstance(extra_dp_size, int) or isinstance(extra_dp_size, bool) or extra_dp_size < 1:
        raise ValueError(f"extra_dp_size: expected a number of rows of ranks, at least 1, got {extra_dp_size!r}")
    if use_fp8:
        raise NotImplementedError(f"use_fp8={use_fp8!r} is not available yet: leave use_fp8 out")


def _check_process_group(extra_dp_size: int) -> None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError(
            "expected an initialised process group, got none: call colossalai.launch_from_torch() first, "
            "in a program that torchrun starts"
        )
    world_size = torch.distributed.get_world_size()
    if world_size % extra_dp_size:
        raise ValueError(f"extra_dp_size: expected a divisor of the world size, {world_size}, got {extra_dp_size}")


def _check_pair(model: object, optimizer: object) -> None:
    """Raise unless the two are a module and, if any, an optimizer over its parameters or one that is boosted."""
    others = [each for each in (model, optimizer) if isinstance(each, ModelWrapper | OptimizerWrapper)]
    others = [each for each in others if not isinstance(each, BoostedOptimizer)]
    if others:
        raise ValueError(
            f"expected a model and an optimizer that no other plugin has boosted, got a {type(others[0]).__name__}: "
            "boost the module and the optimizer that it wraps, each by one plugin"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if optimizer is None or isinstance(optimizer, BoostedOptimizer):
        return
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    own = set(model.parameters())
    for p, name in parameter_names((group["params"] for group in optimizer.param_groups), model).items():
        if p not in own:
            raise ValueError(
                f"optimizer: expected parameters of the model, got others, first {name}, {tuple(p.shape)}: make the "
                "optimizer with model.parameters() of the very model that is boosted, not of a copy"
            )
