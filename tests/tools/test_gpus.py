"""The one command for whoever has GPUs: what it makes of results, and what it says where there are none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import gpus
from benchmarks.output import RESULTS

REPORT = """<testsuites><testsuite>
<testcase name="test_one"/><testcase name="test_two"><failure message="expected 1, got 2">...</failure></testcase>
</testsuite></testsuites>"""


def test_where_there_is_no_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="expected a GPU that torch can use, found none"):
        gpus.main([])


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
