"""Objects of a wrong kind, and changes behind the optimizer's back: refused by name, or seen to."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import save_checkpoint
from lowlevel_zero.deepspeed import safe_get_full_fp32_param
from tests.support.misuse import Doing, Refused, Right, Work, Wrong, adam, net, nothing, try_out

# ---- objects of a wrong kind, to construct from or to call with, and copies ----


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


def no_leaf(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adam(model)
    optimizer.param_groups[0]["params"][1] = model[0].weight * 2  # type: ignore[index]
    return optimizer


def sharing_memory(model: Any) -> torch.optim.Optimizer:
    model[2].bias = nn.Parameter(model[0].bias.data[1:3])
    return adam(model)


def with_a_buffer(name: str, make: Callable[[], Tensor]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """An optimizer over a model with one more buffer of whatever kind."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        model.register_buffer(name, make())
        return adam(model)

    return optimizer


def conjugate() -> Tensor:
    return torch.ones(3, dtype=torch.complex64).conj()


def frozen_on_meta() -> nn.Parameter:
    """It isn't trained, but ranks would start from rank 0's."""
    return nn.Parameter(torch.ones(3, device="meta"), requires_grad=False)


def of_trained_ones(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class HoldsItsParameters(torch.optim.SGD):
    """Keeps a list of its parameters beside its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.all = [p for group in self.param_groups for p in group["params"]]


class HoldsThemIn(torch.optim.SGD):
    """Keeps its parameters in a container of its own."""

    def __init__(self, params: Any, make: Callable[[Any], Any]) -> None:
        super().__init__(params, lr=0.1)
        self.make, self.kept = make, make(self.param_groups[0]["params"])


class OtherName(torch.optim.SGD):
    """Has its groups under two names."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.held = {"groups": self.param_groups, "first": self.param_groups[0]}


HOLDING: dict[str, Callable[[Any], Any]] = {
    "a dict of rates by parameter": lambda params: dict.fromkeys(params, 0.1),
    "a dict of rates by a parameter's id": lambda params: {id(p): 0.1 for p in params},
    "pairs of parameters and rates": lambda params: [(p, 0.1) for p in params],
    "groups of its own": lambda params: {"all": [{"params": list(params)}]},
}


def add(make: Callable[[Any], list[Tensor]]) -> Doing:
    """A param group of what ``make`` makes of the model."""
    return lambda work: work.optimizer.add_param_group({"params": make(work.model)})


def twice(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*of_trained_ones(model), model[0].weight], lr=0.1)  # type: ignore[index]


def with_wider_gradients(model: Any) -> torch.optim.Optimizer:
    model[2].weight.grad_dtype = torch.float64
    return adam(model)


def inference_parameter() -> nn.Parameter:
    with torch.inference_mode():
        return nn.Parameter(torch.ones(3))


def look_up_sparsely(work: Work) -> None:
    """No module has announced it."""
    table = nn.Parameter(torch.ones(5, 3))
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD([table], lr=0.1))
    optimizer.backward(nn.functional.embedding(torch.tensor([1, 2]), table, sparse=True).sum())


def schedule_another_optimizer(work: Work) -> None:
    another = adam(net())
    scheduler = torch.optim.lr_scheduler.StepLR(another, 1, gamma=0.1)
    another.step()
    scheduler.step()
    work.steps(3)


def not_a_number(work: Work) -> None:
    work.optimizer.param_groups[0]["lr"] = "0.1"
    work.steps(3)


ONCE = "expected it once in the param groups, got it twice"
NO_COPY = Refused(TypeError, "got the LowLevelZeroOptimizer itself .*state_dict.*save_checkpoint")
OBJECTS = [
    Wrong(
        "a model that the optimizer knows nothing of",
        construct(model=net()),
        Refused(ValueError, "model: .* without any of them: .*model.parameters"),
    ),
    Wrong(
        "a sparse embedding",
        lambda work: LowLevelZeroOptimizer(adam(embedding := nn.Embedding(3, 2, sparse=True)), model=embedding),
        Refused(ValueError, "weight: expected a dense gradient, .*sparse=False"),
    ),
    Wrong("a sparse lookup", look_up_sparsely, Refused(RuntimeError, "sparse=False")),
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
        Refused(ValueError, "pass model.module and drop the wrapper"),
    ),
    Wrong("parameters for an optimizer", construct(list), Refused(TypeError, "expected a torch.optim.Optimizer, got")),
    Wrong(
        "an optimizer that isn't elementwise",
        construct(lambda model: torch.optim.LBFGS(of_trained_ones(model))),
        Refused(TypeError, "LBFGS.* Use an optimizer that .* such as torch.optim.AdamW"),
    ),
    Wrong("a scheduler of another optimizer", schedule_another_optimizer, Right()),
    Wrong("a string for a learning rate", not_a_number, Refused(TypeError, "bad operand type", ends=True)),
    Wrong(
        "construction under inference_mode",
        lambda work: torch.inference_mode()(construct())(work),
        Refused(RuntimeError, "outside of torch.inference_mode"),
    ),
    Wrong("a float for a loss", lambda work: work.optimizer.backward(0.5), Refused(TypeError, "loss: .* got float")),
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
        "a tensor for a parameter",
        lambda work: work.optimizer.get_param_grad(torch.zeros(4)),
        Refused(ValueError, "expected a trainable parameter"),
    ),
    Wrong("a negative norm", lambda work: work.clip(-1.0), Refused(ValueError, "max_norm")),
    Wrong(
        "a norm of another kind",
        lambda work: work.optimizer.get_grad_norm(norm_type=1),
        Refused(ValueError, "norm_type"),
    ),
    Wrong(
        "a param group without params",
        lambda work: work.optimizer.add_param_group({"lr": 1.0}),
        Refused(TypeError, "param_group: expected a dict with 'params', got \\['lr'\\]"),
    ),
    Wrong(
        "a set of parameters",
        lambda work: work.optimizer.add_param_group({"params": {nn.Parameter(torch.ones(2))}}),
        Refused(TypeError, "ordering of tensors in sets will change between runs. Please use a list instead"),
    ),
    Wrong("no state dict", lambda work: work.optimizer.load_state_dict(None), Refused(TypeError, "got a NoneType")),
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
    Wrong(
        "a model that is all frozen",
        construct(lambda model: adam(model.requires_grad_(False))),
        Refused(ValueError, "requires_grad=True"),
    ),
    Wrong("a parameter that is no leaf", construct(no_leaf), Refused(ValueError, r"param_groups.0..'params'..1.*leaf")),
    Wrong("parameters that share memory", construct(sharing_memory), Refused(ValueError, "2.bias.* 0.bias.*tie")),
    Wrong(
        "a sparse buffer",
        construct(with_a_buffer("odd", lambda: torch.eye(4).to_sparse())),
        Refused(ValueError, "odd: expected a dense tensor, got layout torch.sparse_coo"),
    ),
    *(
        Wrong(
            f"a buffer that is a {name} view",
            construct(with_a_buffer("odd", make)),
            Refused(ValueError, "odd: expected a tensor that can be broadcast"),
        )
        for name, make in {"conjugate": conjugate, "negated": lambda: conjugate().imag}.items()
    ),
    *(
        Wrong(name, construct(make), Refused(ValueError, "odd: expected values, got a tensor on meta"))
        for name, make in {
            "a frozen parameter without values": with_a_parameter(frozen_on_meta),
            "a buffer without values": with_a_buffer("odd", lambda: torch.zeros(3, device="meta")),
        }.items()
    ),
    Wrong("a parameter twice in the groups", construct(twice), Refused(ValueError, f"0.weight: {ONCE}")),
    Wrong(
        "a parameter twice in a group that is added",
        add(lambda model: [nn.Parameter(torch.ones(3))] * 2),
        Refused(ValueError, ONCE),
    ),
    Wrong(
        "a parameter that it has already",
        add(lambda model: [model[0].weight]),
        Refused(ValueError, r"0\.weight: expected a parameter this optimizer doesn't have"),
    ),
    Wrong(
        "a later parameter in fp16",
        add(lambda model: [nn.Parameter(torch.zeros(2, dtype=torch.float16))]),
        Refused(ValueError, "fp16"),
    ),
    Wrong(
        "a later parameter in memory of a sharded one",
        add(lambda model: [nn.Parameter(model[0].bias.data[2:4])]),
        Refused(ValueError, "expected memory of its own, got memory that .* uses too"),
    ),
    Wrong(
        "an optimizer with a list of parameters of its own",
        construct(lambda model: HoldsItsParameters(of_trained_ones(model))),
        Refused(TypeError, "expected HoldsItsParameters to find .* found a separate list in .all"),
    ),
    *(
        Wrong(
            f"an optimizer with {what}",
            construct(lambda model, make=make: HoldsThemIn(of_trained_ones(model), make)),  # type: ignore[misc]
            Refused(TypeError, "expected HoldsThemIn to find .* found a separate list in .kept"),
        )
        for what, make in HOLDING.items()
    ),
    Wrong(
        "an optimizer with a tensor for each parameter's place",
        construct(lambda model: HoldsThemIn(of_trained_ones(model), lambda params: [p.clone() for p in params])),
        Refused(TypeError, "expected HoldsThemIn to keep .* in its state.* found a tensor for each place in .kept"),
    ),
    Wrong(
        "an optimizer with another name of its groups",
        construct(lambda model: OtherName(of_trained_ones(model))),
        Right(nothing),
    ),
    *(
        Wrong(
            "gradients of another dtype",
            construct(with_wider_gradients),
            Refused(TypeError, r"2\.weight: expected gradients in the parameter's torch\.float32, got grad_"),
        )
        for _ in range(hasattr(torch.Tensor, "grad_dtype"))  # torch 2.10
    ),
    Wrong("copy.deepcopy", lambda work: copy.deepcopy(work.optimizer), NO_COPY),
    Wrong(
        "pickle of its scheduler",
        lambda work: pickle.dumps(torch.optim.lr_scheduler.StepLR(work.optimizer, 1)),
        NO_COPY,
    ),
    Wrong("copy.deepcopy of the wrapped optimizer", lambda work: copy.deepcopy(work.optimizer.optim), Right(nothing)),
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

TABLES = {"objects": OBJECTS, "models": MODELS, "edits": EDITS}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("table", TABLES)
def test_wrong_objects_and_changes(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.chdir(tmp_path)  # some save
    try_out(TABLES[table], 2, subtests)
