"""Optimizers of rare habits, which a split could get wrong in silence: what is chosen, and that it trains alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowlevel_zero.testing import assert_trains_alike
from tests.numbers.test_strange_optimizers import Net, Rule, over_parameters
from tests.support.on_ranks import on_ranks


class SkipsWhatIsNoParameter(Rule):
    """Steps leaves of ``nn.Parameter`` that require grad alone."""

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        stepped = isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad
        return gradient if stepped else torch.zeros_like(gradient)


ALIKE: dict[str, tuple[Any, str]] = {
    "what is no parameter is skipped": (over_parameters(SkipsWhatIsNoParameter), "elements"),
}


@on_ranks(2, ALIKE)
def test_it_trains_as_in_one_process(rank: int, case: str) -> None:
    make, split = ALIKE[case]
    found = assert_trains_alike(make, Net, 14, tolerance=0, stage=2)
    assert {*found.splits} == {split}
