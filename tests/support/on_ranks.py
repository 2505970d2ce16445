"""Tests whose body is what each rank does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.support.ranks import run_cases, run_ranks


def on_ranks(
    world_size: int, cases: Iterable[Any] | None = None, **launch: Any
) -> Callable[[Callable[..., None]], Any]:
    """Make a test of what each rank does, given its rank: it fails where a rank raises.

    What the function asks for behind its rank are the values of a case, if there are some, and then fixtures and
    parameters, as of any test::

        @on_ranks(2, product(STAGES, (1, 3)))
        def test_it_trains(rank: int, stage: str, batches: int) -> None: ...

    Args:
        cases: what is done one after another in one launch of ranks, each in a subtest that it names: a tuple of
            values, or the only one.
        launch: of ``run_ranks``, or of ``run_cases``, of which ``one_group`` is True unless it is told otherwise.
    """

    def decorate(work: Callable[..., None]) -> Any:
        _, *asks = inspect.signature(work).parameters.values()
        test = _once(work, world_size, launch)
        if cases is not None:
            given = [case if isinstance(case, tuple) else (case,) for case in cases]
            test = _of_cases(work, world_size, given, {"one_group": True, **launch})
            subtests = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
            asks = [subtests, *asks[len(given[0]) :]]
        functools.update_wrapper(test, work)
        test.__signature__ = inspect.Signature(asks)  # type: ignore[attr-defined]
        return test

    return decorate


def _once(work: Callable[..., None], world_size: int, launch: dict[str, Any]) -> Callable[..., None]:
    def test(**asked: Any) -> None:
        __tracebackhide__ = True
        run_ranks(lambda rank, _: work(rank, **asked), world_size, **launch)

    return test


def _of_cases(
    work: Callable[..., None], world_size: int, cases: list[tuple[Any, ...]], launch: dict[str, Any]
) -> Callable[..., None]:
    def test(subtests: pytest.Subtests, **asked: Any) -> None:
        __tracebackhide__ = True
        for case, ran in run_cases(lambda rank, _, *of: work(rank, *of, **asked), world_size, cases, **launch):
            with subtests.test(", ".join(map(_told, case))):
                ran.values()

    return test


def _told(value: Any) -> str:
    """What names a value of a case in a subtest."""
    return value.__name__ if inspect.isroutine(value) or inspect.isclass(value) else str(value)
