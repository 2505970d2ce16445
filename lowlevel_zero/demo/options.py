"""The options: what they are, what they may be, and what "auto" means here."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

Number = TypeVar("Number", int, float)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Options:
    """One run of the demo, as asked for on the command line."""

    stage: int
    dtype: str
    layer_drop: float
    layer_drop_per_rank: bool
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    accumulation: int
    steps: int
    lr: float
    clip: float
    seed: int
    out: Path
    device: str
    save_every: int
    checkpoint_dir: Path
    keep: int
    resume: bool

    def drop_seed(self, rank: int) -> int:
        """The same on all ranks, so that they drop the same layers, unless each shall draw for itself."""
        return self.seed + (1 + rank if self.layer_drop_per_rank else 0)

    def plain(self) -> dict[str, int | float | str]:
        """By name, in values that JSON has."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; exits with a message, as argparse does, before anything has been started."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    given.setdefault("checkpoint_dir", given["out"] / "checkpoints")
    options = Options(**given)
    mistake = _mistake(options)
    if mistake:
        parser.error(mistake)
    return options


def choose_dtype(name: str, device: torch.device, stage: int) -> str:
    """Turn "auto" into bf16 where the hardware multiplies it natively, else into fp32.

    A CPU without bf16 instructions is about three times slower in bf16 than in fp32. Plain DDP gets fp32: it
    has no fp32 masters here.
    """
    if name != "auto":
        return name
    return "bf16" if stage and _multiplies_bf16(device) else "fp32"


def cpu_multiplies_bf16(cpuinfo: str) -> bool:
    """Whether the text of /proc/cpuinfo names instructions that multiply bf16 (AVX-512 or AMX; ARM's own)."""
    for line in cpuinfo.splitlines():
        kind, _, flags = line.partition(":")
        if kind.strip() in ("flags", "Features"):
            return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())
    return False


def _multiplies_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and cpu_multiplies_bf16(cpuinfo.read_text())


def _mistake(options: Options) -> str | None:
    """What is wrong with options that are each right."""
    if options.width % (2 * options.heads):
        return (
            f"--width {options.width} must be a multiple of twice --heads {options.heads}: "
            "each head turns its channels in pairs"
        )
    if options.out.exists() and not options.out.is_dir():
        return f"--out {options.out} must be a folder, or nothing yet"
    if options.stage == 0 and options.dtype in ("bf16", "fp16"):
        return f"--dtype {options.dtype} needs --stage 1 or 2: plain DDP has no fp32 masters here; use fp32"
    if options.checkpoint_dir.exists() and not options.checkpoint_dir.is_dir():
        return f"--checkpoint-dir {options.checkpoint_dir} must be a folder, or nothing yet"
    if options.stage == 0 and options.resume:
        return "--resume needs --stage 1 or 2: plain DDP saves no checkpoints here"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lowlevel_zero.demo",
        description="Train a byte-level GPT with LayerDrop on Python's standard library, sharded by ZeRO.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_zero(parser.add_argument_group("ZeRO"))
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    return parser


def _reader(kind: Callable[[str], Number], allowed: Callable[[Number], bool], expected: str) -> Callable[[str], Number]:
    """What argparse calls with an option's text; it says what it expected, not just that this is invalid."""

    def read(text: str) -> Number:
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not allowed(number):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return number

    return read


_count = _reader(int, lambda number: number >= 1, "a whole number of at least 1")
_amount = _reader(int, lambda number: number >= 0, "a whole number of at least 0")
_seed = _reader(int, lambda number: 0 <= number < 2**32, "a whole number from 0 to 2**32 - 1")
_rate = _reader(float, lambda number: 0 <= number < 1, "a rate of at least 0 and below 1")
_positive = _reader(float, lambda number: 0 < number < math.inf, "a number above 0")
_not_negative = _reader(float, lambda number: 0 <= number < math.inf, "a number of at least 0")


def _add_zero(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--stage", type=int, choices=(0, 1, 2), default=2, help="0: plain DDP, to compare")
    group.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: bf16 where native, else fp32")
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if each rank has one"
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--layers", type=_count, metavar="N", default=4, help="transformer layers")
    group.add_argument("--width", type=_count, metavar="N", default=192, help="channels")
    group.add_argument("--heads", type=_count, metavar="N", default=6, help="attention heads")
    group.add_argument("--context", type=_count, metavar="N", default=128, help="bytes the model sees")
    group.add_argument(
        "--layer-drop",
        type=_rate,
        default=0.1,
        metavar="RATE",
        help="chance of a layer to be left out of a pass",
    )
    group.add_argument("--layer-drop-per-rank", action="store_true", help="each rank leaves out other layers")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=_count, metavar="N", default=300, help="optimizer steps")
    group.add_argument("--batch", type=_count, metavar="N", default=8, help="sequences a rank and micro-batch")
    group.add_argument("--accumulation", type=_count, metavar="N", default=1, help="micro-batches a step")
    group.add_argument("--lr", type=_positive, metavar="X", default=2e-3, help="highest learning rate")
    group.add_argument("--clip", type=_not_negative, metavar="X", default=1.0, help="largest gradient norm; 0: any")
    group.add_argument("--seed", type=_seed, metavar="N", default=0, help="of weights, batches and dropped layers")
    group.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("demo_output"), help="folder for picture and numbers"
    )


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--save-every",
        type=_amount,
        metavar="N",
        default=50,
        help="save after so many steps, and at the end, in stage 1 and 2; 0: never",
    )
    group.add_argument(
        "--checkpoint-dir",
        type=Path,
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="folder for checkpoints (default: checkpoints in the folder of --out)",
    )
    group.add_argument("--keep", type=_count, metavar="N", default=2, help="checkpoints to keep, the newest ones")
    group.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
