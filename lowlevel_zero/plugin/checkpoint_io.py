"""A Booster's checkpoints: ColossalAI's file layout, whole tensors, at any number of ranks.

Models are saved and loaded by ColossalAI's own code, optimizers by this package's. All ranks raise one rank's error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from colossalai.booster.plugin.low_level_zero_plugin import LowLevelZeroCheckpointIO
from colossalai.checkpoint_io import CheckpointIndexFile
from colossalai.checkpoint_io.utils import (
    get_model_base_filenames,
    get_optimizer_base_filenames,
    get_shard_filename,
    save_config_file,
    save_param_groups,
    save_state_dict,
    shard_model_checkpoint,
)
from colossalai.utils import get_current_device
from colossalai.utils.safetensors import _flatten_optim_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint.background import Background
from ..checkpoint.folders import sync
from ..communication.agreement import together
from ..communication.shard_group import ShardGroup
from ..state.loading import EXTRAS, FP8
from ..state.whole import scale_as_numbers
from .boosted import BoostedModel, BoostedOptimizer
from .files import (
    check_boosted,
    check_file_target,
    check_folder_target,
    check_same_model,
    file_beside,
    read_index,
    read_optimizer_file,
    shapes_in,
)

_OF_INDEX = f"{EXTRAS}."  # begins keys of an index's metadata, of which ColossalAI reads its own alone


class BoostedCheckpointIO(LowLevelZeroCheckpointIO):  # type: ignore[misc]  # ColossalAI ships no types
    """Saves and loads boosted models, optimizers and schedulers; every rank calls each method.

    A file is replaced when the new one is complete: a crash loses none. A directory has no index while its files are
    replaced: a crash then leaves nothing that loads. The fp32 master weights of 16-bit parameters are saved with the
    optimizer's state, as ``master_param``, and come back exactly, whichever of model and optimizer is loaded first.

    With ``use_async`` values are copied to the host, and a thread writes them while training goes on: in safetensors'
    format, one save after the other. What goes wrong there a later save or load raises; a load, and a save without
    ``use_async``, waits for all of them. A failure that nobody has been told of fails the process at its end.

    Raises (each method, on every rank):
        TypeError: the model or optimizer isn't boosted.
        ValueError: the checkpoint is another model's; the message names the first difference.
        OSError: a directory where a file is meant, or the reverse, or no such place. Nothing has been written.
        RuntimeError: another rank's error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1)
        self._writes: list[Background[None]] = []

    def _sync_io(self, wait: bool = True) -> None:
        """Raise errors of asynchronous writes that are over; with ``wait``, wait for all of them first."""
        while self._writes and (wait or self._writes[0].done()):
            self._writes.pop(0).result()

    def _target(self, checkpoint: str, index_name: str | None, use_safetensors: bool, use_async: bool) -> str:
        """Return the absolute path, since the working directory may change before the thread writes.

        Raise on rank 0 unless a checkpoint can be written there; raise earlier asynchronous failures.
        """
        self._sync_io(wait=not use_async)  # the thread may be writing there
        if self.coordinator.is_master() and index_name is not None:
            check_folder_target(checkpoint, index_name)
        elif self.coordinator.is_master():
            check_file_target(checkpoint, use_safetensors)
        return str(Path(checkpoint).absolute())

    def _do(self, write: Callable[[], None], use_async: bool) -> None:
        """Call ``write`` now, or on the writer thread if ``use_async``."""
        if use_async:
            writing: Background[None] = Background()
            writing.start(write, self._thread)
            self._writes.append(writing)
        else:
            write()

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
        """Save a model to a file or, with ``shard``, in pieces to a directory; rank 0 writes. Communicates."""
        use_safetensors = use_safetensors or use_async
        names = get_model_base_filenames(prefix, use_safetensors)
        with together(ShardGroup(), "save its model"):
            check_boosted(model, BoostedModel, "model")
            checkpoint = self._target(checkpoint, names[1] if shard else None, use_safetensors, use_async)
        model.finish_gathers()
        with together(ShardGroup(), "save its model"):
            if self.coordinator.is_master():
                state_dict = _to_write(model, use_safetensors, use_async)
                form = partial(save_state_dict, use_safetensors=use_safetensors)
                write = partial(_write_file, state_dict, checkpoint, form)
                if shard:
                    pieces = shard_model_checkpoint(state_dict, size_per_shard)
                    config = partial(save_config_file, model.unwrap())
                    write = partial(_write_folder, pieces, checkpoint, names, form, config, {})
                self._do(write, use_async)

    def load_model(
        self,
        model: BoostedModel,
        checkpoint: str,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> BoostedModel:
        """Load a model from a file, a directory or its index, and set its master weights to match. Communicates."""
        with together(ShardGroup(), "load its model"):
            self._sync_io()
        with together(ShardGroup(), "load its model"):
            check_boosted(model, BoostedModel, "model")
            little = low_cpu_mem_mode or get_current_device().type == "cpu"  # the other way pins memory
            super().load_model(model, os.fspath(checkpoint), strict, little, num_threads)
        return model

    def load_unsharded_model(
        self, model: BoostedModel, checkpoint: str, strict: bool = True, *more: Any, **options: Any
    ) -> None:
        """Load a model from one file, once its names and shapes are found to match. Doesn't communicate."""
        check_same_model(model, shapes_in(checkpoint), checkpoint, strict)
        super().load_unsharded_model(model, checkpoint, strict, *more, **options)

    def load_sharded_model(
        self, model: BoostedModel, checkpoint_index_file: Path, strict: bool = False, *more: Any, **options: Any
    ) -> None:
        """Load a model from a directory, once its names and shapes are found to match. Doesn't communicate."""
        files, _ = read_index(checkpoint_index_file).get_checkpoint_filenames()
        shapes = {name: shape for file in files for name, shape in shapes_in(file).items()}
        check_same_model(model, shapes, str(checkpoint_index_file), strict)
        super().load_sharded_model(model, checkpoint_index_file, strict, *more, **options)

    def save_lora_as_pretrained(
        self, model: BoostedModel, checkpoint: str, use_safetensors: bool = False, state_dict: Any = None
    ) -> None:
        """Save the adapters, in peft's layout, to a directory; rank 0 writes, all ranks call it. Communicates."""
        with together(ShardGroup(), "save its adapters"):
            check_boosted(model, BoostedModel, "model")
            if self.coordinator.is_master() and Path(checkpoint).is_file():
                raise NotADirectoryError(
                    f"{checkpoint}: expected a directory to save adapters in, got a file: name another"
                )
        with together(ShardGroup(), "save its adapters"):
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
        """Gather the optimizer's state, and save it on rank 0 to a file or, with ``shard``, in pieces. Communicates.

        A directory has an index, a file of param groups, and pieces of the state.
        """
        names = get_optimizer_base_filenames(prefix, use_async)
        with together(ShardGroup(), "save its optimizer"):
            check_boosted(optimizer, BoostedOptimizer, "optimizer")
            checkpoint = self._target(checkpoint, names[1] if shard else None, use_async, use_async)
        if shard:
            self._save_pieces(optimizer, checkpoint, names, size_per_shard, use_async)
            return
        state_dict = optimizer.state_dict({} if use_async else None, only_on_master=True)
        with together(ShardGroup(), "save its optimizer"):
            if self.coordinator.is_master():
                self._do(partial(_write_file, state_dict, checkpoint, _optimizer_form(use_async)), use_async)

    def _save_pieces(
        self, optimizer: BoostedOptimizer, checkpoint: str, names: tuple[str, str, str], size: int, use_async: bool
    ) -> None:
        """Gather the optimizer's state on all ranks, and write it on the master as a folder of pieces. Communicates."""
        pieces = optimizer.state_dict_shard(size, {} if use_async else None, only_on_master=True)
        with together(ShardGroup(), "save its optimizer"):
            try:
                if self.coordinator.is_master():
                    taken, form = list(pieces) if use_async else pieces, _optimizer_form(use_async)
                    extras = {
                        "loss_scale": scale_as_numbers(optimizer.scaler),
                        FP8: optimizer.options.communication.fp8,
                    }
                    metadata: dict[str, Any] = {f"{_OF_INDEX}{key}": each for key, each in extras.items() if each}
                    metadata["param_groups"] = names[2]
                    groups = partial(_save_groups, optimizer.whole_state.packed_groups(), names[2])
                    self._do(partial(_write_folder, taken, checkpoint, names, form, groups, metadata), use_async)
            finally:
                for _ in pieces:  # to the end even after an error: the other ranks gather too
                    pass

    def load_optimizer(
        self,
        optimizer: BoostedOptimizer,
        checkpoint: str,
        prefix: str | None = None,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load an optimizer from a file, a directory or its index, on every rank or on none. Communicates."""
        with together(ShardGroup(), "load its optimizer"):
            self._sync_io()
        with together(ShardGroup(), "load its optimizer"):
            check_boosted(optimizer, BoostedOptimizer, "optimizer")
            super().load_optimizer(optimizer, os.fspath(checkpoint), prefix, low_cpu_mem_mode, num_threads)

    def load_unsharded_optimizer(self, optimizer: BoostedOptimizer, checkpoint: str, *_: Any, **__: Any) -> None:
        """Load an optimizer from one file, which every rank reads. Communicates."""
        optimizer.load_state_dict(read_optimizer_file(checkpoint, dict))

    def load_sharded_optimizer(
        self, optimizer: BoostedOptimizer, index_file_path: Path, prefix: str | None = None, *_: Any, **__: Any
    ) -> None:
        """Load an optimizer from a directory, whose pieces every rank reads one by one. Communicates."""
        index = read_index(index_file_path)
        groups_file = index.get_param_group_filename()
        if groups_file is None:
            raise ValueError(
                f"{index_file_path}: expected the index that booster.save_optimizer wrote, got one without "
                "param_groups, such as a model's: name the optimizer's index file"
            )
        files, _ = index.get_checkpoint_filenames()
        with optimizer.loading_whole():
            optimizer.whole_state.load_shards(
                read_optimizer_file(groups_file, list),
                (read_optimizer_file(file, dict) for file in files),
                {key.removeprefix(_OF_INDEX): v for key, v in index.metadata.items() if key.startswith(_OF_INDEX)},
            )

    # ---- schedulers ----

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        """Save a scheduler to a file, which rank 0 writes. All ranks call it. Communicates."""
        with together(ShardGroup(), "save its scheduler"):
            if self.coordinator.is_master():
                check_file_target(checkpoint)
                with file_beside(checkpoint) as path:
                    super().save_lr_scheduler(lr_scheduler, path)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        """Load a scheduler from a file, which every rank reads; if one fails, all raise. Communicates."""
        with together(ShardGroup(), "load its scheduler"):
            super().load_lr_scheduler(lr_scheduler, checkpoint)


# ---- writing: now, or by the thread ----

# Writes one state dict to a path.
_Form: TypeAlias = Callable[[dict[Any, Any], str], None]


def _write_file(state_dict: dict[Any, Any], checkpoint: str, form: _Form) -> None:
    with file_beside(checkpoint) as path:
        form(state_dict, path)


def _write_folder(
    pieces: Iterable[tuple[dict[Any, Any], float]],
    checkpoint: str,
    names: Sequence[str],
    form: _Form,
    write_others: Callable[[str], None],
    metadata: Mapping[str, Any],
) -> None:
    """Remove the former index, write the pieces and other files, then the index, and delete stale files.

    A former index goes before the first of its files is replaced: a crash meanwhile leaves none, and nothing loads. Its
    files that the new index doesn't name go at the end. ``pieces`` are state dicts and their sizes in MiB; ``names``
    are the start of the pieces' names, and the name of the index.
    """
    base_name, index_name, *_ = names
    folder = Path(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    former: set[str] = set()
    if (folder / index_name).exists():
        former = set(read_index(folder / index_name).weight_map.values())
        (folder / index_name).unlink()
        sync(folder)
    index = CheckpointIndexFile(folder)
    total = 0.0
    for at, (piece, size) in enumerate(pieces):
        file = get_shard_filename(base_name, at)
        for key in piece:
            index.append_weight_map(str(key), file)
        form(piece, str(folder / file))
        sync(folder / file)
        total += size
    write_others(checkpoint)
    for key, value in {"total_size": total, **metadata}.items():
        index.append_meta_data(key, value)
    beside = folder / f"{index_name}.writing"  # ColossalAI takes any *.index.json for an index
    index.write_index_file(beside.name)
    sync(beside)
    os.replace(beside, folder / index_name)
    sync(folder)
    for file in former.difference(index.weight_map.values()):
        (folder / file).unlink(missing_ok=True)


def _save_groups(groups: list[dict[str, Any]], name: str, folder: str) -> None:
    save_param_groups({"param_groups": groups}, os.path.join(folder, name))
    sync(Path(folder, name))


def _save_flat(state_dict: dict[Any, Any], path: str) -> None:
    """Write an optimizer's state as safetensors, by ColossalAI's names for asynchronous saves."""
    flat, others = _flatten_optim_state_dict(state_dict)
    save_file(flat, path, {"format": "pt", **{key: json.dumps(value) for key, value in (others or {}).items()}})


def _optimizer_form(use_async: bool) -> _Form:
    return _save_flat if use_async else partial(save_state_dict, use_safetensors=False)


def _to_write(model: BoostedModel, use_safetensors: bool, use_async: bool) -> dict[str, Any]:
    """Return a model's state dict: for safetensors, contiguous tensors that share no memory; for a thread, copies."""
    state_dict: dict[str, Any] = model.unwrap().state_dict()
    seen = set()
    for name, value in state_dict.items() if use_safetensors else ():
        if isinstance(value, Tensor) and value.numel() > 0:
            address = value.untyped_storage().data_ptr()
            if use_async or address in seen or not value.is_contiguous():
                device = "cpu" if use_async else value.device
                state_dict[name] = value.detach().to(device, copy=True, memory_format=torch.contiguous_format)
            seen.add(address)
    return state_dict
