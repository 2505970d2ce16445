"""Files of optimizers in trainers' checkpoints: where a rank doesn't find what the others do, all raise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lowlevel_zero.trainers.files import load_optimizer, save_sharded
from tests.support.checkpoints import check_same
from tests.support.ranks import run_cases_expecting
from tests.support.saving import linear, train

FINDS = {  # what each of two ranks finds: the first one's error and the second one's, in parts
    ("nothing", "nothing"): ("optimizer_0: expected an optimizer's slices there, or a file optimizer.bin",) * 2,
    ("file", "nothing"): ("rank 1 could not load its optimizer", "found neither: load a checkpoint whose save was"),
    ("folder", "nothing"): ("rank 1 could not load its optimizer", "found neither: load a checkpoint whose save was"),
    ("file", "folder"): ("expected the optimizer of the same checkpoint on",) * 2,
}


def test_ranks_that_find_other_files_all_raise(tmp_path: Path, subtests: pytest.Subtests) -> None:
    def rank(rank: int, world_size: int, *finds: str) -> None:
        model, optimizer = linear()
        train(model, optimizer)
        seen = {name: tmp_path / f"{name} of {' and '.join(finds)}" for name in ("nothing", "file", "folder")}
        save_sharded(optimizer, seen["folder"] / "optimizer_0", seen["folder"] / "optimizer.bin")
        state = optimizer.state_dict()
        if rank == 0:
            seen["file"].mkdir()
            torch.save(state, seen["file"] / "optimizer.bin")
        dist.barrier()
        place = seen[finds[rank]]
        try:
            load_optimizer(optimizer, place / "optimizer_0", place / "optimizer.bin")
        finally:
            check_same(optimizer.state_dict(), state)

    for finds, ran in run_cases_expecting(rank, 2, list(FINDS)):
        with subtests.test(" and ".join(finds)):
            for raised, part in zip(ran.raised(), FINDS[finds], strict=True):
                assert part in raised.message
