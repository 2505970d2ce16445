"""``ZeroAccelerator``, held against accelerate's own DDP run: every loss, and the weights at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from accelerate.utils.deepspeed import DummyOptim
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.trainers.accelerate import ZeroAccelerator
from tests.support.cases import check_refusals
from tests.support.ranks import run_cases
from tests.support.trainers import (
    LayerDrop,
    Make,
    adamw,
    check_ends,
    gentle,
    gpt2,
    launched,
    llama,
    momentum,
    sentences,
    weights,
    when_launched,
)

STEPS = 4


@dataclass(frozen=True)
class Run:
    """One way to train.

    Attributes:
        accelerator: keywords of both accelerators.
        zero: ``zero_options``.
        model: makes it, of a rank.
        batches: of each rank.
        train: runs them all; the losses.
    """

    accelerator: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    model: Callable[[int], nn.Module] = lambda rank: gpt2()
    make: Make = momentum
    clip: float = 0.0
    clip_value: float = 0.0
    batches: int = STEPS


@dataclass
class Prepared:
    """What ``prepare`` gave."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    loader: Any
    scheduler: Any


def loading(rows: int) -> DataLoader[Any]:
    return DataLoader(sentences(rows), batch_size=2)  # type: ignore[arg-type]


def prepare(accelerator: Accelerator, run: Run) -> Prepared:
    model = run.model(accelerator.process_index)
    optimizer = run.make(model.parameters())
    loader = loading(run.batches * 2 * accelerator.num_processes)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * accelerator.num_processes, 0.5)
    torch.manual_seed(accelerator.process_index)  # for dropout
    return Prepared(accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def train(prepared: Prepared, run: Run, batches: Any = None) -> list[float]:
    """Losses of this rank."""
    accelerator, model, optimizer = prepared.accelerator, prepared.model, prepared.optimizer
    losses = []
    for batch in prepared.loader if batches is None else batches:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if run.clip:
                    losses.append(accelerator.clip_grad_norm_(model.parameters(), run.clip).item())
                if run.clip_value:
                    accelerator.clip_grad_value_(model.parameters(), run.clip_value)
            optimizer.step()
            prepared.scheduler.step()
            optimizer.zero_grad()
    return losses


Result = tuple[list[float], dict[str, Tensor]]


def result(accelerator: Accelerator, run: Run) -> Result:
    prepared = prepare(accelerator, run)
    losses = train(prepared, run)
    return losses, weights(accelerator.unwrap_model(prepared.model, keep_torch_compile=False))


UNUSED = DistributedDataParallelKwargs(find_unused_parameters=True)


def both(rank: int, world_size: int, name: str) -> tuple[Result, Result]:
    run = RUNS[name]
    options = {"cpu": True, **run.accelerator}
    with launched(rank, world_size):
        theirs = result(Accelerator(kwargs_handlers=[UNUSED], **options), run)
    with launched(rank, world_size):
        return theirs, result(ZeroAccelerator(zero_options=run.zero, **options), run)


STAGE_2 = {"partition_grad": True}
EACH = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
RUNS = {
    "stage 2": Run(zero=STAGE_2, make=adamw),
    "stage 1, clipped": Run(clip=0.3, accelerator={"gradient_accumulation_steps": 2}, model=lambda rank: llama()),
    "clipped by value": Run(zero=STAGE_2, clip_value=0.01, accelerator={"gradient_accumulation_steps": 3}),
    "accumulated, reduced each time": Run(zero=STAGE_2, accelerator={"gradient_accumulation_plugin": EACH}),
    "layer drop": Run(zero=STAGE_2, model=LayerDrop, batches=6),
    "compiled": Run(zero=STAGE_2, accelerator={"dynamo_backend": "eager"}, model=lambda rank: LayerDrop(rank, kept=1)),
    "gathered late": Run(zero={"overlap_allgather": True}, model=lambda rank: llama()),
    "autocast": Run(zero=STAGE_2, accelerator={"mixed_precision": "bf16"}, clip=0.3),
}
# Those in which it matters that ranks don't divide the parameters, and that sums round; the others run in two.
IN_THREE = ("stage 1, clipped", "layer drop", "autocast")


def check_alike(one: Result, other: Result, exact: float = 1e-6, ends: float = 1e-5) -> None:
    assert other[0] == pytest.approx(one[0], abs=exact)
    check_ends(one[1], other[1], ends)


@pytest.mark.parametrize("world_size", [2, 3])
def test_trains_as_accelerates_ddp_does(world_size: int, subtests: pytest.Subtests) -> None:
    names = [name for name in RUNS if (name in IN_THREE) == (world_size == 3)]
    for (name,), ran in run_cases(both, world_size, [(name,) for name in names], one_group=True):
        with subtests.test(name):
            for theirs, own in ran.values():
                check_alike(theirs, own, *((2e-3, 2e-2) if name == "autocast" else ()))
                assert theirs[0][0] != pytest.approx(theirs[0][-1], abs=1e-3)


# ---- other loops ----

MakeAccelerator = Callable[[], Any]


def train_alone(accelerator: Any, model: Any, optimizer: Any, loader: Any, clip: float = 0.5) -> list[float]:
    return train(Prepared(accelerator, model, optimizer, loader, Unscheduled()), Run(clip=clip))


class Unscheduled:
    def step(self) -> None:
        pass


def two_over_one_model(make: MakeAccelerator) -> Result:
    """Matrices by one, the rest by another; one loss, and one norm, for both."""
    model, accelerator = gpt2(), make()
    optimizers = [
        momentum([p for p in model.parameters() if p.ndim > 1]),
        adamw([p for p in model.parameters() if p.ndim < 2]),
    ]
    torch.manual_seed(accelerator.process_index)
    *prepared, model, loader = accelerator.prepare(*optimizers, model, loading(24))  # in an order of its own

    class Both:
        def step(self) -> None:
            for each in prepared:
                each.step()

        def zero_grad(self) -> None:
            for each in prepared:
                each.zero_grad()

    return train_alone(accelerator, model, Both(), loader, 0.3), weights(accelerator.unwrap_model(model))


def by_no_sync(make: MakeAccelerator) -> Result:
    """Forwards under ``no_sync``, and a last backward that is told to reduce, after it or within; clipping sees all."""
    model, accelerator = gpt2(), make()
    model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
    torch.manual_seed(accelerator.process_index)
    losses = []

    def run_back(first: Tensor, second: Tensor) -> None:
        losses.extend([first.item(), second.item()])
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)

    for step in range(4):
        with accelerator.no_sync(model):
            made = [model(input_ids=batch, labels=batch).loss for batch in torch.randint(31, (2, 2, 8))]
            if step % 2:
                run_back(*made)
        if step % 2 == 0:
            run_back(*made)
        losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(accelerator.unwrap_model(model))


def bare(make: MakeAccelerator) -> Result:
    """``loss.backward()``, as accelerate's own pages write it under ``accumulate``; evaluation in between."""
    model, accelerator = gpt2(), make()
    model, optimizer, loader, test = accelerator.prepare(model, adamw(model.parameters()), loading(24), loading(7))
    torch.manual_seed(accelerator.process_index)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            scored = [accelerator.gather_for_metrics(model(**batch).logits.mean((1, 2))) for batch in test]
        losses += torch.cat(scored).tolist()
        model.train()
    assert len(losses) % 7 == 0
    return losses, weights(accelerator.unwrap_model(model))


def one_accelerator(make: MakeAccelerator) -> Result:
    """A cell of a notebook that is run again; the former optimizer is kept."""
    model, accelerator, kept, losses = gpt2(), make(), [], []
    prepared: Any = model
    for new in (momentum, gentle):
        plain = accelerator.unwrap_model(prepared)
        prepared, optimizer, loader = accelerator.prepare(plain, new(plain.parameters()), loading(16))
        kept.append(optimizer)
        losses += train_alone(accelerator, prepared, optimizer, loader)
    return losses, weights(model)


def prepared_again(make: MakeAccelerator) -> Result:
    """What has been prepared goes on, with its state."""
    model, first, second = gpt2(), make(), make()
    prepared = first.prepare(model, momentum(model.parameters()), loading(16))
    losses = train_alone(first, *prepared)
    return losses + train_alone(second, *second.prepare(*prepared[:2], loading(16))), weights(model)


AGAIN = (one_accelerator, prepared_again)


def each_way(rank: int, world_size: int, train: Callable[[MakeAccelerator], Result]) -> tuple[Result, Result]:
    options: dict[str, Any] = {
        "cpu": True,
        "gradient_accumulation_steps": 2 if train in (bare, two_over_one_model) else 1,
    }
    with launched(rank, world_size):
        theirs = train(lambda: Accelerator(**options))
    with launched(rank, world_size):
        return theirs, train(lambda: ZeroAccelerator(zero_options=STAGE_2, **options))


LOOPS = {2: (bare, *AGAIN), 3: (two_over_one_model, by_no_sync)}


@pytest.mark.parametrize("world_size", LOOPS)
def test_other_loops_train_as_under_ddp(world_size: int, subtests: pytest.Subtests) -> None:
    cases = [(train,) for train in LOOPS[world_size]]
    for (train,), ran in run_cases(each_way, world_size, cases):
        with subtests.test(train.__name__):
            for theirs, own in ran.values():
                check_alike(theirs, own, ends=1e-6 if train in AGAIN else 1e-5)


# ---- 16-bit parameters ----


def in_16_bits(rank: int, world_size: int, dtype: torch.dtype) -> tuple[Result, Result]:
    """By the accelerator, and by our optimizer without accelerate."""
    run = Run(
        zero={"initial_scale": 64.0}, model=lambda rank: gpt2(embd_pdrop=0, attn_pdrop=0, resid_pdrop=0).to(dtype)
    )
    with launched(rank, world_size):
        accelerated = result(ZeroAccelerator(cpu=True, zero_options=run.zero), run)
    model, losses = run.model(rank), []
    optimizer = LowLevelZeroOptimizer(momentum(model.parameters()), model=model, **run.zero)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for at in range(STEPS):
        batch = torch.stack([each["input_ids"] for each in sentences(24)[4 * at + 2 * rank : 4 * at + 2 * rank + 2]])
        loss = model(input_ids=batch, labels=batch).loss
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float32}
    return accelerated, (losses, weights(model))


def test_16_bit_parameters_have_fp32_masters(subtests: pytest.Subtests) -> None:
    for (dtype,), ran in run_cases(in_16_bits, 2, [(torch.bfloat16,), (torch.float16,)]):
        with subtests.test(dtype=dtype):
            for one, other in ran.values():
                assert one[0] == other[0]
                check_ends(one[1], other[1], 0.0)


# ---- checkpoints ----


def go_on(rank: int, world_size: int, folder: str, way: str) -> tuple[Result, Result]:
    """A run of eight batches; and one that ends after four, which another goes on from."""
    run = Run(zero=STAGE_2, make=adamw, batches=8, accelerator={"gradient_accumulation_steps": 2})
    named = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=way == "named")
    options = {"cpu": True, "project_config": named, **run.accelerator}
    place = None if way == "named" else folder

    def ours() -> Prepared:
        return prepare(ZeroAccelerator(zero_options=run.zero, **options), run)

    with launched(rank, world_size):
        whole = ours()
        batches = list(whole.loader)
        torch.manual_seed(rank)
        train(whole, run, batches[:4])
        losses = train(whole, run, batches[4:])
        ends = weights(whole.model)
    with launched(rank, world_size):
        first = prepare(Accelerator(**options), run) if way == "theirs" else ours()
        train(first, run, batches[:2])
        first.accelerator.save_state(place)
        train(first, run, batches[2:4])
        notes = Path(folder, "optimizer_0", "notes.txt")
        if way == "own" and rank == 0:
            notes.write_text("of its user")
            Path(folder, "optimizer_0", "__9_0.distcp").write_text("of a run with more ranks")
        first.accelerator.save_state(place)  # over the former one, or beside it
        if way == "own":
            assert {file.name for file in notes.parent.iterdir()} == {
                *(".metadata", "notes.txt"),
                *(f"__{rank}_0.distcp" for rank in range(world_size)),
            }
        first.accelerator.save_model(first.model, f"{folder}/model")
        first.accelerator.wait_for_everyone()
    with launched(rank, world_size):
        second = ours()
        with torch.no_grad():
            second.model.transformer.h[0].ln_1.bias.add_(1.0)
        torch.manual_seed(9)
        second.accelerator.load_state(place)
        assert second.scheduler.get_last_lr() == [0.01 * 0.5]
        saved = load_file(f"{folder}/model/model.safetensors")
        assert all(torch.equal(p, saved[name.removeprefix("module.")]) for name, p in weights(second.model).items())
        own = train(second, run, batches[4:])
        second.accelerator.save_state(place)
        assert not Path(folder, "optimizer.bin").exists()  # which accelerate would load
        return (losses, ends), (own, weights(second.model))


@pytest.mark.parametrize("world_size", [2, 3])
def test_goes_on_from_a_saved_state(world_size: int, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Bit for bit, from its own; from that of a DDP run, too."""
    ways = ("own", "named") if world_size == 2 else ("own", "theirs")
    cases = [(str(tmp_path / way), way) for way in ways]
    for (_, way), ran in run_cases(go_on, world_size, cases):
        with subtests.test(way):
            exact = 1e-6 if way == "theirs" else 0
            for (losses, ends), (own_losses, own_ends) in ran.values():
                assert own_losses == pytest.approx(losses, abs=exact, rel=0)
                check_ends(ends, own_ends, 10 * exact)


def compiled_and_not(rank: int, world_size: int, folder: str) -> None:
    """A compiled model's state is a plain one's, in the same files, by accelerate and by ours."""
    run = Run(make=adamw, model=lambda rank: LayerDrop(rank, kept=1))
    ways = [(Accelerator, "eager"), (ZeroAccelerator, "no"), (ZeroAccelerator, "eager"), (ZeroAccelerator, "no")]
    for number, (cls, backend) in enumerate(ways):
        with launched(rank, world_size):
            prepared = prepare(cls(cpu=True, dynamo_backend=backend), run)
            if number:
                prepared.accelerator.load_state(f"{folder}/{number - 1}")
                assert set(prepared.optimizer.optimizer.parameter_names().values()) == set(weights(run.model(rank)))
            train(prepared, run)
            prepared.accelerator.save_state(f"{folder}/{number}")
            prepared.accelerator.wait_for_everyone()
            assert [file.name for file in Path(folder, str(number)).glob("model*")] == ["model.safetensors"]


def test_a_compiled_model_is_saved_and_named_as_it_is_plain(tmp_path: Path) -> None:
    run_cases(compiled_and_not, 2, [(str(tmp_path),)])[0][1].values()


# ---- mistakes ----


def accelerating(**options: Any) -> Callable[[], Any]:
    return lambda: ZeroAccelerator(**{"cpu": True, **options})


def preparing(make: Callable[[], tuple[Any, ...]], **options: Any) -> Callable[[], Any]:
    return lambda: ZeroAccelerator(cpu=True, **options).prepare(*make())


def a_pair(make: Callable[[Any], Any] = adamw, wrap: Callable[[Any], Any] = lambda model: model) -> tuple[Any, Any]:
    model = wrap(gpt2())
    return model, make(model.parameters())


def wrapped_twice() -> tuple[Any, Any]:
    model, optimizer = a_pair()
    return model, LowLevelZeroOptimizer(optimizer, model=model)


def several_in_fp16() -> None:
    """Neither of them is sharded."""
    model = gpt2().half()
    optimizers = [adamw(model.transformer.h.parameters()), adamw(model.transformer.ln_f.parameters())]
    try:
        ZeroAccelerator(cpu=True).prepare(model, *optimizers)
    finally:
        assert set(model.parameters()).issuperset(p for each in optimizers for p in each.param_groups[0]["params"])


def another_in_fp16() -> None:
    """The first one trains on, and a second one over its parameters may take its place."""
    accelerator, model = ZeroAccelerator(cpu=True), gpt2().half()
    model, first = accelerator.prepare(model, adamw(model.transformer.h.parameters()))
    try:
        accelerator.prepare(adamw(model.transformer.ln_f.parameters()))
    finally:
        first.optimizer.verify()
        accelerator.prepare(adamw(model.parameters()))
        assert first.optimizer.is_retired


def without_an_optimizer() -> None:
    accelerator = ZeroAccelerator(cpu=True)
    model = accelerator.prepare(gpt2())
    accelerator.backward(model(**{key: row[None] for key, row in sentences(1)[0].items()}).loss)


def uneven() -> None:
    accelerator = ZeroAccelerator(cpu=True)
    with accelerator.join_uneven_inputs([accelerator.prepare(*a_pair())[0]]):
        pass


COMPRESSED = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
MISTAKES: dict[str, tuple[Any, ...]] = {
    "fp16": (accelerating(mixed_precision="fp16"), "ValueError: ", "expected 'no' or 'bf16', got 'fp16'"),
    "option": (preparing(a_pair, zero_options={"stage": 3}), "ValueError: ", "stage: expected 1 or 2, got 3"),
    "FSDP": (
        lambda: ZeroAccelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()),
        "ValueError: ",
        "got ACCELERATE_USE_FSDP: leave the plugin out",
    ),
    "comm hook": (accelerating(kwargs_handlers=[COMPRESSED]), "ValueError: ", "communication_dtype=torch.bfloat16"),
    "wrapped twice": (preparing(wrapped_twice), "TypeError: ", "hand over the one that it wraps"),
    "in DDP": (
        preparing(lambda: a_pair(wrap=DistributedDataParallel)),
        "TypeError: ",
        "expected the bare module, got DistributedDataParallel",
    ),
    "dummy": (preparing(lambda: a_pair(lambda params: DummyOptim([]))), "TypeError: ", "got DummyOptim"),
    "no optimizer": (without_an_optimizer, "RuntimeError: ", "expected prepare(model, optimizer), got a model alone"),
    "another model": (preparing(lambda: (gpt2(), a_pair()[1])), "ValueError: ", "one that holds none of them"),
    "several in fp16": (several_in_fp16, "ValueError: ", "expected one optimizer where parameters are fp16"),
    "another in fp16": (another_in_fp16, "ValueError: ", "expected one optimizer where parameters are fp16"),
    "unseen": (
        accelerating(cpu=False),
        "RuntimeError: ",
        "the 2 processes that were launched, got an Accelerator of 1: start it with torchrun or accelerate launch",
    ),
    "uneven": (uneven, "NotImplementedError: join_uneven_inputs"),
}


def test_mistakes_are_told(subtests: pytest.Subtests) -> None:
    check_refusals(subtests, 2, {name: (when_launched(call), *told) for name, (call, *told) in MISTAKES.items()})
