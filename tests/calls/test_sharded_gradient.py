"""``p.grad`` after backward: what it is, what may be done with it, and what becomes of what is dropped."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.gradients.sharded_gradient import ShardedGradient
from tests.support.gradients import adamw, backward_alone, loss_at, net, sharded, steps_on
from tests.support.several import check_all, told

# ---- what it is ----


def looks(rank: int, world_size: int) -> None:
    model, _ = sharded(rank)
    alone = net()
    backward_alone(alone, 0, world_size)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        gradient = p.grad
        assert isinstance(gradient, ShardedGradient)
        assert isinstance(gradient, Tensor)
        assert (gradient.shape, gradient.dtype, gradient.device) == (p.shape, p.dtype, p.device)
        assert not gradient.requires_grad
        assert q.grad is not None
        torch.testing.assert_close(gradient.full_tensor(), q.grad)
        torch.testing.assert_close(gradient.norm(), q.grad.norm())
        torch.testing.assert_close(gradient.data.norm(1), q.grad.norm(1))
        torch.testing.assert_close(gradient.detach().norm(float("inf")), q.grad.norm(float("inf")))
        torch.testing.assert_close(
            torch.linalg.vector_norm(gradient, dtype=torch.float64), torch.linalg.vector_norm(q.grad.double())
        )
        own = gradient.to_local()
        size = -(-p.numel() // world_size)
        padded = torch.cat([q.grad.reshape(-1), torch.zeros(size * world_size - p.numel())])
        torch.testing.assert_close(own, padded[rank * size : (rank + 1) * size])
        assert "full_tensor" in repr(gradient)


def one_collective(rank: int, world_size: int) -> None:
    """However many gradients are asked for their norms, until one changes."""
    model, optimizer = sharded(rank)
    began: list[str] = []
    gather = ShardGroup.all_gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardGroup, "all_gather", lambda *args: (began.append("gather"), gather(*args))[1])
        for p in [*model.parameters()] * 3:
            assert p.grad is not None
            p.grad.norm()
        assert len(began) == 1
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert len(began) == 1
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert len(began) == 2
    optimizer.step()


def copies(rank: int, world_size: int) -> None:
    """Models are copied, saved, and averaged as they are."""
    model, optimizer = sharded(rank)
    copied = copy.deepcopy(model)
    assert all(p.grad is None for p in copied.parameters())
    ema = AveragedModel(model)
    ema.update_parameters(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    unpickled = pickle.loads(pickle.dumps(model))
    for each in (copied, loaded, unpickled, ema.module):
        for p, q in zip(each.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)
    assert all(not isinstance(value, ShardedGradient) for value in model.state_dict().values())
    assert all(each.grad is None for each in copy.deepcopy(optimizer.param_groups[0]["params"]))
    model.to("cpu")
    model.requires_grad_(True)
    model.train()
    optimizer.step()
    steps_on(model, optimizer, rank, world_size)


def the_optimizer_goes(rank: int, world_size: int) -> None:
    """By itself, without the garbage collector, and takes its gradients along."""
    model, optimizer = sharded(rank)
    kept: Any = model[0].weight.grad
    inner, gone = optimizer.optim, weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    assert all(p.grad is None for p in model.parameters())
    assert all(p32.grad is None for group in inner.param_groups for p32 in group["params"])
    with pytest.raises(RuntimeError, match=r"0.weight: expected the optimizer .* which is gone"):
        kept.norm()
    second = LowLevelZeroOptimizer(adamw(model.parameters()), model=model)
    second.backward(loss_at(model, 0, rank))
    second.step()


# ---- what is dropped ----


def old_gradients(rank: int, world_size: int) -> None:
    """A backward that adds to what was stepped is told of, once; one after any kind of clearing isn't."""
    model, optimizer = sharded(rank)
    clears: list[Callable[[], None]] = [
        optimizer.zero_grad,
        model.zero_grad,
        lambda: model.zero_grad(set_to_none=False),
        lambda: optimizer.zero_grad(set_to_none=False),
        optimizer.optim.zero_grad,
    ]
    with told() as lines:
        for clear in clears:
            optimizer.step()
            clear()
            optimizer.backward(loss_at(model, 1, rank))
        assert not lines
        for _ in range(2):
            optimizer.step()
            optimizer.backward(loss_at(model, 1, rank))
        assert [line.endswith("call optimizer.zero_grad() after each step") for line in lines] == [True] * (rank == 0)


# ---- what is refused ----


def a_grad_scaler(rank: int, world_size: int) -> None:
    """Asking what an optimizer supports isn't using it; a scaler that is used is refused, before anything changes."""
    model, optimizer = sharded(rank)
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is False
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(
            RuntimeError, match=r"no enabled torch.amp.GradScaler.* to fp16 and call optimizer.backward\(loss\)"
        ):
            call(optimizer)
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(loss_at(model, 1, rank)).backward()
    off.unscale_(optimizer)
    off.step(optimizer)
    off.update()
    steps_on(model, optimizer, rank, world_size)


def dropped_on_one_rank(rank: int, world_size: int) -> None:
    """All are told, at the next call; and again when it is all gradients of one rank."""
    model, optimizer = sharded(rank)
    for clear in (lambda: setattr(model[0].weight, "grad", None), model.zero_grad):
        if rank == world_size - 1:
            clear()
        with pytest.raises(RuntimeError, match=r"set to None for the same parameters on every rank.*0.weight"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.backward(loss_at(model, 0, rank))
    optimizer.step()
    if rank == 0:
        model.zero_grad()
    optimizer.backward(loss_at(model, 1, rank))
    with pytest.raises(RuntimeError, match=r"set to None for the same parameters on every rank|zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(loss_at(model, 0, rank))
    optimizer.step()


def clipped_where_one_rank_lacks_all(rank: int, world_size: int) -> None:
    """Torch's function finds no gradients there, and the rank goes on to the step."""
    model = net()
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model)
    if rank > 0:
        loss_at(model, 0, rank).backward()

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"the same call on every rank.*lowlevel_zero.clip_grad_norm_"):
        clip_and_step()
    steps_on(model, optimizer, rank, world_size)


def after_synchronize(rank: int, world_size: int) -> None:
    model, optimizer = sharded(rank)
    optimizer.synchronize()
    before = model[0].weight.grad.clone()  # type: ignore[union-attr]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(model[0].weight.grad.clone(), before * 1e-3 / norm)  # type: ignore[union-attr]
    with optimizer.skip_synchronize():
        optimizer.step()
    steps_on(model, optimizer, rank, 3)


USES = [
    looks,
    one_collective,
    copies,
    the_optimizer_goes,
    old_gradients,
    a_grad_scaler,
    after_synchronize,
    dropped_on_one_rank,
    clipped_where_one_rank_lacks_all,
]


def test_gradients_after_backward(subtests: pytest.Subtests) -> None:
    check_all(USES, 3, subtests, one_group=True)
