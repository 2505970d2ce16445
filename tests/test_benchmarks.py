"""The benchmarks run, and everybody in them trains the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import collectives, report, step
from benchmarks.peers import CONTESTANTS

# Ranks inherit the tests' filters; what a peer is warned of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")
ROOT = Path(__file__).parents[1]
SMALL = "--size=tiny --rounds=1 --steps=1 --warm-up=3".split()  # noqa: SIM905


def _measure(folder: Path, *arguments: str) -> dict[str, Any]:
    out = folder / "step.json"
    step.main([*SMALL, f"--out={out}", *arguments])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("arguments", [["--dtype=fp32"], ["--dtype=bf16", "--micro-batches=2"]])
def test_all_contestants_train_alike(tmp_path: Path, arguments: list[str]) -> None:
    found = _measure(tmp_path, *arguments)
    baseline = found["contestants"][found["baseline"]]
    assert len(found["contestants"]) > 7
    tolerance = step.TOLERANCE[found["run"]["dtype"]]
    for name, row in found["contestants"].items():
        if CONTESTANTS[name].alike:
            assert row["losses"] == pytest.approx(baseline["losses"], rel=tolerance), name
            assert row["losses"][-1] < row["losses"][0], name
        assert row["seconds"]["whole"]["median"] > 0
        before, after = (sum(row[f"held after {moment}"].values()) for moment in ("backward", "step"))
        # So small a model's wires are larger than what is kept of them, and a gather has more than a reduction.
        assert before >= after - row["held after step"].get("wires", 0) > 0, name
    assert baseline["ratios"]["whole"]["median"] == 1
    assert found["odd"] == []
    assert (tmp_path / "step.png").exists()


def test_the_command_runs_one_alone(tmp_path: Path) -> None:
    out = tmp_path / "alone.json"
    command = [sys.executable, "-m", "benchmarks.step", *SMALL, "--alone=ours-2", "--keep=no", f"--out={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "peak RSS" in done.stdout
    (row,) = json.loads(out.read_text())["contestants"].values()
    assert row["ratios"] is None
    assert all(peak >= base > 0 for peak, base in row["peak rss"])


def _row(seconds: list[float], losses: list[float] | None = None) -> dict[str, Any]:
    return {"rounds": [dict.fromkeys(report.PHASES, second) for second in seconds], "losses": losses or [1.0]}


def test_ratios_are_taken_within_a_round_to_whichever_contestant() -> None:
    rows = {"ddp": _row([1, 2, 4]), "zro": _row([3, 2, 4]), "ours-2": _row([2, 2, 2])}
    report.relate(rows, "zro")
    assert rows["ours-2"]["ratios"]["whole"] == {"median": 2 / 3, "least": 0.5, "most": 1}
    assert report.ratio(rows["ours-2"], rows["ddp"]) == (1, 0.5, 2)
    report.relate(rows, "fsdp2")
    assert rows["ours-2"]["ratios"] is None


@pytest.mark.parametrize("losses", [[2.0, 1.9], [2.0, float("nan")]])
def test_a_contestant_that_trains_something_else_is_named(losses: list[float]) -> None:
    rows = {"ddp": _row([1], [2.0, 1.8]), "zro": _row([1], [2.0, 1.8]), "ours-2": _row([1], losses), "floor": _row([1])}
    (line,) = report.strangers(rows, "ddp", 1e-5)
    assert line.startswith("ours-2 trains something else")


def test_unknown_contestants_are_named() -> None:
    with pytest.raises(ValueError, match=r"expected contestants among ddp, .*, got 'horovod'"):
        step.main([*SMALL, "--contestants", "horovod"])


def test_collectives_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "collectives.json"
    collectives.main(["--world-sizes=2", "--elements=10", "--rounds=1", f"--out={out}"])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["collective"], row["dtype"]) for row in rows] == [
        (name, dtype) for name in collectives.COLLECTIVES for dtype in ("fp32", "bf16")
    ]
    assert all(row["ratios"][way]["median"] > 0 for row in rows for way in collectives.WAYS[1:])
