"""``ZeroTrainer``: transformers' ``Trainer`` with a sharded optimizer instead of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from .accelerate import ZeroAccelerator
from .checks import check_plain
from .files import load_optimizer, remove_sharded, save_sharded

_FOLDER = "optimizer_0"


class ZeroTrainerMixin(Trainer):  # type: ignore[misc]  # transformers' types aren't asked for
    """A mixin that shards the optimizer of any ``Trainer`` subclass: ``class Mine(ZeroTrainerMixin, Seq2SeqTrainer)``.

    The optimizer, whether the trainer makes it or is given it, is a plain one, and is sharded when training begins.
    Checkpoints are the trainer's own, with a whole ``optimizer.pt``, which all ranks gather and the first one writes:
    they go to and from runs with DDP, and to other numbers of ranks.

    Args:
        zero_options: keywords of ``LowLevelZeroOptimizer``.
        sharded_checkpoint: write a folder instead, ``optimizer_0``, in which each rank has its slices. Both are read.
        args, kwargs: the trainer's.

    Raises:
        TypeError, ValueError: ``fp16=True``, a model or optimizer that isn't plain, or another way to shard.
        RuntimeError: the trainer doesn't see the processes that were launched, or would use several GPUs in one.
    """

    accelerator: Any
    optimizer: Any

    def __init__(
        self,
        *args: Any,
        zero_options: Mapping[str, Any] | None = None,
        sharded_checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        self.zero_options = dict(zero_options or {})
        self.sharded_checkpoint = sharded_checkpoint
        super().__init__(*args, **kwargs)
        check_plain(self.model)
        check_plain(self.optimizer)

    def create_accelerator_and_postprocess(self) -> None:
        """Set ``self.accelerator`` to a ``ZeroAccelerator``; raise ``RuntimeError`` for several GPUs in one process."""
        super().create_accelerator_and_postprocess()
        if self.args.n_gpu > 1:
            raise RuntimeError(
                f"expected a process for each GPU, got {self.args.n_gpu} GPUs in one process, which DataParallel would "
                "train on: start it with torchrun --nproc-per-node, or show it one of them by CUDA_VISIBLE_DEVICES"
            )
        chosen = self.args.accelerator_config.gradient_accumulation_kwargs or {}
        self.accelerator = ZeroAccelerator(
            zero_options=self.zero_options,
            dataloader_config=self.accelerator.dataloader_config,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=1, sync_each_batch=chosen.get("sync_each_batch", False)
            ),
        )

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """Return what ``Trainer`` does; where it begins to train a compiled model, prepare the optimizer. Communicates.

        Gradients are dropped then, as ``Trainer`` drops ``p.grad``: the last backward may have run out of memory.
        """
        wrapped = super()._wrap_model(model, training, dataloader)
        if training and isinstance(self.optimizer, AcceleratedOptimizer):
            self.optimizer.optimizer.zero_grad()
        if training and wrapped is not self.model:  # compiled before: Trainer takes it, and its optimizer, for prepared
            _, self.optimizer = self.accelerator.prepare(wrapped, self.optimizer)
        return wrapped

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as ``Trainer`` does; within a checkpoint, also wait until all ranks have come here."""
        super().save_model(output_dir, _internal_call)
        if _internal_call:
            self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the scheduler, and each rank's slices or, by one rank, the gathered state. Communicates."""
        optimizer = self.optimizer.optimizer
        folder, file = Path(output_dir, _FOLDER), Path(output_dir, OPTIMIZER_NAME)
        if self.sharded_checkpoint:
            save_sharded(optimizer, folder, file)
        else:
            state = optimizer.state_dict(only_on_master=not self.args.save_on_each_node)
            if self.args.should_save:
                remove_sharded(folder)  # of a former run, which loading would prefer
                torch.save(state, file)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load this rank's slices and the scheduler; do nothing if ``checkpoint`` lacks the scheduler. Communicates."""
        if checkpoint is None or not Path(checkpoint, SCHEDULER_NAME).is_file():  # the model alone was saved
            return
        load_optimizer(self.optimizer.optimizer, Path(checkpoint, _FOLDER), Path(checkpoint, OPTIMIZER_NAME))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))


class ZeroTrainer(ZeroTrainerMixin):
    """``Trainer`` itself with a sharded optimizer: see ``ZeroTrainerMixin``."""
