"""Several checks in one launch of ranks, and what the package's logger tells meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.cases import Check, check_each


def check_all(checks: Iterable[Check], world_size: int, subtests: pytest.Subtests, **options: Any) -> None:
    """Each of ``checks`` on all ranks, in a subtest of its name; ``options`` are those of ``run_cases``."""
    check_each(subtests, world_size, checks, **options)


def of_all(value: Any) -> list[Any]:
    """What each rank has for ``value``; all call it, over the default process group."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def told(level: int = logging.WARNING, levels: bool = False) -> Iterator[list[str]]:
    """The lines that the package logs in this process from here to the end; with their levels, if it is asked."""
    lines: list[str] = []
    logger = logging.getLogger("lowlevel_zero")
    handler, before = logging.Handler(level), logger.level
    handler.emit = lambda record: lines.append(f"{record.levelname}: " * levels + record.getMessage())  # type: ignore
    logger.addHandler(handler)
    if level < logging.WARNING:
        logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
