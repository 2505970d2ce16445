"""Two hosts, which are network namespaces of this machine: links that are gone for a while or for good, hosts that die.

And the benchmark that measures over such links runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support import over_link
from tests.support.mortal import BACKWARD, Task, train
from tests.support.network import missing
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
WHY = missing()
STEPS, TIMEOUT = 30, 15
HOSTS = {0: (0, 1), 1: (2, 3)}  # their ranks

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300), pytest.mark.skipif(bool(WHY), reason=WHY)]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


def told(*faults: str) -> dict[int, list[dict[str, Any]]]:
    """What each rank told of a run to which ``faults`` happened."""
    done = run("tests.support.hosts", ",".join(faults), str(STEPS), str(TIMEOUT))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr
    return {rank: [line for line in lines if line["rank"] == rank] for host in HOSTS.values() for rank in host}


def test_a_link_that_loses_packets_and_is_gone_for_seconds_and_a_slow_rank_change_nothing() -> None:
    """Beside a run on one host, through shared memory."""
    losses = run_ranks(lambda rank, world_size: over_link.train(STEPS, TIMEOUT, pause=0.0), 4)
    for rank, lines in told("lose", "interrupt", "slow").items():
        *steps, end = lines
        assert [line.get("loss") for line in steps] == losses[rank]
        assert end["sent_again"] > STEPS  # packets
        pauses = sorted(later["at"] - line["at"] for line, later in pairwise(steps))
        assert pauses[-1] > 4  # the link was gone
        assert pauses[-4] > 0.5  # the slow rank's steps


@pytest.mark.parametrize(
    ("fault", "ends", "says", "within"),
    [
        ("cut", (0, 1), "nothing has come from rank {} within the process group's timeout", TIMEOUT + 5),
        ("crash", (0,), "lost the connection to rank {}, whose end isn't seen from this host", 10),
    ],
)
def test_every_rank_that_is_left_ends_in_time_and_names_one_of_the_host_that_is_gone(
    fault: str, ends: tuple[int, ...], says: str, within: float
) -> None:
    lines = told(fault)
    for host in ends:
        for rank in HOSTS[host]:
            last = lines[rank][-1]
            assert any(says.format(other) in last["message"] for other in HOSTS[1 - host]), last
            assert last["at"] - lines[rank][-2]["at"] < within


def test_a_rank_that_is_killed_and_a_host_that_dies_come_back_from_the_newest_checkpoint(tmp_path: Path) -> None:
    task = Task(str(tmp_path), 400, 10, deaths=((1, BACKWARD, 55),))
    done = run("tests.support.hosts", "come_back", json.dumps(task))
    assert done.returncode == 0, done.stderr
    lines = task.told()
    turns = [line["step"] for before, line in pairwise(lines) if line["step"] <= before["step"]]
    assert len(turns) == 2
    assert turns[0] == 51
    whole = task._replace(folder=str(tmp_path / "whole"), deaths=())
    (tmp_path / "whole").mkdir()
    run_ranks(lambda rank, world_size: train(whole, 0), 2, timeout=100.0)
    losses = [line["loss"] for line in whole.told()]
    assert {line["step"] for line in lines} == set(range(1, task.steps + 1))
    assert all(line["loss"] == losses[line["step"] - 1] for line in lines)


def test_the_benchmark_counts_the_bytes_that_cross_and_half_of_them_do_with_replicas(tmp_path: Path) -> None:
    out = tmp_path / "hosts.json"
    shape = ["--ranks", "2", "--rate", "10gbit", "--delay", "1", "--size", "6m"]
    turns = ["--rounds", "1", "--steps", "2", "--warm-up", "3", "--patience", "0"]
    names = ["ours-1", "ours-2", "ours-2-bf16", "ours-2-hybrid"]
    done = run("benchmarks.hosts", *shape, *turns, "--contestants", *names, "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["contestants"]
    sent = {name: row["sent by a host"] for name, row in rows.items()}
    for name in names:
        assert sent[name] == pytest.approx(rows[name]["told by a host"], rel=0.03), name
    assert sent["ours-2-hybrid"] < 0.51 * sent["ours-2"]
    assert sent["ours-2-bf16"] < sent["ours-2"] < sent["ours-1"]
