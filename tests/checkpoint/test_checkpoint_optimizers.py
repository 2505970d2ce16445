"""Several optimizers that train one model, saved and loaded together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.__main__ import main
from lowlevel_zero.checkpoint import load_checkpoint, read_manifest, save_checkpoint
from lowlevel_zero.layout import layout_of
from tests.support.checkpoints import check_same, logged
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks
from tests.support.saving import Calls, Make, adamw, check_refused, held, linear, momentum, train
from tests.support.several import told

SHARES = 6  # of each batch: every world size here divides it


class Trio:
    """A model, two optimizers of different kinds, stages and buckets, and their schedulers.

    The model is an embedding, hidden matrices, a frozen layer, and a head.
    """

    def __init__(self, seed: int, of_rest: Make = torch.optim.AdamW) -> None:
        torch.manual_seed(seed)
        layers = (nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 8))
        self.model = nn.Sequential(nn.Embedding(8, 6), *layers).bfloat16()
        hidden = [self.model[1].weight, self.model[2].weight]
        rest = [p for p in self.model.parameters() if all(p is not h for h in hidden)]
        muon = getattr(torch.optim, "Muon", torch.optim.SGD)(hidden, lr=0.02)  # torch 2.9 and later
        adamw = of_rest([{"params": rest[:3]}, {"params": rest[3:], "lr": 0.01}])
        self.muon = LowLevelZeroOptimizer(muon, model=self.model, partition_grad=True, reduce_bucket_size=40)
        self.adamw = LowLevelZeroOptimizer(adamw, model=self.model)
        self.decay = torch.optim.lr_scheduler.StepLR(self.adamw, 2)
        self.as_dict = {"muon": self.muon, "adamw": self.adamw}
        self.as_list = [self.muon, self.adamw]

    def train(self, steps: range, rank: int, world_size: int) -> Trio:
        for step in steps:
            losses = []
            for share in range(rank, SHARES, world_size):
                tokens = torch.arange(4) * (share + 1) % 8
                losses.append(self.model(tokens).float().square().mean() * (1 + step))
            self.muon.backward(torch.stack(losses).mean())
            for optimizer in self.as_list:
                optimizer.step()
                optimizer.zero_grad()
            self.decay.step()
        return self

    def whole(self) -> Any:
        return held(self.model, *self.as_list), self.decay.state_dict()


Saved = tuple[Path, Any, Any, list[list[str]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder with checkpoints of a dict and of a list, what was in them, what came of it, and names by optimizer."""
    folder = tmp_path_factory.mktemp("saved")

    def save(rank: int, world_size: int) -> Saved:
        trio = Trio(0).train(range(3), rank, world_size)
        names = [[p.name for p in layout_of(optimizer).parameters] for optimizer in trio.as_list]
        save_checkpoint(folder / "dict", trio.model, trio.as_dict, scheduler={"adamw": trio.decay}, extra=3)
        saving = save_checkpoint(
            folder / "list", trio.model, tuple(trio.as_list), scheduler=[None, trio.decay], async_save=True
        )
        at_save = trio.whole()
        later = trio.train(range(3, 5), rank, world_size).whole()
        saving.wait()
        return folder, at_save, later, names

    return run_ranks(save, 3)[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_optimizers_go_on_from_one_checkpoint_at_any_number_of_ranks(world_size: int, saved: Saved) -> None:
    """Bit for bit with the same ranks, whether they come in a dict or in a list, saved at once or by a thread."""
    folder, at_save, later, _ = saved

    def load(rank: int, world_size: int) -> None:
        for path in ("dict", "list"):
            again = Trio(1 + rank)
            optimizers: Any = again.as_list if path == "list" else again.as_dict
            if path == "dict" and rank:
                optimizers = dict(reversed(optimizers.items()))
            schedulers = (None, again.decay) if path == "list" else {"muon": None, "adamw": again.decay}
            extra = load_checkpoint(folder / path, again.model, optimizers, scheduler=schedulers)
            assert extra == (3 if path == "dict" else None)
            check_same(at_save, again.whole(), at=path)
            again.train(range(3, 5), rank, world_size)
            if world_size == 3:
                check_same(later, again.whole(), at=f"{path}, later")

    run_ranks(load, world_size)


@on_ranks(2, ("dict", "list"))
def test_one_warning_names_schedulers_that_are_not_loaded(rank: int, path: str, saved: Saved) -> None:
    again = Trio(1)
    optimizers: Any = again.as_list if path == "list" else again.as_dict
    with told() as lines:
        load_checkpoint(saved[0] / path, again.model, optimizers)
    name = 1 if path == "list" else "adamw"
    expected = f"has the state of a learning-rate scheduler, scheduler[{name!r}], which wasn't passed"
    assert [expected in line for line in lines] == [True] * (rank == 0)


def test_a_checkpoint_of_several_consolidates_and_is_described(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, ((model, muon, adamw), _), _, names = saved
    for kind, expected in (("dict", {"adamw": adamw, "muon": muon}), ("list", [muon, adamw])):
        out = tmp_path / f"{kind} whole"
        assert main(["consolidate", str(folder / kind), str(out)]) == 0
        whole = load_file(out / "model.safetensors"), torch.load(out / "optimizer.pt", weights_only=True)
        check_same((model, expected), whole)
    capsys.readouterr()
    assert main(["inspect", "--json", str(folder / "dict")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(group["optimizer"], group["params"]) for group in told["groups"]] == [
        ("adamw", 3),
        ("adamw", 4),
        ("muon", 2),
    ]
    assert told["scheduler"]["muon"] is None
    assert "last_epoch" in told["scheduler"]["adamw"]
    owners = {line["name"]: line["optimizer"] for line in told["model"] if line["kind"] == "trainable"}
    assert owners == {**dict.fromkeys(names[0], "muon"), **dict.fromkeys(names[1], "adamw")}
    laid_out = told["layout"]["parameters"]
    assert {p["name"] for p in laid_out} == {*names[0], *names[1]}
    assert [bucket["number"] for bucket in told["layout"]["buckets"]] == list(range(len(told["layout"]["buckets"])))
    assert main(["inspect", str(folder / "dict"), "--world-size", "5"]) == 0
    people = capsys.readouterr().out
    assert "group adamw/1   4 parameters, lr" in people
    assert "  scheduler   adamw step_size, " in people


@on_ranks(2)
def test_what_does_not_fit_together_is_refused_by_name_and_changes_nothing(rank: int, tmp_path: Path) -> None:
    trio = Trio(0).train(range(1), rank, 2)
    both: Any = trio.as_dict
    save_checkpoint(tmp_path / "dict", trio.model, both)
    save_checkpoint(tmp_path / "list", trio.model, trio.as_list)
    other, single = linear()
    save_checkpoint(tmp_path / "one", other, [single])
    alone = dist.new_group([rank], use_local_synchronization=True)
    apart = linear(dp_process_group=alone)[1]

    def save(optimizer: Any, scheduler: Any = None) -> None:
        save_checkpoint(tmp_path / "new", trio.model, optimizer, scheduler=scheduler)

    def load(name: str, optimizer: Any, scheduler: Any = None) -> None:
        load_checkpoint(tmp_path / name, trio.model, optimizer, scheduler=scheduler)

    others = Trio(1, torch.optim.RMSprop)
    before = trio.whole(), others.whole()
    of_dict = "ValueError: optimizer: expected a dict of optimizers by 'adamw', 'muon', with which the checkpoint"
    schedulers = "ValueError: scheduler: expected a dict of schedulers by 'adamw', 'muon', as optimizer is, got"
    other_class = "ValueError: optimizer['adamw']: expected the state of this class of optimizer"
    calls: Calls = {
        "ValueError: 1.weight: expected one optimizer that trains it, got optimizer[0] and optimizer[1]": (
            lambda: save([trio.muon, trio.muon])
        ),
        "TypeError: optimizer[1]: expected a LowLevelZeroOptimizer, got AdamW": (
            lambda: save([trio.muon, trio.adamw.optim])
        ),
        "TypeError: optimizer: expected a dict of optimizers by name, got a int as key": lambda: save(
            {1: trio.muon, 2: trio.adamw}
        ),
        "TypeError: optimizer: expected a LowLevelZeroOptimizer, got list": lambda: save([]),
        "ValueError: optimizer: expected optimizers over the same ranks": lambda: save([trio.muon, apart]),
        f"{schedulers} one scheduler": lambda: save(both, trio.decay),
        f"{schedulers} a list of 2": lambda: save(both, [None, trio.decay]),
        f"{schedulers} a dict of": lambda: save(both, {"sgd": trio.decay}),
        "ValueError: scheduler: expected a list of 2 schedulers, as optimizer is, got one scheduler": (
            lambda: save(trio.as_list, [trio.decay])
        ),
        "RuntimeError: expected the same call on every rank, got rank 0 to save a checkpoint to": (
            lambda: save(both if rank else trio.as_list)
        ),
        ("TypeError: optimizer['muon']: expected a Low", "RuntimeError: rank 0 could not save a checkpoint to"): (
            lambda: save(both if rank else {**both, "muon": "not one"})
        ),
        f"{of_dict} was saved, got a list of 2": lambda: load("dict", trio.as_list),
        "ValueError: optimizer: expected a list of 2 optimizers, with which the checkpoint was saved, got a dict": (
            lambda: load("list", both)
        ),
        f"{of_dict} was saved, got a dict of optimizers by 'muon', 'sgd'": (
            lambda: load("dict", {"muon": trio.muon, "sgd": trio.adamw})
        ),
        f"{of_dict} was saved, got a dict of optimizers by 'muon':": lambda: load("dict", {"muon": trio.muon}),
        "ValueError: optimizer[0]: expected 2 param groups, got 1": lambda: load("list", trio.as_list[::-1]),
        f"{of_dict} was saved, got one": lambda: load("dict", trio.adamw),
        "ValueError: optimizer: expected one optimizer, with which the checkpoint was saved, got a dict": (
            lambda: load("one", both)
        ),
        f"{other_class}, RMSprop, got that of AdamW": (
            lambda: load_checkpoint(tmp_path / "dict", others.model, others.as_dict)
        ),
        "ValueError: scheduler['adamw']: ": lambda: load("dict", both, {"adamw": trio.decay}),
    }
    check_refused(calls, rank)
    check_same(before, (trio.whole(), others.whole()))
    load_checkpoint(tmp_path / "one", other, single)
    assert not (tmp_path / "new").exists()


@on_ranks(2)
def test_parameters_that_no_optimizer_trains_are_named(rank: int, tmp_path: Path) -> None:
    """And they are saved. A frozen one is nobody's mistake."""
    trio = Trio(0)
    with logged() as lines:
        save_checkpoint(tmp_path / "both", trio.model, trio.as_list)
        assert lines == []
        save_checkpoint(tmp_path / "one", trio.model, trio.adamw, exclude_frozen=True)
    told = "no optimizer that was given trains 1.weight, ... (2 parameters that require gradients)"
    assert [told in line for line in lines] == [True] * (rank == 0)
    manifest = read_manifest(tmp_path / "one")
    assert list(manifest.excluded) == ["3.weight", "3.bias"]
    assert manifest.tensors["1.weight"].kind == "untrained"


def test_experts_of_several_optimizers_are_all_in_it(tmp_path: Path) -> None:
    """Each has some of an expert's parameters, over the same ranks, by a group of its own."""

    def start(rank: int, seed: int) -> tuple[nn.ModuleDict, dict[str, LowLevelZeroOptimizer]]:
        torch.manual_seed(seed + rank % 2)
        expert, optimizers = nn.Linear(4, 4), {}
        expert.register_buffer("load", torch.tensor(float(rank % 2)))
        model = nn.ModuleDict({"shared": nn.Linear(4, 4), "experts": nn.ModuleDict({str(rank % 2): expert})})
        for name, make in (("weight", momentum), ("bias", adamw)):
            groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            shared, own = getattr(model.shared, name), getattr(expert, name)
            optimizers[name] = LowLevelZeroOptimizer(make([shared, own]), {groups[rank % 2]: [own]}, model=model)
        return model, optimizers

    def run(rank: int, world_size: int) -> None:
        model, optimizers = start(rank, 0)
        train(model, *optimizers.values(), steps=2, scale=rank)
        save_checkpoint(tmp_path / "a", model, optimizers)
        other, its_optimizers = start(rank, 9)
        other.experts[str(rank % 2)].load.fill_(7.0)
        load_checkpoint(tmp_path / "a", other, its_optimizers)
        check_same(held(model, *optimizers.values()), held(other, *its_optimizers.values()))

    run_ranks(run, 4)
    assert main(["consolidate", str(tmp_path / "a"), str(tmp_path / "out")]) == 0
    whole = load_file(tmp_path / "out" / "model.safetensors")
    assert {"experts.0.load", "experts.1.load", "experts.0.weight", "experts.1.bias"} <= whole.keys()
    assert whole["experts.1.load"] == 1.0


class Nested(torch.optim.Optimizer):
    """Its states are in a dict, and one is of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                momenta = self.state[p].setdefault("momenta", {"fast": torch.zeros_like(p)})
                p.sub_(momenta["fast"].mul_(0.5).add_(p.grad), alpha=0.1)


@pytest.mark.parametrize("split", [None, "elements"], ids=["whole parameters", "slices"])
def test_states_in_a_dict_go_to_another_number_of_ranks_and_are_consolidated(split: Any, tmp_path: Path) -> None:
    def work(rank: int, world_size: int, saved: Any = None) -> dict[str, Any]:
        """A step, of a fresh run or one that goes on from a checkpoint or a state dict."""
        model, optimizer = linear(make=Nested, split=split)
        if isinstance(saved, Path):
            load_checkpoint(saved, model, optimizer)
        elif saved is not None:
            optimizer.load_state_dict(saved)
        optimizer.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if saved is None:
            save_checkpoint(tmp_path / "step", model, optimizer)
        return optimizer.state_dict()["state"]

    after_one = run_ranks(work, 2)[0]
    assert after_one[0]["momenta"]["fast"].unique().tolist() == [1.0]
    assert main(["consolidate", str(tmp_path / "step"), str(tmp_path / "out")]) == 0
    got = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    check_same(after_one, got["state"])
    for saved, world_size in ((tmp_path / "step", 1), (tmp_path / "step", 3), (got, 3)):
        resumed = run_ranks(work, world_size, saved)[-1]
        assert resumed["steps"] == 2
        assert [resumed[at]["momenta"]["fast"].unique().tolist() for at in range(2)] == [[1.5]] * 2
