"""One rank can't construct its optimizer, whatever the reason and however late: all ranks raise, and may try again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.construction import prepare
from tests.support.ranks import run_ranks
from tests.support.scripts import Alone, Together, momentum, net, steps
from tests.support.several import check_all, of_all

ODD = 1  # the rank on which it goes wrong


# From the first look, and after all was checked, to the last thing that is done.
FAULTS = {"state": AttributeError("no such state"), "buffers": OSError("a file behind them"), "hook": KeyError("mine")}
armed: list[str] = []  # where it goes wrong next, once


def strike(where: str) -> None:
    if where in armed:
        armed.remove(where)
        raise type(FAULTS[where])(*FAULTS[where].args)  # anew: a traceback would keep what is constructed


class Sgd(torch.optim.SGD):
    """A user's subclass whose state is looked up in a way of its own; in a probe's copies as ever."""

    own = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "state" and self.own == id(self):
            strike("state")
        return super().__getattribute__(name)


class Weight(nn.Parameter):
    """A parameter that may refuse a hook."""

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        strike("hook")
        return super().register_post_accumulate_grad_hook(hook)


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*net(layers=2))
        self[0].weight = Weight(self[0].weight.detach())
        self.register_buffer("seen", torch.zeros(2))

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        strike("buffers")
        return super().buffers(recurse)


def wrap(model: Model) -> LowLevelZeroOptimizer:
    inner = Sgd(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    inner.own = id(inner)
    return LowLevelZeroOptimizer(inner, model=model, split="elements")


def train_as_alone(model: nn.Module, optimizer: LowLevelZeroOptimizer, rank: int, world_size: int) -> None:
    """Three steps end as those of one process."""
    alone = Model()
    steps(Together(rank), model, optimizer, range(3))
    steps(Alone(world_size), alone, momentum(alone), range(3))
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()), rtol=1e-5, atol=1e-6)


def all_ranks_raise_and_may_try_again(rank: int, world_size: int) -> None:
    for where, error in FAULTS.items():
        model = Model()
        armed.extend([where] * (rank == ODD))
        with pytest.raises(type(error) if rank == ODD else RuntimeError) as caught:
            wrap(model)
        if rank != ODD:
            told = f"rank {ODD} could not construct its LowLevelZeroOptimizer: {type(error).__name__}: {error}"
            assert str(caught.value) == told
        del caught
        assert not armed, where
        train_as_alone(model, wrap(model), rank, world_size)


def a_group_that_one_rank_can_not_add(rank: int, world_size: int) -> None:
    """Before anything is changed, all go on without it."""
    optimizer = wrap(model := Model())
    armed.extend(["state"] * (rank == ODD))
    with pytest.raises(AttributeError if rank == ODD else RuntimeError) as caught:
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(3))]})
    if rank != ODD:
        assert str(caught.value) == f"rank {ODD} could not add a param group: AttributeError: no such state"
    assert len(optimizer.param_groups) == 1
    train_as_alone(model, optimizer, rank, world_size)

    optimizer = LowLevelZeroOptimizer(Sgd([nn.Parameter(torch.ones(3))], lr=0.1), split="elements")
    armed.extend(["hook"] * (rank == ODD))
    with pytest.raises(KeyError if rank == ODD else RuntimeError, match="mine"):
        optimizer.add_param_group({"params": [Weight(torch.ones(3))]})


# ---- several devices ----


class Apart(nn.Module):
    """Parameters of which one may be elsewhere, on a device that the process group serves too."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.here = nn.Parameter(torch.ones(3))
        self.there = nn.Parameter(torch.ones(3, device=device))


def a_model_on_several_devices_is_refused(rank: int, world_size: int) -> None:
    """Alike on all ranks, even where one rank's alone is, and nothing is changed."""
    for ranks in ([0, 1], [1]):
        model = Apart("meta" if rank in ranks else "cpu")
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        address = model.here.data_ptr()
        expected = (
            r"params'\]\[1\]: expected it on cpu, where param_groups\[0\]\['params'\]\[0\] is.* on meta.*move the model"
        )
        with pytest.raises(ValueError if rank in ranks else RuntimeError, match=expected):
            LowLevelZeroOptimizer(inner, forced_dtype=torch.bfloat16)
        assert (model.here.data_ptr(), model.here.dtype) == (address, torch.float32)
        assert inner.param_groups[0]["params"][0] is model.here

    here = nn.Parameter(torch.ones(3))
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD([here], lr=0.1))
    with pytest.raises(ValueError, match=r"param_groups\[1\]\['params'\]\[0\]: expected it on cpu, .* on meta"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, device="meta"))]})
    optimizer.backward((here * (1 + rank)).sum())
    optimizer.step()
    assert here.tolist() == pytest.approx([1 - 0.1 * 1.5] * 3)


def a_named_parameter_that_it_has_already_is_refused_and_it_trains_on(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(list(model.named_parameters()), lr=0.1), model=model)
    with pytest.raises(ValueError, match="weight: expected a parameter this optimizer doesn't have yet"):
        optimizer.add_param_group({"params": [("weight", model.weight)]})
    optimizer.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()


def one_rank_alone_constructs_another_where_the_others_step(rank: int, world_size: int) -> None:
    """All refuse it; then the old optimizer trains on, and later all construct and train another."""
    old = wrap(model := Model())
    steps(Together(rank), model, old, range(1))
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            wrap(Model()) if rank == ODD else old.step()
        called = f"rank {1 - ODD} to step; rank {ODD} to construct its LowLevelZeroOptimizer: "
        assert called in str(caught.value)
        old.zero_grad()
    steps(Together(rank), model, old, range(1))
    train_as_alone(other := Model(), new := wrap(other), rank, world_size)
    assert len(set(of_all(new.shard_group.number))) == 1
    steps(Together(rank), model, old, range(1))


def one_rank_leaves_construction_between_agreements(rank: int, world_size: int) -> None:
    """As by an interrupt: the others are at the next exchange, and learn there that it makes another call."""
    old = wrap(model := Model())
    with pytest.MonkeyPatch.context() as patch:
        if rank == ODD:
            patch.setattr(prepare, "make_groups", interrupted)
        with pytest.raises(KeyboardInterrupt if rank == ODD else RuntimeError):
            wrap(Model())
    if rank == ODD:
        with pytest.raises(RuntimeError, match="of another call"):
            old.zero_grad()
    old.zero_grad()
    train_as_alone(other := Model(), new := wrap(other), rank, world_size)
    assert len(set(of_all(new.shard_group.number))) == 1
    steps(Together(rank), model, old, range(1))


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


CHECKS = [
    all_ranks_raise_and_may_try_again,
    one_rank_alone_constructs_another_where_the_others_step,
    one_rank_leaves_construction_between_agreements,
    a_group_that_one_rank_can_not_add,
    a_model_on_several_devices_is_refused,
    a_named_parameter_that_it_has_already_is_refused_and_it_trains_on,
]


def test_what_cannot_be_constructed(subtests: pytest.Subtests) -> None:
    check_all(CHECKS, 2, subtests, backend="cpu:gloo,meta:gloo", one_group=True)


def test_a_rank_that_has_waited_in_vain_constructs_it_when_the_others_come(tmp_path: Path) -> None:
    def construct(rank: int, world_size: int) -> tuple[list[str], bool]:
        dist.init_process_group(
            "gloo", f"file://{tmp_path}/meeting", rank=rank, world_size=world_size, timeout=timedelta(seconds=1.5)
        )
        model, refused = nn.Linear(3, 3), []
        if rank == 1:
            time.sleep(2.5)
        for _ in range(3):
            try:
                optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
                break
            except TimeoutError as error:
                refused.append(str(error))
        optimizer.backward(model(torch.full((2, 3), float(rank))).sum())
        optimizer.step()
        optimizer.verify()
        return refused, bool(optimizer.get_grad_norm() > 0)

    (refused, early), (none, late) = run_ranks(construct, 2, init=False, timeout=20)
    assert early
    assert late
    assert len(refused) == 1
    assert "rank 1 to construct" in refused[0]
    assert none == []
