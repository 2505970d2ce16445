"""An older tree of this project, beside today's in the same rounds: ``--older COMMIT``."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_NAME = "lowlevel_zero_older"

# In ranks, which are forked: the folder, which goes with the process that made it.
_folders: list[tempfile.TemporaryDirectory[str]] = []


def unpack(commit: str) -> None:
    """Have the package as it was at ``commit`` importable under another name; before ranks are started.

    Raises:
        ValueError: there is no such commit here.
    """
    done = subprocess.run(["git", "archive", commit, "lowlevel_zero"], cwd=_ROOT, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"--older: expected a commit of this project, got {commit!r}: {done.stderr.decode().strip()}")
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder.name, filter="data")
    package = (Path(folder.name) / "lowlevel_zero").rename(Path(folder.name) / _NAME)  # imports are relative
    for path in package.rglob("*.py"):  # names of groups and keys in stores, which both trees would use
        path.write_text(path.read_text(encoding="utf-8").replace('"lowlevel_zero/', f'"{_NAME}/'), encoding="utf-8")
    sys.path.append(folder.name)


def older_class() -> Any:
    """The optimizer of that tree."""
    return import_module(_NAME).LowLevelZeroOptimizer
