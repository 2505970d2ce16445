"""Crashes, full disks and threads: a former checkpoint stays whole, and what is written is the state at the call."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import latest, load_checkpoint, save_checkpoint, saving, storage
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


def killed_in_a_save(folder: Path, save: Callable[[nn.Module, Any], Any], check: Callable[[], None], every: int) -> int:
    """A process for each or ``every`` so many operations of ``save``, killed there; ``check`` in the next; how many."""

    def crash(rank: int, world_size: int, fatal: int) -> None:
        if fatal > 1:
            check()
        model, optimizer = start(1)
        load_checkpoint(folder, model, optimizer)  # the run goes on
        fuse = Fuse(folder, fatal)
        fuse.light()
        save(model, optimizer)

    for count, fatal in enumerate(range(1, 200, every)):
        try:
            run_ranks(crash, 1, fatal, timeout=20.0)
        except AssertionError as error:
            if "ProcessDied" not in str(error) and "SIGKILL" not in str(error):
                raise
        else:
            return count
    raise AssertionError("a save has no end")


def loaded(path: Path) -> Any:
    return load_checkpoint(path, *start(2))


@pytest.mark.parametrize("overwrite", [False, True], ids=["beside", "over"])
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_a_crash_at_any_file_operation_leaves_a_checkpoint_whole(every: int, overwrite: bool, tmp_path: Path) -> None:
    """The former one or, once it is in place, the new one, and no half one; what is left behind is no hindrance."""
    run = tmp_path / "run"
    former, new = run / "step-1", run / ("step-1" if overwrite else "step-2")
    seen = tmp_path / "seen"

    def first(rank: int, world_size: int) -> None:
        save_checkpoint(former, *start(0), extra="former")

    def check() -> None:
        newest = latest(run)
        assert newest is not None
        found = loaded(newest)
        if overwrite:
            assert loaded(former) == found
        for place in run.iterdir():
            if not place.name.endswith((".tmp", ".old")):
                loaded(place)
        with seen.open("a") as file:
            file.write(f"{found} ")

    run_ranks(first, 1)
    count = killed_in_a_save(
        run, lambda model, optimizer: save_checkpoint(new, model, optimizer, extra="new", keep=1), check, every
    )
    assert count > 40 // every
    assert {*seen.read_text().split()} == {"former", "new"}
    assert [place.name for place in run.iterdir()] == [new.name]


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


@pytest.mark.parametrize("asynchronous", [False, True], ids=["now", "async"])
@pytest.mark.parametrize("unlucky", [0, 1])
def test_a_full_disk_on_one_rank_is_told_on_all_and_nothing_is_left(
    unlucky: int, asynchronous: bool, tmp_path: Path
) -> None:
    def save(rank: int, world_size: int) -> tuple[str, Any, list[str]]:
        pair = Training().start().train(BEFORE, rank, world_size)
        path = tmp_path / "a"
        save_checkpoint(path, pair.model, pair.optimizer, extra="former")
        message = ""
        began = time.monotonic()
        with full_disk(30000 if rank == unlucky else 2**30):
            try:
                save_checkpoint(path, pair.model, pair.optimizer, extra="new", async_save=asynchronous).wait()
            except RuntimeError as error:
                message = str(error)
        assert time.monotonic() - began < 10
        dist.barrier()
        left = [place.name for place in tmp_path.iterdir()]
        former = load_checkpoint(path, pair.model, pair.optimizer)
        save_checkpoint(path, pair.model, pair.optimizer, extra="later")
        return message, (former, load_checkpoint(path, pair.model, pair.optimizer)), left

    for message, extras, left in run_ranks(save, 2):
        assert f"rank {unlucky}: OSError: [Errno {errno.EFBIG}]" in message
        assert extras == ("former", "later")
        assert left == ["a"]


def test_a_failure_of_the_last_rename_puts_the_former_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(rank: int, world_size: int) -> tuple[str, Any]:
        pair = Training().start()
        save_checkpoint(tmp_path / "a", pair.model, pair.optimizer, extra="former")
        rename = os.rename

        def fail(source: Any, target: Any) -> None:
            if str(source).endswith(".tmp") and str(target).endswith("/a"):
                raise OSError(errno.ENOSPC, "No space left on device")
            rename(source, target)

        monkeypatch.setattr(os, "rename", fail)
        with pytest.raises(RuntimeError) as caught:
            save_checkpoint(tmp_path / "a", pair.model, pair.optimizer, extra="new")
        return str(caught.value), load_checkpoint(tmp_path / "a", pair.model, pair.optimizer)

    for message, extra in run_ranks(save, 2):
        assert "rank 0: OSError: [Errno 28] No space left on device" in message
        assert extra == "former"
    assert [place.name for place in tmp_path.iterdir()] == ["a"]


# Asynchronous saves


def test_what_an_asynchronous_save_writes_is_the_state_at_the_call(tmp_path: Path) -> None:
    """Writing waits here until training has gone on."""

    def save(rank: int, world_size: int) -> tuple[bool, list[str]]:
        goes_on = threading.Event()
        write = storage.CommittingWriter.write_data

        def held(writer: Any, plan: Any, planner: Any) -> Any:
            assert goes_on.wait(20)
            return write(writer, plan, planner)

        patch_rank(storage.CommittingWriter, "write_data", held)
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
        write = storage.CommittingWriter.write_data

        def slow(writer: Any, plan: Any, planner: Any) -> Any:
            time.sleep(0.3)
            return write(writer, plan, planner)

        patch_rank(storage.CommittingWriter, "write_data", slow)
        first = save_checkpoint(tmp_path / "a", pair.model, pair.optimizer, extra=1, async_save=True)
        second = save_checkpoint(tmp_path / "a", pair.model, pair.optimizer, extra=2, async_save=True)
        done = first.done()
        extra = load_checkpoint(tmp_path / "a", pair.model, pair.optimizer)
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
write = storage.CommittingWriter.write_data
storage.CommittingWriter.write_data = lambda *args: (time.sleep(0.5), write(*args))[1]
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
        dcp_save = saving.dcp_save
        write = storage.CommittingWriter.write_data

        def late(tensors: Any, **options: Any) -> Any:
            assert started or goes_on.wait(20)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch's: "assuming the intent is a single process"
                return dcp_save(tensors, **options)

        def held(writer: Any, plan: Any, planner: Any) -> Any:
            planned.set()
            assert goes_on.wait(20)
            return write(writer, plan, planner)

        patch_rank(saving, "dcp_save", late)
        patch_rank(storage.CommittingWriter, "write_data", held)
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
