"""ColossalAI's CPU accelerator, completed by the calls that raise in ColossalAI's own."""

from __future__ import annotations

import torch
from colossalai.accelerator import CpuAccelerator, get_accelerator, set_accelerator


class HostAccelerator(CpuAccelerator):  # type: ignore[misc]  # ColossalAI ships no types
    """ColossalAI's CPU accelerator with the calls of its checkpoints, seeds and memory reports.

    ColossalAI's own raises in them, so ``TorchDDPPlugin``, say, can't load a sharded optimizer on a CPU.
    """

    def synchronize(self, device: object = None) -> None:
        """Do nothing: the host's operations are done when they return."""

    def empty_cache(self) -> None:
        """Do nothing: the host's memory isn't cached."""

    def device_count(self) -> int:
        """Return 1: the host."""
        return 1

    def manual_seed(self, seed: int) -> None:
        """Seed the host's generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


def complete_cpu_accelerator() -> None:
    """Set ``HostAccelerator`` as ColossalAI's accelerator if it runs on the CPU."""
    if type(get_accelerator()) is CpuAccelerator:
        set_accelerator(HostAccelerator())
