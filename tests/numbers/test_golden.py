"""What must not change: checkpoints of format 1 load, consolidate and go on, and short runs have the same numbers.

``tests/golden/make.py`` made the files.
"""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lowlevel_zero.__main__ import main
from lowlevel_zero.checkpoint import latest, load_checkpoint, read_manifest
from tests.golden.checkpoints import EXTRA, FORMAT_1, SHARES, STEPS, WRITERS, Saved, build, plain
from tests.golden.curves import CURVES, NONE, OPTIMIZERS, RANKS, RUNS, Curve, Mistake, Run, curve_of, together
from tests.golden.model import Small, loss_of
from tests.support.checkpoints import differences
from tests.support.ranks import run_ranks


def golden(kind: str) -> dict[str, Any]:
    """What was held when the checkpoint was saved, and the masters after one more step."""
    whole: dict[str, Any] = torch.load(FORMAT_1 / f"{kind}.pt", weights_only=True)
    return whole


def compare(expected: dict[str, Any], got: dict[str, Any], at: str) -> list[str]:
    """Where two whole states differ. torch adds settings to groups and schedulers from time to time."""
    wrong = differences(expected["model"], got["model"], at=f"{at}: model")
    wrong += differences(expected["optimizer"]["state"], got["optimizer"]["state"], at=f"{at}: state")
    wrong += differences(known(expected["scheduler"], got["scheduler"]), got["scheduler"], at=f"{at}: scheduler")
    groups = zip(expected["optimizer"]["param_groups"], got["optimizer"]["param_groups"], strict=True)
    return wrong + [line for one, two in groups for line in differences(known(one, two), two, at=f"{at}: group")]


def known(expected: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """All that was saved, and what else there is now."""
    return {**got, **expected}


# ---- loading ----

# How far the masters may be off after one more step, which moves them by 0.01: sums in another order (measured: 3e-8),
# of gradients that were rounded to bf16 (7e-5). The mistakes below make it more than ten times as much.
TOLERANCE = {"fp32": 1e-6, "wrapped": 1e-6, "bf16": 2e-4}


def off(kind: str, masters: Tensor) -> float:
    later: Tensor = golden(kind)["later"]
    return (masters - later).abs().max().item()


def load_all(rank: int, world_size: int) -> list[str]:
    wrong = []
    for kind in WRITERS:
        for stage in (1, 2):
            at = f"{kind}, stage {stage}, {world_size} ranks"
            saved = Saved.start(build(kind, seed=5 + rank), stage)
            extra = load_checkpoint(FORMAT_1 / kind, saved.model, saved.optimizer, scheduler=saved.scheduler)
            wrong += differences(EXTRA, extra, at=f"{at}: extra")
            wrong += compare(golden(kind)["saved"], saved.whole(), at)
            saved.one_more(rank, world_size)
            if off(kind, saved.masters()) > TOLERANCE[kind]:
                wrong.append(f"{at}: one more step is off by {off(kind, saved.masters())}")
    return wrong


@pytest.fixture(scope="module")
def _compiler() -> None:
    """Imports torch's compiler once, not in every rank."""
    torch.compile(nn.Linear(1, 1))


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_format_1_loads_bit_for_bit_and_goes_on(world_size: int) -> None:
    assert run_ranks(load_all, world_size) == [[]] * world_size


@pytest.mark.usefixtures("_compiler")
def test_format_1_loads_into_what_is_wrapped_otherwise() -> None:
    """The names in one of the two have wrappers' attributes in them."""

    def load(rank: int, world_size: int) -> list[str]:
        wrong = []
        for kind, other in (("wrapped", "fp32"), ("fp32", "wrapped")):
            saved = Saved.start(build(other, seed=5 + rank))
            load_checkpoint(FORMAT_1 / kind, saved.model, saved.optimizer, scheduler=saved.scheduler)
            wrong += compare(golden(kind)["saved"], saved.whole(), f"{kind} into {other}")
        return wrong

    assert run_ranks(load, 2) == [[]] * 2
    assert any("_orig_mod" in name for name in read_manifest(FORMAT_1 / "wrapped").tensors)


def test_whole_state_dicts_of_that_time_load() -> None:
    def load(rank: int, world_size: int) -> list[str]:
        wrong = []
        for kind in ("fp32", "bf16"):
            expected = golden(kind)["saved"]
            saved = Saved.start(build(kind, seed=5 + rank))
            saved.model.load_state_dict(expected["model"])
            saved.optimizer.load_state_dict(expected["optimizer"])
            saved.scheduler.load_state_dict(expected["scheduler"])
            wrong += compare(expected, saved.whole(), kind)
            saved.one_more(rank, world_size)
            wrong += [] if off(kind, saved.masters()) <= TOLERANCE[kind] else [f"{kind}: one more step"]
        return wrong

    assert run_ranks(load, 2) == [[]] * 2


def test_the_tolerance_of_one_more_step_would_show() -> None:
    def skipped(saved: Saved) -> None:
        pass

    def half_the_batch(saved: Saved) -> None:
        """One of two ranks was left out."""
        saved.one_more(0, 2)

    def without_state(saved: Saved) -> None:
        saved.optimizer.load_state_dict({**saved.optimizer.state_dict(), "state": {}})
        saved.one_more(0, 1)

    def load(rank: int, world_size: int) -> list[str]:
        missed = []
        for kind in WRITERS:
            for mistake in (skipped, half_the_batch, without_state):
                saved = Saved.start(build(kind))
                load_checkpoint(FORMAT_1 / kind, saved.model, saved.optimizer, scheduler=saved.scheduler)
                mistake(saved)
                if off(kind, saved.masters()) < 10 * TOLERANCE[kind]:
                    missed.append(f"{kind}: {mistake.__name__}: {off(kind, saved.masters())}")
        return missed

    assert run_ranks(load, 1) == [[]]


def test_what_made_it_is_recorded() -> None:
    made_by = json.loads((FORMAT_1 / "made_by.json").read_text())
    for kind, world_size in WRITERS.items():
        manifest = read_manifest(FORMAT_1 / kind)
        assert (manifest.version, manifest.torch) == (made_by["lowlevel_zero"], made_by["torch"])
        assert (manifest.world_size, manifest.stage) == (world_size, 2)
    assert latest(FORMAT_1) == FORMAT_1 / list(WRITERS)[-1]


@pytest.mark.parametrize("kind", WRITERS)
def test_format_1_consolidates(kind: str, tmp_path: Path) -> None:
    """To the same tensors, with which plain torch goes on as the run did."""
    main(["consolidate", str(FORMAT_1 / kind), str(tmp_path / "whole")])
    tensors = {plain(name): value for name, value in load_file(tmp_path / "whole" / "model.safetensors").items()}
    state = torch.load(tmp_path / "whole" / "optimizer.pt", weights_only=True)
    expected = golden(kind)["saved"]
    stateless = {name: value for name, value in expected["model"].items() if isinstance(value, Tensor)}
    assert differences(stateless, tensors) == []
    assert compare(expected, {**expected, "optimizer": state}, kind) == []
    if kind == "fp32":
        assert off(kind, plain_step(tensors, state)) <= TOLERANCE[kind]


def plain_step(tensors: dict[str, Tensor], state: dict[str, Any]) -> Tensor:
    """One more step by plain torch; the masters end to end."""
    model = Small(seed=5)
    model.load_state_dict(tensors, strict=False)  # but for the counter
    groups = [[p for p in model.parameters() if p.dim() < 2], [p for p in model.parameters() if p.dim() == 2]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    optimizer.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    torch.stack([loss_of(model, set(), STEPS, 0, share) for share in range(SHARES)]).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


# ---- curves ----


def tolerance(run: Run) -> float:
    """Of sums in another order in fp32 (measured: 1.2e-7), else of one rounding of every gradient on its way.

    Half an epsilon: of bf16 4e-3 (measured, with fp32 on the way instead: 3e-3), of fp16 5e-4 (3e-4).
    """
    return 1e-6 if run.dtype == "float32" else torch.finfo(getattr(torch, run.dtype)).eps / 2


def differing(run: Run, expected: dict[str, list[float]], got: Curve) -> set[str]:
    """Which of losses and norms aren't the golden ones."""
    pairs = {"losses": (expected["losses"], got.losses), "norms": (expected["norms"], got.norms)}
    return {what for what, (one, two) in pairs.items() if two != pytest.approx(one, rel=tolerance(run), abs=0)}


# Each with what shows it. By AdamW a factor of all gradients changes no step, and where norms are clipped by neither.
MISTAKES = {
    "one rank left out": (Mistake(rank_left_out=True), {"losses", "norms"}),
    "factor 2": (Mistake(factor=2.0), {"norms"}),
    "one micro-batch lost": (Mistake(micro_batch_lost=True), {"losses", "norms"}),
    "a step skipped": (Mistake(step_skipped=True), {"losses", "norms"}),
    "clipping forgotten": (Mistake(clipping_forgotten=True), {"losses", "norms"}),
    "zeros for what is dropped": (Mistake(zeros_for_dropped=True), {"norms"}),
}


def mistakes_of(run: Run) -> dict[str, tuple[Mistake, set[str]]]:
    """Those that it can make."""
    can = {"one micro-batch lost": run.micro_batches > 1, "clipping forgotten": run.clip > 0}
    can["zeros for what is dropped"] = run.drop
    return {name: each for name, each in MISTAKES.items() if can.get(name, True)}


@pytest.fixture(scope="module")
def curves() -> dict[tuple[Run, str, str], Curve]:
    """Of each run by each optimizer: as it should be, and with each mistake."""

    def train(rank: int, world_size: int) -> dict[tuple[Run, str, str], Curve]:
        ways = {run: {"": (NONE, set()), **mistakes_of(run)} for run in RUNS}
        return {
            (run, optimizer, name): curve_of(rank, world_size, run, optimizer, mistake)
            for run in RUNS
            for optimizer in OPTIMIZERS
            for name, (mistake, _) in ways[run].items()
        }

    ranks = run_ranks(train, RANKS)
    assert all(curve.norms == ranks[1][which].norms for which, curve in ranks[0].items())
    return {which: together([each[which] for each in ranks]) for which in ranks[0]}


GOLDEN_CURVES = {Run(**each["run"]): each for each in json.loads(CURVES.read_text())["runs"]}


def test_every_run_has_its_curves() -> None:
    assert list(GOLDEN_CURVES) == RUNS
    rows = [(run.stage, run.dtype, run.micro_batches, run.drop, run.clip) for run in RUNS]
    for one, other in combinations(zip(*rows, strict=True), 2):
        assert set(zip(one, other, strict=True)) == set(product(one, other))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.label)
def test_curves_are_the_golden_ones(run: Run, optimizer: str, curves: dict[tuple[Run, str, str], Curve]) -> None:
    expected = GOLDEN_CURVES[run][optimizer]
    assert differing(run, expected, curves[run, optimizer, ""]) == set(), (expected, curves[run, optimizer, ""])
    for name, (_, shown_by) in mistakes_of(run).items():
        assert shown_by <= differing(run, expected, curves[run, optimizer, name]), name
