"""Crashes while a Booster saves: no half checkpoint is ever loaded; what is left is no hindrance."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from colossalai.booster import Booster
from colossalai.checkpoint_io import GeneralCheckpointIO
from torch import nn

from lowlevel_zero.plugin import checkpoint_io
from tests.support.boosting import Pair, adamw, ours
from tests.support.ranks import run_ranks

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
SMALL = 0.00001  # MiB: every parameter in a shard of its own


class Crash(BaseException):
    """The end of a process."""


class Fuse:
    """Ends what is done at the ``fatal``-th file operation under a folder, just before it; of a write half is done.

    A process that has ended doesn't clean up: whatever its handlers attempt afterwards has no effect either.
    Audit events announce opening, renaming and removing; fsyncs and the writers that aren't Python's are intercepted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.burning = False
        self.left = 0
        self.synced: set[int] = set()
        sys.addaudithook(self._audit)

    @contextmanager
    def lit(self, fatal: int) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", self._fsync(os.fsync))
            patch.setattr(torch, "save", self._write(torch.save))
            patch.setattr(safetensors.torch, "save_file", self._write(safetensors.torch.save_file))
            patch.setattr(checkpoint_io, "save_file", self._write(checkpoint_io.save_file))
            self.left, self.burning = fatal, True
            self.synced.clear()
            try:
                yield
            finally:
                self.burning = False

    def _audit(self, event: str, args: Any) -> None:
        if self.burning and event in EVENTS and (self.folder in str(args[0]) or _in_open_folder(event, args)):
            self._burn()
            if event == "os.rename":
                assert os.stat(args[0]).st_ino in self.synced, f"{args[0]} is renamed before it is on the disk"

    def _fsync(self, fsync: Callable[[int], None]) -> Callable[[int], None]:
        def fused(handle: int) -> None:
            self._burn()
            fsync(handle)
            self.synced.add(os.fstat(handle).st_ino)

        return fused

    def _write(self, write: Callable[..., None]) -> Callable[..., None]:
        def fused(data: Any, path: Any, *args: Any, **options: Any) -> None:
            if self.left == 1:
                write(data, path, *args, **options)
                os.truncate(path, os.path.getsize(path) // 2)
            self._burn()
            write(data, path, *args, **options)

        return fused

    def _burn(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise Crash


def _in_open_folder(event: str, args: Any) -> bool:
    """Whether a removal names its file from a folder that is open, as ``shutil.rmtree`` does."""
    return event in ("os.remove", "os.rmdir") and args[1] != -1


def boosted(model: nn.Module) -> Pair:
    booster = Booster(plugin=ours(precision="fp32"))
    return Pair(booster, *booster.boost(model, adamw(model.parameters()))[:2])


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))


class Saves:
    """Saves and loads one kind of checkpoint, all of whose numbers are its version."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = str(path)
        self.pair = boosted(model_of())
        self.pair.booster.backward(self.pair.model(torch.ones(1, 3)).sum(), self.pair.optimizer)
        self.pair.optimizer.step()
        self.schedule = torch.optim.lr_scheduler.ConstantLR(self.pair.optimizer, 1.0)
        self.plain = model_of()
        self.plain_optimizer = adamw(self.plain.parameters())

    def save(self, version: int) -> None:
        """Odd versions in one shard, even ones in two."""
        booster, size = self.pair.booster, 1 if version % 2 else SMALL
        options = {"shard": "sharded" in self.kind, "use_async": "async" in self.kind}
        if "model" in self.kind:
            for p in self.pair.model.unwrap().parameters():
                p.data.fill_(version)
            options["use_safetensors"] = "safetensors" in self.kind
            booster.save_model(self.pair.model, self.path, size_per_shard=size, **options)
        elif "optimizer" in self.kind:
            for group in self.pair.optimizer.param_groups:
                group["lr"] = version
            for state in self.pair.optimizer.optim.state.values():
                state["exp_avg"].fill_(version)
            booster.save_optimizer(self.pair.optimizer, self.path, size_per_shard=size, **options)
        else:
            self.schedule.last_epoch = version
            booster.save_lr_scheduler(self.schedule, self.path)
        booster.checkpoint_io._sync_io()  # what a thread met with is raised here

    def load(self) -> set[float]:
        """All versions in what is there, as ColossalAI itself reads it: one, if it is whole; none without an index."""
        if "sharded" in self.kind and not list(Path(self.path).glob("*.index.json")):
            with pytest.raises((OSError, RuntimeError, ValueError, AssertionError)):
                self._read()
            return set()
        return self._read()

    def _read(self) -> set[float]:
        if "model" in self.kind:
            GeneralCheckpointIO().load_model(self.plain, self.path)
            return {number for p in self.plain.parameters() for number in p.detach().view(-1).tolist()}
        if "optimizer" in self.kind:
            GeneralCheckpointIO().load_optimizer(self.plain_optimizer, self.path)
            states = [self.plain_optimizer.state[p]["exp_avg"] for p in self.plain.parameters()]
            lrs = {group["lr"] for group in self.plain_optimizer.param_groups}
            return lrs | {number for state in states for number in state.view(-1).tolist()}
        return {torch.load(self.path)["last_epoch"]}


KINDS = {
    "model": "model.pt",
    "model, safetensors": "model.safetensors",
    "model, sharded": "model",
    "model, sharded, safetensors": "model-safe",
    "model, safetensors, async": "later.safetensors",
    "model, sharded, safetensors, async": "model-later",
    "optimizer": "optimizer.pt",
    "optimizer, async": "optimizer.safetensors",
    "optimizer, sharded, async": "optimizer-later",
    "optimizer, sharded": "optimizer",
    "scheduler": "scheduler.pt",
}


def test_a_crash_at_any_file_operation_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    """The old one or the new one; of shards, none in between. Nothing that crashes leave piles up."""

    def crashed(saves: Saves, fuse: Fuse, version: int, fatal: int) -> bool:
        try:
            with fuse.lit(fatal):
                saves.save(version)
        except Crash:
            return True
        return False

    def rank(rank: int, world_size: int) -> None:
        fuse = Fuse(tmp_path)
        for kind, name in KINDS.items():
            saves = Saves(kind, tmp_path / name)
            held = version = 1
            fatal, seen = 0, set()
            saves.save(version)
            while crashed(saves, fuse, version + 1, fatal := fatal + 1):
                version += 1
                found = saves.load()
                assert found in ({held}, {version}, *([set()] if "sharded" in kind else [])), (
                    f"{kind}, {fatal}: {found}"
                )
                seen.add(found == {version})
                if not found:
                    saves.save(version)
                (held,) = found or {version}
            assert saves.load() == {version + 1}
            assert seen == {False, True}, kind
            assert fatal > (10 if "sharded" in kind else 4), kind

    run_ranks(rank, 1)
    assert {path.name for path in tmp_path.iterdir()} == {*KINDS.values()}
    for kind, name in KINDS.items():
        if "sharded" in kind:
            assert len(list((tmp_path / name).iterdir())) <= 4, "two shards, an index, a file of groups"
