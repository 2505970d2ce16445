"""What a save and a load cost: exchanges, bytes read, files opened, memory; and who waits for what."""

from __future__ import annotations

import shutil
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # here once, not in every forked rank
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import checksum, folders, load_checkpoint, save_checkpoint
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.checkpoints import wait_for_pruning
from tests.support.patching import patch_rank
from tests.support.ranks import run_ranks

WIDTH = 512


def trained(layers: int = 2) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model, stage=2)
    optimizer.backward(model(torch.randn(2, WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def counting(found: Counter[str], owner: Any, name: str) -> None:
    """Count the calls of ``owner.name`` on this rank."""
    call = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        found[name] += 1
        return call(*args, **options)

    patch_rank(owner, name, counted)


@pytest.mark.parametrize("in_background", [False, True])
def test_ranks_agree_twice_and_then_exchange_a_few_numbers(in_background: bool, tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> Counter[str]:
        pair = trained()
        save_checkpoint(tmp_path / "first", *pair)
        found: Counter[str] = Counter()
        for name in ("all_reduce_max", "all_gather_object"):
            counting(found, ShardGroup, name)
        for name in ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"):
            counting(found, dist, name)
        for name in ("gather", "all_reduce", "all_gather", "broadcast"):
            counting(found, dist, name)
        save_checkpoint(tmp_path / "second", *pair, async_save=in_background).wait()
        return found

    assert run_ranks(save, 3) == [{"all_reduce_max": 2, "gather_object": 1, "broadcast_object_list": 1}] * 3


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def test_a_save_reads_nothing_and_a_load_each_byte_once(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> tuple[float, float]:
        pair = trained()
        save_checkpoint(tmp_path / "first", *pair)
        before = bytes_read()
        save_checkpoint(tmp_path / "second", *pair)
        saving = bytes_read() - before
        share = (tmp_path / "second" / f"__{rank}_0.distcp").stat().st_size
        before = bytes_read()
        load_checkpoint(tmp_path / "second", *pair)
        return saving / share, (bytes_read() - before) / share

    for saving, loading in run_ranks(run, 2):
        assert saving < 0.02
        assert 0.99 <= loading < 1.1


def test_a_save_opens_no_older_checkpoint(tmp_path: Path) -> None:
    """And to prune it reads the first lines of their manifests, and no more of those of other runs."""
    opened: list[str] = []

    def note(event: str, args: Any) -> None:
        if event == "open" and str(tmp_path) in str(args[0]):
            opened.append(str(args[0]))

    def save(rank: int, world_size: int) -> tuple[int, int]:
        pair = trained()
        save_checkpoint(tmp_path / "of others" / "one", *pair)
        if rank == 0:
            for at in range(40):
                shutil.copytree(tmp_path / "of others" / "one", tmp_path / "run" / f"older-{at}")
        dist.barrier()
        sys.addaudithook(note)
        save_checkpoint(tmp_path / "run" / "new", *pair)
        without = sum("older-" in path for path in opened)
        read: Counter[str] = Counter()
        counting(read, folders, "read_manifest")
        other = trained()
        for name in ("a", "b", "c"):
            save_checkpoint(tmp_path / "run" / name, *other, keep=2)
            wait_for_pruning()
        return without, read["read_manifest"]

    (without, read), *_ = run_ranks(save, 2)
    assert without == 0
    assert 0 < read <= 3
    assert len(list((tmp_path / "run").glob("older-*"))) == 40
    assert {place.name for place in (tmp_path / "run").iterdir() if "older" not in place.name} == {"new", "b", "c"}


def test_nobody_waits_for_pruning(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> list[bool]:
        pair = trained()
        save_checkpoint(tmp_path / "a", *pair, keep=1)
        goes_on = threading.Event()
        remove = folders.remove
        patch_rank(folders, "remove", lambda path: (goes_on.wait(20), remove(path))[1])
        seen = []
        for name, in_background in (("b", False), ("c", True)):
            save_checkpoint(tmp_path / name, *pair, keep=1, async_save=in_background).wait()
            seen.append((tmp_path / "a").exists())
        load_checkpoint(tmp_path / "c", *pair)
        goes_on.set()
        wait_for_pruning()
        return seen

    assert run_ranks(save, 2) == [[True, True]] * 2
    assert {place.name for place in tmp_path.iterdir()} == {"c"}


def test_memory_of_asynchronous_saves_is_kept(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> None:
        pair = trained()
        first = save_checkpoint(tmp_path / "a", *pair, async_save=True)
        second = save_checkpoint(tmp_path / "b", *pair, async_save=True)
        save_checkpoint(tmp_path / "c", *pair)
        third = save_checkpoint(tmp_path / "d", *pair, async_save=True)
        third.wait()
        assert first.staging is not None
        assert first.staging is second.staging is third.staging
        share = sum(each.nbytes for record in pair[1].sharded_parameters for each in (record.row,) * 3)
        assert share <= first.staging.nbytes < 1.01 * share

    run_ranks(save, 2)


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
