"""What users write between backward and step: on ``p.grad`` of sharded gradients it gives what it gives in plain torch.

Each use is made of a model that is trained by ranks, and of the same model in one process with all of the batch: what
it returns, the gradients afterwards and the parameters after the step are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowlevel_zero
from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.agreement import Call
from lowlevel_zero.gradients.sharded_gradient import ShardedGradient
from tests.support.gradients import batch
from tests.support.ranks import run_cases

INF = float("inf")


class Net(nn.Module):
    """Three layers of sizes that ranks don't divide, of which the last may be left out."""

    def __init__(self, strided: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 3, bias=False)
        self.dropped = nn.Linear(3, 3, bias=False)
        if strided:
            self.first.weight = nn.Parameter(torch.randn(3, 5).t())

    def forward(self, x: Tensor, drop: bool) -> Tensor:
        x = self.second(self.first(x.to(self.first.weight.dtype)).tanh())
        x = x if drop else self.dropped(x)
        return x.float().square().mean()


def of(model: nn.Module) -> list[tuple[Any, Any]]:
    """Parameters that have a gradient, with it."""
    return [(p, p.grad) for p in model.parameters() if p.grad is not None]


def gradients(model: nn.Module) -> list[Any]:
    return [g for _, g in of(model)]


def each(use: Callable[[Any, Any], Any]) -> Callable[[nn.Module], Any]:
    """A use of each parameter and its gradient."""
    return lambda model: [use(p, g) for p, g in of(model)]


def edit(use: Callable[[Any, Any], Any]) -> Callable[[nn.Module], None]:
    """An edit of each gradient."""

    def edit_all(model: nn.Module) -> None:
        for p, g in of(model):
            use(p, g)

    return edit_all


def all_of(use: Callable[[list[Any], list[Any]], Any]) -> Callable[[nn.Module], Any]:
    """A use of lists of parameters and of their gradients."""
    return lambda model: use([p for p, _ in of(model)], gradients(model))


def mask(like: Tensor) -> Tensor:
    return torch.arange(like.numel()).reshape(like.shape) % 3 == 0


# ---- edits ----


def set_row(p: Any, g: Any) -> None:
    g[0] = 0


def set_masked(p: Any, g: Any) -> None:
    g[mask(p)] = 0.25


def add_in_place(p: Any, g: Any) -> None:
    p.grad += 0.1 * p.detach()
    p.grad *= 0.5
    p.grad -= 0.01
    p.grad /= torch.full_like(p, 2.0)


def by_out(p: Any, g: Any) -> None:
    torch.add(g, p, alpha=0.1, out=g)
    torch.mul(p, 0.5, out=g.data)


def of_rows(p: Any, g: Any) -> None:
    for row in g.view(len(g), -1):
        row.div_(row.norm() + 1)


def clip_adaptively(p: Any, g: Any) -> None:
    """As adaptive gradient clipping does, unit by unit."""
    data, gradient = p.detach(), g.detach()
    most = data.norm(dim=-1, keepdim=True).clamp_(min=1e-3).mul_(0.1)
    norm = gradient.norm(dim=-1, keepdim=True)
    g.detach().copy_(torch.where(norm < most, gradient, gradient * (most / norm.clamp(min=1e-6))))


def flatten_and_back(model: nn.Module) -> None:
    """As wrappers do that average by themselves."""
    flat = torch._utils._flatten_dense_tensors([g.data for g in gradients(model)])
    flat.mul_(0.5)
    for g, part in zip(gradients(model), torch._utils._unflatten_dense_tensors(flat, gradients(model)), strict=True):
        g.copy_(part)


def same_gradient_twice(model: nn.Module) -> None:
    first = gradients(model)[0]
    torch._foreach_mul_([first, first], 2.0)
    torch._foreach_add_([first, first], 0.1)


def beside_plain(model: nn.Module) -> Any:
    """Lists that hold plain tensors too."""
    others = [torch.ones(3), torch.full((2,), 2.0)]
    mixed = [others[0], *gradients(model), others[1]]
    norms = torch._foreach_norm(mixed)
    torch._foreach_mul_(mixed, 0.5)
    torch._foreach_add_(mixed, [torch.ones_like(each) for each in mixed], alpha=0.1)
    torch._foreach_clamp_max_(mixed, 0.6)
    torch._foreach_zero_(mixed[:2])
    return [*norms, *others]


def with_a_history(model: nn.Module) -> None:
    """Outside of ``no_grad`` too, where autograd follows."""
    with torch.enable_grad():
        for p, g in of(model):
            g.add_(p, alpha=0.1)


def bits(g: Any) -> list[bool]:
    return [bool(g.isfinite().all()), bool(g.isnan().any()), bool(torch.isinf(g).any()), bool((g == g).all())]


EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "copy_ of a tensor": edit(lambda p, g: g.copy_(0.1 * p)),
    "copy_ of what it was": edit(lambda p, g: g.copy_(g * 2 + p)),
    "add_ with alpha": edit(lambda p, g: g.add_(p, alpha=0.1)),
    "add_ in a function": edit(lambda p, g: torch.Tensor.add_(g, p, alpha=-0.1)),
    "add_ of itself": edit(lambda p, g: g.add_(g)),
    "sub_ of its mean": edit(lambda p, g: g.sub_(g.mean())),
    "operators": each(add_in_place),
    "out": each(by_out),
    "mul_ by a mask": edit(lambda p, g: g.mul_(mask(p))),
    "mul_ that broadcasts": edit(lambda p, g: g.mul_(torch.arange(1.0, g.shape[-1] + 1))),
    "div_ by a number and rounding": edit(lambda p, g: g.div_(0.01, rounding_mode="trunc")),
    "abs_": edit(lambda p, g: torch.abs_(g)),
    "clamp_ by tensors": edit(lambda p, g: g.clamp_(-p.abs(), p.abs())),
    "clamp_ by keywords": edit(lambda p, g: g.clamp_(max=0.01).clamp_(min=-0.02)),
    "masked_fill_": edit(lambda p, g: g.masked_fill_(mask(p), 0.5)),
    "fill_": edit(lambda p, g: g.fill_(0.3)),
    "lerp_": edit(lambda p, g: g.lerp_(p, 0.2)),
    "addcdiv_": edit(lambda p, g: torch.Tensor.addcdiv_(g, p, p.abs() + 1)),
    ".data": edit(lambda p, g: g.data.mul_(0.5).add_(p.data, alpha=0.1).clamp_(-0.1, 0.1)),
    "detach()": edit(lambda p, g: g.detach().mul_(0.5)),
    "a row": each(set_row),
    "a column": edit(lambda p, g: g[..., 1].zero_()),
    "a mask": each(set_masked),
    "an end": edit(lambda p, g: g.view(-1)[2:].mul_(2)),
    "a transposed one": edit(lambda p, g: g.t().add_(p.t())),
    "rows": each(of_rows),
    "index_fill_": edit(lambda p, g: g.index_fill_(0, torch.tensor([0, 2]), 1.5)),
    "index_add_": edit(lambda p, g: g.index_add_(0, torch.tensor([1]), p[:1].detach())),
    "cumsum_": edit(lambda p, g: g.cumsum_(0)),
    "adaptive clipping": each(clip_adaptively),
    "flattened and back": flatten_and_back,
    "the same one twice": same_gradient_twice,
    "lists with plain tensors": beside_plain,
    "a history": with_a_history,
    "_foreach_add_": all_of(lambda ps, gs: torch._foreach_add_(gs, ps, alpha=0.1)),
    "_foreach_mul_ by a list": all_of(lambda ps, gs: torch._foreach_mul_(gs, [0.5] * len(gs))),
    "_foreach_mul_ by tensors": all_of(lambda ps, gs: torch._foreach_mul_(gs, ps)),
    "_foreach_div_": all_of(lambda ps, gs: torch._foreach_div_(gs, torch.tensor(3.0))),
    "_foreach_addcdiv_ by a tensor": all_of(
        lambda ps, gs: torch._foreach_addcdiv_(gs, ps, [p.abs() + 1 for p in ps], torch.full((len(ps),), 0.5))
    ),
    "clip_grad_value_": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "lowlevel_zero.clip_grad_value_": lambda model: lowlevel_zero.clip_grad_value_(model.parameters(), 0.01),
    "clip_grads_with_norm_": lambda model: torch.nn.utils.clip_grads_with_norm_(
        model.parameters(), 0.01, torch.nn.utils.get_total_norm(gradients(model))
    ),
    **{
        f"clip_grad_norm_ {order} {foreach}": (
            lambda model, order=order, foreach=foreach: torch.nn.utils.clip_grad_norm_(
                model.parameters(), 0.01, order, error_if_nonfinite=True, foreach=foreach
            )
        )
        for order in (2.0, 1.0, INF)
        for foreach in (True, False)
    },
}

READS: dict[str, Callable[[nn.Module], Any]] = {
    "finite": each(lambda p, g: bits(g)),
    "largest": each(lambda p, g: [g.abs().max(), g.max(), torch.min(g), g.amax(dim=0), torch.aminmax(g)[0]]),
    "means": each(lambda p, g: [g.mean(), g.std(), g.sum(), float(g.sum()), g.square().mean().sqrt().item()]),
    "norms": each(lambda p, g: [g.norm(), g.norm(1), torch.norm(g, INF), torch.linalg.norm(g), g.data.norm(2)]),
    "other norms": each(lambda p, g: [g.norm(dim=0), g.norm(0), g.view(-1).norm(), g.flatten().norm(1)]),
    "norms that keep dimensions": each(lambda p, g: torch.linalg.vector_norm(g, keepdim=True)),
    "clone": each(lambda p, g: [g.clone(), g.detach().clone(), g.clone().detach(), g.data.clone(), copy.deepcopy(g)]),
    "detach": each(lambda p, g: [g.detach().flatten(), g.detach().view(-1)[:2].sum(), g.detach() * 1]),
    "dtypes": each(lambda p, g: [g.double().sum(), g.detach().cpu() + 0, g.to(torch.float64), g.float() * 2]),
    "numbers": each(
        lambda p, g: [g.tolist(), torch.from_numpy(g.detach().cpu().float().numpy().copy()), len(g), g.shape]
    ),
    "operators": each(lambda p, g: [g + 1, 2 * g, g - p, p * g, g / 2, -g, g**2, g > 0, g == g, abs(g)]),
    "functions": each(lambda p, g: [torch.where(g > 0, g, p), torch.maximum(g, p), torch.equal(g, g), g.sign()]),
    "indices": each(lambda p, g: [g[0] + 0, g[..., -1] + 0, g[mask(p)], [row.sum() for row in g], g.t() + 0]),
    "cat": all_of(lambda ps, gs: torch.cat([g.flatten() for g in gs])),
    "parameters_to_vector": all_of(lambda ps, gs: torch.nn.utils.parameters_to_vector(gs)),
    "total norm": all_of(lambda ps, gs: [torch.nn.utils.get_total_norm(gs, n, foreach=None) for n in (1.0, 2.0, INF)]),
    "total norm of squares": all_of(lambda ps, gs: sum(g.data.norm(2).item() ** 2 for g in gs) ** 0.5),
    "_foreach": all_of(
        lambda ps, gs: [*torch._foreach_norm(gs, INF), *torch._foreach_add(gs, ps), *torch._foreach_abs(gs)]
    ),
    "cosine": all_of(
        lambda ps, gs: torch.nn.functional.cosine_similarity(
            *(torch.cat([t.flatten() for t in ts]) for ts in (ps, gs)), dim=0
        )
    ),
    "into plain tensors": each(
        lambda p, g: [
            torch.ones_like(p).mul_(g),
            torch.zeros_like(p).copy_(g),
            torch.ones_like(p).detach().lerp_(g.detach(), 0.5),
            torch.mul(g, 2, out=torch.empty_like(g)),
        ]
    ),
    "like it": each(lambda p, g: [torch.zeros_like(g), torch.ones_like(g), g.new_full((2,), 3), g.new_tensor([1.0])]),
}


class Case:
    """How the ranks train, and what is made of gradients."""

    def __init__(self, name: str, uses: Iterable[str], dtype: torch.dtype = torch.float32, **how: Any) -> None:
        self.name, self.uses, self.dtype = name, list(uses), dtype
        self.bare, self.drop, self.micro, self.strided = (
            how.pop(key, False) for key in ("bare", "drop", "micro", "strided")
        )
        self.options = {"reduce_bucket_size": 40, **how}


STAGE_2 = {"partition_grad": True}
ALL = {**EDITS, **READS}
STRIDED = ["copy_ of a tensor", "add_ with alpha", "mul_ by a mask", "a column", "a mask", "_foreach_add_", "clone"]
CASES = {
    1: [Case("fp16", list(ALL)[::4], torch.float16, initial_scale=256.0, **STAGE_2)],
    2: [
        Case("stage 1", ALL),
        Case("layers dropped on a rank", list(ALL)[::4], drop=True, bare=True, **STAGE_2),
        Case("micro-batches", list(ALL)[1::4], micro=True, bare=True),
        Case("fp16 on the host", list(ALL)[1::4], torch.float16, initial_scale=256.0, cpu_offload=True),
    ],
    3: [
        Case("stage 2", list(ALL)[::2], **STAGE_2),
        Case("whole parameters", list(ALL)[1::3], split="parameters"),
        Case("layers dropped on a rank, stage 1", list(ALL)[1::4], drop=True),
        Case("bf16 without masters", list(ALL)[::4], torch.bfloat16, master_weights=False),
        Case("other strides", STRIDED, strided=True, **STAGE_2),
        Case("one parameter a bucket", list(ALL)[::5], reduce_bucket_size=1, **STAGE_2),
    ],
}


def close(case: Case) -> dict[str, Any]:
    return {
        torch.float32: {"rtol": 2e-5, "atol": 2e-6},
        torch.bfloat16: {"rtol": 0.08, "atol": 0.02},
        torch.float16: {"rtol": 0.02, "atol": 4e-3},
    }[case.dtype]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Beside:
    """A model that ranks train, and the same in plain torch with every rank's share."""

    def __init__(self, rank: int, world_size: int, case: Case) -> None:
        self.rank, self.world_size, self.case = rank, world_size, case
        self.model, self.plain = (Net(case.strided).to(case.dtype) for _ in range(2))
        self.start = [p.detach().clone() for p in self.plain.parameters()]
        self.optimizer = LowLevelZeroOptimizer(sgd(self.model.parameters()), model=self.model, **case.options)
        self.alone = sgd(self.plain.parameters())

    def drops(self, rank: int) -> bool:
        return bool(self.case.drop) and rank == self.world_size - 1

    def backward(self, at: int) -> None:
        loss = self.model(batch(at, self.rank), self.drops(self.rank))
        if self.case.bare:
            loss.backward()
        else:
            self.optimizer.backward(loss)
        shares = [self.plain(batch(at, rank), self.drops(rank)) for rank in range(self.world_size)]
        torch.stack(shares).mean().backward()

    @torch.no_grad()
    def use(self, use: Callable[[nn.Module], Any]) -> None:
        """A step from where training began, with a use before it."""
        for p, q, value in zip(self.model.parameters(), self.plain.parameters(), self.start, strict=True):
            p.copy_(value)
            q.copy_(value)
        with torch.enable_grad():
            for at in range(1 + bool(self.case.micro)):
                self.backward(at)
        if self.case.bare or self.case.drop:
            self.optimizer.calls.finish_gradients(Call("look at gradients"))  # which gradients there are is known then
        torch.testing.assert_close(use(self.model), use(self.plain), check_dtype=False, **close(self.case))
        for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert isinstance(p.grad, ShardedGradient) == (q.grad is not None)
            if isinstance(p.grad, ShardedGradient) and q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, **close(self.case))
                norm = q.grad.float().norm()
                torch.testing.assert_close(p.grad.norm(), norm, check_dtype=False, **close(self.case))
        self.optimizer.step()
        self.alone.step()
        for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, **close(self.case))


def train(rank: int, world_size: int, case: Case) -> None:
    wrong = []
    beside = Beside(rank, world_size, case)
    for name in case.uses:
        try:
            beside.use(ALL[name])
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        beside.optimizer.zero_grad()
        beside.alone.zero_grad()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world_size", CASES)
def test_what_users_write_gives_what_it_gives_in_plain_torch(world_size: int, subtests: pytest.Subtests) -> None:
    cases = [(case,) for case in CASES[world_size]]
    for (case,), ran in run_cases(train, world_size, cases, one_group=True, timeout=120):
        with subtests.test(case.name):
            ran.values()
