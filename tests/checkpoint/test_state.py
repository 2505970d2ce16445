"""State as tensors: cut and gathered, and a whole state dict that goes to plain torch and back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
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
from tests.support.oracle import Run, build, check_close, groups, loss_of
from tests.support.ranks import run_cases, run_ranks
from tests.support.saving import Make, adamw, held, train, wrapped


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


# One tensor


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_slices_are_the_rows_in_memory_order_and_gathered_they_are_the_whole(world_size: int) -> None:
    """Cut from tensors in other strides, they have the same elements."""

    def gather(rank: int, world_size: int) -> None:
        for shape, make in SHAPES.items():
            record = record_of(make(), rank, world_size)
            own = record.row if record.split.numel != 1 else make().reshape(1)  # which all ranks have
            assert torch.equal(record.slice_of(make()), own), shape
            assert torch.equal(record.slice_of(make().contiguous()), own), shape
            (whole,) = whole_slices([Slice(record, record.slice_of(make() * 2))], ShardGroup())
            assert torch.equal(whole, make() * 2), shape
            assert whole.stride() == make().stride(), shape

    run_ranks(gather, world_size)


def test_rows_lose_their_padding() -> None:
    record = record_of(torch.zeros(5), 0, 3)
    assert unshard(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]]), record).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("p", [torch.tensor(1.0), torch.ones(1), torch.ones(2)], ids=["0-d", "one", "two"])
def test_a_step_count_and_the_state_of_a_single_element_are_every_rank_s(p: Tensor) -> None:
    for rank in range(2):  # rank 1's slice may be but padding
        record, value = record_of(p.clone(), rank, 2), torch.tensor(7.0)
        assert slice_state({"step": value}, record)["step"] is value
        cut = slice_state({"count": torch.full_like(p, 7.0)}, record)["count"]
        assert cut.tolist() == [7]


@pytest.mark.parametrize("key", ["step", "mu"])
def test_states_are_told_by_their_shape_whatever_their_name(key: str) -> None:
    record = record_of(torch.zeros(2), 1, 2)
    cut = slice_state({key: torch.tensor([3.0, 4.0])}, record)[key]
    assert cut.tolist() == [4]
    assert is_slice(key, cut, record)


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


Saved = list[dict[str, Any]]
"""A model's and its optimizer's state dict."""


def restored(make: Make, saved: Saved | None, seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(Run(seed=0 if saved is None else seed))
    if saved is not None:
        model.load_state_dict(saved[0])
    return model, make(groups(model))


def go_alone(make: Make, saved: Saved | None, steps: range) -> Saved:
    model, optimizer = restored(make, saved)
    if saved is not None:
        optimizer.load_state_dict(saved[1])
    steps_alone(model, optimizer, steps)
    return held(model, optimizer)


def go_sharded(rank: int, world_size: int, make: Make, saved: Saved | None, steps: range) -> Saved:
    model, inner = restored(make, saved)
    optimizer = LowLevelZeroOptimizer(inner, model=model, partition_grad=world_size % 2 == 0, reduce_bucket_size=50)
    if saved is not None:
        optimizer.load_state_dict(saved[1])
    steps_sharded(rank, world_size, model, optimizer, steps)
    return held(model, optimizer)


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


def test_round_trip_over_world_sizes_and_plain_torch(subtests: pytest.Subtests) -> None:
    """From three ranks to one process of plain torch to others, six ranks' worth of data all along."""
    first = run_cases(go_sharded, 3, [(make, None, range(2)) for make in OPTIMIZERS.values()])
    for name, ((make, *_), ran) in zip(OPTIMIZERS, first, strict=True):
        with subtests.test(name, ranks=3):
            expected = go_alone(make, None, range(2))
            for saved in ran.values():
                check_same_state(expected[1], saved[1], 2e-6)
    between = [(make, go_alone(make, ran.values()[2], range(2, 4)), range(4, 6)) for (make, *_), ran in first]
    for world_size in (1, 2):
        for name, ((make, *_), ran) in zip(OPTIMIZERS, run_cases(go_sharded, world_size, between), strict=True):
            with subtests.test(name, ranks=world_size):
                ranks, expected = ran.values(), go_alone(make, None, range(6))
                check_close(expected[0], [each[0] for each in ranks], 4e-6)
                for each in ranks:
                    check_same_state(expected[1], each[1], 4e-6)


def test_a_forgotten_state_would_show() -> None:
    make = OPTIMIZERS["momentum"]
    saved = go_alone(make, None, range(2))
    expected = go_alone(make, saved, range(2, 4))
    fresh = go_alone(make, [saved[0], make(groups(build(Run()))).state_dict()], range(2, 4))
    with pytest.raises(AssertionError, match="differs from the oracle"):
        check_close(expected[0], [fresh[0]], 4e-6)


def test_nothing_of_a_loaded_state_dict_is_kept_beyond_the_next_step() -> None:
    """Masters are, until then: the model may be loaded after the optimizer."""

    def load(rank: int, world_size: int) -> None:
        model = nn.Linear(7, 285, bias=False).bfloat16()
        optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model=model)

        def wide_tensors() -> int:
            train(model, optimizer)
            gc.collect()
            found = (each for each in gc.get_objects() if type(each) is Tensor)
            return len({each.data_ptr() for each in found if each.numel() == 998 and each.dtype == torch.float32})

        before = wide_tensors()
        assert before == 3  # master and two moments
        optimizer.load_state_dict(optimizer.state_dict())
        assert wide_tensors() == before

    run_ranks(load, 2)


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

    for (saved_scale, waits), ran in run_cases(load, 2, product((16.0, 64.0), (False, True)), timeout=30):
        expected = (1.0, 0.75) if saved_scale == 16.0 else (0.75, 0.5)
        assert ran.values() == [expected] * 2, (saved_scale, waits)


# What doesn't fit


def test_another_model_s_state_is_refused() -> None:
    def load(rank: int, world_size: int) -> None:
        model = build(Run())
        optimizer = LowLevelZeroOptimizer(OPTIMIZERS["adamw"](groups(model)), model=model)
        train(model, optimizer)
        spoils: tuple[tuple[Callable[[Any, Any], Any], str], ...] = (
            (lambda groups, states: groups.pop(1), "param groups"),
            (lambda groups, states: groups[0]["params"].pop(), "param groups"),
            (
                lambda groups, states: states[max(states)].update(exp_avg=torch.zeros(2, 2)),
                r"expected exp_avg of its shape .* got \(2, 2\)",
            ),
        )
        for spoil, told in spoils:
            saved = optimizer.state_dict()
            spoil(saved["param_groups"], saved["state"])
            with pytest.raises(ValueError, match=told):
                optimizer.load_state_dict(saved)

    run_ranks(load, 2)


class CountsInOneElement(torch.optim.SGD):
    """A state of one element beside the momentum, as QHAdam's weights."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p]["weight"] = self.state[p].get("weight", p.new_zeros(1)) + 1
        return super().step(closure)


def test_a_number_that_is_a_tensor_of_one_element_is_loaded() -> None:
    def load(rank: int, world_size: int) -> None:
        pair = wrapped(nn.Linear(5, 6), lambda ps: CountsInOneElement(ps, lr=0.1, momentum=0.9))
        for _ in range(2):
            train(*pair)
            pair[1].load_state_dict(pair[1].state_dict())
        assert [state["weight"].tolist() for state in pair[1].state.values()] == [[2.0], [2.0]]

    run_ranks(load, 2)


def test_a_loaded_state_is_its_owner_s_alone() -> None:
    def load(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5))
        model, optimizer = wrapped(model, adamw, steps=1, split="parameters")
        before = memory_held(optimizer).states
        optimizer.load_state_dict(optimizer.state_dict())
        assert memory_held(optimizer).states == before
        train(model, optimizer)
        assert memory_held(optimizer).states == before

    run_ranks(load, 2)
