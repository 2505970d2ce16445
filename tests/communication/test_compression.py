"""fp8 on the wire: how numbers are rounded, what is summed, what travels, and what training makes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from lowlevel_zero import Communication, LowLevelZeroOptimizer
from lowlevel_zero import options as options_of_zero
from lowlevel_zero.checkpoint import Sharded
from lowlevel_zero.communication.fp8 import BLOCK, decode, encode, encoded_size
from lowlevel_zero.deepspeed import full_fp32_params
from lowlevel_zero.partition import Alignment
from tests.support.checkpoints import check_same
from tests.support.judging import off_the_way
from tests.support.on_ranks import on_ranks
from tests.support.oracle import parameters_of
from tests.support.patching import patch_rank
from tests.support.several import check_all, of_all
from tests.support.ways import by, group_by

LARGEST = torch.finfo(torch.float32).max
WAYS = ["native", "messages", "shared memory", "staged messages"]
RANKS = 3


def there_and_back(rows: Tensor) -> Tensor:
    encoded = torch.empty(len(rows), encoded_size(rows.shape[1]), dtype=torch.uint8)
    encode(rows, encoded)
    return decode(encoded, rows.shape[1])


def bound(rows: Tensor) -> Tensor:
    """The largest error of each number of ``[k, n]``: half a step of e4m3's 3 bits, or of its smallest numbers."""
    numel = rows.shape[1]
    blocks = nn.functional.pad(rows.float(), (0, -numel % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    return torch.maximum(blocks.abs() / 16, largest / 224 * 2.0**-10).flatten(1)[:, :numel]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Of all magnitudes, in each block."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * 10 ** (8 * torch.rand(*shape, generator=generator) - 6)


# ---- the code ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5000])
def test_every_number_is_rounded_within_its_bound(numel: int, dtype: torch.dtype) -> None:
    rows = numbers(3, numel).to(dtype)
    back = there_and_back(rows)
    assert back.dtype == torch.float32
    assert (back.double() - rows.double()).abs().le(bound(rows)).all()
    assert torch.equal(there_and_back(back), back)  # what has been rounded stays
    assert encoded_size(numel) == numel + -(-numel // 256)


def test_numbers_of_three_bits_are_exact_whatever_is_beside_them() -> None:
    exact = torch.tensor([[1.0, 1.125, -1.875, 0.0, -0.0, 2.0**-13, 1000 * 1.024 * 0 + 1.75 * 2**-9]])
    assert torch.equal(there_and_back(exact), exact)


@pytest.mark.parametrize("largest", [448.0, 449.0, 464.0, 480.0, 511.9, 512.0, 1e-3, LARGEST, 2.0**-126, 1e-42])
def test_the_largest_number_of_a_block_never_overflows(largest: float) -> None:
    rows = torch.linspace(-1, 1, 511)[None] * largest
    back = there_and_back(rows)
    if largest == LARGEST:  # rounded up it is more than fp32 has, as by any rounding
        assert back[:, [0, -1]].isinf().all()
        back = back.clamp(-LARGEST, LARGEST)
    assert (back.double() - rows.double()).abs().le(bound(rows) + 2.0**-136).all()


def test_one_huge_number_costs_its_block_alone_and_that_no_more_than_its_steps() -> None:
    rows = torch.rand(1, 4 * BLOCK) + 0.5
    rows[0, BLOCK] = 1e9
    back = there_and_back(rows)
    assert back[0, BLOCK] == pytest.approx(1e9, rel=1 / 16)
    assert (back - rows).abs().le(bound(rows)).all()
    others = torch.cat([back[0, :BLOCK], back[0, 2 * BLOCK :]])
    assert (others > 0.4).all()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    rows = numbers(2, 3 * BLOCK + 7)
    rows[1, -1] = bad
    rows[0, BLOCK + 3] = bad
    back = there_and_back(rows)
    assert not back[0, BLOCK : 2 * BLOCK].isfinite().any()
    assert not back[1, 3 * BLOCK :].isfinite().any()
    assert back[0, :BLOCK].isfinite().all()
    assert back[1, : 3 * BLOCK].isfinite().all()
    assert not there_and_back(torch.zeros(2, 300)).any()


# ---- the ways ----


def sums_are_those_of_the_rounded_numbers(rank: int, way: str) -> None:
    wires = [numbers(RANKS, 700, seed=of).bfloat16() for of in range(RANKS)]
    rounded = torch.stack([there_and_back(wire) for wire in wires]).sum(0).bfloat16()
    exact = torch.stack(wires).float().sum(0)
    most = torch.stack([bound(wire) for wire in wires]).sum(0) + exact.abs() / 128
    with group_by(way) as group:
        wire = group.new_buffer(700, torch.bfloat16, exact.device, fp8=True).copy_(wires[rank])
        own = group.reduce_scatter(wire, fp8=True).wait()
        mine = wires[rank].clone()
        total = group.all_reduce(mine, fp8=True).wait()
    assert torch.equal(own, rounded[rank])
    assert (own - exact[rank]).abs().le(most[rank]).all()
    assert torch.equal(mine, wires[rank])
    assert torch.equal(total, there_and_back(rounded).bfloat16())


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def gathered_rows_are_alike_on_all_ranks(rank: int, way: str) -> None:
    for_rank = [[numbers(size, seed=rank + size) for size in (300, 1, 256)] for rank in range(RANKS)]
    expected = there_and_back(torch.stack([torch.cat(each) for each in for_rank]).bfloat16()).bfloat16()
    with group_by(way) as group:
        rows = torch.zeros(RANKS, 557, dtype=torch.bfloat16)
        group.gather([torch.cat(for_rank[rank])], [rows], fp8=True).wait()
        pieces = [torch.zeros(RANKS, size, dtype=torch.bfloat16) for size in (300, 1, 256)]
        aligned = [torch.zeros_like(each) for each in pieces]
        group.gather(for_rank[rank], pieces, fp8=True).wait()
        with fresh_memory_is_nan():
            group.gather(for_rank[rank], aligned, fp8=True, alignment=Alignment(64, 64)).wait()
        assert torch.equal(rows, expected)
        for each in (pieces, aligned):
            assert torch.equal(torch.cat(each, dim=1), expected)
        assert group.traffic()["gather"] == (RANKS - 1) * (2 * encoded_size(557) + encoded_size(560))


def a_backend_s_own_reduce_scatters_sum_16_bits_in_fp32(rank: int, way: str) -> None:
    with group_by(way, sums_in_fp32=True) as group:
        for dtype, large in [(torch.bfloat16, 256.0), (torch.float16, 2048.0)]:  # above them only even numbers
            wire = torch.full((RANKS, 5), large if rank == 0 else 1.0, dtype=dtype)
            total = group.reduce_scatter(wire).wait()
            assert torch.equal(total, torch.full((5,), large + RANKS - 1).to(dtype))
        wire = torch.full((RANKS, 5), 2.0**-30 * 3**rank)
        exact = torch.tensor(2.0**-30 * sum(3**of for of in range(RANKS)))
        assert torch.allclose(group.reduce_scatter(wire).wait(), exact)


CONTRACT = [
    *product([sums_are_those_of_the_rounded_numbers, gathered_rows_are_alike_on_all_ranks], WAYS),
    (a_backend_s_own_reduce_scatters_sum_16_bits_in_fp32, "native"),
]


@on_ranks(RANKS, CONTRACT)
def test_collectives_by_each_way(rank: int, check: Callable[[int, str], None], way: str) -> None:
    check(rank, way)


# ---- training ----


class Case(NamedTuple):
    """One training run: a model, what its buffers carry, and how it is trained."""

    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = {}  # noqa: RUF012
    way: str = "shared memory"
    drops: bool = False
    micro_batches: int = 1
    steps: int = 4


STAGE_1: dict[str, Any] = {}
STAGE_2 = {"partition_grad": True}
FP8 = {"fp8_communication": True}


class Net(nn.Module):
    """Three matrices that travel in fp8, one of them dropped now and then, and small parameters that don't."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(31, 96)
        self.middle = nn.Linear(96, 96)
        self.last = nn.Linear(96, 31, bias=False)

    def forward(self, x: Tensor, drop: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = hidden if drop else hidden + torch.tanh(self.middle(hidden))
        return self.last(hidden)


class Trained(NamedTuple):
    model: Net
    optimizer: LowLevelZeroOptimizer
    losses: list[float]
    norms: list[float]
    values: list[dict[str, Tensor]]  # after each step

    def masters(self) -> dict[str, Tensor]:
        """Whole ones."""
        masters = full_fp32_params(self.model)
        return {name: master.float() for name, master in masters.items() if master is not None}


def build(case: Case, **options: Any) -> tuple[Net, LowLevelZeroOptimizer]:
    torch.manual_seed(3)
    model = Net().to(case.dtype)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, LowLevelZeroOptimizer(sgd, model=model, **case.options, **options)


def train(case: Case, rank: int, model: Net, optimizer: LowLevelZeroOptimizer, first: int = 0) -> Trained:
    losses, norms, values = [], [], []
    for step in range(first, first + case.steps):
        for micro in range(case.micro_batches):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            x = torch.randn(16, 31, generator=generator).to(case.dtype)
            loss = (model(x, drop=case.drops and (step + rank) % 3 > 0) - x.roll(1, 1)).float().square().mean()
            optimizer.backward(loss / case.micro_batches)
        losses.append(loss.item())
        optimizer.step()
        norms.append(cast(float, optimizer.get_grad_norm()))
        optimizer.zero_grad()
        values.append(parameters_of(model))
    return Trained(model, optimizer, losses, norms, values)


def run(case: Case, rank: int, **options: Any) -> Trained:
    with by(case.way):
        return train(case, rank, *build(case, **options))


CASES = {
    "stage 1": Case(options=STAGE_1),
    "fp32": Case(torch.float32, {**STAGE_2, "clip_grad_norm": 0.1}, way="messages"),
    "fp16": Case(torch.float16, {**STAGE_1, "initial_scale": 2.0**10}),
    "layers dropped": Case(options=STAGE_2, drops=True, steps=7),
    "micro-batches": Case(options={**STAGE_1, "overlap_allgather": True}, micro_batches=3),
    "offloaded": Case(options={**STAGE_2, "cpu_offload": True}, micro_batches=2),
    "native": Case(options=STAGE_1, way="native"),
}


SHARE = 0.05  # of the way that masters go, they may be off; so rounded, they are off by 0.02 to 0.03


@on_ranks(3, CASES)
def test_training_is_near_a_run_without_and_alike_on_all_ranks(rank: int, name: str) -> None:
    case = CASES[name]
    fp8, plain = run(case, rank, **FP8), run(case, rank)
    values, *others = of_all(fp8.values)
    for other in others:
        check_same(values, other)
    torch.manual_seed(3)
    start = parameters_of(Net().to(case.dtype))
    assert 1e-3 < off_the_way(start, plain.masters(), fp8.masters()) <= SHARE
    assert fp8.norms == pytest.approx(plain.norms, rel=0.02)


def gradients_are_within_their_bounds_and_small_parameters_untouched(rank: int, world_size: int) -> None:
    grads: list[dict[str, Tensor]] = []
    for options, least in ((FP8, 2048), ({}, 2048), (FP8, 10**6)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(options_of_zero, "FP8_MIN_NUMEL", least)
            model, optimizer = build(Case(torch.float32, STAGE_2), **options)
        x = torch.randn(16, 31, generator=torch.Generator().manual_seed(rank))
        optimizer.backward(model(x).square().mean())
        grads.append({name: optimizer.get_param_grad(p) for name, p in model.named_parameters()})
    for name, exact in grads[1].items():
        assert torch.equal(grads[2][name], exact)
        error = (grads[0][name] - exact).abs().max()
        assert error <= exact.abs().max() / 8
        assert (error > 0) == (exact.numel() >= 2048), name


def an_overflow_on_one_rank_skips_the_step_on_all(rank: int, world_size: int) -> None:
    model, optimizer = build(Case(torch.float16), hysteresis=1, initial_scale=2.0**10, **FP8)
    before = model.middle.weight.detach().clone()
    x = torch.full((2, 31), 60000.0 if rank == 1 else 1.0, dtype=torch.float16)
    optimizer.backward(model.first(x).float().square().sum() + model.middle.weight.sum())
    optimizer.step()
    assert torch.equal(model.middle.weight, before)
    optimizer.zero_grad()
    optimizer.backward(model.middle.weight.float().square().sum())
    optimizer.step()
    assert optimizer.loss_scale == 2.0**9
    assert not torch.equal(model.middle.weight, before)


# ---- masters ----


def masters_are_exact_and_go_on_where_they_were(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(dtype, STAGE_2, steps=3)
        done = run(case, rank, **FP8)
        model, optimizer = done.model, done.optimizer
        for record in optimizer.sharded_parameters:
            if record.fp8:
                assert not torch.equal(record.p32, record.row.float())
                assert ((record.p32 - record.row).abs() <= record.p32.abs() / 16 + record.p32.abs().max() / 1e4).all()
        parameters, state = model.state_dict(), optimizer.state_dict()
        assert "master_param" in state["state"][0]
        assert ("master_param" in state["state"][1]) == (dtype == torch.bfloat16)  # a small one
        parameters = {name: value.clone() for name, value in parameters.items()}
        there = train(case, rank, model, optimizer, first=3)
        for model_first in (True, False):
            again, resumed = build(case, **FP8)
            loads = [(again, parameters), (resumed, state)]
            for it, saved in loads if model_first else reversed(loads):
                it.load_state_dict(copy.deepcopy(saved))
            here = train(case, rank, again, resumed, first=3)
            assert here.losses == there.losses
            check_same(there.values[-1], here.values[-1])


class Pieces(nn.Module):
    """A long vector and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(3000))
        self.matrix = nn.Parameter(torch.randn(16, 16))


@on_ranks(2, (True, False))
def test_what_a_run_sent_is_saved_with_its_state(rank: int, fp8: bool, tmp_path: Path) -> None:
    """Values alone don't tell: a model may have been changed in a few places, or rounded to fp8 on purpose."""

    def built(seed: int, **options: Any) -> tuple[Pieces, LowLevelZeroOptimizer]:
        torch.manual_seed(seed)
        model = Pieces().bfloat16()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, LowLevelZeroOptimizer(inner, model=model, partition_grad=True, **options)

    patch_rank(options_of_zero, "FP8_MIN_NUMEL", 1)
    model, optimizer = built(0, fp8_communication=fp8)
    for _ in range(3):
        optimizer.backward(sum((p.float() * torch.randn(p.shape)).sum() for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    exact = full_fp32_params(model)
    whole = copy.deepcopy(optimizer.state_dict())
    dcp.save({"optim": Sharded(optimizer)}, checkpoint_id=tmp_path / str(fp8))
    values = parameters_of(model)
    if fp8:
        values["matrix"][2, 3] += 1.0
    else:
        values = {name: there_and_back(value.view(1, -1)).view_as(value) for name, value in values.items()}
    kept = {name: values[name] == p for name, p in model.named_parameters()}
    assert all(same.any() for same in kept.values())
    assert not all(same.all() for same in kept.values())

    def load_whole(other: LowLevelZeroOptimizer) -> None:
        other.load_state_dict(whole)

    def load_sharded(other: LowLevelZeroOptimizer) -> None:
        dcp.load({"optim": Sharded(other)}, checkpoint_id=tmp_path / str(fp8))

    for load, model_first in product((load_whole, load_sharded), (True, False)):
        again, resumed = built(1)
        if model_first:
            again.load_state_dict(values)
        load(resumed)
        if not model_first:
            again.load_state_dict(values)
        for name, master in full_fp32_params(again).items():
            assert torch.equal(master, torch.where(kept[name], exact[name], values[name].float())), name


def what_others_write_into_a_parameter_reaches_its_master(rank: int, world_size: int) -> None:
    case = Case(options=STAGE_2, steps=2)
    model, optimizer = build(case, **FP8)
    for value in (0.75, 1.25):
        with torch.no_grad():
            model.middle.weight[5] = value  # fp8 has them
            model.middle.weight[60] = value + 0.01  # and not these
        record = optimizer.sharded_parameters[model.middle.weight]
        kept = record.p32.clone()
        record.follow_edits()
        edited = torch.zeros_like(model.middle.weight, dtype=torch.bool)
        edited[[5, 60]] = True
        own = record.slice_of(edited).bool()
        assert torch.equal(record.p32[~own], kept[~own])
        assert torch.equal(record.p32[own], record.row[own].float())
        train(case, rank, model, optimizer)


def training_with_sums_in_fp32_is_what_gloo_s_wires_make_of_it(rank: int, world_size: int) -> None:
    sums = Communication(reduce_scatter_with_fp32_accumulation=True)
    native = run(Case(options=STAGE_2, way="native"), rank, communication=sums).values
    check_same(run(Case(options=STAGE_2, way="messages"), rank).values, native)


CHECKS = [
    gradients_are_within_their_bounds_and_small_parameters_untouched,
    an_overflow_on_one_rank_skips_the_step_on_all,
    masters_are_exact_and_go_on_where_they_were,
    what_others_write_into_a_parameter_reaches_its_master,
    training_with_sums_in_fp32_is_what_gloo_s_wires_make_of_it,
]


def test_what_training_in_fp8_and_sums_in_fp32_leave(subtests: pytest.Subtests) -> None:
    check_all(CHECKS, 2, subtests, one_group=True)
