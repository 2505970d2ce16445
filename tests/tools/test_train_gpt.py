"""The GPT example: what it refuses, trains, reports and saves; killed at any moment and resumed, it ends the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import report
import train_gpt
from lowlevel_zero.checkpoint import latest
from options import parse
from tests.support.ranks import run_ranks

SMALL = "--layers=2 --width=32 --heads=4 --context=32 --batch=4 --dtype=fp32 --lr=1e-2".split()  # noqa: SIM905
SOURCES = train_gpt.library_sources()[:48]

Told = dict[str, Any]


def train(out: Path, *arguments: str) -> None:
    """The example, on a rank that has its process group, on a part of its text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *_, **__: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        patch.setattr(train_gpt, "library_sources", lambda: SOURCES)
        patch.setattr(report, "SAMPLE_BYTES", 20)
        train_gpt.main([*SMALL, "--out", str(out), *arguments])


def told(out: Path) -> Told:
    read: Told = json.loads((out / "summary.json").read_text())
    return read


# What it refuses.


MISTAKES = {
    "--steps 0": "--steps: expected a number of at least 1, got 0",
    "--layer-drop 1": "--layer-drop: expected a rate below 1, got 1.0",
    "--lr inf": "got inf",
    "--save-every -1": "--save-every: expected a number of at least 0, got -1",
    "--width 100 --heads 6": "--width 100 must be a multiple of --heads 6",
}


def test_mistakes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in MISTAKES.items():
        with pytest.raises(SystemExit, match="2"):
            parse(arguments.split())
        assert message in capsys.readouterr().err
    assert parse(["--out", "mine"]).out == Path("mine")


def test_a_context_longer_than_the_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"0123456789")
    assert train_gpt.windows_of([tmp_path / "text"], 9).tolist() == [list(b"0123456789")]
    with pytest.raises(ValueError, match="--context 10 needs a longer text than 10 bytes"):
        train_gpt.windows_of([tmp_path / "text"], 10)


def test_a_byte_sees_those_before_it_alone_and_a_dropped_layer_gets_no_gradient() -> None:
    model = train_gpt.GPT(layers=3, width=16, heads=2, context=13)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # from the identity at which layers start
    text = torch.randint(256, (1, 13))
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    difference = (model(text) - model(changed)).abs().amax(-1)[0]
    assert difference[:7].max() < 1e-6
    assert difference[7:].min() > 1e-4
    keep = [True, False, True]
    train_gpt.byte_loss(model, text, keep).backward()
    assert [all(p.grad is not None for p in layer.parameters()) for layer in model.layers] == keep


# Training.


REPORTED = ["--steps=8", "--layer-drop=0.5", "--layer-drop-per-rank"]


def check_reported(out: Path, stdout: str) -> None:
    run = told(out)
    assert len(run["train"]) == 8
    assert run["world_size"] == 2
    assert run["validation"][-1][1] < run["validation"][0][1] - 0.5
    assert 0 < run["layers_dropped"] < 16
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    for part in ("ZeRO-2, measured", "states", "together", str(out / "loss.png"), "8 steps in"):
        assert part in stdout
    for name, loss in run["ngrams"].items():
        assert f"{name} " in stdout
        assert f"{loss:.3f}" in stdout


def test_it_trains_and_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(lambda rank, world_size: train(tmp_path, *REPORTED), 2)
    shown = capfd.readouterr()
    assert "8/8" in shown.err, "the progress bar"
    check_reported(tmp_path, shown.out)


@pytest.mark.soak
def test_the_command_trains_and_reports(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, train_gpt.__file__, *SMALL, *REPORTED]
    # All warnings, but that torch 2.4's distributed.checkpoint leaves an empty directory to the interpreter when it is
    # imported, and what it does, up to 2.5, when it writes.
    of_torch = "ignore:Implicitly cleaning up:ResourceWarning,ignore:TypedStorage is deprecated:UserWarning"
    warnings = {"PYTHONWARNINGS": f"default,{of_torch}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **warnings},
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "8/8" in done.stderr, "the progress bar"
    check_reported(tmp_path, done.stdout)


# Resuming.

STEPS, EVERY, KEEP = 10, 2, 2
ASKED = [f"--steps={STEPS}", f"--save-every={EVERY}", f"--keep={KEEP}", "--layer-drop=0.3", "--accumulation=2"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing has interrupted."""
    out = tmp_path_factory.mktemp("whole")
    run_ranks(lambda rank, world_size: train(out, *ASKED), 2)
    return out


def same_run(run: Told, expected: Told) -> None:
    """Bit for bit: JSON has all digits."""
    for what in ("train", "validation", "sample", "layers_dropped"):
        assert run[what] == expected[what], what


def saved(out: Path) -> int:
    """The steps of the newest checkpoint."""
    newest = latest(out / "checkpoints")
    return int(newest.name.split("-")[1].split(".")[0]) if newest else 0


def start(rank: int, meet: Path, out: Path, arguments: list[str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    train(out, *ASKED, *arguments)


def killed_after(step: int, out: Path, *arguments: str) -> None:
    """Start two ranks, and kill them with SIGKILL at any moment soon after a checkpoint of ``step`` or more."""
    fork, meet = multiprocessing.get_context("fork"), out.with_name(f"meet-{time.monotonic_ns()}")
    ranks = [fork.Process(target=start, args=(rank, meet, out, list(arguments)), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        deadline = time.monotonic() + 60
        while saved(out) < step:
            assert all(process.is_alive() for process in ranks), "a rank ended by itself"
            assert time.monotonic() < deadline, f"no checkpoint of step {step}"
            time.sleep(0.001)
        time.sleep(random.uniform(0.0, 0.03))  # in a step, in a save, between two renames
    finally:
        for process in random.sample(ranks, 2):
            process.kill()
        for process in ranks:
            process.join()


@pytest.mark.soak
def test_killed_again_and_again_it_ends_the_same(tmp_path: Path, whole_run: Path) -> None:
    out = tmp_path / "out"
    for step in (EVERY, 2 * EVERY, 4 * EVERY):
        killed_after(step, out, "--resume")
        assert not (out / "summary.json").exists(), "it was killed before its end"
    run_ranks(lambda rank, world_size: train(out, *ASKED, "--resume"), 2)
    same_run(told(out), told(whole_run))
    assert len(told(out)["train"]) == STEPS
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert left == [f"step-{STEPS - EVERY}", f"step-{STEPS}"]


def test_another_number_of_ranks_in_the_other_stage_goes_on(tmp_path: Path, whole_run: Path) -> None:
    out = tmp_path / "out"
    killed_after(2 * EVERY, out)
    done = saved(out)
    run_ranks(lambda rank, world_size: train(out, *ASKED, "--resume", "--stage=1"), 3)
    run, expected = told(out), told(whole_run)
    assert run["train"][:done] == expected["train"][:done]
    assert len(run["train"]) == STEPS
    assert run["world_size"] == 3
    assert [step for step, _ in run["validation"]] == [step for step, _ in expected["validation"]]
    assert run["validation"][-1][1] < run["validation"][0][1] - 0.5


def test_what_is_done_is_not_done_again_and_another_run_not_continued(tmp_path: Path, whole_run: Path) -> None:
    out = shutil.copytree(whole_run, tmp_path / "out")

    def rank(rank: int, world_size: int) -> str:
        with pytest.raises(ValueError, match=f"--out: .*/step-{STEPS} is of an earlier run: pass --resume"):
            train(out, *ASKED)
        train(out, *ASKED, "--resume")
        with pytest.raises(ValueError, match="--resume") as refused:
            train(out, *ASKED, "--resume", "--lr=0.5")
        return str(refused.value)

    for message in run_ranks(rank, 2):
        assert f"step-{STEPS} is of a run with " in message
        assert "'lr': 0.01" in message
        assert "give the same, or another --out" in message
    same_run(told(out), told(whole_run))
    assert told(out)["seconds"] == told(whole_run)["seconds"]
