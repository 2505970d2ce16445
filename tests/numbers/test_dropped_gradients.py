"""Gradients that a loop drops by ``p.grad = None``, while ranks differ in what they use and in how fast they are.

A rank must not decide by what it alone knows (what it used, what has come so far) what becomes of a sum of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.support.covering import covering
from tests.support.internals import finish_late
from tests.support.numbers import trained
from tests.support.ranks import run_ranks
from tests.support.scripts import STAGES, TIMEOUT, WAYS, Alone, Together, data, judge, momentum, net, parameters_of

Moves = Callable[[Alone, nn.Sequential, Any], None]


def loss(model: nn.Sequential, step: int, unused: Sequence[int] = ()) -> Callable[[int], Tensor]:
    """A loss whose ranks but the first leave some layers out."""

    def of(rank: int) -> Tensor:
        hidden = data(step, rank)
        for at, layer in enumerate(model):
            hidden = hidden if rank > 0 and at in unused else torch.tanh(layer(hidden))
        return hidden.square().mean()

    return of


def clear(model: nn.Sequential, *layers: int) -> None:
    for at in layers:
        model[at].zero_grad()


def another_than_one_rank_left_out(side: Alone, model: nn.Sequential, optimizer: Any) -> None:
    side.backward(optimizer, side.mean(loss(model, 0, [1])))
    clear(model, 2)


def all_but_what_one_rank_left_out(side: Alone, model: nn.Sequential, optimizer: Any) -> None:
    side.backward(optimizer, side.mean(loss(model, 0, [1])))
    clear(model, 0, 2, 3)
    side.backward(optimizer, side.mean(loss(model, 1, [0, 3])))
    clear(model, 1)


def one_of_several_micro_batches(side: Alone, model: nn.Sequential, optimizer: Any) -> None:
    side.backward(optimizer, side.mean(loss(model, 0, [1, 2])))
    side.backward(optimizer, side.mean(loss(model, 1, [1])))
    clear(model, 3)
    side.backward(optimizer, side.mean(loss(model, 2, [3])))
    clear(model, 0)


def what_one_rank_left_out(side: Alone, model: nn.Sequential, optimizer: Any) -> None:
    side.backward(optimizer, side.mean(loss(model, 0, [1])))
    clear(model, 1)
    side.backward(optimizer, side.mean(loss(model, 1, [1, 3])))


def one_after_the_other(side: Alone, model: nn.Sequential, optimizer: Any) -> None:
    for step in range(4):
        side.backward(optimizer, side.mean(loss(model, step, [step])))
        clear(model, (step + 1) % 4)


def half_of_the_parameters(side: Alone, model: nn.Sequential, optimizer: Any) -> None:
    """As many are dropped as may have been summed by then."""
    side.backward(optimizer, side.mean(loss(model, 0)))
    clear(model, 0, 1)


ALL: list[Moves] = [
    another_than_one_rank_left_out,
    all_but_what_one_rank_left_out,
    one_of_several_micro_batches,
    what_one_rank_left_out,
    one_after_the_other,
    half_of_the_parameters,
]


class Training(NamedTuple):
    """Moves with options of ``Together``, on ranks of which some finish reductions late."""

    moves: Moves
    options: dict[str, Any]
    late: tuple[int, ...] = ()
    world_size: int = 2

    def script(self, side: Alone) -> nn.Module:
        model = net()
        optimizer = side.wrap(momentum(model), model)
        for _ in range(2):
            self.moves(side, model, optimizer)
            side.step(optimizer)
            optimizer.zero_grad()
        return model


def train(rank: int, world_size: int, training: Training) -> tuple[dict[str, Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        if rank in training.late:
            finish_late(patch)
        return (parameters_of(training.script(Together(rank, **training.options))),)


def test_dropped_gradients_are_those_of_one_process(subtests: pytest.Subtests) -> None:
    runs = {
        f"{moves.__name__}, {stage}, {way}, late ranks {late}": Training(
            moves, {**STAGES[stage], **WAYS[way], "clip": 0.05 if late else 0.0}, late
        )
        for moves, stage, way, late in covering(ALL, STAGES, WAYS, ((), (0,), (1,)))
    }
    for name, training, ran in trained(runs, train, timeout=TIMEOUT):
        with subtests.test(name):
            judge(training, ran.values())


def drop_after_different_backwards(rank: int, world_size: int) -> None:
    """Whether the second backward's gradient is dropped with the first one's isn't to be seen from the other rank."""
    model = net()
    optimizer = Together(rank).wrap(momentum(model), model)
    loss(model, 0)(rank).backward()
    if rank == 0:
        loss(model, 1)(rank).backward()
    clear(model, 2)
    with pytest.raises(RuntimeError, match="2.weight after backward 2 on rank 0 and not on rank 1"):
        optimizer.step()
    optimizer.zero_grad()
    loss(model, 2)(rank).backward()
    optimizer.step()
    optimizer.verify()


def test_gradients_dropped_after_different_numbers_of_backwards_are_refused() -> None:
    run_ranks(drop_after_different_backwards, 2)


def multiply_twice(rank: int, world_size: int) -> list[Tensor]:
    model = net(layers=1)
    optimizer = Together(rank, partition_grad=True, reduce_bucket_size=100).wrap(momentum(model), model)
    loss(model, 0)(rank).backward()
    before = [p.grad.full_tensor() for p in model.parameters()]
    torch._foreach_mul_([model[0].weight.grad, model[0].weight.grad], 2)
    after = [p.grad.full_tensor() for p in model.parameters()]
    optimizer.zero_grad()
    return [new / old for new, old in zip(after, before, strict=True)]


def test_a_gradient_that_a_list_names_twice_is_multiplied_twice_and_no_other_is() -> None:
    for weight, bias in run_ranks(multiply_twice, 2):
        torch.testing.assert_close(weight, torch.full_like(weight, 4.0))
        torch.testing.assert_close(bias, torch.full_like(bias, 1.0))
