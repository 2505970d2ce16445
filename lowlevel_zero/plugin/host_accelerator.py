"""ColossalAI's accelerator of a machine without one, with the calls that its own leaves out."""

from __future__ import annotations

import torch
from colossalai.accelerator import CpuAccelerator, get_accelerator, set_accelerator


class HostAccelerator(CpuAccelerator):  # type: ignore[misc]  # ColossalAI ships no types
    """ColossalAI's CPU accelerator, that also answers what its checkpoints, seeds and memory reports ask.

    Its own raises in them, so that ``TorchDDPPlugin``, say, can't load a sharded optimizer on a CPU.
    """

    def synchronize(self, device: object = None) -> None:
        """Nothing to wait for: the host's operations are done when they return."""

    def empty_cache(self) -> None:
        """Nothing to empty: the host's memory isn't cached."""

    def device_count(self) -> int:
        """One: the host."""
        return 1

    def manual_seed(self, seed: int) -> None:
        """Seed the host's generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the host's generator."""
        torch.manual_seed(seed)


def complete_cpu_accelerator() -> None:
    """Where ColossalAI runs on the CPU, give it ``HostAccelerator`` by its public ``set_accelerator``."""
    if type(get_accelerator()) is CpuAccelerator:
        set_accelerator(HostAccelerator())
