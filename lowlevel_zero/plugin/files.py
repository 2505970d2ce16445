"""Files of a Booster's checkpoints: checked before they are written or loaded, and replaced whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from colossalai.checkpoint_io import CheckpointIndexFile
from colossalai.utils.safetensors import load_flat
from safetensors import safe_open
from torch import Tensor

from ..checkpoint.folders import sync
from .boosted import BoostedModel

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...] | None]

_OTHER_MODEL = "the checkpoint is another model's: build the model that was saved, or load another checkpoint"


def check_boosted(thing: object, kind: type, word: str) -> None:
    """Raise ``TypeError`` unless ``thing`` is of the class ``kind``, which ``booster.boost`` returns."""
    if not isinstance(thing, kind):
        raise TypeError(
            f"{word}: expected what booster.boost returned with this plugin, got {type(thing).__name__}: "
            f"boost the {word} before saving or loading it"
        )


def read_index(path: Path) -> CheckpointIndexFile:
    """Return the index of a directory; raise ``ValueError`` if it is damaged."""
    try:
        return CheckpointIndexFile.from_file(path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: expected the index of a sharded checkpoint, got a damaged file ({type(error).__name__}: "
            f"{error}): take another checkpoint, or copy it anew; to save there, remove the file first"
        ) from error


def read_optimizer_file(path: str, kind: type[T]) -> T:
    """Return an optimizer file's contents, an asynchronous save's unflattened; ``ValueError`` unless a ``kind``."""
    flat = path.endswith(".safetensors")
    contents = load_flat(path) if flat else torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(contents, kind):
        raise ValueError(
            f"{path}: expected a {kind.__name__} that booster.save_optimizer wrote, got a {type(contents).__name__}: "
            "name the optimizer's checkpoint"
        )
    return contents


def shapes_in(file: str) -> Shapes:
    """Read the shapes of a model file's tensors, without their data; None for values that aren't tensors."""
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{file}: expected a model's state dict, got a {type(values).__name__}: name a file of the model"
        )
    return {str(name): tuple(value.shape) if isinstance(value, Tensor) else None for name, value in values.items()}


def check_same_model(model: BoostedModel, got: Shapes, checkpoint: str, strict: bool) -> None:
    """Raise ``ValueError`` for the first tensor whose shape differs, or, if ``strict``, that only one side has."""
    values = model.unwrap().state_dict()
    expected = {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in values.items()}
    for name, shape in expected.items():
        if strict and name not in got:
            raise ValueError(f"{checkpoint}: expected a tensor {name}, which the model has, found none: {_OTHER_MODEL}")
        if got.get(name, shape) != shape:
            raise ValueError(
                f"{name}: expected the model's shape {shape}, got {got[name]} from {checkpoint}: {_OTHER_MODEL}"
            )
    surplus = [name for name in got if name not in expected]
    if strict and surplus:
        raise ValueError(f"{checkpoint}: expected tensors of the model alone, found {surplus[0]}: {_OTHER_MODEL}")


# ---- writing ----


def check_file_target(path: str, use_safetensors: bool = False) -> None:
    """Raise unless a file can be written at ``path``, and ends in ``.safetensors`` if ``use_safetensors`` is set."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(
            f"{path}: expected the path of a file to write, got a directory: name a file in it, or pass shard=True"
        )
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path}: expected a path in an existing directory: create {target.parent} first")
    if use_safetensors and target.suffix != ".safetensors":
        raise ValueError(
            f"{path}: expected a file name that ends in .safetensors, with use_safetensors=True or use_async=True, got "
            f"{target.name}: name it {target.stem}.safetensors"
        )


def check_folder_target(path: str, index_name: str) -> None:
    """Raise if ``path`` is a file, or a directory that has an index of another name than ``index_name``."""
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(
            f"{path}: expected a directory for a sharded checkpoint, got a file: name another, or pass shard=False"
        )
    others = [index.name for index in target.glob("*.index.*json") if index.name != index_name]
    if others:
        raise FileExistsError(
            f"{path}: expected no other checkpoint there, found {others[0]}: name another directory for {index_name}"
        )


@contextmanager
def file_beside(path: str | Path) -> Iterator[str]:
    """Yield a path to write to in place of ``path``; at the end flush that file to disk, and rename it to ``path``.

    A save that breaks off leaves one file, which the next one replaces. For one process.
    """
    target = Path(path).absolute()
    beside = target.with_name(f".writing.{target.name}")
    try:
        yield str(beside)
        sync(beside)
        os.replace(beside, target)
        sync(target.parent)
    finally:
        beside.unlink(missing_ok=True)
