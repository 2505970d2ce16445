"""State as tensors: cut and gathered, and a whole state dict that goes to plain torch and back."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping.sharded_parameter import Position, ShardedParameter
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.layout import memory_held
from lowlevel_zero.partition import EvenSplit
from lowlevel_zero.state.values import Slice, is_slice, slice_state, unshard, whole_slices
from tests.support.oracle import Run, batch, build, check_close, groups, loss_of
from tests.support.ranks import run_cases, run_cases_expecting, run_ranks

Make = Callable[[Any], torch.optim.Optimizer]


def record_of(p: Tensor, rank: int, world_size: int) -> ShardedParameter:
    return ShardedParameter(Position(0, 0, "p"), nn.Parameter(p), EvenSplit(p.numel(), world_size), rank)


SHAPES: dict[str, Callable[[], Tensor]] = {
    "0-d": lambda: torch.tensor(3.0),
    "one": lambda: torch.tensor([3.0]),
    "empty": lambda: torch.zeros(0, 4),
    "vector": lambda: torch.arange(7.0),
    "matrix": lambda: torch.arange(15.0).view(3, 5),
    "transposed": lambda: torch.arange(15.0).view(3, 5).t(),
    "channels_last": lambda: torch.arange(48.0).view(2, 4, 2, 3).to(memory_format=torch.channels_last),
}
over_shapes = pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES.keys())
over_world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


# One tensor


@over_shapes
@over_world_sizes
def test_slices_are_the_rows_in_memory_order(world_size: int, make: Callable[[], Tensor]) -> None:
    for rank in range(world_size):
        record = record_of(make(), rank, world_size)
        assert torch.equal(record.slice_of(make()), record.row)


@over_shapes
@over_world_sizes
def test_state_in_other_strides_is_cut_to_the_same_elements(world_size: int, make: Callable[[], Tensor]) -> None:
    for rank in range(world_size):
        record = record_of(make(), rank, world_size)
        assert torch.equal(record.slice_of(make().contiguous()), record.row)


@over_world_sizes
def test_gathered_slices_are_the_whole(world_size: int, subtests: pytest.Subtests) -> None:
    def gather(rank: int, world_size: int, shape: str) -> tuple[Tensor, tuple[int, ...]]:
        make = SHAPES[shape]
        record = record_of(make(), rank, world_size)
        (whole,) = whole_slices([Slice(record, record.slice_of(make() * 2))], ShardGroup())
        return whole, whole.stride()

    for (shape,), ran in run_cases(gather, world_size, [(shape,) for shape in SHAPES]):
        with subtests.test(shape):
            for whole, stride in ran.values():
                assert torch.equal(whole, SHAPES[shape]() * 2)
                assert stride == SHAPES[shape]().stride()


def test_rows_lose_their_padding() -> None:
    record = record_of(torch.zeros(5), 0, 3)
    assert unshard(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]]), record).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("p", [torch.tensor(1.0), torch.ones(1), torch.ones(2)], ids=["0-d", "one", "two"])
def test_a_step_count_is_never_cut(p: Tensor) -> None:
    value = torch.tensor(7.0)
    for rank in range(2):  # rank 1's slice may be but padding
        assert slice_state({"step": value}, record_of(p.clone(), rank, 2))["step"] is value


@pytest.mark.parametrize("key", ["step", "mu"])
def test_states_are_told_by_their_shape_whatever_their_name(key: str) -> None:
    record = record_of(torch.zeros(2), 1, 2)
    cut = slice_state({key: torch.tensor([3.0, 4.0])}, record)[key]
    assert cut.tolist() == [4]
    assert is_slice(key, cut, record)


@pytest.mark.parametrize("p", [torch.tensor(1.0), torch.ones(1)], ids=["0-d", "one"])
def test_the_state_of_a_single_element_is_every_rank_s(p: Tensor) -> None:
    for rank in range(2):
        assert slice_state({"count": torch.full_like(p, 7.0)}, record_of(p.clone(), rank, 2))["count"].tolist() == [7]


def test_what_is_not_of_the_parameter_s_size_is_not_cut() -> None:
    state = {"exp_avg": torch.arange(6.0).view(2, 3), "rows": torch.arange(2.0), "lr": 0.5, "name": "p", "none": None}
    cut = slice_state(state, record_of(torch.zeros(2, 3), 1, 2))
    assert cut.pop("exp_avg").tolist() == [3, 4, 5]
    assert all(cut[key] is state[key] for key in cut)
    assert cut.keys() == state.keys() - {"exp_avg"}


def test_sixteen_bit_state_becomes_the_master_s_dtype() -> None:
    record = record_of(torch.zeros(4).bfloat16(), 0, 2)
    record.make_master(torch.float32)
    state = {"exp_avg": torch.ones(4).bfloat16(), "wide": torch.ones(4).double(), "flags": torch.ones(4).bool()}
    cut = slice_state(state, record)
    assert [cut[key].dtype for key in ("exp_avg", "wide", "flags")] == [torch.float32, torch.float64, torch.bool]


# A whole state dict

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
}
SHARES = 6  # of the batch; every world size here divides it, so that all see the same data
RUN = Run(SHARES, drop=lambda step, rank: {2} if step < 4 else set())  # a layer that has no state at first


def steps_alone(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for share in range(SHARES):
            (loss_of(model, RUN, step, 0, share) / SHARES).backward()
        optimizer.step()
        optimizer.zero_grad()


def steps_sharded(rank: int, world_size: int, model: nn.Module, optimizer: LowLevelZeroOptimizer, steps: range) -> None:
    own = range(rank, SHARES, world_size)
    for step in steps:
        optimizer.backward(torch.stack([loss_of(model, RUN, step, 0, share) for share in own]).mean())
        optimizer.step()
        optimizer.zero_grad()


class Saved(dict[str, Any]):
    """A model's and its optimizer's state dict, copied."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Saved:
        return cls(
            model={name: value.clone() for name, value in model.state_dict().items()}, optim=optimizer.state_dict()
        )


def restored(make: Make, saved: Saved | None, seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(Run(seed=0 if saved is None else seed))
    if saved is not None:
        model.load_state_dict(saved["model"])
    return model, make(groups(model))


def go_alone(make: Make, saved: Saved | None, steps: range) -> Saved:
    model, optimizer = restored(make, saved)
    if saved is not None:
        optimizer.load_state_dict(saved["optim"])
    steps_alone(model, optimizer, steps)
    return Saved.of(model, optimizer)


def go_sharded(rank: int, world_size: int, make: Make, saved: Saved | None, steps: range) -> Saved:
    model, inner = restored(make, saved)
    optimizer = LowLevelZeroOptimizer(inner, model=model, partition_grad=world_size % 2 == 0, reduce_bucket_size=50)
    if saved is not None:
        optimizer.load_state_dict(saved["optim"])
    steps_sharded(rank, world_size, model, optimizer, steps)
    return Saved.of(model, optimizer)


def trainable() -> set[int]:
    """Places of the parameters that aren't frozen; the others have no state here, though Adagrad gives them some."""
    members = [p for group in groups(build(RUN)) for p in group["params"]]
    return {place for place, p in enumerate(members) if p.requires_grad}


def check_same_state(expected: dict[str, Any], got: dict[str, Any], tolerance: float) -> None:
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys() & trainable()
    for place in got["state"]:
        state = expected["state"][place]
        assert got["state"][place].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(got["state"][place][key], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world_size", [1, 3])
def test_state_dict_is_that_of_plain_torch(world_size: int, subtests: pytest.Subtests) -> None:
    cases = [(make, None, range(3)) for make in OPTIMIZERS.values()]
    for (name, make), (_, ran) in zip(OPTIMIZERS.items(), run_cases(go_sharded, world_size, cases), strict=True):
        with subtests.test(name):
            expected = go_alone(make, None, range(3))
            for saved in ran.values():
                check_same_state(expected["optim"], saved["optim"], 2e-6)


def test_round_trip_over_world_sizes_and_plain_torch(subtests: pytest.Subtests) -> None:
    """Three ranks, one process, two ranks, six ranks' worth of data all along."""
    first = run_cases(go_sharded, 3, [(make, None, range(2)) for make in OPTIMIZERS.values()])
    between = [(make, go_alone(make, ran.values()[2], range(2, 4))) for (make, *_), ran in first]
    last = run_cases(go_sharded, 2, [(make, saved, range(4, 6)) for make, saved in between])
    for (name, make), (_, ran) in zip(OPTIMIZERS.items(), last, strict=True):
        with subtests.test(name):
            ranks = ran.values()
            expected = go_alone(make, None, range(6))
            check_close(expected["model"], [each["model"] for each in ranks], 4e-6)
            check_same_state(expected["optim"], ranks[0]["optim"], 4e-6)


def test_a_forgotten_state_would_show() -> None:
    make = OPTIMIZERS["momentum"]
    saved = go_alone(make, None, range(2))
    expected = go_alone(make, saved, range(2, 4))
    fresh = go_alone(make, Saved(saved, optim=make(groups(build(Run()))).state_dict()), range(2, 4))
    with pytest.raises(AssertionError, match="differs from the oracle"):
        check_close(expected["model"], [fresh["model"]], 4e-6)


def test_masters_of_a_sixteen_bit_model_survive(subtests: pytest.Subtests) -> None:
    """A parameter's low bits are in its master alone: a resumed run must not start from the rounded ones."""

    def train_and_resume(rank: int, world_size: int, name: str) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
        run, make = Run(dtype=torch.bfloat16), OPTIMIZERS[name]
        model = build(run)
        optimizer = LowLevelZeroOptimizer(make(groups(model)), model=model)
        optimizer.backward(loss_of(model, run, 0, 0, rank))
        optimizer.step()
        saved = Saved.of(model, optimizer)
        resumed = build(Run(dtype=torch.bfloat16, seed=3))
        resumed.load_state_dict(saved["model"])
        again = LowLevelZeroOptimizer(make(groups(resumed)), model=resumed)
        again.load_state_dict(saved["optim"])
        return (
            [p32.clone() for p32 in optimizer.get_working_to_master_map().values()],
            [p32.clone() for p32 in again.get_working_to_master_map().values()],
            saved["optim"],
        )

    for (name,), ran in run_cases(train_and_resume, 2, [("adamw",), ("sgd",)]):
        with subtests.test(name):
            for before, after, saved in ran.values():
                assert any(not torch.equal(p32, p32.bfloat16().float()) for p32 in before)  # there are low bits
                assert all(map(torch.equal, before, after))
                plain = OPTIMIZERS[name](groups(build(Run(dtype=torch.bfloat16))))
                plain.load_state_dict(saved)  # plain torch takes it, masters and all


def test_nothing_of_a_loaded_state_dict_is_kept_beyond_the_next_step() -> None:
    """Masters are, until then: the model may be loaded after the optimizer."""

    def train(rank: int, world_size: int) -> None:
        model = nn.Linear(7, 285, bias=False).bfloat16()
        optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model=model)

        def held() -> int:
            optimizer.backward(model(torch.ones(1, 7, dtype=torch.bfloat16)).sum())
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
            found = (each for each in gc.get_objects() if type(each) is Tensor)
            return len({each.data_ptr() for each in found if each.numel() == 998 and each.dtype == torch.float32})

        before = held()
        assert before == 3  # master and two moments
        optimizer.load_state_dict(optimizer.state_dict())
        assert held() == before

    run_ranks(train, 2)


def test_gradients_go_if_another_loss_scale_is_loaded_between_backward_and_step() -> None:
    """They carry the former one. Of the same scale they stay, as in torch."""

    def load(rank: int, world_size: int, saved_scale: float, waits: bool) -> tuple[float, float]:
        saved, p = (nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2))
        state = LowLevelZeroOptimizer(torch.optim.SGD([saved], lr=1.0), initial_scale=saved_scale).state_dict()
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD([p], lr=1.0), initial_scale=64.0)
        with optimizer.no_sync() if waits else nullcontext():
            optimizer.backward(p.float().sum() * 0.25)
        optimizer.load_state_dict(state)
        optimizer.step()
        stepped = p[0].item()
        optimizer.zero_grad()
        optimizer.backward(p.float().sum() * 0.25)
        optimizer.step()
        return stepped, p[0].item()

    for waits in (False, True):
        assert run_ranks(load, 2, 16.0, waits, timeout=30) == [(1.0, 0.75)] * 2
        assert run_ranks(load, 2, 64.0, waits, timeout=30) == [(0.75, 0.5)] * 2


def test_settings_of_groups_are_loaded() -> None:
    def load(rank: int, world_size: int) -> list[float]:
        model = build(Run())
        optimizer = LowLevelZeroOptimizer(OPTIMIZERS["adamw"](groups(model)), model=model)
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group["lr"] *= 0.5
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups is optimizer.optim.param_groups
        return [group["lr"] for group in optimizer.param_groups]

    assert run_ranks(load, 2) == [[5e-3] * 3] * 2


# What doesn't fit


def wrapped() -> LowLevelZeroOptimizer:
    model = build(Run())
    optimizer = LowLevelZeroOptimizer(OPTIMIZERS["adamw"](groups(model)), model=model)
    x, y = batch(Run(), 0, 0, 0)
    optimizer.backward((model(x, set()) - y).square().mean())
    optimizer.step()
    return optimizer


def one_group_less(saved: dict[str, Any]) -> None:
    del saved["param_groups"][1]


def one_parameter_less(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["params"].pop()


def another_shape(saved: dict[str, Any]) -> None:
    place = sorted(saved["state"])[-1]
    saved["state"][place]["exp_avg"] = torch.zeros(2, 2)


SPOILT: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (one_group_less, "param groups"),
    (one_parameter_less, "param groups"),
    (another_shape, r"expected exp_avg of its shape .* got \(2, 2\)"),
]


def test_another_model_s_state_is_refused(subtests: pytest.Subtests) -> None:
    def load(rank: int, world_size: int, spoil: Callable[[dict[str, Any]], None], message: str) -> None:
        optimizer = wrapped()
        saved = optimizer.state_dict()
        spoil(saved)
        optimizer.load_state_dict(saved)

    for (spoil, message), ran in run_cases_expecting(load, 2, SPOILT):
        with subtests.test(spoil.__name__):
            for error in ran.raised():
                assert error.type == "ValueError"
                assert re.search(message, error.message)


class CountsInOneElement(torch.optim.SGD):
    """A state of one element beside the momentum, as QHAdam's weights."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p]["weight"] = self.state[p].get("weight", p.new_zeros(1)) + 1
        return super().step(closure)


def test_a_number_that_is_a_tensor_of_one_element_is_loaded() -> None:
    def train(rank: int, world_size: int) -> None:
        model = nn.Linear(5, 6)
        optimizer = LowLevelZeroOptimizer(CountsInOneElement(model.parameters(), lr=0.1, momentum=0.9), model=model)
        for _ in range(2):
            optimizer.backward(model(torch.ones(2, 5)).sum())
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
        assert [state["weight"].tolist() for state in optimizer.state.values()] == [[2.0], [2.0]]

    run_ranks(train, 2)


def test_a_loaded_state_is_its_owner_s_alone() -> None:
    def train(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5))
        inner = torch.optim.AdamW(model.parameters())
        optimizer = LowLevelZeroOptimizer(inner, model=model, split="parameters")

        def held() -> int:
            optimizer.backward(model(torch.ones(2, 5)).sum())
            optimizer.step()
            optimizer.zero_grad()
            return memory_held(optimizer).states

        before = held()
        optimizer.load_state_dict(optimizer.state_dict())
        assert memory_held(optimizer).states == before
        assert held() == before

    run_ranks(train, 2)
