"""Parameters of fewer elements than ranks: they travel without the rows that would hold nothing but padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.accessors import safe_get_full_grad
from lowlevel_zero.communication.collectives import ShardGroup
from tests.support.judging import check_run
from tests.support.oracle import Run, train_rank
from tests.support.ranks import run_ranks

STAGES: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 1, scattered": {"reduce_scatter": True},
    "stage 2": {"partition_grad": True},
}


class Tiny(nn.Module):
    """Parameters of 1, 2 and 3 elements, in layers that can be dropped, and a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(4, 3)  # its bias has 3 elements
        self.layers = nn.ModuleList(nn.ParameterList([torch.randn(()), torch.randn(1), torch.randn(2)]) for _ in "ab")

    def forward(self, x: Tensor, drop: set[int]) -> Tensor:
        hidden = torch.tanh(self.inward(x))
        for place, (scale, shift, pair) in enumerate(self.layers):
            if place not in drop:
                hidden = hidden * scale + shift + (hidden[:, :2] @ pair)[:, None]
        return hidden


@pytest.fixture(params=["shared memory", "messages"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", str(int(request.param == "shared memory")))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("world_size", [4, 5])
@pytest.mark.parametrize("stage", STAGES)
def test_the_numbers_are_those_of_one_process(stage: str, world_size: int) -> None:
    run = Run(
        world_size,
        micro_batches=2,
        drop=lambda step, rank: {step % 3} if rank == 1 or step == 4 else set(),
        model=Tiny,
        options=STAGES[stage] | {"reduce_bucket_size": 6},
    )

    def train(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[float], set[int]]:
        model, optimizer, norms = train_rank(rank, world_size, run)
        compact = {bucket.rows for bucket in optimizer.layout().buckets if bucket.members}
        return {name: p.detach().clone() for name, p in model.named_parameters()}, norms, compact

    ranks = run_ranks(train, world_size)
    check_run(run, [(values, norms) for values, norms, _ in ranks])
    assert all(rows == {1, 2, world_size} for _, _, rows in ranks)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_gathered_bit_for_bit(dtype: torch.dtype) -> None:
    bits = torch.tensor([[-0.0, math.nan, 1.5], [math.inf, 5e-324, -math.inf]], dtype=torch.float64).to(dtype)

    def gather(rank: int, world_size: int) -> list[Tensor]:
        group = ShardGroup()
        group.own_wires()
        rows = [torch.full((2, 1), 7, dtype=dtype) for _ in range(3)]
        mine = bits[rank] if rank < 2 else torch.ones(3, dtype=dtype)
        group.gather([each.reshape(1) for each in mine], rows).wait()
        return rows

    for rows in run_ranks(gather, 4):
        assert torch.equal(torch.cat(rows, 1).view(torch.uint8), bits.view(torch.uint8))


@pytest.mark.parametrize("stage", STAGES)
def test_whole_gradients_have_all_elements(stage: str) -> None:
    def look(rank: int, world_size: int) -> tuple[Tensor | None, Tensor]:
        p = nn.Parameter(torch.zeros(2))
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD([p], lr=1.0), **STAGES[stage])
        for _ in range(2):
            optimizer.backward((p * torch.tensor([1.0, 2.0]) * (rank + 1)).sum())
        gradient = safe_get_full_grad(p)
        optimizer.step()
        return gradient, p.detach().clone()

    for gradient, values in run_ranks(look, 4):
        assert gradient is not None
        assert gradient.tolist() == [5.0, 10.0]
        assert values.tolist() == [-5.0, -10.0]


@pytest.mark.parametrize("stage", ["stage 1", "stage 2"])
def test_bytes_are_those_of_the_rows_that_travel(stage: str) -> None:
    def count(rank: int, world_size: int) -> dict[str, int]:
        model = nn.ParameterList(torch.randn(2) for _ in range(200))
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **STAGES[stage])
        optimizer.backward(torch.cat(list(model)).sum())
        optimizer.step()
        return optimizer.traffic()

    wire = 2 * 224 * 4  # two rows of 200 elements, padded to 224, 4 bytes each; flags travel once, as 201 numbers
    for told in run_ranks(count, 4):
        assert told == {"reduce": 2 * 3 * (wire // 4 + 51 * 4), "gather": 2 * 3 * (2 * 200 * 4 // 4)}


def test_sums_of_bf16_are_rounded_once_in_stage_2() -> None:
    def train(rank: int, world_size: int) -> float:
        p = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD([p], lr=1.0), partition_grad=True, reduction="sum")
        optimizer.backward(p * (256.0 if rank == 0 else 1.0))  # 256 + 1 is 256 in bf16, 256 + 3 rounds to 260
        optimizer.step()
        return p.item()

    assert run_ranks(train, 4) == [-260.0] * 4
