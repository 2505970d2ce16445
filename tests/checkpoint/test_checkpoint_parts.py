"""What is each rank's own comes back to it; what is frozen may be left out."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # here once, not in every forked rank
from safetensors.torch import load_file
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.__main__ import main
from lowlevel_zero.checkpoint import load_checkpoint, read_manifest, read_rank_state, save_checkpoint
from tests.support.checkpoints import differences, logged
from tests.support.ranks import run_ranks

# Each rank's own state


def start(seed: int = 0) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    return model, LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model=model)


def train(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> list[Tensor]:
    """By the random numbers of this rank."""
    for _ in range(2):
        optimizer.backward(model(torch.randn(8, 4) * random.random()).sum())
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "async"])
def test_a_run_goes_on_with_each_rank_s_own_random_numbers(in_background: bool, tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> list[str]:
        pair = start()
        torch.manual_seed(rank)
        random.seed(rank)
        train(*pair)
        own = {"torch": torch.get_rng_state(), "python": random.getstate(), "batches": [rank, 5]}
        saving = save_checkpoint(tmp_path / "a", *pair, rank_state=own, extra="all's", async_save=in_background)
        own["batches"] = "changed later"
        expected = train(*pair)
        saving.wait()
        fresh = start(seed=7)
        state: dict[str, Any] = {"left": "over"}
        assert load_checkpoint(tmp_path / "a", *fresh, rank_state=state) == "all's"
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        assert state.keys() == {"torch", "python", "batches"}
        assert state["batches"] == [rank, 5]
        return differences(expected, train(*fresh))

    assert run_ranks(run, 3) == [[]] * 3
    assert read_rank_state(tmp_path / "a", 2)["batches"] == [2, 5]
    assert read_rank_state(tmp_path / "a", 3) == {}
    assert main(["inspect", "--check", str(tmp_path / "a")]) == 0


def test_who_is_given_what_at_another_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def save(rank: int, world_size: int) -> None:
        pair = start()
        save_checkpoint(tmp_path / "all", *pair, rank_state={"rank": rank})
        save_checkpoint(tmp_path / "some", *pair, rank_state={"rank": rank} if rank else None)
        save_checkpoint(tmp_path / "none", *pair)

    def load(rank: int, world_size: int) -> Any:
        pair, given, told = start(), [], []
        for name in ("all", "some", "none"):
            state: dict[str, Any] = {}
            with logged() as lines:
                load_checkpoint(tmp_path / name, *pair, rank_state=state)
            given.append(state.get("rank"))
            told.append(lines)
        with logged() as unasked:
            load_checkpoint(tmp_path / "all", *pair)
        return given, told, unasked

    run_ranks(save, 3)
    by_size = {size: run_ranks(load, size) for size in (2, 3, 4)}
    given = {size: [given for given, _, _ in told] for size, told in by_size.items()}
    assert given[2] == [[0, None, None], [1, 1, None]]
    assert given[3] == [[0, None, None], [1, 1, None], [2, 2, None]]
    assert given[4] == [[0, None, None], [1, 1, None], [2, 2, None], [None, None, None]]
    for size, ((_, first, unasked), *others) in by_size.items():
        assert all(lines == [[], [], []] and not asked for _, lines, asked in others)
        assert len(unasked) == 1
        assert "pass rank_state={}" in unasked[0]
        ends = [line[0].partition(" rank_state: ")[2] if line else "" for line in first]
        fewer = "; those of ranks 2 are given to nobody: see read_rank_state" if size == 2 else ""
        more = ",3" if size == 4 else ""
        assert ends == [
            "" if size == 3 else f"{size} ranks load: saved by 0-2{'; ranks 3 are given none' if more else fewer}",
            f"{size} ranks load: saved by 1-2; ranks 0{more} are given none{fewer}",
            f"{size} ranks load: none was saved; ranks 0-{size - 1} are given none",
        ]
        assert all(line[0].startswith("WARNING") for line in first if line)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "some")]) == 0
    assert "own state of ranks 1-2" in capsys.readouterr().out


def test_states_that_would_not_come_back_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> list[str]:
        pair = start()
        told = []
        state: dict[str, Any] = {"here": 1}
        bad: Any = [3]
        save_checkpoint(tmp_path / "a", *pair, rank_state={"rank": rank})
        if rank == 0:
            file = tmp_path / "a" / "rank_1.pt"
            file.write_bytes(bytes(file.stat().st_size))
        for attempt in (
            lambda: save_checkpoint(tmp_path / "b", *pair, rank_state={"path": tmp_path} if rank else {}),
            lambda: save_checkpoint(tmp_path / "b", *pair, rank_state=bad),
            lambda: load_checkpoint(tmp_path / "a", *pair, rank_state=bad),
            lambda: load_checkpoint(tmp_path / "a", *pair, rank_state=state),
            lambda: load_checkpoint(tmp_path / "a", *pair, rank_state=state, verify=False),
        ):
            with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
                attempt()
            told.append(str(caught.value))
        assert state == {"here": 1}
        return told

    first, second = run_ranks(run, 2)
    for one, other, part in zip(
        first,
        second,
        (
            "rank_state['path']: expected what torch.load",
            "expected a dict, got list",
            "expected a dict, got list",
            "",
            "",
        ),
        strict=True,
    ):
        assert part in one
        assert part in other
    assert "rank_1.pt is not what was written" in second[3]
    assert "rank_1.pt" in second[4]
    assert not (tmp_path / "b").exists()


# Without what is frozen


class Adapted(nn.Module):
    """A frozen base with a buffer and a tied name, and an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).requires_grad_(False)
        self.again = nn.Linear(64, 64, bias=False)
        self.again.weight = self.base[0].weight
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out.square().mean()


FROZEN = ["base.0.weight", "base.0.bias", "base.1.weight", "base.1.bias"]


def adapted(seed: int, in_groups: bool = False, thaw: str = "") -> tuple[Adapted, LowLevelZeroOptimizer]:
    torch.manual_seed(seed)
    model = Adapted()
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or name == thaw)
    trained = [p for p in model.parameters() if p.requires_grad or in_groups]
    return model, LowLevelZeroOptimizer(torch.optim.AdamW(trained), model=model, partition_grad=True)


def one_step(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
    optimizer.backward(model(torch.randn(4, 64)))
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("in_groups", [False, True], ids=["not the optimizer's", "frozen in the optimizer"])
def test_frozen_parameters_are_left_out_and_the_model_brings_them(
    in_groups: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(rank: int, world_size: int) -> Any:
        model, optimizer = adapted(0, in_groups)
        one_step(model, optimizer)
        save_checkpoint(tmp_path / "all", model, optimizer)
        save_checkpoint(tmp_path / "small", model, optimizer, exclude_frozen=True)
        return dict(model.state_dict()), optimizer.state_dict()

    def load(rank: int, world_size: int) -> Any:
        model, optimizer = adapted(5, in_groups)
        own = {name: value.clone() for name, value in model.state_dict().items()}
        with logged() as lines:
            load_checkpoint(tmp_path / "small", model, optimizer)
        brought = {*FROZEN, "again.weight"}
        mixed = {name: own[name] if name in brought else value for name, value in values.items()}
        wrong = differences(mixed, dict(model.state_dict())) + differences(states, optimizer.state_dict())
        with logged() as of_all:
            load_checkpoint(tmp_path / "all", model, optimizer)
        return wrong + differences(values, dict(model.state_dict())) + of_all, lines

    values, states = run_ranks(save, 2)[0]
    assert list(read_manifest(tmp_path / "small").excluded) == FROZEN
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).glob("*.distcp")) for name in ("all", "small")]
    assert sizes[0] - sizes[1] >= 4 * (64 * 64 + 3 * 64)
    (wrong, lines), (also, nothing), _ = run_ranks(load, 3)
    assert wrong == also == nothing == []
    assert len(lines) == 1
    assert lines[0].startswith("WARNING: ")
    assert (
        f"4 frozen parameters (exclude_frozen=True), which keep the values that the model has: {', '.join(FROZEN)}"
        in lines[0]
    )

    assert main(["inspect", "--json", str(tmp_path / "small")]) == 0
    assert json.loads(capsys.readouterr().out)["excluded"] == FROZEN
    assert main(["inspect", str(tmp_path / "small")]) == 0
    assert "excluded  4 frozen parameters: base.0.weight, " in capsys.readouterr().out
    assert main(["consolidate", str(tmp_path / "small"), str(tmp_path / "out")]) == 0
    assert f"not in it, since it was saved with exclude_frozen: {', '.join(FROZEN)}" in capsys.readouterr().out
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == values.keys() - {*FROZEN, "again.weight"}
    optimizer = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    assert differences(states, optimizer) == []


def test_what_a_small_checkpoint_cannot_give_is_refused_by_name(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> list[str]:
        model, optimizer = adapted(0)
        save_checkpoint(tmp_path / "small", model, optimizer, exclude_frozen=True)
        told = []
        thawed = adapted(1, thaw="base.0.bias")
        without = adapted(1)
        without[0].base[0].bias = None
        reshaped = adapted(1)
        reshaped[0].base[0].bias = nn.Parameter(torch.zeros(3), requires_grad=False)
        more = adapted(1)
        more[0].more = nn.Linear(2, 2).requires_grad_(False)
        for pair in (thawed, without, reshaped, more):
            with pytest.raises(ValueError, match="base.0.bias|more.weight") as caught:
                load_checkpoint(tmp_path / "small", *pair)
            told.append(str(caught.value))
        return told

    for thawed, without, reshaped, more in run_ranks(run, 2):
        assert "base.0.bias: expected it frozen, since the checkpoint was saved without it" in thawed
        assert "base.0.bias: the checkpoint has it, the model doesn't" in without
        assert "base.0.bias: expected (3,), the checkpoint has (64,)" in reshaped
        assert "more.weight: the model has it, the checkpoint doesn't" in more


def test_what_no_optimizer_trains_but_requires_gradients_stays_in(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> None:
        model = Adapted()
        optimizer = LowLevelZeroOptimizer(torch.optim.AdamW([model.up.weight]), model=model)
        save_checkpoint(tmp_path / "a", model, optimizer, exclude_frozen=True)

    run_ranks(save, 2)
    manifest = read_manifest(tmp_path / "a")
    assert list(manifest.excluded) == FROZEN
    assert manifest.tensors["down.weight"].kind == "untrained"
