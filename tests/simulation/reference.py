"""What a program must come to, by plain torch in one process: whole weights, each rank's gradients summed by hand.

The reference follows the ranks' logs: it makes every call that a rank made, and at each call that ranks make together
it says whether they had to refuse it, might refuse it, or had to make it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.simulation import net
from tests.simulation.calls import BOTH, BY_NUMBERS, assigns_weights, edits_slices
from tests.simulation.net import Use
from tests.simulation.program import Call, Part, Program

MOST_WRITES = 99  # of a weight in a step
Written = tuple[int, float]  # a weight's number, and what it was multiplied with
Key = tuple[int, int]  # a weight's number, and which half of the ranks has it: experts differ, others are 0


def _is_coarse(part: Part) -> bool:
    dtypes = {*(weight.dtype for weight in part.weights), part.keywords.get("communication_dtype")}
    return bool(dtypes & {"bfloat16", "float16"})


def _passes_through(program: Program) -> bool:
    """Whether a loss of one model follows from the other model."""
    return any(call is not None and call.name in BOTH for row in program.rows for call in row)


class PartReference:
    """One model and its optimizer: masters, fp32 at least, and gradients by rank.

    Attributes:
        weights: the parameters, whole, by key.
        base: gradients that all ranks know of, summed over the ranks.
        own: by rank, what its backwards have added since, and reduce.
        local: by rank, what waits in ``p.grad`` to be reduced.
        is_one_of_several: it shares the ranks with another one, or has experts: gradients of its plain backwards wait
            in ``p.grad`` until the ranks complete them.
        slices_edited: by rank, whether it may have assigned a slice's ``.grad``, or set it to None.
        waits: by rank, whether something waits so since an earlier agreement.
        edited_apart: some ranks alone have edited a gradient.
        edits_vary: ranks have edited different gradients at the same time, and may make the others' edits yet.
        norm: the last step's.
        is_coarse: its numbers are rounded to 16 bits, or follow from others that are.
    """

    def __init__(self, program: Program, number: int) -> None:
        self.program, self.number = program, number
        self.part, self.ranks = program.parts[number], program.ranks
        self.weights = self._whole(number)
        self.masters: dict[Key, nn.Parameter] = {}
        self.is_coarse = any(map(_is_coarse, program.parts if _passes_through(program) else [self.part]))
        self.has_experts = any(weight.expert for weight in self.part.weights)
        self.is_one_of_several = len(program.parts) > 1 or self.has_experts
        self.joined = False
        self.scale = net.SCALE if self.part.half else 1.0
        self.norm: Tensor | None = None
        self.base: dict[Key, Tensor] = {}
        self.frozen: list[set[Key]] = [set() for _ in range(self.ranks)]
        self.frozen_slices: list[set[Key]] = [set() for _ in range(self.ranks)]  # whose gradients are dropped
        groups = net.groups_of(self.part, list(range(len(self.part.weights))))
        self.optimizer = net.OPTIMIZERS[self.part.optimizer]([self._of_masters(group) for group in groups])
        # By rank, what it has multiplied the settings of all groups with, by name.
        self.settings: list[list[tuple[str, float]]] = [[] for _ in range(self.ranks)]
        self.written: list[list[Written]] = [[] for _ in range(self.ranks)]  # since the last step
        self.repaired = [False] * self.ranks  # settings and weights, since the last step
        self.unlike: set[Key] = set()  # weights that ranks have written, each in its own way or at its own time
        self.saved: Any = None  # what a checkpoint has
        self.kept: Any = None  # what a state dict has
        self.offered: dict[Key, Tensor] = {}  # masters of a state dict that has been loaded since the last step
        self.forget()

    def _whole(self, number: int) -> dict[Key, nn.Parameter]:
        """What construction leaves: the values of the first rank that has each weight."""
        nets = [net.initial_values(self.part, rank + 10 * number) for rank in range(min(2, self.ranks))]
        halves = {at: (0, 1) if weight.expert else (0,) for at, weight in enumerate(self.part.weights)}
        return {(at, half): nets[half][at] for at, both in halves.items() for half in both}

    def _of_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        keeps_dtype = not self.part.keywords.get("master_weights", True)
        keys = [
            key for at in group["params"] for key in self.weights if key[0] == at and self.weights[key].requires_grad
        ]
        for key in keys:
            p = self.weights[key]
            dtype = p.dtype if keeps_dtype else torch.promote_types(p.dtype, torch.float32)
            self.masters[key] = nn.Parameter(p.detach().to(dtype, copy=True))
        return {**group, "params": [self.masters[key] for key in keys]}

    def key(self, at: int, rank: int) -> Key:
        return (at, rank % 2) if self.part.weights[at].expert else (at, 0)

    def of_rank(self, rank: int) -> list[Tensor]:
        """One rank's weights, in order."""
        return [self.weights[self.key(at, rank)] for at in range(len(self.part.weights))]

    def touches(self, rank: int, uses: Iterable[Use]) -> bool:
        """Whether one of the weights takes a gradient on this rank."""
        keys = {self.key(use.weight, rank) for use in uses}
        return any(self.takes(key, rank) for key in keys)

    def takes(self, key: Key, rank: int) -> bool:
        """Whether a weight takes gradients on this rank."""
        return self.weights[key].requires_grad and key not in self.frozen[rank] | self.frozen_slices[rank]

    # ---- gradients ----

    def forget(self) -> None:
        """Drop all gradients."""
        self.base = {}
        self.own: list[dict[Key, Tensor]] = [{} for _ in range(self.ranks)]
        self.local: list[dict[Key, Tensor]] = [{} for _ in range(self.ranks)]
        self.waits = [False] * self.ranks
        self.slices_edited = [False] * self.ranks
        self.edited_apart = self.edits_vary = False
        self.edits_alone: list[list[Any]] = [[] for _ in range(self.ranks)]
        self.is_mixed = False  # gradients follow from weights that ranks have written each in its own way
        self.forget_drops()

    @property
    def fresh(self) -> list[bool]:
        """Whether a rank has run a backward since the last agreement that it has to tell others of."""
        return [bool(ways or local) for ways, local in zip(self.ways, self.local, strict=True)]

    def forget_drops(self) -> None:
        self.ways: list[list[str]] = [[] for _ in range(self.ranks)]
        self.dropped: list[set[tuple[Key, int]]] = [set() for _ in range(self.ranks)]  # and after which backward
        self.maybe_dropped: list[set[tuple[Key, int]]] = [set() for _ in range(self.ranks)]
        self.untold: list[set[tuple[Key, int]]] = [set() for _ in range(self.ranks)]  # gone, and not compared yet

    def add(self, rank: int, gradients: Iterable[tuple[int, Tensor]], way: str) -> None:
        """Take one rank's backward; ``way``: what is reduced by it, for comparing ranks, or "local"."""
        local = self.local[rank]
        for at, gradient in gradients:
            key = self.key(at, rank)
            if self.takes(key, rank) and gradient.numel():
                local[key] = local[key] + gradient if key in local else gradient
        if way != "local":
            self.ways[rank].append(way)
            self._reduce(rank)

    def _reduce(self, rank: int) -> None:
        own, local = self.own[rank], self.local[rank]
        for key, gradient in local.items():
            sent = gradient.to(getattr(torch, self.part.keywords.get("communication_dtype", "float32")))
            wide = sent.to(torch.promote_types(gradient.dtype, torch.float32)) / self.scale
            own[key] = own[key] + wide if key in own else wide
        local.clear()

    @property
    def aligned(self) -> bool:
        """Whether all ranks have run the same backwards since they agreed last."""
        return all(ways == self.ways[0] for ways in self.ways)

    def drop(self, rank: int, keys: Iterable[Key]) -> None:
        """One rank sets ``p.grad`` to None."""
        when = len(self.ways[rank])
        for key in keys:
            waits = key in self.local[rank] or self._waits(rank)
            before = any(key == each for each, _ in self.dropped[rank] | self.maybe_dropped[rank])
            seen = not waits and (key in self.own[rank] or (key in self.base and not before))
            (self.dropped if seen else self.maybe_dropped)[rank].add((key, when))
            self.own[rank].pop(key, None)
            self.local[rank].pop(key, None)

    def _waits(self, rank: int) -> bool:
        kept = self.is_one_of_several and "plain" in self.ways[rank]
        return kept or self.waits[rank] or self.part.recomputed  # whose gradients no graph foresees

    def drops_differ(self) -> tuple[bool, bool]:
        """Whether the ranks must be told that they have dropped different gradients, and whether they may be."""
        if not any(self.dropped) and not any(self.maybe_dropped):
            return False, any(self.untold)
        either = self._either()
        if self.is_one_of_several and any("plain" in ways for ways in self.ways):  # which reduce at the next agreement
            either = [{(key, when) for key, _ in own for when in range(len(self.ways[0]) + 1)} for own in either]
        must = any(
            drop not in either[rank]
            for dropped in self.dropped
            for drop in dropped
            for rank in range(self.ranks)
            if self.key(drop[0][0], rank) == drop[0]
        )
        same = all(dropped == self.dropped[0] for dropped in (*self.dropped, *self.maybe_dropped, *self.untold))
        return must and self.aligned, must or not self.aligned or (not same)

    def dropped_apart(self) -> list[set[tuple[Key, int]]]:
        """By rank, what it has dropped and another one hasn't."""
        either = self._either()
        return [{each for each in own if any(each not in either[r] for r in self.sharers(each[0]))} for own in either]

    def _either(self) -> list[set[tuple[Key, int]]]:
        """By rank, all that it may have dropped."""
        return [
            one | two | three for one, two, three in zip(self.dropped, self.maybe_dropped, self.untold, strict=True)
        ]

    def gone(self) -> set[Key]:
        """The weights whose gradients all ranks have dropped since they agreed last."""
        maybe = [{key for key, _ in dropped} for dropped in self.maybe_dropped]
        by_all = {key for some in maybe for key in some if all(key in maybe[rank] for rank in self.sharers(key))}
        return by_all | {key for dropped in self.dropped for key, _ in dropped}

    def finish(self, with_local: bool = True) -> None:
        """Complete all gradients: what all ranks have dropped is gone, and what each has added is summed.

        ``with_local``: what waits in ``p.grad`` to be reduced, too.
        """
        for key in self.gone():
            self.base.pop(key, None)
        self.waits = [not with_local and self._waits(rank) for rank in range(self.ranks)]
        for rank in range(self.ranks) if with_local else ():
            self._reduce(rank)
        for own, waits in zip(self.own, self.waits, strict=True):
            if not waits:
                for key, gradient in own.items():
                    self.base[key] = self.base[key] + gradient if key in self.base else gradient
                own.clear()
        self.forget_drops()

    def edit_alone(self, rank: int, call: Call) -> None:
        """One rank edits gradients: the others that share them have to hear of it, unless they do the same."""
        if any(self.own):  # which ranks may have completed by looking at norms of them
            self.edits_vary = self.is_mixed = True
        edited = [key for key in self.base if self.key(key[0], rank) == key and not self.edits_vary]
        key = self.key(call.at, rank)
        if call.name == "torch's clip":
            self.edited_apart |= bool(edited)
            self.edits_alone[rank].append(rank)
        elif key in edited:
            if self.sharers(key) == [rank]:
                self.edit(call, key)
                return
            if len(self.sharers(key)) < self.ranks:  # other experts may have no gradient
                self.edits_vary = self.is_mixed = True
            self.edits_alone[rank].append(call)
            unlike = any(edits != self.edits_alone[rank] for edits in self.edits_alone)
            self.edited_apart = unlike and not self.edits_vary
            if not self.edited_apart:
                for each in self.edits_alone[rank]:
                    self.edit(each, self.key(each.at, rank))
                self.edits_alone = [[] for _ in range(self.ranks)]

    def edit_unlike(self, calls: Sequence[Call]) -> None:
        """The ranks edit gradients at the same time, each in its own way."""
        names, weights = {call.name for call in calls}, {call.at for call in calls}
        free = {"scale"} if edits_slices(self.program) else set()  # each rank's slice may have a number of its own
        if len(names) == len(weights) == 1 and names <= {*BY_NUMBERS} - free:
            may_be_lost = self.part.recomputed and any(self.frozen_slices)  # in a plain backward that was open then
            whole = [key for key in self.base if len(self.sharers(key)) == self.ranks and not may_be_lost]
            self.edited_apart |= any(key[0] in weights or names == {"clip value"} for key in whole)
        self.edits_vary = self.is_mixed = True

    def edit(self, call: Call, only: Key | None = None) -> None:
        """Edit one weight's averaged gradient, or all, in place. fp16: what has overflowed stays so, unless zeroed."""
        every = call.name == "clip value"
        keeps = self.part.half and not (call.name == "copy" and edits_slices(self.program))  # which zeroes slices first
        for key in [key for key in self.base if (every or key[0] == call.at) and only in (None, key)]:
            base, weight = (
                self.base[key],
                self.weights[key].detach().to(self.base[key].dtype) * call.amount * self._over,
            )
            edited = {
                "scale": base * call.amount,
                "scale twice": base * call.amount**2,
                "add": base + weight,
                "copy": weight,
                "fill": base.index_fill(-1, torch.zeros(1, dtype=torch.int64), call.amount * self._over),
                "clip value": base.clamp(-call.amount * self._over, call.amount * self._over),
            }[call.name]
            self.base[key] = torch.where(base.isfinite(), edited, base) if keeps else edited

    @property
    def _over(self) -> int:
        """What sums over the ranks are divided by."""
        return 1 if self.part.keywords.get("reduction") == "sum" else self.ranks

    def average(self, key: Key) -> Tensor | None:
        return self.base[key] / self._over if key in self.base else None

    def total_norm(self) -> Tensor:
        averages = [self.average(key) for key in self.base]
        return torch.stack(
            [torch.zeros((), dtype=torch.float64), *(a.double().norm() for a in averages if a is not None)]
        ).norm()

    def clip(self, most: float) -> Tensor:
        norm = self.total_norm()
        self.multiply(self.base, (most / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def multiply(self, keys: Iterable[Key], factor: float | Tensor) -> None:
        for key in list(keys):
            if key in self.base:
                self.base[key] = self.base[key] * factor

    # ---- steps ----

    def step(self) -> None:
        """What a plain optimizer does with the average; in fp16, nothing where it isn't finite."""
        self.norm = self.total_norm()
        if self.part.half and not self.norm.isfinite():
            self.scale /= 2
            self.forget()
            return
        if self.part.keywords.get("clip_grad_norm"):
            self.clip(self.part.keywords["clip_grad_norm"])
        with torch.no_grad():
            self._assign()
            self.optimizer.step()
            for key, master in self.masters.items():
                self.weights[key].copy_(master)

    def _assign(self) -> None:
        for key, master in self.masters.items():
            average = self.average(key)
            # Of the master's strides, as a backward makes it: fused kernels look at memory alone.
            master.grad = None if average is None else torch.empty_like(master).copy_(average)
        self._settle()
        self.offered = {}

    def _settle(self) -> None:
        """Let masters be those that were offered where these round to the weights, else their own, else the weights."""
        for key, master in self.masters.items():
            p, offered = self.weights[key], self.offered.get(key, master)
            own = torch.where(master.to(p.dtype) == p, master, p.to(master.dtype))
            master.copy_(torch.where(offered.to(p.dtype) == p, offered, own))

    def join(self) -> None:
        """``add_param_group``."""
        if self.part.late and not self.joined:
            self.joined = True
            if not self.settings_differ():
                self._set()
            for at in self.part.late:
                self.weights[at, 0].requires_grad_(True)
            self.optimizer.add_param_group(
                self._of_masters({"params": self.part.late, **net.settings_of(self.part.groups)})
            )

    def written_apart(self, seen: bool = False) -> set[int]:
        """Weights that some ranks have written more often than others; ``seen``: whose values that has changed."""
        most = 1 if assigns_weights(self.program) else MOST_WRITES
        apart = {
            key
            for key in self._written_keys()
            if len({min(most, len(self._factors(key, rank))) for rank in self.sharers(key)}) > 1
        }
        return {key[0] for key in apart if not seen or self._changes(key)}

    def written_unlike(self) -> set[int]:
        """Weights that ranks have written to different values, as often as one another or not."""
        return {key[0] for key in self._written_keys() if self._changes(key)}

    def _written_keys(self) -> set[Key]:
        return {self.key(at, rank) for rank, written in enumerate(self.written) for at, _ in written}

    def is_behind(self, rank: int) -> bool:
        """Whether other ranks have written or repaired weights that this one has yet to, so that its values differ."""
        writes = [len(written) for written in self.written]
        return max(writes) > writes[rank] or (any(self.repaired) and not self.repaired[rank])

    def _factors(self, key: Key, rank: int) -> list[float]:
        """The numbers that a rank has multiplied a weight with."""
        return [amount for at, amount in self.written[rank] if at == key[0]]

    def sharers(self, key: Key) -> list[int]:
        """The ranks that have a weight, or half of an expert, in common."""
        return [rank for rank in range(self.ranks) if self.key(key[0], rank) == key]

    def _changes(self, key: Key) -> bool:
        """Whether ranks have given a weight different values by different products."""
        p = self.weights[key]
        products = {math.prod(self._factors(key, rank)) for rank in self.sharers(key)}
        return len(products) > 1 and bool((p.isfinite() & (p != 0)).any())

    def save(self) -> None:
        """Keep all that a checkpoint has."""
        self.saved = copy.deepcopy((self.weights, self.masters, self.scale, self.optimizer.state_dict()))
        for group in self.saved[-1]["param_groups"]:
            for name, factor in self.settings[0]:
                group[name] *= factor

    @torch.no_grad()
    def load(self) -> None:
        """Take it again, without gradients."""
        weights, masters, self.scale, states = copy.deepcopy(self.saved)
        for kept, own in ((weights, self.weights), (masters, self.masters)):
            for key, value in kept.items():
                own[key].copy_(value)
        self.optimizer.load_state_dict(states)
        self.settings = [[] for _ in range(self.ranks)]
        self.written = [[] for _ in range(self.ranks)]
        self.offered = {}
        self.forget()

    def keep_state(self) -> None:
        """Keep what a state dict has, as each rank has it."""
        states = self.optimizer.state_dict()
        self.kept = copy.deepcopy((self.masters, self.scale, states, self.settings))

    @torch.no_grad()
    def load_state(self) -> None:
        """Take it again; masters where they round to the weights, now or before the next step."""
        masters, self.scale, states, self.settings = copy.deepcopy(self.kept)
        self.optimizer.load_state_dict(states)
        self.offered = {key: value.detach() for key, value in masters.items()}
        self._settle()

    @torch.no_grad()
    def anew(self) -> PartReference:
        """The same weights with a new optimizer, and without gradients."""
        other = PartReference(self.program, self.number)
        for key, p in self.weights.items():
            other.weights[key].copy_(p)
            other.weights[key].requires_grad_(p.requires_grad and key[0] not in self.part.late)
        for key, master in other.masters.items():
            master.copy_(self.weights[key])
        other.saved, other.kept = self.saved, self.kept
        other.is_one_of_several = self.is_one_of_several
        return other

    def settings_differ(self) -> bool:
        return any(settings != self.settings[0] for settings in self.settings)

    def settings_apart(self) -> set[str]:
        """The settings that ranks have multiplied with different numbers."""
        names = {name for settings in self.settings for name, _ in settings}
        return {name for name in names if len({_factor(settings, name) for settings in self.settings}) > 1}

    def follow(self) -> None:
        """Take the settings that all ranks have made, and the weights that they have written."""
        self._set()
        self.written = [[] for _ in range(self.ranks)]
        self.repaired = [False] * self.ranks
        self.unlike.clear()

    def _set(self) -> None:
        for group in self.optimizer.param_groups:
            for name, factor in self.settings[0]:
                group[name] *= factor
        self.settings = [[] for _ in range(self.ranks)]

    def repair(self, rank: int) -> None:
        """One rank makes its settings and weights what all ranks make them."""
        self.settings[rank], self.written[rank], self.repaired[rank] = [], [], True
        self.unlike.clear()
        if rank == 0:
            for at, group in enumerate(self.optimizer.param_groups):
                group.update(net.settings_of(at))


def _factor(settings: Iterable[tuple[str, float]], name: str) -> float:
    return math.prod(factor for each, factor in settings if each == name)
