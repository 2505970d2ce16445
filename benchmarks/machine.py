"""The header: on what and with what a number was measured."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_ROOT = Path(__file__).parents[1]
_PEERS = ("deepspeed", "colossalai", "fairscale")


def header() -> dict[str, str]:
    """Facts by name, as they are now."""
    versions = {"torch": torch.__version__} | {name: _version(name) for name in _PEERS if _version(name)}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": "python " + shlex.join(_without_out(sys.orig_argv[1:])),
        "code": _git("describe", "--always") + ("-dirty" if is_dirty() else ""),
        "tree of lowlevel_zero": _git("rev-parse", "--short", "HEAD:lowlevel_zero"),
        "python": platform.python_version(),
        **versions,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "threads per rank": "1",
        "load average before": load(),
    }


def load() -> str:
    """Of the last 1, 5 and 15 minutes: other work on the machine shows here."""
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def is_dirty() -> bool:
    """Whether files of the package or the benchmarks differ from the commit, or nobody knows."""
    files = ("lowlevel_zero", "benchmarks/*.py", "benchmarks/peers")
    done = subprocess.run(["git", "status", "--porcelain", "--", *files], cwd=_ROOT, capture_output=True, check=False)
    return done.returncode != 0 or bool(done.stdout)


def _git(*arguments: str) -> str:
    told = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "not under version control"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _without_out(arguments: list[str]) -> list[str]:
    """A command line without where its results go, which is a matter of the machine."""
    kept: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument != "--out" and before != "--out" and not argument.startswith("--out="):
            kept.append(argument)
    return kept
