"""DeepSpeed's keys: what the value of each has to be, and which keywords it becomes; the tables are at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import torch

Options: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[[str, Any], Options]  # of a key's path and its value

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def no_equal(path: str, value: Any, accepted: str, why: str) -> NoReturn:
    """Raise for a value that asks for what isn't here; ``accepted`` is."""
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
            no_equal(path, value, " or ".join(map(json.dumps, accepted)), why)
        return {}

    return rule


def _off(why: str) -> Rule:
    """A feature that must not be on: false, or a section that isn't enabled."""

    def rule(path: str, value: Any) -> Options:
        on = value.get("enabled", bool(value)) if isinstance(value, Mapping) else value
        if on and on != "auto":
            name = f"{path}.enabled" if isinstance(value, Mapping) and "enabled" in value else path
            no_equal(name, on, "it off or left out", why)
        return {}

    return rule


def _stage(path: str, value: Any) -> Options:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{path}: expected 0, 1 or 2, got {type(value).__name__} {value!r}")
    if value not in (0, 1, 2):
        no_equal(path, value, "0, 1 or 2", "torch.distributed.fsdp.fully_shard shards parameters")
    return {"partition_grad": value == 2}


def _zero_as_flag(path: str, value: Any) -> Options:
    """``"zero_optimization": true``, an old way of saying stage 1."""
    return {**_flag(path, value), "partition_grad": False}


def _offload_optimizer(path: str, value: Any) -> Options:
    if value not in ("cpu", "none"):
        no_equal(path, value, '"cpu" or "none"', "optimizer state lives on the device or in the host's memory")
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
        no_equal(path, value, "an optimizer of torch.optim or your own", "gradients travel as numbers, not as signs")
    return {}


def _optimizer_params(path: str, value: Any) -> Options:
    if isinstance(value, Mapping) and value.get("max_grad_norm"):
        no_equal(f"{path}.max_grad_norm", value["max_grad_norm"], "it left out", "say gradient_clipping")
    return {}


# ---- the tables ----

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
            *("wandb", "comet", "csv_monitor", "timers", "checkpoint", "compile"),
            "seq_parallel_communication_data_type",
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

KEYS: dict[str, Rule] = {
    **_TOP,
    **{f"zero_optimization.{key}": rule for key, rule in _ZERO.items()},
    **{f"fp16.{key}": rule for key, rule in _FP16.items()},
    **{f"bf16.{key}": rule for key, rule in _BF16.items()},
}

# What has keys of its own: "zero_optimization", "zero_optimization.offload_param".
SECTIONS = {".".join(parts[:length]) for path in KEYS for parts in [path.split(".")] for length in range(1, len(parts))}

RENAMED = {"bfloat16": "bf16"}
