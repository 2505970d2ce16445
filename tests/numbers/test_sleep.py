"""States that sleep: what a rank holds goes to the host and back, by a simulated device, and no number changes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer, sharded_optimizer
from lowlevel_zero.checkpoint import load_checkpoint, save_checkpoint
from lowlevel_zero.offload import sleep
from lowlevel_zero.streams import Streams
from tests.support.on_ranks import on_ranks
from tests.support.oracle import Run, adamw, build, groups, loss_of, momentum
from tests.support.two_devices import DEVICE, HOST, TwoDevices


class OfDevice(Streams):
    """The streams of a device that does everything at once.

    Attributes:
        released: how often its allocator's cache has been emptied.
    """

    several = True
    released = 0

    def release_memory(self) -> None:
        self.released += 1


@contextmanager
def two_devices() -> Iterator[TwoDevices]:
    """Have masters, states and gradients be on a device, and what moves say where it goes."""
    mode, moved = TwoDevices(), sleep._move

    def move(members: Sequence[Tensor], device: torch.device, *args: Any) -> int:
        to = HOST if {mode.side(each) for each in members} == {DEVICE} else DEVICE
        before, mode._crossing = mode._crossing, True
        try:
            size = moved(members, device, *args)
        finally:
            mode._crossing = before
        for each in members:
            mode.put(each, to)
        return size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_optimizer, "streams_of", lambda devices: OfDevice())
        patch.setattr(sleep, "_move", move)
        with mode:
            yield mode


def made(run: Run, mode: TwoDevices) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    model = build(run)
    for p in model.parameters():
        mode.put(p, DEVICE)
    return model, LowLevelZeroOptimizer(run.optimizer(groups(model)), model=model, **run.options)


def held(zero: LowLevelZeroOptimizer, kind: str) -> list[Tensor]:
    """What of a kind has elements, and may leave the device."""
    tensors = sleep.movable([kind], zero.optim, zero.sharded_parameters.records, zero.sharded_groups)
    return [each for each in tensors if each.numel() and each.dim()]


def sides(zero: LowLevelZeroOptimizer, mode: TwoDevices) -> dict[str, set[str | None]]:
    return {kind: {mode.side(each) for each in held(zero, kind)} for kind in ("masters", "states", "gradients")}


SLEEPY = {"masters": {HOST}, "states": {HOST}, "gradients": {HOST}}


WAKING: dict[str, Callable[[LowLevelZeroOptimizer, Callable[[], Tensor]], Any]] = {
    "reload": lambda zero, loss: zero.reload_states(),
    "backward": lambda zero, loss: zero.backward(loss()),
    "plain backward": lambda zero, loss: loss().backward(),
    "step": lambda zero, loss: zero.step(),
    "zeros": lambda zero, loss: zero.zero_grad(set_to_none=False),
    "state_dict": lambda zero, loss: zero.state_dict(),
    "clip": lambda zero, loss: zero.clip_grad_norm_(1e3),
    "read": lambda zero, loss: [p.grad.norm() for p in zero.sharded_parameters.groups[0] if p.grad is not None],
}


def trained(rank: int, world_size: int, run: Run, sleeps: bool) -> dict[str, Tensor]:
    """Train, and sleep in each step before another call wakes; in fp16 none is a plain backward, which isn't scaled."""
    calls = [name for name in WAKING if name != "plain backward" or run.dtype != torch.float16]
    with two_devices() as mode:
        model, zero = made(run, mode)
        for step in range(run.steps):
            zero.backward(loss_of(model, run, step, 0, rank))
            if sleeps and step:
                assert zero.offload_states(pinned=bool(step % 2), non_blocking=bool(step % 3)) > 0
                assert sides(zero, mode) == SLEEPY
                assert {mode.side(p) for p in model.parameters()} == {DEVICE}
            WAKING[calls[step % len(calls)]](zero, lambda step=step: loss_of(model, run, step, 1, rank))
            assert HOST not in set().union(*sides(zero, mode).values())
            zero.step()
            zero.zero_grad()
            if sleeps:
                zero.offload_states()
        return {name: value.clone() for name, value in model.state_dict().items()}


OF_BF16 = Run(2, steps=len(WAKING) + 1, dtype=torch.bfloat16, optimizer=adamw, options={"reduce_bucket_size": 50})
OF_FP16 = replace(OF_BF16, dtype=torch.float16, optimizer=momentum).with_options(initial_scale=64.0)
RUNS = {
    "stage 1, by elements": OF_BF16.with_options(split="elements"),
    "stage 2, by parameters": OF_BF16.with_options(stage=2, split="parameters"),
    "fp16": OF_FP16.with_options(stage=2, overlap_allgather=True),
}


@on_ranks(2, RUNS)
def test_no_call_and_no_number_tells_that_states_have_slept(rank: int, name: str) -> None:
    woken, never = (trained(rank, 2, RUNS[name], sleeps) for sleeps in (True, False))
    assert all(torch.equal(woken[name], never[name]) for name in never)


def a_linear(mode: TwoDevices, **options: Any) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    """Return a layer and its optimizer, which has states and gradients."""
    model = nn.Linear(4, 4, dtype=options.pop("dtype", torch.bfloat16))
    for p in model.parameters():
        mode.put(p, DEVICE)
    zero = LowLevelZeroOptimizer(adamw(model.parameters()), model=model, **options)
    zero.backward(model(torch.ones(2, 4, dtype=model.weight.dtype)).sum())
    zero.step()
    return model, zero


@on_ranks(2, sleep.KINDS)
def test_what_is_included_alone_sleeps(rank: int, kind: str) -> None:
    with two_devices() as mode:
        _, zero = a_linear(mode)
        sizes = {each: sum(t.untyped_storage().nbytes() for t in held(zero, each)) for each in SLEEPY}
        moved = zero.offload_states(include=[kind])
        found = sides(zero, mode)
        assert [each for each in found if found[each] == {HOST}] == [kind] * (kind != "buffers")
        assert sizes.get(kind, 0) <= moved <= sizes.get(kind, 0) + 32  # and step counts
        assert zero.streams.released == (kind == "buffers")
        assert zero.offload_states(include=("masters", "states")) > 0  # wakes the others
        assert {each for each, at in sides(zero, mode).items() if at == {HOST}} == {"masters", "states"}


@on_ranks(2)
def test_memory_of_the_device_is_let_go_and_gradients_of_a_step_are_forgotten_asleep(rank: int) -> None:
    with two_devices() as mode:
        _, zero = a_linear(mode)
        storages = [ref(each.untyped_storage()) for kind in SLEEPY for each in held(zero, kind)]
        zero.offload_states()
        gc.collect()
        assert not any(each() for each in storages)
        zero.zero_grad()
        assert sides(zero, mode) == {**SLEEPY, "gradients": set()}  # it didn't wake
        zero.reload_states()
        assert sides(zero, mode) == {"masters": {DEVICE}, "states": {DEVICE}, "gradients": set()}


@on_ranks(1)
def test_a_gradient_that_is_replaced_while_its_slice_sleeps_is_where_it_was(rank: int) -> None:
    """Somebody keeps it when gradients are forgotten. There is one device more here, of no memory, to sleep on."""
    with two_devices() as mode:
        model, zero = a_linear(mode)
        record = zero.sharded_parameters[model.weight]
        kept, awake = record.p32.grad, record.p32
        record.p32 = nn.Parameter(awake.detach().to("meta"))
        made = kept.retire()
        record.p32 = awake
        awake.grad = made
        with pytest.raises(RuntimeError, match="weight"):
            kept.clone()


@on_ranks(2)
def test_masters_that_are_the_parameter_stay_and_with_them_its_memory(rank: int) -> None:
    with two_devices() as mode:
        model, zero = a_linear(mode, dtype=torch.float32)
        weight = model.weight.detach().clone()
        zero.offload_states()
        assert sides(zero, mode) == {**SLEEPY, "masters": set()}
        assert torch.equal(model.weight, weight)
        zero.step()
        assert not torch.equal(model.weight, weight)


@on_ranks(2)
def test_experts_sleep_too(rank: int) -> None:
    alone = [torch.distributed.new_group([each]) for each in range(2)][rank]
    with two_devices() as mode:
        model = nn.ModuleList(nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(2))
        for p in model.parameters():
            mode.put(p, DEVICE)
        experts = {alone: list(model[1].parameters())}
        zero = LowLevelZeroOptimizer(adamw(model.parameters()), pg_to_param_list=experts, model=model)
        for _ in range(2):
            zero.backward(sum(layer(torch.ones(2, 4, dtype=torch.bfloat16)).sum() for layer in model))
            zero.offload_states()
            assert {mode.side(each) for each in held(zero, "gradients")} == {HOST}
            zero.step()
            zero.offload_states()
            assert sides(zero, mode) == SLEEPY
            zero.zero_grad()


@on_ranks(2)
def test_a_checkpoint_is_saved_asleep_as_awake_and_loading_wakes(rank: int, tmp_path: Any) -> None:
    with two_devices() as mode:
        model, zero = a_linear(mode)
        save_checkpoint(tmp_path / "awake", model, zero)
        zero.offload_states()
        save_checkpoint(tmp_path / "asleep", model, zero)
        after = []
        for path in ("awake", "asleep"):
            zero.step()  # by the gradients that the first step has left
            zero.offload_states()
            load_checkpoint(tmp_path / path, model, zero)
            assert HOST not in set().union(*sides(zero, mode).values())
            zero.step()
            after.append([each.clone() for kind in ("masters", "states") for each in held(zero, kind)])
        assert all(map(torch.equal, *after))


@on_ranks(2, [True, False])
def test_on_the_host_there_is_nothing_to_move_and_a_line_tells_that(
    rank: int, offload: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lowlevel_zero")
    with two_devices() if offload else nullcontext(TwoDevices()) as mode:
        _, zero = a_linear(mode, cpu_offload=offload)
        assert zero.offload_states() == 0
    assert "offload_states: what is to be offloaded is on the host already" in caplog.messages


@on_ranks(2)
def test_a_move_that_fails_leaves_everything_as_it_was(rank: int) -> None:
    with two_devices() as mode:
        _, zero = a_linear(mode)
        before, move, moved = sides(zero, mode), sleep._move, []

        def fails_late(members: Any, device: torch.device, *args: Any) -> int:
            moved.append(device)
            if len(moved) == 3:
                raise MemoryError("no pinned memory")
            return move(members, device, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sleep, "_move", fails_late)
            with pytest.raises(MemoryError, match="no pinned memory"):
                zero.offload_states()
        assert sides(zero, mode) == before
        zero.step()


@on_ranks(2)
def test_a_wake_that_fails_may_be_called_again(rank: int) -> None:
    """As where the device's memory is still somebody else's."""
    with two_devices() as mode:
        _, zero = a_linear(mode)
        before, move, moved = sides(zero, mode), sleep._move, []

        def fails_once(members: Any, device: torch.device, *args: Any) -> int:
            moved.append(device)
            if len(moved) == 2:
                raise MemoryError("out of memory")
            return move(members, device, *args)

        zero.offload_states()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sleep, "_move", fails_once)
            with pytest.raises(MemoryError, match="out of memory"):
                zero.reload_states()
            zero.reload_states()
        assert sides(zero, mode) == before
        zero.step()


MISUSE: dict[str, tuple[Callable[[LowLevelZeroOptimizer, int], Any], str]] = {
    "include": (
        lambda zero, rank: zero.offload_states(include=("masters", "weights")),
        r"include: expected some of \('masters', 'states', 'gradients', 'buffers'\), got 'weights'",
    ),
    "a word": (lambda zero, rank: zero.offload_states(include="masters"), "include: expected some of"),
    "one rank alone": (
        lambda zero, rank: zero.step() if rank else zero.offload_states(),
        "expected the same call on every rank, got .*rank 0 to offload_states.*rank 1 to step",
    ),
    "in inference mode": (
        lambda zero, rank: torch.inference_mode()(zero.offload_states)(),
        "offload_states: expected it outside of torch.inference_mode",
    ),
}


@on_ranks(2, MISUSE, one_group=False)
def test_misuse_is_refused_and_changes_nothing(rank: int, case: str) -> None:
    act, message = MISUSE[case]
    with two_devices() as mode:
        _, zero = a_linear(mode)
        before = sides(zero, mode)
        with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
            act(zero, rank)
        assert sides(zero, mode) == before
