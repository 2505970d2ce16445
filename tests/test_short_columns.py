"""Short columns: they come to where they belong, whatever lay ready from the last time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Thread

import pytest
import torch
from torch import Tensor

from lowlevel_zero.alignment import RowLayout
from lowlevel_zero.communication import short_columns, transport
from lowlevel_zero.communication.short_columns import are_short
from lowlevel_zero.communication.transport import unpack


def unpacked(rows: int, size: int, count: int, dtype: torch.dtype, tail: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Each column's home and what belongs there."""
    wire = torch.randn(rows, size * count + tail).to(dtype)
    homes = [torch.full((rows, size), -7.0, dtype=dtype) for _ in range(count)]
    unpack(wire, homes, RowLayout((size,) * count, (), tail))
    return zip(homes, wire[:, : size * count].split(size, dim=1), strict=True)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many columns were copied in one go, each time."""
    seen = []

    def counted(wire: Tensor, homes: Sequence[Tensor]) -> None:
        seen.append(len(homes))
        short_columns.copy_out(wire, homes)

    monkeypatch.setattr(transport, "copy_out", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size", "count"), [(1, 1, 2), (4, 1, 5), (3, 2, 7), (64, 1, 3), (2, 32, 2)])
def test_short_columns_come_home(rows: int, size: int, count: int, dtype: torch.dtype, copies: list[int]) -> None:
    for tail in (0, 3, 0):
        assert all(torch.equal(home, column) for home, column in unpacked(rows, size, count, dtype, tail))
    assert copies == [count] * 3


def test_others_are_kept_out() -> None:
    wire, homes = torch.zeros(4, 64), [torch.zeros(4, 16)] * 4
    assert are_short(wire, homes, (16,) * 4)
    assert not are_short(wire, homes, (17, 16, 16, 15))
    assert not are_short(torch.zeros(5, 64), homes, (16,) * 4)
    assert not are_short(wire, homes[:1], (16,))
    assert not are_short(wire.double(), homes, (16,) * 4)
    assert not are_short(wire.to("meta"), homes, (16,) * 4)


def test_what_inference_mode_leaves_serves_outside_of_it() -> None:
    with torch.inference_mode():
        assert all(torch.equal(home, column) for home, column in unpacked(2, 3, 4, torch.float32))
    assert all(torch.equal(home, column) for home, column in unpacked(2, 3, 4, torch.float32))


def test_threads_have_memory_of_their_own() -> None:
    """Each keeps what it used last, and uses it again."""
    kept: dict[int, int] = {}

    def use(place: int) -> None:
        for _ in range(2):
            assert all(torch.equal(home, column) for home, column in unpacked(2, 1, 5, torch.float32))
        kept[place] = short_columns._kept.memory.data_ptr()

    use(0)
    thread = Thread(target=use, args=(1,))
    thread.start()
    thread.join(10)
    use(2)
    assert kept[0] == kept[2] != kept[1]
