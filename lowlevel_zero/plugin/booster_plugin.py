"""``LowLevelZeroPlugin``: ColossalAI's plugin with this package's optimizer in place of ColossalAI's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from inspect import signature
from typing import Any

from colossalai.booster.plugin import LowLevelZeroPlugin as ColossalAIsPlugin
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import nn
from torch.optim import Optimizer

from ..bookkeeping.module_names import parameter_names
from ..communication.agreement import together
from ..communication.shard_group import ShardGroup
from ..options import options_of
from .boosted import BoostedModel, BoostedOptimizer
from .checkpoint_io import BoostedCheckpointIO
from .host_accelerator import complete_cpu_accelerator
from .lora import add_lora_parameters

_DEFAULTS = {name: each.default for name, each in signature(BoostedOptimizer).parameters.items()}


class LowLevelZeroPlugin(ColossalAIsPlugin):  # type: ignore[misc]  # ColossalAI ships no types
    """A plugin for ``colossalai.booster.Booster`` that trains with this package's ZeRO, on CUDA, NPU or CPU.

    It takes the keywords of ColossalAI 0.5.0's ``LowLevelZeroPlugin``, with their meanings and defaults. Those of the
    optimizer are checked when ``Booster.boost`` begins. On a machine without an accelerator the plugin completes
    ColossalAI's CPU accelerator (see ``host_accelerator.py``).

    Raises:
        AssertionError: ColossalAI's own checks fail: of the stage, the precision, the process group.
        ValueError: ``extra_dp_size`` is less than 1.
        NotImplementedError: ``use_fp8=True``.
    """

    @wraps(ColossalAIsPlugin.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        complete_cpu_accelerator()
        options = self.zero_optim_kwargs
        options["reduce_bucket_size"] = int(options["reduce_bucket_size"])
        if keywords.get("extra_dp_size", 1) < 1:
            raise ValueError(
                "extra_dp_size: expected a number of groups to split the ranks into, at least 1, got "
                f"{keywords['extra_dp_size']!r}"
            )
        if self.use_fp8:
            raise NotImplementedError(
                f"use_fp8: expected False, got {self.use_fp8!r}: leave it out; fp8_communication=True sends fp8"
            )

    # ---- what Booster asks ----

    def support_no_sync(self) -> bool:
        """Return True: ``no_sync`` works in both stages."""
        return True

    def supported_devices(self) -> list[str]:
        """Return the device types that the plugin supports."""
        return ["cuda", "npu", "cpu"]

    def get_checkpoint_io(self) -> BoostedCheckpointIO:
        """Return the object that saves and loads boosted models and optimizers."""
        return BoostedCheckpointIO()

    # ---- boosting ----

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, Optimizer | None, Callable[..., object] | None, object, object]:
        """Wrap the model and shard the optimizer, unless they are boosted. Communicates: every rank calls ``boost``.

        A boosted model or optimizer passes through, so a boosted model may get its optimizer later, or several. A new
        optimizer retires the former ones that have trained its parameters.

        Raises:
            ValueError, TypeError: the two don't belong together, were boosted by another plugin, or can't be sharded;
                on a mistake of one rank, all raise.
        """
        with together(ShardGroup(), "boost its model and optimizer"):
            module = model.module if isinstance(model, BoostedModel) else model
            _check_pair(module, optimizer)
            options_of({**_DEFAULTS, **self.zero_optim_kwargs, "verbose": self.verbose})
            if self.lora_enabled:
                add_lora_parameters(module, optimizer)
        boosted = BoostedModel(module, self.precision, cast_inputs=self.cast_inputs) if module is model else model
        if optimizer is not None and not isinstance(optimizer, BoostedOptimizer):
            optimizer = BoostedOptimizer(optimizer, **self.zero_optim_kwargs, verbose=self.verbose, model=module)
        return boosted, optimizer, criterion, dataloader, lr_scheduler

    def no_sync(self, model: nn.Module | None, optimizer: OptimizerWrapper) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate in ``p.grad`` without reduction, in both stages."""
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
        """Add LoRA adapters to a model before it is boosted: new ones, or those in ``pretrained_dir``.

        The optimizer may exist already: boosting gives it the adapters' parameters.
        """
        if isinstance(model, ModelWrapper):
            raise ValueError(
                f"model: expected one that isn't boosted yet, got a {type(model).__name__}: "
                "call booster.enable_lora before booster.boost"
            )
        return super().enable_lora(model, pretrained_dir, lora_config, bnb_quantization_config)  # type: ignore[no-any-return]


def _check_pair(model: object, optimizer: object) -> None:
    """Raise unless ``model`` is a module and ``optimizer``, boosted or not, is over its parameters, or None."""
    others = [each for each in (model, optimizer) if isinstance(each, ModelWrapper | OptimizerWrapper)]
    others = [each for each in others if not isinstance(each, BoostedOptimizer)]
    if others:
        raise ValueError(
            f"expected a model and an optimizer that no other plugin has boosted, got a {type(others[0]).__name__}: "
            "boost the module and the optimizer that it wraps, each by one plugin"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    own = set(model.parameters())
    if isinstance(optimizer, BoostedOptimizer):  # its groups hold slices
        names = optimizer.parameter_names()
    else:
        names = parameter_names((group["params"] for group in optimizer.param_groups), model)
    for p, name in names.items():
        if p not in own:
            raise ValueError(
                f"optimizer: expected parameters of the model, got others, first {name}, {tuple(p.shape)}: make the "
                "optimizer with model.parameters() of the model that is boosted, not of a copy"
            )
