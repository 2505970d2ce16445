"""Looking at an optimizer after plain backwards of unequal number: nobody waits for ever, and the step is right."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.accessors import (
    full_fp32_params,
    full_grads,
    full_optimizer_states,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
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


Gradients = dict[str, Tensor | None]


@cache
def alone(world_size: int, backwards: Callable[[int, int], int]) -> tuple[Gradients, dict[str, Tensor]]:
    """The oracle: gradients of the second step, and parameters after the third."""
    model, optimizer = build(0)
    gradients: Gradients = {}
    for step in range(3):
        for rank in range(world_size):
            for micro in range(backwards(rank, world_size) if step == 1 else 1):
                (loss_of(model, step, rank, micro) / world_size).backward()
        if step == 1:
            gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {name: p.detach() for name, p in model.named_parameters()}


class Looking:
    """What a look-up is given: a rank in the midst of its second step, and what it should see."""

    def __init__(self, model: Model, optimizer: LowLevelZeroOptimizer, gradients: Gradients, rank: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.gradients = gradients
        self.rank = rank
        self.whole = dict(model.named_parameters())

    def check_whole(self, name: str, got: Tensor | None) -> None:
        expected = self.gradients[name]
        assert (got is None) == (expected is None), name
        if got is not None and expected is not None:
            torch.testing.assert_close(got.float(), expected, rtol=1e-5, atol=1e-6)

    def check_own(self, name: str, got: Tensor | None, rank: int | None = None) -> None:
        expected = self.gradients[name]
        assert (got is None) == (expected is None), name
        if got is not None and expected is not None:
            size = len(got)
            own = expected.flatten()[size * (rank if rank is not None else self.rank) :][:size]
            torch.testing.assert_close(got[: len(own)].float(), own, rtol=1e-5, atol=1e-6)


def by_id(it: Looking) -> None:
    for name, p in it.whole.items():
        it.check_own(name, it.optimizer.get_working_grad_by_param_id(id(p)))


def partitioned(it: Looking) -> None:
    for name, p in it.whole.items():
        slices = it.optimizer.get_partitioned_gradients_by_param_id(0, id(p))
        assert (not slices) == (it.gradients[name] is None)
        for rank, own in enumerate(slices):
            it.check_own(name, own, it.rank if len(slices) == 1 else rank)


def full_gradients(it: Looking) -> None:
    for name, gradient in full_grads(it.model).items():
        it.check_whole(name, gradient)
        it.check_whole(name, safe_get_full_grad(it.whole[name]))
        it.check_own(name, safe_get_local_grad(it.whole[name]))


def set_gradients(it: Looking) -> None:
    for name, p in it.whole.items():
        gradient = it.gradients[name]
        if gradient is not None:
            safe_set_full_grad(p, gradient)
            own = safe_get_local_grad(p)
            assert own is not None
            safe_set_local_grad(p, own)


def masters(it: Looking) -> None:
    for name, value in full_fp32_params(it.model).items():
        assert value is not None
        torch.testing.assert_close(value, safe_get_full_fp32_param(it.whole[name]), rtol=0, atol=0)
        torch.testing.assert_close(value.to(it.whole[name].dtype), it.whole[name].detach(), rtol=0, atol=0)


def set_masters(it: Looking) -> None:
    for p in it.whole.values():
        safe_set_full_fp32_param(p, safe_get_full_fp32_param(p))
        safe_set_local_fp32_param(p, safe_get_local_fp32_param(p))


def states(it: Looking) -> None:
    for name, value in full_optimizer_states(it.model, "momentum_buffer").items():
        again = safe_get_full_optimizer_state(it.whole[name], "momentum_buffer")
        assert (value is None) == (again is None)
        if value is not None and again is not None:
            assert torch.equal(value, again)
            safe_set_full_optimizer_state(it.whole[name], value, "momentum_buffer")


def state_dict(it: Looking) -> None:
    whole = it.optimizer.state_dict()["state"]
    pieces = {place: state for piece, _ in it.optimizer.state_dict_shard(1) for place, state in piece.items()}
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[at]["momentum_buffer"], pieces[at]["momentum_buffer"]) for at in whole)


def sharded_state(it: Looking) -> None:
    Sharded(it.optimizer).state_dict()


def saved(it: Looking) -> None:
    save_checkpoint(Path("checkpoint"), it.model, it.optimizer)


def local(it: Looking) -> None:
    """One rank may call what doesn't communicate, while the others go on to their step."""
    if it.rank > 0:
        return
    optimizer = it.optimizer
    assert optimizer.get_grad_norm() is not None
    assert optimizer.loss_scale == 1.0
    assert len(optimizer.working_to_master_param) == len(optimizer.master_to_working_param) == len(it.whole)
    assert len(optimizer.get_working_to_master_map()) == len(optimizer.get_master_to_working_map())
    assert len(optimizer.get_param_padding_map()) == len(it.whole)
    assert optimizer.get_param_padding_size(it.model.one) >= 0
    assert optimizer.memory_held()["parameters"] > 0
    assert len(optimizer.layout().parameters) == len(it.whole)
    assert optimizer.traffic()["reduce"] > 0
    assert optimizer.unwrap() is optimizer.optim
    for p in it.whole.values():
        safe_get_local_fp32_param(p)
        safe_get_local_optimizer_state(p, "momentum_buffer")


LOOKS: dict[str, Callable[[Looking], None]] = {
    "get_working_grad_by_param_id": by_id,
    "get_partitioned_gradients_by_param_id": partitioned,
    "accessors: gradients": full_gradients,
    "accessors: gradients are set": set_gradients,
    "accessors: masters": masters,
    "accessors: masters are set": set_masters,
    "accessors: states": states,
    "state_dict": state_dict,
    "Sharded": sharded_state,
    "save_checkpoint": saved,
    "what doesn't communicate": local,
}


def train(rank: int, world_size: int, look: str, uneven: str, driven: bool, options: dict[str, Any]) -> None:
    """Three steps, the second of which is uneven; a ``driven`` first one shows that a parameter is used seldom."""
    backwards = BACKWARDS[uneven]
    gradients, expected = alone(world_size, backwards)
    model, inner = build(rank)
    optimizer = LowLevelZeroOptimizer(inner, model=model, reduce_bucket_size=20, **options)
    for step in range(3):
        for micro in range(backwards(rank, world_size) if step == 1 else 1):
            if step == 0 and driven:
                optimizer.backward(loss_of(model, step, rank, micro))
            else:
                loss_of(model, step, rank, micro).backward()
        if step == 1:
            LOOKS[look](Looking(model, optimizer, gradients, rank))
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-5, atol=1e-6, msg=f"{look}, {uneven}: {name}")


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "shared memory": (3, "1", {"partition_grad": True, "overlap_allgather": True}),
    "messages": (2, "0", {"cpu_offload": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_plain_backwards_of_unequal_number(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look meets another number of backwards in each case."""
    world_size, shared, options = CASES[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", shared)

    def work(rank: int, world_size: int) -> None:
        for at, look in enumerate(LOOKS, start=world_size):
            train(rank, world_size, look, list(BACKWARDS)[at % 3], at % 2 == 0, options)

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
