"""Stacks of matrices, ``[E, m, n]``: each rank steps as many where the ranks divide E, as one process would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping import gather_store
from lowlevel_zero.deepspeed import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from lowlevel_zero.layout import layout_of, memory_held
from lowlevel_zero.optim.splits import choose_splits
from lowlevel_zero.planning import estimate
from tests.support.judging import check_run
from tests.support.numbers import DROPS, STAGES, check_masters, masters_of, trained
from tests.support.on_ranks import on_ranks
from tests.support.oracle import Run, build, groups, loss_of
from tests.support.ranks import run_cases
from tests.support.saving import load_by, save_by


class ByMatrix(torch.optim.SGD):
    """Scales each matrix' update to a norm of its own, with a momentum, and steps other parameters whole."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.mul_(0.9).add_(p.grad)
                    over = (-2, -1) if p.dim() == 3 else None
                    p.data.add_(
                        mean / (torch.linalg.vector_norm(mean, dim=over, keepdim=True) + 0.1), alpha=-group["lr"]
                    )


def by_matrix(parameters: Any) -> torch.optim.Optimizer:
    return ByMatrix(parameters, lr=0.05)


class Across(ByMatrix):
    """Adds a mean over the whole stack."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data.sub_(p.grad.mean(), alpha=0.01)


class Experts(nn.Module):
    """Layers that can be dropped: stacks of 4 and 3 matrices, transposed ones, and parameters that are no stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(4, 5)
        self.four = nn.Parameter(0.5 * torch.randn(4, 5, 6))
        self.three = nn.Parameter(0.5 * torch.randn(3, 6, 5))
        self.turned = nn.Parameter((0.5 * torch.randn(4, 6, 5)).transpose(1, 2))
        self.mixed = nn.Parameter((0.5 * torch.randn(5, 4, 5)).transpose(0, 1))  # its matrices don't lie apart
        self.frozen = nn.Parameter(torch.randn(2, 2, 2), requires_grad=False)
        self.outward = nn.Linear(5, 3)

    def forward(self, x: Tensor, drop: set[int]) -> Tensor:
        hidden = torch.tanh(self.inward(x))
        wide = torch.zeros(len(x), 6, dtype=x.dtype)
        for place, stack in enumerate((self.four, self.turned)):
            if place not in drop:
                wide = wide + torch.tanh(torch.einsum("bi,eio->beo", hidden, stack)).sum(1)
        if 2 not in drop:
            hidden = hidden + torch.einsum("bi,eio->bo", wide, self.three)
        if 3 not in drop:
            hidden = hidden + torch.tanh(torch.einsum("bi,eio->bo", hidden, self.mixed))
        return self.outward(hidden + wide[:, :5])


def run_of(world_size: int = 2, **settings: Any) -> Run:
    settings = {"steps": 4, "dtype": torch.float64, "optimizer": by_matrix, "model": Experts, **settings}
    return Run(world_size, **settings).with_options(split="matrices")


WAYS: dict[str, dict[str, Any]] = {
    "clipped, dropped by all": {"clip": 0.3, "drop": DROPS["total"]},
    "under no_sync": {"micro_batches": 2, "no_sync": True, "bare": True},
    "micro-batches": {"micro_batches": 2},
    "on the host": {"options": {"cpu_offload": True, "partition_grad": True}},
    "overlapped gathers": {"options": {"overlap_allgather": True, "reduce_bucket_size": 40}},
    "small buckets": {"options": {"reduce_bucket_size": 1, "partition_grad": True}},
}


def test_the_split_is_chosen_by_a_probe_where_the_model_has_stacks() -> None:
    stack, matrix = nn.Parameter(torch.ones(2, 2, 3)), nn.Parameter(torch.ones(2, 3))
    assert choose_splits(by_matrix([stack, matrix])) == ["matrices"]
    assert choose_splits(by_matrix([matrix])) == ["parameters"]
    assert choose_splits(Across([stack], lr=0.1)) == ["parameters"]
    assert choose_splits(torch.optim.Adafactor([stack])) == ["parameters"]  # it clips by a norm of the whole stack
    assert choose_splits(torch.optim.AdamW([stack])) == ["elements"]
    with pytest.raises(
        TypeError, match=r"split='matrices': expected an optimizer that steps each matrix .*, got .*Across"
    ):
        choose_splits(Across([stack], lr=0.1), "matrices")


def test_one_process_s_numbers_in_all_ways(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_store, "PART", 40)  # so that a small model is gathered in several parts
    sizes = {1: "stage1", 2: "stage1", 4: "stage2"}
    runs = {
        f"{size} ranks": run_of(size, drop=DROPS["different"]).with_options(**STAGES[sizes[size]]) for size in sizes
    }
    runs |= {f"{way} on {n}": run_of(n, **{"drop": DROPS["different"], **WAYS[way]}) for way in WAYS for n in (2, 3)}
    for name, run, ran in trained(runs):
        with subtests.test(name):
            check_run(run, ran.values(), 1e-9, 1e-9)


def test_sixteen_bits_over_fp32_masters(subtests: pytest.Subtests) -> None:
    def of(dtype: torch.dtype) -> Run:
        run = run_of(2, dtype=dtype, drop=DROPS["different"], clip=0.3)
        return run.with_options(partition_grad=True, initial_scale=256.0, communication_dtype=torch.float32)

    for name, run, ran in trained({str(dtype): of(dtype) for dtype in (torch.bfloat16, torch.float16)}, masters_of):
        with subtests.test(name):
            check_masters(run, ran.values(), 1e-2)


@on_ranks(2)
def test_ranks_step_as_many_matrices_and_other_parameters_whole(rank: int) -> None:
    model = Experts()
    optimizer = LowLevelZeroOptimizer(by_matrix(model.parameters()), model=model, stage=2)
    shapes = {record.name: tuple(record.p32.shape) for record in optimizer.sharded_parameters}
    assert shapes["four"] == shapes["turned"] == (2, 5, 6)
    layout = layout_of(optimizer)
    splits = {p.name: p.split for p in layout.parameters}
    assert [splits["four"].span(each) for each in range(2)] == [(0, 60), (60, 120)]
    owned = {name for name, split in splits.items() if split.owner is not None}
    assert owned == {"inward.weight", "inward.bias", "three", "mixed", "outward.weight", "outward.bias"}
    optimizer.backward(model(torch.ones(2, 4), set()).sum())
    optimizer.step()
    (four,) = (record for record in optimizer.sharded_parameters if record.name == "four")
    assert optimizer.optim.state[four.p32]["mean"].shape == (2, 5, 6)
    assert optimizer.state_dict()["state"][0]["mean"].shape == (4, 5, 6)
    held, planned = memory_held(optimizer), estimate(Experts(), 2, 2, optimizer=ByMatrix)
    assert planned.states == max(gathered(held.states))


def gathered(value: int) -> list[int]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@on_ranks(2)
def test_a_stack_s_gradient_master_and_state_are_read_and_written_whole(rank: int) -> None:
    model = nn.ParameterList([torch.ones(4, 2, 3)]).bfloat16()
    optimizer = LowLevelZeroOptimizer(by_matrix(model.parameters()), model=model, stage=2)
    p, value = model[0], torch.linspace(0, 1, 24).view(4, 2, 3)
    optimizer.backward(p.sum())
    (slice_,) = optimizer.param_groups[0]["params"]
    assert slice_.shape == slice_.grad.shape == (2, 2, 3)
    assert torch.equal(slice_.grad.clone(), torch.ones(2, 2, 3))
    slice_.grad.mul_(2)
    torch.testing.assert_close(safe_get_full_grad(p), torch.full((4, 2, 3), 2.0))
    safe_set_full_grad(p, value)
    optimizer.step()
    torch.testing.assert_close(safe_get_full_optimizer_state(p, "mean"), value)
    safe_set_full_optimizer_state(p, 2 * value, "mean")
    torch.testing.assert_close(safe_get_full_optimizer_state(p, "mean"), 2 * value)
    safe_set_full_fp32_param(p, value)
    torch.testing.assert_close(safe_get_full_fp32_param(p), value)
    with torch.no_grad():
        p.mul_(2)  # which its master follows
    optimizer.zero_grad()
    optimizer.offload_states()
    optimizer.backward(p.sum() * 0)
    optimizer.step()
    expected = value.bfloat16() * 2 - 0.05 * 1.8 * value / (1.8 * value.flatten(1).norm(dim=1) + 0.1)[:, None, None]
    torch.testing.assert_close(safe_get_full_fp32_param(p), expected, rtol=1e-5, atol=1e-5)


# ---- at another number of ranks ----


def train(model: nn.Module, optimizer: Any, run: Run, steps: range, ranks: range) -> Any:
    """Train by the mean of these ranks' batches, and return the parameters and the state."""
    for step in steps:
        loss = torch.stack([loss_of(model, run, step, 0, rank) for rank in ranks]).mean()
        optimizer.backward(loss) if isinstance(optimizer, LowLevelZeroOptimizer) else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return values, {place: state["mean"].clone() for place, state in optimizer.state_dict()["state"].items()}


WAYS_TO_SAVE = {
    "checkpoint": torch.float64,
    "torch": torch.float64,
    "state_dict": torch.float64,
    "masters": torch.bfloat16,
}


@pytest.mark.parametrize("saved_by", [2, 3])
def test_a_run_goes_on_at_another_number_of_ranks(tmp_path: Path, subtests: pytest.Subtests, saved_by: int) -> None:
    """Stacks are cut on 2 and 4 ranks, and one is owned whole there, and the other on 3. Ranks share twelve batches."""

    def go_on(rank: int, world_size: int, way: str, resumes: bool) -> Any:
        run = run_of(12, dtype=WAYS_TO_SAVE[way], drop=DROPS["different"])
        model, ranks = build(run), range(rank, 12, world_size)
        optimizer = LowLevelZeroOptimizer(run.optimizer(groups(model)), model=model, **run.options)
        path = tmp_path / f"{way}-{saved_by}"
        if resumes and way == "state_dict":
            for part, state in zip((model, optimizer), torch.load(f"{path}.pt"), strict=True):
                part.load_state_dict(state)
        elif resumes:
            load_by("torch" if way == "torch" else "checkpoint", path, model, optimizer)
        else:
            train(model, optimizer, run, range(2), ranks)
            if way == "state_dict":
                states = model.state_dict(), optimizer.state_dict()
                if rank == 0:
                    torch.save(states, f"{path}.pt")
            else:
                save_by("torch" if way == "torch" else "checkpoint", path, model, optimizer)
        return train(model, optimizer, run, range(2, 4), ranks)

    cases = [(way, False) for way in WAYS_TO_SAVE]
    straight = {way: ran.values()[0] for (way, _), ran in run_cases(go_on, saved_by, cases)}
    for world_size in (1, 2, 3, 4):
        for (way, _), ran in run_cases(go_on, world_size, [(way, True) for way in WAYS_TO_SAVE]):
            with subtests.test(way, world_size=world_size):
                tolerance = 1e-9 if WAYS_TO_SAVE[way] is torch.float64 else 2e-2
                for values in ran.values():
                    torch.testing.assert_close(values, straight[way], rtol=tolerance, atol=tolerance)
