"""The plugin in real ColossalAI training: DDP's numbers, ColossalAI's ZeRO's numbers, Booster's interface."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.interface import AMPModelMixin, ModelWrapper, OptimizerWrapper
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.zero.low_level import LowLevelZeroOptimizer as Theirs
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.layout import traffic_of
from lowlevel_zero.plugin import LowLevelZeroPlugin
from lowlevel_zero.plugin.host_accelerator import HostAccelerator
from tests.support.boosting import (
    TheirPlugin,
    adamw,
    batch,
    boost,
    check_close,
    check_equal,
    ddp,
    groups_of,
    model_of,
    momentum,
    ours,
    theirs,
)
from tests.support.cases import Check, check_cases, check_each, check_refusals
from tests.support.judging import off_the_way
from tests.support.ranks import run_cases, run_ranks, run_ranks_expecting

# ---- numbers ----


CLIP = 0.4  # in some steps norms are larger, in some they aren't: else factors would be clipped away


def trained(rank: int, world_size: int, make: Any, options: dict[str, Any], clip: float) -> dict[str, Tensor]:
    pair = boost(make, momentum, **options)
    pair.train(rank, 0, 5, clip)
    return pair.values()


def test_fp32_equals_ddp() -> None:
    def rank(rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
        results = {"ddp": trained(rank, world_size, ddp, {}, CLIP)}
        for stage in (1, 2):
            options = {"stage": stage, "precision": "fp32", "max_norm": CLIP}
            results[f"stage {stage}"] = trained(rank, world_size, ours, options, 0.0)
        return results

    ranks = run_ranks(rank, 3)
    for each in ranks:
        for stage in ("stage 1", "stage 2"):
            check_equal(ranks[0][stage], each[stage])
            check_close(each["ddp"], each[stage], 2e-6)
    assert (model_values()["inward.weight"] - ranks[0]["ddp"]["inward.weight"]).abs().max() > 1e-2
    assert torch.equal(model_values()["dropped.weight"], ranks[0]["stage 2"]["dropped.weight"])


def test_extra_dp_size_shards_over_all_ranks_as_colossalai_does() -> None:
    """It keeps its numbers, its groups and its slices' sizes; only which rank has which slice is ours."""

    def rank(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[list[int]], dict[str, int]]:
        pair = boost(ours, momentum, stage=2, precision="fp32", max_norm=CLIP, extra_dp_size=2)
        pair.train(rank, 0, 5)
        keywords = pair.booster.plugin.zero_optim_kwargs
        groups = [dist.get_process_group_ranks(keywords[name]) for name in ("extra_dp_group", "dp_process_group")]
        assert {len(p32) for p32 in pair.optimizer.optim.param_groups[0]["params"]} == {9, 20, 31}
        return pair.values(), groups, traffic_of(pair.optimizer)

    ranks = run_ranks(rank, 4)
    expected = run_ranks(trained, 4, ddp, {}, CLIP)
    for each in ranks:
        check_equal(ranks[0][0], each[0])
        check_close(expected[0], each[0], 2e-6)
        assert each[2]["reduce"] > 0
    assert [groups for _, groups, _ in ranks] == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]


def model_values() -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model_of().named_parameters()}


# Of the way that parameters go: where a norm that clips differs in its last bit, some are rounded the other way.
SHARES = {"fp32": 1e-6, "bf16": 2e-3, "fp16": 2e-4}


def test_it_equals_colossalais_own_zero(subtests: pytest.Subtests) -> None:
    cases = [
        ({"stage": stage, "precision": precision, "initial_scale": 128, "max_norm": CLIP},)
        for stage, precision in zip((1, 2, 1), SHARES, strict=True)
    ]

    def rank(rank: int, world_size: int, options: dict[str, Any], make: Any = ours) -> dict[str, Tensor]:
        return trained(rank, world_size, make, options, 0.0)

    by_theirs = run_cases(partial(rank, make=theirs), 2, cases)  # sets an accelerator, which stays
    for ((options,), ran), (_, expected) in zip(run_cases(rank, 2, cases), by_theirs, strict=True):
        with subtests.test(options["precision"]):
            got = ran.values()
            check_equal(got[0], got[1])
            assert off_the_way(model_values(), expected.values()[0], got[0]) <= SHARES[options["precision"]]


def test_no_sync_accumulates_as_ddp_does() -> None:
    def accumulated(rank: int, make: Any, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        pair = boost(make, momentum, **options)
        with pair.booster.no_sync(pair.model, pair.optimizer):
            pair.backward(rank, 0)
            pair.backward(rank, 1)
            pair.optimizer.step() if make is ours else None  # does nothing
            own = {name: p.grad for name, p in pair.model.unwrap().named_parameters()}
            kept = {name: None if grad is None else grad.clone() for name, grad in own.items()}
        pair.train(rank, 2, 3)
        return pair.values(), kept

    def rank(rank: int, world_size: int) -> None:
        expected, their_grads = accumulated(rank, ddp)
        got, our_grads = accumulated(rank, ours, stage=2, precision="fp32")
        check_equal(their_grads, our_grads)
        assert our_grads["inward.weight"] is not None
        assert our_grads["dropped.weight"] is None
        check_close(expected, got, 2e-6)

    run_ranks(rank, 2)


Clip = Callable[[Any, list[nn.Parameter]], Any]


def by_norm(norm_type: float, **more: Any) -> tuple[Clip, Clip]:
    return (
        lambda _, parameters: torch.nn.utils.clip_grad_norm_(parameters, CLIP, norm_type, **more),
        lambda optimizer, _: optimizer.clip_grad_by_norm(CLIP, norm_type, **more),
    )


CLIPS: dict[str, tuple[Clip, Clip]] = {
    "2-norm": by_norm(2.0),
    "maximum": by_norm(float("inf")),
    "1-norm, foreach": by_norm(1.0, foreach=True),
    "3-norm, finite": by_norm(3, error_if_nonfinite=True),
    "by value": (
        lambda _, parameters: torch.nn.utils.clip_grad_value_(parameters, 0.01),
        lambda optimizer, _: optimizer.clip_grad_by_value(0.01),
    ),
}


def test_clipping_by_norms_and_by_value_as_ddp_does(subtests: pytest.Subtests) -> None:
    def rank(rank: int, world_size: int, name: str, stage: int) -> None:
        ends = []
        for make, clip in zip((ddp, partial(ours, stage=stage, precision="fp32")), CLIPS[name], strict=True):
            pair = boost(make, momentum)
            norms = []
            for step in range(3):
                pair.backward(rank, step)
                norms.append(clip(pair.optimizer, list(pair.model.parameters())))
                pair.optimizer.step()
                pair.optimizer.zero_grad()
            ends.append((pair.values(), norms))
        check_close(ends[0][0], ends[1][0], 2e-6)
        if ends[0][1][0] is not None:
            torch.testing.assert_close(ends[1][1], ends[0][1], rtol=1e-5, atol=0)

    check_cases(subtests, 2, rank, [(name, 1 + at % 2) for at, name in enumerate(CLIPS)])


# ---- the interface ----


def the_pair_is_what_booster_and_its_callers_expect(rank: int, world_size: int) -> None:
    model = model_of()
    plain = adamw(groups_of(model))
    booster = Booster(plugin=ours(stage=2, precision="bf16"))
    boosted, optimizer, criterion, loader, scheduler = booster.boost(model, plain, len, [1], None)
    assert (criterion, loader, scheduler) == (len, [1], None)
    for kind in (LowLevelZeroOptimizer, OptimizerWrapper, torch.optim.Optimizer):
        assert isinstance(optimizer, kind)
    for kind in (ModelWrapper, AMPModelMixin):
        assert isinstance(boosted, kind)
    assert boosted.unwrap() is model
    assert optimizer.unwrap() is plain
    assert optimizer.optim is plain
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.parameters == [p for group in plain.param_groups for p in group["params"]]
    assert model.inward.weight.dtype == torch.bfloat16
    assert boosted(batch(0, 0)[0]).dtype == torch.bfloat16  # inputs are cast
    assert optimizer.get_grad_norm() is None
    plugin = booster.plugin
    assert (plugin.stage, plugin.precision, plugin.verbose, plugin.use_fp8) == (2, "bf16", False, False)
    assert ours(verbose=True).verbose is True


def a_model_can_be_boosted_alone(rank: int, world_size: int) -> None:
    boosted, optimizer, *_ = Booster(plugin=ours(precision="bf16", cast_inputs=False)).boost(model_of())
    assert optimizer is None
    boosted.update_master_params()
    boosted._force_wait_all_gather()
    with pytest.raises(RuntimeError, match="dtype"):
        boosted(batch(0, 0)[0])


def it_says_what_it_supports(rank: int, world_size: int) -> None:
    for stage in (1, 2):
        plugin = ours(stage=stage)
        assert plugin.support_no_sync()
        assert plugin.support_lora()
        assert plugin.supported_devices() == ["cuda", "npu", "cpu"]
        assert plugin.supported_precisions() == ["fp16", "bf16", "fp32"]
    assert type(get_accelerator()) is HostAccelerator
    get_accelerator().synchronize()
    get_accelerator().empty_cache()
    get_accelerator().manual_seed_all(1)
    assert get_accelerator().device_count() == 1
    set_by_the_user = get_accelerator()
    ours()
    assert get_accelerator() is set_by_the_user


def schedulers_work_on_either_optimizer(rank: int, world_size: int) -> None:
    model = model_of()
    plain = adamw(groups_of(model))
    made_before = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    booster = Booster(plugin=ours(precision="fp32"))
    boosted, optimizer, _, _, made_before = booster.boost(model, plain, lr_scheduler=made_before)
    for _ in range(2):
        booster.backward(boosted(batch(rank, 0)[0]).square().mean(), optimizer)
        optimizer.step()
        made_before.step()
    assert [group["lr"] for group in optimizer.param_groups] == [2.5e-3, 2.5e-3]
    made_after = CosineAnnealingWarmupLR(optimizer, total_steps=10, warmup_steps=5)
    optimizer.step()
    made_after.step()
    assert plain.param_groups[0]["lr"] == pytest.approx(1e-2 * 2 / 5)  # of the rate it began with


def prepare_dataloader_shares_the_data(rank: int, world_size: int) -> None:
    loader = ours().prepare_dataloader(torch.arange(12), batch_size=3, shuffle=True, drop_last=True)
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, [int(x) for part in loader for x in part])
    assert sorted(parts[0] + parts[1]) == list(range(12))


def fp16_defaults_find_their_scale(rank: int, world_size: int) -> None:
    pair = boost(ours)
    assert pair.optimizer.loss_scale == 2**32
    pair.train(rank, 0, 40)
    assert 1 <= pair.optimizer.loss_scale <= 2**24
    assert not torch.equal(pair.values()["inward.weight"], model_values()["inward.weight"].half())


def a_pair_goes_when_nobody_uses_it(rank: int, world_size: int) -> None:
    gc.collect()
    gc.disable()
    pair = boost(ours, stage=2, precision="bf16")
    pair.train(rank, 0, 2)
    module = pair.model.unwrap()
    gone = [ref(pair.model), ref(pair.optimizer), ref(pair.optimizer.optim)]
    del pair
    assert [each() for each in gone] == [None] * 3
    again = Booster(plugin=ours(precision="fp32")).boost(module, adamw(module.parameters()))  # not boosted any more
    assert again[1] is not None
    gc.enable()


INTERFACE = (
    the_pair_is_what_booster_and_its_callers_expect,
    a_model_can_be_boosted_alone,
    it_says_what_it_supports,
    schedulers_work_on_either_optimizer,
    prepare_dataloader_shares_the_data,
    fp16_defaults_find_their_scale,
    a_pair_goes_when_nobody_uses_it,
)


def test_the_interface_is_what_booster_s_users_expect(subtests: pytest.Subtests) -> None:
    check_each(subtests, 2, INTERFACE)


def keywords(of: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(name, p.default) for name, p in inspect.signature(of).parameters.items()]


def test_keywords_and_defaults_are_colossalais() -> None:
    assert inspect.signature(LowLevelZeroPlugin) == inspect.signature(TheirPlugin)
    ours = {"overlap_communication": True, "reduce_bucket_size": None}
    theirs = [(name, ours.get(name, default)) for name, default in keywords(Theirs)]
    assert keywords(LowLevelZeroOptimizer)[: len(theirs)] == theirs


# ---- what is refused ----


def test_it_needs_a_process_group() -> None:
    with pytest.raises(AssertionError, match="colossalai.launch"):
        LowLevelZeroPlugin()


def option(**options: Any) -> Check:
    """By ColossalAI's own plugin, or when the optimizer is constructed."""
    return lambda rank, world_size: boost(ours, **options)


def boosting(make: Callable[[int], tuple[Any, Any]], plugin: Callable[..., Any] = ours) -> Check:
    return lambda rank, world_size: Booster(plugin=plugin(precision="fp32")).boost(*make(rank))


def a_pair(optimizer: Callable[..., Any] = adamw, **options: Any) -> tuple[Any, Any]:
    model = model_of(**options)
    return model, optimizer(model.parameters())


def boosted_twice(rank: int, world_size: int) -> None:
    booster, (model, plain) = Booster(plugin=ours(precision="fp32")), a_pair()
    booster.boost(model, plain)
    booster.boost(model, plain)


def boosted_with_another_model(rank: int, world_size: int) -> None:
    booster = Booster(plugin=ours(precision="fp32"))
    booster.boost(model_of(), booster.boost(*a_pair())[1])


def bad_option_of_bf16(rank: int, world_size: int) -> None:
    """The module isn't cast."""
    model, plain = a_pair()
    try:
        Booster(plugin=ours(precision="bf16", max_norm=-1.0)).boost(model, plain)
    finally:
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def strangers_on_rank_1(rank: int) -> tuple[Any, Any]:
    model, optimizer = a_pair()
    return model_of() if rank == 1 else model, optimizer


def of_sparse_gradients(rank: int) -> tuple[Any, Any]:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def pipeline(rank: int, world_size: int) -> None:
    pair = boost(ours)
    pair.booster.execute_pipeline(iter([]), pair.model, len, pair.optimizer)


def no_sync_too_early(rank: int, world_size: int) -> None:
    Booster(plugin=ours(precision="fp32")).no_sync(*a_pair())


def norm_of_no_type(rank: int, world_size: int) -> None:
    pair = boost(ours, precision="fp32")
    pair.backward(rank, 0)
    pair.optimizer.clip_grad_by_norm(0.1, 0)


MISTAKES: dict[str, tuple[Any, ...]] = {
    "stage": (option(stage=3), "AssertionError: ", "only supports stage 1/2"),
    "fp8": (option(use_fp8=True), "NotImplementedError: use_fp8: expected False, got True"),
    "no groups": (
        option(extra_dp_size=0),
        "ValueError: extra_dp_size: expected a number of groups to split the ranks into, at least 1, got 0",
    ),
    "groups of a rank and a half": (
        option(extra_dp_size=4),
        "AssertionError: extra_dp_size should be a factor of world_size",
    ),
    "max_norm": (bad_option_of_bf16, "ValueError: clip_grad_norm: expected a number >= 0"),
    "bucket size": (option(reduce_bucket_size_in_m=0), "ValueError: reduce_bucket_size: expected an int of at least 1"),
    "norm of no type": (norm_of_no_type, "ValueError: norm_type: expected a number above 0, or inf, got 0"),
    "boosted by another plugin": (
        boosting(lambda rank: Booster(plugin=ddp()).boost(*a_pair())[:2]),
        "ValueError: ",
        "no other plugin has boosted, got a TorchDDPModel: boost the module",
    ),
    "optimizer boosted twice": (boosted_twice, "ValueError: ", "expected parameters of the model, got others"),
    "boosted with another model": (
        boosted_with_another_model,
        "ValueError: ",
        "expected parameters of the model, got others, first inward.weight, (11, 7): make the",
    ),
    "strangers' parameters": (
        boosting(lambda rank: (model_of(), a_pair(seed=1)[1])),
        "ValueError: ",
        "expected parameters of the model, got others, first param_groups[0]",
    ),
    "no module": (
        boosting(lambda rank: (len, a_pair()[1])),
        "TypeError: ",
        "model: expected a torch.nn.Module, got builtin_function_or_method",
    ),
    "no optimizer": (
        boosting(lambda rank: (model_of(), len)),
        "TypeError: ",
        "optimizer: expected a torch.optim.Optimizer, got builtin",
    ),
    "not elementwise": (boosting(lambda rank: a_pair(torch.optim.LBFGS)), "TypeError: ", "LBFGS"),
    "other models": (boosting(lambda rank: a_pair(width=11 + rank)), "ValueError: ", "parameter inward.weight"),
    "names are the model's own": (boosting(of_sparse_gradients), "ValueError: 0.weight: expected a dense gradient"),
    "no_sync too early": (
        no_sync_too_early,
        "TypeError: ",
        "expected the one that booster.boost returned, got AdamW",
    ),
    "pipeline": (pipeline, "AssertionError: ", "does not support pipeline"),
}


def test_mistakes_are_refused_on_every_rank(subtests: pytest.Subtests) -> None:
    check_refusals(subtests, 2, MISTAKES)


def test_a_mistake_of_one_rank_is_told_to_all() -> None:
    first, second = run_ranks_expecting(boosting(strangers_on_rank_1), 2)
    assert first.message.startswith("rank 1 could not boost its model and optimizer: ValueError: optimizer: expected")
    assert second.message.startswith("optimizer: expected parameters of the model")
