"""Judges a run: follows its logs call by call beside the reference, and compares what the ranks hold in the end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.simulation.calls import BACKWARDS, BOTH, CALLS, EDITS, written
from tests.simulation.log import Entry, Log
from tests.simulation.net import Batches, derivatives, forward
from tests.simulation.program import Call, Program
from tests.simulation.reference import Key, PartReference


class Failure(Exception):
    """What is wrong with a run.

    Args:
        kind: one of a few words, which shrinking keeps.
        text: the whole of it.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Expectation(NamedTuple):
    """What the ranks had to do at a call that they made together.

    Attributes:
        must: patterns, one of which the error of every rank has to match; empty: it need not be refused.
        may: whether it may be refused.
    """

    must: tuple[str, ...] = ()
    may: bool = False


class Judge:
    """Follows the logs of one run."""

    def __init__(self, program: Program, logs: Sequence[Log], batches: Batches | None = None) -> None:
        self.program, self.logs = program, logs
        self.batches = batches or Batches(program)
        self.parts = [PartReference(program, number) for number in range(len(program.parts))]
        self.next = [0] * program.ranks
        self.half_done: set[int] = set()  # ranks whose closure has run, and which wait to step
        self.refused = 0  # how often all ranks refused a call
        self.spoilt = False  # numbers aren't compared any more

    def judge(self) -> None:
        """Raise ``Failure`` unless the run is right."""
        while True:
            here = {rank: entry for rank in range(self.program.ranks) if (entry := self._entry(rank)) is not None}
            alone = [rank for rank, entry in here.items() if not self._waits(entry, rank)]
            if alone:
                self._alone(min(alone, key=lambda rank: (here[rank].place, rank)))
            elif len(here) == self.program.ranks:
                self._meet(here)
            elif here:
                raise Failure("ended", f"ranks {sorted(here)} make calls that others never came to: {_told(here)}")
            else:
                break
        self._compare_ends()

    def _entry(self, rank: int) -> Entry | None:
        entries = self.logs[rank].entries
        return entries[self.next[rank]] if self.next[rank] < len(entries) else None

    def _waits(self, entry: Entry, rank: int) -> bool:
        if entry.call.name == "closure" and rank not in self.half_done:
            return False
        return CALLS[entry.call.name].agreed is not None and not entry.absent

    # ---- what a rank does by itself ----

    def _alone(self, rank: int) -> None:
        entry = self._entry(rank)
        assert entry is not None
        call = entry.call
        if call.name == "closure":
            self._backward(rank, entry)
            self.half_done.add(rank)
            return
        self.next[rank] += 1
        if entry.error is not None and not (call.name == "raising" and entry.error.type == "UserError"):
            raise Failure("wrongly refused", f"rank {rank}, {call}: {entry.error}")
        if entry.absent:
            return
        part = self.parts[call.of]
        if call.name in BACKWARDS or call.name in BOTH:
            self._backward(rank, entry)
        elif call.name == "model.zero_grad":
            part.drop(rank, [part.key(at, rank) for at in range(len(part.part.weights))])
        elif call.name == "grad = None":
            part.drop(rank, [part.key(call.at, rank)])
        elif call.name == "learning rate":
            part.rates[rank].append(call.amount)
        elif call.name == "write weight":
            self._write(rank, entry)
        elif call.name == "freeze":
            if part.part.weights[call.at].role == "trained":
                part.frozen[rank] ^= {part.key(call.at, rank)}
        elif call.name == "last norm":
            self._compare_told(part, [entry], part.norm)
        elif call.name == "repair":
            self._repair(rank, entry)

    def _backward(self, rank: int, entry: Entry) -> None:
        """One rank's backward, through one model, or from one through the other."""
        call = entry.call
        if entry.error is not None:  # half a backward: the step must be begun anew
            self.parts[call.of].ways[rank].append("raised")
            return
        order = [call.of] if call.name not in BOTH else [1 - call.of, call.of]
        value, found = self.batches.of(order[0], entry.place, rank).start, []
        for number in order:
            part = self.parts[number]
            batch = self.batches.of(number, entry.place, rank)
            value, uses = forward(part.part, part.of_rank(rank), call.drops, batch, value)
            found.append((part, number, uses))
        touches = any(part.touches(rank, uses) for part, _, uses in found)
        slope = 2 * value * self.parts[call.of].scale * (float("nan") if call.name == "nan" else 1)
        for part, number, uses in reversed(found):
            slope, gradients = derivatives(uses, slope)
            part.add(rank, gradients, self._way(entry, number, touches))

    def _way(self, entry: Entry, number: int, touches: bool) -> str:
        name, own = entry.call.name, number == entry.call.of
        if "no_sync" in name or (not own and name not in ("plain through", "nested")):
            return "local"
        if name in ("plain", "plain through"):
            return "plain" if touches else "local"
        return "own"

    def _write(self, rank: int, entry: Entry) -> None:
        """A weight that all ranks which share it write alike is written once; else they differ until it is repaired."""
        part, call, row = self.parts[entry.call.of], entry.call, self.program.rows[entry.place]
        part.written[rank].append(call.at)
        key = part.key(call.at, rank)
        sharers = part.sharers(key)
        if rank == sharers[0] and all(row[each] == call for each in sharers):
            with torch.no_grad():
                part.weights[key].mul_(call.amount)

    def _repair(self, rank: int, entry: Entry) -> None:
        for part in self.parts:
            part.repair(rank)
        if rank == 0:
            for of, at in written(self.program):
                with torch.no_grad():
                    for key, p in self.parts[of].weights.items():
                        if key[0] == at:
                            p.fill_(entry.call.amount)

    # ---- what the ranks do together ----

    def _meet(self, here: dict[int, Entry]) -> None:
        """All ranks stand before a call that they make together."""
        signatures = {_signature(entry.call) for entry in here.values()}
        raised = [rank for rank, entry in here.items() if entry.error is not None]
        quiet = [rank for rank, entry in here.items() if CALLS[entry.call.name].quiet and rank not in raised]
        looks = [rank for rank in quiet if here[rank].call.name == "norm"]
        if quiet and (raised or len(signatures) > 1):
            self.next[quiet[0]] += 1  # nothing had changed here, so nobody was asked
            call = here[quiet[0]].call
            self.parts[call.of].edited_apart |= call.name in (*EDITS, "torch's clip")
            return
        if 0 < len(looks) < len(quiet):
            self.next[looks[0]] += 1  # norms are taken once, and then known to what clips by them
            return
        expected = self._different_calls(here) if len(signatures) > 1 else self._expected(here)
        self.half_done.clear()
        for rank in here:
            self.next[rank] += 1
        if not raised:
            if expected.must:
                raise Failure("not refused", f"{_told(here)}: expected an error like {expected.must}")
            self._together(here)
        else:
            self._check_refusal(here, raised, expected)
            self.refused += 1

    def _check_refusal(self, here: dict[int, Entry], raised: list[int], expected: Expectation) -> None:
        text = f"{_told(here)}: " + "; ".join(f"rank {rank}: {here[rank].error}" for rank in raised)
        if not expected.must and not expected.may:
            raise Failure("wrongly refused", text)
        if len(raised) < len(here):
            raise Failure("refused by some", text)
        if not expected.may:
            for rank in raised:
                if not any(re.search(pattern, str(here[rank].error)) for pattern in expected.must):
                    raise Failure("unnamed cause", f"rank {rank}: expected {expected.must} in: {here[rank].error}")

    def _different_calls(self, here: dict[int, Entry]) -> Expectation:
        """The ranks have come to different calls: each is told so, with what another was called for."""
        names = [CALLS[entry.call.name].agreed for entry in here.values()]
        told = [re.escape(f"{name}") for name in dict.fromkeys(names) if name is not None]
        return Expectation((rf"rank \d+ to .*(?:{'|'.join(told)})", rf"rank \d+ could not (?:{'|'.join(told)})"))

    def _expected(self, here: dict[int, Entry]) -> Expectation:
        """What all ranks, who came for the same call, have to do."""
        part, name = self.parts[here[0].call.of], here[0].call.name
        must, may = [], False
        if any(entry.call.name == "load raising" for entry in here.values()):
            must.append("the user's own")
        if any("raised" in ways for ways in part.ways):
            may = True
        if name == "construct" and self.program.carrier == "nccl":  # whose collectives have one order
            may |= any(ways != each.ways[0] for each in self.parts for ways in each.ways)
        drops_must, drops_may = part.drops_differ()
        if drops_must and name != "zero_grad":
            if CALLS[name].quiet:
                may = True
            else:
                must.append(r"p\.grad to be set to None|expected the same call")
        if part.edited_apart and name != "zero_grad" and not CALLS[name].quiet:
            must.append("same edits of p.grad")
            if drops_may:  # which is told first
                must.append(r"p\.grad to be set to None")
        may |= drops_may or part.edited_apart
        if name in ("step", "closure", "synchronize"):
            if part.rates_differ():
                must.append(r"\blr\b")
            may |= bool(part.written_apart())
            if part.written_apart(seen=True):
                must.append(_names(part.written_apart(seen=True)))
            if part.part.keywords.get("error_if_nonfinite") and self._is_bad(part):
                must.append("finite")
        elif part.rates_differ() or part.written_apart():
            may = name != "zero_grad"
            if name == "verify" and part.written_apart(seen=True):
                must.append(_names(part.written_apart(seen=True)))
        return Expectation(tuple(must), may and not must)

    def _is_bad(self, part: PartReference) -> bool:
        """Whether the norm of what a step would use isn't finite."""
        summed = [*part.base.values(), *(g for own in (*part.own, *part.local) for g in own.values())]
        return not all(bool(gradient.isfinite().all()) for gradient in summed)

    def _together(self, here: dict[int, Entry]) -> None:
        entry = here[0]
        part, call = self.parts[entry.call.of], entry.call
        if call.name in ("zero_grad", "load"):
            part.forget() if call.name == "zero_grad" else part.load()
            return
        if call.name != "construct":
            part.finish(with_local=CALLS[call.name].completes)
        if call.name in ("step", "closure", "synchronize"):
            if call.name == "synchronize":
                part.multiply(part.base, call.amount)
            part.follow()
            part.step()
        elif call.name == "zero_grad to zeros":
            part.multiply(part.base, 0.0)
            part.base = {key: torch.zeros_like(gradient) for key, gradient in part.base.items()}
        elif call.name in ("clip", "torch's clip"):
            self._compare_told(part, here.values(), part.clip(call.amount))
        elif call.name == "norm":
            for each in here.values():
                average = part.average((each.call.at, 0))
                self._compare_told(part, [each], torch.zeros(()) if average is None else average.double().norm())
        elif call.name in EDITS:
            part.edit(call)
        elif call.name == "clone":
            for rank, each in here.items():
                average = part.average(part.key(call.at, rank))
                zeros = torch.zeros_like(part.of_rank(rank)[call.at], requires_grad=False)
                self._compare_told(part, [each], zeros if average is None else average)
        elif call.name == "gradient":
            for rank, each in here.items():
                self._compare_told(part, [each], part.average(part.key(call.at, rank)))
        elif call.name == "add group":
            part.join()
        elif call.name == "save":
            part.save()

    # ---- numbers ----

    def _compare_told(self, part: PartReference, entries: Iterable[Entry], expected: Tensor | None) -> None:
        if part.written_apart():
            return
        for entry in entries:
            if (entry.told is None) != (expected is None):
                raise Failure("wrong numbers", f"{entry.call} at {entry.place} told {entry.told}, expected {expected}")
            if expected is not None and entry.told is not None:
                self._compare(part, expected, entry.told, f"what {entry.call} at {entry.place} told", largest(expected))

    def _compare_ends(self) -> None:
        for number, part in enumerate(self.parts):
            for rank, log in enumerate(self.logs):
                for at in range(len(part.part.weights)):
                    expected, got = part.weights[part.key(at, rank)].detach(), log.parameters[number, at]
                    first = next(r for r in range(self.program.ranks) if part.key(at, r) == part.key(at, rank))
                    if not _same_bits(got, self.logs[first].parameters[number, at]):
                        raise Failure("ranks differ", f"model {number}, w{at}: ranks {first} and {rank}")
                    self._compare(part, expected, got, f"rank {rank}, model {number}, w{at}", largest(expected), 2)
            for key in part.masters:
                self._compare_slices(number, part, key)

    def _compare_slices(self, number: int, part: PartReference, key: Key) -> None:
        """A master and the optimizer's states of it, as each rank's slices have them."""
        master = part.masters[key]
        states = {"master": master.detach(), **part.optimizer.state.get(master, {})}
        whole = {name: value for name, value in states.items() if isinstance(value, Tensor) and name != "step"}
        for rank, log in enumerate(self.logs):
            if part.key(key[0], rank) != key or not master.numel():
                continue
            slices, start = log.slices[number, key[0]], log.starts[number, key[0]]
            for name, value in whole.items():
                what = f"rank {rank}, model {number}, {name} of w{key[0]}"
                if name not in slices:
                    raise Failure("wrong numbers", f"{what}: expected one, found none among {sorted(slices)}")
                flat, got = _flat(value, part.part.weights[key[0]].transposed), slices[name]
                own = flat[start : start + len(got)]
                self._compare(part, own, got, what, largest(value), 2 if name == "master" else 0)

    def _compare(
        self, part: PartReference, expected: Tensor, got: Tensor, what: str, size: float, roundings: float = 0
    ) -> None:
        within = tolerance(part, got.dtype, size, roundings)
        one, other = expected.double(), got.double()
        if not torch.allclose(other, one, rtol=0, atol=within, equal_nan=True):
            raise Failure("wrong numbers", f"{what}: expected {one.tolist()}, got {other.tolist()}, to {within:.2g}")


def tolerance(part: PartReference, dtype: torch.dtype, size: float, roundings: float = 0) -> float:
    """What numbers may be off by: a share of their ``size``, and so many ``roundings`` of the numbers themselves.

    A program of 12 calls makes 2e-5 of a difference in a weight's last bit.
    """
    share, least = (0.05, 3e-2) if part.is_coarse else (1e-4, 2e-6)
    return share * size + least + roundings * size * torch.finfo(dtype).eps


def _signature(call: Call) -> tuple[str | None, int, float]:
    """What ranks compare of a call."""
    agreed = CALLS[call.name].agreed
    return (
        agreed,
        call.of,
        {"get_param_grad": call.at, "read p.grad": call.at, "clip_grad_norm_": call.amount}.get(agreed or "", 0),
    )


def _names(numbers: Iterable[int]) -> str:
    """A pattern of one of these weights' names."""
    return "|".join(rf"weights\.{at}\b" for at in sorted(numbers))


def _flat(value: Tensor, transposed: bool) -> Tensor:
    """The elements in memory order."""
    return (value.permute(tuple(reversed(range(value.dim())))) if transposed else value).reshape(-1)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def _told(here: dict[int, Entry]) -> str:
    return ", ".join(f"rank {rank} at {entry.place}: {entry.call}" for rank, entry in sorted(here.items()))
