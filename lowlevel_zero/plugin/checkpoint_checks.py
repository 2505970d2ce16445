"""Checks of a checkpoint before it is written or loaded; nothing here changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from colossalai.utils.safetensors import load_flat
from safetensors import safe_open
from torch import Tensor

from .boosted import BoostedModel

Shapes = Mapping[str, tuple[int, ...] | None]

_OTHER_MODEL = "build the model that was saved, or name another checkpoint"


def check_boosted(thing: object, kind: type, word: str) -> None:
    """Raise unless ``thing`` is of the class ``kind``, which ``booster.boost`` returns."""
    if not isinstance(thing, kind):
        raise TypeError(
            f"{word}: expected what booster.boost returned with this plugin, got {type(thing).__name__}: "
            f"boost the {word} before saving or loading it"
        )


def read_optimizer_file(path: str) -> Any:
    """Read an optimizer's file, and return its contents; an asynchronous save's are unflattened."""
    if path.endswith(".safetensors"):
        return load_flat(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def shapes_in(file: str) -> Shapes:
    """Read the shapes of a model file's tensors, without their data; None for values that aren't tensors."""
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(values, Mapping):
        raise ValueError(f"{file}: expected a model's state dict, got a {type(values).__name__}")
    return {str(name): tuple(value.shape) if isinstance(value, Tensor) else None for name, value in values.items()}


def check_same_model(model: BoostedModel, got: Shapes, checkpoint: str, strict: bool) -> None:
    """Raise for the first tensor whose shape differs, or, if ``strict``, that only one side has."""
    values = model.unwrap().state_dict()
    expected = {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in values.items()}
    for name, shape in expected.items():
        if name not in got:
            if strict:
                raise ValueError(f"{checkpoint}: expected the model's {name}, found none: {_OTHER_MODEL}")
        elif got[name] != shape:
            raise ValueError(f"{name}: expected {shape}, {checkpoint} has {got[name]}: {_OTHER_MODEL}")
    surplus = [name for name in got if name not in expected]
    if strict and surplus:
        raise ValueError(f"{checkpoint}: expected only what the model has, found {surplus[0]}: {_OTHER_MODEL}")
