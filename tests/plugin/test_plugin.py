"""The plugin in real ColossalAI training: DDP's numbers, ColossalAI's ZeRO's numbers, Booster's interface."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
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
from tests.support.judging import off_the_way
from tests.support.ranks import run_cases, run_ranks, run_ranks_expecting

# ---- numbers ----


CLIP = 0.4  # in some steps norms are larger, in some they aren't: else factors would be clipped away


def trained(
    rank: int, world_size: int, make: Any, options: dict[str, Any], clip: float, steps: int = 5
) -> dict[str, Tensor]:
    pair = boost(make, momentum, **options)
    pair.train(rank, 0, steps, clip)
    return pair.values()


def test_a_mistake_is_farther_off_than_tolerances() -> None:
    def rank(rank: int, world_size: int) -> list[dict[str, Tensor]]:
        right = trained(rank, world_size, ddp, {}, CLIP)
        short = trained(rank, world_size, ddp, {}, CLIP, steps=4)
        alone = trained(0, world_size, ddp, {}, CLIP)  # rank 0's data on both: rank 1 is left out
        mean_square = nn.functional.mse_loss
        wrong = boost(ddp, momentum)
        for step in range(5):
            x, y = batch(rank, step)
            wrong.booster.backward(2 * mean_square(wrong.model(x), y), wrong.optimizer)
            torch.nn.utils.clip_grad_norm_(wrong.model.parameters(), CLIP)
            wrong.optimizer.step()
            wrong.optimizer.zero_grad()
        return [right, short, alone, wrong.values()]

    right, *wrong = run_ranks(rank, 2)[0]
    for each in wrong:
        assert off_the_way(model_values(), right, each) > 10 * max(SHARES.values())


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


def test_extra_dp_size_has_to_divide_the_world() -> None:
    for raised in run_ranks_expecting(lambda rank, world_size: LowLevelZeroPlugin(extra_dp_size=2), 3):
        assert "extra_dp_size should be a factor of world_size" in raised.message


def model_values() -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model_of().named_parameters()}


# Of the way that parameters go: where a norm that clips differs in its last bit, some are rounded the other way.
SHARES = {"fp32": 1e-6, "bf16": 2e-3, "fp16": 2e-4}


@pytest.mark.parametrize(("stage", "precision"), list(zip((1, 2, 1), SHARES, strict=True)))
def test_it_equals_colossalais_own_zero(stage: int, precision: str) -> None:
    options = {"stage": stage, "precision": precision, "initial_scale": 128, "max_norm": CLIP}
    expected = run_ranks(trained, 2, theirs, options, 0.0)
    got = run_ranks(trained, 2, ours, options, 0.0)
    check_equal(got[0], got[1])
    assert off_the_way(model_values(), expected[0], got[0]) <= SHARES[precision]


def test_fp16_defaults_find_their_scale() -> None:
    def rank(rank: int, world_size: int) -> tuple[float, dict[str, Tensor]]:
        pair = boost(ours)
        assert pair.optimizer.loss_scale == 2**32
        pair.train(rank, 0, 40)
        return pair.optimizer.loss_scale, pair.values()

    for scale, values in run_ranks(rank, 2):
        assert 1 <= scale <= 2**24
        assert not torch.equal(values["inward.weight"], model_values()["inward.weight"].half())


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


def test_clip_grad_by_norm_clips_by_hand() -> None:
    def rank(rank: int, world_size: int) -> None:
        by_plugin = boost(ours, momentum, precision="fp32", max_norm=0.1)
        by_plugin.train(rank, 0, 1)
        by_hand = boost(ours, momentum, precision="fp32")
        by_hand.backward(rank, 0)
        norm = by_hand.optimizer.clip_grad_by_norm(0.1, error_if_nonfinite=True)
        by_hand.optimizer.step()
        assert norm.item() == pytest.approx(by_plugin.optimizer.get_grad_norm(), rel=1e-6)
        assert norm.item() > 0.2  # Adam's first step would be the same with any gradients
        check_close(by_plugin.values(), by_hand.values(), 1e-7)
        with pytest.raises(ValueError, match="norm_type: expected a number above 0, or inf, got 0"):
            by_hand.optimizer.clip_grad_by_norm(0.1, 0)

    run_ranks(rank, 2)


Clip = Callable[[Any, list[nn.Parameter]], Any]


def by_norm(norm_type: float, **more: Any) -> tuple[Clip, Clip]:
    return (
        lambda _, parameters: torch.nn.utils.clip_grad_norm_(parameters, CLIP, norm_type, **more),
        lambda optimizer, _: optimizer.clip_grad_by_norm(CLIP, norm_type, **more),
    )


CLIPS: dict[str, tuple[Clip, Clip]] = {
    "maximum": by_norm(float("inf")),
    "1-norm, foreach": by_norm(1.0, foreach=True),
    "3-norm, finite": by_norm(3, error_if_nonfinite=True),
    "by value": (
        lambda _, parameters: torch.nn.utils.clip_grad_value_(parameters, 0.01),
        lambda optimizer, _: optimizer.clip_grad_by_value(0.01),
    ),
}


def test_clipping_by_other_norms_and_by_value_as_ddp_does(subtests: pytest.Subtests) -> None:
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

    for (name, stage), ran in run_cases(rank, 2, list(product(CLIPS, (1, 2)))):
        with subtests.test(name, stage=stage):
            ran.values()


# ---- the interface ----


def test_the_pair_is_what_booster_and_its_callers_expect() -> None:
    def rank(rank: int, world_size: int) -> None:
        model = model_of()
        plain = adamw(groups_of(model))
        booster = Booster(plugin=ours(stage=2, precision="bf16"))
        boosted, optimizer, criterion, loader, scheduler = booster.boost(model, plain, len, [1], None)
        assert (criterion, loader, scheduler) == (len, [1], None)
        assert isinstance(optimizer, LowLevelZeroOptimizer)
        assert isinstance(optimizer, OptimizerWrapper)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(boosted, ModelWrapper)
        assert isinstance(boosted, AMPModelMixin)
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

    run_ranks(rank, 2)


def test_a_model_can_be_boosted_alone() -> None:
    def rank(rank: int, world_size: int) -> None:
        boosted, optimizer, *_ = Booster(plugin=ours(precision="bf16", cast_inputs=False)).boost(model_of())
        assert optimizer is None
        boosted.update_master_params()
        boosted._force_wait_all_gather()
        with pytest.raises(RuntimeError, match="dtype"):
            boosted(batch(0, 0)[0])

    run_ranks(rank, 1)


def test_keywords_and_defaults_are_colossalais() -> None:
    def of(plugin: type) -> dict[str, Any]:
        return {name: p.default for name, p in inspect.signature(plugin).parameters.items()}

    assert of(LowLevelZeroPlugin) == of(TheirPlugin)
    assert list(of(LowLevelZeroPlugin)) == list(of(TheirPlugin))


def test_what_it_supports() -> None:
    def rank(rank: int, world_size: int) -> None:
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

    run_ranks(rank, 1)


def test_schedulers_work_on_either_optimizer() -> None:
    def rank(rank: int, world_size: int) -> None:
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

    run_ranks(rank, 2)


def test_prepare_dataloader_shares_the_data() -> None:
    def rank(rank: int, world_size: int) -> list[int]:
        loader = ours().prepare_dataloader(torch.arange(12), batch_size=3, shuffle=True, drop_last=True)
        return [int(x) for part in loader for x in part]

    parts = run_ranks(rank, 2)
    assert sorted(parts[0] + parts[1]) == list(range(12))


def test_a_pair_goes_when_nobody_uses_it() -> None:
    def rank(rank: int, world_size: int) -> None:
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

    run_ranks(rank, 2)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stage": 3}, AssertionError, "only supports stage 1/2"),
        ({"precision": "fp8"}, AssertionError, "only supports .*fp16"),
        ({"norm_type": 1.0}, AssertionError, "norm_type=2.0"),
        ({"use_fp8": True}, NotImplementedError, "use_fp8=True is not available yet"),
        (
            {"extra_dp_size": 0},
            ValueError,
            "extra_dp_size: expected a number of groups to split the ranks into, at least 1, got 0",
        ),
        ({"max_norm": -1.0}, ValueError, "clip_grad_norm: expected a number >= 0"),
        ({"reduce_bucket_size_in_m": 0}, ValueError, "reduce_bucket_size: expected an int of at least 1"),
        ({"communication_dtype": torch.int8}, ValueError, "communication_dtype: expected"),
        ({"growth_factor": 0.5}, ValueError, "growth_factor: expected a number above 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """By ColossalAI's own plugin, or when the optimizer is constructed."""

    def rank(rank: int, world_size: int) -> None:
        with pytest.raises(error, match=message):
            boost(ours, **options)

    run_ranks(rank, 1)


def test_it_needs_a_process_group() -> None:
    with pytest.raises(AssertionError, match="colossalai.launch"):
        LowLevelZeroPlugin()


def test_its_keywords_are_colossalai_s() -> None:
    assert inspect.signature(LowLevelZeroPlugin) == inspect.signature(TheirPlugin)


def test_pipelines_are_refused() -> None:
    def rank(rank: int, world_size: int) -> None:
        pair = boost(ours)
        pair.booster.execute_pipeline(iter([]), pair.model, len, pair.optimizer)

    for raised in run_ranks_expecting(rank, 2):
        assert "does not support pipeline" in raised.message


def optimizer_boosted_twice(booster: Booster, rank: int) -> None:
    model = model_of()
    plain = adamw(model.parameters())
    booster.boost(model, plain)
    booster.boost(model, plain)


def boosted_by_another_plugin(booster: Booster, rank: int) -> None:
    model = model_of()
    booster.boost(*Booster(plugin=ddp()).boost(model, adamw(model.parameters()))[:2])


def strangers_parameters(booster: Booster, rank: int) -> None:
    booster.boost(model_of(), adamw(model_of(1).parameters()))


def no_module(booster: Booster, rank: int) -> None:
    booster.boost(len, adamw(model_of().parameters()))


def no_optimizer(booster: Booster, rank: int) -> None:
    booster.boost(model_of(), len)


def not_elementwise(booster: Booster, rank: int) -> None:
    model = model_of()
    booster.boost(model, torch.optim.LBFGS(model.parameters()))


def other_models(booster: Booster, rank: int) -> None:
    model = model_of(width=11 + rank)
    booster.boost(model, adamw(model.parameters()))


def no_sync_too_early(booster: Booster, rank: int) -> None:
    booster.no_sync(model_of(), adamw(model_of().parameters()))


BAD_BOOSTS = [
    (boosted_by_another_plugin, "ValueError", "no other plugin has boosted, got a TorchDDPModel: boost the module"),
    (optimizer_boosted_twice, "ValueError", "expected parameters of the model, got others"),
    (strangers_parameters, "ValueError", "expected parameters of the model, got others, first param_groups[0]"),
    (no_module, "TypeError", "model: expected a torch.nn.Module, got builtin_function_or_method"),
    (no_optimizer, "TypeError", "optimizer: expected a torch.optim.Optimizer, got builtin"),
    (not_elementwise, "TypeError", "LBFGS"),
    (other_models, "ValueError", "parameter inward.weight"),
    (no_sync_too_early, "TypeError", "expected the one that booster.boost returned, got AdamW"),
]


@pytest.mark.parametrize(("mistake", "error", "message"), BAD_BOOSTS, ids=lambda value: getattr(value, "__name__", ""))
def test_mistakes_are_refused_on_every_rank(mistake: Any, error: str, message: str) -> None:
    def rank(rank: int, world_size: int) -> None:
        mistake(Booster(plugin=ours(precision="fp32")), rank)

    for raised in run_ranks_expecting(rank, 2):
        assert raised.type == error
        assert message in raised.message


def test_a_mistake_of_one_rank_is_told_to_all() -> None:
    def rank(rank: int, world_size: int) -> None:
        model = model_of()
        Booster(plugin=ours()).boost(model, adamw((model_of() if rank == 1 else model).parameters()))

    first, second = run_ranks_expecting(rank, 2)
    assert first.message.startswith("rank 1 could not boost its model and optimizer: ValueError: optimizer: expected")
    assert second.message.startswith("optimizer: expected parameters of the model")


def test_names_in_messages_are_the_models_own() -> None:
    def rank(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
        Booster(plugin=ours(precision="fp32")).boost(model, torch.optim.SGD(model.parameters(), lr=1.0))

    for raised in run_ranks_expecting(rank, 2):
        assert raised.message.startswith("0.weight: expected a dense gradient")


def test_the_optimizer_s_keywords_and_defaults_are_colossalais() -> None:
    def keywords(optimizer: Any) -> list[tuple[str, Any]]:
        return [(name, p.default) for name, p in inspect.signature(optimizer).parameters.items()]

    ours = {"overlap_communication": True, "reduce_bucket_size": None}
    theirs = [(name, ours.get(name, default)) for name, default in keywords(Theirs)]
    assert keywords(LowLevelZeroOptimizer)[: len(theirs)] == theirs
