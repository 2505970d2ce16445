"""The demo: its options, its training, and the command itself, alone and under torchrun."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowlevel_zero.demo import options
from lowlevel_zero.demo.__main__ import main
from lowlevel_zero.demo.model import GPT
from lowlevel_zero.demo.plain import PlainAdamW
from lowlevel_zero.demo.progress import optional
from lowlevel_zero.demo.ranks import Ranks
from lowlevel_zero.demo.training import History, learning_rate, validation_loss
from tests.support.ranks import run_ranks

SMALL = "--layers=2 --width=32 --heads=4 --context=32 --batch=4 --dtype=fp32 --device=cpu".split()  # noqa: SIM905

# All of them, but that importing torch 2.4's distributed.checkpoint leaves an empty directory to the interpreter.
WARNINGS = "default,ignore:Implicitly cleaning up:ResourceWarning"

# The options.


def test_defaults_exercise_layer_drop() -> None:
    chosen = options.parse([])
    assert chosen.stage == 2
    assert chosen.layer_drop > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: expected a whole number of at least 1, got '0'"),
        (["--layers", "two"], "--layers: expected a whole number of at least 1, got 'two'"),
        (["--layer-drop", "1"], "--layer-drop: expected a rate of at least 0 and below 1, got '1'"),
        (["--layer-drop", "nan"], "expected a rate of at least 0 and below 1, got 'nan'"),
        (["--lr", "0"], "--lr: expected a number above 0, got '0'"),
        (["--lr", "inf"], "--lr: expected a number above 0, got 'inf'"),
        (["--clip", "-1"], "--clip: expected a number of at least 0, got '-1'"),
        (["--seed", "-1"], "--seed: expected a whole number from 0"),
        (["--stage", "3"], "--stage: invalid choice: 3"),
        (["--dtype", "fp8"], "--dtype: invalid choice: 'fp8'"),
        (["--width", "100", "--heads", "6"], "--width 100 must be a multiple of twice --heads 6"),
        (["--stage", "0", "--dtype", "bf16"], "--dtype bf16 needs --stage 1 or 2"),
        (["--out", __file__], "must be a folder"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        options.parse(arguments)
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("flags\t\t: fpu amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\nbugs\t: bf16\n", False),
        ("Features\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_native_bf16(cpuinfo: str, native: bool) -> None:
    assert options.cpu_multiplies_bf16(cpuinfo) is native


def test_dtype_of_choice() -> None:
    cpu = torch.device("cpu")
    assert options.choose_dtype("fp16", cpu, stage=2) == "fp16"
    assert options.choose_dtype("auto", cpu, stage=0) == "fp32"
    assert options.choose_dtype("auto", cpu, stage=2) in ("fp32", "bf16")


def test_a_missing_package_is_named_with_the_remedy() -> None:
    with pytest.raises(SystemExit, match=r"needs no_such_package: pip install 'lowlevel-zero\[demo\]'"):
        optional("no_such_package")


# The training.


def test_learning_rate_rises_then_falls() -> None:
    shares = [learning_rate(100)(step) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == shares[9] == 1.0
    assert shares[9:] == sorted(shares[9:], reverse=True)
    assert shares[-1] == pytest.approx(0.05, abs=0.01)
    assert learning_rate(1)(0) == 1.0


def test_the_most_that_was_held_is_remembered() -> None:
    history = History()
    for gradients, states in ((8, 0), (2, 4)):
        history.remember_held({"gradients": gradients, "states": states})
    assert history.held == {"gradients": 8, "states": 4}


def _validate(rank: int, world_size: int) -> float:
    torch.manual_seed(1)
    model = GPT(layers=2, width=16, heads=2, context=12, layer_drop=0.9)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    windows = torch.randint(256, (10, 13))
    return validation_loss(model, windows, 3, Ranks(rank, world_size, torch.device("cpu")))


def test_validation_is_the_same_on_however_many_ranks() -> None:
    (alone,) = run_ranks(_validate, 1)
    assert run_ranks(_validate, 5) == pytest.approx([alone] * 5, abs=1e-6)


def test_plain_adamw_clips_and_counts() -> None:
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = PlainAdamW([{"params": [parameter]}], lr=0.1, betas=(0.9, 0.95), clip=1.0)
    optimizer.backward((parameter**2).sum() / 2)
    assert optimizer.memory_held() == {"parameters": 8, "gradients": 8, "masters": 0, "states": 0}
    optimizer.step()
    assert float(optimizer.get_grad_norm()) == pytest.approx(5.0)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], torch.tensor([0.06, 0.08]))
    assert optimizer.memory_held()["states"] == 8 + 8 + 4


# The command.


def _alone(rank: int, world_size: int, arguments: list[str]) -> None:
    main(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--stage", "0", "--clip", "0"],
        ["--stage", "1", "--dtype", "bf16"],
        ["--stage", "2", "--dtype", "fp16", "--accumulation", "2"],
    ],
    ids=" ".join,
)
def test_alone_without_torchrun(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowlevel_zero.demo.__main__.SAMPLE_BYTES", 20)
    run_ranks(_alone, 1, [*SMALL, "--steps", "3", "--out", str(tmp_path), *arguments], init=False)
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["world_size"] == 1
    assert all(math.isfinite(loss) for loss in told["train"])
    assert len(told["train"]) == 3


Runs = dict[int, tuple[Path, str]]  # by stage: the folder that it wrote, and what it said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The real command in both stages, at once: much of their time is waiting."""
    folders = {stage: tmp_path_factory.mktemp(f"stage-{stage}") for stage in (1, 2)}
    started = {stage: _launch(stage, out) for stage, out in folders.items()}
    return {stage: (folders[stage], _said(process)) for stage, process in started.items()}


def _launch(stage: int, out: Path) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    asked = ["--layer-drop=0.5", "--layer-drop-per-rank", "--steps=8", "--lr=1e-2"]
    return subprocess.Popen(
        [
            sys.executable,
            *launcher,
            "-m",
            "lowlevel_zero.demo",
            *SMALL,
            *asked,
            "--stage",
            str(stage),
            "--out",
            str(out),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": WARNINGS},
    )


def _said(process: subprocess.Popen[str]) -> str:
    try:
        said, complaints = process.communicate(timeout=50)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun tells its ranks
        said, complaints = process.communicate()
    assert process.returncode == 0, complaints
    assert "Warning" not in complaints
    return said


def _read(run: tuple[Path, str]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run[0] / "summary.json").read_text())
    return read


@pytest.mark.parametrize("stage", [1, 2])
def test_torchrun_trains(runs: Runs, stage: int) -> None:
    told = _read(runs[stage])
    losses = [*told["train"], *(loss for _, loss in told["validation"])]
    assert len(told["train"]) == 8
    assert all(math.isfinite(loss) for loss in losses)
    assert told["validation"][-1][1] < told["validation"][0][1] - 0.5
    assert told["world_size"] == 2
    assert told["layers_drawn"] == 16
    assert 0 < told["layers_dropped"] < 16


@pytest.mark.parametrize("stage", [1, 2])
def test_torchrun_reports(runs: Runs, stage: int) -> None:
    folder, said = runs[stage]
    told = _read(runs[stage])
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert str(folder / "loss.png") in said
    assert f"ZeRO-{stage}, measured" in said
    for name, loss in told["baselines"].items():
        assert f"{name} " in said
        assert f"{loss:.3f}" in said


def test_stages_agree(runs: Runs) -> None:
    first, second = _read(runs[1]), _read(runs[2])
    assert first["train"] == pytest.approx(second["train"], abs=1e-4)
    assert dict(first["validation"]) == pytest.approx(dict(second["validation"]), abs=1e-4)


def test_a_rank_holds_a_share(runs: Runs) -> None:
    """Of gradients too: in stage 1 a sum lives once a host, where ranks share memory."""
    first, second = _read(runs[1]), _read(runs[2])
    for told in (first, second):
        assert 0.4 * told["ddp"]["gradients"] < told["held"]["gradients"] < 0.6 * told["ddp"]["gradients"]
        assert told["held"]["masters"] == 0  # an fp32 model's are slices of its parameters
        assert told["held"]["states"] == pytest.approx(told["ddp"]["states"] / 2, rel=0.05)
        assert told["held"]["parameters"] == pytest.approx(told["ddp"]["parameters"], rel=0.05)
