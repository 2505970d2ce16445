"""Judges a run: follows its logs call by call beside the reference, and compares what the ranks hold in the end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.simulation.calls import (
    BACKWARDS,
    BOTH,
    CALLS,
    EDITS,
    OF_ONE_OPTIMIZER,
    SAVE,
    SETTINGS,
    drops_first,
    edits_slices,
    written,
)
from tests.simulation.log import Entry, Error, Log
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


BYTES = 4  # of an element of a gradient that has been stepped, at most


class Meeting(NamedTuple):
    """A place within a call where ranks compare their calls.

    Attributes:
        name: under which they agree.
        of: the number of the part.
    """

    name: str
    of: int


# What a rank is told that takes norms after fewer backwards than others.
LATE = r"weights\.\d+: expected norms of p\.grad after the same backwards"
# And one whose p.grad is found to be cleared in the same call, since its slice's has been set to None.
KEPT = r"weights\.\d+: expected p\.grad of the present step"

# As the ranks agree on them where optimizers share the order of collectives.
BACKWARD = "run a backward"
WITHIN = "run a backward within another optimizer's"


class Judge:
    """Follows the logs of one run."""

    def __init__(
        self, program: Program, logs: Sequence[Log], batches: Batches | None = None, slack: float = 1.0
    ) -> None:
        self.program, self.logs = program, logs
        self._slack = slack  # how much more numbers may be off by
        self.batches = batches or Batches(program)
        self.parts = [PartReference(program, number) for number in range(len(program.parts))]
        self.next = [0] * program.ranks
        self.met = [0] * program.ranks  # meetings of the next call that a rank has passed
        self.is_shared = program.carrier == "nccl" and len(self.parts) > 1  # the order of collectives
        self.refused = 0  # how often all ranks refused a call
        self.is_over = False  # ranks have waited in vain for each other: nobody communicates any more
        self.spoilt = False  # numbers aren't compared any more: weights were stepped that ranks had written unlike

    def judge(self) -> None:
        """Raise ``Failure`` unless the run is right."""
        while True:
            here = {rank: entry for rank in range(self.program.ranks) if (entry := self._entry(rank)) is not None}
            alone = [rank for rank, entry in here.items() if self._meeting(entry, rank) is None]
            if alone:
                self._alone(min(alone, key=lambda rank: (here[rank].place, rank)))
            elif len(here) == self.program.ranks:
                self._meet(here)
            elif here:
                raise Failure("ended", f"ranks {sorted(here)} make calls that others never came to: {_told(here)}")
            else:
                break
            if self.is_over:
                return
        self._compare_ends()

    def _entry(self, rank: int) -> Entry | None:
        entries = self.logs[rank].entries
        return entries[self.next[rank]] if self.next[rank] < len(entries) else None

    def _meeting(self, entry: Entry, rank: int) -> Meeting | None:
        """Return where in its next call a rank waits for the others; None: it goes on by itself."""
        meetings = self._meetings(entry.call)
        return None if entry.absent or self.met[rank] >= len(meetings) else meetings[self.met[rank]]

    def _meetings(self, call: Call) -> list[Meeting | None]:
        """Return where a call waits for the others, one after the other; None: its backward waits for nobody."""
        meetings: list[Meeting | None] = [None] if call.name == "closure" else []
        if self.is_shared and call.name in OF_ONE_OPTIMIZER:
            meetings = [Meeting(BACKWARD, call.of)]
            if call.name == "nested":
                meetings.append(Meeting(WITHIN, 1 - call.of))
        agreed = CALLS[call.name].agreed
        if agreed is not None:
            meetings.append(Meeting(agreed, call.of))
        if call.name == "reload":
            meetings.append(Meeting("load_state_dict", call.of))
        return meetings

    def _pass(self, rank: int) -> None:
        """A rank's call is over."""
        self.next[rank] += 1
        self.met[rank] = 0

    # ---- what a rank does by itself ----

    def _alone(self, rank: int) -> None:
        entry = self._entry(rank)
        assert entry is not None
        call = entry.call
        if call.name == "closure" and not (entry.error and self._may_raise(entry.error, call, rank)):
            self._backward(rank, entry)
            self.met[rank] += 1
            return
        self._pass(rank)
        if entry.error is not None and not self._may_raise(entry.error, call, rank):
            raise Failure("wrongly refused", f"rank {rank}, {call}: {entry.error}")
        if entry.absent:
            return
        part = self.parts[call.of]
        if call.name in BACKWARDS or call.name in BOTH or call.name == "closure":
            self._backward(rank, entry)
        elif call.name == "model.zero_grad":
            part.drop(rank, [part.key(at, rank) for at in range(len(part.part.weights))])
        elif call.name == "grad = None":
            self._note_edited_slice(rank, call)
            part.drop(rank, [part.key(call.at, rank)])
        elif call.name in SETTINGS:
            part.settings[rank].append((SETTINGS[call.name], call.amount))
        elif call.name == "write weight":
            self._write(rank, entry)
        elif call.name == "freeze":
            if part.part.weights[call.at].role == "trained":
                part.frozen[rank] ^= {part.key(call.at, rank)}
        elif call.name == "freeze slice":
            part.frozen_slices[rank] ^= {part.key(call.at, rank)}
            part.is_mixed |= part.part.recomputed  # a plain backward that isn't over may lose its gradient
        elif call.name == "evaluate":
            batch = self.batches.of(call.of, entry.place, rank)
            value, _ = forward(part.part, part.of_rank(rank), call.drops, batch, batch.start)
            if not part.unlike:
                self._compare_told(part, [entry], torch.tensor(value))
        elif call.name == "last norm":
            self._compare_told(part, [entry], part.norm)
        elif call.name == "repair":
            self._repair(rank, entry)

    def _may_raise(self, error: Error, call: Call, rank: int) -> bool:
        """Whether a call that a rank makes by itself may raise this error."""
        if call.name == "raising" and error.type == "UserError":
            return True
        if re.match(r"weights\.\d+: expected \.grad of its slice", error.text):
            return any(part.slices_edited[rank] for part in self.parts)
        has_frozen = any(part.frozen_slices[rank] for part in self.parts)
        return has_frozen and bool(re.match(r"weights\.\d+: expected no earlier gradient", error.text))

    def _backward(self, rank: int, entry: Entry) -> None:
        """One rank's backward, through one model, or from one through the other."""
        call = entry.call
        if entry.error is not None:  # half a backward: the step must be begun anew
            for number in {call.of, 1 - call.of} if call.name in BOTH else {call.of}:
                self.parts[number].ways[rank].append("raised")
            return
        order = [call.of] if call.name not in BOTH else [1 - call.of, call.of]
        value, found = self.batches.of(order[0], entry.place, rank).start, []
        for number in order:
            part = self.parts[number]
            batch = self.batches.of(number, entry.place, rank)
            value, uses = forward(part.part, part.of_rank(rank), call.drops, batch, value)
            found.append((part, number, uses))
        touches = any(part.touches(rank, uses) for part, _, uses in found)
        is_mixed = any(part.unlike or part.is_mixed or part.is_behind(rank) for part, _, _ in found)
        slope = 2 * value * self.parts[call.of].scale * (float("nan") if call.name == "nan" else 1)
        for part, number, uses in reversed(found):
            slope, gradients = derivatives(uses, slope)
            if call.name == "by inputs" and part.key(call.at, rank) not in part.frozen[rank]:
                gradients = [each for each in gradients if each[0] == call.at]
            part.add(rank, gradients, self._way(entry, number, touches))
            part.is_mixed |= is_mixed

    def _way(self, entry: Entry, number: int, touches: bool) -> str:
        name, own = entry.call.name, number == entry.call.of
        if "no_sync" in name or (not own and name not in ("plain through", "nested")):
            return "local"
        if name in ("plain", "plain with graph", "plain through"):
            return "plain" if touches else "local"
        return "own"

    def _write(self, rank: int, entry: Entry) -> None:
        """A weight that all ranks which share it write alike is written once; else they differ until it is repaired."""
        part, call, row = self.parts[entry.call.of], entry.call, self.program.rows[entry.place]
        part.written[rank].append((call.at, call.amount))
        key = part.key(call.at, rank)
        sharers = part.sharers(key)
        if any(row[each] != call for each in sharers):
            part.unlike.add(key)
        elif rank == sharers[0]:
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
        meetings = {rank: meeting for rank, entry in here.items() if (meeting := self._meeting(entry, rank))}
        signatures = {(meeting, _detail(here[rank], meeting)) for rank, meeting in meetings.items()}
        raised = [rank for rank, entry in here.items() if entry.error is not None]
        quiet = [rank for rank, entry in here.items() if CALLS[entry.call.name].quiet and rank not in raised]
        looks = [rank for rank in quiet if here[rank].call.name == "norm"]
        if self._lose_late(here, raised) or self._half_reload(here, meetings, raised):
            return
        closing = {entry.place >= len(self.program.rows) for entry in here.values()}
        if len(closing) > 1 and {entry.call.name for entry in here.values()} == {"together"}:
            self.is_over = True  # a rank is at its last calls after an error of its own, and others' calls are alike
            return
        if quiet and (raised or len(signatures) > 1):
            self._pass(quiet[0])  # nothing had changed here, so nobody was asked
            call = here[quiet[0]].call
            self._note_edited_slice(quiet[0], call)
            if call.name in (*EDITS, "torch's clip"):
                self.parts[call.of].edit_alone(quiet[0], call)
            return
        if looks and not all(fresh := self.parts[here[0].call.of].fresh) and any(fresh):
            self.is_over = True  # who has nothing new may know the norm, and asks when others have gone on
            return
        if 0 < len(looks) < len(quiet):
            self._pass(looks[0])  # norms are taken once, and then known to what clips by them
            return
        if self._give_up(here, raised):
            return
        if len(signatures) == 1 and meetings[0].name in (BACKWARD, WITHIN):
            self._run_backwards(here)
            return
        expected = self._different_calls(meetings) if len(signatures) > 1 else self._expected(here)
        for rank in here:
            self._pass(rank)
        if not raised:
            if expected.must:
                raise Failure("not refused", f"{_told(here)}: expected an error like {expected.must}")
            self._together(here)
        else:
            self._check_refusal(here, raised, expected)
            self.refused += 1

    def _note_edited_slice(self, rank: int, call: Call) -> None:
        """Note whether a slice's ``.grad`` was assigned, or set to None: not every backward may add to it then."""
        if call.name in ("copy", "grad = None"):
            self.parts[call.of].slices_edited[rank] = edits_slices(self.program)

    def _half_reload(self, here: dict[int, Entry], meetings: dict[int, Meeting], raised: list[int]) -> bool:
        """Whether some ranks have kept a state dict where others go on to load theirs again."""
        keep = [rank for rank, entry in here.items() if entry.call.name == "keep state"]
        names = {entry.call.name for entry in here.values()}
        if names != {"keep state", "reload"} or len({*meetings.values()}) > 1 or not {*keep}.isdisjoint(raised):
            return False
        for rank in here:
            if rank in keep:
                self._pass(rank)
            else:
                self.met[rank] += 1
        return True

    def _give_up(self, here: dict[int, Entry], raised: list[int]) -> bool:
        """Whether ranks have waited in vain for others to construct an optimizer over two levels of ranks."""
        alone = [rank for rank in raised if re.search("waited .* in vain for rank", str(here[rank].error))]
        alone = [rank for rank in alone if here[rank].call.name in ("construct", "train anew")]
        for rank in alone:
            self._pass(rank)
        self.is_over = bool(alone) and len(alone) < len(raised)
        return any(self.parts[here[rank].call.of].part.levels != "none" for rank in alone)

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

    def _lose_late(self, here: dict[int, Entry], raised: list[int]) -> bool:
        """Whether ranks have fewer gradients than others, and lose what they have by norms of too few."""
        part = self.parts[here[0].call.of]
        late = [rank for rank in raised if re.match(LATE, here[rank].error.text)]
        kept = [rank for rank in raised if part.slices_edited[rank] and re.match(KEPT, here[rank].error.text)]
        foreseen = not part.part.recomputed  # else a gradient may wait for the next call, as in a backward that goes on
        alike = part.aligned and not any(part.local) and not any(part.dropped_apart()) and foreseen
        if not kept and (alike or not late):
            return False
        part.finish()
        for rank in here:
            self._pass(rank)
            part.ways[rank] += ["raised"] * (rank in late + kept)
        return True

    def _run_backwards(self, here: dict[int, Entry]) -> None:
        """The ranks have agreed on the optimizer whose backwards they begin."""
        for rank, entry in here.items():
            if self._meetings(entry.call)[self.met[rank] + 1 :] and entry.call.name != "closure":
                self.met[rank] += 1
            else:
                self._alone(rank)

    def _different_calls(self, meetings: dict[int, Meeting]) -> Expectation:
        """The ranks have come to different calls: each is told so, with what another was called for."""
        told = [re.escape(name) for name in dict.fromkeys(meeting.name for meeting in meetings.values())]
        return Expectation((rf"rank \d+ to .*(?:{'|'.join(told)})", rf"rank \d+ could not (?:{'|'.join(told)})"))

    def _expected(self, here: dict[int, Entry]) -> Expectation:
        """What all ranks, who came for the same call, have to do."""
        part, name = self.parts[here[0].call.of], here[0].call.name
        must, may = [], False
        if any(entry.call.name == "load raising" for entry in here.values()):
            must.append("the user's own")
        if any("raised" in ways for ways in part.ways):
            may = True
        if name in ("construct", "train anew"):  # on a device collectives have one order
            # A plain backward with others nested in it ends at the next call: it has begun the reductions whose
            # gradients have all come on this rank.
            # And ranks that share no expert begin its reductions by themselves.
            begun_apart = any(
                ways != each.ways[0] or ((each.part.recomputed or each.has_experts) and "plain" in ways)
                for each in self.parts
                for ways in each.ways
            )
            may = self.program.carrier == "nccl" and begun_apart
            apart = len({entry.call.name for entry in here.values()}) > 1  # one takes parameters that another leaves
            return Expectation(("parameters of a former optimizer",) if apart and not may else (), may)
        if name == "save":  # compares contents and writes alone
            seen = part.written_apart(seen=True)
            if seen and not part.settings_differ():
                return Expectation((_names(seen),))
            return Expectation(may=part.settings_differ() or bool(part.written_apart()))
        drops_must, drops_may = part.drops_differ()
        if name == "load":  # it clears all gradients, whichever have been cleared or edited before
            differs = drops_must or drops_may or part.edited_apart or part.edits_vary
            differs = differs or part.settings_differ() or bool(part.written_apart())
            return Expectation(tuple(must), (may or differs) and not must)
        if drops_must and name != "zero_grad":
            if CALLS[name].quiet:
                may = True
            else:
                must.append(r"p\.grad to be set to None|expected the same call")
        if part.edited_apart and name != "zero_grad" and not CALLS[name].quiet:
            must.append("same edits of p.grad")
            if drops_may:  # which is told first
                must.append(r"p\.grad to be set to None")
        may |= drops_may or part.edited_apart or part.edits_vary
        if name in ("step", "closure", "synchronize"):
            must += [rf"\b{name}\b" for name in part.settings_apart()]
            if must and name == "synchronize" and drops_may:  # which it tells, before the step tells settings
                must.append(r"p\.grad to be set to None")
            may |= bool(part.written_apart()) or (bool(written(self.program)) and len({*part.repaired}) > 1)
            if part.written_apart(seen=True):
                must.append(_names(part.written_apart(seen=True)))
                if drops_may:  # which is told first
                    must.append(r"p\.grad to be set to None")
            leaves_out = name == "synchronize" and drops_first(self.program)
            if part.part.keywords.get("error_if_nonfinite") and self._is_bad(part, but=0 if leaves_out else None):
                must.append("finite")
                if drops_may:  # which is told first
                    must.append(r"p\.grad to be set to None")
        elif part.settings_differ() or part.written_apart():
            may = name != "zero_grad"
        if name == "verify" and part.written_unlike():  # it compares values; the others compare writes
            must.append(_names(part.written_unlike()))
        return Expectation(tuple(must), may and not must)

    def _is_bad(self, part: PartReference, but: int | None) -> bool:
        """Whether the norm of what a step would use isn't finite; ``but``: a weight that is left out of it."""
        gone = part.gone()
        summed = [(key, g) for key, g in part.base.items() if key not in gone]
        summed += [each for own in (*part.own, *part.local) for each in own.items()]
        used = [gradient for (at, half), gradient in summed if half or at != but]
        return not all(bool(gradient.isfinite().all()) for gradient in used)

    def _together(self, here: dict[int, Entry]) -> None:
        entry = here[0]
        part, call = self.parts[entry.call.of], entry.call
        for rank, each in here.items():
            self._note_edited_slice(rank, each.call)
        if call.name == "zero_grad":
            part.forget()
            if any(each.held for each in here.values()):
                raise Failure("held", f"{call} at {entry.place}: {[each.held for each in here.values()]} bytes by rank")
            return
        if call.name == "load":
            part.load()
            return
        if call.name == "restore":
            self.parts[call.of] = PartReference(self.program, call.of)
            self.parts[call.of].is_one_of_several = part.is_one_of_several
            return
        if call.name == "construct":
            self.is_shared |= self.program.carrier == "nccl"
            for each in self.parts:  # on a device, one order of reductions stays shared
                each.is_one_of_several |= self.is_shared
        elif call.name == "train anew":
            self.parts[call.of] = part.anew()
            return
        elif call.name == "keep state":
            part.keep_state()
        elif call.name == "load state":
            part.load_state()
        elif call.name == "construct aside":
            if outlived := {rank: each.outlived for rank, each in here.items() if each.outlived}:
                raise Failure("left behind", f"process groups beside one that has been destroyed: {outlived}")
            return
        apart: list[set[tuple[Key, int]]] = []
        if call.name not in ("construct", "save"):
            apart = part.dropped_apart() if CALLS[call.name].quiet else []  # it may have had nothing to ask
            part.finish(with_local=CALLS[call.name].completes)
            for rank, keys in enumerate(apart):
                part.untold[rank] |= keys
        if call.name in ("step", "closure", "synchronize"):
            if call.name == "synchronize":
                part.multiply(part.base, call.amount)
                self.spoilt |= any(each.call.amount != call.amount for each in here.values())  # the user's own factors
                part.base = {key: each for key, each in part.base.items() if key[0] or not drops_first(self.program)}
            self.spoilt |= part.is_mixed or bool(part.unlike)
            part.follow()
            part.step()
            self._check_held(part, here)
        elif call.name == "zero_grad to zeros":
            part.multiply(part.base, 0.0)
            part.base = {key: torch.zeros_like(gradient) for key, gradient in part.base.items()}
        elif call.name in ("clip", "torch's clip", "package's clip"):
            norm = part.clip(call.amount)
            self._compare_told(part, () if any(apart) else here.values(), norm)  # each rank's is that of its own list
            if any(each.call.amount != call.amount for each in here.values()):  # which the next call may tell
                part.edits_vary = part.is_mixed = True
        elif call.name == "norm":
            for each in here.values():
                average = part.average((each.call.at, 0))
                self._compare_told(part, [each], torch.zeros(()) if average is None else average.double().norm())
        elif any(each.call.name in EDITS and each.call != call for each in here.values()):
            part.edit_unlike([each.call for each in here.values()])
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

    def _check_held(self, part: PartReference, here: dict[int, Entry]) -> None:
        """After a step a rank holds its own slices of gradients alone.

        A row that is summed across two inner groups is padded to a multiple of two.
        """
        if part.part.by_parameters or "cpu_offload" in part.part.keywords:
            return
        inner = part.part.levels == "inner"
        shares = {key: 2 if inner else len(part.sharers(key)) for key in part.weights}
        most = sum(BYTES * (-(-p.numel() // shares[key]) + inner) for key, p in part.weights.items())
        for rank, entry in here.items():
            if entry.call.name == "step" and entry.held > most:
                raise Failure("held", f"rank {rank}, {entry.call} at {entry.place}: {entry.held} bytes, at most {most}")

    # ---- numbers ----

    def _compare_told(self, part: PartReference, entries: Iterable[Entry], expected: Tensor | None) -> None:
        if self.spoilt or part.is_mixed or any(each.written_apart() for each in self.parts):
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
                    if not self.spoilt:
                        self._compare(part, expected, got, f"rank {rank}, model {number}, w{at}", largest(expected), 2)
            for key in part.masters if not self.spoilt else ():
                self._compare_slices(number, part, key)

    def _compare_slices(self, number: int, part: PartReference, key: Key) -> None:
        """A master and the optimizer's states of it, as each rank's slices have them."""
        master = part.masters[key]
        states = {"master": master.detach(), **part.optimizer.state.get(master, {})}
        whole = {name: value for name, value in states.items() if isinstance(value, Tensor) and name != "step"}
        sharers = [rank for rank in range(len(self.logs)) if part.key(key[0], rank) == key]
        owners = [rank for rank in sharers if (number, key[0]) in self.logs[rank].slices]
        replicas = 2 if part.part.levels == "inner" else 1
        is_owned = part.part.by_parameters and not part.part.is_cut(key[0], len(sharers) // replicas)
        expected = replicas if is_owned else len(sharers)
        if len(owners) != expected:
            raise Failure("wrong numbers", f"model {number}, w{key[0]}: expected {expected} owners, found {owners}")
        first: dict[int, dict[str, Tensor]] = {}  # by where a slice starts, that of its first owner
        for rank in owners if master.numel() else ():
            log = self.logs[rank]
            slices, start = log.slices[number, key[0]], log.starts[number, key[0]]
            for name, value in first.setdefault(start, slices).items():
                if not _same_bits(value, slices[name]):
                    raise Failure("ranks differ", f"model {number}, {name} of w{key[0]}: rank {rank} and its replica's")
            for name, value in whole.items():
                what = f"rank {rank}, model {number}, {name} of w{key[0]}"
                if name not in slices:
                    raise Failure("wrong numbers", f"{what}: expected one, found none among {sorted(slices)}")
                flat, got = _flat(value, part.part.weights[key[0]].transposed), slices[name]
                own = flat[start : start + len(got)]
                # A square of a small sum of large gradients, each rounded to 16 bits, is off by more than they are.
                size = largest(value) * (4 if name == "sum" and part.is_coarse else 1)
                self._compare(part, own, got, what, size, 2 if name == "master" else 0)
            # A fused kernel makes states in a step that it leaves out for an overflow, too.
            if slices.keys() - whole.keys() and not part.part.half:
                raise Failure(
                    "wrong numbers", f"rank {rank}, w{key[0]}: expected {sorted(whole)}, found {sorted(slices)}"
                )

    def _compare(
        self, part: PartReference, expected: Tensor, got: Tensor, what: str, size: float, roundings: float = 0
    ) -> None:
        within = tolerance(part, got.dtype, size, roundings) * self._slack
        one, other = expected.double(), got.double()
        if not torch.allclose(other, one, rtol=0, atol=within, equal_nan=True):
            raise Failure("wrong numbers", f"{what}: expected {one.tolist()}, got {other.tolist()}, to {within:.2g}")


def tolerance(part: PartReference, dtype: torch.dtype, size: float, roundings: float = 0) -> float:
    """What numbers may be off by: a share of their ``size``, and so many ``roundings`` of the numbers themselves.

    A program of 12 calls makes 2e-5 of a difference in a weight's last bit.
    """
    share, least = (0.12, 0.25) if part.is_coarse else (1e-4, 1e-5)
    return share * size + least + roundings * size * torch.finfo(dtype).eps


def _detail(entry: Entry, meeting: Meeting) -> float:
    """What ranks compare of a call beside its name."""
    call = entry.call
    details = {"get_param_grad": call.at, "read p.grad": call.at, "clip_grad_norm_": call.amount, SAVE: entry.place}
    return details.get(meeting.name, 0)


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
