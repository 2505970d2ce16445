"""Buffers in shared memory: with a rank that lags, when they can't be had, and what they take."""

from __future__ import annotations

import gc
import logging
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero.communication import runtime
from lowlevel_zero.communication.backends import memory_pool, shared_memory
from lowlevel_zero.communication.backends.backend import Trade
from lowlevel_zero.communication.backends.control_pipe import ControlPipe, PeerPipe
from lowlevel_zero.communication.backends.memory_pool import Memory
from lowlevel_zero.communication.backends.pairwise import Pairwise
from lowlevel_zero.communication.backends.shared_memory import SharedMemory
from lowlevel_zero.communication.memory_file import map_of
from lowlevel_zero.communication.processes import own_process
from lowlevel_zero.communication.runtime import Threads
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.layout import memory_held
from tests.support.on_ranks import on_ranks
from tests.support.patching import patch_rank
from tests.support.ranks import run_cases, run_ranks, run_ranks_expecting
from tests.support.saving import Pair, linear, squares, train, wrapped
from tests.support.several import told

SWITCH = "LOWLEVEL_ZERO_SHARED_MEMORY"
CPU = torch.device("cpu")


FEW = 2**15  # bytes of slots with a few numbers that peers may not have read yet


def is_shared(group: ShardGroup) -> bool:
    return group.host_backend.shares_memory


def group_with_wires(shared: bool = True) -> ShardGroup:
    os.environ[SWITCH] = str(int(shared))
    group = ShardGroup()
    group.connect()
    assert is_shared(group) == shared
    return group


@on_ranks(4)
def test_an_all_reduce_reads_no_more_with_more_ranks(rank: int) -> None:
    """A rank reads at most two buffers' worth, and ends with the exact sum, also where a peer lags."""
    group, read, trade = group_with_wires(), [], SharedMemory.trade

    def noted(self: SharedMemory, what: Trade, act: Any) -> Any:
        read.append(sum(what.coming) - what.coming[rank])
        return trade(self, what, act)

    patch_rank(SharedMemory, "trade", noted)
    numbers, works = torch.arange(20).view(4, 5), []
    for number in range(3):
        works.append(group.all_reduce(group.new_buffer(5, torch.bfloat16, CPU).copy_(numbers + rank + number)))
        time.sleep(0.05 * rank)
    for number, work in enumerate(works):
        assert torch.equal(work.wait(), (4 * (numbers + number) + 6).to(torch.bfloat16))
    assert sum(read) <= 3 * 2 * 20


@on_ranks(4)
def test_a_buffer_that_is_padded_for_an_all_reduce_gives_its_block_back(rank: int) -> None:
    """As one row does that the ranks don't divide; no step comes between."""
    group, held = group_with_wires(), []
    for _ in range(16):
        buffer = group.new_buffer(2**18 + 1, torch.float32, CPU, rows=1).fill_(1.0)
        assert (group.all_reduce(buffer).wait() == 4).all()
        dist.barrier()
        held.append(sum(map(torch.numel, group.held())))
    assert held[-1] - held[2] <= 2 * 2**21  # peers may be late to tell of two blocks that they have read


@on_ranks(4, timeout=30)
def test_a_rank_without_memory_still_hands_on_the_row_that_others_wait_for(rank: int) -> None:
    """What an all-reduce needs is allocated when it starts."""

    def refuse_memory(*_: object) -> Any:
        raise MemoryError

    group = group_with_wires()
    work = group.all_reduce(group.new_buffer(2, torch.float32, CPU).fill_(rank))
    if rank == 1:
        patch_rank(Memory, "take", refuse_memory)
    assert torch.equal(work.wait(), torch.full((4, 2), 6.0))


@on_ranks(2)
def test_a_step_between_processes_of_one_host_takes_no_collective_of_gloo_s(rank: int) -> None:
    """Its threads have to be woken on every rank, and there are fewer cores than threads."""

    def refused(*_: object, **__: object) -> Any:
        raise AssertionError("a collective of gloo's")

    os.environ[SWITCH] = "1"
    model, optimizer = linear(clip_grad_norm=1.0, steps=1)  # the first step has told of the order of gradients
    for name in ("all_reduce", "broadcast", "all_gather_object"):
        patch_rank(torch.distributed, name, refused)
    patch_rank(Pairwise, "send_and_receive", refused)
    train(model, optimizer, steps=3)
    assert optimizer.shard_group.progress.step == 4


# A rank that lags


def test_a_rank_may_be_far_ahead_and_its_peers_may_read_what_it_left_when_it_has_gone() -> None:
    def run(rank: int, world_size: int) -> None:
        group = group_with_wires()
        pending = [
            group.reduce_scatter(group.new_buffer(1000, torch.float32, CPU).fill_(number)) for number in range(50)
        ]
        if rank == 0:
            totals = [each.wait() for each in pending]
            group.all_reduce_max([0])
            os._exit(0)
        group.all_reduce_max([0])
        time.sleep(0.2)
        totals = [each.wait() for each in pending]
        raise ValueError(f"{[total[-1].item() for total in totals] == [2.0 * number for number in range(50)]}")

    left, stayed = run_ranks_expecting(run, 2)
    assert left.type == "ProcessDied"
    assert (stayed.type, stayed.message) == ("ValueError", "True")


def to(pipe: ControlPipe) -> PeerPipe:
    return PeerPipe(own_process(), pipe.descriptor, 1, Threads())


def connected(own: ControlPipe) -> list[ControlPipe]:
    """Pipes of ranks 1 and 2, of this same process, which tell ``own``, rank 0's, what they have to say."""
    others = [ControlPipe(rank, range(3), {}, Threads()) for rank in (1, 2)]
    for rank, other in enumerate(others, 1):
        own.peers[rank] = to(other)
        other.peers[0] = to(own)
    return others


def test_a_pipe_is_looked_at_only_if_what_is_known_doesn_t_do(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ControlPipe(0, range(3), {}, Threads())
    others = connected(own)
    looks = 0
    collect = own.collect

    def count() -> None:
        nonlocal looks
        looks += 1
        collect()

    monkeypatch.setattr(own, "collect", count)
    for _ in range(2):
        for other in others:
            other.tell(7)
    assert own.has((7, 1))
    assert looks == 1
    assert own.has((7, 0))
    assert sorted(own.receive((7, 0), timeout=1)) == [1, 2]
    assert looks == 1
    assert not own.has((7, 0))
    assert looks == 2


def test_any_amount_of_messages_is_taken_in_at_a_time() -> None:
    own = ControlPipe(0, range(3), {}, Threads())
    others = connected(own)
    for count in (1, 400, 1024, 3000):
        for serial in range(count):
            for rank, other in enumerate(others, 1):
                other.tell(count, rank, [serial])
            if serial % 200 == 0:
                own.collect()
        for serial in range(count):
            assert own.receive((count, serial), timeout=10) == {1: (1, serial, 0), 2: (2, serial, 0)}


def test_any_number_of_blocks_may_be_finished_with_at_a_time() -> None:
    own = Memory(0, range(2), Threads())
    others = connected(own.pipe)
    blocks = [own.take(1, torch.uint8)[0] for _ in range(600)]
    for block in blocks:
        block.readers.discard(0)
        others[0].peers[0].finished.append(block.offset)
    for left in (588, 576, 564):
        others[0].tell(0)
        own.pipe.collect()
        assert sum(bool(block.readers) for block in blocks) == left
    for _ in range(50):
        others[0].tell(0)
    own.pipe.collect()
    own.trim()
    assert own.held() == []


# When it can't be had


def refuse(*_: object) -> Any:
    raise PermissionError("not here")


MESSAGES = "by pairwise messages over gloo "
WAYS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (lambda patch: patch.delattr(os, "memfd_create"), f"{MESSAGES}(rank 1: not on its system: module 'os' has"),
    (lambda patch: patch.setattr(runtime.Runtime, "others_memory", refuse), f"{MESSAGES}(rank 1: not here)"),
    (lambda patch: patch.setenv(SWITCH, "0"), f"{MESSAGES}({SWITCH}=0 is set on one of them)"),
    (lambda patch: None, "by shared memory of one host"),
]


@on_ranks(3)
def test_one_rank_that_can_t_makes_all_send_messages_and_the_first_line_says_why(rank: int) -> None:
    for prepare, way in WAYS:
        group = dist.new_group()  # what it has found out about shared memory it keeps
        with pytest.MonkeyPatch.context() as patch, told(logging.INFO) as lines:
            if rank == 1:
                prepare(patch)
            ranks = linear(dp_process_group=group)[1].shard_group
            total = ranks.reduce_scatter(ranks.new_buffer(5, torch.float32, CPU).fill_(rank)).wait()
        assert total.tolist() == [3.0] * 5, way
        gc.collect()
        assert (is_shared(ranks), mappings()) == ((True, 3) if "shared" in way else (False, 0)), way
        starts = [line.partition(" 1 bucket ")[::2] for line in lines]
        head = "ZeRO stage 1: 8 elements in 2 parameters over 3 ranks,"
        assert [(start, rest[: len(way)]) for start, rest in starts] == [(head, way)] * (rank == 0)


@on_ranks(2)
def test_a_limited_address_space_is_left_to_others(rank: int) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (2**40, resource.RLIM_INFINITY))
    with told(logging.INFO) as lines:
        _, optimizer = linear(steps=1)
    assert not is_shared(optimizer.shard_group)
    assert all("(rank 1: its address space is limited" in line and "ulimit -v" in line for line in lines)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"process": own_process()._replace(space="another")}, "another host"),
        ({"token": b"something else"}, "seen here"),
        ({"process": own_process()._replace(number=2**22 + 1)}, "No such file"),
    ],
    ids=["host", "token", "process"],
)
def test_only_the_very_process_s_memory_is_taken(changed: dict[str, Any], reason: str) -> None:
    own = Memory(0, range(1), Threads())
    map_of(own.address)  # as if this process were another
    before = descriptors()
    with pytest.raises((OSError, ValueError), match=reason):
        map_of(own.address._replace(**changed))
    assert descriptors() == before


def test_no_more_memory_is_an_error_that_tells_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Memory(0, range(1), Threads())
    with pytest.raises(MemoryError, match=f"{SWITCH}=0"):
        own.take(own.address.size, torch.uint8)

    def full(*_: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError, match="no space"):
        own.take(100, torch.uint8)


@pytest.mark.parametrize("options", [{"fp8_communication": True}, {"partition_grad": True}], ids=str)
def test_a_rank_that_runs_out_of_memory_raises_in_time_and_its_peers_too(options: dict[str, Any]) -> None:
    """It has no memory for any one of its blocks: also for that of a second collective, as of fp8's sums."""

    def run(rank: int, world_size: int, failing: int) -> tuple[list[str], float, int]:
        model, optimizer = wrapped(nn.Linear(64, 64), **options)
        calls, left = 0, failing

        def full(*_: int) -> None:
            nonlocal calls
            calls += 1
            if calls == left:
                raise OSError("no space")

        began, errors = time.monotonic(), []
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(os, "posix_fallocate", full)
            for _ in range(2):
                try:
                    optimizer.backward(squares(model))
                    optimizer.step()
                except RuntimeError as error:
                    errors.append(str(error))
                while True:  # until the ranks are together again
                    try:
                        optimizer.zero_grad()
                        break
                    except RuntimeError as error:
                        errors.append(str(error))
        return errors, time.monotonic() - began, calls

    blocks = run_ranks(run, 2, 0)[1][2]
    assert blocks > ("fp8_communication" in options)
    for (failing,), ran in run_cases(run, 2, [(at + 1,) for at in range(blocks)], timeout=30):
        for errors, seconds, calls in ran.values():
            assert seconds < 10
            assert errors or calls < failing  # blocks may be free again in time
            assert all("no space" in error or "rank 1" in error for error in errors)


# Nothing piles up


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:lowlevel_zero")


def make() -> Pair:
    model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(4)))
    return wrapped(model, reduce_bucket_size=3000, partition_grad=True)


@on_ranks(3)
def test_eighty_steps_take_no_more_than_twenty(rank: int) -> None:
    pair, pause, seen = make(), random.Random(rank), []
    for steps in (20, 60):
        for _ in range(steps):
            time.sleep(pause.random() * 0.002)
            train(*pair)
        seen.append((descriptors(), mappings()))
    assert seen[0] == seen[1]
    assert seen[1][1] == 3
    assert 0 < memory_held(pair[1]).bucket_buffers < 2**20


@on_ranks(2)
def test_ten_optimizers_one_after_another_take_no_more_than_one(rank: int) -> None:
    gc.freeze()  # what torch left behind at its import takes long to look at
    seen = []
    for _ in range(10):
        model, optimizer = make()
        train(model, optimizer, steps=2)
        group = optimizer.shard_group
        group.all_reduce_max([0])  # all have read all
        del model, optimizer
        gc.collect()
        seen.append((descriptors(), mappings()))
        assert sum(each.nbytes for each in group.held()) <= FEW
    assert seen[0] == seen[-1]
    assert seen[0][1] == 2


@on_ranks(2)
def test_between_steps_little_is_kept(rank: int) -> None:
    patch_rank(shared_memory, "KEPT", 2 * 2**20)
    group = group_with_wires()
    pending = [group.reduce_scatter(group.new_buffer(2**17, torch.float32, CPU).fill_(1)) for _ in range(8)]
    assert sum(each.nbytes for each in group.held()) == 8 * 2**20
    for each in pending:
        each.wait()
    group.all_reduce_max([0])
    group.trim()
    assert 2 * 2**20 <= sum(each.nbytes for each in group.held()) <= 2 * 2**20 + FEW


@on_ranks(2)
def test_the_end_of_a_step_frees_what_is_idle(rank: int) -> None:
    patch_rank(shared_memory, "KEPT", 0)
    model, optimizer = make()
    train(model, optimizer)
    optimizer.shard_group.all_reduce_max([0])  # all have read all
    optimizer.step()
    assert memory_held(optimizer).bucket_buffers <= FEW


@on_ranks(2)
def test_a_buffer_that_could_not_be_filled_is_not_kept(rank: int) -> None:
    group = group_with_wires()
    group.new_buffer(2**20, torch.float32, CPU)
    group.trim(for_good=True)
    assert sum(each.nbytes for each in group.held()) <= FEW


@on_ranks(1)
def test_the_transport_is_not_set_up_where_it_is_of_no_use(rank: int) -> None:
    patch_rank(memory_pool, "Memory", None)
    model, optimizer = make()
    train(model, optimizer)
    assert optimizer.shard_group.progress.step == 1
