"""Accessors: whole and local values of one parameter, and of a model, read and written as DeepSpeed's users do."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer, accessors
from lowlevel_zero.accessors import (
    full_fp32_params,
    full_grads,
    full_optimizer_states,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.state import values
from tests.support.grid import Grid
from tests.support.judging import mistakes
from tests.support.numbers import trained
from tests.support.oracle import Run, adamw, build, groups, loss_of, summed_gradients
from tests.support.ranks import run_cases, run_ranks

STAGES = ("stage 1", "stage 2")
STEPS = 3  # until layers that were dropped are foreseen
DTYPES = (torch.float32, torch.bfloat16)


def one_each(step: int, rank: int) -> set[int]:
    return {rank % 3}


def always_the_second(step: int, rank: int) -> set[int]:
    return {1}


def wrapped(run: Run, **options: Any) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    model = build(run)
    options = {"reduce_bucket_size": 50, **run.options, **options}
    return model, LowLevelZeroOptimizer(run.optimizer(groups(model)), model=model, **options)


def backward(optimizer: LowLevelZeroOptimizer, model: nn.Module, run: Run, step: int, rank: int) -> None:
    for micro in range(run.micro_batches):
        loss = loss_of(model, run, step, micro, rank)
        if run.no_sync and micro < run.micro_batches - 1:
            with optimizer.no_sync():
                optimizer.backward(loss)
        elif run.bare:
            loss.backward()
        else:
            optimizer.backward(loss)


def train(optimizer: LowLevelZeroOptimizer, model: nn.Module, run: Run, steps: int, rank: int) -> None:
    for step in range(steps):
        backward(optimizer, model, run, step, rank)
        optimizer.step()
        optimizer.zero_grad()


def without_padding(slices: list[Tensor], p: Tensor) -> Tensor:
    """What ranks' slices are together, in ``p``'s shape; padding must be zeros."""
    flat = torch.cat(slices)
    assert not flat[p.numel() :].any()
    return torch.as_strided(flat[: p.numel()].clone(), p.shape, p.stride())


# Gradients


class Seen(NamedTuple):
    """what a rank read after a further backward, and the weights that it had then."""

    weights: dict[str, Tensor]
    full: dict[str, Tensor | None]
    single: dict[str, Tensor | None]
    local: dict[str, Tensor | None]


def read_gradients(rank: int, world_size: int, run: Run) -> Seen:
    model, optimizer = wrapped(run)
    train(optimizer, model, run, STEPS, rank)
    backward(optimizer, model, run, STEPS, rank)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    named = dict(model.named_parameters())
    full = full_grads(model)
    single = {name: safe_get_full_grad(p) for name, p in named.items()}
    local = {name: safe_get_local_grad(p) for name, p in named.items()}
    again = full_grads(model, device="cpu")
    assert all(full[name] is value or torch.equal(full[name], value) for name, value in again.items())  # type: ignore[arg-type]
    optimizer.step()  # it must not have been disturbed
    return Seen(weights, full, single, local)


def check_gradients(run: Run, ranks: list[Seen], tolerance: float) -> None:
    model = build(run)
    model.load_state_dict(ranks[0].weights)
    sums = summed_gradients(model, run, STEPS)
    check_mistakes_show(model, run, STEPS, tolerance)
    for name, p in model.named_parameters():
        for seen in ranks:
            full, single = seen.full[name], seen.single[name]
            if p not in sums or p.numel() == 0:
                assert full is single is seen.local[name] is None, name
                continue
            assert full is not None
            assert single is not None
            assert full.dtype == single.dtype == torch.float32
            assert full.shape == p.shape
            assert torch.equal(full, single)
            off = off_by((sums[p] / run.world_size).float(), full)
            assert off <= tolerance, f"{name} is off by {off:.2g} of itself"
        if p in sums and p.numel():
            slices = [seen.local[name] for seen in ranks]
            assert torch.equal(without_padding(slices, p), ranks[0].full[name]), name  # type: ignore[arg-type]


def off_by(expected: Tensor, got: Tensor) -> float:
    """As a share of the expected values."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def check_mistakes_show(model: nn.Module, run: Run, step: int, tolerance: float) -> None:
    """A rank left out, a factor 2, a lost micro-batch: each is ten tolerances off in some parameter."""
    sums = summed_gradients(model, run, step)
    for what, wrong in mistakes(run).items():
        others = summed_gradients(model, wrong, step)
        farthest = max(off_by(total, others[p]) for p, total in sums.items() if p.numel())
        assert wrong.steps != run.steps or farthest > 10 * tolerance, f"the tolerance would hide it: {what}"


WAYS: dict[str, Run] = {
    "one-rank": Run(1, drop=always_the_second),
    "accumulation-drop": Run(3, micro_batches=3, drop=one_each),
    "no_sync": Run(2, micro_batches=3, no_sync=True),
    "bare-drop": Run(2, bare=True, drop=one_each),
    "offload-total-drop": Run(4, drop=always_the_second, options={"cpu_offload": True}),
    "overlapped": Run(2, micro_batches=2, options={"overlap_allgather": True}),
}


def in_both_stages(runs: Mapping[str, Run]) -> dict[str, Run]:
    return {
        f"{name}, {stage}": run.with_options(partition_grad=stage == "stage 2")
        for name, run in runs.items()
        for stage in STAGES
    }


def test_gradients_are_one_process_s(subtests: pytest.Subtests) -> None:
    """Of micro-batches in both stages, of the others in one."""
    others = {"one-rank, stage 1", "bare-drop, stage 2", "offload-total-drop, stage 2", "overlapped, stage 1"}
    runs = {
        name: run
        for name, run in in_both_stages(WAYS).items()
        if name in others or name.startswith(("accumulation-drop", "no_sync"))
    }
    for name, run, ran in trained(runs, read_gradients):
        with subtests.test(name):
            check_gradients(run, ran.values(), 1e-5)


def test_gradients_of_sixteen_bits_are_unscaled(subtests: pytest.Subtests) -> None:
    run = Run(2, micro_batches=2, drop=one_each, options={"initial_scale": 2.0**10})
    runs = {str(dtype): replace(run, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)}
    for name, each, ran in trained(in_both_stages(runs), read_gradients):
        with subtests.test(name):
            check_gradients(each, ran.values(), 2 * torch.finfo(each.dtype).eps)


def test_a_gradient_that_is_set_is_stepped(subtests: pytest.Subtests) -> None:
    def rank(rank: int, world_size: int, stage_2: bool) -> None:
        run = Run(optimizer=lambda params: torch.optim.SGD(params, lr=0.5))
        for offload in (False, True):
            model, optimizer = wrapped(run, partition_grad=stage_2, cpu_offload=offload)
            named = dict(model.named_parameters())
            backward(optimizer, model, run, 0, rank)
            whole, sliced, other = named["conv.weight"], named["inward"], named["layers.1.weight"]
            kept = safe_get_full_grad(other)
            new, part = torch.randn_like(whole), torch.full_like(safe_get_local_fp32_param(sliced), rank + 1.0)
            dist.broadcast(new, 0)
            before = {name: p.detach().clone() for name, p in named.items()}
            safe_set_full_grad(whole, new)
            safe_set_local_grad(sliced, part)
            torch.testing.assert_close(safe_get_full_grad(whole), new)
            assert torch.equal(safe_get_full_grad(other), kept)  # type: ignore[arg-type]
            flat = torch.cat([torch.full_like(part, of + 1.0) for of in range(world_size)])[: sliced.numel()]
            expected = torch.as_strided(flat, sliced.shape, sliced.stride())
            torch.testing.assert_close(safe_get_full_grad(sliced), expected)
            optimizer.step()
            for p, name, gradient in (
                (whole, "conv.weight", new),
                (sliced, "inward", expected),
                (other, "layers.1.weight", kept),
            ):
                torch.testing.assert_close(p.detach(), before[name] - 0.5 * gradient)

    for (stage_2,), ran in run_cases(rank, 3, [(False,), (True,)], one_group=True):
        with subtests.test(stage_2=stage_2):
            ran.values()


# Masters


def test_masters_are_whole_and_round_to_the_parameter(subtests: pytest.Subtests) -> None:
    def rank(rank: int, world_size: int, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Tensor]:
        run = Run(dtype=dtype, options=options)
        model, optimizer = wrapped(run)
        train(optimizer, model, run, 2, rank)
        full = full_fp32_params(model)
        found: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            if not p.requires_grad:
                assert full[name] is None
                continue
            single = safe_get_full_fp32_param(p)
            assert single.dtype == torch.float32
            assert torch.equal(single, full[name])  # type: ignore[arg-type]
            assert torch.equal(single.to(dtype), p.detach())
            found[name] = safe_get_local_fp32_param(p)
        keeps_more = dtype == torch.bfloat16 and options.get("master_weights", True)
        assert keeps_more == any(not torch.equal(v, v.bfloat16().float()) for v in found.values()) or not keeps_more
        assert all(
            torch.equal(found[name], optimizer.get_working_to_master_map()[id(p)].float())
            for name, p in model.named_parameters()
            if name in found
        )
        return found

    ways: list[dict[str, Any]] = [{}, {"overlap_allgather": True}, {"cpu_offload": True}, {"master_weights": False}]
    for (dtype, options), ran in run_cases(rank, 3, product(DTYPES, ways), one_group=True):
        with subtests.test(dtype=dtype, options=options):
            slices = ran.values()
            for name, p in build(Run()).named_parameters():
                if p.requires_grad:
                    without_padding([each[name] for each in slices], p)


def test_edits_are_seen_before_the_next_step() -> None:
    def rank(rank: int, world_size: int) -> None:
        model, optimizer = wrapped(Run(dtype=torch.bfloat16))
        train(optimizer, model, Run(dtype=torch.bfloat16), 1, rank)
        p = model.inward
        with torch.no_grad():
            p.fill_(0.25)
        assert torch.equal(safe_get_local_fp32_param(p), optimizer.get_working_to_master_map()[id(p)])
        assert torch.equal(safe_get_full_fp32_param(p), torch.full_like(p, 0.25).float())

    run_ranks(rank, 2)


def test_a_parameter_that_is_set_is_so_on_all_ranks_low_bits_too(subtests: pytest.Subtests) -> None:
    def rank(rank: int, world_size: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
        run = Run(dtype=dtype, optimizer=lambda params: torch.optim.SGD(params, lr=0.5), options=options)
        model, optimizer = wrapped(run)
        train(optimizer, model, run, 1, rank)
        optimizer.load_state_dict(optimizer.state_dict())  # offers masters, which must not come back
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            value = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
            safe_set_full_fp32_param(p, value)
            assert torch.equal(safe_get_full_fp32_param(p), value), name
            assert torch.equal(p.detach(), value.to(dtype)), name
        backward(optimizer, model, run, 1, rank)
        gradients, masters = full_grads(model), full_fp32_params(model)
        optimizer.step()
        for name, after in full_fp32_params(model).items():
            gradient, before = gradients[name], masters[name]
            if gradient is not None and before is not None:
                torch.testing.assert_close(after, before - 0.5 * gradient)
        local = torch.full_like(safe_get_local_fp32_param(model.inward), rank + 0.125)
        safe_set_local_fp32_param(model.inward, local)
        flat = torch.cat([torch.full_like(local, of + 0.125) for of in range(world_size)])[: model.inward.numel()]
        assert torch.equal(
            model.inward.detach().float(), torch.as_strided(flat, model.inward.shape, model.inward.stride())
        )
        assert not safe_get_local_fp32_param(model.inward)[slice(*_padding(model.inward, rank, world_size))].any()

    ways: list[dict[str, Any]] = [{}, {"overlap_allgather": True, "partition_grad": True}, {"cpu_offload": True}]
    for (dtype, options), ran in run_cases(rank, 3, product(DTYPES, ways), one_group=True):
        with subtests.test(dtype=dtype, options=options):
            ran.values()


def _padding(p: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    size = -(-p.numel() // world_size)
    return max(0, min(size, p.numel() - rank * size)), size


def test_a_write_between_forward_and_backward_is_noticed() -> None:
    def rank(rank: int, world_size: int) -> None:
        model, optimizer = wrapped(Run())
        loss = loss_of(model, Run(), 0, 0, rank)
        safe_set_full_fp32_param(model.outward.weight, torch.zeros_like(model.outward.weight))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            optimizer.backward(loss)

    run_ranks(rank, 2)


# Optimizer state


def test_states_are_the_state_dict_s(subtests: pytest.Subtests) -> None:
    def rank(rank: int, world_size: int, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
        run = Run(dtype=dtype, drop=always_the_second, optimizer=adamw, options=options)
        model, optimizer = wrapped(run)
        named = dict(model.named_parameters())
        assert set(full_optimizer_states(model, "exp_avg").values()) == {None}
        assert safe_get_full_optimizer_state(model.inward, "exp_avg") is None
        assert safe_get_local_optimizer_state(model.inward, "exp_avg") is None
        train(optimizer, model, run, 2, rank)
        places = {p: place for place, p in enumerate(p for group in groups(model) for p in group["params"])}
        states = optimizer.state_dict()["state"]
        local: dict[str, Tensor] = {}
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
                if key == "step":
                    assert torch.equal(safe_get_local_optimizer_state(p, key), torch.tensor(2.0))  # type: ignore[arg-type]
                elif key == "exp_avg":
                    local[name] = safe_get_local_optimizer_state(p, key)  # type: ignore[assignment]
        assert full["layers.1.weight"] is None
        return {"local": local, "full": full_optimizer_states(model, "exp_avg")}

    ways: list[dict[str, Any]] = [{}, {"cpu_offload": True}]
    for (dtype, options), ran in run_cases(rank, 3, product(DTYPES, ways), one_group=True):
        with subtests.test(dtype=dtype, options=options):
            ranks = ran.values()
            full = ranks[0]["full"]
            for name, p in build(Run()).named_parameters():
                if name in ranks[0]["local"]:
                    assert torch.equal(without_padding([each["local"][name] for each in ranks], p), full[name])


def test_a_state_that_is_set_is_stepped_with() -> None:
    def rank(rank: int, world_size: int) -> None:
        for offload in (False, True):
            run = Run(options={"cpu_offload": offload})
            model, optimizer = wrapped(run)
            train(optimizer, model, run, 1, rank)
            p, q = model.inward, model.outward.weight
            value = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
            part = torch.full_like(safe_get_local_fp32_param(q), 1.0 + rank)
            safe_set_full_optimizer_state(p, value, "momentum_buffer")
            safe_set_local_optimizer_state(q, part, "momentum_buffer")
            assert torch.equal(safe_get_full_optimizer_state(p, "momentum_buffer"), value)  # type: ignore[arg-type]
            flat = torch.cat([torch.full_like(part, 1.0 + of) for of in range(world_size)])[: q.numel()]
            assert torch.equal(safe_get_full_optimizer_state(q, "momentum_buffer"), flat.view(q.shape))  # type: ignore[arg-type]
            before = p.detach().clone()
            backward(optimizer, model, run, 1, rank)
            gradient = safe_get_full_grad(p)
            optimizer.step()
            torch.testing.assert_close(p.detach(), before - 0.05 * (0.9 * value + gradient))

    run_ranks(rank, 3)


def test_numbers_are_set_alike() -> None:
    def rank(rank: int, world_size: int) -> None:
        model, optimizer = wrapped(Run(optimizer=adamw))
        train(optimizer, model, Run(), 1, rank)
        p = model.scale
        safe_set_full_optimizer_state(p, torch.tensor(7.0), "step")
        assert safe_get_full_optimizer_state(p, "step") == 7
        safe_set_local_optimizer_state(p, torch.tensor([5.0]), "step")
        assert safe_get_local_optimizer_state(p, "step") == 5
        assert safe_get_full_optimizer_state(model.one, "step") == 1
        with pytest.raises(ValueError, match="«step = 0.0» where rank 1"):
            safe_set_full_optimizer_state(p, torch.tensor(float(rank)), "step")
        with pytest.raises(TypeError, match="one number"):
            safe_set_full_optimizer_state(p, torch.zeros(3), "step")
        assert safe_get_full_optimizer_state(p, "step") == 5

    run_ranks(rank, 2)


# Many at once


class Many(nn.Module):
    """200 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 9)) for _ in range(200))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x @ weight).sum() for weight in self.weights]).sum()


def many() -> tuple[nn.Module, LowLevelZeroOptimizer]:
    model = Many()
    optimizer = LowLevelZeroOptimizer(torch.optim.Adam(model.parameters()), model=model, partition_grad=True)
    optimizer.backward(model(torch.ones(2, 8)))
    return model, optimizer


def count_gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each wire that is gathered from now on."""
    sizes: list[int] = []
    gather = ShardGroup.gather

    def counted(self: ShardGroup, own: Any, rows: Any) -> Any:
        sizes.append(sum(each.numel() * each.element_size() for each in rows))
        return gather(self, own, rows)

    monkeypatch.setattr(ShardGroup, "gather", counted)
    return sizes


@pytest.mark.parametrize("what", ["gradients", "masters", "states"])
def test_many_take_one_message(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(rank: int, world_size: int) -> list[int]:
        model, optimizer = many()
        if what == "states":
            optimizer.step()
        batched: dict[str, Callable[[], Any]] = {
            "gradients": lambda: full_grads(model),
            "masters": lambda: full_fp32_params(model),
            "states": lambda: full_optimizer_states(model, "exp_avg"),
        }
        single: dict[str, Callable[[Tensor], Any]] = {
            "gradients": safe_get_full_grad,
            "masters": safe_get_full_fp32_param,
            "states": lambda p: safe_get_full_optimizer_state(p, "exp_avg"),
        }
        sizes = count_gathers(monkeypatch)
        batched[what]()  # and what backward has left under way
        counts = []
        for read in (batched[what], lambda: [single[what](p) for p in model.parameters()]):
            sizes.clear()
            assert len(read()) == 200
            counts.append(len(sizes))
        return counts

    assert run_ranks(rank, 2) == [[1, 200]] * 2


def test_a_message_is_no_larger_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 3000  # ten parameters of 288 bytes
    monkeypatch.setattr(values, "MESSAGE_BYTES", bound)

    def rank(rank: int, world_size: int) -> list[int]:
        model, optimizer = many()
        sizes = count_gathers(monkeypatch)
        assert all(value is not None for value in full_grads(model).values())
        assert optimizer is not None
        return sizes

    for sizes in run_ranks(rank, 2):
        assert sizes == [2880] * 20


def test_a_model_may_have_several_optimizers_and_parameters_of_none() -> None:
    def rank(rank: int, world_size: int) -> None:
        model = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("a", "b", "plain")})
        optimizers = [
            LowLevelZeroOptimizer(torch.optim.SGD(model[name].parameters(), lr=0.1), model=model[name])
            for name in ("b", "a")
        ]
        x = torch.ones(2, 3)
        for optimizer, name in zip(optimizers, ("b", "a"), strict=True):
            optimizer.backward(model[name](x).sum())
        found = full_grads(model)
        assert list(found) == [name for name, _ in model.named_parameters()]
        assert [name for name, value in found.items() if value is None] == ["plain.weight", "plain.bias"]
        assert torch.equal(found["a.weight"], torch.full((2, 3), 2.0))  # type: ignore[arg-type]

    run_ranks(rank, 2)


# What is refused


def test_names_and_order_of_arguments_are_deepspeed_s() -> None:
    expected = {
        "safe_get_full_fp32_param": ["param"],
        "safe_get_full_grad": ["param"],
        "safe_get_full_optimizer_state": ["param", "optim_state_key"],
        "safe_set_full_fp32_param": ["param", "value"],
        "safe_set_full_grad": ["param", "value"],
        "safe_set_full_optimizer_state": ["param", "value", "optim_state_key"],
        "safe_get_local_fp32_param": ["param"],
        "safe_get_local_grad": ["param"],
        "safe_get_local_optimizer_state": ["param", "optim_state_key"],
        "safe_set_local_fp32_param": ["param", "value"],
        "safe_set_local_grad": ["param", "value"],
        "safe_set_local_optimizer_state": ["param", "value", "optim_state_key"],
    }
    for name, positional in expected.items():
        parameters = inspect.signature(getattr(accessors, name)).parameters.values()
        assert [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD] == positional


def test_ranks_that_call_different_things_are_told_so() -> None:
    def rank(rank: int, world_size: int) -> list[str]:
        model, optimizer = wrapped(Run())
        twin = nn.Linear(3, 2), nn.Linear(3, 2)
        optimizers = [LowLevelZeroOptimizer(torch.optim.SGD(m.parameters(), lr=1.0), model=m) for m in twin]
        backward(optimizer, model, Run(), 0, rank)
        pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
            (lambda: safe_get_full_grad(model.inward), lambda: safe_get_full_grad(model.outward.weight)),
            (lambda: safe_get_full_grad(model.inward), lambda: safe_get_full_fp32_param(model.inward)),
            (lambda: safe_get_full_grad(model.inward), lambda: full_grads(model)),
            (lambda: safe_get_full_fp32_param(twin[0].weight), lambda: safe_get_full_fp32_param(twin[1].weight)),
        ]
        told = []
        for pair in pairs:
            with pytest.raises(ValueError, match="the same call") as caught:
                pair[rank]()
            told.append(str(caught.value))
        assert safe_get_full_grad(model.inward) is not None
        assert len(optimizers) == 2
        return told

    one, other = run_ranks(rank, 2)
    assert one == other
    assert "rank 0 has «safe_get_full_grad of inward" in one[0]
    assert "rank 1 has «safe_get_full_grad of outward.weight" in one[0]


def test_what_one_rank_refuses_all_refuse_and_nothing_changes() -> None:
    def rank(rank: int, world_size: int) -> list[str]:
        run = Run(dtype=torch.bfloat16, optimizer=adamw)
        model, optimizer = wrapped(run)
        train(optimizer, model, run, 1, rank)
        backward(optimizer, model, run, 1, rank)
        p = model.inward
        good = torch.ones(p.shape)
        slice_ = torch.ones(-(-p.numel() // world_size))

        def seen() -> list[Tensor | None]:
            return [
                p.detach().clone(),
                safe_get_full_fp32_param(p),
                safe_get_full_grad(p),
                safe_get_full_optimizer_state(p, "exp_avg"),
            ]

        before = seen()
        bad: list[tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...]]] = [
            (safe_set_full_fp32_param, (good,), (good.t(),)),
            (safe_set_full_fp32_param, (good,), (good.int(),)),
            (safe_set_full_fp32_param, (good,), (good.tolist(),)),
            (safe_set_local_fp32_param, (slice_,), (good,)),
            (safe_set_full_grad, (good,), (good[1:],)),
            (safe_set_local_grad, (slice_,), (slice_[1:],)),
            (safe_set_full_optimizer_state, (good, "exp_avg"), (slice_, "exp_avg")),
            (safe_set_full_optimizer_state, (good, "exp_avg"), (good.bool(), "exp_avg")),
            (safe_set_full_optimizer_state, (good, "exp_avg"), (good, "exp_average")),
        ]
        told = []
        for setter, well, badly in bad:
            with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
                setter(p, *(badly if rank == 1 else well))
            told.append(f"{type(caught.value).__name__}: {caught.value}")
        for one, other in zip(before, seen(), strict=True):
            assert torch.equal(one, other)  # type: ignore[arg-type]
        return told

    theirs, own = run_ranks(rank, 2)
    assert all(line.startswith("RuntimeError: rank 1 could not call safe_set_") for line in theirs)
    assert all(line.startswith(("ValueError: ", "TypeError: ")) for line in own)
    assert "inward: expected a value of (5, 4), got (4, 5)" in own[0]
    assert "expected one of its states, exp_avg, exp_avg_sq, step, got 'exp_average'" in own[-1]


def test_what_is_no_parameter_of_an_optimizer_is_refused() -> None:
    def rank(rank: int, world_size: int) -> None:
        model, optimizer = wrapped(Run())
        frozen = model.frozen.weight
        assert safe_get_full_grad(frozen) is None
        assert safe_get_local_grad(frozen) is None
        for call in (safe_get_full_fp32_param, safe_get_local_fp32_param):
            with pytest.raises(ValueError, match="requires_grad=False"):
                call(frozen)
            with pytest.raises(ValueError, match=r"\(5, 4\) tensor that none holds"):
                call(model.inward * 1)
            with pytest.raises(TypeError, match="got str"):
                call("inward")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="that none holds"):
            safe_get_full_grad(nn.Parameter(torch.zeros(5, 4)))
        with pytest.raises(ValueError, match="none holds any"):
            full_grads(nn.Linear(2, 2))
        with pytest.raises(TypeError, match="nn.Module"):
            full_grads(list(model.parameters()))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no rank has one"):
            safe_set_full_grad(model.inward, torch.zeros_like(model.inward))
        with pytest.raises(ValueError, match="none so far"):
            safe_set_full_optimizer_state(model.inward, torch.zeros_like(model.inward), "exp_avg")
        del optimizer
        gc.collect()
        with pytest.raises(ValueError, match="that none holds"):
            safe_get_full_fp32_param(model.inward)
        again = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        assert torch.equal(safe_get_full_fp32_param(model.inward), model.inward.detach())
        assert again is not None

    run_ranks(rank, 2)


def test_a_hook_can_not_read_gradients() -> None:
    def rank(rank: int, world_size: int) -> None:
        model, optimizer = wrapped(Run())
        model.outward.weight.register_hook(lambda gradient: safe_get_full_grad(model.inward))
        with pytest.raises(RuntimeError, match="safe_get_full_grad of inward: expected it after backward"):
            optimizer.backward(loss_of(model, Run(), 0, 0, rank))

    run_ranks(rank, 2)


# Two levels


@pytest.mark.parametrize("form", ["pair", "hybrid"])
def test_values_over_two_levels(form: str) -> None:
    run = Run(4, dtype=torch.bfloat16, drop=one_each, optimizer=adamw)

    def rank(rank: int, world_size: int) -> Seen:
        options = Grid.of(rank, (2, 2)).options(form)
        model, optimizer = wrapped(run, partition_grad=True, **options)
        train(optimizer, model, run, 1, rank)
        value = torch.arange(20.0).view(5, 4) + 2.0**-20
        safe_set_full_fp32_param(model.inward, value)
        assert torch.equal(safe_get_full_fp32_param(model.inward), value)
        assert torch.equal(model.inward.detach(), value.bfloat16())
        states = full_optimizer_states(model, "exp_avg")
        assert torch.equal(states["inward"], optimizer.state_dict()["state"][1]["exp_avg"])  # type: ignore[arg-type]
        backward(optimizer, model, run, 1, rank)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return Seen(weights, full_grads(model), {}, {})

    ranks = run_ranks(rank, 4)
    model = build(run)
    model.load_state_dict(ranks[0].weights)
    sums = summed_gradients(model, run, 1)
    check_mistakes_show(model, run, 1, 2 * torch.finfo(run.dtype).eps)
    for name, p in model.named_parameters():
        for seen in ranks:
            assert torch.equal(seen.weights[name], ranks[0].weights[name])
            if p in sums and p.numel():
                assert off_by(sums[p] / 4, seen.full[name]) <= 2 * torch.finfo(run.dtype).eps, name
            else:
                assert seen.full[name] is None
