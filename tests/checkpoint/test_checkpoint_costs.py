"""What a save and a load cost: exchanges, bytes read, files opened, memory; and who waits for what."""

from __future__ import annotations

import ctypes
import gc
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.counters import bytes_read, forget_peak, resident
from lowlevel_zero.checkpoint import checksum, folders, load_checkpoint, save_checkpoint, storage
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.checkpoints import wait_for_pruning
from tests.support.on_ranks import on_ranks
from tests.support.patching import patch_rank
from tests.support.saving import Pair, adamw, names_in, wrapped

WIDTH = 512
OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
COLLECTIVES = (*OBJECTS, "gather", "all_reduce", "all_gather", "broadcast")


def trained() -> Pair:
    torch.manual_seed(0)
    return wrapped(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))), adamw, steps=1, stage=2)


def counting(found: Counter[str], owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    """Count the calls of ``owner.name``."""
    call = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        found[name] += 1
        return call(*args, **options)

    patch.setattr(owner, name, counted)


@on_ranks(3)
def test_ranks_agree_twice_and_then_exchange_a_few_numbers(rank: int, tmp_path: Path) -> None:
    """At once and in the background."""
    pair = trained()
    save_checkpoint(tmp_path / "first", *pair)
    for in_background in (False, True):
        found: Counter[str] = Counter()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce_max", "all_gather_object"):
                counting(found, ShardGroup, name, patch)
            for name in COLLECTIVES:
                counting(found, dist, name, patch)
            save_checkpoint(tmp_path / str(in_background), *pair, async_save=in_background).wait()
        assert found == {"all_reduce_max": 2, "gather_object": 1, "broadcast_object_list": 1}


@on_ranks(2)
def test_a_save_reads_nothing_and_a_load_each_byte_once_into_states_that_are_there(rank: int, tmp_path: Path) -> None:
    model, optimizer = trained()

    def places() -> list[int]:
        states = (optimizer.optim.state[record.p32] for record in optimizer.sharded_parameters)
        return [state[key].data_ptr() for state in states for key in ("exp_avg", "exp_avg_sq")]

    save_checkpoint(tmp_path / "first", model, optimizer)
    start = bytes_read()
    save_checkpoint(tmp_path / "second", model, optimizer)
    saving = bytes_read() - start
    share = (tmp_path / "second" / f"__{rank}_0.distcp").stat().st_size
    assert 1.0 <= share / (2 * WIDTH * WIDTH * 3 * 4 / 2) < 1.1
    before, start = places(), bytes_read()
    load_checkpoint(tmp_path / "second", model, optimizer)
    loading = bytes_read() - start
    assert places() == before
    assert saving < 0.02 * share
    assert 0.99 * share <= loading < 1.1 * share


@on_ranks(2)
def test_a_save_opens_no_older_checkpoint(rank: int, tmp_path: Path) -> None:
    """And to prune it reads the first lines of their manifests, and no more of those of other runs."""
    opened: list[str] = []

    def note(event: str, args: Any) -> None:
        if event == "open" and str(tmp_path) in str(args[0]):
            opened.append(str(args[0]))

    pair = trained()
    save_checkpoint(tmp_path / "of others" / "one", *pair)
    if rank == 0:
        for at in range(40):
            shutil.copytree(tmp_path / "of others" / "one", tmp_path / "run" / f"older-{at}")
    dist.barrier()
    sys.addaudithook(note)
    save_checkpoint(tmp_path / "run" / "new", *pair)
    assert not [path for path in opened if "older-" in path]
    read: Counter[str] = Counter()
    counting(read, folders, "read_manifest", pytest.MonkeyPatch())
    other = trained()
    for name in ("a", "b", "c"):
        save_checkpoint(tmp_path / "run" / name, *other, keep=2)
        wait_for_pruning()
    assert rank > 0 or 0 < read["read_manifest"] <= 3
    assert names_in(tmp_path / "run") == {*(f"older-{at}" for at in range(40)), "new", "b", "c"}


@on_ranks(2)
def test_nobody_waits_for_pruning(rank: int, tmp_path: Path) -> None:
    pair, goes_on, remove = trained(), threading.Event(), folders.remove
    save_checkpoint(tmp_path / "a", *pair, keep=1)
    patch_rank(folders, "remove", lambda path: (goes_on.wait(20), remove(path))[1])
    for name, in_background in (("b", False), ("c", True)):
        save_checkpoint(tmp_path / name, *pair, keep=1, async_save=in_background).wait()
        assert (tmp_path / "a").exists()
    load_checkpoint(tmp_path / "c", *pair)
    dist.barrier()  # all have seen it
    goes_on.set()
    wait_for_pruning()
    assert names_in(tmp_path) == {"c"}


@on_ranks(2)
def test_asynchronous_saves_are_waited_for_and_keep_their_memory(rank: int, tmp_path: Path) -> None:
    """By further saves, and by loads."""
    pair, write = trained(), storage.CheckpointWriter.write_share
    patch_rank(storage.CheckpointWriter, "write_share", lambda *args: (time.sleep(0.3), write(*args))[1])
    first = save_checkpoint(tmp_path / "a", *pair, async_save=True)
    second = save_checkpoint(tmp_path / "b", *pair, extra="second", async_save=True)
    assert first.done()
    assert load_checkpoint(tmp_path / "b", *pair) == "second"
    assert second.done()
    save_checkpoint(tmp_path / "c", *pair)
    third = save_checkpoint(tmp_path / "d", *pair, async_save=True)
    third.wait()
    assert first.staging is not None
    assert first.staging is second.staging is third.staging
    share = sum(each.nbytes for record in pair[1].sharded_parameters for each in (record.row,) * 3)
    assert share <= first.staging.nbytes < 1.01 * share


def test_a_checksum_shows_what_has_changed(tmp_path: Path) -> None:
    block = 2**16
    data = bytearray(torch.randint(0, 256, (5 * block + 1234,), dtype=torch.uint8).tolist())

    def of(content: bytes | bytearray) -> checksum.FileSum:
        (tmp_path / "file").write_bytes(content)
        return checksum.FileSum.of(tmp_path / "file")

    whole = of(data)
    assert whole.bytes == len(data)
    for sizes in ((1, 7, block - 8), (block,), (3 * block + 5, 11), (len(data),)):
        with checksum.SummedFile(tmp_path / "written") as file:
            at = 0
            while at < len(data):
                size = sizes[at % len(sizes)]
                file.write(bytes(data[at : at + size]))
                at += size
            assert file.sync() == whole
    for at in (0, block - 1, block, 3 * block + 77, len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 1
        assert of(changed) != whole
    swapped = data[block : 2 * block] + data[:block] + data[2 * block :]
    zeroed = data[:block] + bytes(4096) + data[block + 4096 :]
    for other in (swapped, zeroed, data[:-1], data + b"\0", b""):
        assert of(other) != whole


# Memory at its peak, over what was held before

M_MMAP_THRESHOLD = -3
LAYERS, LARGE = 12, 1280
WHOLE = LARGE * LARGE * 4  # bytes of one weight, or of one whole state
SHARE = 3 * LAYERS / 2  # whole tensors that a rank holds of weights and two states


def peak_over_held(call: Callable[[], object]) -> float:
    """How much resident memory rose at most while ``call`` ran, in whole tensors."""
    call()  # what is allocated once and kept
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    forget_peak()
    held = resident("VmRSS")
    kept = call()
    del kept
    return (resident("VmHWM") - held) / WHOLE


def within(low: float, high: float, call: Callable[[], object], attempts: int = 10) -> float:
    """``peak_over_held``, as soon as it is between the two on all ranks.

    What threads give back meanwhile, and what the system takes, is in a measurement too; but never in all of them.
    """
    peak = 0.0
    for _ in range(attempts):
        peak = peak_over_held(call)
        outside = torch.tensor([int(not low < peak < high)])
        dist.all_reduce(outside)
        if not outside.item():
            break
    return peak


def large() -> Pair:
    # So that what is freed goes back to the system, and is seen when it is taken again; from the first tensor on.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(LARGE, LARGE, bias=False) for _ in range(LAYERS)))
    return wrapped(model, adamw, steps=1, partition_grad=True)


@on_ranks(2, timeout=100)
def test_a_save_holds_two_slices_or_one_copy_of_the_share_and_a_load_one_parameter(rank: int, tmp_path: Path) -> None:
    """The copy is an asynchronous save's."""
    model, optimizer = large()
    numbers = count()

    def save(in_background: bool = False) -> None:
        save_checkpoint(tmp_path / str(next(numbers)), model, optimizer, async_save=in_background).wait()

    # The states themselves on the first rank; on others one tensor, and what carries it.
    states = (0.5, 2.2) if rank else (2 * LAYERS - 1.5, 2 * LAYERS + 2.2)
    for low, high, call in (
        (-1.0, 1.0, save),  # a slice is half a tensor
        (-1.0, 2.0, lambda: load_checkpoint(tmp_path / "0", model, optimizer)),  # a parameter's, beside what is there
        (*states, lambda: optimizer.state_dict(only_on_master=True)),
        (0.0, SHARE + 5.0, lambda: save(in_background=True)),
    ):
        peak = within(low, high, call)
        assert low < peak < high
