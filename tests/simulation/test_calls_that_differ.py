"""Ranks that are at different calls: all are told, or all go on; none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import Diagnostics, LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.simulation.world import CARRIERS, Carrier, simulate

RANKS = 2
X = torch.randn(2, RANKS, 4, 6, generator=torch.Generator().manual_seed(1))


class Rank:
    """Two models, whose layers are buckets each, and an optimizer for each model."""

    def __init__(self, rank: int, stage: int, models: int, layers: int = 12) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.models = [nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(layers)) for _ in range(models)]
        self.optimizers = [
            LowLevelZeroOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                partition_grad=stage == 2,
                reduce_bucket_size=1,
                diagnostics=Diagnostics(stall_timeout=0.0),
            )
            for model in self.models
        ]

    def backward(self, which: int = 0, at: int = 0, dropped: int = -1) -> None:
        h = X[at][self.rank]
        for number, layer in enumerate(self.models[which]):
            h = h if number == dropped else layer(h)
        self.optimizers[which].backward(h.square().mean())

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def told(self, *calls: Callable[[], Any]) -> list[str]:
        texts = []
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                texts.append(str(error))
        return texts

    def begin_anew(self) -> None:
        for optimizer in self.optimizers:
            for _ in range(6):
                try:
                    optimizer.zero_grad()
                    break
                except RuntimeError:
                    pass

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for model in self.models for p in model.parameters()])


def compare(carrier: Carrier, job: Callable[[int], tuple[list[str], Tensor]], clean: Callable[[int], Tensor]) -> None:
    outcome = simulate(job, RANKS, 1, carrier)
    assert (outcome.deadlock, outcome.errors) == (None, {}), outcome.tracebacks
    expected = simulate(clean, RANKS, 0, carrier).results
    for rank, (texts, weights) in outcome.results.items():
        assert any("rank 0 to" in text and "rank 1 to" in text for text in texts), (rank, texts)
        torch.testing.assert_close(weights, expected[rank])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_backward_more_on_one_rank_meets_a_clip_on_another(carrier: Carrier, stage: int) -> None:
    def job(rank: int) -> tuple[list[str], Tensor]:
        this = Rank(rank, stage, models=1)
        clip = partial(this.optimizers[0].clip_grad_norm_, 1.0)
        texts = this.told(*([this.backward, this.backward, this.step] if rank == 0 else [clip, this.backward, clip]))
        this.begin_anew()
        this.backward()
        this.step()
        return texts, this.weights()

    def clean(rank: int) -> Tensor:
        this = Rank(rank, stage, models=1)
        this.backward()
        this.step()
        return this.weights()

    compare(carrier, job, clean)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("carrier", ["messages", "memory"])
def test_one_optimizers_zero_grad_on_one_rank_meets_anothers_backward(carrier: Carrier, stage: int) -> None:
    def detect(this: Rank) -> None:
        for which in (0, 1):
            this.backward(which, dropped=2)
        this.step()

    def job(rank: int) -> tuple[list[str], Tensor]:
        this = Rank(rank, stage, models=2)
        detect(this)
        alone = [this.optimizers[1].zero_grad] if rank == 1 else []
        texts = this.told(*alone, this.backward, lambda: this.backward(1), this.step)
        this.begin_anew()
        for which in (0, 1):
            this.backward(which, at=1, dropped=4)
        this.step()
        return texts, this.weights()

    def clean(rank: int) -> Tensor:
        this = Rank(rank, stage, models=2)
        detect(this)
        for which in (0, 1):
            this.backward(which, at=1, dropped=4)
        this.step()
        return this.weights()

    compare(carrier, job, clean)


@pytest.mark.parametrize("carrier", ["messages", "memory"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_changes_no_numbers(carrier: Carrier, late: int) -> None:
    """With detection, the others put their sync off when they have waited for long; so the ranks run it later."""
    from lowlevel_zero.communication.runtime import runtime

    def job(rank: int, pause: float) -> Tensor:
        this = Rank(rank, 2, models=1)
        for at in range(2):
            this.backward(dropped=3 + at)
            this.step()
        for at in range(2):
            if rank == late:
                runtime().sleep(pause)
            this.backward(at=at, dropped=rank)
            this.backward(at=at, dropped=5)
        this.step()
        return this.weights()

    slow, prompt = (simulate(lambda rank, pause=pause: job(rank, pause), RANKS, 2, carrier) for pause in (60.0, 0.0))
    assert (slow.deadlock, slow.errors, prompt.errors) == (None, {}, {}), slow.tracebacks
    for rank, weights in slow.results.items():
        torch.testing.assert_close(weights, prompt.results[rank])


def test_numbers_of_a_call_of_another_length_are_not_read() -> None:
    def tell_some(rank: int) -> list[int]:
        group = ShardGroup()
        group.connect()
        return group.all_reduce_max([1, 2, 3][: 1 + 2 * rank])

    errors = simulate(tell_some, 2, 0, "memory").errors
    assert "expected 8 bytes from rank 1, as many as it gets, got 24 bytes of another call" in str(errors[0])
    assert "expected 24 bytes from rank 0, as many as it gets, got 8 bytes of another call" in str(errors[1])
