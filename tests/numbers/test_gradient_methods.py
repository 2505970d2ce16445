"""Between backward and step: what Horovod's users write, with parameters and with slices."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer, clip_grad_norm_, clip_grad_value_
from tests.support.covering import covering
from tests.support.on_ranks import on_ranks

STAGES: dict[str, dict[str, Any]] = {"stage 1": {}, "stage 2": {"partition_grad": True}}


def slices(optimizer: LowLevelZeroOptimizer) -> list[Tensor]:
    return [p32 for group in optimizer.optim.param_groups for p32 in group["params"]]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.arange(5.0))
        self.other = nn.Parameter(torch.arange(5.0))
        self.dropped = nn.Parameter(torch.arange(3.0))

    def forward(self, x: float) -> Tensor:
        return x * (self.used.sum() + 2 * self.other.sum())


def two(rank: int, **options: Any) -> tuple[Two, LowLevelZeroOptimizer]:
    """Return a model and its optimizer after a backward whose average gradients are 1.5 and 3."""
    model = Two()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = LowLevelZeroOptimizer(sgd, model=model, initial_scale=4, **{"partition_grad": True, **options})
    optimizer.backward(model(1.0 + rank))
    return model, optimizer


@on_ranks(2, [(False,), (True,)])
def test_gradients_of_slices_may_be_taken_away_and_exchanged(rank: int, offload: bool) -> None:
    model, optimizer = two(rank, cpu_offload=offload)
    optimizer.synchronize()
    used, other, dropped = slices(optimizer)
    assert dropped.grad is None
    used.grad, other.grad = other.grad, used.grad
    assert optimizer.get_param_grad(model.used).tolist() == [3.0] * 5
    with optimizer.skip_synchronize():
        optimizer.step()
    assert model.used.tolist() == [value - 3.0 for value in range(5)]
    assert model.other.tolist() == [value - 1.5 for value in range(5)]
    assert model.dropped.tolist() == [0.0, 1.0, 2.0]
    assert optimizer.get_grad_norm() == pytest.approx((5 * 9 + 5 * 2.25) ** 0.5)
    before = model.used.detach().clone()
    optimizer.zero_grad()
    optimizer.backward(model(1.0))
    optimizer.synchronize()
    used.grad = None
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.equal(model.used, before)
    assert model.other.tolist() == [value - 3.5 for value in range(5)]
    assert optimizer.get_grad_norm() == pytest.approx(20**0.5)


@on_ranks(2, product((False, True), (False, True)))
def test_edited_gradients_are_clipped_by_their_global_norm(rank: int, by_option: bool, offload: bool) -> None:
    # Five elements on two ranks: the sixth is padding, which an edit may reach and nobody may count.
    clip = {"clip_grad_norm": 1.0} if by_option else {}
    model, optimizer = two(rank, cpu_offload=offload, **clip)
    optimizer.synchronize()
    used, other, _ = slices(optimizer)
    used.grad.fill_(3.0)
    other.grad = torch.full_like(other, 4.0)
    if not by_option:
        assert optimizer.clip_grad_norm_(1.0).item() == pytest.approx(125**0.5)
        factor = 125**-0.5
        torch.testing.assert_close(used.grad[:2].clone(), torch.full((2,), 3 * factor))
        torch.testing.assert_close(other.grad[:2].clone(), torch.full((2,), 4 * factor))
    with optimizer.skip_synchronize():
        optimizer.step()
    assert optimizer.get_grad_norm() == pytest.approx(125**0.5 if by_option else 1.0)
    torch.testing.assert_close(model.used.detach(), torch.arange(5.0) - 3 * 125**-0.5)
    torch.testing.assert_close(model.other.detach(), torch.arange(5.0) - 4 * 125**-0.5)


@on_ranks(2, [("stage 1", False, True), ("stage 2", False, False), ("stage 1", True, False)])
def test_an_overflow_skips_the_step_whatever_became_of_it(rank: int, stage: str, offload: bool, fused: bool) -> None:
    model = Two().half()
    adam = torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused)
    options = {"initial_scale": 4, "hysteresis": 1, "cpu_offload": offload, **STAGES[stage]}
    optimizer = LowLevelZeroOptimizer(adam, model=model, **options)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.backward(model(60_000.0 if rank == 0 else 1.0))
    optimizer.synchronize()
    for p32 in slices(optimizer):
        if p32.grad is not None:
            torch.nan_to_num_(p32.grad, 0.0, 1.0, -1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.loss_scale == 2
    optimizer.backward(model(1.0))
    optimizer.synchronize()
    assert slices(optimizer)[0].grad[:2].tolist() == [1.0, 1.0]
    with optimizer.skip_synchronize():
        optimizer.step()
    assert not torch.equal(before[0], model.used)
    assert torch.equal(before[2], model.dropped)


@on_ranks(2)
def test_a_gradient_of_another_optimizer_s_backward_is_added(rank: int) -> None:
    """As in plain torch, also after ``synchronize``: ``zero_grad`` before that backward would drop nothing of it."""
    model, optimizer = two(rank)
    other = nn.Linear(1, 1)
    another = LowLevelZeroOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), model=other)
    optimizer.synchronize()
    another.backward(model(1.0) + 0.0 * other(torch.ones(1)).sum())
    assert model.used.grad is not None
    with optimizer.skip_synchronize():
        optimizer.step()
    assert model.used.tolist() == [value - 2.5 for value in range(5)]
    optimizer.zero_grad()
    assert model.used.grad is None


@on_ranks(2)
def test_synchronize_is_refused_under_no_sync(rank: int) -> None:
    _, optimizer = two(rank)
    with optimizer.no_sync(), pytest.raises(RuntimeError, match="outside of no_sync"):
        optimizer.synchronize()


@on_ranks(2)
def test_a_gradient_can_t_be_assigned_to_a_slice_of_a_dropped_layer(rank: int) -> None:
    model, optimizer = two(rank)
    optimizer.synchronize()
    slices(optimizer)[2].grad = torch.ones_like(slices(optimizer)[2])
    with pytest.raises(ValueError, match="dropped: expected .grad of a slice to be assigned where some rank has"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(model(1.0))
    model.dropped.grad = torch.full_like(model.dropped, 1.0 + rank)
    optimizer.step()
    assert model.dropped.tolist() == [value - 1.5 for value in range(3)]


def taken_away(p32: Tensor) -> None:
    p32.grad = None


def replaced(p32: Tensor) -> None:
    p32.grad = torch.ones_like(p32)


def replaced_by_a_sparse_one(p32: Tensor) -> None:
    p32.grad = torch.ones_like(p32).to_sparse()


EDITS_APART = [
    (taken_away, "expected p.grad to be set to None for the same parameters"),
    (replaced, "other by an assignment once on rank 1 and not on rank 0"),
    (replaced_by_a_sparse_one, "other by an assignment once on rank 1 and not on rank 0"),
]


@on_ranks(2, EDITS_APART)
def test_ranks_must_make_the_same_edits(rank: int, edit: Callable[[Tensor], None], message: str) -> None:
    model, optimizer = two(rank)
    optimizer.synchronize()
    if rank == 1:
        edit(slices(optimizer)[1])
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert message in str(caught.value)
    optimizer.zero_grad()
    optimizer.backward(model(1.0))
    optimizer.step()
    assert model.other.tolist() == [value - 2.0 for value in range(5)]


NUMBERS_APART: list[tuple[Callable[[nn.Module, float], object], str]] = [
    (lambda model, number: model.other.grad.mul_(number), "other by mul_ 1 once on rank 0 and not on rank 1"),
    (lambda model, number: model.other.grad.add_(model.other, alpha=number), "other by add_ 1 once on rank 0"),
    (lambda model, number: model.other.grad.masked_fill_(torch.ones(5, dtype=torch.bool), number), "masked_fill_ 1"),
    (lambda model, number: nn.utils.clip_grad_norm_(model.parameters(), number / 10), "mul_ 0.0"),
    (lambda model, number: nn.utils.clip_grad_value_(model.parameters(), number / 10), " -0.1"),
    (
        lambda model, number: torch._foreach_mul_([model.used.grad, model.other.grad], [1.0, number + 1]),
        "by _foreach_mul_ 1 2 once on rank 0",
    ),
    (
        lambda model, number: torch._foreach_add_([model.other.grad], [torch.tensor(number)]),
        "by _foreach_add_ 1 once on rank 0",
    ),
    (lambda model, number: clip_grad_norm_(model.parameters(), number), "by clip_grad_norm_ to 1 from 7.5 once on"),
    (lambda model, number: clip_grad_value_(model.parameters(), number), "by clip_grad_value_ to 1 once on rank 0"),
]


@on_ranks(2, NUMBERS_APART)
def test_ranks_must_edit_by_the_same_numbers(
    rank: int, edit: Callable[[nn.Module, float], object], message: str
) -> None:
    """Each rank would scale its own slices by its own number, and all would have the same weights afterwards."""
    model, optimizer = two(rank)
    optimizer.synchronize()
    edit(model, 1.0 + rank)
    with pytest.raises(RuntimeError, match="expected the same edits of p.grad on every rank") as caught:
        optimizer.step()
    assert message in str(caught.value)
    optimizer.zero_grad()
    optimizer.backward(model(1.0))
    edit(model, 1.0 + rank * 2**-20)  # a rounding
    optimizer.step()


@on_ranks(2)
def test_each_rank_may_write_other_numbers_to_its_slices(rank: int) -> None:
    model, optimizer = two(rank)
    slices(optimizer)[1].grad.add_(rank + 1.0)  # type: ignore[union-attr]
    optimizer.step()
    assert model.other.tolist() == [value - 3.0 - (1 + (value > 2)) for value in range(5)]


@on_ranks(2)
def test_a_gradient_may_be_divided_by_zero(rank: int) -> None:
    model, _ = two(rank)
    model.other.grad.div_(0.0)  # type: ignore[union-attr]
    assert model.other.grad.tolist() == [float("inf")] * 5  # type: ignore[union-attr]


@on_ranks(2)
def test_a_sparse_gradient_may_be_assigned(rank: int) -> None:
    model, optimizer = two(rank)
    replaced_by_a_sparse_one(slices(optimizer)[1])
    optimizer.step()
    assert model.other.tolist() == [value - 1.0 for value in range(5)]


# Gradients that are assigned, scaled or taken from elsewhere


def made(count: int = 2, **options: Any) -> tuple[list[nn.Parameter], LowLevelZeroOptimizer]:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(count)]
    return parameters, LowLevelZeroOptimizer(torch.optim.SGD(parameters, lr=1.0), **options)


def weighted(parameters: list[nn.Parameter]) -> Tensor:
    return torch.stack([(at + 1) * p.sum() for at, p in enumerate(parameters)]).sum()


@on_ranks(2, covering((False, True), (False, True), (1, 2)))
def test_one_between_two_backwards_takes_the_place_of_the_sum(
    rank: int, plain: bool, none_first: bool, stage: int
) -> None:
    """Those of parameters 0 and 2 are assigned."""
    parameters, optimizer = made(3, stage=stage)
    for at in range(2):
        if plain:
            weighted(parameters).backward()
        else:
            optimizer.backward(weighted(parameters))
        for p in parameters[::2] if at == 0 else ():
            if none_first:
                p.grad = None
            p.grad = torch.full((4,), 100.0)
    optimizer.step()
    assert [p[0].item() for p in parameters] == [-101.0, -4.0, -103.0]


@on_ranks(2)
def test_one_of_a_slice_outlives_a_refused_step(rank: int) -> None:
    parameters, optimizer = made()
    optimizer.backward(weighted(parameters))
    for p32 in optimizer.param_groups[0]["params"]:
        p32.grad = torch.full_like(p32, 0.25)
    optimizer.param_groups[0]["lr"] = 1.0 + rank
    with pytest.raises(ValueError, match="expected the same settings"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    if rank == 1:  # which the other rank hasn't done, though the values are the same
        with torch.no_grad():
            parameters[1].add_(1).sub_(1)
    optimizer.step()
    assert [p[0].item() for p in parameters] == [-0.25, -0.25]


@on_ranks(2)
def test_another_parameter_s_is_refused(rank: int) -> None:
    (p, q), optimizer = made()
    optimizer.backward(q.sum())
    p.grad = q.grad
    for call in (optimizer.step, lambda: optimizer.backward(p.sum()), lambda: (p.sum() + q.sum()).backward()):
        with pytest.raises(RuntimeError, match="another tensor that was assigned to it: write"):
            call()
        optimizer.zero_grad()
        optimizer.backward(q.sum())
        p.grad = q.grad


@pytest.mark.parametrize("beside", ["a plain gradient", "another optimizer"])
@on_ranks(2)
def test_a_norm_that_differs_by_rank_is_refused(rank: int, beside: str) -> None:
    (p,), optimizer = made(1)
    (q,) = [nn.Parameter(torch.ones(4))]
    groups = [dist.new_group([each]) for each in range(2)]
    if beside == "another optimizer":
        other = LowLevelZeroOptimizer(torch.optim.SGD([q], lr=1.0), dp_process_group=groups[rank])
        other.backward(q.sum() * (1 + 9 * rank))
    else:
        (q.sum() * (1 + 9 * rank)).backward()
    optimizer.backward(p.sum())
    clip_grad_norm_([p, q], 1.0)
    with pytest.raises(
        RuntimeError, match="expected the same edits of p.grad on every rank, .* from 2.83 once on rank"
    ):
        optimizer.step()


@on_ranks(2)
def test_an_operator_in_place_on_its_data(rank: int) -> None:
    (p, q), optimizer = made()
    optimizer.backward(8 * p.sum() + 8 * q.sum())
    p.grad.data *= 0.5  # type: ignore[union-attr]
    optimizer.param_groups[0]["params"][1].grad.data -= 2.0
    with pytest.raises(RuntimeError, match=r"expected p.grad.copy_\(tensor\)"):
        p.grad.data = torch.ones(4)  # type: ignore[union-attr]
    optimizer.step()
    assert [p[0].item(), q[0].item()] == [-4.0, -6.0]


@on_ranks(2)
def test_a_gradient_with_other_strides_is_added_element_by_element(rank: int) -> None:
    """Each rank's slice of it has other elements."""
    rows, columns = nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(5, 3).t())
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD([rows, columns], lr=1.0))
    numbers = torch.arange(15.0).view(3, 5)
    optimizer.backward((rows * numbers + columns * numbers * 100).sum())
    rows.grad.add_(columns.grad)  # type: ignore[union-attr]
    optimizer.step()
    assert torch.equal(rows, -101 * numbers)


FACTORS = [torch.tensor(value, dtype=kind) for kind in (torch.float16, torch.bfloat16) for value in (3.0, 1e-5, 5e4)]


@on_ranks(3, product(FACTORS, (torch.float32, torch.float64)))
def test_a_factor_of_16_bits_costs_no_digits(rank: int, factor: Tensor, dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD([p], lr=1.0))
    edits: list[Callable[[Any], object]] = [
        lambda g: torch._foreach_div_([g], factor),
        lambda g: g.mul_(factor),
        lambda g: g.div_(factor.view(1)),
    ]
    for edit in edits:
        optimizer.backward((p * torch.arange(4, dtype=dtype)).sum() / 3)
        expected = torch.arange(4, dtype=dtype) / 3
        edit(p.grad)
        edit(expected)
        torch.testing.assert_close(p.grad.clone(), expected)  # type: ignore[union-attr]
        optimizer.zero_grad()


@on_ranks(2, covering(*[(False, True)] * 3))
def test_a_gradient_that_was_cleared_is_no_earlier_one_of_a_frozen_slice(
    rank: int, plain: bool, other: bool, clears: bool
) -> None:
    """The caller took the gradient of the backward before: what comes next can be told from it."""
    parameters, optimizer = made(stage=2)
    _ = made() if other else None
    with optimizer.no_sync():
        optimizer.backward(weighted(parameters))
    if other:
        weighted(parameters).backward()
    if clears:
        parameters[0].grad = parameters[1].grad = None
    optimizer.param_groups[0]["params"][0].requires_grad = False
    run_back = torch.autograd.backward if plain else optimizer.backward
    if clears:
        run_back(weighted(parameters))
    else:
        with pytest.raises(RuntimeError, match="expected no earlier .*zero_grad"):
            run_back(weighted(parameters))
        optimizer.zero_grad()
    optimizer.step()
    assert parameters[0].eq(0).all()


@on_ranks(2)
def test_slices_of_fp64_gradients_are_fp64_where_no_rank_used_the_parameter(rank: int) -> None:
    used, unused = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD([used, unused], lr=1.0))
    optimizer.backward(used.sum())
    gradients: list[Any] = [used.grad, unused.grad]
    assert [each.to_local().dtype for each in gradients] == [torch.float64] * 2
    assert not gradients[1].to_local().any()
