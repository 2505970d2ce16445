"""Sums whose rows lie with their owners: looked at before and after others have gone on; and memory comes back."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.arena import Arena
from lowlevel_zero.communication.collectives import ShardGroup
from lowlevel_zero.communication.offers import OfferedRows
from lowlevel_zero.communication.rows import Rows
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
SIZES = [1, 3, 1001, 70_001]
over_world_sizes = pytest.mark.parametrize("world_size", [2, 3])


def wire_of(rank: int, world_size: int, row: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(world_size, row, generator=torch.Generator().manual_seed(1000 * row + rank)).to(dtype)


def wires_of(rank: int, world_size: int) -> list[Tensor]:
    return [wire_of(rank, world_size, row, dtype) for dtype in DTYPES for row in SIZES]


def sums_of(world_size: int) -> list[Tensor]:
    """In rank order, 16-bit numbers in fp32."""
    by_wire = zip(*(wires_of(rank, world_size) for rank in range(world_size)), strict=True)
    return [
        sum(wire.to(torch.promote_types(wire.dtype, torch.float32)) for wire in wires).to(wires[0].dtype)
        for wires in by_wire
    ]


def start(group: ShardGroup, wire: Tensor) -> Any:
    return group.all_reduce(group.new_wire(wire.shape[1], wire.dtype, CPU).copy_(wire))


def whole(rows: Rows) -> Tensor:
    assert isinstance(rows, OfferedRows)
    return rows.columns(0, rows.row.numel())


def group_of_its_own() -> ShardGroup:
    group = ShardGroup()
    group.own_wires()
    return group


def alike(sums: list[Tensor], world_size: int) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(sums, sums_of(world_size), strict=True))


@over_world_sizes
@pytest.mark.parametrize("ready", ["none", "the last", "all"])
def test_a_look_waits_for_nobody(ready: str, world_size: int) -> None:
    """Rank 0 looks while the others sit still, of which none, one or all have summed their rows."""

    def look(rank: int, world_size: int) -> bool:
        group = group_of_its_own()
        pending = [start(group, wire) for wire in wires_of(rank, world_size)]
        early = {"none": (), "the last": (world_size - 1,), "all": range(1, world_size)}[ready]
        rows = [each.wait() for each in pending] if rank in early else []
        group.largest([0])
        mine = rank == 0 and alike([whole(each.wait()) for each in pending], world_size)
        group.largest([0])
        return mine or alike([whole(each) for each in rows or [each.wait() for each in pending]], world_size)

    assert run_ranks(look, world_size) == [True] * world_size


@over_world_sizes
def test_a_late_look_sees_what_others_have_long_forgotten(world_size: int) -> None:
    def look(rank: int, world_size: int) -> bool:
        group = group_of_its_own()
        rows = [each.wait() for each in [start(group, wire) for wire in wires_of(rank, world_size)]]
        if rank > 0:
            rows.clear()
        for number in range(5):
            further = [start(group, torch.full_like(wire, number)) for wire in wires_of(rank, world_size)]
            group.largest([0])
            assert all((each.wait().row == world_size * number).all() for each in further)
        return alike([whole(each) for each in rows], world_size) if rank == 0 else True

    assert run_ranks(look, world_size) == [True] * world_size


def test_some_columns_are_those_of_the_whole() -> None:
    def look(rank: int, world_size: int) -> bool:
        group = group_of_its_own()
        rows = [start(group, wire).wait() for wire in wires_of(rank, world_size)]
        parts = [
            (each.columns(at, 1), whole(each)[:, at : at + 1]) for each in rows for at in (0, each.row.numel() - 1)
        ]
        return all(torch.equal(part, expected) for part, expected in parts)

    assert run_ranks(look, 3) == [True] * 3


# Memory


def test_a_lent_slot_is_used_again_once_no_tensor_sees_it() -> None:
    own = Arena()
    slot, row = own.lend(1000, torch.float32, readers=0)
    view = row.fill_(1)[10:20].view(2, 5)
    del row
    another, other = own.lend(1000, torch.float32, readers=0)
    assert another.offset != slot.offset
    other.fill_(2)
    assert (view == 1).all()
    del view
    assert own.lend(1000, torch.float32, readers=0)[0] is slot
    del other, own  # nor is it gone before its tensors


def test_a_lent_slot_waits_for_its_readers_too() -> None:
    own = Arena()
    slot, row = own.lend(10, torch.float32, readers=1)
    del row
    assert own.lend(10, torch.float32, readers=0)[0] is not slot
    own.finish(slot)
    assert own.lend(10, torch.float32, readers=0)[0] is slot


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 100_001, 2**21 - 1, 2**21 + 4, 10**8 + 1])
def test_a_lent_slot_is_hardly_larger_than_it_must_be(nbytes: int) -> None:
    slot, row = Arena().lend(nbytes, torch.uint8, readers=0)
    assert row.untyped_storage().nbytes() == nbytes <= slot.nbytes <= max(nbytes * 17 / 16, nbytes + 4096)


def make(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 12), nn.Linear(12, 5, bias=False)).to(dtype)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    return model, LowLevelZeroOptimizer(sgd, model=model, reduce_bucket_size=200, **options)


def loss_of(model: nn.Module, rank: int, step: int, micro_batch: int = 0) -> Tensor:
    seed = 100 * step + 10 * micro_batch + rank
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    return model(x).float().square().mean()


def looked_at(optimizer: LowLevelZeroOptimizer, p: Tensor) -> Tensor:
    """All slices of its averaged gradient, without a word to the others."""
    return torch.cat(optimizer.get_partitioned_gradients_by_param_id(0, id(p)))[: p.numel()].view(p.shape)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_who_looks_late_sees_no_step_of_the_others(world_size: int, micro_batches: int) -> None:
    """Each rank looks at its own pace, now and then; the others may be in their step already, which scales rows."""

    def train(rank: int, world_size: int) -> None:
        model, optimizer = make()
        pause = random.Random(rank)
        for step in range(12):
            losses = [loss_of(model, of, step, at) for of in range(world_size) for at in range(micro_batches)]
            expected = torch.autograd.grad(sum(losses, torch.zeros(())) / world_size, list(model.parameters()))
            for at in range(micro_batches):
                optimizer.backward(loss_of(model, rank, step, at))
            time.sleep(pause.random() * 0.01)
            if pause.random() < 0.7:
                for p, gradient in zip(model.parameters(), expected, strict=True):
                    torch.testing.assert_close(looked_at(optimizer, p), gradient)
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(train, world_size)


@pytest.mark.parametrize("by", ["synchronize", "a hook"])
def test_a_gradient_that_somebody_holds_stays_as_it_was(by: str) -> None:
    def train(rank: int, world_size: int) -> bool:
        model, optimizer = make()
        slices = [p32 for group in optimizer.optim.param_groups for p32 in group["params"]]
        held: list[Tensor | None] = []
        kept: list[Tensor] = []

        def keep(*_: object) -> None:
            held.extend(p32.grad for p32 in slices)
            kept.extend(p32.grad.clone() for p32 in slices if p32.grad is not None)

        if by == "a hook":
            optimizer.optim.register_step_post_hook(keep)
        for step in range(8):
            optimizer.backward(loss_of(model, rank, step))
            if by == "synchronize":
                optimizer.synchronize()
                keep()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        assert len(kept) == 8 * len(slices)
        return all(now is not None and torch.equal(now, then) for now, then in zip(held, kept, strict=True))

    assert run_ranks(train, 2) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("looks", ["nobody looks", "one looks", "all look"])
def test_thirty_steps_take_no_more_than_ten(looks: str, dtype: torch.dtype) -> None:
    def train(rank: int, world_size: int) -> list[int]:
        model, optimizer = make(dtype)
        seen = []
        for step in range(30):
            optimizer.backward(loss_of(model, rank, step))
            if looks == "all look" or (looks == "one looks" and rank == 1):
                for p in model.parameters():
                    looked_at(optimizer, p)
            optimizer.step()
            optimizer.zero_grad()
            optimizer._group.largest([0])
            seen.append(len(optimizer._group._hosts._own._slots))
        return seen

    for seen in run_ranks(train, 3):
        assert max(seen[10:]) <= max(seen[:10]) + 5  # who is ahead takes one more now and then


def test_nothing_is_left_of_an_optimizer_that_is_gone() -> None:
    def train(rank: int, world_size: int) -> int:
        for _ in range(2):
            model, optimizer = make()
            optimizer.backward(loss_of(model, rank, 0))
            looked_at(optimizer, next(model.parameters()))
            group = optimizer._group
            del model, optimizer
            group.largest([0])  # all have forgotten all
            group.rest()
            group._hosts.rest(for_good=True)
            group.largest([0])
            group._hosts.rest(for_good=True)
        return sum(each.nbytes for each in group.held())

    assert max(run_ranks(train, 2)) <= 4096  # the last agreement's
