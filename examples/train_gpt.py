"""Train a byte-level GPT with LayerDrop, sharded by ZeRO, on the sources of Python's standard library.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --resume  # after it was killed

Read it from top to bottom and make it yours. report.py beside it prints and draws the results.
"""

from __future__ import annotations

import math
import random
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import report
from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import latest, load_checkpoint, save_checkpoint
from lowlevel_zero.layout import memory_held
from options import DTYPES, Options, join, parse, run_of

# ---- the model ----


def layer_of(width: int, heads: int) -> nn.TransformerEncoderLayer:
    """Return a pre-norm layer that starts as the identity, so that dropping it early changes nothing."""
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
    nn.init.zeros_(layer.self_attn.out_proj.weight)
    nn.init.zeros_(layer.linear2.weight)
    return layer


class GPT(nn.Module):
    """A byte-level GPT, which returns the logits of each next byte; the embedding is the output projection, too."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.layers = nn.ModuleList(layer_of(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, text: Tensor, keep: Sequence[bool] | None = None) -> Tensor:  # text: [batch, time]
        """Return logits, [batch, time, 256]; ``keep`` selects layers to run (LayerDrop, Fan et al., 2019), None all."""
        x = self.embedding(text) + self.position.weight[: text.size(1)]
        future = nn.Transformer.generate_square_subsequent_mask(text.size(1), x.device, x.dtype)
        for layer, kept in zip(self.layers, keep or [True] * len(self.layers), strict=True):
            x = layer(x, future, is_causal=True) if kept else x
        return F.linear(self.norm(x), self.embedding.weight)


def byte_loss(model: nn.Module, windows: Tensor, keep: Sequence[bool] | None = None) -> Tensor:
    """Return the mean cross-entropy, in fp32, of all but the first byte of each of ``windows`` [batch, context + 1]."""
    logits = model(windows[:, :-1], keep)
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


# ---- the data ----


def library_sources() -> list[Path]:
    """Return the standard library's source files, sorted, without tests and installed packages."""
    root, left_out = (
        Path(sysconfig.get_path("stdlib")),
        {"site-packages", "dist-packages", "test", "tests", "idle_test"},
    )
    found = [file for pattern in ("*.py", "*/*.py", "*/*/*.py") for file in root.glob(pattern)]
    return sorted(file for file in found if left_out.isdisjoint(file.relative_to(root).parts))


def windows_of(files: Sequence[Path], context: int) -> Tensor:
    """Return all windows over the files' concatenated bytes: uint8 [windows, context + 1], a view."""
    text = bytearray(b"\n".join(file.read_bytes() for file in files))
    if len(text) <= context:
        raise ValueError(f"--context {context} needs a longer text than {len(text)} bytes: choose less, or fewer ranks")
    return torch.frombuffer(text, dtype=torch.uint8).unfold(0, context + 1, 1)


def draw(options: Options, text: Tensor, step: int, micro_batch: int) -> tuple[Tensor, list[bool]]:
    """Return a micro-batch of this rank, [batch, context + 1], and for each layer whether to run it.

    Both depend only on the arguments and the rank, so a resumed run draws the same as an uninterrupted one.
    """
    shared = random.Random(f"{options.seed} {step} {micro_batch}")
    own = random.Random(f"{options.seed} {step} {micro_batch} {dist.get_rank()}")
    windows = text[[own.randrange(len(text)) for _ in range(options.batch)]].long()
    chance = own if options.layer_drop_per_rank else shared
    return windows, [chance.random() >= options.layer_drop for _ in range(options.layers)]


# ---- the training ----


class Training:
    """A model, its sharded optimizer, and the training loop."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self.options, self.device, self.folder = options, device, options.out / "checkpoints"
        torch.manual_seed(options.seed)
        self.model = GPT(options.layers, options.width, options.heads, options.context)
        self.model.to(device, DTYPES[options.dtype])
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.model.parameters() if p.ndim < 2], "weight_decay": 0.0},  # biases and norms
        ]
        adamw = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)
        self.optimizer = LowLevelZeroOptimizer(adamw, self.model, stage=options.stage, clip_grad_norm=options.clip)
        self.schedule = LambdaLR(self.optimizer, lambda step: learning_rate(step, options.steps))
        self.history = report.History()
        self.losses: list[Tensor] = []  # of the steps that the history lacks: reading them would wait for the device

    def run(self, text: Tensor, validation: Tensor) -> None:
        """Run the remaining steps on windows of this rank's ``text``; ``validation`` is the same on all ranks."""
        options, history, done = self.options, self.history, len(self.history.train)
        if not done:
            self.validate(0, validation)
        with report.progress_bar(options.steps, done) as bar:
            for step in range(done + 1, options.steps + 1):
                began = time.perf_counter()
                self.backward(step, text)
                self.optimizer.step()
                self.schedule.step()
                if due(step, options.steps, 100):
                    held = asdict(memory_held(self.optimizer))
                    history.held = {owner: max(size, history.held.get(owner, 0)) for owner, size in held.items()}
                    bar.set_postfix_str(f"loss {self.losses[-1]:.3f}, norm {self.optimizer.get_grad_norm():.2f}", False)
                self.optimizer.zero_grad()
                history.seconds += time.perf_counter() - began
                bar.update()
                if due(step, options.steps, 8):
                    self.validate(step, validation)
                if options.save_every and (step % options.save_every == 0 or step == options.steps):
                    self.save(step)

    def backward(self, step: int, text: Tensor) -> None:
        """Run forward and backward of a step's micro-batches, and keep their mean loss on the device."""
        losses = []
        for micro_batch in range(self.options.accumulation):
            windows, keep = draw(self.options, text, step, micro_batch)
            self.history.layers_dropped += keep.count(False)
            losses.append(byte_loss(self.model, windows.to(self.device), keep))
            self.optimizer.backward(losses[-1] / self.options.accumulation)
        self.losses.append(torch.stack(losses).detach().mean())

    @torch.no_grad()
    def validate(self, step: int, windows: Tensor) -> None:
        """Record the loss over all ``windows``, with no layer dropped; each rank evaluates its share."""
        self.average_losses()
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in torch.split(windows[dist.get_rank() :: dist.get_world_size()], self.options.batch):
            nats += byte_loss(self.model, part.to(self.device)) * len(part)
        dist.all_reduce(nats)
        self.history.validation.append((step, nats.item() / len(windows)))

    def average_losses(self) -> None:
        """Average the losses since the last call over the ranks, and record them."""
        if self.losses:
            mean = torch.stack(self.losses) / dist.get_world_size()
            dist.all_reduce(mean)
            self.history.train += mean.tolist()
            self.losses.clear()

    def save(self, step: int) -> None:
        """Write a checkpoint; every rank calls it."""
        self.average_losses()
        extra = {"run": run_of(self.options), "history": vars(self.history)}
        path, keep = self.folder / f"step-{step}", self.options.keep
        save_checkpoint(path, self.model, self.optimizer, scheduler=self.schedule, extra=extra, keep=keep)

    def resume(self) -> Path | None:
        """Load the newest checkpoint, and return its path, or None if there is none yet."""
        newest = latest(self.folder, group=dist.group.WORLD)
        if newest is not None and not self.options.resume:
            raise ValueError(f"--out: {newest} is of an earlier run: pass --resume to go on with it, or another --out")
        if newest is not None:
            extra = load_checkpoint(newest, self.model, self.optimizer, scheduler=self.schedule)
            if extra["run"] != run_of(self.options):
                raise ValueError(f"--resume: {newest} is of a run with {extra['run']}: give the same, or another --out")
            self.history = report.History(**extra["history"])
        return newest


def learning_rate(step: int, steps: int) -> float:
    """Return the factor of the peak learning rate: a linear warm-up, then half a cosine down to 0.05."""
    warm_up = max(1, round(0.1 * steps))
    turn = math.pi * (step - warm_up) / max(1, steps - warm_up)
    return (step + 1) / warm_up if step < warm_up else 0.05 + 0.95 * (1 + math.cos(turn)) / 2


def due(step: int, steps: int, times: int) -> bool:
    """Return whether an action that runs ``times`` times, evenly spaced and at the last step, is due after ``step``."""
    return step * times // steps > (step - 1) * times // steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and report on rank 0."""
    options = parse(arguments)
    device = join()
    files = library_sources()
    held_out, others = files[::16], [file for at, file in enumerate(files) if at % 16]
    text = windows_of(others[dist.get_rank() :: dist.get_world_size()], options.context)
    validation = windows_of(held_out, options.context)
    validation = validation[torch.linspace(0, len(validation) - 1, 128).long()].long()

    training = Training(options, device)
    report.begin(options, training.model, training.resume())
    training.run(text, validation)
    report.conclude(options, training.model, training.history, windows_of(others, 0).flatten(), validation)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
