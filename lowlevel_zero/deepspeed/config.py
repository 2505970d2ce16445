"""DeepSpeed's JSON as options of ``LowLevelZeroOptimizer``.

Names and meanings are those of DeepSpeed 0.19. What a config leaves out, or leaves to be filled in (``"auto"``,
``null``), keeps this package's default. There is one exception: of an fp16 loss scale every number is DeepSpeed's,
since training depends on it. Keys that are the caller's own code here (optimizer, scheduler, batch sizes,
accumulation), that only move work or that print are passed by. (There, divide a loss by
``gradient_accumulation_steps`` yourself; and DeepSpeed's "Adam" is ``torch.optim.AdamW`` unless its ``adam_w_mode``
is false.)
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

_log = logging.getLogger("lowlevel_zero")

Options: TypeAlias = dict[str, Any]

_NO_LIMIT = 2.0**127  # DeepSpeed's loss scale has none


def options_from_deepspeed(config: Mapping[str, Any] | str | os.PathLike[str]) -> Options:
    """The keywords of ``LowLevelZeroOptimizer`` that do what a DeepSpeed config asks for.

    Stages 0 and 1 are stage 1 here, whose numbers are those of stage 0. ``fp16`` and ``bf16`` become
    ``forced_dtype``, which converts the optimizer's parameters; convert the model too if it has more.
    One warning names the keys that aren't read and aren't off: they change nothing here.

    Args:
        config: what DeepSpeed takes: its dict, or the path of a JSON file.

    Returns:
        Keywords, as in ``LowLevelZeroOptimizer(optimizer, model=model, **options_from_deepspeed("ds.json"))``.

    Raises:
        ValueError: a bad value, or one that this package has no equal of, as stage 3; the message has its path, as
            ``zero_optimization.stage``.
        TypeError: a value of the wrong type.
        OSError: the file can't be read.
    """
    given = dict(_entries(_loaded(config)))
    options = {keyword: convert(path, given[path]) for path, (keyword, convert) in _KEYWORDS.items() if path in given}
    _warn_of_unread(given)
    return {**options, **_precision(given)}


# ---- values ----


def _flag(path: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{path}: expected true or false, got {type(value).__name__} {value!r}")
    return value


def _number(path: str, value: Any, least: float = 0) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{path}: expected a number, got {type(value).__name__} {value!r}")
    if not least <= value < float("inf"):
        raise ValueError(f"{path}: expected a number of at least {least}, got {value!r}")
    return float(value)


def _count(path: str, value: Any, least: int = 1) -> int:
    if _number(path, value, least) != int(value):
        raise ValueError(f"{path}: expected a whole number, got {value!r}")
    return int(value)


def _factor(path: str, value: Any) -> float:
    if _number(path, value) == 0:
        raise ValueError(f"{path}: expected a number above 0, got {value!r}")
    return float(value)


def _one_of(values: Mapping[str, Any], path: str, value: Any) -> Any:
    if not isinstance(value, str) or value.lower() not in values:
        raise ValueError(f"{path}: expected {', '.join(values)} or null, got {value!r}")
    return values[value.lower()]


def _is_stage_2(path: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{path}: expected 0, 1 or 2, got {type(value).__name__} {value!r}")
    if value not in (0, 1, 2):
        why = "torch.distributed.fsdp.fully_shard shards parameters"
        raise ValueError(f"{path}: expected 0, 1 or 2, got {value!r}, which has no equal here: {why}")
    return value == 2


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

# What is one of our keywords, and how its value becomes that keyword's.
_KEYWORDS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "zero_optimization.stage": ("partition_grad", _is_stage_2),
    "zero_optimization.reduce_bucket_size": ("reduce_bucket_size", _count),
    "zero_optimization.overlap_comm": ("overlap_communication", _flag),
    "zero_optimization.reduce_scatter": ("reduce_scatter", _flag),
    "zero_optimization.cpu_offload": ("cpu_offload", _flag),
    "zero_optimization.offload_optimizer.device": ("cpu_offload", partial(_one_of, {"cpu": True, "none": False})),
    "gradient_clipping": ("clip_grad_norm", _number),
    "communication_data_type": ("communication_dtype", partial(_one_of, _DTYPES)),
    "gradient_predivide_factor": ("gradient_predivide_factor", _factor),
    "gradient_allreduce_op": ("reduction", partial(_one_of, {"mean": "mean", "sum": "sum"})),
}


# What says together which dtype and loss scale there are.
_PRECISION = (
    *("fp16.enabled", "fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis"),
    *("fp16.min_loss_scale", "bf16.enabled"),
)
# What is the caller's own code here, only moves work, or prints: by how the path starts.
_PASSED_BY = (
    *("optimizer.", "scheduler.", "train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print"),
    *("gradient_accumulation_steps", "wall_clock_breakdown", "zero_optimization.contiguous_gradients"),
    *("zero_optimization.allgather_", "zero_optimization.round_robin_gradients"),
    "zero_optimization.offload_optimizer.pin_memory",
)
_OFF = (False, 0, "none")


def _warn_of_unread(given: Mapping[str, Any]) -> None:
    known = [*_KEYWORDS, *_PRECISION, *_PASSED_BY]
    off = {path.rpartition(".")[0] for path, value in given.items() if path.endswith(".enabled") and not value}
    unread = [
        path
        for path, value in given.items()
        if not (path in known or path.startswith(_PASSED_BY) or value in _OFF or path.rpartition(".")[0] in off)
    ]
    if unread:
        near = {path: get_close_matches(path, known, 1, 0.9) for path in unread}
        listed = ", ".join(f"{path} (is it {near[path][0]}?)" if near[path] else path for path in unread)
        _log.warning("options_from_deepspeed: these keys aren't read, and change nothing here: %s", listed)


def _precision(given: Mapping[str, Any]) -> Options:
    """dtype and loss scale."""
    half, brain = (_flag(f"{name}.enabled", given.get(f"{name}.enabled", False)) for name in ("fp16", "bf16"))
    if half and brain:
        raise ValueError("bf16.enabled: expected one of fp16 and bf16 to be enabled, got both")
    if brain:
        return {"forced_dtype": torch.bfloat16}
    return {"forced_dtype": torch.float16, **_loss_scale(given)} if half else {}


def _loss_scale(given: Mapping[str, Any]) -> Options:
    def count(key: str, default: int, least: int = 1) -> int:
        return _count(f"fp16.{key}", given.get(f"fp16.{key}", default), least)

    static = _number("fp16.loss_scale", given.get("fp16.loss_scale", 0))
    if static:
        return {"initial_scale": static, "min_scale": static, "max_scale": static}
    power = count("initial_scale_power", 16, least=0)
    if power > 127:
        raise ValueError(f"fp16.initial_scale_power: expected at most 127, got {power!r}")
    return {
        "initial_scale": 2.0**power,
        "min_scale": float(count("min_loss_scale", 1)),
        "max_scale": _NO_LIMIT,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": count("loss_scale_window", 1000),
        "hysteresis": count("hysteresis", 2),
    }


# ---- reading ----


def _loaded(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"config: expected a dict or the path of a JSON file, got {type(config).__name__}")
    try:
        loaded = json.loads(Path(config).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{os.fspath(config)}: expected DeepSpeed's JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise TypeError(f"{os.fspath(config)}: expected a JSON object, got {type(loaded).__name__}")
    return loaded


def _entries(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by path, but those that leave the choice open."""
    for key, value in config.items():
        path = f"{prefix}{'bf16' if key == 'bfloat16' else key}"
        if isinstance(value, Mapping):
            yield from _entries(value, f"{path}.")
        elif path in ("fp16", "bf16", "zero_optimization"):
            raise TypeError(f"{path}: expected an object, got {type(value).__name__} {value!r}")
        elif value is not None and value != "auto":
            yield path, value
