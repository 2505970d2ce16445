"""Ranks that are late, or at calls of another length: numbers don't change, or all are told.

Ranks at different calls are in programs (``test_programs.py``).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import Diagnostics, LowLevelZeroOptimizer
from lowlevel_zero.communication.runtime import runtime
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.simulation.world import Carrier, simulate

RANKS = 2
X = torch.randn(2, RANKS, 4, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("carrier", ["messages", "memory"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_changes_no_numbers(carrier: Carrier, late: int) -> None:
    """With detection, the others put their sync off when they have waited for long; so the ranks run it later."""

    def job(rank: int, pause: float) -> Tensor:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(12))
        sgd, diagnostics = torch.optim.SGD(model.parameters(), lr=0.1), Diagnostics(stall_timeout=0.0)
        optimizer = LowLevelZeroOptimizer(sgd, partition_grad=True, reduce_bucket_size=1, diagnostics=diagnostics)

        def backward(at: int, dropped: int) -> None:
            h = X[at][rank]
            for number, layer in enumerate(model):
                h = h if number == dropped else layer(h)
            optimizer.backward(h.square().mean())

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        for at in range(2):
            backward(0, dropped=3 + at)
            step()
        for at in range(2):
            if rank == late:
                runtime().sleep(pause)
            backward(at, dropped=rank)
            backward(at, dropped=5)
        step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

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
