"""Trials: fresh optimizers of a class step small parameters, to find the inputs and the results of a step.

The optimizer itself, and random number generators, stay unchanged.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from inspect import getclosurevars
from itertools import chain
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as _torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .twins import NoProbe, Options, fresh, kinds_to_try, own_options, twin, unlike_settings, with_one_each

LARGE = (16, 12, 5, 4, 3, 2)  # a shape of as many dimensions as a parameter has
LARGE_LR = 0.1  # by which decay that comes with it isn't lost to rounding
# Steps with gradients, and then without. Slow weights are updated in every second to tenth step, seldom later, and some
# are made in the first of these. Limits, as of a clamp, bind at once: so some parameters have no gradient at all.
_USED, _UNUSED = 11, 100


def full_name(optimizer: Optimizer) -> str:
    """Return the class's module and name, without private modules, from which torch moves classes."""
    cls = type(optimizer)
    return re.sub(r"\._[a-z]\w*\.", ".", f"{cls.__module__}.{cls.__qualname__}")


def step_is_replaced(optimizer: Optimizer) -> bool:
    """Return whether ``step`` is replaced on the instance; wrappers of schedulers and compilers don't count."""
    return "step" in vars(optimizer) and _bare(optimizer.step) is not _bare(type(optimizer).step)


def _bare(method: Any) -> Any:
    """Return the function of a method, without what torch's schedulers and compilers have put around it."""
    while True:
        if getattr(method, "_wrapped_by_lr_sched", False):
            is_told = hasattr(method, "__wrapped__")  # torch 2.4's wrapper has it in its closure alone
            method = method.__wrapped__ if is_told else getclosurevars(method).nonlocals["func"]
        elif hasattr(method, "_torchdynamo_orig_callable"):
            method = method._torchdynamo_orig_callable
        else:
            return getattr(method, "__func__", method)


# ---- what a step makes, needs and writes ----


def states_of_shape(
    optimizer: Optimizer,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    make: Callable[[list[Tensor]], Optimizer] | None = None,
) -> list[Options]:
    """Return the state that a parameter of this ``shape`` gets in its first step, for each param group.

    The parameter is one of ``dtype`` on the host; None: one like the group's first. ``make``: makes another optimizer;
    None: its class's constructor.

    Raises:
        NoProbe: no other optimizer of the class could be made.
    """
    with undisturbed():
        params: list[Tensor] = []
        on_host = torch.empty(0, dtype=dtype, device="cpu")
        for group in optimizer.param_groups:
            like = group["params"][0] if group["params"] and dtype is None else on_host
            params.append(torch.nn.Parameter(like.new_zeros(shape)))
        other = make(params) if make else with_one_each(optimizer, params)
        for group in other.param_groups:
            if "capturable" in group:
                group["capturable"] = False  # as a twin's
        step(other, params, map(torch.zeros_like, params))
        return [other.state.get(p, {}) for p in params]


def missing_in(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], keys: Mapping[int, Collection[str]]
) -> str | None:
    """Return the key that a fresh optimizer lacks to step with these saved ``groups`` and states, or None.

    None: nothing, or it could not be tried. ``keys``: by group, those of one parameter's state.
    """
    with suppress(NoProbe), undisturbed():
        params: list[Tensor] = [torch.nn.Parameter(torch.zeros(LARGE[:1], device="cpu")) for _ in groups]
        pairs = zip(optimizer.param_groups, groups, strict=True)
        other = fresh(optimizer, [own_options({**own, **saved}) for own, saved in pairs], [[p] for p in params])
        step(other, params, map(torch.zeros_like, params))
        held, zeros = other.state_dict()["state"], torch.zeros(LARGE[:1], device="cpu")
        states = {at: {key: held.get(at, {}).get(key, zeros) for key in own} for at, own in keys.items()}
        saved = [{**own_options(group), "params": [at]} for at, group in enumerate(groups)]
        try:
            other.load_state_dict({"state": states, "param_groups": saved})
            step(other, params, map(torch.zeros_like, params))
        except KeyError as missing:
            return str(missing)
    return None


def fails_without_gradients(optimizer: Optimizer, empty: bool, untried: bool) -> bool:
    """Return whether a fresh optimizer fails on groups without gradients, or counts otherwise than with gradients.

    The groups are ``empty``, or have a parameter each. Settings of groups and numbers of the optimizer's own are
    compared, but for those that depend on how many parameters a group has. ``untried`` is the result if no optimizer
    can be made.
    """
    with suppress(NoProbe), undisturbed():
        options = [own_options(group) for group in optimizer.param_groups]
        # One parameter a group, also without gradients, and then two.
        members = [[[_ones() for _ in range(count)] for _ in options] for count in (1, 1, 2)]
        other, filled, fuller = (fresh(optimizer, options, each) for each in members)
        for group in other.param_groups if empty else ():
            group["params"] = []
        with suppress(Exception):  # whatever the class raises
            other.step()
            for each, of in ((filled, members[1]), (fuller, members[2])):
                params = [*chain.from_iterable(of)]
                step(each, params, map(torch.ones_like, params))
            lacking, found, more = map(_own_numbers, (other, filled, fuller))
            counts = {name: number for name, number in found.items() if number == more.get(name)}
            differ = any(lacking.get(name) != number for name, number in counts.items())
            return differ or unlike_settings(filled, other) is not None
        return True
    return untried


def _ones() -> Tensor:
    return torch.nn.Parameter(torch.ones(LARGE[:2], device="cpu"))


def _own_numbers(optimizer: Optimizer) -> dict[str, list[str]]:
    """Return the ``repr`` of each number in attributes and states of no parameter, by name."""
    states = {str(key): value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "defaults")}
    leaves = {name: tree_leaves(value) for name, value in {**own, **states}.items()}
    return {name: [repr(each) for each in of if isinstance(each, Number)] for name, of in leaves.items()}


def writes_without_gradients(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer``'s class writes parameters that have no gradient, as slow weights are written.

    A write of the same values counts too. True where it can't be tried.
    """
    with suppress(NoProbe), undisturbed():
        torch.default_generator.manual_seed(0)  # the host's alone: torch.manual_seed seeds those of devices, too
        kinds = kinds_to_try(optimizer, LARGE_LR)
        params: list[Tensor] = [torch.nn.Parameter(torch.randn(LARGE[:2], device="cpu")) for _ in range(3 * len(kinds))]
        other = twin(optimizer, kinds, params, [3] * len(kinds))
        steps_with_gradients = (_USED + _UNUSED, _USED, 0) * len(kinds)
        before = {p: (p.detach().clone(), p._version) for p in params[2::3]}
        for number in range(_USED + _UNUSED):
            if number == _USED:
                before |= {p: (p.detach().clone(), p._version) for p in params[1::3]}
            used = [number < count for count in steps_with_gradients]
            step(other, params, [torch.randn_like(p) if of else None for p, of in zip(params, used, strict=True)])
        return any(p._version != version or not torch.equal(p, old) for p, (old, version) in before.items())
    return True


# ---- how a trial runs ----


def step(optimizer: Optimizer, params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Step ``params`` with copies of ``grads``, since some optimizers write into them."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    optimizer.step()


class Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises ``NoProbe`` where an operation communicates.

    All ranks try the same numbers, of which a mean over the ranks changes none.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            raise NoProbe("its step communicates by itself")
        return function(*args, **(kwargs or {}))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run the body without effect on random number generators, and turn its exceptions into ``NoProbe``.

    Steps that their class compiles, which takes minutes, run as they are written; torch before 2.6 compiles them. The
    program's hooks on the steps of all optimizers don't run.
    """
    numpy, stance = sys.modules.get("numpy"), getattr(torch.compiler, "set_stance", lambda _: nullcontext())
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if started else ()
    with ExitStack() as restored:
        restored.callback(random.setstate, random.getstate())
        if numpy:
            restored.callback(numpy.random.set_state, numpy.random.get_state())
        both: list[Any] = [_torch_optimizer._global_optimizer_pre_hooks, _torch_optimizer._global_optimizer_post_hooks]
        for hooks in both:
            restored.callback(hooks.update, dict(hooks))
            hooks.clear()
        numbers = torch.random.fork_rng(devices, device_type="cuda")
        for each in (numbers, torch.device("cpu"), warnings.catch_warnings(), stance("force_eager")):
            restored.enter_context(each)
        warnings.simplefilter("ignore")
        try:
            yield
        except NoProbe:
            raise
        except Exception as error:  # whatever another's class raises
            raise NoProbe(f"{type(error).__name__}: {error}") from error
