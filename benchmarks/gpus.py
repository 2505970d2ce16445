"""All that a machine with GPUs can tell, in one file to send in: ``python -m benchmarks.gpus``.

The tests of CUDA, one GPU's step at simulated world sizes, and whole steps beside the peers on all GPUs, over NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from .machine import header
from .output import heading
from .tables import TABLES, Table

_ROOT = Path(__file__).parents[1]
# Processes of tests that share the GPUs; each starts ranks of its own.
_SIDE_BY_SIDE = min(8, os.cpu_count() or 1)


def main(arguments: list[str] | None = None) -> None:
    """Run all, print one table, and write the file; what fails doesn't keep the rest from running."""
    options = _parse(arguments)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # processes that are started here may fork
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        raise SystemExit("expected a GPU that torch can use, found none: its driver may be older than torch's CUDA")
    with tempfile.TemporaryDirectory() as folder:
        content: dict[str, Any] = {"header": header() | {"gpus": str(gpus), "nvidia-smi": _told_by_driver()}}
        content["tests"] = _tested(Path(folder, "tests.xml"), options.quick)
        content["measured"] = {
            name: _measured(command, Path(folder, f"{name}.json")) for name, command in _parts(gpus, options.quick)
        }
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(
        f"\n{heading(content['header'], {})}\n\n{summary(content).text()}\n\nwritten: {options.out}; please send it in"
    )
    if any(result is None for result in content["measured"].values()) or content["tests"]["failed"]:
        raise SystemExit("not all went well: see above")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpus", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes and few tests: shows that all runs")
    parser.add_argument("--out", type=Path, default=Path("cuda-report.json"), help="the file to send in")
    return parser.parse_args(arguments)


def _parts(gpus: int, quick: bool) -> Iterator[tuple[str, list[str]]]:
    """Names, of which the first word is a table's, and modules with their arguments."""
    small = ["--size", "tiny"] if quick else []
    yield "cuda", ["cuda", "--steps", "2" if quick else "10", *small]
    turns = "--rounds 1 --steps 1 --warm-up 2" if quick else "--rounds 5 --steps 10"
    for dtype in ("fp32", "bf16"):
        for size in ("tiny",) if quick else ("85m", "1b"):
            yield (
                f"step-{size}-{dtype}",
                ["step", *f"--device cuda --world-size {gpus} --size {size} --dtype {dtype} {turns}".split()],
            )


def _told_by_driver() -> str:
    asked = "--query-gpu=name,driver_version,memory.total"
    try:
        done = subprocess.run(
            ["nvidia-smi", asked, "--format=csv,noheader"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
    return "; ".join(done.stdout.strip().splitlines())


def _tested(report: Path, quick: bool) -> dict[str, Any]:
    """How many tests passed, and what those say that failed; with what the run ended."""
    chosen = ["-k", "oracle and stage2"] if quick else []
    command = ["pytest", "tests/gpu", f"--junitxml={report}", "-q", f"-n{_SIDE_BY_SIDE}", "--dist=worksteal", *chosen]
    code = _run(command)
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = {case.get("name", "?"): trouble.get("message", "")[:2000] for case, trouble in _troubles(cases)}
    return {"exit code": code, "passed": len(cases) - len(failed), "failed": failed}


def _troubles(cases: Sequence[ElementTree.Element]) -> Iterator[tuple[ElementTree.Element, ElementTree.Element]]:
    for case in cases:
        trouble = case.find("failure")
        trouble = case.find("error") if trouble is None else trouble
        if trouble is not None:
            yield case, trouble


def _measured(command: Sequence[str], out: Path) -> Any:
    """What a benchmark has written; None: nothing."""
    module, *arguments = command
    _run([f"benchmarks.{module}", *arguments, f"--out={out}"])
    return json.loads(out.read_text(encoding="utf-8")) if out.exists() else None


def _run(command: Sequence[str]) -> int:
    print(f"\n---- python -m {' '.join(command)} ----", flush=True)
    return subprocess.run([sys.executable, "-m", *command], cwd=_ROOT, check=False).returncode


def summary(content: dict[str, Any]) -> Table:
    """Tests and benchmarks in one table: what, with whom, how much."""
    tests = content["tests"]
    rows = [["tests", "", f"{tests['passed']} passed, {len(tests['failed'])} failed (exit code {tests['exit code']})"]]
    for name, result in content["measured"].items():
        if result is None:
            rows.append([name, "", "failed"])
            continue
        table = TABLES[name.partition("-")[0]](result)
        for first, *cells in table.rows:
            told = ", ".join(f"{title}: {cell}" for title, cell in zip(table.titles[1:], cells, strict=True))
            rows.append([name, first, told])
    return Table(["what", "who", "how much"], rows)


if __name__ == "__main__":
    main()
