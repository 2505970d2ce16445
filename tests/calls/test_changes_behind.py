"""Changes behind the optimizer's back, to the model, to gradients and to groups: seen to, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.misuse import Doing, Refused, Right, Work, Wrong, try_out

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


def widen_gradients(work: Work) -> None:
    weight = work.model[0].weight
    weight.grad_dtype = torch.float64
    try:
        work.backward()
    finally:
        weight.grad_dtype = weight.dtype
        work.optimizer.zero_grad()


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


CONVERTED = "expected dtype, device and shape as at this optimizer's construction"
BEFORE = r".*move or convert a model \(.*\) before constructing the optimizer"
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
    Wrong(
        "a parametrization that moves its parameter",
        then_train(lambda model: nn.utils.parametrizations.orthogonal(model[0])),
        Right(),
    ),
    Wrong(
        "model.half()",
        lambda work: convert(work, torch.float16),
        Refused(RuntimeError, f"0.weight: {CONVERTED} .torch.float32, .*, got torch.float16{BEFORE}", ends=True),
    ),
    *(
        Wrong("gradients of another dtype", widen_gradients, Refused(TypeError, "0.weight: .* got grad_dtype"))
        for _ in range(hasattr(torch.Tensor, "grad_dtype"))  # torch 2.10
    ),
    Wrong("model.double() and back", then_train(lambda model: model.double().float()), Right()),
    Wrong("model.share_memory()", then_train(lambda model: model.share_memory()), Right()),
]

# ---- edits ----


def edit_data(work: Work) -> None:
    work.model[0].weight.data.mul_(0.5)
    work.steps(3)


def edit_and_tell(work: Work) -> None:
    work.model[0].weight.data.mul_(0.5)
    if not work.plain:
        work.optimizer.update_master_params(work.model)
    work.steps(3)


def edit_slices(work: Work) -> None:
    work.steps(1)
    with torch.no_grad():
        work.optimizer.param_groups[0]["params"][0].mul_(0.5)
    work.steps(1)


def give_a_gradient(work: Work) -> None:
    work.model[0].weight.grad = torch.full((4, 3), 0.5)
    work.optimizer.step()


def double_under_no_sync(work: Work) -> None:
    with work.no_sync():
        work.backward()
        work.model[0].weight.grad = 2 * work.model[0].weight.grad
    work.optimizer.step()


def misshape_a_gradient(work: Work) -> None:
    work.model[0].weight.grad = torch.ones(3, 4)


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
    Wrong("p.data of 16 bits, and then update_master_params", edit_and_tell, Right(), {}, torch.bfloat16, 2e-2),
    Wrong(
        "p.data, assigned",
        then_train(lambda model: setattr(model[0].weight, "data", torch.zeros(4, 3))),
        Right(),
    ),
    Wrong(
        "a slice, in place",
        edit_slices,
        Refused(
            RuntimeError, "0.weight: expected its slice in param_groups .*Lookahead.* load a checkpoint", ends=True
        ),
    ),
    Wrong("p.grad before any backward", give_a_gradient, Right()),
    Wrong("p.grad under no_sync", double_under_no_sync, Right()),
    Wrong("p.grad of another shape", misshape_a_gradient, Refused(RuntimeError, "size|shape")),
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

TABLES = {"models": MODELS, "edits": EDITS}


@pytest.mark.parametrize("table", TABLES)
def test_changes(table: str, subtests: pytest.Subtests) -> None:
    try_out(TABLES[table], 2, subtests)
