"""DeepSpeed's JSON read: what has an equal here becomes keywords, what would train differently is refused.

Names and defaults are those of DeepSpeed 0.19. What a config leaves out, or leaves to be filled in (``"auto"``,
``null``), keeps this package's default. There is one exception: of an fp16 loss scale every number is DeepSpeed's,
since training depends on it. Keys that only move work (how DeepSpeed packs, pins and gathers), that watch, that belong
to stage 3, or that are the caller's own code here (optimizer, scheduler, batch sizes, accumulation) aren't read.
(There, divide a loss by ``gradient_accumulation_steps`` yourself; and DeepSpeed's "Adam" is ``torch.optim.AdamW``
unless its ``adam_w_mode`` is false.)
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
import torch.distributed as dist

_log = logging.getLogger("lowlevel_zero")

Options: TypeAlias = dict[str, Any]

_NO_LIMIT = 2.0**127  # DeepSpeed's loss scale has none
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def options_from_deepspeed(config: Mapping[str, Any] | str | os.PathLike[str]) -> Options:
    """The keywords of ``LowLevelZeroOptimizer`` that do what a DeepSpeed config asks for.

    Stages 0 and 1 are stage 1 here, whose numbers are those of stage 0. ``fp16`` and ``bf16`` become
    ``forced_dtype``, which converts the optimizer's parameters; convert the model too if it has more.
    ``prescale_gradients`` becomes a ``gradient_predivide_factor`` of as many ranks as the default process group has.
    One warning names the keys that aren't read.

    Args:
        config: what DeepSpeed takes: its dict, or the path of a JSON file.

    Returns:
        Keywords, as in ``LowLevelZeroOptimizer(optimizer, model=model, **options_from_deepspeed("ds.json"))``.

    Raises:
        ValueError: a value that asks for what this package has no equal of, or a bad one; the message has its path,
            as ``zero_optimization.stage``.
        TypeError: a value of the wrong type.
        OSError: the file can't be read.
    """
    given = dict(_entries(_loaded(config)))
    options = {keyword: convert(path, given[path]) for path, (keyword, convert) in _KEYWORDS.items() if path in given}
    _refuse_what_has_no_equal(given)
    _warn_of_unread(given)
    return {**options, **_precision(given), **_prescaling(given)}


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


def _one_of(values: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    def convert(path: str, value: Any) -> Any:
        if not isinstance(value, str) or value.lower() not in values:
            raise ValueError(f"{path}: expected {', '.join(values)} or null, got {value!r}")
        return values[value.lower()]

    return convert


def _is_stage_2(path: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{path}: expected 0, 1 or 2, got {type(value).__name__} {value!r}")
    return value == 2


def _factor(path: str, value: Any) -> float:
    if _number(path, value) == 0:
        raise ValueError(f"{path}: expected a number above 0, got {value!r}")
    return float(value)


# What is one of our keywords, and how its value becomes that keyword's.
_KEYWORDS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "zero_optimization": ("partition_grad", lambda path, value: _flag(path, value) and False),  # once said: stage 1
    "zero_optimization.stage": ("partition_grad", _is_stage_2),
    "zero_optimization.reduce_bucket_size": ("reduce_bucket_size", _count),
    "zero_optimization.overlap_comm": ("overlap_communication", _flag),
    "zero_optimization.reduce_scatter": ("reduce_scatter", _flag),
    "zero_optimization.cpu_offload": ("cpu_offload", _flag),
    "zero_optimization.offload_optimizer.device": ("cpu_offload", _one_of({"cpu": True, "none": False})),
    "gradient_clipping": ("clip_grad_norm", _number),
    "communication_data_type": ("communication_dtype", _one_of(_DTYPES)),
    "gradient_predivide_factor": ("gradient_predivide_factor", _factor),
    "gradient_allreduce_op": ("reduction", _one_of({"mean": "mean", "sum": "sum"})),
}


class _Only(NamedTuple):
    """The values of a key that change nothing here; all others would train differently, or have no equal."""

    accepted: tuple[Any, ...]
    why: str


_OFF = (False,)
_STAGE_3 = "that is stage 3's"
_QUANTISED = "gradients aren't quantised to integers"
_ONE_BIT = {"onebitadam", "zerooneadam", "onebitlamb"}

_ONLY: dict[str, _Only] = {
    "zero_optimization.stage": _Only((0, 1, 2), "torch.distributed.fsdp.fully_shard shards parameters"),
    "zero_optimization.offload_optimizer.ratio": _Only((1,), "all of the optimizer's state is offloaded, or none"),
    "zero_optimization.offload_param.device": _Only(("none",), _STAGE_3),
    "zero_optimization.cpu_offload_param": _Only(_OFF, _STAGE_3),
    "zero_optimization.zero_hpz_partition_size": _Only((0, 1), _STAGE_3),
    "zero_optimization.mics_shard_size": _Only((-1, 0), _STAGE_3),
    "zero_optimization.zero_quantized_weights": _Only(_OFF, _STAGE_3),
    "zero_optimization.zero_quantized_gradients": _Only(_OFF, _QUANTISED),
    "zero_optimization.zeropp_loco_param": _Only(_OFF, _QUANTISED),
    "fp16.auto_cast": _Only(_OFF, "cast the model's inputs yourself"),
    "fp16.fp16_master_weights_and_grads": _Only(_OFF, "masters of fp16 parameters are fp32"),
    "bf16.check_grad_overflow": _Only(_OFF, "a step in bf16 is taken whatever its gradients are"),
    "data_types.grad_accum_dtype": _Only(("fp32",), "micro-batches are summed in fp32"),
    "optimizer.params.max_grad_norm": _Only((0,), "say gradient_clipping"),
}

# Features that would train differently: a value, or a section, which may be switched off by its "enabled".
_NOT_HERE = (
    *("amp", "torch_autocast", "sparse_gradients", "pipeline", "tensor_parallel", "expert_parallel"),
    *("compression_training", "sparse_attention", "curriculum_learning", "data_efficiency", "progressive_layer_drop"),
    *("elasticity", "zero_optimization.zenflow"),
)

# What several keys say together, and what a run may well have and nothing here has to know.
_ALSO_KNOWN = (
    *("fp16.enabled", "fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window"),
    *("fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale", "bf16.enabled"),
    *("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", "prescale_gradients", "train_batch_size"),
    *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print", "wall_clock_breakdown"),
    *("zero_optimization.contiguous_gradients", "zero_optimization.allgather_partitions", "optimizer.type"),
    *("zero_optimization.allgather_bucket_size", "zero_optimization.round_robin_gradients"),
    "zero_optimization.offload_optimizer.pin_memory",
)
_CALLERS = ("optimizer.params.", "scheduler.", *(f"{name}." for name in _NOT_HERE))


def _refuse_what_has_no_equal(given: Mapping[str, Any]) -> None:
    for path, (accepted, why) in _ONLY.items():
        if path in given and given[path] not in accepted:
            _refuse(path, given[path], " or ".join(map(json.dumps, accepted)), why)
    for name in _NOT_HERE:
        section = [path for path in given if path.startswith(f"{name}.")]
        path = f"{name}.enabled" if f"{name}.enabled" in given else name
        if given.get(path, bool(section)):
            _refuse(path, given.get(path, "a section"), "it off or left out", "it is not a part of this package")
    if str(given.get("optimizer.type")).lower() in _ONE_BIT:
        why = "gradients travel as numbers, not as signs"
        _refuse("optimizer.type", given["optimizer.type"], "an optimizer of torch.optim or your own", why)


def _refuse(path: str, value: Any, accepted: str, why: str) -> NoReturn:
    raise ValueError(f"{path}: expected {accepted}, got {value!r}, which has no equal here: {why}")


def _warn_of_unread(given: Mapping[str, Any]) -> None:
    known = [*_KEYWORDS, *_ONLY, *_NOT_HERE, *_ALSO_KNOWN]
    unread = [path for path in given if path not in known and not path.startswith(_CALLERS)]
    if unread:
        near = {path: get_close_matches(path, known, 1, 0.8) for path in unread}
        told = ", ".join(f"{path} (is it {near[path][0]}?)" if near[path] else path for path in unread)
        _log.warning("options_from_deepspeed: these keys aren't read, and change nothing here: %s", told)


# ---- what several keys say together ----


def _precision(given: Mapping[str, Any]) -> Options:
    """dtype and loss scale."""
    half, brain = (_flag(f"{name}.enabled", given.get(f"{name}.enabled", False)) for name in ("fp16", "bf16"))
    if half and brain:
        raise ValueError("bf16.enabled: expected one of fp16 and bf16 to be enabled, got both")
    if brain and given.get("bf16.bf16_master_weights_and_grads", False):
        if not given.get("bf16.bf16_optimizer_states", False):
            _refuse("bf16.bf16_optimizer_states", False, "true along with bf16 masters", "states have their dtype")
        return {"forced_dtype": torch.bfloat16, "master_weights": False}
    if brain:
        return {"forced_dtype": torch.bfloat16}
    return {"forced_dtype": torch.float16, **_loss_scale(given)} if half else {}


def _loss_scale(given: Mapping[str, Any]) -> Options:
    def count(key: str, default: int, least: int = 1) -> int:
        return _count(f"fp16.{key}", given.get(f"fp16.{key}", default), least)

    static = _number("fp16.loss_scale", given.get("fp16.loss_scale", 0))
    if static:
        return {"initial_scale": static, "min_scale": static, "max_scale": static}
    power, hysteresis = count("initial_scale_power", 16, least=0), count("hysteresis", 2)
    if power > 127:
        raise ValueError(f"fp16.initial_scale_power: expected at most 127, got {power!r}")
    if given.get("fp16.consecutive_hysteresis", False) and hysteresis > 1:
        _refuse("fp16.consecutive_hysteresis", True, "false", "overflows are counted since the scale last grew")
    return {
        "initial_scale": 2.0**power,
        "min_scale": float(count("min_loss_scale", 1)),
        "max_scale": _NO_LIMIT,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": count("loss_scale_window", 1000),
        "hysteresis": hysteresis,
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
        elif path in ("fp16", "bf16"):
            raise TypeError(f"{path}: expected an object, got {type(value).__name__} {value!r}")
        elif value is not None and value != "auto":
            yield path, value
