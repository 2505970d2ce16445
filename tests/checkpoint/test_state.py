"""State as tensors: cut and gathered, and a whole state dict that goes to plain torch and back."""

from __future__ import annotations

import copy
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
from tests.support.checkpoints import check_same
from tests.support.on_ranks import on_ranks
from tests.support.oracle import Run, build, groups
from tests.support.ranks import run_ranks
from tests.support.saving import adamw, train, wrapped


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
        step = slice_state({"step": value}, record)["step"]
        assert step == value
        assert step.data_ptr() != value.data_ptr()  # the next step counts it up in place
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
    assert torch.equal(cut.pop("rows"), torch.arange(2.0))
    assert cut == {"lr": 0.5, "name": "p", "none": None}


def test_sixteen_bit_state_becomes_the_master_s_dtype() -> None:
    record = record_of(torch.zeros(4).bfloat16(), 0, 2)
    record.make_master(torch.float32)
    state = {"exp_avg": torch.ones(4).bfloat16(), "wide": torch.ones(4).double(), "flags": torch.ones(4).bool()}
    cut = slice_state(state, record)
    assert [cut[key].dtype for key in ("exp_avg", "wide", "flags")] == [torch.float32, torch.float64, torch.bool]


# A whole state dict


@on_ranks(2)
def test_nothing_of_a_loaded_state_dict_is_kept_beyond_the_next_step(rank: int) -> None:
    """Masters are, until then: the model may be loaded after the optimizer."""
    model, optimizer = wrapped(nn.Linear(7, 285, bias=False).bfloat16(), adamw)

    def wide_tensors() -> int:
        train(model, optimizer)
        gc.collect()
        found = (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter))
        return len({each.data_ptr() for each in found if each.numel() == 998 and each.dtype == torch.float32})

    before = wide_tensors()
    assert before == 3  # master and two moments
    optimizer.load_state_dict(optimizer.state_dict())
    assert wide_tensors() == before


@on_ranks(2, product((16.0, 64.0), (False, True)))
def test_gradients_go_if_another_loss_scale_is_loaded_between_backward_and_step(
    rank: int, saved_scale: float, waits: bool
) -> None:
    """They carry the former one. Of the same scale they stay, as in torch."""
    saved, p = (nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2))
    state = LowLevelZeroOptimizer(torch.optim.SGD([saved], lr=1.0), initial_scale=saved_scale).state_dict()
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD([p], lr=1.0), initial_scale=64.0)
    with optimizer.no_sync() if waits else nullcontext():
        optimizer.backward(p.float().sum() * 0.25)
    optimizer.load_state_dict(state)
    optimizer.step()
    stepped = 1.0 if saved_scale == 16.0 else 0.75
    assert p[0].item() == stepped
    optimizer.zero_grad()
    optimizer.backward(p.float().sum() * 0.25)
    optimizer.step()
    assert p[0].item() == stepped - 0.25


# What doesn't fit


@on_ranks(2)
def test_another_model_s_state_is_refused(rank: int) -> None:
    model = build(Run())
    optimizer = LowLevelZeroOptimizer(adamw(groups(model)), model=model)
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


class CountsInOneElement(torch.optim.SGD):
    """A state of one element beside the momentum, as QHAdam's weights."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p]["weight"] = self.state[p].get("weight", p.new_zeros(1)) + 1
        return super().step(closure)


@on_ranks(2)
def test_a_number_that_is_a_tensor_of_one_element_is_loaded(rank: int) -> None:
    pair = wrapped(nn.Linear(5, 6), lambda ps: CountsInOneElement(ps, lr=0.1, momentum=0.9))
    for _ in range(2):
        train(*pair)
        pair[1].load_state_dict(pair[1].state_dict())
    assert [state["weight"].tolist() for state in pair[1].state.values()] == [[2.0], [2.0]]


@on_ranks(2)
def test_a_setting_is_loaded_to_where_it_was(rank: int) -> None:
    """A rate on a device, which a graph may have captured; here on one without memory."""
    optimizer = LowLevelZeroOptimizer(torch.optim.Adam(nn.Linear(3, 2).parameters(), betas=(0.8, 0.9)))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5, device="meta")
    state = optimizer.state_dict()
    state["param_groups"][0] |= {"lr": torch.tensor(0.25), "betas": (torch.tensor(0.5), 0.75)}
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"].is_meta
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)


@on_ranks(2)
def test_a_master_of_one_element_is_no_number(rank: int) -> None:
    model, optimizer = wrapped(nn.Linear(5, 6).bfloat16(), adamw, steps=1)
    saved = optimizer.state_dict()
    saved["state"][0]["master_param"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"^weight: expected master_param of its shape \(6, 5\), got \(1,\)"):
        optimizer.load_state_dict(saved)
    train(model, optimizer)


@on_ranks(2)
def test_a_piece_may_be_as_large_as_is_asked_for(rank: int) -> None:
    weights = nn.ParameterList(nn.Parameter(torch.zeros(512, 512)) for _ in range(5))  # 1 MiB each
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    optimizer.backward(torch.stack([p.sum() for p in weights]).sum())
    optimizer.step()
    pieces = [(sorted(piece), size) for piece, size in optimizer.state_dict_shard(2)]
    assert pieces == [([0, 1], 2.0), ([2, 3], 2.0), ([4], 1.0)]


@on_ranks(2)
def test_a_state_dict_that_was_given_stays_as_it_was(rank: int) -> None:
    """Step counts too, which the next step counts up in place."""
    model, optimizer = wrapped(nn.Linear(5, 6), adamw, steps=1)
    given = optimizer.state_dict()
    before = copy.deepcopy(given)
    train(model, optimizer)
    check_same(before, given)


@on_ranks(2)
def test_a_loaded_state_is_its_owner_s_alone(rank: int) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5))
    model, optimizer = wrapped(model, adamw, steps=1, split="parameters")
    before = memory_held(optimizer).states
    optimizer.load_state_dict(optimizer.state_dict())
    assert memory_held(optimizer).states == before
    train(model, optimizer)
    assert memory_held(optimizer).states == before
