"""The built wheel where only torch and what torch needs is installed: it imports, plans and trains on two ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("lowlevel_zero", "pyproject.toml", "README.md", "LICENSE")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def needed_by(name: str, known: set[str]) -> Iterator[Distribution]:
    """A distribution and, without extras, what it needs of what is installed here."""
    if name in known:
        return
    known.add(name)
    try:
        found = distribution(name)
    except PackageNotFoundError:  # of another system, or another Python
        return
    yield found
    for line in found.requires or ():
        if "extra ==" not in line:
            yield from needed_by(re.split(r"[^\w.-]", line, maxsplit=1)[0], known)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages: links to torch and its dependencies, and the wheel's files."""
    folder = tmp_path_factory.mktemp("site")
    for each in needed_by("torch", set()):
        for top in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(each.locate_file(top))))
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", "dist", "."]
    subprocess.run(build, cwd=source, check=True)
    (wheel,) = (source / "dist").glob("lowlevel_zero-*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    subprocess.run(install, check=True)
    return folder


def start(site: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Python with the packages in ``site`` alone."""
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-S", *arguments]
    return subprocess.Popen(command, env=own, cwd=site, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def test_every_module_imports_but_the_plugin(site: Path) -> None:
    source = """
    import importlib, importlib.util, pkgutil
    import lowlevel_zero
    for absent in ("colossalai", "tqdm", "matplotlib", "safetensors", "pytest", "transformers"):
        assert importlib.util.find_spec(absent) is None, absent
    names = [each.name for each in pkgutil.walk_packages(lowlevel_zero.__path__, "lowlevel_zero.", onerror=str)]
    for name in names:
        if not name.startswith(("lowlevel_zero.plugin", "lowlevel_zero.trainers")):
            importlib.import_module(name)
    print(lowlevel_zero.__file__, len(names))
    """
    path, count = output_of(start(site, "-c", textwrap.dedent(source))).split()[-2:]
    assert Path(path).is_relative_to(site)
    assert int(count) > 50


def test_the_command_line_plans(site: Path) -> None:
    told = output_of(start(site, "-m", "lowlevel_zero", "plan", "--params", "7B", "--world-size", "8"))
    assert "7,000,000,000 parameters" in told
    script = output_of(start(site, str(site / "bin" / "lowlevel-zero"), "plan", "--params", "7B", "--world-size", "8"))
    assert script == told


def test_two_ranks_train(site: Path, tmp_path: Path) -> None:
    """Without NumPy, too, which torch doesn't bring; checkpoints need it, since torch.distributed.checkpoint does."""
    source = f"""
    import os
    import torch
    from lowlevel_zero import LowLevelZeroOptimizer
    rank, meet = int(os.environ["RANK"]), "file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = LowLevelZeroOptimizer(adam, model=model, partition_grad=True, clip_grad_norm=1.0)
    x = torch.randn(64, 8)
    for step in range(30):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            print("first", loss.item())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.verify()
    print("last", loss.item())
    print("sum", sum(p.double().sum().item() for p in model.parameters()))
    torch.distributed.destroy_process_group()
    """
    ranks = [start(site, "-c", textwrap.dedent(source), RANK=str(rank)) for rank in range(2)]
    told = [dict(line.split() for line in output_of(each).splitlines()[-3:]) for each in ranks]
    for each in told:
        assert float(each["last"]) < 0.5 * float(each["first"])
    assert told[0]["sum"] == told[1]["sum"]
