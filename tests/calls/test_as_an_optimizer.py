"""It is a ``torch.optim.Optimizer``: closures, hooks, schedulers, groups, states, and how it ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.numbers import trained
from tests.support.ranks import run_cases
from tests.support.scripts import (
    WAYS,
    Alone,
    Case,
    Script,
    Together,
    adamw,
    check_each,
    data,
    judge,
    loss_at,
    momentum,
    net,
    parameters_of,
    steps,
)
from tests.support.several import check_all
from tests.support.strangers import AdamByHand


def test_a_closure_is_run_with_gradients_and_its_loss_returned(subtests: pytest.Subtests) -> None:
    def script(side: Alone) -> nn.Module:
        model = net()
        optimizer = side.wrap(momentum(model), model)
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = side.mean(loss_at(model, step))
                side.backward(optimizer, loss)
                return loss.detach()

            with torch.no_grad():
                before = side.mean(loss_at(model, step))
                assert torch.equal(optimizer.step(closure), before)
        return model

    check_each({way: Case(script, options) for way, options in WAYS.items()}, subtests)


def step_hooks_run_once_a_step(rank: int, world_size: int) -> None:
    for on_wrapper in (True, False):
        model = net()
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
        hooked = optimizer if on_wrapper else optimizer.optim
        seen: list[str] = []
        hooked.register_step_pre_hook(lambda *_, seen=seen: seen.append("pre"))
        hooked.register_step_post_hook(lambda *_, seen=seen: seen.append("post"))
        steps(Together(rank), model, optimizer, range(3))
        assert seen == ["pre", "post"] * 3, on_wrapper


def state_dict_hooks_run_as_plain_torch_runs_them(rank: int, world_size: int) -> None:
    model = net()
    optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "epoch": 3})
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append(f"epoch {state_dict['epoch']}"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after loading"))
    state_dict = optimizer.state_dict()
    optimizer.load_state_dict(state_dict)
    assert seen == ["before saving", "epoch 3", "after loading"]
    assert state_dict["epoch"] == 3


class Eager(torch.optim.SGD):
    """Steps further with each call of ``zero_grad``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            group["lr"] *= 1.5


class EagerWithoutArguments(Eager):
    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


def a_class_s_own_zero_grad_runs_too(rank: int, world_size: int) -> None:
    for cls, arguments in ((Eager, (True,)), (Eager, (False,)), (EagerWithoutArguments, ())):
        model, alone = net(), net()
        for side, optimizer in (
            (model, LowLevelZeroOptimizer(cls(model.parameters(), lr=0.01), model=model)),
            (alone, cls(alone.parameters(), lr=0.01)),
        ):
            for step in range(3):
                loss_at(side, step)(0).backward()
                optimizer.step()
                optimizer.zero_grad(*arguments)
        torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))


def groups_state_and_defaults_stay_those_of_the_wrapped_optimizer(rank: int, world_size: int) -> None:
    for on_wrapper in (True, False):
        model = net()
        optimizer = LowLevelZeroOptimizer(adamw(model), model=model)
        steps(Together(rank), model, optimizer, range(1))
        loader = optimizer if on_wrapper else optimizer.optim
        loader.load_state_dict(loader.state_dict())
        optimizer.param_groups[0]["lr"] = 0.125
        assert optimizer.param_groups is optimizer.optim.param_groups
        assert optimizer.state is optimizer.optim.state
        assert optimizer.defaults is optimizer.optim.defaults
        assert optimizer.optim.param_groups[0]["lr"] == 0.125
        assert isinstance(optimizer, torch.optim.Optimizer)


def the_defaults_of_an_optimizer_that_is_not_torch_s_stay_as_they_are(rank: int, world_size: int) -> None:
    """Groups that are added later have what its class gives them."""
    inner = AdamByHand(net().parameters())
    before = dict(inner.defaults)
    LowLevelZeroOptimizer(inner)
    assert inner.defaults == before


def gradients_that_are_views_of_one_buffer_become_zeros(rank: int, world_size: int) -> None:
    ps = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer, flat = LowLevelZeroOptimizer(torch.optim.SGD(ps, lr=1.0)), torch.ones(8)
    ps[0].grad, ps[1].grad = flat[:4], flat[4:]
    optimizer.zero_grad(set_to_none=False)
    assert flat.tolist() == [0.0] * 8


CHECKS = [
    step_hooks_run_once_a_step,
    state_dict_hooks_run_as_plain_torch_runs_them,
    a_class_s_own_zero_grad_runs_too,
    groups_state_and_defaults_stay_those_of_the_wrapped_optimizer,
    the_defaults_of_an_optimizer_that_is_not_torch_s_stay_as_they_are,
    gradients_that_are_views_of_one_buffer_become_zeros,
]


def test_it_is_an_optimizer(subtests: pytest.Subtests) -> None:
    check_all(CHECKS, 2, subtests, one_group=True)


# ---- what is compiled: in one launch, since each process that compiles imports torch's compiler for seconds ----


def step_compiled_whole(way: str) -> Script:
    def script(side: Alone) -> nn.Module:
        model = net()
        optimizer = side.wrap(momentum(model), model)

        def train_step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            if not isinstance(optimizer, LowLevelZeroOptimizer) or way == "loss.backward":
                loss.backward()
            elif way == "optimizer.backward":
                optimizer.backward(loss)
            else:
                with optimizer.backward_pass(loss) as scaled:
                    scaled.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        compiled = compiled_in_ranks(side, train_step)
        for step in range(3):
            compiled(data(step, 0))
        return model

    return script


def compiled_in_ranks(side: Alone, function: Callable[..., Any]) -> Any:
    """This process is that of all tests, which shouldn't find a compiler at work."""
    return torch.compile(function, backend="eager") if isinstance(side, Together) else function


def model_compiled(side: Alone) -> nn.Module:
    model = net()
    optimizer = side.wrap(momentum(model), model)
    steps(side, compiled_in_ranks(side, model), optimizer, range(2))
    return model


def compiled_autograd_refused(side: Alone) -> nn.Module:
    """Before it compiles hooks."""
    model = net()
    optimizer = side.wrap(momentum(model), model)
    if isinstance(side, Together):
        from torch._dynamo import compiled_autograd

        for backward, what in ((optimizer.backward, "backward"), (Tensor.backward, r"3.bias")):
            with (
                compiled_autograd._enable(torch.compile(backend="eager")),  # type: ignore[no-untyped-call]
                pytest.raises(RuntimeError, match=rf"{what}: expected a backward that autograd runs, got .* compiled"),
            ):
                backward(loss_at(model, 0)(side.rank))
        optimizer.zero_grad()
    steps(side, model, optimizer, range(2))
    return model


def train_once(rank: int, world_size: int, case: Case) -> tuple[dict[str, Tensor]]:
    return (parameters_of(case.script(Together(rank, **case.options))),)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
def test_models_and_whole_steps_may_be_compiled_and_backwards_may_not(subtests: pytest.Subtests) -> None:
    ways = ("optimizer.backward", "loss.backward", "backward_pass")
    scripts = {way: step_compiled_whole(way) for way in ways}
    scripts |= {"a model": model_compiled, "compiled autograd": compiled_autograd_refused}
    cases = {name: Case(script, {}) for name, script in scripts.items()}
    for name, case, ran in trained(cases, train_once, timeout=100):
        with subtests.test(name):
            judge(case, ran.values())


def test_an_optimizer_dies_by_reference_counting_alone_and_takes_its_hooks_along(subtests: pytest.Subtests) -> None:
    def live(rank: int, world_size: int, way: str, used: bool) -> tuple[bool, bool, bool]:
        model = net()
        side = Together(rank, **WAYS[way])
        optimizer = side.wrap(momentum(model), model)
        if used:
            side.backward(optimizer, loss_at(model, 0)(rank))
            optimizer.step()
        gc.collect()
        gc.disable()
        died = weakref.ref(optimizer)
        inner = weakref.ref(optimizer.optim)
        del optimizer
        hooks = any(p._post_accumulate_grad_hooks for p in model.parameters())
        gone = died() is None, inner() is None, not hooks
        gc.enable()
        loss_at(model, 1)(rank).backward()
        assert all(p.grad is not None for p in model.parameters())
        return gone

    for (way, used), ran in run_cases(live, 2, product(WAYS, (True, False))):
        with subtests.test(way=way, used=used):
            assert ran.values() == [(True, True, True)] * 2
