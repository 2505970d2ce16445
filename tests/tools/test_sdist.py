"""The source distribution has what a stranger needs to test, document and cite the package."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's list of files")
def test_the_sdist_has_what_is_tracked_and_its_tests_are_found(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    made = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], cwd=copy, capture_output=True, text=True, check=True
    )
    with tarfile.open(tmp_path / made.stdout.split()[-1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("lowlevel_zero-*/")
    missing = {name for name in tracked if not (unpacked / name).exists() and not name.startswith(".git")}
    assert missing == set()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/calls/test_module_names.py"]
    ran = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
