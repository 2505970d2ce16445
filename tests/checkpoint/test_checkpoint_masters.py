"""fp32 masters come back wherever they are on the disk, and wherever the run has fp32."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor  # here once, not in every forked rank
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, save_checkpoint
from tests.support.checkpoints import differences, logged
from tests.support.ranks import run_ranks

Pair = tuple[nn.Module, LowLevelZeroOptimizer]


class Net(nn.Module):
    """Three layers, of which the last has no gradient in the first step."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3)).to(dtype)

    def forward(self, x: Tensor, layers: int) -> Tensor:
        for layer in self.layers[:layers]:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


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
    dtype, options = RUNS[name]
    model = Net(seed, dtype)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, LowLevelZeroOptimizer(inner, model=model, partition_grad=True, **options)


def trained(name: str) -> Pair:
    model, optimizer = start(name, 0)
    for layers in (2, 3):
        optimizer.backward(model(torch.ones(2, 7, dtype=RUNS[name][0]), layers))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def masters(pair: Pair) -> list[Tensor]:
    """This rank's slices that are stepped, without their padding."""
    records = pair[1].sharded_parameters
    sizes = [stop - start for start, stop in (record.split.span(record.rank) for record in records)]
    return [record.p32.detach().float()[:size].clone() for record, size in zip(records, sizes, strict=True)]


def rounded(pair: Pair) -> list[str]:
    """Where a parameter isn't its master as its dtype rounds that, on this rank."""
    for record in pair[1].sharded_parameters:
        start, stop = record.split.span(record.rank)
        if not torch.equal(record.p32[: stop - start].to(record.p.dtype), record.row[: stop - start]):
            return [record.name]
    return []


def test_load_checkpoint_brings_them_from_each_run_to_each_other(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> list[str]:
        wrong = []
        for name in PRECISE:
            pair = trained(name)
            save_checkpoint(tmp_path / name, *pair)
            for other in RUNS:
                again = start(other, 5)
                load_checkpoint(tmp_path / name, *again)
                again[1].verify()
                expected = masters(pair)
                if other not in PRECISE:
                    saved = RUNS[name][0]  # which this run loads, and rounds once more
                    expected = [each.to(saved).bfloat16().float() for each in expected]
                wrong += differences(expected, masters(again), at=f"{name} into {other}")
                wrong += [f"{name} into {other}: {each} isn't its master" for each in rounded(again)]
        return wrong

    assert run_ranks(run, 2) == [[], []]


def test_they_survive_a_run_that_saves_them_untouched(tmp_path: Path) -> None:
    """From fp32 to masters of a run that takes no step, and back."""

    def run(rank: int, world_size: int) -> list[str]:
        first = pair = trained("fp32")
        for at, name in enumerate(("bf16", "fp16", "bf16, on the host", "fp32")):
            save_checkpoint(tmp_path / str(at), *pair)
            pair = start(name, 5)
            load_checkpoint(tmp_path / str(at), *pair)
        return differences(dict(first[0].state_dict()), dict(pair[0].state_dict()))

    assert run_ranks(run, 2) == [[], []]


def test_another_number_of_ranks_has_them_too(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> dict[str, Tensor]:
        pair = trained("bf16")
        save_checkpoint(tmp_path / "a", *pair)
        return {f"{at}": state["master_param"] for at, state in pair[1].state_dict()["state"].items()}

    def load(rank: int, world_size: int) -> dict[str, Tensor]:
        model, optimizer = start("fp32", 5)
        load_checkpoint(tmp_path / "a", model, optimizer)
        return {f"{at}": p.detach().clone() for at, p in enumerate(model.parameters())}

    saved = run_ranks(save, 3)[0]
    for world_size in (1, 2, 4):
        for loaded in run_ranks(load, world_size):
            assert differences(saved, loaded) == []


def test_plain_state_dicts_bring_them_after_the_model(tmp_path: Path) -> None:
    """Where the model's weights are what 16 bits have kept of them, and nowhere else."""

    def run(rank: int, world_size: int) -> list[str]:
        wrong = []
        for name, other in product(("bf16", "fp16"), PRECISE[:2]):
            pair = trained(name)
            again = start(other, 5)
            again[0].load_state_dict(pair[0].state_dict())
            edited = again[0].layers[0].bias
            with torch.no_grad():
                edited[2] += 1.0
            expected = [each["master_param"].clone() for each in pair[1].state_dict()["state"].values()]
            at = next(at for at, p in enumerate(again[0].parameters()) if p is edited)
            expected[at][2] = edited[2].item()
            again[1].load_state_dict(pair[1].state_dict())
            again[1].verify()
            wrong += differences(expected, [p.detach() for p in again[0].parameters()], at=f"{name} into {other}")
            again[1].step()
        return wrong

    assert run_ranks(run, 3) == [[], [], []]


@pytest.mark.parametrize("model_first", [True, False])
def test_sharded_brings_them_where_the_dtype_is_the_same(model_first: bool, tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> list[str]:
        pair, again = trained("bf16"), start("bf16", 5)
        states: list[dict[str, Any]] = [
            {"model": each[0].state_dict(), "optim": Sharded(each[1])} for each in (pair, again)
        ]
        if not model_first:
            states = [dict(reversed(state.items())) for state in states]
        dcp.save(states[0], checkpoint_id=tmp_path / "a")
        dcp.load(states[1], checkpoint_id=tmp_path / "a")
        Sharded(again[1]).state_dict()  # looks at masters
        return differences(masters(pair), masters(again))

    assert run_ranks(run, 2) == [[], []]


def test_sharded_tells_which_it_has_not_read(tmp_path: Path) -> None:
    """An fp32 run doesn't ask for masters, which no checkpoint of its own would have."""

    def run(rank: int, world_size: int) -> list[str]:
        pair, again = trained("bf16"), start("fp32", 5)
        dcp.save({"model": pair[0].state_dict(), "optim": Sharded(pair[1])}, checkpoint_id=tmp_path / "a")
        with logged() as lines:
            dcp.load({"model": again[0].state_dict(), "optim": Sharded(again[1])}, checkpoint_id=tmp_path / "a")
        return lines

    first, second = run_ranks(run, 2)
    assert len(first) == 1
    assert first[0].startswith("WARNING: layers.0.weight: ")
    assert "fp32 master" in first[0]
    assert second == []
