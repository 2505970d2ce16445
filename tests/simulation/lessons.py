"""Small trainings for the fault sweep: what each constructs, and the public calls that it makes with each batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.simulation.outcome import Carrier

BATCHES = 12  # more than any training comes to
TRAIN = ("model(...)", "backward", "clip_grad_norm_", "step", "zero_grad")


class WithModes(torch.optim.SGD):
    """SGD whose parameters are doubled while they are evaluated."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.5)
        for group in self.param_groups:
            group["evaluates"] = False

    def train(self) -> None:
        """Have the parameters be those that are trained."""
        self._switch(to=False, factor=0.5)

    def eval(self) -> None:
        """Have the parameters be those that are evaluated."""
        self._switch(to=True, factor=2.0)

    @torch.no_grad()
    def _switch(self, to: bool, factor: float) -> None:
        for group in self.param_groups:
            if group["evaluates"] != to:
                group["evaluates"] = to
                for p in group["params"]:
                    p.mul_(factor)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05, eps=0.1),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.05, eps=0.1, fused=True),
    "with modes": lambda params: WithModes(params, lr=0.1),
}


@dataclass(frozen=True)
class Lesson:
    """One training.

    Attributes:
        calls: what is called with each batch.
        optimizer: a name in ``OPTIMIZERS``.
        options: keywords of ``LowLevelZeroOptimizer``.
        carrier: what carries buffers.
        first: what is called once, before the first checkpoint is saved.
        half: parameters are fp16.
        drops: with every other batch a rank leaves a layer out.
        overflows: with the second batch the gradients of the last rank do.
        ranks: how many there are.
        experts: the last layer is one, of which the even and the odd ranks have one each.
        levels: the ranks are in rows, which each hold all slices.
    """

    calls: Sequence[str] = TRAIN
    optimizer: str = "sgd"
    options: dict[str, Any] = field(default_factory=dict)
    carrier: Carrier = "messages"
    first: Sequence[str] = ()
    half: bool = False
    drops: bool = False
    overflows: bool = False
    ranks: int = 2
    experts: bool = False
    levels: bool = False


STAGE_2 = {"partition_grad": True, "reduce_bucket_size": 12}

LESSONS: dict[str, Lesson] = {
    "stage 1": Lesson(),
    "stage 2": Lesson(options=STAGE_2, carrier="memory", optimizer="adam"),
    "stage 2 on a device": Lesson(options=STAGE_2, carrier="nccl"),
    "overlapped gathers": Lesson(options={"overlap_allgather": True, **STAGE_2}, carrier="memory"),
    "on the host": Lesson(options={"cpu_offload": True, **STAGE_2}, optimizer="adam"),
    "whole parameters": Lesson(
        ("model(...)", "backward", "step", "zero_grad", "state_dict", "load_state_dict", "save_checkpoint"),
        optimizer="adam",
        options={"split": "parameters", **STAGE_2},
        carrier="memory",
    ),
    "fp16": Lesson(half=True, optimizer="fused adam", options={"initial_scale": 2.0**8}),
    "fp16 that overflows": Lesson(half=True, overflows=True, carrier="nccl", options={"initial_scale": 2.0**8}),
    "layers dropped": Lesson(drops=True, options={"reduce_bucket_size": 12}),
    "plain backwards": Lesson(
        ("model(...)", "no_sync", "model(...)", "loss.backward()", "p.grad", "step", "zero_grad"), options=STAGE_2
    ),
    "edited slices": Lesson(
        ("model(...)", "backward", "synchronize", "step after synchronize", "zero_grad"), carrier="memory"
    ),
    "looks": Lesson(
        ("model(...)", "backward", "get_param_grad", "verify", "step", "get_grad_norm", "zero_grad"), options=STAGE_2
    ),
    "asleep": Lesson(
        ("model(...)", "backward", "offload_states", "step", "offload_states", "reload_states", "zero_grad"),
        optimizer="adam",
        options=STAGE_2,
        carrier="nccl",
    ),
    "whole states": Lesson(
        ("model(...)", "backward", "state_dict", "step", "zero_grad", "load_state_dict"), carrier="memory"
    ),
    "checkpoints": Lesson(("model(...)", "backward", "step", "zero_grad", "save_checkpoint", "load_checkpoint")),
    "clipped by functions": Lesson(
        (*TRAIN[:2], "lowlevel_zero.clip_grad_value_", "lowlevel_zero.clip_grad_norm_", "step", "zero_grad"),
        options=STAGE_2,
    ),
    "sharded states": Lesson(
        ("model(...)", "backward", "Sharded.state_dict", "step", "zero_grad", "Sharded.load_state_dict"),
        optimizer="adam",
        options=STAGE_2,
    ),
    "accessors": Lesson(
        (
            *("model(...)", "backward", "deepspeed.safe_get_full_*", "deepspeed.safe_set_full_grad"),
            *("deepspeed.safe_set_full_fp32_param", "step", "zero_grad"),
        ),
        options=STAGE_2,
    ),
    "newest": Lesson((*TRAIN[:2], "step", "zero_grad", "save_checkpoint", "latest(group=...)")),
    "modes": Lesson(
        ("train", "model(...)", "backward", "step", "zero_grad", "eval"),
        optimizer="with modes",
        options={"split": "elements"},
        carrier="memory",
    ),
    "one more group": Lesson(first=("add_param_group",), options={"overlap_allgather": True}),
    "experts": Lesson(options=STAGE_2, ranks=4, experts=True),
    "two levels": Lesson(ranks=4, levels=True, carrier="memory"),
    "whole parameters in two levels": Lesson(
        options={"split": "parameters", "overlap_allgather": True, **STAGE_2}, carrier="nccl", ranks=4, levels=True
    ),
    # A rank that fails before one of these calls leaves the others waiting in it.
    "others wait in modes": Lesson(
        ("train", "model(...)", "backward", "eval", "train", "step", "eval", "zero_grad"),
        optimizer="with modes",
        options={"split": "elements"},
    ),
    "others wait in looks": Lesson(
        ("model(...)", "backward", "clip_grad_norm_", "get_param_grad", "step", "get_param_grad", "zero_grad"),
        options=STAGE_2,
        carrier="memory",
    ),
    "others wait in states": Lesson(
        ("model(...)", "state_dict", "backward", "load_state_dict", "step", "state_dict", "zero_grad"),
        optimizer="adam",
        options=STAGE_2,
    ),
    "others wait in loads": Lesson(
        (*TRAIN[:2], "load_checkpoint", *TRAIN[:2], "step", "save_checkpoint", "zero_grad", "load_checkpoint"),
        carrier="memory",
    ),
}


class Model(nn.Module):
    """Layers of which no two have the same size; the last one is frozen at first where a group is to be added."""

    def __init__(self, lesson: Lesson, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.half = lesson.half
        self.a, self.b, self.c = (_layer(3, size, generator, lesson.half) for size in (4, 2, 3))
        self.register_buffer("shift", torch.randn(3, generator=generator))
        if "add_param_group" in lesson.first:
            self.c.requires_grad_(False)

    def loss(self, lesson: Lesson, batch: int, rank: int) -> Tensor:
        """Return the loss of one rank's batch."""
        x = X[batch, rank].half() if self.half else X[batch, rank]
        dropped = lesson.drops and batch % 2 == 1
        used = [layer for at, layer in enumerate((self.a, self.b, self.c)) if not (dropped and at == rank)]
        loss = torch.stack([layer(x).float().tanh().square().mean() for layer in used]).sum()
        return loss * float("inf") if lesson.overflows and batch == 1 and rank == lesson.ranks - 1 else loss


def _layer(inputs: int, outputs: int, generator: torch.Generator, half: bool) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return layer.half() if half else layer


X = torch.randn(BATCHES, 4, 2, 3, generator=torch.Generator().manual_seed(1))
