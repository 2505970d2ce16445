"""Runs that lose processes come back from their newest checkpoint under torchrun, and train as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.mortal import AGENT_DIES, BACKWARD, SAVE, Task, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
# A store that outlives a start has the addresses of the ranks that were.
FRESH_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **FRESH_STORES}


def torchrun(task: Task, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--module", "tests.support.mortal"]
    env = {**os.environ, **ENVIRONMENT, **environment}
    return subprocess.Popen([*command, json.dumps(task)], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)


def finish(process: subprocess.Popen[str], timeout: float = 300.0) -> str:
    """Its complaints, when it has come to its end all the same."""
    with process:
        try:
            complaints = process.communicate(timeout=timeout)[1]
        finally:
            process.terminate()  # torchrun takes its ranks along
    assert process.returncode == 0, complaints
    return complaints


def uninterrupted(task: Task, folder: Path, world_size: int = 2) -> list[float]:
    """The losses of the same run without a death."""
    folder.mkdir()
    task = task._replace(folder=str(folder), deaths=(), killed=0)
    run_ranks(lambda rank, world_size: train(task, 0), world_size, timeout=100.0)
    return [line["loss"] for line in task.told()]


def restarts(task: Task) -> list[list[int]]:
    """The steps that were done in each start that came to one."""
    steps: dict[int, list[int]] = {}
    for line in task.told():
        steps.setdefault(line["start"], []).append(line["step"])
    return list(steps.values())


def check(task: Task, losses: list[float]) -> None:
    """Every step that was ever done had the loss that it should have, and no start lost more than its last steps."""
    for line in task.told():
        assert line["loss"] == losses[line["step"] - 1], line
    starts = restarts(task)
    for before, after in pairwise(starts):
        # Killed after the last step and within the save, it has done one save's worth of steps in vain.
        assert before[-1] - task.every < after[0] <= before[-1] + 1
        assert (after[0] - 1) % task.every == 0
    assert starts[-1][-1] == task.steps


@pytest.mark.timeout(400)
def test_a_killed_run_comes_back_by_itself_and_its_losses_are_the_same(tmp_path: Path) -> None:
    deaths = ((1, BACKWARD, 6), (0, SAVE, 2))
    task = Task(str(tmp_path), 20, 4, deaths)
    complaints = finish(torchrun(task, "--standalone", "--nproc-per-node=2", "--max-restarts=2"))
    assert complaints.count("(exitcode: -9)") == 2
    assert restarts(task) == [[*range(1, 6)], [*range(5, 13)], [*range(9, 21)]]
    check(task, uninterrupted(task, tmp_path / "whole"))


@pytest.mark.timeout(900)
def test_killed_at_twenty_random_moments_it_loses_nothing_but_the_steps_since_the_last_save(tmp_path: Path) -> None:
    task = Task(str(tmp_path), 2000, 10, killed=20)
    complaints = finish(torchrun(task, "--standalone", "--nproc-per-node=2", "--max-restarts=20"), timeout=800.0)
    assert complaints.count("(exitcode: -9)") == 20
    check(task, uninterrupted(task, tmp_path / "whole"))


@pytest.mark.timeout(400)
def test_a_run_that_loses_a_host_goes_on_with_those_that_are_left(tmp_path: Path) -> None:
    """Each torchrun stands for a host; one is killed, and its rank with it."""
    task = Task(str(tmp_path), 20, 4, agent_dies=10)
    # They meet in a file, which needs no port that somebody else may take meanwhile.
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={tmp_path / 'meeting'}", "--rdzv-id=hosts"]
    size = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    patience = "store_type=file,last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=5"
    stays = torchrun(task, *meet, *size, f"--rdzv-conf={patience}")
    goes = torchrun(task, *meet, *size, f"--rdzv-conf={patience}", **{AGENT_DIES: "1"})
    with goes:
        complaints = finish(stays)
        goes.kill()
    assert goes.returncode == -9
    assert "LostRank" in complaints
    told = task.told()
    assert [line["step"] for line in told] == [*range(1, 10), *range(9, 21)]
    assert [line["ranks"] for line in told] == [2] * 9 + [1] * 12
    losses = uninterrupted(task, tmp_path / "whole")
    assert [line["loss"] for line in told[:9]] == losses[:9]
    assert [line["loss"] for line in told[9:]] == pytest.approx(losses[8:], rel=1e-5)
