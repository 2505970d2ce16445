"""The divergence watch: one flipped bit on one rank is found and named, on all ranks; equal ranks are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import Diagnostics, LowLevelZeroOptimizer
from lowlevel_zero.diagnostics.verification import checksum
from tests.support.oracle import Odd
from tests.support.ranks import Raised, run_ranks, run_ranks_expecting

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit in memory, past autograd and all bookkeeping."""
    flat = torch.as_strided(tensor.data, (tensor.numel(),), (1,))
    bits = flat.view(INTEGERS[tensor.element_size()])
    width = 8 * tensor.element_size()
    bits[element] ^= (1 << bit) - (1 << width if bit == width - 1 else 0)


def wrap(model: nn.Module, **options: Any) -> LowLevelZeroOptimizer:
    return LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)


def train(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
    optimizer.backward(model(torch.ones(3, 4), set()).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, dtype=dtype)
    before = checksum(tensor)
    for element in range(7):
        for bit in range(8 * tensor.element_size()):
            flip(tensor, element, bit)
            assert checksum(tensor) != before
            flip(tensor, element, bit)
    assert torch.equal(checksum(tensor), before)


def test_a_checksum_knows_places_signs_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.zeros(0)) == 0
    monkeypatch.setattr("lowlevel_zero.diagnostics.verification._CHUNK", 3)
    one, other = torch.arange(7.0), torch.arange(7.0)
    other[:3], other[3:6] = one[3:6].clone(), one[:3].clone()
    assert checksum(one) != checksum(other)
    assert checksum(one.reshape(7, 1).t()) == checksum(one)


FLIPS = {"inward": 0, "frozen.bias": 1}


@pytest.mark.parametrize("name", FLIPS)
def test_a_flipped_bit_is_named_on_all_ranks(name: str) -> None:
    culprit = FLIPS[name]

    def live(rank: int, world_size: int) -> None:
        model = Odd()
        optimizer = wrap(model, partition_grad=True)
        train(model, optimizer)
        if rank == culprit:
            flip(dict(model.named_parameters())[name], 0, 3)
        optimizer.verify()

    others = ", ".join(str(rank) for rank in range(3) if rank != culprit)
    expected = (
        f"{name}: expected the same values on every rank, got others on rank {culprit} than on ranks {others} (1 of"
    )
    check_all(run_ranks_expecting(live, 3), expected)


def check_all(errors: list[Raised], expected: str) -> None:
    for error in errors:
        assert error.type == "RuntimeError"
        assert error.message.startswith(expected), error.message


def test_a_layer_that_one_rank_alone_has_is_named_on_all() -> None:
    def live(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = wrap(model)
        if rank == 1:
            model.append(nn.Linear(4, 2))
        with pytest.raises(RuntimeError, match="rank 0 has «nothing more» where rank 1 has «2.weight»"):
            optimizer.verify()
        if rank == 1:
            model.pop(2)
        optimizer.verify()

    run_ranks(live, 2)


def test_every_so_many_steps() -> None:
    """A bit of a dropped layer flips after the first step; the fourth finds it."""

    def live(rank: int, world_size: int) -> None:
        model = Odd()
        optimizer = wrap(model, diagnostics=Diagnostics(verify_every=4))
        for step in range(4):
            loss = model(torch.ones(3, 4), {1}).square().mean()
            optimizer.backward(loss)
            if step == 3:
                with pytest.raises(RuntimeError, match="^layers.1.weight: "):
                    optimizer.step()
                return
            optimizer.step()
            if rank == 1 and step == 0:
                flip(model.layers[1].weight, 3, 0)

    run_ranks(live, 2)


def test_buffers_are_compared_when_asked_for() -> None:
    def live(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = wrap(model)
        model(torch.randn(8, 4) + rank)
        optimizer.verify()
        optimizer.verify(buffers=True)

    check_all(run_ranks_expecting(live, 2), "1.running_mean: ")


def test_a_layer_that_was_replaced_on_all_ranks_and_differs() -> None:
    """Two tensors have one name then: the former one's record, and the new one."""

    def live(rank: int, world_size: int) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = wrap(model)
        former, model[0] = model[0], nn.Linear(3, 3)
        former.weight.data[0, 0] += rank  # type: ignore[union-attr, operator]
        with pytest.raises(RuntimeError) as refused:
            optimizer.verify()
        return str(refused.value)

    for found in run_ranks(live, 2):
        assert "0.weight: expected the same values on every rank" in found
