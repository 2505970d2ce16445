"""Parameters that the caller writes in mid-run: masters follow, and keep the low bits of the rest."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_cases, run_cases_expecting, run_ranks
from tests.support.scripts import STAGES, Alone, Case, Script, Together, adamw, check_each, momentum, net, steps


def load(model: nn.Module) -> None:
    model.load_state_dict(net(seed=7).to(next(model.parameters()).dtype).state_dict())


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.clamp_(-0.2, 0.2)


def clamp_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


@torch.no_grad()
def set_one_element(model: nn.Module) -> None:
    model[1].weight[2, 3] = 1.5


def assign(model: nn.Module) -> None:
    """New memory, of other strides here and there, and partly of other values."""
    for p in model.parameters():
        p.data = torch.where(p.data > 0.1, p.data * 0.5, p.data).t().contiguous().t()


def copy_there_and_back(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model.double().to(dtype)


EDITS = {
    "load_state_dict": load,
    "clamp": clamp,
    "data_clamp": clamp_data,
    "one_element": set_one_element,
    "assigned": assign,
    "there_and_back": copy_there_and_back,
}


def test_edits_of_an_fp32_model_are_followed(subtests: pytest.Subtests) -> None:
    def script_of(edit: Callable[[nn.Module], None]) -> Script:
        def script(side: Alone) -> nn.Module:
            model = net()
            optimizer = side.wrap(momentum(model), model)
            steps(side, model, optimizer, range(2))
            edit(model)
            steps(side, model, optimizer, range(2, 4))
            return model

        return script

    cases = zip(cycle(STAGES), EDITS.items(), strict=False)
    check_each({name: Case(script_of(edit), STAGES[stage], 3) for stage, (name, edit) in cases}, subtests)


SEEN_BY_AUTOGRAD = [name for name in EDITS if name != "data_clamp"]


def test_an_edit_behind_autograd_s_back_of_a_sixteen_bit_model_needs_update_master_params() -> None:
    def train(rank: int, world_size: int) -> None:
        model = net().bfloat16()
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
        clamp_data(model)
        edited = [p.detach().clone() for p in model.parameters()]
        optimizer.update_master_params(model)
        steps(Together(rank), model, optimizer, [0])
        assert all(torch.equal(p, value) for p, value in zip(model.parameters(), edited, strict=True))

    run_ranks(train, 2)


@pytest.mark.parametrize("world_size", [1, 3])
def test_edits_of_a_sixteen_bit_model_reach_the_masters_and_leave_the_rest_its_low_bits(
    world_size: int, subtests: pytest.Subtests
) -> None:
    """A step with a rate of 0 takes edits over and changes nothing else."""

    def train(rank: int, world_size: int, edit: str) -> list[tuple[Tensor, Tensor, Tensor]]:
        model = net().bfloat16()
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        steps(Together(rank), model, optimizer, [0])
        slices = [optimizer.get_working_to_master_map()[id(p)] for p in model.parameters()]
        before = [own.clone() for own in slices]
        EDITS[edit](model)
        edited = [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups[0]["lr"] = 0.0
        steps(Together(rank), model, optimizer, [1])
        return list(zip(before, edited, slices, strict=True))

    for (edit,), ran in run_cases(train, world_size, [(edit,) for edit in SEEN_BY_AUTOGRAD], one_group=True):
        with subtests.test(edit):
            for parts in zip(*ran.values(), strict=True):
                edited = parts[0][1].flatten()
                before, after = (torch.cat([part[at] for part in parts])[: edited.numel()] for at in (0, 2))
                kept = before.bfloat16() == edited
                assert torch.equal(after, torch.where(kept, before, edited.float()))


def to_bfloat16(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def to_double(model: nn.Module) -> None:
    model.double()


def test_a_parameter_of_another_dtype_is_refused_by_name(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, stage: str, bucket: int, take_away: Callable[[nn.Module], None]) -> None:
        model = net()
        optimizer = LowLevelZeroOptimizer(adamw(model), model=model, reduce_bucket_size=bucket, **STAGES[stage])
        steps(Together(rank), model, optimizer, [0])
        take_away(model)
        steps(Together(rank), model, optimizer, [1])

    ways = (to_bfloat16, to_double)
    for (stage, bucket, take_away), ran in run_cases_expecting(train, 2, product(STAGES, (1, 2**20), ways)):
        with subtests.test(stage=stage, bucket=bucket, take_away=take_away.__name__):
            for error in ran.raised():
                assert error.type == "RuntimeError"
                assert error.message.startswith(("1.weight: ", "0.weight: "))
                assert "before constructing the optimizer" in error.message


def test_master_slices_can_be_refreshed_from_the_model() -> None:
    def refresh(rank: int, world_size: int) -> bool:
        model = net().bfloat16()
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        steps(Together(rank), model, optimizer, [0])
        slices = [optimizer.get_working_to_master_map()[id(p)] for p in model.parameters()]
        low_bits = any(not torch.equal(own, own.bfloat16().float()) for own in slices)
        clamp_data(model)
        optimizer.update_master_params(model)
        same = [
            torch.equal(own[: p.numel()], p.detach().flatten().float())
            for own, p in zip(slices, model.parameters(), strict=True)
        ]
        return low_bits and all(same)

    assert run_ranks(refresh, 1) == [True]
