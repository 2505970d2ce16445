"""Models and sequences of calls, played by one process in plain torch, and by several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import load_checkpoint, save_checkpoint
from lowlevel_zero.state.loading import MASTER

WIDTH = 3
MOST_RANKS = 4
SCALE = 2.0**8  # of fp16 losses
NOTHING = -1  # a loss that touches no parameter

# ---- what is played ----


@dataclass(frozen=True)
class Weight:
    """A parameter; "late" ones join by ``add_param_group``, "thawed" ones too, after being frozen members."""

    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float32
    role: str = "trained"  # or frozen, late, thawed
    group: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class Call:
    """One call of a sequence.

    Attributes:
        drops: by rank, the layers dropped, as bits; or ``NOTHING``.
        bare: the ranks, as bits, that call ``loss.backward()``.
        amount: the norm to clip to, or what else the call wants.
    """

    name: str = "backward"
    drops: tuple[int, ...] = (0,) * MOST_RANKS
    bare: int = 0
    checkpointing: str = "none"
    amount: float = 0.5


@dataclass(frozen=True)
class Phase:
    """What so many ranks do until all is saved, ``by`` state dicts or checkpoints, and others go on.

    Attributes:
        options: those that change no numbers.
        levels: four ranks are two times two: "both" share each parameter, or with "hybrid" those of the inner one.
    """

    calls: tuple[Call, ...]
    world_size: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    levels: str = "none"
    shared_memory: bool = True
    by: str = "state_dict"


@dataclass(frozen=True)
class Case:
    """A model, an optimizer, and what is done to them.

    Attributes:
        layers: the weights that each uses; one that two use is tied.
        options: those that change numbers.
    """

    weights: tuple[Weight, ...]
    layers: tuple[tuple[int, ...], ...]
    phases: tuple[Phase, ...]
    optimizer: str = "sgd"
    groups: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def half(self) -> bool:
        """Losses are scaled."""
        return any(weight.dtype == torch.float16 and weight.role == "trained" for weight in self.weights)

    @property
    def coarse(self) -> bool:
        """Something is rounded to 16 bits."""
        wires = {phase.options.get("communication_dtype") for phase in self.phases}
        return bool(({weight.dtype for weight in self.weights} | wires) & {torch.bfloat16, torch.float16})


class Net(nn.Module):
    """Residual layers of weights of any shape; checkpointing, each is a segment of its own."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(WIDTH, generator=generator) * 0.1)
        self.weights = nn.ParameterList(_made(weight, generator) for weight in case.weights)
        self.layers = case.layers

    def forward(self, x: Tensor, factors: Sequence[Tensor], drop: int, checkpointing: str) -> Tensor:
        hidden = x + self.first
        for place, members in enumerate(self.layers):
            if not drop >> place & 1:
                hidden = self._segment(members, factors, hidden, checkpointing)
        return hidden

    def _segment(self, members: Sequence[int], factors: Sequence[Tensor], hidden: Tensor, checkpointing: str) -> Tensor:
        def run(hidden: Tensor) -> Tensor:
            for at in members:
                hidden = hidden + torch.tanh(hidden / 2 + (self.weights[at].double() * factors[at]).sum())
            return hidden

        if checkpointing == "none" or not torch.is_grad_enabled():
            return run(hidden)
        return checkpoint(run, hidden, use_reentrant=checkpointing == "reentrant")


def _made(weight: Weight, generator: torch.Generator) -> nn.Parameter:
    shape = weight.shape[::-1] if weight.transposed else weight.shape
    values = torch.randn(shape, generator=generator).to(weight.dtype)
    flipped = values.permute(tuple(reversed(range(values.dim())))) if weight.transposed else values
    return nn.Parameter(flipped, requires_grad=weight.role == "trained")


def loss_of(model: Net, call: Call, place: int, rank: int) -> Tensor:
    """A rank's loss in the call at ``place``."""
    if call.drops[rank] == NOTHING:
        return torch.zeros(())
    generator = torch.Generator().manual_seed(1 + rank + 10 * place)
    x = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    scales = [max(1, p.numel()) ** 0.5 for p in model.weights]
    factors = [
        torch.randn(p.shape, generator=generator, dtype=torch.float64) / scale
        for p, scale in zip(model.weights, scales, strict=True)
    ]
    out: Tensor = model(x, factors, call.drops[rank], call.checkpointing)
    loss = out.square().mean()
    return loss * float("inf") if call.name == "overflow" and rank == 0 else loss


def groups_of(case: Case, model: Net, joined: bool) -> list[dict[str, Any]]:
    """The param groups of a fresh optimizer; ``joined``: late and thawed weights are trained in one of their own."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": 0.1 / (1 + at), "lr": 0.125 / (1 + at)} for at in range(case.groups)
    ]
    groups[0]["params"].append(model.first)
    for weight, p in zip(case.weights, model.weights, strict=True):
        if weight.role in ("trained", "frozen") or (weight.role == "thawed" and not joined):
            groups[weight.group % case.groups]["params"].append(p)
    return groups + [late_group(case, model)] * (joined and waits(case))


def late_group(case: Case, model: Net) -> dict[str, Any]:
    return {"params": [p for _, p in late(case, model)], "lr": 0.0625}


def waits(case: Case) -> bool:
    """Whether there is anything to add."""
    return any(weight.role in ("late", "thawed") for weight in case.weights)


def late(case: Case, model: Net) -> Iterator[tuple[Weight, nn.Parameter]]:
    for weight, p in zip(case.weights, model.weights, strict=True):
        if weight.role in ("late", "thawed"):
            yield weight, p


def trained(case: Case, model: Net, joined: bool) -> list[nn.Parameter]:
    """But the empty ones, which have no gradients."""
    roles = ("trained", "late", "thawed") if joined else ("trained",)
    own = [p for weight, p in zip(case.weights, model.weights, strict=True) if weight.role in roles and p.numel()]
    return [model.first, *own]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.125, eps=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.125, initial_accumulator_value=0.1),
}

# ---- what is seen ----


class Told(NamedTuple):
    """What a call returned: of each parameter, of each rank (None: another's), or one number."""

    name: str
    values: list[Tensor | None]


class Seen(NamedTuple):
    """What a phase told, and what it left: parameters and states, by name."""

    told: list[Told]
    parameters: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


# ---- one process ----


class Alone:
    """Plain torch over masters, fp32 at least; each rank's ``p.grad`` is kept apart until it is summed."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = Net(case, 0)
        self.ranks = 1
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        self.joined = False
        groups = [self._of_masters(group) for group in groups_of(case, self.model, joined=False)]
        self.optimizer = OPTIMIZERS[case.optimizer](groups)
        self.forget()

    def _of_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        keeps_dtype = not self.case.options.get("master_weights", True)
        own = [p for p in group["params"] if p.requires_grad]
        for p in own:
            dtype = p.dtype if keeps_dtype else torch.promote_types(p.dtype, torch.float32)
            self.masters[p] = nn.Parameter(p.detach().to(dtype, copy=True))
        return {**group, "params": [self.masters[p] for p in own]}

    def forget(self) -> None:
        """No gradients."""
        self.local: list[dict[nn.Parameter, Tensor]] = [{} for _ in range(MOST_RANKS)]
        self.sums: dict[nn.Parameter, Tensor] = {}

    def play(self, phase: Phase) -> Seen:
        self.ranks = phase.world_size
        self.forget()
        told: list[Told] = []
        for place, call in enumerate(phase.calls):
            told += self._do(call, place)
        parameters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        names = {p: name for name, p in self.model.named_parameters()}
        states = {names[p]: dict(self.optimizer.state.get(master, {})) for p, master in self.masters.items()}
        return Seen(told, parameters, {name: _copied(state) for name, state in states.items() if state})

    def _do(self, call: Call, place: int) -> list[Told]:
        if call.name in ("backward", "no_sync", "closure", "overflow"):
            for rank in range(self.ranks):
                self._backward(call, place, rank)
            if call.name != "no_sync":
                self._sum()
        if call.name in ("step", "closure"):
            self._step()
        elif call.name == "gradients":
            self._sum()
            return [Told("gradients", [self._gradient(p) for p in trained(self.case, self.model, self.joined)])]
        elif call.name == "clip":
            self._sum()
            return [Told("norm", [self._clip(call.amount)])]
        elif call.name == "zero_grad":
            self.forget()
        elif call.name == "zero_grad to zeros":
            self._sum()
            self.sums = {p: torch.zeros_like(total) for p, total in self.sums.items()}
        elif call.name == "evaluate":
            with torch.no_grad():
                return [Told("losses", [loss_of(self.model, call, place, rank) for rank in range(self.ranks)])]
        elif call.name == "add" and not self.joined:
            self.joined = True
            if waits(self.case):
                self.optimizer.add_param_group(self._of_masters(joining(self.case, self.model)))
        else:
            change(call, self.case, self.model, self.optimizer)
        return []

    def _backward(self, call: Call, place: int, rank: int) -> None:
        loss = loss_of(self.model, call, place, rank)
        if loss.requires_grad:
            (loss * SCALE if self.case.half else loss).backward()
        local = self.local[rank]
        for p in self.model.parameters():
            if p.grad is not None:
                local[p] = local[p] + p.grad if p in local else p.grad
                p.grad = None

    def _sum(self) -> None:
        for local in self.local[: self.ranks]:
            for p, grad in local.items():
                wide = grad.to(torch.promote_types(p.dtype, torch.float32)) / (SCALE if self.case.half else 1)
                self.sums[p] = self.sums[p] + wide if p in self.sums else wide
            local.clear()

    def _gradient(self, p: nn.Parameter) -> Tensor | None:
        over = 1 if self.case.options.get("reduction") == "sum" else self.ranks
        return self.sums[p] / over if p in self.sums else None

    def _clip(self, most: float) -> Tensor:
        for p, master in self.masters.items():
            gradient = self._gradient(p)
            master.grad = None if gradient is None else gradient.to(master.dtype)
        norm = torch.stack(
            [torch.zeros(()), *(m.grad.double().norm() for m in self.masters.values() if m.grad is not None)]
        ).norm()
        factor = (most / (norm + 1e-6)).clamp(max=1.0)
        self.sums = {p: total * factor for p, total in self.sums.items()}
        return norm

    def _step(self) -> None:
        self._sum()
        if self.case.half and not all(total.isfinite().all() for total in self.sums.values()):
            self.forget()
            return
        if self.case.options.get("clip_grad_norm"):
            self._clip(self.case.options["clip_grad_norm"])
        with torch.no_grad():
            for p, master in self.masters.items():
                gradient = self._gradient(p)
                master.grad = None if gradient is None else gradient.to(master.dtype)
                master.copy_(torch.where(master.to(p.dtype) == p, master, p.to(master.dtype)))
            self.optimizer.step()
            for p, master in self.masters.items():
                p.copy_(master)


def joining(case: Case, model: Net) -> dict[str, Any]:
    """Thaw what waits for it, as a group."""
    for _, p in late(case, model):
        p.requires_grad_(True)
    return late_group(case, model)


def change(call: Call, case: Case, model: Net, optimizer: torch.optim.Optimizer) -> None:
    """What is the same for one process and for ranks."""
    if call.name == "edit":
        with torch.no_grad():
            model.first.mul_(1.0 + call.amount)
            model.weights[0].add_(call.amount)
    elif call.name == "learning rate":
        for group in optimizer.param_groups:
            group["lr"] *= call.amount
    elif call.name == "freeze":
        for weight, p in zip(case.weights, model.weights, strict=True):
            if weight.role == "trained":
                p.requires_grad_(not p.requires_grad)
                break


def _copied(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in state.items() if isinstance(value, Tensor)}


# ---- ranks ----


class Left(NamedTuple):
    """What one phase leaves to the next."""

    joined: bool
    frozen: list[bool]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]


def play_rank(rank: int, world_size: int, case: Case, at: int, left: Left | None, folder: str) -> tuple[Seen, Left]:
    """The phase ``at`` of a case as one rank, after what another ``left``."""
    phase = case.phases[at]
    if not phase.shared_memory:
        os.environ["LOWLEVEL_ZERO_SHARED_MEMORY"] = "0"
    player = Rank(rank, case, phase, left, f"{folder}/{at - 1}")
    for place, call in enumerate(phase.calls):
        player.do(call, place)
    return player.seen(), player.leave(f"{folder}/{at}", last=phase is case.phases[-1])


def _levels(phase: Phase) -> dict[str, Any]:
    if phase.levels == "none" or phase.world_size < 4:
        return {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    groups = (mesh.get_group("outer"), mesh.get_group("inner"))
    return {"dp_process_group": groups, "hybrid_shard": phase.levels == "hybrid"}


class Rank:
    """One rank's model and optimizer in one phase, and what its calls told."""

    def __init__(self, rank: int, case: Case, phase: Phase, left: Left | None, path: str) -> None:
        self.rank, self.case, self.phase = rank, case, phase
        self.model = model = Net(case, rank if left is None else 100 + rank)
        self.joined = left is not None and left.joined
        if self.joined:
            joining(case, model)
        wrapped = OPTIMIZERS[case.optimizer](groups_of(case, model, self.joined))
        scaling = {"initial_scale": SCALE, "hysteresis": 1} if case.half else {}
        options = {**scaling, **case.options, **phase.options, **_levels(phase)}
        self.optimizer = LowLevelZeroOptimizer(wrapped, model=model, **options)
        self.told: list[Told] = []
        if left is not None:
            self._resume(left, path)

    def _resume(self, left: Left, path: str) -> None:
        if left.model:
            self.model.load_state_dict(left.model)
            self.optimizer.load_state_dict(left.optimizer)
        else:
            load_checkpoint(path, self.model, self.optimizer)
        for p, frozen in zip(self.model.parameters(), left.frozen, strict=True):
            p.requires_grad_(not frozen)

    def do(self, call: Call, place: int) -> None:
        model, optimizer = self.model, self.optimizer
        if call.name in ("backward", "no_sync", "overflow"):
            with optimizer.no_sync() if call.name == "no_sync" else nullcontext():
                self._backward(call, place)
        elif call.name == "closure":
            optimizer.step(lambda: self._backward(call, place))
        elif call.name == "step":
            optimizer.step()
        elif call.name == "gradients":
            gradients = [optimizer.get_param_grad(p) for p in trained(self.case, model, self.joined)]
            self.told.append(Told("gradients", gradients))
        elif call.name == "clip":
            self.told.append(Told("norm", [optimizer.clip_grad_norm_(call.amount)]))
        elif call.name in ("zero_grad", "zero_grad to zeros"):
            optimizer.zero_grad(set_to_none=call.name == "zero_grad")
        elif call.name == "evaluate":
            with torch.no_grad():
                own = loss_of(model, call, place, self.rank)
            ranks = range(self.phase.world_size)
            self.told.append(Told("losses", [own if rank == self.rank else None for rank in ranks]))
        elif call.name == "add" and not self.joined:
            self.joined = True
            if waits(self.case):
                optimizer.add_param_group(joining(self.case, model))
        else:
            change(call, self.case, model, optimizer)

    def _backward(self, call: Call, place: int) -> None:
        loss = loss_of(self.model, call, place, self.rank)
        if not call.bare >> self.rank & 1 or self.case.half:
            self.optimizer.backward(loss)
        elif loss.requires_grad:
            loss.backward()

    def seen(self) -> Seen:
        parameters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        names = {p: name for name, p in self.model.named_parameters()}
        members = [names[p] for group in self._groups() for p in group]
        states = self.optimizer.state_dict()["state"]
        by_name = {members[place]: _copied(state) for place, state in states.items()}
        for state in by_name.values():
            state.pop(MASTER, None)
        return Seen(self.told, parameters, by_name)

    def _groups(self) -> list[list[nn.Parameter]]:
        return [group["params"] for group in groups_of(self.case, self.model, self.joined)]

    def leave(self, path: str, last: bool) -> Left:
        frozen = [not p.requires_grad for p in self.model.parameters()]
        self.optimizer.zero_grad()
        if last:
            return Left(self.joined, frozen, {}, {})
        if self.phase.by == "checkpoint":
            save_checkpoint(path, self.model, self.optimizer)
            return Left(self.joined, frozen, {}, {})
        return Left(self.joined, frozen, self.model.state_dict(), self.optimizer.state_dict())
