"""The contestants: who takes part, under which name, and in which dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from .floor import Floor
from .fsdp import FSDP2
from .ours import Ours
from .peer import Peer, Setting
from .replicated import DDP, DDPMasters, ZeRORedundancy

__all__ = ["BASELINE", "CONTESTANTS", "Contestant", "Peer", "Setting", "taking_part"]

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
        needs: the module without which it can't take part; empty: none but torch.
        accumulates: only for more than one micro-batch; with one it would be another contestant's double.
    """

    name: str
    title: str
    make: Callable[[Setting], Peer]
    dtypes: tuple[str, ...] = BOTH
    needs: str = ""
    accumulates: bool = False

    def suits(self, setting: Setting) -> bool:
        """Whether it can take part in a run with ``setting``."""
        return (
            setting.dtype in self.dtypes
            and (setting.micro_batches > 1 or not self.accumulates)
            and (not self.needs or find_spec(self.needs) is not None)
        )


# The one that all ratios are taken to: what a user leaves who comes here.
BASELINE = {"fp32": "ddp", "bf16": "ddp-masters"}

_ALL = (
    Contestant("ddp", "DDP, fused", DDP, FP32),
    Contestant("ddp-foreach", "DDP, foreach", partial(DDP, implementation="foreach"), FP32),
    Contestant("ddp-masters", "DDP with fp32 masters, fused", DDPMasters, BF16),
    Contestant("zro", "ZeroRedundancyOptimizer, fused", ZeRORedundancy, FP32),
    Contestant("fsdp2", "FSDP2 without reshard, fused", partial(FSDP2, reshard=False)),
    Contestant("fsdp2-reshard", "FSDP2 with reshard, fused", partial(FSDP2, reshard=True)),
    Contestant("ours-1", "ours, stage 1, fused", partial(Ours, stage=1)),
    Contestant("ours-2", "ours, stage 2, fused", partial(Ours, stage=2)),
    Contestant("ours-2-foreach", "ours, stage 2, foreach", partial(Ours, stage=2, implementation="foreach")),
    Contestant(
        "ours-2-each", "ours, stage 2, every micro-batch", partial(Ours, stage=2, reduce_each=True), accumulates=True
    ),
    Contestant("floor", "no communication, a rank's share of the step", Floor),
)
CONTESTANTS = {contestant.name: contestant for contestant in _ALL}


def taking_part(setting: Setting, names: list[str] | None) -> list[Contestant]:
    """Who takes part in a run: the baseline, and those named (None: all), where they suit; else ``ValueError``."""
    baseline = CONTESTANTS[BASELINE[setting.dtype]]
    if names is None:
        others = [each for each in _ALL if each.suits(setting)]
    else:
        others = [_named(name, setting) for name in names]
    return [baseline, *(each for each in others if each is not baseline)]


def _named(name: str, setting: Setting) -> Contestant:
    if name not in CONTESTANTS:
        raise ValueError(f"expected contestants among {', '.join(CONTESTANTS)}, got {name!r}")
    if not CONTESTANTS[name].suits(setting):
        raise ValueError(f"{name} doesn't take part in {setting}: see {__name__.replace('.', '/')}/__init__.py")
    return CONTESTANTS[name]
