"""On a GPU: nothing that waits for the device, streams that wait for each other, and overlap.

Collected where there is one (see ``conftest.py``). One is enough: one rank talks to itself through NCCL. Ranks are
forked, so nothing may have touched the device before: run it in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.offload.step_on_host import StepOnHost
from tests.gpu.places import DEVICE, EXTRAS, LONG, Blocks, over_nccl, ran_beside_products, traced_backward
from tests.support.numbers import STAGES
from tests.support.oracle import adamw, momentum
from tests.support.patching import patch_rank

# ---- nothing waits for the device ----


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}, {"overlap_allgather": True}], ids=str)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stage", STAGES)
def test_steps_wait_for_nothing(stage: str, dtype: str, fused: bool, options: dict[str, Any]) -> None:
    if dtype == "float16" and not fused:
        options = {**options, "waits": True}

    def work(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        model = Blocks().to(DEVICE, getattr(torch, dtype))
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        own = {key: value for key, value in options.items() if key != "waits"}
        optimizer = LowLevelZeroOptimizer(inner, reduce_bucket_size=2**19, **STAGES[stage], **own)
        x = torch.randn(16, 512, device=DEVICE, dtype=getattr(torch, dtype))

        def step() -> None:
            optimizer.backward(model(x))
            optimizer.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(4):  # the first ones agree on the bucket order, and make states
            step()
        with no_waiting():
            if options.get("waits"):
                with pytest.raises(RuntimeError, match="synchronizing"):  # it has to know whether to step
                    step()
            else:
                step()
                step()

    over_nccl(work)


# ---- streams ----


class Late(torch.autograd.Function):
    """The identity, whose gradient is there after a long while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        torch.cuda._sleep(LONG)
        return grad * 1


class Branches(nn.Module):
    """Layers side by side, each on a stream of its own, forward and so backward too."""

    def __init__(self, branches: int = 3, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(branches))
        self.streams: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.streams:
            self.streams = [torch.cuda.Stream() for _ in self.layers]
        main = torch.cuda.current_stream()
        found = []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                found.append(torch.tanh(layer(Late.apply(x))).square().mean() + Late.apply(layer(x)).square().mean())
        for stream in self.streams:
            main.wait_stream(stream)
        return torch.stack(found).sum()


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_several_streams_are_waited_for(stage: str, extra: str) -> None:
    def train(optimize: Callable[[nn.Module], Any], backward: Callable[[Any, Tensor], None]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Branches().to(DEVICE)
        optimizer = optimize(model)
        x = torch.randn(8, 256, device=DEVICE, requires_grad=True)
        for _ in range(3):
            backward(optimizer, model(x))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    def work(rank: int, world_size: int) -> None:
        expected = train(lambda model: momentum(model.parameters()), lambda _, loss: loss.backward())
        got = train(
            lambda model: LowLevelZeroOptimizer(
                momentum(model.parameters()), reduce_bucket_size=70_000, **STAGES[stage], **EXTRAS[extra]
            ),
            lambda optimizer, loss: optimizer.backward(loss),
        )
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)

    over_nccl(work)


def test_a_step_on_another_stream_than_the_one_it_was_made_on() -> None:
    def train(side: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Blocks(width=64).to(DEVICE)
        optimizer = LowLevelZeroOptimizer(momentum(model.parameters()), partition_grad=True)
        stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                optimizer.backward(model(torch.ones(4, 64, device=DEVICE)))
                torch.cuda._sleep(LONG)
                optimizer.step()
                optimizer.zero_grad()
            found = [p.detach().clone() for p in model.parameters()]
        torch.cuda.synchronize()
        return found

    def work(rank: int, world_size: int) -> None:
        torch.testing.assert_close(train(True), train(False))

    over_nccl(work)


def test_readers_on_several_streams_get_the_new_values() -> None:
    def work(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(512, 512).to(DEVICE)
        optimizer = LowLevelZeroOptimizer(momentum(model.parameters()), overlap_allgather=True, partition_grad=True)
        for _ in range(3):
            optimizer.backward(model(torch.ones(4, 512, device=DEVICE)).square().sum())
            torch.cuda._sleep(LONG)
            optimizer.step()
            readers = [torch.cuda.Stream() for _ in range(3)]
            seen = []
            for reader in readers:
                with torch.cuda.stream(reader):
                    seen.append(model.weight.clone())
            seen.append(model.weight.clone())
            torch.cuda.synchronize()
            assert all(torch.equal(each, model.weight) for each in seen)
            optimizer.zero_grad()

    over_nccl(work)


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool, bare: bool) -> None:
    """``bare``: hooks alone tell the end of a backward, and of those nested in it, on threads of autograd's own."""

    class Checkpointed(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=reentrant)
            return x.float().square().mean()

    def train(kind: type[Blocks]) -> list[Tensor]:
        torch.manual_seed(0)
        model = kind(width=64).to(DEVICE)
        optimizer = LowLevelZeroOptimizer(momentum(model.parameters()), reduce_bucket_size=5000, partition_grad=True)
        for _ in range(3):
            loss = model(torch.ones(4, 64, device=DEVICE, requires_grad=True))
            loss.backward() if bare else optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    def work(rank: int, world_size: int) -> None:
        torch.testing.assert_close(train(Checkpointed), train(Blocks))

    over_nccl(work)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("way", ["graphed", "compiled"])
def test_parts_that_are_replayed_or_compiled_read_the_new_values(way: str, overlaps: bool) -> None:
    def train(changed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Blocks(width=64).to(DEVICE), torch.ones(4, 64, device=DEVICE, requires_grad=True)
        optimizer = LowLevelZeroOptimizer(
            momentum(model.parameters()), model=model, reduce_bucket_size=5000, overlap_allgather=overlaps
        )
        forward: Any = model
        for step in range(5):
            if changed and step == 2:  # gathers of the step before are still to be finished, if anybody waits for them
                forward = torch.cuda.make_graphed_callables(model, (x,)) if way == "graphed" else torch.compile(model)
            optimizer.backward(forward(x))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    def work(rank: int, world_size: int) -> None:
        torch.testing.assert_close(train(True), train(False))

    over_nccl(work)


# ---- the host's part, and overlap ----


def test_offloaded_rows_travel_through_pinned_memory_and_masters_rest_in_plain() -> None:
    def work(rank: int, world_size: int) -> None:
        rows: list[Tensor] = []
        copy_down = StepOnHost._copy_down

        def spy(self: StepOnHost, row: Tensor) -> Tensor:
            rows.append(copy_down(self, row))
            return rows[-1]

        patch_rank(StepOnHost, "_copy_down", spy)
        model = Blocks(width=64).to(DEVICE, torch.bfloat16)
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), cpu_offload=True, partition_grad=True)
        optimizer.backward(model(torch.ones(4, 64, device=DEVICE, dtype=torch.bfloat16)))
        optimizer.step()
        assert rows
        assert all(row.is_pinned() for row in rows)
        slices = [optimizer.get_working_to_master_map()[id(p)] for p in model.parameters()]
        states = [value for state in optimizer.state.values() for value in state.values()]
        assert {tensor.device.type for tensor in (*slices, *states)} == {"cpu"}
        assert all(
            torch.equal(p.view(-1).cpu(), own.bfloat16()) for p, own in zip(model.parameters(), slices, strict=True)
        )

    over_nccl(work)


@pytest.mark.parametrize("stage", STAGES)
def test_the_device_s_memory_is_free_while_states_sleep(stage: str) -> None:
    def train(sleeps: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Blocks().to(DEVICE, torch.bfloat16)
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model, **STAGES[stage])
        elements = sum(p.numel() for p in model.parameters())
        for step in range(4):
            x = torch.randn(16, 512, device=DEVICE, dtype=torch.bfloat16)
            optimizer.backward(model(x))
            if sleeps:
                optimizer.offload_states(pinned=step % 2 == 0)
                assert {p32.device.type for group in optimizer.param_groups for p32 in group["params"]} == {"cpu"}
            optimizer.step()
            optimizer.zero_grad()
            if sleeps:
                before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
                moved = optimizer.offload_states()
                assert moved >= 12 * elements  # master and two states
                assert torch.cuda.memory_allocated() <= before - moved
                assert torch.cuda.memory_reserved() < reserved
        return [p.detach().clone() for p in model.parameters()]

    def work(rank: int, world_size: int) -> None:
        torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)

    over_nccl(work)


def test_backward_goes_on_while_rows_travel_to_the_host(tmp_path: Path) -> None:
    def work(rank: int, world_size: int) -> None:
        trace = traced_backward(tmp_path / "trace.json", cpu_offload=True)
        assert ran_beside_products(trace, "dtoh")

    over_nccl(work)
