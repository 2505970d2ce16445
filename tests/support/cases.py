"""Several checks in one launch of ranks: each is looked at in a subtest, so that one that failed hides no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from tests.support.ranks import run_cases, run_cases_expecting

Check = Callable[[int, int], Any]
"""Of a rank and the number of ranks; raises where something is wrong."""


def check_each(subtests: pytest.Subtests, world_size: int, checks: Iterable[Check], **options: Any) -> None:
    """Call each check on every rank; ``options`` are those of ``run_cases``."""
    for (check,), ran in run_cases(_call, world_size, [(check,) for check in checks], **options):
        with subtests.test(check.__name__):
            ran.values()


def check_cases(
    subtests: pytest.Subtests, world_size: int, check: Callable[..., Any], cases: Iterable[Any], **options: Any
) -> None:
    """Call ``check(rank, world_size, *case)`` for each case, which may stand alone where it is one argument."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    for case, ran in run_cases(check, world_size, tuples, **options):
        with subtests.test(", ".join(getattr(each, "__name__", str(each)) for each in case)):
            ran.values()


def check_refusals(
    subtests: pytest.Subtests, world_size: int, mistakes: Mapping[str, tuple[Any, ...]], **options: Any
) -> None:
    """Make each mistake on every rank, which must be told what belongs to it.

    Args:
        subtests: one for each mistake.
        world_size: how many ranks.
        mistakes: by name: a call of a rank and the number of ranks, how ``"Type: message"`` of the error begins, and
            what else is in it.
        options: of ``run_cases_expecting``.
    """
    cases = [(call, name) for name, (call, *_) in mistakes.items()]
    for (_, name), ran in run_cases_expecting(_call, world_size, cases, **options):
        _, begins, *others = mistakes[name]
        with subtests.test(name):
            for raised in ran.raised():
                told = f"{raised.type}: {raised.message}"
                assert told.startswith(begins), f"{name}: {told}"
                for text in others:
                    assert text in told, f"{name}: {told}"


def _call(rank: int, world_size: int, check: Check, *_: Any) -> Any:
    return check(rank, world_size)
