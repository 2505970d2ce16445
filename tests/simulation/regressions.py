"""Programs that went wrong once, as shrinking left them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.simulation.program import NOTHING, Call, Fault, Part, Program, Row, Weight

BACKWARD, STEP, ZERO = Call("backward"), Call("step"), Call("zero_grad")


def _both(*calls: Call, ranks: int = 2) -> list[Row]:
    """Rows of the same calls on all ranks."""
    return [(call,) * ranks for call in calls]


def _program(rows: Sequence[Row], *parts: Part, kind: str = "regression", **others: Any) -> Program:
    """A program of these rows and parts; ``others``: what else isn't as ``Program`` has it by itself."""
    return Program(parts=parts or (TWO_LAYERS,), rows=tuple(rows), kind=kind, **others)


TWO_LAYERS = Part((Weight(), Weight()), ((0,), (1,)), options=(("reduce_bucket_size", 1),))
ONE_BUCKET = Part((Weight(), Weight()), ((0,), (1,)), options=(("partition_grad", True),))

REGRESSIONS: dict[str, Program] = {
    "a gradient is dropped on all ranks, and another layer on one": _program(
        [*_both(BACKWARD), (BACKWARD, Call("backward", drops=1)), *_both(Call("grad = None", at=1), STEP)], ONE_BUCKET
    ),
    "a gradient is dropped while others are on their way": _program(
        [(Call("plain"), Call("plain", drops=1)), *_both(Call("grad = None", at=1), STEP)]
    ),
    "a backward is left out before gradients are dropped": _program(
        [(BACKWARD, None), *_both(BACKWARD, Call("model.zero_grad"), BACKWARD, STEP)]
    ),
    "norms are taken on one rank first": _program(
        [*_both(BACKWARD), (Call("norm"), None), *_both(Call("torch's clip"), STEP)]
    ),
    "ranks clip to different norms": _program(
        [*_both(BACKWARD), (Call("clip", amount=0.25), Call("clip", amount=2.0)), *_both(STEP)]
    ),
    "one rank alone runs a backward, and a weight is used by none": _program(
        [*_both(BACKWARD, STEP, ZERO), (None, BACKWARD), *_both(Call("synchronize"))],
        Part((Weight(), Weight(), Weight()), ((0,), (1,))),
    ),
    "ranks make different calls when the norm of the last step is to be judged": _program(
        [*_both(Call("nan"), STEP, ZERO), (Call("synchronize"), STEP), *_both(ZERO)],
        Part((Weight(), Weight()), ((0,), (1,)), options=(("overlap_allgather", True),)),
    ),
    "one of two optimizers that detect unused parameters runs a backward on one rank alone": _program(
        [
            *_both(*(Call(name, of=of, drops=1) for of in (0, 1) for name in ("backward", "step"))),
            (Call("backward", of=1), None),
            *_both(BACKWARD, STEP, Call("step", of=1)),
        ],
        TWO_LAYERS,
        TWO_LAYERS,
    ),
    "one of two optimizers runs a backward on one rank alone": _program(
        [(Call("backward", of=1), None), *_both(BACKWARD, STEP, Call("step", of=1))], TWO_LAYERS, TWO_LAYERS
    ),
    "backwards of two optimizers are nested on one rank alone": _program(
        [(Call("nested"), BACKWARD), (None, Call("backward", of=1)), *_both(STEP, Call("step", of=1))],
        TWO_LAYERS,
        TWO_LAYERS,
    ),
    "another optimizer is constructed after a backward on one rank alone": _program(
        [*_both(BACKWARD, STEP, ZERO), (BACKWARD, None), *_both(Call("construct"), STEP, ZERO)]
    ),
    "a gradient is dropped on one rank before all become zeros": _program(
        [*_both(BACKWARD), (None, Call("grad = None", at=1)), *_both(Call("zero_grad to zeros"), STEP, ZERO)]
    ),
    "a rank that has run fewer backwards clips by torch's function": _program(
        [
            *_both(BACKWARD, STEP, ZERO),
            (Call("backward", drops=2), None),
            (BACKWARD, Call("backward", drops=2)),
            *_both(Call("torch's clip"), STEP, ZERO),
        ],
        Part((Weight(), Weight(), Weight()), ((2,), (0,))),
    ),
    "a gradient of a plain backward is dropped behind a look at parameters, with two optimizers": _program(
        _both(*(Call(name, of=1) for name in ("plain", "verify", "grad = None", "backward", "step"))),
        TWO_LAYERS,
        TWO_LAYERS,
    ),
    "a rank that left a plain backward out runs one of its optimizer's, and another optimizer was there": _program(
        [
            *_both(BACKWARD, Call("construct"), STEP),
            (Call("plain", drops=NOTHING), Call("plain")),
            *_both(BACKWARD, STEP, ZERO),
        ],
        Part((Weight(), Weight()), ((1,),)),
    ),
    "a rank saves a checkpoint while another constructs an optimizer": _program(
        [(None, Call("save")), *_both(Call("construct"))]
    ),
    "a loss touches nothing on one rank": _program([(Call("plain"), Call("plain", drops=NOTHING)), *_both(STEP, ZERO)]),
    "one of four ranks writes a weight of experts, which two of them share": _program(
        [(None, None, Call("write weight", at=1), None), *_both(STEP, ranks=4)],
        Part((Weight(), Weight(expert=True)), ((0,),)),
        ranks=4,
    ),
    "a rank writes a weight before its backward, and another behind it": _program(
        [(BACKWARD, Call("write weight")), (Call("write weight"), BACKWARD), *_both(Call("torch's clip"))]
    ),
    "gradients that aren't finite are clipped, and then become zeros": _program(
        _both(Call("nan"), Call("torch's clip"), Call("zero_grad to zeros"), STEP)
    ),
    "a rank writes a weight before all load a state dict": _program(
        [(None, Call("write weight")), *_both(Call("reload"), STEP)],
        Part((Weight(dtype="float16"),), ((0,),), optimizer="adagrad"),
    ),
    "gradients that were offloaded in 16 bits are added up beside another optimizer's": _program(
        _both(*(Call(name, of=1) for name in ("backward", "plain", "torch's clip"))),
        Part((Weight(),), ((0,),)),
        Part((Weight(), Weight(dtype="bfloat16")), ((1,),), options=(("cpu_offload", True), ("partition_grad", True))),
    ),
    "a rank comes to a grid when the others have given it up, and then to the next one": _program(
        [(None, None, Call("sleep"), None), *_both(Call("construct"), ranks=4)],
        Part(levels="inner"),
        ranks=4,
        aside=True,
    ),
    "a backward fails on one rank, and the others wait for it in vain in a grid": _program(
        [*_both(BACKWARD, Call("construct"), ranks=4)],
        Part(levels="both"),
        ranks=4,
        fault=Fault(rank=3, at=7),
    ),
    "a reduction fails in the thread that finishes those of an optimizer that was dropped": _program(
        [*_both(BACKWARD, Call("construct"), STEP, ranks=3)],
        Part(
            (Weight(), Weight(), Weight()),
            ((0,), (1,), (2,)),
            options=(("partition_grad", True), ("reduce_bucket_size", 1)),
        ),
        ranks=3,
        fault=Fault(rank=2, at=62),
    ),
    "a rank loses another in a column of a grid while the rest of its row waits for it": _program(
        _both(Call("backward", of=1), ranks=4),
        Part((Weight(),), ((0,),)),
        Part((Weight(),), ((0,),), levels="inner"),
        ranks=4,
        fault=Fault(rank=2, at=105, kind="die"),
        schedule=4007817,
    ),
    "a gradient is dropped where one rank's last plain backward goes on until its next call": _program(
        [*_both(BACKWARD), (Call("plain"), None), *_both(Call("grad = None"), Call("by gradient"), STEP)],
        Part((Weight(),), ((0,),), recomputed=True),
    ),
    "a slice is frozen whose gradient comes twice in a backward, behind the start of its bucket": _program(
        _both(Call("freeze slice", at=1)), Part((Weight(), Weight()), ((1,), (1,), (0,)), recomputed=True)
    ),
    "memory runs out between the two levels of a bucket's reduction to its owner": _program(
        _both(Call("plain"), ranks=4),
        Part(
            (Weight(), Weight(), Weight(), Weight((2, 2, 2)), Weight((2, 3))),
            ((0,),),
            options=(("partition_grad", True), ("reduce_bucket_size", 1), ("split", "parameters")),
            levels="inner",
        ),
        ranks=4,
        fault=Fault(rank=0, at=42),
    ),
    "one rank asks for the memory that is held over two levels of ranks": _program(
        [(None, None, Call("evaluate"), None)],
        Part(levels="inner"),
        ranks=4,
        carrier="nccl",
    ),
    "a gradient is dropped twice, on one rank while its sum is on its way": _program(
        _both(
            *(Call(name, of=1) for name in ("backward", "backward", "grad = None")),
            *(Call(name, of=1) for name in ("plain through", "grad = None", "step")),
        ),
        Part((Weight(),), ((0,),)),
        Part((Weight(), Weight()), ((1,),), options=(("reduce_bucket_size", 4),)),
        carrier="memory",
        kind="grad = None alone",
        fault=Fault(rank=1, at=48),
        schedule=19098574,
    ),
    "zero_grad drops a gradient behind a sum, fails in it on one rank, and is called again": _program(
        [
            *_both(BACKWARD),
            (Call("by gradient"), Call("by gradient", drops=0b11)),
            (Call("raising"), None),
            (Call("backward", drops=0b11), Call("backward", drops=0b110)),
            *_both(*(Call("grad = None", at=5), BACKWARD, Call("grad = None", at=5), STEP)),
        ],
        Part(
            (
                *(Weight(role=role) for role in ("trained", "late", "frozen")),
                Weight((4,)),
                Weight((2, 2, 2)),
                Weight(),
                Weight(),
            ),
            ((2,), (6, 2, 6), (0,)),
            options=(("partition_grad", True), ("reduce_bucket_size", 10)),
            recomputed=True,
        ),
        kind="raising alone",
        fault=Fault(rank=1, at=187),
        schedule=19014056,
    ),
    "a slice's gradient is assigned, and then clipped with the others by value": _program(
        _both(BACKWARD, Call("copy"), Call("clip value"), STEP),
        schedule=4,
    ),
    "a rank has run no backward since the step before, and all clip by value": _program(
        [*_both(BACKWARD, STEP, ZERO), (None, BACKWARD), *_both(Call("clip value", amount=0.01), STEP)],
    ),
    "a rank has run no backward, after a step without zero_grad, and all clip by value": _program(
        [*_both(BACKWARD, STEP), (None, Call("plain")), *_both(Call("clip value", amount=0.01), STEP)],
    ),
    "a slice's gradient is set to None before the next backward": _program(
        _both(BACKWARD, STEP, Call("grad = None"), Call("grad = None", at=1), BACKWARD, STEP),
        schedule=4,
    ),
    "a slice's gradient is assigned before the next backward": _program(
        _both(BACKWARD, Call("copy"), BACKWARD, STEP),
        schedule=4,
    ),
    "a gradient is dropped on one rank, which then takes norms of the others'": _program(
        [
            *_both(Call("plain", of=1)),
            (Call("grad = None", of=1), None),
            *_both(Call("torch's clip", of=1), Call("zero_grad", of=1)),
        ],
        Part((Weight(),), ((0,),)),
        Part((Weight(), Weight()), ((0,),)),
    ),
    "a gradient is cleared before a slice is frozen, whose next gradient goes as it comes": _program(
        _both(BACKWARD, Call("model.zero_grad"), Call("freeze slice", at=1), Call("plain in no_sync"), STEP),
        Part((Weight(), Weight()), ((1,),)),
    ),
    "a gradient with a graph takes the sharded one's place where its slice is frozen, and is cleared": _program(
        _both(BACKWARD, Call("freeze slice"), Call("plain with graph"), Call("model.zero_grad"), STEP),
        Part((Weight(),), ((0,),)),
    ),
    "gradients that were clipped by a norm of NaN are overwritten": _program(
        _both(Call("nan"), Call("torch's clip"), BACKWARD, Call("copy"), STEP),
        Part((Weight(),), ((0,),), options=(("clip_grad_norm", 0.5),)),
    ),
    "a state dict is loaded twice": _program(
        _both(BACKWARD, STEP, Call("keep state"), Call("load state"), STEP, Call("load state"), STEP),
        Part((Weight(),), ((0,),), optimizer="adamw"),
    ),
    "a rank writes a weight when another has yet to run the backward before": _program(
        [*_both(BACKWARD), (None, Call("norm")), *_both(Call("norm"), BACKWARD, Call("write weight", at=1), STEP)],
        Part((Weight(), Weight()), ((0,), (1,)), recomputed=True),
    ),
    "a rank has an open sync of one gradient before another optimizer, and the other rank has none": _program(
        [
            *_both(BACKWARD, STEP),
            (Call("plain", drops=NOTHING), Call("plain")),
            *_both(Call("construct"), BACKWARD),
        ],
        Part((Weight(), Weight()), ((1,),), recomputed=True),
        carrier="nccl",
    ),
    "a rank's steps are watched by a hook, and its replica's are not, of 16-bit masters": _program(
        _both(*3 * (BACKWARD, STEP, ZERO), BACKWARD, ranks=4),
        Part(
            (Weight((16,), "bfloat16"), Weight((7,))),
            ((0,), (0, 1)),
            "fused adamw",
            1,
            (("clip_grad_norm", 0.5), ("master_weights", False)),
            "inner",
        ),
        ranks=4,
        schedule=6,
    ),
    "a rank's steps are watched by a hook, and its replica's are not": _program(
        _both(*3 * (BACKWARD, STEP, ZERO), BACKWARD, ranks=4),
        Part((Weight((16,)), Weight((7,))), ((0,), (0, 1)), "fused adamw", 1, (("clip_grad_norm", 0.5),), "inner"),
        ranks=4,
        schedule=6,
    ),
    "ranks drop gradients before and after a backward whose sync is put off": _program(
        [
            *_both(BACKWARD, STEP, Call("plain")),
            (BACKWARD, Call("model.zero_grad")),
            (Call("model.zero_grad"), BACKWARD),
            *_both(STEP),
        ],
        Part((Weight(), Weight()), ((0,),)),
    ),
    "ranks drop gradients behind a backward whose sync one of them has put off": _program(
        [
            *_both(BACKWARD, STEP, ZERO),
            (BACKWARD, Call("plain")),
            *_both(Call("nan"), Call("model.zero_grad"), Call("closure")),
        ],
        Part((Weight(), Weight()), ((0,),)),
        carrier="memory",
        schedule=17002717,
    ),
    "all ranks write a weight, and one of them writes it again": _program(
        [*_both(Call("write weight"), BACKWARD), (None, Call("write weight")), *_both(STEP)]
    ),
    "all ranks assign a weight, one of them twice, and verify": _program(
        [(None, Call("write weight", amount=2.0)), *_both(Call("write weight"), Call("verify"), STEP)],
        schedule=10,
    ),
    "ranks run layers again in a plain backward before another optimizer": _program(
        [(Call("plain"), Call("plain", drops=1)), *_both(Call("construct"))],
        Part((Weight(), Weight()), ((1,), (0,)), recomputed=True),
        carrier="nccl",
    ),
    "ranks scale a gradient before and after another optimizer's step": _program(
        [
            *_both(BACKWARD, Call("norm")),
            (Call("step", of=1), Call("scale")),
            (Call("scale"), Call("step", of=1)),
            *_both(STEP),
        ],
        Part((Weight(),), ((0,),)),
        Part((Weight(),), ((0,),)),
    ),
    "a rank freezes the only parameter of 16 bits, and all add another group": _program(
        [(None, Call("freeze")), *_both(Call("add group"))],
        Part((Weight(dtype="float16"), Weight(role="late")), ((0, 1),)),
    ),
    "a rank alone constructs an optimizer where the other steps, and then all construct and train": _program(
        [*_both(BACKWARD), (STEP, Call("construct"))], anew=True
    ),
    "a rank alone constructs an optimizer beside two others, and then all train both anew": _program(
        [(None, Call("construct"))], TWO_LAYERS, TWO_LAYERS, anew=True
    ),
    "a rank alone trains its model anew where three others step, and then all do": _program(
        [*_both(BACKWARD, ranks=4), (STEP, STEP, Call("train anew"), STEP)], ranks=4, anew=True
    ),
    "a rank alone trains its model anew where the other constructs an optimizer of another model": _program(
        [*_both(BACKWARD), (Call("train anew"), Call("construct"))], anew=True
    ),
    "a rank of experts alone constructs an optimizer, and then all construct and train": _program(
        [*_both(BACKWARD, ranks=4), (STEP, Call("construct"), STEP, STEP)],
        Part((Weight(), Weight(expert=True)), ((0,), (1,))),
        ranks=4,
        anew=True,
    ),
}
