"""Train a small Llama through ColossalAI's Booster, sharded by ZeRO; save it, and resume it on any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/train_llama_booster.py --save run
    torchrun --standalone --nproc-per-node 4 examples/train_llama_booster.py --resume run

It trains on the bytes of torch's own ``torch/nn/functional.py``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import chain, repeat
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
    """Return a file's bytes in pieces: int64 [pieces, LENGTH]."""
    text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    return text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small Llama with ColossalAI's Booster.")
    usual = "bf16" if torch.cuda.is_available() else "fp32"
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2, help="ZeRO stage (default: 2)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default=usual, help=f"default here: {usual}")
    parser.add_argument("--steps", type=int, default=60, help="default: 60")
    parser.add_argument("--save", type=Path, help="save to this directory at the end")
    parser.add_argument("--resume", type=Path, help="resume from a directory that --save wrote")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --standalone --nproc-per-node 2 examples/train_llama_booster.py")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as with ColossalAI's own plugin, and print the loss and the gradient norm."""
    options = parse(arguments)
    colossalai.launch_from_torch(verbose=False)
    plugin = LowLevelZeroPlugin(stage=options.stage, precision=options.precision, initial_scale=2**16, max_norm=1.0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=10 * options.steps)
    loader = plugin.prepare_dataloader(read(str(torch.nn.functional.__file__)), batch_size=8, shuffle=True)
    booster = Booster(plugin=plugin)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)

    if options.resume:
        booster.load_model(model, str(options.resume / "model"))
        booster.load_optimizer(optimizer, str(options.resume / "optimizer"))
        booster.load_lr_scheduler(scheduler, str(options.resume / "scheduler.pt"))
    first, device = scheduler.last_epoch + 1, next(model.parameters()).device
    model.train()
    batches = chain.from_iterable(repeat(loader))  # for ever
    for step, tokens in zip(range(first, first + options.steps), batches, strict=False):
        tokens = tokens.to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if torch.distributed.get_rank() == 0 and (step == first or step % 10 == 0):
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {optimizer.get_grad_norm():.3f}", flush=True)
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        booster.save_model(model, str(options.save / "model"), shard=True)
        booster.save_optimizer(optimizer, str(options.save / "optimizer"), shard=True)
        booster.save_lr_scheduler(scheduler, str(options.save / "scheduler.pt"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
