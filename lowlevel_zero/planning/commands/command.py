"""A sub-command: what it is called, what it takes, what it does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A sub-command.

    Attributes:
        name: what it is called.
        does: what it does, in a few words.
        run: raises ``ValueError``, ``OSError`` or ``ImportError`` where it can't.
    """

    name: str
    does: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def whole_number(text: str) -> int:
    """The value of an option, such as ``8``: a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text!r}")
    return number
