"""Draws a program from a seed: what users build and call, and how one rank may come to differ from the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from random import Random
from typing import Any

from tests.simulation.calls import BY_NUMBERS, SLICE_EDITS
from tests.simulation.outcome import Fault
from tests.simulation.program import NOTHING, Call, Part, Program, Row, Weight

SHAPES = [(3,), (), (1,), (0, 3), (7,), (2, 3), (4,), (2, 2, 2), (16,)]
CARRIERS = ("messages", "memory", "nccl")
MOST_CALLS = 12
BY_PARAMETERS = 0.25  # of the programs
BY_MATRICES = 0.4  # of these
OF_FEW_KINDS = 0.5  # of the programs
FEW_KINDS = 4  # of what comes between backward and step
OF_OWN_CLASSES = 0.05  # of the programs: the first optimizer is of a class that the package doesn't know, and probes
OTHER_WAYS = 0.2  # how often a backward is that of some inputs, or leaves a graph of gradients, in such programs
BACKWARD_AGAIN = 0.3  # how often one comes behind such a call, where there are few kinds
FAULT_WITHIN = 200  # messages or hand-overs of a rank: about as many as the longest programs have
OPERATIONS = 500  # of a rank: most programs have about as many

# How often what comes between backward and step.
BETWEEN = {
    "clip": 12,
    "torch's clip": 12,
    "norm": 8,
    "scale": 5,
    "scale twice": 5,
    "add": 4,
    "copy": 3,
    "fill": 3,
    "clip value": 3,
    "clone": 3,
    "gradient": 6,
    "evaluate": 5,
    "step in no_sync": 2,
    "grad = None": 14,
    "verify": 5,
    "sleep": 6,
    "wake": 3,
    "reload": 4,
    "write weight": 8,
    "learning rate": 5,
    "weight decay": 3,
    "freeze": 6,
    "last norm": 4,
    "construct": 4,
    "model.zero_grad": 3,
    "zero_grad": 3,
    "add group": 6,
    "together": 2,
    "save": 3,
    "load": 3,
    "keep state": 5,
    "load state": 5,
    "train anew": 3,
}

# How often what one rank does alone.
APART = {
    "leave out": 30,
    "swap": 8,
    "another call": 10,
    "grad = None": 10,
    "learning rate": 6,
    "weight decay": 2,
    "write weight": 8,
    "model.zero_grad": 6,
    "raising": 10,
    "verify": 6,
    "sleep": 4,
    "wake": 2,
    "gradient": 4,
    "evaluate": 4,
    "step in no_sync": 2,
    "norm": 4,
    "reload": 3,
    "freeze": 3,
    "save": 1,
    "load raising": 2,
    "other numbers": 4,
}


# Calls that concern one weight.
OF_A_WEIGHT = (
    *(*SLICE_EDITS, "fill", "norm", "clone", "gradient", "grad = None"),
    *("write weight", "freeze", "freeze slice", "raising"),
)


def draw(seed: int, carrier: str | None = None) -> Program:
    """The program of a seed. In one of four, one rank owns a parameter whole, or as many matrices of a stack.

    Half of the programs have few kinds of calls between backward and step, more often each, and backwards among them,
    so that calls come twice and beside each other that would seldom meet in a program of all kinds (swarm testing:
    Groce et al., 2012).
    """
    few = Random(f"of {seed}: kinds")
    kinds = few.sample(sorted(BETWEEN), FEW_KINDS) if few.random() < OF_FEW_KINDS else list(BETWEEN)
    program = Drawing(Random(seed), carrier, kinds).program(seed)
    if few.random() < OF_OWN_CLASSES:
        own = replace(program.parts[0], optimizer=few.choice(["own sgd", "normalized"]))
        program = replace(program, parts=(own, *program.parts[1:]))
    if Random(f"of {seed}: split").random() >= BY_PARAMETERS:
        return program
    by = {"split": "matrices" if Random(f"of {seed}: matrices").random() < BY_MATRICES else "parameters"}
    parts = (replace(part, options=tuple(sorted({**part.keywords, **by}.items()))) for part in program.parts)
    return replace(program, parts=tuple(parts))


class Drawing:
    """Choices of one program, each with its own odds."""

    def __init__(self, random: Random, carrier: str | None, kinds: Collection[str]) -> None:
        self.random = random
        self.kinds = {name: odds for name, odds in BETWEEN.items() if name in kinds}
        self.mixes = len(kinds) < len(BETWEEN)  # backwards with what comes between these and the step
        self.carrier = carrier or self.one_of(*CARRIERS)
        self.ranks = random.choices([2, 3, 4], [65, 25, 10])[0]

    def program(self, seed: int) -> Program:
        count = 2 if self.chance(0.2) else 1
        self.parts = [self.part(alone=count == 1) for _ in range(count)]
        rows = self.rows()
        kind = "alike"
        # A simulated device lets the host wait where streams join, so ranks must not leave out backwards of experts.
        experts = any(weight.expert for part in self.parts for weight in part.weights)
        if self.chance(0.45) and not (experts and self.carrier == "nccl"):
            kind, rows = self.differing(rows)
        rows, fault = rows[:MOST_CALLS], self.fault()
        freezes = _makes(rows, "freeze") or _makes(rows, "freeze slice")
        for name, one_program in (  # whose ranks all come to it
            ("add group", fault is None or fault.kind != "raise"),  # checkpoints are of the first groups
            ("train anew", kind == "alike" and (fault is None or fault.kind == "wait") and not freezes),
        ):
            if not one_program:
                rows = [row for row in rows if not _makes([row], name)]
        aside = (fault is None or fault.kind == "wait") and self.chance(0.1)
        return Program(self.ranks, self.carrier, tuple(self.parts), tuple(rows), seed, fault, kind, aside)

    def fault(self) -> Fault | None:
        """An operation that raises, a message that waits, or a rank that dies, if the program comes to it."""
        kind = self.random.choices([None, "raise", "wait", "die"], [73, 9, 12, 6])[0]
        if kind is None:
            return None
        rank, within = self.random.randrange(self.ranks), self.random.random()
        return Fault(rank, int(OPERATIONS * within if kind == "raise" else FAULT_WITHIN * within**2), kind)

    def chance(self, odds: float) -> bool:
        return self.random.random() < odds

    def one_of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    # ---- models and options ----

    def part(self, alone: bool) -> Part:
        dtypes = self.random.choices(
            [["float32"], ["float32", "bfloat16"], ["float16", "float32"]], [66, 20, 14 * alone]
        )[0]
        experts = self.ranks in (2, 4) and self.chance(0.1)
        count = self.random.randint(2, 8 if alone else 4)
        weights = [Weight((3,), dtypes[0])] + [self.weight(dtypes, experts) for _ in range(count - 1)]
        layers = [
            tuple(self.random.choices(range(count), k=self.random.randint(1, 3)))
            for _ in range(self.random.randint(1, 4))
        ]
        return Part(
            tuple(weights),
            (*layers, (0,)) if self.chance(0.5) else tuple(layers),
            self.random.choices(["sgd", "adamw", "fused adamw", "adagrad"], [55, 20, 15, 10])[0],
            self.one_of(1, 1, 1, 2),
            tuple(sorted(self.options(dtypes).items())),
            self.one_of("both", "inner") if self.ranks == 4 and not experts and self.chance(0.3) else "none",
            self.chance(0.12),
        )

    def weight(self, dtypes: list[str], experts: bool) -> Weight:
        role = self.random.choices(["trained", "frozen", "late"], [80, 8, 12])[0]
        return Weight(
            self.one_of(*SHAPES),
            self.one_of(*dtypes),
            role,
            self.one_of(0, 0, 1),
            self.chance(0.15),
            experts and role == "trained" and self.chance(0.5),
        )

    def options(self, dtypes: list[str]) -> dict[str, Any]:
        """Of what differs from the defaults."""
        options: dict[str, Any] = {"reduce_bucket_size": self.one_of(1, 4, 10, 1000)}
        options.update(self.one_of({}, {"partition_grad": True}, {"partition_grad": True}, {}))
        if self.chance(0.2):
            options["overlap_communication"] = False
        for name, odds in (
            ("overlap_allgather", 0.25),
            ("cpu_offload", 0.12),
            ("pad_buckets_for_high_nccl_busbw", 0.05),
        ):
            if self.chance(odds):
                options[name] = True
        if self.chance(0.15):
            options["clip_grad_norm"] = self.one_of(0.5, 5.0)
        if self.chance(0.1):
            options["gradient_predivide_factor"] = 2.0
        if self.chance(0.1) and dtypes == ["float32"]:
            options["reduction"] = "sum"
        if self.chance(0.1) and "float16" not in dtypes:
            options["error_if_nonfinite"] = True
        if len(dtypes) > 1 and self.chance(0.25):
            options["master_weights"] = False
        if len(dtypes) > 1 and self.chance(0.3):
            options["communication_dtype"] = self.one_of("float32", "bfloat16")
        return options

    # ---- what all ranks call ----

    def rows(self) -> list[Row]:
        """Some steps, each of backwards, what users do with gradients, a step, and a zero_grad."""
        rows: list[Row] = []
        while len(rows) < MOST_CALLS - 1:
            rows += self.one_step()
            if self.chance(0.15):
                break
        return rows[:MOST_CALLS]

    def one_step(self) -> list[Row]:
        rows: list[Row] = []
        order = self.random.sample(range(len(self.parts)), len(self.parts))
        for of in order:
            rows += [self.backward(of) for _ in range(self.random.choices([1, 2, 3], [65, 28, 7])[0])]
            rows += [row for _ in range(self.random.choices([0, 1, 2], [45, 40, 15])[0]) for row in self.between(of)]
            while self.mixes and self.chance(BACKWARD_AGAIN):
                rows += [self.backward(of), *self.between(of)]
        for of in order:
            name = self.random.choices(["step", "closure", "synchronize", "none"], [84, 6, 6, 4])[0]
            if name != "none":
                rows.append(self.alike(Call(name, of, amount=self.one_of(0.5, 2.0))))
            rows += self.between(of) if self.chance(0.15) else []
            name = self.random.choices(["zero_grad", "model.zero_grad", "zero_grad to zeros", "none"], [74, 12, 6, 8])[
                0
            ]
            if name != "none":
                rows.append(self.alike(Call(name, of)))
        return rows

    def alike(self, call: Call) -> Row:
        return (call,) * self.ranks

    def backward(self, of: int) -> Row:
        """A backward on every rank, each with layers of its own; on the host, ranks may run it in different ways."""
        way = self.way(of)
        mixes = self.carrier != "nccl" and self.chance(0.15)
        drops = self.drops(of)
        calls: list[Call | None] = [Call(way, of, drops[rank]) for rank in range(self.ranks)]
        if mixes:
            odd = self.random.randrange(self.ranks)
            calls[odd] = None if self.chance(0.3) else Call(self.way(of), of, drops[odd])
        part = self.parts[of]
        if self.mixes and not part.recomputed and self.chance(OTHER_WAYS):
            calls = [call and self.other_way(call, self.one_of(*part.trained)) for call in calls]
        return tuple(calls)

    def other_way(self, call: Call, at: int) -> Call:
        """The same backward for the gradient of one weight, or one that leaves a graph of its gradients."""
        if call.name == "backward":
            return replace(call, name="by inputs", at=at)
        return replace(call, name="plain with graph") if call.name == "plain" else call

    def way(self, of: int) -> str:
        if len(self.parts) > 1 and self.chance(0.25):
            return str(self.random.choices(["through", "nested", "plain through"], [50, 25, 25])[0])
        if self.parts[of].half:
            names = ["backward", "by gradient", "pass", "no_sync", "nan"]
            return str(self.random.choices(names, [70, 5, 10, 10, 5])[0])
        names = ["backward", "by gradient", "plain", "pass", "no_sync", "plain in no_sync", "nan"]
        return str(self.random.choices(names, [50, 2, 25, 6, 11, 4, 2])[0])

    def drops(self, of: int) -> list[int]:
        layers = len(self.parts[of].layers)

        def one() -> int:
            return NOTHING if self.chance(0.08) else self.random.randrange(2**layers)

        how = self.random.choices(["none", "same", "each", "one"], [45, 15, 25, 15])[0]
        if how == "same":
            return [one()] * self.ranks
        if how == "each":
            return [one() for _ in range(self.ranks)]
        odd = self.random.randrange(self.ranks) if how == "one" else -1
        return [one() if rank == odd else 0 for rank in range(self.ranks)]

    def between(self, of: int) -> list[Row]:
        name = self.choice(self.kinds, of)
        if name == "clip" and self.mixes and self.chance(0.5):
            name = "package's clip"
        before = [self.alike(Call("zero_grad", of))] if name == "train anew" else []
        return [*before, self.alike(self.call(name, of))]

    def choice(self, odds: dict[str, int], of: int) -> str:
        """A name, but none of norms of ``p.grad`` where there are experts, for which they are refused."""
        experts = any(weight.expert for weight in self.parts[of].weights)
        names = [name for name in odds if not (experts and name in ("torch's clip", "norm"))]
        return self.random.choices(names, [odds[name] for name in names])[0]

    def call(self, name: str, of: int) -> Call:
        if name == "freeze" and self.mixes and self.chance(0.5):
            name = "freeze slice"
        trained = self.parts[of].trained
        at = self.random.choice(trained) if name in OF_A_WEIGHT else 0
        return Call(name, of, 0, at, self.one_of(0.5, 0.25, 2.0))

    # ---- how one rank differs ----

    def differing(self, rows: list[Row]) -> tuple[str, list[Row]]:
        """One rank does something else at one place; but all construct, before which nothing can be agreed on."""
        places = [at for at, row in enumerate(rows) if row[0] is None or row[0].name != "construct"]
        rank, at = self.random.randrange(self.ranks), self.random.choice(places)
        of = self.random.randrange(len(self.parts))
        kind = self.choice(APART, of)
        if kind == "leave out":
            return kind, self.put(rows, at, rank, None)
        if kind == "swap" and at + 1 in places:
            one, other = rows[at][rank], rows[at + 1][rank]
            return kind, self.put(self.put(rows, at, rank, other), at + 1, rank, one)
        if kind == "another call":
            call = self.call(self.one_of("step", "zero_grad", "clip", "gradient", "synchronize"), of)
            others = rows[at][rank]
            if others is not None and others.name == call.name == "synchronize":  # its factor is the user's own
                call = others
            return kind, self.put(rows, at, rank, call)
        if kind == "swap":
            return "leave out", self.put(rows, at, rank, None)
        if kind == "other numbers":
            edit = self.call(self.one_of(*BY_NUMBERS), of)
            other = replace(edit, amount=3 * edit.amount)
            return kind, [*rows[:at], tuple(other if each == rank else edit for each in range(self.ranks)), *rows[at:]]
        if kind == "load raising":
            load = [self.call(kind if each == rank else "load", of) for each in range(self.ranks)]
            return kind, [self.alike(Call("save", of)), *rows[:at], tuple(load), *rows[at:]]
        alone = tuple(self.call(kind, of) if each == rank else None for each in range(self.ranks))
        return f"{kind} alone", [*rows[:at], alone, *rows[at:]]

    def put(self, rows: list[Row], at: int, rank: int, call: Call | None) -> list[Row]:
        """The rows, with another call of one rank."""
        row = tuple(call if each == rank else old for each, old in enumerate(rows[at]))
        return [*rows[:at], row, *rows[at + 1 :]]


def _makes(rows: Iterable[Row], name: str) -> bool:
    """Whether a rank makes a call of this name."""
    return any(call is not None and call.name == name for row in rows for call in row)
