"""The collectives: against plain sums, for every dtype and row size, and the two paths beside each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowlevel_zero.communication import flat_buffers
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.buffers import buffer_of, sum_of_buffers
from tests.support.ranks import run_cases, run_ranks, run_ranks_expecting

WORLD_SIZES = [1, 2, 3, 4]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ROWS = [1, 3, 7, 64, 1001]


over_world_sizes = pytest.mark.parametrize("world_size", WORLD_SIZES)


@over_world_sizes
def test_reduce_scatter_leaves_the_own_row_of_the_sum(world_size: int, subtests: pytest.Subtests) -> None:
    def reduce(rank: int, world_size: int, dtype: torch.dtype) -> list[Tensor]:
        group = ShardGroup()
        pending = [group.reduce_scatter(buffer_of(rank, world_size, row, dtype)) for row in ROWS]
        return [each.wait() for each in pending]

    for (dtype,), ran in run_cases(reduce, world_size, zip(DTYPES)):
        with subtests.test(dtype=dtype):
            for rank, totals in enumerate(ran.values()):
                for row, total in zip(ROWS, totals, strict=True):
                    assert total.dtype == dtype
                    assert torch.equal(total, sum_of_buffers(world_size, row, dtype)[rank])


@over_world_sizes
def test_all_reduce_leaves_the_sum_in_the_wire(world_size: int, subtests: pytest.Subtests) -> None:
    def reduce(rank: int, world_size: int, dtype: torch.dtype) -> list[tuple[Tensor, bool]]:
        group = ShardGroup()
        wires = [buffer_of(rank, world_size, row, dtype) for row in ROWS]
        pending = [group.all_reduce(wire) for wire in wires]
        return [
            (each.wait(), each.tensors[0].data_ptr() == wire.data_ptr())
            for each, wire in zip(pending, wires, strict=True)
        ]

    for (dtype,), ran in run_cases(reduce, world_size, zip(DTYPES)):
        with subtests.test(dtype=dtype):
            for totals in ran.values():
                for row, (total, in_place) in zip(ROWS, totals, strict=True):
                    assert in_place
                    assert torch.equal(total, sum_of_buffers(world_size, row, dtype))


@over_world_sizes
def test_all_gather_fills_the_wire_with_every_rank_s_row(world_size: int, subtests: pytest.Subtests) -> None:
    def gather(rank: int, world_size: int, dtype: torch.dtype) -> list[Tensor]:
        group = ShardGroup()
        pending = []
        for row in ROWS:
            wire = torch.full((world_size, row), -99.0, dtype=dtype)
            wire[rank] = buffer_of(rank, world_size, row, dtype)[rank]
            pending.append(group.all_gather(wire))
        return [each.wait() for each in pending]

    for (dtype,), ran in run_cases(gather, world_size, zip(DTYPES)):
        with subtests.test(dtype=dtype):
            for wires in ran.values():
                for row, wire in zip(ROWS, wires, strict=True):
                    for rank in range(world_size):
                        assert torch.equal(wire[rank], buffer_of(rank, world_size, row, dtype)[rank])


@over_world_sizes
def test_all_to_all_hands_out_what_each_rank_has_for_each(world_size: int, subtests: pytest.Subtests) -> None:
    def size(of: int, to: int) -> int:
        return 0 if to == 1 else 3 * of + to + 1  # nothing for rank 1

    def piece(of: int, to: int, number: int, dtype: torch.dtype) -> Tensor:
        return torch.arange(size(of, to)).to(dtype) + 10 * of + number

    def hand_out(rank: int, world_size: int, dtype: torch.dtype) -> list[Tensor]:
        group = ShardGroup()
        ranks = range(world_size)
        sizes, sizes_into = [size(rank, to) for to in ranks], [size(of, rank) for of in ranks]
        pending = []
        for number in range(3):
            wire = torch.cat([piece(rank, to, number, dtype) for to in ranks])
            pending.append(group.all_to_all(wire, sizes, wire.new_empty(sum(sizes_into)), sizes_into))
        assert group.traffic()["step"] == 3 * (sum(sizes) - sizes[rank]) * dtype.itemsize
        return [each.wait() for each in pending]

    for (dtype,), ran in run_cases(hand_out, world_size, zip(DTYPES)):
        with subtests.test(dtype=dtype):
            for rank, received in enumerate(ran.values()):
                for number, tensor in enumerate(received):
                    expected = [piece(of, rank, number, dtype) for of in range(world_size)]
                    assert torch.equal(tensor, torch.cat(expected))


def test_sixteen_bit_rows_are_summed_in_fp32(subtests: pytest.Subtests) -> None:
    def reduce(rank: int, world_size: int, dtype: torch.dtype, large: float) -> Tensor:
        wire = torch.full((world_size, 5), large if rank == 0 else 1.0, dtype=dtype)
        return ShardGroup().reduce_scatter(wire).wait()

    # Above these only even numbers can be held.
    for (dtype, large), ran in run_cases(reduce, 3, [(torch.bfloat16, 256.0), (torch.float16, 2048.0)]):
        with subtests.test(dtype=dtype):
            for total in ran.values():
                assert total.tolist() == [large + 2] * 5


def test_reductions_may_be_taken_in_another_order_than_they_were_started() -> None:
    def reduce(rank: int, world_size: int) -> list[float]:
        group = ShardGroup()
        pending = [group.reduce_scatter(torch.full((world_size, 2), float(at + rank))) for at in range(4)]
        return [each.wait()[0].item() for each in reversed(pending)]

    assert run_ranks(reduce, 2) == [[7.0, 5.0, 3.0, 1.0]] * 2


@over_world_sizes
def test_sum_scalar(world_size: int) -> None:
    totals = run_ranks(lambda rank, _: ShardGroup().sum_scalar(torch.tensor(rank + 0.5)).wait().item(), world_size)
    assert totals == [sum(rank + 0.5 for rank in range(world_size))] * world_size


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


@over_world_sizes
def test_broadcast_carries_all_kinds(world_size: int, subtests: pytest.Subtests) -> None:
    def broadcast(rank: int, world_size: int, batch_bytes: int) -> list[tuple[Tensor, tuple[int, ...]]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flat_buffers, "_MESSAGE_BYTES", batch_bytes)
            tensors = assorted(rank)
            ShardGroup().broadcast(tensors, torch.device("cpu"))
            return [(tensor, tensor.stride()) for tensor in tensors]

    for (batch_bytes,), ran in run_cases(broadcast, world_size, [(1,), (40,), (2**20,)]):
        with subtests.test(batch_bytes=batch_bytes):
            for got in ran.values():
                for (tensor, stride), expected in zip(got, assorted(0), strict=True):
                    assert (tensor.dtype, stride) == (expected.dtype, expected.stride())
                    assert torch.equal(tensor, expected)


@over_world_sizes
def test_what_hosts_tell_each_other(world_size: int) -> None:
    def tell(rank: int, world_size: int) -> dict[str, Any]:
        group = ShardGroup()
        return {
            "largest": group.all_reduce_max([rank, -rank, 5]),
            "alike": group.alike([3, -(2**55)]),
            "one differs": group.alike([3, int(rank == world_size - 1)]),
            "from_rank_zero": group.from_rank_zero([rank + 7, -rank]),
            "exchange": group.all_gather_object({"rank": rank}),
        }

    last = world_size - 1
    for told in run_ranks(tell, world_size):
        assert told == {
            "largest": [last, 0, 5],
            "alike": True,
            "one differs": world_size == 1,
            "from_rank_zero": [7, 0],
            "exchange": [{"rank": rank} for rank in range(world_size)],
        }


def test_hosts_can_agree_while_the_wires_of_some_are_under_way() -> None:
    def agree(rank: int, world_size: int) -> tuple[list[int], float]:
        group = ShardGroup()
        wire = torch.full((world_size, 3), float(rank + 1))
        early = group.reduce_scatter(wire) if rank == 0 else None
        agreed = group.all_reduce_max([10 - rank])
        pending = early if early is not None else group.reduce_scatter(wire)
        return agreed, pending.wait()[0].item()

    assert run_ranks(agree, 3, timeout=20) == [([10], 6.0)] * 3


def test_part_of_the_ranks_can_be_a_group() -> None:
    def use(rank: int, world_size: int) -> Any:
        group = dist.new_group([3, 1])
        if rank not in (1, 3):
            return None
        shard = ShardGroup(group)
        wire = torch.zeros(2, 1)
        wire[shard.rank] = rank
        value = torch.tensor(float(rank))
        shard.broadcast([value], torch.device("cpu"))
        return shard.rank, shard.all_gather(wire).wait().tolist(), value.item(), shard.from_rank_zero([rank])

    got = run_ranks(use, 4)
    assert got[0] is None
    assert got[2] is None
    first = 1 if got[1][0] == 0 else 3
    for rank in (1, 3):
        own, rows, value, told = got[rank]
        assert sorted(rows) == [[1.0], [3.0]]
        assert rows[own] == [rank]
        assert (value, told) == (first, [first])


def test_a_rank_outside_of_the_group_is_refused() -> None:
    def construct(rank: int, world_size: int) -> str:
        group = dist.new_group([2])
        try:
            ShardGroup(group)
        except ValueError as error:
            return str(error)
        return "taken"

    *outside, inside = run_ranks(construct, 3)
    assert all(message.startswith("dp_process_group: ") for message in outside)
    assert inside == "taken"


def test_without_a_process_group_the_way_out_is_told() -> None:
    (error,) = run_ranks_expecting(lambda rank, world_size: ShardGroup(), 1, init=False)
    assert error.type == "RuntimeError"
    assert re.search(r"init_process_group\(\).*torchrun.*world_size=1", error.message)


def test_gloo_serves_the_host_and_what_it_says_it_does() -> None:
    def served(rank: int, world_size: int) -> tuple[list[str], list[bool]]:
        group = ShardGroup()
        return group.device_types, [kind in group.device_types for kind in ("cpu", "cuda", "meta")]

    assert run_ranks(served, 1) == [(["cpu", "cuda"], [True, True, False])]


def test_a_new_default_group_is_not_taken_for_the_old_one() -> None:
    def twice(rank: int, world_size: int) -> list[int]:
        first = ShardGroup().all_reduce_max([rank])
        dist.barrier()
        second = ShardGroup(dist.new_group(list(range(world_size)))).all_reduce_max([rank + 1])
        return first + second

    assert run_ranks(twice, 2) == [[1, 2]] * 2
