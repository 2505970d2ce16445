"""Importing the package: it asks for nothing that one kind of system alone has, and changes nothing for others."""

from __future__ import annotations

import io
import sys
import textwrap
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed.checkpoint
import torch.distributed.tensor  # here once, not in every forked rank  # noqa: F401

from tests.support.ranks import run_ranks

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


def output_of(source: str) -> str:
    """What it prints, in this process, a forked rank, as if nobody had imported the package."""
    for name in [name for name in sys.modules if name.split(".")[0] == "lowlevel_zero"]:
        del sys.modules[name]
    warnings.resetwarnings()  # the import in the test's process may have left filters
    warnings.filterwarnings("error", category=UserWarning, module="lowlevel_zero")
    with redirect_stdout(io.StringIO()) as printed:
        exec(textwrap.dedent(source), {"__name__": "__main__"})
    return printed.getvalue()


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
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
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
    sources = [leaving_filters(tmp_path), *ranks]
    told, first, second = run_ranks(lambda rank, _: output_of(sources[rank]), len(sources), init=False)
    with subtests.test("the filters of warnings are as they were"):
        assert int(told.split()[-1]) > 90  # torch 2.5 warns before
    with subtests.test("two ranks train where there is no POSIX"):
        start_of_all = first.splitlines()[0]
        assert "by pairwise messages over gloo (rank 0: not on its system: " in start_of_all
        assert "; rank 1: not on its system: " in start_of_all
        assert first.splitlines()[-1] == second.splitlines()[-1]
