"""A model is trained again: a new optimizer retires the former ones over its parameters, and trains as plain torch."""

from __future__ import annotations

import gc
import inspect
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import save_checkpoint
from lowlevel_zero.deepspeed import safe_get_full_fp32_param
from tests.support.scripts import Alone, Case, Together, adamw, check_each, loss_at, momentum, net, steps
from tests.support.several import check_all

# ---- numbers: those of plain torch; tests/simulation has new optimizers over all parameters, whatever came before ----


def halves_that_overlap(side: Alone) -> nn.Module:
    """The later one, over the middle layers, retires both; the outer layers are trained no more."""
    model = net()
    one, other = (side.wrap(momentum(part), model) for part in (model[:2], model[2:]))
    for step in range(3):
        side.backward(one, side.mean(loss_at(model, step)))
        for each in (one, other):
            side.step(each)
        model.zero_grad()
    later = side.wrap(momentum(model[1:3]), model)
    for step in range(3, 6):
        side.backward(later, side.mean(loss_at(model, step)))
        side.step(later)
        model.zero_grad()
    return model


def added_to_another(side: Alone) -> nn.Module:
    """A group's parameters, too, are taken from the optimizer that has trained them."""
    model = net()
    one, other = (side.wrap(momentum(part), model) for part in (model[:2], model[2:]))
    for step in range(2):
        side.backward(one, side.mean(loss_at(model, step)))
        side.step(one)
        side.step(other)
        model.zero_grad()
    one.add_param_group({"params": list(model[2:].parameters()), "lr": 0.03})
    steps(side, model, one, range(2, 5))
    return model


def test_several_optimizers_over_parts_of_one_model(subtests: pytest.Subtests) -> None:
    """A former one is retired whole, whichever of its parameters are taken; others train on."""
    cases = {
        "halves that overlap": Case(halves_that_overlap, {"partition_grad": True}),
        "added": Case(added_to_another, {"overlap_allgather": True, "partition_grad": True}),
    }
    check_each(cases, subtests)


# ---- what a retired optimizer leaves, and says ----

TOLD = r"trains 0\.weight, got a former one: a LowLevelZeroOptimizer that .* Call that one, and make schedulers from it"


def taken(rank: int, **options: Any) -> tuple[nn.Module, LowLevelZeroOptimizer, LowLevelZeroOptimizer]:
    """A model, its retired optimizer and the later one."""
    model = net()
    former = LowLevelZeroOptimizer(adamw(model), model=model, **options)
    steps(Together(rank), model, former, range(2))
    return model, former, LowLevelZeroOptimizer(adamw(model), model=model, **options)


def called(optimizer: LowLevelZeroOptimizer, name: str) -> None:
    """Look an attribute up; call a method, with something for its arguments; enter and leave a context."""
    method: Any = getattr(optimizer, name)
    parameters = inspect.signature(method).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    result = method(*[net() if each.name == "model" else 1.0 for each in needed])
    with result:
        pass


def whatever_is_asked_of_a_retired_optimizer_raises(rank: int, world_size: int) -> None:
    _, former, later = taken(rank)
    names = {name for cls in LowLevelZeroOptimizer.__mro__ for name in vars(cls) if cls.__module__.startswith("low")}
    answers = {"is_retired", "skip_synchronize"}  # the second does nothing: the step within raises
    public = sorted(name for name in names - answers if not name.startswith("_"))
    assert len(public) > 30
    assert {"step", "zero_grad", "backward", "state_dict", "param_groups", "no_sync", "get_grad_norm"} <= set(public)
    for name in public:
        with pytest.raises(RuntimeError, match=TOLD):
            called(former, name)
    with pytest.raises(RuntimeError, match=TOLD):
        torch.optim.lr_scheduler.StepLR(former, 1)
    with pytest.raises(RuntimeError, match=TOLD):
        save_checkpoint("nowhere", net(), former)
    assert former.is_retired
    assert not later.is_retired
    assert not hasattr(later, "no_such_name")
    assert repr(former) == "LowLevelZeroOptimizer (retired)"


def it_gives_hooks_gradients_slices_states_and_memory_back(rank: int, world_size: int) -> None:
    model = net(layers=30).bfloat16()
    own = momentum(model)
    former = LowLevelZeroOptimizer(own, model=model)
    steps(Together(rank), model, former, range(2))
    former.backward(loss_at(model, 9)(rank))
    held = [ref(each) for record in former.sharded_parameters for each in (record.p32, record.padded)]
    held += [ref(each) for p32 in own.state for each in own.state[p32].values()]
    before = held_bytes()
    later = LowLevelZeroOptimizer(momentum(model), model=model)
    assert [each() for each in held if each() is not None] == []
    assert [p.grad for p in model.parameters() if p.grad is not None] == []
    assert {len(p._post_accumulate_grad_hooks) for p in model.parameters()} == {1}  # type: ignore[attr-defined]
    assert [group["params"] for group in own.param_groups] == [[]]
    steps(Together(rank), model, later, range(2))
    later.backward(loss_at(model, 9)(rank))
    assert held_bytes() <= before
    assert former.is_retired


def held_bytes() -> int:
    """Bytes of all tensors that Python sees."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, Tensor) and type(each) in (Tensor, nn.Parameter):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


def functions_that_look_for_the_optimizer_of_a_parameter_find_the_later_one(rank: int, world_size: int) -> None:
    model, former, later = taken(rank)
    steps(Together(rank), model, later, range(2, 4))
    master = safe_get_full_fp32_param(model[0].weight)
    assert master is not None
    assert torch.equal(master, model[0].weight)
    assert former.is_retired


def gradients_that_were_not_reduced_stay_unless_the_loss_was_scaled(rank: int, world_size: int) -> None:
    for dtype, stay in ((torch.float32, True), (torch.float16, False)):
        model = net().to(dtype)
        former = LowLevelZeroOptimizer(momentum(model), model=model)
        with former.no_sync():
            former.backward(loss_at(model, 2)(rank))
        LowLevelZeroOptimizer(momentum(model), model=model)
        assert {type(p.grad) for p in model.parameters()} == {Tensor if stay else type(None)}


# ---- what retires nothing ----


def a_refused_construction(rank: int, world_size: int) -> None:
    model, expected = net(), net()
    former = LowLevelZeroOptimizer(momentum(model), model=model)
    untouched = LowLevelZeroOptimizer(momentum(expected), model=expected)
    steps(Together(rank), model, former, range(2))
    former.backward(loss_at(model, 2)(rank))
    with pytest.raises((ValueError, RuntimeError), match="clip_grad_norm"):
        LowLevelZeroOptimizer(momentum(model), model=model, clip_grad_norm=-1.0 if rank == 1 else 0.0)
    former.step()
    former.zero_grad()
    steps(Together(rank), expected, untouched, range(3))
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)


def on_one_rank_alone(rank: int, world_size: int) -> None:
    """One rank would retire what another leaves be, whose model of the same shapes is another one."""
    models = [net(), net(), net()]
    first, second = (LowLevelZeroOptimizer(momentum(model), model=model) for model in models[:2])
    steps(Together(rank), models[0], first, range(1))
    told = r"trains 0\.weight on rank 0, and on rank 1 others, which leave it be: pass the parameters of the same model"
    for model in (models[2 * rank], models[rank]):
        with pytest.raises(ValueError, match=told):
            LowLevelZeroOptimizer(momentum(model), model=model)
    with pytest.raises(ValueError, match="on rank 0, and on rank 1 others, which leave it be"):
        second.add_param_group({"params": list(models[2 * rank].parameters())})
    assert len(second.param_groups) == 1
    assert not first.is_retired
    assert not second.is_retired
    steps(Together(rank), models[0], first, range(1, 3))
    expected = net()
    steps(Together(rank), expected, LowLevelZeroOptimizer(momentum(expected), model=expected), range(3))
    for p, q in zip(models[0].parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)
    steps(Together(rank), models[1], second, range(2))
    second.verify()


def garbage_of_one_rank(rank: int, world_size: int) -> None:
    """One rank still has the former one, which another has let go: both train the model again."""
    model, kept = net(), []
    former = LowLevelZeroOptimizer(momentum(model), model=model)
    steps(Together(rank), model, former, range(1))
    if rank == 0:
        kept.append(former)
    del former
    gc.collect()
    later = LowLevelZeroOptimizer(momentum(model), model=model)
    steps(Together(rank), model, later, range(2))
    later.verify()
    assert [each.is_retired for each in kept] == [True] * (rank == 0)


def within_a_backward(rank: int, world_size: int) -> None:
    model = net()
    former = LowLevelZeroOptimizer(momentum(model), model=model)
    with former.backward_pass(loss_at(model, 2)(rank)) as loss:
        loss.backward()
        with pytest.raises(RuntimeError, match=r"expected construction outside of backward"):
            LowLevelZeroOptimizer(momentum(model), model=model)
    former.zero_grad()
    steps(Together(rank), model, former, range(2))


def over_slices(rank: int, world_size: int) -> None:
    """Of an optimizer that trains on, and of none: whoever takes the wrapped one for a plain one is told."""
    model, _, later = taken(rank)
    own = later.optim
    slices = own.param_groups[0]["params"]
    behind = [nn.Parameter(torch.ones(2)), slices[1]]
    for sharded in (own, torch.optim.SGD(slices, lr=0.1), torch.optim.SGD(behind, lr=0.1), later):
        with pytest.raises(TypeError, match="expected a plain optimizer, got .* wrap each optimizer once"):
            LowLevelZeroOptimizer(sharded)
    steps(Together(rank), model, later, range(2))


def over_slices_of_one_that_is_gone(rank: int, world_size: int) -> None:
    """It would step these, and never the model."""
    model = net()
    own = momentum(model)
    LowLevelZeroOptimizer(own, model=model)
    for sharded in (own, torch.optim.SGD(own.param_groups[0]["params"], lr=0.1)):
        with pytest.raises(TypeError, match="expected a plain optimizer, got SGD .* wrap each optimizer once"):
            LowLevelZeroOptimizer(sharded)
    own.param_groups[0]["params"] = list(model.parameters())
    own.state.clear()
    steps(Together(rank), model, LowLevelZeroOptimizer(own, model=model), range(2))
    steps(Together(rank), model, LowLevelZeroOptimizer(momentum(model), model=model), range(2))


CHECKS = [
    whatever_is_asked_of_a_retired_optimizer_raises,
    it_gives_hooks_gradients_slices_states_and_memory_back,
    functions_that_look_for_the_optimizer_of_a_parameter_find_the_later_one,
    gradients_that_were_not_reduced_stay_unless_the_loss_was_scaled,
    a_refused_construction,
    on_one_rank_alone,
    garbage_of_one_rank,
    within_a_backward,
    over_slices,
    over_slices_of_one_that_is_gone,
]


def test_a_later_optimizer_retires_the_former_unless_it_is_refused(subtests: pytest.Subtests) -> None:
    check_all(CHECKS, 2, subtests)


def over_other_ranks(rank: int, world_size: int) -> None:
    """The ranks of the later one aren't those of the former, which can't be called to finish together."""
    model = net()
    former = LowLevelZeroOptimizer(momentum(model), model=model)
    steps(Together(rank), model, former, range(2))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    former.backward(loss_at(model, 2)(rank))
    later = LowLevelZeroOptimizer(momentum(model), model=model, dp_process_group=pairs[rank // 2])
    later.zero_grad()
    steps(Together(rank), model, later, range(2, 4))
    later.verify()
    assert former.is_retired


def after_its_group_was_destroyed(rank: int, world_size: int) -> None:
    model = net()
    everybody = dist.new_group(range(world_size))
    former = LowLevelZeroOptimizer(momentum(model), model=model, dp_process_group=everybody)
    former.backward(loss_at(model, 2)(rank))
    former.step()
    dist.destroy_process_group(everybody)
    later = LowLevelZeroOptimizer(momentum(model), model=model)
    steps(Together(rank), model, later, range(2))
    later.verify()
    assert former.is_retired


def test_process_groups_that_differ(subtests: pytest.Subtests) -> None:
    check_all([over_other_ranks, after_its_group_was_destroyed], 4, subtests)
