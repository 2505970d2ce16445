"""DeepSpeed's JSON read: what has an equal here becomes keywords, what has none is refused, the rest changes nothing.

Key by key, by the tables below; names and defaults are those of DeepSpeed 0.19. What a config leaves out, or leaves to
be filled in (``"auto"``, ``null``), keeps this package's default. There is one exception: of an fp16 loss scale every
number is DeepSpeed's, since training depends on it.

Passed by are keys that move work without changing its result (how DeepSpeed packs, pins and gathers), that watch
(logs, profilers, monitors), that belong to stage 3, and that are the caller's own code here: ``optimizer``,
``scheduler``, batch sizes and accumulation. (There, divide a loss by ``gradient_accumulation_steps`` yourself; and
DeepSpeed's "Adam" is ``torch.optim.AdamW`` unless its ``adam_w_mode`` is false.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist

Options: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[[str, Any], Options]  # of a key's path and its value

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
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
        options.update(_KEYS[path](path, value))
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
            _no_equal("bf16.bf16_optimizer_states", False, "true along with bf16 masters", "states have their dtype")
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
        _no_equal("fp16.consecutive_hysteresis", True, "false", "overflows are counted since the scale last grew")
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
        path = f"{prefix}{_RENAMED.get(key, key)}"
        if path in _SECTIONS and isinstance(value, Mapping):
            yield from _entries(value, f"{path}.")
        elif path in _KEYS:
            if value is not None and value != "auto":
                yield path, value
        elif path not in _SECTIONS:
            raise ValueError(f"{path}: unknown to DeepSpeed 0.19{_nearest(path)}: correct it or leave it out")
        elif value is not None:
            raise TypeError(f"{path}: expected an object, got {type(value).__name__} {value!r}")


def _nearest(path: str) -> str:
    near = get_close_matches(path, [*_KEYS, *_SECTIONS], n=1, cutoff=0.5)
    return f"; the nearest that it knows is {near[0]}" if near else ""


def _no_equal(path: str, value: Any, accepted: str, why: str) -> NoReturn:
    raise ValueError(f"{path}: expected {accepted}, got {value!r}, which has no equal here: {why}")


# ---- rules ----


def _passed_by(path: str, value: Any) -> Options:
    return {}


def _flag(path: str, value: Any) -> Options:
    """A choice that others look at."""
    if not isinstance(value, bool):
        raise TypeError(f"{path}: expected true or false, got {type(value).__name__} {value!r}")
    return {}


def _number(path: str, value: Any, least: float = 0) -> Options:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{path}: expected a number, got {type(value).__name__} {value!r}")
    if not least <= value < float("inf"):
        raise ValueError(f"{path}: expected a number of at least {least}, got {value!r}")
    return {}


def _count(path: str, value: Any, least: int = 1) -> Options:
    _number(path, value, least)
    if value != int(value):
        raise ValueError(f"{path}: expected a whole number, got {value!r}")
    return {}


def _exponent(path: str, value: Any) -> Options:
    """Of a power of two that fp32 holds."""
    _count(path, value, least=0)
    if value > 127:
        raise ValueError(f"{path}: expected at most 127, got {value!r}")
    return {}


def _maps(check: Rule, keyword: str, convert: Callable[[Any], Any]) -> Rule:
    """A value that is one of our keywords."""

    def rule(path: str, value: Any) -> Options:
        check(path, value)
        return {keyword: convert(value)}

    return rule


def _only(accepted: tuple[Any, ...], why: str) -> Rule:
    """Values that change nothing; all others have no equal."""

    def rule(path: str, value: Any) -> Options:
        if value not in accepted:
            _no_equal(path, value, " or ".join(map(json.dumps, accepted)), why)
        return {}

    return rule


def _off(why: str) -> Rule:
    """A feature that must not be on: false, or a section that isn't enabled."""

    def rule(path: str, value: Any) -> Options:
        on = value.get("enabled", bool(value)) if isinstance(value, Mapping) else value
        if on and on != "auto":
            name = f"{path}.enabled" if isinstance(value, Mapping) and "enabled" in value else path
            _no_equal(name, on, "it off or left out", why)
        return {}

    return rule


def _stage(path: str, value: Any) -> Options:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{path}: expected 0, 1 or 2, got {type(value).__name__} {value!r}")
    if value not in (0, 1, 2):
        _no_equal(
            path,
            value,
            "0, 1 or 2",
            "torch.distributed.fsdp.fully_shard shards parameters",
        )
    return {"partition_grad": value == 2}


def _zero_as_flag(path: str, value: Any) -> Options:
    """``"zero_optimization": true``, an old way of saying stage 1."""
    return {**_flag(path, value), "partition_grad": False}


def _offload_optimizer(path: str, value: Any) -> Options:
    if value not in ("cpu", "none"):
        _no_equal(path, value, '"cpu" or "none"', "optimizer state lives on the device or in the host's memory")
    return {"cpu_offload": value == "cpu"}


def _dtype(path: str, value: Any) -> Options:
    if not isinstance(value, str) or value.lower() not in _DTYPES:
        raise ValueError(f"{path}: expected {', '.join(_DTYPES)} or null, got {value!r}")
    return {"communication_dtype": _DTYPES[value.lower()]}


def _predivide(path: str, value: Any) -> Options:
    _number(path, value)
    if value == 0:
        raise ValueError(f"{path}: expected a number above 0, got {value!r}")
    return {} if value == 1 else {"gradient_predivide_factor": float(value)}


def _reduction(path: str, value: Any) -> Options:
    if not isinstance(value, str) or value.lower() not in ("mean", "sum"):
        raise ValueError(f'{path}: expected "mean" or "sum", got {value!r}')
    return {"reduction": "sum"} if value.lower() == "sum" else {}


def _optimizer_type(path: str, value: Any) -> Options:
    if not isinstance(value, str):
        raise TypeError(f"{path}: expected a name, got {type(value).__name__} {value!r}")
    if value.lower() in ("onebitadam", "zerooneadam", "onebitlamb"):
        _no_equal(path, value, "an optimizer of torch.optim or your own", "gradients travel as numbers, not as signs")
    return {}


def _optimizer_params(path: str, value: Any) -> Options:
    if isinstance(value, Mapping) and value.get("max_grad_norm"):
        _no_equal(f"{path}.max_grad_norm", value["max_grad_norm"], "it left out", "say gradient_clipping")
    return {}


# ---- the tables ----

_RENAMED = {"bfloat16": "bf16"}

_STAGE_3 = "that is stage 3's"
_OWN_CODE = "it is not a part of this package"

_TOP: dict[str, Rule] = {
    "zero_optimization": _zero_as_flag,
    "gradient_clipping": _maps(_number, "clip_grad_norm", float),
    "communication_data_type": _dtype,
    "gradient_predivide_factor": _predivide,
    "prescale_gradients": _flag,
    "gradient_allreduce_op": _reduction,
    "train_batch_size": _count,
    "train_micro_batch_size_per_gpu": _count,
    "gradient_accumulation_steps": _count,
    "optimizer.type": _optimizer_type,
    "optimizer.params": _optimizer_params,
    "data_types.grad_accum_dtype": _only(("fp32",), "micro-batches are summed in fp32"),
    "data_types.param_dtype": _off("fp16 and bf16 say it"),
    "data_types.buffer_dtype": _off("buffers stay as they are"),
    "data_types.keep_in_fp32_modules": _off("leave forced_dtype out and convert the other modules"),
    **dict.fromkeys(
        [
            *("optimizer.legacy_fusion", "scheduler", "managed_gradient_accumulation", "dataloader_drop_last"),
            *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio", "activation_checkpointing"),
            *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"),
            *("vocabulary_size", "log_level", "flops_profiler", "comms_logger", "tensorboard"),
            *(
                "wandb",
                "comet",
                "csv_monitor",
                "timers",
                "checkpoint",
                "compile",
                "seq_parallel_communication_data_type",
            ),
        ],
        _passed_by,
    ),
    **dict.fromkeys(
        [
            *("amp", "torch_autocast", "sparse_gradients", "disable_allgather", "autotuning", "elasticity"),
            *("compression_training", "quantize_training", "weight_quantization", "sparse_attention", "eigenvalue"),
            *("data_efficiency", "curriculum_learning", "progressive_layer_drop", "hybrid_engine", "pipeline"),
            *("tensor_parallel", "expert_parallel", "use_data_before_expert_parallelism", "nebula", "datastates_ckpt"),
            "graph_harvesting",
        ],
        _off(_OWN_CODE),
    ),
}

_ZERO: dict[str, Rule] = {
    "stage": _stage,
    "reduce_bucket_size": _maps(_count, "reduce_bucket_size", int),
    "overlap_comm": _maps(_flag, "overlap_communication", bool),
    "reduce_scatter": _maps(_flag, "reduce_scatter", bool),
    "cpu_offload": _maps(_flag, "cpu_offload", bool),
    "offload_optimizer.device": _offload_optimizer,
    "offload_optimizer.ratio": _only((1, 1.0), "all of the optimizer's state is offloaded, or none"),
    "offload_optimizer.super_offload": _off(_OWN_CODE),
    "offload_param.device": _only(("none",), _STAGE_3),
    "cpu_offload_param": _off(_STAGE_3),
    "cpu_offload_params": _off(_STAGE_3),
    "zero_hpz_partition_size": _only((0, 1), _STAGE_3),
    "mics_shard_size": _only((-1, 0), _STAGE_3),
    "zero_quantized_weights": _off(_STAGE_3),
    "zero_quantized_nontrainable_weights": _off(_STAGE_3),
    "zero_quantized_gradients": _off("gradients aren't quantised to integers"),
    "zeropp_loco_param": _off("gradients aren't quantised to integers"),
    "zenflow": _off(_OWN_CODE),
    **dict.fromkeys(
        [
            *("contiguous_gradients", "allgather_partitions", "allgather_bucket_size", "round_robin_gradients"),
            *("use_multi_rank_bucket_allreduce", "parameter_alignment", "load_from_fp32_weights", "legacy_stage1"),
            *("elastic_checkpoint", "ignore_unused_parameters", "compute_grad_norm", "cpu_offload_use_pin_memory"),
            *("log_trace_cache_warnings", "enable_sanity_checks", "sub_group_size", "memory_efficient_linear"),
            *("override_module_apply", "pipeline_loading_checkpoint", "mics_hierarchical_params_gather"),
            *("save_muon_momentum_buffer_in_memory", "leaf_module", "stage3_prefetch_bucket_size"),
            *("stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
            *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save"),
            *("stage3_gather_fp16_weights_on_model_save", "stage3_module_granularity_threshold"),
            *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "prefetch_bucket_size"),
            *("param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
            *("max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold"),
            *("use_all_reduce_for_fetch_params", "allgather_sequential"),
        ],
        _passed_by,
    ),
    **{
        f"offload_{what}.{key}": _passed_by
        for what in ("optimizer", "param")
        for key in ("pin_memory", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read")
    },
    **{f"offload_optimizer.{key}": _passed_by for key in ("pipeline_write", "fast_init", "cpuadam_cores_perc")},
}

_FP16: dict[str, Rule] = {
    "enabled": _flag,
    "loss_scale": _number,
    "initial_scale_power": _exponent,
    "loss_scale_window": _count,
    "hysteresis": _count,
    "consecutive_hysteresis": _flag,
    "min_loss_scale": _count,
    "auto_cast": _off("cast the model's inputs yourself"),
    "fp16_master_weights_and_grads": _off("masters of fp16 parameters are fp32"),
}

_BF16: dict[str, Rule] = {
    "enabled": _flag,
    "bf16_master_weights_and_grads": _flag,
    "bf16_optimizer_states": _flag,
    "immediate_grad_update": _passed_by,
    "check_grad_overflow": _off("a step in bf16 is taken whatever its gradients are"),
}

_KEYS: dict[str, Rule] = {
    **_TOP,
    **{f"zero_optimization.{key}": rule for key, rule in _ZERO.items()},
    **{f"fp16.{key}": rule for key, rule in _FP16.items()},
    **{f"bf16.{key}": rule for key, rule in _BF16.items()},
}
# What has keys of its own: "zero_optimization", "zero_optimization.offload_param".
_SECTIONS = {
    ".".join(parts[:length]) for path in _KEYS for parts in [path.split(".")] for length in range(1, len(parts))
}
