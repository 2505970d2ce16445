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
    import torch
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


# One interpreter imports torch, whose forks import the package, as it takes seconds.
FORKED = """
import os, runpy, sys
import torch, torch.distributed, torch.distributed.checkpoint, torch.distributed.tensor
torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports torch's compiler
for number in range(int(sys.argv[2])):
    if os.fork() == 0:
        output = os.open(f"{sys.argv[1]}/{number}.out", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        runpy.run_path(f"{sys.argv[1]}/{number}.py")
        sys.exit()
failed = [number for number in range(int(sys.argv[2])) if os.wait()[1]]
sys.exit(len(failed))
"""


def outputs(sources: list[str], folder: Path) -> list[str]:
    """What each prints where nobody has imported the package."""
    for number, source in enumerate(sources):
        (folder / f"{number}.py").write_text(textwrap.dedent(source))
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning:lowlevel_zero", "-c", FORKED, str(folder), str(len(sources))]
    done = subprocess.run(command, env=own, timeout=100, check=False)
    printed = [(folder / f"{number}.out").read_text() for number in range(len(sources))]
    assert done.returncode == 0, printed
    return printed


def leaving_filters(folder: Path) -> str:
    """Torch's modules, which are imported first, are torch's business."""
    return f"""
    import warnings
    import torch
    before = list(warnings.filters)
    {EVERYTHING}
    for name in names:
        importlib.import_module(name)
        assert warnings.filters == before, name
    from lowlevel_zero import LowLevelZeroOptimizer
    from lowlevel_zero.checkpoint import load_checkpoint, save_checkpoint
    torch.distributed.init_process_group("gloo", init_method="file://{folder}/rendezvous-0", rank=0, world_size=1)
    model = torch.nn.Linear(3, 2)
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    save_checkpoint("{folder}/first", model, optimizer)
    save_checkpoint("{folder}/second", model, optimizer, async_save=True).wait()
    load_checkpoint("{folder}/second", model, optimizer)
    assert warnings.filters == before
    print(len(names))
    """


def training_without_posix(folder: Path, rank: int) -> str:
    return f"""
    {ONLY_WHERE_THERE_IS_POSIX}
    import logging
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    {EVERYTHING}
    for name in names:
        importlib.import_module(name)
    from lowlevel_zero import LowLevelZeroOptimizer
    torch.distributed.init_process_group(
        "gloo", init_method="file://{folder}/rendezvous", rank={rank}, world_size=2
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, partition_grad=True)
    for _ in range(3):
        optimizer.backward(model(torch.full((1, 3), 1.0 + {rank})).sum())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.verify()
    print(f"{{model.bias.sum().item():.4f}}")
    torch.distributed.destroy_process_group()
    """


def test_it_changes_nothing_and_trains_where_there_is_no_posix(tmp_path: Path, subtests: pytest.Subtests) -> None:
    ranks = [training_without_posix(tmp_path, rank) for rank in range(2)]
    told, first, second = outputs([leaving_filters(tmp_path), *ranks], tmp_path)
    with subtests.test("the filters of warnings are as they were"):
        assert int(told.split()[-1]) > 90  # torch 2.5 warns before
    with subtests.test("two ranks train where there is no POSIX"):
        start_of_all = first.splitlines()[0]
        assert "by pairwise messages over gloo (rank 0: not on its system: " in start_of_all
        assert "; rank 1: not on its system: " in start_of_all
        assert first.splitlines()[-1] == second.splitlines()[-1]
