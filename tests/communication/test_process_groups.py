"""Process groups: those that some ranks alone have made don't matter, and each of the caller's gets one beside it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import Communication, LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import load_checkpoint, save_checkpoint
from lowlevel_zero.communication import process_groups
from lowlevel_zero.communication.process_groups import side_group
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.deepspeed import full_grads
from tests.support.checkpoints import check_same
from tests.support.on_ranks import on_ranks
from tests.support.patching import patch_rank
from tests.support.ranks import run_ranks
from tests.support.saving import squares, wrapped
from tests.support.several import of_all


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def made(model: nn.Module, **options: Any) -> LowLevelZeroOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return LowLevelZeroOptimizer(sgd, model=model, **{"reduce_bucket_size": 50, **options})


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def train(model: nn.Module, optimizer: LowLevelZeroOptimizer, rank: int, steps: int = 2) -> list[Tensor]:
    """The parameters after some steps; in the first one, a rank lacks a gradient, which leads to forecasts."""
    for step in range(steps):
        layers = [layer for at, layer in enumerate(model) if (at, step, rank) != (1, 0, 0)]
        optimizer.backward(loss_of(nn.Sequential(*layers), step, rank))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


# ---- groups that some ranks alone have made ----


class Gossips:
    """Makes groups that other ranks know nothing of, each time as many as were asked for on this rank."""

    def __init__(self, rank: int, counts: tuple[int, ...]) -> None:
        self.rank = rank
        self.count = counts[rank]
        self.kept: list[Any] = []

    def __call__(self) -> None:
        for number in range(self.count):
            backend = ("gloo", None)[number % 2]
            self.kept.append(dist.new_group([self.rank], backend=backend, use_local_synchronization=True))


def users(folder: Path, rank: int, **options: Any) -> Iterator[list[Tensor]]:
    """One after the other, all that uses process groups beside the caller's; gives what has come of it."""
    kept: list[Any] = []
    for _ in range(2):
        model = net()
        optimizer = made(model, **options)
        kept.append((model, optimizer))
        yield train(model, optimizer, rank)  # with forecasts, from the second step on
    save_checkpoint(folder / "now", model, optimizer)
    yield []
    save_checkpoint(folder / "later", model, optimizer, async_save=True)
    train(model, optimizer, rank)
    load_checkpoint(folder / "later", model, optimizer)
    yield []
    found = []
    for model, optimizer in kept:
        found += train(model, optimizer, rank)
        optimizer.backward(loss_of(model, 9, rank))
        found += [grad for grad in full_grads(model).values() if grad is not None]
    yield found


def everything(rank: int, world_size: int, folder: Path, counts: tuple[int, ...]) -> list[Tensor]:
    """Whatever makes process groups, or uses them, with groups of this rank's own made in between."""
    tell_nobody = Gossips(rank, counts)
    mesh = dist.init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("outer", "inner"))
    levels = mesh.get_group("outer"), mesh.get_group("inner")
    part = [dist.new_group([0, 1]), dist.new_group(list(range(2, world_size)))][rank // 2]
    found = []
    choices: list[dict[str, Any]] = [
        {"partition_grad": True, "overlap_allgather": True},
        {"dp_process_group": part, "partition_grad": True},
        {"dp_process_group": levels, "partition_grad": True},
        {"dp_process_group": levels[1], "extra_dp_group": levels[0], "communication": Communication(hybrid_shard=True)},
    ]
    for number, options in enumerate(choices):
        tell_nobody()
        parts = 2 if options.get("dp_process_group") is part else None  # torch 2.4 can't load for it
        for values in islice(users(folder / f"{number}", rank, **options), parts):
            found += values
            tell_nobody()
    return found


def test_what_some_ranks_alone_have_made_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the way that buckets take."""
    found = []
    for shared, counts in ((False, (3, 0, 1, 2)), (True, (0, 0, 0, 0))):
        monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", str(int(shared)))
        folder = tmp_path / str(len(found))
        folder.mkdir()
        found.append(run_ranks(everything, 4, folder, counts, timeout=100))
    check_same(*found)


# ---- how many there are ----


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def sockets() -> int:
    return sum(_is_socket(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))


def _is_socket(path: str) -> bool:
    try:
        return os.readlink(path).startswith("socket:")
    except FileNotFoundError:  # what listed them
        return False


@pytest.mark.parametrize(("shared", "beside"), [("1", 1), ("0", 2)], ids=["shared memory", "messages"])
def test_there_are_as_many_beside_each_of_the_callers_however_many_use_them(
    shared: str, beside: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", shared)

    def count(rank: int, world_size: int) -> list[tuple[int, int, int]]:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        levels = mesh.get_group("outer"), mesh.get_group("inner")
        seen = []
        for name, options in (
            ("flat", {}),
            ("hybrid", {"dp_process_group": levels, "communication": Communication(hybrid_shard=True)}),
        ):
            before = groups()
            counts = [(groups(), sockets()) for _ in users(tmp_path / name, rank, partition_grad=True, **options)]
            assert counts[1:] == counts[:-1], counts
            seen.append((groups() - before, len(counts), sockets()))
        return seen

    for (flat, *_), (levels, *_) in run_ranks(count, 4, timeout=100):
        assert flat == beside
        assert levels == 2 * beside  # of the two; that of all ranks is there


@on_ranks(2)
def test_torch_gives_a_side_group_to_nobody_who_asks_for_one_of_its_ranks(rank: int) -> None:
    ShardGroup()
    assert dist.distributed_c10d._find_pg_by_ranks_and_tag("", [0, 1]) is dist.group.WORLD


@on_ranks(2)
def test_a_side_group_has_the_caller_s_timeout_and_ends_with_all_groups(rank: int) -> None:
    side = side_group(dist.new_group([0, 1], timeout=timedelta(seconds=77)))
    assert dist.get_process_group_ranks(side) == [0, 1]
    assert side._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 77.0
    dist.barrier()
    dist.destroy_process_group()
    assert groups() == 0


def test_a_timeout_is_the_shortest_of_any_device_s() -> None:
    """As where one backend's has been set by itself; a device whose communicator isn't made yet has none."""

    class Group:
        _device_types = ("slow", "fast", "unused", "without")

        def _get_backend(self, device: str) -> Any:
            if device == "unused":
                raise RuntimeError("no communicator yet")
            seconds = {"slow": 77, "fast": 7}.get(device)
            return SimpleNamespace(options=SimpleNamespace(_timeout=seconds and timedelta(seconds=seconds)))

    group: Any = Group()
    assert process_groups.timeout_of(group) == 7.0
    group._device_types = ("unused",)
    assert process_groups.timeout_of(group) == dist.constants.default_pg_timeout.total_seconds()


# ---- a communicator of our own ----


def join_stand_in(rank: int, world_size: int, meeting: Path) -> None:
    """A default group whose backend has, as NCCL, one order of collectives a group: gloo under another name."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.Backend.register_backend(
        "stand_in",
        lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
        devices=["cpu"],
    )
    dist.init_process_group("cpu:stand_in", f"file://{meeting}", rank=rank, world_size=world_size)


@on_ranks(2, init=False)
def test_what_a_device_reduces_is_not_taken_for_the_callers_own(rank: int, tmp_path: Path) -> None:
    """A rank that is ready earlier starts its reduction before the caller's collective, another after it."""
    join_stand_in(rank, 2, tmp_path / "meeting")
    group, callers = ShardGroup(), torch.full((2,), 10.0 * (rank + 1))
    group.connect()
    buffer = torch.full((2, 1), rank + 1.0)
    early = group.all_reduce(buffer) if rank == 0 else None
    asked = dist.all_reduce(callers, async_op=True)
    assert (early or group.all_reduce(buffer)).wait().flatten().tolist() == [3.0, 3.0]
    asked.wait()
    dist.barrier()
    assert callers[0] == 30.0


@on_ranks(2, init=False)
def test_one_communicator_serves_all_optimizers_and_trains_unless_it_is_given_up(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_stand_in(rank, 2, tmp_path / "meeting")
    used: list[str] = []
    for name in ("_broadcast_coalesced", "all_reduce"):
        collective = getattr(dist, name)

        def noted(*args: Any, collective: Any = collective, **keywords: Any) -> Any:
            used.append(keywords.get("group", args[0]).group_name)
            return collective(*args, **keywords)

        monkeypatch.setattr(dist, name, noted)
    values = []
    # One group for what hosts tell each other, and one for buffers where they have one of their own.
    for own, carries in ((False, "0"), (True, "lowlevel_zero/data/0")):
        before, models = groups(), [net() for _ in range(3)]
        used.clear()
        optimizers = [made(model, communication=Communication(own_communicator=own)) for model in models]
        # The first one's tensors come at construction, where all ranks are: NCCL would begin in a backward else.
        assert len(set(used)) == 1
        values += [train(model, optimizer, rank)[0] for model, optimizer in zip(models, optimizers, strict=True)]
        assert not optimizers[0].shard_group.on_gloo(torch.device("cpu"))
        assert (groups() - before, set(used)) == (1, {carries})
    check_same(values[:1] * 6, values)
    check_same(*of_all(values))


@on_ranks(3, init=False)
def test_a_part_of_the_ranks_shares_its_communicator_where_it_would_be_split_off_that_of_all(
    rank: int, tmp_path: Path
) -> None:
    """As where ``init_process_group`` was given a device: ranks that aren't in the group would have to take part."""
    join_stand_in(rank, 3, tmp_path / "meeting")
    part = dist.new_group([0, 1])
    for device in (torch.device("cuda", 0), None) if rank < 2 else ():
        bound = SimpleNamespace(bound_device_id=device)
        patch_rank(process_groups, "default_group", lambda bound=bound: bound)
        assert (process_groups.data_group(part) is part) == (device is not None)


@on_ranks(3, init=False)
def test_hosts_of_a_grid_talk_over_gloo_whatever_carries_buffers(rank: int, tmp_path: Path) -> None:
    """Also where all ranks of the grid are a part of the world, and have a group that this package makes."""
    join_stand_in(rank, 3, tmp_path / "meeting")
    pair = dist.new_group([0, 1])
    if rank < 2:
        union = process_groups.union_group([0, 1], pair)
        for group, backend in ((union, "stand_in"), (side_group(union), "gloo")):
            assert set(process_groups.backends_by_device(group).values()) == {backend}


@on_ranks(2)
def test_ranks_meet_when_all_wait_at_a_time(rank: int) -> None:
    store = process_groups.store_of(dist.group.WORLD, "meeting")
    for _ in range(2 if rank == 1 else 0):
        with pytest.raises(TimeoutError, match="Not there yet: rank 0"):
            process_groups.await_all(store, [0, 1], timeout=0.0)
    dist.barrier()
    for _ in range(3):
        process_groups.await_all(store, [0, 1], timeout=20.0)
    assert store.add("0/count", 0) == 1


@pytest.mark.parametrize("part", [False, True], ids=["the default group", "a part"])
@on_ranks(2, timeout=30)
def test_a_group_that_is_destroyed_breaks_off_what_no_peer_joins(rank: int, part: bool) -> None:
    """torch forgets the default group's backends before it forgets the group."""
    os.environ["LOWLEVEL_ZERO_SHARED_MEMORY"] = "0"
    patch_rank(process_groups, "_PATIENCE", 0.5)
    unraisable: list[str] = []
    sys.unraisablehook = lambda raised: unraisable.append(f"{raised.exc_value}")
    group = dist.new_group([0, 1]) if part else None
    model, optimizer = wrapped(nn.Linear(64, 64), dp_process_group=group)
    if rank == 0:
        squares(model).backward()
        dist.destroy_process_group(group)
        context = optimizer.shard_group.context
        context.end_threads(0.0, context.threads)
        assert [each.name for each in threading.enumerate() if each.name.startswith("lowlevel_zero")] == []
        assert unraisable == []
    else:
        time.sleep(1.5)
