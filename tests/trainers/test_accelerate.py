"""``ZeroAccelerator``, held against accelerate's own DDP run: every loss, and the weights at the end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
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
from tests.support.ranks import run_cases, run_cases_expecting, run_ranks
from tests.support.trainers import (
    LayerDrop,
    Make,
    adamw,
    forget,
    gpt2,
    launched,
    llama,
    momentum,
    sentences,
    weights,
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


def prepare(accelerator: Accelerator, run: Run) -> Prepared:
    model = run.model(accelerator.process_index)
    optimizer = run.make(model.parameters())
    everywhere = 2 * accelerator.num_processes
    data = sentences(run.batches * everywhere)
    loader = DataLoader(data, batch_size=everywhere if accelerator.split_batches else 2)  # type: ignore[arg-type]
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
    "clipped by value": Run(zero=STAGE_2, clip_value=0.01, accelerator={"gradient_accumulation_steps": 2}),
    "accumulated, a rest": Run(accelerator={"gradient_accumulation_steps": 3}),
    "accumulated, reduced each time": Run(zero=STAGE_2, accelerator={"gradient_accumulation_plugin": EACH}),
    "layer drop": Run(zero=STAGE_2, model=LayerDrop, batches=6),
    "compiled": Run(zero=STAGE_2, accelerator={"dynamo_backend": "eager"}, model=lambda rank: LayerDrop(rank, kept=1)),
    "gathered late": Run(zero={"overlap_allgather": True}, model=lambda rank: llama()),
    "batches are split": Run(accelerator={"dataloader_config": DataLoaderConfiguration(split_batches=True)}),
}
BF16 = {
    "autocast": Run(zero=STAGE_2, accelerator={"mixed_precision": "bf16"}, clip=0.3),
}
RUNS |= BF16
# Those in which it matters that ranks don't divide the parameters, and that sums round; the others run in two.
IN_THREE = ("stage 2", "stage 1, clipped", "clipped by value", "accumulated, a rest", "layer drop", "autocast")


def check_alike(one: Result, other: Result, exact: float = 1e-6) -> None:
    (losses, ends), (own_losses, own_ends) = one, other
    assert own_losses == pytest.approx(losses, abs=exact)
    assert own_ends.keys() == ends.keys()
    for key, end in ends.items():
        torch.testing.assert_close(own_ends[key], end, atol=10 * exact, rtol=10 * exact, msg=key)


@pytest.mark.parametrize("world_size", [2, 3])
def test_trains_as_accelerates_ddp_does(world_size: int, subtests: pytest.Subtests) -> None:
    names = [name for name in RUNS if (name in IN_THREE) == (world_size == 3)]
    for (name,), ran in run_cases(both, world_size, [(name,) for name in names], one_group=True):
        with subtests.test(name):
            for theirs, own in ran.values():
                check_alike(theirs, own, 2e-3 if name in BF16 else 1e-6)
                assert theirs[0][0] != pytest.approx(theirs[0][-1], abs=1e-3)


# ---- several optimizers ----


def two_over_one_model(accelerator: Accelerator) -> Result:
    """Matrices by one, the rest by another; one loss, and one norm, for both."""
    model = gpt2()
    optimizers = [
        momentum([p for p in model.parameters() if p.ndim > 1]),
        adamw([p for p in model.parameters() if p.ndim < 2]),
    ]
    torch.manual_seed(accelerator.process_index)
    loader = DataLoader(sentences(24), batch_size=2)  # type: ignore[arg-type]
    *prepared, model, loader = accelerator.prepare(*optimizers, model, loader)  # in an order of its own
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.3).item())
            for optimizer in prepared:
                optimizer.step()
                optimizer.zero_grad()
    return losses, weights(accelerator.unwrap_model(model))


def adversaries(accelerator: Accelerator) -> Result:
    """A GAN: the discriminator's loss doesn't reach the generator, whose loss goes through both."""
    torch.manual_seed(0)
    generator, judge = (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, n)) for n in (5, 1))
    step_generator, step_judge = adamw(generator.parameters()), momentum(judge.parameters())
    generator, judge, step_generator, step_judge = accelerator.prepare(generator, judge, step_generator, step_judge)
    torch.manual_seed(accelerator.process_index)
    losses = []
    for _ in range(STEPS):
        made = generator(torch.randn(4, 5))
        step_judge.zero_grad()
        loss = judge(torch.randn(4, 5)).sigmoid().log().mean() - judge(made.detach()).sigmoid().log().mean()
        accelerator.backward(-loss)
        step_judge.step()
        step_generator.zero_grad()
        other = -judge(made).sigmoid().log().mean()
        accelerator.backward(other)
        step_generator.step()
        losses += [loss.item(), other.item()]
    named = {"generator": generator, "judge": judge}
    ends = {
        f"{name}.{key}": p for name, it in named.items() for key, p in weights(accelerator.unwrap_model(it)).items()
    }
    return losses, ends


def by_no_sync(accelerator: Accelerator) -> Result:
    """Two forwards under ``no_sync``, and the second one's backward is told to reduce."""
    model = gpt2()
    model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
    torch.manual_seed(accelerator.process_index)
    losses = []
    for _ in range(3):
        batches = [torch.randint(31, (2, 8)) for _ in range(2)]
        with accelerator.no_sync(model):
            first, second = [model(input_ids=batch, labels=batch).loss for batch in batches]
        losses += [first.item(), second.item()]
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(accelerator.unwrap_model(model))


def within_no_sync(accelerator: Accelerator) -> Result:
    """The last backward within ``no_sync`` triggers the reduction of all, and clipping sees the norm of the sum."""
    model = gpt2()
    model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
    torch.manual_seed(accelerator.process_index)
    losses = []
    for _ in range(3):
        with accelerator.no_sync(model):
            for at in range(2):
                batch = torch.randint(31, (2, 8))
                loss = model(input_ids=batch, labels=batch).loss
                with accelerator.trigger_sync_in_backward(model) if at else nullcontext():
                    accelerator.backward(loss)
        losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(accelerator.unwrap_model(model))


def bare(accelerator: Accelerator) -> Result:
    """``loss.backward()``, as accelerate's own pages write it under ``accumulate``; evaluation in between."""
    model = gpt2()
    optimizer = adamw(model.parameters())
    loaders = [DataLoader(sentences(n), batch_size=2) for n in (24, 7)]  # type: ignore[arg-type]
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, *loaders)
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


def each_way(rank: int, world_size: int, train: Callable[[Accelerator], Result]) -> tuple[Result, Result]:
    options: dict[str, Any] = {
        "cpu": True,
        "gradient_accumulation_steps": 2 if train in (two_over_one_model, bare) else 1,
    }
    with launched(rank, world_size):
        theirs = train(Accelerator(kwargs_handlers=[UNUSED] if train is adversaries else [], **options))
    with launched(rank, world_size):
        return theirs, train(ZeroAccelerator(zero_options=STAGE_2, **options))


LOOPS = {2: (adversaries, bare, within_no_sync), 3: (two_over_one_model, by_no_sync)}


@pytest.mark.parametrize("world_size", LOOPS)
def test_other_loops_train_as_under_ddp(world_size: int, subtests: pytest.Subtests) -> None:
    cases = [(train,) for train in LOOPS[world_size]]
    for (train,), ran in run_cases(each_way, world_size, cases, one_group=True):
        with subtests.test(train.__name__):
            for theirs, own in ran.values():
                check_alike(theirs, own)


# ---- 16-bit parameters ----


def by_hand(rank: int, dtype: torch.dtype) -> Result:
    """Our optimizer, without accelerate."""
    model = gpt2(embd_pdrop=0, attn_pdrop=0, resid_pdrop=0).to(dtype)
    optimizer = LowLevelZeroOptimizer(momentum(model.parameters()), model=model, initial_scale=64.0)
    torch.manual_seed(rank)
    losses = []
    for at in range(STEPS):
        batch = torch.stack([each["input_ids"] for each in sentences(24)[4 * at + 2 * rank : 4 * at + 2 * rank + 2]])
        loss = model(input_ids=batch, labels=batch).loss
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(model)


def in_16_bits(rank: int, world_size: int, dtype: torch.dtype) -> tuple[Result, Result]:
    with launched(rank, world_size):
        accelerator = ZeroAccelerator(cpu=True, zero_options={"initial_scale": 64.0})
        model = gpt2(embd_pdrop=0, attn_pdrop=0, resid_pdrop=0).to(dtype)
        loader = DataLoader(sentences(4 * STEPS), batch_size=2)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, momentum(model.parameters()), loader)
        torch.manual_seed(rank)
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float32}
        ends = weights(model)
    return by_hand(rank, dtype), (losses, ends)


def test_16_bit_parameters_have_fp32_masters(subtests: pytest.Subtests) -> None:
    for (dtype,), ran in run_cases(in_16_bits, 2, [(torch.bfloat16,), (torch.float16,)]):
        with subtests.test(dtype=dtype):
            for (losses, ends), (own_losses, own_ends) in ran.values():
                assert own_losses == losses
                assert all(torch.equal(own_ends[key], end) for key, end in ends.items())


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
                for key, end in ends.items():
                    torch.testing.assert_close(own_ends[key], end, atol=10 * exact, rtol=0, msg=key)


# ---- one process, and mistakes ----


def alone(rank: int, world_size: int) -> tuple[Result, Result]:
    run = RUNS["clipped by value"]
    theirs = result(Accelerator(cpu=True, **run.accelerator), run)
    forget()
    own = result(ZeroAccelerator(cpu=True, zero_options=run.zero, **run.accelerator), run)
    assert dist.get_world_size() == 1
    forget()
    return theirs, own


def test_trains_in_one_process() -> None:
    ((theirs, own),) = run_ranks(alone, 1, init=False)
    check_alike(theirs, own)


def misused(rank: int, world_size: int, name: str) -> None:
    with launched(rank, world_size):
        MISTAKES[name][0]()


def fsdp() -> None:
    ZeroAccelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())


def compressed() -> None:
    ddp = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    ZeroAccelerator(cpu=True, kwargs_handlers=[ddp])


def wrapped_twice() -> None:
    model = gpt2()
    ZeroAccelerator(cpu=True).prepare(model, LowLevelZeroOptimizer(adamw(model.parameters()), model=model))


def in_ddp() -> None:
    model = DistributedDataParallel(gpt2())
    ZeroAccelerator(cpu=True).prepare(model, adamw(model.parameters()))


def without_an_optimizer() -> None:
    accelerator = ZeroAccelerator(cpu=True)
    model = accelerator.prepare(gpt2())
    accelerator.backward(model(**{key: row[None] for key, row in sentences(1)[0].items()}).loss)


def with_options(options: dict[str, Any]) -> None:
    model = gpt2()
    ZeroAccelerator(cpu=True, zero_options=options).prepare(model, adamw(model.parameters()))


def of_another_model() -> None:
    ZeroAccelerator(cpu=True).prepare(gpt2(), adamw(gpt2().parameters()))


def several_in_fp16() -> None:
    model = gpt2().half()
    one, two = adamw(model.transformer.h.parameters()), adamw(model.transformer.ln_f.parameters())
    ZeroAccelerator(cpu=True).prepare(model, one, two)


def unseen() -> None:
    ZeroAccelerator()


def uneven() -> None:
    accelerator = ZeroAccelerator(cpu=True)
    model, _ = accelerator.prepare(model := gpt2(), adamw(model.parameters()))
    with accelerator.join_uneven_inputs([model]):
        pass


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "fp16": (lambda: ZeroAccelerator(cpu=True, mixed_precision="fp16"), "expected 'no' or 'bf16', got 'fp16'"),
    "option": (lambda: with_options({"phase": 2}), "unexpected keyword argument 'phase'"),
    "bad option": (lambda: with_options({"stage": 3}), "stage: expected 1 or 2, got 3"),
    "model": (lambda: with_options({"model": None}), "multiple values for keyword argument 'model'"),
    "fsdp": (fsdp, "got ACCELERATE_USE_FSDP: leave the plugin out"),
    "comm hook": (compressed, "communication_dtype=torch.bfloat16"),
    "wrapped twice": (wrapped_twice, "hand over the one that it wraps"),
    "in DDP": (in_ddp, "expected the bare module, got DistributedDataParallel"),
    "dummy": (lambda: ZeroAccelerator(cpu=True).prepare(gpt2(), DummyOptim([])), "got DummyOptim"),
    "no optimizer": (without_an_optimizer, r"expected prepare(model, optimizer), got a model alone"),
    "another model": (of_another_model, "one that holds none of them"),
    "several in fp16": (several_in_fp16, "expected one optimizer where parameters are fp16"),
    "unseen": (
        unseen,
        "the 2 processes that were launched, got an Accelerator of 1: start it with torchrun or accelerate launch",
    ),
    "uneven": (uneven, "join_uneven_inputs"),
}


def test_mistakes_are_told(subtests: pytest.Subtests) -> None:
    for (name,), ran in run_cases_expecting(misused, 2, [(name,) for name in MISTAKES]):
        with subtests.test(name):
            for raised in ran.raised():
                assert MISTAKES[name][1] in raised.message
