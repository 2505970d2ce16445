"""``requires_grad`` set through ``param_groups``, as trainers that train several optimizers in turn set it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.covering import covering
from tests.support.ranks import run_cases, run_cases_expecting, run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 2": {"partition_grad": True},
    "small buckets": {"partition_grad": True, "reduce_bucket_size": 4},
    "offloaded": {"cpu_offload": True},
    "overlapped": {"overlap_allgather": True},
}


@contextmanager
def toggled(chosen: Optimizer, everybody: Sequence[Optimizer]) -> Iterator[None]:
    """All parameters but those of ``chosen`` are frozen, as far as param groups tell."""
    before = {p: p.requires_grad for each in everybody for group in each.param_groups for p in group["params"]}
    own = {p for group in chosen.param_groups for p in group["params"]}
    for p in before:
        p.requires_grad = before[p] and p in own
    yield
    for p in before.keys() - own:
        p.requires_grad = before[p]


class Gan(nn.Module):
    """Parameters of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
        self.critic = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))

    def losses(self, step: int, ranks: Sequence[int]) -> dict[str, Tensor]:
        """The mean over these ranks' data, of what each of the two optimizers makes small."""
        noise, real = (torch.cat([_data(at, step, rank) for rank in ranks]) for at in (0, 1))
        made = self.generator(noise)
        return {
            "generator": -self.critic(made).mean(),
            "critic": self.critic(made.detach()).mean() - self.critic(real).square().mean(),
        }


def _data(at: int, step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * at + 10 * step + rank))


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def train_gan(
    model: Gan, own: dict[str, Any], run_back: Callable[[Any, Tensor], None], ranks: Sequence[int], micro: int = 1
) -> dict[str, Tensor]:
    """As a trainer's users write it: gradients are cleared after their step alone, so what else came would pile up."""
    for step in range(4):
        for name, optimizer in own.items():
            with toggled(optimizer, list(own.values())):
                for at in range(micro):
                    run_back(optimizer, model.losses(micro * step + at, ranks)[name])
                optimizer.step()
                optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def by_itself(optimizer: Any, loss: Tensor) -> None:
    loss.backward()


def through_it(optimizer: Any, loss: Tensor) -> None:
    optimizer.backward(loss)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gan_whose_optimizers_take_turns(world_size: int, subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, options: str, run_back: Any, micro: int) -> dict[str, Tensor]:
        model = Gan()
        wrap = partial(LowLevelZeroOptimizer, **OPTIONS[options])
        own = {"generator": wrap(sgd(model.generator)), "critic": wrap(sgd(model.critic))}
        return train_gan(model, own, run_back, [rank], micro)

    expected = {}
    for micro in (1, 2):
        plain = Gan()
        own = {"generator": sgd(plain.generator), "critic": sgd(plain.critic)}
        expected[micro] = train_gan(plain, own, by_itself, range(world_size), micro)
    cases = covering(OPTIONS, (by_itself, through_it), (1, 2))
    for (options, way, micro), ran in run_cases(train, world_size, cases, one_group=True):
        with subtests.test(options=options, way=way.__name__, micro=micro):
            for got in ran.values():
                for name, value in expected[micro].items():
                    assert (got[name] - value).abs().max() <= 2e-6, name


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(3, 5)

    def loss(self, at: int, second: bool = True) -> Tensor:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(at))
        used = self.second(x) if second else self.second(x).detach()
        return (self.first(x).sin() + used.cos()).square().mean()


def two(model: Two) -> LowLevelZeroOptimizer:
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.second.parameters())}]
    adam = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    return LowLevelZeroOptimizer(adam, model=model, partition_grad=True, reduce_bucket_size=4)


def test_a_frozen_group_is_a_dropped_layer() -> None:
    """On all ranks, or on some: as if the loss hadn't touched it there. Also once unused parameters are detected."""

    def work(rank: int, world_size: int) -> None:
        frozen, dropped = Two(), Two()
        optimizers = two(frozen), two(dropped)
        everywhere, somewhere, none = {0, 1}, {1}, set[int]()
        for step, where in enumerate((none, everywhere, everywhere, somewhere, none, somewhere, everywhere)):
            before = [p.detach().clone() for p in frozen.second.parameters()]
            for p in optimizers[0].param_groups[1]["params"]:
                p.requires_grad_(rank not in where)
            for at in range(2):
                optimizers[0].backward(frozen.loss(4 * step + 2 * at + rank))
                optimizers[1].backward(dropped.loss(4 * step + 2 * at + rank, second=rank not in where))
            for each in optimizers:
                each.step()
                each.zero_grad()
            still = all(map(torch.equal, before, frozen.second.parameters()))
            assert still is (where == everywhere), step
            for p, q in zip(frozen.parameters(), dropped.parameters(), strict=True):
                assert torch.equal(p, q), step
        assert all(p.requires_grad for p in frozen.parameters())

    run_ranks(work, 2)


def test_what_came_before_freezing_is_stepped() -> None:
    def work(rank: int, world_size: int) -> None:
        frozen, trained = Two(), Two()
        for model in (frozen, trained):
            optimizer = two(model)
            with optimizer.no_sync():
                optimizer.backward(model.loss(rank))
            for p in optimizer.param_groups[1]["params"]:
                p.requires_grad_(model is trained)
            optimizer.backward(model.loss(2 + rank, second=False))
            optimizer.step()
        for p, q in zip(frozen.parameters(), trained.parameters(), strict=True):
            assert torch.equal(p, q)

    run_ranks(work, 2)


def test_a_gradient_that_cannot_be_told_from_an_earlier_one_is_refused() -> None:
    def work(rank: int, world_size: int, clear: bool) -> None:
        model = Two()
        optimizer = two(model)
        with optimizer.no_sync():
            optimizer.backward(model.loss(0))
        if clear:
            optimizer.zero_grad()
        for p in optimizer.param_groups[0]["params"]:
            p.requires_grad = False
        optimizer.backward(model.loss(1))
        assert clear
        raise ValueError("went on")

    for (clear,), ran in run_cases_expecting(work, 2, [(False,), (True,)]):
        for error in ran.raised():
            if clear:
                assert error.message == "went on"
            else:
                assert error.message.startswith(
                    ("first.weight: expected no earlier", "first.bias: expected no earlier")
                )
                assert "zero_grad" in error.message


def test_a_gradient_that_was_cleared_is_no_earlier_one() -> None:
    """``model.zero_grad()`` took the gradient of the backward before: what comes next can be told from it."""

    def work(rank: int, world_size: int, plain: bool, other: bool, clears: bool) -> None:
        model, beside = Two(), Two()
        optimizer, _ = two(model), two(beside) if other else None
        with optimizer.no_sync():
            optimizer.backward(model.loss(0))
        if other:
            model.loss(5).backward()
        if clears:
            model.zero_grad()
        before = [p.detach().clone() for p in model.first.parameters()]
        for p in optimizer.param_groups[0]["params"]:
            p.requires_grad = False
        run_back = by_itself if plain else through_it
        if clears:
            run_back(optimizer, model.loss(1))
        else:
            with pytest.raises(RuntimeError, match="expected no earlier"):
                run_back(optimizer, model.loss(1))
            optimizer.zero_grad()
        optimizer.step()
        assert all(map(torch.equal, before, model.first.parameters()))

    for _, ran in run_cases(work, 2, covering(*[(False, True)] * 3)):
        ran.values()
