"""DeepSpeed's JSON: what it becomes, what is refused and by which name, and a training that follows it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowlevel_zero import Communication, LossScale, LowLevelZeroOptimizer, options_from_deepspeed
from tests.support.ranks import run_ranks

# As transformers' documentation has it, more or less.
USUAL: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
SCALE = {"growth_factor": 2.0, "backoff_factor": 0.5, "max_scale": 2.0**127}


def zero(**section: Any) -> dict[str, Any]:
    return {"zero_optimization": section}


def test_the_usual_one() -> None:
    assert options_from_deepspeed(USUAL) == {
        "stage": 2,
        "cpu_offload": True,
        "communication": Communication(bucket_size=200_000_000),
        "clip_grad_norm": 0.5,
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        (zero(stage=0), {"stage": 1}),
        (zero(stage=1), {"stage": 1}),
        (zero(overlap_comm=False, reduce_scatter=False), {"communication": Communication(overlap_reductions=False)}),
        (zero(reduce_bucket_size="auto", overlap_comm=None), {}),
        (zero(cpu_offload=True), {"cpu_offload": True}),
        (zero(offload_optimizer={"device": "none"}, offload_param={"device": "none"}), {"cpu_offload": False}),
        (zero(offload_optimizer=None, stage3_max_live_parameters=1e9, zero_quantized_gradients=False), {}),
        ({"communication_data_type": "bf16"}, {"communication": Communication(dtype=torch.bfloat16)}),
        ({"communication_data_type": None}, {}),
        (
            {"gradient_predivide_factor": 1.0, "prescale_gradients": False, "gradient_allreduce_op": "mean"},
            {"communication": Communication()},
        ),
        ({"gradient_predivide_factor": 4}, {"communication": Communication(gradient_predivide_factor=4.0)}),
        ({"gradient_allreduce_op": "sum"}, {"communication": Communication(reduction="sum")}),
        ({"bf16": {"enabled": True, "immediate_grad_update": True}}, {"forced_dtype": torch.bfloat16}),
        ({"bfloat16": {"enabled": True}}, {"forced_dtype": torch.bfloat16}),
        ({"fp16": {"enabled": False, "loss_scale": 128}}, {}),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 7}},
            {
                "forced_dtype": torch.float16,
                "loss_scale": LossScale(initial_scale=128.0, min_scale=128.0, max_scale=128.0),
            },
        ),
        (
            {"fp16": {"enabled": True}},
            {
                "forced_dtype": torch.float16,
                "loss_scale": LossScale(2.0**16, growth_interval=1000, hysteresis=2, **SCALE),
            },
        ),
        (
            {
                "fp16": {
                    **{"enabled": True, "loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 500},
                    **{"hysteresis": 1, "min_loss_scale": 8, "auto_cast": False},
                }
            },
            {
                "forced_dtype": torch.float16,
                "loss_scale": LossScale(2.0**32, 8.0, growth_interval=500, hysteresis=1, **SCALE),
            },
        ),
        *(
            (
                {"fp16": {"enabled": True, "initial_scale_power": power}},
                {
                    "forced_dtype": torch.float16,
                    "loss_scale": LossScale(2.0**power, growth_interval=1000, hysteresis=2, **SCALE),
                },
            )
            for power in (0, 127)
        ),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, {}),
        ({"amp": {"enabled": False, "opt_level": "O1"}, "flops_profiler": {"enabled": True, "profile_step": 1}}, {}),
        ({"data_types": {"grad_accum_dtype": "fp32"}, "activation_checkpointing": {"cpu_checkpointing": True}}, {}),
    ],
)
def test_what_has_an_equal(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert options_from_deepspeed(config) == expected


@pytest.mark.parametrize(
    ("config", "path", "says"),
    [
        (zero(stage=3), "zero_optimization.stage", "got 3, which this package doesn't have"),
        (zero(stage="2"), "zero_optimization.stage", "got str '2'"),
        (zero(stage=2, offload_optimizer={"device": "nvme"}), "zero_optimization.offload_optimizer.device", "'nvme'"),
        (zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size", "at least 1"),
        (
            zero(reduce_bucket_size=1.5),
            "zero_optimization.reduce_bucket_size",
            "an int of at least 1 element, or None, got float",
        ),
        (zero(reduce_bucket_size="5e8"), "zero_optimization.reduce_bucket_size", "got str"),
        (zero(overlap_comm="yes"), "zero_optimization.overlap_comm", "expected True or False, got str"),
        ({"fp16": True}, "fp16", "expected an object, got bool"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled", "got both"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale", "expected a number above 0"),
        ({"fp16": {"enabled": True, "initial_scale_power": 128}}, "fp16.initial_scale_power", "at most 127"),
        ({"zero_optimization": True}, "zero_optimization", "expected an object, got bool"),
        ({"gradient_clipping": "1"}, "gradient_clipping", "expected a number"),
        ({"gradient_clipping": -1}, "gradient_clipping", "expected a number >= 0"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping", "expected a number >= 0"),
        ({"communication_data_type": "int8"}, "communication_data_type", "fp16, bf16, fp32 or null"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor", "above 0"),
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op", "got 'max'"),
    ],
)
def test_what_has_none_is_refused_by_its_path(config: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        options_from_deepspeed(config)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (zero(overlap_com=True), "zero_optimization.overlap_com (is it zero_optimization.overlap_comm?)"),
        ({"gradient_cliping": 1.0}, "gradient_cliping (is it gradient_clipping?)"),
        ({"zero_optimisation": {"stage": 1}}, "zero_optimisation.stage (is it zero_optimization.stage?)"),
        (zero(stage=1, sub_group_size=1e9, stage3_max_live_parameters=1), "zero_optimization.sub_group_size"),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0.3}), "zero_optimization.offload_optimizer.ratio"),
        (zero(offload_param={"device": "cpu"}, zero_quantized_gradients=True), "offload_param.device, zero_opt"),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast"),
        ({"amp": {"enabled": True}, "sparse_gradients": True}, "amp.enabled, sparse_gradients"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"fp16": {"enabled": True, "consecutive_hysteresis": True}}, "fp16.consecutive_hysteresis"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads"),
    ],
)
def test_what_is_not_read_is_told(config: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="lowlevel_zero"):
        options_from_deepspeed(config)
    assert told in caplog.text


def test_what_is_off_and_the_usual_one_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    options_from_deepspeed({**USUAL, "amp": {"enabled": False, "opt_level": "O1"}, "sparse_gradients": False})
    options_from_deepspeed(zero(offload_param={"device": "none"}, zero_quantized_gradients=False))
    assert not caplog.records


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(USUAL))
    assert options_from_deepspeed(path) == options_from_deepspeed(str(path)) == options_from_deepspeed(USUAL)
    for text, says in (("{", "expected DeepSpeed's config as JSON"),):
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            options_from_deepspeed(path)
    path.write_text("[]")
    with pytest.raises(TypeError, match="ds.json: expected DeepSpeed's config, a JSON object"):
        options_from_deepspeed(path)
    with pytest.raises(FileNotFoundError):
        options_from_deepspeed(tmp_path / "none.json")
    with pytest.raises(TypeError, match="PathLike"):
        options_from_deepspeed(7)  # type: ignore[arg-type]


def test_all_keywords_are_the_optimizer_s() -> None:
    half = {"fp16": {"enabled": True}, "communication_data_type": "fp32"}
    sums = {"gradient_allreduce_op": "sum", "gradient_predivide_factor": 2.0}
    known = inspect.signature(LowLevelZeroOptimizer).parameters
    assert set(options_from_deepspeed({**USUAL, **half, **sums})) <= set(known)


def test_fp16_starts_at_its_scale() -> None:
    def rank(rank: int, world_size: int) -> tuple[float, float]:
        model = torch.nn.Linear(4, 4)
        options = options_from_deepspeed({"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}})
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)
        before = optimizer.loss_scale
        optimizer.backward((model(torch.ones(2, 4).half()) * 1000).sum())
        optimizer.step()
        return before, optimizer.loss_scale

    assert run_ranks(rank, 2) == [(2.0**30, 2.0**29)] * 2
