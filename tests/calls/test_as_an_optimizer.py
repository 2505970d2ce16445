"""It is a ``torch.optim.Optimizer``: closures, hooks, schedulers, groups, states, and how it ends."""

from __future__ import annotations

import gc
import weakref
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_cases, run_ranks
from tests.support.scripts import (
    WAYS,
    Alone,
    Case,
    Together,
    adamw,
    check,
    check_each,
    data,
    loss_at,
    momentum,
    net,
)
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


EITHER = ("wrapper", "inner")


def test_step_hooks_run_once_a_step(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, on: str) -> list[str]:
        model = net()
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
        hooked = optimizer if on == "wrapper" else optimizer.optim
        seen: list[str] = []
        hooked.register_step_pre_hook(lambda *_: seen.append("pre"))
        hooked.register_step_post_hook(lambda *_: seen.append("post"))
        for step in range(3):
            optimizer.backward(loss_at(model, step)(rank))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    for (on,), ran in run_cases(train, 2, [(on,) for on in EITHER], one_group=True):
        with subtests.test(on):
            assert ran.values() == [["pre", "post"] * 3] * 2


def test_state_dict_hooks_run_as_plain_torch_runs_them() -> None:
    def train(rank: int, world_size: int) -> tuple[list[str], int]:
        model = net()
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
        seen: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "epoch": 3})
        optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append(f"epoch {state_dict['epoch']}"))
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after loading"))
        state_dict = optimizer.state_dict()
        optimizer.load_state_dict(state_dict)
        return seen, state_dict["epoch"]

    assert run_ranks(train, 2) == [(["before saving", "epoch 3", "after loading"], 3)] * 2


class Eager(torch.optim.SGD):
    """Steps further with each call of ``zero_grad``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            group["lr"] *= 1.5


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_class_s_own_zero_grad_runs_too(set_to_none: bool) -> None:
    def train(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Tensor]:
        for _ in range(3):
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        return [p.detach().clone() for p in model.parameters()]

    def work(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        model, alone = nn.Linear(3, 2), nn.Linear(3, 2)
        alone.load_state_dict(model.state_dict())
        optimizer = LowLevelZeroOptimizer(Eager(model.parameters(), lr=0.01), model=model)
        trained = train(optimizer, model)
        torch.testing.assert_close(trained, train(Eager(alone.parameters(), lr=0.01), alone))

    run_ranks(work, 2)


def test_groups_state_and_defaults_stay_those_of_the_wrapped_optimizer(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, load_on: str) -> list[bool]:
        model = net()
        optimizer = LowLevelZeroOptimizer(adamw(model), model=model)
        optimizer.backward(loss_at(model, 0)(rank))
        optimizer.step()
        loader = optimizer if load_on == "wrapper" else optimizer.optim
        loader.load_state_dict(loader.state_dict())
        optimizer.param_groups[0]["lr"] = 0.125
        return [
            optimizer.param_groups is optimizer.optim.param_groups,
            optimizer.state is optimizer.optim.state,
            optimizer.defaults is optimizer.optim.defaults,
            optimizer.optim.param_groups[0]["lr"] == 0.125,
            isinstance(optimizer, torch.optim.Optimizer),
        ]

    for (load_on,), ran in run_cases(train, 2, [(on,) for on in EITHER], one_group=True):
        with subtests.test(load_on):
            assert ran.values() == [[True] * 5] * 2


def test_the_defaults_of_an_optimizer_that_is_not_torch_s_stay_as_they_are() -> None:
    """Groups that are added later have what its class gives them."""

    def wrap(rank: int, world_size: int) -> tuple[dict[str, object], dict[str, object]]:
        inner = AdamByHand(net().parameters())
        before = dict(inner.defaults)
        LowLevelZeroOptimizer(inner)
        return before, dict(inner.defaults)

    for before, after in run_ranks(wrap, 2, timeout=30):
        assert before == after


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
@pytest.mark.parametrize("way", ["optimizer.backward", "loss.backward", "backward_pass"])
def test_a_training_step_may_be_compiled_whole(way: str) -> None:
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

        is_sharded = isinstance(optimizer, LowLevelZeroOptimizer)  # else this process is that of all tests
        compiled = torch.compile(train_step, backend="eager") if is_sharded else train_step
        for step in range(3):
            compiled(data(step, 0))
        return model

    check(script)


def test_gradients_that_are_views_of_one_buffer_become_zeros() -> None:
    def zero(rank: int, world_size: int) -> list[float]:
        ps = [nn.Parameter(torch.ones(4)) for _ in range(2)]
        optimizer, flat = LowLevelZeroOptimizer(torch.optim.SGD(ps, lr=1.0)), torch.ones(8)
        ps[0].grad, ps[1].grad = flat[:4], flat[4:]
        optimizer.zero_grad(set_to_none=False)
        return flat.tolist()

    assert run_ranks(zero, 2, timeout=30) == [[0.0] * 8] * 2


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
