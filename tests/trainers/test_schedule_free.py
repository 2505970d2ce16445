"""Schedule-free optimizers, which have two modes: what is trained, and what is evaluated and saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree, AdamWScheduleFreePaper, RAdamScheduleFree, SGDScheduleFree
from torch import Tensor, nn
from torch.optim import Optimizer

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.cases import check_cases, check_each
from tests.support.collections import pytorch_optimizer
from tests.support.oracle import Run, batch, check_close, worst
from tests.support.ranks import run_cases

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda params: AdamWScheduleFree(params, lr=0.02, weight_decay=0.1, warmup_steps=2),
    "adamw, one by one": lambda params: AdamWScheduleFree(params, lr=0.02, foreach=False),
    "paper": lambda params: AdamWScheduleFreePaper(params, lr=0.02),
    "radam": lambda params: RAdamScheduleFree(params, lr=0.02),
    "sgd": lambda params: SGDScheduleFree(params, lr=0.1, momentum=0.9),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 2": {"partition_grad": True, "reduce_bucket_size": 8},
    "overlapped": {"overlap_allgather": True},
    "offloaded": {"cpu_offload": True},
}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(Run(dtype=next(model.parameters()).dtype), step, 0, rank)
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(
    model: nn.Module, optimizer: Any, ranks: Iterable[int], steps: range, evaluate: bool = True
) -> list[dict[str, Tensor]]:
    """What is evaluated after each step, and what is trained in the end; as trainers do, who switch in every step.

    Losses are those of ``ranks``: its own, or in one process all.
    """
    seen = []
    for step in steps:
        optimizer.train()
        loss = torch.stack([loss_of(model, step, rank) for rank in ranks]).mean()
        optimizer.backward(loss) if isinstance(optimizer, LowLevelZeroOptimizer) else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            optimizer.eval()
            optimizer.eval()
            seen.append(values(model))
    optimizer.train()
    return [*seen, values(model)]


Make = Callable[[Any], Any]


def made(make: Make, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    model = net(dtype)
    return model, LowLevelZeroOptimizer(make(model.parameters()), model=model, **options)


def alone(make: Make, world_size: int, steps: range) -> list[dict[str, Tensor]]:
    model = net()
    return train(model, make(model.parameters()), range(world_size), steps)


class Averaging(torch.optim.SGD):
    """Evaluates an average of the weights; swaps it in through ``p.data``, and keeps its mode where nobody looks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p].setdefault("mean", p.detach().clone()).lerp_(p, 0.5)

    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "mean" in self.state[p] and "trained" not in self.state[p]:
                self.state[p]["trained"] = p.data.clone()
                p.data.copy_(self.state[p]["mean"])

    def train(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "trained" in self.state[p]:
                p.data.copy_(self.state[p].pop("trained"))


class NormalisedAveraging(Averaging):
    """The same of normalised gradients, which one rank owns whole; it takes for granted that all have states."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.div_(p.grad.norm() + 1e-6)
        super().step()

    def eval(self) -> None:
        assert all("mean" in self.state[p] for p in self.param_groups[0]["params"])
        super().eval()


WRITING_THROUGH_DATA: dict[str, Callable[[Any], Optimizer]] = {
    "ScheduleFreeAdamW": lambda params: pytorch_optimizer.ScheduleFreeAdamW(params, lr=0.02),
    "ScheduleFreeSGD": lambda params: pytorch_optimizer.ScheduleFreeSGD(params, lr=0.1),
    "averaging": lambda params: Averaging(params, lr=0.1),
    "normalised": lambda params: NormalisedAveraging(params, lr=0.1),
}
ALL = OPTIMIZERS | WRITING_THROUGH_DATA
# Each optimizer in some way, and one of each kind in every way.
WAYS = [
    *zip(ALL, cycle(OPTIONS), strict=False),
    *(("adamw", how) for how in list(OPTIONS)[1:]),
    *(("averaging", how) for how in list(OPTIONS)[:3]),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_numbers_are_those_of_one_process(world_size: int, subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, which: str, how: str) -> list[dict[str, Tensor]]:
        return train(*made(ALL[which], **OPTIONS[how]), [rank], range(7))

    for (which, how), ran in run_cases(work, world_size, WAYS[world_size % 2 :: 2], one_group=True):
        with subtests.test(which=which, how=how):
            expected = alone(ALL[which], world_size, range(7))
            for at, value in enumerate(expected):
                check_close(value, [got[at] for got in ran.values()], 2e-6)
            difference, _ = worst(expected[-1], expected[-2])
            assert difference > 2e-5, "the modes are alike, which tests nothing"


def test_masters_keep_their_precision() -> None:
    """Switching there and back leaves a bf16 model's masters as an fp32 optimizer's parameters would be."""

    def work(rank: int, world_size: int, evaluate: bool) -> list[Tensor]:
        model, optimizer = made(OPTIMIZERS["adamw"], torch.bfloat16, partition_grad=True)
        train(model, optimizer, [rank], range(4), evaluate)
        for p in model.parameters():
            master = optimizer.working_to_master_param[id(p)].detach()
            own = p.detach().flatten()[rank * len(master) :][: len(master)]
            assert torch.equal(master[: len(own)].bfloat16(), own)
        return [master.detach().clone() for master in optimizer.working_to_master_param.values()]

    (_, without), (_, evaluated) = run_cases(work, 2, [(False,), (True,)])
    for ours, theirs in zip(without.values(), evaluated.values(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one - other).abs().max() <= 2e-6


def test_saved_in_eval_mode_it_goes_on_as_it_would_have(subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, dtype: torch.dtype) -> None:
        model, optimizer = made(OPTIMIZERS["adamw"], dtype)
        train(model, optimizer, [rank], range(3))
        optimizer.eval()
        evaluated = values(model)
        saved = model.state_dict(), optimizer.state_dict()
        again, other = made(OPTIMIZERS["adamw"], dtype)
        again.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        assert not any(group["train_mode"] for group in other.param_groups)
        for name, p in again.named_parameters():
            assert torch.equal(p, evaluated[name])
        expected, got = (train(*pair, [rank], range(3, 6))[-1] for pair in ((model, optimizer), (again, other)))
        assert all(torch.equal(expected[name], got[name]) for name in expected)

    check_cases(subtests, 2, work, [torch.float32, torch.bfloat16])


class ShowingAverages(Averaging):
    """Shows the averages whenever it is told to evaluate, and trains on from there."""

    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.copy_(self.state[p]["mean"])


def steps_between_two_evaluations_are_seen(rank: int, world_size: int) -> None:
    make = partial(ShowingAverages, lr=0.1)
    (model, optimizer), reference = made(make), net()
    alone = make(reference.parameters())
    for step in range(2):
        optimizer.backward(loss_of(model, step, 0))
        loss_of(reference, step, 0).backward()
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
            each.eval()
    check_close(values(reference), [values(model)], 2e-6)


class EvaluatesInVain(Averaging):
    """Negates parameters to evaluate them, but fails on rank 1 after some."""

    after = 0

    @torch.no_grad()
    def eval(self) -> None:
        for at, p in enumerate(self.param_groups[0]["params"]):
            if at == self.after and dist.get_rank() == 1:
                raise MemoryError("no memory to evaluate")
            p.neg_()

    @torch.no_grad()
    def train(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.neg_()


def an_error_of_one_rank_is_raised_by_all(rank: int, world_size: int) -> None:
    for after in (0, 1):
        model, optimizer = made(partial(EvaluatesInVain, lr=0.1))
        optimizer.backward(loss_of(model, 0, rank))
        before = [p32.detach().clone() for p32 in optimizer.param_groups[0]["params"]]
        optimizer.optim.after = after
        with pytest.raises(MemoryError if rank == 1 else RuntimeError, match="no memory to evaluate"):
            optimizer.eval()
        if rank == 0 or not after:
            assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))
        if after:
            with pytest.raises(RuntimeError, match="undefined: load a checkpoint"):
                optimizer.step()
        else:
            optimizer.step()
            optimizer.verify()


def modes_are_there_where_the_wrapped_optimizer_has_them(rank: int, world_size: int) -> None:
    _, plain = made(torch.optim.AdamW)
    for mode in ("train", "eval"):
        assert not hasattr(plain, mode)
        assert getattr(plain, mode, None) is None
    _, free = made(OPTIMIZERS["sgd"])
    assert callable(free.train)
    assert callable(free.eval)


def one_rank_alone_is_refused_on_all(rank: int, world_size: int) -> None:
    model, optimizer = made(OPTIMIZERS["adamw"])
    train(model, optimizer, [rank], range(2), evaluate=False)
    before = values(model)
    call = optimizer.eval if rank == 0 else optimizer.step
    with pytest.raises(RuntimeError, match="rank 0 to eval; rank 1 to step"):
        call()
    assert all(group["train_mode"] for group in optimizer.param_groups)
    for name, p in model.named_parameters():
        assert (p - before[name]).abs().max() <= 1e-6


def test_modes_change_on_all_ranks_or_on_none(subtests: pytest.Subtests) -> None:
    checks = (
        steps_between_two_evaluations_are_seen,
        an_error_of_one_rank_is_raised_by_all,
        modes_are_there_where_the_wrapped_optimizer_has_them,
        one_rank_alone_is_refused_on_all,
    )
    check_each(subtests, 2, checks, timeout=30)
