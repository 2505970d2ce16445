"""Two hosts, which are network namespaces of this machine: links that are gone for a while or for good, hosts that die.

And the benchmark that measures over such links runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.network import missing

ROOT = Path(__file__).parents[2]
WHY = missing()
STEPS, TIMEOUT = 40, 15

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300), pytest.mark.skipif(bool(WHY), reason=WHY)]


def told(fault: str) -> dict[int, list[dict[str, Any]]]:
    """What each rank told of a run to which ``fault`` happened after the first steps."""
    command = [sys.executable, "-m", "tests.support.hosts", fault, str(STEPS), str(TIMEOUT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    return {rank: [line for line in lines if line["rank"] == rank] for rank in (0, 1)}


@pytest.fixture(scope="module")
def unharmed() -> dict[int, list[dict[str, Any]]]:
    return told("nothing")


def test_a_link_that_is_gone_for_seconds_changes_nothing(unharmed: dict[int, list[dict[str, Any]]]) -> None:
    harmed = told("interrupt")
    for rank, lines in unharmed.items():
        assert len(lines) == STEPS + 1
        assert [line.get("loss", line.get("sum")) for line in harmed[rank]] == [
            line.get("loss", line.get("sum")) for line in lines
        ]
    pauses = [later["at"] - line["at"] for line, later in zip(harmed[0], harmed[0][1:], strict=False)]
    assert max(pauses) > 4


def test_both_ranks_end_in_time_and_name_the_other_where_the_link_is_gone_for_good() -> None:
    for rank, lines in told("cut").items():
        assert f"nothing has come from rank {1 - rank} within the process group's timeout" in lines[-1]["message"]
        assert lines[-1]["at"] - lines[-2]["at"] < TIMEOUT + 5


@pytest.mark.parametrize(
    ("fault", "says", "within"),
    [
        ("kill", "nothing has come from rank 1 within the process group's timeout", TIMEOUT + 5),
        ("crash", "lost the connection to rank 1, whose end isn't seen from this host", 10),
    ],
)
def test_a_host_that_dies_is_named_by_the_other(fault: str, says: str, within: float) -> None:
    lines = told(fault)[0]
    assert says in lines[-1]["message"]
    assert lines[-1]["at"] - lines[-2]["at"] < within


def test_the_benchmark_runs_over_a_link_and_counts_its_bytes(tmp_path: Path) -> None:
    out = tmp_path / "hosts.json"
    turns = ["--size", "tiny", "--rounds", "1", "--steps", "4", "--warm-up", "4", "--patience", "0"]
    names = ["ours-1", "ours-2", "ours-2-bf16"]
    command = [sys.executable, "-m", "benchmarks.hosts", *turns, "--contestants", *names, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["contestants"]
    sent = {name: row["sent by a host"] for name, row in rows.items()}
    for name in ("ours-1", "ours-2"):
        assert rows[name]["told by a host"] < sent[name] < 2 * rows[name]["told by a host"]  # tiny buffers: headers
    assert sent["ours-2-bf16"] < sent["ours-2"]
