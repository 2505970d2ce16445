"""torch's Muon: one rank owns a matrix and orthogonalises it, and the numbers are one process's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, save_checkpoint
from tests.support.grid import Grid
from tests.support.judging import check_run
from tests.support.numbers import DROPS, STAGES, check_masters, masters_of, trained
from tests.support.oracle import Result, Run, loss_of, train_sharded
from tests.support.ranks import run_ranks, run_ranks_expecting

if not hasattr(torch.optim, "Muon"):
    pytest.skip("torch has Muon from 2.9 on", allow_module_level=True)

from torch.optim import _muon


class Matrices(nn.Module):
    """Nothing but matrices: wide, tall, smaller than the ranks, transposed, shared, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Parameter(torch.randn(4, 5).t() * 0.5)
        self.one = nn.Parameter(torch.randn(1, 1))
        self.gate = nn.Parameter(torch.randn(1, 5))
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.up, self.down = nn.Linear(5, 17, bias=False), nn.Linear(17, 5, bias=False)
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.outward = nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor, drop: set[int]) -> Tensor:
        hidden = x @ self.inward.t() * self.one
        for place, layer in enumerate(self.layers):
            if place not in drop:
                hidden = hidden + torch.tanh(layer(hidden)) * self.gate
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return self.outward(self.frozen(hidden))


def muon_of(**settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.Muon(parameters, **{"lr": 0.02, **settings})


def run_of(world_size: int = 2, dtype: torch.dtype = torch.float64, **settings: Any) -> Run:
    return Run(world_size, steps=4, dtype=dtype, model=Matrices, optimizer=muon_of(), **settings)


def check(run: Run, ranks: list[Result]) -> None:
    """Compare norms too: Muon's steps are the same whatever its gradients are multiplied with."""
    check_run(run, ranks, 1e-9, 1e-9)


# ---- the numbers: in fp64, where no sum over the ranks tips the rounding to bf16 that follows, they are exact ----

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heavy": {"nesterov": False, "weight_decay": 0.5, "momentum": 0.5},
    "moonshot": {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 2, "eps": 1.0},
    "tensor lr": {"lr": torch.tensor(0.05), "ns_coefficients": (2.0, -1.5, 0.5)},
}


WAYS: dict[str, dict[str, Any]] = {
    "clipped, dropped by all": {"clip": 0.3, "drop": DROPS["total"]},
    "under no_sync": {"micro_batches": 2, "no_sync": True, "bare": True},
    "on the host": {"options": {"cpu_offload": True, "partition_grad": True}},
    "overlapped gathers": {"options": {"overlap_allgather": True, "reduce_bucket_size": 40}},
}


def test_all_settings_on_any_number_of_ranks_and_all_ways_to_get_gradients(subtests: pytest.Subtests) -> None:
    def of(world_size: int, settings: str) -> Run:
        stage = list(STAGES)[(world_size + len(settings)) % len(STAGES)]
        run = replace(run_of(world_size, drop=DROPS["different"]), optimizer=muon_of(**SETTINGS[settings]))
        return run.with_options(**STAGES[stage])

    runs = {
        f"{size} ranks, {settings}": of(size, settings) for size, settings in zip((1, 2, 3, 4), SETTINGS, strict=True)
    }
    runs |= {way: run_of(3, **{"drop": DROPS["different"], **settings}) for way, settings in WAYS.items()}
    for name, run, ran in trained(runs):
        with subtests.test(name):
            check(run, ran.values())


def test_sixteen_bits_over_fp32_masters(subtests: pytest.Subtests) -> None:
    """With gradients in fp32 on the wire: else its rounding is what would be seen."""

    def of(dtype: torch.dtype) -> Run:
        run = run_of(2, dtype, drop=DROPS["different"], clip=0.3)
        return run.with_options(partition_grad=True, initial_scale=256.0, communication_dtype=torch.float32)

    for name, run, ran in trained({str(dtype): of(dtype) for dtype in (torch.bfloat16, torch.float16)}, masters_of):
        with subtests.test(name):
            check_masters(run, ran.values(), 1e-2)


# ---- what stays, and who works ----


def test_every_matrix_is_orthogonalised_once_and_by_all_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, world_size: int) -> list[int]:
        taken: list[tuple[int, int]] = []
        monkeypatch.setattr(
            _muon, "_zeropower_via_newtonschulz", lambda x, *settings: (taken.append(tuple(x.shape)), x)[1]
        )
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
        optimizer = LowLevelZeroOptimizer(torch.optim.Muon(model.parameters()), model=model)
        counts = []
        for layers in (model, model[:4]):
            taken.clear()
            optimizer.backward(layers(torch.randn(2, 16)).sum())
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(taken))
        return counts

    assert run_ranks(work, 4) == [[2, 1]] * 4


# ---- in a model with other parameters ----


# ---- state ----


def steps(optimizer: Any, model: nn.Module, run: Run, which: range, rank: int | None) -> None:
    """Train one rank's share, or all shares in one process (``rank`` None)."""
    for step in which:
        if rank is None:
            torch.stack([loss_of(model, run, step, 0, of) for of in range(run.world_size)]).mean().backward()
        else:
            optimizer.backward(loss_of(model, run, step, 0, rank))
        optimizer.step()
        optimizer.zero_grad()


def started(seed: int = 0) -> tuple[Matrices, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Matrices().double()
    return model, torch.optim.Muon(model.parameters(), lr=0.02)


def test_state_goes_to_plain_muon_and_back() -> None:
    run = run_of(3)

    def work(rank: int, world_size: int) -> None:
        plain, optimizer = started()
        model, wrapped = started(seed=rank)
        ours = LowLevelZeroOptimizer(wrapped, model=model, partition_grad=True)
        for start, source, target in ((0, ours, optimizer), (3, optimizer, ours)):
            steps(optimizer, plain, run, range(start, start + 3), None)
            steps(ours, model, run, range(start, start + 3), rank)
            mine, theirs = ours.state_dict()["state"], optimizer.state_dict()["state"]
            assert mine.keys() == theirs.keys()
            torch.testing.assert_close([*mine.values()], [*theirs.values()], rtol=1e-9, atol=1e-12)
            target.load_state_dict(source.state_dict())
        steps(optimizer, plain, run, range(6, 9), None)
        steps(ours, model, run, range(6, 9), rank)
        torch.testing.assert_close([*model.parameters()], [*plain.parameters()], rtol=1e-9, atol=1e-9)

    run_ranks(work, 3)


def test_a_checkpoint_goes_on_at_another_world_size(tmp_path: Path) -> None:
    run = run_of(6)  # shares of each batch: 2 and 3 ranks divide them

    def trained(rank: int, world_size: int, ours: LowLevelZeroOptimizer, model: nn.Module, which: range) -> None:
        for step in which:
            losses = [loss_of(model, run, step, 0, of) for of in range(rank, 6, world_size)]
            ours.backward(torch.stack(losses).mean())
            ours.step()
            ours.zero_grad()

    def save(rank: int, world_size: int) -> list[Tensor]:
        model, wrapped = started()
        ours = LowLevelZeroOptimizer(wrapped, model=model)
        assert all("momentum_buffer" in Sharded(ours).state_dict()["state"][name] for name in ("up.weight", "inward"))
        trained(rank, world_size, ours, model, range(3))
        save_checkpoint(tmp_path / "a", model, ours)
        trained(rank, world_size, ours, model, range(3, 6))
        return [p.detach().clone() for p in model.parameters()]

    def resume(rank: int, world_size: int) -> list[Tensor]:
        model, wrapped = started(seed=5)
        ours = LowLevelZeroOptimizer(wrapped, model=model, partition_grad=True)
        load_checkpoint(tmp_path / "a", model, ours)
        trained(rank, world_size, ours, model, range(3, 6))
        return [p.detach().clone() for p in model.parameters()]

    later = run_ranks(save, 2)[0]
    torch.testing.assert_close(run_ranks(resume, 3)[0], later, rtol=1e-9, atol=1e-9)


# ---- hooks, and mistakes ----


def test_hooks_on_its_steps_run_once_a_step() -> None:
    def work(rank: int, world_size: int) -> None:
        model, wrapped = started()
        torch.optim.lr_scheduler.ConstantLR(wrapped)  # which warns if it sees no step
        calls: list[str] = []
        wrapped.register_step_pre_hook(lambda *_: calls.append("before"))
        wrapped.register_step_post_hook(lambda *_: calls.append("after"))
        ours = LowLevelZeroOptimizer(wrapped, model=model)
        steps(ours, model, run_of(), range(2), rank)
        assert calls == ["before", "after"] * 2

    run_ranks(work, 2)


def test_what_is_no_matrix_is_refused() -> None:
    def wrap(rank: int, world_size: int) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Muon([model.weight])
        optimizer.add_param_group({"params": [model.bias]})  # which torch finds out in its first step
        LowLevelZeroOptimizer(optimizer, model=model)

    for raised in run_ranks_expecting(wrap, 2):
        assert raised.type == "TypeError"
        assert "Muon only supports 2D parameters" in raised.message


# ---- two levels of ranks ----


@pytest.mark.parametrize("form", ["pair", "hybrid"])
def test_two_levels_of_ranks(form: str) -> None:
    run = run_of(4, drop=DROPS["different"])

    def train(rank: int, world_size: int) -> Result:
        return train_sharded(rank, world_size, run.with_options(**Grid.of(rank, (2, 2)).options(form)))

    check(run, run_ranks(train, 4))


def test_experts_are_orthogonalised_by_the_ranks_that_share_them() -> None:
    """Ranks 0 and 2 have one expert, 1 and 3 another; all have the dense matrix. Gradients are whole numbers."""

    def gradient(step: int, rank: int, shape: tuple[int, int]) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + shape[0])
        return torch.randint(-9, 10, shape, generator=generator).double()

    def work(rank: int, world_size: int) -> None:
        twins = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        shapes = [(5, 3), (4, 7)]
        plain, sharded = ([nn.Parameter(torch.ones(shape).double()) for shape in shapes] for _ in range(2))
        optimizer = torch.optim.Muon(plain, lr=0.1)
        ours = LowLevelZeroOptimizer(torch.optim.Muon(sharded, lr=0.1), pg_to_param_list={twins: [sharded[1]]})
        for step in range(4):
            ours.backward(sum((p * gradient(step, rank, s)).sum() for p, s in zip(sharded, shapes, strict=True)))
            sharers = [range(4), range(rank % 2, 4, 2)]
            for p, shape, ranks in zip(plain, shapes, sharers, strict=True):
                p.grad = torch.stack([gradient(step, of, shape) for of in ranks]).sum(0) / world_size
            for each in (optimizer, ours):
                each.step()
                each.zero_grad()
        torch.testing.assert_close(sharded, plain, rtol=1e-9, atol=1e-9)

    run_ranks(work, 4)
