"""What is each rank's own comes back to it; what is frozen may be left out; of buffers there are those of one rank."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.__main__ import main
from lowlevel_zero.checkpoint import load_checkpoint, read_manifest, read_metadata, read_rank_state, save_checkpoint
from tests.support.checkpoints import check_same, logged
from tests.support.grid import Grid
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks
from tests.support.saving import (
    Calls,
    Keeping,
    Pair,
    adamw,
    check_refused,
    held,
    linear,
    load_by,
    momentum,
    refused,
    save_by,
    train,
    wrapped,
)

# Each rank's own state


def train_by_chance(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> list[Tensor]:
    """By the random numbers of this rank."""
    for _ in range(2):
        train(model, optimizer, scale=random.random() + torch.rand(()).item())
    return [p.detach().clone() for p in model.parameters()]


def test_a_run_goes_on_with_each_rank_s_own_random_numbers(tmp_path: Path) -> None:
    """From what was saved at once and in the background."""

    def run(rank: int, world_size: int) -> None:
        for in_background in (False, True):
            path, pair, fresh = tmp_path / str(in_background), linear(), linear(7)
            torch.manual_seed(rank)
            random.seed(rank)
            train_by_chance(*pair)
            own = {"torch": torch.get_rng_state(), "python": random.getstate(), "batches": [rank, 5]}
            saving = save_checkpoint(path, *pair, rank_state=own, extra="all's", async_save=in_background)
            own["batches"] = "changed later"
            expected = train_by_chance(*pair)
            saving.wait()
            state: dict[str, Any] = {"left": "over"}
            assert load_checkpoint(path, *fresh, rank_state=state) == "all's"
            torch.set_rng_state(state["torch"])
            random.setstate(state["python"])
            assert state.keys() == {"torch", "python", "batches"}
            assert state["batches"] == [rank, 5]
            check_same(expected, train_by_chance(*fresh))

    run_ranks(run, 3)
    for path in tmp_path.iterdir():
        assert read_rank_state(path, 2)["batches"] == [2, 5]
        assert read_rank_state(path, 3) == {}
        assert main(["inspect", "--check", str(path)]) == 0


LEFT = "; those of ranks 2 are given to nobody: see read_rank_state"
# What the first of so many ranks is told where all of three, the last two and none have saved a state.
TOLD = {
    2: (
        f"saved by 0-2{LEFT}",
        f"saved by 1-2; ranks 0 are given none{LEFT}",
        "none was saved; ranks 0-1 are given none",
    ),
    3: ("", "saved by 1-2; ranks 0 are given none", "none was saved; ranks 0-2 are given none"),
    4: (
        "saved by 0-2; ranks 3 are given none",
        "saved by 1-2; ranks 0,3 are given none",
        "none was saved; ranks 0-3 are given none",
    ),
}


def test_who_is_given_what_at_another_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def save(rank: int, world_size: int) -> None:
        pair = linear()
        save_checkpoint(tmp_path / "all", *pair, rank_state={"rank": rank})
        save_checkpoint(tmp_path / "some", *pair, rank_state={"rank": rank} if rank else None)
        save_checkpoint(tmp_path / "none", *pair)

    def load(rank: int, world_size: int) -> None:
        pair = linear()
        for name, saved, told in zip(("all", "some", "none"), ((0, 1, 2), (1, 2), ()), TOLD[world_size], strict=True):
            state: dict[str, Any] = {}
            with logged() as lines:
                load_checkpoint(tmp_path / name, *pair, rank_state=state)
            assert state == ({"rank": rank} if rank in saved else {})
            told = f" rank_state: {world_size} ranks load: {told}" if told and rank == 0 else ""
            assert [line.startswith("WARNING") and line.endswith(told) for line in lines] == [True] * bool(told)
        with logged() as lines:
            load_checkpoint(tmp_path / "all", *pair)
        assert ["pass rank_state={}" in line for line in lines] == [True] * (rank == 0)

    run_ranks(save, 3)
    for world_size in TOLD:
        run_ranks(load, world_size)
    assert main(["inspect", str(tmp_path / "some")]) == 0
    assert "own state of ranks 1-2" in capsys.readouterr().out


@on_ranks(2)
def test_states_that_would_not_come_back_are_refused_on_all_ranks(rank: int, tmp_path: Path) -> None:
    pair, state, bad = linear(), {"here": 1}, cast(Any, [3])
    save_checkpoint(tmp_path / "a", *pair, rank_state={"rank": rank})
    if rank == 0:
        file = tmp_path / "a" / "rank_1.pt"
        file.write_bytes(bytes(file.stat().st_size))

    def save(rank_state: Any) -> None:
        save_checkpoint(tmp_path / "b", *pair, rank_state=rank_state)

    def load(rank_state: Any, **options: Any) -> None:
        load_checkpoint(tmp_path / "a", *pair, rank_state=rank_state, **options)

    calls: Calls = {
        "rank_state['path']: expected what torch.load": lambda: save({"path": tmp_path} if rank else {}),
        "rank_state: expected a dict of what this rank keeps, got list": lambda: save(bad),
        "expected a dict of what this rank keeps, got list": lambda: load(bad),
        ("", "rank_1.pt is not what was written"): lambda: load(state),
        ("", "rank_1.pt"): lambda: load(state, verify=False),
    }
    check_refused(calls, rank)
    assert state == {"here": 1}
    assert not (tmp_path / "b").exists()


# Without what is frozen


FROZEN = ["base.0.weight", "base.0.bias", "base.1.weight", "base.1.bias"]


def adapted(seed: int, in_groups: bool = False, thaw: str = "") -> Pair:
    """A frozen base with a buffer and a tied name, and an adapter that is trained."""
    torch.manual_seed(seed)
    base = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).requires_grad_(False)
    adapter = {"down": nn.Linear(64, 2, bias=False), "up": nn.Linear(2, 64, bias=False)}
    model = nn.ModuleDict({"base": base, "again": nn.Linear(64, 64, bias=False), **adapter})
    model.again.weight = base[0].weight
    model.base[1].running_mean.fill_(float(seed))
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or name == thaw)
    if not in_groups:
        return wrapped(model, adamw, partition_grad=True)
    return model, LowLevelZeroOptimizer(adamw(model.parameters()), model=model, partition_grad=True)


@pytest.mark.parametrize("in_groups", [False, True], ids=["not the optimizer's", "frozen in the optimizer"])
def test_frozen_parameters_are_left_out_and_the_model_brings_them(
    in_groups: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(rank: int, world_size: int) -> Any:
        model, optimizer = adapted(0, in_groups)
        train(model, optimizer)
        save_checkpoint(tmp_path / "all", model, optimizer)
        save_checkpoint(tmp_path / "small", model, optimizer, exclude_frozen=True)
        return dict(model.state_dict()), optimizer.state_dict()

    def load(rank: int, world_size: int) -> None:
        model, optimizer = adapted(5, in_groups)
        own = {name: value.clone() for name, value in model.state_dict().items()}
        with logged() as lines:
            load_checkpoint(tmp_path / "small", model, optimizer)
        brought = {*FROZEN, "again.weight"}
        mixed = {name: own[name] if name in brought else value for name, value in values.items()}
        check_same([mixed, states], [dict(model.state_dict()), optimizer.state_dict()])
        with logged() as of_all:
            load_checkpoint(tmp_path / "all", model, optimizer)
        check_same(values, dict(model.state_dict()))
        told = (
            f"4 frozen parameters (exclude_frozen=True), which keep the values that the model has: {', '.join(FROZEN)}"
        )
        assert [line.startswith("WARNING: ") and told in line for line in lines] == [True] * (rank == 0)
        assert of_all == []

    values, states = run_ranks(save, 2)[0]
    assert list(read_manifest(tmp_path / "small").excluded) == FROZEN
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).glob("*.distcp")) for name in ("all", "small")]
    assert sizes[0] - sizes[1] >= 4 * (64 * 64 + 3 * 64)
    run_ranks(load, 3)
    if in_groups:
        return
    assert main(["inspect", "--json", str(tmp_path / "small")]) == 0
    assert json.loads(capsys.readouterr().out)["excluded"] == FROZEN
    assert main(["inspect", str(tmp_path / "small")]) == 0
    assert "excluded  4 frozen parameters: base.0.weight, " in capsys.readouterr().out
    assert main(["consolidate", str(tmp_path / "small"), str(tmp_path / "out")]) == 0
    assert f"not in it, since it was saved with exclude_frozen: {', '.join(FROZEN)}" in capsys.readouterr().out
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == values.keys() - {*FROZEN, "again.weight"}
    check_same(states, torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True))


@on_ranks(2)
def test_what_a_small_checkpoint_cannot_give_is_refused_by_name(rank: int, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "small", *adapted(0), exclude_frozen=True)
    without, reshaped, more = adapted(1), adapted(1), adapted(1)
    without[0].base[0].bias = None
    reshaped[0].base[0].bias = nn.Parameter(torch.zeros(3), requires_grad=False)
    more[0].more = nn.Linear(2, 2).requires_grad_(False)
    for pair, told in (
        (adapted(1, thaw="base.0.bias"), "base.0.bias: expected it frozen, since the checkpoint was saved without"),
        (without, "base.0.bias: the checkpoint has it, the model doesn't"),
        (reshaped, "base.0.bias: expected (3,), got (64,) from the checkpoint"),
        (more, "more.bias: the model has it, the checkpoint doesn't"),
    ):
        found = refused(lambda: load_checkpoint(tmp_path / "small", *pair))  # noqa: B023
        assert found.startswith(f"ValueError: {told}"), found


# Buffers: ranks may have different values


WIDTH = 7


class Buffered(nn.Module):
    """Buffers of several dtypes and memory orders, a tied one, and one that isn't saved; and state of its own."""

    def __init__(self, seed: int = 0, order: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inward, self.norm, self.counter = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Keeping(seed)
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=order)
        self.frozen = nn.Conv2d(2, 3, 2).to(memory_format=order).requires_grad_(False)
        self.register_buffer("order", torch.arange(WIDTH))
        self.register_buffer("mask", torch.zeros(WIDTH, dtype=torch.bool))
        self.register_buffer("turned", torch.zeros(3, 5).t())
        self.register_buffer("low", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.again = nn.Module()
        self.again.register_buffer("order", self.order)

    @torch.no_grad()
    def differ(self, rank: int) -> None:
        """Give all buffers values of this rank."""
        torch.manual_seed(rank)
        self.norm(torch.randn(9, WIDTH))
        self.order.copy_(torch.randperm(WIDTH))
        self.mask.copy_(torch.rand(WIDTH) < 0.5)
        for buffer in (self.turned, self.low, self.scratch):
            buffer.copy_(torch.randn(buffer.shape))
        self.count.fill_(rank + 1)


def copied(tensors: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors if isinstance(tensor, Tensor)}


WAYS = ("checkpoint", "checkpoint, async", "torch's, optimizer first", "torch's, async")


@pytest.mark.parametrize(
    ("form", "world_size", "later"), [("flat", 3, {1: "flat", 2: "flat"}), ("hybrid", 4, {2: "flat", 4: "pair"})]
)
def test_a_checkpoint_has_the_first_rank_s_buffers(
    form: str, world_size: int, later: dict[int, str], tmp_path: Path
) -> None:
    """Whichever way it is saved, from every form of ranks to another one; replicas of a slice write none either."""

    def options(rank: int, world_size: int, form: str) -> dict[str, Any]:
        return {} if form == "flat" else Grid.of(rank, (2, world_size // 2)).options(form)

    def save(rank: int, world_size: int) -> dict[str, Any]:
        saved = {}
        for way in WAYS:
            model, optimizer = wrapped(Buffered(), adamw, steps=1, **options(rank, world_size, form))
            model.differ(rank)
            saved[way] = [copied(model.state_dict().items()), optimizer.state_dict()]
            save_by(way, tmp_path / way, model, optimizer)
            if way.startswith("checkpoint"):  # which changes none
                check_same(saved[way][0], copied(model.state_dict().items()))
        return saved

    def load(rank: int, world_size: int, form: str) -> None:
        for way in WAYS:
            model, optimizer = wrapped(Buffered(5), adamw, **options(rank, world_size, form))
            model.differ(rank + 7)
            scratch = model.scratch.clone()
            load_by(way, tmp_path / way, model, optimizer)
            check_same(first[way], [copied(model.state_dict().items()), optimizer.state_dict()], at=way)
            assert torch.equal(scratch, model.scratch)

    first, *others = run_ranks(save, world_size)
    means = [each["checkpoint"][0]["norm.running_mean"] for each in (first, *others)]
    assert not any(torch.equal(means[0], other) for other in means[1:])
    for number, other in later.items():
        run_ranks(load, number, other)
    assert main(["consolidate", str(tmp_path / "checkpoint"), str(tmp_path / "out")]) == 0
    check_same(first["checkpoint"][0], load_file(tmp_path / "out" / "model.safetensors"))
    stored = read_metadata(tmp_path / "checkpoint").storage_data
    once = {at: place for at, place in stored.items() if at.fqn != "model.again.order"}  # tied
    assert len({(place.relative_path, place.offset) for place in once.values()}) == len(once)
    assert {at.relative_path for at in stored.values()} == {f"__{rank}_0.distcp" for rank in range(world_size)}


def test_other_memory_orders_and_expanded_buffers_are_loaded(tmp_path: Path) -> None:
    def start(seed: int, order: torch.memory_format, steps: int) -> Pair:
        model = Buffered(seed, order)
        model.register_buffer("wide", torch.full((1,), float(seed)).expand(4))
        return wrapped(model, adamw, steps, partition_grad=True)

    def save(rank: int, world_size: int) -> Any:
        pair = start(1, torch.channels_last, 2)
        save_checkpoint(tmp_path / "a", *pair)
        return held(*pair)

    def load(rank: int, world_size: int) -> None:
        for order in (torch.channels_last, torch.contiguous_format):
            model, optimizer = start(7, order, 0)
            load_checkpoint(tmp_path / "a", model, optimizer)
            assert model.counter.kept == 1
            assert model.wide.stride() == (0,)
            check_same(expected, held(model, optimizer), at=str(order))

    expected = run_ranks(save, 2)[0]
    run_ranks(load, 3)


@on_ranks(4, ("checkpoint", "torch's"))
def test_buffers_of_experts_are_their_group_s_first_rank_s(rank: int, way: str, tmp_path: Path) -> None:
    def made(count: int) -> Pair:
        expert = nn.ModuleDict({str(rank % 2): nn.BatchNorm1d(WIDTH)})
        model = nn.ModuleDict({"shared": nn.BatchNorm1d(WIDTH), "expert": expert})
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        pair = wrapped(model, pg_to_param_list={groups[rank % 2]: list(model.expert.parameters())})
        for each in (model["shared"], expert[str(rank % 2)]):
            each.running_mean.fill_(count)
            each.num_batches_tracked.fill_(count)
        return pair

    other = made(9)
    save_by(way, tmp_path / way, *made(rank + 1))
    load_by(way, tmp_path / way, *other)
    for name, buffer in other[0].named_buffers():
        if "var" not in name:
            assert buffer.unique().tolist() == [rank % 2 + 1 if name.startswith("expert") else 1], name


@on_ranks(3)
def test_parameters_that_no_optimizer_trains_are_the_first_rank_s(rank: int, tmp_path: Path) -> None:
    """Code of the caller's may change them on each rank by itself, frozen ones too."""

    def made(value: float) -> Pair:
        model = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        model[2].requires_grad_(False)
        optimizer = LowLevelZeroOptimizer(momentum(model[0].parameters()), model=model)
        for each in model[1:]:
            each.weight.detach().fill_(value)
        return model, optimizer

    saved, loaded = made(rank + 1.0), made(9.0)
    save_checkpoint(tmp_path / "a", *saved)
    load_checkpoint(tmp_path / "a", *loaded)
    for pair, value in ((saved, rank + 1.0), (loaded, 1.0)):
        assert [each.weight.unique().tolist() for each in pair[0][1:]] == [[value]] * 2


@on_ranks(3)
def test_tensors_among_extra_states_are_the_first_rank_s_for_torch_s_tools(rank: int, tmp_path: Path) -> None:
    kept = (Keeping(torch.full((3,), float(rank))) for _ in range(4))
    save_checkpoint(tmp_path / "a", *wrapped(nn.Sequential(*kept, nn.Linear(2, 2))))
    states = {f"{at}._extra_state": torch.full((3,), 9.0) for at in range(4)}
    dcp.load({"model": states}, checkpoint_id=tmp_path / "a")
    assert [each.sum().item() for each in states.values()] == [0.0] * 4


def test_a_consolidated_module_that_is_in_two_places_has_its_extra_state_in_both(tmp_path: Path) -> None:
    """As in its model's own state dict, which torch wants to have all names of."""

    def made(value: float) -> nn.Module:
        kept = Keeping(torch.full((3,), value))
        return nn.ModuleDict({"one": kept, "other": kept, "linear": nn.Linear(2, 2)})

    def save(rank: int, world_size: int) -> None:
        save_checkpoint(tmp_path / "a", *wrapped(model := made(1.0)))
        load_checkpoint(tmp_path / "a", *wrapped(again := made(2.0)))
        check_same(model["one"].kept, again["one"].kept)

    run_ranks(save, 1)
    assert main(["consolidate", str(tmp_path / "a"), str(tmp_path / "out")]) == 0
    model = made(2.0)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert model["one"].kept.tolist() == [1.0] * 3


@on_ranks(2, ("checkpoint", "checkpoint, async"))
def test_tensors_among_extra_states_may_lie_in_any_memory_order_or_be_conjugated(
    rank: int, way: str, tmp_path: Path
) -> None:
    """And so may buffers. They are saved as they are read."""
    values = {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "with gaps": torch.arange(12).view(3, 4)[:, ::2],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "nested": [torch.arange(4).view(2, 2).t(), {"empty": {}, "list": []}],
        "conjugated": torch.polar(torch.ones(2), torch.arange(1.0, 3.0)).conj(),
    }
    waves = torch.polar(torch.ones(4), torch.arange(4.0)).conj()
    trough = waves[1:2].imag
    assert waves.is_conj()
    assert trough.is_neg()
    assert trough.is_contiguous()

    def made(kept: Any) -> Pair:
        model = nn.Sequential(nn.Linear(2, 2), Keeping(kept))
        model.register_buffer("waves", torch.zeros(4, dtype=torch.complex64))
        model.register_buffer("trough", torch.zeros(1))
        return wrapped(model)

    saved, loaded = made(values), made({})
    saved[0].waves, saved[0].trough = waves, trough
    save_by(way, tmp_path / way, *saved)
    load_by(way, tmp_path / way, *loaded)
    check_same([values, waves, trough], [loaded[0][1].kept, loaded[0].waves, loaded[0].trough])
