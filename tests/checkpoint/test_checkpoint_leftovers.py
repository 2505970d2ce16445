"""Saves and loads leave nothing over: no gradients, graphs or memory of before, and no failure that nobody knows."""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import time
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import load_checkpoint, read_manifest, save_checkpoint
from lowlevel_zero.checkpoint.background import Background
from lowlevel_zero.state.loading import all_or_nothing
from tests.support.checkpoints import check_same, wait_for_pruning
from tests.support.on_ranks import on_ranks
from tests.support.saving import held, held_writes, linear, momentum, names_in, refused, squares, train


def two() -> tuple[nn.ModuleList, list[LowLevelZeroOptimizer]]:
    """Two layers, an optimizer of each, and a frozen parameter that is in the groups of both."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 3)])
    frozen = model[0].bias.requires_grad_(False)
    plain = momentum(model[0].parameters()), momentum([*model[1].parameters(), frozen])
    return model, [LowLevelZeroOptimizer(each, model=model) for each in plain]


@on_ranks(2)
def test_a_load_clears_the_gradients_of_all_optimizers(rank: int, tmp_path: Path) -> None:
    model, optimizers = two()
    train(model, *optimizers)
    save_checkpoint(tmp_path / "a", model, optimizers)
    saved = held(model, *optimizers)
    optimizers[0].backward(squares(model))
    load_checkpoint(tmp_path / "a", model, optimizers)
    assert all(p.grad is None for p in model.parameters())
    for optimizer in optimizers:
        optimizer.step()
    check_same(saved, held(model, *optimizers))


@on_ranks(2)
def test_what_several_optimizers_have_saved_is_each_one_s_to_keep(rank: int, tmp_path: Path) -> None:
    """A frozen parameter is told as the first one's that has it in a group."""
    model, (one, other) = two()
    save_checkpoint(tmp_path / "both", model, {"b": one, "a": other})
    assert read_manifest(tmp_path / "both").tensors["0.bias"].optimizer == "a"
    save_checkpoint(tmp_path / "of the first", model[0], one)
    save_checkpoint(
        tmp_path / "of the second", nn.ModuleList([model[1], nn.ParameterList([model[0].bias])]), other, keep=1
    )
    wait_for_pruning()
    assert names_in(tmp_path) == {"of the second"}


@on_ranks(3)
def test_a_graph_of_the_weights_before_a_load_is_not_run_with_those_after(rank: int, tmp_path: Path) -> None:
    """Also of a parameter that has fewer elements than there are ranks."""
    model, optimizer = linear(steps=1)
    save_checkpoint(tmp_path / "a", model, optimizer)
    losses = [p.square().sum() for p in model.parameters()]
    load_checkpoint(tmp_path / "a", model, optimizer)
    for loss in losses:
        assert "modified by an inplace operation" in refused(loss.backward)


class InPlace:
    """A scheduler whose state dict is what it goes on with, and loads into."""

    def __init__(self, count: int) -> None:
        self.held = {"count": count}

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held.clear()
        self.held.update(state)


@on_ranks(2)
def test_a_scheduler_that_loads_in_place_comes_back_where_another_rank_refuses(rank: int, tmp_path: Path) -> None:
    def refuse(*_: Any) -> None:
        raise LookupError("no")

    pair, scheduler = linear(), InPlace(3)
    save_checkpoint(tmp_path / "a", *pair, scheduler=scheduler)
    scheduler.held["count"] = 5
    if rank == 1:
        pair[1].optim.register_load_state_dict_post_hook(refuse)
    assert "LookupError: no" in refused(lambda: load_checkpoint(tmp_path / "a", *pair, scheduler=scheduler))
    assert scheduler.held == {"count": 5}


@on_ranks(2)
def test_what_a_refusal_would_bring_back_is_let_go_when_none_has_come(rank: int) -> None:
    former = torch.zeros(3)
    kept = ref(former)
    with all_or_nothing(linear()[1].shard_group, "load") as undo:
        undo.callback(former.zero_)
        del former
    assert kept() is None


@on_ranks(2)
def test_who_has_waited_in_vain_has_not_been_told_of_a_failure(rank: int, tmp_path: Path) -> None:
    logging.disable()
    pair = linear()
    with held_writes() as writes:
        saving = save_checkpoint(tmp_path / "late", *pair, async_save=True)
    for wait in (saving.result, saving.exception):
        with pytest.raises(concurrent.futures.TimeoutError):
            wait(0.01)
    if rank == 0:
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "notes.txt").write_text("of its user")
    writes.goes_on.set()
    while not saving.done():
        time.sleep(0.01)
    dist.barrier()
    assert "late: expected nothing there" in refused(lambda: save_checkpoint(tmp_path / "next", *pair))
    save_checkpoint(tmp_path / "next", *pair)


def test_work_that_has_succeeded_is_let_go_though_nobody_asks() -> None:
    kept = []
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        for each in (executor, None):
            work: Background[None] = Background()
            work.start(lambda: None, each)
            kept.append(ref(work))
            while not work.done():
                time.sleep(0.01)
            del work
    deadline = time.monotonic() + 10
    while any(each() is not None for each in kept) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert [each() for each in kept] == [None, None]
