"""A parameter that was moved to memory of other strides, such as channels_last: numbers are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_cases

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CALLS = ("state_dict", "backward after", "backward before", "read", "edit", "no_sync", "load", "assign")


class Both:
    """A model that is trained on two ranks, and one that is trained in one process, on the same batch."""

    def __init__(self, rank: int, start: str, then: str, split: str | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=FORMATS[start])
        self.alone = copy.deepcopy(self.model)
        self.x, self.rank, self.then = torch.randn(4, 2, 3, 3), rank, then
        adam = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.optimizer = LowLevelZeroOptimizer(adam, model=self.model, split=split)
        self.of_alone = torch.optim.Adam(self.alone.parameters(), lr=0.1)

    def backward(self) -> None:
        self.optimizer.backward(self.model(self.x[2 * self.rank :][:2]).square().mean())
        self.alone(self.x).square().mean().backward()

    def step(self) -> None:
        for each in (self.optimizer, self.of_alone):
            each.step()
            each.zero_grad()

    def move(self) -> None:
        for model in (self.model, self.alone):
            model.weight.data = model.weight.data.to(memory_format=FORMATS[self.then])

    def after(self, call: str) -> tuple[Tensor, Tensor]:
        """Train, move the weight, make a call, and return the same of both."""
        self.backward()
        self.step()
        if call in ("backward before", "read", "edit"):
            self.backward()
        if call == "no_sync":
            with self.optimizer.no_sync():
                self.backward()
        saved = [copy.deepcopy(each.state_dict()) for each in (self.optimizer, self.of_alone)]
        self.move()
        if call == "state_dict":
            whole, of_alone = (each.state_dict()["state"][0]["exp_avg"] for each in (self.optimizer, self.of_alone))
            return whole, of_alone
        if call == "read":
            return self.model.weight.grad.clone(), self.alone.weight.grad.clone()  # type: ignore[union-attr]
        if call == "edit":
            for model in (self.model, self.alone):
                model.weight.grad.add_(model.weight.detach())  # type: ignore[union-attr]
        if call == "load":
            self.optimizer.load_state_dict(saved[0])
            self.of_alone.load_state_dict(saved[1])
        if call == "assign":
            for model in (self.model, self.alone):
                model.weight.data = torch.arange(24.0).view(3, 2, 2, 2) / 20
        if call in ("backward after", "no_sync", "load", "assign"):
            self.backward()
        self.step()
        return self.model.weight.detach().clone(), self.alone.weight.detach().clone()


def train(rank: int, world_size: int, start: str, split: str | None) -> list[float]:
    (then,) = FORMATS.keys() - {start}
    made: list[Any] = [(call, Both(rank, start, then, split)) for call in CALLS]
    return [float((own - alone).abs().max()) for call, both in made for own, alone in [both.after(call)]]


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_numbers_are_those_of_one_process(subtests: pytest.Subtests) -> None:
    cases = [(start, split) for start in FORMATS for split in (None, "parameters")]
    for (start, split), ran in run_cases(train, 2, cases, timeout=30):
        for differences in ran.values():
            for call, difference in zip(CALLS, differences, strict=True):
                with subtests.test(start=start, split=split, call=call):
                    assert difference < 1e-6
