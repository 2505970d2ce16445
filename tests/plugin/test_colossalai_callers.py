"""What ColossalAI's own tests of its low-level ZeRO do to the optimizer, done to ours, on CPU and gloo."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_ranks

TOLERANCE = {
    torch.float32: {"rtol": 1.3e-6, "atol": 1e-5},
    torch.float16: {"rtol": 5e-2, "atol": 5e-4},
    torch.bfloat16: {"rtol": 4e-3, "atol": 4e-3},
}


class Mlp(nn.Module):
    """Two layers that work and one that never does."""

    def __init__(self, sizes: tuple[int, int, int] = (123, 253, 51)) -> None:
        super().__init__()
        self.first = nn.Linear(sizes[0], sizes[1])
        self.unused = nn.Linear(sizes[1], sizes[1])
        self.second = nn.Linear(sizes[1], sizes[2])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def twins(dtype: torch.dtype = torch.float32, **sizes: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    model = Mlp(**sizes).to(dtype)
    return model, copy.deepcopy(model)


def data_of(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2001 + rank))


def same(one: Tensor, other: Tensor, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(one.detach().to(dtype), other.detach().to(dtype), **TOLERANCE[dtype])


def same_gradient(one: Tensor, other: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """To a few roundings of its size: a factor 2, or a rank that is left out, is off by half of that."""
    off = (one.detach().float() - other.detach().float()).norm() / one.detach().float().norm()
    assert off <= max(2 * torch.finfo(dtype).eps, 1e-6)


def test_stage_1_and_2_agree() -> None:
    def rank(rank: int, world_size: int) -> None:
        models = twins()
        optimizers = [
            LowLevelZeroOptimizer(
                torch.optim.Adam(model.parameters(), lr=1),
                overlap_communication=True,
                partition_grad=stage == 2,
                initial_scale=128,
                verbose=True,
            )
            for stage, model in zip((1, 2), models, strict=True)
        ]
        x = data_of(rank, 32, 123)
        outputs = [model(x) for model in models]
        assert torch.equal(*outputs)
        for optimizer, output in zip(optimizers, outputs, strict=True):
            optimizer.backward(output.mean().float())
        for pair in zip(*(model.parameters() for model in models), strict=True):
            one, other = (optimizer.get_param_grad(p) for optimizer, p in zip(optimizers, pair, strict=True))
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                same_gradient(one, other)
        for optimizer in optimizers:
            optimizer.step()
            optimizer._force_wait_all_gather()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            same(one, other)

    run_ranks(rank, 4)


@pytest.mark.parametrize(("dtype", "master_weights"), [(torch.float16, True), (torch.bfloat16, False)])
def test_stage_1_is_ddp(dtype: torch.dtype, master_weights: bool) -> None:
    def rank(rank: int, world_size: int) -> None:
        plain, sharded = twins(dtype)
        ddp = DistributedDataParallel(plain, static_graph=True)
        optimizer = LowLevelZeroOptimizer(
            torch.optim.SGD(sharded.parameters(), lr=1),
            overlap_communication=True,
            initial_scale=1,
            reduce_bucket_size=1024 * 1024,
            master_weights=master_weights,
        )
        reference = torch.optim.SGD(ddp.parameters(), lr=1)
        assert optimizer.get_grad_norm() is None
        x = data_of(rank, 32, 123).abs().to(dtype)
        mine, theirs = sharded(x), ddp(x)
        same(mine, theirs, dtype)
        optimizer.backward(mine.mean())
        theirs.mean().backward()
        for p, q in zip(ddp.parameters(), sharded.parameters(), strict=True):
            gradient = optimizer.get_param_grad(q)
            assert (p.grad is None) == (gradient is None)
            if p.grad is not None and gradient is not None:
                same_gradient(p.grad, gradient, dtype)
        optimizer.step()
        reference.step()
        assert isinstance(optimizer.get_grad_norm(), float)
        for p, q in zip(ddp.parameters(), sharded.parameters(), strict=True):
            same(p, q, dtype)

    run_ranks(rank, 2)


@pytest.mark.parametrize(("stage", "unsynchronised"), [(1, True), (2, False)])
def test_accumulation_is_ddps(stage: int, unsynchronised: bool) -> None:
    def rank(rank: int, world_size: int) -> None:
        plain, sharded = twins()
        ddp = DistributedDataParallel(plain, find_unused_parameters=True)
        reference = torch.optim.Adam(ddp.parameters(), lr=0.001)
        optimizer = LowLevelZeroOptimizer(
            torch.optim.Adam(sharded.parameters(), lr=0.001),
            overlap_communication=False,
            reduce_bucket_size=262144,
            clip_grad_norm=1.0,
            partition_grad=stage == 2,
        )

        def accumulate(x: Tensor, quiet: bool) -> None:
            with optimizer.no_sync() if quiet else nullcontext():
                mine = sharded(x)
                optimizer.backward(mine.sum().float())
            with ddp.no_sync() if quiet else nullcontext():
                theirs = ddp(x)
                assert torch.equal(mine, theirs)
                theirs.sum().backward()
            if quiet:
                for p, q in zip(ddp.parameters(), sharded.parameters(), strict=True):
                    assert (p.grad is None) == (q.grad is None)
                    assert p.grad is None or torch.equal(p.grad, q.grad)

        accumulate(data_of(rank, 16, 123), unsynchronised)
        accumulate(data_of(rank + 10, 16, 123), False)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        reference.step()
        for p, q in zip(ddp.parameters(), sharded.parameters(), strict=True):
            same(p, q)

    run_ranks(rank, 2)


@pytest.mark.parametrize(("stage", "master_weights"), [(1, True), (2, False)])
def test_state_is_plain_torchs(stage: int, master_weights: bool) -> None:
    def rank(rank: int, world_size: int) -> None:
        plain, sharded = twins(sizes=(12, 25, 13))
        ddp = DistributedDataParallel(plain, static_graph=True)
        reference = torch.optim.Adam(ddp.parameters(), lr=1)
        optimizer = LowLevelZeroOptimizer(
            torch.optim.Adam(sharded.parameters(), lr=1),
            overlap_communication=True,
            initial_scale=1,
            reduce_bucket_size=262144,
            partition_grad=stage == 2,
            master_weights=master_weights,
        )
        x = data_of(rank, 4, 12)
        optimizer.backward(sharded(x).mean().float())
        ddp(x).mean().backward()
        optimizer.step()
        reference.step()
        expected = reference.state_dict()
        check_state(expected, optimizer.state_dict())
        shards = dict(item for shard, _ in optimizer.state_dict_shard(max_shard_size=1024) for item in shard.items())
        check_state(expected, {"state": shards})
        optimizer.optim.state = []  # ColossalAI's test empties it so
        optimizer.load_state_dict(copy.deepcopy(expected))
        check_state(expected, optimizer.state_dict())
        assert optimizer.optim.state_dict()["state"][0]["exp_avg"].shape == (-(-12 * 25 // world_size),)

    run_ranks(rank, 2)


def check_state(expected: dict[str, Any], got: dict[str, Any]) -> None:
    assert expected["state"].keys() == got["state"].keys()
    for place, state in expected["state"].items():
        assert state.keys() == got["state"][place].keys()
        for key, value in state.items():
            same(value, got["state"][place][key])


def test_only_the_master_keeps_whole_states() -> None:
    def rank(rank: int, world_size: int) -> None:
        _, model = twins(torch.bfloat16, sizes=(12, 25, 13))
        optimizer = LowLevelZeroOptimizer(torch.optim.Adam(model.parameters(), lr=1))
        optimizer.backward(model(data_of(rank, 4, 12).bfloat16()).mean())
        optimizer.step()
        buffers: dict[int, dict[str, Tensor]] = {}
        first = optimizer.state_dict(buffers, only_on_master=True)
        again = optimizer.state_dict(buffers, only_on_master=True)
        assert list(first["state"]) == [0, 1, 4, 5]
        assert first["param_groups"] == optimizer.state_dict()["param_groups"]
        if rank > 0:
            assert first["state"] == {0: {}, 1: {}, 4: {}, 5: {}}
        else:
            assert list(first["state"][0]) == ["step", "exp_avg", "exp_avg_sq", "master_param"]
            assert again["state"][0]["exp_avg"] is first["state"][0]["exp_avg"]
            assert first["state"][0]["exp_avg"] is buffers[0]["exp_avg"]
            assert torch.equal(first["state"][0]["master_param"].bfloat16(), model.first.weight)
        sizes = [size for _, size in optimizer.state_dict_shard(1, only_on_master=True)]
        assert sum(sizes) == pytest.approx(3 * 4 * (12 * 25 + 25 + 25 * 13 + 13) / 2**20)

    run_ranks(rank, 2)


def test_maps_between_working_and_master() -> None:
    def rank(rank: int, world_size: int) -> None:
        _, model = twins(torch.bfloat16, sizes=(3, 5, 1))
        plain = torch.optim.SGD(model.parameters(), lr=1)
        optimizer = LowLevelZeroOptimizer(plain)
        assert optimizer.unwrap() is plain
        assert optimizer.optim.state is optimizer.state
        for p in model.parameters():
            master = optimizer.working_to_master_param[id(p)]
            assert optimizer.master_to_working_param[id(master)] is p
            padded = nn.functional.pad(p.detach().view(-1), (0, optimizer.get_param_padding_size(p)))
            assert torch.equal(padded.chunk(world_size)[rank], master.to(p.dtype))

    run_ranks(rank, 3)


@pytest.mark.parametrize("options", [{}, {"partition_grad": True}, {"overlap_communication": False}])
def test_counting_references_frees_it(options: dict[str, Any]) -> None:
    def rank(rank: int, world_size: int) -> list[str]:
        deleted: list[str] = []

        class Watched(LowLevelZeroOptimizer):
            def __del__(self) -> None:
                super().__del__()
                deleted.append("gone")

        gc.collect()
        gc.disable()
        _, model = twins(sizes=(12, 24, 12))
        for train in (False, True):
            optimizer = Watched(torch.optim.SGD(model.parameters(), lr=1), model=model, **options)
            if train:
                optimizer.backward(model(data_of(rank, 4, 12)).mean())
                optimizer.step()
                optimizer.zero_grad()
            del optimizer
        return deleted

    assert run_ranks(rank, 2) == [["gone", "gone"]] * 2
