"""Checkpoints have the model's own names: what is wrapped in one run may be bare, or wrapped otherwise, in the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.__main__ import main
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, read_manifest, save_checkpoint, state_dict_for
from lowlevel_zero.layout import layout_of
from tests.support.checkpoints import check_same
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks
from tests.support.saving import Keeping, Pair, train

Wrap = Callable[[nn.Module], nn.Module]


@pytest.fixture(scope="module", autouse=True)
def _backends_of_the_compiler() -> None:
    """Loads them all, which takes seconds: here once, not in every forked rank."""
    torch._dynamo.lookup_backend("eager")


class Block(Keeping):
    """Has an attribute of its own that is called as wrappers call what they wrap, a buffer, and state of its own."""

    def __init__(self) -> None:
        super().__init__(0)
        self.module = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))


class Net(nn.Module):
    """Two blocks, tied weights, and a frozen layer."""

    def __init__(self, wrap: Wrap = lambda module: module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([wrap(Block()), wrap(Block())])
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = wrap(nn.Linear(4, 4, bias=False))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = next(self.head.parameters())


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


# What wraps parts of the model, and what wraps the model when it is saved or loaded.
WRAPPINGS: dict[str, tuple[Wrap, Wrap]] = {
    "bare": (lambda part: part, lambda model: model),
    "checkpointing": (checkpoint_wrapper, lambda model: model),
    "compiled": (lambda part: part, compiled),
    "compiled parts": (compiled, lambda model: model),
    "both": (lambda part: checkpoint_wrapper(compiled(part)), compiled),
    "ddp": (lambda part: part, DistributedDataParallel),
    "ddp inside": (lambda part: checkpoint_wrapper(DistributedDataParallel(part)), compiled),
}


def start(wrapping: str, seed: int) -> Pair:
    """The model as it is given to the checkpoint, and its optimizer."""
    torch.manual_seed(seed)
    inside, outside = WRAPPINGS[wrapping]
    bare = Net(inside)
    model = outside(bare)
    optimizer = torch.optim.AdamW(
        [{"params": list(bare.blocks.parameters())}, {"params": list(bare.head.parameters())}]
    )
    given = bare if isinstance(model, DistributedDataParallel) else model
    return model, LowLevelZeroOptimizer(optimizer, model=given, partition_grad=True)


def trained(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> Pair:
    """After a step, which needs no forward: of what is compiled that would take seconds."""
    train(model, optimizer)
    count(model, 1)
    return model, optimizer


def count(model: nn.Module, seen: int) -> None:
    for module in model.modules():
        if isinstance(module, Block):
            module.kept = seen


def whole(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> Any:
    tensors = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    return tensors, optimizer.state_dict()["state"], [m.kept for m in model.modules() if isinstance(m, Block)]


OWN = {
    *(f"blocks.{at}.{name}" for at in range(2) for name in ("module.weight", "module.bias", "mask")),
    *("frozen.weight", "frozen.bias", "head.weight"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a checkpoint of each wrapping, and what was in each."""
    folder = tmp_path_factory.mktemp("saved")

    def save(rank: int, world_size: int) -> dict[str, Any]:
        expected = {}
        for wrapping in WRAPPINGS:
            model, optimizer = trained(*start(wrapping, seed=0))
            save_checkpoint(folder / wrapping, model, optimizer)
            expected[wrapping] = whole(model, optimizer)
            names = {name for name in OWN if "mask" not in name and "frozen" not in name}
            assert set(Sharded(optimizer).state_dict()["state"]) == names
            assert {p.name for p in layout_of(optimizer).parameters} == names
        return expected

    return folder, run_ranks(save, 2)[0]


def test_any_wrapping_loads_into_any_other(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = saved

    def load(rank: int, world_size: int) -> None:
        for at, target in enumerate(WRAPPINGS):
            model, optimizer = start(target, seed=1 + rank)
            # Each into the bare one, and into the next but one; the bare one into each.
            for source in {list(WRAPPINGS)[at - 2], "bare"} if target != "bare" else WRAPPINGS:
                count(model, 7)
                load_checkpoint(folder / source, model, optimizer)
                check_same(expected[source], whole(model, optimizer), at=f"{source} into {target}")

    for wrapping in WRAPPINGS:
        assert set(read_manifest(folder / wrapping).tensors) == OWN, wrapping
    run_ranks(load, 3)


@on_ranks(1)
def test_a_consolidated_file_loads_into_wrapped_and_bare_models(
    rank: int, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """By load_state_dict as it is, but for wrappers that hide the model's own names from it."""
    folder, expected = saved
    assert main(["consolidate", str(folder / "both"), str(tmp_path / "out")]) == 0
    file = tmp_path / "out" / "model.safetensors"
    assert set(load_file(file)) == OWN | {"tied.weight"}
    for wrapping in WRAPPINGS:
        model, optimizer = start(wrapping, seed=1)
        state = load_file(file)
        takes_it = wrapping in ("bare", "checkpointing")
        model.load_state_dict(state if takes_it else state_dict_for(model, state), strict=False)
        check_same(expected["both"][0], whole(model, optimizer)[0], at=wrapping)


@pytest.mark.colossalai
@on_ranks(2)
def test_a_boosted_model_s_names_are_the_bare_one_s(rank: int, tmp_path: Path) -> None:
    """ColossalAI's wrapper, around it and around what torch.compile and activation checkpointing have wrapped."""
    from colossalai.booster import Booster
    from colossalai.interface import ModelWrapper

    from tests.support import boosting

    def boosted(wrap: Wrap, seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        booster = Booster(plugin=boosting.ours(stage=2, precision="fp32"))
        net = Net(wrap)
        inner = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1)
        model, optimizer, *_ = booster.boost(net, inner)
        return model, optimizer

    wraps: list[Wrap] = [lambda part: part, checkpoint_wrapper, lambda part: ModelWrapper(compiled(part))]
    for at, wrap in enumerate(wraps):
        model, optimizer = boosted(wrap, at)
        trained(model, optimizer)
        save_checkpoint(tmp_path / str(at), model, optimizer)
        assert set(read_manifest(tmp_path / str(at)).tensors) == OWN
        again, its_optimizer = boosted(wraps[at - 1], 5)
        load_checkpoint(tmp_path / str(at), compiled(again), its_optimizer)
        check_same(whole(model, optimizer), whole(again, its_optimizer))
