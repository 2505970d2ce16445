"""States and maps that ColossalAI's own tests of its low-level ZeRO look at, of our optimizer, on CPU and gloo."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.cases import check_cases, check_each


class Mlp(nn.Module):
    """Two layers that work and one that never does."""

    def __init__(self, sizes: tuple[int, int, int] = (123, 253, 51)) -> None:
        super().__init__()
        self.first = nn.Linear(sizes[0], sizes[1])
        self.unused = nn.Linear(sizes[1], sizes[1])
        self.second = nn.Linear(sizes[1], sizes[2])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def twins(dtype: torch.dtype = torch.float32, **sizes: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    model = Mlp(**sizes).to(dtype)
    return model, copy.deepcopy(model)


def data_of(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2001 + rank))


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one.detach().float(), other.detach().float(), rtol=1.3e-6, atol=1e-5)


def state_is_plain_torchs(rank: int, world_size: int, stage: int, master_weights: bool) -> None:
    plain, sharded = twins(sizes=(12, 25, 13))
    ddp = DistributedDataParallel(plain, static_graph=True)
    reference = torch.optim.Adam(ddp.parameters(), lr=1)
    optimizer = LowLevelZeroOptimizer(
        torch.optim.Adam(sharded.parameters(), lr=1),
        overlap_communication=True,
        initial_scale=1,
        reduce_bucket_size=262144,
        partition_grad=stage == 2,
        master_weights=master_weights,
    )
    x = data_of(rank, 4, 12)
    optimizer.backward(sharded(x).mean().float())
    ddp(x).mean().backward()
    optimizer.step()
    reference.step()
    expected = reference.state_dict()
    check_state(expected, optimizer.state_dict())
    shards = dict(item for shard, _ in optimizer.state_dict_shard(max_shard_size=1024) for item in shard.items())
    check_state(expected, {"state": shards})
    optimizer.optim.state = []  # ColossalAI's test empties it so
    optimizer.load_state_dict(copy.deepcopy(expected))
    check_state(expected, optimizer.state_dict())
    assert optimizer.optim.state_dict()["state"][0]["exp_avg"].shape == (-(-12 * 25 // world_size),)


def check_state(expected: dict[str, Any], got: dict[str, Any]) -> None:
    assert expected["state"].keys() == got["state"].keys()
    for place, state in expected["state"].items():
        assert state.keys() == got["state"][place].keys()
        for key, value in state.items():
            same(value, got["state"][place][key])


def only_the_master_keeps_whole_states(rank: int, world_size: int) -> None:
    _, model = twins(torch.bfloat16, sizes=(12, 25, 13))
    optimizer = LowLevelZeroOptimizer(torch.optim.Adam(model.parameters(), lr=1))
    optimizer.backward(model(data_of(rank, 4, 12).bfloat16()).mean())
    optimizer.step()
    buffers: dict[int, dict[str, Tensor]] = {}
    first = optimizer.state_dict(buffers, only_on_master=True)
    again = optimizer.state_dict(buffers, only_on_master=True)
    assert list(first["state"]) == [0, 1, 4, 5]
    assert first["param_groups"] == optimizer.state_dict()["param_groups"]
    if rank > 0:
        assert first["state"] == {0: {}, 1: {}, 4: {}, 5: {}}
    else:
        assert list(first["state"][0]) == ["step", "exp_avg", "exp_avg_sq", "master_param"]
        assert again["state"][0]["exp_avg"] is first["state"][0]["exp_avg"]
        assert first["state"][0]["exp_avg"] is buffers[0]["exp_avg"]
        assert torch.equal(first["state"][0]["master_param"].bfloat16(), model.first.weight)
    sizes = [size for _, size in optimizer.state_dict_shard(1, only_on_master=True)]
    assert sum(sizes) == pytest.approx(3 * 4 * (12 * 25 + 25 + 25 * 13 + 13) / 2**20)


def maps_lead_from_working_to_master_and_back(rank: int, world_size: int) -> None:
    _, model = twins(torch.bfloat16, sizes=(3, 5, 1))
    plain = torch.optim.SGD(model.parameters(), lr=1)
    optimizer = LowLevelZeroOptimizer(plain)
    assert optimizer.unwrap() is plain
    assert optimizer.optim.state is optimizer.state
    for p in model.parameters():
        master = optimizer.working_to_master_param[id(p)]
        assert optimizer.master_to_working_param[id(master)] is p
        padded = nn.functional.pad(p.detach().view(-1), (0, optimizer.get_param_padding_size(p)))
        assert torch.equal(padded.chunk(world_size)[rank], master.to(p.dtype))


def test_states_and_maps_are_what_callers_look_at(subtests: pytest.Subtests) -> None:
    check_cases(subtests, 2, state_is_plain_torchs, [(1, True), (2, False)])
    check_each(subtests, 2, [only_the_master_keeps_whole_states])
    check_each(subtests, 3, [maps_lead_from_working_to_master_and_back])
