"""The benchmarks run, and everybody in them trains the same model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import (
    bars,
    checkpoints,
    collectives,
    construction,
    cuda,
    gpus,
    hosts,
    overhead,
    peak,
    peers,
    readme,
    report,
    scale,
    step,
)
from benchmarks.fake import fake_world
from benchmarks.output import RESULTS
from benchmarks.peers import CONTESTANTS
from benchmarks.plan import PARTS
from tests.support.ranks import run_ranks

# Ranks inherit the tests' filters; what a peer is warned of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")
ROOT = Path(__file__).parents[2]
SMALL = "--size=tiny --rounds=1 --steps=1 --warm-up=3 --patience=0".split()  # noqa: SIM905


def _measure(folder: Path, *arguments: str) -> dict[str, Any]:
    out = folder / "step.json"
    step.main([*SMALL, f"--out={out}", *arguments])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.soak
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
        assert before >= after - row["held after step"].get("bucket_buffers", 0) > 0, name
    assert baseline["ratios"]["whole"]["median"] == 1
    assert found["odd"] == []
    assert (tmp_path / "step.png").exists()


@pytest.mark.soak
def test_an_older_tree_trains_beside_todays_in_one_process(tmp_path: Path) -> None:
    found = _measure(tmp_path, "--older=HEAD", "--contestants", "ours-2", "older-2", "--rounds=2")["contestants"]
    assert found["older-2"]["losses"] == found["ours-2"]["losses"]


@pytest.mark.soak
def test_the_command_runs_one_alone(tmp_path: Path) -> None:
    out = tmp_path / "alone.json"
    command = [sys.executable, "-m", "benchmarks.step", *SMALL, "--alone=ours-2", "--keep=no", f"--out={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "peak RSS" in done.stdout
    (row,) = json.loads(out.read_text())["contestants"].values()
    assert row["ratios"] is None
    assert all(peak >= base > 0 for peak, base in row["peak rss"])


def test_a_contestant_that_trains_something_else_or_is_unknown_is_named() -> None:
    losses = {"ddp": [2.0, 1.8], "zro": [2.0, 1.8], "ours-1": [2.0, 1.9], "ours-2": [2.0, float("nan")]}
    lines = report.strangers({name: {"losses": own} for name, own in losses.items()}, "ddp", 1e-5)
    assert [line.partition(" trains something else")[0] for line in lines] == ["ours-1", "ours-2"]
    with pytest.raises(ValueError, match=r"expected contestants among ddp, .*, got 'horovod'"):
        step.main([*SMALL, "--contestants", "horovod"])


@pytest.mark.soak
def test_collectives_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "collectives.json"
    collectives.main(["--world-sizes=2", "--elements=10", "--rounds=1", f"--out={out}"])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["collective"], row["dtype"]) for row in rows] == [
        (name, dtype) for name in collectives.COLLECTIVES for dtype in ("fp32", "bf16")
    ]
    assert all(row["ratios"][way]["median"] > 0 for row in rows for way in collectives.WAYS[1:])


def test_overhead_is_counted_per_parameter(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    overhead.main(["--parameters=20", "--rounds=2", "--steps=1", "--world-sizes", "1", "8", f"--out={out}"])
    alone, many = json.loads(out.read_text())["rows"]
    assert alone["overhead"] == pytest.approx(alone["ours"] - alone["plain"], rel=0.5)
    assert alone["collectives"] == 0
    assert many["collectives"] > 0
    assert (tmp_path / "overhead.png").exists()


def test_scale_holds_less_the_more_ranks_there_are(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    scale.main(["--size=tiny", "--rounds=1", "--world-sizes", "8", "64", f"--out={out}"])
    rows = {(row["name"], row["world size"]): row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {(name, size) for name in scale.NAMES for size in (8, 64)}
    for name in scale.NAMES:
        assert rows[name, 64]["bytes after step"] < rows[name, 8]["bytes after step"]
        assert rows[name, 64]["collectives"] > 0


def test_the_peak_of_a_step_stands_beside_the_least(tmp_path: Path) -> None:
    peak.main(["--size=tiny", "--contestants", "ours-2", "floor", f"--out={tmp_path / 'peak.json'}"])
    content = json.loads((tmp_path / "peak.json").read_text())
    ours, floor = (content["contestants"][name] for name in ("ours-2", "floor"))
    assert ours["step"] > 0 < ours["buffer"]
    least = bars.least_peak(content, "ours-2")
    assert least == max(
        10 * content["run"]["elements"] + floor["step"] - floor["after_backward"],
        8 * content["run"]["elements"] + floor["forward"],
    )
    assert bars.least_peak(content, "ours-1-offload") > least
    (verdict, *_) = (each for each in bars.verdicts(tmp_path) if each.what.startswith("ours-2, peak"))
    assert verdict.measured == ours["step"] / (least + 2 * ours["buffer"])


def test_construction_is_measured_on_real_and_on_simulated_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(construction.CONTESTANTS, "deepspeed", raising=False)  # its import takes seconds
    out = tmp_path / "construction.json"
    construction.main(["--models", "20x10", "--rounds=1", "--simulated", "8", f"--out={out}"])
    rows = json.loads(out.read_text())["rows"]
    real = [(name, 2) for name in construction.CONTESTANTS]
    assert [(row["name"], row["ranks"]) for row in rows] == [*real, ("ours", 8)]
    assert all(row["cpu"] > 0 for row in rows)


def test_all_exchanges_of_a_save_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Collectives of objects, too, which no agreement makes."""
    monkeypatch.setattr(checkpoints, "MANY", 4)
    found = run_ranks(checkpoints.save_beside_others, 2, 1, tmp_path)
    assert [each["exchanges"] for each in found] == [4.0, 4.0]


def test_a_fake_world_undoes_itself() -> None:
    def look(rank: int, world_size: int) -> tuple[int, int, bool]:
        real = dist.all_reduce
        with fake_world(4096) as calls:
            dist.all_reduce(torch.ones(1))
            size = dist.get_world_size()
        return size, calls.count, dist.all_reduce is real and not dist.is_initialized()

    assert run_ranks(look, 1, init=False) == [(4096, 1, True)]


@pytest.mark.colossalai
def test_the_gpu_benchmark_runs_without_what_only_cuda_tells(tmp_path: Path) -> None:
    out = tmp_path / "cuda.json"
    small = ["--size=tiny", "--world-sizes", "8", "--steps=1", "--copied=1000"]
    cuda.main([*small, "--device=cpu", "--contestants", "ours-2", "colossalai-2", f"--out={out}"])
    rows = json.loads(out.read_text())["rows"]
    assert {row["name"] for row in rows} == {"ours-2", "colossalai-2"}
    for row in rows:
        assert row["to copying"] == pytest.approx(row["step ms"] / row["copying ms"])
        assert "launches" not in row


def test_the_gpu_benchmarks_refuse_to_run_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for main, arguments in ((cuda.main, ["--size=tiny"]), (gpus.main, [])):
        with pytest.raises(SystemExit, match="expected a GPU that torch can use, found none"):
            main(arguments)


def test_every_part_of_the_plan_is_a_benchmark_that_takes_its_arguments() -> None:
    runnable = (step, peak, overhead, scale, construction, collectives, cuda, hosts, checkpoints)
    modules = {module.__name__: module for module in runnable}
    assert {bar.part for bar in bars.BARS} <= {part.name for part in PARTS}
    for part in PARTS:
        for quick in (False, True):
            modules[f"benchmarks.{part.module}"]._parse(part.command(quick)[1:])


def test_bars_are_judged_and_shown(tmp_path: Path) -> None:
    assert "not measured" in bars.report(tmp_path)
    content = _measure(tmp_path, "--contestants", "ours-1", "ours-2", "ours-2-drop")
    (tmp_path / f"{bars.FP32}.json").write_text(json.dumps(content))
    judged = {(verdict.part, verdict.what): verdict for verdict in bars.verdicts(tmp_path)}
    verdict = judged[bars.FP32, "ours-2 / ddp"]
    assert verdict.measured == content["contestants"]["ours-2"]["ratios"]["whole"]["median"]
    assert verdict.holds == (verdict.measured <= 0.88)
    assert judged[bars.FP32, "ours-2-drop / ours-2"].measured is not None
    assert judged[bars.FP32, "ours-2 / deepspeed-2"].measured is None
    assert judged[bars.FP32, "ours-1, held after step / the least"].measured == pytest.approx(1, abs=0.02)
    assert "measured bars hold" in bars.report(tmp_path)


MISSES = (ROOT / "benchmarks" / "results" / "misses.md").read_text()
NUMBER = r"\d[\d.]*\d|\d"
# By the beginning of a row in misses.md: the bars that it is about, as ``bars`` names them.
ROWS = {
    "2 ranks, to DDP": rf"{bars.FP32}: ours-. / ddp$",
    "2 ranks, fp32, to ZeroRedundancyOptimizer": rf"{bars.FP32}: ours-. / (zro|fairscale|fsdp2|deepspeed|colossalai)",
    "2 ranks, bf16, to DDP with masters": rf"{bars.BF16}: ours-. / ddp-masters",
    "4 ranks on 2 cores, to DDP": rf"{bars.FOUR}: ours-. / ddp",
    "85M, 4 ranks": rf"{bars.LARGE}: ours-. / ddp",
    "four micro-batches under": rf"{bars.ACCUMULATED}: ours-. / ddp",
    "four micro-batches, each reduced": rf"{bars.ACCUMULATED}: ours-.-each / ddp",
    "peak of a step, stage 1": r"peak: ours-1, peak",
    "the same with offload": r"peak: ours-1-offload, peak",
    "construction, microseconds": r"construction: .* on 2 ranks",
    "the same, 64 ranks": r"construction: .* on 64 ranks",
    "the same, 4,096 ranks |": r"construction: .* on 4,096 ranks",
    "host microseconds per parameter and step, 8": r"overhead: us .* 8 ranks",
    "the same, 1, 64, 512 and": r"overhead: us .* (1|64|512|4096) ranks",
    "the same, 4,096 ranks to 8": r"overhead: 4,096 ranks / 8",
    "messages on loopback": rf"{bars.FP32}: ours-.-messages / ddp",
    "1 Gbit/s, to DDP": rf"{bars.LINK}: ours-. / ddp",
    "1 Gbit/s, overlapped": rf"{bars.LINK}: ours-.-overlap / ddp",
    "1 Gbit/s, gradients in bf16": rf"{bars.LINK}: ours-.-bf16 / ddp",
    "1 Gbit/s, fp8": rf"{bars.LINK}: ours-.-fp8 / ddp",
    "100 Mbit/s, 2 x 2": rf"{bars.TWO_BY_TWO[bars.SLOW_LINK]}: ours-2-hybrid, time",
    "stand-still of an async save": r"checkpoints: stall of an async save",
}


def test_each_missed_bar_has_a_row_with_what_is_asked_and_what_was_measured() -> None:
    """Of the kept results; so the table's figures are theirs."""
    for verdict in bars.verdicts(RESULTS):
        if verdict.measured is None or verdict.holds:
            continue
        name = f"{verdict.part}: {verdict.what}"
        begins = [row for row, pattern in ROWS.items() if re.match(pattern, name)]
        rows = [line for line in MISSES.splitlines() if begins and line.startswith(f"| {begins[0]}")]
        assert len(begins) == len(rows) == 1, f"{name} has no row"
        asked, measured = rows[0].split(" | ")[1:3]
        expected = {f"{verdict.measured:.{digits}f}" for digits in ((2,) if verdict.measured < 5 else (0, 1))}
        assert expected & set(re.findall(NUMBER, measured)), f"{name}: {verdict.measured}"
        assert verdict.bar in map(float, re.findall(NUMBER, asked)), f"{name}: {verdict.bar}"


def test_results_go_between_the_markers(tmp_path: Path) -> None:
    content = _measure(tmp_path, "--contestants", "ours-2")
    (tmp_path / "step-mine.json").write_text(json.dumps(content))
    (tmp_path / "step.png").rename(tmp_path / "step-mine.png")
    block = "<!-- bench: {} -->\nwhat was here\n<!-- /bench -->\n"
    text = "before\n" + block.format("step-mine") + "between\n" + block.format("scale") + "after\n"
    shown = readme.filled(text, tmp_path)
    assert "| ours, stage 2, fused | " in shown
    assert "step-mine.png)" in shown
    assert shown.count("what was here") == 1, "what has no result stays"
    assert readme.filled(shown, tmp_path) == shown
    assert shown.startswith("before\n")
    assert shown.endswith("after\n")


def test_a_library_that_is_not_installed_is_left_out_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda package: None)
    assert "fairscale is not installed, and so left out: make peers" in peers.left_out()
    names = [each.name for each in peers.taking_part(peers.Setting("tiny", "fp32", 1), None)]
    assert "ours-2" in names
    assert not any(name.startswith(("deepspeed", "colossalai", "fairscale")) for name in names)
    with pytest.raises(ValueError, match="deepspeed-2: deepspeed is not installed: make peers"):
        peers.taking_part(peers.Setting("tiny", "fp32", 1), ["deepspeed-2"])


# The one command for whoever has GPUs.

REPORT = """<testsuites><testsuite>
<testcase name="test_one"/><testcase name="test_two"><failure message="expected 1, got 2">...</failure></testcase>
</testsuite></testsuites>"""


def test_one_file_has_everything_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[str] = []

    def run(command: Sequence[str]) -> int:
        commands.append(" ".join(command[:-1]))
        out = next(Path(word.partition("=")[2]) for word in command if word.startswith(("--out=", "--junitxml=")))
        if command[0] == "pytest":
            out.write_text(REPORT)
        elif command[0] == "benchmarks.step" and "fp32" in command:
            shutil.copy(RESULTS / "step-25m-fp32-1x-2r.json", out)
        return 1

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(gpus, "_run", run)
    out = tmp_path / "report.json"
    with pytest.raises(SystemExit, match="not all went well"):
        gpus.main(["--quick", f"--out={out}"])
    content = json.loads(out.read_text())
    assert content["header"]["gpus"] == "4"
    assert content["tests"] == {"exit code": 1, "passed": 1, "failed": {"test_two": "expected 1, got 2"}}
    assert content["measured"]["cuda"] is None
    assert any("--device cuda --world-size 4" in command for command in commands)
    told = capsys.readouterr().out
    assert "1 passed, 1 failed" in told
    assert "ours, stage 2, fused" in told
    assert str(out) in told
