"""Wrong calls: each is a clear error or the right thing, on one rank and on two, and never a hang."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.accessors import safe_get_full_fp32_param
from lowlevel_zero.checkpoint import save_checkpoint
from tests.support.misuse import Alone, Doing, Refused, Right, Work, Wrong, adam, momentum, net, nothing, try_out
from tests.support.ranks import run_ranks

# ---- calls in a wrong order ----


def in_a_hook(call: Callable[[Work], Any]) -> Doing:
    """``call`` within a backward."""

    def do(work: Work) -> None:
        handle = work.model[0].weight.register_hook(lambda _: (call(work), None)[1])
        try:
            work.backward()
        finally:
            handle.remove()

    return do


def step_twice(work: Work) -> None:
    work.backward()
    work.optimizer.step()
    work.optimizer.step()


def clear_before_the_step(work: Work) -> None:
    work.backward()
    work.optimizer.zero_grad()
    work.optimizer.step()


def backward_again(work: Work) -> None:
    loss = work.loss()
    work.optimizer.backward(loss)
    work.optimizer.backward(loss)


def backward_twice_over_a_graph(work: Work) -> None:
    for loss in work.shares():
        for _ in range(2):
            work.run_back(loss, retain_graph=True)
    work.optimizer.step()


def forget_zero_grad(work: Work) -> None:
    work.backward()
    work.optimizer.step()
    work.backward(3)
    work.optimizer.step()


def step_in_no_sync(work: Work) -> None:
    with work.no_sync():
        work.backward()
        if not work.plain:
            work.optimizer.step()
    work.optimizer.step()


def nest_no_sync(work: Work) -> None:
    with work.no_sync(), work.no_sync():
        work.backward()
    work.backward(3)
    work.optimizer.step()


def leave_no_sync_by_an_error(work: Work) -> None:
    try:
        with work.no_sync():
            work.backward()
            raise KeyError
    except KeyError:
        work.backward(3)
    work.optimizer.step()


def load_between_backward_and_step(work: Work) -> None:
    state = copy.deepcopy(work.optimizer.state_dict())
    work.steps(3)
    work.backward(4)
    work.optimizer.load_state_dict(state)
    work.optimizer.step()


def save_in_mid_accumulation(work: Work) -> None:
    with work.no_sync():
        work.backward()
        if not work.plain:
            folder = [tempfile.mkdtemp() if work.rank == 0 else ""]
            dist.broadcast_object_list(folder)
            save_checkpoint(Path(folder[0]) / "checkpoint", work.model, work.optimizer)
    work.backward(3)
    work.optimizer.step()


def add_a_group_before_the_step(work: Work) -> None:
    work.backward()
    work.optimizer.add_param_group({"params": work.model[3].bias.requires_grad_(True)})
    work.optimizer.step()


def thaw_before_the_step(work: Work) -> None:
    work.backward()
    work.model[3].bias.requires_grad_(True)
    work.optimizer.step()


def clip_twice(work: Work) -> None:
    work.clip(1.0)
    work.backward()
    work.clip(0.5)
    work.clip(0.1)
    work.optimizer.step()


def fail_in_a_closure(work: Work) -> None:
    def closure() -> None:
        work.backward()
        raise KeyError("the closure's own")

    work.optimizer.step(closure)


def step_by_a_closure_alone(work: Work) -> None:
    work.optimizer.step(lambda: work.backward(3))


ORDER = [
    Wrong("step before any backward", lambda work: work.optimizer.step(), Right()),
    Wrong("step twice", step_twice, Right()),
    Wrong("zero_grad before the step", clear_before_the_step, Right()),
    Wrong("backward again through what is gone", backward_again, Refused(RuntimeError, "backward through the graph")),
    Wrong("backward twice through what was retained", backward_twice_over_a_graph, Right()),
    Wrong("no zero_grad after a step", forget_zero_grad, Right()),
    Wrong("step in no_sync", step_in_no_sync, Right()),
    Wrong("no_sync in no_sync", nest_no_sync, Right()),
    Wrong("no_sync left by an error", leave_no_sync_by_an_error, Right()),
    Wrong("no_sync without a with", lambda work: work.no_sync(), Right()),
    Wrong("load_state_dict between backward and step", load_between_backward_and_step, Right()),
    Wrong("save in no_sync", save_in_mid_accumulation, Right()),
    Wrong("add_param_group between backward and step", add_a_group_before_the_step, Right(thaw_before_the_step)),
    Wrong("clip before backward, and twice after it", clip_twice, Right()),
    Wrong("an exception in a closure", fail_in_a_closure, Refused(KeyError, "the closure's own")),
    Wrong("a closure that doesn't clear gradients", step_by_a_closure_alone, Right()),
    Wrong("step in a hook", in_a_hook(lambda work: work.optimizer.step()), Refused(RuntimeError, "step: .* in a hook")),
    Wrong(
        "zero_grad in a hook",
        in_a_hook(lambda work: work.optimizer.zero_grad()),
        Refused(RuntimeError, "zero_grad: .* in a hook"),
    ),
    Wrong(
        "backward in a hook",
        in_a_hook(lambda work: work.backward(3)),
        Refused(RuntimeError, "backward: .* in a hook"),
    ),
    Wrong(
        "clip_grad_norm_ in a hook",
        in_a_hook(lambda work: work.clip(1.0)),
        Refused(RuntimeError, "clip_grad_norm_: .* in a hook"),
    ),
    Wrong(
        "synchronize in a hook",
        in_a_hook(lambda work: work.optimizer.synchronize()),
        Refused(RuntimeError, "synchronize: .* in a hook"),
    ),
    Wrong(
        "add_param_group in a hook",
        in_a_hook(lambda work: work.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})),
        Refused(RuntimeError, "add_param_group: .* in a hook"),
    ),
    Wrong(
        "an accessor in a hook",
        in_a_hook(lambda work: safe_get_full_fp32_param(work.model[0].weight)),
        Refused(RuntimeError, "0.weight: .* in a hook"),
    ),
]

# ---- wrong objects ----


def construct(make: Callable[[nn.Module], Any] = adam, **options: Any) -> Doing:
    """Another optimizer, over a model of its own."""

    def do(work: Work) -> None:
        model = net()
        LowLevelZeroOptimizer(make(model), **{"model": model, **options})

    return do


def over_a_dtensor(work: Work) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import Shard, distribute_tensor
    except ImportError:  # torch 2.4
        from torch.distributed._tensor import Shard, distribute_tensor

    model = net()
    mesh = init_device_mesh("cpu", (work.world_size,))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
    LowLevelZeroOptimizer(adam(model), model=model)


def with_a_parameter(make: Callable[[], Tensor]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """An optimizer over one more parameter of whatever kind."""

    def optimizer(model: Any) -> torch.optim.Optimizer:
        model[1].register_parameter("odd", make())
        return adam(model)

    return optimizer


def inference_parameter() -> nn.Parameter:
    with torch.inference_mode():
        return nn.Parameter(torch.ones(3))


def wrap_again(work: Work) -> None:
    LowLevelZeroOptimizer(work.optimizer.optim)


def train_by_two(work: Work) -> None:
    work.optimizer.zero_grad()
    another = LowLevelZeroOptimizer(adam(work.model), model=work.model)
    work.backward()
    another.step()


def scale_by_a_grad_scaler(work: Work) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(work.loss()).backward()
    scaler.step(work.optimizer)


def schedule_another_optimizer(work: Work) -> None:
    another = adam(net())
    scheduler = torch.optim.lr_scheduler.StepLR(another, 1, gamma=0.1)
    another.step()
    scheduler.step()
    work.steps(3)


def not_a_number(work: Work) -> None:
    work.optimizer.param_groups[0]["lr"] = "0.1"
    work.steps(3)


OBJECTS = [
    Wrong(
        "a model that the optimizer knows nothing of",
        construct(model=net()),
        Refused(ValueError, "model: .* holds none of: .*model.parameters"),
    ),
    Wrong(
        "a sparse embedding",
        lambda work: LowLevelZeroOptimizer(adam(embedding := nn.Embedding(3, 2, sparse=True)), model=embedding),
        Refused(ValueError, "weight: expected a dense gradient, .*sparse=False"),
    ),
    Wrong(
        "a complex parameter",
        construct(with_a_parameter(lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)))),
        Refused(TypeError, "1.odd: expected float16, .* got torch.complex64"),
    ),
    Wrong(
        "a parameter on the meta device",
        construct(with_a_parameter(lambda: nn.Parameter(torch.ones(3, device="meta")))),
        Refused(ValueError, "1.odd: expected a parameter on cpu.* on meta: move the model"),
    ),
    Wrong(
        "a parameter made under inference_mode",
        construct(with_a_parameter(inference_parameter)),
        Refused(ValueError, "1.odd: .*inference_mode: make the model outside"),
    ),
    Wrong("a DTensor", over_a_dtensor, Refused(TypeError, "0.weight: expected a plain tensor, got a DTensor")),
    Wrong(
        "a model in DistributedDataParallel",
        lambda work: construct(adam, model=DistributedDataParallel(net()))(work),
        Refused(ValueError, "model.module"),
    ),
    Wrong("parameters for an optimizer", construct(list), Refused(TypeError, "expected a torch.optim.Optimizer, got")),
    Wrong(
        "an optimizer that isn't elementwise",
        construct(lambda model: torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad])),
        Refused(TypeError, "LBFGS"),
    ),
    Wrong(
        "an optimizer that shards already",
        lambda work: LowLevelZeroOptimizer(work.optimizer, model=work.model),
        Refused(TypeError, "wrap each optimizer once"),
    ),
    Wrong("an optimizer that another one wraps", wrap_again, Refused(TypeError, "SGD .* wrap each optimizer once")),
    Wrong(
        "two optimizers over one model", train_by_two, Refused(RuntimeError, "0.weight: .* found another", ends=True)
    ),
    Wrong("a GradScaler", scale_by_a_grad_scaler, Refused(RuntimeError, "GradScaler.*optimizer.backward.loss.")),
    Wrong("a scheduler of another optimizer", schedule_another_optimizer, Right()),
    Wrong("a string for a learning rate", not_a_number, Refused(TypeError, "bad operand type", ends=True)),
    Wrong(
        "construction under inference_mode",
        lambda work: torch.inference_mode()(construct())(work),
        Refused(RuntimeError, "outside of torch.inference_mode"),
    ),
    Wrong("a float for a loss", lambda work: work.optimizer.backward(0.5), Refused(TypeError, "loss: .* got float")),
    Wrong(
        "a list of losses",
        lambda work: work.optimizer.backward([work.loss()]),
        Refused(TypeError, "loss: expected a tensor, got list"),
    ),
    Wrong(
        "a loss of several numbers",
        lambda work: work.optimizer.backward(work.model(torch.ones(2, 3))),
        Refused(RuntimeError, "scalar outputs"),
    ),
    Wrong(
        "a model for a parameter",
        lambda work: safe_get_full_fp32_param(work.model),  # type: ignore[arg-type]
        Refused(TypeError, "param: expected a parameter of the model, got Sequential"),
    ),
    Wrong(
        "a view for a parameter",
        lambda work: work.optimizer.get_param_grad(work.model[0].weight[0]),
        Refused(ValueError, "not a copy or a view"),
    ),
    Wrong(
        "a param group without params",
        lambda work: work.optimizer.add_param_group({"lr": 1.0}),
        Refused(TypeError, "param_group: expected a dict with 'params', got \\['lr'\\]"),
    ),
    Wrong(
        "parameters for a param group",
        lambda work: work.optimizer.add_param_group(list(net().parameters())),
        Refused(TypeError, "param_group: expected a dict with 'params', got list"),
    ),
    Wrong(
        "a param group of known parameters",
        lambda work: work.optimizer.add_param_group({"params": work.model[0].weight}),
        Refused(ValueError, "0.weight: .* got one it has"),
    ),
    Wrong("no state dict", lambda work: work.optimizer.load_state_dict(None), Refused(TypeError, "got NoneType")),
    Wrong(
        "a model's state dict",
        lambda work: work.optimizer.load_state_dict(work.model.state_dict()),
        Refused(ValueError, "'state' and 'param_groups'"),
    ),
    Wrong(
        "another model's state dict",
        lambda work: work.optimizer.load_state_dict(adam(nn.Linear(2, 2)).state_dict()),
        Refused(ValueError, "state_dict: expected param groups of \\[6\\] parameters"),
    ),
    Wrong(
        "a checkpoint of another model",
        lambda work: save_checkpoint("nowhere", net(), work.optimizer),
        Refused(ValueError, "model"),
    ),
]

KEYWORDS: list[tuple[dict[str, Any], type[BaseException], str]] = [
    ({"partition_grad": "False"}, TypeError, "partition_grad: expected True or False, got str 'False'"),
    ({"partition_grad": 1}, TypeError, "partition_grad: expected True or False, got int 1"),
    ({"overlap_communication": None}, TypeError, "overlap_communication: expected True or False, got NoneType"),
    ({"cpu_offload": {"device": "cpu"}}, TypeError, "cpu_offload: expected True or False, got dict"),
    ({"fp8_communication": "e4m3"}, TypeError, "fp8_communication: expected True or False, got str 'e4m3'"),
    ({"debug": "yes"}, TypeError, "debug: expected True or False, got str 'yes'"),
    ({"verbose": 2}, TypeError, "verbose: expected True or False, got int 2"),
    ({"reduce_bucket_size": -1}, ValueError, "reduce_bucket_size: expected at least 1 element, got -1"),
    ({"reduce_bucket_size": "25MB"}, TypeError, "reduce_bucket_size: expected an int"),
    ({"clip_grad_norm": float("nan")}, ValueError, "clip_grad_norm: expected a number >= 0"),
    ({"communication_dtype": "bf16"}, TypeError, "communication_dtype: expected a torch.dtype or None, got str"),
    ({"forced_dtype": torch.int8}, ValueError, "forced_dtype: expected float16, .* got torch.int8"),
    ({"initial_scale": "dynamic"}, ValueError, "initial_scale .* got 'dynamic'"),
    ({"backward_context": "fp8"}, TypeError, "backward_context: expected a callable"),
    ({"fp8_min_numel": -1}, ValueError, "fp8_min_numel: expected 0 or more"),
    ({"reduction": "average"}, ValueError, "reduction: expected 'mean' or 'sum'"),
    ({"gradient_predivide_factor": 0}, ValueError, "gradient_predivide_factor: expected a finite number above 0"),
    ({"stall_timeout": -1}, ValueError, "stall_timeout: expected a number of seconds >= 0"),
    ({"verify_every": 0.5}, TypeError, "verify_every: expected an int"),
    ({"max_skipped_steps": -1}, ValueError, "max_skipped_steps: expected at least 0 steps"),
    ({"dp_process_group": 3}, TypeError, "dp_process_group.* expected process groups, got int 3"),
    ({"dp_process_group": [0, 1]}, TypeError, "dp_process_group.* expected process groups, got int 0"),
    ({"extra_dp_group": 3}, ValueError, "extra_dp_group: expected dp_process_group beside it"),
    ({"hybrid_shard": True}, ValueError, "hybrid_shard"),
    ({"pg_to_param_list": {"experts": []}}, TypeError, "pg_to_param_list: expected process groups"),
    ({"pg_to_param_list": [1]}, TypeError, "pg_to_param_list"),
]

# ---- on wrong ranks ----


def instead(call: Callable[[Work], Any], others: Callable[[Work], Any] = lambda work: work.optimizer.step()) -> Doing:
    """After a backward, a call on the last rank alone, while the others make another."""

    def do(work: Work) -> None:
        work.backward()
        (call if work.odd else others)(work)

    return do


def different(theirs: str) -> Refused:
    """All are told that the last rank came to another call than to step."""
    return Refused(RuntimeError, f"rank 0 to step; rank 1 to {theirs}: ")


def forget_zero_grad_alone(work: Work) -> None:
    one_step(work)
    if not work.odd:
        work.optimizer.zero_grad()
    work.backward(3)
    work.optimizer.step()


def one_step(work: Work) -> None:
    work.backward()
    work.optimizer.step()


def without_the_last(work: Work) -> None:
    work.backward(without=work.world_size - 1)
    work.optimizer.step()


def no_sync_alone(work: Work) -> None:
    if work.plain or not work.odd:
        work.backward()
    else:
        with work.no_sync():
            work.backward()
    work.optimizer.step()


def bare_backward_alone(work: Work) -> None:
    if work.plain or not work.odd:
        work.backward()
    else:
        work.loss().backward()
    work.optimizer.step()


def fail_alone(work: Work) -> None:
    handle = work.model[0].weight.register_hook(lambda _: 1 / 0 if work.odd else None)
    try:
        work.backward()
    except ZeroDivisionError:
        work.optimizer.zero_grad()
        return
    finally:
        handle.remove()
    work.optimizer.step()


def freeze_alone(work: Work) -> None:
    bias = work.model[0].bias
    for rank in range(work.world_size) if work.plain else [work.rank]:
        bias.requires_grad_(rank != work.world_size - 1)
        if work.plain:
            (work.loss(0, rank) / work.world_size).backward()
        else:
            work.backward()
    work.optimizer.step()
    bias.requires_grad_(True)


def thaw_alone(work: Work) -> None:
    frozen = work.model[3].weight
    frozen.requires_grad_(work.odd)
    work.loss().backward()
    try:
        work.optimizer.step()
    finally:
        frozen.requires_grad_(False)


def move_alone(work: Work) -> None:
    if work.odd:
        work.model[0].weight.data = work.model[0].weight.data.clone()
    work.steps(3)


def convert_alone(work: Work) -> None:
    if work.odd:
        work.model[0].weight.data = work.model[0].weight.data.double()
    work.optimizer.step()


def sparse_alone(work: Work) -> None:
    if work.odd:
        work.model[0].weight.grad = torch.ones(4, 3).to_sparse()
    work.optimizer.step()


def regroup_alone(work: Work) -> None:
    members = work.optimizer.param_groups[0]["params"]
    taken = members.pop() if work.odd else None
    work.backward()
    try:
        work.optimizer.step()
    finally:
        members += [] if taken is None else [taken]


def construct_otherwise(
    model: Callable[[bool], Any] = lambda odd: net(), options: Callable[[bool], dict[str, Any]] = lambda odd: {}
) -> Doing:
    """Another optimizer, of another model or by other options on the last rank."""

    def do(work: Work) -> None:
        own = model(work.odd)
        LowLevelZeroOptimizer(adam(own), model=own, **options(work.odd))

    return do


def load_otherwise(work: Work) -> None:
    state = work.optimizer.state_dict(only_on_master=True)
    work.optimizer.load_state_dict(state)


def step_two_in_other_orders(work: Work) -> None:
    other = net()
    another = LowLevelZeroOptimizer(adam(other), model=other)
    another.backward(other(torch.ones(2, 3)).sum())
    work.backward()
    for optimizer in (another, work.optimizer) if work.odd else (work.optimizer, another):
        optimizer.step()


RANKS = [
    Wrong(
        "zero_grad for step", instead(lambda work: work.optimizer.zero_grad()), different("zero_grad"), Right(nothing)
    ),
    Wrong(
        "clip_grad_norm_ for step",
        instead(lambda work: work.clip(1.0)),
        different("clip_grad_norm_"),
        Right(nothing),
    ),
    Wrong(
        "synchronize for step",
        instead(lambda work: work.optimizer.synchronize()),
        different("synchronize"),
        Right(nothing),
    ),
    Wrong(
        "get_param_grad for step",
        instead(lambda work: work.optimizer.get_param_grad(work.model[0].weight)),
        different("get_param_grad"),
        Right(nothing),
    ),
    Wrong(
        "add_param_group for step",
        instead(lambda work: work.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})),
        different("add_param_group"),
        Right(nothing),
    ),
    Wrong(
        "load_state_dict for step",
        instead(lambda work: work.optimizer.load_state_dict(momentum(work.model).state_dict())),
        different("load_state_dict"),
        Right(lambda work: work.optimizer.state.clear()),
    ),
    Wrong(
        "a zero_grad that one rank forgets",
        forget_zero_grad_alone,
        Refused(RuntimeError, "rank 0 to zero_grad; rank 1 to step: ", plain=one_step),
        Right(forget_zero_grad),
    ),
    Wrong("a backward that one rank leaves out", without_the_last, Right()),
    Wrong("no_sync on one rank", no_sync_alone, Right()),
    Wrong("a bare backward on one rank", bare_backward_alone, Right()),
    Wrong("an exception in one rank's backward", fail_alone, different("zero_grad"), Right(nothing)),
    Wrong(
        "an accessor on one rank",
        lambda work: safe_get_full_fp32_param(work.model[0].bias) if work.odd else work.optimizer.zero_grad(),
        Refused(
            RuntimeError, "rank 0 to zero_grad; rank 1 to call safe_get_full_fp32_param of 0.bias: ", plain=nothing
        ),
        Right(nothing),
    ),
    Wrong(
        "a save on one rank",
        lambda work: save_checkpoint("nowhere", work.model, work.optimizer, timeout=0.3) if work.odd else None,
        Alone(TimeoutError, "save_checkpoint: expected all 2 ranks, got rank 1 and, .* not rank 0"),
        Right(nothing),
    ),
    Wrong("a parameter that is frozen on one rank", freeze_alone, Right()),
    Wrong(
        "a parameter that is unfrozen on one rank",
        thaw_alone,
        Refused(RuntimeError, "3.weight: expected it frozen", "rank 1 could not step: RuntimeError: 3.weight"),
    ),
    Wrong("a parameter over other memory on one rank", move_alone, Right()),
    Wrong(
        "a parameter of another dtype on one rank",
        convert_alone,
        Refused(RuntimeError, "0.weight: .* over other", "rank 1 could not step: RuntimeError: 0.weight", ends=True),
    ),
    Wrong(
        "a sparse gradient on one rank",
        sparse_alone,
        Refused(RuntimeError, "0.weight: expected a dense", "rank 1 could not step: RuntimeError: 0.weight"),
    ),
    Wrong(
        "a param group that lacks a slice on one rank",
        regroup_alone,
        Refused(RuntimeError, "^param_groups.0..'params'.: expected the 4 slices", "rank 1 could not step: .*param_gr"),
    ),
    Wrong(
        "other models",
        construct_otherwise(lambda odd: net() if odd else net()[:3]),
        Refused(ValueError, "rank 0 has .* rank 1 has .*parameter 3.weight of group 0: frozen"),
        Right(nothing),
    ),
    Wrong(
        "other dtypes",
        construct_otherwise(lambda odd: net().bfloat16() if odd else net()),
        Refused(ValueError, "rank 0 has «parameter 0.weight .*float32» where rank 1 has .*bfloat16"),
        Right(nothing),
    ),
    Wrong(
        "other options",
        construct_otherwise(options=lambda odd: {"partition_grad": odd}),
        Refused(ValueError, "rank 0 has .*partition_grad=False.* where rank 1 has .*partition_grad=True"),
        Right(nothing),
    ),
    Wrong(
        "a bad option on one rank",
        construct_otherwise(options=lambda odd: {"reduction": "max" if odd else "mean"}),
        Refused(ValueError, "reduction: expected", "rank 1 could not construct .*ValueError: reduction: expected"),
    ),
    Wrong(
        "a state dict that only the first rank has whole",
        load_otherwise,
        Refused(ValueError, "the same state dict on every rank; rank 0 has .*momentum_buffer.* where rank 1 has"),
        Right(nothing),
    ),
    Wrong(
        "two optimizers that ranks step in other orders",
        step_two_in_other_orders,
        # Which number an optimizer has in a process depends on how many there were before.
        Refused(RuntimeError, r"rank 0 to step of optimizer (\d+); rank 1 to step of optimizer (?!\1)\d+: "),
        Right(one_step),
    ),
]

# ---- models that are changed after construction ----


def then_train(change: Callable[[Any], Any]) -> Doing:
    """A change to the model, and a step."""

    def do(work: Work) -> None:
        change(work.model)
        work.steps(3)

    return do


def convert(work: Work, dtype: torch.dtype) -> None:
    work.model.to(dtype)
    work.dtype = dtype
    work.steps(3)


def thaw(work: Work) -> None:
    bias = work.model[3].bias.requires_grad_(True)
    try:
        work.backward()
    finally:
        bias.requires_grad_(False)


def set_aside(model: Any, at: int, module: nn.Module) -> None:
    model[at] = module


def share_a_bias(model: Any) -> None:
    model[3].bias = model[2].bias


def assign_a_state_dict(model: nn.Module) -> None:
    model.load_state_dict({name: torch.ones_like(p) for name, p in model.named_parameters()}, assign=True)


MOVED = "expected it where this optimizer put it, found it over other memory"
MODELS = [
    Wrong(
        "a parameter that came later",
        then_train(lambda model: model.register_parameter("late", nn.Parameter(torch.ones(2)))),
        Right(),
    ),
    Wrong("a layer that is another by now", then_train(lambda model: set_aside(model, 0, nn.Linear(3, 4))), Right()),
    Wrong("a layer that has gone", then_train(lambda model: set_aside(model, 3, nn.Identity())), Right()),
    Wrong("a bias that was tied later", then_train(share_a_bias), Right()),
    Wrong("a state dict that was assigned", then_train(assign_a_state_dict), Right()),
    Wrong("a layer that is frozen by now", then_train(lambda model: model[0].requires_grad_(False)), Right()),
    Wrong("a bias that isn't frozen any more", thaw, Refused(RuntimeError, "3.bias: .*add_param_group")),
    Wrong(
        "weight_norm",
        then_train(lambda model: nn.utils.parametrizations.weight_norm(model[0])),
        Right(),
    ),
    Wrong("pruning", then_train(lambda model: prune.l1_unstructured(model[0], "weight", 0.5)), Right()),
    Wrong(
        "a parametrization that moves its parameter",
        then_train(lambda model: nn.utils.parametrizations.orthogonal(model[0])),
        Right(),
    ),
    Wrong(
        "model.half()",
        lambda work: convert(work, torch.float16),
        Refused(RuntimeError, f"0.weight: {MOVED} .torch.float16", ends=True),
    ),
    Wrong(
        "model.double()",
        lambda work: convert(work, torch.float64),
        Refused(RuntimeError, f"0.weight: {MOVED} .torch.float64", ends=True),
    ),
    Wrong("model.double() and back", then_train(lambda model: model.double().float()), Right()),
    Wrong("model.share_memory()", then_train(lambda model: model.share_memory()), Right()),
]

# ---- edits behind the optimizer's back ----


def edit_data(work: Work) -> None:
    work.model[0].weight.data.mul_(0.5)
    work.steps(3)


def edit_and_tell(work: Work) -> None:
    work.model[0].weight.data.mul_(0.5)
    if not work.plain:
        work.optimizer.update_master_params(work.model)
    work.steps(3)


def give_a_gradient(work: Work) -> None:
    work.model[0].weight.grad = torch.full((4, 3), 0.5)
    work.optimizer.step()


def replace_a_gradient(work: Work) -> None:
    work.backward()
    work.model[0].weight.grad = torch.full((4, 3), 0.5)
    work.optimizer.step()


def double_under_no_sync(work: Work) -> None:
    with work.no_sync():
        work.backward()
        work.model[0].weight.grad = 2 * work.model[0].weight.grad
    work.optimizer.step()


def misshape_a_gradient(work: Work) -> None:
    work.model[0].weight.grad = torch.ones(3, 4)


def sparse_gradient(work: Work) -> None:
    work.model[0].weight.grad = torch.ones(4, 3).to_sparse()
    work.optimizer.step()


def reset_state(work: Work) -> None:
    work.optimizer.state.clear()
    work.steps(3)


def change_groups(change: Callable[[list[dict[str, Any]]], Any]) -> Doing:
    """Change the param groups by hand, step, and change them back."""

    def do(work: Work) -> None:
        groups = work.optimizer.param_groups
        before = [{**group, "params": list(group["params"])} for group in groups]
        change(groups)
        work.backward()
        try:
            work.optimizer.step()
        finally:
            groups[:] = before

    return do


def a_tensor_learning_rate(work: Work) -> None:
    work.optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
    work.steps(3)


EDITS = [
    Wrong("p.data, in place", edit_data, Right()),
    Wrong("p.data of 16 bits, and then update_master_params", edit_and_tell, Right(), None, {}, torch.bfloat16, 2e-2),
    Wrong(
        "p.data, assigned",
        then_train(lambda model: setattr(model[0].weight, "data", torch.zeros(4, 3))),
        Right(),
    ),
    Wrong("p.grad before any backward", give_a_gradient, Right()),
    Wrong(
        "p.grad after a backward",
        replace_a_gradient,
        Refused(RuntimeError, "0.weight: .* assigned by hand.*synchronize"),
    ),
    Wrong("p.grad under no_sync", double_under_no_sync, Right()),
    Wrong("p.grad of another shape", misshape_a_gradient, Refused(RuntimeError, "size|shape")),
    Wrong("p.grad that is sparse", sparse_gradient, Refused(RuntimeError, "0.weight: expected a dense gradient")),
    Wrong("state, cleared", reset_state, Right()),
    Wrong("a tensor for a learning rate", a_tensor_learning_rate, Right()),
    Wrong(
        "a parameter among the slices",
        change_groups(lambda groups: groups[0]["params"].append(nn.Parameter(torch.ones(3)))),
        Refused(RuntimeError, "param_groups.0..'params'.: expected the 4 slices .* found 5 .*add_param_group"),
    ),
    Wrong(
        "a param group that was added to the wrapped optimizer",
        change_groups(lambda groups: groups.append({**groups[0], "params": []})),
        Refused(RuntimeError, "param_groups: expected the 1 groups .* found 2: .*add_param_group"),
    ),
    Wrong(
        "a param group that was taken out",
        change_groups(lambda groups: groups.pop()),
        Refused(RuntimeError, "param_groups: expected the 1 groups .* found 0: .*requires_grad_"),
    ),
]

# ---- copies ----


def copy_the_model(work: Work) -> None:
    another = copy.deepcopy(work.model)
    another(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(another.parameters(), lr=1.0).step()


def save_the_model(work: Work) -> None:
    buffer = io.BytesIO()
    torch.save(work.model, buffer)
    buffer.seek(0)
    another = torch.load(buffer, weights_only=False)
    another(torch.ones(2, 3)).sum().backward()
    assert another[0].weight.grad is not None


NO_COPY = Refused(TypeError, "got the LowLevelZeroOptimizer itself .*state_dict.*save_checkpoint")
COPIES = [
    Wrong("copy.copy", lambda work: copy.copy(work.optimizer), NO_COPY),
    Wrong("copy.deepcopy", lambda work: copy.deepcopy(work.optimizer), NO_COPY),
    Wrong("copy.deepcopy beside its model", lambda work: copy.deepcopy((work.model, work.optimizer)), NO_COPY),
    Wrong("pickle", lambda work: pickle.dumps(work.optimizer), NO_COPY),
    Wrong("torch.save", lambda work: torch.save({"optimizer": work.optimizer}, io.BytesIO()), NO_COPY),
    Wrong(
        "pickle of its scheduler",
        lambda work: pickle.dumps(torch.optim.lr_scheduler.StepLR(work.optimizer, 1)),
        NO_COPY,
    ),
    Wrong("copy.deepcopy of its model", copy_the_model, Right(nothing)),
    Wrong("torch.save of its model", save_the_model, Right(nothing)),
    Wrong("copy.deepcopy of the wrapped optimizer", lambda work: copy.deepcopy(work.optimizer.optim), Right(nothing)),
]

# ---- threads, processes, modes and exceptions ----


def step_in_a_thread(work: Work) -> None:
    work.backward()
    thread = threading.Thread(target=work.optimizer.step)
    thread.start()
    thread.join()


def train_two_in_threads(work: Work) -> None:
    """Each over a process group of its own."""
    models = [net(), net()]
    optimizers = [LowLevelZeroOptimizer(adam(each), model=each, dp_process_group=dist.new_group()) for each in models]

    def train(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
        for _ in range(5):
            optimizer.backward(model(torch.ones(2, 3)).sum())
            optimizer.step()
            optimizer.zero_grad()

    threads = [threading.Thread(target=train, args=pair) for pair in zip(models, optimizers, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def in_a_fork(act: Callable[[Work], Any]) -> Doing:
    """``act`` in a fork of this process, which must have come back after it."""

    def do(work: Work) -> None:
        work.steps(3)
        if work.plain:
            return
        child = os.fork()
        if child == 0:
            try:
                act(work)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    return do


def step_in_vain(work: Work) -> None:
    with pytest.raises(RuntimeError, match="expected the process that constructed the optimizer"):
        work.backward()
    with pytest.raises(RuntimeError, match="expected the process that constructed the optimizer"):
        work.optimizer.step()


def let_go(work: Work) -> None:
    work.optimizer = None
    gc.collect()


def destroy_the_group(work: Work) -> None:
    if not work.plain:
        dist.barrier()
        dist.destroy_process_group()
    work.steps(3)


def outlive_the_group(work: Work) -> None:
    model = net()
    another = LowLevelZeroOptimizer(adam(model), model=model)
    another.backward(model(torch.ones(2, 3)).sum())
    dist.barrier()
    dist.destroy_process_group()
    del another
    gc.collect()


def fail_and_go_on(error: type[BaseException], clear: bool = True) -> Doing:
    """A hook raises when all gradients but the first layer's are there, and then doesn't any more."""

    def hook(_: Tensor) -> None:
        raise error

    def do(work: Work) -> None:
        handle = work.model[0].weight.register_hook(hook)
        for loss in work.shares():
            with pytest.raises(error):
                work.run_back(loss)
        handle.remove()
        if clear:
            work.optimizer.zero_grad()
        work.backward(3)
        work.optimizer.step()

    return do


def keep_the_graph_of_gradients(work: Work) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of reference cycles
        for loss in work.shares():
            loss.backward(create_graph=True)
    work.optimizer.step()


def forward_under_no_grad(work: Work) -> None:
    with torch.no_grad():
        work.backward()
    work.optimizer.step()


def backward_under_no_grad(work: Work) -> None:
    shares = work.shares()
    with torch.no_grad():
        for loss in shares:
            work.run_back(loss)
    work.optimizer.step()


def under_inference_mode(call: Callable[[Work], Any]) -> Doing:
    def do(work: Work) -> None:
        with torch.inference_mode():
            call(work)

    return do


PROCESSES = [
    Wrong("step in another thread", step_in_a_thread, Right(one_step)),
    Wrong("two optimizers in two threads", train_two_in_threads, Right(nothing)),
    Wrong("a fork that steps", in_a_fork(step_in_vain), Right()),
    Wrong("a fork that lets go", in_a_fork(let_go), Right()),
    Wrong("a process group that is destroyed by now", destroy_the_group, Right()),
    Wrong("an exception in a hook", fail_and_go_on(KeyError), Right()),
    Wrong("an exception in a hook, without zero_grad", fail_and_go_on(KeyError, clear=False), Right()),
    Wrong("KeyboardInterrupt in backward", fail_and_go_on(KeyboardInterrupt), Right()),
    Wrong("create_graph", keep_the_graph_of_gradients, Right()),
    Wrong("a forward under no_grad", forward_under_no_grad, Right(nothing)),
    Wrong("a backward under no_grad", backward_under_no_grad, Right()),
    Wrong(
        "a backward under inference_mode",
        under_inference_mode(lambda work: work.backward()),
        Refused(RuntimeError, "backward: expected it outside of torch.inference_mode"),
    ),
    Wrong(
        "a step under inference_mode",
        under_inference_mode(lambda work: work.optimizer.step()),
        Refused(RuntimeError, "step: expected it outside of torch.inference_mode"),
    ),
]

# In a launch of its own: a thread of it waits for the file of a store that has gone with the group.
OUTLIVING = [Wrong("an optimizer that outlives its group", outlive_the_group, Right(nothing))]

TABLES = {
    "order": ORDER,
    "objects": OBJECTS,
    "ranks": RANKS,
    "models": MODELS,
    "edits": EDITS,
    "copies": COPIES,
    "processes": PROCESSES,
    "outliving": OUTLIVING,
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("table", TABLES)
def test_wrong_calls(
    table: str, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.chdir(tmp_path)  # some save
    try_out(TABLES[table], world_size, subtests)


# Those in which ranks run other syncs than others, or one can't.
UNEVEN = (
    "zero_grad for step",
    "a backward that one rank leaves out",
    "a bare backward on one rank",
    "an exception in one rank's backward",
    "a parameter that is unfrozen on one rank",
    "a sparse gradient on one rank",
)


@pytest.mark.usefixtures("forecasting")
def test_wrong_calls_where_unused_parameters_are_detected(subtests: pytest.Subtests) -> None:
    try_out([wrong for wrong in RANKS if wrong.what in UNEVEN], 2, subtests)


def test_the_uneven_ones_are_among_them() -> None:
    assert {wrong.what for wrong in RANKS}.issuperset(UNEVEN)


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_keywords(world_size: int) -> None:
    """All in one go: none leaves anything behind."""

    def rank(rank: int, world_size: int) -> None:
        for options, error, says in KEYWORDS:
            model = net()
            with pytest.raises(error, match=says):
                LowLevelZeroOptimizer(adam(model), model=model, **options)
            assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())

    run_ranks(rank, world_size)


def test_the_table_is_long_and_no_record_is_there_twice() -> None:
    whats = [wrong.what for table in TABLES.values() for wrong in table]
    assert len(whats) >= 60
    assert len(set(whats)) == len(whats)
