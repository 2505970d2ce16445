"""The scripts of docs/trainers.md, as a reader runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
SCRIPTS = re.findall(r"^## (\w+)\n(?:.*?)^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("script", [pytest.param(script, id=trainer) for trainer, script in SCRIPTS])
def test_the_scripts_run_under_torchrun(script: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} > {"train.py"}
