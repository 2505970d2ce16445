"""8-bit optimizers of torchao and bitsandbytes: states have a scale for each block, so slices end where blocks end.

They step slices as they step what is whole then, bit for bit; but both quantise a state only where it has so many
elements (4,096, unless bitsandbytes is told otherwise): a parameter whose slices are smaller keeps fp32 states. torchao
wants whole blocks, besides: it doesn't quantise states of a parameter that has others, and so mustn't its slices' be.

A checkpoint has the codes and the scales of a quantised state as they are (``stored_state``); both are cut where slices
are, at the boundaries of blocks. A whole state dict has one scale for each element instead (``flat_state``), so that it
is gathered and cut like any other. No bit is lost either way, at any number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..partition import EvenSplit
from .trials import full_name

_TORCHAO = re.compile(r"torchao\.optim\.adam\.AdamW?8bit")
_BITSANDBYTES = re.compile(r"bitsandbytes\.optim\.\w+\.(Paged)?(Adam|AdamW|Adagrad|Lion|RMSprop|SGD)(8bit|32bit)?")
_BLOCK = 256  # bitsandbytes' block size; torchao's optimizers have theirs as an attribute
_SMALLEST = 4096  # elements of the smallest tensor whose states torchao quantises; bitsandbytes' have an attribute
_CODES, _SCALE = "_codes", "_scale"

State = dict[str, Any]


def is_known(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` is of the torchao and bitsandbytes classes that step whole blocks exactly."""
    return _is_torchao(optimizer) or bool(_BITSANDBYTES.fullmatch(full_name(optimizer)))


def _is_torchao(optimizer: Optimizer) -> bool:
    return bool(_TORCHAO.fullmatch(full_name(optimizer)))


def block_size(optimizer: Any) -> int:
    """Return how many elements of an optimizer's quantised states share a scale; 1 if none are known to do."""
    if _is_torchao(optimizer):
        size: int = optimizer.block_size
        return size
    quantises = _BITSANDBYTES.fullmatch(full_name(optimizer)) and optimizer.args.optim_bits == 8
    return _BLOCK if quantises else 1


def check_unstepped(optimizer: Optimizer, new: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
    """Raise ``ValueError`` if a parameter already has states that can't be sliced.

    Those are quantised ones, and ones of an optimizer inside this one.
    """
    for inner in vars(optimizer).values():
        of_inner = isinstance(inner, Optimizer) and inner.state is not optimizer.state
        for p in new if of_inner else ():
            if inner.state.get(p):
                raise ValueError(
                    f"{names[p]}: expected no states of the {type(inner).__name__} inside {type(optimizer).__name__} "
                    "yet, got some, which would stay whole: wrap the optimizer before its first step"
                )
    stepped = [names[p] for p in new if optimizer.state.get(p)] if block_size(optimizer) > 1 else []
    if stepped:
        raise ValueError(
            f"{stepped[0]}: expected no quantised states yet, got some: wrap the optimizer before its first step, and "
            "then load a state dict that a wrapped one has saved"
        )


def slice_multiple(optimizer: Any) -> Callable[[int, int], int]:
    """Return a function of a parameter's elements and the ranks that share it: slices are multiples of its result."""
    block = block_size(optimizer)
    if block == 1:
        return lambda numel, world_size: 1
    whole_blocks = _is_torchao(optimizer)
    smallest = _SMALLEST if whole_blocks else optimizer.args.min_8bit_size

    def multiple(numel: int, world_size: int) -> int:
        size = EvenSplit(numel, world_size).slice_size
        if size < smallest:
            return 1
        if whole_blocks and numel % block:
            return size + 1 if size % block == 0 else 1  # it would quantise slices of whole blocks
        return block

    return multiple


# ---- a slice's state ----


def is_quantised(value: object) -> bool:
    """Return whether a state has ``codes`` or is a ``uint8`` tensor: quantised numbers, which need their scales."""
    return hasattr(value, "codes") or (isinstance(value, Tensor) and value.dtype == torch.uint8)


def stored_state(optimizer: Optimizer, state: State) -> State:
    """Return ``state`` as it is saved: quantised states as codes and one scale for each block, no lookup tables."""
    if block_size(optimizer) == 1:
        return state
    stored: State = {}
    for key, value in state.items():
        if hasattr(value, "codes"):
            stored |= {key + _CODES: value.codes, key + _SCALE: value.scale}
        elif not key.startswith("qmap"):
            stored[key] = value
    return stored


def is_scale(key: str, state: Collection[str]) -> bool:
    """Return whether ``key`` names the scales that belong to codes in a ``stored_state``."""
    return _codes_of(key) in state


def _codes_of(key: str) -> str:
    """Return the name of the codes to which scales of the name ``key`` belong; empty if scales have no such name."""
    if key.startswith("absmax"):
        return "state" + key.removeprefix("absmax")
    return key.removesuffix(_SCALE) + _CODES if key.endswith(_SCALE) else ""


def flat_state(optimizer: Optimizer, state: State) -> State:
    """Return ``state`` for a whole state dict, with quantised states as codes and one scale for each element."""
    stored, block = stored_state(optimizer, state), block_size(optimizer)
    flat = dict(stored)
    for key in stored if block > 1 else ():
        if is_scale(key, stored):
            codes = stored[_codes_of(key)]
            flat[key] = scales_of(stored[key], block, 0, codes.numel()).view(codes.shape)
    return flat


def scales_of(scales: Tensor, block: int, start: int, numel: int) -> Tensor:
    """Repeat each block's scale for its elements, and return the scales of ``numel`` elements from ``start`` on."""
    return scales.repeat_interleave(block)[start : start + numel]


def quantised_state(optimizer: Any, p32: Tensor, state: Mapping[str, Any]) -> State:
    """Return a slice's ``flat_state`` as ``optimizer`` keeps it for ``p32``: quantised, or dequantised if small."""
    if block_size(optimizer) == 1:
        return dict(state)
    flat = {key for key, each in state.items() if isinstance(each, Tensor) and each.shape == p32.shape}
    on_device = {key: each.to(p32.device) if key in flat else each for key, each in state.items()}
    return _torchao_state(optimizer, p32, on_device) if _is_torchao(optimizer) else _bnb_state(optimizer, on_device)


def _torchao_state(optimizer: Any, p32: Tensor, state: State) -> State:
    """Return saved codes as torchao's 8-bit tensors, or dequantised if ``p32`` is small or not of whole blocks."""
    found: State = {}
    quantises = p32.numel() >= _SMALLEST and p32.numel() % optimizer.block_size == 0
    for key, value in state.items():
        name = key.removesuffix(_CODES)
        if key.endswith(_CODES):
            held = optimizer._subclass_zeros(p32, name == "exp_avg", optimizer.block_size)
            held.codes.copy_(value)
            held.scale.copy_(state[name + _SCALE].flatten()[:: optimizer.block_size])
            found[name] = held if quantises else held.dequantize()
        elif not key.endswith(_SCALE):
            found[key] = value
    return found


def _bnb_state(optimizer: Any, state: State) -> State:
    """Return saved codes and scales as bitsandbytes' state, or dequantised for a small parameter."""
    found = dict(state)
    for key in [key for key in state if key.startswith("absmax")]:
        number, scale = key.removeprefix("absmax"), found.pop(key)
        if "dynamic" not in optimizer.name2qmap:
            optimizer.fill_qmap()
        codes = found["state" + number]
        qmap = optimizer.name2qmap["dynamic" if number == "1" else "udynamic"].to(codes.device)
        if codes.numel() < optimizer.args.min_8bit_size:
            found["state" + number] = qmap[codes.long()] * scale
        else:
            zero = qmap.abs().argmin().to(codes.dtype)  # of padding, which counts in its block
            found["state" + number] = torch.where(scale == 0, zero, codes)
            found[key], found["qmap" + number] = scale.flatten()[::_BLOCK].contiguous(), qmap
    return found
