"""Weights that some ranks alone write: all ranks refuse the step, name the first, and may go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_cases, run_ranks

RANKS, ODD = 3, 1


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).bfloat16()


def wrap(model: nn.Module) -> LowLevelZeroOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return LowLevelZeroOptimizer(inner, model=model)


def backward(optimizer: LowLevelZeroOptimizer, model: nn.Module, rank: int, at: int = 0) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * at + rank))
    optimizer.backward(model(x.bfloat16()).square().mean())


def train(optimizer: LowLevelZeroOptimizer, model: nn.Module, rank: int, at: int) -> None:
    backward(optimizer, model, rank, at)
    optimizer.step()
    optimizer.zero_grad()


def everything(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> list[Tensor]:
    """What this rank has of parameters, masters and states, as it is now."""
    masters = [p32 for group in optimizer.param_groups for p32 in group["params"]]
    states = [optimizer.state[p32].get("momentum_buffer") for p32 in masters]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *masters, *states) if tensor is not None]


# ---- ways to write, each on the ranks where ``writes`` ----


def load(model: nn.Module, optimizer: LowLevelZeroOptimizer, writes: bool) -> None:
    if writes:
        model.load_state_dict(net(seed=7).state_dict())


@torch.no_grad()
def add(model: nn.Module, optimizer: LowLevelZeroOptimizer, writes: bool) -> None:
    if writes:
        model[2].bias.add_(1.0)


def assign(model: nn.Module, optimizer: LowLevelZeroOptimizer, writes: bool) -> None:
    if writes:
        model[2].bias.data = model[2].bias.data + 1.0


def add_and_refresh(model: nn.Module, optimizer: LowLevelZeroOptimizer, writes: bool) -> None:
    add(model, optimizer, writes)
    if writes:
        optimizer.update_master_params(model)


def add_and_save(model: nn.Module, optimizer: LowLevelZeroOptimizer, writes: bool) -> None:
    """All look at masters in between, which follow on the one rank."""
    add(model, optimizer, writes)
    optimizer.state_dict()


Write = Callable[[nn.Module, LowLevelZeroOptimizer, bool], None]
WRITES: dict[str, tuple[Write, str]] = {
    "load_state_dict": (load, "0.weight"),
    "in place": (add, "2.bias"),
    "assigned": (assign, "2.bias"),
    "in place, and update_master_params": (add_and_refresh, "2.bias"),
    "in place, and a state dict": (add_and_save, "2.bias"),
}


def test_all_ranks_refuse_the_step_by_name(subtests: pytest.Subtests) -> None:
    """Nothing is stepped, and no master follows."""

    def live(rank: int, world_size: int, way: str) -> tuple[str, bool]:
        write, name = WRITES[way]
        model = net()
        optimizer = wrap(model)
        train(optimizer, model, rank, 0)
        write(model, optimizer, rank == ODD)
        backward(optimizer, model, rank, 1)
        before = everything(model, optimizer)
        for _ in range(2):  # a second step is refused as well
            with pytest.raises(RuntimeError, match="expected weights to be written on every rank or on none") as caught:
                optimizer.step()
            assert str(caught.value).startswith(f"{name}: ")
        same = all(map(torch.equal, before, everything(model, optimizer)))
        return str(caught.value), same

    for (way,), ran in run_cases(live, RANKS, [(way,) for way in WRITES], one_group=True):
        with subtests.test(way):
            first, *others = ran.values()
            assert others == [first, first]
            assert f"on rank {ODD} and not on ranks 0, 2" in first[0]
            assert first[1]


def test_all_ranks_refuse_a_step_where_one_has_written_again() -> None:
    """All have written, so it's the number of writes that tells; where the values are the same, the step is taken."""

    def live(rank: int, world_size: int) -> str:
        model = net()
        optimizer = wrap(model)
        add(model, optimizer, writes=True)
        once = [p.detach().clone() for p in model.parameters()]
        add(model, optimizer, writes=rank == ODD)
        backward(optimizer, model, rank)
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        undo(model, rank, once)
        optimizer.step()
        return str(caught.value)

    first, *others = run_ranks(live, RANKS)
    assert others == [first, first]
    assert first.startswith("2.bias: expected weights to be written on every rank or on none")
    assert f"got 2 times on rank {ODD} and once on ranks 0, 2: " in first


# ---- ways out, after the refused step ----


@torch.no_grad()
def undo(model: nn.Module, rank: int, saved: list[Tensor]) -> None:
    for p, value in zip(model.parameters(), saved, strict=True):
        if rank == ODD:
            p.copy_(value)


# ---- what isn't refused ----


def test_weights_that_one_rank_exchanges_and_puts_back_are_no_difference() -> None:
    """As one does for a look at a validation set by averaged weights; masters keep their low bits."""

    def live(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
        ends = []
        for exchanges in (True, False):
            model = net()
            optimizer = wrap(model)
            for at in range(3):
                if exchanges and rank == ODD:
                    saved = [p.detach().clone() for p in model.parameters()]
                    load(model, optimizer, True)
                    undo(model, rank, saved)
                train(optimizer, model, rank, at)
            ends.append(everything(model, optimizer))
        return ends[0], ends[1]

    for got, expected in run_ranks(live, 2):
        assert all(map(torch.equal, got, expected))


def test_values_are_compared_once_where_ranks_have_not_written_alike() -> None:
    """Later steps wait as often as those before, also where they don't gather what was written."""

    def live(rank: int, world_size: int) -> list[int]:
        model, unused = net(), nn.Linear(2, 2)
        optimizer = wrap(nn.ModuleList([model, unused]))
        waits = []
        for at in range(4):
            if at == 1 and rank == ODD:
                undo(unused, rank, [p.detach().clone() for p in unused.parameters()])
            before = optimizer.shard_group.progress.waits
            train(optimizer, model, rank, at)
            waits.append(optimizer.shard_group.progress.waits - before)
        return waits

    for _, compared, third, fourth in run_ranks(live, 2):
        assert compared > third == fourth
