"""Wrong calls: each is a clear error or the right thing, on one rank and on two, and never a hang."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import Communication, LowLevelZeroOptimizer
from lowlevel_zero.deepspeed import safe_get_full_fp32_param
from tests.support.misuse import (
    Doing,
    Refused,
    Right,
    Work,
    Wrong,
    adam,
    net,
    nothing,
    one_step,
    try_out,
)

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


def backward_twice_over_a_graph(work: Work) -> None:
    for loss in work.shares():
        for _ in range(2):
            work.run_back(loss, retain_graph=True)
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


def fail_in_a_closure(work: Work) -> None:
    def closure() -> None:
        work.backward()
        raise KeyError("the closure's own")

    work.optimizer.step(closure)


def from_the_loss_itself(work: Work) -> None:
    loss = work.loss()
    with work.optimizer.backward_pass(loss):
        loss.backward()


def step_within_a_pass(work: Work) -> None:
    with work.optimizer.backward_pass(work.loss()) as scaled:
        scaled.backward()
        work.optimizer.step()


def backward_within_a_pass(work: Work) -> None:
    loss = work.loss()
    with work.optimizer.backward_pass(loss):
        work.optimizer.backward(loss)


def pass_of_a_number(work: Work) -> None:
    with work.optimizer.backward_pass(1.0):
        pass


NEVER_IN_A_HOOK: dict[str, Callable[[Work], Any]] = {
    "step": lambda work: work.optimizer.step(),
    "zero_grad": lambda work: work.optimizer.zero_grad(),
    "backward": lambda work: work.backward(3),
    "clip_grad_norm_": lambda work: work.clip(1.0),
    "synchronize": lambda work: work.optimizer.synchronize(),
    "add_param_group": lambda work: work.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "safe_get_full_fp32_param of 0.weight": lambda work: safe_get_full_fp32_param(work.model[0].weight),
    "get_param_grad": lambda work: work.optimizer.get_param_grad(work.model[0].weight),
    "look at gradients": lambda work: work.optimizer.get_working_grads_by_group_id(0),
}

ORDER = [
    Wrong("step twice", step_twice, Right()),
    Wrong("backward twice through what was retained", backward_twice_over_a_graph, Right()),
    Wrong("no_sync in no_sync", nest_no_sync, Right()),
    Wrong("no_sync left by an error", leave_no_sync_by_an_error, Right()),
    Wrong("an exception in a closure", fail_in_a_closure, Refused(KeyError, "the closure's own")),
    Wrong(
        "backward_pass, and a backward from the loss itself",
        from_the_loss_itself,
        Refused(RuntimeError, "as scaled: scaled.backward"),
        dtype=torch.float16,
        options={"initial_scale": 64.0},
        tolerance=2e-2,
    ),
    Wrong(
        "a plain backward of an fp16 model",
        lambda work: work.loss().backward(),
        Refused(RuntimeError, r"2\.bias.*optimizer\.backward"),
        dtype=torch.float16,
        options={"initial_scale": 64.0},
        tolerance=2e-2,
    ),
    Wrong(
        "step within backward_pass",
        step_within_a_pass,
        Refused(RuntimeError, "step: .* outside of optimizer.backward_pass"),
    ),
    Wrong(
        "backward within backward_pass",
        backward_within_a_pass,
        Refused(RuntimeError, "backward: .* outside of optimizer.backward_pass"),
    ),
    Wrong("backward_pass of a number", pass_of_a_number, Refused(TypeError, "loss: expected a tensor, got float")),
    *(
        Wrong(f"{name} in a hook", in_a_hook(call), Refused(RuntimeError, f"{name}: .* in a hook"))
        for name, call in NEVER_IN_A_HOOK.items()
    ),
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


def let_go(work: Work) -> None:
    work.optimizer = None
    gc.collect()


def destroy_the_group(work: Work) -> None:
    dist.barrier()
    dist.destroy_process_group()
    work.steps(3)


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
    Wrong("a fork that lets go", in_a_fork(let_go), Right()),
    Wrong(
        "a process group that is destroyed by now",
        destroy_the_group,
        Refused(RuntimeError, "process group.*destroyed", ends=True),
    ),
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

# ---- the last rank does what the others don't: all are told, or the right thing happens ----


def instead(call: Callable[[Work], Any], others: Callable[[Work], Any] = lambda work: work.optimizer.step()) -> Doing:
    """After a backward, a call on the last rank alone, while the others make another."""

    def do(work: Work) -> None:
        work.backward()
        (call if work.odd else others)(work)

    return do


def thaw_alone(work: Work) -> None:
    frozen = work.model[3].weight
    frozen.requires_grad_(work.odd)
    work.loss().backward()
    try:
        work.optimizer.step()
    finally:
        frozen.requires_grad_(False)


def clip_by_torch_without_gradients_alone(work: Work) -> None:
    """Torch's function finds none there, and the rank goes on to the step."""
    if not work.odd:
        work.loss().backward()
    torch.nn.utils.clip_grad_norm_(work.model.parameters(), 1.0)
    work.optimizer.step()


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


def backward_by_wrong_inputs_alone(work: Work) -> None:
    """It can't begin there; what others have reduced by theirs is dropped."""
    inputs = [[work.model[0].weight]] if work.odd else None
    with pytest.raises((TypeError, RuntimeError)) if work.odd else nullcontext():
        work.optimizer.backward(work.loss(), inputs=inputs)
    work.optimizer.zero_grad()


class Refusing(logging.Handler):
    """A handler as of who wants no warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError(f"unwanted: {record.getMessage()}")


def refuse_a_warning_alone(work: Work) -> None:
    """Rank 0, which is to tell that a step took gradients of the last one, too, has stepped as others have."""
    work.backward()
    work.optimizer.step()
    work.backward()
    handler = Refusing(logging.WARNING)
    logging.getLogger("lowlevel_zero").addHandler(handler)
    try:
        with pytest.raises(ValueError, match="unwanted") if work.rank == 0 else nullcontext():
            work.optimizer.step()
    finally:
        logging.getLogger("lowlevel_zero").removeHandler(handler)


def two_steps_of_gradients_that_add_up(work: Work) -> None:
    for _ in range(2):
        work.backward()
        work.optimizer.step()


def construct_by_a_bad_option(work: Work) -> None:
    own = net()
    LowLevelZeroOptimizer(adam(own), model=own, communication=Communication(reduction="max" if work.odd else "mean"))


def construct(model: nn.Module) -> None:
    LowLevelZeroOptimizer(adam(model), model=model)


def construct_with_another_buffer(work: Work) -> None:
    model = net()
    model.register_buffer("seen", torch.zeros(2 if work.odd else 1))
    construct(model)


def frozen(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)


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


ONE_RANK = [
    Wrong("inputs that are no tensors on one rank", backward_by_wrong_inputs_alone, Right(nothing)),
    Wrong("a warning that one rank refuses", refuse_a_warning_alone, Right(two_steps_of_gradients_that_add_up)),
    Wrong(
        "verify with buffers for verify",
        instead(lambda work: work.optimizer.verify(buffers=True), lambda work: work.optimizer.verify()),
        Refused(RuntimeError, "rank 0 to verify; rank 1 to verify buffers: "),
    ),
    Wrong(
        "a step on one rank",
        instead(lambda work: work.optimizer.step(), lambda work: work.optimizer.zero_grad()),
        Refused(RuntimeError, "let every rank make the same calls .* «if rank == 0».*zero_grad"),
    ),
    Wrong(
        "an accessor on one rank",
        lambda work: safe_get_full_fp32_param(work.model[0].bias) if work.odd else work.optimizer.zero_grad(),
        Refused(RuntimeError, "rank 0 to zero_grad; rank 1 to call safe_get_full_fp32_param of 0.bias: "),
    ),
    Wrong(
        "a parameter that is unfrozen on one rank",
        thaw_alone,
        Refused(RuntimeError, "3.weight: expected it frozen", "rank 1 could not step: RuntimeError: 3.weight"),
    ),
    Wrong(
        "a norm by torch where one rank has no gradients",
        clip_by_torch_without_gradients_alone,
        Refused(RuntimeError, "the same call on every rank.*lowlevel_zero.clip_grad_norm_"),
    ),
    Wrong("a parameter over other memory on one rank", move_alone, Right()),
    Wrong(
        "a parameter of another dtype on one rank",
        convert_alone,
        Refused(
            RuntimeError,
            "0.weight: expected dtype, device and shape",
            "rank 1 could not step: RuntimeError: 0.weight",
            ends=True,
        ),
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
        "a bad option on one rank",
        construct_by_a_bad_option,
        Refused(
            ValueError,
            "reduction: expected",
            "rank 1 could not construct .*ValueError: communication.reduction: expected",
        ),
    ),
    Wrong(
        "a weight of another shape",
        lambda work: construct(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5 if work.odd else 2))),
        Refused(ValueError, r"rank 0.*1\.weight.*\(2, 4\).*rank 1.*\(5, 4\)"),
    ),
    Wrong(
        "a layer too many",
        lambda work: construct(nn.Sequential(*[nn.Linear(3, 3) for _ in range(3 if work.odd else 2)])),
        Refused(ValueError, r"rank 0.*rank 1.*2\.weight"),
    ),
    Wrong(
        "a buffer of another shape",
        construct_with_another_buffer,
        Refused(ValueError, r"rank 0.*rank 1.*seen.*\(2,\)"),
    ),
    Wrong(
        "a later parameter of another shape",
        lambda work: work.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2 + work.odd))]}),
        Refused(ValueError, "rank 1"),
    ),
    Wrong(
        "a later frozen parameter of another dtype",
        lambda work: work.optimizer.add_param_group({"params": [frozen(torch.int32 if work.odd else torch.float32)]}),
        Refused(ValueError, "rank 1"),
    ),
    Wrong(
        "a state dict that only the first rank has whole",
        load_otherwise,
        Refused(ValueError, "the same state dict on every rank; rank 0 has .*momentum_buffer.* where rank 1 has"),
    ),
    Wrong(
        "two optimizers that ranks step in other orders",
        step_two_in_other_orders,
        # Which number an optimizer has in a process depends on how many there were before.
        Refused(RuntimeError, r"rank 0 to step of optimizer (\d+); rank 1 to step of optimizer (?!\1)\d+: "),
    ),
]


TABLES = {"order": ORDER, "processes": PROCESSES, "one rank": ONE_RANK}


@pytest.mark.parametrize(
    ("table", "world_size"), [("order", 1), ("order", 2), ("processes", 1), ("processes", 2), ("one rank", 2)]
)
def test_wrong_calls(
    table: str, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.chdir(tmp_path)  # some save
    try_out(TABLES[table], world_size, subtests)
