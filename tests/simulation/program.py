"""A program: models, options and each rank's public calls, as plain data that can be printed, replayed and shrunk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.simulation.outcome import Carrier, Fault

NOTHING = -1  # in place of dropped layers: the loss touches no parameter
ALL = 0
NUDGE, FP16_NUDGE = 2.0**-23, 2.0**-10  # roundings of fp32 and of fp16


@dataclass(frozen=True)
class Weight:
    """One parameter of a model.

    Attributes:
        role: "trained", "frozen", or "late": frozen at first, and trained after ``add_param_group``.
        group: its param group.
        expert: shared by half of the ranks only (of four).
    """

    shape: tuple[int, ...] = (3,)
    dtype: str = "float32"
    role: str = "trained"
    group: int = 0
    transposed: bool = False
    expert: bool = False


@dataclass(frozen=True)
class Part:
    """One model and its optimizer.

    Attributes:
        weights: the model's parameters.
        layers: the weights that each layer uses; two layers may share one.
        optimizer: a name in ``net.OPTIMIZERS``.
        groups: the number of param groups.
        options: keywords of ``LowLevelZeroOptimizer``, sorted by name.
        levels: "none", or two levels of two ranks each: "both" share a parameter, or the "inner" ones do.
        recomputed: layers are run again in the backward, by backwards nested in it.
        nudge: by how large a part of themselves initial weights are larger than they would be.
    """

    weights: tuple[Weight, ...] = (Weight(),)
    layers: tuple[tuple[int, ...], ...] = ((0,),)
    optimizer: str = "sgd"
    groups: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    levels: str = "none"
    recomputed: bool = False
    nudge: float = 0.0

    @property
    def keywords(self) -> dict[str, Any]:
        return dict(self.options)

    def in_fp32(self) -> Part:
        """The same part, of which nothing is rounded to bf16."""
        weights = tuple(
            replace(weight, dtype="float32") if weight.dtype == "bfloat16" else weight for weight in self.weights
        )
        return replace(
            self, weights=weights, options=tuple(each for each in self.options if each[0] != "communication_dtype")
        )

    @property
    def by_parameters(self) -> bool:
        """Whether one rank owns each weight whole, but for stacks that are cut."""
        return "split" in self.keywords or self.optimizer == "normalized"

    def is_cut(self, at: int, ranks: int) -> bool:
        """Whether each of the ranks that share a weight has as many of its matrices."""
        weight = self.weights[at]
        by_matrices = self.keywords.get("split", "matrices") == "matrices" and self.by_parameters
        return by_matrices and len(weight.shape) == 3 and not weight.transposed and weight.shape[0] % ranks == 0

    @property
    def half(self) -> bool:
        """Whether losses are scaled."""
        return any(weight.dtype == "float16" and weight.role != "frozen" for weight in self.weights)

    @property
    def trained(self) -> list[int]:
        """Numbers of the weights that are trained from the start."""
        return [at for at, weight in enumerate(self.weights) if weight.role == "trained"]

    @property
    def late(self) -> list[int]:
        """Numbers of the weights that join later."""
        return [at for at, weight in enumerate(self.weights) if weight.role == "late"]


@dataclass(frozen=True)
class Call:
    """One call of one rank.

    Attributes:
        name: a name in ``calls.CALLS``.
        of: the number of the part.
        drops: layers that a backward's loss leaves out, as bits; or ``NOTHING``.
        at: the number of a weight.
        amount: a norm, a factor, a number to add.
    """

    name: str
    of: int = 0
    drops: int = ALL
    at: int = 0
    amount: float = 0.5

    def __str__(self) -> str:
        told = [self.name, f"of {self.of}"] if self.of else [self.name]
        if self.drops == NOTHING:
            told.append("of nothing")
        elif self.drops:
            told.append("without " + ",".join(str(at) for at in range(16) if self.drops >> at & 1))
        if self.at:
            told.append(f"w{self.at}")
        return " ".join(told + ([f"{self.amount:g}"] if self.amount != 0.5 else []))


Row = tuple["Call | None", ...]
"""What each rank calls at one place of the program; None: nothing."""


@dataclass(frozen=True)
class Program:
    """What all ranks do: row after row, each rank its own column.

    Attributes:
        schedule: the seed of the scheduler.
        rows: calls by place and rank.
        fault: what goes wrong beside, as ``outcome.Fault`` has it; None: nothing.
        kind: what the program was drawn to be, for statistics.
        aside: in the end, all ranks train another model over a process group of its own, and destroy that.
        anew: before that, all ranks train each model by a new optimizer; seeds draw none that do.
    """

    ranks: int = 2
    carrier: Carrier = "messages"
    parts: tuple[Part, ...] = (Part(),)
    rows: tuple[Row, ...] = ()
    schedule: int = 0
    fault: Fault | None = None
    kind: str = "alike"
    aside: bool = False
    anew: bool = False

    def of_rank(self, rank: int) -> list[Call | None]:
        """One rank's calls."""
        return [row[rank] for row in self.rows]

    @property
    def raises(self) -> bool:
        """Whether an operation of the package is to raise."""
        return self.fault is not None and self.fault.kind == "raise"

    def in_fp32(self) -> Program | None:
        """The same program with nothing rounded to bf16; None: fp16's loss scale belongs to it."""
        parts = tuple(part.in_fp32() for part in self.parts)
        is_fp16 = any(weight.dtype == "float16" for part in parts for weight in part.weights)
        return None if is_fp16 else replace(self, parts=parts)

    @property
    def offset(self) -> int:
        """How many ranks of the default group come before those that train, and do nothing."""
        several = any(part.levels != "none" or any(weight.expert for weight in part.weights) for part in self.parts)
        return int(self.schedule % 13 == 12 and not several and not self.aside)

    def nudged(self) -> Program:
        """The same program, whose weights begin a rounding away."""
        nudge = FP16_NUDGE if self.in_fp32() is None else NUDGE
        return replace(self, parts=tuple(replace(part, nudge=nudge) for part in self.parts))

    def __str__(self) -> str:
        return "\n".join([*self._settings(), *self._table()])

    def _settings(self) -> list[str]:
        lines = [f"{self.ranks} ranks by {self.carrier}, schedule {self.schedule}, {self.kind}"]
        lines += ["in the end, each model by a new optimizer"] * self.anew
        lines += ["in the end, another model over a process group of its own"] * self.aside
        for number, part in enumerate(self.parts):
            lines.append(f"model {number}: {part.optimizer}, layers {list(map(list, part.layers))}")
            lines += [f"  w{at}: {_described(weight)}" for at, weight in enumerate(part.weights)]
            if part.levels != "none":
                lines.append(f"  two levels of ranks, {part.levels}")
            lines += ["  layers are run again in the backward"] * part.recomputed
            lines += [f"  {name}={value}" for name, value in part.options]
        return lines

    def _table(self) -> list[str]:
        fault = [] if self.fault is None else [_told(self.fault)]
        columns = [[f"rank {rank}", *map(str_of, self.of_rank(rank))] for rank in range(self.ranks)]
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in zip(*columns, strict=False)
        ]
        return [f"{'' if at == 0 else at - 1:>3}  {line.rstrip()}" for at, line in enumerate(lines)] + fault


def _told(fault: Fault) -> str:
    return {
        "raise": f"operation {fault.at} of rank {fault.rank} raises",
        "die": f"rank {fault.rank} dies at its hand-over {fault.at}",
        "wait": f"message {fault.at} of rank {fault.rank} waits until nobody can go on without it",
    }[fault.kind]


def str_of(call: Call | None) -> str:
    return "-" if call is None else str(call)


def _described(weight: Weight) -> str:
    told = [str(weight.shape), weight.dtype, weight.role, f"group {weight.group}"]
    return ", ".join(told + ["transposed"] * weight.transposed + ["expert"] * weight.expert)
