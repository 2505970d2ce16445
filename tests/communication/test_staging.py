"""A device's wires through the host: shown with the host's own tensors, treated as if gloo couldn't take them."""

from __future__ import annotations

import pytest
from torch import Tensor

from lowlevel_zero.communication import shard_group
from lowlevel_zero.communication.backends.staged import Staged
from tests.support.numbers import DROPS, STAGES
from tests.support.oracle import Result, Run, check_close, train_sharded
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(("stage", "shared"), list(zip(STAGES, (False, True), strict=True)))
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
        monkeypatch.setattr(shard_group, "is_staged", lambda device: True)
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
