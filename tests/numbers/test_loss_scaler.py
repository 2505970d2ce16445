"""The loss scale: literal tables of ColossalAI's rules, and no look from the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowlevel_zero.loss_scaler import LossScaler
from lowlevel_zero.options import LossScale, ZeroOptions


class ForbidHostReads(TorchDispatchMode):
    """Fails on every operation that hands a tensor's value to the host."""

    forbidden = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "_to_copy")

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.forbidden:
            raise AssertionError(f"{name} reads a tensor on the host")
        self.calls += 1
        return func(*args, **(kwargs or {}))


def flag(overflow: bool) -> Tensor:
    return torch.tensor(overflow)


def scales(scaler: LossScaler, overflows: str) -> list[float]:
    """The scale after each step; ``x``: overflow, ``.``: clean."""
    seen = []
    for sign in overflows:
        scaler.update(flag(sign == "x"))
        seen.append(scaler.loss_scale)
    return seen


BOUNDS: dict[str, Any] = {"growth_interval": 3, "max_scale": 64}
ODD_BOUNDS: dict[str, Any] = {"hysteresis": 1, "growth_interval": 1, "min_scale": 6, "max_scale": 30}  # no powers


@pytest.mark.parametrize(
    ("options", "overflows", "expected"),
    [
        ({**BOUNDS, "hysteresis": 1}, "xxx", [8, 4, 2]),
        ({**BOUNDS, "hysteresis": 0}, "xxx", [8, 4, 2]),
        ({**BOUNDS, "hysteresis": 2}, "xxx", [16, 8, 4]),
        ({**BOUNDS, "hysteresis": 3}, "xxxx", [16, 16, 8, 4]),
        ({**BOUNDS, "hysteresis": 2}, "...", [16, 16, 32]),
        ({**BOUNDS, "hysteresis": 2}, "......", [16, 16, 32, 32, 32, 64]),
        ({**BOUNDS, "hysteresis": 2}, "..x..", [16, 16, 16, 16, 16]),  # an overflow restarts the growth
        ({**BOUNDS, "hysteresis": 2}, "..x...", [16, 16, 16, 16, 16, 32]),
        ({**BOUNDS, "hysteresis": 2}, "x.x", [16, 16, 8]),  # a clean step does not forget an overflow
        ({**BOUNDS, "hysteresis": 2}, "x...x", [16, 16, 16, 32, 32]),  # a growth does
        ({**BOUNDS, "hysteresis": 2}, "x...xx", [16, 16, 16, 32, 32, 16]),
        ({**BOUNDS, "hysteresis": 2}, "xx...x", [16, 8, 8, 8, 16, 16]),
        ({**BOUNDS, "hysteresis": 1}, "xxxxxx", [8, 4, 2, 1, 1, 1]),  # min_scale
        ({**BOUNDS, "hysteresis": 1}, "............", [16, 16, 32, 32, 32, 64, 64, 64, 64, 64, 64, 64]),  # max_scale
        (ODD_BOUNDS, "xxx..", [8, 6, 6, 12, 24]),
        (ODD_BOUNDS, ".....", [30, 30, 30, 30, 30]),
        ({"min_scale": 16, "max_scale": 16, "growth_interval": 2}, "xx.x...x", [16] * 8),
    ],
)
def test_tables(options: dict[str, Any], overflows: str, expected: list[float]) -> None:
    scaler = LossScaler(LossScale(initial_scale=16, **options))
    assert scales(scaler, overflows) == expected
    in_a_row = len(overflows) - len(overflows.rstrip("x"))
    assert (int(scaler.state_dict()["skipped"]), int(scaler.skipped_in_a_row)) == (overflows.count("x"), in_a_row)


@pytest.mark.parametrize(
    "found_inf",
    [
        torch.tensor(True),
        torch.tensor(1.0),
        torch.tensor(3, dtype=torch.int32),
        torch.tensor([1.0]),
        torch.tensor(float("inf")),
        torch.tensor(float("nan")),
        torch.tensor(2.0, dtype=torch.float16),
        torch.tensor(1e-40),
    ],
)
def test_every_kind_of_flag(found_inf: Tensor) -> None:
    scaler = LossScaler(LossScale(initial_scale=16, hysteresis=1))
    scaler.update(found_inf)
    assert scaler.loss_scale == 8
    scaler.update(torch.zeros_like(found_inf))
    assert (scaler.loss_scale, int(scaler.state_dict()["skipped"]), int(scaler.skipped_in_a_row)) == (8, 1, 0)


def test_defaults_are_colossalai_s() -> None:
    scaler = LossScaler(LossScale())
    assert scaler.loss_scale == 2**16
    assert (scaler.min_scale, scaler.max_scale) == (1, 2**24)
    assert (scaler.growth_factor, scaler.backoff_factor) == (2, 0.5)
    assert (scaler.growth_interval, scaler.hysteresis) == (2000, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        scaler = LossScaler(LossScale(initial_scale=1000, growth_interval=1, growth_factor=1.1))
        scaler.update(flag(False))
    finally:
        torch.set_default_dtype(torch.float32)
    assert scaler.scale.dtype == torch.float32
    assert scaler.loss_scale == pytest.approx(1100, rel=1e-6)


def test_update_reads_nothing_on_the_host() -> None:
    scaler = LossScaler(LossScale())
    overflow, clean = flag(True), torch.zeros(())
    with ForbidHostReads() as forbid:
        scaler.update(overflow)
        scaler.update(clean)
    assert 0 < forbid.calls <= 2 * 16  # 12 kernels and 4 views


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"min_scale": 0}, "loss_scale.min_scale: expected a number above 0.*got 0"),
        ({"min_scale": -1.0}, "min_scale.*got -1.0"),
        ({"initial_scale": float("nan")}, "initial_scale.*got nan"),
        ({"initial_scale": "big"}, "initial_scale.*got str 'big'"),
        ({"max_scale": float("inf")}, "max_scale.*got inf"),
        ({"max_scale": 1e39}, "max_scale.*float32"),
        ({"min_scale": 1e-60}, "min_scale.*float32"),
        ({"initial_scale": 0.5}, "min_scale <= initial_scale <= max_scale.*initial_scale=0.5"),
        ({"initial_scale": 2**25}, "initial_scale=33554432, max_scale=16777216"),
        ({"growth_factor": 1.0}, "growth_factor: expected a number above 1.*got 1.0"),
        ({"growth_factor": True}, "growth_factor.*got bool True"),
        ({"backoff_factor": 0.0}, "backoff_factor.*got 0.0"),
        ({"backoff_factor": 1.0}, "backoff_factor: expected a number between 0 and 1, got 1.0"),
        ({"growth_interval": 0}, "growth_interval: expected an int of at least 1 step, got 0"),
        ({"growth_interval": 10.0}, "growth_interval: expected an int.*got float 10.0"),
        ({"hysteresis": -1}, "hysteresis: expected an int of at least 0 overflows, got -1"),
    ],
)
def test_bad_keywords(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ZeroOptions(loss_scale=LossScale(**keywords))


def make(**keywords: Any) -> LossScaler:
    return LossScaler(LossScale(initial_scale=256, growth_interval=3, **keywords))


@pytest.mark.parametrize("before", ["", "x", "x..", "xx", "..", "xxx.xx"])
def test_round_trip_continues_alike(before: str, tmp_path: Any) -> None:
    scaler = make(growth_factor=4.0, backoff_factor=0.25, hysteresis=3)
    scales(scaler, before)
    torch.save(scaler.state_dict(), tmp_path / "scaler.pt")
    restored = make()
    restored.load_state_dict(torch.load(tmp_path / "scaler.pt", weights_only=True))
    after = "x.x...xx.xxx......x"
    assert scales(restored, after) == scales(scaler, after)
    assert int(restored.state_dict()["skipped"]) == int(scaler.state_dict()["skipped"])


def test_state_is_a_copy() -> None:
    scaler = make(hysteresis=1)
    state = scaler.state_dict()
    scaler.update(flag(True))
    assert (state["scale"].item(), state["skipped"].item()) == (256, 0)


def test_loads_the_state_of_colossalai() -> None:
    scaler = make()
    scaler.update(flag(True))
    scaler.load_state_dict(
        {"scale": torch.tensor([1024.0]), "growth_factor": 4, "backoff_factor": 0.25, "hysteresis": 1}
    )
    assert int(scaler.state_dict()["skipped"]) == 0
    assert scales(scaler, "x...") == [256, 256, 256, 1024]


def test_a_loaded_scale_is_moved_into_the_bounds() -> None:
    scaler = make(max_scale=512)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4096.0})
    assert scaler.loss_scale == 512


def test_a_loaded_count_beyond_the_growth_interval_grows_at_once() -> None:
    saved = LossScaler(LossScale(initial_scale=256, growth_interval=8))
    scales(saved, "......")
    scaler = make()
    scaler.load_state_dict(saved.state_dict())
    assert scales(scaler, "....") == [512, 512, 512, 1024]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": float("nan")}, "scale.*got nan"),
        ({"scale": torch.tensor(0.0)}, "scale.*got 0.0"),
        ({"scale": None}, "scale.*got NoneType None"),
        ({"scale": torch.ones(2)}, "scale.*got Tensor tensor"),
        ({"growth_factor": 0.5}, "growth_factor.*expected a number above 1.*got 0.5"),
        ({"backoff_factor": 2.0}, "backoff_factor"),
        ({"hysteresis": 1.5}, "hysteresis.*got float 1.5"),
        ({"skipped": torch.tensor(-1)}, "skipped.*got -1"),
        ({"growth_step": 0.5}, "growth_step.*got float 0.5"),
        ({"tracker": 1}, r"unknown: \['tracker'\]"),
    ],
)
def test_a_bad_state_changes_nothing(change: dict[str, Any], message: str) -> None:
    scaler = make()
    scaler.update(flag(True))
    before = scaler.state_dict()
    with pytest.raises((ValueError, TypeError), match=message):
        scaler.load_state_dict({**before, "skipped": 7, **change})
    assert scaler.state_dict() == before


def test_a_missing_key() -> None:
    state = make().state_dict()
    del state["hysteresis"]
    with pytest.raises(ValueError, match=r"missing: \['hysteresis'\]"):
        make().load_state_dict(state)
