"""On a GPU: whole parameters, checkpoints, gradients in hand, edits between steps, and what ranks may do wrong.

Collected where there is a GPU (see ``conftest.py``). Ranks are forked, so nothing may have touched the device before:
run it in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import load_checkpoint, save_checkpoint
from tests.gpu.places import DEVICE, EXTRAS, over_gloo, over_nccl
from tests.support.checkpoints import AFTER, BEFORE, Pair, Training, differences
from tests.support.numbers import STAGES
from tests.support.oracle import adamw, momentum


class Net(nn.Sequential):
    def __init__(self, width: int = 6) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, width), nn.Tanh(), nn.Linear(width, 3))
        self.to(DEVICE)


def loss_of(model: nn.Module, ranks: range, at: int) -> Tensor:
    """Of the batches of ``ranks`` at one step; all are of the same size."""
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * at + rank)) for rank in ranks]
    loss: Tensor = model(torch.cat(batches).to(next(model.parameters()))).square().mean()
    return loss


def values(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *states)]


# ---- whole parameters ----


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("stage", STAGES)
def test_muon_by_owners_is_one_process_s(stage: str, extra: str) -> None:
    """In fp64, where no sum over the ranks tips the rounding to bf16 that Muon does itself, on the same device."""
    steps_on = "cpu" if extra == "cpu_offload" else DEVICE

    def matrices() -> nn.Module:
        model = Net().double()
        for p in model.parameters():
            p.requires_grad_(p.dim() == 2)
        return model

    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=0.02)

    def work(rank: int, world_size: int) -> None:
        alone, model = matrices().to(steps_on), matrices()
        plain = muon(alone)
        optimizer = LowLevelZeroOptimizer(muon(model), model=model, **STAGES[stage], **EXTRAS[extra])
        for at in range(4):
            loss_of(alone, range(world_size), at).backward()
            plain.step()
            plain.zero_grad()
            optimizer.backward(loss_of(model, range(rank, rank + 1), at))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.verify()
        expected = [p.to(DEVICE) for p in alone.parameters()]
        torch.testing.assert_close(list(model.parameters()), expected, rtol=0, atol=1e-6)

    over_gloo(2, work)
    over_nccl(work)


# ---- checkpoints ----


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_two(
    dtype: torch.dtype, extra: str, tmp_path: Path
) -> None:
    training = Training(2, dtype, options=EXTRAS[extra])

    def on_device(seed: int) -> Pair:
        with torch.device(DEVICE):
            pair = training.start(seed)
        assert all(p.device.type == DEVICE for p in pair.model.parameters())
        return pair

    def train(pair: Pair, steps: range, rank: int, world_size: int) -> None:
        """On batches of the host."""
        hooks = (
            pair.model.register_forward_pre_hook(lambda _, args: (args[0].to(DEVICE), *args[1:])),
            pair.model.register_forward_hook(lambda _, args, out: out.cpu()),
        )
        pair.train(steps, rank, world_size)
        for hook in hooks:
            hook.remove()

    def save(rank: int, world_size: int) -> None:
        pair = on_device(seed=0)
        train(pair, BEFORE, rank, world_size)
        saving = save_checkpoint(tmp_path / "at", pair.model, pair.optimizer, async_save=True)
        at_save = pair.whole()
        train(pair, AFTER, rank, world_size)  # meanwhile
        saving.wait()
        if rank == 0:
            torch.save((at_save, pair.whole()), tmp_path / "whole.pt")
        else:
            pair.whole()

    def load(rank: int, world_size: int) -> None:
        pair = on_device(seed=5 + rank)
        load_checkpoint(tmp_path / "at", pair.model, pair.optimizer)
        at_save, later = torch.load(tmp_path / "whole.pt", weights_only=False)
        assert differences(at_save, pair.whole()) == []
        train(pair, AFTER, rank, world_size)
        if world_size == 2:  # a sum of two is the same in any order
            assert differences(later, pair.whole()) == []
        elif dtype == torch.float32:
            assert differences(later, pair.whole(), 5e-6) == []

    over_gloo(2, save)
    over_gloo(2, load)
    over_nccl(load)


# ---- gradients in hand, and edits between steps ----


def gradients_in_hand(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.isfinite().all()
        assert not p.grad.isnan().any()
        assert p.grad.abs().max() > 0
        kept = p.grad.clone()
        p.grad.mul_(2.0).add_(kept, alpha=-1.0)


def edits(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        model[2].bias.add_(0.25)


def frozen(model: Any) -> None:
    model[4].requires_grad_(not model[4].weight.requires_grad)


@pytest.mark.parametrize("between", [gradients_in_hand, edits, frozen], ids=lambda each: each.__name__)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("stage", STAGES)
def test_what_users_do_between_backward_and_step(stage: str, extra: str, between: Callable[[Any], None]) -> None:
    def work(rank: int, world_size: int) -> None:
        alone, model = Net(), Net()
        plain = momentum(alone.parameters())
        optimizer = LowLevelZeroOptimizer(momentum(model.parameters()), model=model, **STAGES[stage], **EXTRAS[extra])
        for at in range(4):
            loss_of(alone, range(world_size), at).backward()
            optimizer.backward(loss_of(model, range(rank, rank + 1), at))
            if between is gradients_in_hand:
                between(model)
            plain.step()
            optimizer.step()
            plain.zero_grad()
            optimizer.zero_grad()
            if between is not gradients_in_hand:
                between(alone)
                between(model)
        torch.testing.assert_close(list(model.parameters()), list(alone.parameters()), rtol=1e-5, atol=1e-6)
        optimizer.verify()

    over_gloo(2, work)
    over_nccl(work)


@pytest.mark.parametrize("fused", [False, True])
def test_a_rate_on_the_device_is_read_by_every_step(fused: bool) -> None:
    def work(rank: int, world_size: int) -> None:
        alone, model = Net(), Net()
        rates = [torch.tensor(1e-3, device=DEVICE) for _ in range(2)]
        plain = torch.optim.AdamW(alone.parameters(), lr=rates[0], fused=fused)
        inner = torch.optim.AdamW(model.parameters(), lr=rates[1], fused=fused)
        optimizer = LowLevelZeroOptimizer(inner, model=model, partition_grad=True)
        for at in range(4):
            loss_of(alone, range(world_size), at).backward()
            optimizer.backward(loss_of(model, range(rank, rank + 1), at))
            for stepped in (plain, optimizer):
                stepped.step()
                stepped.zero_grad()
            for rate in rates:
                rate.mul_(1.5)
        torch.testing.assert_close(list(model.parameters()), list(alone.parameters()), rtol=1e-4, atol=1e-5)

    over_gloo(2, work)
    over_nccl(work)


def test_trials_of_an_unknown_class_leave_the_device_s_random_numbers_alone() -> None:
    class Unknown(torch.optim.AdamW):
        pass

    def work(rank: int, world_size: int) -> None:
        model = Net()
        torch.cuda.manual_seed(5)
        before = torch.cuda.get_rng_state()
        LowLevelZeroOptimizer(Unknown(model.parameters(), capturable=True), model=model)
        assert torch.equal(torch.cuda.get_rng_state(), before)

    over_nccl(work)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_fp16_that_overflows_is_skipped(fused: bool, extra: str) -> None:
    def work(rank: int, world_size: int) -> None:
        model = Net().half()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused and extra != "cpu_offload")
        optimizer = LowLevelZeroOptimizer(inner, model=model, partition_grad=True, initial_scale=64.0, **EXTRAS[extra])
        x = torch.ones(4, 6, device=DEVICE, dtype=torch.float16)
        for at in range(4):
            before = [p.detach().clone() for p in model.parameters()]
            loss = model(x).square().mean()
            optimizer.backward(loss * float("inf") if at == 2 and rank == world_size - 1 else loss)
            optimizer.step()
            optimizer.zero_grad()
            changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
            assert any(changed) == (at != 2)
        assert all(p.isfinite().all() for p in model.parameters())
        optimizer.verify()

    over_gloo(2, work)
    over_nccl(work)


# ---- what ranks may do wrong ----


def another_rate(model: Any, optimizer: LowLevelZeroOptimizer, rank: int) -> None:
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank)


def other_weights(model: Any, optimizer: LowLevelZeroOptimizer, rank: int) -> None:
    if rank == 1:
        with torch.no_grad():
            model[2].bias.add_(1.0)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [(another_rate, "lr"), (other_weights, r"2\.bias")],
    ids=["another rate", "other weights"],
)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_differ_are_refused_by_name(stage: str, mistake: Callable[..., None], message: str) -> None:
    def work(rank: int, world_size: int) -> None:
        model = Net()
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model, **STAGES[stage])
        for at in range(2):
            optimizer.backward(loss_of(model, range(rank, rank + 1), at))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.backward(loss_of(model, range(rank, rank + 1), 2))
        mistake(model, optimizer, rank)
        before = values(model, optimizer)
        with pytest.raises((RuntimeError, ValueError), match=message):
            optimizer.step()
        assert all(map(torch.equal, values(model, optimizer), before))

    over_gloo(2, work)


def test_two_optimizers_reduce_at_once_on_one_communicator() -> None:
    def work(rank: int, world_size: int) -> None:
        alone, models = [Net(), Net()], [Net(), Net()]
        plain = [momentum(model.parameters()) for model in alone]
        optimizers = [
            LowLevelZeroOptimizer(momentum(model.parameters()), model=model, reduce_bucket_size=40, **STAGES[stage])
            for model, stage in zip(models, STAGES, strict=True)
        ]
        for at in range(4):
            for model in alone:
                loss_of(model, range(world_size), at).backward()
            losses = [loss_of(model, range(rank, rank + 1), at) for model in models]
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.backward(loss)
            for stepped in (*plain, *optimizers):
                stepped.step()
                stepped.zero_grad()
        for model, single in zip(models, alone, strict=True):
            torch.testing.assert_close(list(model.parameters()), list(single.parameters()), rtol=1e-5, atol=1e-6)

    over_gloo(2, work)
    over_nccl(work)
