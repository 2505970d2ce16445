"""Print and draw the results of train_gpt.py: n-gram models to compare with, a sample, memory, the loss curve."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from lowlevel_zero.layout.text import aligned, in_bytes
from lowlevel_zero.planning import estimate
from options import Options

PROMPT, SAMPLE_BYTES, TEMPERATURE = b"def ", 240, 0.8
BLUE, ORANGE, GREY = "#1f5fa8", "#d9660a", "#777777"


@dataclass
class History:
    """The record of a run, which its checkpoints contain."""

    train: list[float] = field(default_factory=list)  # of each step: nats a byte, averaged over the ranks
    validation: list[tuple[int, float]] = field(default_factory=list)  # after how many steps, nats a byte
    seconds: float = 0.0  # spent in steps
    layers_dropped: int = 0  # on this rank
    held: dict[str, int] = field(default_factory=dict)  # bytes by owner, on this rank right after a step, at most


def progress_bar(steps: int, done: int) -> Any:
    """Return a progress bar of steps, shown on rank 0; in a file or a log it prints a line every ten seconds."""
    pause = 0.2 if sys.stderr.isatty() else 10
    return tqdm(total=steps, initial=done, disable=dist.get_rank() > 0, unit="step", mininterval=pause)


def ngrams(text: Tensor, windows: Tensor) -> dict[str, float]:
    """Return losses of n-gram models, in nats a byte on ``windows``; they are counted on ``text`` (uint8 [bytes])."""
    before, after = windows[:, :-1], windows[:, 1:]
    pairs = torch.bincount(text[:-1].int() * 256 + text[1:], minlength=256 * 256).view(256, 256)
    single, double = pairs.sum(0) + 0.1, pairs + 0.1  # of what was never seen, a little
    unigram, bigram = single / single.sum(), double / double.sum(1, keepdim=True)
    losses = {"unigram": unigram[after], "bigram": bigram[before, after]}
    return {"uniform": math.log(256), **{name: -share.log().mean().item() for name, share in losses.items()}}


@torch.no_grad()
def sample(model: nn.Module, options: Options) -> str:
    """Return the prompt and the bytes that the model samples after it; control characters are escaped."""
    generator, text = torch.Generator().manual_seed(options.seed), list(PROMPT)
    device = next(model.parameters()).device
    for _ in range(SAMPLE_BYTES):
        logits = model(torch.tensor([text[-options.context :]], device=device))[0, -1].float().cpu()
        text.append(int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)))
    return "".join(chr(byte) if byte == 10 or 32 <= byte < 127 else f"\\x{byte:02x}" for byte in text)


def begin(options: Options, model: nn.Module, resumed: Path | None) -> None:
    """Print the model's size, the options and the checkpoint to resume from, on rank 0."""
    if dist.get_rank() == 0:
        count = sum(p.numel() for p in model.parameters())
        print(f"A byte-level GPT of {count:,} parameters, ZeRO-{options.stage} on {dist.get_world_size()} ranks")
        print(", ".join(f"{name} {value}" for name, value in vars(options).items()))
        print(f"begins after {resumed}" if resumed else "begins at the first step", flush=True)


def conclude(options: Options, model: nn.Module, history: History, text: Tensor, validation: Tensor) -> None:
    """Draw the loss curve, write all numbers to summary.json, and print a summary, on rank 0."""
    if dist.get_rank():
        return
    options.out.mkdir(parents=True, exist_ok=True)
    size, name = dist.get_world_size(), f"ZeRO-{options.stage}"
    tokens = len(history.train) * options.batch * options.accumulation * options.context * size
    levels, ddp = ngrams(text, validation), estimate(model, size, stage=0)
    summary = {**asdict(history), "world_size": size, "ngrams": levels, "ddp": ddp.as_dict()}
    summary["sample"] = sample(model, options)
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    losses = {**levels, "GPT at first": history.validation[0][1], "GPT at last": history.validation[-1][1]}
    of_ddp = {**vars(ddp), "bucket_buffers": ddp.gradients}  # its buckets are a second set of them
    held = [(owner, in_bytes(ours), in_bytes(of_ddp[owner])) for owner, ours in history.held.items()]
    ours, theirs = sum(history.held.values()), sum(of_ddp[owner] for owner in history.held)
    held.append(("together", in_bytes(ours), in_bytes(theirs)))
    print(f"""
{len(history.train):,} steps in {history.seconds:.0f} s, {tokens / history.seconds:,.0f} tokens/s, \
{history.layers_dropped:,} layer passes dropped

Validation loss, nats a byte
{aligned([(of, f"{loss:.3f}") for of, loss in losses.items()], right=[1])}

Memory held by each rank, right after a step
{aligned([("", f"{name}, measured", "DDP, computed"), *held], right=[1, 2])}

What it writes after {PROMPT.decode()!r}
{summary["sample"]}

The loss curve is in {options.out / "loss.png"}""", flush=True)  # fmt: skip
    draw(history, levels, options.out / "loss.png")


def draw(history: History, levels: dict[str, float], path: Path) -> None:
    """Draw the losses over the steps, and the losses of the n-gram models as horizontal lines."""
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for name, loss in levels.items():
        axes.axhline(loss, color=GREY, linewidth=1, linestyle="--")
        axes.text(len(history.train), loss, f"{name} {loss:.2f}", ha="right", va="bottom", color=GREY)
    axes.plot(range(1, len(history.train) + 1), history.train, color=BLUE, linewidth=0.8, label="training")
    axes.plot(*zip(*history.validation, strict=True), "o-", color=ORANGE, label="validation")
    axes.set(xlabel="optimizer steps", ylabel="loss, nats a byte", ylim=(0, None))
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path)
