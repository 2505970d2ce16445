"""The Llama example: the command under torchrun, and a run that another number of ranks resumes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tests.support.boosting  # noqa: F401  # ColossalAI, before ranks are forked
import train_llama_booster
from tests.support.ranks import run_ranks


@pytest.mark.soak
def test_the_command_runs(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, train_llama_booster.__file__, "--steps", "2", "--save", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "step 1: loss 5." in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "optimizer", "scheduler.pt"]


def test_a_run_is_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def rank(rank: int, world_size: int, port: int, arguments: list[str]) -> None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="localhost", GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo")
        train_llama_booster.main(arguments)

    run_ranks(rank, 2, free_port(), ["--steps", "4", "--save", str(tmp_path)], init=False)
    run_ranks(rank, 1, free_port(), ["--steps", "1", "--resume", str(tmp_path), "--stage", "1"], init=False)
    first, resumed = capfd.readouterr().out.splitlines()
    assert first.startswith("step 1: loss 5.")
    assert resumed.startswith("step 5: loss 4.")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return int(listening.getsockname()[1])


def test_it_says_how_to_start_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        train_llama_booster.main([])
    assert "torchrun --standalone --nproc-per-node 2 examples/train_llama_booster.py" in capsys.readouterr().err
