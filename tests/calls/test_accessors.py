"""Accessors: values of one parameter, and of a model, read and written as DeepSpeed's users do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.deepspeed import (
    full_fp32_params,
    full_grads,
    full_optimizer_states,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.support.accessing import backward, train, wrapped
from tests.support.numbers import trained
from tests.support.oracle import Run, adamw, build, groups
from tests.support.several import check_all

STEPS = 3  # until layers that were dropped are foreseen


def one_each(step: int, rank: int) -> set[int]:
    return {rank % 3}


def always_the_second(step: int, rank: int) -> set[int]:
    return {1}


def without_padding(slices: list[Tensor], p: Tensor) -> Tensor:
    """What ranks' slices are together, in ``p``'s shape; padding must be zeros."""
    flat = torch.cat(slices)
    assert not flat[p.numel() :].any()
    return torch.as_strided(flat[: p.numel()].clone(), p.shape, p.stride())


# Gradients


def read_gradients(rank: int, world_size: int, run: Run) -> dict[str, tuple[Tensor, Tensor]]:
    """Whole gradients of a further backward, and this rank's slices of them, by name."""
    model, optimizer = wrapped(run)
    train(optimizer, model, run, STEPS, rank)
    backward(optimizer, model, run, STEPS, rank)
    full, again = full_grads(model), full_grads(model, device="cpu")
    found = {}
    for name, p in model.named_parameters():
        expected = optimizer.get_param_grad(p) if p.requires_grad and p.numel() else None
        told = (full[name], again[name], safe_get_full_grad(p))
        if expected is None:
            assert {*told} == {None}, name
            continue
        for value in told:
            assert value is not None
            assert (value.dtype, value.shape) == (torch.float32, p.shape)
            assert torch.equal(value.to(expected.dtype), expected), name
        found[name] = told[0], optimizer.sharded_parameters[p].handle.to_local()  # type: ignore[union-attr]
    optimizer.step()  # it must not have been disturbed
    return found


STAGE_2 = {"partition_grad": True}
RUNS: dict[str, Run] = {
    "one rank": Run(1, drop=always_the_second),
    "micro-batches and drops": Run(3, micro_batches=3, drop=one_each, options=STAGE_2),
    "offload and a layer that nobody uses": Run(4, drop=always_the_second, options={"cpu_offload": True}),
    "overlapped gathers": Run(2, micro_batches=2, options={"overlap_allgather": True}),
    "fp16": Run(2, micro_batches=2, drop=one_each, dtype=torch.float16, options={"initial_scale": 2.0**10, **STAGE_2}),
}


def test_gradients_are_those_of_get_param_grad(subtests: pytest.Subtests) -> None:
    parameters = dict(build(Run()).named_parameters())
    for what, _, ran in trained(RUNS, read_gradients):
        with subtests.test(what):
            ranks = ran.values()
            assert len(ranks[0]) > 5
            for name, (full, _) in ranks[0].items():
                slices = [found[name][1] for found in ranks]
                assert torch.equal(without_padding(slices, parameters[name]), full), name


def gradients_read_under_inference_mode_can_still_be_added_to(rank: int, world_size: int) -> None:
    ends = []
    for reads in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, stage=2)
        for micro_batch in range(3):
            optimizer.backward(model(torch.full((1, 3), 1.0 + micro_batch + rank)).square().sum())
            with torch.inference_mode():
                if reads:
                    full_grads(model)
        optimizer.step()
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)


# Masters


def _padding(p: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    size = -(-p.numel() // world_size)
    return max(0, min(size, p.numel() - rank * size)), size


def masters_are_whole_and_round_to_the_parameter(rank: int, world_size: int) -> None:
    ways: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float32, {"overlap_allgather": True}),
        (torch.bfloat16, {"cpu_offload": True}),
        (torch.bfloat16, {"master_weights": False}),
    ]
    for dtype, options in ways:
        run = Run(dtype=dtype, options=options)
        model, optimizer = wrapped(run)
        train(optimizer, model, run, 2, rank)
        full = full_fp32_params(model)
        rounded = []
        for name, p in model.named_parameters():
            if not p.requires_grad:
                assert full[name] is None
                continue
            single = safe_get_full_fp32_param(p)
            assert single.dtype == torch.float32
            assert torch.equal(single, full[name])  # type: ignore[arg-type]
            assert torch.equal(single.to(dtype), p.detach())
            own = optimizer.get_working_to_master_map()[id(p)].detach().float()
            assert not own[slice(*_padding(p, rank, world_size))].any(), name
            rounded.append(torch.equal(own, own.bfloat16().float()))
        if dtype == torch.bfloat16 and options.get("master_weights", True):
            assert not all(rounded)


# Optimizer state


def states_are_the_state_dict_s(rank: int, world_size: int) -> None:
    ways: list[tuple[torch.dtype, dict[str, Any]]] = [(torch.float32, {}), (torch.bfloat16, {"cpu_offload": True})]
    for dtype, options in ways:
        run = Run(dtype=dtype, drop=always_the_second, optimizer=adamw, options=options)
        model, optimizer = wrapped(run)
        named = dict(model.named_parameters())
        assert set(full_optimizer_states(model, "exp_avg").values()) == {None}
        assert safe_get_full_optimizer_state(model.inward, "exp_avg") is None
        train(optimizer, model, run, 2, rank)
        places = {p: place for place, p in enumerate(p for group in groups(model) for p in group["params"])}
        states = optimizer.state_dict()["state"]
        for key in ("exp_avg", "exp_avg_sq", "step"):
            full = full_optimizer_states(model, key)
            for name, p in named.items():
                expected = states.get(places[p], {}).get(key)
                assert (full[name] is None) == (expected is None), name
                if expected is None:
                    continue
                assert full[name].dtype == torch.float32  # type: ignore[union-attr]
                assert torch.equal(full[name], expected.float())  # type: ignore[arg-type]
                assert torch.equal(safe_get_full_optimizer_state(p, key), full[name])  # type: ignore[arg-type]
        assert full["layers.1.weight"] is None


# What is set


def what_is_set_is_read_and_stepped_with(rank: int, world_size: int) -> None:
    """On all ranks, low bits of masters too; the gradients and states of others stay."""
    ways: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float32, {"cpu_offload": True}),
        (torch.bfloat16, {"overlap_allgather": True, "partition_grad": True}),
    ]
    for dtype, options in ways:
        run = Run(dtype=dtype, options=options)
        model, optimizer = wrapped(run)
        train(optimizer, model, run, 1, rank)
        optimizer.load_state_dict(optimizer.state_dict())  # offers masters, which must not come back
        generator = torch.Generator().manual_seed(0)
        masters = full_fp32_params(model)
        for name, p in model.named_parameters():
            if p.requires_grad:
                masters[name] = torch.randn(p.shape, generator=generator)
                safe_set_full_fp32_param(p, masters[name])
                assert torch.equal(safe_get_full_fp32_param(p), masters[name]), name
                assert torch.equal(p.detach(), masters[name].to(dtype)), name
        buffers = full_optimizer_states(model, "momentum_buffer")
        backward(optimizer, model, run, 1, rank)
        gradients = full_grads(model)
        for name in ("conv.weight", "inward"):
            p = model.get_parameter(name)
            gradients[name], buffers[name] = (torch.randn(p.shape, generator=generator) for _ in range(2))
            safe_set_full_grad(p, gradients[name])
            safe_set_full_optimizer_state(p, buffers[name], "momentum_buffer")
        for before, now in (
            (gradients, full_grads(model)),
            (buffers, full_optimizer_states(model, "momentum_buffer")),
        ):
            for name, value in before.items():
                assert value is None or torch.equal(value, now[name]), name
        optimizer.step()
        for name, after in full_fp32_params(model).items():
            gradient, buffer = gradients[name], buffers[name]
            if gradient is not None and buffer is not None:
                torch.testing.assert_close(after, masters[name] - 0.05 * (0.9 * buffer + gradient))
        own = optimizer.get_working_to_master_map()[id(model.inward)]
        assert not own[slice(*_padding(model.inward, rank, world_size))].any()


def a_number_that_was_read_is_a_copy(rank: int, world_size: int) -> None:
    model = torch.nn.Linear(5, 6)
    optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model=model)
    for _ in range(2):
        optimizer.backward(model(torch.ones(2, 5)).sum())
        optimizer.step()
        optimizer.zero_grad()
        step = safe_get_full_optimizer_state(model.weight, "step")
        assert step is not None
        step.add_(100)
    again = safe_get_full_optimizer_state(model.weight, "step")
    assert again is not None
    assert again.item() == 2


CHECKS = [
    gradients_read_under_inference_mode_can_still_be_added_to,
    masters_are_whole_and_round_to_the_parameter,
    what_is_set_is_read_and_stepped_with,
    states_are_the_state_dict_s,
    a_number_that_was_read_is_a_copy,
]


def test_masters_gradients_and_states_are_read_and_set(subtests: pytest.Subtests) -> None:
    check_all(CHECKS, 3, subtests, one_group=True)
