"""What is under way between ranks: when it can end, and how its data moves."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

PROMPT = 0.5  # how likely a look finds what is there


class Pending:
    """What ends when other ranks have done their part."""

    broken = ""  # why it never will

    def is_ready(self, asked: dict[int, bool]) -> bool:
        """Whether it can end, or be seen to be broken; without side effects.

        ``asked``: by id, what has been found out of others in the same breath.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Let it end, once."""
        raise NotImplementedError


class apart:
    """Compute for no rank: without its autograd, its counters and its streams."""

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else None
        if self._modes is not None:
            self._modes.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._modes is not None:
            self._modes.__exit__(*error)
        torch._C._set_grad_enabled(self._grad)


def closed(rank: int) -> str:
    return f"[simulated network] Connection closed by peer [rank {rank}]"
