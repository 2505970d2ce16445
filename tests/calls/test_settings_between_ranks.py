"""Settings and weights that differ by rank: all ranks refuse the step, name what differs, and may go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_cases
from tests.support.scripts import Together, loss_at, net, steps
from tests.support.several import check_all, of_all

RANKS, ODD = 3, 1


class Kind(Enum):
    LINEAR = 0
    COSINE = 1

    def told(self) -> str:
        return self.name


def settings() -> dict[str, Any]:
    """Of every kind that ranks compare, in containers of their own."""
    return {
        "betas": [0.9, 0.99],
        "weight_decay": torch.tensor(0.1),
        "note": {"decay": 0.5},
        "lr": 0.01,
        "pair": (torch.tensor(0.1),),
        "list": [0.1] * 17,
        "dict": dict.fromkeys(range(17), 0.1),
        "nested": {"of": [1, {"those": ("a", "b")}]},
        "tensor": torch.zeros(2000),
        "tensors": [torch.zeros(17), torch.zeros(17)],
        "array": np.array([1.0, 2.0]),
        "half": np.zeros((3, 17), dtype=np.float16)[:, ::2],
        "bytes": bytes(3),
        "enum": Kind.LINEAR,
        "set": {3, 1},
        "frozenset": frozenset(),
        "range": range(3),
        "function": math.sin,
        "class": Kind,
        "method": Kind.told,
    }


def wrap(model: nn.Module, **options: Any) -> LowLevelZeroOptimizer:
    groups = [{"params": [p for p in model.parameters() if p.dim() == dim], **settings()} for dim in (1, 2)]
    return LowLevelZeroOptimizer(AdamW(groups), model=model, **options)


def values(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> list[Tensor]:
    """What this rank has of parameters, masters and states, as it is now."""
    masters = [p32 for group in optimizer.param_groups for p32 in group["params"]]
    states = [state[key] for state in optimizer.state.values() for key in sorted(state)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *masters, *states)]


# ---- settings ----

Group = dict[str, Any]

# By what differs: how a group is changed, and what the message tells of the odd rank's.
CHANGES: dict[str, tuple[Callable[[Group], Any], str]] = {
    "lr": (lambda group: group.update(lr=0.5), "0.5"),
    "lr of a metric": (lambda group: group.update(lr=np.float64(0.25)), "0.25"),
    "betas in place": (lambda group: group["betas"].__setitem__(0, 0.5), "(0.5, 0.99)"),
    "betas": (lambda group: group.update(betas=(0.5, 0.99)), "(0.5, 0.99)"),
    "weight_decay": (lambda group: group.update(weight_decay=0.7), "0.7"),
    "weight_decay in place": (lambda group: group["weight_decay"].fill_(0.75), "0.75"),
    "amsgrad": (lambda group: group.update(amsgrad=True), "True"),
    "note": (lambda group: group["note"].update(decay=0.25), "{'decay': 0.25}"),
    "pair in place": (lambda group: group["pair"][0].fill_(0.625), "0.625"),
    "initial_lr": (lambda group: group.update(initial_lr=0.3), "0.3"),
    "list in place": (lambda group: group["list"].__setitem__(16, 0.5), "(17 elements with digest "),
    "dict in place": (lambda group: group["dict"].update({16: 0.5}), "{17 elements with digest "),
    "nested": (lambda group: group.update(nested={"of": [1, {"those": ("a", "c")}]}), "'c'"),
    "tensor": (lambda group: group.update(tensor=torch.ones(2000)), "a tensor with checksum "),
    "tensor in place": (lambda group: group["tensor"][1500].fill_(1.0), "a tensor with checksum "),
    "tensors in place": (lambda group: group["tensors"][1][3].fill_(1.0), "a tensor with checksum "),
    "array in place": (lambda group: group["array"].__setitem__(1, 3.0), "ndarray [1.0, 3.0], (2,) d"),
    "array": (lambda group: group.update(array=np.array([1.0, 2.0], dtype=np.float32)), "(2,) f"),
    "half in place": (lambda group: group["half"].__setitem__((2, 8), 1.0), "ndarray with digest "),
    "bytes": (lambda group: group.update(bytes=b"123"), "bytes with digest "),
    "enum": (lambda group: group.update(enum=Kind.COSINE), "Kind.COSINE, 1"),
    "set in place": (lambda group: group["set"].add(2), "{1, 2, 3}"),
    "frozenset": (lambda group: group.update(frozenset=frozenset({"b", "a"})), "{'a', 'b'}"),
    "range": (lambda group: group.update(range=range(4)), "range(0, 4)"),
    "function": (lambda group: group.update(function=math.cos), "math.cos"),
    "class": (lambda group: group.update({"class": Enum}), "enum.Enum"),
    "method": (lambda group: group.update(method=len), "builtins.len"),
}


def test_all_ranks_refuse_a_step_by_other_settings_and_go_on(subtests: pytest.Subtests) -> None:
    """Nothing is stepped; the same gradients are, once the settings are alike."""

    def live(rank: int, world_size: int, what: str) -> str:
        model = net()
        optimizer = wrap(model)
        steps(Together(rank), model, optimizer, [0])
        optimizer.backward(loss_at(model, 1)(rank))
        before = values(model, optimizer)
        group = optimizer.param_groups[1]
        kept = {**group, **settings()}
        if rank == ODD:
            CHANGES[what][0](group)
        with pytest.raises(ValueError, match="on every rank") as caught:
            optimizer.step()
        assert all(map(torch.equal, before, values(model, optimizer)))
        group.pop("initial_lr", None)
        group.update(kept)
        optimizer.step()
        assert not torch.equal(before[0], model[0].weight)
        return str(caught.value)

    for (what,), ran in run_cases(live, RANKS, [(what,) for what in CHANGES], one_group=True):
        with subtests.test(what):
            (message,) = set(ran.values())
            setting = what.partition(" ")[0]
            assert CHANGES[what][1] in message
            assert "set them alike on all ranks" in message
            for rank in range(RANKS):
                assert f"rank {rank} has «{setting} of group 1: " in message


def settings_in_another_order_are_the_same(rank: int, world_size: int) -> None:
    model = net()
    optimizer = wrap(model)
    for group in optimizer.param_groups:
        group["betas"] = (0.9, 0.5)
        if rank == ODD:
            group["weight_decay"] = group.pop("weight_decay")
    steps(Together(rank), model, optimizer, [0])


def a_loss_scale_of_one_rank_s_own_is_refused_by_name(rank: int, world_size: int) -> None:
    for name in ("scale", "growth_interval"):
        model = net().half()
        optimizer = LowLevelZeroOptimizer(AdamW(model.parameters()), model=model, initial_scale=64.0)
        steps(Together(rank), model, optimizer, [0])
        scaler = optimizer.scaler
        assert scaler is not None
        if rank == ODD and name == "scale":
            scaler.scale.fill_(2.0)
        elif rank == ODD:
            scaler.growth_interval = 3
        optimizer.backward(loss_at(model, 0)(rank))
        told = f"rank 0 has «{name} of the loss scaler.*rank {ODD} has «{name} of the loss scaler"
        with pytest.raises(ValueError, match=told) as caught:
            optimizer.step()
        assert set(of_all(str(caught.value))) == {str(caught.value)}


def settings_that_may_change_in_place_may_go_and_come_back(rank: int, world_size: int) -> None:
    """They are the last, behind which there is nothing to look at any more."""
    model = net()
    optimizer = wrap(model)
    group = optimizer.param_groups[-1]
    for held in ({"note": {"decay": 0.5}, "pair": [0.25]}, {}, {"pair": [0.5]}):
        for key in ("note", "pair"):
            group.pop(key, None)
        group.update(held)
        steps(Together(rank), model, optimizer, [0])


class Same:
    """Has a text of its own on each rank."""


def settings_that_ranks_cannot_compare_or_may_have_of_their_own(rank: int, world_size: int) -> None:
    """Objects have addresses, a rank its device, and experts their names."""
    model = net()
    own = {dist.new_group([rank], use_local_synchronization=True): list(model[0].parameters())}
    apart = nn.ModuleDict({f"expert {rank}": model[0], "rest": model[1:]})
    optimizer = LowLevelZeroOptimizer(AdamW(apart.parameters()), pg_to_param_list=own, model=apart)
    optimizer.param_groups[0].update(
        {
            "object": Same(),
            "objects": [Same(), (Same(), {Same()}), {Same(): Same()}],
            "array of objects": np.array([Same(), Same()]),
            "function": lambda: rank,
            "device": torch.device("cuda", rank),
            "names": [f"expert {rank}.weight", "rest.1.weight"],
            "by name": {f"expert {rank}.weight": 0.5},
        }
    )
    for at in range(2):
        steps(Together(rank), model, optimizer, [at])
    optimizer.param_groups[0]["names"].append(f"expert of rank {rank}")
    optimizer.backward(loss_at(model, 2)(rank))
    with pytest.raises(ValueError, match=f"'expert of rank {ODD}'"):
        optimizer.step()


class Counted(float):
    """A number that counts how often it is written out."""

    told = 0

    def __repr__(self) -> str:
        Counted.told += 1
        return super().__repr__()


def settings_that_stay_cost_no_exchange_and_are_not_described_again(rank: int, world_size: int) -> None:
    model = net()
    optimizer = LowLevelZeroOptimizer(AdamW(model.parameters(), lr=Counted(0.01)), model=model)
    large = {"tensor": torch.zeros(17), "tensors": [torch.zeros(17)], "list": [Counted(0.1)] * 1001}
    optimizer.param_groups[0].update(large, pair=(Counted(0.1), "a", frozenset({Counted(0.2)})))
    begun = []
    patch = pytest.MonkeyPatch()
    for at in range(6):
        optimizer.backward(loss_at(model, at)(rank))
        before = optimizer.shard_group.progress.begun["agreement"]
        optimizer.step()
        begun.append(optimizer.shard_group.progress.begun["agreement"] - before)
        optimizer.zero_grad()
        if at == 1:
            Counted.told = 0
            patch.setattr("lowlevel_zero.diagnostics.settings.checksum", None)
    assert Counted.told == 0
    patch.undo()
    assert begun[1:] == [1] * 5  # after the first step the ranks take over an order of gradients


# ---- weights: ways to write, each on the ranks where ``writes`` ----


def load(model: nn.Module, optimizer: LowLevelZeroOptimizer, writes: bool) -> None:
    if writes:
        model.load_state_dict(net(7).bfloat16().state_dict())


@torch.no_grad()
def add(model: nn.Module, optimizer: LowLevelZeroOptimizer, writes: bool) -> None:
    if writes:
        model[2].bias.add_(1.0)


def add_and_refresh(model: nn.Module, optimizer: LowLevelZeroOptimizer, writes: bool) -> None:
    add(model, optimizer, writes)
    if writes:
        optimizer.update_master_params(model)


def add_and_save(model: nn.Module, optimizer: LowLevelZeroOptimizer, writes: bool) -> None:
    """All look at masters in between, which follow on the one rank."""
    add(model, optimizer, writes)
    optimizer.state_dict()


Write = Callable[[nn.Module, LowLevelZeroOptimizer, bool], None]
# By way: the first parameter that is written, in the order of groups, and what is told of the others.
WRITES: dict[str, tuple[Write, str, str]] = {
    "load_state_dict": (load, "0.bias", " (and 7 more)"),
    "in place": (add, "2.bias", ""),
    "in place, and update_master_params": (add_and_refresh, "2.bias", ""),
    "in place, and a state dict": (add_and_save, "2.bias", ""),
}


def test_all_ranks_refuse_a_step_from_other_weights(subtests: pytest.Subtests) -> None:
    """Nothing is stepped, and no master follows."""

    def live(rank: int, world_size: int, way: str) -> str:
        write, name, _ = WRITES[way]
        model = net().bfloat16()
        optimizer = wrap(model)
        steps(Together(rank), model, optimizer, [0])
        write(model, optimizer, rank == ODD)
        optimizer.backward(loss_at(model, 1)(rank))
        before = values(model, optimizer)
        for _ in range(2):  # a second step is refused as well
            with pytest.raises(RuntimeError, match=f"^{name}: expected weights to be written on every rank") as caught:
                optimizer.step()
        assert all(map(torch.equal, before, values(model, optimizer)))
        return str(caught.value)

    for (way,), ran in run_cases(live, RANKS, [(way,) for way in WRITES], one_group=True):
        with subtests.test(way):
            (message,) = set(ran.values())
            assert f"on rank {ODD} and not on ranks 0, 2{WRITES[way][2]}: write the same" in message


def part_frozen() -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    return model


def all_ranks_refuse_a_step_from_other_frozen_weights(rank: int, world_size: int) -> None:
    """In a param group or not; in the first step, and later in one that looks. All may write, and other values."""
    for in_group, in_model, at in ((True, True, 0), (True, False, 0), (False, True, 4)):
        model = part_frozen()
        members = [p for p in model.parameters() if in_group or p.requires_grad]
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(members, lr=0.1), model=model if in_model else None)
        name = "0.weight" if in_model else r"param_groups\[0\]\['params'\]\[0\]"
        steps(Together(rank), model, optimizer, range(at))
        if rank == ODD:
            model[0].load_state_dict(net(7)[0].state_dict())
        optimizer.backward(loss_at(model, at)(rank))
        before = copies(model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"^{name}: .*on rank 1 and not on ranks 0, 2 \(and 1 more\)"):
                optimizer.step()
        assert all(map(torch.equal, before, copies(model)))
        if rank != ODD:
            model[0].load_state_dict(net(7)[0].state_dict())
        steps(Together(rank), model, optimizer, range(at, at + 3))
        with torch.no_grad():
            model[0].weight.add_(rank)
        steps(Together(rank), model, optimizer, range(at + 3, 65))


def frozen_weights_that_one_rank_puts_back_are_no_difference(rank: int, world_size: int) -> None:
    model = part_frozen()
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    if rank == ODD:
        saved = copies(model)
        model[0].reset_parameters()
        undo(model, saved)
        model[0].weight.data = model[0].weight.data.clone()
    steps(Together(rank), model, optimizer, range(3))
    optimizer.verify()


def all_ranks_refuse_a_step_where_one_trains_other_tensors(rank: int, world_size: int) -> None:
    """Whatever their values are: they stay as they are there."""
    model = net()
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    if rank == ODD:
        model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    optimizer.backward(loss_at(model, 0)(rank))
    match = r"^0.weight \(replaced by another tensor\): .*on rank 1 and not on ranks 0, 2"
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()


@torch.no_grad()
def undo(model: nn.Module, saved: list[Tensor]) -> None:
    for p, value in zip(model.parameters(), saved, strict=True):
        p.copy_(value)


def copies(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def all_ranks_refuse_a_step_where_one_has_written_again(rank: int, world_size: int) -> None:
    """All have written, so it's the number of writes that tells; where the values are the same, the step is taken."""
    model = net().bfloat16()
    optimizer = wrap(model)
    add(model, optimizer, writes=True)
    once = copies(model)
    add(model, optimizer, writes=rank == ODD)
    optimizer.backward(loss_at(model, 0)(rank))
    times = f"got 2 times on rank {ODD} and once on ranks 0, 2: "
    with pytest.raises(RuntimeError, match=f"^2.bias: expected weights to be written on every .*{times}") as caught:
        optimizer.step()
    assert set(of_all(str(caught.value))) == {str(caught.value)}
    if rank == ODD:
        undo(model, once)
    optimizer.step()


def weights_that_one_rank_exchanges_and_puts_back_are_no_difference(rank: int, world_size: int) -> None:
    """As one does for a look at a validation set by averaged weights; masters keep their low bits."""
    ends = []
    for exchanges in (True, False):
        model = net().bfloat16()
        optimizer = wrap(model)
        for at in range(3):
            if exchanges and rank == ODD:
                saved = copies(model)
                load(model, optimizer, True)
                undo(model, saved)
            steps(Together(rank), model, optimizer, [at])
        ends.append(values(model, optimizer))
    assert all(map(torch.equal, *ends))


def weights_that_others_receive_from_one_are_written_on_all(rank: int, world_size: int) -> None:
    """By ``p.data``, which counts no write; a step with a rate of 0 leaves them."""
    model = net().bfloat16()
    optimizer = wrap(model)
    steps(Together(rank), model, optimizer, [0])
    add(model, optimizer, writes=rank == ODD)
    dist.broadcast(model[2].bias.data, ODD)
    written = model[2].bias.detach().clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    steps(Together(rank), model, optimizer, [1])
    assert torch.equal(model[2].bias, written)


def values_are_compared_once_where_ranks_have_not_written_alike(rank: int, world_size: int) -> None:
    """Later steps wait as often as those before, also where they don't gather what was written."""
    model, unused = net(), nn.Linear(2, 2)
    optimizer = wrap(nn.ModuleList([model, unused]))
    waits = []
    for at in range(4):
        if at == 1 and rank == ODD:
            undo(unused, copies(unused))
        before = optimizer.shard_group.progress.waits
        steps(Together(rank), model, optimizer, [at])
        waits.append(optimizer.shard_group.progress.waits - before)
    _, compared, third, fourth = waits
    assert compared > third == fourth


CHECKS = [
    settings_in_another_order_are_the_same,
    settings_that_ranks_cannot_compare_or_may_have_of_their_own,
    a_loss_scale_of_one_rank_s_own_is_refused_by_name,
    settings_that_stay_cost_no_exchange_and_are_not_described_again,
    settings_that_may_change_in_place_may_go_and_come_back,
    all_ranks_refuse_a_step_where_one_has_written_again,
    weights_that_one_rank_exchanges_and_puts_back_are_no_difference,
    all_ranks_refuse_a_step_from_other_frozen_weights,
    frozen_weights_that_one_rank_puts_back_are_no_difference,
    all_ranks_refuse_a_step_where_one_trains_other_tensors,
    weights_that_others_receive_from_one_are_written_on_all,
    values_are_compared_once_where_ranks_have_not_written_alike,
]


def test_differences_count_as_often_as_they_are_there(subtests: pytest.Subtests) -> None:
    check_all(CHECKS, RANKS, subtests, one_group=True)
