"""Importing the package: it asks for nothing that one kind of system alone has, and changes nothing for others."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# All modules but those of other packages' plugins, and programs.
EVERYTHING = """
    import importlib, pathlib, lowlevel_zero
    root = pathlib.Path(lowlevel_zero.__file__).parent
    paths = [path.relative_to(root.parent).with_suffix("") for path in sorted(root.rglob("*.py"))]
    kept = [path.parts for path in paths if path.parts[1] not in ("plugin", "trainers") and path.name != "__main__"]
    names = [".".join(parts).removesuffix(".__init__") for parts in kept]
"""

# What torch or the standard library has imported by then it keeps; what is imported after that finds none of it.
ONLY_WHERE_THERE_IS_POSIX = """
    import mmap, os, select, sys
    import torch, torch.distributed, torch.distributed.checkpoint, torch.distributed.tensor
    for name in ("fcntl", "resource", "grp", "pwd", "pty", "termios", "syslog"):
        sys.modules[name] = None
    for owner, names in (
        (os, "register_at_fork fork memfd_create pidfd_open pipe2 posix_fallocate sysconf getuid O_CLOEXEC O_NONBLOCK"),
        (select, "poll epoll POLLIN POLLOUT"),
        (mmap, "MADV_REMOVE MADV_DONTDUMP PROT_READ MAP_SHARED"),
    ):
        for name in names.split():
            delattr(owner, name)
"""


def start(source: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error::UserWarning:lowlevel_zero", "-c", textwrap.dedent(source)]
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    return output


def test_it_leaves_the_filters_of_warnings_as_they_were(tmp_path: Path) -> None:
    """Its own modules do; torch's, which are imported first, are torch's business."""
    source = f"""
    import warnings
    import torch, torch.distributed, torch.distributed.checkpoint, torch.distributed.tensor
    before = list(warnings.filters)
    {EVERYTHING}
    for name in names:
        importlib.import_module(name)
        assert warnings.filters == before, name
    from lowlevel_zero import LowLevelZeroOptimizer
    from lowlevel_zero.checkpoint import load_checkpoint, save_checkpoint
    torch.distributed.init_process_group("gloo", init_method="file://{tmp_path}/rendezvous", rank=0, world_size=1)
    model = torch.nn.Linear(3, 2)
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    save_checkpoint("{tmp_path}/first", model, optimizer)
    save_checkpoint("{tmp_path}/second", model, optimizer, async_save=True).wait()
    load_checkpoint("{tmp_path}/second", model, optimizer)
    assert warnings.filters == before
    print(len(names))
    """
    assert int(output_of(start(source)).split()[-1]) > 90  # torch 2.5 warns before


@pytest.mark.parametrize("world_size", [2])
def test_it_trains_where_there_is_no_posix(world_size: int, tmp_path: Path) -> None:
    source = f"""
    {ONLY_WHERE_THERE_IS_POSIX}
    {EVERYTHING}
    for name in names:
        importlib.import_module(name)
    import logging
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    from lowlevel_zero import LowLevelZeroOptimizer
    from lowlevel_zero.planning import estimate
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group(
        "gloo", init_method="file://{tmp_path}/rendezvous", rank=rank, world_size={world_size}
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, partition_grad=True)
    for _ in range(3):
        optimizer.backward(model(torch.full((1, 3), 1.0 + rank)).sum())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.verify()
    print(f"{{model.bias.sum().item():.4f}}")
    torch.distributed.destroy_process_group()
    """
    first, second = map(output_of, [start(source, RANK=str(rank)) for rank in range(world_size)])
    start_of_all = first.splitlines()[0]
    assert "by pairwise messages over gloo (rank 0: not on its system: " in start_of_all
    assert "; rank 1: not on its system: " in start_of_all
    assert first.splitlines()[-1] == second.splitlines()[-1]
