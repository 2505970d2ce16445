"""A test for users: whether an optimizer of their own trains over several ranks as in one process."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, start_processes
from torch.optim import Optimizer

from .layout import memory_held, traffic_of
from .optimizer import LowLevelZeroOptimizer
from .partition import BY_ELEMENTS

MakeModel: TypeAlias = Callable[[], nn.Module]
MakeOptimizer: TypeAlias = Callable[[nn.Module], Optimizer]
# The loss of one rank's share of a step: ``loss(model, step, rank)``.
Loss: TypeAlias = Callable[[nn.Module, int, int], Tensor]


class Alike(NamedTuple):
    """The result of comparing an optimizer over several ranks with one process.

    Attributes:
        splits: how the ranks share the parameters of each param group, "elements", "parameters" or "matrices".
        difference: the largest difference of an element, as a share of the longest way that an element of its parameter
            has gone; 0: all bits are the same.
        where: the parameter that has it.
        sent: bytes of bucket buffers that a rank sends in a step, as the mean over the ranks.
        states: bytes of the optimizer's state on each rank.
    """

    splits: tuple[str, ...]
    difference: float
    where: str
    sent: float
    states: tuple[int, ...]


def assert_trains_alike(
    make_optimizer: MakeOptimizer,
    make_model: MakeModel,
    steps: int = 6,
    *,
    tolerance: float = 1e-5,
    loss: Loss | None = None,
    world_size: int = 2,
    **options: Any,
) -> Alike:
    """Train over several ranks and in one process; raise ``AssertionError`` if parameters differ by over ``tolerance``.

    The reference is a plain optimizer in one process, on the mean of the ranks' gradients, clipped to the option
    ``clip_grad_norm``. In some steps some ranks, or
    all, leave parameters out. Half of the way state dict and weights go to a new optimizer and model, of the reference
    too: what a class leaves out of its own state dict is lost on both sides.

    Of bf16 parameters it steps fp32 copies, as the ranks do unless ``master_weights=False``. What the ranks have then
    may differ from these copies by the rounding to bf16.

    All ranks of the default process group take part where there is one, or where torchrun has started them. Otherwise
    processes are forked for it, on the CPU. Sums of two fp32 gradients have the bits of one process's.

    Args:
        make_optimizer: returns an optimizer over the parameters of a model.
        make_model: returns the model; it is called several times, with the same random seed.
        steps: steps to compare, at least 1.
        tolerance: the largest difference, as a share of a parameter's way.
        loss: returns the loss of a rank's share of a step; None: random gradients, which also depend on the weights.
        world_size: processes to fork, where there are no ranks yet.
        options: further arguments of ``LowLevelZeroOptimizer``.

    Raises:
        AssertionError: a parameter differs by more, or differs between ranks.
        TypeError, ValueError: the optimizer is refused, ``steps`` is less than 1, or there are fp16 parameters, whose
            loss scale no plain optimizer has.
    """
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, got {steps}: without a step nothing is compared")

    compare = partial(_compare, make_optimizer, make_model, steps, tolerance, loss or random_loss, options)
    if dist.is_initialized():
        return compare()
    if {"MASTER_PORT", "RANK"} <= os.environ.keys():  # which torchrun sets
        dist.init_process_group("gloo")
        try:
            return compare()
        finally:
            dist.destroy_process_group()
    return _forked(compare, world_size)


def random_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return a loss with random gradients that depend on step and rank; some parameters have none."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    total = torch.zeros((), device=next(model.parameters()).device)
    for place, p in enumerate(p for p in model.parameters() if p.requires_grad):
        direction = torch.randn(p.shape, generator=generator, device="cpu").to(p)
        everybody, alone = (step + place) % 5 == 4, (step + 2 * place + rank) % 3 == 0
        if not (everybody or alone):
            total = total + (p * direction).sum() + 0.05 * p.square().sum()
    return total


# ---- the comparison, on one rank ----


class _Trained(NamedTuple):
    """A model with an optimizer over the parameters of ``stepped``: the model itself, or one with fp32 copies."""

    model: nn.Module
    optimizer: Any
    stepped: nn.Module


def _made(make_optimizer: MakeOptimizer, make_model: MakeModel, copies: bool = False) -> _Trained:
    """Make a model and its optimizer from a fixed seed, and put the optimizer in training mode.

    ``copies``: the optimizer steps fp32 copies of 16-bit parameters.

    Raises:
        ValueError: the model has trainable fp16 parameters.
    """
    torch.manual_seed(0)
    model = stepped = make_model()
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype == torch.float16:
            raise ValueError(
                f"{name}: expected fp32, fp64 or bf16 parameters, got fp16: its loss scale skips steps, which plain "
                "training doesn't, so try the optimizer with model.bfloat16() or model.float()"
            )
    if copies and any(p.requires_grad and p.dtype.itemsize < 4 for p in model.parameters()):
        torch.manual_seed(0)
        stepped = make_model()
        for p in stepped.parameters():
            p.data = p.data.to(torch.promote_types(p.dtype, torch.float32))
    optimizer = make_optimizer(stepped)
    if callable(train := getattr(optimizer, "train", None)):  # schedule-free ones step in that mode alone
        train()
    return _Trained(model, optimizer, stepped)


def _compare(
    make_optimizer: MakeOptimizer,
    make_model: MakeModel,
    steps: int,
    tolerance: float,
    loss: Loss,
    options: dict[str, Any],
) -> Alike:
    """Return how far plain and sharded training differ, resumed half-way; raise beyond ``tolerance``. Communicates.

    Raises:
        AssertionError: by more than the ``tolerance``.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    make_plain = partial(_made, make_optimizer, make_model, options.get("master_weights", True))
    plain, sharded = make_plain(), _sharded(make_optimizer, make_model, options)
    start = [p.detach().clone() for p in plain.stepped.parameters()]
    sent = 0
    for step in range(steps):
        if step == steps // 2:
            sent += sum(traffic_of(sharded.optimizer).values())
            sharded = _resumed(sharded, _sharded(make_optimizer, make_model, options))
            plain = _resumed(plain, make_plain())
        _step_alone(plain, [loss(plain.model, step, of) for of in range(ranks)], options.get("clip_grad_norm", 0.0))
        sharded.optimizer.backward(loss(sharded.model, step, rank))
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    sent += sum(traffic_of(sharded.optimizer).values())
    sharded.optimizer.verify()
    difference, where = _difference(start, plain.stepped, sharded.model)
    of_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(of_ranks, (memory_held(sharded.optimizer).states, sent, difference, where))
    states, sents, differences, names = zip(*of_ranks, strict=True)
    worst = max(range(ranks), key=differences.__getitem__)
    splits = tuple(_split_of(sharded.optimizer, at) for at in range(len(sharded.optimizer.param_groups)))
    found = Alike(splits, differences[worst], names[worst], sum(sents) / ranks / steps, states)
    if not found.difference <= tolerance:  # NaN is a difference, too
        raise AssertionError(
            f"{found.where}: expected the values of one process, to {tolerance:g} of the way that they have gone, got "
            f"a difference of {found.difference:.2g} (split by {', '.join(dict.fromkeys(splits))}): try the other "
            "split=, or let the optimizer step each parameter by itself"
        )
    return found


def _sharded(make_optimizer: MakeOptimizer, make_model: MakeModel, options: dict[str, Any]) -> _Trained:
    model, optimizer, _ = _made(make_optimizer, make_model)
    return _Trained(model, LowLevelZeroOptimizer(optimizer, model=model, **options), model)


def _split_of(optimizer: LowLevelZeroOptimizer, group: int) -> str:
    by = (record.split.by for record in optimizer.sharded_parameters if record.group == group)
    return next(by, BY_ELEMENTS)


def _step_alone(trained: _Trained, losses: Sequence[Tensor], max_norm: float) -> None:
    """Step the plain optimizer by the mean of all ranks' gradients, summed in the order of the ranks and clipped."""
    sums: dict[nn.Parameter, Tensor] = {}
    for each in losses:
        if each.requires_grad:
            each.backward()  # type: ignore[no-untyped-call]
        for p in trained.model.parameters():
            if p.grad is not None:
                sums[p] = sums[p] + p.grad if p in sums else p.grad
            p.grad = None
    both = list(zip(trained.model.parameters(), trained.stepped.parameters(), strict=True))
    for p, stepped in both:
        if p in sums:
            stepped.grad = sums[p].to(stepped.dtype) / len(losses)
    if max_norm > 0:
        nn.utils.clip_grad_norm_(trained.stepped.parameters(), max_norm)
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    for p, stepped in both:
        if p is not stepped:
            p.detach().copy_(stepped)


def _resumed(former: _Trained, new: _Trained) -> _Trained:
    """Load the weights and the state of ``former`` into ``new``, and return ``new``. Communicates if it is sharded."""
    for ours, theirs in ((new.model, former.model), (new.stepped, former.stepped)):
        ours.load_state_dict({name: value.clone() for name, value in theirs.state_dict().items()})
    new.optimizer.load_state_dict(former.optimizer.state_dict())
    return new


def _difference(start: Sequence[Tensor], plain: nn.Module, sharded: nn.Module) -> tuple[float, str]:
    """Return the largest difference of an element, as a share of its parameter's movement, and where it is.

    Where ranks have fewer bits than ``plain``, what a rounding to them explains is no difference.
    """
    worst, where = 0.0, ""
    both = zip(start, plain.named_parameters(), sharded.parameters(), strict=True)
    for before, (name, expected), got in both:
        if expected.numel():
            way = float((expected.detach() - before).abs().max())
            rounding = 0.0 if got.dtype == expected.dtype else torch.finfo(got.dtype).eps / 2
            gap = float(((expected - got).abs() - rounding * expected.abs()).detach().max().clamp(min=0))
            share = gap / way if way else gap
            if share > worst or share != share:
                worst, where = share, name
    return worst, where


# ---- processes of its own ----


def _forked(compare: Callable[[], Alike], world_size: int) -> Alike:
    """Run ``compare`` in several forked processes that form a process group, and return rank 0's result.

    The first error of a rank ends them all, and is raised.
    """
    told = get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(_run, (world_size, folder, compare, told), world_size, start_method="fork")  # type: ignore[no-untyped-call]
        except ProcessExitedException:
            if not told.empty():
                raise told.get() from None
            raise
    found: Alike = told.get()
    return found


def _run(rank: int, world_size: int, folder: str, compare: Callable[[], Alike], told: SimpleQueue[Any]) -> None:
    """Compare in a new process group, and tell rank 0's result or the error of a rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        found = compare()
    except Exception as error:  # the caller's functions may raise anything, and its type may not be pickled
        is_plain = type(error) in (AssertionError, TypeError, ValueError)
        told.put(type(error)(str(error)) if is_plain else RuntimeError(f"{type(error).__name__}: {error}"))
        sys.exit(1)  # others, which may wait for this rank, are ended then
    if rank == 0:
        told.put(found)
    dist.destroy_process_group()
