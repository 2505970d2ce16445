"""Replace attributes of the package, and fail where there is nothing to replace.

A plain assignment to a name that is gone would go on passing, and test nothing.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest


def patch_rank(owner: object, name: str, value: Any) -> None:
    """Replace an attribute for the rest of this process, a forked rank.

    Elsewhere use the fixture ``monkeypatch``, or ``pytest.MonkeyPatch.context()``: they undo it.

    Raises:
        AttributeError: ``owner`` has no such attribute.
    """
    assert multiprocessing.parent_process() is not None, "expected a forked rank: nothing would undo this"
    pytest.MonkeyPatch().setattr(owner, name, value)
