"""DeepSpeed's JSON read: what has an equal here becomes keywords, what has none is refused, the rest changes nothing.

Key by key, by the tables of ``deepspeed_keys``; names and defaults are those of DeepSpeed 0.19. What a config leaves
out, or leaves to be filled in (``"auto"``, ``null``), keeps this package's default. There is one exception: of an fp16
loss scale every number is DeepSpeed's, since training depends on it.

Passed by are keys that move work without changing its result (how DeepSpeed packs, pins and gathers), that watch
(logs, profilers, monitors), that belong to stage 3, and that are the caller's own code here: ``optimizer``,
``scheduler``, batch sizes and accumulation. (There, divide a loss by ``gradient_accumulation_steps`` yourself; and
DeepSpeed's "Adam" is ``torch.optim.AdamW`` unless its ``adam_w_mode`` is false.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .deepspeed_keys import KEYS, RENAMED, SECTIONS, Options, no_equal

_NO_LIMIT = 2.0**127  # DeepSpeed's loss scale has none


def options_from_deepspeed(config: Mapping[str, Any] | str | os.PathLike[str]) -> Options:
    """The keywords of ``LowLevelZeroOptimizer`` that do what a DeepSpeed config asks for.

    Stages 0 and 1 are stage 1 here, whose numbers are those of stage 0. ``fp16`` and ``bf16`` become
    ``forced_dtype``, which converts the optimizer's parameters; convert the model too if it has more.
    ``prescale_gradients`` becomes a ``gradient_predivide_factor`` of as many ranks as the default process group has.

    Args:
        config: what DeepSpeed takes: its dict, or the path of a JSON file.

    Returns:
        Keywords, as in ``LowLevelZeroOptimizer(optimizer, model=model, **options_from_deepspeed("ds.json"))``.

    Raises:
        ValueError: a key that DeepSpeed doesn't know, that this package has no equal of, or a bad value; the message
            has its path, as ``zero_optimization.stage``.
        TypeError: a value of the wrong type.
        OSError: the file can't be read.
    """
    given = dict(_entries(_loaded(config)))
    options: Options = {}
    for path, value in given.items():
        options.update(KEYS[path](path, value))
    _check_batch(given)
    return {**options, **_precision(given), **_prescaling(given)}


# ---- what several keys say together ----


def _precision(given: Mapping[str, Any]) -> Options:
    """dtype and loss scale."""
    half, brain = given.get("fp16.enabled", False), given.get("bf16.enabled", False)
    if half and brain:
        raise ValueError("bf16.enabled: expected one of fp16 and bf16 to be enabled, got both")
    if brain and given.get("bf16.bf16_master_weights_and_grads", False):
        if not given.get("bf16.bf16_optimizer_states", False):
            no_equal("bf16.bf16_optimizer_states", False, "true along with bf16 masters", "states have their dtype")
        return {"forced_dtype": torch.bfloat16, "master_weights": False}
    if brain:
        return {"forced_dtype": torch.bfloat16}
    return {"forced_dtype": torch.float16, **_loss_scale(given)} if half else {}


def _loss_scale(given: Mapping[str, Any]) -> Options:
    static = given.get("fp16.loss_scale", 0)
    if static:
        return {"initial_scale": float(static), "min_scale": float(static), "max_scale": float(static)}
    hysteresis = given.get("fp16.hysteresis", 2)
    if given.get("fp16.consecutive_hysteresis", False) and hysteresis > 1:
        no_equal("fp16.consecutive_hysteresis", True, "false", "overflows are counted since the scale last grew")
    return {
        "initial_scale": 2.0 ** given.get("fp16.initial_scale_power", 16),
        "min_scale": float(given.get("fp16.min_loss_scale", 1)),
        "max_scale": _NO_LIMIT,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": int(given.get("fp16.loss_scale_window", 1000)),
        "hysteresis": int(hysteresis),
    }


def _prescaling(given: Mapping[str, Any]) -> Options:
    if not given.get("prescale_gradients", False):
        return {}
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "prescale_gradients: expected an initialised process group, whose size it divides by, got none: call "
            "torch.distributed.init_process_group() first"
        )
    return {"gradient_predivide_factor": float(dist.get_world_size())} if dist.get_world_size() > 1 else {}


def _check_batch(given: Mapping[str, Any]) -> None:
    whole = given.get("train_batch_size")
    micro, turns = given.get("train_micro_batch_size_per_gpu", 1), given.get("gradient_accumulation_steps", 1)
    if whole is not None and whole % (micro * turns):
        raise ValueError(
            f"train_batch_size: expected a multiple of train_micro_batch_size_per_gpu * gradient_accumulation_steps = "
            f"{micro} * {turns}, got {whole}"
        )


# ---- reading ----


def _loaded(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"config: expected a dict or the path of a JSON file, got {type(config).__name__}")
    try:
        loaded = json.loads(Path(config).read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise ValueError(f"{os.fspath(config)}: expected DeepSpeed's JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise TypeError(f"{os.fspath(config)}: expected a JSON object, got {type(loaded).__name__}")
    return loaded


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)} is there twice")
    return found


def _entries(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Known keys by path, and their values; those that leave the choice open are left out."""
    for key, value in config.items():
        path = f"{prefix}{RENAMED.get(key, key)}"
        if path in SECTIONS and isinstance(value, Mapping):
            yield from _entries(value, f"{path}.")
        elif path in KEYS:
            if value is not None and value != "auto":
                yield path, value
        elif path not in SECTIONS:
            raise ValueError(f"{path}: unknown to DeepSpeed 0.19{_nearest(path)}: correct it or leave it out")
        elif value is not None:
            raise TypeError(f"{path}: expected an object, got {type(value).__name__} {value!r}")


def _nearest(path: str) -> str:
    near = get_close_matches(path, [*KEYS, *SECTIONS], n=1, cutoff=0.5)
    return f"; the nearest that it knows is {near[0]}" if near else ""
