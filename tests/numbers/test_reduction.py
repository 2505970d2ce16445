"""What gradients become over the ranks: mean or sum, and divided by a factor before they are summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping.bucket_store import pack
from tests.support.on_ranks import on_ranks
from tests.support.options import grouped

STAGES: dict[str, dict[str, Any]] = {"stage 1": {}, "stage 2": {"partition_grad": True}}


SIZE = 128


class Slope(nn.Module):
    """Its gradient is what it is called with. Two ranks have aligned slices of it, which can be reduced in place."""

    def __init__(self, dtype: torch.dtype, size: int = SIZE) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(size, dtype=dtype))
        self.other = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, slope: Tensor) -> Tensor:
        return ((self.one.view(-1) + self.other.view(-1)) * slope).sum()


def gradients_of(slope: Tensor, **options: Any) -> tuple[list[Any], bool]:
    """The whole averaged gradients, and whether a step was taken."""
    model = Slope(slope.dtype)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = LowLevelZeroOptimizer(sgd, model=model, initial_scale=1, **grouped(options))
    optimizer.backward(model(slope))
    gradients = [optimizer.get_param_grad(p) for p in model.parameters()]
    optimizer.step()
    return gradients, bool(model.one.detach().ne(0).any())


WAYS = [("stage 1", 1), ("stage 2", 2**20), ("stage 2", 1), ("stage 1", 2**20)]  # in place, and packed


@on_ranks(2, WAYS)
def test_a_factor_keeps_fp16_sums_finite(rank: int, stage: str, bucket: int) -> None:
    slope = torch.full((SIZE,), 40_000.0, dtype=torch.float16)
    options = {"reduce_bucket_size": bucket, **STAGES[stage]}
    overflown, stepped = gradients_of(slope, **options)
    assert all(gradient is not None and gradient.isinf().all() for gradient in overflown)
    assert not stepped
    whole, stepped = gradients_of(slope, gradient_predivide_factor=2, **options)
    assert all(gradient is not None and gradient.eq(40_000).all() for gradient in whole)
    assert stepped


@on_ranks(2, STAGES)
def test_gradients_are_divided_before_the_wire_narrows_them(rank: int, stage: str) -> None:
    options = {"communication_dtype": torch.float16, **STAGES[stage]}
    slope = torch.full((SIZE,), 70_000.0)
    overflown, whole = (gradients_of(slope, gradient_predivide_factor=factor, **options)[0] for factor in (1, 4))
    assert all(gradient.isinf().all() for gradient in overflown)
    assert all(gradient.sub(70_000).abs().max() < 70_000 / 2**11 for gradient in whole)


def slope_of(rank: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)).bfloat16()


@on_ranks(2, WAYS)
def test_sums_are_of_quotients_in_the_wire_s_dtype(rank: int, stage: str, bucket: int) -> None:
    """Two gradients that share memory: neither is divided twice."""
    total = (slope_of(0) / 3) + (slope_of(1) / 3)
    expected = (total.float() * (3 / 2)).bfloat16()
    assert not torch.equal(expected, (slope_of(0).float() / 2 + slope_of(1).float() / 2).bfloat16())
    options = {"gradient_predivide_factor": 3, "reduce_bucket_size": bucket, **STAGES[stage]}
    gradients, _ = gradients_of(slope_of(rank), **options)
    assert all(torch.equal(gradient, expected) for gradient in gradients)


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numels", [[8], [8, 3], [5]], ids=str)
def test_packing_divides_and_leaves_gradients_as_they_are(numels: list[int], to: torch.dtype, of: torch.dtype) -> None:
    flats = [torch.randn(numel).to(of) for numel in numels]
    kept = [flat.clone() for flat in flats]
    columns = sum(-(-numel // 2) for numel in numels)
    wire, expected = torch.empty(2, columns, dtype=to), torch.empty(2, columns, dtype=to)
    pack(wire, flats, 4.0)
    pack(expected, [flat / 4 for flat in flats])
    assert torch.equal(wire, expected)
    assert all(map(torch.equal, flats, kept))


FACTOR = "gradient_predivide_factor: expected a finite number above 0"
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"gradient_predivide_factor": 0}, ValueError, FACTOR),
    ({"gradient_predivide_factor": -2.0}, ValueError, "got -2.0"),
    ({"gradient_predivide_factor": float("nan")}, ValueError, "got nan"),
    ({"gradient_predivide_factor": "2"}, TypeError, FACTOR),
    ({"gradient_predivide_factor": True}, TypeError, "got bool"),
    ({"reduction": "average"}, ValueError, "reduction: expected 'mean' or 'sum' over the ranks, got 'average'"),
    ({"reduction": None}, TypeError, "got NoneType None"),
]


@on_ranks(1, BAD)
def test_bad_options_are_refused(rank: int, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(kind, match=message):
        LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **grouped(options))


@on_ranks(2)
def test_micro_batches_in_16_bits_are_summed_in_fp32(rank: int) -> None:
    """In bf16 the sum of 512 and 2 is 512."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD([weight], lr=1.0))
    for gradient in (256.0, 1.0, 1.0):
        optimizer.backward((weight * gradient).sum())
    optimizer.synchronize()
    assert float(optimizer.optim.param_groups[0]["params"][0].grad[0]) == 258.0
