"""A small training on one simulated rank, which goes on after exceptions as the docs say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import lowlevel_zero
from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded, latest, load_checkpoint, save_checkpoint
from lowlevel_zero.communication.failed_ranks import LostRank
from lowlevel_zero.deepspeed import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from tests.simulation.aftermath import OF_CALL, UNCHANGED, Recovery
from tests.simulation.lessons import BATCHES, OPTIMIZERS, Lesson, Model
from tests.support.options import grouped

STEPS = 3  # that a training takes
TRIES = 8  # how often a rank may call the same again
CONSTRUCT = "LowLevelZeroOptimizer(...)"
# What all ranks are told where one of them has made another call, or can't make this one.
OTHER_CALLS = "expected the same call on every rank"
REFUSED = re.compile(rf"{OTHER_CALLS}|rank \d+ could not")


class Raised(NamedTuple):
    """An exception that has left a call.

    Attributes:
        call: as ``OF_CALL`` has it.
        number: of the calls that this rank has made so far.
        text: the exception, with its class.
        changed: parameters or states aren't the same as before the call.
    """

    call: str
    number: int
    text: str
    changed: bool


@dataclass
class Diary:
    """What one rank did.

    Attributes:
        taken: the batches whose steps count.
        raised: the exceptions that left its calls.
        holds: in the end, its parameters, masters and states, by name.
    """

    taken: list[int] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    holds: dict[str, Tensor] = field(default_factory=dict)


class Anew(Exception):
    """The batch is given up, and the next one is begun."""


class ProcessEnds(Exception):
    """An exception that isn't to be caught, in words: the exception itself would keep frames alive."""


class Training:
    """One rank's training, which goes on after exceptions as the docs say.

    Args:
        lesson: what it calls.
        rank: this rank.
        diary: what it writes down, also where it doesn't come to an end.
        folder: for checkpoints.
        batches: those that it takes; None: one after the other, until ``STEPS`` are taken.
    """

    def __init__(
        self, lesson: Lesson, rank: int, diary: Diary, folder: str, batches: Sequence[int] | None = None
    ) -> None:
        self._lesson, self._rank, self._folder, self._newest = lesson, rank, folder, ""
        self._batches = iter(range(BATCHES) if batches is None else batches)
        self._steps = STEPS if batches is None else len(batches)
        self._model = Model(lesson, rank)
        self._optimizer: LowLevelZeroOptimizer | None = None
        self._loss: Tensor | None = None
        self._state: dict[str, Any] = {}
        self._experts = _group_of_experts(rank) if lesson.experts else None
        self._levels = _levels(rank) if lesson.levels else None
        self._batch = self._number = self._loads = self._saved_at = 0
        self.diary = diary

    def train(self) -> Diary:
        """Take the steps, and then meet the others: one of them may have failed in its last step."""
        for name in (CONSTRUCT, *self._lesson.first, "save_checkpoint"):
            self._do(name)
        while True:
            try:
                while len(self.diary.taken) < self._steps:
                    self._batch = next(self._batches)
                    for name in self._lesson.calls:
                        self._do(name)
                self._do("verify")
                break
            except Anew:
                continue
        self.diary.holds = dict(self._held())
        return self.diary

    # ---- calls, and what to do about their exceptions ----

    def _do(self, name: str) -> None:
        """Make a call, and do what the table says if it raises."""
        for _ in range(TRIES):
            raised = self._raised_by(name)
            if raised is None:
                return
            recovery = OF_CALL[name].recovery
            if "undefined" in raised.text:
                self._call_until_done("load_checkpoint")
                raise Anew
            if recovery is Recovery.RESTART and not REFUSED.search(raised.text):
                raise ProcessEnds(raised.text)
            if recovery is Recovery.CONSTRUCT and name != CONSTRUCT:
                self._do(CONSTRUCT)
            if recovery in (Recovery.ZERO_GRAD, Recovery.LOAD, Recovery.RESTART) or OTHER_CALLS in raised.text:
                self._call_until_done("zero_grad")
                raise Anew
        raise AssertionError(f"{name} raises again and again: {raised}")

    def _call_until_done(self, name: str) -> None:
        for _ in range(TRIES):
            raised = self._raised_by(name)
            if raised is None:
                return
        raise AssertionError(f"{name} raises again and again: {raised}")

    def _raised_by(self, name: str) -> Raised | None:
        """Make a call; return what it raises, and note that."""
        self._number += 1
        keeps = OF_CALL[name].here in UNCHANGED and "overlap_allgather" not in self._lesson.options
        before = dict(self._held()) if keeps else {}
        try:
            CALLS[name](self)
        except LostRank as error:
            raise ProcessEnds(str(error)) from None
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        else:
            return None
        self.diary.raised.append(Raised(name, self._number, text, keeps and not _same(before, dict(self._held()))))
        return self.diary.raised[-1]

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, masters and states by name, copied."""
        for name, p in self._model.named_parameters():
            yield name, _copied(p)
        if self._optimizer is not None:
            for record in self._optimizer.sharded_parameters:
                states = self._optimizer.optim.state.get(record.p32, {})
                for key, value in {"master": record.p32, **states}.items():
                    if isinstance(value, Tensor):
                        yield f"{key} of {record.name}", _copied(value)

    @property
    def _zero(self) -> LowLevelZeroOptimizer:
        assert self._optimizer is not None
        return self._optimizer

    # ---- the calls ----

    def construct(self) -> None:
        trained = [p for p in self._model.parameters() if p.requires_grad]
        plain = OPTIMIZERS[self._lesson.optimizer](trained)
        options: dict[str, Any] = {"stall_timeout": 0.0, **self._lesson.options}
        if self._experts is not None:
            options["pg_to_param_list"] = {self._experts: list(self._model.c.parameters())}
        if self._levels is not None:
            options |= {"dp_process_group": self._levels, "hybrid_shard": True}
        self._optimizer = LowLevelZeroOptimizer(plain, model=self._model, **grouped(options))

    def add_param_group(self) -> None:
        self._model.c.requires_grad_(True)
        try:
            self._zero.add_param_group({"params": list(self._model.c.parameters())})
        except Exception:
            self._model.c.requires_grad_(False)
            raise

    def forward(self) -> None:
        self._loss = self._model.loss(self._lesson, self._batch, self._rank)

    def backward(self) -> None:
        assert self._loss is not None
        self._zero.backward(self._loss)

    def plain_backward(self) -> None:
        assert self._loss is not None
        self._loss.backward()

    def no_sync(self) -> None:
        assert self._loss is not None
        with self._zero.no_sync():
            self._zero.backward(self._loss)

    def clip(self) -> None:
        self._zero.clip_grad_norm_(0.5)

    def clip_by_torch(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 0.5)

    def synchronize(self) -> None:
        self._zero.synchronize()
        for group in self._zero.param_groups:
            for p32 in group["params"]:
                if p32.grad is not None:
                    p32.grad.mul_(0.5)

    def step(self) -> None:
        self._zero.step()
        self.diary.taken.append(self._batch)

    def step_by_edited(self) -> None:
        with self._zero.skip_synchronize():
            self.step()

    def zero_grad(self) -> None:
        self._zero.zero_grad()

    def switch(self, mode: str) -> None:
        getattr(self._zero, mode)()

    def get_param_grad(self) -> None:
        self._zero.get_param_grad(self._model.a.weight)

    def save(self) -> None:
        path = f"{self._folder}/{self._loads}-{len(self.diary.taken)}"
        save_checkpoint(path, self._model, self._zero)
        self._newest, self._saved_at = path, len(self.diary.taken)

    def load(self) -> None:
        load_checkpoint(self._newest, self._model, self._zero)
        self._loads += 1
        del self.diary.taken[self._saved_at :]

    def state(self) -> None:
        self._state = self._zero.state_dict()

    def load_state(self) -> None:
        self._zero.load_state_dict(self._state)

    def clip_values(self) -> None:
        lowlevel_zero.clip_grad_value_(self._model.parameters(), 0.01)

    def clip_jointly(self) -> None:
        lowlevel_zero.clip_grad_norm_(self._model.parameters(), 0.5)

    def sharded_state(self) -> None:
        self._state = Sharded(self._zero).state_dict()

    def load_sharded_state(self) -> None:
        Sharded(self._zero).load_state_dict(self._state)

    def get_whole(self) -> None:
        weight = self._model.b.weight
        for value in (safe_get_full_fp32_param(weight), safe_get_full_grad(weight)):
            assert value is not None
            assert value.shape == weight.shape

    def set_master(self) -> None:
        weight = self._model.b.weight
        safe_set_full_fp32_param(weight, torch.full_like(weight, 0.5))

    def set_gradient(self) -> None:
        weight = self._model.b.weight
        safe_set_full_grad(weight, torch.full_like(weight, 0.5))

    def newest(self) -> None:
        assert latest(self._folder, group=dist.group.WORLD) is not None


CALLS: dict[str, Callable[[Training], Any]] = {
    CONSTRUCT: Training.construct,
    "add_param_group": Training.add_param_group,
    "model(...)": Training.forward,
    "backward": Training.backward,
    "loss.backward()": Training.plain_backward,
    "no_sync": Training.no_sync,
    "clip_grad_norm_": Training.clip,
    "p.grad": Training.clip_by_torch,
    "synchronize": Training.synchronize,
    "step": Training.step,
    "step after synchronize": Training.step_by_edited,
    "zero_grad": Training.zero_grad,
    "train": lambda training: training.switch("train"),
    "eval": lambda training: training.switch("eval"),
    "get_param_grad": Training.get_param_grad,
    "get_grad_norm": lambda training: training._zero.get_grad_norm(),
    "verify": lambda training: training._zero.verify(),
    "offload_states": lambda training: training._zero.offload_states(pinned=False),
    "reload_states": lambda training: training._zero.reload_states(),
    "state_dict": Training.state,
    "load_state_dict": Training.load_state,
    "save_checkpoint": Training.save,
    "load_checkpoint": Training.load,
    "lowlevel_zero.clip_grad_norm_": Training.clip_jointly,
    "lowlevel_zero.clip_grad_value_": Training.clip_values,
    "Sharded.state_dict": Training.sharded_state,
    "Sharded.load_state_dict": Training.load_sharded_state,
    "deepspeed.safe_get_full_*": Training.get_whole,
    "deepspeed.safe_set_full_fp32_param": Training.set_master,
    "deepspeed.safe_set_full_grad": Training.set_gradient,
    "latest(group=...)": Training.newest,
}


def _group_of_experts(rank: int) -> dist.ProcessGroup:
    """Return the group of the even or of the odd ranks, which share an expert; all four ranks make both."""
    groups = [dist.new_group([half, half + 2]) for half in range(2)]
    return groups[rank % 2]


def _levels(rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's column and its row, of two by two ranks."""
    columns = [dist.new_group([at, at + 2]) for at in range(2)]
    rows = [dist.new_group([at, at + 1]) for at in (0, 2)]
    return columns[rank % 2], rows[rank // 2]


def _copied(tensor: Tensor) -> Tensor:
    return torch.Tensor.detach(tensor).clone()


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
