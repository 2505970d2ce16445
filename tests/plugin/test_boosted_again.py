"""Boosted again: what is boosted passes through, as in ColossalAI, and a new optimizer takes its parameters over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from torch import Tensor, nn

from tests.support.boosting import adamw, batch, check_close, model_of, momentum, ours
from tests.support.judging import off_the_way
from tests.support.ranks import run_cases, run_ranks


class Side:
    """One rank with the plugin, or plain torch on the shares of two."""

    def __init__(self, rank: int | None, **options: Any) -> None:
        self.ranks = range(2) if rank is None else [rank]
        self.booster = None if rank is None else Booster(plugin=ours(precision="fp32", **options))

    def boost(self, model: Any, optimizer: Any = None) -> tuple[Any, Any]:
        return (model, optimizer) if self.booster is None else self.booster.boost(model, optimizer)[:2]

    def train(self, model: Any, optimizer: Any, steps: Iterable[int]) -> None:
        for step in steps:
            shares = [(model(x) - y).square().mean() for x, y in (batch(rank, step) for rank in self.ranks)]
            loss = torch.stack(shares).mean()
            loss.backward() if self.booster is None else self.booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()


def model_first_and_the_pair_once_more(side: Side, model: Any) -> None:
    boosted, none = side.boost(model)
    assert none is None
    again, optimizer = side.boost(boosted, momentum(boosted.parameters()))
    assert again is boosted
    side.train(boosted, optimizer, range(2))
    assert side.boost(boosted, optimizer) == (boosted, optimizer)
    side.train(boosted, optimizer, range(2, 4))


def another_optimizer(side: Side, model: Any) -> None:
    """Of the boosted model, and of its module; the former optimizers are kept."""
    boosted, kept = model, []
    for turn in range(3):
        boosted, optimizer = side.boost(model if turn == 1 else boosted, momentum(boosted.parameters()))
        side.train(boosted, optimizer, range(2 * turn, 2 * turn + 2))
        kept.append(optimizer)


WAYS = (model_first_and_the_pair_once_more, another_optimizer)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_it_trains_on_as_plain_torch(subtests: pytest.Subtests) -> None:
    def rank(rank: int, world_size: int, way: Callable[[Side, Any], None], stage: int) -> dict[str, Tensor]:
        model = model_of()
        way(Side(rank, stage=stage), model)
        return values(model)

    for (way, stage), ran in run_cases(rank, 2, [(way, 1 + at % 2) for at, way in enumerate(WAYS)]):
        with subtests.test(way.__name__, stage=stage):
            model = model_of()
            way(Side(None), model)
            for got in ran.values():
                check_close(values(model), got, 2e-6)
            assert off_the_way(values(model_of()), values(model), got) < 1e-5


def test_what_is_loaded_into_a_model_reaches_the_masters_of_all_its_optimizers() -> None:
    """And of none that is retired."""

    def rank(rank: int, world_size: int) -> None:
        booster = Booster(plugin=ours(precision="bf16", overlap_allgather=True))
        model = model_of()
        boosted, former, *_ = booster.boost(model, adamw(model.parameters()))
        boosted, one, *_ = booster.boost(boosted, adamw(model.inward.parameters()))
        boosted, other, *_ = booster.boost(boosted, adamw(model.outward.parameters()))
        assert former.is_retired
        for p in model.parameters():
            p.data.fill_(0.5)
        boosted.update_master_params()
        boosted._force_wait_all_gather()
        for optimizer in (one, other):
            for record in optimizer.sharded_parameters:
                start, stop = record.split.span(record.rank)
                assert record.p32[: stop - start].eq(0.5).all()

    run_ranks(rank, 2)
