"""The report: what a person reads in the terminal, before the run and after it."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path

from .options import Options
from .ranks import Ranks
from .summary import Summary, wrapper_name
from .text import Split

OWNERS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "masters": "fp32 masters",
    "states": "optimizer state",
}
EXPLAINED = {
    "uniform": "all bytes alike",
    "unigram": "how common each byte is",
    "bigram": "how common after the byte before",
}


def heading(
    options: Options, dtype: str, ranks: Ranks, parameters: int, files: Split, resumed: Path | None = None
) -> str:
    """What is about to be trained, on what and by whom, and where it begins."""
    facts = (
        f"model       {parameters:,} parameters, {dtype}: {options.layers} layers of width {options.width}",
        f"layer drop  {_layer_drop(options)}",
        f"text        the standard library of Python {platform.python_version()}, {_amount(files.training)},",
        f"            and {_amount(files.validation)} held out for validation",
        f"ranks       {_ranks(options, ranks)}",
        f"saved       {_saved(options)}",
        *([f"begins      {_begins(options, resumed)}"] if options.resume else ()),
    )
    title = f"A byte-level GPT with LayerDrop, trained with {wrapper_name(options.stage)}"
    return f"\n{title}\n{indented(facts)}\n"


def conclusion(summary: Summary) -> str:
    """What came out."""
    parts = (
        _effort(summary),
        f"Validation loss, in nats a byte\n{loss_table(summary.baselines, summary.validation)}",
        f"Memory held by each rank, right before a step\n{memory_table(summary.name, summary.held, summary.ddp)}",
        f"What it writes after {summary.prompt!r}\n{indented(summary.sample.splitlines(), margin='  | ')}",
        f"The loss curve is in {summary.picture}",
    )
    return "\n" + "\n\n".join(parts) + "\n"


def loss_table(baselines: dict[str, float], validation: list[tuple[int, float]]) -> str:
    """The network's loss at first and at last, below the models that need no network."""
    (_, first), (steps, last) = validation[0], validation[-1]
    lines = [f"{name:9}{EXPLAINED[name]:33}{loss:6.3f}" for name, loss in baselines.items()]
    lines.append(f"{'GPT':9}{'before its first step':33}{first:6.3f}")
    lines.append(f"{'GPT':9}{f'after {steps:,} steps':33}{last:6.3f}  {verdict(last, baselines['bigram'])}")
    return indented(lines)


def verdict(loss: float, bigram: float) -> str:
    """How the network compares with the best of the simple models."""
    return f"({abs(bigram - loss):.2f} {'below' if loss < bigram else 'ABOVE'} the bigram)"


def memory_table(name: str, held: dict[str, int], ddp: dict[str, int]) -> str:
    """Bytes by owner: measured in this run, which ``name`` stands for, and what DDP would hold."""
    rows = [(title, held[owner], ddp[owner]) for owner, title in OWNERS.items()]
    rows.append(("together", sum(held.values()), sum(ddp.values())))
    lines = [f"{'':18}{f'{name}, measured':>18}{'DDP, computed':>16}{'share':>8}"]
    lines += [f"{owner:18}{size(a):>18}{size(b):>16}{share(a, b):>8}" for owner, a, b in rows]
    return indented(lines)


def size(number: int) -> str:
    """Bytes as people read them: 1.50 KiB."""
    amount, unit = float(number), ""
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.2f} {unit}" if unit else f"{number} B"


def share(ours: int, theirs: int) -> str:
    """Ours as percent of theirs; a dash where there is nothing to compare."""
    return f"{100 * ours / theirs:.0f}%" if theirs else "-"


def printable(text: bytes) -> str:
    """Line breaks as they are; everything else that a terminal might act upon as its escape."""
    return "".join(chr(byte) if byte == 10 or 32 <= byte < 127 else f"\\x{byte:02x}" for byte in text)


def indented(lines: Iterable[str], margin: str = "  ") -> str:
    """The lines, each after ``margin``."""
    return "\n".join(f"{margin}{line}".rstrip() for line in lines)


def _effort(summary: Summary) -> str:
    speed = f"{summary.tokens_per_second:,.0f} tokens/s"
    dropped = f"{summary.layers_dropped:,} of {summary.layers_drawn:,} layer passes dropped"
    return f"{len(summary.train):,} steps in {summary.seconds:.0f} s, {speed}, {dropped}"


def _layer_drop(options: Options) -> str:
    whose = "on each rank others" if options.layer_drop_per_rank else "on all ranks the same"
    return f"{options.layer_drop:.0%} of the layers in a pass, {whose}" if options.layer_drop else "none"


def _amount(files: list[Path]) -> str:
    return f"{sum(file.stat().st_size for file in files) / 1e6:.1f} MB in {len(files)} files"


def _ranks(options: Options, ranks: Ranks) -> str:
    sequences = options.batch * options.accumulation
    work = f"{sequences} sequences of {options.context} bytes a step"
    return f"{ranks.world_size} on {ranks.device.type}, each with {work}"


def _saved(options: Options) -> str:
    if not (options.save_every and options.stage):
        return "never"
    return f"every {options.save_every} steps, in {options.checkpoint_dir}, of which {options.keep} are kept"


def _begins(options: Options, resumed: Path | None) -> str:
    return f"where {resumed} ends" if resumed else f"at the beginning: no checkpoint in {options.checkpoint_dir} yet"
