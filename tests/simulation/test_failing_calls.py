"""A public call that fails on one rank after the ranks have agreed on it: nobody waits for ever, and all are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import Diagnostics, LowLevelZeroOptimizer, clip_grad_norm_
from tests.simulation.world import CARRIERS, Carrier, Fault, Outcome, SimulationEnded, simulate

RANKS, STEPS, TRIES = 2, 2, 5
X = torch.randn(STEPS, RANKS, 4, 6, generator=torch.Generator().manual_seed(1))

Told = list[tuple[int, str]]  # by rank: what its calls raised


class Training:
    """Two layers on one rank, which goes back to the last checkpoint or begins a step anew when a call raises."""

    def __init__(self, rank: int, told: Told, **options: Any) -> None:
        torch.manual_seed(0)
        self.rank, self.told, self.done = rank, told, 0
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
        optim = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.optimizer = LowLevelZeroOptimizer(
            optim, model=self.model, reduce_bucket_size=1, diagnostics=Diagnostics(stall_timeout=0.0), **options
        )
        self.model_state = {name: each.clone() for name, each in self.model.state_dict().items()}
        self.state = self.optimizer.state_dict()

    def step(self) -> None:
        self.optimizer.backward(self.model(X[self.done][self.rank]).square().mean())
        self.use_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1

    def use_gradients(self) -> None:
        self.optimizer.clip_grad_norm_(0.1)

    def begin_anew(self) -> None:
        self.optimizer.zero_grad()

    def load(self) -> None:
        self.model.load_state_dict(self.model_state)
        self.optimizer.load_state_dict(self.state)
        self.optimizer.zero_grad()
        self.done = 0

    def attempt(self, call: Callable[[], None]) -> str:
        try:
            call()
        except SimulationEnded:
            raise
        except Exception as error:
            self.told.append((self.rank, str(error)))
            assert len(self.told) < 10 * TRIES, "these ranks don't recover"
            return str(error)
        return ""

    def run(self) -> Tensor:
        for _ in range(TRIES):
            while self.done < STEPS and (raised := self.attempt(self.step)):
                recover = self.load if "load a checkpoint" in raised else self.begin_anew
                assert any(not self.attempt(recover) for _ in range(TRIES))
            if not self.attempt(self.optimizer.verify):
                return torch.cat([p.detach().flatten() for p in self.model.parameters()])
            assert any(not self.attempt(self.load) for _ in range(TRIES))
        raise AssertionError("this rank didn't recover")


class Uses(Training):
    """One that uses gradients as torch's functions do."""

    def use_gradients(self) -> None:
        first = next(self.model.parameters())
        assert self.optimizer.get_param_grad(first) is not None
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        clip_grad_norm_(self.model.parameters(), 0.05)


def train(
    carrier: Carrier, fault: Fault | None = None, make: type[Training] = Training, **options: Any
) -> tuple[Outcome[Tensor], Told]:
    told: Told = []
    outcome = simulate(lambda rank: make(rank, told, **options).run(), RANKS, 3, carrier, fault, count=True)
    return outcome, told


def in_construction(carrier: Carrier, **options: Any) -> int:
    return simulate(lambda rank: Training(rank, [], **options).done, RANKS, 3, carrier, count=True).operations[1]


WAYS: list[tuple[Carrier, dict[str, Any]]] = [
    ("messages", {}),
    ("messages", {"partition_grad": True, "overlap_allgather": True}),
    ("memory", {"partition_grad": True}),
    ("memory", {"clip_grad_norm": 1.0}),
    ("nccl", {}),
    ("nccl", {"partition_grad": True}),
]


def sweep(carrier: Carrier, make: type[Training], every: int, **options: Any) -> None:
    """Fail every so manyth operation, one a run."""
    clean = train(carrier, None, make, **options)[0]
    first, last = in_construction(carrier, **options), clean.operations[1]
    for at in range(first + len(options), last, every):
        outcome, told = train(carrier, Fault(1, at), make, **options)
        own = f"injected fault in operation {at},"
        here = f"operation {at}: {outcome.tracebacks} {told}"
        assert (outcome.deadlock, outcome.mismatch, outcome.errors) == (None, None, {}), here
        assert any(rank == 1 and text.startswith(own) for rank, text in told), here
        cause = own if make is Training else "rank 1 to zero_grad"  # torch's own functions call several times
        assert any(rank == 0 and "rank 1" in text and (own in text or cause in text) for rank, text in told), here
        for result in outcome.results.values():
            torch.testing.assert_close(result, clean.results[0], msg=here)


@pytest.mark.parametrize(("carrier", "options"), WAYS, ids=str)
def test_training_goes_on_wherever_an_operation_fails(carrier: Carrier, options: dict[str, Any]) -> None:
    sweep(carrier, Training, 9, **options)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_training_goes_on_where_a_use_of_gradients_fails(carrier: Carrier) -> None:
    sweep(carrier, Uses, 11, partition_grad=True)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_no_step_is_taken_after_a_backward_that_raised_on_one_rank(carrier: Carrier) -> None:
    """Also where this rank goes on as if nothing had happened: its gradients are half there."""

    def job(rank: int) -> list[str]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)

        def told(call: Callable[[], Any]) -> str:
            try:
                call()
            except (RuntimeError, ArithmeticError) as error:
                return f"{type(error).__name__}: {error}"
            return ""

        def fail(_: Tensor) -> None:
            raise ArithmeticError("no gradient today")

        def backward() -> None:
            optimizer.backward(model(X[0][rank]).square().mean())

        hook = model.weight.register_hook(fail) if rank == 1 else None
        texts = [told(backward)]
        if hook is not None:
            hook.remove()
        return [*texts, *map(told, (optimizer.step, optimizer.zero_grad, backward, optimizer.step))]

    outcome = simulate(job, RANKS, 0, carrier)
    assert (outcome.deadlock, outcome.errors) == (None, {}), outcome.tracebacks
    own, other = outcome.results[1], outcome.results[0]
    assert (own[0], other[0]) == ("ArithmeticError: no gradient today", "")
    for text in (own[1], other[1]):
        assert "zero_grad" in text
        assert "no gradient today" in text
    assert other[1].startswith("RuntimeError: rank 1 could not step")
    assert own[2:] == other[2:] == ["", "", ""]


class FailingOnce(torch.optim.SGD):
    """Raises in its first step of the model on rank 1, but not in a trial of the class."""

    def step(self, closure: Any = None) -> None:
        super().step()
        is_trial = len(self.param_groups[0]["params"]) > 1 and self.param_groups[0]["params"][0].dim() > 1
        if torch.distributed.get_rank() == 1 and not is_trial and not self.__dict__.get("failed"):
            self.__dict__["failed"] = True
            raise ArithmeticError("no step today")


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_step_that_fails_on_one_rank_refuses_all_that_follows_until_a_checkpoint_is_loaded(carrier: Carrier) -> None:
    def job(rank: int) -> list[str]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = LowLevelZeroOptimizer(FailingOnce(model.parameters(), lr=0.1), model=model, split="elements")
        saved = {name: each.clone() for name, each in model.state_dict().items()}, optimizer.state_dict()

        def told(call: Callable[[], Any]) -> str:
            try:
                call()
            except (RuntimeError, ArithmeticError) as error:
                return f"{type(error).__name__}: {error}"
            return ""

        def step() -> None:
            optimizer.backward(model(X[0][rank]).square().mean())
            optimizer.step()

        texts = [told(step), told(optimizer.zero_grad), told(step), told(optimizer.state_dict)]
        optimizer.zero_grad()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return [*texts, told(step)]

    outcome = simulate(job, RANKS, 0, carrier)
    assert (outcome.deadlock, outcome.errors) == (None, {}), outcome.tracebacks
    own, other = outcome.results[1], outcome.results[0]
    assert (own[0], other[0]) == ("ArithmeticError: no step today", "")
    assert (own[1], other[1]) == ("", "")
    for at, call in ((2, "step"), (3, "state_dict")):
        assert other[at].startswith(f"RuntimeError: rank 1 could not {call}: RuntimeError: expected parameters")
        for text in (own[at], other[at]):
            assert "ArithmeticError: no step today" in text
            assert "load a checkpoint on every rank" in text
    assert (own[4], other[4]) == ("", "")
