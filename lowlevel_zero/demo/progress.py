"""The progress bar, and the packages that only the demo needs."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, TracebackType

from .training import Glance


def optional(name: str) -> ModuleType:
    """Import a package of the ``demo`` extra; exits with what to do where it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise SystemExit(f"the demo needs {missing.name}: pip install 'lowlevel-zero[demo]'") from None


class Progress:
    """A bar of steps with loss, gradient norm and speed; nothing at all where it is not ``visible``."""

    def __init__(self, steps: int, visible: bool, done: int = 0) -> None:
        # A file or a log can't redraw a line: there, a line in ten seconds is enough.
        pause = 0.2 if sys.stderr.isatty() else 10
        self._bar = optional("tqdm").tqdm(
            total=steps, initial=done, disable=not visible, unit="step", mininterval=pause, dynamic_ncols=True
        )

    def show(self, glance: Glance) -> None:
        speed = f"{glance.tokens_per_second:,.0f} tokens/s"
        text = f"loss {glance.loss:.3f}, norm {glance.norm:.2f}, {speed}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(glance.steps - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
