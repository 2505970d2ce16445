"""A device's wires through the host: shown with the host's own tensors, treated as if gloo couldn't take them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowlevel_zero.communication import communicator
from lowlevel_zero.communication.backends.staged import Staged
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.buffers import buffer_of, sum_of_buffers
from tests.support.covering import covering
from tests.support.numbers import DROPS, STAGES
from tests.support.oracle import Result, Run, check_close, train_sharded
from tests.support.ranks import run_ranks

ROWS = (1, 7, 1001)


@pytest.fixture
def _forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "is_staged", lambda device: True)


@pytest.mark.usefixtures("_forced")
@pytest.mark.parametrize(
    ("world_size", "dtype", "connect"), covering((2, 3), (torch.float32, torch.bfloat16), (False, True)), ids=str
)
def test_wires_come_back_as_they_would_have(world_size: int, dtype: torch.dtype, connect: bool) -> None:
    def work(rank: int, world_size: int) -> None:
        group = ShardGroup()
        if connect:
            group.communicator.connect()
        assert isinstance(group.communicator.backends[torch.device("cpu"), False], Staged)
        for row in ROWS:
            mine = buffer_of(rank, world_size, row, dtype)
            kept = mine.clone()
            expected = sum_of_buffers(world_size, row, dtype)
            assert torch.equal(group.reduce_scatter(mine).wait(), expected[rank])
            assert torch.equal(group.all_reduce(mine).wait(), expected)
            assert torch.equal(mine, kept)  # nothing was summed in the device's memory
            gathered = torch.zeros_like(mine)
            gathered[rank] = mine[rank]
            everyones = torch.stack([buffer_of(of, world_size, row, dtype)[of] for of in range(world_size)])
            assert group.all_gather(gathered).wait() is gathered
            assert torch.equal(gathered, everyones)
            into = torch.zeros_like(mine)
            sizes = [row] * world_size
            assert group.all_to_all(mine.view(-1), sizes, into.view(-1), sizes).wait().shape == (world_size * row,)
            assert torch.equal(
                into, torch.stack([buffer_of(of, world_size, row, dtype)[rank] for of in range(world_size)])
            )
        assert group.sum_scalar(torch.tensor(float(rank))).wait().item() == world_size * (world_size - 1) / 2

    run_ranks(work, world_size)


@pytest.mark.usefixtures("_forced")
def test_gathers_fill_the_rows() -> None:
    def work(rank: int, world_size: int) -> None:
        group = ShardGroup()
        for sizes in ((3,), (3, 1, 4)):
            own = [torch.full((size,), 10.0 * rank + size) for size in sizes]
            rows = [torch.zeros(world_size, size, dtype=torch.bfloat16) for size in sizes]
            group.gather(own, rows).wait()
            for size, each in zip(sizes, rows, strict=True):
                assert each.tolist() == [[10.0 * of + size] * size for of in range(world_size)]

    run_ranks(work, 3)


@pytest.mark.parametrize(("stage", "shared"), list(zip(STAGES, (False, True, True), strict=True)))
def test_training_ends_in_the_same_bits(monkeypatch: pytest.MonkeyPatch, stage: str, shared: bool) -> None:
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", str(int(shared)))
    run = Run(micro_batches=2, drop=DROPS["different"], clip=0.3).with_options(**STAGES[stage], reduce_bucket_size=50)
    staged: list[int] = []
    stage_wire = Staged._staged

    def counted(self: Staged, wire: Tensor) -> Tensor:
        staged.append(wire.numel())
        return stage_wire(self, wire)

    def train(rank: int, world_size: int) -> list[Result]:
        direct = train_sharded(rank, world_size, run)
        assert not staged
        monkeypatch.setattr(communicator, "is_staged", lambda device: True)
        monkeypatch.setattr(Staged, "_staged", counted)
        through_host = [
            train_sharded(rank, world_size, each)
            for each in (run, run.with_options(overlap_allgather=True), run.with_options(cpu_offload=True))
        ]
        assert staged
        return [direct, *through_host]

    for (direct, norms), *others, (offloaded, its_norms) in run_ranks(train, 2):
        check_close(direct, [direct, *(got for got, _ in others)], 0.0)
        assert [own for _, own in others] == [norms, norms]
        check_close(direct, [offloaded], 2e-6)
        assert its_norms == pytest.approx(norms, rel=1e-5)
