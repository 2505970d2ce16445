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
from tests.support.checkpoints import differences
from tests.support.experts import Mixture, Run, Trained, loss_of, prepare, train_step, whole_name
from tests.support.ranks import run_ranks
from tests.support.saving import Keeping, Pair, adamw, held, load_by, momentum, refused, save_by, wrapped

BEFORE, AFTER = range(2), range(2, 4)


def drops(step: int, rank: int) -> set[int]:
    return {0} if step == 0 else set()


def a_run(world_size: int, size: int, **more: Any) -> Run:
    options = {"partition_grad": True, "reduce_bucket_size": 60}
    return Run(world_size, size, drop=drops, clip=0.1, optimizer=adamw, options=options, **more)


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


@pytest.mark.parametrize(
    ("in_background", "of_run"),
    [(False, {}), (True, {"numbered": True, "dtype": torch.bfloat16})],
    ids=["places, at once", "numbers in bf16, async"],
)
def test_the_same_layout_goes_on_bit_for_bit(in_background: bool, of_run: dict[str, Any], tmp_path: Path) -> None:
    run = a_run(4, 2, **of_run)

    def rank(rank: int, world_size: int) -> list[str]:
        path = tmp_path / "it"
        first = train(prepare(rank, run), run, BEFORE, rank)
        saving = save_checkpoint(path, first.model, first.optimizer, extra={"at": 2}, async_save=in_background)
        train(first, run, AFTER, rank)
        assert saving.wait() == path
        second = emptied(rank, run)
        assert load_checkpoint(path, second.model, second.optimizer) == {"at": 2}
        train(second, run, AFTER, rank)
        plans = [[group.reducer.plan.whole for group in each.optimizer.sharded_groups] for each in (first, second)]
        assert plans[0] == plans[1]
        states = [each.optimizer.state_dict() for each in (first, second)]
        return [*differences(*states), *differences(whole(first, run), whole(second, run))]

    assert run_ranks(rank, 4) == [[]] * 4


@pytest.mark.filterwarnings("ignore:Detected mismatched keys")  # torch 2.5 says it, and reads them all
@pytest.mark.parametrize(
    ("before", "after", "way"),
    [
        ((4, 2), (2, 2), "places, checkpoint"),
        ((4, 4), (4, 2), "checkpoint"),
        ((4, 2), (1, 1), "checkpoint"),
        ((4, 2), (2, 2), "torch's"),
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


@pytest.mark.parametrize("dense_first", [False, True])
def test_a_run_without_experts_has_them_all(dense_first: bool, tmp_path: Path) -> None:
    """What all ranks share in one of the two runs, groups share in the other."""
    first, then = a_run(2, 2, numbered=True), a_run(4, 2, numbered=True)
    runs = (first, then)
    dense = Run(**{**vars(runs[not dense_first]), "size": 1})

    def shared_by_all(rank: int, world_size: int) -> Trained:
        return emptied(rank, Run(**{**vars(dense), "options": {**dense.options, "pg_to_param_list": None}}))

    def start(rank: int, world_size: int) -> None:
        trained = shared_by_all(rank, world_size) if dense_first else prepare(rank, first)
        if dense_first:
            trained.model.load_state_dict(Mixture(numbered=True).state_dict())
            trained.optimizer.update_master_params(trained.model)
        train(trained, first, BEFORE, rank)
        save_checkpoint(tmp_path / "it", trained.model, trained.optimizer)

    def go_on(rank: int, world_size: int) -> dict[str, Tensor]:
        trained = emptied(rank, then) if dense_first else shared_by_all(rank, world_size)
        load_checkpoint(tmp_path / "it", trained.model, trained.optimizer)
        return whole(train(trained, then, AFTER, rank), then)

    run_ranks(start, first.world_size)
    check_close(alone(first, then), run_ranks(go_on, then.world_size))


def test_sharded_states_are_slices_over_each_group_s_own_ranks() -> None:
    def look(rank: int, world_size: int) -> list[tuple[int, int] | None]:
        run = a_run(4, 2, numbered=True)
        states = Sharded(train(prepare(rank, run), run, BEFORE, rank).optimizer).state_dict()["state"]
        averages = [states.get(name, {}).get("exp_avg") for name in ("experts.0.up.bias", "inward.bias")]
        return [None if each is None else (each.numel(), each.to_local().numel()) for each in averages]

    experts, shared = zip(*run_ranks(look, 4), strict=True)
    assert experts == ((7, 4), None, (7, 3), None)
    assert shared == ((5, 2), (5, 2), (5, 1), (5, 0))


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


def test_what_modules_keep_themselves_buffers_and_tied_weights_are_each_ranks_own(tmp_path: Path) -> None:
    """Whether the optimizer has been told the model or not."""

    def rank(rank: int, world_size: int, told: bool) -> list[Any]:
        path = tmp_path / str(told)
        model, optimizer = counting(rank, 5 + rank, told)
        save_checkpoint(path, model, optimizer)
        again, other = counting(rank, 0, told)
        load_checkpoint(path, again, other)
        assert torch.equal(again["expert"].weight, model["expert"].weight)
        shared, expert = again["shared"], again["expert"]
        return [shared.kept, shared.tally.kept, expert.kept, expert.tally.kept, expert.seen.tolist()]

    for told in (False, True):
        assert run_ranks(rank, 2, told) == [[5, 5, 5, 5, [5.0] * 3], [5, 5, 6, 6, [6.0] * 3]], told


def test_all_ranks_refuse_what_those_of_one_expert_refuse() -> None:
    """Ranks that share another expert have seen nothing, and would go on without the others."""

    def rank(rank: int, world_size: int, call: str) -> str:
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
        return refused(optimizer.state_dict if call == "state_dict" else Sharded(optimizer).state_dict)

    for call in ("state_dict", "Sharded"):
        ours, told, *others = run_ranks(rank, 4, call)
        assert ours == told
        assert "more" in ours
        assert all("rank 0 could not give " in each for each in others), others
    told, ours, *others = run_ranks(rank, 4, "replaced")
    assert ours.startswith("ValueError: expert.weight: expected the parameter that the optimizer trains")
    assert all(ours.removeprefix("ValueError: ") in each for each in (told, *others))


def test_several_kinds_of_groups(tmp_path: Path) -> None:
    """One expert is shared by ranks two apart, the other by neighbours; both have one name on all ranks."""

    def start(rank: int, seed: int, steps: int) -> Pair:
        torch.manual_seed(seed)
        model = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("shared", "apart", "near")})
        apart = [dist.new_group([at, at + 2]) for at in range(2)][rank % 2]
        near = [dist.new_group([at, at + 1]) for at in (0, 2)][rank // 2]
        experts = {near: list(model["near"].parameters()), apart: list(model["apart"].parameters())}
        return wrapped(model, adamw, steps, pg_to_param_list=experts)

    def rank(rank: int, world_size: int) -> list[str]:
        saved, loaded = start(rank, rank, 1), start(rank, rank + 4, 0)
        save_checkpoint(tmp_path / "it", *saved)
        load_checkpoint(tmp_path / "it", *loaded)
        return differences(held(*saved), held(*loaded))

    assert run_ranks(rank, 4) == [[]] * 4
    experts = read_manifest(tmp_path / "it").experts
    assert {name: experts[name].ranks for name in experts if name.startswith(("apart.bias", "near.bias"))} == {
        "apart.bias@0": (0, 2),
        "apart.bias@1": (1, 3),
        "near.bias@0": (0, 1),
        "near.bias@1": (2, 3),
    }


# ---- what is refused ----


@pytest.mark.parametrize(("before", "after"), [((4, 4), (4, 2)), ((2, 1), (2, 2)), ((2, 2), (2, 1))])
def test_experts_of_the_same_name_want_as_many_groups(before: Layout, after: Layout, kept: Kept) -> None:
    path = kept(*before, False)

    def load(rank: int, world_size: int) -> str:
        trained = prepare(rank, a_run(*after))
        before = whole(trained, a_run(*after))
        told = refused(lambda: load_checkpoint(path, trained.model, trained.optimizer))
        assert differences(before, whole(trained, a_run(*after))) == []
        return told

    told = run_ranks(load, after[0])
    assert set(told) == {told[0]}
    assert told[0].startswith("ValueError: experts.0.calls")
    assert "share experts out among as many groups" in told[0]


def test_what_one_rank_has_otherwise_is_refused_on_all(kept: Kept, tmp_path: Path) -> None:
    """A parameter that others' experts lack, a buffer that twins lack, and a name that experts are told apart by."""
    path = kept(2, 2, False)

    def load(rank: int, world_size: int) -> list[str]:
        model, optimizer, *_ = prepare(rank, a_run(2, 2))
        if rank == 1:
            model.experts[1].more = nn.Linear(2, 2).requires_grad_(False)
        taken, its_optimizer = counting(rank, 0, told=True)
        taken["expert"].register_buffer("weight@1", torch.zeros(1))
        return [
            refused(lambda: load_checkpoint(path, model, optimizer)),
            refused(lambda: save_checkpoint(tmp_path / "it", taken, its_optimizer)),
        ]

    def save(rank: int, world_size: int) -> str:
        model, optimizer, *_ = prepare(rank, a_run(4, 2))
        if rank == 3:
            model.experts[0].register_buffer("calls", torch.zeros(2))
        return refused(lambda: save_checkpoint(tmp_path / "it", model, optimizer))

    for other, taken in run_ranks(load, 2):
        assert other.startswith(("ValueError: ", "RuntimeError: "))
        assert "experts.1.more.bias" in other
        assert taken.startswith("ValueError: expert.weight@1: expected another name, since expert.weight of 2 groups'")
    assert all("experts.0.calls" in told for told in run_ranks(save, 4))
    assert not (tmp_path / "it").exists()
