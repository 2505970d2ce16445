"""A record of the table of wrong calls, and how it is tried: in the midst of a training, beside plain torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.oracle import parameters_of
from tests.support.ranks import run_cases

# Batches that are trained on before and after what is done wrong.
BEFORE, AFTER = (1, 2), (8, 9)


def net() -> nn.Sequential:
    """Four modules, of which the second has no parameters and the last is frozen."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Linear(5, 5).requires_grad_(False))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """For numbers: unlike Adam, it feels a gradient that is wrong by a factor."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Work:
    """A training in which something is done wrong: as one rank of several, or plainly, with the shares of all."""

    def __init__(self, rank: int | None, world_size: int, options: dict[str, Any], dtype: torch.dtype) -> None:
        self.model = net().to(dtype)
        self.dtype = dtype
        self.rank = rank
        self.world_size = world_size
        inner = momentum(self.model)
        self.optimizer: Any = inner
        if rank is not None:
            self.optimizer = LowLevelZeroOptimizer(inner, model=self.model, **options)

    @property
    def plain(self) -> bool:
        """One process, plain torch."""
        return self.rank is None

    @property
    def odd(self) -> bool:
        """Whether this rank is the one that does what others don't: the last."""
        return self.rank == self.world_size - 1

    def loss(self, at: int = 0, rank: int | None = None) -> Tensor:
        """The loss of one rank's share, this one's or ``rank``'s, of batch ``at``."""
        whose = self.rank if rank is None else rank
        assert whose is not None
        generator = torch.Generator().manual_seed(100 * at + whose)
        x, y = (torch.randn(2, size, generator=generator).to(self.dtype) for size in (3, 5))
        loss: Tensor = (self.model(x) - y).square().mean()
        return loss

    def backward(self, at: int = 0, without: int | None = None) -> None:
        """Every rank's backward of batch ``at``, but that of the rank ``without``."""
        for rank, loss in enumerate(self.shares(at)):
            if without is None or without != (rank if self.plain else self.rank):
                self.run_back(loss)

    def run_back(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward from ``loss``."""
        if self.plain:
            loss.backward(retain_graph=retain_graph)
        else:
            self.optimizer.backward(loss, retain_graph=retain_graph)

    def shares(self, at: int = 0) -> list[Tensor]:
        """The losses that this process runs backwards from, to be averaged by plain torch."""
        if not self.plain:
            return [self.loss(at)]
        return [self.loss(at, rank) / self.world_size for rank in range(self.world_size)]

    def steps(self, *batches: int) -> None:
        """Whole steps."""
        for at in batches:
            self.backward(at)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self.plain else self.optimizer.no_sync()

    def clip(self, max_norm: float) -> None:
        if self.plain:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        else:
            self.optimizer.clip_grad_norm_(max_norm)


Doing = Callable[[Work], Any]
Errors = type[BaseException]


def nothing(work: Work) -> None:
    """What there is to do for plain torch where a call is refused, and so changes nothing."""


def one_step(work: Work) -> None:
    """What plain torch does where only that is left of the calls."""
    work.backward()
    work.optimizer.step()


@dataclass(frozen=True)
class Refused:
    """The call raises on every rank, and has changed nothing: training goes on as if it hadn't been made.

    Attributes:
        error: of which type.
        says: a pattern of the message.
        others: what ranks but the last one are told, where that differs.
        plain: what plain torch makes of what comes before the call.
        ends: training can't go on.
    """

    error: Errors
    says: str
    others: str | None = None
    plain: Doing = nothing
    ends: bool = False


@dataclass(frozen=True)
class Right:
    """The right thing happens: what plain torch makes of the same calls, or of ``plain``."""

    plain: Doing | None = None


@dataclass(frozen=True)
class Wrong:
    """A record of the table.

    Attributes:
        what: is done wrong.
        do: does it, on every rank; ``work.odd`` tells the one that does what others don't.
        must: what must happen.
        options: of the optimizer.
        dtype: of the model.
        tolerance: of the parameters in the end.
    """

    what: str
    do: Doing
    must: Refused | Right
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    tolerance: float = 2e-6

    @property
    def ends(self) -> bool:
        """Whether training can't go on."""
        return isinstance(self.must, Refused) and self.must.ends


def try_out(wrongs: Iterable[Wrong], world_size: int, subtests: pytest.Subtests, timeout: float = 30.0) -> None:
    """Train a little, do it wrong, see to what must happen, and train on: parameters end as plain torch has them.

    Those after which training goes on follow each other in one process group, the others have one of their own.
    """
    wrongs = list(wrongs)
    assert len({wrong.what for wrong in wrongs}) == len(wrongs), "expected each record to have a name of its own"
    going_on = [(wrong,) for wrong in wrongs if not wrong.ends]
    ending = [(wrong,) for wrong in wrongs if wrong.ends]
    tried = run_cases(_try_rank, world_size, going_on, timeout=timeout, one_group=True)
    tried += run_cases(_try_rank, world_size, ending, timeout=timeout)
    for (wrong,), ran in tried:
        with subtests.test(wrong.what):
            got = ran.values()
            if not wrong.ends:
                _check(wrong, _plainly(wrong, world_size), got)


def _check(wrong: Wrong, expected: dict[str, Tensor], got: list[dict[str, Tensor]]) -> None:
    for rank, values in enumerate(got):
        for name, value in expected.items():
            assert torch.equal(values[name], got[0][name]), f"ranks 0 and {rank} differ in {name}"
            difference = (values[name].float() - value.float()).abs().max().item()
            assert difference <= wrong.tolerance, f"{name} differs from plain torch's by {difference:.3g}"


def _try_rank(rank: int, world_size: int, wrong: Wrong) -> dict[str, Tensor]:
    must = wrong.must
    work = Work(rank, world_size, wrong.options, wrong.dtype)
    work.steps(*BEFORE)
    if isinstance(must, Right):
        wrong.do(work)
    else:
        told_of_another = must.others is not None and not work.odd
        with pytest.raises(RuntimeError if told_of_another else must.error) as caught:
            wrong.do(work)
        pattern = must.others if told_of_another else must.says
        assert re.search(str(pattern), str(caught.value)), f"no {pattern!r} in {caught.value!r}"
    if not wrong.ends:
        work.optimizer.zero_grad()
        work.steps(*AFTER)
    return parameters_of(work.model)


def _plainly(wrong: Wrong, world_size: int) -> dict[str, Tensor]:
    work = Work(None, world_size, {}, wrong.dtype)
    work.steps(*BEFORE)
    (wrong.must.plain or wrong.do)(work)
    work.optimizer.zero_grad()
    work.steps(*AFTER)
    return parameters_of(work.model)
