"""Checkpoints through Booster: resume bit for bit, at other world sizes, to and from ColossalAI's own plugins."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.nn.optimizer import HybridAdam, cpu_adam
from colossalai.utils.safetensors import _flatten_optim_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.support.boosting import (
    Pair,
    adamw,
    boost,
    check_close,
    check_equal,
    ddp,
    groups_of,
    model_of,
    ours,
    sgd,
    theirs,
)
from tests.support.cases import check_cases
from tests.support.judging import off_the_way
from tests.support.ranks import run_ranks, run_ranks_expecting

SMALL = 0.001  # MiB: every parameter in a shard of its own


def save(pair: Pair, folder: Path, shard: bool = False, safetensors: bool = False) -> None:
    suffix = "" if shard else ".safetensors" if safetensors else ".pt"
    pair.booster.save_model(
        pair.model, str(folder / f"model{suffix}"), shard=shard, use_safetensors=safetensors, size_per_shard=SMALL
    )
    pair.booster.save_optimizer(
        pair.optimizer, str(folder / f"optimizer{'' if shard else '.pt'}"), shard=shard, size_per_shard=SMALL
    )
    dist.barrier()


def load(pair: Pair, folder: Path, optimizer_first: bool = False) -> None:
    (model,) = folder.glob("model*")
    (optimizer,) = folder.glob("optimizer*")
    loads = [
        lambda: pair.booster.load_model(pair.model, str(model)),
        lambda: pair.booster.load_optimizer(pair.optimizer, str(optimizer)),
    ]
    for each in reversed(loads) if optimizer_first else loads:
        each()


def masters(pair: Pair) -> dict[str, Tensor]:
    return {record.name: record.p32.clone() for record in pair.optimizer.sharded_parameters}


def in_folder(folder: Path, rank: int, world_size: int, check: Callable[..., None], *args: Any) -> None:
    """A check in a folder of its own."""
    place = folder / ", ".join(getattr(each, "__name__", str(each)) for each in (check, *args))
    place.mkdir(exist_ok=True)
    check(rank, world_size, place, *args)


# ---- resuming ----


def a_resumed_run_is_the_run(
    rank: int,
    world_size: int,
    folder: Path,
    stage: int,
    precision: str,
    shard: bool,
    safetensors: bool,
    optimizer_first: bool,
) -> None:
    options = {"stage": stage, "precision": precision, "initial_scale": 128}
    whole = boost(ours, **options)
    whole.train(rank, 0, 3)
    save(whole, folder, shard, safetensors)
    resumed = boost(ours, seed=1, **options)
    load(resumed, folder, optimizer_first)
    check_equal(whole.values(), resumed.values())
    check_equal(masters(whole), masters(resumed))
    check_equal(whole.optimizer.optim.state_dict(), resumed.optimizer.optim.state_dict())
    whole.train(rank, 3, 6)
    resumed.train(rank, 3, 6)
    check_equal(whole.values(), resumed.values())
    check_equal(whole.state(), resumed.state())
    assert not torch.equal(whole.values()["inward.bias"], model_of().to(torch.float16).inward.bias)
    dist.barrier()
    assert not list(folder.glob(".*")), "what was written beside is gone"


def a_sharded_optimizer_keeps_its_loss_scale(rank: int, world_size: int, folder: Path) -> None:
    """Files without one, which others write, load too; one that can't be is refused before anything is changed."""

    def scale(pair: Pair) -> dict[str, Any]:
        return pair.optimizer.state_dict()["lowlevel_zero"]["loss_scale"]

    def rewrite(index: Path, **loss_scale: Any) -> None:
        dist.barrier()
        content = json.loads(index.read_text())
        content["metadata"] = {key: value for key, value in content["metadata"].items() if "loss_scale" not in key}
        if loss_scale:
            content["metadata"]["lowlevel_zero.loss_scale"] = loss_scale
        dist.barrier()
        if rank == 0:
            index.write_text(json.dumps(content))
        dist.barrier()

    pair = boost(ours, precision="fp16", hysteresis=2, growth_interval=5)
    pair.train(rank, 0, 30)  # from 2**32 down to what fits, then up again and down
    save(pair, folder, shard=True)
    resumed = boost(ours, seed=1, precision="fp16", hysteresis=2, growth_interval=5)
    first = scale(resumed)
    load(resumed, folder)
    assert scale(resumed) == scale(pair) != first
    pair.train(rank, 30, 36)
    resumed.train(rank, 30, 36)
    check_equal(scale(pair), scale(resumed))
    check_equal(pair.values(), resumed.values())

    (index,) = (folder / "optimizer").glob("*.json")
    rewrite(index)
    without = boost(ours, seed=1, precision="fp16")
    load(without, folder)
    assert scale(without) == first
    rewrite(index, **{**first, "scale": -1.0})
    untouched = boost(ours, seed=1, precision="fp16")
    with pytest.raises(ValueError, match="scale"):
        load(untouched, folder, optimizer_first=True)
    check_equal(untouched.optimizer.optim.state_dict()["state"], {})


def masters_of_an_optimizer_without_states_keep_their_low_bits(rank: int, world_size: int, folder: Path) -> None:
    pair = boost(ours, sgd, precision="bf16")
    pair.train(rank, 0, 3)
    save(pair, folder)
    moved = masters(pair)["inward.weight"]
    assert not torch.equal(moved, moved.bfloat16().float())
    resumed = boost(ours, sgd, seed=1, precision="bf16")
    load(resumed, folder)
    check_equal(masters(pair), masters(resumed))
    state = torch.load(folder / "optimizer.pt")["state"]
    assert state[0]["master_param"].shape == (11, 7)


def masters_of_a_run_that_sent_fp8_come_back(rank: int, world_size: int, folder: Path, shard: bool) -> None:
    """In one that doesn't."""

    def wide(seed: int, **options: Any) -> Pair:
        model, booster = model_of(seed, width=50), Booster(plugin=ours(stage=2, precision="bf16", **options))
        return Pair(booster, *booster.boost(model, adamw(groups_of(model)))[:2])

    one, other = wide(0, fp8_communication=True), wide(1)
    one.train(rank, 0, 2)
    expected = masters(one)
    assert any(not torch.equal(record.row, record.p32.bfloat16()) for record in one.optimizer.sharded_parameters)
    save(one, folder, shard)
    load(other, folder)
    check_equal(expected, masters(other))


def a_safetensors_optimizer_is_read(rank: int, world_size: int, folder: Path) -> None:
    """What ColossalAI's asynchronous saving writes."""
    pair = boost(ours, precision="fp32")
    pair.train(rank, 0, 2)
    state = pair.state()
    if rank == 0:
        flat, metadata = _flatten_optim_state_dict(state)
        text = {key: json.dumps(value) for key, value in metadata.items()}
        save_file({key: value.clone() for key, value in flat.items()}, folder / "o.safetensors", text)
    dist.barrier()
    again = boost(ours, precision="fp32")
    again.booster.load_optimizer(again.optimizer, str(folder / "o.safetensors"))
    check_equal(state, again.state())


def test_a_run_comes_back_from_its_files(tmp_path: Path, subtests: pytest.Subtests) -> None:
    cases = [
        (a_resumed_run_is_the_run, 1, "fp32", False, False, True),
        (a_resumed_run_is_the_run, 2, "bf16", False, True, False),
        (a_resumed_run_is_the_run, 1, "fp16", True, False, True),
        (a_resumed_run_is_the_run, 2, "fp32", True, True, False),
        a_sharded_optimizer_keeps_its_loss_scale,
        masters_of_an_optimizer_without_states_keep_their_low_bits,
        (masters_of_a_run_that_sent_fp8_come_back, False),
        (masters_of_a_run_that_sent_fp8_come_back, True),
        a_safetensors_optimizer_is_read,
    ]
    check_cases(subtests, 2, partial(in_folder, tmp_path), cases)


# ---- elsewhere ----


@pytest.mark.parametrize(("precision", "shard"), [("fp32", True), ("bf16", False)])
def test_another_world_size_loads_it(tmp_path: Path, precision: str, shard: bool) -> None:
    def saving(rank: int, world_size: int) -> dict[str, Any]:
        pair = boost(ours, stage=2, precision=precision)
        pair.train(rank, 0, 3)
        save(pair, tmp_path, shard)
        return {"values": pair.values(), "state": pair.state()}

    def loading(rank: int, world_size: int) -> None:
        pair = boost(ours, stage=1, precision=precision, seed=1)
        load(pair, tmp_path)
        check_equal(expected["values"], pair.values())
        check_equal(expected["state"], pair.state())

    expected = run_ranks(saving, 2)[0]
    for world_size in (1, 3):
        run_ranks(loading, world_size)


def from_one_plugin_to_another(rank: int, world_size: int, folder: Path, source: Any, target: Any, shard: bool) -> None:
    options = {"stage": 2, "precision": "fp32", "drop": source is not theirs}  # their shards want all to have a state
    one = boost(source, **options)
    one.train(rank, 0, 3)
    save(one, folder, shard)
    other = boost(target, seed=1, **options)
    load(other, folder)
    check_equal(one.values(), other.values())
    one.train(rank, 3, 6)
    other.train(rank, 3, 6)
    check_close(one.values(), other.values(), 2e-6)


def activation_checkpointing_changes_no_names(
    rank: int, world_size: int, folder: Path, source: Any, target: Any, wrapped: bool, shard: bool
) -> None:
    """Saved with it and loaded without, and the other way round, by this plugin and by ColossalAI's own."""

    def pair_of(make: Any, wrapped: bool, seed: int) -> Pair:
        model = model_of(seed, drop=False)
        if wrapped:
            model.inward, model.outward = checkpoint_wrapper(model.inward), checkpoint_wrapper(model.outward)
        booster = Booster(plugin=make(precision="fp32"))
        return Pair(booster, *booster.boost(model, adamw(groups_of(model)))[:2])

    def values(pair: Pair) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in pair.model.unwrap().state_dict().items()}

    one, other = pair_of(source, wrapped, 0), pair_of(target, not wrapped, 1)
    one.train(rank, 0, 2)
    save(one, folder, shard)
    load(other, folder)
    check_equal(values(one), values(other))
    check_equal(list(values(one)), list(model_of().state_dict()))
    one.train(rank, 2, 4)
    other.train(rank, 2, 4)
    check_close(values(one), values(other), 2e-6)


def test_colossalais_plugins_load_it_and_save_for_it(tmp_path: Path, subtests: pytest.Subtests) -> None:
    ways = ((ours, ours, True), (ours, ddp, False), (ddp, ours, True))
    cases = [(activation_checkpointing_changes_no_names, *way, shard) for way in ways for shard in (False, True)]
    own = ((ddp, ours, False), (ours, ddp, True), (theirs, ours, True), (ours, theirs, False))  # set an accelerator
    cases += [(from_one_plugin_to_another, *way) for way in own]
    check_cases(subtests, 2, partial(in_folder, tmp_path), cases)


def test_the_layout_is_colossalais(tmp_path: Path) -> None:
    def rank(rank: int, world_size: int, make: Any, folder: Path) -> None:
        pair = boost(make, precision="fp32", drop=False)
        pair.train(rank, 0, 1)
        save(pair, folder, shard=True)

    listed = []
    for make in (theirs, ours):
        folder = tmp_path / make.__name__
        folder.mkdir()
        run_ranks(rank, 2, make, folder)
        files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.*"))}
        indices = {name: json.loads(path.read_text()) for name, path in files.items() if name.endswith("json")}
        states = {
            name: torch.load(path) for name, path in files.items() if name.endswith("bin") and "model" not in name
        }
        listed.append([list(files), indices, states])
    assert len(listed[0][2]) > 3
    check_equal(*listed)


def test_places_of_trainable_parameters_alone_are_understood(tmp_path: Path) -> None:
    """ColossalAI's ZeRO doesn't count frozen parameters; torch does."""

    def rank(rank: int, world_size: int, make: Any) -> dict[int, Any]:
        pair = boost(make, groups=lambda model: model.parameters(), precision="fp32")
        if make is theirs:
            pair.train(rank, 0, 2)
            save(pair, tmp_path)
        else:
            load(pair, tmp_path)
        return pair.state()["state"]

    expected, got = (run_ranks(rank, 2, make)[0] for make in (theirs, ours))
    assert list(expected) == [0, 1, 4, 5, 6, 7]  # the layer that is left out has 2 and 3
    assert list(got) == [0, 1, 6, 7, 8, 9]  # the frozen one has 4 and 5
    check_equal(list(expected.values()), list(got.values()))


# ---- while training goes on ----


def an_asynchronous_save_has_the_values_of_its_moment(rank: int, world_size: int, folder: Path, shard: bool) -> None:
    """Training goes on meanwhile; the thread is held up until it has."""
    go_on = threading.Event()
    pair = boost(ours, precision="bf16")
    pair.train(rank, 0, 2)
    values, state = pair.values(), pair.state()
    pair.booster.checkpoint_io._thread.submit(go_on.wait)
    suffix = "" if shard else ".safetensors"
    model, optimizer = (str(folder / f"{name}{suffix}") for name in ("model", "optimizer"))
    pair.booster.save_model(pair.model, model, shard=shard, use_async=True, size_per_shard=SMALL)
    pair.booster.save_optimizer(pair.optimizer, optimizer, shard=shard, use_async=True, size_per_shard=SMALL)
    pair.train(rank, 2, 4)
    assert list(folder.iterdir()) == []
    dist.barrier()
    go_on.set()
    pair.booster.load_model(pair.model, model)
    pair.booster.load_optimizer(pair.optimizer, optimizer)
    check_equal(values, pair.values())
    check_equal(state, pair.state())


def test_what_an_asynchronous_save_meets_with_is_raised_by_the_next(tmp_path: Path) -> None:
    def rank(rank: int, world_size: int) -> None:
        pair = boost(ours, precision="fp32")
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        io = pair.booster.checkpoint_io
        go_on = threading.Event()
        io._thread.submit(go_on.wait)
        pair.booster.save_model(pair.model, str(folder / "model.safetensors"), use_async=True)
        if rank == 0:
            folder.rmdir()
        go_on.set()
        try:
            pair.booster.save_model(pair.model, str(tmp_path / "model.pt"))
        except Exception as error:
            pair.booster.save_model(pair.model, str(tmp_path / "model.pt"))
            raise RuntimeError(f"once: {error}") from error

    first, second = run_ranks_expecting(rank, 2)
    assert first.message.startswith("once: ")
    assert "No such file" in first.message
    assert second.message.startswith("once: rank 0 could not save its model")


class Kernel:
    """Stands in for the kernel of ColossalAI's HybridAdam, which only a machine with CUDA compiles."""

    def __init__(self, *_: Any) -> None:
        pass

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle it, nor copy it")

    def step(self, *arguments: Any) -> None:
        step, lr, beta1, beta2, eps, decay, _, p, grad, average, square, _ = arguments
        average.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        p.mul_(1 - lr * decay)
        p.addcdiv_(average / (1 - beta1**step), (square / (1 - beta2**step)).sqrt() + eps, value=-lr)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # which HybridAdam asks for its size
def test_hybrid_adam_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SimpleNamespace(load=lambda: SimpleNamespace(CPUAdamOptimizer=Kernel))
    monkeypatch.setattr(cpu_adam, "CPUAdamLoader", lambda: loader)

    def hybrid(params: Any) -> HybridAdam:
        return HybridAdam(params, lr=1e-2, weight_decay=0.1)

    def rank(rank: int, world_size: int) -> None:
        options = {"precision": "bf16", "stage": 2, "drop": False}
        plain, pair = boost(ours, **options), boost(ours, hybrid, **options)
        start = masters(plain)
        for each in (plain, pair):
            each.train(rank, 0, 3)
        # A step less, or a rank's gradients left out: a tenth of the way or more.
        assert off_the_way(start, masters(plain), masters(pair)) <= 1e-4
        for shard in (False, True):
            folder = tmp_path / f"shard {shard}"
            folder.mkdir(exist_ok=True)
            save(pair, folder, shard)
            again = boost(ours, hybrid, seed=1, **options)
            load(again, folder)
            check_equal(pair.optimizer.optim.state_dict(), again.optimizer.optim.state_dict())
            check_equal(masters(pair), masters(again))

    run_ranks(rank, 2)


# ---- directories that are written again, buffers, and what a failure has left ----


def a_directory_is_replaced_whole(rank: int, world_size: int, folder: Path) -> None:
    pair = boost(ours, precision="fp32")
    unstepped, place = folder / "unstepped", folder / "optimizer"
    pair.booster.save_optimizer(pair.optimizer, str(unstepped), shard=True)
    pair.train(rank, 0, 1)
    pair.booster.save_optimizer(pair.optimizer, str(unstepped), shard=True)
    pair.booster.save_optimizer(pair.optimizer, str(place), shard=True, size_per_shard=SMALL)
    dist.barrier()
    assert (unstepped / "pytorch_optim.bin.index.json").exists()
    assert len(list(place.iterdir())) > 4
    dist.barrier()
    (place / "notes.txt").write_text("mine") if rank == 0 else None
    dist.barrier()
    pair.booster.save_optimizer(pair.optimizer, str(place), shard=True)
    dist.barrier()
    assert sorted(path.name for path in place.iterdir()) == [
        "notes.txt",
        "pytorch_optim-00001.bin",
        "pytorch_optim.bin.index.json",
        "pytorch_optim_group.bin",
    ]
    again = boost(ours, seed=1, precision="fp32")
    again.booster.load_optimizer(again.optimizer, str(place))
    check_equal(pair.state(), again.state())


class Counted(torch.nn.Module):
    """A layer with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.norm = torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)
        self.register_buffer("order", torch.arange(5))


def a_saved_model_has_the_first_rank_s_buffers(
    rank: int, world_size: int, folder: Path, shard: bool, use_async: bool
) -> None:
    def boosted() -> Pair:
        booster, model = Booster(plugin=ours(precision="fp32")), Counted()
        return Pair(booster, *booster.boost(model, sgd(model.parameters()))[:2])

    def filled(buffer: Tensor, of: int) -> Tensor:
        return (torch.arange(buffer.numel()).view(buffer.shape) + 7 * of + 1).to(buffer.dtype)

    pair, path = boosted(), str(folder / ("model" if shard else "model.pt"))
    for buffer in pair.model.unwrap().buffers():
        buffer.copy_(filled(buffer, rank))
    pair.booster.save_model(pair.model, path, shard=shard, use_async=use_async)
    pair.booster.checkpoint_io._sync_io()
    dist.barrier()
    again = boosted()
    again.booster.load_model(again.model, path)
    for name, buffer in again.model.unwrap().named_buffers():
        assert torch.equal(buffer, filled(buffer, 0)), name


class FailingAdamW(torch.optim.AdamW):
    """Fails in a step if it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise MemoryError("no memory")
        return super().step(closure)


def a_loaded_checkpoint_mends_what_a_failed_step_has_left(
    rank: int, world_size: int, folder: Path, shard: bool
) -> None:
    pair = boost(ours, lambda ps: FailingAdamW(ps, lr=0.1), stage=1, precision="fp32")

    def step() -> None:
        pair.booster.backward(sum(p.square().sum() for p in pair.model.parameters()), pair.optimizer)
        pair.optimizer.step()

    step()
    pair.optimizer.zero_grad()
    save(pair, folder, shard=shard)
    pair.optimizer.optim.fails = rank == 1
    with suppress(MemoryError):
        step()
    pair.optimizer.optim.fails = False
    pair.optimizer.zero_grad()
    load(pair, folder)
    step()


def test_what_is_saved_is_whole_and_of_its_moment(tmp_path: Path, subtests: pytest.Subtests) -> None:
    both = (an_asynchronous_save_has_the_values_of_its_moment, a_loaded_checkpoint_mends_what_a_failed_step_has_left)
    cases = [
        a_directory_is_replaced_whole,
        *((check, shard) for check in both for shard in (False, True)),
        *((a_saved_model_has_the_first_rank_s_buffers, *how) for how in ((False, False), (True, False), (True, True))),
    ]
    check_cases(subtests, 2, partial(in_folder, tmp_path), cases)
