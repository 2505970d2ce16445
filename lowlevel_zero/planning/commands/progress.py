"""How far a long command has come, on stderr: tqdm's bar where it is installed, else a line now and then."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from types import TracebackType
from typing import Any

PAUSE = 10.0  # seconds between lines, for who can't redraw one


class Progress:
    """Counts bytes up to ``total``: ``with Progress(total) as progress: progress.add(count)``."""

    def __init__(self, total: int) -> None:
        self._bar: Any = _tqdm(total) if importlib.util.find_spec("tqdm") else _Lines(total)

    def add(self, count: int) -> None:
        self._bar.update(count)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def _tqdm(total: int) -> Any:
    pause = 0.2 if sys.stderr.isatty() else PAUSE
    return importlib.import_module("tqdm").tqdm(
        total=total, unit="B", unit_scale=True, unit_divisor=1024, mininterval=pause, dynamic_ncols=True
    )


class _Lines:
    """The little of tqdm that is needed."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._next = time.monotonic() + PAUSE

    def update(self, count: int) -> None:
        self._done += count
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PAUSE
            print(f"{self._done / self._total:.0%} of {self._total:,} bytes", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass
