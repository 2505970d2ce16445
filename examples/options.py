"""What train_gpt.py may be asked for, and the ranks, device and dtype that this machine gives it."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RANKS_HERE = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as torchrun says


def number(kind: Callable[[str], Any], expected: str, allowed: Callable[[Any], bool]) -> Callable[[str], Any]:
    """What argparse calls with an option's text; it says what it expected."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return read


COUNT = number(int, "a whole number of at least 1", lambda value: value >= 1)
AMOUNT = number(int, "a whole number of at least 0", lambda value: value >= 0)
SEED = number(int, "a whole number from 0 to 2**32 - 1", lambda value: 0 <= value < 2**32)
RATE = number(float, "a rate of at least 0 and below 1", lambda value: 0 <= value < 1)
POSITIVE = number(float, "a number above 0", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = number(float, "a number of at least 0", lambda value: 0 <= value < math.inf)


def option(default: Any, text: str, **settings: Any) -> Any:
    """A field of ``Options``, with what argparse is told of it."""
    return field(default=default, metadata={"default": default, "help": text, **settings})


@dataclass(frozen=True)
class Options:
    """One run, as asked for on the command line."""

    stage: int = option(2, "of ZeRO; 0: plain DDP, to compare", type=int, choices=(0, 1, 2))
    dtype: str = option("auto", "auto: bf16 where native, else fp32", choices=("auto", *DTYPES))
    device: str = option("auto", "auto: GPUs if each rank has one", choices=("auto", "cpu", "cuda"))
    layers: int = option(4, "transformer layers", type=COUNT, metavar="N")
    width: int = option(192, "channels", type=COUNT, metavar="N")
    heads: int = option(6, "attention heads", type=COUNT, metavar="N")
    context: int = option(128, "bytes the model sees", type=COUNT, metavar="N")
    layer_drop: float = option(0.1, "chance of a layer to be left out of a pass", type=RATE, metavar="RATE")
    layer_drop_per_rank: bool = option(False, "each rank leaves out other layers", action="store_true")
    steps: int = option(300, "optimizer steps", type=COUNT, metavar="N")
    batch: int = option(8, "sequences a rank and micro-batch", type=COUNT, metavar="N")
    accumulation: int = option(1, "micro-batches a step", type=COUNT, metavar="N")
    lr: float = option(2e-3, "highest learning rate", type=POSITIVE, metavar="X")
    clip: float = option(1.0, "largest gradient norm; 0: any", type=NOT_NEGATIVE, metavar="X")
    seed: int = option(0, "of weights, batches and dropped layers", type=SEED, metavar="N")
    out: Path = option("demo_output", "folder for picture and numbers", type=Path, metavar="DIR")  # noqa: RUF009
    save_every: int = option(50, "save after so many steps, and at the end; 0: never", type=AMOUNT, metavar="N")
    checkpoint_dir: Path = option(None, "folder for checkpoints; None: in --out", type=Path, metavar="DIR")  # noqa: RUF009
    keep: int = option(2, "checkpoints to keep, the newest ones", type=COUNT, metavar="N")
    resume: bool = option(False, "go on from the newest checkpoint, if there is one", action="store_true")

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints: DDP writes none here."""
        return bool(self.stage and self.save_every)

    def run(self) -> dict[str, Any]:
        """What makes a run what it is. The stage, the device and the number of ranks may change when it is resumed."""
        free = ("stage", "device", "out", "save_every", "checkpoint_dir", "keep", "resume")
        return {name: value for name, value in asdict(self).items() if name not in free}

    def check_same_run(self, path: Path, extra: Any) -> None:
        """Raise ``ValueError`` unless the checkpoint ``path``, with this ``extra``, is of a run with these options."""
        saved = extra.get("run") if isinstance(extra, Mapping) else None
        if not isinstance(saved, Mapping):
            raise ValueError(f"--resume: {path} is not one of this program's checkpoints")
        for name, own in self.run().items():
            if saved.get(name) != own:
                raise ValueError(
                    f"--resume: {path} is of a run with --{name.replace('_', '-')} {saved.get(name)}, this one has "
                    f"{own}: give the same options, or another --checkpoint-dir"
                )


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line, and settle what is "auto"; exits with a message before anything has been started."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT with LayerDrop on Python's standard library, sharded by ZeRO.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for each in fields(Options):
        parser.add_argument(f"--{each.name.replace('_', '-')}", **each.metadata)
    options = Options(**vars(parser.parse_args(arguments)))
    options = replace(options, checkpoint_dir=options.checkpoint_dir or options.out / "checkpoints")
    mistake = mistake_in(options)
    if mistake:
        parser.error(mistake)
    device = device_of(options.device)
    bf16 = options.stage > 0 and multiplies_bf16(device)
    return replace(options, device=str(device), dtype=options.dtype.replace("auto", "bf16" if bf16 else "fp32"))


def mistake_in(options: Options) -> str | None:
    """What is wrong with options that are each right."""
    if options.width % (2 * options.heads):
        turned = "each head turns its channels in pairs"
        return f"--width {options.width} must be a multiple of twice --heads {options.heads}: {turned}"
    if options.stage == 0 and options.dtype in ("bf16", "fp16"):
        return f"--dtype {options.dtype} needs --stage 1 or 2: plain DDP has no fp32 masters here; use fp32"
    if options.stage == 0 and options.resume:
        return "--resume needs --stage 1 or 2: plain DDP saves no checkpoints here"
    for name, folder in (("--out", options.out), ("--checkpoint-dir", options.checkpoint_dir)):
        if folder.exists() and not folder.is_dir():
            return f"{name} {folder} must be a folder, or nothing yet"
    if options.device == "cuda" and torch.cuda.device_count() < RANKS_HERE:
        return f"--device cuda needs a GPU for each of {RANKS_HERE} ranks, found {torch.cuda.device_count()}: use cpu"
    return None


def device_of(name: str) -> torch.device:
    """This rank's GPU, where each rank of this machine has one, else the CPU."""
    if name == "cpu" or torch.cuda.device_count() < RANKS_HERE:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def join(options: Options) -> None:
    """Join torchrun's process group, or be one of a single process."""
    cuda = options.device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(options.device)
    store = dist.HashStore()  # type: ignore[attr-defined]  # it is there, if not in __all__
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": store, "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if cuda else "gloo", **alone)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether it does so natively: a CPU without such instructions is three times slower in bf16 than in fp32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    cpuinfo = Path("/proc/cpuinfo")
    flags = r"^(flags|Features)\s*:.*\b(avx512_bf16|amx_bf16|bf16)\b"
    return cpuinfo.exists() and re.search(flags, cpuinfo.read_text(), re.MULTILINE) is not None
