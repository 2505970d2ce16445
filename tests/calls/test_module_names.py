"""A model's own names, whatever wraps it or modules in it; and how saved names find them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel

from lowlevel_zero.bookkeeping.module_names import matched, own_names
from lowlevel_zero.checkpoint import state_dict_for


class Inner(nn.Module):
    """Has an attribute of its own that is called as wrappers call what they wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), Inner())


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def each(wrap: Any) -> Any:
    """Wraps every module in the model."""

    def wrapped(model: nn.Module) -> nn.Module:
        model[0], model[1].module = wrap(model[0]), wrap(model[1].module)
        model[1] = wrap(model[1])
        return model

    return wrapped


WRAPPINGS = {
    "plain": lambda model: model,
    "checkpointed": each(checkpoint_wrapper),
    "compiled": compiled,
    "compiled inside": each(compiled),
    "parallel": DataParallel,
    "parallel inside": each(DataParallel),
    "compiled and checkpointed": lambda model: compiled(each(lambda m: compiled(checkpoint_wrapper(m)))(model)),
    "checkpointed and compiled": lambda model: checkpoint_wrapper(
        each(lambda m: checkpoint_wrapper(compiled(m)))(model)
    ),
    "all, twice": lambda model: compiled(
        DataParallel(each(lambda m: DataParallel(compiled(checkpoint_wrapper(m))))(model))
    ),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrappers_do_not_show_in_names(wrapping: str) -> None:
    expected = list(own_names(build()).values())
    assert expected[:4] == ["0.weight", "0.bias", "1.module.weight", "1.module.bias"]
    assert list(own_names(WRAPPINGS[wrapping](build())).values()) == expected


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_state_dict_loads_into_what_is_wrapped_otherwise(wrapping: str) -> None:
    for other in ("plain", "all, twice"):
        source, target = WRAPPINGS[other](build()), WRAPPINGS[wrapping](build())
        target.load_state_dict(state_dict_for(target, source.state_dict()))
        for name, value in by_name(source).items():
            assert torch.equal(by_name(target)[name], value), name


def by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for tensor, name in own_names(model).items()}


def test_what_a_model_lacks_is_still_refused() -> None:
    state = {**build().state_dict(), "2.weight": torch.ones(1)}
    model = compiled(build())
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"2.weight\""):
        model.load_state_dict(state_dict_for(model, state))


@pytest.mark.parametrize(
    ("saved", "own", "expected"),
    [
        ("a._orig_mod.w", ["a.w"], "a.w"),
        ("_orig_mod.a._checkpoint_wrapped_module._orig_mod.w", ["a.w"], "a.w"),
        ("module.a.w", ["a.w"], "a.w"),
        ("module.module.w", ["module.w"], "module.w"),
        ("module.a.module.w", ["a.module.w"], "a.module.w"),
        ("module.w", ["module.w"], "module.w"),
        ("a._orig_mod.w", ["b"], "a.w"),
        ("module.w", ["b"], "module.w"),
        ("submodule.w", ["w"], "submodule.w"),
        ("module", ["w"], "module"),
    ],
)
def test_saved_names_find_the_model_s(saved: str, own: list[str], expected: str) -> None:
    assert matched([saved], own) == {saved: expected}


def test_no_two_saved_names_find_the_same() -> None:
    assert matched(["module.w", "w"], ["w"]) == {"module.w": "module.w", "w": "w"}
    assert sorted(matched(["module.w", "a.module.w"], ["a.w", "w"]).values()) == ["a.w", "w"]
    assert len(set(matched(["a._orig_mod.w", "_orig_mod.a.w"], ["a.w"]).values())) == 2
