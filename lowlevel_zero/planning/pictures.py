"""Pictures: one figure in a file, drawn by matplotlib where that is installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def figure_in(path: str | os.PathLike[str], width: float, height: float) -> Iterator[Any]:
    """A ``matplotlib.figure.Figure`` to draw into, so many inches wide and high; written to ``path`` at the end.

    The suffix of ``path`` says in which format. Nothing of ``pyplot``, or of its user's settings, is touched.

    Raises:
        ModuleNotFoundError: matplotlib isn't installed.
        ValueError: a format that matplotlib doesn't know.
        OSError: it can't be written there.
    """
    try:
        plotting = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"a picture needs {missing.name}: pip install 'lowlevel-zero[cli]', or leave the picture out"
        ) from None
    figure = plotting.Figure(figsize=(width, height), dpi=150, layout="constrained")
    yield figure
    figure.savefig(path)
