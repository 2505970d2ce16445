"""Experts that ranks share out: against one process that has them all, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import read_manifest, save_checkpoint
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.deepspeed import full_grads, safe_get_full_grad
from lowlevel_zero.layout import traffic_of
from tests.support.experts import Mixture, Run, judge, lay_out, prepare, sgd, train_spread, train_step, wrap
from tests.support.numbers import trained
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks


def drops(step: int, rank: int) -> set[int]:
    """The first layer on some ranks, the second on all of them at times."""
    return {0} if (step + rank) % 2 else {1} if step == 2 else set()


def lacks_one(step: int, rank: int) -> set[int]:
    return {9} if rank == 1 else set()


WAYS: dict[str, dict[str, Any]] = {
    "layers dropped": {"drop": drops, "clip": 0.1, "options": {"reduce_bucket_size": 60}},
    # In backward rank 0 has ten wires to start before rank 1, which lacks the third, needs it for its experts' tokens.
    "a peer that waits": {"behind": 8, "drop": lacks_one, "options": {"partition_grad": True, "reduce_bucket_size": 1}},
    "one expert a rank": {"size": 4, "bare": True, "drop": drops, "options": {"partition_grad": True}},
    "in turn, as on a device": {"as_on_device": True, "bare": True, "drop": drops, "micro_batches": 2},
    "on the host": {"world_size": 2, "options": {"cpu_offload": True, "partition_grad": True}, "clip": 0.1},
    "overlapped gathers": {"options": {"overlap_allgather": True, "communication_dtype": torch.float64}},
}


def test_experts_train_as_in_one_process(subtests: pytest.Subtests) -> None:
    for name, run, ran in trained({way: Run(**settings) for way, settings in WAYS.items()}, train_spread):
        with subtests.test(name):
            judge(run, ran.values(), 2e-5)


# ---- what travels ----


@on_ranks(2)
def test_experts_without_twins_send_nothing(rank: int) -> None:
    run = Run(2, 2)
    trained = prepare(rank, run)
    train_step(trained, run, 0, rank)
    trained.optimizer.step()
    dense, experts = (group.group.traffic() for group in trained.optimizer.sharded_groups)
    assert traffic_of(trained.optimizer) == dense
    assert min(dense.values()) > max(experts.values()) == 0


@on_ranks(4)
def test_what_twins_send_each_other_counts_too(rank: int) -> None:
    run = Run(4, 2)
    trained = prepare(rank, run)
    train_step(trained, run, 0, rank)
    trained.optimizer.step()
    dense, experts = (group.group.traffic() for group in trained.optimizer.sharded_groups)
    assert min(experts.values()) > 0
    assert traffic_of(trained.optimizer) == {purpose: dense[purpose] + experts[purpose] for purpose in dense}


@on_ranks(2, product((False, True), (False, True)))
def test_on_a_device_groups_take_turns(rank: int, bare: bool, as_on_device: bool) -> None:
    """Its communicators want one order on all ranks, whose gradients may come in another one on each.

    So do further groups of a plain backward, which not all ranks may run, on any device.
    """
    started: list[int] = []
    start = ShardGroup.all_reduce

    def noted(group: ShardGroup, *arguments: Any) -> Any:
        started.append(group.ranks)
        return start(group, *arguments)

    run = Run(2, 2, bare=bare, as_on_device=as_on_device, options={"reduce_bucket_size": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardGroup, "all_reduce", noted)
        trained = prepare(rank, run)
        train_step(trained, run, 0, rank)
        trained.optimizer.step()
    assert set(started) == {1, 2}
    assert (started == sorted(started, reverse=True)) == (as_on_device or bare)


# ---- who is started alike ----


@on_ranks(4)
def test_each_group_starts_from_its_own_first_rank(rank: int) -> None:
    """Parameters, buffers and frozen parameters of experts; the dense ones from rank 0."""
    layout = lay_out(rank, 4, 2)
    model = Mixture(layout)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float(rank))
    wrap(Run(4, 2), model, layout)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert (tensor == (rank % 2 if name.startswith("experts") else 0)).all(), name


def _frozen_beside(rank: int) -> nn.ModuleDict:
    """A frozen layer and an expert, in the model itself and once more in a module of it; other values on each rank."""
    torch.manual_seed(rank)
    pairs = [{"frozen": nn.Linear(3, 3), "expert": nn.Linear(3, 3)} for _ in range(2)]
    for pair in pairs:
        pair["frozen"].requires_grad_(False)
    return nn.ModuleDict({**pairs[0], "inner": nn.ModuleDict(pairs[1])})


@on_ranks(2, (False, True), one_group=False, timeout=30)
def test_frozen_layers_beside_experts_are_all_ranks_if_the_model_has_them_or_lists_them_so(
    rank: int, in_optimizer: bool, tmp_path: Path
) -> None:
    """They start from rank 0, are saved once, and train together when they are unfrozen."""
    alone = [dist.new_group([each]) for each in range(2)][rank]
    model = _frozen_beside(rank)
    frozen, experts, inner = model["frozen"], [model["expert"], model["inner"]["expert"]], model["inner"]["frozen"]
    trained = [p for each in experts for p in each.parameters()]
    listed = {alone: trained, dist.group.WORLD: list(inner.parameters())}
    members = model.parameters() if in_optimizer else trained
    optimizer = LowLevelZeroOptimizer(sgd(members), listed, model=model, dp_process_group=dist.group.WORLD)
    save_checkpoint(folder := tmp_path / f"{in_optimizer}", model, optimizer)
    names = {name.partition("@")[0] for name in read_manifest(folder).tensors if "@" in name}
    assert names == {f"{place}expert.{name}" for place in ("", "inner.") for name in ("weight", "bias")}
    late = [*frozen.parameters(), *inner.parameters()]
    for p in late:
        p.requires_grad_(True)
    optimizer.add_param_group({"params": late})
    for _ in range(2):
        optimizer.backward(model["expert"](frozen(inner(torch.full((2, 3), rank + 1.0)))).square().sum())
        optimizer.step()
    optimizer.verify()
    first: list[list[Any]] = [[], []]
    dist.all_gather_object(first, [p.tolist() for p in late])
    assert first[0] == first[1]


@on_ranks(2, timeout=30)
def test_a_frozen_layer_that_counts_as_experts_is_not_trained_unless_it_is_listed(rank: int) -> None:
    alone = [dist.new_group([each]) for each in range(2)][rank]
    model = _frozen_beside(rank)
    inner = model["inner"]["frozen"]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = LowLevelZeroOptimizer(sgd(trained), {alone: trained}, model=model, dp_process_group=dist.group.WORLD)
    inner.requires_grad_(rank == 0)
    told = (ValueError, "inner.frozen.weight: expected it in a list") if rank == 0 else (RuntimeError, "rank 0 could")
    with pytest.raises(told[0], match=told[1]):
        optimizer.add_param_group({"params": list(inner.parameters()) if rank == 0 else []})


@on_ranks(2, timeout=30)
def test_a_parameter_that_one_rank_alone_has_frozen_is_told_of(rank: int) -> None:
    """The ranks meet in the default group, though all that one of them trains is listed."""
    alone = [dist.new_group([each]) for each in range(2)][rank]
    model = nn.ModuleDict({"router": nn.Linear(3, 3).requires_grad_(rank == 1), "expert": nn.Linear(3, 3)})
    with pytest.raises(ValueError, match=r"router\.weight of group 0"):
        LowLevelZeroOptimizer(sgd(model.parameters()), {alone: list(model["expert"].parameters())}, model=model)


def test_experts_may_have_names_of_their_own_and_other_shapes() -> None:
    """As where a rank keeps the experts of a dense model that are its own."""

    def rank(rank: int, world_size: int) -> float:
        torch.manual_seed(0)
        model = nn.ModuleDict({"dense": nn.Linear(3, 3), f"expert {rank}": nn.Linear(3, 3 + rank)})
        alone = [dist.new_group([0]), dist.new_group([1])][rank]
        assigned = {alone: list(model[f"expert {rank}"].parameters())}
        optimizer = LowLevelZeroOptimizer(sgd(model.parameters()), model=model, pg_to_param_list=assigned)
        optimizer.backward(model[f"expert {rank}"](model["dense"](torch.ones(1, 3))).sum())
        seen = full_grads(model)
        assert all(seen[name].shape == p.shape for name, p in model.named_parameters())
        assert torch.equal(safe_get_full_grad(assigned[alone][1]), torch.full((3 + rank,), 0.5))
        optimizer.step()
        norm = optimizer.get_grad_norm()
        assert norm is not None
        return norm

    one, other = run_ranks(rank, 2)
    assert one == other > 0


# ---- what is refused ----


Change = Callable[[int, Mixture, Any], Any]
"""The mapping that a rank gives: ``change(rank, model, layout)``."""


def _experts(model: Mixture) -> list[nn.Parameter]:
    return list(model.experts.parameters())


def _twice_on_one_rank(rank: int, model: Mixture, layout: Any) -> Any:
    twice = [model.gate.bias] if rank == 1 else []
    return {dist.group.WORLD: [*model.gate.parameters(), *twice], layout.twins: _experts(model)}


def _of_both_on_one_rank(rank: int, model: Mixture, layout: Any) -> Any:
    """One rank lists its experts under a group of both, the other under its own."""
    both = dist.new_group([0, 1])
    return {both if rank == 0 else layout.twins: _experts(model)}


# What is given, and what each rank is told: all the same, where there is one.
MISTAKES: dict[str, tuple[Change, list[tuple[type[Exception], str]]]] = {
    "not a mapping": (lambda rank, model, layout: [1], [(TypeError, "expected a dict")]),
    "not a group": (lambda rank, model, layout: {1: _experts(model)}, [(TypeError, "process groups as keys")]),
    "not a list": (
        lambda rank, model, layout: {layout.twins: model.gate.weight},
        [(TypeError, "expected a list")],
    ),
    "not a parameter": (
        lambda rank, model, layout: {layout.twins: ["gate"]},
        [(TypeError, "expected a list of param")],
    ),
    "a stranger": (
        lambda rank, model, layout: {layout.twins: [nn.Parameter(torch.zeros(2, 9))]},
        [(ValueError, r"\(2, 9\) tensor")],
    ),
    "listed twice": (
        lambda rank, model, layout: {layout.twins: [model.gate.bias], layout.neighbours: [model.gate.bias]},
        [(ValueError, "gate.bias: expected it in one list")],
    ),
    "a group without this rank": (
        lambda rank, model, layout: {dist.GroupMember.NON_GROUP_MEMBER: _experts(model)},
        [(ValueError, "that this rank belongs to")],
    ),
    "listed twice on one rank": (
        _twice_on_one_rank,
        [(RuntimeError, "rank 1 could not.*gate.bias"), (ValueError, "gate.bias")],
    ),
    "a mapping on one rank alone": (
        lambda rank, model, layout: {layout.twins: _experts(model)} if rank == 0 else None,
        [(ValueError, "")],
    ),
    "a group of all on one rank": (
        _of_both_on_one_rank,
        [(ValueError, "«0 groups in pg.* where rank 1 has «1 groups")],
    ),
}


@on_ranks(2, MISTAKES, one_group=False, timeout=20)
def test_a_bad_mapping(rank: int, mistake: str) -> None:
    change, told = MISTAKES[mistake]
    layout = lay_out(rank, 2, 2)
    model = Mixture(layout)
    raised, message = told[rank % len(told)]
    with pytest.raises(raised, match=f"(?s){message}"):
        wrap(Run(2, 2), model, layout, pg_to_param_list=change(rank, model, layout))


@on_ranks(3, timeout=20)
def test_two_groups_of_the_same_ranks_are_listed_in_one_order(rank: int) -> None:
    """One rank lists under the first group what another lists under the second."""
    groups = [[dist.new_group(ranks) for _ in range(2)] for ranks in ([0, 1], [2])][rank // 2]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    lists = [list(layer.parameters()) for layer in model[:2]]
    assigned = dict(zip(groups, lists if rank == 0 else lists[::-1], strict=True))
    told = r"rank 0 has the group of ranks \[0, 1\] where rank 1 has another one of the same ranks"
    with pytest.raises(ValueError, match=told):
        LowLevelZeroOptimizer(sgd(model.parameters()), assigned, model=model)


@on_ranks(3, timeout=20)
def test_groups_that_do_not_part_the_ranks(rank: int) -> None:
    """The first rank lists its expert under a group of two, the others list theirs under their own."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1], [2])]
    model = nn.ModuleDict({"dense": nn.Linear(2, 2), "expert": nn.Linear(2, 2)})
    told = r"rank 0 has the group of ranks \[0, 1\] where rank 1 has one of ranks \[1\]"
    with pytest.raises(ValueError, match=told):
        LowLevelZeroOptimizer(sgd(model.parameters()), {groups[rank]: list(model["expert"].parameters())}, model=model)


@on_ranks(2, timeout=20)
def test_what_is_listed_under_a_group_of_all_ranks_is_no_expert(rank: int) -> None:
    """As where a caller lists what is trained, and not what is frozen."""
    model = nn.ModuleDict({"trained": nn.Linear(2, 2), "frozen": nn.Linear(2, 2).requires_grad_(False)})
    listed = {dist.new_group([0, 1]): list(model["trained"].parameters())}
    optimizer = LowLevelZeroOptimizer(sgd(model.parameters()), listed, model=model)
    optimizer.backward(model["frozen"](model["trained"](torch.ones(3, 2))).square().sum())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm > 1
    optimizer.step()
    assert len(optimizer.sharded_parameters.shard_groups) == 1


@on_ranks(2, timeout=20)
def test_a_group_outside_the_data_parallel_one(rank: int) -> None:
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    both = dist.new_group([0, 1])
    model = nn.Linear(2, 2)
    options = {"dp_process_group": alone, "pg_to_param_list": {both: [model.weight]}}
    with pytest.raises(ValueError, match="expected groups within the data-parallel one"):
        LowLevelZeroOptimizer(sgd(model.parameters()), model=model, **options)


@on_ranks(4, timeout=20)
def test_experts_that_differ_in_a_group_of_twins(rank: int) -> None:
    """Only one pair of twins differs; the others hear of it."""
    layout = lay_out(rank, 4, 2)
    model = Mixture(layout)
    if rank == 3:
        model.experts[0].up = nn.Linear(5, 7, bias=False)
    raised, message = [(RuntimeError, "rank 1 could not"), (ValueError, "experts.0.up.bias")][rank % 2]
    with pytest.raises(raised, match=message):
        wrap(Run(4, 2), model, layout)


@on_ranks(2, (None, "the default group"), timeout=30)
def test_ranks_may_list_groups_in_any_order(rank: int, given: str | None) -> None:
    """Also where several groups have all ranks, of which each might be that of the data-parallel ranks."""
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("one", "other")})
    listed = [(dist.new_group([0, 1]), list(layer.parameters())) for layer in model.values()]
    mapping = dict(listed[:: 1 if rank == 0 else -1])
    everybody = dist.group.WORLD if given else None
    optimizer = LowLevelZeroOptimizer(sgd(model.parameters()), mapping, model=model, dp_process_group=everybody)
    optimizer.backward(model["one"](model["other"](torch.full((2, 3), rank + 1.0))).square().sum())
    optimizer.step()
    optimizer.verify()


@on_ranks(2)
def test_lists_without_parameters_change_nothing(rank: int) -> None:
    layout = lay_out(rank, 2, 2)
    model = Mixture(layout)
    empty = {layout.twins: [], dist.group.WORLD: list(model.parameters()), dist.GroupMember.NON_GROUP_MEMBER: []}
    optimizer = wrap(Run(2, 2), model, layout, pg_to_param_list=empty)
    assert len(list(optimizer.sharded_groups)) == 1


@on_ranks(2, timeout=30)
def test_experts_of_another_dtype_on_one_rank_are_refused_when_they_are_added(rank: int) -> None:
    group = [dist.new_group([each]) for each in range(2)][rank]
    model = nn.ModuleDict({"dense": nn.Linear(3, 3), "late": nn.Linear(3, 3).requires_grad_(False)})
    model["late"].to(torch.float64 if rank == 0 else torch.float32)
    sgd = torch.optim.SGD(model["dense"].parameters(), lr=0.1)
    optimizer = LowLevelZeroOptimizer(sgd, {group: list(model["late"].parameters())}, model=model)
    model["late"].requires_grad_(True)
    with pytest.raises(ValueError, match="expected the same model.*dtypes"):
        optimizer.add_param_group({"params": list(model["late"].parameters())})
    model["late"].requires_grad_(False)
    optimizer.backward(model["dense"](torch.ones(2, 3)).sum())
    optimizer.step()


@on_ranks(2, timeout=30)
def test_experts_that_a_rank_has_frozen_may_be_of_another_dtype(rank: int) -> None:
    """Whether norms are in fp64 and losses are scaled is decided by what is trained."""
    alone = [dist.new_group([each]) for each in range(2)][rank]
    model = nn.ModuleDict({"dense": nn.Linear(3, 3), "expert": nn.Linear(3, 3).requires_grad_(False)})
    model["expert"].to(torch.float64 if rank == 0 else torch.float32)
    optimizer = LowLevelZeroOptimizer(sgd(model.parameters()), {alone: list(model["expert"].parameters())}, model=model)
    optimizer.backward(model["dense"](torch.ones(2, 3)).sum())
    optimizer.step()


@on_ranks(2, timeout=30)
def test_experts_of_other_dtypes_are_alike_where_one_is_forced_on_them(rank: int) -> None:
    alone = [dist.new_group([each]) for each in range(2)][rank]
    model = nn.ModuleDict({"dense": nn.Linear(3, 3), "expert": nn.Linear(3, 3)})
    model["expert"].to(torch.float16 if rank == 0 else torch.float64)
    listed = {alone: list(model["expert"].parameters())}
    optimizer = LowLevelZeroOptimizer(sgd(model.parameters()), listed, model=model, forced_dtype=torch.float32)
    optimizer.backward(model["expert"](model["dense"](torch.ones(2, 3))).sum())
    optimizer.step()
    optimizer.verify()


@on_ranks(3, timeout=30)
def test_twins_that_are_handed_over_otherwise_are_refused_on_all_ranks(rank: int) -> None:
    """Two ranks share an expert, of which one of them adds the bias where the other one adds the weight."""
    group = [dist.new_group(ranks) for ranks in ([0, 1], [2])][rank // 2]
    model = nn.ModuleDict({"dense": nn.Linear(3, 3), "expert": nn.Linear(3, 3).requires_grad_(False)})
    expert = model["expert"]
    optimizer = LowLevelZeroOptimizer(sgd(model["dense"].parameters()), {group: list(expert.parameters())}, model=model)
    expert.requires_grad_(True)
    added = expert.bias if rank == 1 else expert.weight
    raised, message = (ValueError, "expert.weight of group 1") if rank < 2 else (RuntimeError, "rank 0 could not")
    with pytest.raises(raised, match=message):
        optimizer.add_param_group({"params": [added]})


@pytest.mark.parametrize("later", [False, True])
def test_experts_of_one_rank_may_be_frozen_where_others_train_theirs(later: bool) -> None:
    def work(rank: int, world_size: int) -> list[float | None]:
        group = [dist.new_group([each]) for each in range(world_size)][rank]
        dense, expert = nn.Linear(3, 3), nn.Linear(3, 3)
        model = nn.ModuleDict({"dense": dense, "experts": nn.ModuleDict({str(rank): expert})})
        expert.requires_grad_(rank == 0)
        listed = {group: list(expert.parameters())}
        optimizer = LowLevelZeroOptimizer(sgd(model.parameters()), listed, model=model, clip_grad_norm=1.0)
        norms = []
        for step in range(3):
            if later and step == 1:
                expert.requires_grad_(True)
                optimizer.add_param_group({"params": list(expert.parameters()) if rank == 1 else []})
            optimizer.backward(expert(dense(torch.ones(2, 3) * (rank + 1))).square().sum())
            optimizer.step()
            norms.append(optimizer.get_grad_norm())
            optimizer.zero_grad()
        optimizer.verify()
        return norms

    first, second = run_ranks(work, 2, timeout=30)
    assert first == second
    assert None not in first
