"""The summary: what came out of a run, as the report tells it and as summary.json keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn


@dataclass(frozen=True)
class Summary:
    """One finished run. Losses are in nats a byte, sizes in bytes on rank 0."""

    options: dict[str, int | float | str]
    dtype: str
    device: str
    world_size: int
    parameters: int
    seconds: float  # of training alone
    tokens_per_second: float  # of all ranks
    layers_drawn: int  # on rank 0, as the next
    layers_dropped: int
    train: list[float]
    validation: list[tuple[int, float]]  # after how many steps, and the loss
    baselines: dict[str, float]
    held: dict[str, int]  # measured, by owner
    ddp: dict[str, int]  # what plain DDP would hold, likewise
    prompt: str
    sample: str  # prompt included
    picture: str

    @property
    def name(self) -> str:
        """What trained the model."""
        return wrapper_name(int(self.options["stage"]))

    def write(self, path: Path) -> None:
        """As JSON, beside the picture."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def wrapper_name(stage: int) -> str:
    """Stage 0 is the word for no ZeRO at all."""
    return f"ZeRO-{stage}" if stage else "DDP"


def ddp_would_hold(model: nn.Module) -> dict[str, int]:
    """Bytes a rank by owner, had plain DDP trained ``model`` with AdamW.

    All of it is whole: parameters, gradients, two moments in fp32, and fp32 masters of what is 16-bit. DDP's
    buckets, another set of gradients, are not even counted.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    own = sum(p.nbytes for p in parameters)
    return {
        "parameters": own,
        "gradients": own,
        "masters": sum(4 * p.numel() for p in parameters if p.itemsize < 4),
        "states": sum(8 * p.numel() for p in parameters),
    }
