"""The scripts of docs/tutorial.md: they run, the change keeps DDP's losses, and the last one resumes on other ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
FIRST, LAST = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
(DIFF,) = re.findall(r"^```diff\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def changed(script: str) -> str:
    """Return ``script`` after the page's diff: each line that comes takes the place of those that went before it."""
    gone: list[str] = []
    for line in DIFF.splitlines():
        if line.startswith("-"):
            gone.append(line[1:])
        else:
            before = "\n".join(gone)
            assert script.count(before) == 1, before
            script = script.replace(before, line[1:])
            gone.clear()
    assert not gone
    return script


def run(script: str, world_size: int, folder: Path) -> list[dict[str, object]]:
    """Return what the names of a script are on each rank in the end, as far as they are plain."""

    def rank(rank: int, world_size: int) -> dict[str, object]:
        os.chdir(folder)
        names: dict[str, object] = {"__name__": "__main__"}
        own = script.replace(
            'dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")', "pass"
        )
        exec(compile(own, "train.py", "exec"), names)
        return {name: value for name, value in names.items() if isinstance(value, int | float | list)}

    return [*run_ranks(rank, world_size)]


def test_sharding_keeps_the_losses_of_ddp(tmp_path: Path) -> None:
    before, after = run(FIRST, 2, tmp_path), run(changed(FIRST), 2, tmp_path)
    for old, new in zip(before, after, strict=True):
        assert old["losses"] == pytest.approx(new["losses"], rel=1e-4)
        assert torch.tensor(new["losses"]).diff().sum() < 0


def test_the_last_script_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    first = run(LAST, 2, tmp_path)
    then = run(LAST, 3, tmp_path)
    assert [names["step"] for names in first] == [19] * 2
    assert [names["step"] for names in then] == [39] * 3
    assert first[0]["total"] > then[0]["total"]
    assert sorted(os.listdir(tmp_path / "run")) == ["step-20", "step-40"]
