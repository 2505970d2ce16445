"""What a Booster saves and loads: ColossalAI's file layout, whole tensors, at any number of ranks.

The model half is ColossalAI's own, the optimizer half this package's. What one rank can't do, all refuse.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from colossalai.booster.plugin.low_level_zero_plugin import LowLevelZeroCheckpointIO
from colossalai.checkpoint_io import CheckpointIndexFile
from colossalai.checkpoint_io.utils import (
    get_model_base_filenames,
    get_optimizer_base_filenames,
    get_shard_filename,
    save_param_groups,
    save_state_dict,
)
from colossalai.interface.model import PeftUnwrapMixin
from colossalai.utils import get_current_device
from colossalai.utils.safetensors import save_nested
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..state.whole import load_state_shards, packed_groups, scale_as_numbers
from .boosted import BoostedModel, BoostedOptimizer
from .checkpoint_checks import (
    check_async,
    check_boosted,
    check_is_file,
    check_same_model,
    check_suffix,
    read_optimizer_file,
    shapes_in,
)
from .files import all_or_none, check_file_target, check_folder_target, file_beside, folder_beside

# Among an index's metadata, of which ColossalAI reads its own keys alone.
LOSS_SCALE = "lowlevel_zero.loss_scale"
SENT_FP8 = "lowlevel_zero.fp8"


class BoostedCheckpointIO(LowLevelZeroCheckpointIO):  # type: ignore[misc]  # ColossalAI ships no types
    """Saves and loads boosted models, optimizers and schedulers; every rank calls each method.

    A file, or a directory's index, is replaced when the new checkpoint is complete: a crash loses none. The fp32 master
    weights of 16-bit parameters are saved with the optimizer's state, as ``master_param``, and come back exactly,
    whichever of model and optimizer is loaded first.

    Raises (each method, on every rank):
        TypeError: what is to be saved or loaded isn't boosted.
        ValueError: the checkpoint is another model's; the message names the first difference.
        OSError: a directory where a file is meant, or the reverse, or no such place. Nothing has been written.
        RuntimeError: another rank's error, or ``use_async`` without tensornvme.
    """

    # ---- models ----

    def save_model(
        self,
        model: BoostedModel,
        checkpoint: str,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Save a model: to a file, or with ``shard`` to a directory in pieces of ``size_per_shard`` MiB."""
        with all_or_none("save its model"):
            check_boosted(model, BoostedModel, "model")
            check_async(use_async)
            if self.coordinator.is_master() and shard:
                check_folder_target(checkpoint, get_model_base_filenames(prefix, use_safetensors or use_async)[1])
            elif self.coordinator.is_master():
                check_file_target(checkpoint)
                check_suffix(checkpoint, use_safetensors or use_async)
        with all_or_none("save its model"), _apart(model, use_safetensors or use_async):
            super().save_model(
                model, checkpoint, shard, gather_dtensor, prefix, size_per_shard, use_safetensors, use_async
            )

    def save_unsharded_model(
        self, model: BoostedModel, checkpoint: str, gather_dtensor: bool, use_safetensors: bool, use_async: bool = False
    ) -> None:
        """Save a model to a file."""
        alone = self.coordinator.is_master() and not use_async
        with file_beside(checkpoint) if alone else nullcontext(checkpoint) as path:
            super().save_unsharded_model(model, path, gather_dtensor, use_safetensors, use_async)

    def save_sharded_model(
        self,
        model: BoostedModel,
        checkpoint_path: str,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        max_shard_size: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Save a model to a directory."""
        if not self.coordinator.is_master():
            return
        index_name = get_model_base_filenames(prefix, use_safetensors)[1]
        with nullcontext(checkpoint_path) if use_async else folder_beside(checkpoint_path, index_name) as folder:
            super().save_sharded_model(
                model, folder, gather_dtensor, prefix, max_shard_size, use_safetensors, use_async
            )

    def load_model(
        self,
        model: BoostedModel,
        checkpoint: str,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> BoostedModel:
        """Load a model from a file, a directory or its index, and refresh the master weights."""
        with all_or_none("load its model"):
            check_boosted(model, BoostedModel, "model")
            super().load_model(model, checkpoint, strict, _low_memory(low_cpu_mem_mode), num_threads)
        return model

    def load_unsharded_model(
        self, model: BoostedModel, checkpoint: str, strict: bool = True, *more: Any, **options: Any
    ) -> None:
        """Load a model from a file."""
        check_is_file(checkpoint)
        check_same_model(model, shapes_in(checkpoint), checkpoint, strict)
        super().load_unsharded_model(model, checkpoint, strict, *more, **options)

    def load_sharded_model(
        self, model: BoostedModel, checkpoint_index_file: Path, strict: bool = False, *more: Any, **options: Any
    ) -> None:
        """Load a model from a directory."""
        files, _ = CheckpointIndexFile.from_file(checkpoint_index_file).get_checkpoint_filenames()
        shapes = {name: shape for file in files for name, shape in shapes_in(file).items()}
        check_same_model(model, shapes, str(checkpoint_index_file), strict)
        super().load_sharded_model(model, checkpoint_index_file, strict, *more, **options)

    def save_lora_as_pretrained(
        self, model: BoostedModel, checkpoint: str, use_safetensors: bool = False, state_dict: Any = None
    ) -> None:
        """Save the adapters, in peft's layout, to a directory."""
        with all_or_none("save its adapters"):
            check_boosted(model, BoostedModel, "model")
            if self.coordinator.is_master() and Path(checkpoint).is_file():
                raise NotADirectoryError(f"{checkpoint}: expected a directory for the adapters, got a file")
        with all_or_none("save its adapters"):
            super().save_lora_as_pretrained(model, checkpoint, use_safetensors, state_dict)

    # ---- optimizers ----

    def save_optimizer(
        self,
        optimizer: BoostedOptimizer,
        checkpoint: str,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Save an optimizer as plain torch would: to a file, or with ``shard`` to a directory in pieces."""
        with all_or_none("save its optimizer"):
            check_boosted(optimizer, BoostedOptimizer, "optimizer")
            check_async(use_async)
            if self.coordinator.is_master() and shard:
                check_folder_target(checkpoint, get_optimizer_base_filenames(prefix, use_async)[1])
            elif self.coordinator.is_master():
                check_file_target(checkpoint)
        super().save_optimizer(optimizer, checkpoint, shard, gather_dtensor, prefix, size_per_shard, use_async)

    def save_unsharded_optimizer(
        self, optimizer: BoostedOptimizer, checkpoint: str, gather_dtensor: bool = False, use_async: bool = False
    ) -> None:
        """Save an optimizer to a file: the state dict of a plain torch optimizer over the whole parameters."""
        state_dict = optimizer.state_dict(self._pinned(optimizer, use_async), only_on_master=True)
        with all_or_none("save its optimizer"):
            if self.coordinator.is_master():
                self._write(state_dict, checkpoint, use_async)

    def save_sharded_optimizer(
        self,
        optimizer: BoostedOptimizer,
        checkpoint: str,
        gather_dtensor: bool = False,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Save an optimizer to a directory: an index, a file of param groups, and pieces of the state."""
        pieces = optimizer.state_dict_shard(size_per_shard, self._pinned(optimizer, use_async), only_on_master=True)
        with all_or_none("save its optimizer"):
            try:
                if self.coordinator.is_master():
                    names = get_optimizer_base_filenames(prefix, use_async)
                    with nullcontext(checkpoint) if use_async else folder_beside(checkpoint, names[1]) as folder:
                        self._write_pieces(optimizer, pieces, folder, names, use_async)
            finally:
                for _ in pieces:  # to the end even after an error: the other ranks gather too
                    pass

    def _write_pieces(
        self,
        optimizer: BoostedOptimizer,
        pieces: Iterator[tuple[dict[int, Any], float]],
        folder: str,
        names: tuple[str, str, str],
        use_async: bool,
    ) -> None:
        states_name, index_name, groups_name = names
        Path(folder).mkdir(parents=True, exist_ok=True)
        index = CheckpointIndexFile(folder)
        index.append_meta_data("param_groups", groups_name)
        save_param_groups({"param_groups": packed_groups(optimizer)}, os.path.join(folder, groups_name))
        total = 0.0
        for at, (piece, size) in enumerate(pieces):
            file = get_shard_filename(states_name, at)
            for place in piece:
                index.append_weight_map(str(place), file)
            self._write(piece, os.path.join(folder, file), use_async)
            total += size
        index.append_meta_data("total_size", total)
        loss_scale = scale_as_numbers(optimizer.scaler)
        if loss_scale is not None:
            index.append_meta_data(LOSS_SCALE, loss_scale)
        if optimizer.options.fp8_communication:
            index.append_meta_data(SENT_FP8, True)
        index.write_index_file(index_name)

    def _write(self, state_dict: dict[Any, Any], path: str, use_async: bool) -> None:
        if use_async:
            self.async_writers.append(save_nested(path, state_dict))
            return
        with file_beside(path) as beside:
            save_state_dict(state_dict, beside, use_safetensors=False)

    def _pinned(self, optimizer: BoostedOptimizer, use_async: bool) -> dict[int, Any] | None:
        """Buffers that an asynchronous writer reads from, kept for the next time."""
        if not (use_async and self.coordinator.is_master()):
            return None
        pinned: dict[int, Any] = self.pinned_state_dicts.setdefault(id(optimizer), {})
        return pinned

    def load_optimizer(
        self,
        optimizer: BoostedOptimizer,
        checkpoint: str,
        prefix: str | None = None,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load an optimizer from a file, a directory or its index, saved by this plugin or by another."""
        with all_or_none("load its optimizer"):
            check_boosted(optimizer, BoostedOptimizer, "optimizer")
            super().load_optimizer(optimizer, checkpoint, prefix, low_cpu_mem_mode, num_threads)

    def load_unsharded_optimizer(self, optimizer: BoostedOptimizer, checkpoint: str, *_: Any, **__: Any) -> None:
        """Load an optimizer from a file."""
        check_is_file(checkpoint)
        optimizer.load_state_dict(read_optimizer_file(checkpoint))

    def load_sharded_optimizer(
        self, optimizer: BoostedOptimizer, index_file_path: Path, prefix: str | None = None, *_: Any, **__: Any
    ) -> None:
        """Load an optimizer from a directory, piece by piece."""
        index = CheckpointIndexFile.from_file(index_file_path)
        groups_file = index.get_param_group_filename()
        if groups_file is None:
            raise ValueError(f"{index_file_path}: expected an optimizer's index, got one without param_groups")
        files, _ = index.get_checkpoint_filenames()
        load_state_shards(
            optimizer,
            read_optimizer_file(groups_file),
            (read_optimizer_file(file) for file in files),
            index.metadata.get(LOSS_SCALE),
            bool(index.metadata.get(SENT_FP8)),
        )

    # ---- schedulers ----

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        """Save a scheduler to a file."""
        with all_or_none("save its scheduler"):
            if self.coordinator.is_master():
                check_file_target(checkpoint)
                with file_beside(checkpoint) as path:
                    super().save_lr_scheduler(lr_scheduler, path)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        """Load a scheduler from a file."""
        with all_or_none("load its scheduler"):
            check_is_file(checkpoint)
            super().load_lr_scheduler(lr_scheduler, checkpoint)


@contextmanager
def _apart(model: BoostedModel, wanted: bool) -> Iterator[None]:
    """In the model's state dict, give each tensor contiguous memory of its own, which safetensors insists on."""
    module = model.unwrap()
    module = module.base_model if isinstance(module, PeftUnwrapMixin) else module
    handle = module._register_state_dict_hook(_copy_what_shares) if wanted else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def _copy_what_shares(module: object, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    seen = set()
    for name, value in state_dict.items():
        if isinstance(value, Tensor) and value.numel() > 0:
            address = value.untyped_storage().data_ptr()
            if address in seen or not value.is_contiguous():
                state_dict[name] = value.clone(memory_format=torch.contiguous_format)
            seen.add(address)


def _low_memory(asked: bool) -> bool:
    """Pinned memory, which the other mode uses, needs an accelerator."""
    return asked or get_current_device().type == "cpu"
