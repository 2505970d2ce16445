"""On a GPU: the oracle's numbers, on one rank over NCCL, on two that share it over gloo, and on one a GPU over NCCL.

Collected where there is a GPU (see ``conftest.py``), and those of several GPUs where there are several. Ranks are
forked, so nothing may have touched the device before: run it in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.places import EXTRAS, GPUS, on_device, over_gloo, over_gpus, over_nccl
from tests.support.grid import Grid
from tests.support.judging import check_run, check_share
from tests.support.numbers import DROPS, STAGES, joined, share_of
from tests.support.oracle import Result, Run, adamw, build, emulate, train_rank, train_sharded

PLACES: dict[str, Callable[..., None]] = {"alone": over_nccl, "sharing": partial(over_gloo, 2)}
if GPUS > 1:
    PLACES["a GPU each"] = over_gpus

WAYS: dict[str, dict[str, Any]] = {
    "adamw-clip": {"optimizer": adamw, "clip": 0.3},
    "thrice-drop": {"micro_batches": 3, "drop": DROPS["different"]},
    "bare-no_sync": {"micro_batches": 2, "bare": True, "no_sync": True},
}


def fp32_numbers(rank: int, world_size: int, run: Run) -> None:
    run = on_device(replace(run, world_size=world_size))
    check_run(run, [train_sharded(rank, world_size, run)], 1e-5, 1e-4)


def sixteen_bit_numbers(rank: int, world_size: int, run: Run) -> None:
    run = replace(run, world_size=world_size)
    trained = train_rank(rank, world_size, on_device(run))
    slices: list[Any] = [None] * world_size
    own = {name: master.cpu() for name, master in trained.masters().items()}
    if world_size > 1:
        dist.all_gather_object(slices, own)
    else:
        slices = [own]
    share = max(share_of(run.dtype, world_size), 1e-5)
    masters = joined(slices, dict(build(run).named_parameters()))
    check_share(run, [(masters, trained.norms)], share, by=emulate_on_device)


def emulate_on_device(run: Run) -> Result:
    masters, norms = emulate(on_device(run))
    return {name: master.cpu() for name, master in masters.items()}, norms


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_fp32_is_the_oracle_s(stage: str, way: str, extra: str, place: str) -> None:
    run = Run(steps=5, **WAYS[way]).with_options(**STAGES[stage], **EXTRAS[extra], reduce_bucket_size=50)
    PLACES[place](fp32_numbers, run)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stage", STAGES)
def test_sixteen_bits_are_the_oracle_s(stage: str, dtype: str, extra: str, place: str) -> None:
    run = Run(steps=5, dtype=getattr(torch, dtype), micro_batches=2, clip=0.3)
    run = run.with_options(**STAGES[stage], **EXTRAS[extra], reduce_bucket_size=50, initial_scale=256.0)
    PLACES[place](sixteen_bit_numbers, run)


def over_two_levels(rank: int, world_size: int, run: Run, form: str) -> None:
    grid = Grid.of(rank, (world_size // 2, 2))
    fp32_numbers(rank, world_size, run.with_options(**grid.options(form)))


@pytest.mark.parametrize("form", ["pair", "hybrid"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_levels_are_the_oracle_s(stage: str, form: str) -> None:
    run = Run(steps=5, **WAYS["thrice-drop"]).with_options(**STAGES[stage], reduce_bucket_size=50)
    over_gloo(2, over_two_levels, run, form)
    if GPUS > 1:
        over_gpus(over_two_levels, run, form, ranks=GPUS // 2 * 2)
