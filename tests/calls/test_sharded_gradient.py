"""``p.grad`` after backward: what it is, what becomes of what is dropped, and uses that can't be right.

Those raise on every rank, tell their own cause, and change nothing.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import time
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.gradients.sharded_gradient import ShardedGradient
from tests.support.gradients import adamw, backward_alone, loss_at, net, sharded, steps_on
from tests.support.ranks import run_cases
from tests.support.several import check_all, told

RANKS = 3

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


def norms_are_the_caller_s(rank: int, world_size: int) -> None:
    """Who has added to what he was given gets the same norms again."""
    model, optimizer = sharded(rank)
    gradients: Any = [p.grad for p in model.parameters()]
    expected = [g.clone().norm() for g in gradients]
    for _ in range(2):
        norms = [g.norm() for g in gradients]
        torch.testing.assert_close(norms, expected)
        norms[0] += norms[1]
        norms = torch._foreach_norm([*gradients, gradients[0]])
        torch.testing.assert_close([*norms], [*expected, expected[0]])
        torch._foreach_zero_(norms[:1])
        torch.testing.assert_close(norms[-1], expected[0])
    optimizer.step()


def norms_of_each_order_follow_edits(rank: int, world_size: int) -> None:
    model, optimizer = sharded(rank)
    gradients: Any = [p.grad for p in model.parameters()]
    for _ in range(2):
        for order, gradient in product((1.0, 2.0, float("inf")), gradients):
            torch.testing.assert_close(gradient.norm(order), gradient.clone().norm(order))
        torch._foreach_mul_(gradients, 0.5)
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
    inner.step()  # nothing has gradients, and nobody else steps it
    second = LowLevelZeroOptimizer(adamw(model.parameters()), model=model)
    second.backward(loss_at(model, 0, rank))
    second.step()


# ---- what is dropped ----


def old_gradients(rank: int, world_size: int) -> None:
    """A step of what a backward has added to what was stepped is told of, once; after any kind of clearing none is."""
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
        assert [line.endswith("was called: call it in each step") for line in lines] == [True] * (rank == 0)


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


def after_synchronize(rank: int, world_size: int) -> None:
    model, optimizer = sharded(rank)
    optimizer.synchronize()
    before = model[0].weight.grad.clone()  # type: ignore[union-attr]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(model[0].weight.grad.clone(), before * 1e-3 / norm)  # type: ignore[union-attr]
    with optimizer.skip_synchronize():
        optimizer.step()
    steps_on(model, optimizer, rank, 3)


# ---- one message for each cause ----

MEMORY = r"0.weight: expected a tensor with memory, .* of p.grad.*full_tensor\(\).*copy_"
NO_POINTER = r"[Cc]annot access data pointer"
COPIES = r"0.weight: expected a plain tensor to save, pickle or copy.*full_tensor\(\)"
DATA = r"0.weight: expected p.grad.copy_\(tensor\), got p.grad.data = tensor"
SHAPE_KEPT = r"0.weight: expected p.grad to keep its shape and memory, got .*clone\(\)"
COLLECTIVE = r"0.weight: expected no collective on p.grad, which is averaged .* already, got "
SHAPE = r"0.weight: expected a tensor that fits p.grad, \(5, 3\), got "


def set_data(g: Any, value: Tensor) -> None:
    g.data = value


def save(g: Any) -> None:
    torch.save([g], io.BytesIO())


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "data_ptr": (lambda g: g.data_ptr(), MEMORY),
    "storage": (lambda g: g.storage(), MEMORY),
    "from_dlpack": (lambda g: torch.from_dlpack(g), MEMORY),
    "to_dlpack": (lambda g: torch.utils.dlpack.to_dlpack(g), NO_POINTER),  # type: ignore[attr-defined]
    "pickle": (pickle.dumps, COPIES),
    "save": (save, COPIES),
    "copy": (copy.copy, COPIES),
    "data": (lambda g: set_data(g, torch.ones(5, 3)), DATA),
    "vector_to_parameters": (lambda g: torch.nn.utils.vector_to_parameters(torch.ones(15), [g]), DATA),
    "resize_": (lambda g: g.resize_(15), SHAPE_KEPT),
    "set_": (lambda g: g.set_(torch.ones(5, 3)), SHAPE_KEPT),
    "all_reduce": (lambda g: dist.all_reduce(g), COLLECTIVE + "allreduce_"),
    "all_gather": (
        lambda g: dist.all_gather([torch.empty(5, 3) for _ in range(dist.get_world_size())], g),
        COLLECTIVE + "allgather_",
    ),
    "functional all_reduce": (lambda g: functional.all_reduce(g, "sum", dist.group.WORLD), COLLECTIVE + "all_reduce"),
    "all_gather_object": (lambda g: dist.all_gather_object([None] * dist.get_world_size(), g), COPIES),
    "add_ of another shape": (lambda g: g.add_(torch.ones(3, 5)), SHAPE),
    "copy_ of another shape": (lambda g: g.copy_(torch.ones(15)), SHAPE),
    "_foreach_add_ of another shape": (lambda g: torch._foreach_add_([g], [torch.ones(2)]), SHAPE),
    "out of another shape": (lambda g: torch.add(torch.ones(2, 2), 1, out=g), ""),  # torch warns, or raises
}


def refused(rank: int, world_size: int, name: str) -> None:
    call, pattern = REFUSED[name]
    model, optimizer = sharded(rank, partition_grad=True)
    gradient: Any = model[0].weight.grad
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with torch.no_grad(), pytest.raises((RuntimeError, UserWarning)) as caught:
        call(gradient)
    assert re.search(pattern, str(caught.value)), caught.value
    assert model[0].weight.grad is gradient
    for p, value in zip(model.parameters(), before, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad.clone(), value)
    steps_on(model, optimizer, rank, world_size)


def test_each_wrong_use_is_told_its_own_cause_and_changes_nothing(subtests: pytest.Subtests) -> None:
    for (name,), ran in run_cases(refused, RANKS, [(name,) for name in REFUSED], one_group=True):
        with subtests.test(name):
            ran.values()


# ---- uses that take more than one call ----


def a_slice_is_read(rank: int, world_size: int) -> None:
    """Norms of slices in ``param_groups`` are those of the whole; reads and edits are of this rank's elements."""
    model, optimizer = sharded(rank)
    own: Any = optimizer.param_groups[0]["params"][0].grad
    stop = min(15 - rank * len(own), len(own))
    whole = model[0].weight.grad.clone().flatten()  # type: ignore[union-attr]
    expected = whole[rank * len(own) :][:stop]
    assert own.isfinite().all()
    for read in (own.clone(), torch.zeros(own.shape).add_(own), own * 1, own[:], own.detach(), torch.cat([own])):
        torch.testing.assert_close(read.clone()[:stop], expected)
    assert own[:stop].sum().item() == pytest.approx(expected.sum().item())
    own[:1].zero_()
    own[0] += expected[0]
    torch.testing.assert_close(own.norm(), model[0].weight.grad.norm())  # type: ignore[union-attr]
    local = own.to_local()
    own.add_(torch.ones_like(local), alpha=0.5).neg_().data.mul_(2.0)
    torch._foreach_add_([own], 0.25)
    torch.testing.assert_close(own.to_local()[:stop], (-2 * (local + 0.5) + 0.25)[:stop])
    steps_on(model, optimizer, rank, world_size)


def a_handle_is_kept(rank: int, world_size: int) -> None:
    """It would tell of another step's gradient: it refuses, whichever way its own was cleared."""
    model, optimizer = sharded(rank)

    def drop() -> None:
        model[0].weight.grad = None

    clears = (optimizer.zero_grad, model.zero_grad, drop)
    for clear in clears:
        kept: Any = model[0].weight.grad
        slice_of: Any = optimizer.param_groups[0]["params"][0].grad
        detached, view = kept.detach(), kept.view(-1)
        clear()
        for again in (False, True):
            if again:
                optimizer.backward(loss_at(model, 1, rank))
                assert model[0].weight.grad is not kept
            for use in (kept.norm, kept.zero_, kept.clone, kept.detach, view.sum, slice_of.zero_, detached.neg_):
                if again or clear is optimizer.zero_grad or use is kept.norm:  # others clear at the next call
                    with pytest.raises(RuntimeError, match=r"0.weight: .*p.grad of the present step, got one that was"):
                        use()
        steps_on(model, optimizer, rank, world_size)
        optimizer.zero_grad()
        optimizer.backward(loss_at(model, 0, rank))


def a_handle_is_read_that_was_cleared(rank: int, world_size: int) -> None:
    """What reads it finds that out only when all reductions are finished."""
    model, optimizer = sharded(rank)
    for read in (ShardedGradient.to_local, ShardedGradient.full_tensor):
        kept: Any = model[0].weight.grad
        model[0].weight.grad = None
        with pytest.raises(RuntimeError, match=r"0.weight: .*p.grad of the present step, got one that was"):
            read(kept)
        optimizer.zero_grad()
        optimizer.backward(loss_at(model, 0, rank))


def nobody_keeps_a_handle(rank: int, world_size: int) -> None:
    """The same one is shown again, since making another takes time; a history of autograd's isn't kept with it."""
    model, optimizer = sharded(rank)
    weight: Any = model[0].weight
    first = id(weight.grad)
    for _ in range(3):
        weight.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.backward(loss_at(model, 0, rank))
        assert id(weight.grad) == first
    weight.grad.add_(weight, alpha=0.1)
    assert weight.grad.requires_grad
    gone = weakref.ref(weight.grad)
    optimizer.step()
    gc.disable()
    try:
        optimizer.zero_grad()
        assert gone() is None
    finally:
        gc.enable()
    optimizer.backward(loss_at(model, 0, rank))
    assert not weight.grad.requires_grad


def detached_values(rank: int, world_size: int) -> None:
    """``detach()`` keeps the values that it was taken with, over edits and steps; what is written to it is edited."""
    for options in ({"partition_grad": True}, {"clip_grad_norm": 0.01}, {"cpu_offload": True}):
        model, optimizer = sharded(rank, **options)
        weight: Any = model[0].weight
        whole = weight.grad.full_tensor()
        kept, data = weight.grad.detach(), weight.grad.data
        kept.mul_(2)
        assert torch.equal(weight.grad.full_tensor(), 2 * whole)
        assert torch.equal(kept.clone(), 2 * whole)
        assert torch.equal(data.clone(), whole)
        data.view(-1)[4:].zero_()
        assert torch.equal(weight.grad.flatten()[:4] + 0, 2 * whole.flatten()[:4])
        assert not weight.grad.flatten()[4:].any()
        optimizer.step()
        optimizer.zero_grad()
        for step in (1, 2):
            optimizer.backward(loss_at(model, step, rank))
            assert torch.equal(kept + 0, 2 * whole)
            torch.testing.assert_close(kept.norm(), 2 * whole.norm())
            assert torch.equal(torch.cat([kept.flatten()]), 2 * whole.flatten())
            assert torch.equal(kept.detach().full_tensor(), 2 * whole)
            assert bool(kept.isfinite().all())
        optimizer.step()


def detached_values_after_a_later_backward(rank: int, world_size: int) -> None:
    """The ranks make the same calls, whether a reduction has ended on one of them or not."""
    model, optimizer = sharded(rank)
    weight: Any = model[0].weight

    def under_no_sync() -> None:
        with optimizer.no_sync():
            optimizer.backward(loss_at(model, 1, rank))

    def assigned_to_a_slice() -> None:
        optimizer.param_groups[0]["params"][0].grad = torch.ones_like(optimizer.param_groups[0]["params"][0])

    later: list[Callable[[], None]] = [
        under_no_sync,
        assigned_to_a_slice,
        lambda: optimizer.backward(loss_at(model, 1, rank)),
        lambda: loss_at(model, 1, rank).backward(),
    ]
    for run in later:
        kept, whole = weight.grad.detach(), weight.grad.clone()
        if rank:
            time.sleep(0.05)  # the first rank has begun to read by then, without its sum
        run()
        assert torch.equal(kept.clone(), whole)
        torch.testing.assert_close(kept.norm(), whole.norm())
        assert not torch.equal(weight.grad.clone(), whole)
        optimizer.zero_grad()
        optimizer.backward(loss_at(model, 0, rank))
    kept, whole = weight.grad.detach(), weight.grad.clone()
    if rank == 0:
        loss_at(model, 1, rank).backward()
    assert torch.equal(kept.clone(), whole)


def in_a_hook(rank: int, world_size: int) -> None:
    """A hook that runs behind the reduction's start would edit what is reduced later, or nothing."""
    uses: tuple[Callable[[Any], Any], ...] = (lambda p: p.grad.mul_(0.5), lambda p: p.grad.norm())
    for use in uses:
        model = net()
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model, reduce_bucket_size=1)
        hook = model[2].bias.register_post_accumulate_grad_hook(use)
        for backward in (optimizer.backward, Tensor.backward):
            with pytest.raises(RuntimeError, match=r"2.bias: expected p.grad to be left alone within a backward, got"):
                backward(loss_at(model, 0, rank))  # type: ignore[operator]
            optimizer.zero_grad()
        hook.remove()
        steps_on(model, optimizer, rank, world_size)


def within_ddp(rank: int, world_size: int) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}):
        model = net()
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model)
        wrapped = DistributedDataParallel(model, **options)  # type: ignore[arg-type]
        with pytest.raises(
            RuntimeError, match=r"0.weight: .*DistributedDataParallel: leave that wrapper out, and run the plain"
        ):
            optimizer.backward(loss_at(wrapped, 0, rank))
        optimizer.zero_grad()
        del wrapped


def by_hand(rank: int, world_size: int) -> None:
    model, optimizer = sharded(rank)
    weight: Any = model[0].weight
    for value in (torch.ones(5, 3), weight.grad.detach()):
        weight.grad = value
        for call in (optimizer.step, loss_at(model, 1, rank).backward):
            if call == optimizer.step or isinstance(value, ShardedGradient):  # a backward adds to a plain one
                with pytest.raises(RuntimeError, match=r"0.weight: .* another tensor .*: .*p.grad.copy_\(tensor\)"):
                    call()
        optimizer.zero_grad()
        optimizer.backward(loss_at(model, 0, rank))
    steps_on(model, optimizer, rank, world_size)


def slices_before_a_backward(rank: int, world_size: int) -> None:
    """A tensor assigned to a slice is not to be added to, nor a gradient that slices' None should have dropped."""
    model, optimizer = sharded(rank)
    slices = optimizer.param_groups[0]["params"]

    def plain() -> None:
        loss_at(model, 1, rank).backward()

    def own() -> None:
        optimizer.backward(loss_at(model, 1, rank))

    for call, value, how in ((plain, 1.0, "assigned"), (own, 1.0, "assigned"), (plain, None, "set to None")):
        for p32 in slices:
            p32.grad = None if value is None else torch.full_like(p32, value)
        with pytest.raises(RuntimeError, match=rf"expected .grad of its slice .* {how} before .*zero_grad"):
            call()
        optimizer.zero_grad()
        optimizer.backward(loss_at(model, 0, rank))
    steps_on(model, optimizer, rank, world_size)


USES = [
    looks,
    one_collective,
    norms_are_the_caller_s,
    norms_of_each_order_follow_edits,
    copies,
    the_optimizer_goes,
    old_gradients,
    a_grad_scaler,
    after_synchronize,
    slices_before_a_backward,
    a_slice_is_read,
    a_handle_is_kept,
    a_handle_is_read_that_was_cleared,
    nobody_keeps_a_handle,
    detached_values,
    detached_values_after_a_later_backward,
    in_a_hook,
    within_ddp,
    by_hand,
]


def test_gradients_after_backward(subtests: pytest.Subtests) -> None:
    check_all(USES, RANKS, subtests, one_group=True)
