"""What exceptions leave is what the docs say: the table's rows, and operations that fail in small trainings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowlevel_zero
from lowlevel_zero import LowLevelZeroOptimizer, checkpoint, deepspeed
from tests.simulation import faults, training
from tests.simulation.aftermath import AFTERMATHS, OF_CALL
from tests.simulation.faults import Point, points, problem
from tests.simulation.lessons import LESSONS

PAGE = (Path(__file__).parents[2] / "docs" / "when-something-goes-wrong.md").read_text()
EVERY = 197  # of the operations one fails here; ``make simulate`` draws among all of them


def test_the_table_of_the_page_has_these_rows() -> None:
    section = PAGE.partition("## What an exception leaves")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == list(map(str, AFTERMATHS))


def test_the_rows_name_public_calls_and_those_of_the_trainings() -> None:
    names = [call.rpartition(".")[2] for call in OF_CALL if call.replace(".", "").isidentifier()]
    homes = (LowLevelZeroOptimizer, lowlevel_zero, checkpoint, deepspeed, torch.Tensor)
    assert [name for name in names if not any(hasattr(home, name) for home in homes)] == []
    used = {call for lesson in LESSONS.values() for call in (*lesson.first, *lesson.calls)}
    assert used <= set(OF_CALL)


@pytest.mark.parametrize("name", LESSONS)
def test_trainings_go_on_wherever_an_operation_fails(name: str) -> None:
    torch.set_num_threads(1)
    for point in list(points([name]))[len(name) % EVERY :: EVERY]:
        assert not (found := problem(point)), f"{found}\nreplay: {point.replay}"


def test_ranks_go_on_where_edited_gradients_cannot_be_taken_over() -> None:
    """The step after ``synchronize`` has agreed, and copies what callers have made of gradients: operation 207."""
    for at in range(204, 211):
        assert not (found := problem(Point("edited slices", 0, at))), found


# ---- what the sweep itself must see ----


def test_a_step_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are compared with those of another run, not with those of this one."""
    real = faults.without_fault

    def other(name: str, batches: tuple[tuple[int, ...], ...]) -> list[dict[str, Tensor]]:
        return real(name, tuple(each[:-1] for each in batches))

    monkeypatch.setattr(faults, "without_fault", other)
    assert "wrong numbers" in problem(Point("stage 1", 1, 10**6))


def test_a_rank_that_takes_no_part_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.CALLS, "zero_grad", lambda training: None)
    assert any(problem(point) for point in list(points(["stage 1"]))[::40])


def test_points_are_told_with_a_command() -> None:
    command = Point("stage 2", 1, 7).replay
    assert re.fullmatch(r'python -m tests\.simulation\.faults "stage 2" --rank 1 --at 7', command)
