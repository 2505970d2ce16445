"""Odd parameters: every shape and stride, shared, in odd storage, and models of which some is frozen or not held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.layout import layout_of, memory_held, traffic_of
from tests.support.on_ranks import on_ranks
from tests.support.oracle import check_close
from tests.support.ranks import run_cases
from tests.support.scripts import STAGES, Alone, Together, adamw, check, loss_at, momentum, net, parameters_of, steps

Parameters = dict[str, Tensor]

# Shapes and strides


def randn(*shape: int) -> Tensor:
    return torch.randn(shape)


KINDS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: randn(0),
    "empty_matrix": lambda: randn(0, 3),
    "zero_d": lambda: randn(),
    "one": lambda: randn(1),
    "one_cubed": lambda: randn(1, 1, 1),
    "two": lambda: randn(2),
    "three": lambda: randn(3),
    "five": lambda: randn(5),
    "twelve": lambda: randn(12),
    "prime": lambda: randn(31),
    "transposed": lambda: randn(3, 5).t(),
    "permuted": lambda: randn(2, 3, 4).permute(2, 0, 1),
    "channels_last": lambda: randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "one_channel_last": lambda: randn(3, 1, 2, 2).to(memory_format=torch.channels_last),
    "strided_rows": lambda: randn(6, 3)[::2],
    "strided_columns": lambda: randn(3, 6)[:, ::2],
    "offset": lambda: randn(10)[3:8],
}
DENSE = [kind for kind in KINDS if not kind.startswith("strided")]


class Kinds(nn.Module):
    """One parameter of each kind; its loss gives every element a gradient of its own."""

    def __init__(self, kinds: tuple[str, ...] = tuple(KINDS)) -> None:
        super().__init__()
        torch.manual_seed(0)
        for kind in kinds:
            setattr(self, kind, nn.Parameter(KINDS[kind]()))

    def forward(self, step: int, rank: int) -> Tensor:
        total = torch.zeros(())
        for at, p in enumerate(self.parameters()):
            goal = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + 50 * rank + at))
            total = total + (p.float() - goal).square().sum()
        return total


@pytest.mark.parametrize(("world_size", "bucket"), [(1, 40), (2, 2**20), (3, 1), (4, 40)])
def test_every_kind_trains_and_keeps_its_strides(world_size: int, bucket: int, subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, stage: str) -> None:
        model, alone = Kinds(), Kinds()
        of_alone = momentum(alone)
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model, reduce_bucket_size=bucket, **STAGES[stage])
        for step in range(4):
            for kind, p in model.named_parameters():
                kept = KINDS[kind]().stride() if kind in DENSE else torch.empty(KINDS[kind]().shape).stride()
                assert p.stride() == kept, kind
            optimizer.backward(model(step, rank))
            torch.stack([alone(step, each) for each in range(world_size)]).mean().backward()
            for each in (optimizer, of_alone):
                each.step()
                each.zero_grad()
        check_close(parameters_of(alone), [parameters_of(model)], 2e-6)
        optimizer.verify()

    for (stage,), ran in run_cases(train, world_size, [(stage,) for stage in STAGES], one_group=True):
        with subtests.test(stage=stage):
            ran.values()


@on_ranks(2)
def test_a_model_of_empty_parameters_alone_can_step(rank: int) -> None:
    model = Kinds(("empty", "empty_matrix"))
    optimizer = LowLevelZeroOptimizer(adamw(model), model=model)
    optimizer.backward(model(0, rank))
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.get_grad_norm() == 0.0


@on_ranks(3)
def test_maps_tell_slices_and_padding(rank: int) -> None:
    model = Kinds(("zero_d", "five", "twelve"))
    optimizer = LowLevelZeroOptimizer(adamw(model), model=model)
    slices, back = optimizer.get_working_to_master_map(), optimizer.get_master_to_working_map()
    padding = optimizer.get_param_padding_map()
    assert [
        (name, slices[id(p)].numel(), padding[id(p)], back[id(slices[id(p)])] is p)
        for name, p in model.named_parameters()
    ] == [("zero_d", 1, 2, True), ("five", 2, 1, True), ("twelve", 4, 0, True)]


# Of which some is frozen


@on_ranks(2, STAGES)
def test_frozen_parameters_cost_neither_state_nor_traffic(rank: int, stage: str) -> None:
    traffic = []
    for held in (lambda p: True, lambda p: p.requires_grad):
        model = net(width=50)
        frozen = parameters_of(model[1].requires_grad_(False))
        inner = torch.optim.AdamW([p for p in model.parameters() if held(p)])
        optimizer = LowLevelZeroOptimizer(inner, model=model, **STAGES[stage])
        optimizer.backward(model(torch.ones(2, 50)).square().mean())
        optimizer.step()
        traffic.append(traffic_of(optimizer))
        assert all(torch.equal(frozen[name], p) for name, p in model[1].named_parameters())
        assert not any(id(p) in optimizer.get_working_to_master_map() for p in model[1].parameters())
        assert len(optimizer.state) == 6
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert traffic[0] == traffic[1]
    assert 0 <= traffic[0]["gather"] - 4 * trained // 2 <= 128  # by which a row may be padded


@on_ranks(2)
def test_a_layer_that_was_trained_before_it_was_frozen_keeps_no_state(rank: int) -> None:
    model = net(width=50)
    inner = adamw(model)
    model(torch.ones(2, 50)).square().mean().backward()
    inner.step()
    inner.zero_grad()
    model[1].requires_grad_(False)
    optimizer = LowLevelZeroOptimizer(inner, model=model)
    assert len(optimizer.state) == 6
    layout = layout_of(optimizer)
    assert layout.bytes.states == memory_held(optimizer).states > 0


def test_trainable_parameters_of_nobody_are_left_alone() -> None:
    """As in plain torch: what the optimizer doesn't hold keeps its own rank's gradients."""

    def script(side: Alone) -> nn.Module:
        model, untouched = net(), net()
        optimizer = side.wrap(momentum(model[:2]), model)
        steps(side, model, optimizer, range(1))
        if isinstance(side, Together):
            loss_at(untouched, 0)(side.rank).backward()
            torch.testing.assert_close(model[2].weight.grad, untouched[2].weight.grad)
        return model

    check(script)
