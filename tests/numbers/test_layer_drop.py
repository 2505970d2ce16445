"""A layer that no rank used stays as it is, without a state, a step or a gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.covering import covering
from tests.support.numbers import STAGES, trained
from tests.support.oracle import Run, build, groups, loss_of

BARE = (True, False)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)  # AdamW counts the steps of each parameter.
ABSENT = (2, 3)  # In these steps no rank uses the second layer.


def absent_at_times(step: int, rank: int) -> set[int]:
    return {1} if step in ABSENT else {rank % 2 * 2}


def never_the_second(step: int, rank: int) -> set[int]:
    return {1, 2 + rank % 2}


def wrapped(run: Run) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    model = build(run)
    options = {"reduce_bucket_size": 40, "initial_scale": 256.0, **run.options}
    return model, LowLevelZeroOptimizer(run.optimizer(groups(model)), model=model, **options)


def backward(model: nn.Module, optimizer: LowLevelZeroOptimizer, run: Run, step: int, rank: int) -> None:
    loss = loss_of(model, run, step, 0, rank)
    if run.bare:
        loss.backward()
    else:
        optimizer.backward(loss)


class Seen(NamedTuple):
    """What a rank holds of the second layer after each step, and which parameters have a saved state in the end."""

    held: list[dict[str, list[Tensor]]]
    saved: set[str]


def train_and_watch(rank: int, world_size: int, run: Run) -> Seen:
    model, optimizer = wrapped(run)
    slices = optimizer.get_working_to_master_map()

    def hold() -> dict[str, list[Tensor]]:
        """Copy each parameter with its master slice and its state."""
        held = {}
        for name, p in model.layers[1].named_parameters():
            state = [torch.as_tensor(value) for _, value in sorted(optimizer.state.get(slices[id(p)], {}).items())]
            held[name] = [each.detach().clone() for each in (p, slices[id(p)], *state)]
        return held

    held = [hold()]
    for step in range(run.steps):
        backward(model, optimizer, run, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        held.append(hold())
    names = {p: name for name, p in model.named_parameters()}
    order = [names[p] for group in groups(model) for p in group["params"]]
    return Seen(held, {order[at] for at in optimizer.state_dict()["state"]})


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_a_layer_that_nobody_used_stays_bit_for_bit(subtests: pytest.Subtests) -> None:
    run = Run(steps=5, drop=absent_at_times, optimizer=ADAMW)
    runs = {
        "plain backwards": replace(run, bare=True),
        "stage 2": replace(run, world_size=3).with_options(**STAGES["stage2"]),
        "bf16": replace(run, world_size=3, dtype=torch.bfloat16).with_options(**STAGES["stage1"]),
    }
    for name, _, ran in trained(runs, train_and_watch):
        with subtests.test(name):
            for held, _ in ran.values():
                for step, (before, after) in enumerate(pairwise(held)):
                    for key in ("weight", "bias"):
                        assert same_bits(before[key], after[key]) == (step in ABSENT), f"{key} in step {step}"
                assert [each["weight"][-1].item() for each in held[1:]] == [1, 2, 2, 2, 3]


def test_a_layer_that_was_never_used_has_no_state(subtests: pytest.Subtests) -> None:
    runs = {
        f"{stage}, bare {bare}": Run(drop=never_the_second, bare=bare, optimizer=ADAMW).with_options(**STAGES[stage])
        for stage, bare in covering(STAGES, BARE)
    }
    for name, _, ran in trained(runs, train_and_watch):
        with subtests.test(name):
            for held, saved in ran.values():
                for each in held:
                    assert all(same_bits(tensors, held[0][key]) for key, tensors in each.items())
                    assert all(len(tensors) == 2 for tensors in each.values()), "there is a state"
                assert "layers.0.weight" in saved
                assert not {"layers.1.weight", "layers.1.bias"} & saved


# ---- the gradient of one parameter ----
