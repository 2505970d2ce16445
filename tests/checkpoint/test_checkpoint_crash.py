"""Crashes, full disks and threads: a former checkpoint stays whole, and what is written is the state at the call."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import latest, load_checkpoint, save_checkpoint, storage
from tests.support.checkpoints import AFTER, BEFORE, Training, differences
from tests.support.patching import patch_rank
from tests.support.ranks import run_ranks

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


def start(seed: int) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model=model)


def loaded(path: Path) -> Any:
    return load_checkpoint(path, *start(2))


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_a_crash_at_any_file_operation_leaves_a_checkpoint_whole(every: int, tmp_path: Path) -> None:
    """The former one or, once it is in place, the new one, and no half one; the last save leaves nothing else."""
    run, user, newest_of = tmp_path / "run", tmp_path / "run" / "step-0" / "notes.txt", tmp_path / "newest"

    def save(rank: int, world_size: int, step: int, fatal: int) -> None:
        model, optimizer = start(1)
        if step:
            newest = latest(run)
            assert newest is not None
            with newest_of.open("a") as file:
                file.write(f"{step - load_checkpoint(newest, model, optimizer)} ")  # the run goes on
            for place in run.iterdir():
                if (place / "lowlevel_zero.json").exists() and place.suffix != ".tmp":
                    loaded(place)
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
    assert {place.name for place in run.iterdir()} == {"step-0", f"step-{step}"}
    assert list((run / "step-0").iterdir()) == [user]


# Full disks


@contextmanager
def full_disk(after: int) -> Iterator[None]:
    """No file of this process grows beyond ``after`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("unlucky", "asynchronous"), [(0, False), (1, True)], ids=["now", "async"])
def test_a_full_disk_on_one_rank_is_told_on_all_and_nothing_is_left(
    unlucky: int, asynchronous: bool, tmp_path: Path
) -> None:
    def save(rank: int, world_size: int) -> tuple[str, Any, list[str]]:
        pair = Training().start().train(BEFORE, rank, world_size)
        run = tmp_path / "run"
        save_checkpoint(run / "former", pair.model, pair.optimizer, extra="former")
        message = ""
        began = time.monotonic()
        with full_disk(10000 if rank == unlucky else 2**30):
            try:
                save_checkpoint(run / "new", pair.model, pair.optimizer, async_save=asynchronous).wait()
            except RuntimeError as error:
                message = str(error)
        assert time.monotonic() - began < 10
        dist.barrier()
        left = [place.name for place in run.iterdir()]
        former = load_checkpoint(run, pair.model, pair.optimizer)
        save_checkpoint(run / "new", pair.model, pair.optimizer, extra="later")
        return message, (former, load_checkpoint(run, pair.model, pair.optimizer)), left

    for message, extras, left in run_ranks(save, 2):
        assert f"rank {unlucky}: OSError: [Errno {errno.EFBIG}]" in message
        assert extras == ("former", "later")
        assert left == ["former"]


def test_a_failure_of_the_last_rename_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(rank: int, world_size: int) -> str:
        pair = Training().start()
        rename = os.rename

        def fail(source: Any, target: Any) -> None:
            if str(source).endswith(".tmp") and str(target).endswith("/a"):
                raise OSError(errno.ENOSPC, "No space left on device")
            rename(source, target)

        monkeypatch.setattr(os, "rename", fail)
        with pytest.raises(RuntimeError) as caught:
            save_checkpoint(tmp_path / "a", pair.model, pair.optimizer)
        return str(caught.value)

    for message in run_ranks(save, 2):
        assert "a: the checkpoint could not be written. rank 0: OSError: [Errno 28] No space left on device" in message
    assert list(tmp_path.iterdir()) == []


def fail_to_sync(folder: Path, number: int) -> None:
    """Let this process fail to sync the directory ``folder`` with the error of this number."""
    fsync, there = os.fsync, folder.stat()

    def fail(handle: int) -> None:
        if os.path.samestat(os.fstat(handle), there):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    patch_rank(os, "fsync", fail)


def test_a_file_system_that_syncs_no_directories_will_do(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> None:
        fail_to_sync(tmp_path, errno.EINVAL)
        save_checkpoint(tmp_path / "a", *start(0))

    run_ranks(save, 2)
    assert latest(tmp_path) == tmp_path / "a"


def test_a_directory_that_fails_to_sync_at_the_end_is_told_as_it_is(tmp_path: Path) -> None:
    """The checkpoint is in its place by then, and older ones stay."""

    def save(rank: int, world_size: int) -> tuple[str, Any]:
        model, optimizer = start(0)
        save_checkpoint(tmp_path / "old", model, optimizer, extra="old")
        fail_to_sync(tmp_path, errno.EIO)
        with pytest.raises(RuntimeError) as caught:
            save_checkpoint(tmp_path / "a", model, optimizer, extra="new", keep=1)
        return str(caught.value), load_checkpoint(tmp_path, model, optimizer)

    for message, extra in run_ranks(save, 2):
        assert f"{tmp_path}/a: the checkpoint is in its place, but a crash of the machine may lose it." in message
        assert "rank 0: NotSynced: [Errno 5] Input/output error" in message
        assert extra == "new"
    assert {place.name for place in tmp_path.iterdir()} == {"old", "a"}


# Asynchronous saves


def test_what_an_asynchronous_save_writes_is_the_state_at_the_call(tmp_path: Path) -> None:
    """Writing waits here until training has gone on."""

    def save(rank: int, world_size: int) -> tuple[bool, list[str]]:
        goes_on = threading.Event()
        write = storage.CheckpointWriter.write_share

        def held(writer: Any, claimed: Any) -> Any:
            assert goes_on.wait(20)
            return write(writer, claimed)

        patch_rank(storage.CheckpointWriter, "write_share", held)
        pair = Training(dtype=torch.bfloat16).start().train(BEFORE, rank, world_size)
        saving = save_checkpoint(tmp_path / "a", pair.model, pair.optimizer, async_save=True)
        at_call = pair.whole()
        pair.train(AFTER, rank, world_size)
        early = saving.done() or (tmp_path / "a").exists()
        goes_on.set()
        assert saving.wait() == saving.result() == tmp_path / "a"
        assert saving.done()
        again = Training(dtype=torch.bfloat16).start(seed=3)
        load_checkpoint(tmp_path / "a", again.model, again.optimizer)
        return early, differences(at_call, again.whole())

    assert run_ranks(save, 3) == [(False, [])] * 3


def test_further_saves_and_loads_wait_for_an_asynchronous_one(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> Any:
        pair = Training().start()
        write = storage.CheckpointWriter.write_share

        def slow(writer: Any, claimed: Any) -> Any:
            time.sleep(0.3)
            return write(writer, claimed)

        patch_rank(storage.CheckpointWriter, "write_share", slow)
        first = save_checkpoint(tmp_path / "a", pair.model, pair.optimizer, extra=1, async_save=True)
        second = save_checkpoint(tmp_path / "b", pair.model, pair.optimizer, extra=2, async_save=True)
        done = first.done()
        extra = load_checkpoint(tmp_path / "b", pair.model, pair.optimizer)
        return done, second.done(), extra

    assert run_ranks(save, 2) == [(True, True, 2)] * 2


def test_the_interpreter_s_end_waits_for_an_asynchronous_save(tmp_path: Path) -> None:
    script = f"""
import time, torch, torch.distributed as dist
from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import save_checkpoint, storage
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
write = storage.CheckpointWriter.write_share
storage.CheckpointWriter.write_share = lambda *args: (time.sleep(0.5), write(*args))[1]
save_checkpoint("{tmp_path}/a", model, optimizer, extra="there", async_save=True)
print("the end")
"""
    command = [sys.executable, "-c", script]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the end\n"
    assert run_ranks(lambda rank, world_size: load_small(tmp_path / "a"), 1) == ["there"]


@pytest.mark.parametrize("started", [False, True], ids=["before it starts", "while it writes"])
def test_destroying_the_group_under_an_asynchronous_save_never_leaves_half_a_checkpoint(
    started: bool, tmp_path: Path
) -> None:
    def save(rank: int, world_size: int) -> tuple[str, Any]:
        goes_on, planned = threading.Event(), threading.Event()
        begin = storage.CheckpointWriter.write
        write = storage.CheckpointWriter.write_share

        def late(writer: Any) -> Any:
            assert started or goes_on.wait(20)
            return begin(writer)

        def held(writer: Any, claimed: Any) -> Any:
            planned.set()
            assert goes_on.wait(20)
            return write(writer, claimed)

        patch_rank(storage.CheckpointWriter, "write", late)
        patch_rank(storage.CheckpointWriter, "write_share", held)
        pair = Training().start().train(BEFORE, rank, world_size)
        under_way = save_checkpoint(tmp_path / "a", pair.model, pair.optimizer, async_save=True)
        assert not started or planned.wait(20)
        dist.destroy_process_group()
        goes_on.set()
        with pytest.raises(RuntimeError, match="could not be written") as caught:
            under_way.wait()
        return str(caught.value), latest(tmp_path)

    for message, found in run_ranks(save, 2):
        assert "destroy_process_group was called before all was written: call wait() first" in message
        assert found is None


def load_small(path: Path) -> Any:
    model = nn.Linear(2, 2)
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    return load_checkpoint(path, model, optimizer)


# Asynchronous saves that fail


def failing_save(folder: Path, unlucky: int, rank: int) -> Any:
    """An asynchronous save that can't be written on one rank; and the model and optimizer."""
    pair = start(0)
    if rank == unlucky:

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch_rank(storage.CheckpointWriter, "write_share", fail)
    return save_checkpoint(folder / "lost", *pair, async_save=True), pair


@pytest.mark.parametrize(("call", "unlucky"), [(save_checkpoint, 0), (load_checkpoint, 1)])
def test_a_failed_asynchronous_save_raises_in_the_next_call_and_only_there(
    call: Any, unlucky: int, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> list[str]:
        save_checkpoint(tmp_path / "there", *start(0))
        write = storage.CheckpointWriter.write_share
        saving, pair = failing_save(tmp_path, unlucky, rank)
        name = "next" if call is save_checkpoint else "there"
        with pytest.raises(RuntimeError) as caught:
            call(tmp_path / name, *pair)
        assert saving.done()
        patch_rank(storage.CheckpointWriter, "write_share", write)
        call(tmp_path / name, *pair)
        return str(caught.value)

    for told in run_ranks(run, 2):
        assert f"{tmp_path}/lost: the checkpoint could not be written. rank {unlucky}: OSError: [Errno 28]" in told


@pytest.mark.parametrize("told_on", [(0, 1), (0,)])
def test_a_failure_that_one_has_waited_for_is_raised_to_the_others(told_on: tuple[int, ...], tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> None:
        write = storage.CheckpointWriter.write_share
        saving, pair = failing_save(tmp_path, 1, rank)
        if rank in told_on:
            with pytest.raises(RuntimeError, match="No space left"):
                saving.wait()
        while not saving.done():
            time.sleep(0.01)
        patch_rank(storage.CheckpointWriter, "write_share", write)
        raises = pytest.raises(RuntimeError, match="No space left")
        with raises if len(told_on) < world_size else nullcontext():
            save_checkpoint(tmp_path / "next", *pair)

    run_ranks(run, 2)


END = """
import sys, torch, torch.distributed as dist
from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import save_checkpoint, storage
dist.init_process_group("gloo", init_method="file://{folder}/store", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
storage.CheckpointWriter.write_share = lambda *args: open("/nowhere/to/be/found")
saving = save_checkpoint("{folder}/a", model, optimizer, async_save=True)
if {waits}:
    try:
        saving.wait()
    except RuntimeError:
        pass
del saving
dist.destroy_process_group() if {waits} else None
print("the end")
"""


@pytest.mark.parametrize(("waits", "code"), [(False, 120), (True, 0)])
def test_a_failed_asynchronous_save_fails_the_process_unless_somebody_knows(
    waits: bool, code: int, tmp_path: Path
) -> None:
    script = END.format(folder=tmp_path, waits=waits)
    command, root = [sys.executable, "-c", script], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert done.returncode == code, done.stderr
    assert done.stdout == "the end\n"
    assert ("nobody has waited for it: " in done.stderr) == (code != 0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_failed_asynchronous_save_fails_processes_of_multiprocessing_too(method: str, tmp_path: Path) -> None:
    script = END.format(folder=tmp_path, waits=False).replace("{", "{{").replace("}", "}}")
    process = multiprocessing.get_context(method).Process(target=_run_script, args=(script,))
    process.start()
    process.join(60)
    assert process.exitcode == 1


def _run_script(script: str) -> None:
    exec(script, {})
