"""Several optimizers that train one model, saved and loaded together."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor  # here once, not in every forked rank
from safetensors.torch import load_file
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.__main__ import main
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, save_checkpoint
from lowlevel_zero.layout import layout_of
from tests.support.checkpoints import differences
from tests.support.ranks import run_ranks

SHARES = 6  # of each batch: every world size here divides it


def model_of(seed: int) -> nn.Sequential:
    """Embedding, hidden matrices, a frozen layer, and a head."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 8))
    model[3].requires_grad_(False)
    return model


def parts_of(model: nn.Sequential) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What is stepped as a matrix, and the rest."""
    hidden = [model[1].weight, model[2].weight]
    return hidden, [p for p in model.parameters() if all(p is not h for h in hidden)]


class Trio:
    """A model, two optimizers of different kinds, stages and buckets, and their schedulers."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.model = model_of(seed).to(dtype)
        hidden, rest = parts_of(self.model)
        muon = getattr(torch.optim, "Muon", torch.optim.SGD)(hidden, lr=0.02)  # torch 2.9 and later
        adamw = torch.optim.AdamW([{"params": rest[:3]}, {"params": rest[3:], "lr": 0.01}])
        self.muon = LowLevelZeroOptimizer(muon, model=self.model, partition_grad=True, reduce_bucket_size=40, **options)
        self.adamw = LowLevelZeroOptimizer(adamw, model=self.model, **options)
        self.decay = torch.optim.lr_scheduler.StepLR(self.adamw, 2)

    @property
    def as_dict(self) -> dict[str, LowLevelZeroOptimizer]:
        return {"muon": self.muon, "adamw": self.adamw}

    @property
    def as_list(self) -> list[LowLevelZeroOptimizer]:
        return [self.muon, self.adamw]

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
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        states = [optimizer.state_dict() for optimizer in self.as_list]
        return model, states, self.decay.state_dict()


def test_two_optimizers_go_on_from_one_checkpoint_at_any_number_of_ranks(tmp_path: Path) -> None:
    """Bit for bit with the same ranks, whether they come in a dict or in a list, saved at once or by a thread."""

    def run(rank: int, world_size: int) -> Any:
        trio = Trio(0, torch.bfloat16).train(range(3), rank, world_size)
        save_checkpoint(tmp_path / "dict", trio.model, trio.as_dict, scheduler={"adamw": trio.decay}, extra=3)
        saving = save_checkpoint(
            tmp_path / "list", trio.model, tuple(trio.as_list), scheduler=[None, trio.decay], async_save=True
        )
        at_save = trio.whole()
        later = trio.train(range(3, 5), rank, world_size).whole()
        saving.wait()
        return at_save, later

    def load(rank: int, world_size: int) -> list[str]:
        wrong = []
        for path in ("dict", "list"):
            again = Trio(1 + rank, torch.bfloat16)
            backwards = dict(reversed(again.as_dict.items())) if rank else again.as_dict
            optimizers, schedulers = (again.as_list, (None, again.decay)) if path == "list" else (backwards, None)
            if schedulers is None:
                schedulers = {"muon": None, "adamw": again.decay}
            extra = load_checkpoint(tmp_path / path, again.model, optimizers, scheduler=schedulers)
            assert extra == (3 if path == "dict" else None)
            wrong += differences(at_save, again.whole(), at=path)
            again.train(range(3, 5), rank, world_size)
            if world_size == 3:
                wrong += differences(later, again.whole(), at=f"{path}, later")
        return wrong

    at_save, later = run_ranks(run, 3)[0]
    assert run_ranks(load, 3) == [[]] * 3
    assert run_ranks(load, 2) == [[]] * 2


def test_a_checkpoint_of_several_consolidates_and_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(rank: int, world_size: int) -> Any:
        trio = Trio(0).train(range(2), rank, world_size)
        save_checkpoint(tmp_path / "dict", trio.model, trio.as_dict, scheduler={"adamw": trio.decay})
        save_checkpoint(tmp_path / "list", trio.model, trio.as_list)
        layouts = [layout_of(optimizer) for optimizer in trio.as_dict.values()]
        return trio.whole(), [[p.name for p in layout.parameters] for layout in layouts]

    (model, (muon, adamw), _), names = run_ranks(save, 2)[0]
    for kind, expected in (("dict", {"adamw": adamw, "muon": muon}), ("list", [muon, adamw])):
        out = tmp_path / f"{kind} whole"
        assert main(["consolidate", str(tmp_path / kind), str(out)]) == 0
        assert differences(model, load_file(out / "model.safetensors")) == []
        assert differences(expected, torch.load(out / "optimizer.pt", weights_only=True)) == []
    capsys.readouterr()
    assert main(["inspect", "--json", str(tmp_path / "dict")]) == 0
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
    assert main(["inspect", str(tmp_path / "dict"), "--world-size", "5"]) == 0
    people = capsys.readouterr().out
    assert "group adamw/1   4 parameters, lr" in people
    assert "  scheduler   adamw step_size, " in people


def refused(save: Any) -> str:
    try:
        save()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")


def test_what_does_not_fit_together_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> list[str]:
        trio = Trio(0).train(range(1), rank, world_size)
        both: Any = trio.as_dict
        save_checkpoint(tmp_path / "dict", trio.model, both)
        save_checkpoint(tmp_path / "list", trio.model, trio.as_list)
        other = model_of(0)
        single = LowLevelZeroOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), model=other)
        save_checkpoint(tmp_path / "one", other, [single])
        alone = dist.new_group([rank], use_local_synchronization=True)
        apart = LowLevelZeroOptimizer(torch.optim.SGD(model_of(0).parameters(), lr=0.1), dp_process_group=alone)

        def save(optimizer: Any, scheduler: Any = None) -> str:
            return refused(lambda: save_checkpoint(tmp_path / "new", trio.model, optimizer, scheduler=scheduler))

        def load(name: str, optimizer: Any, model: Any = trio.model, scheduler: Any = None) -> str:
            return refused(lambda: load_checkpoint(tmp_path / name, model, optimizer, scheduler=scheduler))

        before = trio.whole()
        told = [
            save([trio.muon, trio.muon]),
            save([trio.muon, trio.adamw.optim]),
            save({1: trio.muon, 2: trio.adamw}),
            save([]),
            save([trio.muon, apart]),
            save(both, trio.decay),
            save(both, [None, trio.decay]),
            save(both, {"sgd": trio.decay}),
            save(trio.as_list, [trio.decay]),
            save(both if rank else trio.as_list),
            save(both if rank else {**both, "muon": "not one"}),
            load("dict", trio.as_list),
            load("list", both),
            load("dict", {"muon": trio.muon, "sgd": trio.adamw}),
            load("list", list(reversed(trio.as_list))),
            load("dict", trio.adamw),
            load("one", both),
            load("dict", both, scheduler={"adamw": trio.decay}),
        ]
        assert differences(before, trio.whole()) == []
        load_checkpoint(tmp_path / "one", other, single)
        return told

    expected = [
        "ValueError: 1.weight: expected one optimizer that trains it, got optimizer[0] and optimizer[1]",
        "TypeError: optimizer[1]: expected a LowLevelZeroOptimizer, got AdamW",
        "TypeError: optimizer: expected names as keys, got a int, 1",
        "TypeError: optimizer: expected a LowLevelZeroOptimizer, got list",
        "ValueError: optimizer: expected optimizers over the same ranks",
        "ValueError: scheduler: expected a dict of schedulers by 'adamw', 'muon', as optimizer is, got one scheduler",
        "ValueError: scheduler: expected a dict of schedulers by 'adamw', 'muon', as optimizer is, got a list of 2",
        "ValueError: scheduler: expected a dict of schedulers by 'adamw', 'muon', as optimizer is, got a dict of",
        "ValueError: scheduler: expected a list of 2 schedulers, as optimizer is, got one scheduler",
        "RuntimeError: expected the same call on every rank, got rank 0 to save a checkpoint to",
        ("TypeError: optimizer['muon']: expected a Low", "RuntimeError: rank 0 could not save a checkpoint to"),
        "ValueError: optimizer: expected a dict of optimizers by 'adamw', 'muon', with which the checkpoint was saved",
        "ValueError: optimizer: expected a list of 2 optimizers, with which the checkpoint was saved, got a dict",
        "ValueError: optimizer: expected a dict of optimizers by 'adamw', 'muon', with which the checkpoint was saved",
        "ValueError: optimizer[0]: expected 2 param groups, got 1",
        "ValueError: optimizer: expected a dict of optimizers by 'adamw', 'muon', with which the checkpoint was saved",
        "ValueError: optimizer: expected one optimizer, with which the checkpoint was saved, got a dict of optimizers",
        "ValueError: scheduler['adamw']: ",
    ]
    for rank, told in enumerate(run_ranks(run, 2)):
        for line, beginning in zip(told, expected, strict=True):
            start = beginning[rank] if isinstance(beginning, tuple) else beginning
            assert line.startswith(start), (line, start)
    assert not (tmp_path / "new").exists()


def test_parameters_that_no_optimizer_trains_are_named(tmp_path: Path) -> None:
    """A frozen one is nobody's mistake."""

    def save(rank: int, world_size: int) -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("lowlevel_zero").addHandler(handler)
        trio = Trio(0)
        lines.clear()
        save_checkpoint(tmp_path / "both", trio.model, trio.as_list)
        assert lines == []
        save_checkpoint(tmp_path / "one", trio.model, trio.adamw)
        return lines

    of_first, of_second = run_ranks(save, 2)
    assert len(of_first) == 1
    assert "no optimizer that was given trains 1.weight, ... (2 parameters that require gradients)" in of_first[0]
    assert of_second == []


class Mixed(nn.Module):
    """One expert of this rank's group, a matrix and a bias, in a model that all share."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4) if at == expert else None for at in range(2)])  # type: ignore[misc]
        self.experts[expert].register_buffer("load", torch.tensor(float(expert)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.shared(x)
        for expert in self.experts:
            out = out if expert is None else expert(out)
        return out.square().sum()


def test_experts_of_several_optimizers_are_all_in_it(tmp_path: Path) -> None:
    """Each has some of an expert's parameters, over the same group of ranks."""

    def start(rank: int, seed: int) -> tuple[Mixed, Mapping[str, LowLevelZeroOptimizer]]:
        torch.manual_seed(seed + rank % 2)
        model = Mixed(rank % 2)
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        expert = model.experts[rank % 2]
        matrices, rest = [model.shared.weight, expert.weight], [model.shared.bias, expert.bias]
        optimizers = {
            name: LowLevelZeroOptimizer(inner, {groups[rank % 2]: list(expert.parameters())}, model=model)
            for name, inner in (
                ("matrices", torch.optim.SGD(matrices, lr=0.1, momentum=0.9)),
                ("rest", torch.optim.AdamW(rest)),
            )
        }
        return model, optimizers

    def run(rank: int, world_size: int) -> list[str]:
        model, optimizers = start(rank, 0)
        for _ in range(2):
            optimizers["rest"].backward(model(torch.ones(1, 4) * rank))
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        save_checkpoint(tmp_path / "a", model, optimizers)
        other, its_optimizers = start(rank, 9)
        load_checkpoint(tmp_path / "a", other, its_optimizers)
        wrong = differences(dict(model.state_dict()), dict(other.state_dict()))
        for name, optimizer in optimizers.items():
            wrong += differences(optimizer.state_dict(), its_optimizers[name].state_dict(), at=name)
        return wrong

    assert run_ranks(run, 4) == [[]] * 4
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


def test_a_consolidated_optimizer_has_the_states_of_its_state_dict(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> dict[str, Any]:
        model = nn.Linear(3, 2)
        optimizer = LowLevelZeroOptimizer(Nested(model.parameters()), model=model)
        optimizer.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()
        save_checkpoint(tmp_path / "step", model, optimizer)
        return optimizer.state_dict()

    expected = run_ranks(save, 2)[0]
    assert main(["consolidate", str(tmp_path / "step"), str(tmp_path / "out")]) == 0
    got = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    assert expected["state"][0]["momenta"]["fast"].any()
    assert expected["state"]["steps"] == 1
    assert not differences(expected["state"], got["state"])


def test_slices_in_a_dict_go_to_another_number_of_ranks(tmp_path: Path) -> None:
    def work(rank: int, world_size: int, steps: int, saved: dict[str, Any] | None = None) -> dict[str, Any]:
        model = nn.Linear(3, 2)
        optimizer = LowLevelZeroOptimizer(Nested(model.parameters()), model=model, split="elements")
        if saved is not None:
            optimizer.load_state_dict(saved)
        elif (tmp_path / "step").exists():
            load_checkpoint(tmp_path / "step", model, optimizer)
        for _ in range(steps):
            optimizer.backward(model(torch.ones(1, 3)).sum())
            optimizer.step()
            optimizer.zero_grad()
        if not (tmp_path / "step").exists():
            save_checkpoint(tmp_path / "step", model, optimizer)
        return optimizer.state_dict()

    after_one, after_two = run_ranks(work, 1, 1)[0], run_ranks(work, 1, 1)[0]
    assert after_two["state"][0]["momenta"]["fast"].unique().tolist() == [1.5]
    for resumed in (run_ranks(work, 2, 1)[1], run_ranks(work, 2, 1, after_one)[1]):
        assert not differences(after_two["state"], resumed["state"])


class Counted(torch.optim.SGD):
    """Counts the steps of each parameter, and divides by the count."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                count = self.state[p].setdefault("count", torch.ones(()))
                p.sub_(p.grad, alpha=0.1 / count.item())
                count.add_(1)


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_number_of_a_0_d_parameter_is_loaded_on_ranks_without_it_too(tmp_path: Path, by_torch: bool) -> None:
    def work(rank: int, world_size: int) -> list[float]:
        model, other = nn.Module(), nn.Module()
        model.scale, other.scale = (nn.Parameter(torch.tensor(1.0)) for _ in range(2))
        first = LowLevelZeroOptimizer(Counted([model.scale]), model=model)
        second = LowLevelZeroOptimizer(Counted([other.scale]), model=other)
        first.backward(model.scale * 2)
        first.step()
        if by_torch:
            dcp.save({"optimizer": Sharded(first)}, checkpoint_id=tmp_path / "step")
            dcp.load({"optimizer": Sharded(second)}, checkpoint_id=tmp_path / "step")
        else:
            save_checkpoint(tmp_path / "step", model, first)
            load_checkpoint(tmp_path / "step", other, second)
        return [state["count"].item() for state in second.state.values()]

    assert run_ranks(work, 2) == [[2], [2]]
