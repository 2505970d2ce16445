"""The text: Python's own standard library, which every machine that can run the demo has.

It is split by file, never inside one: what validation reads, no rank has trained on, and what one rank trains
on, no other does.
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_OF = 16  # one file of so many is held out for validation


@dataclass(frozen=True)
class Split:
    """Which files are for what."""

    training: list[Path]
    validation: list[Path]

    def share(self, rank: int, world_size: int) -> list[Path]:
        """The training files of one rank: every ``world_size``-th, so that the shares are alike in kind."""
        return self.training[rank::world_size]


def library_sources(root: Path | None = None) -> list[Path]:
    """The library's sources below ``root``, in one order everywhere; no tests, no installed packages."""
    files: list[Path] = []
    for folder, inner, names in os.walk(root or sysconfig.get_path("stdlib")):
        inner[:] = [name for name in inner if name not in EXCLUDED]  # not even looked into: they may be large
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=Path.as_posix)


def split(files: list[Path], world_size: int) -> Split:
    """Hold out every 16th file. Raises ValueError where too few remain for each rank to get one."""
    validation = files[::HELD_OUT_OF]
    training = [file for position, file in enumerate(files) if position % HELD_OUT_OF]
    if len(training) < world_size:
        raise ValueError(
            f"expected at least {world_size} training files, one a rank, but found {len(training)}: "
            "start fewer ranks, or use a Python that has its standard library's sources"
        )
    return Split(training, validation)


def read(files: list[Path]) -> Tensor:
    """The files' bytes, one after the other with a line break between: uint8 [bytes]."""
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def fixed_windows(text: Tensor, count: int, context: int) -> Tensor:
    """``count`` windows, inputs and last target, spread evenly over ``text``: int64 [count, context + 1]."""
    starts = torch.linspace(0, _last_start(text, context), count).long()
    return text.unfold(0, context + 1, 1)[starts].long()


def random_windows(text: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """``count`` windows, inputs and last target, anywhere in ``text``: int64 [count, context + 1]."""
    starts = torch.randint(_last_start(text, context) + 1, (count,), generator=generator)
    return text.unfold(0, context + 1, 1)[starts].long()


def _last_start(text: Tensor, context: int) -> int:
    if len(text) <= context:
        raise ValueError(f"--context {context} needs a longer text than {len(text)} bytes: choose a smaller one")
    return len(text) - context - 1
