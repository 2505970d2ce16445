"""Short gradients: views are there again in the next step, and nobody who keeps a gradient sees another in it."""

from __future__ import annotations

import torch
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.alignment import RowLayout
from lowlevel_zero.bookkeeping.gradient_sum import GradientSum
from lowlevel_zero.bookkeeping.short_gradients import ShortGradients
from tests.support.ranks import run_ranks


def sum_of(sizes: tuple[int, ...], first: int = 0) -> GradientSum:
    members = tuple(range(first, first + len(sizes)))
    return GradientSum(members, RowLayout(sizes), torch.zeros(sum(sizes)))


def test_views_are_used_again() -> None:
    short, total = ShortGradients(), sum_of((2, 1))
    first = short.slices(total, torch.tensor([1.0, 2.0, 3.0]))
    assert [each.tolist() for each in first] == [[1, 2], [3]]
    again = short.slices(total, torch.tensor([4.0, 5.0, 6.0]))
    assert [each.tolist() for each in again] == [[4, 5], [6]]
    assert again[0] is first[0]
    double = short.slices(total, torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))
    assert double[1].dtype == torch.float64


def test_buckets_of_the_same_sizes_have_views_of_their_own() -> None:
    short = ShortGradients()
    rows = [short.slices(sum_of((1, 1), 2 * place), torch.full((2,), float(place))) for place in range(20)]
    assert [one.item() for one, _ in rows] == list(range(20))


def test_long_slices_are_not_kept() -> None:
    short, total = ShortGradients(), sum_of((40, 1))
    row = torch.zeros(41)
    assert short.slices(total, row)[0] is not short.slices(total, row)[0]


class Keeps(torch.optim.SGD):
    """Remembers the gradients of the last step, as they are."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("seen", []).append(p.grad)
        super().step()


def test_an_optimizer_may_keep_its_gradients() -> None:
    def train(rank: int, world_size: int) -> list[list[float]]:
        model = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3))
        inner = Keeps(model.parameters(), lr=0.0)
        optimizer = LowLevelZeroOptimizer(inner, partition_grad=True, assume_elementwise=True)
        for step in range(3):
            optimizer.backward(torch.cat(list(model)).sum() * (step + 1))
            optimizer.step()
            optimizer.zero_grad()
        return [[seen.item() for seen in inner.state[p]["seen"]] for p in inner.param_groups[0]["params"]]

    for seen in run_ranks(train, 2):
        assert seen == [[1.0, 2.0, 3.0]] * 3
