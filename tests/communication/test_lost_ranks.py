"""A rank dies: the others end soon, by an error that names it, wherever they and it were."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lowlevel_zero import Communication
from lowlevel_zero.checkpoint import latest, save_checkpoint
from lowlevel_zero.communication import failed_ranks, process_groups, processes
from lowlevel_zero.communication.failed_ranks import LostRank, lost_rank_error, run_each
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.mortal import BACKWARD, GATHER, PLACES, SAVE, STEP, build, die_at, loss_of
from tests.support.on_ranks import on_ranks
from tests.support.patching import patch_rank
from tests.support.ranks import Raised, run_ranks_losing
from tests.support.saving import train
from tests.support.ways import by

STEPS = 3
ALONE = "lost rank {}, whose process has ended. If that rank ran out of batches, give every rank the same number"
# Ranks that have lost one end themselves, and are named, too, by those that have waited for them meanwhile.
AMONG_OTHERS = r"lost ranks? ([\d, ]*, )?{}\b.*, whose process(es have| has) ended"


WIRES = ("shared memory", "messages")


# ---- it is killed ----


def mortal(lost: int, place: str, options: Callable[[], dict[str, Any]] = dict) -> Callable[[int, int], None]:
    """What each rank does: three steps and a save, in the last of which one rank comes to ``place`` and dies."""

    def run(rank: int, world_size: int, folder: Path) -> None:
        model, inner, optimizer = build(**options())
        for step in range(1, STEPS + 1):
            if step == STEPS and rank == lost:
                die_at(place, 1, model, inner)
            optimizer.backward(loss_of(model, step, rank, world_size))
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(folder / f"step-{step}", model, optimizer)

    return run


def check(raised: dict[int, Raised], lost: int, type: str = "LostRank") -> None:
    for rank, error in raised.items():
        assert error.type == type, (rank, error)
        if len(raised) == 1:
            assert ALONE.format(lost) in error.message, (rank, error)
        assert re.search(AMONG_OTHERS.format(lost), error.message), (rank, error)


def levels() -> dict[str, Any]:
    """Some wait for a thread that waits for another level."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    both = mesh.get_group("outer"), mesh.get_group("inner")
    return {"dp_process_group": both, "communication": Communication(hybrid_shard=True), "overlap_allgather": True}


# Where who dies of how many ranks, with which options, and by which wires.
DEATHS: list[tuple[str, int, int, Callable[[], dict[str, Any]], str]] = [
    *((place, 1, 2, dict, wires) for place, wires in zip(PLACES, cycle(WIRES))),
    (BACKWARD, 2, 4, dict, WIRES[0]),
    (STEP, 0, 4, dict, WIRES[1]),
    *((GATHER, 1, 3, lambda: {"overlap_allgather": True}, wires) for wires in WIRES),  # which nobody waits for any more
    *((BACKWARD, 1, 4, lambda: {"partition_grad": False}, wires) for wires in WIRES),  # a thread sends sums on
    *((BACKWARD, 2, 4, levels, wires) for wires in WIRES),
]


@pytest.mark.parametrize(("place", "lost", "ranks", "options", "wires"), DEATHS)
def test_all_others_end_by_an_error_that_names_it(
    place: str, lost: int, ranks: int, options: Callable[[], dict[str, Any]], wires: str, tmp_path: Path
) -> None:
    with by(wires):
        raised = run_ranks_losing(mortal(lost, place, options), ranks, lost, tmp_path)
    check(raised, lost, "RuntimeError" if place == SAVE else "LostRank")
    assert latest(tmp_path) is None


def kill_before(act: Callable[[Any, Path], object]) -> Callable[[int, int, Path], None]:
    def run(rank: int, world_size: int, folder: Path) -> None:
        optimizer = build()[2]
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        act(optimizer, folder)

    return run


def test_a_save_is_broken_off_before_its_time(tmp_path: Path) -> None:
    began = time.monotonic()
    save = kill_before(lambda optimizer, folder: save_checkpoint(folder / "a", optimizer.model, optimizer))
    raised = run_ranks_losing(save, 3, 1, tmp_path)
    check(raised, 1)
    assert all(error.message.startswith("save_checkpoint, in the agreement ") for error in raised.values())
    assert time.monotonic() - began < 45


def test_once_a_rank_is_lost_nothing_is_waited_for(tmp_path: Path) -> None:
    def again(optimizer: Any, _: Path) -> None:
        with pytest.raises(LostRank, match="^all_reduce_max, in the agreement ") as first:
            optimizer.shard_group.all_reduce_max([1])
        with pytest.raises(LostRank, match="agreement") as second:
            optimizer.shard_group.from_rank_zero([1])
        assert str(first.value) == str(second.value)
        raise first.value

    check(run_ranks_losing(kill_before(again), 3, 1, tmp_path), 1)


# ---- it ends: it has run out of batches, or has failed, and the others are told what to do in both cases ----

LOST = re.compile(r"expected all ranks, lost (the connection to )?ranks? ([02], )?1\b")
REMEDIES = "If that rank ran out of batches, give every rank the same number", "start all ranks again"


def at_once() -> None:
    """The process ends with its group."""
    raise SystemExit("the end")


def at_leisure() -> None:
    """It destroys its group, as scripts do in the end, and has something else to do for a while."""
    dist.destroy_process_group()
    time.sleep(2)
    raise SystemExit("the end")


def fail() -> None:
    raise ValueError("the end")


def fail_and_destroy() -> None:
    try:
        fail()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("leave", "wires"), [*product([at_once, at_leisure], WIRES), (fail, WIRES[0]), (fail_and_destroy, WIRES[1])]
)
def test_a_rank_that_ends_is_named(leave: Callable[[], None], wires: str) -> None:
    def run(rank: int, world_size: int) -> None:
        model, _, optimizer = build()
        train(model, optimizer, steps=2)
        if rank == 1:
            leave()
        train(model, optimizer, steps=2)

    with by(wires):
        raised = run_ranks_losing(run, 3, 1, how="the end")
    for error in raised.values():
        assert error.type == "LostRank"
        assert LOST.search(error.message), error
        assert all(remedy in error.message for remedy in REMEDIES)


def test_further_collectives_are_run_after_one_that_fails_unless_a_rank_is_lost() -> None:
    """The other ranks are in the next one whatever has become of the last; nobody is who has lost a rank."""
    ran: list[int] = []

    def fail(number: int, error: Exception) -> None:
        ran.append(number)
        raise error

    errors = ValueError("first"), RuntimeError("second"), LostRank("lost"), ValueError("never")
    calls = [partial(fail, number, error) for number, error in enumerate(errors)]
    with pytest.raises(ValueError, match="first"):
        run_each([*calls[:2], partial(ran.append, 9)])
    assert ran == [0, 1, 9]
    with pytest.raises(LostRank):
        run_each(calls)
    assert ran == [0, 1, 9, 0, 1, 2]


# ---- how it is found ----


@on_ranks(2)
def test_other_errors_stay_what_they_are(rank: int) -> None:
    ShardGroup()
    for error in (RuntimeError("expected something else"), LostRank("Connection closed by peer"), ValueError("it")):
        assert lost_rank_error(error, dist.group.WORLD, "it") is None


@on_ranks(2)
def test_a_broken_connection_to_a_rank_that_nobody_sees(rank: int) -> None:
    patch_rank(failed_ranks, "_PATIENCE", 0.05)
    ShardGroup()
    dist.barrier()
    told = lost_rank_error(RuntimeError("Connection closed by peer [10.0.0.1]:1"), dist.group.WORLD, "gather 3")
    assert isinstance(told, LostRank)
    assert str(told).startswith("gather 3: expected all ranks, lost the connection to one of them")


def test_a_number_that_another_process_has_now_is_no_sign_of_life() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    own = processes.own_process()
    theirs = own._replace(number=ended.pid)
    ended.wait()
    assert theirs.has_ended()
    assert own._replace(began="1").has_ended()
    assert not own.has_ended()
    assert not theirs._replace(space="another host").has_ended()


def test_a_process_that_cannot_be_seen_for_want_of_descriptors_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    own = processes.own_process()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        assert not own.has_ended()


@on_ranks(1)
def test_a_rank_that_has_ended_is_found_without_the_store(rank: int) -> None:
    ShardGroup()
    own = processes.own_process()
    known = process_groups.context_of(process_groups.default_group()).processes
    known.update(dict.fromkeys(range(64), own) | {5: own._replace(began="another's")})
    patch_rank(process_groups, "store_of", None)
    assert failed_ranks.ended_ranks(range(64)) == [5]


@on_ranks(2, timeout=20)
def test_ranks_meet_whatever_their_processes_are_called(rank: int) -> None:
    """The kernel keeps 15 bytes of a name, and may cut within a character."""
    Path("/proc/self/comm").write_text("é" * 8 if rank == 1 else "a) b (c")
    train(*build()[::2])
    assert not processes.own_process().has_ended()
