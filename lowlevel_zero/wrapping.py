"""An optimizer that wraps another and still is one: groups, state and defaults are the wrapped one's."""

from __future__ import annotations

from itertools import count
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from torch.optim import Optimizer


class WrappingOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` whose groups, state and defaults are read from and written to another.

    Schedulers and trainers accept it, and what one of the two loads or changes the other has. Step hooks that
    are registered on it run once a step.

    Attributes:
        optim: the wrapped optimizer.
    """

    optim: Optimizer

    def __init__(self, optim: Optimizer) -> None:
        # Optimizer.__init__ would make groups and state of its own; unpickling makes hooks and no more.
        super().__setstate__({"optim": optim})
        _alive[next(_made)] = self

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups; their ``params`` are slices, ``[s]`` each."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by slice."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.optim.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optim.defaults = defaults

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """``pickle`` and ``copy`` ask for this: they would make an optimizer of a rank that there is already."""
        raise TypeError(
            f"expected its state, got the {type(self).__name__} itself to be pickled or copied, whose slices and "
            "process group are this rank's alone: save optimizer.state_dict(), which every rank calls, or use "
            "lowlevel_zero.checkpoint.save_checkpoint, and load into an optimizer that every rank constructs"
        )

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """``torch.amp.GradScaler.step`` asks for this first, of an optimizer whose gradients it can't see."""
        raise RuntimeError(
            "expected no enabled torch.amp.GradScaler around this optimizer: it would look for gradients before "
            "they are reduced. Convert the model to fp16 and call optimizer.backward(loss), which scales the loss "
            "by itself; or use bf16 (model or autocast), which needs no scaling; or GradScaler(enabled=False)"
        )


_made = count()
_alive: WeakValueDictionary[int, WrappingOptimizer] = WeakValueDictionary()


def alive() -> list[WrappingOptimizer]:
    """The wrapping optimizers of this process that somebody still holds, in the order of their making."""
    return list(_alive.values())
