"""Checkpoints: what was saved at one world size continues at any other, exactly; and fp32 masters come back."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, read_manifest, read_metadata, save_checkpoint
from lowlevel_zero.deepspeed import full_fp32_params
from tests.support.checkpoints import AFTER, BEFORE, Training, check_same, logged
from tests.support.on_ranks import on_ranks
from tests.support.oracle import groups
from tests.support.ranks import run_ranks
from tests.support.saving import Make, Pair, adamw, held, linear, load_by, save_by, wrapped
from tests.support.scripts import Together, net, steps

WORLD_SIZES = (1, 2, 3)
WAYS = ("checkpoint", "torch's")
ALL_WAYS = (*WAYS, "state dicts")
TRAININGS = [Training(1, torch.bfloat16), Training(2, torch.float32)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """By world size the folder of its checkpoints, and of each the whole state at the save and two steps later."""

    def save(rank: int, world_size: int, folder: Path) -> list[Any]:
        told = []
        for number, training in enumerate(TRAININGS):
            pair = training.start().train(BEFORE, rank, world_size)
            for way in ALL_WAYS:
                save_by(way, folder / f"{number}, {way}", pair.model, pair.optimizer)
            told.append((pair.whole(), pair.train(AFTER, rank, world_size).whole()))
        return told

    folders = {world_size: tmp_path_factory.mktemp(f"world-{world_size}") for world_size in WORLD_SIZES}
    return {n: (folder, run_ranks(save, n, folder)[0]) for n, folder in folders.items()}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_any_world_size_saved_loads_at_any_other(world_size: int, saved: dict[int, Any]) -> None:
    """Bit for bit; the run goes on bit for bit with the same ranks and options, else to rounding."""

    def load(rank: int, world_size: int) -> None:
        for before, (folder, wholes) in saved.items():
            for (number, training), way in product(enumerate(TRAININGS), ALL_WAYS):
                same = before == world_size
                if not same and (before + world_size + number) % 2:
                    continue  # of others each loads one
                other = Training(3 - training.stage, training.dtype, bucket=20)
                pair = (training if same else other).start(seed=5 + rank)
                load_by(way, folder / f"{number}, {way}", pair.model, pair.optimizer)
                at_save, later = wholes[number]
                at = f"{before} ranks, {training.stage}, {training.dtype}, {way}"
                check_same(at_save, pair.whole(), at=at)
                if same or training.dtype == torch.float32:
                    pair.train(AFTER, rank, world_size)
                    check_same(later, pair.whole(), tolerance=0.0 if same else 5e-6, at=f"{at}, later")

    run_ranks(load, world_size)


def test_files_hold_no_padding_and_no_more_than_was_there(saved: dict[int, Any]) -> None:
    for world_size, (folder, wholes) in saved.items():
        for number, (at_save, _) in enumerate(wholes):
            manifest = read_manifest(folder / f"{number}, checkpoint")
            metadata = read_metadata(folder / f"{number}, checkpoint").state_dict_metadata
            assert manifest.world_size == world_size
            assert set(manifest.tensors) | set(manifest.tied) == set(at_save["model"])
            assert manifest.tied == {"layers.3.weight": "layers.0.weight"}
            for name, entry in manifest.tensors.items():
                value = at_save["model"][name]
                assert (entry.shape, entry.stride) == (value.shape, value.stride())
                assert metadata[f"model.{name}"].size == value.shape
                dropped = name.startswith("layers.2.") or not value.numel()
                has_state = entry.kind == "trainable" and not dropped
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    found = metadata.get(f"optim.state.{name}.{key}")
                    assert (found is not None) == has_state, name
                    assert found is None or found.size == (() if key == "step" else value.shape)


BF16 = Training(dtype=torch.bfloat16)
FP16 = Training(dtype=torch.float16, options={"initial_scale": 2.0**20, "growth_interval": 3})


CASES = [(FP16, 6, way) for way in (*WAYS, "model first")]
CASES += [(BF16, 2, way) for way in ("model first", "optimizer first")]


@on_ranks(3, CASES)
def test_runs_of_16_bits_go_on_bit_for_bit(rank: int, training: Training, steps: int, way: str, tmp_path: Path) -> None:
    """With the loss scale, from checkpoints and from whole dicts, which may come in either order."""
    pair = training.start().train(range(steps), rank, 3)
    if training is FP16:
        assert 1 < pair.optimizer.loss_scale != 2.0**20  # the first ones overflow
    again = training.start(seed=3)
    if way in WAYS:
        save_by(way, tmp_path / way, pair.model, pair.optimizer)
        load_by(way, tmp_path / way, again.model, again.optimizer)
    else:
        torch.save(pair.whole(), tmp_path / f"{rank}.pt")
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        adamw(groups(training.start().model)).load_state_dict(state["optimizer"])  # plain torch takes it
        for part in ("model", "optimizer") if way == "model first" else ("optimizer", "model"):
            getattr(again, part).load_state_dict(state[part])
    if way != "optimizer first":  # masters follow at the next step
        check_same(pair.whole(), again.whole())
    for each in (pair, again):
        each.train(range(steps, steps + 3), rank, 3)
    check_same(pair.whole(), again.whole())


@on_ranks(2, (*WAYS, "state dict"))
def test_masters_of_16_bit_parameters_that_have_no_states_come_along(rank: int, way: str, tmp_path: Path) -> None:
    """Plain SGD keeps nothing else. A checkpoint has those that have been stepped, low bits and all."""

    def made() -> tuple[nn.Module, LowLevelZeroOptimizer]:
        model = net(seed=1).bfloat16()
        return model, LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model=model)

    one, two = made(), made()
    steps(Together(rank), *one, range(3))
    if way in WAYS:
        save_by(way, tmp_path / way, *one)
        load_by(way, tmp_path / way, *two)
    else:
        two[0].load_state_dict(one[0].state_dict())
        two[1].load_state_dict(one[1].state_dict())
    for pair in (one, two):
        steps(Together(rank), *pair, range(3, 6))
    check_same(full_fp32_params(one[0]), full_fp32_params(two[0]))


class Counting(torch.optim.SGD):
    """Has states that aren't slices: numbers, as such and as tensors, and None."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state["times"] = state.get("times", 0) + 1
            state["count"] = state.get("count", torch.ones(())) + 1
            state["nothing"] = None
        return super().step(closure)


MAKES: dict[str, tuple[Make, dict[str, Any]]] = {
    "SGD": (lambda ps: torch.optim.SGD(ps, lr=0.1), {}),
    "Adagrad": (lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.5), {}),
    "counting": (lambda ps: Counting(ps, lr=0.1, momentum=0.5), {}),
    "counting, split": (lambda ps: Counting(ps, lr=0.1, momentum=0.5), {"split": "elements"}),
}


@on_ranks(2, product((*WAYS, "state dict"), MAKES))
def test_states_of_other_optimizers_travel(rank: int, way: str, name: str, tmp_path: Path) -> None:
    """States that aren't tensors, that exist at construction, none at all; and changed settings.

    Numbers of a 0-d parameter are on ranks without it, too.
    """

    def started(steps: int) -> Pair:
        make, options = MAKES[name]
        model = nn.Linear(3, 2)
        model.scale = nn.Parameter(torch.tensor(1.5))
        return wrapped(model, make, steps, **options)

    def numbers(pair: Pair) -> list[Any]:
        return [[float(state[key]) for key in ("times", "count") if key in state] for state in pair[1].state.values()]

    saved, loaded = started(2), started(0)
    saved[1].param_groups[0]["lr"] = 0.25
    save_by(way, tmp_path / f"{way}, {name}", *saved)
    load_by(way, tmp_path / f"{way}, {name}", *loaded)
    check_same([held(*saved)[1], numbers(saved)], [held(*loaded)[1], numbers(loaded)])


@on_ranks(2, WAYS)
def test_saving_changes_nothing_and_edits_of_weights_are_saved(rank: int, way: str, tmp_path: Path) -> None:
    """What a user wrote into 16-bit weights reaches the masters at the next step, saved in between or not."""
    pairs = [BF16.start(seed).train(BEFORE, rank, 2) for seed in (0, 0, 3)]
    for pair in pairs[:2]:
        with torch.no_grad():
            pair.model.outward.weight.clamp_(-0.1, 0.1)
    save_by(way, tmp_path / way, pairs[0].model, pairs[0].optimizer)
    load_by(way, tmp_path / way, pairs[2].model, pairs[2].optimizer)
    one, two, three = (pair.train(AFTER, rank, 2).whole() for pair in pairs)
    check_same([two, two], [one, three])


@on_ranks(2, WAYS)
def test_other_weights_are_saved_for_a_moment_and_masters_keep_their_low_bits(
    rank: int, way: str, tmp_path: Path
) -> None:
    """Averaged weights are put in the parameters' place, saved, and taken out again."""
    one, two = (BF16.start().train(BEFORE, rank, 2) for _ in range(2))
    own = [p.detach().clone() for p in one.model.parameters()]
    with torch.no_grad():
        torch._foreach_mul_(list(one.model.parameters()), 0.5)
        save_by(way, tmp_path / way, one.model, one.optimizer)
        torch._foreach_copy_(list(one.model.parameters()), own)
    check_same(one.train(AFTER, rank, 2).whole(), two.train(AFTER, rank, 2).whole())


@on_ranks(3)
def test_a_group_of_some_ranks_saves_and_loads(rank: int, tmp_path: Path) -> None:
    """Not all ranks, and without the first."""
    group = dist.new_group([1, 2])
    if rank > 0:
        saved, loaded = linear(0, adamw, 1, dp_process_group=group), linear(1, adamw, dp_process_group=group)
        save_checkpoint(tmp_path / "a", *saved)
        load_checkpoint(tmp_path / "a", *loaded)
        check_same(held(*saved), held(*loaded))


# fp32 masters


# Where a run has fp32: as the parameters, as masters on the device or on the host, or nowhere.
RUNS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp32, on the host": (torch.float32, {"cpu_offload": True}),
    "bf16": (torch.bfloat16, {}),
    "bf16, on the host": (torch.bfloat16, {"cpu_offload": True}),
    "fp16": (torch.float16, {"initial_scale": 1.0}),
    "bf16 alone": (torch.bfloat16, {"master_weights": False}),
}
PRECISE = [name for name in RUNS if name != "bf16 alone"]


def start(name: str, seed: int) -> Pair:
    """Three layers that are trained, and a frozen one."""
    torch.manual_seed(seed)
    dtype, options = RUNS[name]
    layers, frozen = nn.ModuleList(nn.Linear(7, 7) for _ in range(3)), nn.Linear(2, 2).requires_grad_(False)
    return wrapped(nn.ModuleDict({"layers": layers, "frozen": frozen}).to(dtype), adamw, partition_grad=True, **options)


def trained(name: str) -> Pair:
    """After two steps, of which the first has no gradient of the last layer."""
    model, optimizer = start(name, 0)
    for layers in (2, 3):
        optimizer.backward(torch.stack([p.float().square().sum() for p in model.layers[:layers].parameters()]).sum())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def masters(pair: Pair) -> list[Tensor]:
    """Whole: each parameter's master, or the parameter itself where it has none. Every rank calls it."""
    states = pair[1].state_dict()["state"]
    parameters = enumerate(pair[0].layers.parameters())
    return [states.get(at, {}).get("master_param", p.detach()).float().clone() for at, p in parameters]


def test_load_checkpoint_brings_them_from_each_run_to_each_other(tmp_path: Path) -> None:
    """Of another number of ranks."""

    def save(rank: int, world_size: int) -> dict[str, tuple[list[Tensor], Tensor]]:
        expected = {}
        for name in PRECISE:
            pair = trained(name)
            save_checkpoint(tmp_path / name, *pair)
            expected[name] = masters(pair), pair[0].frozen.weight.detach()
        return expected

    def load(rank: int, world_size: int) -> None:
        for (name, (expected, frozen)), other in product(saved.items(), RUNS):
            model, optimizer = start(other, 5)
            load_checkpoint(tmp_path / name, model, optimizer)
            optimizer.verify()
            if other not in PRECISE:
                dtype = RUNS[name][0]  # which this run loads, and rounds once more
                expected = [each.to(dtype).bfloat16().float() for each in expected]
            got, still = masters((model, optimizer)), model.frozen.weight.detach()
            rounded = [each.to(still.dtype) for each in got]
            parameters = [p.detach() for p in model.layers.parameters()]
            check_same([expected, rounded], [got, parameters], at=f"{name} into {other}")
            check_same(frozen.to(still.dtype), still, at=f"{name} into {other}, frozen")

    saved = run_ranks(save, 3)[0]
    run_ranks(load, 2)


@on_ranks(2)
def test_they_survive_a_run_that_saves_them_untouched(rank: int, tmp_path: Path) -> None:
    """From fp32 to masters of a run that takes no step, and back."""
    first = pair = trained("fp32")
    for at, name in enumerate(("bf16", "fp16", "bf16, on the host", "fp32")):
        save_checkpoint(tmp_path / str(at), *pair)
        pair = start(name, 5)
        load_checkpoint(tmp_path / str(at), *pair)
    check_same(dict(first[0].layers.state_dict()), dict(pair[0].layers.state_dict()))


@on_ranks(3, product(("bf16", "fp16"), PRECISE[:2]))
def test_plain_state_dicts_bring_them_after_the_model(rank: int, name: str, other: str) -> None:
    """Where the model's weights are what 16 bits have kept of them, and nowhere else."""
    pair, (model, optimizer) = trained(name), start(other, 5)
    model.load_state_dict(pair[0].state_dict())
    edited = model.layers[0].bias
    with torch.no_grad():
        edited[2] += 1.0
    expected = [each["master_param"].clone() for each in pair[1].state_dict()["state"].values()]
    at = next(at for at, p in enumerate(model.parameters()) if p is edited)
    expected[at][2] = edited[2].item()
    optimizer.load_state_dict(pair[1].state_dict())
    optimizer.verify()
    check_same(expected, [p.detach() for p in model.layers.parameters()])
    optimizer.step()


@on_ranks(2, ("torch's", "torch's, optimizer first"))
def test_sharded_brings_them_where_the_dtype_is_the_same_and_tells_which_it_has_not_read(
    rank: int, way: str, tmp_path: Path
) -> None:
    """An fp32 run doesn't ask for masters, which no checkpoint of its own would have."""
    pair, again, of_fp32 = trained("bf16"), start("bf16", 5), start("fp32", 5)
    save_by(way, tmp_path / way, *pair)
    load_by(way, tmp_path / way, *again)
    Sharded(again[1]).state_dict()  # looks at masters
    check_same(masters(pair), masters(again))
    with logged() as lines:
        load_by(way, tmp_path / way, *of_fp32)
    assert [line.startswith("WARNING: layers.0.weight: ") and "fp32 master" in line for line in lines] == [True] * (
        rank == 0
    )
