"""Consolidation: a sharded checkpoint becomes model.safetensors and optimizer.pt, which load without this package."""

from __future__ import annotations

import importlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..optim.quantised import is_scale, scales_of
from ..state.loading import ADDED, CLASS, EXTRAS, FP8, OTHERS, PLANS
from ..state.nested import State, nested
from .folders import publish, sync
from .objects import Settings
from .optimizers import Name
from .saved import SavedCheckpoint
from .sharded_state import BLOCK, renamed

MODEL, OPTIMIZER = "model.safetensors", "optimizer.pt"
_MAPPED_FROM = 2**20  # bytes of a tensor that is read into a mapped file, of which memory keeps what fits


def consolidate(
    checkpoint: SavedCheckpoint, out: Path, *, force: bool = False, done: Callable[[int], object] = lambda count: None
) -> None:
    """Write ``checkpoint`` as ``out/model.safetensors`` and ``out/optimizer.pt``, in one process.

    The model's file has parameters and persistent buffers, tied ones under each name, as ``model.load_state_dict``
    expects them. The optimizer's file is a plain torch optimizer's state dict of whole tensors, as
    ``LowLevelZeroOptimizer.state_dict`` gives it; of several optimizers a list or a dict of them, as they were saved.
    Large tensors are read into mapped files on ``out``'s disk, which go again: so it needs a file's size there once
    more, and no more memory than there is.

    Args:
        force: replace an earlier ``out``, if it holds nothing but these two files.
        done: called with the number of bytes that have been read or written since the last call.

    Raises:
        ImportError: safetensors isn't installed.
        ValueError: the checkpoint is damaged, or has a dtype that safetensors doesn't have, or experts of the same
            name.
        FileExistsError: ``out`` exists.
        OSError: a file can't be read or written. After any error ``out`` is as it was, unless the first
            of two files has replaced a former one when the second can't.
    """
    refuse_existing(out, force)
    library = _safetensors()
    for name, expert in checkpoint.manifest.experts.items():
        if name != expert.name:
            raise ValueError(
                f"{checkpoint.path}: expected experts with the names of a model that has them all, but several groups "
                f"of ranks have a {expert.name} of their own: give experts their numbers in the whole model, and save "
                "anew"
            )
    for file, size in checkpoint.manifest.files.items():
        checkpoint.manifest.check_files(checkpoint.path, [file])
        done(size.bytes)
    out = out.resolve()  # the working directory is named so, too
    out.parent.mkdir(parents=True, exist_ok=True)
    written = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    written.mkdir()

    def read(name: str, key: str | None, like: Tensor) -> Tensor:
        """Return a tensor of the model, or a parameter's state ``key``, read into a new tensor like ``like``."""
        tensor = _room_for(like, written)
        checkpoint.read(tensor, name, key)
        done(tensor.nbytes)
        return tensor

    try:
        _save_model(library, _model(checkpoint, read), written / MODEL)
        _save_optimizers(_optimizers(checkpoint, read), written / OPTIMIZER)
        os.chmod(written / MODEL, (written / OPTIMIZER).stat().st_mode)  # safetensors' is for its owner alone
        for name in (MODEL, OPTIMIZER):
            sync(written / name)
        if not out.exists():
            publish(written, out)
            return
        for name in (MODEL, OPTIMIZER):
            os.replace(written / name, out / name)
        sync(out)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def bytes_to_do(checkpoint: SavedCheckpoint) -> int:
    """Return the bytes that ``consolidate`` reads to check the files, plus the bytes of all tensors that it writes."""
    written = [checkpoint.model[name] for _, name in _names(checkpoint)]
    written += [each for state in checkpoint.states.values() for each in state.values()]
    return sum(each.nbytes for each in written) + sum(file.bytes for file in checkpoint.manifest.files.values())


def not_tensors(checkpoint: SavedCheckpoint) -> list[str]:
    """Return the names of the model's extra states that aren't tensors, which safetensors can't hold."""
    return [name for name, value in checkpoint.objects.model.items() if not isinstance(value, Tensor)]


def refuse_existing(out: Path, force: bool) -> None:
    """Raise ``FileExistsError`` if ``out`` exists, unless ``force`` and it holds only a consolidation's two files."""
    if not os.path.lexists(out):
        return
    if not force:
        raise FileExistsError(f"{out}: expected nothing there: name another directory, or use --force to replace it")
    others = [out.name]
    if out.is_dir() and not out.is_symlink():
        held = out.iterdir()
        others = sorted(each.name for each in held if each.name not in (MODEL, OPTIMIZER) or not each.is_file())
    if others:
        raise FileExistsError(
            f"{out}: expected a directory with {MODEL} and {OPTIMIZER} alone to replace, found {others[0]}: "
            "name another directory"
        )


# ---- the contents of the files ----


def _model(checkpoint: SavedCheckpoint, read: Callable[[str, str | None, Tensor], Tensor]) -> dict[str, Tensor]:
    """Read and return the model's tensors by all of their names, contiguous and with no memory in common."""
    found = {alias: read(name, None, checkpoint.model[name].contiguous()) for alias, name in _names(checkpoint)}
    for name, value in checkpoint.objects.model.items():
        if isinstance(value, Tensor):
            found[name] = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value.detach())
    return found


def _names(checkpoint: SavedCheckpoint) -> list[tuple[str, str]]:
    """Return pairs of a name and the name under which the tensor is stored: tied tensors have several names."""
    tied = checkpoint.manifest.tied.items()
    return [(name, name) for name in checkpoint.model] + [each for each in tied if each[1] in checkpoint.model]


def _optimizers(checkpoint: SavedCheckpoint, read: Callable[[str, str | None, Tensor], Tensor]) -> Any:
    """Read each optimizer's state dict; return a list or a dict of them as they were saved, or the only one itself."""
    found: dict[Name, State] = {}
    for of, settings in checkpoint.objects.optimizers.items():
        states: dict[str, State] = {}
        for name in checkpoint.trained(of):
            p, stored = checkpoint.model[name], checkpoint.states.get(name, {})
            state = states[name] = {key: read(name, key, like) for key, like in stored.items()}
            for key in stored:
                if is_scale(key, stored):  # of a block: repeated for each of its elements
                    each = scales_of(state[key], settings[BLOCK], 0, p.numel())
                    state[key] = each.as_strided(p.shape, p.stride())
        found[of] = _state_dict(settings, states)
    if set(found) == {None}:
        return found[None]
    return list(found.values()) if all(isinstance(name, int) for name in found) else found


def _state_dict(settings: Settings, tensors: Mapping[str, State]) -> State:
    """Build a state dict as ``LowLevelZeroOptimizer`` returns it, from saved settings and states by name."""
    groups = settings["param_groups"]
    places = {name: place for place, name in enumerate(name for group in groups for name in group["params"])}
    state = {places[name]: nested({**of, **settings["states"].get(name, {})}) for name, of in tensors.items()}
    others = dict(settings.get(OTHERS, {}))
    indices = {name: index for index, name in enumerate(tensors)}
    plans = [plan for plan in settings[PLANS] if set(plan["order"]) == indices.keys()]  # groups of experts have others
    return {
        **others.pop(ADDED, {}),
        "state": {place: of_place for place, of_place in state.items() if of_place} | others,
        "param_groups": [{**group, "params": [places[name] for name in group["params"]]} for group in groups],
        EXTRAS: {
            CLASS: settings[CLASS],
            "loss_scale": settings["loss_scale"],
            PLANS: [renamed(plan, indices) for plan in plans],
            FP8: settings["options"]["fp8_communication"],
        },
    }


# ---- files ----


def _room_for(like: Tensor, folder: Path) -> Tensor:
    """Return an uninitialised tensor like ``like``; a large one lies in a mapped, already deleted file."""
    if like.nbytes < _MAPPED_FROM:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # writing into a mapped file can't report that the disk is full
            os.posix_fallocate(file.fileno(), 0, like.nbytes)
        flat = torch.from_file(file.name, shared=True, size=like.numel(), dtype=like.dtype)
    return flat.as_strided(like.shape, like.stride())


def _safetensors() -> Any:
    """Import safetensors and return it; raise ``ImportError`` with the install command if it is missing."""
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise ImportError("consolidate writes a safetensors file: pip install safetensors") from error


def _save_optimizers(contents: object, path: Path) -> None:
    """Write what ``torch.load`` gives back to ``path``; raise ``OSError`` where torch can't write it."""
    try:
        torch.save(contents, path)
    except RuntimeError as error:
        raise OSError(f"{path}: {error}") from error


def _save_model(library: Any, tensors: dict[str, Tensor], path: Path) -> None:
    """Write ``tensors`` as safetensors to ``path``; raise ``ValueError`` for a dtype that the format lacks."""
    try:
        library.torch.save_file(tensors, path, metadata={"format": "pt"})
    except KeyError as error:
        raise ValueError(f"safetensors has no {error.args[0]}: save the model in another dtype") from error
    except library.SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
