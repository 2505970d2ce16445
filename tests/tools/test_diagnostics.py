"""What diagnostics tell: who had an inf or NaN, who differs from other ranks, by names of global ranks."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import Diagnostics, LossScale, LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping.parameter_store import ParameterStore
from lowlevel_zero.diagnostics.verification import checksum
from tests.support.cases import check_cases, check_each
from tests.support.oracle import Odd
from tests.support.ranks import run_ranks


@contextmanager
def listening() -> Iterator[list[str]]:
    """What the package warns of meanwhile."""
    handler, lines = logging.Handler(logging.WARNING), list[str]()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lowlevel_zero").addHandler(handler)
    yield lines
    logging.getLogger("lowlevel_zero").removeHandler(handler)


# ---- bad numbers: an inf or NaN in a gradient is named by parameter, bucket and rank, and not skipped for ever ----


def net(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(dtype)


class Spoiler:
    """A hook that puts its factor, if it has one, into a gradient on rank 1. It doesn't hold the model that has it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.factor: float | None = None

    def __call__(self, gradient: Tensor) -> Tensor | None:
        if self.factor is None or self.rank != 1:
            return None
        spoilt = gradient.clone()
        spoilt[2, 1] = self.factor
        return spoilt


class Run:
    """One rank's training, in which a gradient becomes bad in chosen steps on rank 1."""

    def __init__(self, rank: int, dtype: torch.dtype, optimizer: Any = torch.optim.SGD, **options: Any):
        self.model, self.spoiler = net(dtype), Spoiler(rank)
        options = {"reduce_bucket_size": 20, **options}
        self.optimizer = LowLevelZeroOptimizer(optimizer(self.model.parameters(), lr=0.01), model=self.model, **options)
        self.model[1].weight.register_hook(self.spoiler)

    def train(self, *factors: float | None) -> None:
        for factor in factors:
            self.spoiler.factor = factor
            x = torch.ones(2, 4, dtype=self.model[0].weight.dtype)
            self.optimizer.backward(self.model(x).float().square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()


def fused(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def an_overflow_names_parameter_rank_and_scale(rank: int, world_size: int, stage: int, optimizer: Any) -> None:
    run = Run(rank, torch.float16, optimizer, initial_scale=256.0, hysteresis=1, stage=stage)
    with listening() as lines:
        run.train(None, math.inf, math.nan, None, math.inf)
    told = [(line.partition(" (bucket ")[0], line.partition("), ")[2]) for line in lines]
    expected = [(2, "128, 1 steps"), (3, "64, 2 steps"), (5, "32, 1 steps")]
    assert told == [
        (
            f"step {step}: skipped, since gradients overflowed: first in 1.weight",
            f"from rank 1. Loss scale now {then} skipped in a row",
        )
        for step, then in expected
        if rank == 0
    ]


def test_an_overflow_is_named(subtests: pytest.Subtests) -> None:
    cases = [(1, torch.optim.SGD), (2, fused)]
    check_cases(subtests, 3, an_overflow_names_parameter_rank_and_scale, cases)


def an_overflow_came_from_no_rank_of_an_earlier_one(rank: int, world_size: int) -> None:
    """Whether that was stepped or dropped."""
    run = Run(1, torch.float16, initial_scale=256.0, hysteresis=1)
    with listening() as lines:
        for culprit, end in ((1, run.optimizer.step), (0, run.optimizer.step)) * 2 + ((1, run.optimizer.zero_grad),):
            run.spoiler.factor = math.inf if rank == culprit else None
            run.optimizer.backward(run.model(torch.ones(2, 4).half()).float().square().mean())
            end()
        run.train(math.inf if rank == 0 else None)
    told = [line.partition("), ")[2].partition(". ")[0] for line in lines]
    assert told == [f"from rank {culprit}" for culprit in (1, 0, 1, 0, 0) if rank == 0]


def a_sum_that_overflows_came_from_no_rank(rank: int, world_size: int) -> None:
    """Each rank's gradient fits fp16, their sum doesn't."""
    model = net(torch.float16)
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model, initial_scale=1.0)
    model[0].bias.register_hook(lambda gradient: torch.full_like(gradient, 40_000.0))
    optimizer.backward(model(torch.ones(2, 4).half()).float().sum())
    with listening() as lines:
        optimizer.step()
    told = "first in 0.bias (bucket 0), in the slice of the sum over ranks that rank 0, 1 holds"
    assert rank > 0 or told in lines[0]


def what_was_sent_before_a_step_or_a_zero_grad_is_forgotten(rank: int, world_size: int) -> None:
    """The second overflow is the sum's alone; a rank had sent a bad number of the same parameter before the first."""
    for ends in (LowLevelZeroOptimizer.step, LowLevelZeroOptimizer.zero_grad):
        model = net(torch.float16)
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model, initial_scale=4.0)
        numbers = iter((math.inf if rank == 1 else 1.0, 40_000.0))
        model[0].bias.register_hook(lambda gradient, of=numbers: torch.full_like(gradient, next(of)))
        with listening() as lines:
            for end in (ends, LowLevelZeroOptimizer.step):
                optimizer.backward(model(torch.ones(2, 4).half()).float().sum())
                end(optimizer)
        assert rank > 0 or "first in 0.bias (bucket 0), in the slice of the sum over ranks" in lines[-1], ends


def skipping_ends_when_the_scale_can_fall_no_further(rank: int, world_size: int) -> None:
    run = Run(rank, torch.float16, loss_scale=LossScale(4.0, hysteresis=1, max_skipped_steps=4))
    run.train(math.inf, math.inf, math.inf)
    with pytest.raises(RuntimeError) as caught:
        run.train(math.inf)
    message = str(caught.value)
    assert message.startswith("step 4: skipped, since gradients overflowed: first in 1.weight (bucket ")
    assert "Loss scale now 1, 4 steps skipped in a row. The loss scale is at its minimum" in message


def skipping_goes_on_without_a_limit_and_while_the_scale_falls(rank: int, world_size: int) -> None:
    for limit, scale in ((0, 1.0), (3, 2.0**16)):
        run = Run(rank, torch.float16, loss_scale=LossScale(scale, hysteresis=1, max_skipped_steps=limit))
        before = run.model[0].weight.clone()
        run.train(*[math.inf] * 6)
        assert torch.equal(before, run.model[0].weight)
        run.train(None)
        assert not torch.equal(before, run.model[0].weight)


def each_skipped_step_is_told_on_a_device_if_any_rank_is_verbose(rank: int, world_size: int) -> None:
    """Else the host reads whether one overflows if the one before did."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParameterStore, "on_host", False)
        for verbose, told in ((False, ["step 5"]), (True, ["step 2", "step 4", "step 5"])):
            options = {"initial_scale": 256.0, "hysteresis": 1, "verbose": verbose and rank == 1}
            run = Run(rank, torch.float16, fused, **options)
            with listening() as lines:
                run.train(None, math.inf, None, math.inf, math.inf)
            assert [line.split(":")[0] for line in lines] == told * (rank == 0)


def a_norm_that_is_not_finite_is_told_once_and_again_at_powers_of_two(rank: int, world_size: int) -> None:
    for options in ({}, {"clip_grad_norm": 1.0}, {"overlap_allgather": True}):
        run = Run(rank, torch.float32, **options)
        with listening() as lines:
            run.train(None, *[math.nan] * 4, None)
        assert [line.split(":")[0] for line in lines] == ["step 2", "step 3", "step 5"] * (rank == 0), options
        if rank == 0:
            assert "the gradient norm is nan, 1 in a row: first in 1.weight (bucket " in lines[0]
            assert "in the slice of the sum over ranks that rank 1 holds" in lines[0]
            assert ", 2 in a row" in lines[1]
            assert ", 4 in a row" in lines[2]


def a_norm_that_is_finite_again_begins_the_count_anew(rank: int, world_size: int) -> None:
    run = Run(rank, torch.float32)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with listening() as lines:
        for factor in (math.nan, None, math.nan, math.nan):
            run.train(factor)
            run.model.load_state_dict(before)
    told = [line.partition(" in a row")[0] for line in lines]
    expected = [f"step {step}: the gradient norm is nan, {count}" for step, count in ((1, 1), (3, 1), (4, 2))]
    assert told == expected * (rank == 0)


def error_if_nonfinite_steps_nothing_and_training_goes_on(rank: int, world_size: int) -> None:
    run = Run(rank, torch.bfloat16, torch.optim.AdamW, diagnostics=Diagnostics(error_if_nonfinite=True))
    run.train(None)
    before = [p.detach().clone() for p in run.model.parameters()]
    with listening() as lines, pytest.raises(RuntimeError) as caught:
        run.train(math.inf)
    assert all(map(torch.equal, before, run.model.parameters()))
    run.optimizer.zero_grad()
    run.train(None)
    assert not torch.equal(before[0], run.model[0].weight)
    assert lines == []
    message = str(caught.value)
    assert message.startswith("step 2: expected a finite gradient norm, got inf: first in 1.weight (bucket ")
    assert "), from rank 1. Nothing was stepped: call optimizer.zero_grad() on every rank" in message


def test_bad_numbers(subtests: pytest.Subtests) -> None:
    checks = (
        an_overflow_came_from_no_rank_of_an_earlier_one,
        a_sum_that_overflows_came_from_no_rank,
        what_was_sent_before_a_step_or_a_zero_grad_is_forgotten,
        skipping_ends_when_the_scale_can_fall_no_further,
        skipping_goes_on_without_a_limit_and_while_the_scale_falls,
        each_skipped_step_is_told_on_a_device_if_any_rank_is_verbose,
        a_norm_that_is_not_finite_is_told_once_and_again_at_powers_of_two,
        a_norm_that_is_finite_again_begins_the_count_anew,
        error_if_nonfinite_steps_nothing_and_training_goes_on,
    )
    check_each(subtests, 2, checks)


def test_one_rank_alone() -> None:
    def live(rank: int, world_size: int) -> list[str]:
        run = Run(1, torch.float32)
        with listening() as lines:
            run.train(math.nan)
        return lines

    ((line,),) = run_ranks(live, 1)
    assert line.endswith("first in 1.weight (bucket 1), from rank 0")


# ---- an optimizer over a part of the ranks, of which messages tell the global numbers ----

PART = [1, 3]


def over_a_part(**options: Any) -> tuple[nn.Linear, LowLevelZeroOptimizer] | None:
    group = dist.new_group(PART)
    if dist.get_rank() not in PART:
        return None
    model = nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, LowLevelZeroOptimizer(sgd, model=model, dp_process_group=group, **options)


def the_rank_that_a_nan_came_from(rank: int, world_size: int) -> None:
    if (made := over_a_part(diagnostics=Diagnostics(error_if_nonfinite=True))) is not None:
        model, optimizer = made
        optimizer.backward(model(torch.full((2, 4), float("nan") if rank == 3 else 1.0)).sum())
        with pytest.raises(RuntimeError, match="from rank 3"):
            optimizer.step()


def a_rank_that_others_wait_for(rank: int, world_size: int) -> None:
    with listening() as lines:
        if (made := over_a_part(diagnostics=Diagnostics(stall_timeout=0.2))) is not None:
            time.sleep(1.0 if rank == 3 else 0.0)
            made[1].backward(made[0](torch.ones(2, 4)).sum())
            made[1].step()
    if rank == 1:
        line = next(line for line in lines if "has waited" in line)
        assert line.startswith("rank 1 has waited")
        assert "Not there yet: rank 3" in line


def a_rank_without_shared_memory(rank: int, world_size: int) -> None:
    def refuse(*_: Any) -> int:
        raise OSError("no memfd here")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setattr(os, "memfd_create", refuse)
        made = over_a_part()
    told = made and made[1].shard_group.describe_backend(torch.device("cpu"))
    assert told is None or "rank 3: no memfd here" in told


def steps_are_counted_where_experts_are_all_there_is(rank: int, world_size: int) -> None:
    own = [dist.new_group([each]) for each in range(world_size)][rank]
    model = nn.Linear(4, 4)
    optimizer = LowLevelZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        {own: list(model.parameters())},
        model=model,
        dp_process_group=dist.group.WORLD,
    )
    with listening() as lines:
        for step in range(3):
            optimizer.backward(model(torch.full((2, 4), float("nan") if step == 2 else 1.0)).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert rank > 0 or any(line.startswith("step 3: the gradient norm is nan") for line in lines)


def test_an_optimizer_over_a_part_of_the_ranks(subtests: pytest.Subtests) -> None:
    checks = (
        the_rank_that_a_nan_came_from,
        a_rank_that_others_wait_for,
        a_rank_without_shared_memory,
        steps_are_counted_where_experts_are_all_there_is,
    )
    check_each(subtests, 4, checks)


# ---- the divergence watch: one flipped bit on one rank is found and named, on all; equal ranks are left alone ----

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit in memory, past autograd and all bookkeeping."""
    flat = torch.as_strided(tensor.data, (tensor.numel(),), (1,))
    bits = flat.view(INTEGERS[tensor.element_size()])
    width = 8 * tensor.element_size()
    bits[element] ^= (1 << bit) - (1 << width if bit == width - 1 else 0)


def wrap(model: nn.Module, **options: Any) -> LowLevelZeroOptimizer:
    return LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, dtype=dtype)
    before = checksum(tensor)
    for element in range(7):
        for bit in range(8 * tensor.element_size()):
            flip(tensor, element, bit)
            assert checksum(tensor) != before
            flip(tensor, element, bit)
    assert torch.equal(checksum(tensor), before)


def test_a_checksum_knows_places_signs_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.zeros(0)) == 0
    monkeypatch.setattr("lowlevel_zero.diagnostics.verification._CHUNK", 3)
    one, other = torch.arange(7.0), torch.arange(7.0)
    other[:3], other[3:6] = one[3:6].clone(), one[:3].clone()
    assert checksum(one) != checksum(other)
    assert checksum(one.reshape(7, 1).t()) == checksum(one)


def a_flipped_bit_is_named(rank: int, world_size: int, name: str, culprit: int, others: str) -> None:
    model = Odd()
    optimizer = wrap(model, partition_grad=True)
    optimizer.backward(model(torch.ones(3, 4), set()).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if rank == culprit:
        flip(dict(model.named_parameters())[name], 0, 3)
    told = f"^{name}: expected the same values on every rank, got others on rank {culprit} than on ranks {others} .1 of"
    with pytest.raises(RuntimeError, match=told):
        optimizer.verify()


def test_a_flipped_bit_is_named_on_all_ranks(subtests: pytest.Subtests) -> None:
    check_cases(subtests, 3, a_flipped_bit_is_named, [("inward", 0, "1, 2"), ("frozen.bias", 1, "0, 2")])


def a_layer_that_one_rank_alone_has(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = wrap(model)
    if rank == 1:
        model.append(nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match="rank 0 has «nothing more» where rank 1 has «2.weight»"):
        optimizer.verify()
    if rank == 1:
        model.pop(2)
    optimizer.verify()


def every_so_many_steps(rank: int, world_size: int) -> None:
    """A bit of a dropped layer flips after the first step; the fourth finds it."""
    model = Odd()
    optimizer = wrap(model, diagnostics=Diagnostics(verify_every=4))
    for step in range(4):
        optimizer.backward(model(torch.ones(3, 4), {1}).square().mean())
        if step < 3:
            optimizer.step()
        if rank == 1 and step == 0:
            flip(model.layers[1].weight, 3, 0)
    with pytest.raises(RuntimeError, match="^layers.1.weight: "):
        optimizer.step()


def buffers_are_compared_when_asked_for(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = wrap(model)
    model(torch.randn(8, 4) + rank)
    optimizer.verify()
    with pytest.raises(RuntimeError, match="^1.running_mean: "):
        optimizer.verify(buffers=True)


def a_layer_that_was_replaced_on_all_ranks_and_differs(rank: int, world_size: int) -> None:
    """Two tensors have one name then: the former one's record, and the new one."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = wrap(model)
    former, model[0] = model[0], nn.Linear(3, 3)
    former.weight.data[0, 0] += rank  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="0.weight: expected the same values on every rank"):
        optimizer.verify()


def test_what_differs_is_named(subtests: pytest.Subtests) -> None:
    checks = (
        a_layer_that_one_rank_alone_has,
        every_so_many_steps,
        buffers_are_compared_when_asked_for,
        a_layer_that_was_replaced_on_all_ranks_and_differs,
    )
    check_each(subtests, 2, checks)
