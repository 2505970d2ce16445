"""Odd parameters: every shape and stride, shared, frozen, thawed, added, edited, and what came before wrapping."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from itertools import cycle, pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.covering import covering
from tests.support.oracle import Run, build, check_close, emulate, groups, loss_of, train_alone, train_rank
from tests.support.ranks import run_cases, run_cases_expecting, run_ranks

STAGES: dict[str, dict[str, Any]] = {"stage1": {}, "stage2": {"partition_grad": True}}
over_stages = pytest.mark.parametrize("stage", STAGES)
over_world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
Parameters = dict[str, Tensor]


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


def momentum(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """For numbers: unlike Adam, it feels a gradient that is wrong by a factor."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **options)


def values(model: nn.Module) -> Parameters:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def net(seed: int = 0, sizes: tuple[int, ...] = (4, 5, 5, 3)) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def data(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(data(step, rank).to(dtype)).float().square().mean()


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, world_size: int) -> None:
    torch.stack([loss(model, step, rank) for rank in range(world_size)]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def step_sharded(model: nn.Module, optimizer: LowLevelZeroOptimizer, step: int, rank: int) -> None:
    optimizer.backward(loss(model, step, rank))
    optimizer.step()
    optimizer.zero_grad()


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


def train_kinds_alone(world_size: int, steps: int = 3) -> Parameters:
    model = Kinds()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        torch.stack([model(step, rank) for rank in range(world_size)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def train_kinds(rank: int, world_size: int, stage: str, bucket: int) -> tuple[Parameters, dict[str, set[Any]]]:
    model = Kinds()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = LowLevelZeroOptimizer(inner, model=model, reduce_bucket_size=bucket, **STAGES[stage])
    strides: dict[str, set[Any]] = {name: {p.stride()} for name, p in model.named_parameters()}
    for step in range(3):
        optimizer.backward(model(step, rank))
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            strides[name].add(p.stride())
    return values(model), strides


@over_world_sizes
def test_every_kind_trains_and_keeps_its_strides(world_size: int, subtests: pytest.Subtests) -> None:
    alone = train_kinds_alone(world_size)
    cases = [case for size, *case in covering((1, 2, 3, 4), STAGES, (1, 40, 2**20)) if size == world_size]
    for (stage, bucket), ran in run_cases(train_kinds, world_size, map(tuple, cases), one_group=True):
        with subtests.test(stage=stage, bucket=bucket):
            ranks = ran.values()
            check_close(alone, [parameters for parameters, _ in ranks], 2e-6)
            for _, strides in ranks:
                for kind, seen in strides.items():
                    kept = KINDS[kind]().stride() if kind in DENSE else torch.empty(KINDS[kind]().shape).stride()
                    assert seen == {kept}, kind


def test_a_model_of_empty_parameters_alone_can_step() -> None:
    def train(rank: int, world_size: int) -> float | None:
        model = Kinds(("empty", "empty_matrix"))
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model)
        optimizer.backward(model(0, rank))
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.get_grad_norm()

    assert run_ranks(train, 2) == [0.0, 0.0]


def test_tied_weights_are_one_parameter() -> None:
    def train(rank: int, world_size: int) -> tuple[bool, int, Parameters]:
        model = net(sizes=(4, 4, 4))
        model[1].weight = model[0].weight
        optimizer = LowLevelZeroOptimizer(momentum(model.parameters()), model=model)
        for step in range(3):
            step_sharded(model, optimizer, step, rank)
        tied = model[1].weight is model[0].weight
        return tied, len(optimizer.get_working_to_master_map()), values(model)

    alone = net(sizes=(4, 4, 4))
    alone[1].weight = alone[0].weight
    optimizer = momentum(alone.parameters())
    for step in range(3):
        step_alone(alone, optimizer, step, 2)
    ranks = run_ranks(train, 2)
    assert [(tied, records) for tied, records, _ in ranks] == [(True, 3)] * 2
    check_close(values(alone), [parameters for _, _, parameters in ranks], 2e-6)


def test_maps_tell_slices_and_padding() -> None:
    def look(rank: int, world_size: int) -> list[tuple[str, int, int, bool]]:
        model = Kinds(("zero_d", "five", "twelve"))
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model)
        slices, back = optimizer.get_working_to_master_map(), optimizer.get_master_to_working_map()
        padding = optimizer.get_param_padding_map()
        return [
            (name, slices[id(p)].numel(), padding[id(p)], back[id(slices[id(p)])] is p)
            for name, p in model.named_parameters()
        ]

    assert run_ranks(look, 3) == [[("zero_d", 1, 2, True), ("five", 2, 1, True), ("twelve", 4, 0, True)]] * 3


# Storage


def saved_bytes(model: nn.Module) -> int:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return len(buffer.getvalue())


@over_world_sizes
def test_a_saved_model_is_exactly_as_small_as_before(world_size: int) -> None:
    def grown(rank: int, world_size: int) -> int:
        model = net(sizes=(4, 7, 64, 3))
        before = saved_bytes(model)
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model, reduce_bucket_size=2**20)
        step_sharded(model, optimizer, 0, rank)
        return saved_bytes(model) - before

    assert run_ranks(grown, world_size) == [0] * world_size


def test_a_view_into_a_large_buffer_gets_a_storage_of_its_own() -> None:
    def wrap(rank: int, world_size: int) -> tuple[list[int], bool, bool]:
        large = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        model = nn.ParameterList([nn.Parameter(large[10:16].view(2, 3)), nn.Parameter(large[16:21])])
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model)
        kept = torch.equal(model[0].flatten(), large[10:16]) and torch.equal(model[1], large[16:21])
        optimizer.backward(sum(p.square().sum() for p in model))
        optimizer.step()
        return [p.untyped_storage().nbytes() for p in model], kept, torch.equal(model[1], large[16:21])

    assert run_ranks(wrap, 2) == [([6 * 4, 5 * 4], True, False)] * 2


def test_a_deep_copy_of_the_model_is_a_model_of_its_own() -> None:
    def train(rank: int, world_size: int) -> bool:
        model = net()
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model)
        copied = deepcopy(model)
        before = values(copied)
        step_sharded(model, optimizer, 0, rank)
        copied(data(0, rank)).sum().backward()
        return all(torch.equal(before[name], p) for name, p in copied.named_parameters())

    assert run_ranks(train, 2) == [True, True]


# Frozen ones


def traffic_of(optimizer_of: Callable[[], tuple[nn.Module, LowLevelZeroOptimizer]], rank: int) -> dict[str, int]:
    """Bytes that one step sends, by what for."""
    model, optimizer = optimizer_of()
    step_sharded(model, optimizer, 0, rank)
    return optimizer.traffic()


@over_stages
def test_frozen_parameters_cost_neither_state_nor_traffic(stage: str) -> None:
    def with_frozen() -> tuple[nn.Module, LowLevelZeroOptimizer]:
        model = net(sizes=(4, 50, 50, 3))
        model[1].requires_grad_(False)
        return model, LowLevelZeroOptimizer(adamw(model.parameters()), model=model, **STAGES[stage])

    def without() -> tuple[nn.Module, LowLevelZeroOptimizer]:
        model = net(sizes=(4, 50, 50, 3))
        model[1].requires_grad_(False)
        held = [*model[0].parameters(), *model[2].parameters()]
        return model, LowLevelZeroOptimizer(adamw(held), model=model, **STAGES[stage])

    def look(rank: int, world_size: int) -> tuple[int, int, dict[str, int], dict[str, int]]:
        model, optimizer = with_frozen()
        frozen = values(model[1])
        step_sharded(model, optimizer, 0, rank)
        assert all(torch.equal(frozen[name], p) for name, p in model[1].named_parameters())
        slices = optimizer.get_working_to_master_map()
        held = sum(id(p) in slices for p in model[1].parameters())
        return held, len(optimizer.state), traffic_of(with_frozen, rank), traffic_of(without, rank)

    trained = sum(
        p.numel() for at, layer in enumerate(net(sizes=(4, 50, 50, 3))) for p in layer.parameters() if at != 1
    )
    for held, states, traffic, least in run_ranks(look, 2):
        assert (held, states) == (0, 4)
        assert traffic == least
        assert 0 <= traffic["gather"] - 4 * trained // 2 <= 128  # by which a row may be padded


def test_freezing_and_thawing_in_mid_run_is_followed(subtests: pytest.Subtests) -> None:
    def thaw(model: nn.Module, step: int) -> None:
        model[1].requires_grad_(step not in (1, 2))

    def train(rank: int, world_size: int, stage: str, bare: bool) -> Parameters:
        model = net()
        optimizer = LowLevelZeroOptimizer(
            momentum(model.parameters(), weight_decay=0.5), model=model, reduce_bucket_size=20, **STAGES[stage]
        )
        for step in range(5):
            thaw(model, step)
            if bare:
                loss(model, step, rank).backward()
            else:
                optimizer.backward(loss(model, step, rank))
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    alone = net()
    optimizer = momentum(alone.parameters(), weight_decay=0.5)
    for step in range(5):
        thaw(alone, step)
        step_alone(alone, optimizer, step, 3)
    for (stage, bare), ran in run_cases(train, 3, product(STAGES, (True, False)), one_group=True):
        with subtests.test(stage=stage, bare=bare):
            check_close(values(alone), ran.values(), 2e-6)


THAWED_TOO_LATE = {
    "backward": lambda optimizer, model, rank: optimizer.backward(loss(model, 0, rank)),
    "step": lambda optimizer, model, rank: (loss(model, 0, rank).backward(), optimizer.step()),
}


def test_thawing_what_was_frozen_at_construction_is_refused_by_name(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, act: str) -> None:
        model = net()
        model[1].weight.requires_grad_(False)
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model)
        step_sharded(model, optimizer, 0, rank)
        model[1].weight.requires_grad_(True)
        THAWED_TOO_LATE[act](optimizer, model, rank)

    for (act,), ran in run_cases_expecting(train, 2, [(act,) for act in THAWED_TOO_LATE]):
        with subtests.test(act=act):
            for error in ran.raised():
                assert error.type == "RuntimeError"
                assert error.message.startswith("1.weight: ")
                assert "add_param_group" in error.message


@over_stages
def test_what_was_frozen_can_be_thawed_and_added(stage: str) -> None:
    def train(rank: int, world_size: int) -> tuple[Parameters, list[int], int]:
        model = net()
        model[1].requires_grad_(False)
        optimizer = LowLevelZeroOptimizer(momentum(model.parameters()), model=model, **STAGES[stage])
        for step in range(4):
            if step == 2:
                model[1].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.1})
            step_sharded(model, optimizer, step, rank)
        saved = optimizer.state_dict()
        return values(model), [len(group["params"]) for group in saved["param_groups"]], len(saved["state"])

    alone = net()
    alone[1].requires_grad_(False)
    optimizer = momentum([*alone[0].parameters(), *alone[2].parameters()])
    for step in range(4):
        if step == 2:
            alone[1].requires_grad_(True)
            optimizer.add_param_group({"params": list(alone[1].parameters()), "lr": 0.1})
        step_alone(alone, optimizer, step, 3)
    ranks = run_ranks(train, 3)
    check_close(values(alone), [parameters for parameters, _, _ in ranks], 2e-6)
    assert [(sizes, states) for _, sizes, states in ranks] == [([4, 2], 6)] * 3


# Added ones

WAYS_TO_ADD: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda layer: list(layer.parameters()),
    "generator": lambda layer: layer.parameters(),
}


def test_an_added_group_trains(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, stage: str, way: str) -> Parameters:
        model = net(seed=rank)
        optimizer = LowLevelZeroOptimizer(momentum(model[0].parameters()), model=model, **STAGES[stage])
        for step in range(4):
            if step == 2:
                model.zero_grad()
                optimizer.add_param_group({"params": WAYS_TO_ADD[way](model[2]), "weight_decay": 0.3})
            step_sharded(model, optimizer, step, rank)
        return {name: p for name, p in values(model).items() if name[0] in "02"}

    alone = net()
    optimizer = momentum(alone[0].parameters())
    for step in range(4):
        if step == 2:
            alone.zero_grad()
            optimizer.add_param_group({"params": alone[2].parameters(), "weight_decay": 0.3})
        step_alone(alone, optimizer, step, 3)
    expected = {name: p for name, p in values(alone).items() if name[0] in "02"}
    for (stage, way), ran in run_cases(train, 3, product(STAGES, WAYS_TO_ADD), one_group=True):
        with subtests.test(stage=stage, way=way):
            check_close(expected, ran.values(), 2e-6)


def test_one_parameter_alone_can_be_added() -> None:
    def train(rank: int, world_size: int) -> list[int]:
        model = net()
        optimizer = LowLevelZeroOptimizer(adamw(model[0].parameters()), model=model)
        optimizer.add_param_group({"params": model[1].weight})
        step_sharded(model, optimizer, 0, rank)
        return [len(group["params"]) for group in optimizer.param_groups] + [len(optimizer.state)]

    assert run_ranks(train, 2) == [[2, 1, 3]] * 2


def test_what_is_frozen_for_a_while_may_train_again_when_a_group_has_come_meanwhile() -> None:
    def train(rank: int, world_size: int) -> Tensor:
        model, late = nn.Linear(2, 1), nn.Parameter(torch.ones(2))
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        model.weight.requires_grad_(False)
        optimizer.add_param_group({"params": [late]})
        model.weight.requires_grad_(True)
        before = model.weight.detach().clone()
        optimizer.backward(model(late).sum())
        optimizer.step()
        return model.weight - before

    assert all(torch.equal(moved, torch.full((1, 2), -1.0)) for moved in run_ranks(train, 2))


@over_stages
def test_a_group_can_be_added_between_backward_and_step(stage: str) -> None:
    def train(rank: int, world_size: int) -> Parameters:
        model = net()
        optimizer = LowLevelZeroOptimizer(
            momentum(model[0].parameters()), model=model, reduce_bucket_size=1, **STAGES[stage]
        )
        optimizer.backward(loss(model[:1], 0, rank))
        optimizer.add_param_group({"params": list(model[1].parameters())})
        optimizer.backward(loss(model[:2], 1, rank))
        optimizer.step()
        return values(model)

    alone = net()
    optimizer = momentum([{"params": alone[0].parameters()}, {"params": alone[1].parameters()}])
    torch.stack([loss(alone[:1], 0, rank) + loss(alone[:2], 1, rank) for rank in range(3)]).mean().backward()
    optimizer.step()
    check_close(values(alone), run_ranks(train, 3), 2e-6)


def test_adding_what_is_there_already_is_refused_and_changes_nothing() -> None:
    def train(rank: int, world_size: int) -> tuple[str, int]:
        model = net()
        optimizer = LowLevelZeroOptimizer(adamw(model[:2].parameters()), model=model)
        with pytest.raises(ValueError, match=r"1\.weight") as caught:
            optimizer.add_param_group({"params": [model[2].weight, model[1].weight]})
        step_sharded(model, optimizer, 0, rank)
        return str(caught.value), len(optimizer.param_groups)

    for message, count in run_ranks(train, 2):
        assert "one it has" in message
        assert count == 1


# Parts of models


class Adapted(nn.Module):
    """Frozen linears with low-rank adapters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = net(seed=seed, sizes=(4, 6, 3)).requires_grad_(False)
        self.down = nn.ParameterList([nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(2, 6))])
        self.up = nn.ParameterList([nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.zeros(3, 2))])

    def forward(self, x: Tensor) -> Tensor:
        for layer, down, up in zip(self.base, self.down, self.up, strict=True):
            x = layer(x) + x @ down.t() @ up.t()
        return x


def test_adapters_of_a_frozen_model(subtests: pytest.Subtests) -> None:
    def held(model: nn.Module, all_handed_over: bool) -> list[nn.Parameter]:
        return [p for p in model.parameters() if all_handed_over or p.requires_grad]

    def train(rank: int, world_size: int, stage: str, all_handed_over: bool) -> tuple[Parameters, int]:
        model = Adapted(seed=rank)
        optimizer = LowLevelZeroOptimizer(momentum(held(model, all_handed_over)), model=model, **STAGES[stage])
        for step in range(4):
            step_sharded(model, optimizer, step, rank)
        return values(model), optimizer.memory_held()["states"]

    alone = Adapted()
    optimizer = momentum(alone.parameters())
    for step in range(4):
        step_alone(alone, optimizer, step, 2)
    adapters = [p.numel() for p in alone.parameters() if p.requires_grad]
    for (stage, all_handed_over), ran in run_cases(train, 2, product(STAGES, (True, False)), one_group=True):
        with subtests.test(stage=stage, all_handed_over=all_handed_over):
            ranks = ran.values()
            check_close(values(alone), [parameters for parameters, _ in ranks], 2e-6)
            assert [states for _, states in ranks] == [sum(4 * (numel // 2) for numel in adapters)] * 2


def test_trainable_parameters_of_nobody_are_left_alone() -> None:
    """As in plain torch: what the optimizer doesn't hold keeps its own rank's gradients."""

    def train(rank: int, world_size: int) -> tuple[Parameters, Tensor]:
        model = net()
        optimizer = LowLevelZeroOptimizer(momentum(model[:2].parameters()), model=model)
        step_sharded(model, optimizer, 0, rank)
        assert model[2].weight.grad is not None
        return values(model), model[2].weight.grad

    alone = net()
    step_alone(alone, momentum(alone[:2].parameters()), 0, 2)
    ranks = run_ranks(train, 2)
    check_close(values(alone), [parameters for parameters, _ in ranks], 2e-6)
    for rank, (_, gradient) in enumerate(ranks):
        model = net()
        loss(model, 0, rank).backward()
        torch.testing.assert_close(gradient, model[2].weight.grad)


# How ranks start


def test_ranks_start_from_rank_zero_s_parameters_and_buffers() -> None:
    def wrap(rank: int, world_size: int) -> dict[str, Tensor]:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).requires_grad_(False))
        model(torch.randn(8, 3))  # moves the statistics
        for _ in range(rank):
            model(torch.randn(8, 3))
        LowLevelZeroOptimizer(adamw(model.parameters()), model=model)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    ranks = run_ranks(wrap, 3)
    assert ranks[0]["1.num_batches_tracked"] == 1
    torch.manual_seed(0)
    assert torch.equal(ranks[0]["0.weight"], nn.Linear(3, 4).weight)
    check_close(ranks[0], ranks, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masters_start_from_rank_zero_s_parameters(dtype: torch.dtype) -> None:
    def wrap(rank: int, world_size: int) -> list[Tensor]:
        model = net(seed=rank).to(dtype)
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()))  # without a model
        return [p32.clone() for p32 in optimizer.get_working_to_master_map().values()]

    slices = run_ranks(wrap, 2)
    for p, *own in zip(net().to(dtype).parameters(), *slices, strict=True):
        flat = torch.cat(own)[: p.numel()]
        assert flat.dtype == torch.float32
        assert torch.equal(flat, p.detach().flatten().float())


# State from before

Make = Callable[[Any], torch.optim.Optimizer]
BEFORE: dict[str, Make] = {
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, initial_accumulator_value=0.3),
    "adamw": adamw,
    "momentum": momentum,
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.05, t0=0.0),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-2),
}


@pytest.mark.parametrize(("world_size", "stage"), [(1, "stage2"), (3, "stage1"), (4, "stage2")])
def test_an_optimizer_that_has_trained_goes_on(world_size: int, stage: str, subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, make: str) -> Parameters:
        model = net()
        inner = BEFORE[make](model.parameters())
        for step in range(2):
            step_alone(model, inner, step, world_size)
        optimizer = LowLevelZeroOptimizer(inner, model=model, **STAGES[stage])
        for step in range(2, 5):
            step_sharded(model, optimizer, step, rank)
        return values(model)

    for (make,), ran in run_cases(train, world_size, [(make,) for make in BEFORE], one_group=True):
        with subtests.test(make):
            alone = net()
            optimizer = BEFORE[make](alone.parameters())
            for step in range(5):
                step_alone(alone, optimizer, step, world_size)
            check_close(values(alone), ran.values(), 2e-6)


def test_ranks_go_on_from_rank_zero_s_state() -> None:
    def train(rank: int, world_size: int) -> Parameters:
        model = net(seed=rank)
        inner = adamw(model.parameters())
        for step in range(2):
            step_alone(model, inner, step + 10 * rank, world_size)
        optimizer = LowLevelZeroOptimizer(inner, model=model)
        step_sharded(model, optimizer, 2, rank)
        return values(model)

    alone = net()
    optimizer = adamw(alone.parameters())
    for step in range(3):
        step_alone(alone, optimizer, step, 2)
    check_close(values(alone), run_ranks(train, 2), 2e-6)


def test_state_of_a_sixteen_bit_model_becomes_fp32() -> None:
    def wrap(rank: int, world_size: int) -> set[torch.dtype]:
        model = net().bfloat16()
        inner = adamw(model.parameters())
        step_alone(model, inner, 0, world_size)
        optimizer = LowLevelZeroOptimizer(inner, model=model)
        step_sharded(model, optimizer, 1, rank)
        return {state[key].dtype for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")}

    assert run_ranks(wrap, 2) == [{torch.float32}] * 2


# Forced dtypes


def test_a_forced_dtype_is_as_if_the_model_had_it(subtests: pytest.Subtests) -> None:
    def run_of(stage: str, dtype: torch.dtype) -> Run:
        run = Run(steps=3, dtype=dtype, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05))
        return run.with_options(initial_scale=256.0, **STAGES[stage])

    def train(rank: int, world_size: int, stage: str, dtype: torch.dtype) -> Any:
        """The dtypes and values of a model that is forced, and the values of one that has the dtype from the start."""
        run, model = run_of(stage, dtype), build(Run())
        optimizer = LowLevelZeroOptimizer(run.optimizer(groups(model)), model=model, forced_dtype=dtype, **run.options)
        for step in range(3):
            optimizer.backward(loss_of(model, run, step, 0, rank))
            optimizer.step()
            optimizer.zero_grad()
        return {p.dtype for p in model.parameters()}, values(model), values(train_rank(rank, world_size, run).model)

    for (stage, dtype), ran in run_cases(train, 2, product(STAGES, (torch.bfloat16, torch.float16)), one_group=True):
        with subtests.test(stage=stage, dtype=dtype):
            ranks = ran.values()
            assert [dtypes for dtypes, _, _ in ranks] == [{dtype}] * 2
            check_close(ranks[0][2], [parameters for _, parameters, _ in ranks], 0.0)


# Edits in mid-run


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
    def train(rank: int, world_size: int, stage: str, edit: str) -> Parameters:
        model = net()
        optimizer = LowLevelZeroOptimizer(momentum(model.parameters()), model=model, **STAGES[stage])
        for step in range(4):
            if step == 2:
                EDITS[edit](model)
            step_sharded(model, optimizer, step, rank)
        return values(model)

    for (stage, edit), ran in run_cases(train, 3, zip(cycle(STAGES), EDITS, strict=False), one_group=True):
        with subtests.test(stage=stage, edit=edit):
            alone = net()
            optimizer = momentum(alone.parameters())
            for step in range(4):
                if step == 2:
                    EDITS[edit](alone)
                step_alone(alone, optimizer, step, 3)
            check_close(values(alone), ran.values(), 2e-6)


SEEN_BY_AUTOGRAD = [name for name in EDITS if name != "data_clamp"]


def test_an_edit_behind_autograd_s_back_of_a_sixteen_bit_model_needs_update_master_params() -> None:
    def train(rank: int, world_size: int) -> None:
        model = net().bfloat16()
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
        clamp_data(model)
        edited = [p.detach().clone() for p in model.parameters()]
        optimizer.update_master_params(model)
        step_sharded(model, optimizer, 0, rank)
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
        step_sharded(model, optimizer, 0, rank)
        slices = [optimizer.get_working_to_master_map()[id(p)] for p in model.parameters()]
        before = [own.clone() for own in slices]
        EDITS[edit](model)
        edited = [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups[0]["lr"] = 0.0
        step_sharded(model, optimizer, 1, rank)
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
        optimizer = LowLevelZeroOptimizer(
            adamw(model.parameters()), model=model, reduce_bucket_size=bucket, **STAGES[stage]
        )
        step_sharded(model, optimizer, 0, rank)
        take_away(model)
        step_sharded(model, optimizer, 1, rank)

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
        step_sharded(model, optimizer, 0, rank)
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


def test_the_emulation_is_plain_torch_for_fp32() -> None:
    """What judges 16-bit runs gives, in fp32, what judges fp32 runs."""
    run = Run(3, micro_batches=2, clip=0.3)
    expected, norms = train_alone(run)
    got, own = emulate(run)
    check_close({name: expected[name] for name in got}, [got], 1e-6)
    assert own == pytest.approx(norms, rel=1e-5)
