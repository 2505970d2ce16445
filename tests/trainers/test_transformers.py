"""``ZeroTrainer``, held against transformers' own DDP run: every loss and norm, and the weights at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.trainers.transformers import ZeroTrainer, ZeroTrainerMixin
from tests.support.cases import check_refusals
from tests.support.checkpoints import differences
from tests.support.patching import patch_rank
from tests.support.ranks import run_cases, run_ranks
from tests.support.trainers import (
    LayerDrop,
    adamw,
    check_ends,
    forget,
    gentle,
    gpt2,
    launched,
    llama,
    momentum,
    sentences,
    weights,
    when_launched,
)

STEPS = 3


class Recorder(Trainer):  # type: ignore[misc]  # as in the package
    """Keeps the losses, which ``Trainer`` rounds where it logs them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[float] = []
        super().__init__(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


class Ours(Recorder, ZeroTrainer):
    pass


class ShortOfMemory(Recorder):
    """Runs out of memory in the midst of a backward, unless batches are small."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._train_batch_size < 3:
            return super().training_step(*args, **kwargs)
        hook = self.model.transformer.h[0].ln_2.bias.register_hook(out_of_memory)
        try:
            return super().training_step(*args, **kwargs)
        finally:
            hook.remove()


def out_of_memory(_: Tensor) -> None:
    raise RuntimeError("CUDA out of memory.")


class OursShortOfMemory(ShortOfMemory, ZeroTrainer):
    pass


class TheirsFromSequences(Recorder, Seq2SeqTrainer):  # type: ignore[misc]
    pass


class OursFromSequences(Recorder, ZeroTrainerMixin, Seq2SeqTrainer):  # type: ignore[misc]
    pass


MakeTrainer = Callable[[], Any]


def once(make: MakeTrainer) -> None:
    make().train()


def two_trainers(make: MakeTrainer) -> None:
    """Both are kept, and the first has been trained twice, with an evaluation in between."""
    first, second = make(), make()
    first.train()
    assert first.evaluate()["eval_loss"] > 0
    first.train()
    second.train()


def optimizers_of_ones_own(make: MakeTrainer) -> None:
    for new in (momentum, gentle):
        trainer = make()
        optimizer = new(trainer.model.parameters())
        trainer.optimizer, trainer.lr_scheduler = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        trainer.train()


@dataclass(frozen=True)
class Run:
    """One way to train.

    Attributes:
        args: ``TrainingArguments``.
        zero: ``zero_options``.
        model: makes it, of a rank.
        keywords: of both trainers, made from the model.
        trainers: theirs and ours.
        train: makes and trains trainers of one model, which are kept.
    """

    args: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    model: Callable[[int], nn.Module] = lambda rank: gpt2()
    keywords: Callable[[nn.Module], dict[str, Any]] = lambda model: {}
    trainers: tuple[type[Trainer], type[Trainer]] = (Recorder, Ours)
    train: Callable[[MakeTrainer], None] = once


def trainer_of(which: int, run: Run, rank: int, folder: str, model: nn.Module | None = None) -> Any:
    model = run.model(rank) if model is None else model
    own = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 0.01, "logging_steps": 1}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "log_level": "error", "save_strategy": "no"}
    cls = Seq2SeqTrainingArguments if issubclass(run.trainers[which], Seq2SeqTrainer) else TrainingArguments
    arguments = cls(output_dir=folder, **{**own, **quiet, **run.args})
    zero = {"zero_options": run.zero} if which else {}
    data = {"train_dataset": sentences(36), "eval_dataset": sentences(7)}
    return run.trainers[which](model=model, args=arguments, **data, **zero, **run.keywords(model))


Result = tuple[list[float], list[dict[str, float]], dict[str, Tensor]]


def result(*trainers: Any) -> Result:
    """Losses, what was logged, and the weights."""
    timed = ("runtime", "per_second", "flos")
    history = [each for trainer in trainers for each in trainer.state.log_history]
    logs = [{k: v for k, v in each.items() if not any(t in k for t in timed)} for each in history]
    return [loss for trainer in trainers for loss in trainer.losses], logs, weights(trainers[0].model)


def both(rank: int, world_size: int, name: str, folder: str) -> list[Result]:
    run, results = RUNS[name], []
    for which in range(2):
        with launched(rank, world_size):
            model, made = run.model(rank), []

            def make(which: int = which, model: nn.Module = model, made: list[Any] = made) -> Any:
                made.append(trainer_of(which, run, rank, folder, model))
                return made[-1]

            run.train(make)
            results.append(result(*made))
            del made, make  # which an import that fails within, and is remembered with its frames, would keep
    return results


def by_momentum(model: nn.Module) -> dict[str, Any]:
    optimizer = momentum(model.parameters())
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))}


def lora(rank: int) -> nn.Module:
    """Adapters are trained, and the rest is frozen."""
    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return get_peft_model(llama(), adapters)


STAGE_2 = {"partition_grad": True}
ACCUMULATED = {"gradient_accumulation_steps": 2}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
RUNS = {
    "as it comes": Run(),
    "accumulated": Run({**ACCUMULATED, "max_grad_norm": 0.3}, STAGE_2, keywords=by_momentum),
    "tokens are counted everywhere": Run({**ACCUMULATED, "average_tokens_across_devices": True}, keywords=by_momentum),
    "reentrant": Run({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    "compiled": Run(
        {"torch_compile": True, "torch_compile_backend": "eager"}, STAGE_2, model=lambda rank: LayerDrop(rank, kept=1)
    ),
    "evaluated": Run({**EVALUATED, "eval_on_start": True}, STAGE_2),
    "schedule-free": Run({**EVALUATED, "optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}, STAGE_2),
    "memory runs out": Run(
        {"auto_find_batch_size": True, "per_device_train_batch_size": 4},
        STAGE_2,
        trainers=(ShortOfMemory, OursShortOfMemory),
    ),
    "LoRA": Run(zero=STAGE_2, model=lora),
    "sequences": Run(zero=STAGE_2, trainers=(TheirsFromSequences, OursFromSequences)),
}
AGAIN = {
    each.__name__: Run({"adam_epsilon": 1e-3}, zero, train=each)
    for each, zero in ((two_trainers, {}), (optimizers_of_ones_own, STAGE_2))
}
BF16 = {"autocast": Run({"bf16": True, **ACCUMULATED}, STAGE_2)}
RUNS |= AGAIN | BF16
# Those in which it matters that ranks don't divide the parameters, and that sums round; the others run in two.
IN_THREE = ("as it comes", "accumulated", "autocast")


def check_alike(one: Result, other: Result, exact: float = 1e-6, ends: float = 1e-5) -> None:
    (losses, logs, weights), (own_losses, own_logs, own_weights) = one, other
    assert own_losses == pytest.approx(losses, abs=exact)
    for log, own_log in zip(logs, own_logs, strict=True):
        assert own_log == pytest.approx(log, abs=10 * exact + 1e-4)
    check_ends(weights, own_weights, ends)


@pytest.mark.parametrize("world_size", [2, 3])
def test_trains_as_transformers_ddp_does(world_size: int, tmp_path: Path, subtests: pytest.Subtests) -> None:
    names = [name for name in RUNS if (name in IN_THREE) == (world_size == 3)]
    for (name, _), ran in run_cases(both, world_size, [(name, str(tmp_path)) for name in names], one_group=True):
        with subtests.test(name):
            for theirs, own in ran.values():
                check_alike(theirs, own, *((2e-3, 2e-2) if name in BF16 else (1e-6, 1e-6 if name in AGAIN else 1e-5)))
                assert len(theirs[0]) >= STEPS


def compiled_before(rank: int, world_size: int, folder: str) -> None:
    """By an evaluation, and by training; of fp16, whose loss is scaled where the optimizer is known."""
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    run = Run(compiled, {**STAGE_2, "initial_scale": 64.0}, lambda rank: LayerDrop(rank, kept=1).half())
    with launched(rank, world_size):
        trainer = trainer_of(1, run, rank, folder)
        trainer.evaluate()
        for _ in range(2):
            trainer.train()
            trainer.optimizer.optimizer.verify()
            assert trainer.model_wrapped is not trainer.model


def test_a_model_that_is_compiled_already_has_its_optimizer_sharded(tmp_path: Path) -> None:
    run_ranks(compiled_before, 2, str(tmp_path))


# ---- checkpoints ----


def go_on(rank: int, world_size: int, folder: str, first: int, dtype: torch.dtype, sharded: bool) -> list[Result]:
    """A run of four steps that saves, and one that goes on from the second."""
    how = {"sharded_checkpoint": True} if sharded else {}
    saves = {**ACCUMULATED, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run = Run(saves, STAGE_2, lambda rank: gpt2().to(dtype), keywords=lambda model: how)
    results = []
    for which, start in ((first, None), (1, f"{folder}/checkpoint-2")):
        with launched(rank, world_size):
            trainer = trainer_of(which, run, rank, folder)
            trainer.train(resume_from_checkpoint=start)
            results.append(result(trainer))
            torch.distributed.barrier()
    if sharded:
        assert not Path(folder, "checkpoint-4", "optimizer.pt").exists()
        return results
    with launched(rank, world_size):
        plain = trainer_of(0, run, rank, folder).create_optimizer()
        plain.load_state_dict(torch.load(f"{folder}/checkpoint-4/optimizer.pt"))
        assert plain.state
        assert all(state["exp_avg"].shape == p.shape for p, state in plain.state.items())
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_goes_on_from_a_checkpoint(world_size: int, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Bit for bit, from its own; from DDP's, too, whose optimizer loads what was saved."""
    of_two = [(1, torch.float32, False), (1, torch.bfloat16, True)]
    of_three = [(1, torch.bfloat16, False), (0, torch.float32, False)]
    ways = of_two if world_size == 2 else of_three
    cases = [(str(tmp_path / f"{at}"), *way) for at, way in enumerate(ways)]
    for (_, first, dtype, sharded), ran in run_cases(go_on, world_size, cases):
        with subtests.test(first=first, dtype=dtype, sharded=sharded):
            for (losses, logs, ends), (own_losses, own_logs, own_ends) in ran.values():
                exact = 0 if first else 1e-6
                assert own_losses == pytest.approx(losses[4:], abs=exact, rel=0)
                assert own_logs[2]["grad_norm"] == pytest.approx(logs[2]["grad_norm"], abs=exact, rel=0)
                check_ends(ends, own_ends, 10 * exact)


def after_other_form(rank: int, world_size: int, folder: str, first: bool) -> tuple[Any, Any]:
    """The states of a run that saves where an earlier one had saved in another form, and what is loaded of them."""

    def train(sharded: bool, rate: float, callbacks: Any = (), resume: str | None = None) -> Any:
        args = {"learning_rate": rate, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
        run = Run(keywords=lambda _: {"sharded_checkpoint": sharded, "callbacks": list(callbacks)}, args=args)
        with launched(rank, world_size):
            trainer = trainer_of(1, run, rank, folder)
            trainer.train(resume_from_checkpoint=resume)
            return trainer.optimizer.optimizer.state_dict()["state"]

    class Loaded(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            loaded.append(optimizer.optimizer.state_dict()["state"])

    loaded: list[Any] = []
    train(first, 0.5)
    saved = train(not first, 0.01)
    forms = {"optimizer_0/.metadata": not first, "optimizer.pt": first}
    assert {name: Path(folder, "checkpoint-2", name).exists() for name in forms} == forms
    train(not first, 0.01, [Loaded()], f"{folder}/checkpoint-2")
    return saved, loaded[0]


def test_what_an_earlier_run_has_saved_in_another_form_is_not_loaded(tmp_path: Path) -> None:
    for _, ran in run_cases(after_other_form, 2, [(str(tmp_path / f"{first}"), first) for first in (True, False)]):
        for saved, loaded in ran.values():
            assert not differences(saved, loaded)


def saved_on_each_node(rank: int, world_size: int, folder: str) -> None:
    """Each rank is the first of a node with a disk of its own."""
    own, run = (
        f"{folder}/{rank}",
        Run({"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_on_each_node": True}),
    )
    with launched(rank, world_size):
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        trainer = trainer_of(1, run, rank, own)
        trainer.train()
        saved = torch.load(f"{own}/checkpoint-1/optimizer.pt", weights_only=True)
        assert saved["state"]
        assert not differences(trainer.optimizer.optimizer.state_dict()["state"], saved["state"])


def test_a_checkpoint_on_each_node_is_whole(tmp_path: Path) -> None:
    run_cases(saved_on_each_node, 2, [(str(tmp_path),)])[0][1].values()


def crash_in_other_form(rank: int, world_size: int, folder: str) -> None:
    """Nothing loads, then, where a whole state was to be written over slices."""
    run = Run({"max_steps": 1, "save_strategy": "steps", "save_steps": 1})
    sharded = replace(run, keywords=lambda _: {"sharded_checkpoint": True})
    write = torch.save

    def crash(what: Any, place: Any) -> None:
        if str(place).endswith("optimizer.pt"):
            raise OSError("disk full")
        write(what, place)

    with launched(rank, world_size):
        trainer_of(1, sharded, rank, folder).train()
        whole = trainer_of(1, run, rank, folder)
        patch_rank(torch, "save", crash)
        with pytest.raises(OSError, match="disk full"):
            whole.train()
        with pytest.raises(FileNotFoundError, match="optimizer.pt"):
            trainer_of(1, run, rank, folder).train(resume_from_checkpoint=f"{folder}/checkpoint-1")


def test_a_crash_leaves_no_former_state_in_another_form(tmp_path: Path) -> None:
    run_ranks(crash_in_other_form, 1, str(tmp_path))


def saved(rank: int, world_size: int, folder: str) -> None:
    """The best model is loaded, saved, and what ``from_pretrained`` reads; the trainer trains again, and evaluates."""
    with launched(rank, world_size):
        steps = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1}
        trainer = trainer_of(1, Run({**steps, **best}, STAGE_2), rank, folder)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        assert after == pytest.approx(trainer.state.best_metric, abs=1e-6)
        assert after < before
        trainer.save_model(folder)
        torch.distributed.barrier()
        read = GPT2LMHeadModel.from_pretrained(folder)
        for (name, p), (own_name, own) in zip(trainer.model.named_parameters(), read.named_parameters(), strict=True):
            assert name == own_name
            assert torch.equal(p, own), name
        trainer.train()
        trainer.optimizer.optimizer.verify()
        assert trainer.evaluate()["eval_loss"] < after


def test_the_best_model_is_saved(tmp_path: Path) -> None:
    run_ranks(saved, 2, str(tmp_path))


# ---- one process, and mistakes ----


def alone(rank: int, world_size: int, folder: str) -> list[Result]:
    results = []
    for which in range(2):
        trainer = trainer_of(which, Run(ACCUMULATED, STAGE_2), rank, folder)
        trainer.train()
        results.append(result(trainer))
        forget()
    return results


def test_trains_in_one_process(tmp_path: Path) -> None:
    ((theirs, own),) = run_ranks(alone, 1, str(tmp_path), init=False)
    check_alike(theirs, own)


def several_gpus(folder: str) -> None:
    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    assert args.n_gpu == 0
    patch_rank(args, "_n_gpu", 2)
    ZeroTrainer(model=gpt2(), args=args)


def sharded_before(model: nn.Module) -> dict[str, Any]:
    return {"optimizers": (LowLevelZeroOptimizer(adamw(model.parameters()), model=model), None)}


def build(**keywords: Any) -> Callable[[str], Any]:
    return lambda folder: trainer_of(1, Run(**keywords), 0, folder)


MISTAKES: dict[str, tuple[Any, ...]] = {
    "fp16": (build(args={"fp16": True}), "ValueError: mixed_precision: expected 'no' or 'bf16', got 'fp16'"),
    "option": (
        lambda folder: build(zero={"stage": 3})(folder).train(),
        "ValueError: stage: expected 1 or 2, got 3",
    ),
    "in DDP": (build(model=lambda rank: DistributedDataParallel(gpt2())), "TypeError: ", "got DistributedDataParallel"),
    "sharded": (build(keywords=sharded_before), "TypeError: ", "hand over the one that it wraps"),
    "use_cpu": (build(args={"use_cpu": False}), "RuntimeError: ", "use_cpu=True"),
    "several GPUs": (several_gpus, "RuntimeError: expected a process for each GPU, got 2 GPUs in one process"),
}


def test_mistakes_are_told(tmp_path: Path, subtests: pytest.Subtests) -> None:
    folder = str(tmp_path)
    mistakes = {name: (when_launched(call, folder), *told) for name, (call, *told) in MISTAKES.items()}
    check_refusals(subtests, 2, mistakes)
