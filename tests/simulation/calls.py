"""The public calls that programs make: which of them ranks make together, and under which name they agree on them."""

from __future__ import annotations

from typing import NamedTuple

from tests.simulation.program import Call, Program, Row


class Kind(NamedTuple):
    """One public call.

    Attributes:
        agreed: the name under which the ranks agree on it; None: a rank makes it by itself.
        quiet: it communicates only if something has changed since the last one.
        completes: it reduces what still waits in ``p.grad``.
    """

    agreed: str | None = None
    quiet: bool = False
    completes: bool = True


BACKWARDS = (
    *("backward", "by gradient", "by inputs", "plain", "plain with graph", "no_sync", "plain in no_sync"),
    *("pass", "nan", "raising"),
)
BOTH = ("through", "plain through", "nested")  # backwards through the models of both parts

# Begun by the optimizer.
OF_ONE_OPTIMIZER = ("backward", "by gradient", "by inputs", "pass", "nan", "raising", "through", "nested", "closure")

WITH_LOSS = (*BACKWARDS, *BOTH, "closure", "evaluate", "construct", "construct aside")

SAVE = "save a checkpoint to"

SLICE_EDITS = ("scale", "scale twice", "add", "copy")  # of one weight's p.grad, on each rank's slice
EDITS = (*SLICE_EDITS, "fill", "clip value")
BY_NUMBERS = ("scale", "scale twice", "add", "fill", "clip value")  # whose numbers the ranks compare

SETTINGS = {"learning rate": "lr", "weight decay": "weight_decay"}  # of all param groups, which calls multiply

CALLS: dict[str, Kind] = {
    **dict.fromkeys((*BACKWARDS, *BOTH), Kind()),
    "step": Kind("step"),
    "closure": Kind("step"),
    "zero_grad": Kind("zero_grad"),
    "zero_grad to zeros": Kind("zero_grad(set_to_none=False)"),
    "clip": Kind("clip_grad_norm_"),
    "package's clip": Kind("lowlevel_zero.clip_grad_norm_"),
    "torch's clip": Kind("take norms of p.grad", quiet=True),
    "norm": Kind("take norms of p.grad", quiet=True),
    **dict.fromkeys(SLICE_EDITS, Kind("edit p.grad", quiet=True)),
    "fill": Kind("read p.grad"),
    "clip value": Kind("lowlevel_zero.clip_grad_value_"),
    "evaluate": Kind(),
    "step in no_sync": Kind(),
    "clone": Kind("read p.grad"),
    "gradient": Kind("get_param_grad"),
    "verify": Kind("verify", completes=False),
    "sleep": Kind("offload_states", completes=False),
    "wake": Kind(),
    "reload": Kind("state_dict", completes=False),
    "keep state": Kind("state_dict", completes=False),
    "load state": Kind("load_state_dict", completes=False),
    "save": Kind(SAVE, completes=False),
    "load": Kind("load the checkpoint"),
    "load raising": Kind("load the checkpoint"),
    "add group": Kind("add_param_group", completes=False),
    "synchronize": Kind("synchronize"),
    "construct": Kind("construct its LowLevelZeroOptimizer"),
    "construct aside": Kind("construct its LowLevelZeroOptimizer"),
    "train anew": Kind("construct its LowLevelZeroOptimizer"),
    "restore": Kind("load the checkpoint"),
    "together": Kind("look at gradients"),
    "model.zero_grad": Kind(),
    "grad = None": Kind(),
    **dict.fromkeys(SETTINGS, Kind()),
    "write weight": Kind(),
    "freeze": Kind(),
    "freeze slice": Kind(),
    "last norm": Kind(),
    "repair": Kind(),
}

# What one rank alone may be refused, or keep it from, where backwards touch other layers on each rank.
ONE_IS_REFUSED = ("torch's clip", "norm", "freeze slice", "copy", "grad = None")

# After the rows, and after an error, every rank begins anew: it clears gradients, meets the others in a call that
# programs don't make elsewhere, makes settings and weights alike where they may have come to differ, and trains on.
# (An error ends each rank's rows where it stands, and one may have had nothing to do in a row where another was
# refused.) Where an operation raises, it loads the checkpoint that it has saved before the first row.
REPAIRED = 0.25  # what written weights become


def closing(program: Program, refused: bool) -> list[Call]:
    """What every rank calls behind its rows, and after it has been ``refused`` a call."""
    parts = range(len(program.parts))
    begin = [Call(name, of) for name in ("zero_grad", "together") for of in parts]
    train = [Call(name, of) for of in parts for name in ("backward", "step", "zero_grad")]
    anew = [*(Call("train anew", of) for of in parts), *train] * program.anew
    last = [*anew, *[Call("construct aside")] * program.aside]
    if program.raises:
        return [*(Call(name, of) for name in ("zero_grad", "restore") for of in parts), *train, *train]
    names = {call.name for row in program.rows for call in row if call is not None}
    alike = names.isdisjoint(ONE_IS_REFUSED) and all(map(is_alike, program.rows))
    if program.fault is None and not refused and alike:
        return begin + train + last
    return [*begin, Call("repair", amount=REPAIRED), *train, *train, *last]


def all_calls(program: Program, rank: int, refused: bool = False) -> list[Call | None]:
    """A rank's rows, and then the closing."""
    return [*program.of_rank(rank), *closing(program, refused)]


def is_alike(row: Row) -> bool:
    """Whether all ranks make the same call, up to the layers that a backward leaves out."""
    first = row[0]
    if first is None:
        return all(call is None for call in row)
    return all(call is not None and _key(call) == _key(first) for call in row)


def _key(call: Call) -> tuple[object, ...]:
    return call.name, call.of, call.at, call.amount


def drops_first(program: Program) -> bool:
    """Whether a ``synchronize`` drops the gradient of the first weight, by its slice, beside multiplying all."""
    return program.schedule % 3 == 2


def edits_slices(program: Program) -> bool:
    """Whether gradients are multiplied, assigned and dropped as those of slices in ``param_groups``."""
    return program.schedule % 5 == 4


def assigns_weights(program: Program) -> bool:
    """Whether weights are written by an assignment to ``p.data``, of which one or several are seen alike."""
    return program.schedule % 11 == 10


def watches_steps(program: Program, rank: int) -> bool:
    """Whether a rank has a hook on the steps of its wrapped optimizers, which keeps these from being taken in parts."""
    return program.schedule % 7 == 6 and rank == 0


def written(program: Program) -> list[tuple[int, int]]:
    """The weights that a rank writes, by part and number."""
    calls = [call for row in program.rows for call in row if call is not None and call.name == "write weight"]
    return sorted({(call.of, call.at) for call in calls})
