"""cpu_offload: the numbers are those without it, nothing mixes the two devices, and the host holds what it should.

On a machine without an accelerator both sides are the host, and everything else is as it would be: rows go down and
come up as copies, masters are copies too. That no operation would then mix tensors of two devices is shown by watching
all operations (see ``two_devices.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping.sharded_parameter import ShardedParameter
from lowlevel_zero.layout import memory_held
from lowlevel_zero.offload.step_on_host import StepOnHost
from lowlevel_zero.stepper import Stepper
from tests.support.numbers import STAGES, trained
from tests.support.on_ranks import on_ranks
from tests.support.oracle import Run, adamw, build, check_close, loss_of, train_sharded
from tests.support.two_devices import DEVICE, HOST, TwoDevices

OFFLOADED = {"cpu_offload": True, "reduce_bucket_size": 50}


def test_not_a_bit_differs_from_a_run_without(subtests: pytest.Subtests) -> None:
    """With the kernel that offloading would choose, everything is the same arithmetic in the same order."""

    def train(rank: int, world_size: int, run: Run) -> None:
        plain, offloaded = (
            train_sharded(rank, world_size, run.with_options(cpu_offload=on))[0] for on in (False, True)
        )
        check_close(plain, [offloaded], 0.0)

    run = Run(micro_batches=2, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True))
    run = run.with_options(reduce_bucket_size=50)
    runs = {
        "bf16 communicated": run.with_options(partition_grad=True, communication_dtype=torch.bfloat16),
        "bf16 without masters": replace(run, dtype=torch.bfloat16).with_options(master_weights=False),
        "fp64, clipped": replace(run, dtype=torch.float64, clip=0.3).with_options(overlap_allgather=True),
    }
    for name, _, ran in trained(runs, train):
        with subtests.test(name):
            ran.values()


@on_ranks(2)
def test_masters_are_copies_and_gradients_arrive_beside_them(rank: int) -> None:
    """What the CPU could share it doesn't: so all of these tests run what a device would."""
    model = nn.Linear(4, 4)
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), cpu_offload=True)
    masters = optimizer.get_working_to_master_map()
    homes = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not homes & {masters[id(p)].untyped_storage().data_ptr() for p in model.parameters()}
    optimizer.backward(model(torch.ones(1, 4)).sum())
    held = memory_held(optimizer)
    assert held.masters == sum(master.numel() * 4 for master in masters.values())


@on_ranks(2)
def test_the_norm_that_clips_is_that_of_edited_gradients(rank: int) -> None:
    ended = []
    for offload in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LowLevelZeroOptimizer(inner, model=model, cpu_offload=offload, clip_grad_norm=1.0)
        optimizer.backward(model(torch.full((1, 4), 1.0 + rank)).sum())
        for p in model.parameters():
            assert p.grad is not None
            p.grad.add_(p, alpha=5.0)
        optimizer.step()
        ended.append([*model.parameters()])
    torch.testing.assert_close(*ended)


@on_ranks(2)
def test_the_norm_of_16_bit_rows_is_no_number_of_16_bits(rank: int) -> None:
    norms = []
    for offload in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64).bfloat16()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LowLevelZeroOptimizer(inner, model=model, cpu_offload=offload, clip_grad_norm=1.0)
        optimizer.backward(model(torch.randn(3, 64).bfloat16()).float().square().mean() * (1.0 + rank))
        optimizer.step()
        norms.append(optimizer.get_grad_norm())
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@on_ranks(2, [False, True])
def test_a_norm_of_inf_clips_as_it_does_on_the_device(rank: int, offload: bool) -> None:
    """Torch multiplies by 0 then: what was inf becomes NaN, and all other gradients are 0."""
    p = nn.Parameter(torch.ones(4))
    inner = torch.optim.AdamW([p], lr=0.1, weight_decay=0.0)
    optimizer = LowLevelZeroOptimizer(inner, cpu_offload=offload, clip_grad_norm=1.0)
    optimizer.backward((p * torch.tensor([1.0, 1.0, torch.inf, 1.0])).sum())
    optimizer.step()
    assert p.isnan().tolist() == [False, False, True, False]
    assert p[[0, 1, 3]].tolist() == [1.0, 1.0, 1.0]


# ---- the two sides ----


def on_two_devices(monkeypatch: pytest.MonkeyPatch, mode: TwoDevices) -> None:
    """Let what crosses from one side to the other say so: the offload, and a master that is made or follows ``p``."""
    for name, side in (("_buffer", HOST), ("up", DEVICE), ("_copy_down", HOST)):
        move = mode.crossing(side, getattr(StepOnHost, name))
        monkeypatch.setattr(StepOnHost, name, staticmethod(move) if name == "up" else move)
    monkeypatch.setattr(ShardedParameter, "row_for_master", mode.crossing(HOST, ShardedParameter.row_for_master))


CASES = zip((torch.float32, torch.bfloat16, torch.float16), ("stage1", "stage2", "stage1"), strict=True)


@on_ranks(2, CASES)
def test_no_operation_mixes_tensors_of_two_devices(rank: int, dtype: torch.dtype, stage: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mode = TwoDevices()
        on_two_devices(patch, mode)
        run = Run(dtype=dtype).with_options(**STAGES[stage], **OFFLOADED, clip_grad_norm=0.3)
        train_on_two_devices(rank, run, mode)


def train_on_two_devices(rank: int, run: Run, mode: TwoDevices) -> None:
    model = build(run)
    for p in model.parameters():
        mode.put(p, DEVICE)
    with mode:
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model, initial_scale=64.0, **run.options)
        masters = optimizer.get_working_to_master_map()
        for step in range(3):
            for micro in range(2):
                optimizer.backward(loss_of(model, run, step, micro, rank))
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            seen = [optimizer.get_param_grad(p) for p in model.parameters() if id(p) in masters]
            assert {mode.side(grad) for grad in seen if grad is not None and grad.numel()} == {DEVICE}
            optimizer.zero_grad(set_to_none=step == 0)
    assert {mode.side(p) for p in model.parameters()} == {DEVICE}
    assert {mode.side(master) for master in masters.values()} == {HOST}
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
    assert {mode.side(value) for value in states if value.numel()} == {HOST}
    assert mode.crossings > 100


def test_a_mixing_operation_would_be_seen() -> None:
    mode = TwoDevices()
    one, other = mode.put(torch.ones(3), HOST), mode.put(torch.ones(3), DEVICE)
    with mode:
        assert mode.side(one * 2) == HOST
        assert mode.side(other.view(3, 1).sum() + torch.ones(())) == DEVICE
        for mixing in (
            lambda: one + other,
            lambda: one.mul_(other.sum()),
            lambda: torch._foreach_copy_([one], [other]),
            lambda: torch.cat([one, other]),
        ):
            with pytest.raises(AssertionError, match="mixes tensors of the host and of the device"):
                mixing()


# ---- what callers see ----


@on_ranks(2)
def test_state_made_before_wrapping_moves_with_its_slices(rank: int) -> None:
    ended = []
    for offload in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        inner = adamw(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        inner.step()
        inner.zero_grad()
        optimizer = LowLevelZeroOptimizer(inner, cpu_offload=offload)
        optimizer.backward(model(torch.ones(1, 3)).square().sum())
        optimizer.step()
        ended.append([*model.parameters()])
    torch.testing.assert_close(*ended, rtol=1e-6, atol=1e-7)


# ---- which kernel ----


CHOICES: list[tuple[dict[str, Any], bool]] = [({}, True), ({"foreach": False}, False), ({"fused": False}, False)]


@on_ranks(1, [(kind, *choice) for kind in (torch.optim.Adam, torch.optim.AdamW) for choice in CHOICES])
def test_adam_is_fused_where_its_user_left_that_open(
    rank: int, kind: Any, settings: dict[str, Any], fused: bool
) -> None:
    seen: list[bool] = []
    step_part = Stepper._step_part

    def spy(self: Stepper, part: Any) -> None:
        seen.extend(bool(group["fused"]) for group in self._optim.param_groups)
        step_part(self, part)

    model = nn.Linear(3, 3)
    inner = kind(model.parameters(), lr=0.1, **settings)
    before = [{**group, "params": None} for group in inner.param_groups]
    optimizer = LowLevelZeroOptimizer(inner, cpu_offload=True)
    optimizer.backward(model(torch.ones(1, 3)).sum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "_step_part", spy)
        optimizer.step()
    assert seen == [fused]
    assert [{**group, "params": None} for group in inner.param_groups] == before


@on_ranks(2)
def test_what_the_host_has_no_kernels_for_is_refused(rank: int) -> None:
    inner = torch.optim.AdamW(nn.Linear(3, 3).parameters(), capturable=True)
    with pytest.raises(ValueError, match="expected an optimizer that can step on the host, got capturable=True"):
        LowLevelZeroOptimizer(inner, cpu_offload=True)
