"""From 8 to 4,096 ranks, of which this process is the first: what it asks of stores, groups and other ranks.

The others are nobody: a store that answers as if they had done what this one does, torch's fake process groups in the
place of gloo's and NCCL's, and messages that come back as they were sent. What torch asks when it connects a group
isn't counted, nor what it sends while it writes a checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpt import GPT
from benchmarks.gpt import SIZES as SIZES_OF_GPT
from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping.bucket_plan import Item, make_plan
from lowlevel_zero.checkpoint import load_checkpoint, save_checkpoint, storage
from lowlevel_zero.communication import process_groups, shard_group
from lowlevel_zero.communication.backends import native
from lowlevel_zero.communication.backends.backend import HOST_BUCKET
from lowlevel_zero.communication.backends.pairwise import Pairwise
from lowlevel_zero.partition import EvenSplit, alignment_of
from tests.support.patching import patch_rank
from tests.support.ranks import run_ranks

SIZES = (8, 512, 4096)
Counts: TypeAlias = dict[str, dict[int, dict[str, Counter[str]]]]  # by backend, ranks and phase


class Counting:
    """A store that counts requests, and the other ranks in whatever this one adds itself to."""

    def __init__(self, store: dist.Store, counts: Counter[str], ranks: int) -> None:
        self._store, self._counts, self._ranks = store, counts, ranks

    def add(self, key: str, by: int) -> int:
        self._counts["store requests"] += 1
        return self._store.add(key, by * self._ranks)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def request(*args: Any) -> Any:
            self._counts["store requests"] += 1
            return getattr(self._store, name)(*args)

        return request


@contextmanager
def world(ranks: int, backend: str) -> Iterator[Counter[str]]:
    """A default group of so many ranks and as if of this backend; counts what it is asked for."""
    counts: Counter[str] = Counter()
    make = dist.distributed_c10d._new_process_group_helper

    def make_fake(size: int, rank: int, members: list[int], asked: str, *args: Any, **kwargs: Any) -> Any:
        counts["process groups"] += 1
        return make(size, rank, members, dist.Backend("fake"), *args, **kwargs)

    def echo(self: Pairwise, pairs: list[tuple[Tensor, Tensor]], kind: int, peers: Any = None) -> list[Any]:
        counts["messages"] += len(pairs)
        for mine, theirs in pairs:
            theirs.copy_(mine[:1] if mine.dim() == 2 else mine)  # of objects this rank's are in the first row
        return []

    def store_of(group: dist.ProcessGroup, prefix: str = "") -> Any:
        return Counting(dist.PrefixStore(prefix, store), counts, ranks) if prefix else FakeStore()

    def own_row(row: Tensor, buffer: Tensor, **options: Any) -> Any:
        row.copy_(buffer[: row.numel()])  # which would stay as it was, perhaps no number
        return reduce_scatter(row, buffer, **options)

    store, reduce_scatter = dist.HashStore(), native._reduce_scatter_single
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(shard_group.SWITCH, "0")
        patch.setattr(dist.distributed_c10d, "_new_process_group_helper", make_fake)
        patch.setattr(dist, "get_backend", lambda group=None: backend)
        for module in (process_groups, shard_group):
            patch.setattr(module, "backends_by_device", lambda group: {"cpu": backend})
        patch.setattr(process_groups, "store_of", store_of)
        patch.setattr(Pairwise, "send_and_receive", echo)
        patch.setattr(native, "_reduce_scatter_single", own_row)
        yield counts
    dist.destroy_process_group()


def test_this_process_may_be_any_of_a_fake_group_s_ranks() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        model = nn.Linear(8, 8)
        optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model=model)
        optimizer.backward(model(torch.ones(1, 8)).sum())
        optimizer.step()
    finally:
        dist.destroy_process_group()


def counted(ranks: int, backend: str, folder: Path) -> dict[str, Counter[str]]:
    """What each phase asks for."""
    with world(ranks, backend) as counts:
        found: dict[str, Counter[str]] = {}

        def phase(name: str, work: Callable[[], Any]) -> Any:
            counts.clear()
            result = work()
            found[name] = counts.copy()
            return result

        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        inner = torch.optim.AdamW(model.parameters())
        optimizer = phase("construction", lambda: LowLevelZeroOptimizer(inner, model=model, partition_grad=True))

        def step() -> None:
            for p in model.parameters():
                p.data.fill_(0.01)
            optimizer.backward(model(torch.ones(1, 8)).sum())
            optimizer.step()
            optimizer.zero_grad()

        step()  # the order of gradients is learnt
        phase("step", step)
        phase("save", lambda: save_checkpoint(folder / f"{ranks}", model, optimizer))
        phase("load", lambda: load_checkpoint(folder / "alone", model, optimizer))
        return found


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    folder = tmp_path_factory.mktemp("thousands")

    def alone(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        save_checkpoint(folder / "alone", model, LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters())))

    def count(rank: int, world_size: int) -> Counts:
        patch_rank(storage.CheckpointWriter, "write", lambda writer: None)  # which meets twice, by torch's collectives
        return {
            "gloo": {size: counted(size, "gloo", folder) for size in SIZES[:2]},
            "nccl": {size: counted(size, "nccl", folder) for size in SIZES},
        }

    run_ranks(alone, 1)
    (found,) = run_ranks(count, 1, init=False)
    return found  # type: ignore[no-any-return]


def test_the_store_and_process_groups_are_asked_for_as_often_however_many_ranks_there_are(counts: Counts) -> None:
    """For each of two groups beyond the caller's whether all have come: one asks six times, if it is the last one."""
    for by_size in counts.values():
        for phases in by_size.values():
            for what, at_first in (("store requests", 12), ("process groups", 2)):
                asked = {phase: counter[what] for phase, counter in phases.items()}
                assert asked == {"construction": at_first, "step": 0, "save": 0, "load": 0}, what


def test_what_hosts_tell_each_other_grows_with_the_logarithm(counts: Counts) -> None:
    """Buffers apart, which gloo's ranks send each other."""
    for size, phases in counts["nccl"].items():
        messages = {phase: asked["messages"] / math.log2(size) for phase, asked in phases.items()}
        assert all(
            messages[phase] <= most for phase, most in {"construction": 9, "step": 2, "save": 5, "load": 8}.items()
        )
    for size, phases in counts["gloo"].items():
        buffers = {
            phase: asked["messages"] - counts["nccl"][size][phase]["messages"] for phase, asked in phases.items()
        }
        assert buffers["save"] == 0
        assert buffers["load"] == 4 * (size - 1), "a gather of each parameter"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", SIZES)
def test_a_gpt_of_25_million_is_padded_by_less_than_2_percent(ranks: int, dtype: torch.dtype) -> None:
    """Its parameters; and the rows of its buckets, beside what is in them."""
    with torch.device("meta"):
        splits = [EvenSplit(p.numel(), ranks) for p in GPT(SIZES_OF_GPT["25m"]).parameters()]
    numel = sum(split.numel for split in splits)
    assert sum(split.padding for split in splits) <= 0.02 * numel
    items = [Item(split, dtype, whole=True, alignment=alignment_of(dtype)) for split in splits]
    buckets = make_plan(items, list(reversed(range(len(items)))), HOST_BUCKET)
    assert ranks * sum(bucket.row - bucket.body for bucket in buckets) <= 0.02 * numel
