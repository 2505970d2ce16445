"""Two optimizers of one model: the players of a GAN, and halves that one loss trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from tests.support.scripts import (
    BOTH,
    Alone,
    Case,
    Script,
    adamw,
    check_each,
    data,
    in_both,
    momentum,
    net,
)


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = net(1, layers=2), net(2, layers=2)

    def critic_loss(self, step: int) -> Callable[[int], Tensor]:
        def loss(rank: int) -> Tensor:
            fake = self.generator(data(step, rank)).detach()
            return (self.critic(fake).square() - self.critic(data(step + 5, rank)).tanh()).mean()

        return loss

    def generator_loss(self, step: int) -> Callable[[int], Tensor]:
        def loss(rank: int) -> Tensor:
            return -self.critic(self.generator(data(step, rank))).square().mean()

        return loss


class Gan:
    """The moves of both players, on either side."""

    def __init__(self, side: Alone) -> None:
        self.side = side
        self.model = Adversaries()
        self.g = side.wrap(adamw(self.model.generator), self.model)
        self.d = side.wrap(momentum(self.model.critic), self.model)

    def d_backward(self, step: int) -> None:
        self.side.backward(self.d, self.side.mean(self.model.critic_loss(step)))

    def g_backward(self, step: int) -> None:
        self.side.backward(self.g, self.side.mean(self.model.generator_loss(step)))


def gan_classic(gan: Gan, step: int) -> None:
    gan.d.zero_grad()
    gan.d_backward(step)
    gan.d.step()
    gan.g.zero_grad()
    gan.g_backward(step)
    gan.g.step()


def gan_zero_after_steps(gan: Gan, step: int) -> None:
    gan.d_backward(step)
    gan.d.step()
    gan.d.zero_grad()
    gan.g_backward(step)
    gan.g.step()
    gan.g.zero_grad()
    gan.d.zero_grad()


def gan_generator_between(gan: Gan, step: int) -> None:
    """The critic steps with what the generator's loss has left in it, too."""
    gan.d.zero_grad()
    gan.g.zero_grad()
    gan.d_backward(step)
    gan.g_backward(step)
    gan.d.step()
    gan.g.step()


def gan_generator_first(gan: Gan, step: int) -> None:
    gan.g.zero_grad()
    gan.g_backward(step)
    gan.g.step()
    gan.d.zero_grad()
    gan.d_backward(step)
    gan.d.step()


def gan_zero_late(gan: Gan, step: int) -> None:
    """What the generator's loss left in the critic meets the critic's own, after the generator's zero_grad."""
    gan.g_backward(step)
    gan.g.step()
    gan.g.zero_grad()
    gan.d_backward(step)
    gan.d.step()
    gan.d.zero_grad()


def gan_zero_between_backward_and_step(gan: Gan, step: int) -> None:
    gan.d_backward(step)
    gan.g.zero_grad()
    gan.g_backward(step)
    gan.d.zero_grad()
    gan.d_backward(step + 1)
    gan.d.step()
    gan.g.step()
    gan.d.zero_grad()
    gan.g.zero_grad()


def gan_never_zero(gan: Gan, step: int) -> None:
    gan.d_backward(step)
    gan.d.step()
    gan.g_backward(step)
    gan.g.step()


GANS = [
    gan_classic,
    gan_zero_after_steps,
    gan_generator_between,
    gan_generator_first,
    gan_zero_late,
    gan_zero_between_backward_and_step,
    gan_never_zero,
]


def test_gan(subtests: pytest.Subtests) -> None:
    def script_of(moves: Callable[[Gan, int], None]) -> Script:
        def script(side: Alone) -> nn.Module:
            gan = Gan(side)
            for step in range(3):
                moves(gan, step)
            gan.g.zero_grad()
            gan.d.zero_grad()
            return gan.model

        return script

    check_each(
        {f"{moves.__name__}, {way}": Case(script_of(moves), BOTH[way]) for moves, way in in_both(GANS)}, subtests
    )


# Two optimizers over halves of one model


def halves(drop: Callable[[int], Sequence[int]], drive: str = "first") -> Script:
    """One loss for both; each rank may leave layers out."""

    def script(side: Alone) -> nn.Module:
        model = net(layers=6)
        low, high = side.wrap(momentum(model[:3]), model), side.wrap(adamw(model[3:]), model)

        def loss(step: int) -> Callable[[int], Tensor]:
            def of(rank: int) -> Tensor:
                hidden = data(step, rank).requires_grad_()
                for place, layer in enumerate(model):
                    hidden = hidden if place in drop(rank) else torch.tanh(layer(hidden))
                return hidden.square().mean()

            return of

        for step in range(3):
            side.backward(low if drive == "first" else high, side.mean(loss(step)))
            for optimizer in (low, high):
                side.step(optimizer)
                optimizer.zero_grad()
        return model

    return script


HALVES: dict[str, Callable[[int], Sequence[int]]] = {
    "nothing": lambda rank: (),
    "same": lambda rank: (1, 4),
    "different": lambda rank: (rank, 5 - rank),
    "upper-half-on-one": lambda rank: (3, 4, 5) if rank == 1 else (),
    "lower-half-on-one": lambda rank: (0, 1, 2) if rank == 0 else (),
    "either-half": lambda rank: (0, 1, 2) if rank == 0 else (3, 4, 5),
}


def test_two_optimizers_over_halves_of_a_model(subtests: pytest.Subtests) -> None:
    def of(drop: str, drive: str) -> Case:
        return Case(halves(HALVES[drop], drive), {"bare": drive == "bare", "partition_grad": True})

    cases = {f"{drop}, {drive}": of(drop, drive) for drop, drive in product(HALVES, ("first", "second", "bare"))}
    in_stage_1 = {
        f"{drop}, stage 1": Case(halves(HALVES[drop]), {"bare": True}, 3) for drop in ("nothing", "upper-half-on-one")
    }
    check_each({**cases, **in_stage_1}, subtests)
