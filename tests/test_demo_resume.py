"""The demo's checkpoints: killed at any moment and started again, it ends as if nothing had happened."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lowlevel_zero.checkpoint import latest
from lowlevel_zero.demo import __main__ as demo
from lowlevel_zero.demo import ranks as demo_ranks
from lowlevel_zero.demo.options import parse
from lowlevel_zero.demo.text import library_sources
from lowlevel_zero.demo.training import Trainer
from tests.support.ranks import run_ranks

SMALL = "--layers=2 --width=32 --heads=4 --context=32 --batch=4 --dtype=fp32 --device=cpu".split()  # noqa: SIM905
STEPS, EVERY, KEEP = 24, 4, 2
ASKED = [*SMALL, f"--steps={STEPS}", f"--save-every={EVERY}", f"--keep={KEEP}", "--layer-drop=0.3", "--accumulation=2"]

Told = dict[str, Any]


class Place(NamedTuple):
    """Where one start of the demo leaves what it has to say."""

    out: Path
    start: int  # the how-manieth it is

    @property
    def steps(self) -> Path:
        """A line for each step that rank 0 has done."""
        return self.out / f"steps-{self.start}"

    def steps_done(self) -> list[int]:
        return [int(line) for line in self.steps.read_text().split("\n")[:-1]] if self.steps.exists() else []


def run_demo(rank: int, world_size: int, place: Place, arguments: list[str]) -> None:
    """The demo as one rank, as under torchrun, but with a record of its steps."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meet = {"init_method": f"file://{place.out / f'meet-{place.start}'}", "rank": rank, "world_size": world_size}
    demo_ranks._rendezvous = lambda folder: meet
    demo.SAMPLE_BYTES = 20
    demo.library_sources = lambda: library_sources()[:48]
    demo.draw = lambda *_: None
    step_as_ever = Trainer._timed_step

    def recorded(self: Trainer, step: int, *rest: Any) -> Any:
        loss = step_as_ever(self, step, *rest)
        if rank == 0:
            with place.steps.open("a") as file:
                file.write(f"{step}\n")
        return loss

    Trainer._timed_step = recorded  # type: ignore[method-assign]  # of this forked process alone
    demo.main([*ASKED, "--out", str(place.out), *arguments])


def finish(out: Path, *arguments: str, world_size: int = 2, start: int = 0) -> Told:
    """Run it to its end; what it told."""
    run_ranks(run_demo, world_size, Place(out, start), list(arguments), init=False)
    told: Told = json.loads((out / "summary.json").read_text())
    return told


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing has interrupted."""
    out = tmp_path_factory.mktemp("whole")
    finish(out)
    return out


@pytest.fixture
def uninterrupted(whole_run: Path) -> Told:
    told: Told = json.loads((whole_run / "summary.json").read_text())
    return told


def same_run(told: Told, expected: Told) -> None:
    """Bit for bit: JSON has all digits."""
    for what in ("train", "validation", "sample", "layers_drawn", "layers_dropped"):
        assert told[what] == expected[what], what


# Killing.


def kill_at(place: Place, arguments: list[str], step: int, delay: float) -> None:
    """Start two ranks, and kill them with SIGKILL some time after ``step``."""
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=run_demo, args=(rank, 2, place, arguments), daemon=True) for rank in range(2)]
    for process in started:
        process.start()
    try:
        _wait_for(place, step, started)
        # The moment is meant to be any: in a step, in a save, between two renames.
        time.sleep(delay)
    finally:
        random.shuffle(started)
        for process in started:
            process.kill()
        for process in started:
            process.join()


def _wait_for(place: Place, step: int, started: list[ForkProcess]) -> None:
    deadline = time.monotonic() + 30
    while max(place.steps_done(), default=0) < step:
        assert all(process.is_alive() for process in started), "a rank ended by itself"
        assert time.monotonic() < deadline, f"step {step} never came"
        time.sleep(0.001)


def moments() -> Iterator[tuple[int, float]]:
    """Steps and seconds after them: before the first save, at saves, and anywhere."""
    yield 2, 0.0
    for _ in range(3):
        yield EVERY * random.randrange(1, 5), random.uniform(0.0, 0.02)
    yield random.randrange(EVERY, STEPS - 2), random.uniform(0.0, 0.02)


def test_killed_again_and_again_it_ends_the_same(tmp_path: Path, uninterrupted: Told) -> None:
    begin = 0  # the step that the last start begins after
    for start, (step, delay) in enumerate(moments()):
        if begin > STEPS - 2 * EVERY:  # too little left to be killed in
            break
        place = Place(tmp_path, start)
        kill_at(place, ["--resume"], max(step, begin + 1), delay)
        done = place.steps_done()
        assert done[0] == begin + 1
        found = latest(tmp_path / "checkpoints")
        begin = int(found.name.split("-")[1].split(".")[0]) if found else 0
        assert done[-1] - begin <= EVERY
    told = finish(tmp_path, "--resume", start=9)
    same_run(told, uninterrupted)
    assert len(told["train"]) == STEPS
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == [f"step-{STEPS - EVERY}", f"step-{STEPS}"]


# Resuming.


def test_what_is_done_is_not_done_again(whole_run: Path, tmp_path: Path, uninterrupted: Told) -> None:
    out = shutil.copytree(whole_run, tmp_path / "out")
    again = finish(out, "--resume", start=1)
    same_run(again, uninterrupted)
    assert Place(out, 1).steps_done() == []
    assert again["seconds"] == uninterrupted["seconds"]


def stop_after(rank: int, world_size: int, place: Place, arguments: list[str], step: int) -> None:
    """The demo until its first checkpoint after ``step``."""

    class Stopped(Exception):
        pass

    step_as_ever = Trainer._timed_step

    def stopping(self: Trainer, at: int, *rest: Any) -> Any:
        if at > step:
            raise Stopped
        return step_as_ever(self, at, *rest)

    Trainer._timed_step = stopping  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        run_demo(rank, world_size, place, arguments)


def test_on_other_ranks_and_in_the_other_stage(tmp_path: Path, uninterrupted: Told) -> None:
    run_ranks(stop_after, 2, Place(tmp_path, 0), [], 8, init=False)
    run_ranks(stop_after, 3, Place(tmp_path, 1), ["--resume", "--stage=1"], 16, init=False)
    told = finish(tmp_path, "--resume", world_size=1, start=2)
    assert told["train"][:8] == uninterrupted["train"][:8]
    assert len(told["train"]) == STEPS
    assert told["world_size"] == 1
    assert [step for step, _ in told["validation"]] == [step for step, _ in uninterrupted["validation"]]
    assert told["validation"][-1][1] < told["validation"][0][1] - 0.1


def refused(rank: int, world_size: int, place: Place, arguments: list[str]) -> str:
    with pytest.raises(ValueError, match="--resume") as error:
        run_demo(rank, world_size, place, arguments)
    return str(error.value)


def test_another_run_is_not_continued(tmp_path: Path) -> None:
    run_ranks(stop_after, 1, Place(tmp_path, 0), [], 4, init=False)
    (told,) = run_ranks(refused, 1, Place(tmp_path, 1), ["--resume", "--lr=0.5"], init=False)
    assert "step-4 is of a run with --lr 0.002, this one has 0.5: give the same options" in told


def test_nothing_is_saved_where_nothing_is_asked(tmp_path: Path) -> None:
    finish(tmp_path, "--save-every=0", world_size=1)
    finish(tmp_path, "--stage=0", world_size=1, start=1)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save-every", "-1"], "--save-every: expected a whole number of at least 0, got '-1'"),
        (["--keep", "0"], "--keep: expected a whole number of at least 1, got '0'"),
        (["--checkpoint-dir", __file__], "--checkpoint-dir"),
        (["--resume", "--stage", "0"], "--resume needs --stage 1 or 2"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err


def test_checkpoints_are_in_the_folder_for_all_else() -> None:
    assert parse(["--out", "mine"]).checkpoint_dir == Path("mine/checkpoints")
    assert parse(["--out", "mine", "--checkpoint-dir", "fast"]).checkpoint_dir == Path("fast")
