"""Bad input is refused with a message that says what to do, on every rank alike, and changes nothing."""

from __future__ import annotations

import gc
import inspect
import sys
from contextlib import nullcontext
from dataclasses import fields
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import Communication, Diagnostics, LossScale, LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.layout import layout_of
from lowlevel_zero.options import GROUPS, abouts
from tests.support.options import grouped
from tests.support.ranks import run_ranks
from tests.support.scripts import adamw, net
from tests.support.several import check_all

MOST_CALLS = 272  # of functions, Python's and C's, that a parameter adds to construction


def wrap(model: nn.Module, **options: Any) -> LowLevelZeroOptimizer:
    return LowLevelZeroOptimizer(adamw(model), model=model, **options)


BAD_OPTIONS: list[tuple[dict[str, Any], type[BaseException], str]] = [
    ({"partition_grad": "False"}, TypeError, "partition_grad: expected True or False, got str 'False'"),
    ({"cpu_offload": {"device": "cpu"}}, TypeError, "cpu_offload: expected True or False, got dict"),
    ({"reduce_bucket_size": "25MB"}, TypeError, "reduce_bucket_size: expected an int"),
    ({"clip_grad_norm": float("nan")}, ValueError, "clip_grad_norm: expected a number >= 0"),
    ({"communication_dtype": "bf16"}, TypeError, "communication_dtype: expected a torch.dtype or None: .* got str"),
    ({"forced_dtype": torch.int8}, ValueError, "forced_dtype: expected a torch.dtype .* got torch.int8"),
    ({"initial_scale": "dynamic"}, TypeError, "initial_scale: expected a number above 0 .* got str 'dynamic'"),
    ({"backward_context": "fp8"}, TypeError, "backward_context: expected a callable"),
    ({"max_skipped_steps": -1}, ValueError, "loss_scale.max_skipped_steps: expected an int of at least 0 steps"),
    ({"dp_process_group": [0, 1]}, TypeError, "dp_process_group.* expected process groups, got int 0"),
    ({"pg_to_param_list": {"experts": []}}, TypeError, "pg_to_param_list: expected process groups"),
    ({"reduce_bucket_size": 0}, ValueError, "reduce_bucket_size: expected an int of at least 1 element, .* got 0"),
    ({"clip_grad_norm": "1"}, TypeError, "clip_grad_norm"),
    ({"communication_dtype": torch.int32}, ValueError, "communication_dtype"),
    ({"initial_scale": 2.0, "min_scale": 4.0}, ValueError, "min_scale"),
    ({"initial_scale": 2.0**30}, ValueError, "max_scale"),
    ({"growth_factor": 1.0}, ValueError, "growth_factor"),
    ({"backoff_factor": 1.0}, ValueError, "backoff_factor"),
    ({"growth_interval": 0}, ValueError, "growth_interval"),
    ({"hysteresis": -1}, ValueError, "hysteresis"),
    ({"stall_timeout": float("inf")}, ValueError, "diagnostics.stall_timeout: expected a number of seconds >= 0"),
    ({"verify_every": -1}, ValueError, "diagnostics.verify_every: expected an int of at least 0 steps"),
    ({"verify_every": True}, TypeError, "diagnostics.verify_every: expected an int"),
    ({"max_skipped_steps": 2.5}, TypeError, "loss_scale.max_skipped_steps: expected an int"),
    ({"reduce_scatter_with_fp32_accumulation": True}, ValueError, "expected stage 2, .* pass stage=2 too"),
    ({"bucket_size": 0}, ValueError, "communication.bucket_size: expected an int of at least 1 element"),
    ({"dtype": torch.int8}, ValueError, "communication.dtype: expected a torch.dtype .* got torch.int8"),
    ({"communication": {"fp8": True}}, TypeError, "communication: expected a lowlevel_zero.Communication, got dict"),
    ({"diagnostics": True}, TypeError, "diagnostics: expected a lowlevel_zero.Diagnostics, got bool True"),
    ({"loss_scale": 8.0}, TypeError, "loss_scale: expected a lowlevel_zero.LossScale, got float 8.0"),
    (
        {"loss_scale": LossScale(initial_scale=2.0, min_scale=4.0)},
        ValueError,
        "loss_scale: expected min_scale <= initi",
    ),
    ({"stage": 3}, ValueError, "stage: expected 1 or 2, got 3"),
    ({"stage": "2"}, TypeError, "stage: expected 1 or 2, got str '2'"),
    ({"stage": True}, TypeError, "stage: expected 1 or 2, got bool True"),
    ({"stage": 1, "partition_grad": True}, ValueError, "stage=1, partition_grad=True: expected one stage, got two"),
    (
        {"reduce_bucket_size": 5, "communication": Communication(bucket_size=6)},
        ValueError,
        "reduce_bucket_size=5, communication.bucket_size=6: expected one of the two",
    ),
    (
        {"verbose": True, "diagnostics": Diagnostics(verbose=True)},
        ValueError,
        "verbose=True, diagnostics.verbose=True: expected one of the two",
    ),
    (
        {"initial_scale": 4.0, "loss_scale": LossScale(initial_scale=8.0)},
        ValueError,
        "initial_scale=4.0, loss_scale.initial_scale=8.0: expected one of the two",
    ),
]


def bad_options(rank: int, world_size: int) -> None:
    """All in one go: none leaves anything behind."""
    for options, error, says in BAD_OPTIONS:
        model = net()
        with pytest.raises(error, match=says):
            LowLevelZeroOptimizer(adamw(model), **{"model": model, **grouped(options)})
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def a_plain_backward_that_misses_the_fp16_part_of_a_model(rank: int, world_size: int) -> None:
    """One scaler is for all shard groups, and for gradients that wait under ``no_sync``."""
    alone = [dist.new_group([each]) for each in range(world_size)]
    mixed = (torch.float32, torch.float16)
    for dtypes, waits in product((mixed, mixed[::-1]), (False, True)):
        model = nn.Sequential(nn.Linear(3, 4).to(dtypes[0]), nn.Linear(4, 2).to(dtypes[1]))
        part = model[dtypes.index(torch.float32)]
        optimizer = wrap(model, pg_to_param_list={alone[rank]: list(model[1].parameters())})
        with (
            optimizer.no_sync() if waits else nullcontext(),
            pytest.raises(RuntimeError, match="expected the backward of a model with fp16 parameters"),
        ):
            part(torch.ones(1, part.in_features)).sum().backward()
        with pytest.raises(RuntimeError, match="expected the whole gradients"):
            optimizer.step()
        optimizer.zero_grad()


def a_refused_construction_changes_nothing(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2 + rank))
    optimizer = adamw(model)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"1\.weight"):
        LowLevelZeroOptimizer(optimizer, model=model, forced_dtype=torch.bfloat16)
    assert snapshot(model, optimizer) == before
    model(torch.ones(1, 3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())  # no hook took it


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        [(p.data_ptr(), p.dtype, p.tolist()) for p in model.parameters()],
        [id(p) for group in optimizer.param_groups for p in group["params"]],
        len(optimizer.state),
    ]


def each_of_colossalai_s_keywords_fills_a_field(rank: int, world_size: int) -> None:
    """Its default is the field's, and its value becomes the field's."""
    keywords = inspect.signature(LowLevelZeroOptimizer).parameters
    others = {
        **{"initial_scale": 4.0, "min_scale": 2.0, "growth_factor": 3.0, "backoff_factor": 0.25, "max_scale": 2.0**20},
        **{"growth_interval": 7, "hysteresis": 3, "reduce_bucket_size": 5, "communication_dtype": torch.bfloat16},
        **{"overlap_communication": False, "overlap_allgather": True, "fp8_communication": True, "verbose": True},
    }
    filled = {about.keyword: (name, at) for name, group in GROUPS.items() for at, about in abouts(group).items()}
    filled.pop("")
    assert filled.keys() == others.keys()
    for keyword, (name, at) in filled.items():
        default, other = keywords[keyword].default, others[keyword]
        assert default == getattr(GROUPS[name](), at), keyword
        assert getattr(getattr(wrap(net(), **{keyword: other}).options, name), at) == other != default, keyword


def a_keyword_and_a_group_s_other_fields_are_both_taken(rank: int, world_size: int) -> None:
    given = Communication(reduction="sum", bucket_size=None)
    chosen = wrap(net(), reduce_bucket_size=7, communication=given).options
    assert chosen.communication == Communication(bucket_size=7, reduction="sum")
    assert wrap(net(), stage=2).options.stage == wrap(net(), partition_grad=True, stage=2).options.stage == 2
    assert wrap(net()).options.stage == wrap(net(), stage=1).options.stage == 1


def a_module_in_the_second_place_is_the_model(rank: int, world_size: int) -> None:
    model = net(layers=2)
    model.register_buffer("seen", torch.full((2,), float(rank)))
    optimizer = LowLevelZeroOptimizer(adamw(model), model)
    assert optimizer.model is model
    assert model.seen.tolist() == [0.0, 0.0]
    with pytest.raises(TypeError, match="expected a dict of lists by process group, got Sequential: pass such a dict"):
        LowLevelZeroOptimizer(adamw(model), model, model=model)
    names = [record.name for record in optimizer.sharded_parameters]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


def buckets_are_larger_on_a_gpu_unless_they_were_chosen(rank: int, world_size: int) -> None:
    group = ShardGroup()
    group.connect()
    assert [group.bucket_size(torch.device(kind)) for kind in ("cpu", "cuda")] == [2**20, 40 * 2**20]
    assert len(layout_of(wrap(net())).buckets) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardGroup, "bucket_size", lambda self, device: {"cpu": 1}[device.type])
        assert len(layout_of(wrap(net(layers=2))).buckets) == 4


def the_garbage_collector_is_left_as_it_was(rank: int, world_size: int) -> None:
    try:
        for enabled in (False, True):
            (gc.enable if enabled else gc.disable)()
            wrap(net())
            assert gc.isenabled() == enabled
            with pytest.raises(ValueError, match="optimizer: expected at least one parameter"):
                wrap(net().requires_grad_(False))
            assert gc.isenabled() == enabled
    finally:
        gc.enable()


def a_group_that_comes_later_is_converted_too(rank: int, world_size: int) -> None:
    model, late = nn.Linear(3, 2), nn.Parameter(torch.ones(3))
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), forced_dtype=torch.bfloat16)
    before = [record.p32.dtype for record in optimizer.sharded_parameters]
    optimizer.add_param_group({"params": [late]})
    assert [record.p32.dtype for record in optimizer.sharded_parameters][: len(before)] == before
    optimizer.backward((late * torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)).sum())
    optimizer.step()
    found = late.dtype, optimizer.sharded_parameters[late].p32.dtype, late[2].item()
    assert found == (torch.bfloat16, torch.float32, -0.5)


def frozen_numbers_that_are_no_floats_stay_what_they_are(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 2)
    model.codes = nn.Parameter(torch.tensor([1, -2, 301]), requires_grad=False)
    model.phases = nn.Parameter(torch.tensor([1j, 2.0]), requires_grad=False)
    LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model, forced_dtype=torch.bfloat16)
    assert (model.weight.dtype, model.codes.dtype, model.phases.dtype) == (torch.bfloat16, torch.int64, torch.complex64)
    assert (model.codes.tolist(), model.phases.tolist()) == ([1, -2, 301], [1j, 2.0])


CHECKS = [
    bad_options,
    a_plain_backward_that_misses_the_fp16_part_of_a_model,
    a_refused_construction_changes_nothing,
    each_of_colossalai_s_keywords_fills_a_field,
    a_keyword_and_a_group_s_other_fields_are_both_taken,
    a_module_in_the_second_place_is_the_model,
    buckets_are_larger_on_a_gpu_unless_they_were_chosen,
    the_garbage_collector_is_left_as_it_was,
    a_group_that_comes_later_is_converted_too,
    frozen_numbers_that_are_no_floats_stay_what_they_are,
]


def test_what_is_given_is_checked_and_taken(subtests: pytest.Subtests) -> None:
    check_all(CHECKS, 2, subtests, one_group=True)


COLOSSALAIS = [
    *("optimizer", "pg_to_param_list", "initial_scale", "min_scale", "growth_factor", "backoff_factor"),
    *("growth_interval", "hysteresis", "max_scale", "clip_grad_norm", "verbose", "reduce_bucket_size"),
    *("communication_dtype", "overlap_communication", "partition_grad", "cpu_offload", "dp_process_group"),
    *("extra_dp_group", "forced_dtype", "master_weights", "overlap_allgather", "fp8_communication", "backward_context"),
]


def test_colossalai_s_keywords_come_first_and_each_keyword_is_documented() -> None:
    keywords = inspect.signature(LowLevelZeroOptimizer).parameters
    assert list(keywords)[: len(COLOSSALAIS)] == COLOSSALAIS
    documented = LowLevelZeroOptimizer.__doc__ or ""
    for name in keywords:
        assert documented.count(f"\n    {name}: ") == 1, name
    for group in GROUPS.values():
        for option in fields(group):
            assert (group.__doc__ or "").count(f"\n    {option.name}: ") == 1, option.name


def test_a_parameter_takes_no_more_calls_however_many_there_are() -> None:
    """Calls of functions, Python's and C's, which is what construction of many small parameters takes its time for."""

    def calls(count: int) -> int:
        model = nn.Module()
        model.weights = nn.ParameterList(torch.zeros(8) for _ in range(count))
        optimizer, seen = torch.optim.AdamW(model.parameters()), 0

        def look(frame: object, event: str, of: object) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        gc.disable()  # what it collects of earlier ones makes calls, too
        sys.setprofile(look)
        try:
            LowLevelZeroOptimizer(optimizer, model=model, stage=2)
        finally:
            sys.setprofile(None)
            gc.enable()
        return seen

    def count(rank: int, world_size: int) -> list[float]:
        calls(10)  # imports, and what a process group makes once
        few, some, many = (calls(count) for count in (100, 200, 1_200))
        return [(some - few) / 100, (many - some) / 1_000]

    for small, large in run_ranks(count, 2):
        assert large < 1.02 * small
        assert large < MOST_CALLS
