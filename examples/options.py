"""Train a byte-level GPT with LayerDrop on Python's standard library, sharded by ZeRO."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Options: TypeAlias = argparse.Namespace

# Numeric options: the default, the least value, and the meaning.
NUMBERS: dict[str, tuple[float, float, str]] = {
    "layers": (4, 1, "transformer layers"),
    "width": (192, 1, "channels"),
    "heads": (6, 1, "attention heads"),
    "context": (128, 1, "bytes of context"),
    "layer-drop": (0.1, 0, "probability that a forward skips a layer"),
    "steps": (300, 1, "optimizer steps"),
    "batch": (8, 1, "sequences of a micro-batch on each rank"),
    "accumulation": (1, 1, "micro-batches a step"),
    "lr": (2e-3, 1e-9, "peak learning rate"),
    "clip": (1.0, 0, "clip gradients to this norm; 0: don't clip"),
    "seed": (0, 0, "seed of weights, batches and dropped layers"),
    "save-every": (50, 0, "steps between checkpoints; one more is saved at the end; 0: never save"),
    "keep": (2, 1, "number of newest checkpoints to keep"),
}


def parse(arguments: Sequence[str] | None) -> Options:
    """Parse and check the command line, and exit with a message if an option is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, (default, _, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2, help="ZeRO stage")
    usual = "bf16" if torch.cuda.is_available() else "fp32"
    parser.add_argument("--dtype", choices=DTYPES, default=usual, help="dtype of the model")
    parser.add_argument("--layer-drop-per-rank", action="store_true", help="each rank skips layers of its own")
    parser.add_argument("--out", type=Path, default="demo_output", help="folder for picture, numbers and checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint, if there is one")
    options = parser.parse_args(arguments)
    for name, (_, least, _) in NUMBERS.items():
        value = getattr(options, name.replace("-", "_"))
        if not least <= value < math.inf:
            parser.error(f"--{name}: expected a number of at least {least}, got {value}")
    if not options.layer_drop < 1:
        parser.error(f"--layer-drop: expected a rate below 1, got {options.layer_drop}")
    if options.width % options.heads:
        parser.error(f"--width {options.width} must be a multiple of --heads {options.heads}")
    return options


def run_of(options: Options) -> dict[str, Any]:
    """Return the options that a resumed run must keep; it may change the stage and the number of ranks."""
    free = ("stage", "out", "save_every", "keep", "resume")
    return {name: value for name, value in vars(options).items() if name not in free}


def join() -> torch.device:
    """Initialise the process group, without torchrun one of a single rank, and return this rank's device."""
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("LOCAL_WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    cuda = torch.cuda.device_count() >= ranks
    store = dist.HashStore()  # type: ignore[attr-defined]  # it is there, if not in __all__
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": store, "rank": 0, "world_size": 1}
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", **alone)
    return torch.device("cuda", rank) if cuda else torch.device("cpu")
