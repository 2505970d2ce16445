"""The contestants: who takes part, under which name, and in which dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from .floor import Floor
from .fsdp import FSDP2
from .older import unpack
from .ours import Ours, OursDropping
from .peer import Peer, Setting
from .replicated import DDP, DDPMasters, ZeRORedundancy

__all__ = ["BASELINE", "CONTESTANTS", "Contestant", "Peer", "Setting", "left_out", "taking_part", "unpack"]

FP32 = ("fp32",)
BF16 = ("bf16",)
BOTH = FP32 + BF16


@dataclass(frozen=True)
class Contestant:
    """One who can take part.

    Attributes:
        name: on the command line and in the JSON.
        title: in tables and pictures.
        make: constructs it; called on all ranks alike.
        dtypes: those in which its arithmetic is everybody's: bf16 only with fp32 masters.
        needs: the package without which it can't take part; empty: none but torch.
        accumulates: only for more than one micro-batch; with one it would be another contestant's double.
        alike: trains what everybody trains, so that its losses must be everybody's.
        asked_for: takes part only where it is named.
    """

    name: str
    title: str
    make: Callable[[Setting], Peer]
    dtypes: tuple[str, ...] = BOTH
    needs: str = ""
    accumulates: bool = False
    alike: bool = True
    asked_for: bool = False

    def suits(self, setting: Setting) -> bool:
        """Whether it can take part in a run with ``setting``."""
        return setting.dtype in self.dtypes and (setting.micro_batches > 1 or not self.accumulates) and self.installed

    @property
    def installed(self) -> bool:
        """Whether what it needs is there."""
        return not self.needs or find_spec(self.needs) is not None

    def prepare(self) -> None:
        """Import what it needs, which takes time and memory, but isn't training."""
        if self.needs:
            import_module(f".{_FILES[self.needs]}", __package__)


# By what each imports, which may not be there.
_FILES = {"deepspeed": "deepspeed_zero", "colossalai": "colossal", "fairscale": "fairscale_oss"}


def _theirs(package: str, name: str, setting: Setting, **options: Any) -> Peer:
    make: Callable[..., Peer] = getattr(import_module(f".{_FILES[package]}", __package__), name)
    return make(setting, **options)


# The one that all ratios are taken to: what a user leaves who comes here.
BASELINE = {"fp32": "ddp", "bf16": "ddp-masters"}

_DEEPSPEED = partial(_theirs, "deepspeed", "DeepSpeedZeRO")
_COLOSSALAI = partial(_theirs, "colossalai", "ColossalAI")
_FAIRSCALE = partial(_theirs, "fairscale", "FairscaleOSS")
_STAGES = (1, 2)


def _everybody() -> Iterator[Contestant]:
    yield Contestant("ddp", "DDP, fused", DDP, FP32)
    yield Contestant("ddp-foreach", "DDP, foreach", partial(DDP, implementation="foreach"), FP32)
    yield Contestant("ddp-masters", "DDP with fp32 masters, fused", DDPMasters, BF16)
    yield Contestant("zro", "ZeroRedundancyOptimizer, fused", ZeRORedundancy, FP32)
    yield Contestant("fairscale", "fairscale OSS + ShardedDDP, fused", _FAIRSCALE, FP32, "fairscale")
    yield Contestant("fsdp2", "FSDP2 without reshard, fused", partial(FSDP2, reshard=False))
    yield Contestant("fsdp2-reshard", "FSDP2 with reshard, fused", partial(FSDP2, reshard=True))
    for stage in _STAGES:
        title, make = f"DeepSpeed ZeRO-{stage}, fused", partial(_DEEPSPEED, stage=stage)
        yield Contestant(f"deepspeed-{stage}", title, make, needs="deepspeed")
    for stage in _STAGES:
        title, make = f"ColossalAI's own, stage {stage}, fused", partial(_COLOSSALAI, stage=stage)
        yield Contestant(f"colossalai-{stage}", title, make, needs="colossalai")
    for stage in _STAGES:
        yield Contestant(f"ours-{stage}", f"ours, stage {stage}, fused", partial(Ours, stage=stage))
    yield Contestant("ours-2-foreach", "ours, stage 2, foreach", partial(Ours, stage=2, implementation="foreach"))
    each = partial(Ours, stage=2, reduce_each=True)
    yield Contestant("ours-2-each", "ours, stage 2, every micro-batch", each, accumulates=True)
    for stage in _STAGES:
        title = f"ours, stage {stage}, half of the blocks dropped"
        yield Contestant(f"ours-{stage}-drop", title, partial(OursDropping, stage=stage), alike=False)
    for stage in _STAGES:
        title = f"ours, stage {stage}, by messages"
        yield Contestant(f"ours-{stage}-messages", title, partial(Ours, stage=stage, messages=True))
    for stage in _STAGES:
        for way, messages in (("", False), ("-messages", True)):
            make = partial(Ours, stage=stage, messages=messages, older=True)
            title = f"ours, stage {stage}, older tree{', by messages' if messages else ''}"
            yield Contestant(f"older-{stage}{way}", title, make, asked_for=True)
    for stage in _STAGES:
        make = partial(Ours, stage=stage, cpu_offload=True)
        yield Contestant(f"ours-{stage}-offload", f"ours, stage {stage}, offload", make, asked_for=True)
    yield from _over_links()
    yield Contestant("floor", "no communication, a rank's share of the step", Floor, alike=False)


def _over_links() -> Iterator[Contestant]:
    """Who saves bytes on a slow link, or hides them."""
    less = partial(Contestant, dtypes=FP32, alike=False, asked_for=True)
    yield less("ddp-bf16", "DDP, gradients in bf16", partial(DDP, compression="bf16"))
    yield less("ddp-powersgd", "DDP, PowerSGD of rank 4, one bucket", partial(DDP, compression="powersgd"))
    for stage in _STAGES:
        make = partial(Ours, stage=stage, overlap_allgather=True)
        yield Contestant(f"ours-{stage}-overlap", f"ours, stage {stage}, overlapped gathers", make, asked_for=True)
    bf16 = partial(Ours, stage=2, communication_dtype=torch.bfloat16)
    yield less("ours-2-bf16", "ours, stage 2, gradients in bf16", bf16)
    yield less(
        "ours-2-bf16-overlap", "ours, stage 2, the same, overlapped gathers", partial(bf16, overlap_allgather=True)
    )
    yield less("ours-2-fp8", "ours, stage 2, in fp8", partial(Ours, stage=2, fp8_communication=True))
    make = partial(Ours, stage=2, hybrid_shard=True)
    yield Contestant("ours-2-hybrid", "ours, stage 2, replicas on the other host", make, asked_for=True)


_ALL = tuple(_everybody())
CONTESTANTS = {contestant.name: contestant for contestant in _ALL}


def taking_part(setting: Setting, names: list[str] | None) -> list[Contestant]:
    """Who takes part in a run: the baseline, and those named (None: all), where they suit; else ``ValueError``."""
    baseline = CONTESTANTS[BASELINE[setting.dtype]]
    if names is None:
        others = [each for each in _ALL if each.suits(setting) and not each.asked_for]
    else:
        others = [_named(name, setting) for name in names]
    return [baseline, *(each for each in others if each is not baseline)]


def left_out() -> list[str]:
    """A line for each library that is not installed."""
    missing = dict.fromkeys(each.needs for each in _ALL if not each.installed)
    return [f"{package} is not installed, and so left out: make peers" for package in missing]


def _named(name: str, setting: Setting) -> Contestant:
    if name not in CONTESTANTS:
        raise ValueError(f"expected contestants among {', '.join(CONTESTANTS)}, got {name!r}")
    if not CONTESTANTS[name].installed:
        raise ValueError(f"{name}: {CONTESTANTS[name].needs} is not installed: make peers")
    if not CONTESTANTS[name].suits(setting):
        raise ValueError(f"{name} doesn't take part in {setting}: see {__name__.replace('.', '/')}/__init__.py")
    return CONTESTANTS[name]
