"""Crashes, full disks and threads: a former checkpoint stays whole, and what is written is the state at the call."""

from __future__ import annotations

import errno
import io
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowlevel_zero.checkpoint import latest, load_checkpoint, save_checkpoint, saving, storage
from tests.support.checkpoints import AFTER, BEFORE, Training, check_same
from tests.support.on_ranks import on_ranks
from tests.support.patching import patch_rank
from tests.support.ranks import run_ranks
from tests.support.saving import Pair, held_writes, linear, names_in, refused

# Crashes


class Fuse:
    """Ends the process by SIGKILL at the ``fatal``-th file operation under ``folder``: just before it is done.

    Python announces opening, renaming and removing by audit events; writes and fsyncs are intercepted. A write is
    done by half first.
    """

    def __init__(self, folder: Path, fatal: int) -> None:
        self.folder = str(folder)
        self.left = fatal
        self.log: list[str] = []

    def light(self) -> None:
        sys.addaudithook(self._audit)
        fsync, fuse = os.fsync, self
        patch_rank(os, "fsync", lambda handle: (self._burn("fsync"), fsync(handle))[1])

        class Halving(io.FileIO):
            def write(self, data: Any, /) -> int:
                data = memoryview(data).cast("B")
                if fuse.left == 1:
                    super().write(data[: len(data) // 2])
                fuse._burn("write")
                return super().write(data)

        own_open = io.open

        def opened(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            written = mode == "wb"
            return io.BufferedWriter(Halving(path, mode)) if written else own_open(path, mode, *args, **options)

        patch_rank(io, "open", opened)  # which pathlib calls

    def _audit(self, event: str, args: Any) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and self.folder in str(args[0]):
            self._burn(f"{event} {args[0]}")

    def _burn(self, what: str) -> None:
        self.log.append(what)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_a_crash_at_any_file_operation_leaves_a_checkpoint_whole(every: int, tmp_path: Path) -> None:
    """The former one or, once it is in place, the new one, and no half one; the last save leaves nothing else."""
    run, user, newest_of = tmp_path / "run", tmp_path / "run" / "step-0" / "notes.txt", tmp_path / "newest"

    def save(rank: int, world_size: int, step: int, fatal: int) -> None:
        model, optimizer = linear(1)
        if step:
            newest = latest(run)
            assert newest is not None
            with newest_of.open("a") as file:
                file.write(f"{step - load_checkpoint(newest, model, optimizer)} ")  # the run goes on
            for place in run.iterdir():
                if (place / "lowlevel_zero.json").exists() and place.suffix != ".tmp":
                    load_checkpoint(place, *linear(2))
        if fatal:
            Fuse(run, fatal).light()
        save_checkpoint(run / f"step-{step}", model, optimizer, extra=step, keep=1)

    run_ranks(save, 1, 0, 0)
    user.write_text("of its user")
    for step, fatal in enumerate(range(1, 200, every), start=1):
        try:
            run_ranks(save, 1, step, fatal, timeout=20.0)
        except AssertionError as error:
            if "ProcessDied" not in str(error) and "SIGKILL" not in str(error):
                raise
        else:
            break
    assert 40 // every < step < 200 // every
    assert {*newest_of.read_text().split()} > {"1", "2"}  # the former one, or the one in whose save it died
    assert names_in(run) == {"step-0", f"step-{step}"}
    assert list((run / "step-0").iterdir()) == [user]


# Full disks


@on_ranks(2, (0, 1), one_group=False)
def test_a_full_disk_on_one_rank_is_told_on_all_and_nothing_is_left(rank: int, unlucky: int, tmp_path: Path) -> None:
    """At once and in the background."""
    logging.disable()  # pytest keeps the error of what fails in the background, and all that it holds
    run, pair = tmp_path / str(unlucky), Training().start().train(BEFORE, rank, 2)
    save_checkpoint(run / "former", pair.model, pair.optimizer, extra="former")
    limits, in_background = resource.getrlimit(resource.RLIMIT_FSIZE), unlucky == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000 if rank == unlucky else 2**30, limits[1]))
    told = refused(lambda: save_checkpoint(run / "new", pair.model, pair.optimizer, async_save=in_background).wait())
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"rank {unlucky}: OSError: [Errno {errno.EFBIG}]" in told
    dist.barrier()
    assert names_in(run) == {"former"}
    for expected in ("former", "later"):
        assert load_checkpoint(run, pair.model, pair.optimizer) == expected
        if expected == "former":
            save_checkpoint(run / "new", pair.model, pair.optimizer, extra="later")


@on_ranks(2)
def test_a_failure_of_the_last_rename_leaves_nothing(rank: int, tmp_path: Path) -> None:
    rename = os.rename

    def fail(source: Any, target: Any) -> None:
        if str(source).endswith(".tmp") and str(target).endswith("/a"):
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    patch_rank(os, "rename", fail)
    told = refused(lambda: save_checkpoint(tmp_path / "a", *linear()))
    assert "a: the checkpoint could not be written. rank 0: OSError: [Errno 28] No space left on device" in told
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@on_ranks(2, (0, 1))
def test_a_rank_that_can_not_begin_to_write_leaves_nothing_and_the_next_save_succeeds(
    rank: int, unlucky: int, tmp_path: Path
) -> None:
    claim, pair, run = storage.claim, linear(), tmp_path / f"{unlucky}"

    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    if rank == unlucky:
        patch_rank(storage, "claim", fail)
    told = refused(lambda: save_checkpoint(run / "a", *pair))
    assert f"rank {unlucky}: OSError: [Errno 24] Too many open files: mend that, and save again" in told
    patch_rank(storage, "claim", claim)
    save_checkpoint(run / "a", *pair)
    assert names_in(run) == {"a"}


@on_ranks(2)
def test_hosts_that_share_no_files_are_told_so_and_each_clears_its_own(rank: int, tmp_path: Path) -> None:
    """A path is another folder on each of them."""
    own, write = tmp_path / f"{rank}", saving.CheckpointWriter
    own.mkdir()
    patch_rank(saving, "CheckpointWriter", lambda path, *more: write(own / path.name, *more))
    told = refused(lambda: save_checkpoint(tmp_path / "a", *linear(), rank_state={"rank": rank}))
    assert "rank 0: RuntimeError: rank 0 doesn't find in " in told
    assert "save to a file system that all ranks share" in told
    assert names_in(own) == set()


def fail_to_sync(folder: Path, number: int) -> None:
    """Let this process fail to sync the directory ``folder`` with the error of this number."""
    fsync, there = os.fsync, folder.stat()

    def fail(handle: int) -> None:
        if os.path.samestat(os.fstat(handle), there):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    patch_rank(os, "fsync", fail)


@on_ranks(2)
def test_a_directory_that_fails_to_sync_at_the_end_is_told_as_it_is(rank: int, tmp_path: Path) -> None:
    """The checkpoint is in its place by then, and older ones stay. A file system that syncs no directories will do."""
    run, unable, pair = tmp_path / "run", tmp_path / "unable", linear()
    unable.mkdir(exist_ok=True)
    fail_to_sync(unable, errno.EINVAL)
    save_checkpoint(unable / "a", *pair)
    assert latest(unable) == unable / "a"
    save_checkpoint(run / "old", *pair, extra="old")
    fail_to_sync(run, errno.EIO)
    told = refused(lambda: save_checkpoint(run / "a", *pair, extra="new", keep=1))
    lost = f"RuntimeError: {run}/a: the checkpoint is in its place, but a crash of the machine may lose it."
    assert told.startswith(lost)
    assert "rank 0: NotSynced: [Errno 5] Input/output error" in told
    assert load_checkpoint(run, *pair) == "new"
    assert names_in(run) == {"old", "a"}


# Asynchronous saves


@on_ranks(3)
def test_what_an_asynchronous_save_writes_is_the_state_at_the_call(rank: int, tmp_path: Path) -> None:
    """Writing waits here until training has gone on."""
    pair = Training(dtype=torch.bfloat16).start().train(BEFORE, rank, 3)
    with held_writes() as writes:
        saving = save_checkpoint(tmp_path / "a", pair.model, pair.optimizer, async_save=True)
    at_call = pair.whole()
    pair.train(AFTER, rank, 3)
    assert not saving.done()
    assert not (tmp_path / "a").exists()
    writes.goes_on.set()
    assert saving.wait() == saving.result() == tmp_path / "a"
    assert saving.done()
    again = Training(dtype=torch.bfloat16).start(seed=3)
    load_checkpoint(tmp_path / "a", again.model, again.optimizer)
    check_same(at_call, again.whole())


@on_ranks(2, ("write", "write_share"), one_group=False)
def test_destroying_the_group_under_an_asynchronous_save_never_leaves_half_a_checkpoint(
    rank: int, part: str, tmp_path: Path
) -> None:
    """Before anything is written, and while it is."""
    logging.disable()
    path = tmp_path / part / "a"
    with held_writes(part) as writes:
        under_way = save_checkpoint(path, *linear(), async_save=True)
    dist.destroy_process_group()
    writes.goes_on.set()
    told = refused(under_way.wait)
    assert told.startswith("RuntimeError")
    assert "destroy_process_group was called before all was written: call wait() first" in told
    assert latest(path) is None


# Asynchronous saves that fail


def failed_save(folder: Path, unlucky: int, rank: int) -> tuple[Any, Pair]:
    """An asynchronous save that couldn't be written on one rank; and the model and optimizer."""
    pair = linear()

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == unlucky:
            patch.setattr(storage.CheckpointWriter, "write_share", fail)
        saving = save_checkpoint(folder / "lost", *pair, async_save=True)
        while not saving.done():
            time.sleep(0.01)
    return saving, pair


@on_ranks(2, [("save", 0, ()), ("load", 1, ()), ("save", 1, (0, 1)), ("save", 1, (0,))], one_group=False)
def test_a_failed_asynchronous_save_raises_in_the_next_call_unless_all_have_been_told(
    rank: int, call: str, unlucky: int, told_on: tuple[int, ...], tmp_path: Path
) -> None:
    logging.disable()
    folder = tmp_path / f"{call} {unlucky} {told_on}"
    save_checkpoint(folder / "there", *linear())
    saving, pair = failed_save(folder, unlucky, rank)
    if rank in told_on:
        assert "No space left" in refused(saving.wait)

    def act() -> None:
        save_checkpoint(folder / "next", *pair) if call == "save" else load_checkpoint(folder / "there", *pair)

    if len(told_on) < 2:
        told = refused(act)
        assert told.startswith("RuntimeError: ")
        assert f"{folder}/lost: the checkpoint could not be written. rank {unlucky}: OSError: [Errno 28]" in told
    act()


ENDS = """
import os, sys, time, torch, torch.distributed as dist
from lowlevel_zero.checkpoint import save_checkpoint, storage
from tests.support.saving import linear

torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports, which takes seconds, here and not in each fork
folder = sys.argv[1]
for end in ("slow", "lost", "known"):
    if os.fork() == 0:
        break
    print(end, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
os.dup2(os.open(f"{folder}/{end}.log", os.O_CREAT | os.O_WRONLY), 2)
dist.init_process_group("gloo", init_method=f"file://{folder}/{end}.store", rank=0, world_size=1)
write = storage.CheckpointWriter.write_share if end == "slow" else lambda *args: open("/nowhere/to/be/found")
storage.CheckpointWriter.write_share = lambda *args: (time.sleep(0.5), write(*args))[1]
saving = save_checkpoint(f"{folder}/{end}", *linear(), extra="there", async_save=True)
if end == "known":
    try:
        saving.wait()
    except RuntimeError:
        pass
del saving
if end == "known":
    dist.destroy_process_group()
print("the end")
"""


def test_the_interpreter_s_end_waits_for_an_asynchronous_save_and_fails_unless_somebody_knows(tmp_path: Path) -> None:
    """Three processes: one writes slowly, one fails to write, and one has noticed that."""
    command, root = [sys.executable, "-c", ENDS, str(tmp_path)], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=root)
    codes = {"slow": 0, "lost": 120, "known": 0}
    logs = {end: (tmp_path / f"{end}.log").read_text() for end in codes}
    assert done.stdout == "".join(f"the end\n{end} {code}\n" for end, code in codes.items()), (done.stderr, logs)
    assert {end for end, log in logs.items() if "its wait() wasn't called: " in log} == {"lost"}
    assert run_ranks(lambda rank, world_size: load_checkpoint(tmp_path / "slow", *linear()), 1) == ["there"]


def test_a_failed_asynchronous_save_fails_processes_of_multiprocessing_too(tmp_path: Path) -> None:
    def lose(rank: int = 0) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        failed_save(tmp_path, 0, rank)

    process = multiprocessing.get_context("fork").Process(target=lose)
    process.start()
    process.join(60)
    assert process.exitcode == 1
