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
from lowlevel_zero.communication import shard_group
from lowlevel_zero.communication.fp8 import BLOCK, decode, encode, encoded_size
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.deepspeed import full_fp32_params
from tests.support.judging import off_the_way
from tests.support.patching import patch_rank
from tests.support.ranks import run_cases, run_ranks
from tests.support.several import check_all

CPU = torch.device("cpu")
LARGEST = torch.finfo(torch.float32).max
WAYS = ["native", "messages", "shared memory", "staged"]
RANKS = 3


@contextmanager
def by(way: str) -> Iterator[None]:
    """Meanwhile the wires of this rank travel that way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", str(int(way == "shared memory")))
        if way == "native":
            patch.setattr(ShardGroup, "on_gloo", lambda self, device: False)
        patch.setattr(shard_group, "is_staged", lambda device: way == "staged")
        yield


def joined(**options: bool) -> ShardGroup:
    group = ShardGroup()
    group.connect(**options)
    return group


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


def swapped_rows_go_where_they_belong(rank: int) -> None:
    group = joined()
    backend = group.backend(CPU)
    for row, dtype in [(1, torch.uint8), (7, torch.bfloat16), (1001, torch.float32)]:
        wires = [(numbers(RANKS, row, seed=of).abs() % 200).to(dtype) for of in range(RANKS)]
        packed = backend.new_buffer(row, dtype, CPU).copy_(wires[rank])
        pending = [backend.exchange_rows(wires[rank]), backend.exchange_rows(packed)]
        expected = torch.stack([wire[rank] for wire in wires])
        assert all(torch.equal(each.wait(), expected) for each in pending)


def sums_are_those_of_the_rounded_numbers(rank: int) -> None:
    wires = [numbers(RANKS, 700, seed=of).bfloat16() for of in range(RANKS)]
    rounded = torch.stack([there_and_back(wire) for wire in wires]).sum(0).bfloat16()
    exact = torch.stack(wires).float().sum(0)
    most = torch.stack([bound(wire) for wire in wires]).sum(0) + exact.abs() / 128
    group = joined()
    wire = group.new_buffer(700, torch.bfloat16, CPU, fp8=True).copy_(wires[rank])
    own = group.reduce_scatter(wire, fp8=True).wait()
    assert torch.equal(own, rounded[rank])
    assert (own - exact[rank]).abs().le(most[rank]).all()
    mine = wires[rank].clone()
    total = group.all_reduce(mine, fp8=True).wait()
    assert torch.equal(mine, wires[rank])
    assert torch.equal(total, there_and_back(rounded).bfloat16())


def gathered_rows_are_alike_on_all_ranks(rank: int) -> None:
    for_rank = [[numbers(size, seed=rank + size) for size in (300, 1, 256)] for rank in range(RANKS)]
    expected = there_and_back(torch.stack([torch.cat(each) for each in for_rank]).bfloat16()).bfloat16()
    group = joined()
    rows = torch.zeros(RANKS, 557, dtype=torch.bfloat16)
    group.gather([torch.cat(for_rank[rank])], [rows], fp8=True).wait()
    assert torch.equal(rows, expected)
    pieces = [torch.zeros(RANKS, size, dtype=torch.bfloat16) for size in (300, 1, 256)]
    group.gather(for_rank[rank], pieces, fp8=True).wait()
    assert torch.equal(torch.cat(pieces, dim=1), expected)
    assert group.traffic()["gather"] == (RANKS - 1) * 2 * encoded_size(557)


def a_backend_s_own_reduce_scatters_sum_16_bits_in_fp32(rank: int) -> None:
    group = joined(sums_in_fp32=True)
    for dtype, large in [(torch.bfloat16, 256.0), (torch.float16, 2048.0)]:  # above them only even numbers
        wire = torch.full((RANKS, 5), large if rank == 0 else 1.0, dtype=dtype)
        total = group.reduce_scatter(wire).wait()
        assert torch.equal(total, torch.full((5,), large + RANKS - 1).to(dtype))
    wire = torch.full((RANKS, 5), 2.0**-30 * 3**rank)
    exact = torch.tensor(2.0**-30 * sum(3**of for of in range(RANKS)))
    assert torch.allclose(group.reduce_scatter(wire).wait(), exact)


CONTRACT = [
    *product([sums_are_those_of_the_rounded_numbers, gathered_rows_are_alike_on_all_ranks], WAYS),
    *product([swapped_rows_go_where_they_belong], WAYS[:3]),  # the staged one hands rows to the host's
    (a_backend_s_own_reduce_scatters_sum_16_bits_in_fp32, "native"),
]


def test_collectives_by_each_way(subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, check: Callable[[int], None], way: str) -> None:
        with by(way):
            check(rank)

    for (check, way), ran in run_cases(work, RANKS, CONTRACT, one_group=True):
        with subtests.test(check.__name__, way=way):
            ran.values()


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
        values.append({name: p.detach().clone() for name, p in model.named_parameters()})
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


class Pair(NamedTuple):
    """What a run with fp8 and the same without leave on one rank; masters are whole."""

    values: list[dict[str, Tensor]]  # with it, after each step
    fp8: dict[str, Tensor]
    plain: dict[str, Tensor]
    norms: list[float]
    plain_norms: list[float]

    @classmethod
    def of(cls, fp8: Trained, plain: Trained) -> Pair:
        return cls(fp8.values, whole_masters(fp8), whole_masters(plain), fp8.norms, plain.norms)


def whole_masters(trained: Trained) -> dict[str, Tensor]:
    return {name: master.float() for name, master in full_fp32_params(trained.model).items() if master is not None}


SHARE = 0.05  # of the way that masters go, they may be off; so rounded, they are off by 0.02 to 0.03


def test_training_is_near_a_run_without_and_alike_on_all_ranks(subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, name: str) -> Pair:
        return Pair.of(run(CASES[name], rank, **FP8), run(CASES[name], rank))

    for (name,), ran in run_cases(work, 3, [(name,) for name in CASES], one_group=True):
        with subtests.test(name):
            _check_near(ran.values(), CASES[name])


def _check_near(ranks: list[Pair], case: Case) -> None:
    """Runs with fp8 are the same on all ranks, and not far from those without."""
    first, *others = ranks
    for other in others:
        for mine, theirs in zip(first.values, other.values, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert 1e-3 < off_the_way(_start(case), first.plain, first.fp8) <= SHARE
    for pair in ranks:
        assert pair.norms == pytest.approx(pair.plain_norms, rel=0.02)


def _start(case: Case) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: p.detach() for name, p in Net().to(case.dtype).named_parameters()}


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
            for name, value in there.values[-1].items():
                assert torch.equal(here.values[-1][name], value), name


class Pieces(nn.Module):
    """A long vector and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(3000))
        self.matrix = nn.Parameter(torch.randn(16, 16))


@pytest.mark.parametrize("fp8", [True, False], ids=["with fp8", "without"])
def test_what_a_run_sent_is_saved_with_its_state(fp8: bool, tmp_path: Path) -> None:
    """Values alone don't tell: a model may have been changed in a few places, or rounded to fp8 on purpose."""

    def built(seed: int, **options: Any) -> tuple[Pieces, LowLevelZeroOptimizer]:
        torch.manual_seed(seed)
        model = Pieces().bfloat16()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, LowLevelZeroOptimizer(inner, model=model, partition_grad=True, **options)

    def work(rank: int, world_size: int) -> None:
        patch_rank(options_of_zero, "FP8_MIN_NUMEL", 1)
        model, optimizer = built(0, fp8_communication=fp8)
        for _ in range(3):
            optimizer.backward(sum((p.float() * torch.randn(p.shape)).sum() for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        exact = full_fp32_params(model)
        whole = copy.deepcopy(optimizer.state_dict())
        dcp.save({"optim": Sharded(optimizer)}, checkpoint_id=tmp_path)
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
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
            dcp.load({"optim": Sharded(other)}, checkpoint_id=tmp_path)

        for load in (load_whole, load_sharded):
            for model_first in (True, False):
                again, resumed = built(1)
                if model_first:
                    again.load_state_dict(values)
                load(resumed)
                if not model_first:
                    again.load_state_dict(values)
                for name, master in full_fp32_params(again).items():
                    assert torch.equal(master, torch.where(kept[name], exact[name], values[name].float())), name

    run_ranks(work, 2)


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
    messages = run(Case(options=STAGE_2, way="messages"), rank).values
    sums = Communication(reduce_scatter_with_fp32_accumulation=True)
    native = run(Case(options=STAGE_2, way="native"), rank, communication=sums).values
    for one, other in zip(messages, native, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


CHECKS = [
    gradients_are_within_their_bounds_and_small_parameters_untouched,
    an_overflow_on_one_rank_skips_the_step_on_all,
    masters_are_exact_and_go_on_where_they_were,
    what_others_write_into_a_parameter_reaches_its_master,
    training_with_sums_in_fp32_is_what_gloo_s_wires_make_of_it,
]


def test_what_training_in_fp8_and_sums_in_fp32_leave(subtests: pytest.Subtests) -> None:
    check_all(CHECKS, 2, subtests, one_group=True)
