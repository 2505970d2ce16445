"""Logging: through one logger, one line at the start, which is seen by default, and never a print."""

from __future__ import annotations

import ast
import io
import logging
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.construction import start_line
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_cases, run_ranks
from tests.support.several import told

PACKAGE = Path(__file__).parents[2] / "lowlevel_zero"
# Programs, which talk to who has started them.
PROGRAMS = ("__main__.py", "planning/plan_command.py")


def prints(source: str) -> list[int]:
    """The lines on which something is printed, or written to the standard streams."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("print", "pprint")]
    streams = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in STREAMS]
    return sorted(names + streams)


STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__")


def loggers(source: str) -> set[str]:
    """The names of the loggers that a source asks for."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    asked = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "getLogger"]
    return {str(argument.value) for call in asked for argument in call.args if isinstance(argument, ast.Constant)}


def sources() -> dict[str, str]:
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}


def test_the_library_never_prints_and_has_one_logger() -> None:
    exits = "checkpoint/background.py"  # it sets the exit code of a process through the flush of a standard stream
    library = {name: text for name, text in sources().items() if not name.startswith(PROGRAMS) and name != exits}
    assert len(library) > 40
    assert {name: prints(text) for name, text in library.items() if prints(text)} == {}
    assert set().union(*map(loggers, library.values())) == {"lowlevel_zero"}


@pytest.mark.parametrize("source", ["print(1)", "import sys\nsys.stderr.write('x')", "f = __import__('sys').stdout"])
def test_a_print_would_be_found(source: str) -> None:
    assert prints(source)


def test_one_line_at_the_start_on_rank_zero_and_another_where_fp8_costs_time() -> None:
    def live(rank: int, world_size: int) -> list[str]:
        with told(logging.DEBUG) as lines:
            model = nn.Linear(4, 3)
            optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, stage=2)
            for _ in range(3):
                optimizer.backward(model(torch.ones(2, 4)).sum())
                optimizer.step()
                optimizer.zero_grad()
            with told() as warnings:
                LowLevelZeroOptimizer(torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1), fp8_communication=True)
            assert lines[1:2] == warnings
        return lines

    (line, costs, _), second = run_ranks(live, 2)
    assert line.startswith("ZeRO stage 2: 15 elements in 2 parameters over 2 ranks, ")
    assert costs.startswith("fp8_communication: on CPUs rounding takes longer than it saves")
    assert second == []


@on_ranks(2)
def test_hooks_of_the_wrapped_optimizer_are_told_of_and_run_right_on_the_wrapper(rank: int) -> None:
    def trained(wraps: bool) -> tuple[torch.Tensor, bool]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        inner: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LowLevelZeroOptimizer(inner, model=model) if wraps else inner
        seen: list[torch.Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: (nn.utils.clip_grad_norm_(model.parameters(), 0.1), None)[1])
        optimizer.register_step_post_hook(lambda *_: seen.append(model.weight.detach().clone()))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return model.weight.detach(), torch.equal(seen[0], model.weight)

    torch.testing.assert_close(trained(True), trained(False))
    for register, kind in (
        ("register_step_pre_hook", "step"),
        ("register_step_post_hook", "step"),
        ("register_state_dict_post_hook", "state dict"),
        ("register_load_state_dict_pre_hook", "state dict"),
    ):
        model = nn.Linear(4, 3)
        inner: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(inner, 1)
        getattr(inner, register)(lambda *_: None)
        with told() as warnings:
            LowLevelZeroOptimizer(inner, model=model)
        start = f"SGD: a {kind} hook of the wrapped optimizer sees slices"
        assert [line.startswith(start) for line in warnings] == [True] * (rank == 0)


def test_a_class_s_own_hooks_are_not_told_of() -> None:
    class Hooked(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.register_step_pre_hook(self.look)

        def look(self, *_: Any) -> None:
            pass

    with told() as warnings:
        start_line.warn_of_hooks(Hooked(nn.Linear(4, 3).parameters()))
    assert warnings == []


LINE = (
    "lowlevel_zero: ZeRO stage 2: 15 elements in 2 parameters over 2 ranks, 1 bucket by {}, 96 B a rank beside the "
    "optimizer's states\n"
)


def shown(rank: int, world_size: int, set_up: Callable[[], object]) -> str:
    """What a rank writes to stderr whose program has set up logging by ``set_up`` alone."""
    logging.root.handlers.clear()  # pytest's
    logging.root.setLevel(logging.WARNING)
    logging.getLogger("lowlevel_zero").setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)
    with redirect_stderr(io.StringIO()) as written:
        set_up()
        level = logging.getLogger("lowlevel_zero").level
        model = nn.Linear(4, 3)
        LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=2)
        assert logging.getLogger("lowlevel_zero").level == level
        if rank == 1:
            logging.getLogger("lowlevel_zero").warning("told")
    return written.getvalue()


def by_environment(level: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWLEVEL_ZERO_LOG", level)
        start_line.set_up()


PREFIXED, BARE, BY_ROOT = "lowlevel_zero: warning: told\n", "lowlevel_zero: told\n", "WARNING:lowlevel_zero:told\n"
# How logging is set up, whether the start line is seen, and what a warning looks like.
SET_UPS: dict[str, tuple[Callable[[], object], bool, str]] = {
    "nobody": (lambda: None, True, PREFIXED),
    "a level in the environment": (lambda: by_environment("warning"), False, PREFIXED),
    "a level that shows it": (lambda: by_environment("INFO"), True, PREFIXED),
    "a level of the logger": (lambda: logging.getLogger("lowlevel_zero").setLevel(logging.ERROR), False, ""),
    "warnings alone": (lambda: logging.basicConfig(level=logging.WARNING), False, BY_ROOT),
    "everything": (lambda: logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s"), True, BARE),
    "nothing": (lambda: logging.disable(logging.INFO), False, PREFIXED),
}


def test_the_start_line_and_warnings_are_seen_unless_who_sets_up_logging_decides_otherwise(
    subtests: pytest.Subtests,
) -> None:
    def each(rank: int, world_size: int, name: str) -> str:
        return shown(rank, world_size, SET_UPS[name][0])

    for (name,), ran in run_cases(each, 2, [(name,) for name in SET_UPS], one_group=True):
        with subtests.test(name):
            _, is_seen, warning = SET_UPS[name]
            assert ran.values() == [LINE.format("shared memory of one host") if is_seen else "", warning]


def test_a_level_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="LOWLEVEL_ZERO_LOG: expected one of debug, .* got 'loud'"):
        by_environment("loud")
