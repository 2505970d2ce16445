"""Several checks in one launch of ranks, and what the package's logger tells meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import run_cases

Check = Callable[[int, int], None]
"""Something that every rank does, given its rank and their number, and that raises where it finds a mistake."""


def check_all(checks: Iterable[Check], world_size: int, subtests: pytest.Subtests, **options: Any) -> None:
    """Each of ``checks`` on all ranks, in a subtest of its name; ``options`` are those of ``run_cases``."""
    for (check,), ran in run_cases(_call, world_size, [(check,) for check in checks], **options):
        with subtests.test(check.__name__):
            ran.values()


def _call(rank: int, world_size: int, check: Check) -> None:
    check(rank, world_size)


def of_all(value: Any) -> list[Any]:
    """What each rank has for ``value``; all call it, over the default process group."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def told(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The lines that the package logs in this process from here to the end."""
    lines: list[str] = []
    logger = logging.getLogger("lowlevel_zero")
    handler, before = logging.Handler(level), logger.level
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    if level < logging.WARNING:
        logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
