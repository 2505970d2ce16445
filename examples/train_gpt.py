"""Train a byte-level GPT with LayerDrop, sharded by ZeRO, on the sources of Python's standard library.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --resume  # after it was killed

Read it from top to bottom and make it yours. report.py beside it prints, draws and compares.
"""

from __future__ import annotations

import math
import os
import random
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import report
from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import latest, load_checkpoint, save_checkpoint
from options import DTYPES, Options, join, parse

BYTES = 256

# ---- the model ----


class Block(nn.Module):
    """One pre-norm transformer layer. It starts as the identity: a young model doesn't miss it when it is dropped."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        nn.init.zeros_(self.merge.weight)
        nn.init.zeros_(self.narrow.weight)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:  # x: [batch, time, width]
        by_head = self.project(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = by_head.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(turned(query, rotation), turned(key, rotation), value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(-2))
        x = x + self.narrow(F.gelu(self.widen(self.before_mlp(x))))
        return x


def turned(x: Tensor, rotation: Tensor) -> Tensor:
    """Pairs of channels turned by an angle that grows with the position (RoFormer, Su et al., 2021)."""
    cosine, sine = rotation[:, : x.size(-2)]
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


class GPT(nn.Module):
    """From bytes to the logits of each one's successor; the embedding is the output projection too."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        speeds = 10_000.0 ** -(torch.arange(0, width // heads, 2) * heads / width)
        angles = torch.outer(torch.arange(context), speeds)
        self.register_buffer("rotation", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, text: Tensor, keep: Sequence[bool] | None = None) -> Tensor:  # text: [batch, time]
        """``keep`` says which layers take part (LayerDrop, Fan et al., 2019); None: all."""
        x = self.embedding(text)
        for layer, kept in zip(self.layers, keep or [True] * len(self.layers), strict=True):
            x = layer(x, self.rotation) if kept else x
        return F.linear(self.norm(x), self.embedding.weight)


def byte_loss(network: nn.Module, windows: Tensor, keep: Sequence[bool] | None = None, reduce: str = "mean") -> Tensor:
    """Cross-entropy, in fp32, of all but the first byte of each of ``windows`` [batch, context + 1]."""
    logits = network(windows[:, :-1], keep)
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction=reduce)


# ---- the data ----


def library_sources() -> list[Path]:
    """The standard library's sources in one order everywhere; no tests, no installed packages."""
    files: list[Path] = []
    for folder, inner, names in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = set(inner) - {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=Path.as_posix)


def windows_of(files: Sequence[Path], context: int) -> Tensor:
    """All windows of the files' bytes, end to end: uint8 [windows, context + 1], a view."""
    text = bytearray(b"\n".join(file.read_bytes() for file in files))
    if len(text) <= context:
        raise ValueError(f"--context {context} needs a longer text than {len(text)} bytes: choose less, or fewer ranks")
    return torch.frombuffer(text, dtype=torch.uint8).unfold(0, context + 1, 1)


# ---- the training ----


class Training:
    """A model, the optimizer that ZeRO shards, and the steps that they take together."""

    def __init__(self, options: Options) -> None:
        self.options = options
        torch.manual_seed(options.seed)
        model: nn.Module = GPT(options.layers, options.width, options.heads, options.context)
        self.model = self.network = model.to(options.device, DTYPES[options.dtype])
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},  # biases and norms
        ]
        if options.stage:
            adamw = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)
            self.optimizer: Any = LowLevelZeroOptimizer(
                adamw, model=model, partition_grad=options.stage == 2, clip_grad_norm=options.clip
            )
        else:
            self.network = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
            self.optimizer = report.PlainAdamW(groups, lr=options.lr, betas=(0.9, 0.95), clip=options.clip)
        self.schedule = LambdaLR(self.optimizer, lambda step: learning_rate(step, options.steps))
        self.history = report.History()
        self.losses: list[Tensor] = []  # of the steps that the history lacks: to read them is to wait for the device

    def run(self, text: Tensor, validation: Tensor) -> None:
        """The steps that are left, on windows drawn from ``text``, each rank's own; all share ``validation``."""
        options, history = self.options, self.history
        done = len(history.train)
        if not done:
            self.validate(0, validation)
        with report.progress_bar(options.steps, done, visible=dist.get_rank() == 0) as bar:
            for step in range(done + 1, options.steps + 1):
                began = time.perf_counter()
                self.backward(step, text)
                self.optimizer.step()
                self.schedule.step()
                seen = self.look() if due(step, options.steps, 100) else None
                self.optimizer.zero_grad()
                history.seconds += time.perf_counter() - began
                if seen is not None:
                    bar.set_postfix_str(f"{seen}, {report.speed(options, step, history.seconds):,.0f} tokens/s", False)
                bar.update()
                if due(step, options.steps, 8):
                    self.validate(step, validation)
                if options.saves and (step % options.save_every == 0 or step == options.steps):
                    self.save(step)
        self.average_losses()

    def backward(self, step: int, text: Tensor) -> None:
        """The micro-batches of a step. The mean of their losses stays on the device."""
        options, losses = self.options, []
        for micro_batch in range(options.accumulation):
            # Batches and dropped layers depend on these numbers alone: a resumed run has those of an unbroken one.
            place = f"{options.seed} {step} {micro_batch}"
            own = random.Random(f"{place} {dist.get_rank()}")
            windows = text[[own.randrange(len(text)) for _ in range(options.batch)]].long().to(options.device)
            draw = own if options.layer_drop_per_rank else random.Random(place)
            keep = [draw.random() >= options.layer_drop for _ in range(options.layers)]
            self.history.layers_drawn += len(keep)
            self.history.layers_dropped += keep.count(False)
            losses.append(byte_loss(self.network, windows, keep))
            self.optimizer.backward(losses[-1] / options.accumulation)
        self.losses.append(torch.stack(losses).detach().mean())

    def look(self) -> str:
        """Loss and norm of a step, read from the device; the most that this rank has held of anything is remembered."""
        held = self.history.held
        held |= {owner: max(size, held.get(owner, 0)) for owner, size in self.optimizer.memory_held().items()}
        return f"loss {self.losses[-1].item():.3f}, norm {self.optimizer.get_grad_norm() or 0.0:.2f}"

    @torch.no_grad()
    def validate(self, step: int, windows: Tensor) -> None:
        """Remember the loss over all ``windows``, of which each rank judges its share, with no layer dropped."""
        nats = torch.zeros((), dtype=torch.float64, device=self.options.device)
        for part in torch.split(windows[dist.get_rank() :: dist.get_world_size()], self.options.batch):
            nats += byte_loss(self.model, part.to(self.options.device), reduce="sum")
        dist.all_reduce(nats)
        self.history.validation.append((step, nats.item() / windows[:, 1:].numel()))

    def average_losses(self) -> None:
        """Average over the ranks what the steps since the last time lost, and remember it."""
        if self.losses:
            mean = torch.stack(self.losses).float() / dist.get_world_size()
            dist.all_reduce(mean)
            self.history.train += mean.tolist()
            self.losses.clear()

    def save(self, step: int) -> None:
        """Write a checkpoint; every rank calls it."""
        self.average_losses()
        path = self.options.checkpoint_dir / f"step-{step}"
        extra = {"run": self.options.run(), "history": asdict(self.history)}
        save_checkpoint(path, self.model, self.optimizer, scheduler=self.schedule, extra=extra, keep=self.options.keep)

    def resume(self) -> Path | None:
        """Go on from the newest checkpoint, which is returned, if that is wanted and there is one."""
        newest = latest(self.options.checkpoint_dir, group=dist.group.WORLD) if self.options.resume else None
        if newest is not None:
            extra = load_checkpoint(newest, self.model, self.optimizer, scheduler=self.schedule)
            self.options.check_same_run(newest, extra)
            self.history = report.History(**extra["history"])
        return newest


def learning_rate(step: int, steps: int) -> float:
    """The share of the highest rate: a linear warm-up, then half a cosine down to a twentieth."""
    warm_up = max(1, round(0.1 * steps))
    turn = math.pi * (step - warm_up) / max(1, steps - warm_up)
    return (step + 1) / warm_up if step < warm_up else 0.05 + 0.95 * (1 + math.cos(turn)) / 2


def due(step: int, steps: int, times: int) -> bool:
    """Whether what is done ``times`` times in all, evenly and at the last step, is done after this one."""
    return step * times // steps > (step - 1) * times // steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on this rank, and report on the first."""
    options = parse(arguments)
    join(options)
    files = library_sources()
    held_out, others = files[::16], [file for at, file in enumerate(files) if at % 16]
    text = windows_of(others[dist.get_rank() :: dist.get_world_size()], options.context)
    validation = windows_of(held_out, options.context)
    validation = validation[torch.linspace(0, len(validation) - 1, 128).long()].long()

    training = Training(options)
    report.begin(options, training.model, (len(others), len(held_out)), training.resume())
    training.run(text, validation)
    report.conclude(options, training.model, training.history, windows_of(others, 0).flatten(), validation)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
