"""What a dropped layer costs: our own step with half of the blocks against all: ``python -m benchmarks.drop``."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from ranks import run_ranks

from .gpt import SIZES, make_batches
from .machine import header
from .peers import Setting
from .peers.peer import DTYPES, adamw
from .rounds import settle

_SCRATCH = Path(__file__).parent / "results" / "scratch-drop.json"


class Turn(NamedTuple):
    """A few steps of one kind.

    Attributes:
        seconds: of a whole step, the median.
        sent: bytes that a step hands to other ranks, on this rank, the mean.
    """

    seconds: float
    sent: float


class Contestant:
    """One stage of ours, training with every block or with another half of them in each step.

    Args:
        setting: model and dtype.
        stage: 1 or 2.
        drops: leave half of the blocks out, the same on all ranks.
        rank: whose tokens it is fed.
    """

    def __init__(self, setting: Setting, stage: int, drops: bool, rank: int) -> None:
        self.model = setting.model()
        self.optimizer = LowLevelZeroOptimizer(
            adamw(self.model.parameters()), partition_grad=stage == 2, model=self.model
        )
        self._blocks = list(self.model.blocks)
        self._drops = drops
        self._draw = random.Random(0)
        self._batches = make_batches(SIZES[setting.size], setting.micro_batches, rank)

    def step(self) -> None:
        """One training step."""
        count = len(self._blocks)
        kept = sorted(self._draw.sample(range(count), count - count // 2)) if self._drops else range(count)
        self.model.blocks = nn.ModuleList(self._blocks[place] for place in kept)
        for batch in self._batches:
            self.optimizer.backward(self.model(batch) / len(self._batches))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, steps: int) -> Turn:
        """Some steps, timed."""
        dist.barrier()
        seconds = []
        sent = -sum(self.optimizer.traffic().values())
        for _ in range(steps):
            start = perf_counter()
            self.step()
            seconds.append(perf_counter() - start)
        sent += sum(self.optimizer.traffic().values())
        return Turn(median(seconds), sent / steps)


def measure(rank: int, world_size: int, setting: Setting, rounds: int, steps: int) -> dict[str, list[Turn]]:
    """All rounds on this rank, by kind: whole and dropping take turns, in both stages."""
    made = {
        f"stage {stage}, {kind}": Contestant(setting, stage, kind == "half", rank)
        for stage in (1, 2)
        for kind in ("whole", "half")
    }
    turns: dict[str, list[Turn]] = {name: [] for name in made}
    for contestant in made.values():
        contestant.turn(3)
    for number in range(rounds):
        for name in list(made)[:: 1 if number % 2 else -1]:
            turns[name].append(made[name].turn(steps))
    return turns


def summarise(turns: dict[str, list[Turn]], setting: Setting) -> list[dict[str, Any]]:
    """One row a stage: medians, and those of the ratios within a round."""
    rows = []
    for stage in (1, 2):
        whole, half = turns[f"stage {stage}, whole"], turns[f"stage {stage}, half"]
        ratios = [one.seconds / other.seconds for one, other in zip(half, whole, strict=True)]
        rows.append(
            {
                "stage": stage,
                "whole": {"seconds": median(turn.seconds for turn in whole), "sent": whole[0].sent},
                "half": {"seconds": median(turn.seconds for turn in half), "sent": half[0].sent},
                "time": {"median": median(ratios), "least": min(ratios), "most": max(ratios)},
                "sent": half[0].sent / whole[0].sent,
                "parameters": used_share(setting),
            }
        )
    return rows


def used_share(setting: Setting) -> float:
    """Of all parameters, those that remain when half of the blocks are dropped."""
    model = setting.fp32_model()
    sizes = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    return 1 - sum(sizes[: len(sizes) // 2]) / sum(p.numel() for p in model.parameters())


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drop", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="25m", help="the model")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--micro-batches", type=int, default=1, help="backwards a step")
    parser.add_argument("--world-size", type=int, default=2, help="ranks")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each kind")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--out", type=Path, default=_SCRATCH, help="JSON")
    options = parser.parse_args(arguments)
    setting = Setting(options.size, options.dtype, options.micro_batches)
    facts = header()
    settle()
    first, *_ = run_ranks(measure, options.world_size, setting, options.rounds, options.steps, timeout=3600.0)
    rows = summarise(first, setting)
    print("| | all blocks, ms | half, ms | time, to all | least to most | bytes, to all | parameters, to all |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        time = row["time"]
        print(
            f"| stage {row['stage']} | {1e3 * row['whole']['seconds']:.0f} | {1e3 * row['half']['seconds']:.0f} "
            f"| {time['median']:.2f} | {time['least']:.2f} to {time['most']:.2f} "
            f"| {row['sent']:.4f} | {row['parameters']:.4f} |"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"header": facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
