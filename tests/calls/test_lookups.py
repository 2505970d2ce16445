"""Looks at an optimizer after plain backwards of unequal number: nobody waits for ever, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.accessors import (
    full_fp32_params,
    full_grads,
    full_optimizer_states,
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
)
from lowlevel_zero.checkpoint import Sharded, save_checkpoint
from tests.support.ranks import run_ranks

BACKWARDS: dict[str, Callable[[int, int], int]] = {
    "the first rank twice": lambda rank, world_size: 2 if rank == 0 else 1,
    "the last rank never": lambda rank, world_size: 0 if rank == world_size - 1 else 1,
    "each rank more": lambda rank, world_size: rank,
}


class Model(nn.Module):
    """One parameter that most ranks have nothing of, and one that is used by rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.inward = nn.Linear(3, 5)
        self.seldom = nn.Linear(5, 5)
        self.outward = nn.Linear(5, 2)

    def forward(self, x: Tensor, often: bool) -> Tensor:
        hidden = torch.tanh(self.inward(x)) * self.one
        return self.outward(hidden if often else self.seldom(hidden))


def loss_of(model: nn.Module, step: int, rank: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x = torch.randn(4, 3, generator=generator).to(next(model.parameters()).dtype)
    return model(x, often=rank > 0).float().square().mean()


def build(seed: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def own_gradients(model: Model, optimizer: LowLevelZeroOptimizer) -> None:
    """All ways to ask for this rank's slice of a gradient tell the same."""
    for p in model.parameters():
        own = safe_get_local_grad(p)
        by_id = optimizer.get_working_grad_by_param_id(id(p))
        slices = optimizer.get_partitioned_gradients_by_param_id(0, id(p))
        if own is None:
            assert by_id is None
            assert not slices
        else:
            for same in (by_id, slices[dist.get_rank() if len(slices) > 1 else 0]):
                assert same is not None
                torch.testing.assert_close(own[: len(same)], same)


def set_gradients(model: Model, optimizer: LowLevelZeroOptimizer) -> None:
    for name, gradient in full_grads(model).items():
        if gradient is not None:
            p = model.get_parameter(name)
            safe_set_full_grad(p, gradient)
            safe_set_local_grad(p, safe_get_local_grad(p))


def set_masters(model: Model, optimizer: LowLevelZeroOptimizer) -> None:
    full_fp32_params(model)
    for p in model.parameters():
        safe_set_full_fp32_param(p, safe_get_full_fp32_param(p))
        safe_set_local_fp32_param(p, safe_get_local_fp32_param(p))


def set_states(model: Model, optimizer: LowLevelZeroOptimizer) -> None:
    for name, value in full_optimizer_states(model, "momentum_buffer").items():
        if value is not None:
            safe_set_full_optimizer_state(model.get_parameter(name), value, "momentum_buffer")


def state_dict(model: Model, optimizer: LowLevelZeroOptimizer) -> None:
    whole = optimizer.state_dict()["state"]
    pieces = {place: state for piece, _ in optimizer.state_dict_shard(1) for place, state in piece.items()}
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[at]["momentum_buffer"], pieces[at]["momentum_buffer"]) for at in whole)


def local(model: Model, optimizer: LowLevelZeroOptimizer) -> None:
    """One rank may call what doesn't communicate, while the others go on to their step."""
    if dist.get_rank() > 0:
        return
    count = len(list(model.parameters()))
    assert optimizer.get_grad_norm() is not None
    assert optimizer.loss_scale == 1.0
    assert len(optimizer.working_to_master_param) == len(optimizer.master_to_working_param) == count
    assert len(optimizer.get_working_to_master_map()) == len(optimizer.get_master_to_working_map()) == count
    assert len(optimizer.get_param_padding_map()) == count
    assert optimizer.get_param_padding_size(model.one) >= 0
    assert optimizer.memory_held()["parameters"] > 0
    assert len(optimizer.layout().parameters) == count
    assert optimizer.traffic()["reduce"] > 0
    assert optimizer.unwrap() is optimizer.optim
    for p in model.parameters():
        safe_get_local_fp32_param(p)
        safe_get_local_optimizer_state(p, "momentum_buffer")


Look = Callable[[Model, LowLevelZeroOptimizer], object]
LOOKS: dict[str, Look] = {
    "own gradients": own_gradients,
    "gradients are set": set_gradients,
    "masters are set": set_masters,
    "states are set": set_states,
    "state_dict": state_dict,
    "Sharded": lambda model, optimizer: Sharded(optimizer).state_dict(),
    "save_checkpoint": lambda model, optimizer: save_checkpoint(Path("checkpoint"), model, optimizer),
    "what doesn't communicate": local,
}


def train(rank: int, world_size: int, look: Look, uneven: str, driven: bool, options: dict[str, Any]) -> list[Tensor]:
    """Three steps, the second of which is uneven; a ``driven`` first one shows that a parameter is used seldom."""
    model, inner = build(rank)
    optimizer = LowLevelZeroOptimizer(inner, model=model, reduce_bucket_size=20, **options)
    for step in range(3):
        for micro in range(BACKWARDS[uneven](rank, world_size) if step == 1 else 1):
            loss = loss_of(model, step, rank, micro)
            optimizer.backward(loss) if step == 0 and driven else loss.backward()
        if step == 1:
            look(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "shared memory": (3, "1", {"partition_grad": True, "overlap_allgather": True}),
    "messages": (2, "0", {"cpu_offload": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_look_changes_nothing(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look meets another number of backwards in each case."""
    world_size, shared, options = CASES[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", shared)

    def work(rank: int, world_size: int) -> None:
        @cache
        def without(uneven: str, driven: bool) -> list[Tensor]:
            return train(rank, world_size, lambda model, optimizer: None, uneven, driven, options)

        for at, (name, look) in enumerate(LOOKS.items(), start=world_size):
            way = list(BACKWARDS)[at % 3], at % 2 == 0
            got = train(rank, world_size, look, *way, options)
            torch.testing.assert_close(
                got, without(*way), rtol=1e-5, atol=1e-6, msg=lambda why, at=name: f"{at}: {why}"
            )

    run_ranks(work, world_size, timeout=100)


def test_gradients_are_not_looked_at_in_a_hook() -> None:
    def work(rank: int, world_size: int) -> None:
        model, inner = build(rank)
        optimizer = LowLevelZeroOptimizer(inner, model=model)
        looks = [
            lambda: optimizer.get_param_grad(model.one),
            lambda: optimizer.get_working_grads_by_group_id(0),
            lambda: optimizer.get_working_grad_by_param_id(id(model.one)),
            lambda: optimizer.get_partitioned_gradients_by_param_id(0, id(model.one)),
        ]
        for look in looks:
            handle = model.outward.weight.register_hook(lambda _, look=look: look())
            with pytest.raises(RuntimeError, match="expected it outside of backward, got it within one"):
                optimizer.backward(loss_of(model, 0, rank))
            handle.remove()
            optimizer.zero_grad()

    run_ranks(work, 2)
