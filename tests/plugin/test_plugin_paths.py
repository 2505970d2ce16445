"""Paths of a Booster's checkpoints: relative ones, ``Path`` objects, and directories whose index is damaged."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.boosting import boost, check_equal, ours
from tests.support.cases import check_cases
from tests.support.ranks import run_cases_expecting


def a_relative_path_starts_where_the_save_was_called(rank: int, world_size: int, folder: Path, shard: bool) -> None:
    """The thread writes when the working directory is another one."""
    suffix = "" if shard else ".safetensors"
    at_save, later = (folder / f"{name}{suffix}" for name in ("at save", "later"))
    at_save.mkdir(exist_ok=True)
    later.mkdir(exist_ok=True)
    pair = boost(ours, precision="fp32")
    go_on = threading.Event()
    pair.booster.checkpoint_io._thread.submit(go_on.wait)
    before = os.getcwd()
    os.chdir(at_save)
    pair.booster.save_model(pair.model, f"model{suffix}", shard=shard, use_async=True)
    pair.booster.save_optimizer(pair.optimizer, f"optimizer{suffix}", shard=shard, use_async=True)
    os.chdir(later)
    go_on.set()
    pair.booster.checkpoint_io._sync_io()
    os.chdir(before)
    dist.barrier()
    assert sorted(os.listdir(at_save)) == [f"model{suffix}", f"optimizer{suffix}"]
    assert os.listdir(later) == []


def a_path_object_is_as_good_as_text(rank: int, world_size: int, folder: Path, shard: bool) -> None:
    model, optimizer = (folder / f"{name}{'' if shard else '.pt'}" for name in ("a model", "an optimizer"))
    pair = boost(ours, precision="bf16")
    pair.train(rank, 0, 1)
    values, state = pair.values(), pair.state()
    pair.booster.save_model(pair.model, model, shard=shard)
    pair.booster.save_optimizer(pair.optimizer, optimizer, shard=shard)
    pair.train(rank, 1, 2)
    dist.barrier()
    pair.booster.load_model(pair.model, model)
    pair.booster.load_optimizer(pair.optimizer, optimizer)
    check_equal(values, pair.values())
    check_equal(state, pair.state())


def test_paths_of_any_kind(tmp_path: Path, subtests: pytest.Subtests) -> None:
    checks = (a_relative_path_starts_where_the_save_was_called, a_path_object_is_as_good_as_text)
    cases = [(check, tmp_path, shard) for check in checks for shard in (False, True)]
    check_cases(subtests, 2, lambda rank, world_size, check, *how: check(rank, world_size, *how), cases)


HALVES = [("model", "load"), ("model", "save"), ("optimizer", "load"), ("optimizer", "save")]


def test_a_half_written_index_is_named(tmp_path: Path, subtests: pytest.Subtests) -> None:
    def rank(rank: int, world_size: int, what: str, do: str) -> None:
        pair = boost(ours, precision="fp32")
        thing, folder = getattr(pair, what), tmp_path / f"{what} to {do}"
        getattr(pair.booster, f"save_{what}")(thing, str(folder), shard=True)
        if rank == 0:
            (index,) = folder.glob("*.index.json")
            index.write_text(index.read_text()[:40])
        dist.barrier()
        getattr(pair.booster, f"{do}_{what}")(thing, str(folder), **({"shard": True} if do == "save" else {}))

    for (what, do), ran in run_cases_expecting(rank, 2, HALVES):
        with subtests.test(f"{do} the {what}"):
            first = ran.raised()[0]
            assert first.type == "ValueError"
            assert f"{what} to {do}/" in first.message
            assert "expected the index of a sharded checkpoint, got a damaged file" in first.message
