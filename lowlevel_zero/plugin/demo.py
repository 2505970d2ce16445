"""A small Llama, trained through ColossalAI's Booster: ``torchrun --nproc-per-node 2 -m lowlevel_zero.plugin.demo``.

It learns to write Python from the bytes of torch's own ``torch/nn/functional.py``, and can save and resume.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import colossalai
import torch
from colossalai.booster import Booster
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from . import LowLevelZeroPlugin

LENGTH = 128


class Text(Dataset[Tensor]):
    """A file's bytes, in pieces of ``LENGTH``."""

    def __init__(self, path: str) -> None:
        read = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
        self._pieces = read[: len(read) // LENGTH * LENGTH].view(-1, LENGTH).long()

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, at: int) -> Tensor:
        return self._pieces[at]


class Training(NamedTuple):
    """What a booster trains, saves and loads."""

    booster: Booster
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any

    def save(self, folder: Path) -> None:
        """Write all that a resumed run needs."""
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        self.booster.save_model(self.model, str(folder / "model"), shard=True)
        self.booster.save_optimizer(self.optimizer, str(folder / "optimizer"), shard=True)
        self.booster.save_lr_scheduler(self.scheduler, str(folder / "scheduler.pt"))

    def load(self, folder: Path) -> None:
        """Read it."""
        self.booster.load_model(self.model, str(folder / "model"))
        self.booster.load_optimizer(self.optimizer, str(folder / "optimizer"))
        self.booster.load_lr_scheduler(self.scheduler, str(folder / "scheduler.pt"))


def build(options: argparse.Namespace) -> Training:
    """What any ColossalAI program does, with this package's plugin."""
    plugin = LowLevelZeroPlugin(stage=options.stage, precision=options.precision, initial_scale=2**16, max_norm=1.0)
    booster = Booster(plugin=plugin)
    size = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=10 * options.steps)
    loader = plugin.prepare_dataloader(Text(str(torch.nn.functional.__file__)), batch_size=8, shuffle=True)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    return Training(booster, model, optimizer, scheduler, loader)


def train(training: Training, steps: int) -> Iterator[tuple[float, float]]:
    """Loss on this rank, and gradient norm, of each step."""
    training.model.train()
    for tokens, _ in zip(_forever(training.loader), range(steps), strict=False):
        tokens = tokens.to(next(training.model.parameters()).device)
        loss = training.model(input_ids=tokens, labels=tokens).loss
        training.booster.backward(loss, training.optimizer)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.scheduler.step()
        yield loss.item(), training.optimizer.get_grad_norm()


def _forever(loader: Any) -> Iterator[Tensor]:
    while True:
        yield from loader


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and say how it goes."""
    options = _options(arguments)
    colossalai.launch_from_torch(verbose=False)
    training = build(options)
    if options.resume:
        training.load(options.resume)
    first = training.scheduler.last_epoch
    for step, (loss, norm) in enumerate(train(training, options.steps), start=first + 1):
        if torch.distributed.get_rank() == 0 and (step == first + 1 or step % 10 == 0):
            print(f"step {step}: loss {loss:.3f}, gradient norm {norm:.3f}", flush=True)
    if options.save:
        training.save(options.save)
    torch.distributed.destroy_process_group()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lowlevel_zero.plugin.demo", description="Train a small Llama with Booster.")
    usual = "bf16" if torch.cuda.is_available() else "fp32"
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2, help="of ZeRO (default: 2)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default=usual, help=f"default here: {usual}")
    parser.add_argument("--steps", type=int, default=60, help="default: 60")
    parser.add_argument("--save", type=Path, help="save to this directory at the end")
    parser.add_argument("--resume", type=Path, help="start from what --save left there")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --standalone --nproc-per-node 2 -m lowlevel_zero.plugin.demo")
    return options


if __name__ == "__main__":
    main()
