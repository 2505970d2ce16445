"""The start line: one log line about each new optimizer, which is shown even if logging isn't set up; and warnings.

Python shows INFO records nowhere by default, and warnings without a word of where they are from. Where the program has
set up no logging, the line and warnings go to stderr under the package's name; else the program's handlers and levels
decide. The environment variable ``LOWLEVEL_ZERO_LOG`` sets the level of the package's logger: "warning" leaves the
line out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from ..communication.process_groups import backends_by_device
from ..layout.held import Sharded
from ..layout.records import bytes_of
from ..layout.text import counted, in_bytes, shares_text
from ..partition import owned_by_rank

VARIABLE = "LOWLEVEL_ZERO_LOG"
_LEVELS = ("debug", "info", "warning", "error", "critical")
_log = logging.getLogger("lowlevel_zero")

# Where an optimizer keeps hooks of each kind, and what becomes of those that the caller has registered.
_HOOKS = {
    "step": (
        ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        "sees slices, and the model as it was before the step",
    ),
    "state dict": (
        [
            f"_optimizer_{action}_{when}_hooks"
            for action in ("state_dict", "load_state_dict")
            for when in ("pre", "post")
        ],
        "sees slices, or doesn't run",
    ),
}


class _ToStderr(logging.Handler):
    """Writes records to stderr under the package's name, as long as the program has set up no logging."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, unless other handlers get it."""
        if not _is_set_up() and logging.lastResort is not None:
            level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
            named = logging.makeLogRecord({"msg": f"{record.name}: {level}{record.getMessage()}"})
            logging.lastResort.emit(named)  # to what is stderr by now


def _is_set_up() -> bool:
    """Return whether the program has set up a log handler that receives the package's records."""
    return bool(logging.root.handlers) or not all(isinstance(each, _ToStderr) for each in _log.handlers)


def set_up() -> None:
    """Show records on stderr where no logging is set up, from the level on that ``LOWLEVEL_ZERO_LOG`` names.

    Raises:
        ValueError: the variable is no level.
    """
    if not any(isinstance(each, _ToStderr) for each in _log.handlers):
        _log.addHandler(_ToStderr())
    level = os.environ.get(VARIABLE, "")
    if level and level.lower() not in _LEVELS:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(_LEVELS)}, got {level!r}")
    if level:
        _log.setLevel(level.upper())


def warn_of_hooks(optimizer: Optimizer) -> None:
    """Warn of hooks that the caller has registered on an ``optimizer`` that is to be wrapped.

    Methods of the optimizer are its class's own hooks.
    """
    for kind, (names, sees) in _HOOKS.items():
        hooks = [hook for name in names for hook in getattr(optimizer, name).values()]
        if any(getattr(hook, "__self__", None) is not optimizer for hook in hooks):
            text = "%s: a %s hook of the wrapped optimizer %s: register it on the LowLevelZeroOptimizer instead"
            _log.warning(text, type(optimizer).__name__, kind, sees)


def log_start(optimizer: Sharded) -> None:
    """Log the start line and ranks' shares of whole parameters on the first rank; warn there of fp8 over the host."""
    parameters, options = optimizer.sharded_parameters, optimizer.options
    ranks = parameters.shard_groups[0]
    if ranks.group_rank != 0:
        return
    device = parameters.records[0].padded.device
    way = ranks.describe_backend(device)
    if options.communication.fp8 and way is not None:
        _log.warning(
            "fp8_communication: on CPUs rounding takes longer than it saves, except over a link between hosts of less "
            "than about 4 Gbit/s: leave it out unless your link is slower"
        )
    with _shown():
        _log.info(
            "ZeRO stage %d: %s elements in %s over %s, %s by %s, %s a rank beside the optimizer's states",
            options.stage,
            f"{sum(record.split.numel for record in parameters):,}",
            counted(len(parameters.records), "parameter"),
            counted(ranks.ranks, "rank"),
            counted(sum(len(each.reducer.plan.whole) for each in optimizer.sharded_groups), "bucket"),
            way or backends_by_device(ranks.group)[device.type],
            in_bytes(bytes_of(optimizer)),
        )
        for group, records in zip(parameters.shard_groups, parameters.by_shard_group, strict=True):
            stacks = sum(record.split.owner is None and not record.is_flat for record in records)
            if stacks:
                _log.info("%d stacks of matrices are cut between them: each rank steps as many of a stack", stacks)
            whole = [record.split for record in records if record.split.owner is not None]
            if whole:
                text = "%d parameters are stepped whole by one rank each, which keeps their states; %s"
                _log.info(text, len(whole), shares_text(owned_by_rank(whole, group.size)))


@contextmanager
def _shown() -> Iterator[None]:
    """Let INFO records of the body be shown on stderr, unless the program has set up logging."""
    level = _log.level
    if not _is_set_up() and level <= logging.INFO:
        _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.setLevel(level)
