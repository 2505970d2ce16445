"""Plays a program as one rank: real models, real optimizers, real autograd."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowlevel_zero import LowLevelZeroOptimizer, clip_grad_norm_, clip_grad_value_
from lowlevel_zero.checkpoint import load_checkpoint, save_checkpoint
from lowlevel_zero.communication.failed_ranks import LostRank
from lowlevel_zero.layout import layout_of, memory_held, traffic_of
from tests.simulation import net
from tests.simulation.calls import (
    BACKWARDS,
    BOTH,
    SETTINGS,
    SLICE_EDITS,
    all_calls,
    assigns_weights,
    drops_first,
    edits_slices,
    watches_steps,
    written,
)
from tests.simulation.log import Entry, Error, Log
from tests.simulation.net import Batches, Net, loss_of, run_layers
from tests.simulation.outcome import InjectedFault
from tests.simulation.program import Part, Program
from tests.support.options import grouped

TRIES = 6  # how often a rank may begin anew
# Calls whose exceptions end a process, as the docs' table has it: the others wait for the rank.
ENDS = ("gradient", "reload", "keep state", "load state", "together", "load", "load raising", "restore")
# What any rank may ask by itself, and gets without the others.
ACCOUNTS: tuple[Callable[[LowLevelZeroOptimizer], object], ...] = (
    *(memory_held, traffic_of, layout_of, repr),
    *(LowLevelZeroOptimizer.get_working_to_master_map, LowLevelZeroOptimizer.get_master_to_working_map),
    *(LowLevelZeroOptimizer.get_param_padding_map, LowLevelZeroOptimizer.get_grad_norm),
    *map(attrgetter, ("loss_scale", "param_groups", "state", "defaults", "parameter_names", "is_retired")),
)


class UserError(Exception):
    """What a user's own hook raises."""


def play(program: Program, rank: int, batches: Batches, folder: str = "") -> Log:
    """All that one rank does; its log holds neither models nor optimizers. Checkpoints come into ``folder``."""
    return Rank(program, rank, batches, folder).play()


class Rank:
    """One rank's models and optimizers."""

    def __init__(self, program: Program, rank: int, batches: Batches, folder: str) -> None:
        self.program, self.rank, self.batches, self.folder = program, rank, batches, folder
        self.saved: dict[int, tuple[str, int]] = {}  # by part, where, and how many param groups there were
        self.kept: dict[int, dict[str, Any]] = {}  # by part, a state dict
        self.retired: list[LowLevelZeroOptimizer] = []
        self.groups = _groups(program, rank)
        self.nets = [Net(part, seed=rank + 10 * number) for number, part in enumerate(program.parts)]
        self.optimizers = [self._optimizer(part, model) for part, model in zip(program.parts, self.nets, strict=True)]
        self.log = Log()

    def _optimizer(self, part: Part, model: Net, group: Any = None) -> LowLevelZeroOptimizer:
        wrapped = net.OPTIMIZERS[part.optimizer](net.groups_of(part, list(model.weights)))
        if watches_steps(self.program, self.rank):
            wrapped.register_step_post_hook(lambda *_: None)
        keywords = _keywords(part, model, self.groups)
        if group is not None and part.levels == "none":
            keywords["dp_process_group"] = group
        return LowLevelZeroOptimizer(wrapped, model=model, **keywords)

    def play(self) -> Log:
        calls, at, tries = all_calls(self.program, self.rank), 0, 0
        for of in range(len(self.nets)) if self.program.raises else ():
            save_checkpoint(f"{self.folder}/start/{of}", self.nets[of], self.optimizers[of])
        try:
            while at < len(calls) and tries < TRIES:
                call = calls[at]
                if call is None or self._did(entry := Entry(at, call)) or self._goes_on(entry):
                    at += 1
                else:
                    tries += 1
                    calls, at = all_calls(self.program, self.rank, refused=True), len(self.program.rows)
        except LostRank:  # ends a process
            return self.log
        self._take_stock()
        return self.log

    def _did(self, entry: Entry) -> bool:
        """Make one call; whether it returned."""
        self.log.entries.append(entry)
        try:
            _DO[entry.call.name](self, entry)
        except Exception as error:
            entry.error = Error(type(error).__name__, str(error), tuple(_package(error)))
            if isinstance(error, LostRank) or (isinstance(error, InjectedFault) and entry.call.name in ENDS):
                raise
            return False
        return True

    def _goes_on(self, entry: Entry) -> bool:
        """Return whether the rank takes no notice of the exception of a backward, and makes its next call."""
        injected = entry.error is not None and entry.error.type == InjectedFault.__name__
        return injected and entry.call.name in BACKWARDS and self.program.schedule % 2 == 1

    # ---- calls ----

    def backward(self, entry: Entry) -> None:
        call, loss = entry.call, self._loss(entry)
        optimizer, p = self.optimizers[call.of], self.nets[call.of][call.at]
        if call.name == "raising":
            self._raising(entry, loss)
        elif call.name == "by inputs":
            optimizer.backward(loss, inputs=[p] if p.requires_grad else None)
        else:
            with optimizer.no_sync() if "no_sync" in call.name else nullcontext():
                self._run(call.name, optimizer, loss)

    def _run(self, name: str, optimizer: LowLevelZeroOptimizer, loss: Tensor) -> None:
        if name.startswith("plain"):
            if loss.requires_grad:
                loss.backward(create_graph="graph" in name)
        elif name == "pass":
            with optimizer.backward_pass(loss) as scaled:
                if scaled.requires_grad:
                    scaled.backward()
        elif name == "by gradient":
            optimizer.backward_by_grad(loss, torch.full_like(loss, optimizer.loss_scale))
        else:
            optimizer.backward(loss)

    def _raising(self, entry: Entry, loss: Tensor) -> None:
        def hook(_: Tensor) -> None:
            raise UserError("the user's own")

        p = self.nets[entry.call.of][entry.call.at]
        handle = p.register_hook(hook) if p.requires_grad else None
        try:
            self.optimizers[entry.call.of].backward(loss)
        finally:
            if handle is not None:
                handle.remove()

    def _loss(self, entry: Entry) -> Tensor:
        call, number = entry.call, entry.call.of
        batch = self.batches.of(number, entry.place, self.rank)
        loss = loss_of(self.program.parts[number], self.nets[number].weights, call.drops, batch)
        return loss * float("nan") if call.name == "nan" else loss

    def both(self, entry: Entry) -> None:
        """A backward from one loss through the models of both parts."""
        call, parts = entry.call, self.program.parts
        first, second = call.of, 1 - call.of
        inner, outer = (self.batches.of(number, entry.place, self.rank) for number in (second, first))
        hidden = run_layers(parts[second], self.nets[second].weights, call.drops, inner)
        loss = loss_of(parts[first], self.nets[first].weights, call.drops, outer, hidden)
        if call.name == "nested":
            self._run_nested(first, second, loss)
        else:
            self._run("plain" if call.name == "plain through" else "backward", self.optimizers[first], loss)

    def _run_nested(self, first: int, second: int, loss: Tensor) -> None:
        with self.optimizers[first].backward_pass(loss) as once, self.optimizers[second].backward_pass(once) as twice:
            if twice.requires_grad:
                twice.backward()

    def step(self, entry: Entry) -> None:
        optimizer = self.optimizers[entry.call.of]
        optimizer.step()
        entry.held = memory_held(optimizer).gradients

    def idle_step(self, entry: Entry) -> None:
        """Does nothing."""
        with self.optimizers[entry.call.of].no_sync():
            self.optimizers[entry.call.of].step()

    def closure(self, entry: Entry) -> None:
        optimizer = self.optimizers[entry.call.of]
        optimizer.step(lambda: optimizer.backward(self._loss(entry)))

    def zero_grad(self, entry: Entry) -> None:
        optimizer, to_none = self.optimizers[entry.call.of], entry.call.name == "zero_grad"
        gradients = [p.grad for p in self.nets[entry.call.of].weights] if to_none and self.program.schedule % 2 else []
        optimizer.zero_grad(set_to_none=to_none)
        for kept in filter(_is_sharded, gradients):
            with pytest.raises(RuntimeError, match="kept"):
                kept.norm()
        entry.held = memory_held(optimizer).gradients

    def clip(self, entry: Entry) -> None:
        entry.told = self.optimizers[entry.call.of].clip_grad_norm_(entry.call.amount).clone()

    def clip_by_package(self, entry: Entry) -> None:
        entry.told = clip_grad_norm_(self.nets[entry.call.of].parameters(), entry.call.amount).clone()

    def clip_by_torch(self, entry: Entry) -> None:
        # Those of empty parameters are plain ones, and have no norm.
        gradients = [p.grad for p in self.nets[entry.call.of].weights if p.grad is not None and p.numel()]
        entry.absent = not gradients or not all(map(_is_sharded, gradients))
        if not entry.absent:
            entry.told = torch.nn.utils.clip_grad_norm_(
                self.nets[entry.call.of].parameters(), entry.call.amount
            ).clone()

    def norm(self, entry: Entry) -> None:
        gradient = self.nets[entry.call.of][entry.call.at].grad
        entry.absent = not _is_sharded(gradient)
        if gradient is not None and not entry.absent:
            entry.told = gradient.norm().clone()

    @torch.no_grad()
    def edit(self, entry: Entry) -> None:
        call = entry.call
        p = self.nets[call.of][call.at]
        entry.absent = not _is_sharded(p.grad)
        if p.grad is not None and not entry.absent:
            if edits_slices(self.program) and call.name in ("scale", "copy"):
                self._edit_slice(entry, p)
            elif call.name == "scale":
                p.grad.mul_(call.amount)
            elif call.name == "scale twice":
                torch._foreach_mul_([p.grad, p.grad], call.amount)
            elif call.name == "add":
                p.grad.add_(p, alpha=call.amount)
            else:
                p.grad.copy_(p * call.amount)

    def _edit_slice(self, entry: Entry, p: Tensor) -> None:
        record = self.optimizers[entry.call.of].sharded_parameters[p]
        gradient = record.p32.grad
        entry.absent = gradient is None  # where that was set to None
        if gradient is not None and entry.call.name == "scale":
            entry.absent = not _is_sharded(gradient)  # it was assigned, and nobody hears of what is made of it
            if not entry.absent:
                gradient.mul_(entry.call.amount)
        elif gradient is not None:
            gradient.zero_()
            if record.worked:  # on some rank
                record.p32.grad = record.shaped(record.slice_of(p.detach()).to(record.p32) * entry.call.amount)

    @torch.no_grad()
    def fill(self, entry: Entry) -> None:
        gradient = self.nets[entry.call.of][entry.call.at].grad
        entry.absent = not _is_sharded(gradient)
        if gradient is not None and not entry.absent:
            gradient.index_fill_(-1, torch.zeros(1, dtype=torch.int64), entry.call.amount)

    def clip_values(self, entry: Entry) -> None:
        clip_grad_value_(self.nets[entry.call.of].parameters(), entry.call.amount)

    @torch.no_grad()
    def evaluate(self, entry: Entry) -> None:
        """The number that comes out of the model, of a copy of it, or of its state dict.

        And what any rank may do by itself: ask for accounts, and step the wrapped optimizer, which is refused.
        """
        call, model = entry.call, self.nets[entry.call.of]
        for account in ACCOUNTS:
            account(self.optimizers[call.of])
        with pytest.raises(RuntimeError, match=r"that of the \w+ that it wraps"):
            self.optimizers[call.of].optim.step()
        weights: Sequence[Tensor] = model.weights
        if self.program.schedule % 3 == 1:
            weights = copy.deepcopy(model).weights
        elif self.program.schedule % 3 == 2:
            held = model.state_dict()
            weights = [held[f"weights.{at}"] for at in range(len(model.weights))]
        batch = self.batches.of(call.of, entry.place, self.rank)
        part = replace(self.program.parts[call.of], recomputed=False)
        entry.told = run_layers(part, weights, call.drops, batch).detach().clone()

    def clone(self, entry: Entry) -> None:
        gradient = self.nets[entry.call.of][entry.call.at].grad
        entry.absent = not _is_sharded(gradient)
        if gradient is not None and not entry.absent:
            entry.told = gradient.clone().clone()

    def gradient(self, entry: Entry) -> None:
        gradient = self.optimizers[entry.call.of].get_param_grad(self.nets[entry.call.of][entry.call.at])
        entry.told = None if gradient is None else gradient.clone()

    def verify(self, entry: Entry) -> None:
        self.optimizers[entry.call.of].verify()

    def sleep(self, entry: Entry) -> None:
        self.optimizers[entry.call.of].offload_states(pinned=False)

    def wake(self, entry: Entry) -> None:
        self.optimizers[entry.call.of].reload_states()

    def reload(self, entry: Entry) -> None:
        optimizer = self.optimizers[entry.call.of]
        optimizer.load_state_dict(optimizer.state_dict())

    def keep_state(self, entry: Entry) -> None:
        self.kept[entry.call.of] = self.optimizers[entry.call.of].state_dict()

    def load_state(self, entry: Entry) -> None:
        """Load the state dict that was kept last, if it has as many param groups."""
        optimizer, kept = self.optimizers[entry.call.of], self.kept.get(entry.call.of)
        entry.absent = kept is None or len(kept["param_groups"]) != len(optimizer.param_groups)
        if kept is not None and not entry.absent:
            optimizer.load_state_dict(kept)

    def save(self, entry: Entry) -> None:
        of = entry.call.of
        path = f"{self.folder}/{of}/{entry.place}"
        save_checkpoint(path, self.nets[of], self.optimizers[of])
        self.saved[of] = path, len(self.optimizers[of].param_groups)

    def load(self, entry: Entry) -> None:
        of = entry.call.of
        path, groups = self.saved.get(of, ("", 0))
        entry.absent = groups != len(self.optimizers[of].param_groups)
        if not entry.absent:
            self.nets[of].refuses = UserError("the user's own") if entry.call.name == "load raising" else None
            try:
                load_checkpoint(path, self.nets[of], self.optimizers[of])
            finally:
                self.nets[of].refuses = None

    def restore(self, entry: Entry) -> None:
        """Load the checkpoint of the start."""
        of = entry.call.of
        load_checkpoint(f"{self.folder}/start/{of}", self.nets[of], self.optimizers[of])
        for at in self.program.parts[of].trained:
            p = self.nets[of][at].requires_grad_(True)
            self.optimizers[of].sharded_parameters[p].p32.requires_grad_(True)

    def together(self, entry: Entry) -> None:
        self.optimizers[entry.call.of].get_working_grads_by_group_id(0)

    def add_group(self, entry: Entry) -> None:
        part, model, optimizer = (each[entry.call.of] for each in (self.program.parts, self.nets, self.optimizers))
        entry.absent = not part.late or len(optimizer.param_groups) > part.groups
        if not entry.absent:
            group = net.late_group(part, list(model.weights))
            for p in group["params"]:
                p.requires_grad_(True)
            try:
                optimizer.add_param_group(group)
            except Exception:
                for p in group["params"]:
                    p.requires_grad_(False)
                raise

    def synchronize(self, entry: Entry) -> None:
        optimizer = self.optimizers[entry.call.of]
        optimizer.synchronize()
        for group in optimizer.param_groups:
            for p32 in group["params"]:
                if p32.grad is not None and self.program.schedule % 2:
                    p32.grad = p32.grad * entry.call.amount
                elif p32.grad is not None:
                    p32.grad.mul_(entry.call.amount)
        if drops_first(self.program):
            slices = optimizer.get_working_to_master_map()
            slices[id(self.nets[entry.call.of][0])].grad = None
        with optimizer.skip_synchronize():
            optimizer.step()

    def construct(self, entry: Entry) -> None:
        """An optimizer of another model, which is dropped with its reductions under way."""
        part = self.program.parts[entry.call.of]
        model = Net(part, seed=1)
        optimizer = self._optimizer(part, model)
        batch = self.batches.of(entry.call.of, entry.place, self.rank)
        optimizer.backward(loss_of(part, model.weights, entry.call.drops, batch))

    def train_anew(self, entry: Entry) -> None:
        """A new optimizer over the same model, which retires the former one, held on to or not."""
        of, part = entry.call.of, self.program.parts[entry.call.of]
        if self.program.schedule % 2:
            self.retired.append(self.optimizers[of])
        self.optimizers[of] = self._optimizer(part, self.nets[of])
        for p in net.late_group(part, list(self.nets[of].weights))["params"] if part.late else ():
            p.requires_grad_(False)  # until they are added again
            p.grad = None
        for each in self.retired[-1:]:
            try:
                each.step()
            except RuntimeError as error:
                entry.absent = "got a former one" not in str(error)
            else:
                raise AssertionError("a retired optimizer has stepped")

    def construct_aside(self, entry: Entry) -> None:
        """Train another model over a process group that is destroyed behind the optimizer."""
        groups = torch.distributed.distributed_c10d._world.pg_names
        before = set(groups.values())
        group = dist.new_group()
        part = self.program.parts[entry.call.of]
        model = Net(part, seed=2)
        optimizer = self._optimizer(part, model, group)
        optimizer.backward(loss_of(part, model.weights, 0, self.batches.of(entry.call.of, entry.place, self.rank)))
        del optimizer
        dist.destroy_process_group(group)
        entry.outlived = tuple(sorted(set(groups.values()) - before))

    def clear_model(self, entry: Entry) -> None:
        self.nets[entry.call.of].zero_grad()

    def drop(self, entry: Entry) -> None:
        p = self.nets[entry.call.of][entry.call.at]
        record = self.optimizers[entry.call.of].sharded_parameters.find(p)
        if edits_slices(self.program) and _is_sharded(p.grad) and record is not None:
            record.p32.grad = None
        else:
            p.grad = None

    def set(self, entry: Entry) -> None:
        for group in self.optimizers[entry.call.of].param_groups:
            group[SETTINGS[entry.call.name]] *= entry.call.amount

    @torch.no_grad()
    def write(self, entry: Entry) -> None:
        p = self.nets[entry.call.of][entry.call.at]
        if assigns_weights(self.program):
            new = p.data * entry.call.amount
            p.data = _of_other_strides(new) if self.program.schedule % 2 else new
        else:
            p.mul_(entry.call.amount)

    def freeze(self, entry: Entry) -> None:
        call = entry.call
        if self.program.parts[call.of].weights[call.at].role == "trained":
            p = self.nets[call.of][call.at]
            p.requires_grad_(not p.requires_grad)

    def freeze_slice(self, entry: Entry) -> None:
        call = entry.call
        record = self.optimizers[call.of].sharded_parameters.find(self.nets[call.of][call.at])
        if record is not None:
            record.p32.requires_grad_(not record.p32.requires_grad)

    def last_norm(self, entry: Entry) -> None:
        norm = self.optimizers[entry.call.of].get_grad_norm()
        entry.told = None if norm is None else torch.tensor(norm)

    @torch.no_grad()
    def repair(self, entry: Entry) -> None:
        """What a user does about ranks that have come to differ: the same settings and weights on all."""
        for optimizer in self.optimizers:
            for at, group in enumerate(optimizer.param_groups):
                group.update(net.settings_of(at))
        for of, at in written(self.program):
            self.nets[of][at].fill_(entry.call.amount)

    # ---- the end ----

    def _take_stock(self) -> None:
        for number, (model, optimizer) in enumerate(zip(self.nets, self.optimizers, strict=True)):
            optimizer.finish_gathers()
            numbers = {p: at for at, p in enumerate(model.weights)}
            for p, at in numbers.items():
                self.log.parameters[number, at] = p.detach().clone()
            for record in optimizer.sharded_parameters:
                key = number, numbers[record.p]
                start, stop = record.split.span(record.rank)
                state = optimizer.optim.state.get(record.p32, {})
                held = {"master": record.p32, **state}
                if not record.owns_some:  # another rank has all of it
                    continue
                self.log.starts[key] = start
                self.log.slices[key] = {
                    name: record.flat_slice(value.detach())[: stop - start].clone()
                    for name, value in held.items()
                    if isinstance(value, Tensor) and value.shape == record.p32.shape and name != "step"
                }


_DO: dict[str, Callable[[Rank, Entry], None]] = {
    **dict.fromkeys(BACKWARDS, Rank.backward),
    **dict.fromkeys(BOTH, Rank.both),
    "step": Rank.step,
    "closure": Rank.closure,
    "zero_grad": Rank.zero_grad,
    "zero_grad to zeros": Rank.zero_grad,
    "clip": Rank.clip,
    "torch's clip": Rank.clip_by_torch,
    "package's clip": Rank.clip_by_package,
    "norm": Rank.norm,
    **dict.fromkeys(SLICE_EDITS, Rank.edit),
    "fill": Rank.fill,
    "clip value": Rank.clip_values,
    "evaluate": Rank.evaluate,
    "step in no_sync": Rank.idle_step,
    "clone": Rank.clone,
    "gradient": Rank.gradient,
    "verify": Rank.verify,
    "sleep": Rank.sleep,
    "wake": Rank.wake,
    "reload": Rank.reload,
    "keep state": Rank.keep_state,
    "load state": Rank.load_state,
    "save": Rank.save,
    "load": Rank.load,
    "load raising": Rank.load,
    "together": Rank.together,
    "add group": Rank.add_group,
    "synchronize": Rank.synchronize,
    "construct": Rank.construct,
    "construct aside": Rank.construct_aside,
    "train anew": Rank.train_anew,
    "restore": Rank.restore,
    "model.zero_grad": Rank.clear_model,
    "grad = None": Rank.drop,
    **dict.fromkeys(SETTINGS, Rank.set),
    "write weight": Rank.write,
    "freeze": Rank.freeze,
    "freeze slice": Rank.freeze_slice,
    "last norm": Rank.last_norm,
    "repair": Rank.repair,
}


def _of_other_strides(tensor: Tensor) -> Tensor:
    """The same values in memory of another order, as after ``model.to(memory_format=...)``."""
    if tensor.dim() != 2:
        return tensor
    return tensor.t().contiguous().t() if tensor.is_contiguous() else tensor.contiguous()


def _is_sharded(gradient: Tensor | None) -> bool:
    return hasattr(gradient, "full_tensor")


def _package(error: BaseException) -> Iterator[str]:
    """Where in the package an error came from, the outermost place first."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if "/lowlevel_zero/" in path:
            yield f"{path.rpartition('/lowlevel_zero/')[2]}:{line} {frame.f_code.co_name}"


def _groups(program: Program, rank: int) -> dict[str, Any]:
    """Process groups of some ranks, where a part asks for them; every rank makes all of them."""
    made: dict[str, Any] = {}
    if program.offset:
        made["trains"] = training_group(program)
    if any(weight.expert for part in program.parts for weight in part.weights):
        made["twins"] = _mine([range(at, program.ranks, 2) for at in range(2)], rank)
    if any(part.levels != "none" for part in program.parts):
        made["inner"] = _mine([range(2), range(2, 4)], rank)
        made["outer"] = _mine([range(0, 4, 2), range(1, 4, 2)], rank)
    return made


def training_group(program: Program) -> Any:
    """A group of all ranks but the first ones, which do nothing else than to make it, too."""
    return dist.new_group(list(range(program.offset, program.offset + program.ranks)))


def _mine(all_ranks: list[range], rank: int) -> Any:
    groups = [dist.new_group(list(ranks)) for ranks in all_ranks]
    return next(group for group, ranks in zip(groups, all_ranks, strict=True) if rank in ranks)


def _keywords(part: Part, model: Net, groups: dict[str, Any]) -> dict[str, Any]:
    keywords = {"stall_timeout": 0.0, **({"initial_scale": net.SCALE, "hysteresis": 1} if part.half else {})}
    keywords.update(part.keywords)
    keywords.update({name: getattr(torch, value) for name, value in keywords.items() if name == "communication_dtype"})
    if part.levels != "none":
        keywords["dp_process_group"] = (groups["outer"], groups["inner"])
        keywords["hybrid_shard"] = part.levels == "inner"
    if "trains" in groups:
        keywords["dp_process_group"] = groups["trains"]
    experts = [p for p, weight in zip(model.weights, part.weights, strict=True) if weight.expert]
    if experts:
        keywords["pg_to_param_list"] = {groups["twins"]: experts}
    return grouped(keywords)
