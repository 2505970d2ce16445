"""What an exception leaves: one record for each public call, as the table in the docs tells it, and as faults show it.

``docs/when-something-goes-wrong.md`` has a row for each record, and a loop that follows them. ``faults.py`` makes every
operation of some trainings fail once and follows that loop. ``test_aftermath.py`` holds page and records together.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Left(Enum):
    """What an exception leaves on a rank, in the words of the table."""

    NOTHING = "nothing has changed"
    GRADIENTS = "the step's gradients are lost"
    UNDEFINED = "parameters and states may be undefined"
    NO_OPTIMIZER = "no optimizer; parameters are whole, perhaps rank 0's"
    NO_CHECKPOINT = "no checkpoint; nothing else has changed"


# After which parameters and states are what they were before the call.
UNCHANGED = (Left.NOTHING, Left.GRADIENTS, Left.NO_CHECKPOINT)


class Others(Enum):
    """What the other ranks see, in the words of the table."""

    RAISE = "raise too"
    LATER = "raise too, or in their next call"
    WAIT = "raise too, or wait for this rank until its process ends"


class Recovery(Enum):
    """What every rank does, in the words of the table."""

    AGAIN = "call it again"
    ZERO_GRAD = "`zero_grad`, next batch"
    LOAD = "`zero_grad`, next batch; load a checkpoint when told so"
    CONSTRUCT = "construct again, from a new plain optimizer"
    RESTART = "let it end the process; start again from a checkpoint"


class Aftermath(NamedTuple):
    """One row of the table.

    Attributes:
        calls: the public calls that it is about.
        here: what holds on the rank that the exception comes from.
        others: what the other ranks see.
        recovery: what every rank does then.
    """

    calls: tuple[str, ...]
    here: Left
    others: Others
    recovery: Recovery

    def __str__(self) -> str:
        """Return the row as it stands in the page."""
        calls = ", ".join(f"`{call}`" for call in self.calls)
        return f"| {calls} | {self.here.value} | {self.others.value} | {self.recovery.value} |"


AFTERMATHS = [
    Aftermath(("LowLevelZeroOptimizer(...)",), Left.NO_OPTIMIZER, Others.RAISE, Recovery.CONSTRUCT),
    Aftermath(("add_param_group",), Left.NO_OPTIMIZER, Others.RAISE, Recovery.CONSTRUCT),
    Aftermath(("model(...)",), Left.UNDEFINED, Others.LATER, Recovery.LOAD),
    Aftermath(
        ("backward", "backward_by_grad", "backward_pass", "loss.backward()", "no_sync"),
        Left.GRADIENTS,
        Others.LATER,
        Recovery.ZERO_GRAD,
    ),
    Aftermath(
        ("clip_grad_norm_", "lowlevel_zero.clip_grad_norm_", "lowlevel_zero.clip_grad_value_", "p.grad", "synchronize"),
        Left.GRADIENTS,
        Others.LATER,
        Recovery.ZERO_GRAD,
    ),
    Aftermath(("step", "step after synchronize"), Left.UNDEFINED, Others.LATER, Recovery.LOAD),
    Aftermath(("zero_grad",), Left.GRADIENTS, Others.LATER, Recovery.ZERO_GRAD),
    Aftermath(("train", "eval"), Left.UNDEFINED, Others.WAIT, Recovery.RESTART),
    Aftermath(
        ("get_grad_norm", "verify", "offload_states", "reload_states"), Left.GRADIENTS, Others.LATER, Recovery.ZERO_GRAD
    ),
    Aftermath(
        ("get_param_grad", "state_dict", "Sharded.state_dict", "deepspeed.safe_get_full_*"),
        Left.NOTHING,
        Others.WAIT,
        Recovery.RESTART,
    ),
    Aftermath(("deepspeed.safe_set_full_grad",), Left.GRADIENTS, Others.WAIT, Recovery.RESTART),
    Aftermath(
        ("load_state_dict", "load_checkpoint", "Sharded.load_state_dict", "deepspeed.safe_set_full_fp32_param"),
        Left.UNDEFINED,
        Others.WAIT,
        Recovery.RESTART,
    ),
    Aftermath(("save_checkpoint",), Left.NO_CHECKPOINT, Others.RAISE, Recovery.AGAIN),
    Aftermath(("latest(group=...)",), Left.NOTHING, Others.RAISE, Recovery.AGAIN),
]

OF_CALL = {call: each for each in AFTERMATHS for call in each.calls}
