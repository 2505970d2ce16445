"""Loading is all or nothing on all ranks, also where code of the caller's takes part; what isn't taken is named.

What errors have left isn't saved over what is whole. What an optimizer of another class has saved is refused; another
setting is not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, save_checkpoint
from tests.support.checkpoints import check_same, logged, wait_for_pruning
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks
from tests.support.saving import (
    Keeping,
    Make,
    Pair,
    adamw,
    held,
    linear,
    load_by,
    momentum,
    names_in,
    refused,
    save_by,
    squares,
    train,
    wrapped,
)


class Counter(Keeping):
    """Extra state that changes in place, and may refuse to.

    Attributes:
        refuses: what it raises, half way, for a state of another run; None: nothing.
    """

    refuses: Exception | None = None

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.kept["seen"][:] = state["seen"]
        if self.refuses is not None and state["seen"] != [7]:
            raise self.refuses
        self.kept["table"].copy_(state["table"])


class Observed(dict[str, Any]):
    """Refuses to be updated."""

    def update(self, *_: Any, **__: Any) -> None:
        raise LookupError("rank_state says no")


EXTRA = {"step": 7, "losses": [0.5, 0.25], "tensor": torch.arange(3), "text": "ja"}


class Run:
    """A model with all that is loaded with it, and a setting that has been changed.

    Attributes:
        rank_state: a dict that loading fills.
    """

    def __init__(self, seed: int, seen: int, steps: int) -> None:
        torch.manual_seed(seed)
        layers = {"first": Counter({}), "one": nn.Linear(5, 7), "two": nn.BatchNorm1d(7), "last": Counter({})}
        self.model, self.optimizer = wrapped(nn.ModuleDict(layers), adamw, partition_grad=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.rank_state: dict[str, Any] = {"left": "over"}
        self.optimizer.param_groups[0]["weight_decay"] = 0.125 * seen
        self.model.two.running_mean.fill_(float(seen))
        for counter in (self.model.first, self.model.last):
            counter.kept.update(seen=[seen], table=torch.full((3,), float(seen)))
        for _ in range(steps):
            train(self.model, self.optimizer)
            self.scheduler.step()

    def load(self, path: Path) -> Any:
        return load_checkpoint(path, self.model, self.optimizer, scheduler=self.scheduler, rank_state=self.rank_state)

    def held(self) -> Any:
        own = self.model.first.kept, self.model.last.kept, self.scheduler.state_dict(), self.rank_state
        return held(self.model, self.optimizer), copy.deepcopy(own)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "a"

    def save(rank: int, world_size: int) -> None:
        run, own = Run(0, seen=3, steps=2), {"rank": rank}
        save_checkpoint(path, run.model, run.optimizer, scheduler=run.scheduler, rank_state=own, extra=EXTRA)

    run_ranks(save, 2)
    return path


@on_ranks(2, [(0, "first"), (1, "last"), (0, "optimizer"), (1, "scheduler"), (1, "rank_state")])
def test_what_one_rank_refuses_leaves_every_rank_as_it_was(rank: int, unlucky: int, where: str, saved: Path) -> None:
    run, error = Run(5, seen=7, steps=3), LookupError(f"{where} says no")
    run.optimizer.backward(squares(run.model))
    if where == "rank_state" and rank == unlucky:
        run.rank_state = Observed(left="over")
    before, gradients = run.held(), [p.grad for p in run.model.parameters()]

    def refuse(*_: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        if where == "optimizer" and rank == unlucky:
            run.optimizer.optim.register_load_state_dict_post_hook(refuse)
        elif where == "scheduler" and rank == unlucky:
            patch.setattr(torch.optim.lr_scheduler.StepLR, "load_state_dict", refuse)
        elif where != "rank_state" and rank == unlucky:
            getattr(run.model, where).refuses = error
        told = refused(lambda: run.load(saved))
    if rank == unlucky:
        assert told == f"LookupError: {where} says no"
    else:
        assert f"Error: rank {unlucky} could not load the checkpoint {saved}: LookupError: " in told
    assert all(p.grad is each for p, each in zip(run.model.parameters(), gradients, strict=True))
    check_same(before, run.held())
    run.optimizer.step()


@on_ranks(2)
def test_a_module_that_refuses_its_former_state_too_keeps_nothing_else_from_coming_back(rank: int, saved: Path) -> None:
    run, again = Run(5, seen=6, steps=3), Run(5, seen=6, steps=3)
    if rank == 1:
        run.model.last.refuses = LookupError("never")
    assert "never" in refused(lambda: run.load(saved))
    check_same(again.held(), run.held())


@on_ranks(2)
def test_loading_into_what_has_trained_brings_all(rank: int, saved: Path) -> None:
    expected, run = Run(0, seen=3, steps=2), Run(5, seen=7, steps=3)
    check_same(EXTRA, run.load(saved))
    assert run.rank_state == {"rank": rank}
    run.rank_state = expected.rank_state
    assert load_checkpoint(saved, run.model, run.optimizer) is not None  # without a scheduler
    check_same(expected.held(), run.held())


# What errors have left


class Failing(torch.optim.AdamW):
    """Fails in a step if it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise MemoryError("no memory")
        return super().step(closure)


@on_ranks(2, (0, 1))
def test_parameters_that_a_failed_step_has_left_are_not_saved(rank: int, steps: int, tmp_path: Path) -> None:
    """The last whole checkpoint stays, and training goes on from it, be it of after a step or before the first one."""
    (model, optimizer), folder = linear(make=Failing, steps=steps), tmp_path / str(steps)
    save_checkpoint(folder / "step-1", model, optimizer)
    optimizer.backward(squares(model))
    optimizer.optim.fails = rank == 1
    with suppress(Exception):
        optimizer.step()
    optimizer.optim.fails = done = False
    while not done:
        with suppress(Exception):
            optimizer.zero_grad()
            done = True

    def save() -> None:
        save_checkpoint(folder / "step-2", model, optimizer, keep=1)
        wait_for_pruning()
        assert names_in(folder) == {"step-2"}

    for told in (refused(save), refused(Sharded(optimizer).state_dict)):
        assert "MemoryError: no memory" in told
        assert "load a checkpoint on every rank" in told
    assert names_in(folder) == {"step-1"}
    load_checkpoint(folder, model, optimizer)
    train(model, optimizer)
    save()


@on_ranks(2)
def test_a_load_where_none_can_be_made_changes_nothing(rank: int, tmp_path: Path) -> None:
    """On one rank alone in inference mode, and on all within a backward pass."""
    source, (model, optimizer) = linear(0, adamw, 1), linear(1, adamw, 1)
    save_checkpoint(tmp_path / "a", *source)
    state, before = Sharded(source[1]).state_dict(), held(model, optimizer)
    loads: list[Callable[[], Any]] = [
        lambda: load_checkpoint(tmp_path / "a", model, optimizer),
        lambda: Sharded(optimizer).load_state_dict(state),
    ]
    for load in loads:
        with torch.inference_mode() if rank == 1 else nullcontext():
            assert "torch.inference_mode" in refused(load)
        with optimizer.backward_pass(squares(model)) as loss:
            assert "optimizer.backward_pass" in refused(load)
            loss.backward()
        optimizer.zero_grad()
        check_same(before, held(model, optimizer))
    for load in loads:
        load()
        train(model, optimizer)


# What isn't taken


def frozen_later(seed: int, frozen: tuple[str, ...] = (), steps: int = 1) -> Pair:
    """All parameters are in the optimizer's group, some of them frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model)
    train(model, optimizer, steps=steps)
    return model, optimizer


@on_ranks(2, ("checkpoint", "torch's", "state dict"))
def test_a_parameter_that_was_trained_and_is_frozen_by_now_is_named(rank: int, way: str, tmp_path: Path) -> None:
    """One that was frozen and is trained by now starts afresh."""
    saved, other, same = frozen_later(0), frozen_later(1, ("0.bias", "1.weight")), frozen_later(1)
    save_by(way, tmp_path / way, *saved)
    with logged() as lines:
        load_by(way, tmp_path / way, *other)
    assert len(lines) == (rank == 0)
    for line in lines:
        assert line.startswith("WARNING: 0.bias: trained when it was saved, and by no optimizer here")
        assert "that of 1 more" in line
    expected = saved[1].state_dict()["state"]
    check_same({place: expected[place] for place in (0, 3)}, other[1].state_dict()["state"])
    fresh = frozen_later(1, steps=0)
    save_by(way, tmp_path / f"{way}, frozen", *frozen_later(0, ("0.bias",)))
    with logged() as lines:
        load_by(way, tmp_path / way, *same)
        if way != "torch's":
            load_by(way, tmp_path / f"{way}, frozen", *fresh)
            assert sorted(fresh[1].state_dict()["state"]) == [0, 2, 3]
    assert lines == []


@on_ranks(2)
def test_a_replaced_layer_is_refused_by_name(rank: int, tmp_path: Path) -> None:
    model, optimizer = frozen_later(0)
    if rank == 1:
        model[1] = nn.Linear(7, 3)
    for way in ("checkpoint", "torch's"):
        told = refused(lambda: save_by(way, tmp_path / way, model, optimizer))  # noqa: B023
        for expected in ("1.weight", "construct a new optimizer") if rank == 1 else ("RuntimeError: ", "rank 1"):
            assert expected in told


@on_ranks(2, ("checkpoint", "torch's"))
def test_weights_that_one_rank_alone_has_written_are_not_saved(rank: int, way: str, tmp_path: Path) -> None:
    model, optimizer = frozen_later(0)
    with torch.no_grad():
        if rank == 1:
            model[1].weight.fill_(7.0)
        told = refused(lambda: save_by(way, tmp_path / way, model, optimizer))
        assert "1.weight: expected weights to be written on every rank or on none" in told
        assert not (tmp_path / way).exists()
        model[1].weight.fill_(7.0)
        if rank == 0:
            model[1].weight.fill_(7.0)  # more often, and the same values
    save_by(way, tmp_path / f"{way}, alike", model, optimizer)
    train(model, optimizer)


# Other classes of optimizers


MAKES: dict[str, Make] = {
    "AdamW": adamw,
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
    "SGD": momentum,
    "plain SGD": lambda ps: torch.optim.SGD(ps, lr=0.01),
}
OWN = ("checkpoint", "Sharded alone", "state dict")
WAYS = (*OWN, "plain")


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def start(make: Make, seed: int = 3, steps: int = 0) -> Pair:
    return wrapped(net(seed), make, steps, partition_grad=True)


def load(way: str, folder: Path, *pair: Any) -> None:
    load_by("state dict" if way == "plain" else way, folder / way, *pair)


@pytest.fixture(scope="module")
def saved_by_class(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By class what each way loads, after two steps. Plain state dicts have no class's name."""
    folder = tmp_path_factory.mktemp("saved")

    def save(rank: int, world_size: int) -> None:
        for name, make in MAKES.items():
            pair = start(make, seed=0, steps=2)
            for way in OWN:
                (folder / name).mkdir(exist_ok=True)
                save_by(way, folder / name / way, *pair)
            state = pair[1].state_dict()
            if rank == 0:
                torch.save({key: state[key] for key in ("state", "param_groups")}, folder / name / "plain")

    run_ranks(save, 2)
    return folder


def fails_in_plain_torch(path: Path, make: Make) -> bool:
    """Whether loading or the next step raises: a state dict that has no class's name shows nothing else."""
    parameters = list(net(0).parameters())
    optimizer = make(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    try:
        optimizer.load_state_dict(torch.load(path, weights_only=True))
        optimizer.step()
    except KeyError:
        return True
    return False


@on_ranks(2, (*((way, 2) for way in WAYS), ("Sharded alone", 0)))
def test_another_class_is_refused_and_changes_nothing(rank: int, way: str, steps: int, saved_by_class: Path) -> None:
    names = list(MAKES)

    def is_told(way: str, of: str, into: str) -> bool:
        """Of states that have their class's name, two of each class are enough."""
        if of.split()[-1] == into.split()[-1]:
            return False
        if way == "plain":
            return fails_in_plain_torch(saved_by_class / of / "plain", MAKES[into])
        return (names.index(of) - names.index(into)) % len(names) in (1, 4)

    def load_into(way: str, steps: int, into: str) -> None:
        pair = start(MAKES[into], steps=steps)
        before = held(*pair)
        for of in (name for name in MAKES if is_told(way, name, into)):
            told = refused(lambda: load(way, saved_by_class / of, *pair))  # noqa: B023
            assert told.startswith(("ValueError", "CheckpointException"))
            # Torch misses a state by its name.
            assert "of this class of optimizer" in told or "Missing key" in told, f"{of} into {into}: {told}"
            check_same(before, held(*pair), at=f"{of} into {into}")
        train(*pair)  # it goes on

    for into in MAKES:
        load_into(way, steps, into)


@on_ranks(2, WAYS)
def test_another_setting_is_taken_over(rank: int, way: str, saved_by_class: Path) -> None:
    others: dict[str, Make] = {
        "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.5, betas=(0.1, 0.2), weight_decay=0.0, eps=0.1),
        "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.5, alpha=0.5),
        "SGD": lambda ps: torch.optim.SGD(ps, lr=0.5, momentum=0.1, nesterov=True),
        "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.5, lr_decay=0.1, initial_accumulator_value=3.0),
    }
    for name, make in others.items():
        results = []
        for each in (MAKES[name], make):
            model, optimizer = start(each)
            load(way, saved_by_class / name, model, optimizer)
            model.load_state_dict(net(0).state_dict())
            train(model, optimizer)
            results.append(held(model, optimizer))
        check_same(*results, at=name)


@on_ranks(2)
def test_what_one_rank_alone_refuses_changes_nothing_on_any(rank: int, saved_by_class: Path) -> None:
    """It loads another class's file, or has a hook that refuses."""
    pair = start(adamw, steps=1)
    before = held(*pair)

    def refuse(_: Any, state: Any) -> None:
        raise LookupError("not this one")

    refused(lambda: load("state dict", saved_by_class / ("SGD" if rank == 1 else "AdamW"), *pair))
    check_same(before, held(*pair))
    if rank == 1:
        pair[1].optim.register_load_state_dict_pre_hook(refuse)
    for way in WAYS:
        assert "not this one" in refused(lambda: load(way, saved_by_class / "AdamW", *pair))  # noqa: B023
        check_same(before, held(*pair), at=way)
    train(*pair)
