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

from ..options import GROUPS, SWITCH, ZeroOptions, abouts

_log = logging.getLogger("lowlevel_zero")

Options: TypeAlias = dict[str, Any]

_NO_LIMIT = 2.0**127  # DeepSpeed's loss scale has none


def options_from_deepspeed(config: Mapping[str, Any] | str | os.PathLike[str]) -> Options:
    """Translate a DeepSpeed config to keywords of ``LowLevelZeroOptimizer``, and return them.

    Stages 0 and 1 are stage 1 here, whose numbers are those of stage 0. ``fp16`` and ``bf16`` become
    ``forced_dtype``, which converts the optimizer's parameters; convert the model too if it has more.
    One warning names the keys that aren't read and aren't off: they change nothing here.

    Args:
        config: DeepSpeed's config: a dict, or the path of a JSON file.

    Returns:
        Keywords, as in ``LowLevelZeroOptimizer(optimizer, model=model, **options_from_deepspeed("ds.json"))``. Some are
        groups of options: ``loss_scale``, ``communication``.

    Raises:
        ValueError: a bad value, or one that this package has no equal of, as stage 3; the message has its path, as
            ``zero_optimization.stage``.
        TypeError: a value of the wrong type.
        OSError: the file can't be read.
    """
    given = dict(_entries(_loaded(config)))
    half, brain = (given.get(f"{name}.enabled", False) for name in ("fp16", "bf16"))
    for name, enabled in (("fp16", half), ("bf16", brain)):
        SWITCH(f"{name}.enabled", enabled)
    if half and brain:
        raise ValueError("bf16.enabled: expected one of fp16 and bf16 to be enabled, got both: disable one")
    options = _chosen(_OPTIONS, given)
    if half:
        if given.get("fp16.loss_scale", 0) != 0:
            options |= _chosen(_STATIC_SCALE, given)
        else:
            options |= _chosen(_DYNAMIC_SCALE, {**_DYNAMIC_DEFAULTS, **given})
            options["loss_scale"]["max_scale"] = _NO_LIMIT
    if half or brain:
        options["forced_dtype"] = torch.float16 if half else torch.bfloat16
    _warn_of_unread(given)
    return {name: GROUPS[name](**value) if name in GROUPS else value for name, value in options.items()}


# ---- values: each function returns the option's value for one of a config ----


def _unchanged(path: str, value: Any) -> Any:
    return value


def _whole(path: str, value: Any) -> Any:
    """Return a whole float, such as JSON's 2e8, as an int; any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _power_of_two(path: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 127:
        raise ValueError(f"{path}: expected a whole number of at most 127, got {value!r}")
    return 2.0**value


def _one_of(values: Mapping[str, Any], path: str, value: Any) -> Any:
    if not isinstance(value, str) or value.lower() not in values:
        raise ValueError(f"{path}: expected {', '.join(values)} or null, got {value!r}")
    return values[value.lower()]


def _stage(path: str, value: Any) -> int:
    """Return the stage of the configuration, 1 for DeepSpeed's 0; raise if it isn't 0, 1 or 2."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{path}: expected 0, 1 or 2, got {type(value).__name__} {value!r}")
    if value not in (0, 1, 2):
        why = "torch.distributed.fsdp.fully_shard shards parameters"
        raise ValueError(f"{path}: expected 0, 1 or 2, got {value!r}, which this package doesn't have: {why}")
    return max(value, 1)


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

# Options by the paths of a config: keywords of the optimizer, or fields of its groups.
Table: TypeAlias = "dict[str, tuple[tuple[str, ...], Callable[[str, Any], Any]]]"
_OPTIONS: Table = {
    "zero_optimization.stage": (("stage",), _stage),
    "zero_optimization.cpu_offload": (("cpu_offload",), _unchanged),
    "zero_optimization.offload_optimizer.device": (("cpu_offload",), partial(_one_of, {"cpu": True, "none": False})),
    "zero_optimization.reduce_bucket_size": (("communication.bucket_size",), _whole),
    "zero_optimization.overlap_comm": (("communication.overlap_reductions",), _unchanged),
    "gradient_clipping": (("clip_grad_norm",), _unchanged),
    "communication_data_type": (("communication.dtype",), partial(_one_of, _DTYPES)),
    "gradient_predivide_factor": (("communication.gradient_predivide_factor",), _unchanged),
    "gradient_allreduce_op": (("communication.reduction",), _unchanged),
}
_STATIC_SCALE: Table = {
    "fp16.loss_scale": (("loss_scale.initial_scale", "loss_scale.min_scale", "loss_scale.max_scale"), _unchanged),
}
_DYNAMIC_SCALE: Table = {
    "fp16.initial_scale_power": (("loss_scale.initial_scale",), _power_of_two),
    "fp16.loss_scale_window": (("loss_scale.growth_interval",), _whole),
    "fp16.hysteresis": (("loss_scale.hysteresis",), _whole),
    "fp16.min_loss_scale": (("loss_scale.min_scale",), _unchanged),
}
_DYNAMIC_DEFAULTS = dict(zip(_DYNAMIC_SCALE, (16, 1000, 2, 1), strict=True))


def _chosen(table: Table, given: Mapping[str, Any]) -> Options:
    """Return options by name, converted from the paths of ``table`` in ``given`` and checked; groups' are in dicts."""
    options: Options = {}
    for path, (names, convert) in table.items():
        for name in names if path in given else ():
            group, _, option = name.rpartition(".")
            value = convert(path, given[path])
            abouts(GROUPS.get(group, ZeroOptions))[option].check(path, value)
            (options.setdefault(group, {}) if group else options)[option] = value
    return options


_ENABLED = ("fp16.enabled", "bf16.enabled")
# The start of paths that are the caller's own code here, only move work, or print.
_PASSED_BY = (
    *("optimizer.", "scheduler.", "train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print"),
    *("gradient_accumulation_steps", "wall_clock_breakdown", "zero_optimization.contiguous_gradients"),
    *("zero_optimization.allgather_", "zero_optimization.round_robin_gradients"),
    *("zero_optimization.offload_optimizer.pin_memory", "zero_optimization.reduce_scatter"),
)
_OFF = (False, 0, "none")


def _warn_of_unread(given: Mapping[str, Any]) -> None:
    """Log one warning of keys that are neither read nor off, with the nearest known key, if there are any."""
    known = [*_OPTIONS, *_STATIC_SCALE, *_DYNAMIC_SCALE, *_ENABLED, *_PASSED_BY]
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


# ---- reading ----


def _loaded(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return ``config`` if it is a dict, else the JSON object in the file that it names."""
    if isinstance(config, Mapping):
        return config
    try:
        loaded = json.loads(Path(config).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(config)}: expected DeepSpeed's config as JSON, which this file is not ({error}): mend the file"
        ) from error
    if not isinstance(loaded, dict):
        raise TypeError(
            f"{os.fspath(config)}: expected DeepSpeed's config, a JSON object of options, got a "
            f'{type(loaded).__name__}: write the options as {{"key": value}}'
        )
    return loaded


def _entries(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the config's values by path, such as ``fp16.enabled``; ``null`` and ``"auto"`` are left out."""
    for key, value in config.items():
        path = f"{prefix}{'bf16' if key == 'bfloat16' else key}"
        if isinstance(value, Mapping):
            yield from _entries(value, f"{path}.")
        elif path in ("fp16", "bf16", "zero_optimization"):
            raise TypeError(f"{path}: expected an object, got {type(value).__name__} {value!r}")
        elif value is not None and value != "auto":
            yield path, value
