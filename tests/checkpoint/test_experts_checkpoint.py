"""Checkpoints of experts that ranks share out: as if the run had not stopped, at the layouts that names allow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.__main__ import main
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, read_metadata, save_checkpoint
from lowlevel_zero.checkpoint.manifest import read_manifest
from tests.support.checkpoints import check_same
from tests.support.experts import Mixture, Run, Trained, loss_of, prepare, train_step, whole_name
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks
from tests.support.saving import Keeping, Pair, adamw, held, load_by, momentum, refused, save_by, wrapped
from tests.support.several import of_all

BEFORE, AFTER = range(2), range(2, 4)


def drops(step: int, rank: int) -> set[int]:
    return {0} if step == 0 else set()


SHARED = 0  # in the place of how many ranks share the experts out: all have all of them, as any other parameters


def a_run(world_size: int, size: int, **more: Any) -> Run:
    options: dict[str, Any] = {"partition_grad": True, "reduce_bucket_size": 60}
    if size == SHARED:
        options["pg_to_param_list"] = None
    return Run(world_size, size or 1, drop=drops, clip=0.1, optimizer=adamw, options=options, **more)


def train(trained: Trained, run: Run, steps: range, rank: int) -> Trained:
    for step in steps:
        train_step(trained, run, step, rank)
        trained.optimizer.step()
        trained.optimizer.zero_grad()
    return trained


def emptied(rank: int, run: Run) -> Trained:
    """A fresh pair, which has nothing of what the saved run started with either."""
    trained = prepare(rank, run)
    with torch.no_grad():
        for tensor in (*trained.model.parameters(), *trained.model.buffers()):
            tensor.zero_()
    return trained


def whole(trained: Trained, run: Run) -> dict[str, Tensor]:
    tensors = trained.model.state_dict().items()
    return {name if run.numbered else whole_name(name, trained.layout): t.clone() for name, t in tensors}


Layout = tuple[int, int]
Kept = Callable[..., Path]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Checkpoints to be read: of so many ranks, so many of which share the experts out, whose names are numbers or not.

    Each is saved when somebody first asks for it; by torch, too, where the experts have names of their own.
    """
    folder = tmp_path_factory.mktemp("kept")

    def save(rank: int, world_size: int, path: Path, run: Run) -> None:
        trained = train(prepare(rank, run), run, BEFORE, rank)
        for way in ("checkpoint", "torch's") if run.numbered else ("checkpoint",):
            save_by(way, path / way, trained.model, trained.optimizer)

    def of(world_size: int, size: int, numbered: bool, way: str = "checkpoint") -> Path:
        path = folder / f"{world_size}-{size}-{numbered}"
        if not path.exists():
            run_ranks(save, world_size, path, a_run(world_size, size, numbered=numbered))
        return path / way

    return of


def step_alone(model: Mixture, optimizer: torch.optim.Optimizer, run: Run, step: int) -> None:
    """A step of all ranks' shares in one process."""
    shares = [loss_of(model, run, step, 0, rank) for rank in range(run.world_size)]
    (torch.stack(shares).sum() / run.world_size).backward()
    nn.utils.clip_grad_norm_(model.parameters(), run.clip)
    optimizer.step()
    optimizer.zero_grad()


def alone(first: Run, then: Run) -> dict[str, Tensor]:
    """The oracle: one process with all experts, whose batches have the shares of one run and then of the other."""
    model = Mixture()
    optimizer = first.optimizer([p for p in model.parameters() if p.requires_grad])
    for run, steps in ((first, BEFORE), (then, AFTER)):
        for step in steps:
            step_alone(model, optimizer, run, step)
    return model.state_dict()


def check_close(expected: dict[str, Tensor], ranks: list[dict[str, Tensor]]) -> None:
    assert {name for tensors in ranks for name in tensors} == expected.keys()
    for tensors in ranks:
        for name, tensor in tensors.items():
            assert (tensor - expected[name]).abs().max() <= 2e-6, name


@pytest.mark.filterwarnings("ignore:Detected mismatched keys")  # torch 2.5 says it, and reads them all
@pytest.mark.parametrize(
    ("before", "after", "way"),
    [
        ((4, 2), (2, 2), "places, checkpoint"),
        ((4, 2), (4, 2), "places, checkpoint"),
        ((4, 4), (4, 2), "checkpoint"),
        ((4, 2), (1, 1), "checkpoint"),
        ((4, 2), (2, 2), "torch's"),
        ((2, SHARED), (4, 2), "checkpoint"),
        ((2, 2), (4, SHARED), "checkpoint"),
    ],
)
def test_other_layouts_go_on_as_in_one_process(before: Layout, after: Layout, way: str, kept: Kept) -> None:
    """Layouts are numbers of ranks, and how many of them share the experts out."""
    numbered, way = "places" not in way, way.removeprefix("places, ")
    first, then = (a_run(*layout, numbered=numbered) for layout in (before, after))
    path = kept(*before, numbered, way)

    def rank(rank: int, world_size: int) -> dict[str, Tensor]:
        trained = emptied(rank, then)
        load_by(way, path, trained.model, trained.optimizer)
        return whole(train(trained, then, AFTER, rank), then)

    check_close(alone(first, then), run_ranks(rank, then.world_size))


@on_ranks(4)
def test_sharded_states_are_slices_over_each_group_s_own_ranks(rank: int) -> None:
    run = a_run(4, 2, numbered=True)
    states = Sharded(train(prepare(rank, run), run, BEFORE, rank).optimizer).state_dict()["state"]
    averages = [states.get(name, {}).get("exp_avg") for name in ("experts.0.up.bias", "inward.bias")]
    sizes = [None if each is None else (each.numel(), each.to_local().numel()) for each in averages]
    assert sizes == [((7, 4), None, (7, 3), None)[rank], ((5, 2), (5, 2), (5, 1), (5, 0))[rank]]


# ---- what is written ----


def test_each_expert_is_written_once_and_the_manifest_tells_whose_it_is(kept: Kept) -> None:
    places, numbers = (read_manifest(kept(4, 2, numbered)) for numbered in (False, True))
    assert {name: expert for name, expert in places.experts.items() if expert.name == "experts.0.up.bias"} == {
        "experts.0.up.bias@0": ("experts.0.up.bias", (0, 2)),
        "experts.0.up.bias@1": ("experts.0.up.bias", (1, 3)),
    }
    assert numbers.experts["experts.3.frozen.weight"] == ("experts.3.frozen.weight", (1, 3))
    assert numbers.tensors.keys() == Mixture(numbered=True).state_dict().keys()
    metadata = read_metadata(kept(4, 2, True)).state_dict_metadata
    with_state = {full.split("state.")[1].rpartition(".")[0] for full in metadata if full.startswith("optim.state.")}
    assert with_state == {name for name, tensor in numbers.tensors.items() if tensor.kind == "trainable"}
    elements = sum(tensor.numel() for tensor in Mixture().state_dict().values())
    for manifest in (places, numbers):
        assert sum(tensor.numel for tensor in manifest.tensors.values()) == elements


def test_consolidated_they_are_one_model(kept: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(4, 2, numbered=True)
    assert main(["consolidate", str(kept(4, 2, True)), str(tmp_path / "out")]) == 0
    model = Mixture(numbered=True)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    optimizer = run.optimizer([p for p in model.parameters() if p.requires_grad])
    optimizer.load_state_dict(torch.load(tmp_path / "out" / "optimizer.pt"))
    for step in AFTER:
        step_alone(model, optimizer, run, step)
    check_close(alone(run, run), [model.state_dict()])
    assert main(["consolidate", str(kept(4, 2, False)), str(tmp_path / "other")]) != 0
    assert "several groups of ranks have a experts.0.up.weight of their own" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("numbered", [False, True], ids=["places", "numbers"])
def test_inspected_they_have_their_ranks(numbered: bool, kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(kept(4, 2, numbered))
    assert main(["inspect", path]) == 0
    text = capsys.readouterr().out
    assert "experts  12 tensors of ranks 0,2" in text
    assert "experts  12 tensors of ranks 1,3" in text
    assert main(["inspect", path, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    shared = {line["name"]: line["process_group"] for line in told["layout"]["parameters"]}
    assert shared["inward.weight"] == [0, 1, 2, 3]
    assert shared["experts.2.up.weight" if numbered else "experts.0.up.weight@1"] == [1, 3]
    assert [line["ranks"] for line in told["model"] if line["name"].endswith("inward.bias")] == [None]
    held = sum(sum(line["bytes"].values()) for line in told["layout"]["parameters"] if 0 in line["process_group"])
    assert sum(told["layout"]["bytes"].values()) == held
    assert main(["inspect", path, "--world-size", "2"]) != 0
    assert "world size: expected 4" in capsys.readouterr().err


class Counting(Keeping):
    """A module with a state of its own and another in it, one weight under two names, and a buffer."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.tally = Keeping(count)
        self.weight, self.bias = nn.Linear(3, 3).parameters()
        self.twin = self.weight
        self.register_buffer("seen", torch.tensor([float(count)] * 3))


def counting(rank: int, count: int, told: bool) -> tuple[nn.ModuleDict, LowLevelZeroOptimizer]:
    model = nn.ModuleDict({"shared": Counting(count), "expert": Counting(count)})
    alone = [dist.new_group([each]) for each in range(2)][rank]
    experts = {alone: list(model["expert"].parameters())}
    return model, LowLevelZeroOptimizer(momentum(model.parameters()), experts, model=model if told else None)


@on_ranks(2, (False, True))
def test_what_modules_keep_themselves_buffers_and_tied_weights_are_each_ranks_own(
    rank: int, told: bool, tmp_path: Path
) -> None:
    """Whether the optimizer has been told the model or not."""
    saved, loaded = counting(rank, 5 + rank, told), counting(rank, 0, told)
    save_checkpoint(tmp_path / str(told), *saved)
    load_checkpoint(tmp_path / str(told), *loaded)
    shared, expert = loaded[0]["shared"], loaded[0]["expert"]
    assert torch.equal(expert.weight, saved[0]["expert"].weight)
    assert [shared.kept, shared.tally.kept, expert.kept, expert.tally.kept] == [5, 5, 5 + rank, 5 + rank]
    assert expert.seen.tolist() == [5.0 + rank] * 3


@on_ranks(4, ("state_dict", "Sharded", "replaced"))
def test_all_ranks_refuse_what_those_of_one_expert_refuse(rank: int, call: str) -> None:
    """Ranks that share another expert have seen nothing, and would go on without the others."""
    model = nn.ModuleDict({"shared": nn.Linear(3, 2), "expert": nn.Linear(3, 2)})
    model["expert"].register_buffer("more", torch.zeros(2))
    near = [dist.new_group([at, at + 1]) for at in (0, 2)][rank // 2]
    _, optimizer = wrapped(model, pg_to_param_list={near: list(model["expert"].parameters())})
    if rank == 1 and call == "replaced":
        model["expert"] = nn.Linear(3, 2)
    elif rank == 1:
        model["expert"].more.data = torch.zeros(3)
        weight = optimizer.optim.param_groups[0]["params"][2]
        optimizer.optim.state[weight]["more"] = torch.zeros_like(weight)
    told = of_all(refused(optimizer.state_dict if call == "state_dict" else Sharded(optimizer).state_dict))
    if call == "replaced":
        assert told[1].startswith("ValueError: expert.weight: expected the parameter that the optimizer trains")
        assert all(told[1].removeprefix("ValueError: ") in each for each in told)
    else:
        assert told[0] == told[1]
        assert "more" in told[0]
        assert all("rank 0 could not give " in each for each in told[2:])


@on_ranks(4)
def test_several_kinds_of_groups(rank: int, tmp_path: Path) -> None:
    """One expert is shared by ranks two apart, the other by neighbours; both have one name on all ranks."""

    def start(seed: int, steps: int) -> Pair:
        torch.manual_seed(seed)
        model = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("shared", "apart", "near")})
        apart = [dist.new_group([at, at + 2]) for at in range(2)][rank % 2]
        near = [dist.new_group([at, at + 1]) for at in (0, 2)][rank // 2]
        experts = {near: list(model["near"].parameters()), apart: list(model["apart"].parameters())}
        return wrapped(model, adamw, steps, pg_to_param_list=experts)

    saved, loaded = start(rank, 1), start(rank + 4, 0)
    save_checkpoint(tmp_path / "it", *saved)
    load_checkpoint(tmp_path / "it", *loaded)
    check_same(held(*saved), held(*loaded))
    experts = read_manifest(tmp_path / "it").experts
    ranks = {"apart.bias@0": (0, 2), "apart.bias@1": (1, 3), "near.bias@0": (0, 1), "near.bias@1": (2, 3)}
    assert {name: experts[name].ranks for name in experts if name.startswith(("apart.bias", "near.bias"))} == ranks


# ---- what is refused ----


@pytest.mark.parametrize(("before", "after"), [((4, 4), (4, 2)), ((2, 1), (2, 2))])
def test_experts_of_the_same_name_want_as_many_groups(before: Layout, after: Layout, kept: Kept) -> None:
    path = kept(*before, False)

    def load(rank: int, world_size: int) -> None:
        trained = prepare(rank, a_run(*after))
        held = whole(trained, a_run(*after))
        told = refused(lambda: load_checkpoint(path, trained.model, trained.optimizer))
        assert told.startswith("ValueError: experts.0.calls")
        assert "share experts out among as many groups" in told
        check_same(held, whole(trained, a_run(*after)))

    run_ranks(load, after[0])


def test_what_one_rank_has_otherwise_is_refused_on_all(kept: Kept, tmp_path: Path) -> None:
    """A parameter that others' experts lack, a buffer that twins lack, and a name that experts are told apart by."""
    path = kept(2, 2, False)

    def load(rank: int, world_size: int) -> None:
        model, optimizer, *_ = prepare(rank, a_run(2, 2))
        if rank == 1:
            model.experts[1].more = nn.Linear(2, 2).requires_grad_(False)
        taken, its_optimizer = counting(rank, 0, told=True)
        taken["expert"].register_buffer("weight@1", torch.zeros(1))
        assert "experts.1.more.bias" in refused(lambda: load_checkpoint(path, model, optimizer))
        told = refused(lambda: save_checkpoint(tmp_path / "it", taken, its_optimizer))
        assert told.startswith("ValueError: expert.weight@1: expected another name, since expert.weight of 2 groups'")

    def save(rank: int, world_size: int) -> None:
        model, optimizer, *_ = prepare(rank, a_run(4, 2))
        if rank == 3:
            model.experts[0].register_buffer("calls", torch.zeros(2))
        assert "experts.0.calls" in refused(lambda: save_checkpoint(tmp_path / "it", model, optimizer))

    run_ranks(load, 2)
    run_ranks(save, 4)
    assert not (tmp_path / "it").exists()
