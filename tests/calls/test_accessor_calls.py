"""How accessors are called: one parameter or all, in few messages, alike on all ranks, and what is refused."""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.deepspeed import (
    accessors,
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
from lowlevel_zero.state import values
from tests.support.accessing import backward, train, wrapped
from tests.support.on_ranks import on_ranks
from tests.support.oracle import Run, adamw
from tests.support.several import check_all, of_all


def edits_are_seen_before_the_next_step(rank: int, world_size: int) -> None:
    model, optimizer = wrapped(Run(dtype=torch.bfloat16))
    train(optimizer, model, Run(dtype=torch.bfloat16), 1, rank)
    p = model.inward
    with torch.no_grad():
        p.fill_(0.25)
    assert torch.equal(safe_get_full_fp32_param(p), torch.full_like(p, 0.25).float())


def parameters_that_have_changed_places_are_read_where_they_are_now(rank: int, world_size: int) -> None:
    """One, or all of the model: and the one that isn't read keeps its values as well."""
    reads = (full_fp32_params, lambda model: safe_get_full_fp32_param(model[0].weight))
    for dtype, read in itertools.product((torch.float32, torch.bfloat16), reads):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).to(dtype)
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        one, other = model[0].weight, model[1].weight
        expected = {"0.weight": other.detach().clone().float(), "1.weight": one.detach().clone().float()}
        one.data, other.data = other.data, one.data
        read(model)
        found = full_fp32_params(model)
        assert all(torch.equal(found[name], value) for name, value in expected.items())  # type: ignore[arg-type]
        del optimizer


def one_rank_s_converted_parameter_is_refused_on_all(rank: int, world_size: int) -> None:
    model, optimizer = wrapped(Run())
    if rank == 1:
        model.inward.data = model.inward.data.double()
    told = "inward: expected dtype, device and shape as at" if rank else "^rank 1 could not call full_fp32_params of a"
    with pytest.raises(RuntimeError, match=told):
        full_fp32_params(model)
    del optimizer


class Counting(torch.optim.SGD):
    """Has a plain number among the states of each parameter."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["count"] = self.state[p].get("count", 0) + 1
        return super().step(closure)


def a_plain_number_stays_of_its_type(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = LowLevelZeroOptimizer(Counting(model.parameters(), lr=0.1), model=model)
    for expected in (1, 7):
        optimizer.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        count = optimizer.state_dict()["state"][0]["count"]
        assert (count, type(count)) == (expected, int)
        safe_set_full_optimizer_state(model.weight, torch.tensor(6.0), "count")


def numbers_are_set_alike(rank: int, world_size: int) -> None:
    model, optimizer = wrapped(Run(optimizer=adamw))
    train(optimizer, model, Run(), 1, rank)
    p = model.scale
    safe_set_full_optimizer_state(p, torch.tensor(7.0), "step")
    assert safe_get_full_optimizer_state(p, "step") == 7
    safe_set_full_optimizer_state(p, torch.tensor([5.0]), "step")
    assert safe_get_full_optimizer_state(model.one, "step") == 1
    with pytest.raises(ValueError, match="«step = 0.0» where rank 1"):
        safe_set_full_optimizer_state(p, torch.tensor(float(rank)), "step")
    with pytest.raises(TypeError, match="one number"):
        safe_set_full_optimizer_state(p, torch.zeros(3), "step")
    assert safe_get_full_optimizer_state(p, "step") == 5


def a_model_may_have_several_optimizers_and_parameters_of_none(rank: int, world_size: int) -> None:
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


def reading_a_frozen_parameter_gives_none_and_writing_it_raises(rank: int, world_size: int) -> None:
    """As with DeepSpeed, a loop over all parameters of a model reads None for the frozen ones."""
    model, optimizer = wrapped(Run())
    train(optimizer, model, Run(), 1, rank)
    frozen = model.frozen.weight
    assert safe_get_full_fp32_param(frozen) is None
    assert safe_get_full_grad(frozen) is None
    assert safe_get_full_optimizer_state(frozen, "exp_avg") is None
    with pytest.raises(ValueError, match="requires_grad=False"):
        safe_set_full_fp32_param(frozen, torch.zeros_like(frozen))


def what_is_no_parameter_of_an_optimizer_is_refused(rank: int, world_size: int) -> None:
    model, optimizer = wrapped(Run())
    with pytest.raises(ValueError, match=r"\(5, 4\) tensor that none holds"):
        safe_get_full_fp32_param(model.inward * 1)
    with pytest.raises(TypeError, match="got str"):
        safe_get_full_fp32_param("inward")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="that none holds"):
        safe_get_full_grad(nn.Parameter(torch.zeros(5, 4)))
    with pytest.raises(ValueError, match="got a Linear without any"):
        full_grads(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="nn.Module"):
        full_grads(list(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no rank has one"):
        safe_set_full_grad(model.inward, torch.zeros_like(model.inward))
    with pytest.raises(ValueError, match="none yet"):
        safe_set_full_optimizer_state(model.inward, torch.zeros_like(model.inward), "exp_avg")
    del optimizer
    gc.collect()
    with pytest.raises(ValueError, match="that none holds"):
        safe_get_full_fp32_param(model.inward)
    again = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    assert torch.equal(safe_get_full_fp32_param(model.inward), model.inward.detach())
    assert again is not None


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

    def counted(self: ShardGroup, own: Any, rows: Any, *more: Any) -> Any:
        sizes.append(sum(each.numel() * each.element_size() for each in rows))
        return gather(self, own, rows, *more)

    monkeypatch.setattr(ShardGroup, "gather", counted)
    return sizes


def many_take_one_message(rank: int, world_size: int) -> None:
    model, optimizer = many()
    optimizer.step()
    reads: list[Callable[[], Any]] = [
        lambda: full_grads(model),
        lambda: full_fp32_params(model),
        lambda: full_optimizer_states(model, "exp_avg"),
        lambda: [safe_get_full_fp32_param(p) for p in model.parameters()],
    ]
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        sizes = count_gathers(patch)
        for read in reads:
            sizes.clear()
            assert len(read()) == 200
            counts.append(len(sizes))
    assert counts == [1, 1, 1, 200]


def a_message_is_no_larger_than_its_bound(rank: int, world_size: int) -> None:
    model, _optimizer = many()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "MESSAGE_BYTES", 3000)  # ten parameters of 288 bytes
        sizes = count_gathers(patch)
        assert all(value is not None for value in full_grads(model).values())
    assert sizes == [2880] * 20


def ranks_that_call_different_things_are_told_so(rank: int, world_size: int) -> None:
    model, optimizer = wrapped(Run())
    twin = nn.Linear(3, 2), nn.Linear(3, 2)
    _optimizers = [LowLevelZeroOptimizer(torch.optim.SGD(m.parameters(), lr=1.0), model=m) for m in twin]
    backward(optimizer, model, Run(), 0, rank)
    pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: safe_get_full_grad(model.inward), lambda: safe_get_full_grad(model.outward.weight)),
        (lambda: safe_get_full_grad(model.inward), lambda: safe_get_full_fp32_param(model.inward)),
        (lambda: safe_get_full_grad(model.inward), lambda: full_grads(model)),
        (lambda: safe_get_full_fp32_param(twin[0].weight), lambda: safe_get_full_fp32_param(twin[1].weight)),
    ]
    told = []
    for pair in pairs:
        with pytest.raises(RuntimeError, match="the same call") as caught:
            pair[rank]()
        told.append(str(caught.value))
    assert safe_get_full_grad(model.inward) is not None
    assert "rank 0 to call safe_get_full_grad of inward" in told[0]
    assert "rank 1 to call safe_get_full_grad of outward.weight" in told[0]
    assert of_all(told) == [told, told]


def what_one_rank_refuses_all_refuse_and_nothing_changes(rank: int, world_size: int) -> None:
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
    state = safe_set_full_optimizer_state
    named = "expected one of its states, exp_avg, exp_avg_sq, step, got 'exp_average'"
    bad: list[tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...], str]] = [
        (
            safe_set_full_fp32_param,
            (good,),
            (good.t(),),
            r"inward: expected value to be of shape \(5, 4\), got",
        ),
        (safe_set_full_fp32_param, (good,), (good.int(),), "expected value to be"),
        (safe_set_full_fp32_param, (good,), (good.tolist(),), "expected value to be"),
        (safe_set_full_grad, (good,), (good[1:],), "expected value to be"),
        (state, (good, "exp_avg"), (slice_, "exp_avg"), "expected value to be"),
        (state, (good, "exp_avg"), (good.bool(), "exp_avg"), "expected value to be"),
        (state, (good, "exp_avg"), (good, "exp_average"), named),
    ]
    for setter, well, badly, own in bad:
        refused = (ValueError, TypeError) if rank == 1 else RuntimeError
        with pytest.raises(refused, match=own if rank == 1 else "^rank 1 could not call safe_set_"):
            setter(p, *(badly if rank == 1 else well))
    for one, other in zip(before, seen(), strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]


def groups_of_experts_may_have_different_numbers_of_them(rank: int, world_size: int) -> None:
    group = [dist.new_group([each]) for each in range(world_size)][rank]
    experts = nn.ModuleDict({str(number): nn.Linear(3, 3, bias=False) for number in range(1 + rank)})
    model = nn.ModuleDict({"dense": nn.Linear(3, 3, bias=False), "experts": experts})
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = LowLevelZeroOptimizer(sgd, {group: list(experts.parameters())}, model=model)
    x = model["dense"](torch.ones(2, 3))
    optimizer.backward(sum(each(x).sum() for each in experts.values()))
    found = full_grads(model)
    assert all(value is not None and value.shape == (3, 3) for value in found.values())
    assert list(found) == ["dense.weight", "experts.0.weight", "experts.1.weight"][: 2 + rank]


def experts_are_called_by_each_group_for_its_own(rank: int, world_size: int) -> None:
    """Of a module of experts alone, too, of which one rank has one parameter; their numbers are compared in a group."""
    each, both = [dist.new_group([each]) for each in range(world_size)][rank], dist.new_group([0, 1])
    for group in (each, both):
        experts = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(1 + rank if group is each else 1))
        model = nn.ModuleDict({"dense": nn.Linear(3, 1), "experts": experts})
        optimizer = LowLevelZeroOptimizer(
            torch.optim.AdamW(model.parameters()), {group: list(experts.parameters())}, model=model
        )
        x = model["dense"](torch.ones(2, 3))
        optimizer.backward(sum(expert(x).sum() for expert in experts))
        optimizer.step()
        assert len(full_fp32_params(experts)) == len(experts)
        p = experts[0].weight
        if group is each:
            safe_set_full_optimizer_state(p, torch.full((1, 1), float(rank)), "exp_avg")
            assert safe_get_full_optimizer_state(p, "exp_avg") == rank
            with pytest.raises(RuntimeError, match="the same call on every rank, got rank 0 to call full_grads of a"):
                (full_grads, full_fp32_params)[rank](experts)
        else:
            with pytest.raises(ValueError, match="the same call on every rank; rank 0 has «step = 0.0» where rank 1"):
                safe_set_full_optimizer_state(p, torch.tensor(float(rank)), "step")


def a_state_is_read_that_only_some_parameters_have(rank: int, world_size: int) -> None:
    """By whichever rank that owns them whole, and by whichever optimizer."""
    model = nn.ModuleDict({name: nn.Linear(6, 4) for name in ("a", "b")})
    plain = torch.optim.Adafactor(model["a"].parameters()), torch.optim.SGD(model["b"].parameters(), momentum=0.9)
    optimizers = [LowLevelZeroOptimizer(each, model=model) for each in plain]
    assert {record.split.owner for record in optimizers[0].sharded_parameters} == {0, 1}
    assert set(full_optimizer_states(model, "var").values()) == {None}  # there is none yet
    for optimizer, each in zip(optimizers, model.values(), strict=True):
        optimizer.backward(each(torch.ones(2, 6)).square().mean())
        optimizer.step()
    shapes = {"row_var": {"a.weight": (4, 1)}, "variance": {"a.bias": (4,)}}
    shapes["momentum_buffer"] = {"b.weight": (4, 6), "b.bias": (4,)}
    for key, expected in shapes.items():
        found = full_optimizer_states(model, key)
        assert {name: value.shape for name, value in found.items() if value is not None} == expected, key
    with pytest.raises(ValueError, match="^a.weight: expected one of its states, col_var, row_var, step, got 'var'"):
        full_optimizer_states(model, "var")


CALLS = [
    edits_are_seen_before_the_next_step,
    parameters_that_have_changed_places_are_read_where_they_are_now,
    one_rank_s_converted_parameter_is_refused_on_all,
    a_plain_number_stays_of_its_type,
    numbers_are_set_alike,
    a_model_may_have_several_optimizers_and_parameters_of_none,
    reading_a_frozen_parameter_gives_none_and_writing_it_raises,
    what_is_no_parameter_of_an_optimizer_is_refused,
    many_take_one_message,
    a_message_is_no_larger_than_its_bound,
    ranks_that_call_different_things_are_told_so,
    what_one_rank_refuses_all_refuse_and_nothing_changes,
    groups_of_experts_may_have_different_numbers_of_them,
    experts_are_called_by_each_group_for_its_own,
    a_state_is_read_that_only_some_parameters_have,
]


def test_calls(subtests: pytest.Subtests) -> None:
    check_all(CALLS, 2, subtests)


@on_ranks(3)
def test_an_expert_s_number_is_compared_in_its_own_group(rank: int) -> None:
    alone = [dist.new_group([each]) for each in range(3)][rank]
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2])][rank // 2]
    own, shared = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    model = nn.Sequential(nn.Linear(3, 1), own, shared)
    groups = {alone: [own.weight], pair: [shared.weight]}
    optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), groups, model=model)
    optimizer.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    safe_set_full_optimizer_state(own.weight, torch.tensor(float(rank)), "step")
    assert safe_get_full_optimizer_state(own.weight, "step") == rank
    told = "rank 0 could not call" if rank == 2 else "the same call on every rank; rank 0 has «step = 0.0» where rank 1"
    with pytest.raises((RuntimeError, ValueError), match=told):
        safe_set_full_optimizer_state(shared.weight, torch.tensor(float(rank)), "step")


def test_names_and_order_of_arguments_are_deepspeed_s() -> None:
    expected = {
        "safe_get_full_fp32_param": ["param"],
        "safe_get_full_grad": ["param"],
        "safe_get_full_optimizer_state": ["param", "optim_state_key"],
        "safe_set_full_fp32_param": ["param", "value"],
        "safe_set_full_grad": ["param", "value"],
        "safe_set_full_optimizer_state": ["param", "value", "optim_state_key"],
    }
    for name, positional in expected.items():
        parameters = inspect.signature(getattr(accessors, name)).parameters.values()
        assert [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD] == positional
