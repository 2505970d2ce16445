"""A child that a rank has forked: whatever it calls raises there, by name, and its parent trains on."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowlevel_zero
from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import latest, load_checkpoint, save_checkpoint
from lowlevel_zero.deepspeed import safe_get_full_fp32_param, safe_set_full_fp32_param
from tests.support.ranks import run_cases, run_ranks
from tests.support.scripts import adamw, loss_at, net


def in_child(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """What each of ``calls`` raises in a fork of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = {}
        try:
            for name, call in calls.items():
                try:
                    call()
                    told[name] = "nothing"
                except Exception as error:
                    told[name] = f"{type(error).__name__}: {error}"
            os.write(writing, json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    assert os.waitpid(child, 0)[1] == 0
    loaded: dict[str, str] = json.loads(text)
    return loaded


def plain_backward(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> dict[str, Callable[[], Any]]:
    return {"loss.backward()": lambda: loss_at(model, 5)(5).backward()}


def every_call(model: nn.Sequential, optimizer: LowLevelZeroOptimizer) -> dict[str, Callable[[], Any]]:
    """Of all kinds that talk to other ranks."""
    weight = model[0].weight
    gradient = weight.grad
    state = {"state": {}, "param_groups": []}
    return {
        "optimizer.backward": lambda: optimizer.backward(loss_at(model, 5)(5)),
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "synchronize": optimizer.synchronize,
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(state),
        "add_param_group": lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        "verify": optimizer.verify,
        "get_param_grad": lambda: optimizer.get_param_grad(weight),
        "get_working_grads_by_group_id": lambda: optimizer.get_working_grads_by_group_id(0),
        "a norm of p.grad": lambda: gradient.norm(),
        "p.grad.mul_": lambda: gradient.mul_(2.0),
        "p.grad.full_tensor": lambda: gradient.full_tensor(),
        "torch's clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "clip_grad_norm_ of this package": lambda: lowlevel_zero.clip_grad_norm_(model.parameters(), 1.0),
        "safe_get_full_fp32_param": lambda: safe_get_full_fp32_param(weight),
        "safe_set_full_fp32_param": lambda: safe_set_full_fp32_param(weight, torch.ones_like(weight)),
        "save_checkpoint": lambda: save_checkpoint("nowhere", model, optimizer),
        "load_checkpoint": lambda: load_checkpoint("nowhere", model, optimizer),
        "latest": lambda: latest("nowhere", group=dist.group.WORLD),
        "construct": lambda: LowLevelZeroOptimizer(adamw(net())),
    }


def destroy(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> dict[str, Callable[[], Any]]:
    """gloo itself may wait for its threads, which aren't there: the child leaves by then."""
    destroying = threading.Thread(target=dist.destroy_process_group, daemon=True)
    return {"destroy_process_group": destroying.start, "leave": lambda: destroying.join(1.0)}


Calls = Callable[[Any, LowLevelZeroOptimizer], dict[str, Callable[[], Any]]]
KINDS: dict[str, Calls] = {"a plain backward": plain_backward, "any other call": every_call, "destroying": destroy}


def live(rank: int, world_size: int, kind: str, shared: str, options: dict[str, Any]) -> tuple[dict[str, str], bool]:
    """Fork after two backwards, and train on; what the calls have raised, and whether the fork has changed nothing."""
    told: dict[str, str] = {}
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", shared)
        for forks in (True, False):
            model = net()
            optimizer = LowLevelZeroOptimizer(adamw(model), model=model, reduce_bucket_size=50, **options)
            for at in range(4):
                optimizer.backward(loss_at(model, at)(rank))
                if forks and at == 2 and rank == 0:
                    told = in_child(KINDS[kind](model, optimizer))
                optimizer.step()
                optimizer.zero_grad()
            optimizer.verify()
            ends.append([p.detach().clone() for p in model.parameters()])
    return told, all(map(torch.equal, *ends))


def test_every_call_but_its_group_s_end_raises_in_the_child_and_the_parent_trains_on(subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("a plain backward", "1", {"partition_grad": True, "overlap_allgather": True}),
        ("a plain backward", "0", {}),
        ("any other call", "1", {}),
        ("any other call", "0", {"partition_grad": True, "overlap_allgather": True}),
        ("destroying", "1", {"partition_grad": True}),  # its parent's reductions are left alone
        ("destroying", "0", {}),
    ]
    for (kind, shared, chosen), ran in run_cases(live, 2, cases, timeout=30):
        with subtests.test(kind=kind, shared=shared, options=chosen):
            (told, same), (_, others_same) = ran.values()
            assert same
            assert others_same
            assert told
            for call, error in told.items():
                if kind == "destroying":
                    assert error == "nothing", f"{call}: {error}"
                    continue
                assert error.startswith("RuntimeError: "), f"{call}: {error}"
                assert "expected the process that constructed the optimizer" in error, f"{call}: {error}"
                if kind == "a plain backward":
                    assert error.startswith("RuntimeError: the backward of 3."), error


def test_a_parameter_that_is_being_gathered_is_not_read_in_the_child() -> None:
    def train(rank: int, world_size: int) -> tuple[dict[str, str], bool]:
        told: dict[str, str] = {}
        ends = []
        for forks in (True, False):
            model = net()
            optimizer = LowLevelZeroOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model=model, overlap_allgather=True
            )
            optimizer.backward(loss_at(model, 0)(rank))
            if rank == 1:
                time.sleep(0.3)  # the other rank's gathers are still under way when it forks
            optimizer.step()
            if forks and rank == 0:
                reads = [lambda model=model: model[0].weight.sum(), optimizer.finish_gathers]
                told = in_child({f"{at}": read for at, read in enumerate(2 * reads)})
            optimizer.zero_grad()
            ends.append([p.detach().clone() for p in model.parameters()])
        return told, all(map(torch.equal, *ends))

    (told, same), (_, others_same) = run_ranks(train, 2)
    assert same
    assert others_same
    assert len(told) == 4
    for error in told.values():
        assert error.startswith("RuntimeError: gather (step 1): ")
        assert "0.weight" in error
        assert "expected the process that constructed the optimizer" in error
