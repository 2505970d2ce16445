"""Answers of the package's probes, kept from simulated rank to simulated rank: they took a quarter of a seed's time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.optim import Optimizer

from lowlevel_zero.optim import splits

_KEPT = ("probe_elements", "probe_matrices", "probe_parameters", "writes_without_gradients")


@contextmanager
def kept_answers() -> Iterator[None]:
    """Probe an optimizer only if no other of its class, settings and dimensions was probed in this process.

    Probes step fresh optimizers, without chance and without handing over, so traces stay as they are. Operations in
    them aren't repeated, so this isn't for runs in which operations are counted.
    """
    with mock.patch.multiple(splits, **_asked_once):
        yield


def _once(probe: Callable[..., Any]) -> Callable[..., Any]:
    answers: dict[str, Any] = {}

    def answer(optimizer: Optimizer, parameters: Collection[Tensor] = (), *others: Any) -> Any:
        wanted, groups = set(parameters), []
        for group in optimizer.param_groups:
            groups.append({**group, "params": {p.dim() for p in group["params"] if p in wanted}})
        key = repr((type(optimizer), groups, {p.dim() for p in wanted}, *others))
        if key not in answers:
            answers[key] = probe(optimizer, *([parameters] if parameters else ()), *others)
        return answers[key]

    return answer


_asked_once = {name: _once(getattr(splits, name)) for name in _KEPT}
