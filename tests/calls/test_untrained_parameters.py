"""Warnings of gradients that nobody uses, by name: no optimizer trains them, or a step has used them already."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.diagnostics.untrained import Untrained
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_cases, run_ranks
from tests.support.scripts import loss_at, net
from tests.support.several import told

ODD = 1
ADDS = "took gradients that an earlier step had used, as that of "


def wrap(params: Any, model: nn.Module) -> LowLevelZeroOptimizer:
    return LowLevelZeroOptimizer(torch.optim.SGD(params, lr=0.1), model=model)


def replace(model: nn.Sequential) -> None:
    model[2] = nn.Linear(5, 5)


def add(model: nn.Sequential) -> None:
    model.append(nn.Linear(5, 5))


def replace_frozen(model: nn.Sequential) -> None:
    model[2] = nn.Linear(5, 5).requires_grad_(False)


def leave(model: nn.Sequential) -> None:
    pass


class Case(NamedTuple):
    """A change to the model before step 2, and the names that a warning tells; none: there is no warning."""

    change: Callable[[nn.Sequential], None]
    names: str = ""
    plain: bool = False  # backwards are plain ones, and one rank alone changes it
    trained: slice = slice(None)  # layers that the optimizer gets at construction


CASES = {
    "nothing": Case(leave),
    "a layer that is replaced": Case(replace, "2.weight, 2.bias"),
    "a layer that one rank alone replaces, and a plain backward": Case(replace, "2.weight, 2.bias", plain=True),
    "a layer that is added": Case(add, "4.weight, 4.bias"),
    "a layer that is frozen": Case(replace_frozen),
    "one that was never handed over": Case(leave, "0.weight, 0.bias", trained=slice(1, None)),
}


def live(rank: int, world_size: int, name: str) -> tuple[list[str], list[str]]:
    """What is warned of within the steps around the change, and in the steps after that."""
    case = CASES[name]
    model = net()
    optimizer = wrap(model[case.trained].parameters(), model)

    def train(steps: range) -> list[str]:
        with told() as lines:
            for step in steps:
                if step == 2 and (not case.plain or rank == ODD):
                    case.change(model)
                loss = loss_at(model, step)(rank)
                loss.backward() if case.plain else optimizer.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return lines

    return train(range(4)), train(range(4, 9))


def test_one_warning_names_them(subtests: pytest.Subtests) -> None:
    for (name,), ran in run_cases(live, 2, [(name,) for name in CASES], one_group=True):
        with subtests.test(name):
            case = CASES[name]
            for rank, (soon, later) in enumerate(ran.values()):
                assert later == []
                warned = case.names and (not case.plain or rank == ODD)
                start = f"{case.names}: got gradients on rank {rank}, but no LowLevelZeroOpt"
                assert [line[: len(start)] for line in soon] == ([start] if warned else [])


def test_several_optimizers_of_a_model_warn_together() -> None:
    def train(rank: int, world_size: int) -> list[str]:
        model = net()
        optimizers = [wrap(model[0].parameters(), model), wrap(model[1:3].parameters(), model)]
        model[3].requires_grad_(False)
        with told() as lines:
            for step in range(2):
                optimizers[0].zero_grad()
                optimizers[1].zero_grad()
                with optimizers[0].backward_pass(loss_at(model, step)(rank)) as loss, optimizers[1].backward_pass(loss):
                    loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                assert len(lines) == step
                model[3].requires_grad_(True)
        return lines

    for rank, (line,) in enumerate(run_ranks(train, 2)):
        assert line.startswith(f"3.weight, 3.bias: got gradients on rank {rank}, but no LowLevelZeroOptimizer")


def test_it_is_looked_for_after_few_steps_at_first_later_seldom_and_when_a_gradient_first_lacks() -> None:
    """A look takes a microsecond for each parameter."""
    model, looks = nn.Linear(2, 2), list[int]()
    model(torch.ones(2)).sum().backward()

    def alive() -> list[Any]:
        looks.append(step)
        return []

    untrained: Any = Untrained(model, None, alive)  # type: ignore[arg-type]
    for step in range(1, 200):
        untrained.look(step, lacked=step >= 100)
    assert looks == [1, 2, 4, 8, 16, 32, 64, 100, 128, 192]


@on_ranks(2, product((0, 1, None), (0, 1)))
def test_one_warning_names_the_optimizer_whose_gradients_are_not_cleared(
    rank: int, runs: int | None, left: int
) -> None:
    """Whichever of two optimizers runs the backward, or neither, and whichever isn't cleared."""
    model = net()
    optimizers = [wrap(model[:2].parameters(), model), wrap(model[2:].parameters(), model)]
    with told() as lines:
        for step in range(3):
            loss = loss_at(model, step)(rank)
            loss.backward() if runs is None else optimizers[runs].backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            optimizers[1 - left].zero_grad()
    names = ("0.", "1.") if left == 0 else ("2.", "3.")
    assert len(lines) == (rank == 0), lines
    for line in lines:
        _, _, rest = line.partition(ADDS)
        assert rest.startswith(names), line


def clear_each(model: nn.Module, _: Any) -> None:
    for p in model.parameters():
        p.grad = None


def fill_each(model: nn.Module, _: Any) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.fill_(0.0)


WAYS_TO_CLEAR: dict[str, Callable[[nn.Module, LowLevelZeroOptimizer], object]] = {
    "optimizer.zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad to zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda model, _: model.zero_grad(),
    "model.zero_grad to zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "p.grad = None": clear_each,
    "p.grad.fill_": fill_each,
}


@on_ranks(2, product(WAYS_TO_CLEAR, (1, 2)))
def test_gradients_that_were_cleared_are_not_warned_of(rank: int, way: str, stage: int) -> None:
    model = net()
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, stage=stage)
    with told() as lines:
        for step in range(3):
            optimizer.backward(loss_at(model, step)(rank))
            optimizer.step()
            WAYS_TO_CLEAR[way](model, optimizer)
    assert lines == []


@on_ranks(2, product((1, 2), ("backward", "plain"), ("optimizer", "module", "each")))
def test_gradients_that_another_loss_has_added_are_not_warned_of_if_no_step_takes_them(
    rank: int, stage: int, way: str, clears: str
) -> None:
    """As in a usual GAN: the generator's loss reaches the discriminator, which is cleared before its own loss."""
    generator, discriminator = net(), net()
    models = (generator, discriminator)
    first, second = (
        LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, stage=stage) for model in models
    )

    def run(optimizer: LowLevelZeroOptimizer, loss: torch.Tensor) -> None:
        loss.backward() if way == "plain" else optimizer.backward(loss)

    with told() as lines:
        for step in range(3):
            for optimizer, model in ((second, discriminator), (first, nn.Sequential(generator, discriminator))):
                trained = discriminator if optimizer is second else generator
                if clears == "each":
                    clear_each(trained, None)
                else:
                    trained.zero_grad() if clears == "module" else optimizer.zero_grad()
                run(optimizer, loss_at(model, step)(rank))
                optimizer.step()
    assert lines == []


@on_ranks(2, [("dense and experts", "01"), ("experts", "23"), ("an expert's alone", "23")])
def test_one_warning_tells_of_gradients_of_experts(rank: int, uncleared: str, layers: str) -> None:
    """Whether an optimizer has experts besides, nothing else, or keeps their gradients alone."""
    model = net()
    alone = [dist.new_group([each]) for each in range(2)][rank]
    model[:2].requires_grad_(uncleared != "experts")
    experts = {alone: list(model[2:].parameters())}
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer = LowLevelZeroOptimizer(sgd, experts, model=model, dp_process_group=dist.group.WORLD)
    with told() as lines:
        for step in range(3):
            optimizer.backward(loss_at(model, step)(rank))
            optimizer.step()
            if uncleared == "an expert's alone":
                model[:2].zero_grad()
    assert [line.partition(ADDS)[2][0] in layers for line in lines] == [True] * (rank == 0), lines
