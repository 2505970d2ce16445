"""The scripts of docs/trainers.md, as a reader runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.lives import alive
from tests.support.lightning import QUIET, QUIETLY, torchrun
from tests.support.ranks import run_cases
from tests.support.trainers import launched

pytestmark = QUIETLY

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
SCRIPTS = dict(re.findall(r"^## (\w+)\n(?:.*?)^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))


def run(rank: int, world_size: int, name: str, folder: str) -> set[str]:
    """The files that it has written."""
    before = os.getcwd()
    tqdm.monitor_interval = 0  # its thread would stay
    os.chdir(folder)
    with launched(rank, world_size) if name != "Lightning" else torchrun(rank, world_size):
        os.environ.update({f"PL_TRAINER_{name.upper()}": str(value) for name, value in QUIET.items()})
        names: dict[str, object] = {"__name__": "__main__"}
        exec(compile(SCRIPTS[name], f"{name}.py", "exec"), names)
        (optimizer,) = alive()
        assert isinstance(optimizer, LowLevelZeroOptimizer)
        assert optimizer.options.stage == 2
        assert optimizer.get_grad_norm()
    os.chdir(before)
    return set(os.listdir(folder))


def test_the_scripts_run(tmp_path: Path, subtests: pytest.Subtests) -> None:
    cases = [(name, str(tmp_path / name)) for name in SCRIPTS]
    assert SCRIPTS.keys() == {"accelerate", "transformers", "Lightning"}
    for _, folder in cases:
        Path(folder).mkdir()
    for (name, _), ran in run_cases(run, 2, cases):
        with subtests.test(name):
            assert all(ran.values())
    assert torch.load(tmp_path / "Lightning" / "last.ckpt", weights_only=True)["optimizer_states"]


@pytest.mark.soak
def test_one_runs_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS["accelerate"])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "state" / "optimizer_0").is_dir()
