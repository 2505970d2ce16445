"""Folders beside checkpoints that no save makes, or with names that few people give: passed by, cleared and told."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lowlevel_zero.checkpoint import folders, latest, save_checkpoint
from lowlevel_zero.checkpoint.folders import claim, clear_remains, prune, remove
from lowlevel_zero.checkpoint.manifest import MANIFEST
from tests.support.ranks import run_ranks
from tests.support.saving import linear

HEADS = {"serial": '{"format": 3, "serial": "new", "runs": []', "runs": '{"format": 3, "serial": 1, "runs": 5'}


def saved(folder: Path) -> Path:
    """A checkpoint of one process."""
    path = folder / "step-1"
    run_ranks(lambda rank, world_size: save_checkpoint(path, *linear()).wait(), 1)
    return path


def test_remains_of_a_save_are_known_by_any_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("step 1", "step\n1", "étape"):
        (tmp_path / f"{name}.0123456789abcdef.tmp").mkdir()
        (tmp_path / f"{name}.0123456789abcdef.tmp" / "objects.pt").touch()
    assert latest(tmp_path) is None
    assert caplog.messages == []
    clear_remains(tmp_path / "step-2.0123456789abcdef.tmp")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_taken_for_remains_before_its_file_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another save may clear it in between."""
    written, lock = tmp_path / "step-1.0123456789abcdef.tmp", folders.fcntl.flock
    cleared: list[Path] = []

    def lock_late(file: Any, how: int) -> None:
        if not cleared:
            cleared.append(written)
            shutil.rmtree(written)
        lock(file, how)

    monkeypatch.setattr(folders.fcntl, "flock", lock_late)
    with claim(written, "__0_0.distcp") as file:
        assert cleared == [written]
        assert os.path.samestat(os.fstat(file.fileno()), (written / "__0_0.distcp").stat())


@pytest.mark.parametrize("of", HEADS)
def test_a_head_of_other_types_is_damage(of: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = saved(tmp_path)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / MANIFEST).write_text(f"{HEADS[of]},\n}}")
    assert latest(tmp_path) == whole
    assert f"{MANIFEST}: damaged, or not one of lowlevel_zero's (TypeError: expected a number" in caplog.text
    prune(whole, 1, ["a run"])
    assert len(caplog.messages) == 1


def test_a_begun_removal_ends_where_a_file_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    with monkeypatch.context() as broken_off:
        broken_off.setattr("lowlevel_zero.checkpoint.folders.finish_removal", lambda path: None)
        remove(path)
    path.rename(tmp_path / "moved")
    path.write_text("notes")
    clear_remains(tmp_path / "step-2.0123456789abcdef.tmp")
    assert {each.name for each in tmp_path.iterdir()} == {"moved", "step-1"}
    assert path.read_text() == "notes"
