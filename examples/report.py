"""What train_gpt.py is compared with, prints and draws: guesses and plain DDP, tables, a sample, the loss curve."""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from options import Options

try:
    from matplotlib.figure import Figure
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    raise SystemExit(f"the demo needs {missing.name}: pip install 'lowlevel-zero[demo]'") from None

PROMPT, SAMPLE_BYTES, TEMPERATURE = b"def ", 240, 0.8
SMOOTHINGS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
GUESSES = {"uniform": "all alike", "unigram": "how common each byte is", "bigram": "how common after the byte before"}
OWNERS = {"masters": "fp32 masters", "states": "optimizer state", "wires": "communication"}
BLUE, ORANGE, GREY = "#1f5fa8", "#d9660a", "#777777"


@dataclass
class History:
    """What is remembered of a run, and saved with it."""

    train: list[float] = field(default_factory=list)  # of each step: nats a byte, averaged over the ranks
    validation: list[tuple[int, float]] = field(default_factory=list)  # after how many steps, nats a byte
    seconds: float = 0.0  # spent in steps
    layers_drawn: int = 0  # on this rank, as the next two
    layers_dropped: int = 0
    held: dict[str, int] = field(default_factory=dict)  # bytes by owner, the most of each


# ---- to compare with ----


def baselines(text: Tensor, windows: Tensor) -> dict[str, float]:
    """Losses, in nats a byte, of models that need no network, fitted on ``text`` and judged by ``windows``.

    ``text`` is uint8 [bytes], ``windows`` int64 [count, context + 1]; their first column is context only, as it is for
    the network. Of the smoothings that one counts which suits these very windows best.
    """
    before, after = windows[:, :-1], windows[:, 1:]
    ones = torch.bincount(text, minlength=256)
    pairs = torch.bincount(text[:-1].int() * 256 + text[1:], minlength=256 * 256).view(256, 256)
    return {
        "uniform": math.log(256),
        "unigram": min(-log_shares(ones, smoothing)[after].mean().item() for smoothing in SMOOTHINGS),
        "bigram": min(-log_shares(pairs, smoothing)[before, after].mean().item() for smoothing in SMOOTHINGS),
    }


def log_shares(counts: Tensor, smoothing: float) -> Tensor:
    smoothed = counts.double() + smoothing
    return (smoothed / smoothed.sum(dim=-1, keepdim=True)).log()


class PlainAdamW(torch.optim.AdamW):
    """AdamW for DDP, with the methods of LowLevelZeroOptimizer that the training calls."""

    def __init__(self, groups: list[dict[str, Any]], clip: float, **settings: Any) -> None:
        super().__init__(groups, fused=True, **settings)
        self.clip, self.norm = clip or math.inf, torch.zeros(())

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def step(self, closure: Any = None) -> Any:
        self.norm = nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.clip)
        return super().step(closure)

    def get_grad_norm(self) -> float:
        return self.norm.item()

    def memory_held(self) -> dict[str, int]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [value for state in self.state.values() for value in state.values()]
        return {"parameters": size(parameters), "gradients": size(gradients), "states": size(states)}


def size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def ddp_would_hold(model: nn.Module) -> dict[str, int]:
    """Bytes a rank by owner, had DDP trained ``model`` with AdamW: all of it whole, fp32 masters of what is 16-bit.

    DDP's buckets are another set of gradients.
    """
    own, masters = size(model.parameters()), sum(4 * p.numel() for p in model.parameters() if p.itemsize < 4)
    return {"parameters": own, "gradients": own, "masters": masters, "states": 8 * numbers(model), "wires": own}


@torch.no_grad()
def sample(model: nn.Module, options: Options) -> str:
    """The prompt and what the model adds, byte by byte; what a terminal might act upon is escaped."""
    generator, text = torch.Generator().manual_seed(options.seed), list(PROMPT)
    for _ in range(SAMPLE_BYTES):
        logits = model(torch.tensor([text[-options.context :]], device=options.device))[0, -1].float().cpu()
        text.append(int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)))
    return "".join(chr(byte) if byte == 10 or 32 <= byte < 127 else f"\\x{byte:02x}" for byte in text)


# ---- to print ----


def progress_bar(steps: int, done: int, visible: bool) -> Any:
    """A bar of steps; a file or a log, which can't redraw a line, gets one in ten seconds."""
    pause = 0.2 if sys.stderr.isatty() else 10
    return tqdm(total=steps, initial=done, disable=not visible, unit="step", mininterval=pause, dynamic_ncols=True)


def speed(options: Options, steps: int, seconds: float) -> float:
    """Tokens a second, of all ranks."""
    return steps * options.batch * options.accumulation * options.context * dist.get_world_size() / seconds


def begin(options: Options, model: nn.Module, files: tuple[int, int], resumed: Path | None) -> None:
    """Print on the first rank what is about to be trained, on what and by whom, and where it begins.

    ``files`` counts those for training and those for validation.
    """
    if dist.get_rank():
        return
    whose = "on each rank others" if options.layer_drop_per_rank else "on all ranks the same"
    saved = f"every {options.save_every} steps, in {options.checkpoint_dir}, of which {options.keep} are kept"
    work = f"{options.batch * options.accumulation} sequences of {options.context} bytes a step"
    absent = f": no checkpoint in {options.checkpoint_dir} yet" if options.resume else ""
    print(f"""
A byte-level GPT with LayerDrop, trained with {name_of(options)}
  model       {numbers(model):,} parameters, {options.dtype}: {options.layers} layers of width {options.width}
  layer drop  {f"{options.layer_drop:.0%} of the layers in a pass, {whose}" if options.layer_drop else "none"}
  text        Python {platform.python_version()}'s standard library: {files[0]} files, {files[1]} more for validation
  ranks       {dist.get_world_size()} on {options.device}, each with {work}
  saved       {saved if options.saves else "never"}
  begins      {f"after {resumed}" if resumed else f"at the first step{absent}"}
""", flush=True)  # fmt: skip


def conclude(options: Options, model: nn.Module, history: History, text: Tensor, validation: Tensor) -> None:
    """On the first rank draw the loss curve, write all numbers to summary.json, and print what a person reads."""
    if dist.get_rank():
        return
    options.out.mkdir(parents=True, exist_ok=True)
    summary = {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "dtype": options.dtype,
        "device": options.device,
        "world_size": dist.get_world_size(),
        "parameters": numbers(model),
        "tokens_per_second": speed(options, len(history.train), history.seconds),
        **asdict(history),
        "baselines": baselines(text, validation),
        "ddp": ddp_would_hold(model),
        "prompt": PROMPT.decode(),
        "sample": sample(model, options),
        "picture": str(options.out / "loss.png"),
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(summary, name_of(options))
    print(f"""
{len(history.train):,} steps in {history.seconds:.0f} s, {summary["tokens_per_second"]:,.0f} tokens/s, \
{history.layers_dropped:,} of {history.layers_drawn:,} layer passes dropped

Validation loss, in nats a byte
{loss_table(summary["baselines"], history.validation)}

Memory held by each rank, right after a step
{memory_table(name_of(options), history.held, summary["ddp"])}

What it writes after {summary["prompt"]!r}
{indented(summary["sample"].splitlines(), "  | ")}

The loss curve is in {summary["picture"]}
""", flush=True)  # fmt: skip


def loss_table(levels: dict[str, float], validation: Sequence[tuple[int, float]]) -> str:
    """The network's loss at first and at last, below the models that need no network."""
    (_, first), (steps, last) = validation[0], validation[-1]
    below = f"({abs(levels['bigram'] - last):.2f} {'below' if last < levels['bigram'] else 'ABOVE'} the bigram)"
    rows = [(name, GUESSES[name], loss, "") for name, loss in levels.items()]
    rows += [("GPT", "before its first step", first, ""), ("GPT", f"after {steps:,} steps", last, below)]
    return indented(f"{name:9}{what:34}{loss:6.3f}  {comment}" for name, what, loss, comment in rows)


def memory_table(name: str, held: dict[str, int], ddp: dict[str, int]) -> str:
    """Bytes by owner: measured in this run, and what DDP would hold."""
    rows = [(OWNERS.get(owner, owner), held[owner], ddp.get(owner, 0)) for owner in held]
    rows.append(("together", sum(held.values()), sum(ddp.values())))
    lines = [f"{'':18}{f'{name}, measured':>18}{'DDP, computed':>16}{'share':>8}"]
    for owner, ours, theirs in rows:
        share = f"{ours / theirs:.0%}" if theirs else "-"
        lines.append(f"{owner:18}{ours / 2**20:>14.2f} MiB{theirs / 2**20:>12.2f} MiB{share:>8}")
    return indented(lines)


def name_of(options: Options) -> str:
    return f"ZeRO-{options.stage}" if options.stage else "DDP"


def numbers(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def indented(lines: Iterable[str], margin: str = "  ") -> str:
    return "\n".join(f"{margin}{line}".rstrip() for line in lines)


# ---- to draw ----


def draw(summary: dict[str, Any], name: str) -> None:
    """The losses over the steps, and the guesses as levels to fall below."""
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes: Any = figure.add_subplot()
    at_the_left = {"transform": axes.get_yaxis_transform(), "va": "bottom", "fontsize": 9, "color": GREY}
    for guess, loss in summary["baselines"].items():
        axes.axhline(loss, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        axes.text(0.01, loss, f"{guess} {loss:.2f}", **at_the_left)
    train, validation = summary["train"], summary["validation"]
    steps = range(1, len(train) + 1)
    axes.plot(steps, train, color=BLUE, linewidth=0.8, alpha=0.25)
    axes.plot(steps, smoothed(train), color=BLUE, linewidth=2, label="training, smoothed")
    axes.plot(*zip(*validation, strict=True), "o-", color=ORANGE, linewidth=1, markersize=5, label="validation")
    beside = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "color": ORANGE, "fontweight": "bold"}
    axes.annotate(f"{validation[-1][1]:.2f}", validation[-1], **beside)
    millions, ranks = summary["parameters"] / 1e6, summary["world_size"]
    title = f"Byte-level GPT, {millions:.1f} million parameters, {name} on {ranks} ranks"
    axes.set_title(title, loc="left", fontsize=11)
    axes.set(xlabel="optimizer steps", ylabel="loss, nats a byte", ylim=(0, None))
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(summary["picture"])


def smoothed(losses: Sequence[float]) -> list[float]:
    """An exponential moving average over about a 25th of the steps, corrected for its start as Adam's moments are."""
    memory, average, result = 1 - min(1.0, 25 / len(losses)), 0.0, []
    for count, loss in enumerate(losses, start=1):
        average = memory * average + (1 - memory) * loss
        result.append(average / (1 - memory**count))
    return result
