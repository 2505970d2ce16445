"""The command line: what consolidate writes loads without the package, what inspect says is so, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.__main__ import COMMANDS, main
from lowlevel_zero.checkpoint import save_checkpoint
from lowlevel_zero.checkpoint.manifest import MANIFEST
from tests.support.oracle import Odd, Run, adamw, train_rank
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SAVED_AFTER = 3


class Buffered(Odd):
    """Odd, with buffers that are saved and one that isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def drop(step: int, rank: int) -> set[int]:
    """One layer is dropped until after the save: it has no state then."""
    return {1} if step < SAVED_AFTER else set()


RUNS = {
    "fp32, 2 ranks": Run(world_size=2, steps=SAVED_AFTER, drop=drop, model=Buffered, optimizer=adamw).with_options(
        partition_grad=True
    ),
    "bf16, 3 ranks": Run(
        world_size=3, steps=SAVED_AFTER, drop=drop, dtype=torch.bfloat16, model=Buffered, optimizer=adamw
    ),
}


class Saved(NamedTuple):
    """A checkpoint, and what the run had in memory when it was saved."""

    path: Path
    model: dict[str, Tensor]
    optimizer: dict[str, Any]


def save(rank: int, world_size: int, run: Run, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    trained = train_rank(rank, world_size, run)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.5)
    save_checkpoint(path, trained.model, trained.optimizer, scheduler=scheduler, extra={"losses": [1.0], "step": 3})
    return trained.model.state_dict(), trained.optimizer.state_dict()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """A checkpoint of each run in ``RUNS``, made when it is first asked for."""
    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            path = tmp_path_factory.mktemp("run") / "step-3"
            run = RUNS[name]
            made[name] = Saved(path, *run_ranks(save, run.world_size, run, path)[0])
        return made[name]

    return get


@pytest.fixture
def checkpoint(saved: Callable[[str], Saved], tmp_path: Path) -> Path:
    """A copy of one, to be damaged."""
    return Path(shutil.copytree(saved("fp32, 2 ranks").path, tmp_path / "run" / "step-3"))


# Consolidating.


@pytest.mark.parametrize("name", RUNS)
def test_the_files_are_what_the_run_had(name: str, saved: Callable[[str], Saved], tmp_path: Path) -> None:
    before = saved(name)
    assert main(["consolidate", str(before.path), str(tmp_path / "out")]) == 0
    model = load_file(tmp_path / "out" / "model.safetensors")
    assert model.keys() == before.model.keys()
    for key, value in before.model.items():
        assert torch.equal(model[key], value), key
        assert model[key].dtype == value.dtype, key
    optimizer = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    check_states(optimizer.pop("state"), before.optimizer["state"])
    assert optimizer == {key: value for key, value in before.optimizer.items() if key != "state"}
    assert set(optimizer["lowlevel_zero"]["plans"][0]["order"]) == set(range(15))


def check_states(got: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> None:
    assert got.keys() == expected.keys()
    for place, state in expected.items():
        assert got[place].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(got[place][key], value), (place, key)
            assert got[place][key].dtype == value.dtype, (place, key)
            assert got[place][key].stride() == value.stride(), (place, key)


def wide(rank: int, world_size: int, path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2048, 1024, bias=False) for _ in range(4)))
    optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model=model)
    for layer in model:
        optimizer.backward(layer(torch.ones(1, 2048)).sum())
    optimizer.step()
    save_checkpoint(path, model, optimizer)


LIMITED = """
import re, resource, sys
from pathlib import Path
import safetensors.torch
from lowlevel_zero.__main__ import main
from lowlevel_zero.checkpoint import consolidate
consolidate._MAPPED_FROM = int(sys.argv[1])
held = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 6 * 8 * 2**20,) * 2)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.soak
def test_memory_of_its_own_is_less_than_a_file(tmp_path: Path) -> None:
    """A few tensors of 8 MiB in passing. The rest is in mapped files, of which the system keeps in memory what fits."""
    run_ranks(wide, 1, tmp_path / "step-1")
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # a thread's stack counts too

    def consolidated(mapped_from: int, out: Path) -> str:
        command = [sys.executable, "-c", LIMITED, str(mapped_from), "consolidate", str(tmp_path / "step-1"), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=alone)
        return done.stdout or done.stderr

    assert consolidated(2**20, tmp_path / "out").startswith("wrote ")
    assert {file.name: file.stat().st_size // 2**20 for file in (tmp_path / "out").iterdir()} == {
        "model.safetensors": 4 * 8,
        "optimizer.pt": 4 * 2 * 8,
    }
    assert "allocate" in consolidated(2**40, tmp_path / "other")  # there is no room for them in memory


def test_a_run_stands_for_its_newest_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint.parent / "step-9").mkdir()  # of a save that never ended
    assert main(["consolidate", str(checkpoint.parent), str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert f"the newest whole checkpoint is {checkpoint}" in told.err
    assert told.out.startswith(f"wrote {tmp_path / 'out' / 'model.safetensors'} and ")


def test_a_former_output_is_replaced_when_asked_in_the_mode_that_the_umask_leaves(
    checkpoint: Path, tmp_path: Path
) -> None:
    out, before = tmp_path / "out", os.umask(0o027)
    try:
        assert main(["consolidate", str(checkpoint), str(out)]) == 0
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in out.iterdir()}
    assert modes == {"model.safetensors": 0o640, "optimizer.pt": 0o640}
    (out / "optimizer.pt").write_text("old")
    assert main(["consolidate", str(checkpoint), str(out)]) == 2
    assert (out / "optimizer.pt").read_text() == "old"
    (out / "model.safetensors").write_text("old")
    assert main(["consolidate", "--force", str(checkpoint), str(out)]) == 0
    assert load_file(out / "model.safetensors")
    assert len(torch.load(out / "optimizer.pt", weights_only=True)["state"]) > 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_full_disk_leaves_nothing_half_done(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert main(["consolidate", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


class Noting(torch.optim.SGD):
    """An optimizer with states of other shapes than its parameters', and of no shape at all."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            count = self.state[p].get("count", 0) + 1
            self.state[p].update(count=count, table=torch.full((2, 3), float(count)), note="of a step")


class Counted(nn.Linear):
    """A module whose state isn't tensors alone."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 3}


TABLE = torch.arange(6).view(2, 3)


class Tabled(nn.Identity):
    """A module whose state is a tensor that others have, too, in another memory order than it is read in."""

    def get_extra_state(self) -> torch.Tensor:
        return TABLE.t()

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert torch.equal(state, TABLE.t())


def save_counted(rank: int, world_size: int, path: Path) -> None:
    model = nn.Sequential(Counted(2, 2), Tabled(), Tabled())
    optimizer = LowLevelZeroOptimizer(Noting(model.parameters(), lr=0.1), model=model, split="elements")
    optimizer.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    save_checkpoint(path, model, optimizer)


def test_states_of_any_shape_travel_and_what_safetensors_cannot_hold_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(save_counted, 2, tmp_path / "step-1")
    assert main(["consolidate", str(tmp_path / "step-1"), str(tmp_path / "out")]) == 0
    assert "left out, since safetensors holds tensors alone: 0._extra_state" in capsys.readouterr().out
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == {"0.weight", "0.bias", "1._extra_state", "2._extra_state"}
    assert torch.equal(tensors["2._extra_state"], TABLE.t())
    state = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["state"]
    assert state.keys() == {0, 1}
    for of_parameter in state.values():
        assert of_parameter["table"].tolist() == [[1.0] * 3] * 2
        assert (of_parameter["count"], of_parameter["note"]) == (1, "of a step")


def test_progress_is_shown_where_tqdm_is_and_what_to_install_told_where_safetensors_is_not(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for installed in (True, False):
        if not installed:
            monkeypatch.setitem(sys.modules, "tqdm", None)
        assert main(["consolidate", str(checkpoint), str(tmp_path / f"out, {installed}")]) == 0
        told = capsys.readouterr()
        assert ("100%" in told.err) is installed
        assert told.out.startswith("wrote ")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert main(["consolidate", str(checkpoint), str(tmp_path / "none")]) == 2
    assert "pip install safetensors" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


# Inspecting.


def test_inspect_for_machines(saved: Callable[[str], Saved], capsys: pytest.CaptureFixture[str]) -> None:
    before = saved("bf16, 3 ranks")
    assert main(["inspect", "--json", "--check", str(before.path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["world_size"], told["stage"], told["steps"]) == (3, 1, [3, 3])
    lines = {line["name"]: line for line in told["model"]}
    assert lines.keys() | told["tied"].keys() == before.model.keys()
    assert told["tied"] == {"layers.3.weight": "layers.0.weight"}
    for name, line in lines.items():
        assert tuple(line["tensor"]["shape"]) == before.model[name].shape
        assert line["tensor"]["bytes"] == before.model[name].nbytes
    kinds = {name: line["kind"] for name, line in lines.items()}
    assert (kinds["scale"], kinds["frozen.weight"], kinds["count"]) == ("trainable", "frozen", "buffer")
    assert set(lines["inward"]["state"]) == {"step", "exp_avg", "exp_avg_sq", "master_param"}
    assert lines["inward"]["state"]["master_param"] == {"shape": [5, 4], "dtype": "float32", "bytes": 80}
    assert lines["layers.1.weight"]["state"] == {}
    assert [group["params"] for group in told["groups"]] == [8, 9, 0]
    assert told["extra"] == ["losses", "step"]
    assert "last_epoch" in told["scheduler"]


class CountsInOnes(torch.optim.SGD):
    """Counts steps in a tensor of one element, which are of a slice where that has one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            count = self.state[p].setdefault("step", torch.zeros(1)).add_(1)
            p.sub_(p.grad / count.item(), alpha=0.1)


def test_inspect_reads_counts_of_one_element_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def save_one(rank: int, world_size: int) -> None:
        model = nn.Linear(4, 2)
        optimizer = LowLevelZeroOptimizer(CountsInOnes(model.parameters()), model=model)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        save_checkpoint(tmp_path / "ones", model, optimizer)

    run_ranks(save_one, 2)
    assert main(["inspect", "--json", str(tmp_path / "ones")]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [1, 1]


# Bytes of the parameter and its state; padding, slice, owners and the first span; bytes that a rank holds.
INWARD = ["80", "164", "0", "10", "2", "0:10,", "…", "204", "B"]


def test_inspect_for_people(saved: Callable[[str], Saved], capsys: pytest.CaptureFixture[str]) -> None:
    before = saved("fp32, 2 ranks")
    assert main(["inspect", str(before.path.parent)]) == 0
    told = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in told.splitlines() if line}
    assert "2 ranks, stage 2" in told
    assert lines["steps"] == ["steps", "3"]
    assert lines["inward"] == ["inward", "5x4", "float32", "0", "step,", "exp_avg,", "exp_avg_sq", *INWARD]
    assert lines["frozen.bias"][3] == "frozen"
    assert lines["mask"] == ["mask", "3", "bool", "buffer", "-", "3", "0", *["-"] * 5]
    assert lines["layers.3.weight"] == ["layers.3.weight", "tied", "to", "layers.0.weight"]
    states = [value for state in before.optimizer["state"].values() for value in state.values()]
    together = [f"{sum(tensor.nbytes for tensor in tensors):,}" for tensors in (_distinct(before.model), states)]
    assert lines["together"] == ["together", *together]
    assert "lr 0.01" in told
    assert lines["extra"] == ["extra", "losses,", "step"]


def _distinct(model: dict[str, Tensor]) -> list[Tensor]:
    return [tensor for name, tensor in model.items() if name != "layers.3.weight"]


# What is refused.


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def make_foreign(path: Path) -> None:
    """torch.distributed.checkpoint's files alone."""
    shutil.rmtree(path)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"weight": torch.ones(3)}, checkpoint_id=path)


def make_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("weights")


def shards(path: Path) -> list[Path]:
    found = sorted(path.glob("*.distcp"))
    assert len(found) == 2
    return found


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, "nothing"),
    "a file": (make_file, "got a file"),
    "another's checkpoint": (make_foreign, "torch.distributed.checkpoint's own"),
    "a missing shard": (lambda path: shards(path)[1].unlink(), "__1_0.distcp is missing"),
    "bytes in the manifest that are no text": (
        lambda path: (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes().replace(b"tensors", b"tens\xffrs")),
        "not one of lowlevel_zero's (UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position ",
    ),
    "a flipped bit in a shard": (lambda path: flip(shards(path)[1]), "__1_0.distcp is not what was written"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(
    damage: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, message = DAMAGES[damage]
    harm(checkpoint)
    capsys.readouterr()
    for command in (["consolidate", str(checkpoint), str(tmp_path / "out")], ["inspect", "--check", str(checkpoint)]):
        assert main(command) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"lowlevel_zero {command[0]}: error: ")
        assert message in error
        assert len(error) < 500
        assert not (tmp_path / "out").exists()


def test_other_files_are_never_replaced(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "of folders" / "optimizer.pt").mkdir(parents=True)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.safetensors").touch()
    of_files = (tmp_path / "files" / "model.safetensors", checkpoint / "objects.pt")
    for out in (checkpoint, checkpoint.parent, *of_files, tmp_path, tmp_path / "of folders"):
        before = sorted(tmp_path.rglob("*"))
        assert main(["consolidate", "--force", str(checkpoint), str(out)]) == 2
        assert "name another directory" in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


def test_the_working_directory_may_be_replaced(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    for _ in range(2):
        assert main(["consolidate", "--force", str(checkpoint), "."]) == 0
        assert {path.name for path in Path().iterdir()} == {"model.safetensors", "optimizer.pt"}


def test_an_output_may_lack_letters(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the table, and those of a path that are no text at all."""
    run = checkpoint.rename(checkpoint.with_name("caf\udce9"))
    with (checkpoint.parent / "told").open("w+", encoding="latin-1") as told:
        monkeypatch.setattr(sys, "stdout", told)
        assert main(["inspect", str(run)]) == 0
        told.seek(0)
        assert "caf\\udce9\n" in told.readline()
        assert ", \\u2026" in told.read()


def test_the_output_is_on_the_disk_and_in_a_folder_that_is_made(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr("lowlevel_zero.checkpoint.consolidate.sync", lambda path: synced.append(path.name))
    for _ in range(2):
        assert main(["consolidate", "--force", str(checkpoint), str(tmp_path / "made" / "out")]) == 0
    assert synced == [*("model.safetensors", "optimizer.pt") * 2, "out"]


def test_a_missing_shard_is_told_without_a_check(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards(checkpoint)[1].unlink()
    assert main(["inspect", str(checkpoint)]) == 2
    assert "__1_0.distcp is missing" in capsys.readouterr().err


def test_an_end_by_a_key_and_an_error_of_many_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["inspect", "a\nname"]) == 2
    assert capsys.readouterr().err.startswith("lowlevel_zero inspect: error: a name: expected a checkpoint")
    monkeypatch.setattr("lowlevel_zero.__main__.locate", interrupt)
    assert main(["inspect", "run"]) == 130


def interrupt(path: Path) -> Path:
    raise KeyboardInterrupt


def test_the_commands_of_its_page(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    commands = re.findall(r"^python -m lowlevel_zero (.+)$", page, flags=re.MULTILINE)
    assert {command.split()[0] for command in commands} == {command.name for command in COMMANDS}
    checkpoint.rename(checkpoint.with_name("step-100"))
    monkeypatch.chdir(checkpoint.parent.parent)
    for command in commands:
        assert main(command.split()) == 0


def test_the_console_script_says_what_every_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = re.findall(r'^lowlevel-zero = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    with pytest.raises(SystemExit, match="0"):
        resolve_name(name)(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert {command.name for command in COMMANDS} == {"consolidate", "inspect", "plan"}
    assert all(f"{command.name} {command.does}" in told for command in COMMANDS)


@pytest.mark.filterwarnings("ignore:'lowlevel_zero.__main__' found in sys.modules")
def test_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lowlevel_zero", "inspect", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("lowlevel_zero", run_name="__main__")
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("lowlevel_zero inspect: error: ")
    assert told.err.count("\n") == 1
