"""Several models and optimizers of one ``ZeroAccelerator``: which of them stay, are reduced and are saved."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping.sharded_parameter import Handle
from lowlevel_zero.deepspeed import safe_get_full_grad
from lowlevel_zero.trainers.accelerate import ZeroAccelerator
from tests.support.ranks import run_ranks
from tests.support.trainers import adamw, launched


def prepared_with_others_frozen(rank: int, world_size: int) -> None:
    """The second optimizer has what the first one trains, frozen: both are reduced and saved, until one retires."""
    with launched(rank, world_size):
        accelerator, model = ZeroAccelerator(cpu=True), nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        model = accelerator.prepare(model)
        first = accelerator.prepare(adamw(model[0].parameters()))
        model[0].requires_grad_(False)
        second = accelerator.prepare(adamw(model.parameters()))
        assert accelerator._optimizers == [first, second]
        assert not first.optimizer.is_retired
        other = LowLevelZeroOptimizer(adamw(model[1].parameters()), model=model)  # which nobody has told accelerate of
        third = accelerator.prepare(adamw(model[1].parameters()))
        assert accelerator._optimizers == [first, third]
        assert other.is_retired


def test_an_optimizer_stays_where_another_has_its_parameters_frozen() -> None:
    run_ranks(prepared_with_others_frozen, 2)


def one_is_paused(rank: int, world_size: int) -> None:
    with launched(rank, world_size):
        accelerator = ZeroAccelerator(cpu=True)
        models = accelerator.prepare(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizers = accelerator.prepare(*(adamw(model.parameters()) for model in models))
        with accelerator.no_sync(models[0]):
            accelerator.backward(sum(model(torch.full((1, 3), rank + 1.0)).sum() for model in models))
        paused, other = models
        assert type(paused.weight.grad) is Tensor
        assert isinstance(other.weight.grad, Handle)  # which has been reduced
        assert torch.equal(paused.weight.grad, torch.full((3, 3), rank + 1.0))
        assert torch.equal(safe_get_full_grad(other.weight), torch.full((3, 3), 1.5))
        assert len(optimizers) == 2


def test_a_pause_of_one_model_is_none_of_another() -> None:
    run_ranks(one_is_paused, 2)
