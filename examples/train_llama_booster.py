"""Train a small Llama through ColossalAI's Booster, sharded by ZeRO; save it, and resume it on any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/train_llama_booster.py --save run
    torchrun --standalone --nproc-per-node 4 examples/train_llama_booster.py --resume run

It learns to write Python from the bytes of torch's own ``torch/nn/functional.py``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import colossalai
import torch
from colossalai.booster import Booster
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import LlamaConfig, LlamaForCausalLM

from lowlevel_zero.plugin import LowLevelZeroPlugin

LENGTH = 128
SIZES = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6}


def read(path: str) -> Tensor:
    """A file's bytes in pieces: int64 [pieces, LENGTH]."""
    text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    return text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()


class Training:
    """What any ColossalAI program has, with this package's plugin."""

    def __init__(self, options: argparse.Namespace) -> None:
        plugin = LowLevelZeroPlugin(stage=options.stage, precision=options.precision, initial_scale=2**16, max_norm=1.0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **SIZES))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = CosineAnnealingLR(optimizer, T_max=10 * options.steps)
        loader = plugin.prepare_dataloader(read(str(torch.nn.functional.__file__)), batch_size=8, shuffle=True)
        self.booster = Booster(plugin=plugin)
        boosted = self.booster.boost(model, optimizer, None, loader, scheduler)
        self.model, self.optimizer, _, self.loader, self.scheduler = boosted

    def run(self, steps: int) -> Iterator[tuple[float, float]]:
        """Train; yields the loss on this rank, and the gradients' norm, of each step."""
        self.model.train()
        for tokens, _ in zip(self.batches(), range(steps), strict=False):
            loss = self.model(input_ids=tokens, labels=tokens).loss
            self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            yield loss.item(), self.optimizer.get_grad_norm()

    def batches(self) -> Iterator[Tensor]:
        """This rank's, for ever."""
        device = next(self.model.parameters()).device
        while True:
            yield from (tokens.to(device) for tokens in self.loader)

    def save(self, folder: Path) -> None:
        """Write all that a resumed run needs; every rank calls it."""
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        self.booster.save_model(self.model, str(folder / "model"), shard=True)
        self.booster.save_optimizer(self.optimizer, str(folder / "optimizer"), shard=True)
        self.booster.save_lr_scheduler(self.scheduler, str(folder / "scheduler.pt"))

    def load(self, folder: Path) -> None:
        """Read it; every rank calls it."""
        self.booster.load_model(self.model, str(folder / "model"))
        self.booster.load_optimizer(self.optimizer, str(folder / "optimizer"))
        self.booster.load_lr_scheduler(self.scheduler, str(folder / "scheduler.pt"))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small Llama with ColossalAI's Booster.")
    usual = "bf16" if torch.cuda.is_available() else "fp32"
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2, help="of ZeRO (default: 2)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default=usual, help=f"default here: {usual}")
    parser.add_argument("--steps", type=int, default=60, help="default: 60")
    parser.add_argument("--save", type=Path, help="save to this directory at the end")
    parser.add_argument("--resume", type=Path, help="start from what --save left there")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --standalone --nproc-per-node 2 examples/train_llama_booster.py")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and say how it goes."""
    options = parse(arguments)
    colossalai.launch_from_torch(verbose=False)
    training = Training(options)
    if options.resume:
        training.load(options.resume)
    first = training.scheduler.last_epoch + 1
    for step, (loss, norm) in enumerate(training.run(options.steps), start=first):
        if torch.distributed.get_rank() == 0 and (step == first or step % 10 == 0):
            print(f"step {step}: loss {loss:.3f}, gradient norm {norm:.3f}", flush=True)
    if options.save:
        training.save(options.save)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
