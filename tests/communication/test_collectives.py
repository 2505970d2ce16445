"""The collectives: against plain sums, for every dtype and row size, and the two paths beside each other."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowlevel_zero.communication import broadcast as broadcasts
from lowlevel_zero.communication.broadcast import Broadcast
from lowlevel_zero.communication.progress import REDUCTION
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.communication.work import Work
from tests.support.cases import check_cases
from tests.support.checkpoints import check_same
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks_expecting
from tests.support.ways import group_by, ways_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ROWS = [1, 7, 64, 1001]


# ---- the contract of all backends ----


def buffer_of(rank: int, world_size: int, row: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums every dtype holds exactly; different on each rank and in each row."""
    generator = torch.Generator().manual_seed(1000 * row + rank)
    return torch.randint(-9, 10, (world_size, row), generator=generator).to(dtype)


def buffers_of(group: ShardGroup, row: int, dtype: torch.dtype) -> dict[int, Tensor]:
    """What each rank has, by its global rank."""
    ranks = sorted({*dist.get_process_group_ranks(group.group), *group.slice_ranks})
    return {rank: buffer_of(rank, group.size, row, dtype) for rank in ranks}


def check_reductions(group: ShardGroup, rank: int, dtype: torch.dtype) -> None:
    """All are under way at once; a buffer that the group gave is as good as any other."""
    begun = []
    for row in ROWS:
        mine = buffers_of(group, row, dtype)[rank]
        given = group.new_buffer(row, dtype, mine.device).copy_(mine)
        begun.append([group.reduce_scatter(mine), group.reduce_scatter(given), group.all_reduce(mine.clone())])
    for row, works in zip(ROWS, begun, strict=True):
        whole = torch.stack([each.double() for each in buffers_of(group, row, dtype).values()]).sum(0).to(dtype)
        for work, expected in zip(works, (whole[group.rank], whole[group.rank], whole), strict=True):
            total = work.wait()
            assert total.dtype == dtype
            assert torch.equal(total, expected)


def check_gathers(group: ShardGroup, rank: int, dtype: torch.dtype) -> None:
    """Of a buffer, and of pieces, one or several, that are rows already, or are cast into them, or some of each."""
    begun = []
    for row in ROWS:
        wire = torch.full((group.size, row), -99.0, dtype=dtype)
        wire[group.rank] = buffers_of(group, row, dtype)[rank][group.rank]
        begun.append(group.all_gather(wire))
    for row, work in zip(ROWS, begun, strict=True):
        buffers = buffers_of(group, row, dtype)
        assert torch.equal(work.wait(), torch.stack([buffers[of][at] for at, of in enumerate(group.slice_ranks)]))
    expected = torch.arange(1.0, group.size + 1)
    for sizes, given in product(([5, 1, 300, 17], [5]), ("rows", "cast", "rows and copies")):
        rows = [torch.full((group.size, size), -1.0, dtype=dtype) for size in sizes]
        own = [torch.full((size,), group.rank + 1.0) for size in sizes]
        if given != "cast":
            own = [each[group.rank].fill_(group.rank + 1) for each in rows]
        if given == "rows and copies":
            copies = [each.clone() for each in own[1:]]
            for each in own[1:]:
                each.fill_(-1)
            own[1:] = copies
        group.gather(own, rows).wait()
        assert all(torch.equal(each, expected.to(dtype)[:, None].expand_as(each)) for each in rows)


def check_owned(group: ShardGroup, rank: int, dtype: torch.dtype) -> None:
    """One rank's sums and broadcasts, of each rank in turn, all under way at once; the sum of all for stage 1, too."""
    sent = dict(group.traffic())
    begun = []
    for row, owner in product(ROWS, range(group.size)):
        mine = buffers_of(group, row, dtype)[rank][:1]
        given = group.new_buffer(row, dtype, mine.device, False, 1).copy_(mine)
        begun.append([group.reduce(mine.clone(), owner), group.reduce(given, owner), group.all_reduce(mine.clone())])
    for (row, owner), works in zip(product(ROWS, range(group.size)), begun, strict=True):
        whole = torch.stack([each[:1].double() for each in buffers_of(group, row, dtype).values()]).sum(0).to(dtype)
        own = whole[0] if group.rank == owner else whole[0, :0]
        for work, expected in zip(works, (own, own, whole), strict=True):
            total = work.wait()
            assert total.dtype == dtype
            assert torch.equal(total, expected)
    begun = []
    for owner, sizes, partly in product(range(group.size), ([5, 1, 300, 17], [5]), (False, True)):
        pieces = [torch.full((size,), -1.0, dtype=dtype) for size in sizes]
        own = [torch.full((size,), owner + 1.0) for size in sizes] if group.rank == owner else []
        if own and partly:  # an owner's may be the whole ones themselves, all or some of them
            own = [pieces[0].fill_(owner + 1), *(each.to(dtype) for each in own[1:])]
        begun.append((group.broadcast_from(owner, own, pieces), pieces, owner))
    for work, pieces, owner in begun:
        work.wait()
        assert all(torch.equal(piece, torch.full_like(piece, owner + 1.0)) for piece in pieces)
    if group.rank == 0 and group.size > 1:
        gathered = (group.traffic()["gather"] - sent["gather"]) / ((group.size - 1) * dtype.itemsize)
        assert gathered == pytest.approx(2 * sum((5, 1, 300, 17, 5)), rel=0.02)


def check_exchanges(group: ShardGroup, dtype: torch.dtype) -> None:
    """Each row goes to its rank, of any buffer and of one that the group gave; several are under way at once."""
    backend, begun = group.backend(torch.device("cpu")), []
    for number in range(3):
        rows = torch.arange(group.size * 5).view(group.size, 5).to(dtype) + 10 * group.rank + number
        given = backend.new_buffer(5, dtype, rows.device).copy_(rows)
        begun += [(number, backend.exchange_rows(each)) for each in (rows, given)]
    for number, work in begun:
        own = torch.arange(5 * group.rank, 5 * group.rank + 5).to(dtype)
        assert torch.equal(work.wait(), torch.stack([own + 10 * of + number for of in range(group.size)]))


def check_few(group: ShardGroup, rank: int) -> None:
    """What hosts tell each other, and the sum over the slices, each once."""
    ranks = dist.get_process_group_ranks(group.group)
    total = group.sum_scalar(torch.tensor(rank + 0.5))
    later = group.start_all_reduce_max(torch.tensor([rank, 7 - rank, 7], dtype=torch.uint8))
    assert group.all_reduce_max([rank, -rank, 5]) == [max(ranks), 0, 5]
    assert group.all_reduce_max([-(2**55)]) == [-(2**55)]
    assert group.from_rank_zero([rank + 7, -rank]) == [7, 0]
    assert group.all_gather_object({"rank": rank, "much": "x" * 500 * rank}) == [
        {"rank": of, "much": "x" * 500 * of} for of in ranks
    ]
    assert total.wait().item() == sum(of + 0.5 for of in group.slice_ranks)
    assert later.wait().tolist() == [max(ranks), 7, 7]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_all_ways_keep_the_contract(world_size: int, subtests: pytest.Subtests) -> None:
    def contract(rank: int, world_size: int, way: str) -> None:
        with group_by(way) as group:
            for dtype in DTYPES:
                check_reductions(group, rank, dtype)
                check_gathers(group, rank, dtype)
                check_owned(group, rank, dtype)
            if way in ("messages", "shared memory", "native"):  # others hand rows to one of these
                check_exchanges(group, torch.bfloat16)
                check_exchanges(group, torch.uint8)
            check_few(group, rank)

    check_cases(subtests, world_size, contract, ways_of(world_size))


@on_ranks(3, ("messages", "shared memory", "native", "staged shared memory"))
def test_traffic_is_what_the_buffers_hold(rank: int, way: str) -> None:
    with group_by(way) as group:
        for start in (group.reduce_scatter, group.all_reduce):
            start(group.new_buffer(10, torch.bfloat16, torch.device("cpu")).zero_()).wait()
        rows = [torch.zeros(3, 7), torch.zeros(3, 2)]
        group.gather([each[rank] for each in rows], rows).wait()
        group.all_gather(torch.zeros(3, 4)).wait()
        assert group.traffic() == {"reduce": 2 * 3 * 10 * 2, "gather": 2 * 4 * (7 + 2 + 4)}


@on_ranks(1)
def test_a_reduction_that_fails_to_start_is_not_counted(rank: int) -> None:
    """The ranks compare these numbers when they construct another optimizer."""
    group, counts = ShardGroup(), []
    for buffer in (torch.zeros(1, 2), None):
        with pytest.raises(RuntimeError) if buffer is None else nullcontext():
            group.progress.start(REDUCTION, None, partial(_start, buffer))
        counts.append((group.progress.begun[REDUCTION], group.context.begun))
    assert counts == [(1, 1)] * 2


def _start(buffer: Tensor | None) -> Work[Tensor]:
    if buffer is None:
        raise RuntimeError("no memory")
    return Work(lambda: buffer)


@on_ranks(4, DTYPES)
def test_sums_are_those_of_messages_bit_for_bit_and_in_fp32(rank: int, dtype: torch.dtype) -> None:
    """Whole ones are in the order of ranks."""
    rows, wide = (1, 64, 70_001), torch.promote_types(dtype, torch.float32)

    def numbers(rank: int, row: int) -> Tensor:
        return torch.randn(4, row, generator=torch.Generator().manual_seed(1000 * row + rank)).to(dtype)

    totals = []
    for way in ("shared memory", "messages"):
        with group_by(way) as group:
            works = [group.reduce_scatter(numbers(rank, row)) for row in rows]
            works += [group.all_reduce(numbers(rank, row)) for row in rows]
            totals.append([each.wait() for each in works])
    check_same(*totals)
    check_same([sum(numbers(of, row).to(wide) for of in range(4)).to(dtype) for row in rows], totals[0][len(rows) :])


# ---- what else there is to it ----


def assorted(rank: int) -> list[Tensor]:
    """One of each: dtypes that a byte offset suits or not, 0-d, empty, transposed, expanded memory formats."""
    return [
        torch.arange(3, dtype=torch.uint8) + rank,
        torch.tensor(1.5 + rank),
        torch.tensor([True, False, rank > 0]),
        torch.arange(5, dtype=torch.float64) * (rank + 1),
        torch.zeros(0, 4),
        (torch.arange(6.0).view(2, 3) + rank).t(),
        torch.arange(7).bfloat16() + rank,
        torch.tensor(rank, dtype=torch.int64),
        (torch.arange(24.0).view(1, 2, 3, 4) + rank).to(memory_format=torch.channels_last),
        torch.arange(3).half() - rank,
    ]


@pytest.mark.parametrize("world_size", [1, 3])
def test_broadcast_carries_all_kinds(world_size: int, subtests: pytest.Subtests) -> None:
    def broadcast(rank: int, world_size: int, batch_bytes: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(broadcasts, "_MESSAGE_BYTES", batch_bytes)
            tensors = assorted(rank)
            Broadcast(ShardGroup(), tensors, torch.device("cpu")).run()
        check_same(assorted(0), tensors)
        assert [each.stride() for each in tensors] == [each.stride() for each in assorted(0)]

    check_cases(subtests, world_size, broadcast, (1, 40, 2**20))


@on_ranks(3)
def test_a_rank_outside_of_the_group_is_refused(rank: int) -> None:
    group = dist.new_group([2])
    if rank == 2:
        ShardGroup(group)
    else:
        with pytest.raises(ValueError, match="^dp_process_group: "):
            ShardGroup(group)


def test_without_a_process_group_the_way_out_is_told() -> None:
    (error,) = run_ranks_expecting(lambda rank, world_size: ShardGroup(), 1, init=False)
    assert error.type == "RuntimeError"
    assert re.search(r"init_process_group\(\).*torchrun.*world_size=1", error.message)


@on_ranks(1)
def test_gloo_serves_the_host_and_what_it_says_it_does(rank: int) -> None:
    assert ShardGroup().device_types == ["cpu", "cuda"]


@on_ranks(2)
def test_a_new_default_group_is_not_taken_for_the_old_one(rank: int) -> None:
    assert ShardGroup().all_reduce_max([rank]) == [1]
    dist.barrier()
    assert ShardGroup(dist.new_group([0, 1])).all_reduce_max([rank + 1]) == [2]
