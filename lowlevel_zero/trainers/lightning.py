"""Lightning: ``Trainer(strategy=ZeroStrategy())`` shards the optimizers that ``configure_optimizers`` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.utils import _sync_params_and_buffers
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from ..checkpoint import load_checkpoint, read_rank_state, save_checkpoint
from ..checkpoint.folders import on_first_rank
from ..optimizer import LowLevelZeroOptimizer
from .checks import check_loss_scales
from .files import place_for, put_in_place

_FOLDER = "lowlevel_zero.folder"  # in a checkpoint's dict: where it was read from


class ZeroStrategy(DDPStrategy):  # type: ignore[misc]
    """``DDPStrategy`` with sharded optimizers, and without ``DistributedDataParallel``.

    Optimizers are sharded when the module is on its device and in its dtype. Each rank may drop other layers.

    Args:
        zero_options: keywords of ``LowLevelZeroOptimizer``, for each optimizer of the module.
        sharded_checkpoint: write folders, in which each rank has its slices (``lowlevel_zero.checkpoint``), and not
            files of rank 0. Both are read in any case, at any number of ranks.
        options: ``DDPStrategy``'s. ``broadcast_buffers``: before each batch of ``fit`` all ranks are given rank 0's
            buffers, as by DDP.
    """

    optimizers: list[Any]

    def __init__(
        self, zero_options: Mapping[str, Any] | None = None, *, sharded_checkpoint: bool = False, **options: Any
    ) -> None:
        self.zero_options = dict(zero_options or {})
        self.sharded_checkpoint = sharded_checkpoint
        self.broadcast_buffers = options.pop("broadcast_buffers", True)
        super().__init__(**options)
        others = [*self._ddp_kwargs, *(name for name in options if name.startswith(("ddp_", "model_averaging")))]
        if others:
            raise TypeError(
                f"ZeroStrategy: expected no option of DistributedDataParallel, got {', '.join(others)}: leave it out"
            )

    def configure_ddp(self) -> None:
        """Do nothing: the module stays unwrapped."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Shard each optimizer of ``configure_optimizers``; raise for none, or with a GradScaler. Communicates."""
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError("precision: expected no GradScaler, got '16-mixed': use 'bf16-mixed' or 'bf16-true'")
        if any(hasattr(each, "unfreeze_and_add_param_group") for each in trainer.callbacks):
            raise TypeError(
                "callbacks: expected no BaseFinetuning, which looks for parameters in groups of slices, got one: call "
                "optimizer.add_param_group in a hook of your own"
            )
        super().setup_optimizers(trainer)
        if not any(each.param_groups for each in self.optimizers):  # Lightning's stand-in for None has none
            raise TypeError(
                "configure_optimizers: expected at least one optimizer, got none, so nobody would reduce gradients: "
                "return a torch optimizer over the module's parameters, or use strategy='ddp'"
            )
        module, zero = self.lightning_module, self.zero_options
        check_loss_scales(self.optimizers, zero.get("forced_dtype"))
        self.optimizers = [LowLevelZeroOptimizer(each, model=module, **zero) for each in self.optimizers]

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Broadcast rank 0's buffers if ``broadcast_buffers``, and run the module's training step. Communicates."""
        self._share_buffers()
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's validation step; in ``fit``, broadcast rank 0's buffers before, if ``broadcast_buffers``.

        ``trainer.validate`` doesn't communicate, as there is no DDP in it: ranks may have unequal numbers of batches.
        """
        if self.lightning_module.trainer.state.fn is TrainerFn.FITTING:
            self._share_buffers()
        return super().validation_step(*args, **kwargs)

    def _share_buffers(self) -> None:
        buffers = list(self.lightning_module.buffers())
        if self.broadcast_buffers and buffers:
            _sync_params_and_buffers(dist.group.WORLD, buffers, 2**28, 0)  # type: ignore[arg-type]

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the module's backward, and reduce the gradients of all optimizers; return the loss. Communicates."""
        plugin, module = self.precision_plugin, self.lightning_module
        loss = scaled = plugin.pre_backward(closure_loss, module)
        with ExitStack() as passes:
            for each in self.optimizers:
                scaled = passes.enter_context(each.backward_pass(scaled, kwargs.get("inputs")))
            plugin.backward(scaled, module, optimizer, *args, **kwargs)
        return plugin.post_backward(loss, module)  # type: ignore[no-any-return]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context in which backwards add gradients to ``p.grad`` without reduction."""
        with ExitStack() as blocked:
            for each in self.optimizers:
                blocked.enter_context(each.no_sync())
            yield

    def teardown(self) -> None:
        """Tear down as ``DDPStrategy`` does, but drop gradients, and leave optimizer states on their device.

        The module moves to the host, and a sharded gradient can't.
        """
        optimizers, self.optimizers = self.optimizers, []
        if optimizers:
            self.lightning_module.zero_grad()
        super().teardown()
        self.optimizers = optimizers

    def optimizer_state(self, optimizer: Any) -> StateDict:
        """Gather and return the optimizer's state, whole on rank 0; an empty dict at once if ``sharded_checkpoint``."""
        return {} if self.sharded_checkpoint else optimizer.state_dict(only_on_master=True)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save all ranks' folder if ``sharded_checkpoint`` and there are optimizers, else rank 0's file. Communicates.

        A folder is written beside a former one of its name, as of the last epoch, and replaces it when it is whole.
        """
        if not self.sharded_checkpoint or not checkpoint.get("optimizer_states"):
            return super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[no-any-return]
        del checkpoint["optimizer_states"]
        if _places(checkpoint["state_dict"]) == _places(self.lightning_module_state_dict()):  # not a callback's
            del checkpoint["state_dict"]
        rank_state = checkpoint if self.is_global_zero else None
        path, ranks = Path(self.broadcast(filepath)), self.optimizers[0].shard_group
        written = on_first_rank(ranks, lambda: place_for(path))
        save_checkpoint(written, self.lightning_module, self.optimizers, rank_state=rank_state)
        on_first_rank(ranks, lambda: put_in_place(written, path))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, object]:
        """Return a file's contents, or a folder's but for optimizer states, loading weights in place. Communicates."""
        if not Path(checkpoint_path).is_dir():
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[no-any-return]
        checkpoint = {**read_rank_state(checkpoint_path, 0), "optimizer_states": [], _FOLDER: checkpoint_path}
        if "state_dict" not in checkpoint:
            checkpoint["state_dict"] = self.lightning_module.state_dict()
            dcp_load({"model": checkpoint["state_dict"]}, checkpoint_id=checkpoint_path)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states: slices from a folder, or whole state dicts from a file. Communicates."""
        if _FOLDER in checkpoint:
            load_checkpoint(checkpoint[_FOLDER], self.lightning_module, self.optimizers)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):  # as in DDPStrategy
            optimizer.load_state_dict(state)


def _places(tensors: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [(name, getattr(each, "data_ptr", int)()) for name, each in tensors.items()]
